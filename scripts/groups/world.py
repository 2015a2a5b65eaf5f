"""Is anything that a device was told "I have it" about ever missing from a consumer group, and does anything that a
member was told "settled" about ever come again? Devices publish at QoS 1, members in Python, Go and Rust consume, and the
gateway, a member or both are killed again and again. See scripts/crash.sh, which calls this.

    world.py SERVER WORK ROUNDS SEED NAME=COMMAND...

SERVER is the binary, WORK an empty folder; PYTHONPATH has the modules generated from the protos. Each COMMAND starts a
member; it gets the arguments ADDRESS GROUP MEMBER_ID FILE. In one of the rounds what a crash in the middle of a write leaves is put
behind the newest file of the log.
"""
import atexit
import collections
import os
import random
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import grpc
from gateway_process import Gateway
from gateway.v1 import groups_pb2 as g
from gateway.v1 import groups_pb2_grpc as rpc

server, work, rounds, seed, *commands = sys.argv[1:]
rounds, rng = int(rounds), random.Random(int(seed))
GROUP = "world"
DEVICES = 40  # some for each member
WINDOW = 40
SETTLE = 120.0  # seconds in which everything must be settled after the last kill

gateway = Gateway(server, work)


class Member:
    """A member process; killed and started again under the same id."""

    def __init__(self, name, command):
        self.name, self.command = name, shlex.split(command)
        self.file = os.path.join(work, f"{name}.lines")
        open(self.file, "a").close()

    def start(self):
        errors = open(os.path.join(work, f"{self.name}.log"), "ab")
        self.process = subprocess.Popen([*self.command, gateway.address, GROUP, self.name, self.file], stdout=errors, stderr=errors)
        atexit.register(self.process.kill)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Device(threading.Thread):
    """Publishes 1, 2, 3... at QoS 1, never more than WINDOW without their PUBACK; what was not acknowledged when the
    connection ended it publishes again, in order."""

    def __init__(self, name):
        super().__init__(daemon=True)
        self.name, self.acknowledged, self.next, self.last = name, 0, 1, None

    def run(self):
        while self.last is None or self.acknowledged < self.last:
            try:
                self.serve()
            except OSError:
                time.sleep(0.1)

    def serve(self):
        with socket.create_connection(("127.0.0.1", gateway.mqtt), 5) as link:
            link.settimeout(10)
            client = self.name.encode()
            body = b"\x00\x04MQTT\x04\x02\x00\x00" + struct.pack(">H", len(client)) + client
            link.sendall(bytes([0x10, len(body)]) + body)
            reader = link.makefile("rb")
            if reader.read(4) != b"\x20\x02\x00\x00":
                raise OSError("no CONNACK")
            sent = self.acknowledged
            while self.last is None or self.acknowledged < self.last:
                packets = b""
                while sent < self.acknowledged + WINDOW and (self.last is None or sent < self.last):
                    sent += 1
                    topic = f"world/{self.name}".encode()
                    body = struct.pack(">H", len(topic)) + topic + struct.pack(">H", sent % 65535 + 1)
                    body += f"{self.name} {sent}".encode()
                    packets += bytes([0x32, len(body)]) + body
                if packets:
                    link.sendall(packets)
                packet = reader.read(4)
                if len(packet) < 4 or packet[0] != 0x40:
                    raise OSError("the connection ended")
                expected = (self.acknowledged + 1) % 65535 + 1
                if struct.unpack(">H", packet[2:])[0] != expected:
                    sys.exit(f"{self.name}: PUBACK out of order")
                self.acknowledged += 1
                time.sleep(0.005)

    def stop(self):
        self.last = self.acknowledged + WINDOW


def lag():
    """Messages that the group has not settled."""
    with grpc.insecure_channel(gateway.address) as channel:
        return rpc.GroupsStub(channel).GetGroup(g.GetGroupRequest(name=GROUP), timeout=10).group.status.lag_messages


def tear():
    """Leaves half a record behind the newest file of the log."""
    folder = os.path.join(work, "data", "log")
    segments = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".log")]
    newest = max(segments, key=os.path.getmtime)
    with open(newest, "ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 3000)))
    return newest


def main():
    gateway.start()
    with grpc.insecure_channel(gateway.address) as channel:
        group = g.Group(name=GROUP, filter=g.Filter(topic_filters=["world/#"]))
        group.ack_deadline.seconds = 2
        group.min_backoff.nanos = 50_000_000
        rpc.GroupsStub(channel).CreateGroup(g.CreateGroupRequest(group=group), timeout=10)
    members = [Member(*command.split("=", 1)) for command in commands]
    devices = [Device(f"device-{number}") for number in range(DEVICES)]
    for each in members + devices:
        each.start()
    torn = rng.randrange(rounds)
    for number in range(rounds):
        time.sleep(rng.uniform(0.3, 2.0))
        victims = rng.choice(["gateway", "member", "both"])
        if number == torn:
            victims = "gateway"
        member = rng.choice(members)
        if victims != "member":
            gateway.kill()
        if victims != "gateway":
            member.kill()
        if number == torn:
            print(f"round {number}: torn tail in {os.path.basename(tear())}")
        if victims != "member":
            gateway.start()
        if victims != "gateway":
            member.start()
    for device in devices:
        device.stop()
    for device in devices:
        device.join(SETTLE)
        if device.is_alive():
            sys.exit(f"{device.name} has no acknowledgement for {device.last - device.acknowledged} messages")
    deadline = time.monotonic() + SETTLE
    while (left := lag()) and time.monotonic() < deadline:
        time.sleep(0.2)
    # Answers are on their way still.
    time.sleep(1)
    for member in members:
        member.kill()
    gateway.kill()
    sys.exit(judge(devices, members, left))


def judge(devices, members, left):
    """Counts what must not be; the exit code."""
    deliveries, settled = [], {}
    for member in members:
        with open(member.file) as file:
            for line in file:
                fields = line.split()
                # A member may be killed in the middle of a line.
                if not fields or fields[-1] != ".":
                    continue
                if fields[0] == "A":
                    settled[fields[2]] = min(int(fields[1]), settled.get(fields[2], 1 << 63))
                else:
                    deliveries.append((int(fields[1]), fields[2], int(fields[3]), fields[4], int(fields[5]), member.name))
    deliveries.sort()
    seen, first, disorder, again, redelivered = collections.defaultdict(set), {}, 0, 0, 0
    by = collections.Counter()
    for when, message, attempt, device, number, member in deliveries:
        by[member] += 1
        redelivered += attempt > 1
        if settled.get(message, 1 << 63) < when:
            again += 1
            print(f"settled before it came again: {message} {device} {number} at {member}")
        if number not in seen[device]:
            if number < first.get(device, 0):
                disorder += 1
                print(f"out of order: {device} {number} after {first[device]} at {member}")
            first[device] = number
            seen[device].add(number)
    lost = 0
    for device in devices:
        missing = set(range(1, device.acknowledged + 1)) - seen[device.name]
        lost += len(missing)
        if missing:
            print(f"lost: {device.name} {sorted(missing)[:10]}")
    acknowledged = sum(device.acknowledged for device in devices)
    print(f"acknowledged to devices {acknowledged}, deliveries {len(deliveries)} {dict(by)}, of them again {redelivered}; "
          f"lost {lost}, after their acknowledgement {again}, out of order {disorder}, left unsettled {left}")
    return 1 if lost or again or disorder or left or not all(by[member.name] for member in members) else 0


main()
