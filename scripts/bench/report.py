"""The tables and charts of docs/benchmarks/results.md, made from the results."""

import platform
import re
from pathlib import Path

import charts
from model import AGAIN, MOSQUITTO, OURS, OURS_TWO

BEGIN, END = "<!-- results: written by scripts/bench.sh -->", "<!-- end of results -->"
# Above so much CPU of others (percent of one CPU) a run is marked as disturbed.
DISTURBED = 5.0


def number(value, digits):
    if value is None:
        return "-"
    return f"{value:,.{digits}f}"


def table(results):
    """Markdown: one line for each scenario and metric."""
    peers = []
    for result in results.values():
        for row in result["rows"]:
            peers += [s for s in row["sides"] if s not in (MOSQUITTO, OURS, OURS_TWO) and s not in peers]
    head = ["scenario", "figure", "Mosquitto", "mqtt-server", "two shards", *peers, "ratio", "bound", "", "date"]
    lines = [line(head), line(["---"] * len(head))]
    for name, result in results.items():
        mark = " *" if result["disturbed"] > DISTURBED else ""
        for row in result["rows"]:
            sides, digits = row["sides"], row["digits"]
            values = [number(sides.get(s), digits) for s in (MOSQUITTO, OURS, OURS_TWO, *peers)]
            ratio = number(row["ratio"], 3)
            label = row["metric"] if row["unit"] == "x" else f"{row['metric']}, {row['unit']}"
            cells = [f"`{name}`{mark}", label, *values, ratio, row["bound"], row["verdict"], result["date"]]
            lines.append(line(cells))
    return "\n".join(lines)


def line(cells):
    return "| " + " | ".join(cells) + " |"


def machine():
    """Processor, cores, memory and kernel, as far as the system tells."""
    cpu = re.search(r"model name\s*:\s*(.+)", read("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s*(\d+)", read("/proc/meminfo"))
    cores = len(re.findall(r"^processor", read("/proc/cpuinfo"), re.M))
    kernel = ".".join(platform.release().split(".")[:2])
    name = cpu.group(1).strip() if cpu else platform.machine()
    gb = round(int(memory.group(1)) / 1e6) if memory else "?"
    return f"{name}, {cores} cores, {gb} GB, Linux {kernel}, loopback"


def read(path):
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def notes(results):
    """Versions, disturbances and runs without result."""
    versions = {}
    for scenario, result in results.items():
        for name, text in result["versions"].items():
            if name not in (OURS_TWO, AGAIN):
                versions.setdefault(name, {}).setdefault(text, []).append(scenario)
    lines = [f"Machine: {machine()}.", ""]
    for name, texts in versions.items():
        for text, scenarios in texts.items():
            # Not all was measured with one build.
            lines.append(f"- {name}: {text}" + (f", for {', '.join(scenarios)}" if len(texts) > 1 else ""))
    counts = sorted({(r["rounds"], r["seconds"]) for r in results.values()})
    lines.append("- medians of " + "; ".join(f"{n} rounds of {s:g} s" for n, s in counts))
    scaled = [name for name, r in results.items() if r["scale"] != 1]
    if scaled:
        lines.append(f"- with fewer connections and subscriptions than said: {', '.join(scaled)}")
    disturbed = [f"{n} ({r['disturbed']:.0f} %)" for n, r in results.items() if r["disturbed"] > DISTURBED]
    if disturbed:
        lines.append(f"- `*`: other work took CPU in a run, percent of one CPU: {', '.join(disturbed)}")
    for name, result in results.items():
        lines += [f"- no result: {name}, {problem}" for problem in result["problems"]]
    return lines


def commands(results):
    lines = ["| scenario | what | commands (`-p PORT --pid PID` of the broker measured) |", "|---|---|---|"]
    for name, result in results.items():
        shown = "<br>".join(f"`{c}`" for c in result["commands"])
        lines.append(line([f"`{name}`", result["title"], shown]))
    return lines


def write_docs(root, results):
    """Puts tables and charts between the markers of docs/benchmarks/results.md."""
    path = root / "docs" / "benchmarks" / "results.md"
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise SystemExit(f"{path} has lost its markers {BEGIN} and {END}")
    pictures = [f"![{title}]({file})" for file, title in charts.write(root / "docs" / "benchmarks", results)]
    parts = [notes(results), [table(results)], *([p] for p in pictures), commands(results)]
    body = [BEGIN, *(text for part in parts for text in ("", *part)), "", END]
    path.write_text(before + "\n".join(body) + after)
