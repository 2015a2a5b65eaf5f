"""A server process on free ports with a data directory of its own, for scripts that start, kill and measure one.

Reads nothing of the environment but what it hands on.
"""
import atexit
import os
import random
import signal
import socket
import subprocess
import sys
import time


def is_free(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
        return True
    except OSError:
        return False


def free_ports(count):
    """Some in a row, below those that systems give to clients, one of which might keep one while nobody listens."""
    starts = random.sample(range(12_000, 30_000), 1_000)
    return next(ports for ports in ([*range(start, start + count)] for start in starts) if all(map(is_free, ports)))


class Gateway:
    """Not started yet. Its ports stay the same from start to start, and its data and log are in `directory`. `settings` are keys of
    the configuration as variables of the environment, without MQTT_SERVER_ before them."""

    def __init__(self, server, directory, **settings):
        self.server, self.directory = server, directory
        self.settings = {"GRPC__TLS": "false", **settings}
        self.mqtt, self.grpc, self.http = free_ports(3)
        self.address = f"127.0.0.1:{self.grpc}"

    def start(self):
        """Returns when its port takes connections; the time of that."""
        # What it says is kept for whoever looks for the cause of a failure.
        log = open(os.path.join(self.directory, "gateway.log"), "ab")
        settings = {f"MQTT_SERVER_{key}": value for key, value in self.settings.items()}
        self.process = subprocess.Popen(
            [self.server, "--non-tls", "--addr", f"127.0.0.1:{self.mqtt}", "--grpc-addr", self.address,
             "--http-addr", f"127.0.0.1:{self.http}", "--data-dir", os.path.join(self.directory, "data")],
            stdout=log, stderr=log, env={**os.environ, **settings})
        atexit.register(self.process.kill)
        deadline = time.monotonic() + 120
        while True:
            try:
                # One that stands by for another takes calls, and no devices.
                socket.create_connection(("127.0.0.1", self.mqtt), 1).close()
                return time.monotonic()
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the gateway did not start: see {self.directory}/gateway.log")
                time.sleep(0.002)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
