"""Scenarios beside the agreed rows: does the cost stay flat, what do TLS, WebSocket and gRPC cost, latency."""

from core import PAIR0, cpu, pubsub, traffic
from model import AGAIN, MOSQUITTO, OURS, OURS_TWO, RELAY, Metric, Scenario

# Cost per message may grow so much from the smallest to the largest size.
FLAT = 1.2


def growth(key):
    return Metric(key, "x, largest against smallest", at_most=FLAT, digits=2)


def latencies(*keys):
    return tuple(Metric(k, "us", ratio=1.0, digits=1) for k in keys)


def grown(figures, first, last):
    a, b = figures.get(first), figures.get(last)
    return b / a if a and b else None


PAIRS = (5, 50, 500, 5_000)


def flat_connections(bench, broker):
    """Isolated messages on more and more connections: half publishers, half subscribers."""
    figures = {}
    for pairs in PAIRS:
        n = max(5, round(pairs * bench.scale)) if pairs > 50 else pairs
        report = bench.load.mqload(broker, "pubsub", "-t", "pair", "-P", n, "--qos", 0, "-w", 1)
        figures[f"cpu@{2 * pairs}"] = report["broker_cpu_us_per_message"]
    figures["growth"] = grown(figures, f"cpu@{2 * PAIRS[0]}", f"cpu@{2 * PAIRS[-1]}")
    return figures


SUBSCRIPTIONS = (1_000, 10_000, 100_000, 1_000_000)


def flat_subscriptions(bench, broker, kind, *more):
    """The same 10 hot topics among more and more cold subscriptions."""
    figures = {}
    for n in SUBSCRIPTIONS:
        cold = ("--cold", bench.scaled(n), "--cold-kind", kind)
        report = bench.load.mqload(broker, "pubsub", *PAIR0, *cold, *more)
        figures[f"cpu@{n}"] = report["broker_cpu_us_per_message"]
    figures["growth"] = grown(figures, "cpu@1000", "cpu@1000000")
    return figures


def subscriptions_scenario(name, title, kind, *more):
    series = tuple(Metric(f"cpu@{n}", "us CPU per message") for n in SUBSCRIPTIONS)
    return Scenario(
        name, title, (growth("growth"), *series),
        lambda bench, broker: flat_subscriptions(bench, broker, kind, *more),
        fresh=True, chart="subscriptions", peers=False,
    )


def cold_topics(bench, broker):
    hot = pubsub(*PAIR0)(bench, broker)["cpu"]
    cold = pubsub(*PAIR0, "--cold-topics", bench.scaled(100_000))(bench, broker)["cpu"]
    return {"cpu": cold, "hot": hot, "growth": cold / hot if hot and cold else None}


READERS = (1, 10, 100, 1_000, 10_000)


def fanouts(bench, broker):
    """One publisher to more and more subscribers; the last delivery of each message is what counts."""
    figures = {}
    for readers in READERS:
        n = max(1, round(readers * bench.scale)) if readers > 100 else readers
        rate = max(1, min(1_000, 20_000 // n))
        report = bench.load.mqload(broker, "pubsub", "-t", "fanout", "-P", 1, "-S", n, "--rate", rate)
        figures[f"cpu@{readers}"] = report["broker_cpu_us_per_message"]
        figures[f"last p99@{readers}"] = (report.get("last_delivery_us") or {}).get("p99")
    return figures


def slow_readers(bench, broker):
    """500 fast subscribers alone, then with 500 more that read nothing. What the slow ones miss is dropped or
    queued by the broker; the fast ones must not notice."""
    n = bench.scaled(500)
    base = ("-t", "fanout", "-P", 1, "-S", n, "--rate", 50, "--size", 1024)
    alone = bench.load.mqload(broker, "pubsub", *base)["latency_us"]["p99"]
    beside = bench.load.mqload(broker, "pubsub", *base, "--slow", n)["latency_us"]["p99"]
    return {"alone": alone, "beside": beside, "growth": beside / alone}


def handshakes(bench, broker):
    full = bench.load.mqload(broker, "conn", "-N", bench.scaled(5_000), "--hold", 0.2, via="tls", timed=False)
    resumed = bench.load.mqload(
        broker, "conn", "-N", bench.scaled(5_000), "--hold", 0.2, "--resume", via="tls", timed=False
    )
    return {
        "full": full["broker_cpu_us_per_connection"],
        "full rate": full["connect_per_sec"],
        "resumed": resumed["broker_cpu_us_per_connection"],
        "resumed rate": resumed["connect_per_sec"],
        "share resumed": resumed["tls_resumed"] / resumed["established"],
    }


def beside_tcp(via, *args):
    """The same load through plain TCP and through `via`, in turn."""

    def measure(bench, broker):
        plain = pubsub(*args)(bench, broker)["cpu"]
        other = pubsub(*args, via=via)(bench, broker)["cpu"]
        return {"cpu": other, "tcp": plain, "growth": other / plain if plain and other else None}

    return measure


def half_load(bench, broker):
    """Latency at half of what saturates Mosquitto, found once in the run and then the same for all."""
    if not hasattr(bench, "half_rate"):
        saturated = bench.load.mqload(broker, "pubsub", "-t", "pair", "-P", 100, "--qos", 1, "-w", 10)
        bench.half_rate = round(saturated["msgs_per_sec_in"] / 2, -2)
    report = bench.load.mqload(broker, "pubsub", "-t", "pair", "-P", 100, "--qos", 1, "--rate", bench.half_rate)
    return {**traffic(report), "load": bench.half_rate}


WS = ("-t", "pair", "-P", 10, "--qos", 0, "-w", 100, "--gather-us", 200, "--refill", 50)
ONE = ("-t", "pair", "-P", 50, "--qos", 0, "-w", 1)
LAST = tuple(Metric(f"last p99@{n}", "us", ratio=1.0, digits=0) for n in READERS)

SCENARIOS = [
    Scenario(
        "flat-conns", "isolated messages (window 1) on 10 to 10,000 connections",
        (growth("growth"), *(Metric(f"cpu@{2 * n}", "us CPU per message") for n in PAIRS)),
        flat_connections, chart="connections", peers=False, sides=(MOSQUITTO, OURS, RELAY),
    ),
    subscriptions_scenario("flat-exact", "pair0 among 1k to 1M exact subscriptions", "exact"),
    subscriptions_scenario("flat-wildcard", "pair0 among 1k to 1M wildcard subscriptions", "wildcard"),
    subscriptions_scenario(
        "flat-shapes", "pair0, topics of 8 levels, among 1k to 1M wildcard subscriptions of more than 100 shapes",
        "shapes", "--topic-levels", 8,
    ),
    Scenario(
        "cold-topics", "pair0 over 100,000 topics in turn",
        (cpu(), Metric("hot", "us CPU per message on 10 topics"), Metric("growth", "x", digits=2)),
        cold_topics, fresh=True,
    ),
    Scenario(
        "fanin-many", "1,000 publishers to one subscriber, QoS 1, window 1", (cpu(ratio=1.0),),
        lambda bench, broker: pubsub("-t", "fanin", "-P", bench.scaled(1_000), "--qos", 1, "-w", 1)(bench, broker),
        sides=(MOSQUITTO, OURS, OURS_TWO),
    ),
    Scenario(
        "fanouts", "one publisher to 1 to 10,000 subscribers, about 20,000 deliveries/s",
        (*LAST, *(Metric(f"cpu@{n}", "us CPU per message") for n in READERS)), fanouts, chart="fanout", peers=False,
    ),
    Scenario(
        "slow", "500 subscribers at 50 messages/s of 1 KB, without and with 500 more that do not read",
        (
            Metric("growth", "x, p99 of the fast ones", at_most=1.2, digits=2),
            Metric("alone", "us, p99 without slow ones", digits=0),
            Metric("beside", "us, p99 with slow ones", digits=0),
        ),
        slow_readers, fresh=True,
    ),
    Scenario(
        "handshakes", "TLS handshakes, full and resumed",
        (
            Metric("full", "us CPU per full handshake", ratio=1.0, digits=1),
            Metric("full rate", "full handshakes/s", digits=0),
            Metric("resumed", "us CPU per resumed handshake", ratio=1.0, digits=1),
            Metric("resumed rate", "resumed handshakes/s", digits=0),
            Metric("share resumed", "of connections resumed", at_least=0.99, digits=2),
        ),
        handshakes, wants=("tls",), peers=False,
    ),
    Scenario("tls-pair", "pair0 over TLS", (cpu(ratio=0.5),), pubsub(*PAIR0, via="tls"), wants=("tls",), peers=False),
    Scenario(
        "tls-fanout", "1 to 500 over TLS, QoS 0, window 20", (cpu(ratio=0.5),),
        pubsub("-t", "fanout", "-P", 1, "-S", 500, "--qos", 0, "-w", 20, via="tls"), wants=("tls",), peers=False,
    ),
    Scenario(
        "ws-pair", "pair0 over WebSocket and over TCP",
        (Metric("growth", "x, against TCP", at_most=1.3, digits=2), cpu(), Metric("tcp", "us CPU per message")),
        beside_tcp("ws", *WS), wants=("ws",), peers=False,
    ),
    Scenario(
        "ws-pair-w1", "pair0w1 over WebSocket and over TCP",
        (Metric("growth", "x, against TCP", at_most=1.3, digits=2), cpu(), Metric("tcp", "us CPU per message")),
        beside_tcp("ws", *ONE), wants=("ws",), peers=False,
    ),
    Scenario(
        "half", "100 pairs, QoS 1, at half of Mosquitto's saturation, open loop",
        (cpu(), *latencies("p50", "p99", "p99.9"), Metric("load", "messages/s", digits=0)), half_load,
        sides=(MOSQUITTO, OURS, AGAIN, RELAY),
    ),
]
