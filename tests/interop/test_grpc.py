"""Python grpcio as the backend and paho as the device. Stubs are generated here from proto/."""
import importlib
import os
import pathlib
import queue
import sys
import tempfile
import threading
import time
from datetime import timedelta

import grpc
import pytest
from grpc_tools import protoc

from gw import CA, Client, HOST, PORTS, VERSIONS, WAIT, connect_properties, publish_properties, unique

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"


def generate():
    """Generates the stubs into a temporary directory and imports them."""
    out = tempfile.mkdtemp(prefix="stubs")
    files = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    include = os.path.join(os.path.dirname(protoc.__file__), "_proto")
    code = protoc.main(["protoc", f"-I{PROTO}", f"-I{include}", f"--python_out={out}", f"--grpc_python_out={out}", *files])
    assert code == 0, "grpc_tools.protoc failed"
    sys.path.insert(0, out)
    modules = {}
    for file in files:
        module = file[:-len(".proto")].replace("/", ".")
        name = module.rsplit(".", 1)[-1]
        modules[name] = importlib.import_module(module + "_pb2")
        modules[name + "_grpc"] = importlib.import_module(module + "_pb2_grpc")
    return modules


class Api:
    def __init__(self):
        self.__dict__.update(generate())
        credentials = grpc.ssl_channel_credentials(pathlib.Path(CA).read_bytes())
        self.channel = grpc.secure_channel(f"{HOST}:{PORTS['grpc']}", credentials)
        grpc.channel_ready_future(self.channel).result(timeout=WAIT)
        self.publish = self.publisher_grpc.PublisherStub(self.channel)
        self.subscribe = self.subscriber_grpc.SubscriberStub(self.channel)
        self.latest = self.state_grpc.StateStub(self.channel)
        self.manage = self.devices_grpc.DevicesStub(self.channel)
        self.watch = self.events_grpc.EventsStub(self.channel)
        self.secure = self.security_grpc.SecurityStub(self.channel)
        self.precedent = self.rpcserver_grpc.PublishedPacketServiceStub(self.channel)


@pytest.fixture(scope="module")
def api():
    api = Api()
    yield api
    api.channel.close()


class Stream:
    """A server stream read by a thread; items in order."""

    def __init__(self, call, items):
        self.call, self.queue = call, queue.Queue()

        def read():
            try:
                for response in call:
                    for item in items(response):
                        self.queue.put(item)
            except grpc.RpcError as error:
                self.queue.put(error)

        threading.Thread(target=read, daemon=True).start()

    def next(self, timeout=WAIT):
        item = self.queue.get(timeout=timeout)
        if isinstance(item, grpc.RpcError):
            raise item
        return item

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.call.cancel()


def messages(api, **fields):
    """A Subscribe stream that is known to be registered: the first heartbeat has come."""
    stream = Stream(api.subscribe.Subscribe(api.subscriber.SubscribeRequest(heartbeat_interval=timedelta(milliseconds=100), **fields)),
                    lambda response: response.items)
    assert stream.next().WhichOneof("item") == "heartbeat"
    return stream


def next_message(stream):
    while True:
        item = stream.next()
        kind = item.WhichOneof("item")
        assert kind != "gap", "a stream this small lost messages"
        if kind == "message":
            return item.message


def code_of(call):
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transport", ["tcp", "tls", "ws"])
def test_device_to_stream(api, transport, version):
    topic = unique("dev/")
    with Client(VERSIONS[version], transport) as device:
        device.ok()
        with messages(api, topic_filters=[topic + "/#"]) as stream:
            for qos in (0, 1, 2):
                device.publish(f"{topic}/{qos}", f"at {qos}".encode(), qos)
                message = next_message(stream)
                assert (message.device_id, message.topic, message.payload) == (
                    device.client_id, f"{topic}/{qos}", f"at {qos}".encode())
                assert message.qos == qos + 1 and message.HasField("receive_time")
                assert message.origin == api.common.ORIGIN_DEVICE


def test_stream_carries_the_properties_of_5_0(api):
    topic = unique("dev/")
    with Client() as device:
        device.ok()
        with messages(api, device_ids=[device.client_id]) as stream:
            device.publish(topic, b"x", 1, properties=publish_properties(
                UserProperty=[("b", "1"), ("a", "2")], ContentType="text/plain", ResponseTopic="back",
                CorrelationData=b"\x00\xff", PayloadFormatIndicator=1, MessageExpiryInterval=77))
            message = next_message(stream)
            properties = message.properties
            assert [(p.name, p.value) for p in properties.user_properties] == [("b", "1"), ("a", "2")]
            assert (properties.content_type, properties.response_topic, properties.correlation_data) == (
                "text/plain", "back", b"\x00\xff")
            assert properties.payload_format == api.common.PAYLOAD_FORMAT_TEXT
            assert message.expiry_seconds == 77


def test_stream_filters(api):
    topic, prefix = unique("dev/"), unique("pre")
    with Client(client_id=prefix + "a") as inside, Client() as outside:
        inside.ok()
        outside.ok()
        with messages(api, device_id_prefixes=[prefix], exclude_topic_filters=["+/+/secret"]) as stream:
            outside.publish(topic, b"other device", 1)
            inside.publish(topic + "/secret", b"excluded", 1)
            inside.publish(topic, b"wanted", 1)
            assert next_message(stream).payload == b"wanted"


def test_streams_do_not_steal_from_each_other(api):
    topic = unique("dev/")
    with Client() as device:
        device.ok()
        with messages(api, topic_filters=[topic]) as one, messages(api, topic_filters=[topic]) as two:
            for n in range(20):
                device.publish(topic, str(n), 1)
            for stream in (one, two):
                assert [next_message(stream).payload for _ in range(20)] == [str(n).encode() for n in range(20)]


@pytest.mark.parametrize("version", VERSIONS)
def test_publish_to_a_device_without_subscription_is_acknowledged(api, version):
    with Client(VERSIONS[version]) as device:
        device.ok()
        for qos in (1, 2, 3):
            response = api.publish.Publish(api.publisher.PublishRequest(
                device_id=device.client_id, topic="any/topic", payload=b"for you", qos=qos,
                wait=api.publisher.WAIT_ACKED), timeout=WAIT)
            message = device.message()
            assert (message.topic, message.payload, message.qos) == ("any/topic", b"for you", qos - 1)
            expected = api.publisher.OUTCOME_SENT if qos == 1 else api.publisher.OUTCOME_ACKED
            assert response.outcome in (expected, api.publisher.OUTCOME_ACKED)
            assert response.matched == 1 and response.sent == 1


@pytest.mark.parametrize("wait", ["WAIT_ACCEPTED", "WAIT_SENT", "WAIT_ACKED"])
def test_publish_by_topic_reaches_subscribers(api, wait):
    topic = unique("cmd/")
    with Client() as one, Client() as two:
        one.ok().subscribe(topic, 1)
        two.ok().subscribe(topic, 2)
        response = api.publish.Publish(api.publisher.PublishRequest(
            topic=topic, payload=b"all", wait=getattr(api.publisher, wait)), timeout=WAIT)
        assert response.matched == 2 and response.sent == 2
        assert one.message().payload == two.message().payload == b"all"


def test_publish_carries_properties_to_the_device(api):
    topic = unique("cmd/")
    with Client() as device:
        device.ok()
        api.publish.Publish(api.publisher.PublishRequest(
            device_id=device.client_id, topic=topic, payload=b"x", expiry_seconds=500,
            properties=api.common.Properties(
                content_type="text/plain", response_topic="back", correlation_data=b"\x01",
                user_properties=[api.common.UserProperty(name="b", value="1"),
                                 api.common.UserProperty(name="a", value="2")])), timeout=WAIT)
        properties = device.message().properties
        assert properties.UserProperty == [("b", "1"), ("a", "2")]
        assert (properties.ContentType, properties.ResponseTopic, properties.CorrelationData) == (
            "text/plain", "back", b"\x01")
        assert properties.MessageExpiryInterval <= 500


def test_publish_to_an_offline_device(api):
    client_id, topic = unique("s"), unique("cmd/")
    lasting = connect_properties(SessionExpiryInterval=300)
    with Client(client_id=client_id, clean=False) as device:
        device.ok(properties=lasting)
    # The client has left; the gateway has still to see it.
    deadline = time.monotonic() + WAIT
    while api.manage.GetDevice(api.devices.GetDeviceRequest(device_id=client_id), timeout=WAIT).device.online:
        assert time.monotonic() < deadline, "the gateway never saw the device leave"
        time.sleep(0.01)
    request = dict(device_id=client_id, topic=topic, payload=b"later")
    response = api.publish.Publish(api.publisher.PublishRequest(**request), timeout=WAIT)
    assert response.outcome == api.publisher.OUTCOME_QUEUED and response.queued == 1
    response = api.publish.Publish(api.publisher.PublishRequest(
        **request, offline=api.publisher.OFFLINE_DROP), timeout=WAIT)
    assert response.outcome == api.publisher.OUTCOME_DROPPED
    assert code_of(lambda: api.publish.Publish(api.publisher.PublishRequest(
        **request, offline=api.publisher.OFFLINE_FAIL), timeout=WAIT)) == grpc.StatusCode.FAILED_PRECONDITION
    with Client(client_id=client_id, clean=False) as device:
        device.ok(properties=lasting)
        assert device.message().payload == b"later"
        device.subscribe("mark", 1)
        device.nothing_before("mark")


def test_errors_have_their_status(api):
    publish = api.publish.Publish
    request = api.publisher.PublishRequest
    cases = [
        (request(topic="a/#"), grpc.StatusCode.INVALID_ARGUMENT),
        (request(topic=""), grpc.StatusCode.INVALID_ARGUMENT),
        (request(topic="t", device_id=unique("none")), grpc.StatusCode.NOT_FOUND),
        (request(topic="t", wait=api.publisher.WAIT_DURABLE, qos=api.common.QOS_AT_MOST_ONCE), grpc.StatusCode.INVALID_ARGUMENT),
    ]
    for message, code in cases:
        assert code_of(lambda: publish(message, timeout=WAIT)) == code
    assert publish(request(topic=unique("nobody/")), timeout=WAIT).outcome == api.publisher.OUTCOME_NO_MATCH
    assert code_of(lambda: api.latest.GetLatest(
        api.state.GetLatestRequest(topic=unique("never/")), timeout=WAIT)) == grpc.StatusCode.NOT_FOUND


def test_batch_has_a_result_for_each_message(api):
    topic = unique("batch/")
    with Client() as device:
        device.ok().subscribe(topic, 1)
        requests = [api.publisher.PublishRequest(topic=topic, payload=str(n).encode()) for n in range(50)]
        requests.insert(25, api.publisher.PublishRequest(topic="bad/#"))
        results = api.publish.PublishBatch(
            api.publisher.PublishBatchRequest(requests=requests), timeout=WAIT).results
        assert [r.WhichOneof("result") for r in results] == ["response"] * 25 + ["error"] + ["response"] * 25
        assert device.payloads(50) == [str(n).encode() for n in range(50)]


def test_publish_stream(api):
    topic, count = unique("stream/"), 500
    with Client() as device:
        device.ok().subscribe(topic, 1)

        def frames():
            for start in range(0, count, 50):
                yield api.publisher.PublishStreamRequest(requests=[
                    api.publisher.PublishRequest(topic=topic, payload=str(n).encode())
                    for n in range(start, start + 50)])

        covered = 0
        for response in api.publish.PublishStream(frames(), timeout=WAIT):
            assert response.first_sequence == covered + 1
            covered += response.count
        assert covered == count
        assert device.payloads(count) == [str(n).encode() for n in range(count)]


def test_latest_value(api):
    topic = unique("latest/")
    with Client() as device, Client() as other:
        other.ok().publish(topic, b"older", 1)
        device.ok().publish(topic, b"one", 1, properties=publish_properties(ContentType="text/plain"))
        device.publish(topic, b"two", 2, properties=publish_properties(ContentType="text/plain"))
        value = api.latest.GetLatest(
            api.state.GetLatestRequest(topic=topic, device_id=device.client_id), timeout=WAIT).value
        assert (value.payload, value.qos, value.properties.content_type) == (b"two", 3, "text/plain")
        value = api.latest.GetLatest(api.state.GetLatestRequest(topic=topic), timeout=WAIT).value
        assert (value.device_id, value.payload) == (device.client_id, b"two")
        entries = api.latest.BatchGetLatest(api.state.BatchGetLatestRequest(requests=[
            api.state.GetLatestRequest(topic=topic, device_id=other.client_id),
            api.state.GetLatestRequest(topic=unique("never/")),
        ]), timeout=WAIT).entries
        assert entries[0].value.payload == b"older" and not entries[1].HasField("value")
        values = api.latest.ListLatest(
            api.state.ListLatestRequest(device_ids=[device.client_id, other.client_id]), timeout=WAIT).values
        assert sorted(v.payload for v in values) == [b"older", b"two"]


def test_backend_publishes_are_not_device_values(api):
    topic = unique("latest/")
    with Client() as device:
        device.ok()
        api.publish.Publish(api.publisher.PublishRequest(
            device_id=device.client_id, topic=topic, payload=b"command", wait=api.publisher.WAIT_ACKED), timeout=WAIT)
        assert device.message().payload == b"command"
        assert code_of(lambda: api.latest.GetLatest(
            api.state.GetLatestRequest(topic=topic), timeout=WAIT)) == grpc.StatusCode.NOT_FOUND


def test_watch_latest_gives_a_snapshot_then_changes(api):
    topic = unique("watch/")
    with Client() as device:
        device.ok().publish(topic, b"before", 1)
        call = api.latest.WatchLatest(api.state.WatchLatestRequest(device_ids=[device.client_id]))
        with Stream(call, lambda response: response.items) as stream:
            assert stream.next().value.payload == b"before"
            assert stream.next().WhichOneof("item") == "snapshot_end"
            device.publish(topic, b"after", 1)
            assert stream.next().value.payload == b"after"


def test_retained_messages(api):
    topic = unique("ret/")
    request = api.state
    api.latest.SetRetained(request.SetRetainedRequest(topic=topic, payload=b"kept"), timeout=WAIT)
    assert api.latest.GetRetained(
        request.GetRetainedRequest(topic=topic), timeout=WAIT).message.payload == b"kept"
    found = api.latest.ListRetained(
        request.ListRetainedRequest(topic_filter=topic + "/#"), timeout=WAIT).messages
    assert [m.topic for m in found] == [topic]
    with Client() as device:
        device.ok().subscribe(topic, 1)
        message = device.message()
        assert (message.payload, message.retain) == (b"kept", True)
    assert api.latest.DeleteRetained(request.DeleteRetainedRequest(topic=topic), timeout=WAIT).count == 1
    assert code_of(lambda: api.latest.GetRetained(
        request.GetRetainedRequest(topic=topic), timeout=WAIT)) == grpc.StatusCode.NOT_FOUND


def test_devices_are_listed_shown_and_disconnected(api):
    device = Client()
    device.ok().subscribe("some/filter", 1)
    found = api.manage.GetDevice(api.devices.GetDeviceRequest(device_id=device.client_id), timeout=WAIT).device
    assert found.online and found.connection.protocol_version == api.devices.PROTOCOL_VERSION_V5_0
    assert [(s.topic_filter, s.qos) for s in found.subscriptions] == [("some/filter", 2)]
    listed, token = [], ""
    while True:
        page = api.manage.ListDevices(api.devices.ListDevicesRequest(page_size=100, page_token=token), timeout=WAIT)
        listed += [d.device_id for d in page.devices]
        token = page.next_page_token
        if not token:
            break
    assert device.client_id in listed
    api.manage.DisconnectDevice(api.devices.DisconnectDeviceRequest(device_id=device.client_id), timeout=WAIT)
    assert device.ended() == 0x98
    device.close()
    assert code_of(lambda: api.manage.GetDevice(
        api.devices.GetDeviceRequest(device_id=unique("none")), timeout=WAIT)) == grpc.StatusCode.NOT_FOUND


def test_events_are_streamed(api):
    client_id = unique("ev")
    call = api.watch.WatchEvents(api.events.WatchEventsRequest(device_ids=[client_id, client_id + "probe"]))
    with Stream(call, lambda response: response.items) as stream:
        # WatchEvents has no heartbeat: connect a probe until its event shows that the stream is registered.
        for _ in range(100):
            with Client(client_id=client_id + "probe") as probe:
                probe.ok()
            try:
                stream.next(timeout=0.2)
                break
            except queue.Empty:
                continue
        with Client(client_id=client_id) as device:
            device.ok().subscribe("some/filter", 1)
        kinds = []
        while "disconnected" not in kinds:
            event = stream.next().event
            if event.device_id == client_id:
                kinds.append(event.WhichOneof("detail"))
        assert kinds[:2] == ["connected", "subscribed"]


def test_files_are_read_again(api):
    parts = {part.name: part for part in api.secure.Reload(api.security.ReloadRequest(), timeout=WAIT).parts}
    assert parts["certificates"].summary and not parts["certificates"].problems
    assert not api.secure.ListTokens(api.security.ListTokensRequest(), timeout=WAIT).tokens
    assert code_of(lambda: api.secure.RevokeToken(
        api.security.RevokeTokenRequest(token_id="none"), timeout=WAIT)) == grpc.StatusCode.FAILED_PRECONDITION


def test_precedent_service(api):
    topic = unique("prec/")
    service = api.rpcserver
    with Client() as device:
        device.ok()
        call = api.precedent.StreamPublishedPayload(service.PublishedPacketRequest(device_id=device.client_id))
        with Stream(call, lambda response: [response]) as stream:
            # No heartbeat here either: publish until the first comes, then go on from a mark.
            for n in range(100):
                device.publish(topic, b"probe", 1)
                try:
                    first = stream.next(timeout=0.2)
                    break
                except queue.Empty:
                    continue
            assert (first.device_id, first.topic, first.payload) == (device.client_id, topic, b"probe")
        response = api.precedent.PublishPayloadToDevice(
            service.PublishRequest(device_id=device.client_id, topic="any/topic", payload=b"hi"), timeout=WAIT)
        assert response.code == "Success"
        message = device.message()
        assert (message.topic, message.payload) == ("any/topic", b"hi")
    assert code_of(lambda: api.precedent.PublishPayloadToDevice(
        service.PublishRequest(device_id=unique("none"), topic="t", payload=b"x"),
        timeout=WAIT)) == grpc.StatusCode.NOT_FOUND


def test_health(api):
    health = pytest.importorskip("grpc_health.v1.health_pb2")
    stub = importlib.import_module("grpc_health.v1.health_pb2_grpc").HealthStub(api.channel)
    for service in ("", "gateway.v1.Publisher"):
        answer = stub.Check(health.HealthCheckRequest(service=service), timeout=WAIT)
        assert answer.status == health.HealthCheckResponse.SERVING


def test_a_generic_client_uses_reflection(api):
    """Knows nothing but the address: finds the services, builds a request, calls it."""
    reflection = pytest.importorskip("grpc_reflection.v1alpha.proto_reflection_descriptor_database")
    from google.protobuf import descriptor_pool, message_factory

    database = reflection.ProtoReflectionDescriptorDatabase(api.channel)
    services = set(database.get_services())
    assert {"gateway.v1.Publisher", "gateway.v1.Subscriber", "gateway.v1.State", "gateway.v1.Devices",
            "gateway.v1.Events", "rpcserver.PublishedPacketService", "grpc.health.v1.Health"} <= services
    pool = descriptor_pool.DescriptorPool(database)
    method = pool.FindServiceByName("gateway.v1.Publisher").FindMethodByName("Publish")
    request = message_factory.GetMessageClass(method.input_type)(topic=unique("reflected/"), payload=b"x")
    response = api.channel.unary_unary(
        "/gateway.v1.Publisher/Publish",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )(request, timeout=WAIT)
    assert response.outcome == 4  # OUTCOME_NO_MATCH
    # With what errors carry, so that a generic client can show it.
    details = {"google.rpc.ErrorInfo", "google.rpc.BadRequest", "google.rpc.RetryInfo"}
    assert {pool.FindMessageTypeByName(name).full_name for name in details} == details


def test_requests_and_answers_may_be_compressed(api):
    """The failure: a backend that compresses is refused (UNIMPLEMENTED), or gets what it cannot read."""
    zipped = {"timeout": WAIT, "compression": grpc.Compression.Gzip}
    request = api.publisher.PublishRequest(topic=unique("zipped/"), payload=b"z" * 100_000, retain=True)
    assert api.publish.Publish(request, **zipped).outcome == api.publisher.OUTCOME_NO_MATCH
    kept = api.latest.GetRetained(api.state.GetRetainedRequest(topic=request.topic), **zipped)
    assert kept.message.payload == request.payload
    api.latest.DeleteRetained(api.state.DeleteRetainedRequest(topic=request.topic), **zipped)
