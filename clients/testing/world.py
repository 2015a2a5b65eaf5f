"""A gateway with devices and a bad network, for the tests of the client libraries.

    world.py SERVER WORK

SERVER is the binary, WORK an empty folder. Reads a JSON object a line from standard input, `{"do": NAME, ...}`, does what the method
`do_NAME` of World says with the rest, and answers each by a line with what it returns. Ends, with all it has started, when
standard input does. Python's own tests use World as it is.

The gateway has TLS, tokens and roles of certificates. MQTT is spoken by the few lines below: what is tested is the other side.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 60.0


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def until(what: str, holds: Any) -> None:
    """Waits until `holds()`, for a long time at most."""
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.01)


class Device(threading.Thread):
    """An MQTT 3.1.1 client with a clean session. What it publishes (1, 2, 3... as text, at QoS 1, 40 at most without PUBACK) it
    publishes again after a lost connection until it is acknowledged. It keeps what it gets, and answers
    commands with `pong`, but for those named mute. One named deaf acknowledges nothing."""

    def __init__(self, port: int, name: str, filters: list[str]) -> None:
        super().__init__(daemon=True)
        self.port, self.name, self.filters = port, name, filters
        self.topic, self.last, self.acknowledged, self.sent, self.pace = "", 0, 0, 0, 0.0
        self.received: list[list[str]] = []
        self.up = threading.Event()
        self.over = False
        self.link: socket.socket | None = None
        self.lock = threading.Lock()

    def run(self) -> None:
        while not self.over:
            try:
                self.serve()
            except (OSError, AssertionError):
                self.up.clear()
                time.sleep(0.05)

    def serve(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port), 5) as link:
            reader = link.makefile("rb")
            self.send(link, 0x10, b"\x00\x04MQTT\x04\x02\x00\x00" + text(self.name))
            if packet(reader) != (0x20, b"\x00\x00"):
                raise OSError("no CONNACK")
            if self.filters:
                self.send(link, 0x82, b"\x00\x01" + b"".join(text(filter) + b"\x01" for filter in self.filters))
                assert packet(reader)[0] == 0x90
            # Nothing may come for long.
            link.settimeout(None)
            with self.lock:
                self.sent = self.acknowledged
            self.link = link
            self.up.set()
            threading.Thread(target=self.publish, args=(link,), daemon=True).start()
            while True:
                kind, body = packet(reader)
                if kind == 0x40:
                    with self.lock:
                        self.acknowledged += 1
                elif kind & 0xF0 == 0x30:
                    self.take(link, kind, body)

    def publish(self, link: socket.socket) -> None:
        """Publishes while this link is the one."""
        try:
            while self.link is link and not self.over:
                with self.lock:
                    due = self.sent < min(self.last, self.acknowledged + 40)
                    self.sent += due
                    number = self.sent
                if due:
                    self.send(link, 0x32, text(self.topic) + struct.pack(">H", number % 65535 + 1) + str(number).encode())
                time.sleep(self.pace if due else 0.002)
        except OSError:
            pass

    def take(self, link: socket.socket, kind: int, body: bytes) -> None:
        length = struct.unpack(">H", body[:2])[0]
        topic, rest = body[2 : 2 + length].decode(), body[2 + length :]
        if kind & 0x06:
            if self.name != "deaf":
                self.send(link, 0x40, rest[:2])
            rest = rest[2:]
        self.received.append([topic, rest.decode()])
        parts = topic.split("/")
        if parts[0] == "cmd" and parts[3] != "mute":
            self.send(link, 0x30, text("/".join([*parts[:3], "reply", "200"])) + b"pong " + rest)

    def send(self, link: socket.socket, kind: int, body: bytes) -> None:
        size, length = b"", len(body)
        while True:
            length, low = divmod(length, 128)
            size += bytes([low | (0x80 if length else 0)])
            if not length:
                break
        link.sendall(bytes([kind]) + size + body)


def text(value: str) -> bytes:
    return struct.pack(">H", len(value.encode())) + value.encode()


def packet(reader: Any) -> tuple[int, bytes]:
    head = reader.read(1)
    length, shift = 0, 0
    while head:
        byte = reader.read(1)
        if not byte:
            break
        length |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            body = reader.read(length)
            if len(body) < length:
                break
            return head[0], body
    raise OSError("the connection ended")


class Proxy:
    """A port in front of another. While it swallows, what is asked arrives, and no answer does."""

    def __init__(self, target: int) -> None:
        self.target, self.swallows = target, False
        self.links: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                client.close()
                continue
            self.links += [client, server]
            for source, sink, answers in ((client, server, False), (server, client, True)):
                threading.Thread(target=self.copy, args=(source, sink, answers), daemon=True).start()

    def copy(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if not (answers and self.swallows):
                    sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self) -> None:
        """Ends every connection; answers arrive again."""
        self.swallows = False
        links, self.links = self.links, []
        for link in links:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class World:
    """The gateway, its devices, and the network to it."""

    def __init__(self, server: str, work: str | Path, toml: str = "") -> None:
        self.server, self.work = server, Path(work)
        subprocess.run(["bash", ROOT / "scripts" / "certs.sh", self.work], check=True, stdout=subprocess.DEVNULL)
        self.mqtt, self.grpc, self.http = free_ports(3)
        self.process: subprocess.Popen[bytes] | None = None
        self.tokens = self.work / "tokens"
        self.admin = self.do_token("admin")
        ca = self.work / "ca.crt"
        # The certificate that scripts/certs.sh makes for clients has the common name "device".
        (self.work / "gateway.toml").write_text(
            f'cert = "{self.work}/server.crt"\nkey = "{self.work}/server.key"\nnon_tls = true\n'
            f'addr = "127.0.0.1:{self.mqtt}"\ngrpc_addr = "127.0.0.1:{self.grpc}"\nhttp_addr = "127.0.0.1:{self.http}"\n'
            f'data_dir = "{self.work}/data"\n'
            f'[grpc]\ntls = true\nclient_ca = "{ca}"\n'
            f'[backends]\ntokens = "{self.tokens}"\ncertificates = [{{ name = "device", role = "reader" }}]\n{toml}'
        )
        self.devices: dict[str, Device] = {}
        self.proxy: Proxy | None = None

    def do_start(self) -> dict[str, str]:
        """Starts the gateway, again on its ports and data if it ran before, and says how it is reached."""
        self.log = open(self.work / "gateway.log", "ab")
        self.process = subprocess.Popen(
            [self.server, "--config", self.work / "gateway.toml"], stdout=self.log, stderr=self.log, cwd=self.work
        )

        def listens() -> bool:
            assert self.process is not None and self.process.poll() is None, f"it ended: {self.work}/gateway.log"
            try:
                for port in (self.grpc, self.mqtt):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                return True
            except OSError:
                return False

        until("the gateway listens", listens)
        return {
            "address": f"localhost:{self.grpc}",
            "ca": str(self.work / "ca.crt"),
            "certificate": str(self.work / "client.crt"),
            "key": str(self.work / "client.key"),
            "token": self.admin,
        }

    def do_kill(self) -> None:
        """Ends the gateway at once."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def do_stop(self) -> None:
        """Ends the gateway in order."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(LIMIT)

    def do_token(self, role: str, topics: str = "", expires: str = "1h") -> str:
        """Makes a token, which the gateway knows when this returns."""
        before = self.reloads()
        command = [self.server, "token", "create", "--role", role, "--expires", expires, "--file", str(self.tokens)]
        if topics:
            command += ["--topics", topics]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        if self.process is not None:
            self.process.send_signal(signal.SIGHUP)
            until("the token is known", lambda: self.reloads() > before)
        return next(word for word in output.split() if word.startswith("mqs_"))

    def reloads(self) -> int:
        """How often the gateway has read its tokens again."""
        log = self.work / "gateway.log"
        return log.read_text().count('"reloaded","what":"tokens"') if log.exists() else 0

    def do_device(self, id: str, subscribe: list[str] | None = None) -> None:
        """Connects a device; returns when it has subscribed."""
        device = self.devices[id] = Device(self.mqtt, id, subscribe or [])
        device.start()
        assert device.up.wait(LIMIT), f"{id} did not connect"

    def do_publish(self, id: str, topic: str, count: int, pace: float = 0.0) -> None:
        """Lets a device publish so many numbers more, `pace` seconds apart, in the background."""
        device = self.devices[id]
        device.topic, device.pace = topic, pace
        device.last += count

    def do_published(self, id: str) -> int:
        """Waits until a device has its acknowledgement for everything; how many."""
        device = self.devices[id]
        until(f"{id} has published", lambda: device.acknowledged >= device.last)
        return device.acknowledged

    def do_received(self, id: str, count: int) -> list[list[str]]:
        """What a device got so far: topic and payload, once there are `count`."""
        device = self.devices[id]
        until(f"{id} has received {count}", lambda: len(device.received) >= count)
        return device.received

    def do_away(self, id: str) -> None:
        """A device disconnects for good."""
        device = self.devices.pop(id)
        device.over = True
        if device.link is not None:
            device.link.shutdown(socket.SHUT_RDWR)

    def do_proxy(self) -> str:
        """An address of the gateway behind a network that can be bad."""
        self.proxy = Proxy(self.grpc)
        return f"localhost:{self.proxy.port}"

    def do_swallow(self) -> None:
        """From now on no answer comes through."""
        assert self.proxy is not None
        self.proxy.swallows = True

    def do_cut(self) -> None:
        """Connections through the proxy end; new ones are good."""
        assert self.proxy is not None
        self.proxy.cut()

    def close(self) -> None:
        for device in self.devices.values():
            device.over = True
        if self.process is not None and self.process.poll() is None:
            self.do_kill()


def main() -> None:
    world = World(sys.argv[1], sys.argv[2])
    try:
        for line in sys.stdin:
            arguments = json.loads(line)
            answer = getattr(world, "do_" + arguments.pop("do"))(**arguments)
            print(json.dumps(answer), flush=True)
    finally:
        world.close()


if __name__ == "__main__":
    main()
