"""What hostile clients do to those beside them: `scripts/bench.sh hostile` and `scripts/bench.sh memory`.

Each mix attacks a fresh gateway with one shard for a few seconds (`mqload hostile`, `grpcload batch` and `hold`), while
a pair exchanges 100 messages/s, idle clients keep alive and new ones connect. Attackers of gRPC without credentials are
`grpcload strangers`, with new gRPC clients beside them; forgers of QUIC need what scripts/test.sh installs into .venv. There is no other broker to compare with:
the measure is what ten plain publishers cost the bystanders, and for memory the configured budget.
"""

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from brokers import Gateway, pinned
from odd_logins import OddLogins

# On a quiet machine nothing that clients may legally send stops others for longer.
GAP_MS = 250
# Nor for longer than so many times what ten plain publishers do; gaps below FLOOR_MS are not told apart.
TIMES_FLOOD = 3
FLOOR_MS = 50
# A page, or an answer about health, comes within this.
HTTP_MS = 1_000
# A new gRPC client beside attackers is served in this time.
NEWCOMER_MS = 1000
# What an address that is not shown to be its owner's is sent for each byte that came from there (RFC 9000, 8.1).
QUIC_TIMES = 3
# Beyond the budget memory may grow by so much.
SLACK_MIB = 64
BUDGETS_MIB = (192, 1024)
# Bystanders where the gateway asks for passwords.
USER, PASSWORD = "bystander", "correct-horse-7"


@dataclass(frozen=True)
class Mix:
    """`mixes` for mqload; `grpc` are the arguments of a grpcload that attacks meanwhile; with `http` pages are read meanwhile.

    With `users` the gateway has a password file, and bystanders log in; `settings` are lines of its configuration. With
    `connect_ms` no CONNECT of a bystander takes longer. `groups` are filters of consumer groups without members. With
    `odd_logins` a hook decides about logins, and strangers have names that it answers with a status.
    """

    name: str
    title: str
    mixes: str = ""
    grpc: tuple = ()
    args: tuple = ()
    http: bool = False
    users: bool = False
    settings: tuple = ()
    connect_ms: int = 0
    # Backends need a token, which new gRPC clients beside the attackers have.
    tokens: bool = False
    groups: tuple = ()
    odd_logins: bool = False
    # Packets of QUIC from forged addresses.
    quic: bool = False


def strangers(attack, *args):
    return ("strangers", "--attack", attack, *args)


WORK = [
    Mix("flood", "ten plain publishers, QoS 0"),
    Mix("flood1", "ten publishers, QoS 1"),
    Mix("group-flood", "ten plain publishers, QoS 0, beside a consumer group of all topics", "flood", groups=("#",)),
    Mix("topics", "publishing to new topics"),
    Mix("retain-new", "retained messages to new topics"),
    Mix("replay", "1 MiB SUBSCRIBEs that match retained messages"),
    Mix("replay2", "two clients of that kind"),
    Mix("replay-long", "one client, 10,000 matching filters of 100 bytes in each SUBSCRIBE"),
    Mix("replay-many", "ten clients, 100 matching filters in each SUBSCRIBE"),
    Mix("scan", "2,100 wildcard filters that match none of 300,000 retained topics"),
    Mix("deep", "2^13 wildcard shapes of each of ten clients"),
    Mix("deep-churn", "the same subscribed to and given up"),
    Mix("puback", "PUBACK for nothing, 3.1.1"),
    Mix("puback-v5", "PUBACK for nothing, MQTT 5"),
    Mix("pubrel", "PUBREL for nothing"),
    Mix("pingreq", "PINGREQ"),
    Mix("qos2", "QoS 2 handshakes"),
    Mix("unsubscribe", "UNSUBSCRIBE, one unknown filter"),
    Mix("unsubscribe-wide", "UNSUBSCRIBE of 1 MiB"),
    Mix("subscribe", "SUBSCRIBE to the same filter"),
    Mix("subscribe-new", "SUBSCRIBE to new filters"),
    Mix("subscribe-wide", "SUBSCRIBE of 1 MiB, and UNSUBSCRIBE"),
    Mix("subscribe-retained", "SUBSCRIBE with a retained message each"),
    Mix("subscribe-durable", "SUBSCRIBE in sessions on disk"),
    Mix("shared", "new shared groups, joined and left"),
    Mix("connect", "connecting and tearing off"),
    Mix("takeover", "the same with five client ids"),
    Mix("wills", "the same with wills"),
    Mix("sessions", "the same with sessions on disk"),
    Mix(
        # Nothing is remembered and no address has to wait: the queue alone is on trial.
        "hash-queue", "2,000 wrong passwords at a time from 20 addresses", args=("--sources", "20"), users=True,
        settings=("password_cache_ttl = \"0s\"", "[bans]", "failed_logins = 0"), connect_ms=2000,
    ),
    Mix("fanout", "one publisher to 15,000 subscribers"),
    Mix("slow", "publishers to ten subscribers that do not read"),
    Mix("ws-ping", "WebSocket pings"),
    Mix("ws-tiny", "WebSocket frames of one byte"),
    Mix("tiny", "one byte in each TCP segment"),
    Mix("shadow", "updates of ten shadows, 6 KB of JSON each"),
    Mix("command-reply", "replies to commands that nobody sent"),
    Mix("http", "ten clients of the HTTP API"),
    Mix("breaker", "50 logins/s from 250 addresses that a hook answers with 400, 422 and 500", "quiet", odd_logins=True),
    Mix("quic-amplification", "packets of QUIC from forged addresses", "quiet", quic=True),
    Mix("page-slots", "1,000 forms of logins to the web page that never come", http=True),
    Mix("grpc-batch", "gRPC batches of 10,000 messages", "quiet", ("batch",)),
    Mix(
        "grpc-places", "1,000 gRPC connections from two addresses, one health check each", "quiet",
        strangers("places", "--connections", "1000", "--sources", "2"), tokens=True,
    ),
    Mix(
        "grpc-prefaces", "1,000 halves of an HTTP/2 preface from as many addresses", "quiet",
        strangers("prefaces", "--connections", "1000", "--sources", "1000"), tokens=True,
    ),
]
MEMORY = [
    Mix("mem-ws-pings", "WebSocket pings, answers not read"),
    Mix("mem-replies", "PINGREQ and SUBSCRIBE, answers not read"),
    Mix("mem-frames", "3,000 unfinished PUBLISHes of 1 MB"),
    Mix("mem-connects", "1,000 unfinished CONNECTs of 950 KB"),
    Mix(
        "mem-credentials", "2,000 CONNECTs of 190 KB that wait for a hash", users=True,
        settings=("[bans]", "failed_logins = 0"),
    ),
    Mix("mem-filters", "1,000,000 filters of 900 bytes"),
    Mix("mem-wills", "1,000 wills of 600 KB"),
    Mix("mem-small-wills", "4,000 wills of 240 KB"),
    Mix("mem-sessions", "20,000 sessions with 20 KB of filters"),
    Mix("mem-slow", "300 subscribers that do not read"),
    Mix("mem-queues", "200 sessions without connection, 30 MB for each"),
    Mix("mem-aliases", "2,000 clients with 64 topic aliases of 4 KB"),
    Mix("mem-retained", "1,200 retained messages of 1 MB"),
    Mix("mem-http-bodies", "64 unfinished bodies of 1 MB over HTTP"),
    Mix("mem-http-streams", "50 streams over HTTP that are not read"),
    Mix("mem-selections", "gRPC streams of 1,000 devices each", "quiet", ("streams", "--kind", "shadows")),
    Mix(
        "mem-unread-streams", "500 gRPC streams of everything that are not read, beside ten publishers", "flood",
        ("streams", "--kind", "messages", "--connections", "10", "--streams", "50"),
    ),
    Mix("mem-grpc", "unfinished gRPC requests of 4 MB", "quiet", ("hold", "--connections", "10", "--calls", "100")),
    Mix(
        "mem-grpc-health", "unfinished health checks of 15 MB", "quiet",
        strangers("health-bodies", "--connections", "150", "--calls", "60"), tokens=True,
    ),
    Mix(
        "mem-grpc-window", "1,000 health checks on each gRPC connection, answers without room", "quiet",
        strangers("window-zero", "--connections", "150", "--calls", "1000"), tokens=True,
    ),
    Mix(
        "mem-grpc-denied", "1,000 denied calls on each gRPC connection, answers not read", "quiet",
        strangers("denied", "--connections", "450", "--calls", "1000"), tokens=True,
    ),
    Mix(
        "mem-all", "frames, CONNECTs, wills, filters, pings, slow subscribers and gRPC together",
        "mem-frames,mem-connects,mem-small-wills,mem-filters,mem-ws-pings,mem-slow",
        ("hold", "--connections", "10", "--calls", "100"),
    ),
]
KINDS = {"hostile": WORK, "memory": MEMORY}


class Reader:
    """Reads a page and asks for health, one after the other, until it is stopped: the slowest answer, and how many were none."""

    PATHS = ("/healthz", "/page/")

    def __init__(self, port):
        self.port, self.slowest, self.failed, self.answers = port, 0.0, 0, 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.stopped.wait(0.05):
            path = self.PATHS[self.answers % len(self.PATHS)]
            began = time.monotonic()
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                connection.request("GET", path, headers={"Connection": "close"})
                good = connection.getresponse().status == 200
                connection.close()
            except (OSError, http.client.HTTPException):
                good = False
            self.answers += 1
            self.failed += not good
            self.slowest = max(self.slowest, 1000 * (time.monotonic() - began))

    def stop(self):
        self.stopped.set()
        self.thread.join()
        return {"http_ms": self.slowest, "http_failed": self.failed, "http_answers": self.answers}


class Hostile:
    """Runs mixes against fresh gateways. `binary`: another build of the gateway than the one of target/."""

    def __init__(self, bench, binary=None):
        self.bench = bench
        self.gateway = Gateway("mqtt-server", bench.broker_cpu, bench.certs(), binary=Path(binary or bench.binary))

    def run(self, mix, settings=(), seconds=None):
        """One mix; mqload's report, with `error` where there is none."""
        seconds = seconds or self.bench.seconds
        # What is held shows at once; late messages are another question.
        patience = ["--patience", "3"] if settings else []
        with tempfile.TemporaryDirectory() as directory:
            if mix.users:
                users = Path(directory) / "users"
                add = [str(self.gateway.binary), "passwd", "add", str(users), USER]
                subprocess.run(add, input=PASSWORD + "\n", text=True, check=True, capture_output=True)
                settings = (*settings, "[auth]", f'password_file = "{users}"', *mix.settings)
            token = []
            if mix.tokens:
                tokens = Path(directory) / "tokens"
                make = [str(self.gateway.binary), "token", "create", "--role", "reader", "--file", str(tokens)]
                made = subprocess.run(make, capture_output=True, text=True, check=True)
                settings = (*settings, "[backends]", f'tokens = "{tokens}"')
                token = ["--token", made.stdout.strip()]
            return self.attack(mix, settings, seconds, patience, token)

    def attack(self, mix, settings, seconds, patience, token):
        odd = OddLogins() if mix.odd_logins else None
        wants = ("ws", "grpc", "quic") if mix.quic else ("ws", "grpc")
        running = self.gateway.start(wants, (*settings, *odd.settings()) if odd else settings)
        other = forger = None
        try:
            if odd:
                odd.start(running.ports)
            for number, topic_filter in enumerate(mix.groups):
                create_group(running.ports["http"], f"all-{number}", topic_filter)
            line = ["mqload", "hostile", "-p", str(running.ports["tcp"]), "--ws-port", str(running.ports["ws"])]
            line += ["--http-port", str(running.ports["http"])]
            line += ["--pid", str(running.pid), "--mix", mix.mixes or mix.name, "-d", str(seconds), "--quiet", *mix.args]
            line += ["--quiet-seconds", "1", *patience]
            line += ["--username", USER, "--password", PASSWORD] if mix.users else []
            if self.bench.scale != 1:
                line += ["--retained", str(self.bench.scaled(300_000)), "--subscribers", str(self.bench.scaled(15_000))]
            main = subprocess.Popen(
                pinned(self.bench.load_cpu, [str(self.bench.tools / line[0]), *line[1:]]),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            if mix.grpc:
                # With the quiet second before an attack over.
                time.sleep(1.2)
                rpc = ["grpcload", mix.grpc[0], "--addr", f"http://127.0.0.1:{running.ports['grpc']}", *mix.grpc[1:]]
                rpc += [*token, "-d", str(seconds)] + (["--warmup", "0"] if mix.grpc[0] == "batch" else [])
                other = subprocess.Popen(
                    pinned(self.bench.load_cpu, ["nice", "-n", "10", str(self.bench.tools / rpc[0]), *rpc[1:]]),
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            if mix.quic:
                forger = self.forge(running.ports["quic"], seconds)
            reader = Reader(running.ports["http"]) if mix.http else None
            out, err = main.communicate()
            read = reader.stop() if reader else {}
            try:
                report = json.loads(out) | read
            except json.JSONDecodeError:
                report = {"error": err.strip()[-200:]}
            if running.process.poll() is not None:
                report["error"] = f"the gateway ended with {running.process.returncode}"
            if other:
                out, err = other.communicate(timeout=30)
                report["grpc"] = json.loads(out) if out.strip() else err.strip()[-200:]
            if forger:
                out, err = forger.communicate(timeout=30)
                report |= {"quic": json.loads(out)} if out.strip() else {"error": err.strip()[-200:]}
            return report
        finally:
            if odd:
                odd.stop()
            for process in (other, forger):
                if process and process.poll() is None:
                    process.kill()
                    process.wait()
            # It may be busy for minutes, and has nothing that is worth waiting for.
            running.process.kill()
            running.stop()


    def forge(self, port, seconds):
        """Forgers of QUIC, with the libraries of the interop tests."""
        python = self.bench.root / ".venv/bin/python"
        if not python.exists():
            sys.exit(f"{python} is missing: run scripts/test.sh first, or leave the mixes with QUIC out")
        line = [str(python), str(self.bench.root / "scripts/bench/forged_quic.py"), str(port), str(seconds)]
        return subprocess.Popen(
            pinned(self.bench.load_cpu, line), env=os.environ | {"GW_CA": str(self.gateway.certs / "ca.crt")},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )


def create_group(port, name, topic_filter):
    """A group that nobody consumes, which takes the oldest messages' room for new ones."""
    body = json.dumps({"group": {"name": name, "filter": {"topicFilters": [topic_filter]}}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/groups", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()


def milliseconds(report, key, field="max"):
    figures = report.get(key) or {}
    value = figures.get(field)
    return None if value is None else value / 1000


def work_row(mix, report, flood):
    """The line of a mix, and whether it kept the bounds."""
    if "error" in report:
        return [f"`{mix.name}`", mix.title, *["-"] * 6, f"no result: {report['error']}"], False
    gap = report["gap_ms"]
    closed = report["pair_closed"] + report["innocents_closed"]
    failed = report["connects_failed"]
    problems = []
    if gap > GAP_MS:
        problems.append(f"gap over {GAP_MS}")
    if flood and gap > max(FLOOR_MS, TIMES_FLOOD * flood["gap_ms"]):
        problems.append(f"over {TIMES_FLOOD} x flood")
    slowest = milliseconds(report, "connect_us") or 0
    if mix.connect_ms and slowest > mix.connect_ms:
        problems.append(f"a CONNECT over {mix.connect_ms}")
    if closed or failed or report["refused"] or report["undelivered"]:
        problems.append("others harmed")
    if report.get("http_failed") or report.get("http_ms", 0) > HTTP_MS:
        problems.append(f"pages: {report['http_failed']} failed, slowest {report['http_ms']:.0f} ms")
    for kind, forged in (report.get("quic") or {}).items():
        if not forged["sent"] or forged["times"] > QUIC_TIMES:
            problems.append(f"{kind}: {forged['received']} bytes for {forged['sent']}")
    problems += newcomers(report)
    text = [
        f"`{mix.name}`", mix.title, f"{gap:.0f}" + (" +" if report["undelivered"] else ""),
        f"{milliseconds(report, 'latency_us', 'p50'):.1f}", f"{milliseconds(report, 'latency_us', 'p99'):.0f}",
        str(report["undelivered"]), str(closed), f"{slowest:.0f}" + (f" ({failed} failed)" if failed else ""),
        ", ".join(problems) or "pass",
    ]
    return text, not problems


def newcomers(report):
    """What new gRPC clients beside the attackers have to complain of."""
    grpc = report.get("grpc")
    if not isinstance(grpc, dict) or "served" not in grpc:
        return []
    missing = grpc["newcomers"] - grpc["served"]
    late = grpc["slowest_ms"] > NEWCOMER_MS
    return ([f"{missing} new gRPC clients not served"] if missing else []) + (
        [f"a new gRPC client waited {grpc['slowest_ms']:.0f} ms"] if late else []
    )


WORK_HEAD = ["mix", "what attacks", "greatest gap, ms", "p50, ms", "p99, ms", "undelivered", "others closed", "slowest CONNECT, ms", ""]
MEMORY_HEAD = ["mix", "what attacks", "budget, MiB", "RSS before, MiB", "greatest, MiB", "growth", "of it anonymous", "others closed", "refused", ""]


def memory_row(mix, report, budget):
    if "error" in report:
        return [f"`{mix.name}`", mix.title, str(budget), *["-"] * 6, f"no result: {report['error']}"], False
    before, peak = report["rss_mib_before"], report["rss_mib_peak"]
    # The rest are pages of the stores' files, which the system can have back at any time; the bound is on both.
    anonymous = report["anonymous_mib_peak"] - report["anonymous_mib_before"]
    late = newcomers(report)
    kept = peak - before <= budget + SLACK_MIB and not late
    closed = report["pair_closed"] + report["innocents_closed"]
    text = [
        f"`{mix.name}`", mix.title, str(budget), f"{before:.0f}", f"{peak:.0f}", f"{peak - before:.0f}", f"{anonymous:.0f}",
        str(closed),
        str(report["refused"]), "pass" if kept else ", ".join(late) or "MISS",
    ]
    return text, kept


def chosen(kind, names):
    mixes = KINDS[kind]
    if not names:
        return mixes
    unknown = [n for n in names if n not in {m.name for m in mixes}]
    if unknown:
        sys.exit(f"no mix {', '.join(unknown)} in {kind}; there are {', '.join(m.name for m in mixes)}")
    return [m for m in mixes if m.name in names]


def measure(bench, kind, options, out):
    """Runs the chosen mixes of a kind, keeps their reports in `out` and prints a table; whether all bounds were kept."""
    names = options.mix
    hostile = Hostile(bench, options.binary)
    stored = out / f"{kind}.json"
    reports = json.loads(stored.read_text()) if stored.exists() and (names or options.budget) else {}
    budgets = (options.budget or BUDGETS_MIB) if kind == "memory" else (None,)
    for mix in chosen(kind, names):
        for budget in budgets:
            settings = () if budget is None else ("[limits]", f'memory_budget = "{budget} MiB"')
            report = hostile.run(mix, settings)
            reports[f"{mix.name}@{budget}" if budget else mix.name] = report
            stored.write_text(json.dumps(reports, indent=1))
            row, kept = row_of(kind, mix, budget, reports)
            print("  " + "  ".join(row), file=sys.stderr, flush=True)
    lines, good = [], True
    for mix in KINDS[kind]:
        for budget in sorted({*BUDGETS_MIB, *options.budget}) if kind == "memory" else (None,):
            if (f"{mix.name}@{budget}" if budget else mix.name) in reports:
                row, kept = row_of(kind, mix, budget, reports)
                lines.append("| " + " | ".join(row) + " |")
                good = good and kept
    head = WORK_HEAD if kind == "hostile" else MEMORY_HEAD
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    print("\n".join(lines))
    return good


def row_of(kind, mix, budget, reports):
    if kind == "hostile":
        return work_row(mix, reports[mix.name], reports.get("flood") if mix.name != "flood" else None)
    return memory_row(mix, reports[f"{mix.name}@{budget}"], budget)
