"""The HTTP API as a client library sees it, and its OpenAPI file as a validator does."""
import base64
import json

import gw
import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator


@pytest.fixture
def api():
    with httpx.Client(base_url=f"http://localhost:{gw.PORTS['http']}", timeout=gw.WAIT) as client:
        yield client


@pytest.fixture
def device():
    client = gw.Client()
    client.connect()
    yield client
    client.close()


def ok(response):
    assert response.status_code == 200, response.text
    return response.json()


def test_openapi_is_valid_and_names_each_operation_once(api):
    document = ok(api.get("/openapi.json"))
    errors = [f"{list(error.absolute_path)}: {error.message}" for error in OpenAPIV31SpecValidator(document).iter_errors()]
    assert not errors
    operations = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(operations) == len(set(operations)) > 45


def test_each_path_without_a_body_is_answered_as_the_file_says(api):
    """Whatever a path answers to nonsense, it is JSON with a status of its own making."""
    document = ok(api.get("/openapi.json"))
    for path, verbs in document["paths"].items():
        if path.startswith("/v1/stream/"):
            continue
        for verb, operation in verbs.items():
            names = {p["name"]: "nothing" for p in operation["parameters"] if p["in"] == "path"}
            response = api.request(verb, path.format(**names))
            kind = "application/json" if response.status_code == 200 else "application/problem+json"
            where = f"{verb} {path}: {response.status_code} {response.text}"
            assert response.headers["content-type"] == kind, where
            assert response.status_code < 500 or response.json()["code"] == "UNIMPLEMENTED", where
            if response.status_code != 200:
                assert response.json()["reason"] and response.json()["status"] == response.status_code, where


def test_publish_in_every_form(api, device):
    topic = gw.unique("http/")
    device.subscribe(topic, 2)
    for body, expected in [
        ({"payloadText": "grün"}, "grün".encode()),
        ({"payloadJson": {"a": [1, 2.5]}}, None),
        ({"payload": base64.b64encode(bytes(range(256))).decode()}, bytes(range(256))),
    ]:
        answer = ok(api.post("/v1/publish", json={"topic": topic, "qos": 2, **body}))
        assert answer["outcome"] == "OUTCOME_SENT" and answer["matched"] == 1
        message = device.message()
        if expected is None:
            assert json.loads(message.payload) == {"a": [1, 2.5]}
        else:
            assert message.payload == expected
        assert message.qos == 2
    ok(api.post(f"/v1/topics/{topic}", content=b"\x00\xff", headers={"content-type": "application/cbor"}))
    message = device.message()
    assert message.payload == b"\x00\xff" and message.properties.ContentType == "application/cbor"


def test_a_key_is_good_for_one_message(api, device):
    topic = gw.unique("http/")
    device.subscribe(topic, 1)
    headers = {"idempotency-key": gw.unique()}
    first = ok(api.post(f"/v1/topics/{topic}?wait=accepted", content="1", headers=headers))
    assert ok(api.post(f"/v1/topics/{topic}?wait=accepted", content="1", headers=headers)) == first
    other = api.post(f"/v1/topics/{topic}?wait=accepted", content="2", headers=headers)
    assert other.status_code == 409 and other.json()["reason"] == "IDEMPOTENCY_KEY_REUSED"
    ok(api.post(f"/v1/topics/{topic}", content="end"))
    assert [device.message().payload, device.message().payload] == [b"1", b"end"]


def test_devices_and_latest_come_in_pages(api):
    prefix = gw.unique("page")
    clients = []
    for number in range(5):
        client = gw.Client(client_id=f"{prefix}-{number}")
        client.connect()
        client.publish(f"{prefix}/value", str(number).encode(), 1)
        clients.append(client)
    seen, token = [], ""
    while True:
        page = ok(api.get("/v1/devices", params={"deviceIdPrefix": prefix, "pageSize": 2, "pageToken": token}))
        seen += [device["deviceId"] for device in page["devices"]]
        token = page["nextPageToken"]
        if not token:
            break
    assert sorted(seen) == [f"{prefix}-{number}" for number in range(5)]
    device = ok(api.get(f"/v1/devices/{prefix}-0"))
    assert device["online"] is True and device["connection"]["protocolVersion"] == "PROTOCOL_VERSION_V5_0"
    page = ok(api.get("/v1/latest", params={"topicFilter": f"{prefix}/#", "payload": "json"}))
    assert sorted(value["payloadJson"] for value in page["values"]) == list(range(5))
    assert ok(api.get(f"/v1/devices/{prefix}-3/latest"))["values"][0]["payloadText"] == "3"
    assert api.post(f"/v1/devices/{prefix}-3/disconnect").status_code == 200
    clients[3].ended()
    for client in clients:
        client.close()


def test_a_shadow_is_json_and_its_version_is_held(api):
    device = gw.unique("shadow")
    path = f"/v1/devices/{device}/shadow"
    assert api.get(path).json()["reason"] == "SHADOW_NOT_FOUND"
    big = 12345678901234567
    first = ok(api.patch(path, json={"desired": {"interval": 30, "big": big}, "expectedVersion": 0}))
    assert first["desired"] == {"interval": 30, "big": big} and first["version"] == "1"
    conflict = api.patch(path, json={"desired": {"interval": 31}, "expectedVersion": 0})
    assert conflict.status_code == 409 and conflict.json()["metadata"]["version"] == "1"
    second = ok(api.patch(path, json={"desired": {"interval": None}, "reported": {"on": True}}))
    assert second["desired"] == {"big": big} and second["reported"] == {"on": True}
    assert ok(api.get(f"/v1/devices/{device}/shadows"))["shadows"][0]["deviceId"] == device
    assert ok(api.delete(path))["version"] == "3"


def test_a_command_is_answered_and_one_to_nobody_is_refused(api, device):
    device.subscribe(f"devices/{device.client_id}/commands/+", 1)
    nobody = api.post("/v1/devices/nobody/commands/reboot", content="now")
    assert nobody.status_code == 409 and nobody.json()["reason"] == "DEVICE_OFFLINE"
    late = api.post(f"/v1/devices/{device.client_id}/commands/reboot?timeout=300ms", content="now")
    assert late.status_code == 504, late.text


def test_a_group_is_fetched_and_acknowledged(api, device):
    name, topic = gw.unique("group"), gw.unique("http/")
    ok(api.post("/v1/groups", json={"group": {"name": name, "filter": {"topicFilters": [topic]}}}))
    device.publish(topic, b"kept", 1)
    fetched = ok(api.post(f"/v1/groups/{name}/fetch", json={"memberId": "m", "wait": "10s"}))
    (message,) = fetched["messages"]
    assert message["message"]["payloadText"] == "kept", message
    ok(api.post(f"/v1/groups/{name}/acknowledge", json={"ackIds": [message["ackId"]]}))
    assert not ok(api.post(f"/v1/groups/{name}/fetch", json={"memberId": "m"}))["messages"]
    ok(api.delete(f"/v1/groups/{name}"))


def test_events_of_devices_go_on_where_a_client_stopped(api):
    name = gw.unique("watched")

    def events(headers, wanted):
        with api.stream("GET", "/v1/stream/events", params={"deviceIds": name}, headers=headers) as response:
            assert response.headers["content-type"] == "text/event-stream"
            identifier = None
            for line in response.iter_lines():
                if line.startswith("id: "):
                    identifier = line[4:]
                if line.startswith("data: ") and wanted in line:
                    return identifier
                if wanted == "id" and identifier:
                    return identifier

    place = events({}, "id")
    client = gw.Client(client_id=name)
    client.connect()
    client.close()
    # Both happened while nobody watched.
    assert events({"last-event-id": place}, "\"connected\":")
    assert events({"last-event-id": place}, "\"disconnected\":")
