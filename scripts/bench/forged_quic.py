"""Strangers who have QUIC send to addresses that are not theirs: counts what the gateway sends there.

Run with the Python of .venv, which has aioquic: `forged_quic.py PORT SECONDS`, with GW_CA. Each round sends the first
packets of clients who then say nothing, and packets of a client of another address; what comes back to each is counted.
Prints a line of JSON.
"""

import asyncio
import json
import os
import socket
import sys
import time

# The interop tests know what a client sends.
os.environ["GW_QUIC"] = sys.argv[1]
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../tests/interop"))
import quic  # noqa: E402

ADDRESS = ("127.0.0.1", int(sys.argv[1]))
ROUND_SECONDS = 0.05
FIRST_PACKETS = 4
MOVED_PACKETS = 20
# Sockets at a time: what comes late to an older one is counted when it is closed.
SOCKETS = 500
CONNECT = b"\x10\x12\0\4MQTT\4\2\0\x3c\0\6forger"


class Forged:
    """Sockets of owners of forged addresses, and bytes to and from the gateway."""

    def __init__(self):
        self.sockets, self.sent, self.received = [], 0, 0

    def send(self, datagrams):
        raw = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        raw.setblocking(False)
        self.sockets.append(raw)
        self.sent += sum(raw.sendto(datagram, ADDRESS) for datagram in datagrams)
        while len(self.sockets) > SOCKETS:
            self.close(self.sockets.pop(0))

    def close(self, raw):
        try:
            while True:
                self.received += len(raw.recv(65536))
        except BlockingIOError:
            raw.close()

    def report(self):
        while self.sockets:
            self.close(self.sockets.pop())
        return {"sent": self.sent, "received": self.received, "times": self.received / max(self.sent, 1)}


async def attack(seconds):
    first, moved = Forged(), Forged()
    async with quic.open_link() as link:
        link.send(CONNECT)
        assert (await link.packet())[0] == 0x20, "no CONNACK"
        until = time.monotonic() + seconds
        while time.monotonic() < until and not link.ended:
            for _ in range(FIRST_PACKETS):
                first.send(quic.first_datagrams())
            for number in range(MOVED_PACKETS):
                link._quic.send_ping(number)
                datagrams = link._quic.datagrams_to_send(now=asyncio.get_running_loop().time())
                moved.send([data for data, _ in datagrams])
            await asyncio.sleep(ROUND_SECONDS)
        # What is sent again comes within this.
        await asyncio.sleep(1)
        print(json.dumps({"first": first.report(), "moved": moved.report()}))


asyncio.run(attack(float(sys.argv[2])))
