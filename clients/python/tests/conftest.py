"""A gateway for the tests of a file, from clients/testing/world.py. GATEWAY is the binary; without it, that of `cargo build`."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent.parent
sys.path[:0] = [str(ROOT / "clients" / "testing"), str(PACKAGE), str(PACKAGE / "src")]

from generate import generate  # noqa: E402
from world import World  # noqa: E402

# What is generated is in step with the protos; files of tests may run beside each other.
with open(PACKAGE / "generate.py") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    generate()

SERVER = os.environ.get("GATEWAY", str(ROOT / "target" / "debug" / "mqtt-server"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A gateway of its own for each file: some tests kill it."""
    made = World(SERVER, tmp_path_factory.mktemp("world"))
    made.at = made.do_start()
    yield made
    made.close()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines run on a loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
