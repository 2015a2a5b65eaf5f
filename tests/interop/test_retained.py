"""Retained messages: set, replace, clear, expiry, retain handling and retain as published."""
import pytest

from gw import Client, VERSIONS, publish_properties, unique


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_set_replace_clear(version, qos):
    topic = unique("ret/")
    with Client(VERSIONS[version]) as pub:
        pub.ok()
        for payload in (b"one", b"two"):
            pub.publish(topic, payload, qos, retain=True)
        # QoS 0 has no acknowledgement: a round trip shows that it was handled.
        pub.subscribe(unique("sync/"))
        with Client(VERSIONS[version]) as sub:
            sub.ok().subscribe(topic, 2)
            message = sub.message()
            assert (message.payload, message.retain, message.qos) == (b"two", True, qos)
            pub.publish(topic, b"three", qos, retain=True)
            message = sub.message()
            assert (message.payload, message.retain) == (b"three", False)
            pub.publish(topic, b"", qos, retain=True)
            message = sub.message()
            assert (message.payload, message.retain) == (b"", False)
        with Client(VERSIONS[version]) as late:
            late.ok().subscribe(topic, 1)
            late.nothing_before(topic)


def test_a_message_without_retain_leaves_the_retained_one():
    topic = unique("ret/")
    with Client() as client:
        client.ok().publish(topic, b"kept", 1, retain=True)
        client.publish(topic, b"passing", 1)
        client.subscribe(topic, 1)
        assert client.message().payload == b"kept"
        client.publish(topic, b"", 1, retain=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_wildcard_replay_is_complete(version):
    prefix = unique("retmany")
    count = 500
    with Client() as pub, Client(VERSIONS[version]) as sub:
        pub.ok()
        for n in range(count):
            pub.paho.publish(f"{prefix}/{n}/x", str(n), qos=1, retain=True)
        pub.publish(f"{prefix}/end", b"end", 1, retain=True)
        sub.ok().subscribe(f"{prefix}/+/x", 1)
        seen = {message.topic: message.payload for message in (sub.message() for _ in range(count))}
        assert seen == {f"{prefix}/{n}/x": str(n).encode() for n in range(count)}


@pytest.mark.parametrize("handling", [0, 1, 2])
def test_retain_handling(handling):
    topic = unique("rh/")
    with Client() as client:
        client.ok().publish(topic, b"kept", 1, retain=True)
        client.subscribe(topic, 1, retainHandling=handling)
        if handling < 2:
            assert client.message().payload == b"kept"
        client.subscribe(topic, 1, retainHandling=handling)
        if handling == 0:
            assert client.message().payload == b"kept"
        client.nothing_before(topic)
        client.publish(topic, b"", 1, retain=True)


def test_a_new_subscription_of_311_replays_again():
    topic = unique("again/")
    with Client(VERSIONS["v311"]) as client:
        client.ok().publish(topic, b"kept", 1, retain=True)
        for _ in range(2):
            client.subscribe(topic, 1)
            assert client.message().retain
        client.publish(topic, b"", 1, retain=True)


def test_retain_as_published():
    topic = unique("rap/")
    with Client() as plain, Client() as published, Client() as pub:
        plain.ok().subscribe(topic, 1)
        published.ok().subscribe(topic, 1, retainAsPublished=True)
        pub.ok().publish(topic, b"kept", 1, retain=True)
        assert not plain.message().retain
        assert published.message().retain
        pub.publish(topic, b"passing", 1)
        assert not published.message().retain
        pub.publish(topic, b"", 1, retain=True)


def test_shared_subscriptions_get_no_retained_messages():
    topic = unique("shret/")
    with Client() as client:
        client.ok().publish(topic, b"kept", 1, retain=True)
        client.subscribe(f"$share/g/{topic}", 1)
        client.nothing_before(topic)
        client.publish(topic, b"", 1, retain=True)


def test_retained_messages_expire():
    topic = unique("rexp/")
    with Client() as pub, Client() as watch:
        pub.ok().publish(topic, b"brief", 1, retain=True, properties=publish_properties(MessageExpiryInterval=1))
        # The end is seen by asking again, never by a fixed pause.
        watch.ok()
        for _ in range(200):
            watch.subscribe(topic, 1)
            mark = unique().encode()
            pub.publish(topic, mark, 1)
            message = watch.message()
            if message.payload == mark:
                return
            assert message.payload == b"brief" and message.properties.MessageExpiryInterval <= 1
            assert watch.message().payload == mark
            watch.unsubscribe(topic)
            with pytest.raises(Exception):
                watch.messages.get(timeout=0.1)
        pytest.fail("the retained message did not expire")
