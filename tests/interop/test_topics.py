"""Matching of topic filters: wildcards, `$` topics, empty levels, several filters in one packet."""
import pytest

from gw import Client, VERSIONS, unique

# filter, topics that match, topics that do not; `~` stands for a prefix of the test's own.
CASES = [
    ("~/a/b", ["~/a/b"], ["~/a", "~/a/b/", "~/a/B", "~//a/b"]),
    ("~/+/b", ["~/a/b", "~//b"], ["~/b", "~/a/b/c"]),
    ("~/a/+", ["~/a/b", "~/a/"], ["~/a", "~/a/b/c"]),
    ("~/+/+", ["~/a/b", "~//"], ["~/a", "~/a/b/c"]),
    ("~/a/#", ["~/a", "~/a/", "~/a/b", "~/a/b/c"], ["~/b", "~/ab"]),
    ("~/+/#", ["~/a", "~/a/b/c", "~/"], ["~"]),
    ("~//+", ["~//a", "~//"], ["~/a", "~"]),
    ("~/+/b/#", ["~/a/b", "~/a/b/c/d"], ["~/a/c/b"]),
    ("~/\u00e9\u4e2d\U0001f600/+", ["~/\u00e9\u4e2d\U0001f600/x"], ["~/e/x"]),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_filters_match(case, version):
    pattern, matching, other = CASES[case]
    prefix = unique("m")
    mark = prefix + "-mark"
    with Client(VERSIONS[version]) as client:
        client.ok().subscribe_many([(pattern.replace("~", prefix), 0), (mark, 1)])
        for topic in matching:
            topic = topic.replace("~", prefix)
            client.publish(topic, b"yes", 1)
            assert client.message().topic == topic
        for topic in other:
            client.publish(topic.replace("~", prefix), b"no", 1)
        client.nothing_before(mark)


def test_wildcards_never_match_dollar_topics():
    mark = unique("mark")
    with Client() as client:
        client.ok().subscribe_many([("+/broker/version", 0), (mark, 1)])
        client.nothing_before(mark)
        client.subscribe("$SYS/broker/version")
        message = client.message()
        assert message.topic == "$SYS/broker/version" and message.payload


@pytest.mark.parametrize("version", VERSIONS)
def test_many_filters_in_one_packet(version):
    prefix = unique("many/")
    with Client(VERSIONS[version]) as client:
        client.ok()
        pairs = [(f"{prefix}/{n}", n % 3) for n in range(40)]
        assert client.subscribe_many(pairs) == [qos for _, qos in pairs]
        for topic, qos in pairs:
            client.publish(topic, b"x", 2)
            message = client.message()
            assert (message.topic, message.qos) == (topic, qos)


@pytest.mark.parametrize("version", VERSIONS)
def test_unsubscribe_stops_delivery(version):
    topic, mark = unique("un/"), unique("mark")
    with Client(VERSIONS[version]) as client:
        client.ok().subscribe_many([(topic, 1), (mark, 1)])
        client.publish(topic, b"one", 1)
        assert client.message().payload == b"one"
        codes = client.unsubscribe(topic)
        again = client.unsubscribe(topic)
        if version == "v5":
            assert (codes, again) == ([0x00], [0x11])
        client.publish(topic, b"two", 1)
        client.nothing_before(mark)


@pytest.mark.parametrize("version", VERSIONS)
def test_overlapping_subscriptions_deliver_one_copy(version):
    prefix = unique("over")
    with Client(VERSIONS[version]) as client:
        client.ok().subscribe_many([(f"{prefix}/#", 0), (f"{prefix}/+", 2), (f"{prefix}/a", 1)])
        client.publish(f"{prefix}/a", b"once", 2)
        message = client.message()
        assert (message.payload, message.qos) == (b"once", 2)
        client.nothing_before(f"{prefix}/a")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_new_subscription_replaces_the_old(version):
    topic = unique("replace/")
    with Client(VERSIONS[version]) as client:
        client.ok()
        assert client.subscribe(topic, 2) == [2]
        assert client.subscribe(topic, 0) == [0]
        client.publish(topic, b"x", 2)
        assert client.message().qos == 0
        assert client.subscribe(topic, 1) == [1]
        client.nothing_before(topic)
