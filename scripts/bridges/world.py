"""Does what was acknowledged to a device come to the other side of a bridge, whoever dies? Devices publish at QoS 1, and the gateway
and the other side are killed in turn. See scripts/crash.sh, which calls this.

    world.py SERVER WORK ROUNDS SEED [kafka|mqtt|webhook]

SERVER is the binary, with the feature `kafka` for that kind, and WORK an empty folder. Exit code 3: there is no Kafka to be had. The
other two kinds have sink.py for the other side.
"""
import atexit
import collections
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request

from gateway_process import Gateway, free_ports

server, work, rounds, seed, *kind = sys.argv[1:]
kind = kind[0] if kind else "kafka"
rounds, rng = int(rounds), random.Random(int(seed))
DEVICES = 4
AHEAD = 20  # messages of a device without PUBACK
BATCH = 100  # messages that the bridge has in hand
SETTLE = 240.0  # seconds in which all must be in Kafka after a kill
TOPIC = "crash"

# The second is that of Kafka's controller.
port, _ = free_ports(2)
kafka_script = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "kafka.sh")


def kafka(*what, code=(0,)):
    done = subprocess.run([kafka_script, *what], env={**os.environ, "KAFKA_PORT": str(port)},
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode == 3:
        print(done.stderr.strip(), file=sys.stderr)
        sys.exit(3)
    if done.returncode not in code:
        sys.exit(f"kafka.sh {what}: {done.stderr}")
    return done.stdout


class Kafka:
    name = "Kafka"
    table = f'[bridges.lake.kafka]\nbrokers = ["127.0.0.1:{port}"]\ntopic = "{TOPIC}"'

    def start(self):
        kafka("start")

    def kill(self):
        kafka("kill")

    def stop(self):
        kafka("stop", code=(0, 1))

    def rows(self):
        """Device and number of each record, in order."""
        for line in kafka("dump", TOPIC).splitlines():
            *_, key, number = line.split("\t")
            yield key, int(number)


class Sink:
    def __init__(self):
        self.name, self.file = f"the {kind} sink", os.path.join(work, "taken")
        address = {"mqtt": f"mqtt://127.0.0.1:{port}", "webhook": f"http://127.0.0.1:{port}/"}[kind]
        self.table = f'[bridges.lake.{kind}]\nurl = "{address}"'
        if kind == "mqtt":
            self.table += '\nlevel = "3.1.1"'

    def start(self):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sink.py")
        self.process = subprocess.Popen([sys.executable, script, kind, str(port), self.file])
        atexit.register(self.process.kill)

    def kill(self):
        self.process.kill()
        self.process.wait()

    stop = kill

    def rows(self):
        with open(self.file, "rb") as file:
            for line in file:
                if line.endswith(b"\n") and b"\t" in line:
                    key, number = line.decode().split("\t")
                    yield key, int(number)


other = Kafka() if kind == "kafka" else Sink()
config = os.path.join(work, "config.toml")
with open(config, "w", encoding="utf-8") as file:
    file.write(f"""insecure_grpc = true
[grpc]
tls = false
[bridges.lake]
topics = ["d/#"]
batch_messages = {BATCH}
retry_max = "1s"
deadline = "10s"
{other.table}
""")
gateway = Gateway(server, work, CONFIG=config)
stopping = threading.Event()


def text(value):
    return struct.pack(">H", len(value)) + value


class Device(threading.Thread):
    """Publishes numbers, each once: what has no PUBACK when the connection ends may be in Kafka or not."""

    def __init__(self, name):
        super().__init__(daemon=True)
        self.name, self.round_of, self.acknowledged, self.number = name, {}, set(), 0

    def run(self):
        while not stopping.is_set():
            try:
                self.serve()
            except OSError:
                time.sleep(0.02)

    def serve(self):
        with socket.create_connection(("127.0.0.1", gateway.mqtt), 5) as link:
            link.settimeout(30)
            body = text(b"MQTT") + b"\x04\x02" + struct.pack(">H", 0) + text(self.name.encode())
            link.sendall(b"\x10" + bytes([len(body)]) + body)
            reader = link.makefile("rb")
            if reader.read(4)[:1] != b"\x20":
                raise OSError("no CONNACK")
            under = collections.deque()
            while not stopping.is_set() or under:
                while len(under) < AHEAD and not stopping.is_set():
                    self.number += 1
                    number, packet = self.number, self.number % 65_535 + 1
                    self.round_of[number] = now
                    body = text(f"d/{self.name}".encode()) + struct.pack(">H", packet) + str(number).encode()
                    link.sendall(b"\x32" + bytes([len(body)]) + body)
                    under.append((packet, number))
                head = reader.read(4)
                if len(head) < 4:
                    raise OSError("closed")
                if head[0] != 0x40:
                    raise OSError("no PUBACK")
                packet = struct.unpack(">H", head[2:])[0]
                first, number = under.popleft()
                if first != packet:
                    sys.exit(f"{self.name}: PUBACK {packet}, not {first}")
                self.acknowledged.add(number)
                # About a hundred a second of each, so that a round ends soon after its kill.
                time.sleep(0.01)


def metric(name):
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{gateway.http}/metrics", timeout=10).read().decode()
    except OSError:
        return None
    rows = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


def drained(most=0):
    """Waits until no more than so many wait."""
    deadline = time.monotonic() + SETTLE
    while (waiting := metric("gateway_bridge_lag_messages")) is None or waiting > most:
        if time.monotonic() > deadline:
            sys.exit(f"{waiting} messages are not in {other.name} {SETTLE} s after the last kill")
        time.sleep(0.1)


problems = []
now = 0
try:
    other.start()
    gateway.start()
    # A webhook is only known to be up when it has taken something.
    while kind != "webhook" and metric("gateway_bridge_up") != 1:
        time.sleep(0.1)
    devices = [Device(f"d{number}") for number in range(DEVICES)]
    for device in devices:
        device.start()
    killed = collections.Counter()
    for now in range(1, rounds + 1):
        time.sleep(rng.uniform(0.2, 2.0))
        # While the other is away, every third time.
        which = ("gateway", "other", "both")[now % 3]
        if which != "gateway":
            other.kill()
        if which != "other":
            gateway.kill()
        time.sleep(rng.uniform(0.0, 1.0))
        if which != "other":
            gateway.start()
        if which != "gateway":
            other.start()
        killed[which] += 1
        # Kills do not come so fast that nothing is ever delivered in between; what is published meanwhile is of the next round.
        time.sleep(rng.uniform(0.2, 1.0))
        if now % 5 == 0:
            # Devices go on, so that some are always on their way.
            drained(BATCH)
            print(f"round {now} of {rounds}: {sum(len(d.acknowledged) for d in devices)} acknowledged", flush=True)
    stopping.set()
    for device in devices:
        device.join(60)
        if device.is_alive():
            problems.append(f"{device.name} still waits for a PUBACK")
    drained()
    copies = collections.Counter()
    order = collections.defaultdict(list)
    for key, number in other.rows():
        copies[key, number] += 1
        if copies[key, number] == 1:
            order[key].append(number)
    again = collections.Counter()
    acknowledged = 0
    for device in devices:
        acknowledged += len(device.acknowledged)
        missing = [number for number in sorted(device.acknowledged) if not copies[device.name, number]]
        if missing:
            problems.append(f"{device.name}: acknowledged and not in {other.name}: {missing[:10]}, {len(missing)} in all")
        if order[device.name] != sorted(order[device.name]):
            problems.append(f"{device.name}: not in the order in which it sent them")
        for number, of in device.round_of.items():
            again[of] += max(copies[device.name, number] - 1, 0)
    most = max(again.values(), default=0)
    # What was published in one round is carried in it or in one of the four behind it.
    kills = sum(killed.values())
    if sum(again.values()) > BATCH * kills:
        problems.append(f"{sum(again.values())} came again, more than {BATCH} for each of {kills} kills")
    if acknowledged == 0:
        problems.append("nothing was acknowledged")
    print(f"bridge to {other.name}, {kills} rounds ({dict(killed)}): {acknowledged} acknowledged, {sum(copies.values())} there, "
          f"{sum(again.values())} came again in {sum(1 for count in again.values() if count)} rounds, at most {most} in one "
          f"(a batch is {BATCH}); lost {sum(1 for d in devices for n in d.acknowledged if not copies[d.name, n])}")
finally:
    stopping.set()
    other.stop()
for problem in problems:
    print(problem, file=sys.stderr)
sys.exit(bool(problems))
