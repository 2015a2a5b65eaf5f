"""What a scenario is, and what comes of it: medians, ratios to Mosquitto, bounds kept or missed."""

import statistics
from dataclasses import dataclass, field
from typing import Callable

OURS = "mqtt-server"
OURS_TWO = "mqtt-server/2"  # with two shards, on both CPUs
MOSQUITTO = "mosquitto"
# A second Mosquitto like the first: how far two runs of one broker differ is what a ratio cannot tell.
AGAIN = "mosquitto/again"
RELAY = "mqload relay"  # what the kernel takes for the same packets, without a broker

# Two shards may cost so much more CPU per message than one.
TWO_SHARDS_AT_MOST = 1.25


@dataclass(frozen=True)
class Metric:
    """A figure and its bounds for our side. `ratio` (times Mosquitto's in the same run) binds where it is given;
    `at_most` and `at_least` bind where it is not, and guide otherwise."""

    key: str
    unit: str
    ratio: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    digits: int = 3
    # Which side of ours the bounds are for.
    side: str = OURS

    def bound_text(self):
        parts = []
        if self.ratio is not None:
            parts.append(f"<= {self.ratio:g} x Mosquitto")
        if self.at_most is not None:
            parts.append(f"<= {self.at_most:g}" if self.ratio is None else f"(guide {self.at_most:g})")
        if self.at_least is not None:
            parts.append(f">= {self.at_least:g}")
        return " ".join(parts)


@dataclass(frozen=True)
class Scenario:
    """`measure(bench, broker)` makes one run and gives the metrics' values by key."""

    name: str
    title: str
    metrics: tuple
    measure: Callable
    settings: tuple = ()  # lines of the gateway's configuration, where its defaults do not do
    wants: tuple = ()  # listeners beside plain TCP: tls, ws, grpc
    sides: tuple = (MOSQUITTO, OURS)
    peers: bool = True
    fresh: bool = False  # a new broker for every run, since memory is measured
    core: bool = False  # one of the agreed rows
    chart: str | None = None  # the file of its line chart; metrics are then named KIND@X


@dataclass
class Result:
    """All rounds of one scenario: values[side][key] is a list, one entry for each round that succeeded."""

    scenario: Scenario
    values: dict = field(default_factory=dict)
    problems: list = field(default_factory=list)
    commands: list = field(default_factory=list)
    disturbed: float = 0.0

    def add(self, side, figures):
        for key, value in figures.items():
            if value is not None:
                self.values.setdefault(side, {}).setdefault(key, []).append(value)

    def median(self, side, key):
        seen = self.values.get(side, {}).get(key)
        return statistics.median(seen) if seen else None

    def rows(self):
        """The table's rows, as JSON: label, value of each side, ratio, bound, verdict."""
        rows = [self.row(metric) for metric in self.scenario.metrics]
        if OURS_TWO in self.scenario.sides and OURS in self.scenario.sides:
            rows.append(self.two_shards(self.scenario.metrics[0]))
        if AGAIN in self.values:
            rows += [self.again(metric) for metric in self.scenario.metrics if metric.ratio == 1.0]
        return rows

    def row(self, metric):
        sides = {side: self.median(side, metric.key) for side in self.values if side != AGAIN}
        ours, theirs = sides.get(metric.side), sides.get(MOSQUITTO)
        # What is a ratio already has none to Mosquitto's.
        comparable = ours is not None and theirs and not metric.unit.startswith("x")
        ratio = ours / theirs if comparable else None
        return {
            "metric": metric.key,
            "unit": metric.unit,
            "digits": metric.digits,
            "sides": sides,
            "spread": {side: spread(self.values[side].get(metric.key)) for side in self.values},
            "ratio": ratio,
            "bound": metric.bound_text(),
            "verdict": verdict(metric, ours, ratio),
        }

    def two_shards(self, metric):
        row = self.quotient("two shards / one shard", metric, OURS_TWO, OURS)
        ratio = row["sides"][OURS]
        row["bound"] = f"<= {TWO_SHARDS_AT_MOST:g}"
        row["verdict"] = "no result" if ratio is None else "pass" if ratio <= TWO_SHARDS_AT_MOST else "MISS"
        return row

    def again(self, metric):
        return self.quotient(f"{metric.key}, a second Mosquitto / the first", metric, AGAIN, MOSQUITTO)

    def quotient(self, label, metric, side, base):
        """A row that is one side's figure divided by another's, without a bound."""
        over, under = self.median(side, metric.key), self.median(base, metric.key)
        return {
            "metric": label,
            "unit": "x",
            "digits": 2,
            "sides": {base: over / under if under and over is not None else None},
            "spread": {},
            "ratio": None,
            "bound": "",
            "verdict": "",
        }


def spread(values):
    return [min(values), max(values)] if values else None


def verdict(metric, ours, ratio):
    """pass or MISS by the bound that binds; empty without one."""
    if metric.ratio is None and metric.at_most is None and metric.at_least is None:
        return ""
    if ours is None or (metric.ratio is not None and ratio is None):
        return "no result"
    kept = metric.at_least is None or ours >= metric.at_least
    if metric.ratio is not None:
        kept = kept and ratio <= metric.ratio
    elif metric.at_most is not None:
        kept = kept and ours <= metric.at_most
    return "pass" if kept else "MISS"
