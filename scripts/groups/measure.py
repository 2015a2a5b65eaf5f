"""What consumer groups cost whom: figures that are promised, each against its bound. See scripts/groups.sh, which calls this.

    measure.py SERVER MQLOAD GRPCLOAD WORK [ITEM...]

restart    1,000,000 messages that no member has acknowledged, 10,000 of them delivered; kill -9; the first delivery after the
           port opens
stalled    a member takes nothing while devices publish 20,000 a second for a minute: memory of the gateway, latency of
           another group, and then all of it in order
poisoned   one device's messages are always given back: latency of all other devices, and of those in its partition
fetch      Fetch of 1,000 messages, and the Acknowledge of them
quiet      a busy group at full speed, beside 100 others that have acknowledged everything and beside none, in turns: the
           gateway's CPU for each message, the log, refusals
puback     PUBACK for topics that a group wants, against topics that a persistent session wants, in turns

PYTHONPATH has the modules generated from the protos. ROUNDS and SCALE (1; fewer messages for a trial) are of the environment.
Exit 1: a bound was missed.
"""
import atexit
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time

import grpc
import gateway_process
from gateway.v1 import groups_pb2 as g
from gateway.v1 import groups_pb2_grpc as rpc

SERVER, MQLOAD, GRPCLOAD, WORK, *ITEMS = sys.argv[1:]
ROUNDS = int(os.environ.get("ROUNDS", "5"))
SCALE = float(os.environ.get("SCALE", "1"))
SEGMENT = 64  # MiB of a file of the log
missed = []


class Gateway(gateway_process.Gateway):
    """A server process with a data directory of its own, started."""

    def __init__(self, name):
        directory = os.path.join(WORK, name)
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        super().__init__(SERVER, directory, LATEST__ENABLED="false", SYS__ENABLED="false",
                         GROUPS__MAX_GROUPS="200",
                         LIMITS__OFFLINE_MESSAGES="100000000", LIMITS__OFFLINE_BYTES="4 GiB")
        self.start()

    def end(self):
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def rss(self):
        """What is resident, and what of it is of no file, in bytes."""
        with open(f"/proc/{self.process.pid}/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))

    def group(self, name, topics=("#",), **fields):
        with grpc.insecure_channel(self.address) as channel:
            filter = g.Filter(topic_filters=topics)
            rpc.GroupsStub(channel).CreateGroup(g.CreateGroupRequest(group=g.Group(name=name, filter=filter, **fields)))

    def status(self, name):
        with grpc.insecure_channel(self.address) as channel:
            return rpc.GroupsStub(channel).GetGroup(g.GetGroupRequest(name=name)).group.status

    def mqload(self, *args):
        return self.load(MQLOAD, "pubsub", "-p", self.mqtt, "-t", "none", "--qos", 1, "--quiet", *args)

    def grpcload(self, command, *args):
        return self.load(GRPCLOAD, command, "--addr", f"http://{self.address}", *args)

    def load(self, *line):
        errors = open(os.path.join(self.directory, "load.log"), "ab")
        process = subprocess.Popen([str(word) for word in line], stdout=subprocess.PIPE, stderr=errors, text=True)
        atexit.register(process.kill)
        return process


def report(process):
    """What a load generator says once it is done."""
    text, _ = process.communicate()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        sys.exit(f"a load generator ended with {process.returncode} and no report")


def scaled(count):
    return max(1, round(count * SCALE))


def told(item, bound, holds, **figures):
    shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())
    print(f"{item}: {shown}; bound: {bound}: {'held' if holds else 'MISSED'}", flush=True)
    if not holds:
        missed.append(item)


def restart():
    gateway = Gateway("restart")
    gateway.group("g", ack_deadline={"seconds": 3600})
    count = scaled(10_000)
    report(gateway.mqload("-P", 100, "-w", 100, "-n", count))
    with grpc.insecure_channel(gateway.address) as channel:
        fetch = g.FetchRequest(group="g", member_id="m", max_messages=10_000)
        taken = 0
        while taken < 10_000 and (got := len(rpc.ConsumerStub(channel).Fetch(fetch).messages)):
            taken += got
    status = gateway.status("g")
    times, starts = [], []
    for _ in range(ROUNDS):
        gateway.kill()
        begun = time.monotonic()
        opened = gateway.start()
        starts.append(opened - begun)
        with grpc.insecure_channel(gateway.address) as channel:
            done = threading.Event()

            def said():
                yield g.ConsumeRequest(open=g.Open(group="g"))
                done.wait()

            for response in rpc.ConsumerStub(channel).Consume(said()):
                if any(item.WhichOneof("item") == "message" for item in response.items):
                    break
            times.append(time.monotonic() - opened)
            done.set()
    lag = gateway.status("g").lag_messages
    told("restart", "1 s", max(times) <= 1 and lag == status.lag_messages == 100 * count, unacknowledged=lag,
         outstanding_before=status.outstanding, first_delivery_ms=[round(t * 1000) for t in times],
         start_until_open_ms=[round(t * 1000) for t in starts])
    gateway.end()


def stalled():
    gateway = Gateway("stalled")
    calm, stall, rate = scaled(20), scaled(60), 20_000
    gateway.group("a")
    gateway.group("b")
    total = 2 * calm + stall + 10
    devices = gateway.mqload("-P", 100, "--rate", rate, "--tick-us", 1000, "-d", total, "--warmup", 1)
    # It reads all along but in the middle; then whatever is left.
    stopping = gateway.grpcload("consume", "--group", "a", "--stamps", "--member", "one", "--outstanding", 10_000,
                             "--warmup", calm + 4, "--stall", stall + 2, "-d", 400, "--idle", 5)
    def other(seconds):
        return gateway.grpcload("consume", "--group", "b", "--stamps", "--member", "other", "--outstanding", 10_000,
                                "--warmup", 2, "-d", seconds)
    before = other(calm)
    time.sleep(calm + 2)
    base = gateway.rss()
    report_before = report(before)
    during = other(stall - 2)
    most = base
    while during.poll() is None:
        most = tuple(map(max, most, gateway.rss()))
        time.sleep(0.1)
    report_during = report(during)
    time.sleep(4)
    report_after = report(other(calm - 4))
    published = report(devices)["published"]
    rest = report(stopping)
    mib = [round((b - a) / 2**20, 1) for a, b in zip(base, most)]
    p99 = [each["latency_us"]["p99"] for each in (report_before, report_during, report_after)]
    p50 = [each["latency_us"]["p50"] for each in (report_before, report_during, report_after)]
    calm_p99 = statistics.mean((p99[0], p99[2]))
    told("stalled: memory", "64 MiB", mib[0] <= 64, grown_MiB=mib[0], of_it_anonymous=mib[1], published=published)
    told("stalled: another group", "1.5x", p99[1] <= 1.5 * calm_p99, p50_us_before_during_after=p50,
         p99_us_before_during_after=p99, during_of_calm=round(p99[1] / calm_p99, 2))
    told("stalled: read afterwards", "all, in order", rest["skipped"] == rest["out_of_order"] == 0 and
         rest["settled"] >= published and gateway.status("a").lag_messages == 0,
         settled=rest["settled"], skipped=rest["skipped"], out_of_order=rest["out_of_order"], seconds=round(rest["seconds"]))
    gateway.end()


def poisoned():
    ratios = []
    for _ in range(ROUNDS):
        rows = {}
        for name, more in (("without", ()), ("with", ("--poison", 0))):
            gateway = Gateway("poisoned")
            member = gateway.grpcload("consume", "--group", "g", "--stamps", "--max-attempts", 8, "--warmup", 3, "-d", 12, *more)
            time.sleep(0.5)
            devices = gateway.mqload("-P", 2000, "--rate", 5000, "--tick-us", 1000, "-d", 13, "--warmup", 1)
            rows[name] = report(member)
            report(devices)
            rows[name]["nacks"] = gateway.status("g").dead_letters
            gateway.end()
        ratios.append(rows)
    def figures(name, key):
        return [(row[name][key] or {}) for row in ratios]
    plain, spoilt = figures("without", "latency_us"), figures("with", "latency_us")
    beside = figures("with", "latency_us_beside")
    ms = lambda rows, key: [round(row.get(key, 0) / 1000, 1) for row in rows]
    # The longest of each round, against the longest of the round without: what is more is due to it.
    more = [b - a for a, b in zip(ms(plain, "max"), ms(spoilt, "max"))]
    told("poisoned", "100 ms more", statistics.median(more) <= 100 and all(row["with"]["out_of_order"] == 0 for row in ratios),
         p99_ms_without=ms(plain, "p99"), p99_ms_with=ms(spoilt, "p99"), max_ms_without=ms(plain, "max"), max_ms_with=ms(spoilt, "max"),
         beside_it_p99_ms=ms(beside, "p99"), beside_it_max_ms=ms(beside, "max"), beside_it=[row.get("count", 0) for row in beside])


def fetch():
    gateway = Gateway("fetch")
    gateway.group("g")
    report(gateway.mqload("-P", 100, "-w", 100, "-n", scaled(10_000)))
    cold = report(gateway.grpcload("fetch", "--group", "g", "--warmup", 0.5, "-d", 3))
    gateway.end()
    gateway = Gateway("fetch")
    gateway.group("g")
    report(gateway.mqload("-P", 100, "-w", 100, "-n", 500))
    warm = report(gateway.grpcload("fetch", "--group", "g", "--warmup", 0, "-d", 2))
    gateway.end()
    for name, row in (("from the disk", cold), ("from memory", warm)):
        told(f"fetch of 1,000, {name}", "5 ms at the median", row["fetch_us"]["p50"] <= 5000, **{
            key.replace("_us", " us"): {k: row[key][k] for k in ("count", "p50", "p99", "max")} for key in ("fetch_us", "acknowledge_us")},
            fewer=row["fewer"])


def quiet():
    rows = {"none": [], "100": []}
    spare, refused = [], 0
    for _ in range(ROUNDS):
        for name, others in (("none", 0), ("100", 100)):
            gateway = Gateway("quiet")
            gateway.group("busy", topics=("mqload/#",))
            for number in range(others):
                gateway.group(f"quiet-{number}", topics=("other/#",), when_full=g.WHEN_FULL_DROP_OLDEST)
            report(gateway.mqload("-P", 1, "-w", 1, "-n", 1, "--prefix", "other"))
            with grpc.insecure_channel(gateway.address) as channel:
                consumer = rpc.ConsumerStub(channel)
                for number in range(others):
                    group = f"quiet-{number}"
                    got = consumer.Fetch(g.FetchRequest(group=group, member_id="m", max_messages=10)).messages
                    consumer.Acknowledge(g.AcknowledgeRequest(group=group, ack_ids=[each.ack_id for each in got]))
            member = gateway.grpcload("consume", "--group", "busy", "--warmup", 1, "-d", 60)
            run = report(gateway.mqload("-P", 100, "-w", 100, "-d", scaled(10), "--warmup", 2, "--prefix", "mqload",
                                        "--size", 256, "--pid", gateway.process.pid))
            rows[name].append(run["broker_cpu_us_per_published"])
            refused += run["exit"] != 0
            log = os.path.join(gateway.directory, "data", "log")
            size = sum(os.path.getsize(os.path.join(log, file)) for file in os.listdir(log))
            spare.append(round((size - gateway.status("busy").lag_bytes) / 2**20, 1))
            member.kill()
            gateway.end()
    medians = {name: statistics.median(row) for name, row in rows.items()}
    ratio = medians["100"] / medians["none"]
    told("quiet: CPU", "1.05x", ratio <= 1.05, of_none=round(ratio, 3), none_us=rows["none"], beside_100_us=rows["100"])
    told("quiet: log", "two segments above what is not acknowledged", max(spare) <= 2 * SEGMENT, above_it_MiB=spare)
    told("quiet: refused", "none", refused == 0, runs_with_refusals=refused)


def session(gateway, name):
    """A persistent session that wants everything and is away."""
    with socket.create_connection(("127.0.0.1", gateway.mqtt), 5) as link:
        client = name.encode()
        body = b"\x00\x04MQTT\x04\x00\x00\x00" + len(client).to_bytes(2, "big") + client
        link.sendall(bytes([0x10, len(body)]) + body)
        assert link.recv(4)[3] == 0
        link.sendall(b"\x82\x06\x00\x01\x00\x01#\x01")
        assert link.recv(5)[4] == 1
        link.sendall(b"\xe0\x00")


def puback():
    for publishers, window in ((1, 1), (50, 1), (50, 20)):
        rows = {"group": [], "session": []}
        gateways = {"group": Gateway("puback-group"), "session": Gateway("puback-session")}
        gateways["group"].group("g")
        session(gateways["session"], "away")
        for _ in range(ROUNDS):
            for name, gateway in gateways.items():
                run = report(gateway.mqload("-P", publishers, "-w", window, "-d", 2, "--warmup", 0.5))
                rows[name].append(run["ack_latency_us"]["p50"])
        for gateway in gateways.values():
            gateway.end()
        medians = {name: statistics.median(row) for name, row in rows.items()}
        ratio = medians["group"] / medians["session"]
        told(f"puback, {publishers} publishers, window {window}", "1.3x", ratio <= 1.3, of_session=round(ratio, 2),
             group_p50_us=rows["group"], session_p50_us=rows["session"])


for item in ITEMS or ("restart", "stalled", "poisoned", "fetch", "quiet", "puback"):
    {"restart": restart, "stalled": stalled, "poisoned": poisoned, "fetch": fetch, "quiet": quiet, "puback": puback}[item]()
if missed:
    sys.exit("missed: " + ", ".join(missed))
