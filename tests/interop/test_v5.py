"""What only MQTT 5.0 has."""
import collections
import queue
import time

import pytest
from paho.mqtt.properties import Properties
from paho.mqtt.packettypes import PacketTypes

from gw import WAIT, Client, V311, connect_properties, publish_properties, unique


def subscription_id(number):
    properties = Properties(PacketTypes.SUBSCRIBE)
    properties.SubscriptionIdentifier = number
    return properties


def test_no_local():
    topic = unique("nl/")
    with Client() as client, Client() as other:
        client.ok().subscribe(topic, 1, noLocal=True)
        other.ok()
        client.publish(topic, b"own", 1)
        client.nothing_before(topic, sender=other)


def test_subscription_identifiers():
    prefix = unique("sid")
    with Client() as client:
        client.ok()
        client.subscribe(f"{prefix}/#", 0, properties=subscription_id(7))
        client.subscribe(f"{prefix}/a", 1, properties=subscription_id(268_435_455))
        client.publish(f"{prefix}/a", b"both", 1)
        message = client.message()
        assert sorted(message.properties.SubscriptionIdentifier) == [7, 268_435_455] and message.qos == 1
        client.publish(f"{prefix}/b", b"one", 1)
        assert client.message().properties.SubscriptionIdentifier == [7]
        client.subscribe(f"{prefix}/#", 0, properties=subscription_id(9))
        client.publish(f"{prefix}/b", b"replaced", 1)
        assert client.message().properties.SubscriptionIdentifier == [9]


def test_retained_replay_carries_the_subscription_identifier():
    topic = unique("sidr/")
    with Client() as client:
        client.ok().publish(topic, b"kept", 1, retain=True)
        client.subscribe(topic, 1, properties=subscription_id(5))
        message = client.message()
        assert message.retain and message.properties.SubscriptionIdentifier == [5]
        client.publish(topic, b"", 1, retain=True)


def test_properties_pass_through_in_order():
    topic = unique("props/")
    user = [("b", "1"), ("a", "2"), ("b", "3"), ("", ""), ("\u00e9", "\u4e2d")]
    with Client() as client:
        client.ok().subscribe(topic, 1)
        client.publish(topic, "text".encode(), 1, properties=publish_properties(
            UserProperty=user, ContentType="text/plain", ResponseTopic="back/here",
            CorrelationData=b"\x00\xff\x01", PayloadFormatIndicator=1))
        properties = client.message().properties
        assert properties.UserProperty == user
        assert properties.ContentType == "text/plain"
        assert properties.ResponseTopic == "back/here"
        assert properties.CorrelationData == b"\x00\xff\x01"
        assert properties.PayloadFormatIndicator == 1


def test_request_and_response():
    request, reply = unique("req/"), unique("rep/")
    with Client() as server, Client() as client:
        server.ok().subscribe(request, 1)
        client.ok().subscribe(reply, 1)
        for n in range(10):
            client.publish(request, str(n), 1, properties=publish_properties(
                ResponseTopic=reply, CorrelationData=bytes([n])))
            question = server.message()
            server.publish(question.properties.ResponseTopic, question.payload * 2, 1,
                           properties=publish_properties(CorrelationData=question.properties.CorrelationData))
            answer = client.message()
            assert answer.payload == str(n).encode() * 2 and answer.properties.CorrelationData == bytes([n])


def test_message_expiry_counts_down_and_ends():
    topic, client_id = unique("exp/"), unique("s")
    lasting = connect_properties(SessionExpiryInterval=300)
    with Client(client_id=client_id, clean=False) as first:
        first.ok(properties=lasting).subscribe(topic, 1)
    with Client() as pub:
        pub.ok()
        pub.publish(topic, b"brief", 1, properties=publish_properties(MessageExpiryInterval=1))
        pub.publish(topic, b"long", 1, properties=publish_properties(MessageExpiryInterval=1000))
        pub.publish(topic, b"forever", 1)
    time.sleep(2.1)  # the passing of time is the subject
    with Client(client_id=client_id, clean=False) as second:
        second.ok(properties=lasting)
        long = second.message()
        assert long.payload == b"long"
        assert 900 < long.properties.MessageExpiryInterval < 1000
        forever = second.message()
        assert forever.payload == b"forever"
        assert not hasattr(forever.properties, "MessageExpiryInterval")


def test_inbound_topic_alias():
    topic = unique("alias/")
    with Client() as sub, Client() as pub:
        sub.ok().subscribe(f"{topic}/#", 1)
        _, _, properties = pub.connect()
        assert properties.TopicAliasMaximum >= 2
        pub.publish(f"{topic}/one", b"1", 1, properties=publish_properties(TopicAlias=1))
        pub.publish(f"{topic}/two", b"2", 1, properties=publish_properties(TopicAlias=2))
        for alias, end in ((1, "one"), (2, "two"), (1, "one")):
            pub.publish("", end.encode(), 1, properties=publish_properties(TopicAlias=alias))
        pub.publish(f"{topic}/three", b"3", 1, properties=publish_properties(TopicAlias=1))
        pub.publish("", b"three", 1, properties=publish_properties(TopicAlias=1))
        got = [(m.topic[len(topic) + 1:], m.payload) for m in (sub.message() for _ in range(7))]
        assert got == [("one", b"1"), ("two", b"2"), ("one", b"one"), ("two", b"two"), ("one", b"one"),
                       ("three", b"3"), ("three", b"three")]


def test_unknown_topic_alias_ends_the_connection():
    with Client() as client:
        client.ok()
        client.paho.publish("", b"x", qos=0, properties=publish_properties(TopicAlias=3))
        assert client.ended() in (0x82, 0x94)


def test_outbound_topic_alias_stays_within_the_maximum():
    """paho leaves the mapping of aliases to its user."""
    topic = unique("out/")
    with Client() as sub, Client() as pub:
        sub.ok(properties=connect_properties(TopicAliasMaximum=3)).subscribe(f"{topic}/#", 0)
        pub.ok()
        known = {}
        for n in range(40):
            pub.publish(f"{topic}/{n % 8}", str(n), 1)
            message = sub.message()
            alias = getattr(message.properties, "TopicAlias", None)
            assert alias is None or 1 <= alias <= 3
            name = message.topic
            if alias is not None:
                if name:
                    known[alias] = name
                name = known[alias]
            assert name == f"{topic}/{n % 8}" and message.payload == str(n).encode()


def test_receive_maximum_bounds_what_is_in_flight():
    topic = unique("rm/")
    with Client() as sub, Client() as pub:
        sub.paho.manual_ack_set(True)
        sub.ok(properties=connect_properties(ReceiveMaximum=3)).subscribe(topic, 1)
        pub.ok()
        for n in range(10):
            pub.publish(topic, str(n), 1)
        held = [sub.message() for _ in range(3)]
        # A round trip after the publishes: the fourth message would have come before SUBACK.
        sub.subscribe(unique("sync/"))
        with pytest.raises(queue.Empty):
            sub.messages.get(timeout=0.3)
        seen = [m.payload for m in held]
        while len(seen) < 10:
            message = held.pop(0)
            sub.paho.ack(message.mid, message.qos)
            held.append(sub.message())
            seen.append(held[-1].payload)
        assert seen == [str(n).encode() for n in range(10)]


def test_maximum_packet_size_of_the_client_is_respected():
    topic = unique("mps/")
    with Client() as sub, Client() as pub:
        sub.ok(properties=connect_properties(MaximumPacketSize=200)).subscribe(topic, 1)
        pub.ok()
        pub.publish(topic, b"x" * 500, 1)
        pub.publish(topic, b"small", 1)
        assert sub.message().payload == b"small"


def test_no_match_is_told():
    with Client() as client:
        client.ok()
        codes = queue.Queue()
        client.paho.on_publish = lambda _c, _u, _m, code, _p: codes.put(code)
        client.publish(unique("nobody/"), b"x", 1)
        assert codes.get(timeout=WAIT).value in (0x00, 0x10)


def test_connack_announces_limits():
    with Client() as client:
        _, code, properties = client.connect()
        assert not code.is_failure
        names = ("MaximumQoS", "RetainAvailable", "WildcardSubscriptionAvailable",
                 "SubscriptionIdentifierAvailable", "SharedSubscriptionAvailable")
        for name in names:  # absent means the highest, which is this server's default
            assert getattr(properties, name, 1) == 1


def test_unknown_authentication_method_is_refused():
    client = Client()
    _, code, _ = client.connect(properties=connect_properties(AuthenticationMethod="none-such"))
    assert code.value in (0x8C, 0x87)
    client.close()


@pytest.mark.parametrize("filter", ["a/#/b", "a#", "+a/b", "$share/g", "$share//x", "$share/a+/x"])
def test_malformed_filters_end_the_connection(filter):
    with Client() as client:
        client.ok()
        # paho checks filters too: past its check the packet is made by hand.
        client.paho._filter_wildcard_len_check = lambda _: 0
        client.paho.subscribe(filter, 0)
        assert client.ended() == 0x81
        assert client.acks.empty()


# Shared subscriptions.


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("version", ["v311", "v5"])
def test_shared_group_gets_each_message_once(members, version):
    topic, group = unique("share/"), unique("g")
    clients = [Client(V311 if version == "v311" else 5) for _ in range(members)]
    try:
        for client in clients:
            client.ok().subscribe(f"$share/{group}/{topic}", 1)
        with Client() as pub, Client() as plain:
            plain.ok().subscribe(topic, 1)
            pub.ok()
            count = 60
            for n in range(count):
                pub.publish(topic, str(n), 1)
            assert plain.payloads(count) == [str(n).encode() for n in range(count)]
            seen = collections.Counter()
            shares = []
            for client in clients:
                # A mark of its own shows that all before it has come.
                mark = unique("mark")
                client.subscribe(mark, 1)
                pub.publish(mark, b"end", 1)
                share = 0
                while (message := client.message()).topic != mark:
                    seen[message.payload] += 1
                    share += 1
                shares.append(share)
            assert seen == collections.Counter(str(n).encode() for n in range(count))
            assert all(share == count // members for share in shares), f"not in turn: {shares}"
    finally:
        for client in clients:
            client.close()


def test_two_groups_and_a_plain_subscriber_each_get_a_copy():
    topic = unique("groups/")
    with Client() as one, Client() as two, Client() as pub:
        one.ok().subscribe(f"$share/{unique('g')}/{topic}", 0)
        two.ok().subscribe(f"$share/{unique('g')}/{topic}", 2)
        pub.ok().publish(topic, b"x", 2)
        assert one.message().qos == 0
        assert two.message().qos == 2


def test_no_local_on_a_shared_subscription_is_a_protocol_error():
    with Client() as client:
        client.ok()
        from paho.mqtt.subscribeoptions import SubscribeOptions
        client.paho.subscribe("$share/g/t", options=SubscribeOptions(qos=1, noLocal=True))
        assert client.ended() == 0x82


def test_a_leaving_member_hands_on_what_it_did_not_acknowledge():
    topic, group = unique("redo/"), unique("g")
    with Client() as pub, Client() as second:
        first = Client()
        first.paho.manual_ack_set(True)
        first.ok().subscribe(f"$share/{group}/{topic}", 1)
        pub.ok()
        for n in range(5):
            pub.publish(topic, str(n), 1)
        assert first.payloads(5) == [str(n).encode() for n in range(5)]
        second.ok().subscribe(f"$share/{group}/{topic}", 1)
        first.drop()
        assert sorted(second.payloads(5)) == [str(n).encode() for n in range(5)]
