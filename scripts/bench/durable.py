"""What it costs to keep sessions: persistent pairs, queues of clients that are away, a start with many sessions."""

import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path

from brokers import pinned
from load import Failed
from model import OURS, Metric, Scenario

# Sockets of one mqload; sessions are made in rounds of so many.
ROUND = 16_000


def pair(qos):
    """Persistent pairs, and the same with clean sessions in the same process."""

    def measure(bench, broker):
        args = ("-t", "pair", "-P", 10, "--qos", qos, "-w", 100)
        clean = bench.load.mqload(broker, "pubsub", *args)
        kept = bench.load.mqload(broker, "pubsub", *args, "--clean", "false")
        latency = kept.get("latency_us") or {}
        return {
            "cpu": kept["broker_cpu_us_per_message"],
            "rate": kept["msgs_per_sec_in"],
            "of clean": kept["msgs_per_sec_in"] / clean["msgs_per_sec_in"],
            "p50": latency.get("p50"),
            "p99": latency.get("p99"),
        }

    return measure


def pair_metrics(*bounds):
    return (
        *bounds,
        Metric("of clean", "x, rate of clean sessions", digits=2),
        Metric("p50", "us", digits=0),
        Metric("p99", "us", digits=0),
    )


def offline(bench, broker):
    """1,000 messages for each of 1,000 clients that are away, fetched when they return."""
    clients, messages = bench.scaled(1000), 1000
    args = ("-P", clients, "-S", clients, "--pair", "-n", messages, "-w", 100)
    report = bench.load.mqload(broker, "offline", *args, timed=False)
    queues = broker.directory / "data" / "state" / "data.mdb"
    return {
        "append": report["acked_per_sec"],
        "append cpu": report["publish_cpu_us_per_message"],
        "drain": report["drain_per_sec"],
        "drain cpu": report["drain_cpu_us_per_message"],
        "disk": queues.stat().st_size / (clients * messages) if queues.exists() else None,
    }


def metric(broker, name):
    url = f"http://127.0.0.1:{broker.ports['http']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as page:
        found = re.search(rf"^{name} (\d+)", page.read().decode(), re.M)
    return int(found.group(1))


def wait_for(what, seconds, done):
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise Failed(f"{what} after {seconds} s")
        time.sleep(0.05)


def memory(pid):
    """Bytes of memory that are not pages of files."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s*(\d+)", text).group(1)) * 1024


def sessions(bench, broker):
    """A million sessions with a subscription each whose clients have gone; then kill -9 and a start."""
    before = memory(broker.pid)
    rounds = max(1, bench.scaled(1_000_000) // ROUND)
    shown = f"mqload conn -N {ROUND} --subscribe --clean false, killed, {rounds} times; kill -9 of the gateway, and its start"
    if shown not in bench.load.commands:
        bench.load.commands.append(shown)
    for number in range(rounds):
        line = [str(bench.tools / "mqload"), "conn", "-p", str(broker.ports["tcp"]), "-N", str(ROUND), "--subscribe"]
        line += ["--clean", "false", "--prefix", f"s{number}", "--hold", "600", "--quiet"]
        # Killed, since it would delete its sessions in the end.
        load = subprocess.Popen(pinned(bench.load_cpu, line), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = ROUND * (number + 1)
        wait_for("not all subscribed", 120, lambda: metric(broker, "mqtt_subscriptions") >= wanted)
        load.kill()
        load.wait()
        wait_for("connections still open", 60, lambda: metric(broker, "mqtt_connections") == 0)
    made = metric(broker, "mqtt_sessions")
    time.sleep(2)
    each = (memory(broker.pid) - before) / made
    broker.process.kill()
    broker.process.wait()
    began = time.monotonic()
    with open(broker.directory / "log", "ab") as log:
        broker.process = subprocess.Popen(broker.command, stdout=log, stderr=log, cwd=broker.directory, env=environment())
    broker.wait_until_listening(broker.ports["http"], began)
    # Sockets are bound before the sessions are read; the first answer comes after.
    restored = metric(broker, "mqtt_sessions")
    start = time.monotonic() - began
    if restored != made:
        raise Failed("sessions are missing after the start")
    return {"memory": each, "start": start, "memory after": (memory(broker.pid) - before) / made}


def environment():
    return {k: v for k, v in os.environ.items() if not k.startswith("MQTT_SERVER_")}


SCENARIOS = [
    Scenario(
        "durable1", "10 pairs with persistent sessions, QoS 1, window 100; Mosquitto with persistence",
        pair_metrics(
            Metric("cpu", "us CPU per message", at_most=2.0),
            Metric("rate", "publishes/s", at_least=100_000, digits=0),
        ),
        pair(1), wants=("disk",), peers=False,
    ),
    Scenario(
        "durable2", "10 pairs with persistent sessions, QoS 2, window 100; Mosquitto with persistence",
        pair_metrics(Metric("cpu", "us CPU per message"), Metric("rate", "publishes/s", digits=0)),
        pair(2), wants=("disk",), peers=False,
    ),
    Scenario(
        "offline", "1,000 messages of 256 B for each of 1,000 clients that are away, then fetched; Mosquitto with persistence",
        (
            Metric("append", "messages/s appended", at_least=200_000, digits=0),
            Metric("append cpu", "us CPU per message appended", at_most=4.0),
            Metric("drain", "messages/s fetched", at_least=150_000, digits=0),
            Metric("drain cpu", "us CPU per message fetched"),
            Metric("disk", "bytes on disk per message", at_most=400, digits=0),
        ),
        offline, wants=("disk",), peers=False, fresh=True,
    ),
    Scenario(
        "sessions", "1,000,000 sessions with a subscription each, without connections; kill -9; start",
        (
            Metric("memory", "bytes of memory per session (not file pages)", at_most=500, digits=0),
            Metric("start", "s from exec to the first answer", at_most=5, digits=2),
            Metric("memory after", "bytes of memory per session after the start", digits=0),
        ),
        sessions, wants=("disk",), sides=(OURS,), peers=False, fresh=True,
    ),
]
