"""Does each command that was started end once, in one state, and stay so? Backends start and cancel commands, devices answer them,
and the gateway is killed again and again. See scripts/crash.sh, which calls this.

    world.py SERVER WORK ROUNDS SEED

SERVER is the binary, WORK an empty folder; PYTHONPATH has the modules generated from the protos.
"""
import collections
import random
import socket
import struct
import sys
import threading
import time

import grpc
from gateway_process import Gateway
from gateway.v1 import commands_pb2 as c
from gateway.v1 import commands_pb2_grpc as rpc

server, work, rounds, seed = sys.argv[1:]
rounds, rng = int(rounds), random.Random(int(seed))
DEVICES = 8
CALLERS = 4
SETTLE = 120.0  # seconds in which all must have ended after the last kill
STATES = {number: name.removeprefix("COMMAND_STATE_") for name, number in c.CommandState.items()}
FINAL = {"REPLIED", "TIMED_OUT", "CANCELLED", "REFUSED"}

gateway = Gateway(server, work, COMMANDS__MAX_KEPT="100000")
stopping = threading.Event()  # for devices
enough = threading.Event()  # for callers
problems = []


def text(value):
    return struct.pack(">H", len(value)) + value


class Device(threading.Thread):
    """Acknowledges most commands and answers most of them at QoS 1; an answer without PUBACK it sends again when it is back."""

    def __init__(self, name):
        super().__init__(daemon=True)
        self.name, self.rng = name, random.Random(f"{seed} {name}")
        self.given = collections.defaultdict(set)  # id -> payloads it has sent
        self.open = {}  # packet id -> (topic, payload)
        self.next, self.heard, self.answers = 1, 0, 0

    def run(self):
        while not stopping.is_set():
            try:
                self.serve()
            except OSError:
                time.sleep(0.05)

    def packet(self, link):
        head = link.read(1)
        length, shift = 0, 0
        while True:
            byte = link.read(1)
            if not byte:
                raise OSError("the connection ended")
            length |= (byte[0] & 127) << shift
            shift += 7
            if not byte[0] & 128:
                break
        body = link.read(length)
        if len(body) < length:
            raise OSError("the connection ended")
        return head[0], body

    def say(self, link, number):
        topic, payload = self.open[number]
        body = text(topic) + struct.pack(">H", number) + payload
        length = len(body)
        size = bytes([length]) if length < 128 else bytes([length & 127 | 128, length >> 7])
        link.sendall(b"\x32" + size + body)

    def serve(self):
        with socket.create_connection(("127.0.0.1", gateway.mqtt), 5) as link:
            link.settimeout(1)
            body = text(b"MQTT") + b"\x04\x02\x00\x00" + text(self.name.encode())
            link.sendall(bytes([0x10, len(body)]) + body)
            reader = link.makefile("rb")
            if self.packet(reader) != (0x20, b"\x00\x00"):
                raise OSError("no CONNACK")
            for number in list(self.open):
                self.say(link, number)
            while not stopping.is_set():
                kind, body = self.packet(reader)
                if kind == 0x40:
                    self.open.pop(struct.unpack(">H", body[:2])[0], None)
                elif kind & 0xF0 == 0x30:
                    self.take(link, body)

    def take(self, link, body):
        length = struct.unpack(">H", body[:2])[0]
        _, device, command, _ = body[2:2 + length].decode().split("/")
        if device != self.name:
            problems.append(f"{self.name} got a command of {device}")
        self.heard += 1
        if self.rng.random() < 0.9:
            link.sendall(b"\x40\x02" + body[2 + length:4 + length])
        # Some it never answers, some it answers twice.
        for _ in range(self.rng.choice([0, 1, 1, 1, 2])):
            self.answers += 1
            payload = f"{self.name} {self.answers}".encode()
            self.given[command].add(payload)
            while self.next in self.open:
                self.next = self.next % 65535 + 1
            self.open[self.next] = (f"cmd/{self.name}/{command}/reply/200".encode(), payload)
            self.say(link, self.next)
            self.next = self.next % 65535 + 1
        if self.rng.random() < 0.03:
            raise OSError("this one leaves now and then")


class Caller(threading.Thread):
    """Starts commands, each until it has an answer, cancels some and looks at others. What was told of an end must hold."""

    def __init__(self, number):
        super().__init__(daemon=True)
        self.number, self.rng = number, random.Random(f"{seed} caller {number}")
        self.started, self.told = [], {}

    def run(self):
        with grpc.insecure_channel(gateway.address, options=[("grpc.max_reconnect_backoff_ms", 200)]) as channel:
            stub = rpc.CommandsStub(channel)
            count = 0
            while not enough.is_set():
                count += 1
                command = f"c{self.number}-{count}"
                request = c.StartCommandRequest(command_id=command)
                request.spec.device_id = f"device-{self.rng.randrange(DEVICES + 1)}"  # the last never comes
                request.spec.name = "do"
                request.spec.payload = b"x" * self.rng.randrange(200)
                request.expire_time.FromMilliseconds(int(time.time() * 1000) + self.rng.choice([1500, 6000, 15000]))
                if self.rng.random() < 0.3:
                    request.retry_interval.seconds = 1
                while True:
                    answer = self.ask(stub.StartCommand, request)
                    if answer or enough.is_set():
                        break
                if not answer:
                    break
                self.started.append((command, request.spec.device_id))
                if self.rng.random() < 0.3:
                    some, _ = self.rng.choice(self.started)
                    cancelled = self.ask(stub.CancelCommand, c.CancelCommandRequest(command_id=some))
                    if cancelled:
                        self.note(cancelled.command)
                some, _ = self.rng.choice(self.started)
                found = self.ask(stub.GetCommand, c.GetCommandRequest(command_id=some))
                if found:
                    self.note(found.command)
                time.sleep(0.01)

    def ask(self, method, request):
        try:
            return method(request, timeout=5)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED):
                return None
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                if not (error.code() == grpc.StatusCode.INVALID_ARGUMENT and "expire_time" in error.details()):
                    problems.append(f"{error.code()} {error.details()} of {request}")
                if isinstance(request, c.StartCommandRequest) and error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                    # Its time was over while the gateway was away: another.
                    request.expire_time.FromMilliseconds(int(time.time() * 1000) + 6000)
            time.sleep(0.05)
            return None

    def note(self, command):
        """What is told of an end, and what it must be from then on."""
        state = STATES[command.state]
        if state not in FINAL:
            if command.command_id in self.told:
                problems.append(f"{command.command_id} was {self.told[command.command_id]} and is {state}")
            return
        end = (state, command.reply.payload, command.reason_code)
        if self.told.setdefault(command.command_id, end) != end:
            problems.append(f"{command.command_id} was {self.told[command.command_id]} and is {end}")


def main():
    gateway.start()
    devices = [Device(f"device-{number}") for number in range(DEVICES)]
    callers = [Caller(number) for number in range(CALLERS)]
    for each in devices + callers:
        each.start()
    for _ in range(rounds):
        time.sleep(rng.uniform(0.2, 1.2))
        gateway.kill()
        gateway.start()
    stop_callers(callers)
    left, ends = judge(callers, devices)
    stopping.set()
    started = sum(len(caller.started) for caller in callers)
    print(f"kills {rounds}, started {started}, ended {dict(ends)}, not ended or unknown {left}; commands heard by devices "
          f"{sum(device.heard for device in devices)}, answers {sum(device.answers for device in devices)}; problems {len(problems)}")
    for problem in problems[:20]:
        print(problem)
    gateway.kill()
    # All kinds of ends must have been met, or this proves little.
    sys.exit(1 if problems or left or len(ends) < 3 else 0)


def stop_callers(callers):
    enough.set()
    for caller in callers:
        caller.join(60)
        if caller.is_alive():
            sys.exit("a caller has no answer")


def judge(callers, devices):
    """Waits until all have ended; how many have not, and the others by state."""
    given = collections.defaultdict(set)
    ends, left = collections.Counter(), 0
    deadline = time.monotonic() + SETTLE
    with grpc.insecure_channel(gateway.address) as channel:
        stub = rpc.CommandsStub(channel)
        for caller in callers:
            for command, device in caller.started:
                while True:
                    try:
                        found = stub.GetCommand(c.GetCommandRequest(command_id=command), timeout=10).command
                    except grpc.RpcError as error:
                        problems.append(f"{command}: {error.code()}")
                        left += 1
                        break
                    caller.note(found)
                    if STATES[found.state] in FINAL:
                        ends[STATES[found.state]] += 1
                        if STATES[found.state] == "REPLIED":
                            given = next(each.given for each in devices if each.name == device)
                            if found.reply.payload not in given[command]:
                                problems.append(f"{command} has an answer that its device never gave")
                        break
                    if time.monotonic() > deadline:
                        left += 1
                        break
                    time.sleep(0.05)
        active = stub.ListCommands(c.ListCommandsRequest(active_only=True), timeout=10).commands
        left += len(active)
    return left, ends


main()
