"""Device shadows: paho as a device with the flow that AWS IoT documents for its own, grpcio as the backend."""
import json

import pytest

from gw import Client, V5, VERSIONS, connect_properties, unique
from test_grpc import api  # noqa: F401, a fixture

PREFIX = "$gateway/devices"


class Shadow:
    """What firmware for AWS IoT does with one of its shadows."""

    def __init__(self, client, name=""):
        self.client = client
        self.base = f"{PREFIX}/{client.client_id}/shadow" + (f"/name/{name}" if name else "")

    def listen(self, qos=1):
        for answer in ("update/accepted", "update/rejected", "update/delta", "get/accepted", "get/rejected", "delete/accepted"):
            assert self.client.subscribe(f"{self.base}/{answer}", qos) == [qos]

    def ask(self, operation, document=None, qos=1):
        self.client.publish(f"{self.base}/{operation}", b"" if document is None else json.dumps(document), qos)

    def answer(self):
        """The next answer: what is behind the shadow's topic, and the document."""
        message = self.client.message()
        assert message.topic.startswith(self.base + "/") and not message.retain
        document = json.loads(message.payload)
        assert isinstance(document["timestamp"], int)
        return message.topic[len(self.base) + 1:], document


def desire(api, device, desired, name="", **fields):
    request = api.shadows.UpdateShadowRequest(device_id=device, name=name, desired=json.dumps(desired), **fields)
    return api.shadows_grpc.ShadowsStub(api.channel).UpdateShadow(request).shadow


@pytest.mark.parametrize("version", ["v311", "v5"])
@pytest.mark.parametrize("name", ["", "config"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_device_starts_reports_and_follows_what_is_desired(api, version, name, qos):  # noqa: F811
    with Client(VERSIONS[version]) as client:
        shadow = Shadow(client.ok(), name)
        shadow.listen()
        # It starts: nobody has made its shadow.
        shadow.ask("get", {"clientToken": "start"}, qos)
        topic, document = shadow.answer()
        assert (topic, document["code"], document["clientToken"]) == ("get/rejected", 404, "start")
        shadow.ask("update", {"state": {"reported": {"led": "off", "levels": [1, 2], "wifi": {"ssid": "x", "rssi": -60}}}}, qos)
        topic, document = shadow.answer()
        assert topic == "update/accepted" and document["version"] == 1
        assert "timestamp" in document["metadata"]["reported"]["wifi"]["rssi"]
        # Somebody wants something else.
        made = desire(api, client.client_id, {"led": "on", "wifi": {"ssid": "y"}}, name)
        assert made.version == 2 and json.loads(made.delta) == {"led": "on", "wifi": {"ssid": "y"}}
        assert shadow.answer()[0] == "update/accepted"
        topic, delta = shadow.answer()
        assert topic == "update/delta" and delta["version"] == 2
        assert delta["state"] == {"led": "on", "wifi": {"ssid": "y"}}
        # The device does a part of it, then the rest.
        shadow.ask("update", {"state": {"reported": {"led": delta["state"]["led"]}}, "version": 2}, qos)
        assert shadow.answer()[0] == "update/accepted"
        assert shadow.answer()[1]["state"] == {"wifi": {"ssid": "y"}}
        shadow.ask("update", {"state": {"reported": {"wifi": {"ssid": "y"}}, "desired": None}, "version": 2}, qos)
        topic, document = shadow.answer()
        assert (topic, document["code"]) == ("update/rejected", 409)
        shadow.ask("update", {"state": {"reported": {"wifi": {"ssid": "y", "rssi": None}}, "desired": None}, "version": 3}, qos)
        assert shadow.answer()[0] == "update/accepted"
        shadow.ask("get", qos=qos)
        topic, document = shadow.answer()
        assert topic == "get/accepted" and document["version"] == 4
        assert document["state"] == {"reported": {"led": "on", "levels": [1, 2], "wifi": {"ssid": "y"}}}
        shadow.ask("delete", {}, qos)
        assert shadow.answer()[0] == "delete/accepted"
        shadow.ask("get", qos=qos)
        assert shadow.answer()[1]["code"] == 404
        shadow.ask("update", {"state": {"reported": {}}}, qos)
        assert shadow.answer()[1]["version"] > 4, "versions never go back"


def test_what_was_desired_while_a_device_was_away_waits_for_it(api):  # noqa: F811
    name = unique("away")
    keep = {"properties": connect_properties(SessionExpiryInterval=600)}
    with Client(V5, client_id=name, clean=False) as client:
        Shadow(client.ok(**keep)).listen()
    desire(api, name, {"n": 1})
    desire(api, name, {"n": 2})
    with Client(V5, client_id=name, clean=False) as client:
        present, code, _ = client.connect(**keep)
        assert present and not code.is_failure
        shadow = Shadow(client)
        answers = [shadow.answer() for _ in range(4)]
        deltas = [document for topic, document in answers if topic == "update/delta"]
        assert [(delta["version"], delta["state"]) for delta in deltas] == [(1, {"n": 1}), (2, {"n": 2})]


def test_a_device_reaches_no_other_shadow(api):  # noqa: F811
    with Client(V5) as client, Client(V5) as other:
        client.ok(), other.ok()
        for reach in (f"{PREFIX}/{other.client_id}/shadow/#", f"{PREFIX}/+/shadow/update/accepted", f"{PREFIX}/#"):
            assert client.subscribe(reach, 1) == [0x87]
        Shadow(other).listen()
        client.publish(f"{PREFIX}/{other.client_id}/shadow/update", json.dumps({"state": {"reported": {"a": 1}}}), 1)
        Shadow(other).ask("get")
        assert Shadow(other).answer()[1]["code"] == 404
