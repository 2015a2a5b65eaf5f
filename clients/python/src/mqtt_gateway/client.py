"""The client: what backends do most, each as one call. `stubs` has everything else."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from . import v1
from ._calls import HEARTBEAT, OPTIONS, Stream, Token, call, credentials_of, duration
from ._channel import TokenChannel
from .consume import Consumer, Handler
from .errors import GatewayError
from .v1.commands_pb2_grpc import CommandsStub
from .v1.devices_pb2_grpc import DevicesStub
from .v1.events_pb2_grpc import EventsStub
from .v1.groups_pb2_grpc import ConsumerStub, GroupsStub
from .v1.operations_pb2_grpc import OperationsStub
from .v1.publisher_pb2_grpc import PublisherStub
from .v1.security_pb2_grpc import SecurityStub
from .v1.shadows_pb2_grpc import ShadowsStub
from .v1.state_pb2_grpc import StateStub
from .v1.subscriber_pb2_grpc import SubscriberStub

if TYPE_CHECKING:
    # The stubs as they are with a channel of grpc.aio; at run time they are the same classes.
    from .v1.commands_pb2_grpc import CommandsAsyncStub
    from .v1.devices_pb2_grpc import DevicesAsyncStub
    from .v1.events_pb2_grpc import EventsAsyncStub
    from .v1.groups_pb2_grpc import ConsumerAsyncStub, GroupsAsyncStub
    from .v1.operations_pb2_grpc import OperationsAsyncStub
    from .v1.publisher_pb2_grpc import PublisherAsyncStub
    from .v1.security_pb2_grpc import SecurityAsyncStub
    from .v1.shadows_pb2_grpc import ShadowsAsyncStub
    from .v1.state_pb2_grpc import StateAsyncStub
    from .v1.subscriber_pb2_grpc import SubscriberAsyncStub

T = TypeVar("T")

Json = Mapping[str, Any]


class GapReason(str, Enum):
    """Why something is missing from a stream."""

    BUFFER_FULL = "BUFFER_FULL"
    """The reader was too slow."""
    CONFLATED = "CONFLATED"
    """Replaced by newer messages of the same device and topic."""
    TOO_LARGE = "TOO_LARGE"
    """Larger than the stream's buffer."""
    MEMORY = "MEMORY"
    """The gateway's memory budget was used up."""
    RETENTION = "RETENTION"
    """Removed from a group before it was acknowledged."""
    DAMAGED = "DAMAGED"
    """Damaged on the disk."""
    RECONNECTED = "RECONNECTED"
    """The stream's connection was lost, and what came until it was back is missing. The library says this, not the gateway."""
    UNKNOWN = "UNKNOWN"
    """Something else."""


@dataclass(frozen=True)
class Gap:
    """A place in a stream where something is missing."""

    count: int | None
    """How many messages; None where nobody knows."""
    reason: GapReason

    @classmethod
    def of(cls, gap: v1.Gap) -> Gap:
        """The same as the gateway has told it."""
        name = v1.GapReason.Name(gap.reason).removeprefix("GAP_REASON_")
        return cls(gap.count or None, GapReason.__members__.get(name, GapReason.UNKNOWN))

    @classmethod
    def reconnected(cls) -> Gap:
        return cls(None, GapReason.RECONNECTED)


class Stubs:
    """The generated stubs of all services, with asyncio. What they raise, `error_of` makes an error of this library of."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.publisher: PublisherAsyncStub = PublisherStub(channel)
        self.subscriber: SubscriberAsyncStub = SubscriberStub(channel)
        self.groups: GroupsAsyncStub = GroupsStub(channel)
        self.consumer: ConsumerAsyncStub = ConsumerStub(channel)
        self.commands: CommandsAsyncStub = CommandsStub(channel)
        self.shadows: ShadowsAsyncStub = ShadowsStub(channel)
        self.state: StateAsyncStub = StateStub(channel)
        self.devices: DevicesAsyncStub = DevicesStub(channel)
        self.events: EventsAsyncStub = EventsStub(channel)
        self.security: SecurityAsyncStub = SecurityStub(channel)
        self.operations: OperationsAsyncStub = OperationsStub(channel)


def connect(
    address: str,
    *,
    ca: str | bytes | Path | None = None,
    token: Token | None = None,
    certificate: tuple[str | bytes | Path, str | bytes | Path] | None = None,
    plaintext: bool = False,
    timeout: float = 30.0,
) -> Client:
    """A client of the gateway at `address`, `host:port`. The connection is made with the first call, and again when it is lost.

    `ca` is a file with the authorities to believe, or their PEM as bytes; without it those that grpc comes with. `token` is shown
    with each call: text, or a function that is asked each time, from whichever thread. `certificate` is (chain, key) as files or
    PEM. `plaintext` is without TLS. `timeout` is how many seconds calls take at most that say nothing else.
    """
    if plaintext:
        channel = grpc.aio.insecure_channel(address, options=OPTIONS)
    else:
        channel = grpc.aio.secure_channel(address, credentials_of(ca, certificate), options=OPTIONS)
    return Client(channel, token, timeout)


class Client:
    """Made by `connect`. May be used by any number of tasks of one event loop."""

    def __init__(self, channel: grpc.aio.Channel, token: Token | None = None, timeout: float = 30.0) -> None:
        self._channel = channel
        self._token = token
        self._timeout = timeout
        self.stubs = Stubs(cast(grpc.aio.Channel, TokenChannel(channel, token)))
        """The generated stubs: every method there is."""
        self.commands = Commands(self)
        self.latest = Latest(self)
        self.shadows = Shadows(self)
        self.devices = Devices(self)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and every call on it."""
        await self._channel.close()

    async def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        device_id: str | None = None,
        qos: int = 1,
        retain: bool = False,
        wait: v1.Wait.ValueType = v1.WAIT_ACCEPTED,
        offline: v1.Offline.ValueType = v1.OFFLINE_UNSPECIFIED,
        expiry: int | None = None,
        properties: v1.Properties | None = None,
        deliver_at: datetime | timedelta | None = None,
        idempotency_key: str = "",
        timeout: float | None = None,
    ) -> v1.PublishResponse:
        """Publishes, and returns what became of it once it is routed: `outcome` says whether anybody has it.

        With `device_id` it goes to that device alone, on any topic. `expiry` is in seconds. A message without an idempotency key is
        sent once: if the connection is lost meanwhile, nobody knows whether it was published, and this fails.
        """
        request = _message(topic, payload, device_id, qos, retain, wait, offline, expiry, properties, deliver_at)
        request.idempotency_key = idempotency_key
        return await self._publish(request, timeout)

    async def publish_and_wait(
        self,
        topic: str,
        payload: bytes | str = b"",
        *,
        wait: v1.Wait.ValueType = v1.WAIT_ACKED,
        device_id: str | None = None,
        qos: int = 1,
        retain: bool = False,
        offline: v1.Offline.ValueType = v1.OFFLINE_UNSPECIFIED,
        expiry: int | None = None,
        properties: v1.Properties | None = None,
        idempotency_key: str = "",
        timeout: float | None = None,
    ) -> v1.PublishResponse:
        """Publishes once, and waits until every receiver that is online has acknowledged it, or as `wait` says.

        It is tried again over lost connections and restarts of the gateway, always with the same idempotency key, so that it is
        published once. An error has that key: the same call with it goes on waiting, for as long as the gateway remembers it.
        DeadlineExceeded tells the `level` that was reached; after OutcomeLost it must not be sent again.
        """
        request = _message(topic, payload, device_id, qos, retain, wait, offline, expiry, properties, None)
        request.idempotency_key = idempotency_key or uuid.uuid4().hex
        return await self._publish(request, timeout)

    async def _publish(self, request: v1.PublishRequest, timeout: float | None) -> v1.PublishResponse:
        key = request.idempotency_key
        try:
            return await call(self.stubs.publisher.Publish, request, self._within(timeout), again=bool(key))
        except GatewayError as error:
            error.idempotency_key = key or None
            raise

    async def subscribe(
        self,
        *topic_filters: str,
        device_ids: Sequence[str] = (),
        device_id_prefixes: Sequence[str] = (),
        exclude_topic_filters: Sequence[str] = (),
        exclude_device_ids: Sequence[str] = (),
        devices_only: bool = False,
        slow_policy: v1.SlowPolicy.ValueType = v1.SLOW_POLICY_UNSPECIFIED,
        linger: float | None = None,
    ) -> Stream[v1.ReceivedMessage | Gap]:
        """Follows what is published from now on, at most once. Returns when the gateway has the subscription.

        What a slow reader has lost, and what came while the connection was away, is told by a Gap in its place. Who must not
        miss anything consumes a group.
        """
        request = v1.SubscribeRequest(
            topic_filters=topic_filters,
            device_ids=device_ids,
            device_id_prefixes=device_id_prefixes,
            exclude_topic_filters=exclude_topic_filters,
            exclude_device_ids=exclude_device_ids,
            devices_only=devices_only,
            slow_policy=slow_policy,
            heartbeat_interval=duration(HEARTBEAT),
        )
        if linger is not None:
            request.linger.CopyFrom(duration(linger))

        def items(response: v1.SubscribeResponse) -> Iterable[v1.ReceivedMessage | Gap]:
            for item in response.items:
                if item.HasField("message"):
                    yield item.message
                elif item.HasField("gap"):
                    yield Gap.of(item.gap)

        return await self._stream(self.stubs.subscriber.Subscribe, request, items, Gap.reconnected)

    def consume(
        self,
        group: str,
        handler: Handler,
        *,
        concurrency: int = 16,
        member_id: str | None = None,
        lease: float = 15.0,
        max_outstanding: int = 500,
        drain_timeout: float = 30.0,
        on_gap: Callable[[Gap], None] | None = None,
    ) -> Consumer:
        """A member of `group`, which calls `handler` with each message and acknowledges those for which it returned. See
        Consumer, whose `run` does it. Handlers that run one after the other may share a task: a context variable that one sets
        stays set for the next."""

        def gap(told: v1.Gap) -> None:
            if on_gap is not None:
                on_gap(Gap.of(told))

        return Consumer(
            self.stubs.consumer,
            self.stubs.groups,
            self._token,
            group,
            handler,
            concurrency=concurrency,
            member_id=member_id or f"member-{uuid.uuid4().hex}",
            lease=lease,
            max_outstanding=max_outstanding,
            drain_timeout=drain_timeout,
            on_gap=gap,
        )

    def _within(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    async def _read(self, method: Callable[..., Awaitable[T]], request: object, timeout: float | None) -> T:
        """A call that changes nothing, or twice what it changes once."""
        return await call(method, request, self._within(timeout), again=True)

    async def _write(self, method: Callable[..., Awaitable[T]], request: object, timeout: float | None) -> T:
        """A call that is made once."""
        return await call(method, request, self._within(timeout), again=False)

    async def _stream(
        self,
        method: Callable[..., Any],
        request: object,
        items: Callable[[Any], Iterable[T]],
        on_reconnect: Callable[[], T] | None,
        silence: float | None = HEARTBEAT * 3,
    ) -> Stream[T]:
        return await Stream(lambda: method(request), items, self._token, on_reconnect, silence).open()


def _message(
    topic: str,
    payload: bytes | str,
    device_id: str | None,
    qos: int,
    retain: bool,
    wait: v1.Wait.ValueType,
    offline: v1.Offline.ValueType,
    expiry: int | None,
    properties: v1.Properties | None,
    deliver_at: datetime | timedelta | None,
) -> v1.PublishRequest:
    request = v1.PublishRequest(
        topic=topic,
        payload=payload.encode() if isinstance(payload, str) else payload,
        qos=_qos(qos),
        retain=retain,
        wait=wait,
        offline=offline,
        properties=properties,
    )
    if device_id is not None:
        request.device_id = device_id
    if expiry is not None:
        request.expiry_seconds = expiry
    if deliver_at is not None:
        request.deliver_at.CopyFrom(_time(deliver_at))
    return request


def _qos(qos: int) -> v1.Qos.ValueType:
    """0, 1 and 2 as MQTT counts them."""
    return (v1.QOS_AT_MOST_ONCE, v1.QOS_AT_LEAST_ONCE, v1.QOS_EXACTLY_ONCE)[qos]


def _time(when: datetime | timedelta) -> Timestamp:
    """A point in time, or a span from now on. A datetime without a zone is UTC."""
    stamp = Timestamp()
    if isinstance(when, timedelta):
        stamp.GetCurrentTime()
        stamp.FromNanoseconds(stamp.ToNanoseconds() + int(when.total_seconds() * 1e9))
    else:
        stamp.FromDatetime(when)
    return stamp


def _json(document: Json | str | None) -> str | None:
    return document if isinstance(document, str) or document is None else json.dumps(document)


class _Part:
    def __init__(self, client: Client) -> None:
        self._client = client


class Commands(_Part):
    """Requests to devices, with their answers."""

    async def send(
        self,
        device_id: str,
        name: str,
        payload: bytes | str = b"",
        *,
        qos: int = 1,
        properties: v1.Properties | None = None,
        wait_for_device: float | None = None,
        timeout: float | None = None,
    ) -> v1.Reply:
        """Sends a command and returns the device's answer; what the device calls an error is one, too (`device_status`). A device
        that is not connected is waited for as many seconds as `wait_for_device` says. Sent once: an error tells the `stage`."""
        request = v1.SendRequest(spec=_spec(device_id, name, payload, qos, properties))
        if wait_for_device is not None:
            request.wait_for_device.CopyFrom(duration(wait_for_device))
        return (await self._client._write(self._client.stubs.commands.Send, request, timeout)).reply

    async def start(
        self,
        device_id: str,
        name: str,
        payload: bytes | str = b"",
        *,
        command_id: str = "",
        qos: int = 1,
        properties: v1.Properties | None = None,
        start_time: datetime | timedelta | None = None,
        expire_time: datetime | timedelta | None = None,
        retry_interval: float | None = None,
        timeout: float | None = None,
    ) -> v1.Command:
        """Stores a command, which goes out when its device is there, and returns when it is on disk. Started once: without a
        `command_id` the library makes one, and keeps it over its attempts."""
        request = v1.StartCommandRequest(
            command_id=command_id or uuid.uuid4().hex, spec=_spec(device_id, name, payload, qos, properties)
        )
        if start_time is not None:
            request.start_time.CopyFrom(_time(start_time))
        if expire_time is not None:
            request.expire_time.CopyFrom(_time(expire_time))
        if retry_interval is not None:
            request.retry_interval.CopyFrom(duration(retry_interval))
        return (await self._client._read(self._client.stubs.commands.StartCommand, request, timeout)).command

    async def get(self, command_id: str, *, timeout: float | None = None) -> v1.Command:
        """A stored command as it is now."""
        request = v1.GetCommandRequest(command_id=command_id)
        return (await self._client._read(self._client.stubs.commands.GetCommand, request, timeout)).command

    async def list(
        self, device_id: str = "", *, active_only: bool = False, timeout: float | None = None
    ) -> AsyncIterator[v1.Command]:
        """Stored commands, the newest first; of one device, or of all. Pages are read as they are needed."""
        request = v1.ListCommandsRequest(device_id=device_id, active_only=active_only)
        while True:
            page = await self._client._read(self._client.stubs.commands.ListCommands, request, timeout)
            for command in page.commands:
                yield command
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def cancel(self, command_id: str, *, timeout: float | None = None) -> v1.Command:
        """Cancels a stored command; FailedPrecondition if it has ended."""
        request = v1.CancelCommandRequest(command_id=command_id)
        return (await self._client._write(self._client.stubs.commands.CancelCommand, request, timeout)).command

    async def watch(self, command_id: str) -> Stream[v1.Command]:
        """A stored command as it is, and after each change; the stream ends when the command does."""

        def items(response: v1.WatchCommandResponse) -> Iterable[v1.Command]:
            yield response.command

        request = v1.WatchCommandRequest(command_id=command_id)
        # No heartbeats here: the pings of the connection show that it lives.
        return await self._client._stream(self._client.stubs.commands.WatchCommand, request, items, None, silence=None)


class Latest(_Part):
    """The last message of each device on each topic."""

    async def get(
        self, topic: str, *, device_id: str | None = None, timeout: float | None = None
    ) -> v1.LatestValue:
        """The last message of a device on a topic, or of any device. NotFound if there is none."""
        request = v1.GetLatestRequest(topic=topic)
        if device_id is not None:
            request.device_id = device_id
        return (await self._client._read(self._client.stubs.state.GetLatest, request, timeout)).value

    async def list(
        self, *device_ids: str, topic_filter: str = "", timeout: float | None = None
    ) -> AsyncIterator[v1.LatestValue]:
        """Latest values in order of device and topic. Pages are read as they are needed."""
        request = v1.ListLatestRequest(device_ids=device_ids, topic_filter=topic_filter)
        while True:
            page = await self._client._read(self._client.stubs.state.ListLatest, request, timeout)
            for value in page.values:
                yield value
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def watch(
        self,
        *topic_filters: str,
        device_ids: Sequence[str] = (),
        changes_only: bool = False,
        linger: float | None = None,
    ) -> Stream[v1.LatestValue | v1.RemovedValue | v1.SnapshotEnd | Gap]:
        """The values there are, a SnapshotEnd, then changes, of which a slow reader gets the last. After a lost connection there is
        a Gap, then all of it again."""
        request = v1.WatchLatestRequest(
            topic_filters=topic_filters,
            device_ids=device_ids,
            changes_only=changes_only,
            heartbeat_interval=duration(HEARTBEAT),
        )
        if linger is not None:
            request.linger.CopyFrom(duration(linger))

        def items(
            response: v1.WatchLatestResponse,
        ) -> Iterable[v1.LatestValue | v1.RemovedValue | v1.SnapshotEnd | Gap]:
            for item in response.items:
                if item.HasField("value"):
                    yield item.value
                elif item.HasField("removed"):
                    yield item.removed
                elif item.HasField("snapshot_end"):
                    yield item.snapshot_end
                elif item.HasField("gap"):
                    yield Gap.of(item.gap)

        return await self._client._stream(self._client.stubs.state.WatchLatest, request, items, Gap.reconnected)


class Shadows(_Part):
    """What devices are to be, and what they say they are."""

    async def get(self, device_id: str, *, name: str = "", timeout: float | None = None) -> v1.Shadow:
        """A shadow; its documents are JSON text, in which numbers have every digit. NotFound if there is none."""
        request = v1.GetShadowRequest(device_id=device_id, name=name)
        return (await self._client._read(self._client.stubs.shadows.GetShadow, request, timeout)).shadow

    async def update(
        self,
        device_id: str,
        *,
        desired: Json | str | None = None,
        reported: Json | str | None = None,
        name: str = "",
        expected_version: int | None = None,
        client_token: str = "",
        timeout: float | None = None,
    ) -> v1.Shadow:
        """Merges into what is desired or reported, JSON as a mapping or as text; None in a mapping, `null`, removes a key. The text
        "null" removes all. Aborted, with the `version` there is, if it is not `expected_version`. Made once: if the connection is
        lost meanwhile, the version tells whether it was."""
        request = v1.UpdateShadowRequest(device_id=device_id, name=name, client_token=client_token)
        if (text := _json(desired)) is not None:
            request.desired = text
        if (text := _json(reported)) is not None:
            request.reported = text
        if expected_version is not None:
            request.expected_version = expected_version
        return (await self._client._write(self._client.stubs.shadows.UpdateShadow, request, timeout)).shadow

    async def watch(
        self, *device_ids: str, names: Sequence[str] = (), changes_only: bool = False
    ) -> Stream[v1.Shadow | v1.DeletedShadow | v1.SnapshotEnd | Gap]:
        """The shadows of these devices, a SnapshotEnd, then changes; without devices the changes of all. After a lost connection
        there is a Gap, then all of it again."""
        request = v1.WatchShadowRequest(
            device_ids=device_ids, names=names, changes_only=changes_only, heartbeat_interval=duration(HEARTBEAT)
        )

        def items(response: v1.WatchShadowResponse) -> Iterable[v1.Shadow | v1.DeletedShadow | v1.SnapshotEnd | Gap]:
            for item in response.items:
                if item.HasField("shadow"):
                    yield item.shadow
                elif item.HasField("deleted"):
                    yield item.deleted
                elif item.HasField("snapshot_end"):
                    yield item.snapshot_end
                elif item.HasField("gap"):
                    yield Gap.of(item.gap)

        return await self._client._stream(self._client.stubs.shadows.WatchShadow, request, items, Gap.reconnected)


class Devices(_Part):
    """Devices and their sessions."""

    async def get(self, device_id: str, *, timeout: float | None = None) -> v1.Device:
        """A device that has a session. NotFound otherwise."""
        request = v1.GetDeviceRequest(device_id=device_id)
        return (await self._client._read(self._client.stubs.devices.GetDevice, request, timeout)).device

    async def list(
        self, request: v1.ListDevicesRequest | None = None, *, timeout: float | None = None
    ) -> AsyncIterator[v1.Device]:
        """Devices that have a session, those that `request` describes. Pages are read as they are needed."""
        asked = v1.ListDevicesRequest()
        if request is not None:
            asked.CopyFrom(request)
        while True:
            page = await self._client._read(self._client.stubs.devices.ListDevices, asked, timeout)
            for device in page.devices:
                yield device
            if not page.next_page_token:
                return
            asked.page_token = page.next_page_token


def _spec(
    device_id: str, name: str, payload: bytes | str, qos: int, properties: v1.Properties | None
) -> v1.CommandSpec:
    return v1.CommandSpec(
        device_id=device_id,
        name=name,
        payload=payload.encode() if isinstance(payload, str) else payload,
        properties=properties,
        qos=_qos(qos),
    )
