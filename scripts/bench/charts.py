"""Which charts docs/benchmarks/ has, and what they show."""

import svg
from model import MOSQUITTO, OURS, OURS_TWO

# File, title, what the x axis counts, which metric of the series.
LINES = {
    "connections": ("Isolated messages: broker CPU per message, microseconds", "connections", "cpu"),
    "subscriptions": ("10 pairs among cold subscriptions: broker CPU per message, microseconds", "subscriptions", "cpu"),
    "fanout": ("One publisher: p99 of the last delivery, microseconds", "subscribers", "last p99"),
}


def write(directory, results):
    """Writes every chart that the results have figures for; gives (file, title) of each."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for file, title, chart in [messages(results), *(line_chart(results, name) for name in LINES)]:
        if chart:
            (directory / file).write_text(chart)
            written.append((file, title))
    return written


def messages(results):
    """Bars: CPU per message of the agreed rows."""
    title = "Broker CPU per message, microseconds (logarithmic; shorter is better)"
    groups, sides = [], []
    for name, result in results.items():
        row = result["rows"][0]
        if result["core"] and row["metric"] == "cpu" and row["unit"].endswith("message"):
            groups.append((name, row["sides"]))
            sides += [s for s in row["sides"] if s not in sides]
    order = [s for s in (MOSQUITTO, OURS, OURS_TWO) if s in sides]
    order += [s for s in sides if s not in order]
    return "messages.svg", title, svg.bars(title, groups, order)


def line_chart(results, chart):
    title, x_label, metric = LINES[chart]
    series = {}
    for name, result in results.items():
        if result["chart"] != chart:
            continue
        for row in result["rows"]:
            kind, _, x = row["metric"].partition("@")
            if kind != metric or not x:
                continue
            for side, value in row["sides"].items():
                series.setdefault(f"{side}, {name}", []).append((float(x), value))
    return f"{chart}.svg", title, svg.lines(title, x_label, series)
