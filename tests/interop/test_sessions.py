"""Sessions that outlive the connection, takeover, wills."""
import queue
import time

import pytest
from paho.mqtt.properties import Properties
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

from gw import Client, V5, V311, VERSIONS, connect_properties, unique


def lasting(version, client_id, clean=False, transport="tcp"):
    """A client with a session that outlives its connection, and its CONNECT arguments."""
    client = Client(version, transport, client_id=client_id, clean=clean)
    return client, {"properties": connect_properties(SessionExpiryInterval=300)} if version == V5 else {}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transport", ["tcp", "tls", "ws"])
def test_offline_queue_is_delivered_in_order(version, transport):
    client_id, topic = unique("s"), unique("offline/")
    first, arguments = lasting(VERSIONS[version], client_id, transport=transport)
    present, _, _ = first.connect(**arguments)
    assert not present
    first.subscribe(topic, 2)
    first.close()
    with Client(transport=transport) as pub:
        pub.ok()
        for n in range(50):
            pub.publish(topic, str(n), 1 + n % 2)
    again, arguments = lasting(VERSIONS[version], client_id, transport=transport)
    with again:
        present, code, _ = again.connect(**arguments)
        assert not code.is_failure
        if version != "v31":  # 3.1 has no session present flag
            assert present
        messages = [again.message() for _ in range(50)]
        # Order holds within a QoS [MQTT-4.6.0-5]; a client hands QoS 2 on only after PUBREL.
        for qos in (1, 2):
            expected = [str(n).encode() for n in range(50) if 1 + n % 2 == qos]
            assert [m.payload for m in messages if m.qos == qos] == expected


@pytest.mark.parametrize("version", ["v311", "v5"])
def test_clean_start_discards_the_session(version):
    client_id, topic = unique("s"), unique("clean/")
    first, arguments = lasting(VERSIONS[version], client_id)
    first.ok(**arguments).subscribe(topic, 1)
    first.close()
    second, arguments = lasting(VERSIONS[version], client_id, clean=True)
    with second:
        present, _, _ = second.connect(**arguments)
        assert not present
        mark = unique("mark")
        second.subscribe(mark, 1)
        second.publish(topic, b"lost", 1)
        second.nothing_before(mark)


def test_session_ends_after_its_expiry():
    client_id, topic = unique("s"), unique("expiry/")
    first = Client(client_id=client_id, clean=False)
    first.ok(properties=connect_properties(SessionExpiryInterval=1)).subscribe(topic, 1)
    first.close()
    deadline = time.monotonic() + 20
    time.sleep(1.5)  # the subject of the test is the passing of time
    while True:
        with Client(client_id=client_id, clean=False) as again:
            # Expiry 0: this connection's own session ends with it, so asking does not prolong anything.
            present, _, _ = again.connect()
        if not present:
            return
        assert time.monotonic() < deadline, "the session is still there"


def test_session_without_expiry_ends_with_the_connection():
    client_id, topic = unique("s"), unique("noexp/")
    with Client(client_id=client_id, clean=False) as first:
        first.ok().subscribe(topic, 1)
    with Client(client_id=client_id, clean=False) as second:
        present, _, _ = second.connect()
        assert not present


def test_disconnect_can_shorten_the_expiry():
    client_id = unique("s")
    shorten = Properties(PacketTypes.DISCONNECT)
    shorten.SessionExpiryInterval = 0
    # The next CONNECT may overtake the DISCONNECT on its own socket: then the session is still there once more.
    found = []
    for _ in range(20):
        client = Client(client_id=client_id, clean=False)
        present, _, _ = client.connect(properties=connect_properties(SessionExpiryInterval=300))
        found.append(present)
        client.paho.disconnect(properties=shorten)
        client.ended()
        if len(found) > 1 and not present:
            return
    assert not all(found[1:]), "the session outlives a DISCONNECT with expiry 0"


@pytest.mark.parametrize("version", VERSIONS)
def test_takeover_ends_the_old_connection(version):
    client_id, topic = unique("s"), unique("take/")
    old, arguments = lasting(VERSIONS[version], client_id)
    old.ok(**arguments).subscribe(topic, 1)
    new, arguments = lasting(VERSIONS[version], client_id)
    with new:
        present, _, _ = new.connect(**arguments)
        if version != "v31":
            assert present
        code = old.ended()
        if version == "v5":
            assert code == 0x8E
        new.publish(topic, b"to the new one", 1)
        assert new.message().payload == b"to the new one"
        assert old.messages.empty()
    old.close()


def test_unacknowledged_messages_come_again_after_a_break():
    client_id, topic = unique("s"), unique("redo/")
    first = Client(V311, client_id=client_id, clean=False)
    first.paho.manual_ack_set(True)
    first.ok().subscribe(topic, 1)
    with Client() as pub:
        pub.ok()
        for n in range(5):
            pub.publish(topic, str(n), 1)
    assert first.payloads(5) == [b"0", b"1", b"2", b"3", b"4"]
    first.drop()
    with Client(V311, client_id=client_id, clean=False) as second:
        second.ok()
        messages = [second.message() for _ in range(5)]
        assert [m.payload for m in messages] == [b"0", b"1", b"2", b"3", b"4"]
        assert all(m.dup for m in messages)


@pytest.mark.parametrize("version", ["v311", "v5"])
def test_empty_client_id_is_assigned(version):
    with Client(VERSIONS[version], client_id="") as one, Client(VERSIONS[version], client_id="") as two:
        _, code, first = one.connect()
        assert not code.is_failure
        _, _, second = two.connect()
        if version == "v5":
            assert first.AssignedClientIdentifier and second.AssignedClientIdentifier
            assert first.AssignedClientIdentifier != second.AssignedClientIdentifier


# Wills.


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_will_is_published_when_the_network_fails(version, qos):
    topic = unique("will/")
    with Client() as watch:
        watch.ok().subscribe(topic, 2)
        client = Client(VERSIONS[version])
        client.will(topic, b"gone", qos)
        client.ok().drop()
        message = watch.message()
        assert (message.payload, message.qos, message.retain) == (b"gone", qos, False)


@pytest.mark.parametrize("version", VERSIONS)
def test_disconnect_discards_the_will(version):
    topic = unique("will/")
    with Client() as watch:
        watch.ok().subscribe(topic, 1)
        client = Client(VERSIONS[version])
        client.will(topic, b"gone", 1)
        client.ok().close()
        watch.nothing_before(topic)


def test_disconnect_with_will_publishes_it():
    topic = unique("will/")
    with Client() as watch:
        watch.ok().subscribe(topic, 1)
        client = Client()
        client.will(topic, b"gone", 1, UserProperty=("why", "test"), ContentType="text/plain")
        client.ok().close(ReasonCode(PacketTypes.DISCONNECT, "Disconnect with will message"))
        message = watch.message()
        assert message.payload == b"gone" and message.properties.UserProperty == [("why", "test")]
        assert message.properties.ContentType == "text/plain"


@pytest.mark.parametrize("version", VERSIONS)
def test_retained_will_is_kept(version):
    topic = unique("will/")
    with Client() as watch:
        watch.ok().subscribe(topic, 1)
        client = Client(VERSIONS[version])
        client.will(topic, b"gone", 1, retain=True)
        client.ok().drop()
        assert watch.message().payload == b"gone"
    with Client() as late:
        late.ok().subscribe(topic, 1)
        message = late.message()
        assert (message.payload, message.retain) == (b"gone", True)
        late.publish(topic, b"", 1, retain=True)


def test_will_delay_is_kept():
    topic = unique("will/")
    with Client() as watch:
        watch.ok().subscribe(topic, 1)
        client = Client(clean=False)
        client.will(topic, b"late", 1, delay=2)
        client.ok(properties=connect_properties(SessionExpiryInterval=300))
        dropped = time.monotonic()
        client.drop()
        assert watch.message().payload == b"late"
        assert time.monotonic() - dropped > 1.5


def test_session_end_publishes_the_will_before_its_delay():
    topic = unique("will/")
    with Client() as watch:
        watch.ok().subscribe(topic, 1)
        client = Client(clean=False)
        client.will(topic, b"early", 1, delay=600)
        client.ok(properties=connect_properties(SessionExpiryInterval=1)).drop()
        assert watch.message().payload == b"early"


def test_resuming_within_the_delay_cancels_the_will():
    with Client() as watch:
        watch.ok()
        for delay in (2, 4, 8, 16, 32):
            topic, client_id = unique("will/"), unique("s")
            watch.subscribe(topic, 1)
            first = Client(client_id=client_id, clean=False)
            first.will(topic, b"never", 1, delay=delay)
            first.ok(properties=connect_properties(SessionExpiryInterval=300))
            dropped = time.monotonic()
            first.drop()
            with Client(client_id=client_id, clean=False) as again:
                present, _, _ = again.connect(properties=connect_properties(SessionExpiryInterval=300))
                assert present
                if time.monotonic() - dropped >= delay:
                    # This machine is too busy: it may not have been within the delay.
                    watch.unsubscribe(topic)
                    watch.messages = queue.Queue()
                    continue
                time.sleep(delay + 0.5)  # past the delay: the passing of time is the subject
                watch.nothing_before(topic)
                return
        pytest.fail("never resumed within the delay")


def test_takeover_without_delay_publishes_the_old_will():
    topic, client_id = unique("will/"), unique("s")
    with Client() as watch:
        watch.ok().subscribe(topic, 1)
        old = Client(client_id=client_id, clean=False)
        old.will(topic, b"taken", 1)
        old.ok(properties=connect_properties(SessionExpiryInterval=300))
        with Client(client_id=client_id, clean=False) as new:
            new.ok(properties=connect_properties(SessionExpiryInterval=300))
            assert watch.message().payload == b"taken"
        old.close()


def test_takeover_by_clean_start_publishes_a_delayed_will():
    topic, client_id = unique("will/"), unique("s")
    with Client() as watch:
        watch.ok().subscribe(topic, 1)
        old = Client(client_id=client_id, clean=False)
        old.will(topic, b"ended", 1, delay=600)
        old.ok(properties=connect_properties(SessionExpiryInterval=300))
        with Client(client_id=client_id, clean=True) as new:
            new.ok()
            assert watch.message().payload == b"ended"
        old.close()


def test_keep_alive_ends_a_silent_connection():
    """A raw connection that says nothing after CONNECT (keep alive 1 s) is closed after 1.5 s, will published."""
    import socket

    import gw

    topic = unique("ka/")
    with Client() as watch:
        watch.ok().subscribe(topic, 0)
        will = topic.encode()
        name = unique("k").encode()
        body = (b"\x00\x04MQTT\x04\x06\x00\x01" + len(name).to_bytes(2, "big") + name
                + len(will).to_bytes(2, "big") + will + b"\x00\x04gone")
        with socket.create_connection((gw.HOST, gw.PORTS["tcp"])) as raw:
            raw.settimeout(gw.WAIT)
            start = time.monotonic()
            raw.sendall(b"\x10" + bytes([len(body)]) + body)
            assert raw.recv(4) == b"\x20\x02\x00\x00"
            try:
                assert raw.recv(1) == b""
            except ConnectionResetError:
                pass
            assert time.monotonic() - start > 1.2
        assert watch.message().payload == b"gone"
