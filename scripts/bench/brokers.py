"""The brokers that are measured: how each is configured, started and stopped.

A `Broker` is a kind of broker; `start` gives a `Running` one, fresh, with its own directory and free ports.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

START_SECONDS = 30
STOP_SECONDS = 20
SETTLE_SECONDS = 0.5


def free_ports(count):
    """Ports that nobody listens on, taken from the system and given back."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def pinned(cpus, command):
    return ["taskset", "-c", cpus, *command]


@dataclass
class Running:
    """A broker process. `ports` has tcp, and where the broker was asked for it tls, ws, grpc."""

    name: str
    process: subprocess.Popen
    ports: dict
    directory: Path
    command: list
    started_after: float = 0.0  # seconds from exec to the first accepted connection

    @property
    def pid(self):
        return self.process.pid

    def wait_until_listening(self, port, began):
        while time.monotonic() - began < START_SECONDS:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}: {self.log_tail()}")
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                self.started_after = time.monotonic() - began
                return
            except OSError:
                time.sleep(0.001)
        raise RuntimeError(f"{self.name} does not listen after {START_SECONDS} s: {self.log_tail()}")

    def log_tail(self):
        log = self.directory / "log"
        return log.read_text(errors="replace")[-800:] if log.exists() else ""

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass
class Broker:
    """What all brokers share; `cpus` is a list for taskset."""

    name: str
    cpus: str
    certs: Path | None = None
    features: set = field(default_factory=lambda: {"tcp"})

    def start(self, wants=(), settings=()):
        """A fresh process that listens for TCP and for what is in `wants` (tls, ws, grpc). `settings` are further
        lines of the gateway's configuration; other brokers have no such limits."""
        directory = Path(tempfile.mkdtemp(prefix=f"bench-{self.name.replace('/', '-')}-"))
        names = ["tcp", "tls", "ws", "grpc", "http", "quic"]
        ports = dict(zip(names, free_ports(len(names))))
        command = pinned(self.cpus, self.command(directory, ports, set(wants), settings))
        began = time.monotonic()
        with open(directory / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, env=self.environment())
        running = Running(self.name, process, ports, directory, command)
        try:
            running.wait_until_listening(ports["tcp"], began)
            for name in set(wants) & {"tls", "ws", "grpc"}:
                running.wait_until_listening(ports[name], began)
            # Whatever else it makes when it starts belongs to it, and not to its first clients.
            time.sleep(SETTLE_SECONDS)
        except RuntimeError:
            running.stop()
            raise
        return running

    def environment(self):
        return {k: v for k, v in os.environ.items() if not k.startswith("MQTT_SERVER_")}

    def command(self, directory, ports, wants, settings):
        raise NotImplementedError

    def version(self):
        return ""


@dataclass
class Gateway(Broker):
    """mqtt-server with its default configuration, plain TCP, and as many shards as said."""

    binary: Path = Path("target/dist/mqtt-server")
    shards: int = 1

    def __post_init__(self):
        self.features = {"tcp", "tls", "ws", "grpc", "disk"}

    def command(self, directory, ports, wants, settings):
        lines = [
            f'addr = "127.0.0.1:{ports["tcp"]}"',
            "non_tls = true",
            f'grpc_addr = "127.0.0.1:{ports["grpc"]}"',
            f'http_addr = "127.0.0.1:{ports["http"]}"',
            "insecure_grpc = true",
            f'data_dir = "{directory}/data"',
            f"shards = {self.shards}",
        ]
        # Keys without a section come first.
        top = list(takewhile(lambda line: not line.startswith("["), settings))
        lines += top
        if wants & {"tls", "quic"}:
            lines += [f'cert = "{self.certs}/server.crt"', f'key = "{self.certs}/server.key"']
        for kind in ("tls", "quic"):
            lines += self.listener(kind, ports[kind]) if kind in wants else []
        if "ws" in wants:
            lines += self.listener("ws", ports["ws"])
        lines += ["[grpc]", "tls = false"]
        lines += settings[len(top) :]
        (directory / "config.toml").write_text("\n".join(lines) + "\n")
        return [str(self.binary), "--config", str(directory / "config.toml")]

    @staticmethod
    def listener(kind, port):
        # Tables after the top-level keys; [grpc] follows them.
        return ["[[listeners]]", f'name = "{kind}"', f'address = "127.0.0.1:{port}"', f'kind = "{kind}"']

    def version(self):
        return subprocess.run([self.binary, "--version"], capture_output=True, text=True).stdout.strip()


@dataclass
class Mosquitto(Broker):
    """Without limits on queues and messages in flight, TCP_NODELAY on; persistence where `disk` is wanted."""

    def __post_init__(self):
        self.features = {"tcp", "tls", "ws", "disk"}

    @staticmethod
    def binary():
        return shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")

    def command(self, directory, ports, wants, settings):
        lines = [
            "per_listener_settings false",
            "allow_anonymous true",
            f"persistence {str('disk' in wants).lower()}",
            f"persistence_location {directory}/",
            "set_tcp_nodelay true",
            "max_queued_messages 0",
            "max_inflight_messages 0",
            f"listener {ports['tcp']} 127.0.0.1",
        ]
        if "tls" in wants:
            lines += [
                f"listener {ports['tls']} 127.0.0.1",
                f"certfile {self.certs}/server.crt",
                f"keyfile {self.certs}/server.key",
            ]
        if "ws" in wants:
            lines += [f"listener {ports['ws']} 127.0.0.1", "protocol websockets"]
        if os.geteuid() == 0:
            lines.append("user root")
        (directory / "mosquitto.conf").write_text("\n".join(lines) + "\n")
        return [self.binary(), "-c", str(directory / "mosquitto.conf")]

    def version(self):
        text = subprocess.run([self.binary(), "-h"], capture_output=True, text=True).stdout
        return text.splitlines()[0] if text else "mosquitto"


@dataclass
class Relay(Broker):
    """`mqload relay`: no broker, but the reads and writes that one cannot do without."""

    binary: Path = Path("target/release/mqload")

    def command(self, directory, ports, wants, settings):
        return [str(self.binary), "relay", "--listen", f"127.0.0.1:{ports['tcp']}"]

    def version(self):
        return "no broker: reads and writes alone"


@dataclass
class Peer(Broker):
    """Any broker: `--peer NAME=COMMAND`, the command with {port} (and {dir}, a directory of its own)."""

    template: str = ""

    def command(self, directory, ports, wants, settings):
        text = self.template.replace("{port}", str(ports["tcp"])).replace("{dir}", str(directory))
        return shlex.split(text)

    def version(self):
        return self.template
