"""Measures mqtt-server beside Mosquitto and any other broker. Run it by scripts/bench.sh."""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import core
import database
import durable
import further
import hostile
import report
import special
from brokers import Gateway, Mosquitto, Peer, Relay
from load import Failed, Loader
from model import AGAIN, MOSQUITTO, OURS, OURS_TWO, RELAY, Result

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "target"
OUT = TARGET / "bench"
SCENARIOS = {s.name: s for s in [*core.SCENARIOS, *further.SCENARIOS, *durable.SCENARIOS, *database.SCENARIOS, *special.SCENARIOS]}


class Bench:
    """What a scenario's measure may use: the load generators, the scale, the directory."""

    def __init__(self, options):
        self.rounds = int(os.environ.get("ROUNDS", "3"))
        self.seconds = float(os.environ.get("SECONDS_PER_RUN", "5"))
        self.scale = float(os.environ.get("SCALE", "1"))
        self.broker_cpu = os.environ.get("BROKER_CPU", "0")
        self.load_cpu = os.environ.get("LOAD_CPU", "1")
        self.tools = TARGET / "release"
        # As it is shipped.
        self.binary = TARGET / "dist" / "mqtt-server"
        self.root = ROOT
        self.load = None
        self.brokers = self.make_brokers(options.peer)

    def make_brokers(self, peers):
        one, both = self.broker_cpu, f"{self.broker_cpu},{self.load_cpu}"
        binary = self.binary
        known = {
            OURS: Gateway(OURS, one, binary=binary),
            OURS_TWO: Gateway(OURS_TWO, both, binary=binary, shards=2),
            RELAY: Relay(RELAY, one, binary=self.tools / "mqload"),
        }
        if Mosquitto.binary():
            known[MOSQUITTO] = Mosquitto(MOSQUITTO, one)
            known[AGAIN] = Mosquitto(AGAIN, one)
        for text in peers:
            name, _, command = text.partition("=")
            known[name] = Peer(name, one, template=command)
        return known

    def scaled(self, n):
        """A number of connections or subscriptions, reduced by SCALE for trials."""
        return max(10, round(n * self.scale))

    def sides(self, scenario):
        """The brokers of a scenario, in the order in which they alternate."""
        names = [n for n in scenario.sides if n in self.brokers]
        if scenario.peers:
            names += [n for n, b in self.brokers.items() if isinstance(b, Peer)]
        return [self.brokers[n] for n in names if set(scenario.wants) <= self.brokers[n].features]

    def run(self, scenario):
        """All rounds of one scenario, the sides taking turns."""
        result = Result(scenario)
        self.load = Loader(self.tools, self.load_cpu, self.seconds)
        if "tls" in scenario.wants:
            certs = self.certs()
            for broker in self.brokers.values():
                broker.certs = certs
        running = {}
        try:
            for turn in range(self.rounds):
                for broker in self.sides(scenario):
                    if scenario.fresh and broker.name in running:
                        running.pop(broker.name).stop()
                    try:
                        if broker.name not in running:
                            running[broker.name] = broker.start(scenario.wants, scenario.settings)
                        figures = scenario.measure(self, running[broker.name])
                        result.add(broker.name, figures)
                        print(f"  {turn + 1} {broker.name:14} {show(figures)}", file=sys.stderr, flush=True)
                    except (Failed, RuntimeError) as error:
                        result.problems.append(f"{broker.name}, round {turn + 1}: {error}")
                        print(f"  {turn + 1} {broker.name:14} NO RESULT: {error}", file=sys.stderr, flush=True)
                        if broker.name in running:
                            running.pop(broker.name).stop()
        finally:
            for one in running.values():
                one.stop()
        result.commands = self.load.commands
        result.disturbed = self.load.disturbed()
        (OUT / f"{scenario.name}.runs.json").write_text(json.dumps(self.load.runs, indent=1))
        return result

    def certs(self):
        """The folder of a self-made certificate for all brokers."""
        certs = OUT / "certs"
        if not (certs / "server.crt").exists():
            subprocess.run([ROOT / "scripts" / "certs.sh", certs], check=True, stdout=sys.stderr)
        return certs


def show(figures):
    return "  ".join(f"{k} {v:g}" if isinstance(v, (int, float)) else f"{k} -" for k, v in figures.items())


def record(bench, result):
    """What is kept of a scenario, for the tables and charts."""
    return {
        "title": result.scenario.title,
        "core": result.scenario.core,
        "chart": result.scenario.chart,
        "rows": result.rows(),
        "values": result.values,
        "problems": result.problems,
        "commands": result.commands,
        "disturbed": result.disturbed,
        "rounds": bench.rounds,
        "seconds": bench.seconds,
        "scale": bench.scale,
        "date": date.today().isoformat(),
        "versions": {b.name: b.version() for b in bench.sides(result.scenario)},
    }


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/bench.sh", description=__doc__)
    names = ", ".join(SCENARIOS)
    kinds = ", ".join(hostile.KINDS)
    parser.add_argument("scenario", nargs="*", help=f"which to measure: core (the default), all, {kinds} (each alone), or of {names}")
    parser.add_argument(
        "--mix", action="append", default=[], metavar="NAME",
        help="of hostile or memory this mix only; may be repeated, and what was measured before stays in the table",
    )
    parser.add_argument(
        "--budget", action="append", default=[], type=int, metavar="MIB",
        help=f"memory: with this limits.memory_budget; may be repeated (default {', '.join(map(str, hostile.BUDGETS_MIB))})",
    )
    parser.add_argument("--binary", help="hostile and memory: another build of the gateway")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=COMMAND",
        help="another broker beside the two; {port} and {dir} in the command are filled in",
    )
    parser.add_argument("--no-docs", action="store_true", help="leave docs/benchmarks/results.md as it is")
    parser.add_argument("--only-docs", action="store_true", help="write the docs from the results that are there")
    return parser.parse_args()


def chosen(names):
    wanted = []
    for name in names or ["core"]:
        if name in SCENARIOS:
            wanted.append(SCENARIOS[name])
        elif name == "core":
            wanted += [s for s in SCENARIOS.values() if s.core]
        elif name == "all":
            wanted += SCENARIOS.values()
        else:
            sys.exit(f"no scenario {name}; there are core, all, {', '.join(SCENARIOS)}")
    return list(dict.fromkeys(wanted))


def raise_file_limit():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def attacked(options):
    if len(options.scenario) > 1:
        sys.exit(f"{options.scenario[0]} goes alone; --mix NAME chooses of it")
    raise_file_limit()
    bench = Bench(options)
    # An attack of four seconds is long enough for a freeze, and all of them together take a few minutes.
    bench.seconds = float(os.environ.get("SECONDS_PER_RUN", "4"))
    return hostile.measure(bench, options.scenario[0], options, OUT)


def main():
    options = arguments()
    OUT.mkdir(parents=True, exist_ok=True)
    if options.scenario and options.scenario[0] in hostile.KINDS:
        # Attacks have no peer, no rounds and a table of their own.
        sys.exit(0 if attacked(options) else 1)
    wanted = chosen(options.scenario)
    stored = OUT / "results.json"
    results = json.loads(stored.read_text()) if stored.exists() else {}
    if not options.only_docs:
        raise_file_limit()
        bench = Bench(options)
        began = time.monotonic()
        for scenario in wanted:
            print(f"{scenario.name}: {scenario.title}", file=sys.stderr, flush=True)
            results[scenario.name] = record(bench, bench.run(scenario))
            stored.write_text(json.dumps(results, indent=1))
        print(f"took {time.monotonic() - began:.0f} s; results in {stored}", file=sys.stderr)
    order = [name for name in SCENARIOS if name in results]
    print(report.table({name: results[name] for name in order if name in {s.name for s in wanted}}))
    if not options.no_docs:
        report.write_docs(ROOT, {name: results[name] for name in order})
    missed = [n for n in order for row in results[n]["rows"] if row["verdict"] in ("MISS", "no result")]
    sys.exit(1 if any(s.name in missed for s in wanted) else 0)


if __name__ == "__main__":
    main()
