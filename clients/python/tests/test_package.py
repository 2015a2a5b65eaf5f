"""What would be published is whole and typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent.parent


def run(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=PACKAGE, env={**os.environ, "MYPYPATH": "src"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_what_is_generated_and_its_types(tmp_path: Path) -> None:
    run("hatchling", "build", "-t", "wheel", "-d", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("py.typed", "sync.py", "v1/__init__.py", "v1/groups_pb2.py", "v1/groups_pb2_grpc.pyi", "v1/hooks_pb2.py"):
        assert f"mqtt_gateway/{wanted}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert (PACKAGE / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_mypy_finds_nothing() -> None:
    run("mypy", "--cache-dir", ROOT / "target" / "mypy")


def test_its_version_is_the_gateways() -> None:
    gateway = re.search(r'(?ms)^\[workspace\.package\].*?^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text())
    client = re.search(r'(?m)^version = "([^"]+)"', (PACKAGE / "pyproject.toml").read_text())
    assert gateway and client and gateway.group(1) == client.group(1)
