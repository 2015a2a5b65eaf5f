"""Scenarios that mqload alone does not measure: gRPC, start-up, idling, memory after a burst, mqtt-stresser."""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from load import Failed, Loader
from model import MOSQUITTO, OURS, Metric, Scenario

MB = 1e6


# gRPC ------------------------------------------------------------------------------------------------------------

# A rate below saturation, where messages come in small groups.
STREAM_RATE = 200_000


def beside(bench, main, other):
    """Runs `other` while `main` runs. Both are measures that take a Loader of their own."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(other)
        time.sleep(0.3)
        figures = main()
        future.result()
    return figures


def grpc_subscribe(bench, broker):
    seconds = bench.seconds + 4

    def source(*load):
        loader = Loader(bench.tools, bench.load_cpu, seconds)
        report = loader.mqload(broker, "pubsub", "-t", "none", "-P", 4, "--size", 64, *load, check=False)
        bench.load.runs += loader.runs
        return report

    def consumer():
        return bench.load.grpcload(broker, "subscribe")

    alone = source()["broker_cpu_us_per_published"]
    flood = beside(bench, consumer, source)
    paced = beside(bench, consumer, lambda: source("--rate", STREAM_RATE))
    # What the reader missed was published too, and its cost is in the sum.
    offered = flood["messages"] + flood["missing"]
    both = flood["gateway_cpu_us_per_message"] * flood["messages"] / offered
    return {
        "rate": flood["msgs_per_sec"],
        "cpu": both - alone,
        "cpu with source": both,
        "missing": flood["missing"] / offered * 100,
        "paced": paced["gateway_cpu_us_per_message"],
    }


def grpc_publish(bench, broker):
    nobody = bench.load.grpcload(broker, "publish")
    prefix = f"g{time.monotonic_ns() % 10**9}"

    def device():
        loader = Loader(bench.tools, bench.load_cpu, bench.seconds)
        hold = bench.seconds + 2.5
        return loader.mqload(broker, "conn", "-N", 1, "--prefix", prefix, "--hold", hold, timed=False, check=False)

    one = beside(bench, lambda: bench.load.grpcload(broker, "publish", "--device", f"{prefix}-c0"), device)
    return {
        "rate": nobody["msgs_per_sec"],
        "cpu": nobody["gateway_cpu_us_per_message"],
        "device rate": one["msgs_per_sec"],
        "device cpu": one["gateway_cpu_us_per_message"],
    }


# The process ------------------------------------------------------------------------------------------------------


def startup(bench, broker):
    """Milliseconds from exec to the first connection accepted; the process has an empty data directory."""
    return {"time": broker.started_after * 1000}


def idle(bench, broker):
    hold = max(5.0, bench.seconds)
    report = bench.load.mqload(broker, "conn", "-N", bench.scaled(10_000), "--hold", hold, timed=False)
    return {"cpu": report["broker_idle_cpu_percent"]}


def binary_size(bench, broker):
    return {"size": os.path.getsize(bench.binary) / MB}


def rss(pid):
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s*(\d+)", text).group(1)) * 1024


def burst(bench, broker):
    """1,000,000 messages of 1 KB queue up for sessions that are away, are fetched, and their memory must go again.
    200 sessions of 5,000 messages, since a session's queue has a bound."""
    sessions = bench.scaled(200)
    args = ("-P", sessions, "-S", sessions, "--pair", "--qos", 1, "--size", 1024, "-n")
    # A small round first: what any traffic makes the process hold is not the burst's.
    bench.load.mqload(broker, "offline", *args, 50, timed=False)
    time.sleep(2)
    before = rss(broker.pid)
    report = bench.load.mqload(broker, "offline", *args, 5_000, timed=False)
    time.sleep(float(os.environ.get("BURST_REST", "30")))
    after = rss(broker.pid)
    peak = report.get("broker_rss_kb_peak")
    return {
        "growth": after / before,
        "before": before / MB,
        "after": after / MB,
        "peak": peak * 1024 / MB if peak else None,
    }


# mqtt-stresser ------------------------------------------------------------------------------------------------------

STRESSER = "github.com/inovex/mqtt-stresser@latest"


def stresser_binary(bench):
    """mqtt-stresser of the PATH, or what `go install` gives."""
    own = bench.root / "target" / "bench" / "bin"
    found = shutil.which("mqtt-stresser") or shutil.which("mqtt-stresser", path=str(own))
    if found:
        return found
    go = shutil.which("go")
    if not go:
        raise Failed("mqtt-stresser is not installed, and there is no go to install it with")
    done = subprocess.run(
        [go, "install", STRESSER], env={**os.environ, "GOBIN": str(own)}, capture_output=True, text=True
    )
    if done.returncode != 0:
        # What go says goes to the terminal; the docs need not name the mirrors of whoever measured.
        print(done.stderr.strip(), file=sys.stderr)
        raise Failed(f"mqtt-stresser is not installed, and `go install {STRESSER}` failed")
    return str(own / "mqtt-stresser")


def stresser(bench, broker):
    program = stresser_binary(bench)
    figures = {}
    for clients in (1, 10, 100):
        line = [program, "-broker", f"tcp://127.0.0.1:{broker.ports['tcp']}", "-num-clients", str(clients)]
        line += ["-num-messages", "1000", "-rampup-delay", "1s", "-rampup-size", "10", "-timeout", "60s", "-no-progress"]
        done = subprocess.run(["taskset", "-c", bench.load_cpu, *line], capture_output=True, text=True)
        shown = " ".join(["mqtt-stresser", "-num-clients", str(clients), *line[5:]])
        if shown not in bench.load.commands:
            bench.load.commands.append(shown)
        ok = re.search(r"Received messages:\s*(\d+)\s*\((\d+)%\)", done.stdout, re.I)
        if done.returncode != 0 or not ok or ok.group(2) != "100":
            raise Failed(f"mqtt-stresser with {clients} clients: exit {done.returncode}, {done.stdout.strip()[-200:]}")
        publish, receive = re.findall(r"Median:\s*(\d+)\s*msg/sec", done.stdout)[:2]
        figures[f"published@{clients}"] = float(publish)
        figures[f"received@{clients}"] = float(receive)
    return figures


SCENARIOS = [
    Scenario(
        "grpc-subscribe", "gRPC Subscribe: one consumer of 64 B messages, as fast as it goes; CPU less that of the publishing side",
        (
            Metric("rate", "messages/s", at_least=1_000_000, digits=0),
            Metric("cpu", "us CPU per message", at_most=0.3),
            Metric("cpu with source", "us CPU per message, MQTT publishing included"),
            Metric("missing", "% missed by the consumer", digits=1),
            Metric("paced", "us CPU per message at 200,000/s, publishing included"),
        ),
        grpc_subscribe, wants=("grpc",), sides=(OURS,), peers=False,
    ),
    Scenario(
        "grpc-publish", "gRPC PublishStream, 64 B: to nobody, and to one device",
        (
            Metric("rate", "messages/s to nobody", at_least=500_000, digits=0),
            Metric("cpu", "us CPU per message to nobody"),
            Metric("device rate", "messages/s to a device", at_least=500_000, digits=0),
            Metric("device cpu", "us CPU per message to a device"),
        ),
        grpc_publish, wants=("grpc",), sides=(OURS,), peers=False,
    ),
    Scenario("startup", "start of the process to listening", (Metric("time", "ms", at_most=50, digits=1),), startup, fresh=True),
    Scenario(
        "idle", "10,000 idle connections", (Metric("cpu", "% of one CPU", at_most=0.1, digits=3),), idle, fresh=True
    ),
    Scenario(
        "binary", "the release binary", (Metric("size", "MB", at_most=25, digits=1),), binary_size, sides=(OURS,),
        peers=False,
    ),
    Scenario(
        "burst", "memory 30 s after 1,000,000 messages of 1 KB were queued and fetched (our memory_budget raised to 2 GiB)",
        (
            Metric("growth", "x, of RSS before", at_most=1.2, digits=2),
            Metric("before", "MB", digits=1),
            Metric("peak", "MB", digits=1),
            Metric("after", "MB", digits=1),
        ),
        burst, fresh=True, settings=("[limits]", 'memory_budget = "2 GiB"'),
    ),
    Scenario(
        "stresser", "mqtt-stresser with 1, 10 and 100 clients, 1,000 messages each",
        tuple(Metric(f"{what}@{n}", "messages/s, median client", digits=0) for n in (1, 10, 100) for what in ("published", "received")),
        stresser,
    ),
]
