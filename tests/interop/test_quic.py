"""What only QUIC has: its one stream, its limits, and peers that keep to neither."""
import asyncio
import os
import random
import re
import socket
import time
import urllib.request

import pytest

import gw
import quic
from gw import Client, unique
from quic import configuration, open_link, run

# Reason codes of MQTT 5; error codes of RFC 9000.
PACKET_TOO_LARGE, MALFORMED, KEEP_ALIVE = 0x95, 0x81, 0x8D
CONNECTION_REFUSED, STREAM_LIMIT_ERROR, PROTOCOL_VIOLATION, NO_APPLICATION_PROTOCOL = 0x02, 0x04, 0x0A, 0x100 + 120


def connect_packet(client_id, clean=True, keep_alive=60, version=5):
    name = client_id.encode()
    body = b"\0\4MQTT" + bytes([version, 2 if clean else 0]) + keep_alive.to_bytes(2, "big")
    if version == 5:
        # Session Expiry Interval, where a session is to be kept.
        body += b"\0" if clean else b"\5\x11\0\0\xff\xff"
    body += len(name).to_bytes(2, "big") + name
    return bytes([0x10, len(body)]) + body


def publish_packet(topic, payload):
    body = len(topic).to_bytes(2, "big") + topic.encode() + payload
    assert len(body) < 128
    return bytes([0x30, len(body)]) + body


async def connected(link, client_id, **more):
    link.send(connect_packet(client_id, version=4, **more))
    assert (await link.packet())[0] == 0x20


@run
async def test_other_streams_end_the_connection_and_no_other():
    async with open_link() as good:
        await connected(good, unique("good"))
        for stream in (4, 2):
            async with open_link() as link:
                await connected(link, unique("more"))
                # As a client would that does not keep to the limits it was given.
                link._quic._remote_max_streams_bidi = link._quic._remote_max_streams_uni = 10
                link.send(b"\xc0\0", stream=stream)
                assert (await link.end()).error_code == STREAM_LIMIT_ERROR
        good.send(b"\xc0\0")
        assert await good.packet() == b"\xd0\0"


@run
async def test_datagrams_end_the_connection():
    async with open_link(configuration(max_datagram_frame_size=65536)) as link:
        await connected(link, unique("data"))
        assert not link._quic._remote_max_datagram_frame_size, "datagrams are not offered"
        link._quic._remote_max_datagram_frame_size = 65536
        link._quic.send_datagram_frame(b"\xc0\0")
        link.transmit()
        assert (await link.end()).error_code == PROTOCOL_VIOLATION


@run
async def test_another_protocol_is_refused_in_the_handshake():
    with pytest.raises(ConnectionError):
        async with open_link(configuration(alpn="h3")) as link:
            await link.end()


@run
async def test_what_is_not_mqtt_ends_its_own_connection():
    async with open_link() as good:
        await connected(good, unique("good"))
        for junk in (b"GET / HTTP/1.1\r\n\r\n", bytes(500), b"\x10\xff\xff\xff\xff", b"\xc0\0"):
            async with open_link() as link:
                link.send(junk)
                await link.end()
        good.send(b"\xc0\0")
        assert await good.packet() == b"\xd0\0"


@run
async def test_who_is_refused_is_told_so_before_the_end():
    """The failure: the connection is closed before the CONNACK has left, and the client sees no reason."""
    for _ in range(20):
        async with open_link() as link:
            # A session to be kept needs a client id [MQTT-3.1.3-8].
            link.send(connect_packet("", clean=False, version=4))
            assert await link.packet() == b"\x20\2\0\2"
            await link.end()


@run
async def test_the_reason_of_the_end_is_told_on_the_stream_and_beside_it():
    async with open_link() as link:
        link.send(connect_packet(unique("bad")))
        assert (await link.packet())[0] == 0x20
        # A packet of type 0.
        link.send(b"\0\0")
        assert await link.packet() == bytes([0xE0, 1, MALFORMED])
        assert (await link.end()).error_code == MALFORMED


@run
async def test_a_packet_over_the_limit_is_told_so():
    async with open_link() as link:
        link.send(connect_packet(unique("big")))
        assert (await link.packet())[0] == 0x20
        link.send(b"\x30\xff\xff\xff\x7f")
        assert await link.packet() == bytes([0xE0, 1, PACKET_TOO_LARGE])
        assert (await link.end()).error_code == PACKET_TOO_LARGE


@run
async def test_the_end_of_the_stream_is_the_end_of_the_connection():
    will, client = unique("will/"), unique("fin")
    with Client() as watcher:
        watcher.ok().subscribe(will)
        async with open_link() as link:
            name = client.encode()
            body = b"\0\4MQTT\4\6\0\x3c" + bytes([0, len(name)]) + name
            body += bytes([0, len(will)]) + will.encode() + b"\0\4gone"
            link.send(bytes([0x10, len(body)]) + body)
            assert (await link.packet())[0] == 0x20
            link.send(b"", end=True)
            await link.end()
        assert await asyncio.to_thread(watcher.message)


@run
async def test_who_vanishes_is_found_by_keep_alive():
    will = unique("will/")
    with Client() as watcher:
        watcher.ok().subscribe(will)
        async with open_link() as link:
            name = unique("lost").encode()
            body = b"\0\4MQTT\4\6\0\1" + bytes([0, len(name)]) + name
            body += bytes([0, len(will)]) + will.encode() + b"\0\4gone"
            link.send(bytes([0x10, len(body)]) + body)
            assert (await link.packet())[0] == 0x20
            link.vanish()
            assert (await asyncio.to_thread(watcher.message)).payload == b"gone"


def timeouts():
    """Handshakes that the gateway has given up."""
    with urllib.request.urlopen(f"http://127.0.0.1:{gw.PORTS['http']}/metrics", timeout=quic.WAIT) as page:
        text = page.read().decode()
    return int(re.search(r'^mqtt_connections_refused_total{reason="connect_timeout"} (\d+)', text, re.M).group(1))


def drained(raw):
    """Bytes that have come to a socket."""
    total = 0
    raw.setblocking(False)
    while True:
        try:
            total += len(raw.recv(65536))
        except BlockingIOError:
            return total


async def timed_out(before):
    """Waits until the gateway has given up one more handshake."""
    async with asyncio.timeout(quic.WAIT):
        while timeouts() <= before:
            await asyncio.sleep(0.05)


@run
async def test_unanswered_first_packets_draw_at_most_three_times_their_bytes():
    """The failure: whoever forges an address has the gateway send more than RFC 9000 allows to its owner."""
    for count in (1, 1, 3):
        before = timeouts()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            sent = 0
            for _ in range(count):
                for datagram in quic.first_datagrams():
                    sent += raw.sendto(datagram, ("127.0.0.1", quic.PORT))
            # The gateway has sent it all again and again until then.
            await timed_out(before + count - 1)
            # It answers in order: what it sent at the end is there when this has its answer.
            with Client(transport="quic") as client:
                client.ok()
            got = drained(raw)
            print(f"{got} bytes for {sent}: {got / sent:.2f} times")
            assert 0 < got <= 3 * sent


@run
async def test_packets_from_forged_addresses_draw_at_most_three_times_their_bytes():
    """The failure: small packets of a client with forged addresses have the gateway send large ones to their owners."""
    async with open_link() as link:
        await connected(link, unique("forger"))
        sent = got = 0
        own, sockets = link._transport, []
        for _ in range(20):
            raw = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sockets.append(raw)
            link._quic.send_ping(len(sockets))
            for datagram, _ in link._quic.datagrams_to_send(now=asyncio.get_running_loop().time()):
                sent += raw.sendto(datagram, ("127.0.0.1", quic.PORT))
        link._transport = own
        # The gateway has looked at all of them when it answers what came after.
        with Client(transport="quic") as client:
            client.ok()
        for raw in sockets:
            got += drained(raw)
            raw.close()
        print(f"{got} bytes for {sent}: {got / max(sent, 1):.2f} times")
        assert sent and got <= 3 * sent


@run
async def test_packets_from_another_address_are_left_alone():
    """The connection goes on for its own address."""
    async with open_link() as link:
        await connected(link, unique("stays"))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
            link._quic.send_ping(1)
            for datagram, _ in link._quic.datagrams_to_send(now=asyncio.get_running_loop().time()):
                raw.sendto(datagram, ("127.0.0.1", quic.PORT))
        link.send(b"\xc0\0")
        assert await link.packet() == b"\xd0\0"


@run
async def test_a_client_goes_on_from_another_address_if_that_is_on():
    """As behind a NAT that gives it another port."""
    async with open_link() as link:
        await connected(link, unique("roam"))
        moved = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        moved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        moved.bind(("::", 0))
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Forward(link), sock=moved)
        link._transport = transport
        link.send(b"\xc0\0")
        assert await link.packet() == b"\xd0\0"


class _Forward(asyncio.DatagramProtocol):
    def __init__(self, link):
        self.link = link

    def datagram_received(self, data, address):
        self.link.datagram_received(data, address)


@run
async def test_packets_of_no_connection_are_left_alone():
    random.seed(1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
        address = ("127.0.0.1", quic.PORT)
        whole = quic.first_datagrams()[0]
        for length in (0, 1, 7, 20, 100, 1199, 1200, 1472, 9000):
            raw.sendto(random.randbytes(length), address)
            raw.sendto(whole[:length], address)
            raw.sendto(whole[:-length] if length else whole, address)
            # The beginning of a long header, with a version that nobody has.
            raw.sendto((b"\xc0\x0a\x0a\x0a\x0a\x08" + random.randbytes(length))[:1472], address)
        for _ in range(200):
            damaged = bytearray(whole)
            damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
            raw.sendto(damaged, address)
    with Client(transport="quic") as client:
        topic = unique("after/")
        client.ok().subscribe(topic)
        client.publish(topic, b"well", 1)
        assert client.message().payload == b"well"


@run
async def test_a_slow_reader_is_ended_and_holds_up_nobody():
    topic = unique("slow/")
    async with open_link(configuration(max_data=4096, max_stream_data=4096)) as slow:
        # It never lets the gateway send more.
        slow._quic._write_connection_limits = lambda *_, **__: None
        slow._quic._write_stream_limits = lambda *_, **__: None
        await connected(slow, unique("slow"))
        slow.send(b"\x82" + bytes([5 + len(topic)]) + b"\0\1" + bytes([0, len(topic)]) + topic.encode() + b"\0")
        assert (await slow.packet())[0] == 0x90

        def flood():
            with Client() as publisher, Client() as reader:
                reader.ok().subscribe(topic)
                publisher.ok()
                for number in range(200):
                    publisher.publish(topic, bytes(8000) + bytes([number]), 1)
                for number in range(200):
                    assert reader.message().payload[-1] == number
        await asyncio.to_thread(flood)
        # It may not even be told why.
        await slow.end()


@run
async def test_who_says_nothing_is_sent_away():
    async with open_link() as silent, open_link() as half:
        half.send(connect_packet("half")[:5])
        await silent.end()
        await half.end()


@run
async def test_half_handshakes_keep_nobody_out():
    """More than there are places, from addresses that never answer: whoever comes then has to prove its address."""
    sockets = []
    for _ in range(int(os.environ.get("GW_HANDSHAKES", "1000")) + 10):
        raw = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for datagram in quic.first_datagrams():
            raw.sendto(datagram, ("127.0.0.1", quic.PORT))
        sockets.append(raw)
    with Client(transport="quic") as client:
        client.ok()
    for raw in sockets:
        raw.close()


def session_begins():
    """Before the gateway is killed; not a test of its own."""
    with Client(transport="quic", client_id="kept", clean=False) as client:
        client.ok(properties=gw.connect_properties(SessionExpiryInterval=600))
        assert client.subscribe("kept/#", 2) == [2]
    with Client(transport="quic") as publisher:
        publisher.ok()
        for qos in (1, 2):
            publisher.publish(f"kept/{qos}", b"for later", qos)


def session_resumes():
    with Client(transport="quic", client_id="kept", clean=False) as client:
        present, code, _ = client.connect(properties=gw.connect_properties(SessionExpiryInterval=600))
        assert present and not code.is_failure
        got = [client.message() for _ in range(2)]
        assert sorted((message.topic, message.qos) for message in got) == [("kept/1", 1), ("kept/2", 2)]


def told_of_the_stop():
    """Prints when it is connected, and is then told by the gateway that it stops."""
    async def stay():
        async with open_link() as link:
            link.send(connect_packet(unique("stay")))
            assert (await link.packet())[0] == 0x20
            print("connected", flush=True)
            assert await link.packet() == b"\xe0\x01\x8b"
            assert (await link.end()).error_code == 0x8B
    asyncio.run(stay())
