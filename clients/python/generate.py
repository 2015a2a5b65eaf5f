"""Makes src/mqtt_gateway/v1, the messages and stubs of proto/gateway, and is also the hook by which a build makes them.

    generate.py [PYTHON]

They are not checked in: the wheel and the source distribution have them, and nobody reviews them twice. They are made anew
where the protos, this file or the compiler are others than last time. Needs grpcio-tools and mypy-protobuf.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTO = HERE.parent.parent / "proto"
TARGET = HERE / "src" / "mqtt_gateway" / "v1"
FILES = ["gateway/v1/*.proto", "gateway/hooks/v1/*.proto"]


def digest(protos: list[Path]) -> str:
    """Tells whether what is there was made from the same."""
    state = hashlib.sha256()
    for name in ("grpcio-tools", "mypy-protobuf"):
        state.update(f"{name} {version(name)}\n".encode())
    for path in [HERE / "generate.py", *protos]:
        state.update(path.read_bytes())
    return state.hexdigest()


def place(text: str) -> str:
    """The same module as a part of mqtt_gateway. Names of protos, which other programs share, stay as they are."""
    for package in ("gateway.v1", "gateway.hooks.v1"):
        escaped = re.escape(package)
        text = re.sub(rf"^from {escaped} import", "from mqtt_gateway.v1 import", text, flags=re.MULTILINE)
        text = re.sub(rf"(BuildTopDescriptorsAndMessages\(DESCRIPTOR, '){escaped}\.", r"\1mqtt_gateway.v1.", text)
    return text


def names(folder: Path) -> str:
    """The module that has all messages and enumerations by their plain names."""
    lines = ['"""Messages and enumerations of gateway.v1, as proto/gateway/v1 describes them. Generated."""', ""]
    listed: list[str] = []
    for stub in sorted(folder.glob("*_pb2.pyi")):
        if stub.name.startswith("hooks"):
            continue
        text = stub.read_text()
        found = re.findall(r"^class ([A-Z]\w*)\(", text, flags=re.MULTILINE)
        found += re.findall(r"^([A-Z][A-Z0-9_]+): \w+\.ValueType", text, flags=re.MULTILINE)
        lines.append(f"from .{stub.stem} import (")
        lines += [f"    {name} as {name}," for name in sorted(set(found))]
        lines.append(")")
        listed += found
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in sorted(set(listed))), "]", ""]
    return "\n".join(lines)


def generate() -> None:
    """Makes the modules, unless they are there."""
    if not PROTO.is_dir():
        # A source distribution, which has them.
        assert (TARGET / "__init__.py").exists(), f"neither {PROTO} nor generated modules are there"
        return
    protos = sorted(path for pattern in FILES for path in PROTO.glob(pattern))
    made = digest(protos)
    if (TARGET / ".made").exists() and (TARGET / ".made").read_text() == made:
        return
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        # The plugins lie beside the interpreter whose packages are used, which need not be on the PATH.
        plugins = []
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc"):
            found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
            assert found, f"{name} is missing: install mypy-protobuf"
            plugins.append(f"--plugin={name}={found}")
        outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
        outputs += [f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")]
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *plugins, *outputs, *map(str, protos)]
        subprocess.run(command, check=True)
        fresh = out / "fresh"
        fresh.mkdir()
        for path in (out / "gateway").rglob("*.py*"):
            (fresh / path.name).write_text(place(path.read_text()))
        (fresh / "__init__.py").write_text(names(fresh))
        (fresh / ".made").write_text(made)
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(fresh, TARGET)


if __name__ == "__main__":
    generate()
