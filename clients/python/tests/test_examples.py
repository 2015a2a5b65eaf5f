"""What people copy runs as it stands: the examples, and the one in the README."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from world import World, until

HERE = Path(__file__).resolve().parent.parent


def environment(world: World) -> dict[str, str]:
    at = world.at
    names = {"GATEWAY_ADDRESS": at["address"], "GATEWAY_CA": at["ca"], "GATEWAY_TOKEN": at["token"]}
    return {**os.environ, **names, "PYTHONPATH": str(HERE / "src")}


def run(world: World, *arguments: str | Path) -> str:
    done = subprocess.run([sys.executable, *arguments], env=environment(world), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_publish(world: World) -> None:
    world.do_device("lamp", ["lamp/#", "cmd/lamp/#"])
    assert run(world, HERE / "examples" / "publish.py") == "OUTCOME_ACKED: 1 have it\n"
    assert world.do_received("lamp", 1) == [["lamp/switch", "on"]]


def test_without_asyncio(world: World) -> None:
    world.do_device("meter")
    world.do_publish("meter", "meter/power", 1)
    world.do_published("meter")
    assert run(world, HERE / "examples" / "without_asyncio.py").splitlines() == [
        "the lamp answers 200 pong 3",
        'still to be done: {"on":true}',
        "meter meter/power b'1'",
    ]


def test_consume(world: World, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with open(said, "w") as output:
        program = subprocess.Popen(
            [sys.executable, HERE / "examples" / "consume.py"], env=environment(world), stdout=output, stderr=output
        )
        try:
            until("it consumes", lambda: "consuming" in said.read_text())
            world.do_publish("meter", "meter/power", 20)
            until("all came", lambda: said.read_text().count("meter meter/power") == 20)
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 0, said.read_text()
        finally:
            program.kill()
    assert said.read_text().splitlines()[-1] == "20 acknowledged"


def test_the_example_of_the_readme(world: World, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    # Only where the gateway is differs.
    at = world.at
    there = f'connect("{at["address"]}", ca="{at["ca"]}", token="{at["token"]}")'
    text = blocks[0].replace('connect("localhost:10000", ca="certs/ca.crt")', there)
    assert there in text
    (tmp_path / "readme.py").write_text(text)
    assert run(world, tmp_path / "readme.py").splitlines()[0] == "OUTCOME_ACKED"
