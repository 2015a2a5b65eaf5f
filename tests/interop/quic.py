"""MQTT over QUIC with clients that are not the gateway's: aioquic below, paho-mqtt or bytes by hand above.

One bidirectional stream that the client opens, ALPN "mqtt". `sock()` gives what paho takes for a socket; `Link` is for tests
that say something themselves, or nothing, or the wrong thing.
"""
import asyncio
import contextlib
import os
import socket
import ssl
import threading

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, StreamDataReceived

CA = os.environ.get("GW_CA", "certs/ca.crt")
PORT = int(os.environ.get("GW_QUIC", "0"))
WAIT = 60.0


def configuration(alpn="mqtt", certificate=None, **more):
    settings = QuicConfiguration(is_client=True, alpn_protocols=[alpn], server_name="localhost", **more)
    settings.load_verify_locations(CA)
    if certificate:
        settings.load_cert_chain(*certificate)
    return settings


class Link(QuicConnectionProtocol):
    """One connection; what comes on its stream, and why it ended."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.bytes = bytearray()
        self.ended = None
        self.finished = False
        self.news = asyncio.Event()

    def quic_event_received(self, event):
        if isinstance(event, StreamDataReceived):
            self.bytes += event.data
            self.finished |= event.end_stream
        elif isinstance(event, ConnectionTerminated):
            self.ended = event
        self.news.set()

    def send(self, data, stream=None, end=False):
        """Sends on the connection's stream, or on another."""
        if stream is None:
            stream = 0
        self._quic.send_stream_data(stream, data, end)
        self.transmit()

    async def until(self, done):
        async with asyncio.timeout(WAIT):
            while not done():
                self.news.clear()
                await self.news.wait()

    async def read(self, length):
        await self.until(lambda: len(self.bytes) >= length or self.ended)
        assert len(self.bytes) >= length, f"ended with {bytes(self.bytes)!r}: {self.ended}"
        taken, self.bytes = bytes(self.bytes[:length]), self.bytes[length:]
        return taken

    async def packet(self):
        """The next packet whose length fits into one byte, or None at the end of the connection."""
        await self.until(lambda: len(self.bytes) >= 2 or self.ended)
        if len(self.bytes) < 2:
            return None
        first, length = await self.read(2)
        assert length < 128
        return bytes([first, length]) + await self.read(length)

    async def end(self):
        """How the gateway ended the connection."""
        await self.until(lambda: self.ended)
        return self.ended

    def vanish(self):
        """Is gone without a word."""
        self._transport = _Nowhere()


class _Nowhere:
    def sendto(self, *_):
        pass


@contextlib.asynccontextmanager
async def open_link(settings=None, port=None, local_port=0):
    async with connect("127.0.0.1", port or PORT, configuration=settings or configuration(),
                       create_protocol=Link, local_port=local_port) as link:
        yield link


def run(test):
    """Runs a test that is a coroutine."""
    def wrapped(*arguments, **more):
        asyncio.run(test(*arguments, **more))
    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


def first_datagrams(settings=None):
    """What a client sends first; whatever is answered, it goes no further."""
    connection = QuicConnection(configuration=settings or configuration())
    connection.connect(("127.0.0.1", PORT), now=0.0)
    return [data for data, _ in connection.datagrams_to_send(now=0.0)]


def sock(settings=None):
    """A socket whose other end is a stream over QUIC."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    opened = threading.Event()
    failed = []

    async def pump():
        loop = asyncio.get_running_loop()
        try:
            async with connect("127.0.0.1", PORT, configuration=settings or configuration()) as link:
                reader, writer = await link.create_stream()
                opened.set()

                async def up():
                    while data := await loop.sock_recv(theirs, 1 << 16):
                        writer.write(data)

                async def down():
                    while data := await reader.read(1 << 16):
                        await loop.sock_sendall(theirs, data)

                tasks = [asyncio.create_task(up()), asyncio.create_task(down())]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                # Its end closes the stream, which the connection's end would do too late for it.
                with contextlib.suppress(RuntimeError):
                    writer.close()
        except (ConnectionError, ssl.SSLError, OSError) as error:
            failed.append(error)
        finally:
            opened.set()
            theirs.close()

    threading.Thread(target=lambda: asyncio.run(pump()), daemon=True).start()
    opened.wait(WAIT)
    if failed:
        raise ConnectionError(str(failed[0]))
    return ours
