#!/usr/bin/env python3
"""What a bridge costs: the gateway's CPU per message that it carries out, and how many a second.

    scripts/bridges/measure.py SERVER [kafka|mqtt|webhook ...]

SERVER is a release build, with the feature `kafka` for that kind. For each kind: the other side is away, MESSAGES (100,000) of
SIZE bytes (200) are published at QoS 1 and wait on the disk; then the other side is started, and until nothing waits the time and
the gateway's CPU are taken, so that what devices cost is not in the figures. The other sides are a Kafka (scripts/kafka.sh),
Mosquitto, and a service in Python that takes everything, which may be slower than the bridge. One line of JSON for each kind.
"""
import http.server
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from gateway_process import Gateway, free_ports

MESSAGES, SIZE = int(os.environ.get("MESSAGES", "100000")), int(os.environ.get("SIZE", "200"))
DEVICES = 10
WINDOW = 100
LONGEST = 600  # seconds until all must be carried
scripts = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# The second is its controller's.
port, _ = free_ports(2)


def kafka(*what):
    return subprocess.run([os.path.join(scripts, "kafka.sh"), *what], env={**os.environ, "KAFKA_PORT": str(port)},
                          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)


class Hook(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def begin(kind, work):
    """Starts the other side; returns what ends it."""
    if kind == "kafka":
        kafka("start")
        return lambda: kafka("stop")
    if kind == "mqtt":
        path = os.path.join(work, "mosquitto.conf")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
        program = shutil.which("mosquitto") or "/usr/sbin/mosquitto"
        process = subprocess.Popen([program, "-c", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return process.kill
    service = http.server.ThreadingHTTPServer(("127.0.0.1", port), Hook)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    return service.shutdown


def text(value):
    return struct.pack(">H", len(value)) + value


def length(count):
    out = b""
    while True:
        count, low = divmod(count, 128)
        out += bytes([low | (0x80 if count else 0)])
        if not count:
            return out


def publish(gateway, name, count):
    with socket.create_connection(("127.0.0.1", gateway.mqtt)) as link:
        body = text(b"MQTT") + b"\x04\x02\x00\x00" + text(name.encode())
        link.sendall(b"\x10" + length(len(body)) + body)
        reader = link.makefile("rb")
        assert reader.read(4)[3] == 0, "CONNACK"
        head = text(f"d/{name}".encode())
        left = count
        while left:
            now = min(left, WINDOW)
            packets = (head + struct.pack(">H", number + 1) + b"x" * SIZE for number in range(now))
            link.sendall(b"".join(b"\x32" + length(len(packet)) + packet for packet in packets))
            assert len(reader.read(4 * now)) == 4 * now, "PUBACK"
            left -= now


def metric(gateway, name):
    page = urllib.request.urlopen(f"http://127.0.0.1:{gateway.http}/metrics", timeout=30).read().decode()
    rows = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


def cpu(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


TABLES = {
    "kafka": f'[bridges.out.kafka]\nbrokers = ["127.0.0.1:{port}"]\ntopic = "measured"\n',
    "mqtt": f'[bridges.out.mqtt]\nurl = "mqtt://127.0.0.1:{port}"\n',
    "webhook": f'[bridges.out.webhook]\nurl = "http://127.0.0.1:{port}/"\n',
}
for kind in sys.argv[2:] or list(TABLES):
    with tempfile.TemporaryDirectory() as work:
        config = os.path.join(work, "config.toml")
        with open(config, "w", encoding="utf-8") as file:
            file.write('insecure_grpc = true\n[grpc]\ntls = false\n[latest]\nenabled = false\n'
                       '[bridges.out]\ntopics = ["d/#"]\nretry_max = "500ms"\n' + TABLES[kind])
        gateway = Gateway(sys.argv[1], work, CONFIG=config)
        gateway.start()
        devices = [threading.Thread(target=publish, args=(gateway, f"d{number}", MESSAGES // DEVICES))
                   for number in range(DEVICES)]
        for device in devices:
            device.start()
        for device in devices:
            device.join()
        waiting = metric(gateway, "gateway_bridge_lag_messages")
        assert waiting == MESSAGES // DEVICES * DEVICES, f"{waiting} wait"
        end = begin(kind, work)
        # From the first that is carried on, so that the time of a start of the other side is not counted.
        began = time.monotonic()
        while (first := metric(gateway, "gateway_bridge_messages_total")) == 0:
            assert time.monotonic() < began + LONGEST, f"nothing was carried in {LONGEST} s"
            time.sleep(0.005)
        pid, since = gateway.process.pid, time.monotonic()
        used = cpu(pid)
        while metric(gateway, "gateway_bridge_lag_messages") > 0:
            assert time.monotonic() < since + LONGEST, "not carried in time"
            time.sleep(0.2)
        took, used = time.monotonic() - since, cpu(pid) - used
        count = metric(gateway, "gateway_bridge_messages_total") - first
        gateway.kill()
        end()
        print(json.dumps({"bridge": kind, "messages": MESSAGES, "bytes": SIZE, "measured": count,
                          "per_second": round(count / took), "cpu_us_per_message": round(used / count * 1e6, 2)}), flush=True)
