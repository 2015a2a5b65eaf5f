"""The hook of hatchling: a build makes the generated modules first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))


class Generated(BuildHookInterface):  # type: ignore[type-arg]
    """Calls generate.py."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        from generate import generate

        generate()
