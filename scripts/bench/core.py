"""The agreed rows: what one message, one connection and one subscription cost, against Mosquitto."""

from model import AGAIN, MOSQUITTO, OURS, OURS_TWO, RELAY, Metric, Scenario

BOTH = (MOSQUITTO, OURS)
WITH_TWO = (MOSQUITTO, OURS, OURS_TWO)


def pubsub(*args, via="tcp"):
    """A measure that runs `mqload pubsub` and gives CPU, rate and latency."""

    def measure(bench, broker):
        return traffic(bench.load.mqload(broker, "pubsub", *args, via=via))

    return measure


def traffic(report):
    latency = report.get("latency_us") or {}
    return {
        "cpu": report.get("broker_cpu_us_per_message"),
        "rate": report.get("msgs_per_sec_total"),
        "p50": latency.get("p50"),
        "p99": latency.get("p99"),
        "p99.9": latency.get("p99.9"),
    }


def cpu(ratio=None, at_most=None):
    return Metric("cpu", "us CPU per message", ratio=ratio, at_most=at_most)


PAIR0 = ("-t", "pair", "-P", 10, "--qos", 0, "-w", 100, "--gather-us", 200, "--refill", 50)


def connections(bench, broker, via="tcp", *args):
    # The first connection makes the system map the program's code that serves it, which is no part of the others.
    bench.load.mqload(broker, "conn", "-N", 1, "--hold", 0.2, *args, via=via, timed=False)
    report = bench.load.mqload(
        broker, "conn", "-N", bench.scaled(10_000), "--hold", 3, *args, via=via, timed=False
    )
    return {
        "cpu": report.get("broker_cpu_us_per_connection"),
        "rss": report.get("rss_bytes_per_connection"),
        "rate": report.get("connect_per_sec"),
        "idle": report.get("broker_idle_cpu_percent"),
    }


def subscription_memory(bench, broker):
    report = bench.load.mqload(
        broker, "conn", "-N", 110, "--cold", bench.scaled(1_000_000), "--hold", 3, timed=False
    )
    return {"rss": report.get("rss_bytes_per_cold_subscription"), "cpu": report.get("broker_cpu_us_per_cold_subscription")}


def scale(bench, broker):
    """The same 10 hot topics among 1,000 and then 1,000,000 subscriptions, both in one process."""
    few = pubsub(*PAIR0, "--cold", 1000)(bench, broker)["cpu"]
    many = pubsub(*PAIR0, "--cold", bench.scaled(1_000_000))(bench, broker)["cpu"]
    return {"cpu@1k": few, "cpu@1M": many, "growth": many / few if few and many else None}


SCENARIOS = [
    Scenario("pair0", "10 pairs, QoS 0, window 100", (cpu(0.075, 0.25),), pubsub(*PAIR0), sides=WITH_TWO, core=True),
    Scenario(
        "pair0w1", "50 pairs, QoS 0, window 1: isolated messages", (cpu(0.80, 3.8),),
        pubsub("-t", "pair", "-P", 50, "--qos", 0, "-w", 1), sides=(*WITH_TWO, RELAY), core=True,
    ),
    Scenario(
        "pair1", "10 pairs, QoS 1, window 100", (cpu(0.075, 0.50),),
        pubsub("-t", "pair", "-P", 10, "--qos", 1, "-w", 100), sides=WITH_TWO, core=True,
    ),
    Scenario(
        "pair2", "10 pairs, QoS 2, window 100", (cpu(0.04, 0.70),),
        pubsub("-t", "pair", "-P", 10, "--qos", 2, "-w", 100), core=True,
    ),
    Scenario(
        "fanout0", "1 to 500, QoS 0, window 20", (cpu(0.10, 0.75),),
        pubsub("-t", "fanout", "-P", 1, "-S", 500, "--qos", 0, "-w", 20), core=True,
    ),
    Scenario(
        "fanin1", "50 to 1 by wildcard, QoS 1, window 20", (cpu(0.07, 0.50),),
        pubsub("-t", "fanin", "-P", 50, "--qos", 1, "-w", 20), sides=WITH_TWO, core=True,
    ),
    Scenario(
        "share1", "20 to a shared group of 5, QoS 1, MQTT 5, window 50", (cpu(0.10, 0.80),),
        pubsub("-t", "share", "-P", 20, "-S", 5, "--qos", 1, "--v5", "-w", 50), core=True,
    ),
    Scenario(
        "pub2", "100 publishers, nobody listening, QoS 2, 512 B, window 20", (cpu(0.07, 1.25),),
        pubsub("-t", "none", "-P", 100, "--qos", 2, "-w", 20, "--size", 512), core=True,
    ),
    Scenario(
        "rate1", "100 pairs, QoS 1, 10,000 messages/s open loop",
        (
            cpu(0.88, 18.5),
            Metric("p50", "us", ratio=1.0, digits=1),
            Metric("p99", "us", ratio=1.0, digits=1),
            Metric("p99.9", "us", ratio=1.0, digits=1),
        ),
        pubsub("-t", "pair", "-P", 100, "--qos", 1, "--rate", 10_000), sides=(MOSQUITTO, OURS, AGAIN, RELAY), core=True,
    ),
    Scenario(
        "conn", "10,000 connections with a subscription each",
        (
            Metric("cpu", "us CPU per connection", ratio=1.0, at_most=33, digits=1),
            Metric("rss", "bytes of RSS per connection", ratio=0.95, at_most=1000, digits=0),
        ),
        lambda bench, broker: connections(bench, broker, "tcp", "--subscribe"), fresh=True, core=True,
    ),
    Scenario(
        "tls-conn", "10,000 idle TLS connections, full handshakes",
        (
            Metric("rss", "bytes of RSS per connection", ratio=0.55, at_most=8500, digits=0),
            Metric("cpu", "us CPU per handshake", digits=1),
            Metric("rate", "handshakes/s", digits=0),
        ),
        lambda bench, broker: connections(bench, broker, "tls"), wants=("tls",), peers=False, fresh=True, core=True,
    ),
    Scenario(
        "subs", "1,000,000 further exact subscriptions (`x/DEVICE/x`, 22 B) over 110 connections",
        (
            Metric("rss", "bytes of RSS per subscription", ratio=0.12, at_most=120, digits=0),
            Metric("cpu", "us CPU per subscription", digits=2),
        ),
        subscription_memory, fresh=True, core=True,
    ),
    Scenario(
        "scale", "pair0 among 1,000 and 1,000,000 other exact subscriptions",
        (
            Metric("growth", "x, at 1M against 1k", at_most=1.2, digits=2),
            Metric("cpu@1k", "us CPU per message"),
            Metric("cpu@1M", "us CPU per message"),
        ),
        scale, fresh=True, core=True,
    ),
]
