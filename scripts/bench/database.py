"""What latest values in a real Cassandra cost the gateway and its devices."""

import os
import subprocess
import time
from pathlib import Path

from durable import metric, wait_for
from load import Failed
from model import OURS, Metric, Scenario

DEVICES = 1000
KEYS = 10 * DEVICES
FLUSH = 10  # seconds between flushes: what Cassandra beside the generator on one CPU keeps up with
PER_FLUSH = 10  # messages of each key between two flushes
RATE = PER_FLUSH * KEYS // FLUSH
# Each key less than once in a flush of a tenth of a second: nothing to coalesce.
NAIVE_RATE, NAIVE_FLUSH = 2_000, "100ms"
PAIRS = 100

OFF = ("[latest]", "enabled = false")


class Cassandra:
    """One node by scripts/cassandra.sh, on the CPU of the load generator."""

    def __init__(self, bench):
        self.script = bench.root / "scripts" / "cassandra.sh"
        self.cpus = bench.load_cpu
        self.environment = {**os.environ, "CASSANDRA_HEAP": os.environ.get("CASSANDRA_HEAP", "1024")}

    def call(self, *arguments):
        command = ["taskset", "-c", self.cpus, str(self.script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment)

    def __enter__(self):
        self.was_there = self.call("status").returncode == 0
        done = self.call("start")
        if done.returncode != 0:
            raise Failed(f"no Cassandra: {done.stderr.strip().splitlines()[-1:]}")
        self.address = done.stdout.split()[0]
        return self

    def __exit__(self, *_):
        self.call("resume")
        if not self.was_there:
            self.call("stop")


def with_database(address, flush, keyspace):
    latest = ("[latest]", f'flush_interval = "{flush}"')
    return (f'db_addr = "{address}"', *latest, "[database]", f'keyspace = "{keyspace}"')


def publish(bench, broker, seconds, *args):
    """All devices to their ten topics in turn, QoS 1, nobody listening."""
    load = ("-t", "none", "-P", DEVICES, "--qos", 1, "--cold-topics", KEYS, "-d", seconds)
    return bench.load.mqload(broker, "pubsub", *load, *args, timed=False)


def store_cpu(broker):
    """CPU seconds of the gateway's threads that do not serve devices: stores, ticks, gRPC, metrics."""
    ticks = 0
    for stat in Path(f"/proc/{broker.pid}/task").glob("*/stat"):
        name, fields = stat.read_text().rsplit(")", 1)
        if "(shard-" not in name:
            ticks += sum(map(int, fields.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def paced(bench, broker, rate, settle=lambda broker: None):
    """CPU for each message, over some flushes: of the whole gateway, and of its threads beside those of devices, these
    until it has settled."""
    seconds = 3 * FLUSH if rate == RATE else bench.seconds
    before = store_cpu(broker)
    report = publish(bench, broker, max(seconds, bench.seconds), "--rate", rate, "--tick-us", 1000)
    settle(broker)
    return report["broker_cpu_us_per_published"], (store_cpu(broker) - before) * 1e6 / report["published"]


def counted(broker, run):
    """What `run` gives, and by how much the counters of values and writes grew in it, each second."""
    names = ("gateway_latest_updates_total", "gateway_latest_written_total")
    before, began = [metric(broker, name) for name in names], time.monotonic()
    result = run()
    took = time.monotonic() - began
    return result, *((metric(broker, name) - n) / took for name, n in zip(names, before))


def flushed(broker):
    wait_for("values still wait", 120, lambda: metric(broker, "gateway_latest_pending") == 0)


def pairs(bench, broker, hold):
    """Latency from device to device at a load far below saturation."""
    args = ("-t", "pair", "-P", PAIRS, "--qos", 1, "--rate", 5_000, "-d", hold)
    return bench.load.mqload(broker, "pubsub", *args, timed=False)["latency_us"]["p99"]


def database(bench, broker):
    """`broker` has the embedded store; others are started beside it, one at a time."""
    gateway = bench.brokers[OURS]
    figures = {}
    figures["embedded"], _ = paced(bench, broker, RATE)
    broker.stop()
    keyspace = f"bench_{os.getpid()}_{time.monotonic_ns() % 10**9}"

    def at(settings, measure):
        running = gateway.start(settings=settings)
        try:
            return measure(running)
        finally:
            running.stop()

    figures["off"], idle = at(OFF, lambda running: paced(bench, running, RATE))
    _, naive_idle = at(OFF, lambda running: paced(bench, running, NAIVE_RATE))
    with Cassandra(bench) as cassandra:

        def coalesced(running):
            # The tables are made and the keys known.
            paced(bench, running, RATE)
            flushed(running)
            # With the last flush: else values count that are not written yet.
            run = lambda: paced(bench, running, RATE, flushed)
            (figures["cpu"], busy), values, writes = counted(running, run)
            figures["extra"] = busy - idle
            figures["per write"] = values / writes

        def naive(running):
            (_, busy), values, writes = counted(running, lambda: paced(bench, running, NAIVE_RATE))
            flushed(running)
            figures["naive extra"] = busy - naive_idle
            figures["naive per write"] = values / writes

        def flood(running):
            def run():
                report = publish(bench, running, bench.seconds, "-w", 20)
                # Until then the database has no pause.
                flushed(running)
                return report["msgs_per_sec_in"]

            figures["flood"], _, figures["writes"] = counted(running, run)

        def fault(running):
            figures["p99"] = pairs(bench, running, max(10, bench.seconds))
            cassandra.call("pause")
            try:
                figures["p99 stopped"] = pairs(bench, running, 20)
            finally:
                cassandra.call("resume")
            figures["growth"] = figures["p99 stopped"] / figures["p99"]
            flushed(running)

        for measure, flush in ((coalesced, f"{FLUSH}s"), (naive, NAIVE_FLUSH), (flood, "200ms"), (fault, "200ms")):
            at(with_database(cassandra.address, flush, keyspace), measure)
    return figures


SCENARIOS = [
    Scenario(
        "database",
        f"latest values of 1,000 devices with 10 topics each in a Cassandra of one node: {RATE:,} messages/s, flushed every "
        f"{FLUSH} s, so {PER_FLUSH} messages for each key and flush; one write for each message; as fast as it goes; Cassandra "
        "stopped for 20 s under 5,000 messages/s between 100 pairs",
        (
            Metric("extra", "us CPU per message for the database, in threads beside those of devices", at_most=1.0),
            Metric("cpu", "us CPU per message"),
            Metric("embedded", "us CPU per message, embedded store"),
            Metric("off", "us CPU per message, latest values off"),
            Metric("per write", "messages for each value written", digits=1),
            Metric("naive extra", f"us CPU per message for the database, one write for each, {NAIVE_RATE:,}/s"),
            Metric("naive per write", "messages for each value written there", digits=2),
            Metric("writes", "values/s written, as fast as it goes", digits=0),
            Metric("flood", "messages/s meanwhile", digits=0),
            Metric("growth", "x, p99 while Cassandra is stopped", at_most=2, digits=2),
            Metric("p99", "us, device to device", digits=0),
            Metric("p99 stopped", "us, while Cassandra is stopped", digits=0),
        ),
        database, sides=(OURS,), peers=False, fresh=True,
    ),
]
