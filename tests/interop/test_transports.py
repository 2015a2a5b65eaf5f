"""Publish and subscribe over every transport, in every protocol version, at every QoS."""
import queue
import ssl

import pytest

import gw
from gw import Client, VERSIONS, unique

TRANSPORTS = ["tcp", "tls", "ws", "wss", "quic"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_qos(transport, version):
    topic = unique("every/")
    with Client(VERSIONS[version], transport) as sub, Client(VERSIONS[version], transport) as pub:
        sub.ok()
        pub.ok()
        assert sub.subscribe(topic, 2) == [2]
        for qos in (0, 1, 2):
            pub.publish(topic, f"at {qos}".encode(), qos)
            message = sub.message()
            assert (message.topic, message.payload, message.qos) == (topic, f"at {qos}".encode(), qos)
            assert not message.retain and not message.dup


@pytest.mark.parametrize("publisher", VERSIONS)
@pytest.mark.parametrize("subscriber", VERSIONS)
def test_versions_talk_to_each_other(publisher, subscriber):
    topic = unique("mixed/")
    with Client(VERSIONS[subscriber], "tcp") as sub, Client(VERSIONS[publisher], "tls") as pub:
        sub.ok().subscribe(topic, 1)
        pub.ok().publish(topic, b"hello", 2)
        message = sub.message()
        assert (message.payload, message.qos) == (b"hello", 1)


@pytest.mark.parametrize("granted", [0, 1, 2])
@pytest.mark.parametrize("version", VERSIONS)
def test_delivery_has_the_lower_qos(version, granted):
    topic = unique("lower/")
    with Client(VERSIONS[version]) as client:
        client.ok()
        assert client.subscribe(topic, granted) == [granted]
        for qos in (0, 1, 2):
            client.publish(topic, b"x", qos)
            assert client.message().qos == min(qos, granted)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_large_payload(transport):
    topic = unique("large/")
    payload = bytes(range(256)) * 3600  # 921,600 bytes
    with Client(transport=transport) as client:
        client.ok().subscribe(topic, 1)
        for qos in (0, 1, 2):
            client.publish(topic, payload, qos)
            assert client.message().payload == payload


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_empty_payload(transport):
    topic = unique("empty/")
    with Client(transport=transport) as client:
        client.ok().subscribe(topic, 1)
        client.publish(topic, b"", 1)
        assert client.message().payload == b""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_order_is_kept(transport, qos):
    topic = unique("order/")
    count = 300
    with Client(transport=transport) as sub, Client(transport=transport) as pub:
        sub.ok().subscribe(topic, 2)
        pub.ok()
        infos = [pub.paho.publish(topic, str(n), qos=qos) for n in range(count)]
        for info in infos:
            info.wait_for_publish(gw.WAIT)
        assert sub.payloads(count) == [str(n).encode() for n in range(count)]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_versions(version):
    topic = unique("tls/")
    with Client(transport="tls", tls_max=version) as client:
        client.ok().subscribe(topic, 0)
        assert client.paho.socket().version() == {"TLSv1_2": "TLSv1.2", "TLSv1_3": "TLSv1.3"}[version.name]
        client.publish(topic, b"sealed")
        assert client.message().payload == b"sealed"


def test_keep_alive_pings_are_answered():
    with Client() as client:
        answers = queue.Queue()
        client.paho.on_log = lambda _c, _u, _level, text: "PINGRESP" in text and answers.put(text)
        # Not shorter: a busy machine has half of it to send the next ping.
        client.ok(keepalive=4)
        for _ in range(2):
            answers.get(timeout=gw.WAIT)
        assert client.disconnected.empty()
        client.subscribe(unique("ping/"))
