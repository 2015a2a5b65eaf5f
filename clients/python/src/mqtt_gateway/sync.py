"""The same client without asyncio: calls block, streams are iterators, handlers are plain functions.

It is the asyncio client on a loop of its own in one thread, which all clients of the process share. Handlers run in threads of their
own, as many at once as `concurrency` says. May be used by any number of threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import grpc

from . import client as aio
from . import v1
from ._calls import OPTIONS, Token, credentials_of
from ._calls import Stream as AioStream
from ._channel import TokenChannel
from .client import Gap, Json
from .consume import Consumer as AioConsumer
from .consume import Delivery
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

T = TypeVar("T")
Handler = Callable[[Delivery], None]

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _the_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="mqtt_gateway", daemon=True).start()
        return _loop


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """Does it on the loop. Interrupted, as by Ctrl-C, it is cancelled there."""
    future = asyncio.run_coroutine_threadsafe(work, _the_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _next(items: AsyncIterator[T]) -> T:
    return await items.__anext__()


def _walk(items: AsyncIterator[T]) -> Iterator[T]:
    while True:
        try:
            item = _wait(_next(items))
        except StopAsyncIteration:
            return
        yield item


class Stream(Generic[T]):
    """What a stream brings, item by item; opened again when its connection is lost."""

    def __init__(self, stream: AioStream[T]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[T]:
        return _walk(self._stream.__aiter__())

    def close(self) -> None:
        """Ends the stream. From another thread it ends the iteration, too."""
        _wait(self._stream.close())

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stubs:
    """The generated stubs of all services. What they raise, `error_of` makes an error of this library of."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.publisher = PublisherStub(channel)
        self.subscriber = SubscriberStub(channel)
        self.groups = GroupsStub(channel)
        self.consumer = ConsumerStub(channel)
        self.commands = CommandsStub(channel)
        self.shadows = ShadowsStub(channel)
        self.state = StateStub(channel)
        self.devices = DevicesStub(channel)
        self.events = EventsStub(channel)
        self.security = SecurityStub(channel)
        self.operations = OperationsStub(channel)


class Consumer:
    """A member of a group, in a thread of its own from `start` on."""

    def __init__(self, consumer: AioConsumer, threads: concurrent.futures.ThreadPoolExecutor) -> None:
        self._consumer, self._threads = consumer, threads
        self._running: concurrent.futures.Future[None] | None = None

    def start(self) -> Consumer:
        """Begins, and returns at once."""
        self._running = asyncio.run_coroutine_threadsafe(self._consumer.run(), _the_loop())
        return self

    def run(self) -> None:
        """Consumes until `stop` was called elsewhere and everything is settled, or until it fails for good. Ctrl-C drains."""
        self.start()
        try:
            self.wait()
        except KeyboardInterrupt:
            self.drain()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for its end, and raises what it failed with."""
        assert self._running is not None, "start it first"
        self._running.result(timeout)

    def stop(self) -> None:
        """Takes no more, finishes what it has, acknowledges, and leaves. From any thread, and from signal handlers."""
        _the_loop().call_soon_threadsafe(self._consumer.stop)

    def drain(self) -> None:
        """Calls `stop` and waits until everything is settled."""
        self.stop()
        self.wait()
        self._threads.shutdown(wait=False)

    @property
    def member_id(self) -> str:
        return self._consumer.member_id

    @property
    def handled(self) -> int:
        """Messages for which the handler returned."""
        return self._consumer.handled

    @property
    def confirmed(self) -> int:
        """Acknowledgements that are on the gateway's disk."""
        return self._consumer.confirmed

    @property
    def status(self) -> v1.GroupStatus | None:
        """How far the group is, as the last heartbeat said."""
        return self._consumer.status

    def __enter__(self) -> Consumer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.drain()


def connect(
    address: str,
    *,
    ca: str | bytes | Path | None = None,
    token: Token | None = None,
    certificate: tuple[str | bytes | Path, str | bytes | Path] | None = None,
    plaintext: bool = False,
    timeout: float = 30.0,
) -> Client:
    """A client of the gateway at `address`, as `mqtt_gateway.connect` makes one."""

    async def make() -> aio.Client:
        return aio.connect(
            address, ca=ca, token=token, certificate=certificate, plaintext=plaintext, timeout=timeout
        )

    def open_channel() -> grpc.Channel:
        if plaintext:
            return grpc.insecure_channel(address, options=OPTIONS)
        return grpc.secure_channel(address, credentials_of(ca, certificate), options=OPTIONS)

    return Client(_wait(make()), open_channel, token)


class Client:
    """Made by `connect`."""

    def __init__(self, client: aio.Client, open_channel: Callable[[], grpc.Channel], token: Token | None) -> None:
        self._client, self._open_channel, self._token = client, open_channel, token
        self._channel: grpc.Channel | None = None
        self._stubs: Stubs | None = None
        self.commands = Commands(client.commands)
        self.latest = Latest(client.latest)
        self.shadows = Shadows(client.shadows)
        self.devices = Devices(client.devices)

    @property
    def stubs(self) -> Stubs:
        """The generated stubs: every method there is. They have a connection of their own, made when they are first asked for."""
        with _lock:
            if self._stubs is None:
                self._channel = self._open_channel()
                self._stubs = Stubs(cast(grpc.Channel, TokenChannel(self._channel, self._token)))
            return self._stubs

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections, and every call on them."""
        _wait(self._client.close())
        if self._channel is not None:
            self._channel.close()

    def publish(
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
        """As `mqtt_gateway.Client.publish`."""
        return _wait(
            self._client.publish(
                topic,
                payload,
                device_id=device_id,
                qos=qos,
                retain=retain,
                wait=wait,
                offline=offline,
                expiry=expiry,
                properties=properties,
                deliver_at=deliver_at,
                idempotency_key=idempotency_key,
                timeout=timeout,
            )
        )

    def publish_and_wait(
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
        """As `mqtt_gateway.Client.publish_and_wait`."""
        return _wait(
            self._client.publish_and_wait(
                topic,
                payload,
                wait=wait,
                device_id=device_id,
                qos=qos,
                retain=retain,
                offline=offline,
                expiry=expiry,
                properties=properties,
                idempotency_key=idempotency_key,
                timeout=timeout,
            )
        )

    def subscribe(
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
        """As `mqtt_gateway.Client.subscribe`."""
        return Stream(
            _wait(
                self._client.subscribe(
                    *topic_filters,
                    device_ids=device_ids,
                    device_id_prefixes=device_id_prefixes,
                    exclude_topic_filters=exclude_topic_filters,
                    exclude_device_ids=exclude_device_ids,
                    devices_only=devices_only,
                    slow_policy=slow_policy,
                    linger=linger,
                )
            )
        )

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
        """As `mqtt_gateway.Client.consume`; the handler is a plain function, and is called in threads. Work that takes longer than
        `drain_timeout` cannot be interrupted: its message comes again elsewhere."""
        threads = concurrent.futures.ThreadPoolExecutor(concurrency, thread_name_prefix=f"consume {group}")

        async def handle(delivery: Delivery) -> None:
            await asyncio.get_running_loop().run_in_executor(threads, handler, delivery)

        async def make() -> AioConsumer:
            return self._client.consume(
                group,
                handle,
                concurrency=concurrency,
                member_id=member_id,
                lease=lease,
                max_outstanding=max_outstanding,
                drain_timeout=drain_timeout,
                on_gap=on_gap,
            )

        return Consumer(_wait(make()), threads)


class Commands:
    """Requests to devices, with their answers."""

    def __init__(self, commands: aio.Commands) -> None:
        self._commands = commands

    def send(
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
        """As `mqtt_gateway.client.Commands.send`."""
        return _wait(
            self._commands.send(
                device_id,
                name,
                payload,
                qos=qos,
                properties=properties,
                wait_for_device=wait_for_device,
                timeout=timeout,
            )
        )

    def start(
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
        """As `mqtt_gateway.client.Commands.start`."""
        return _wait(
            self._commands.start(
                device_id,
                name,
                payload,
                command_id=command_id,
                qos=qos,
                properties=properties,
                start_time=start_time,
                expire_time=expire_time,
                retry_interval=retry_interval,
                timeout=timeout,
            )
        )

    def get(self, command_id: str, *, timeout: float | None = None) -> v1.Command:
        """A stored command as it is now."""
        return _wait(self._commands.get(command_id, timeout=timeout))

    def list(
        self, device_id: str = "", *, active_only: bool = False, timeout: float | None = None
    ) -> Iterator[v1.Command]:
        """Stored commands, the newest first; of one device, or of all."""
        return _walk(self._commands.list(device_id, active_only=active_only, timeout=timeout))

    def cancel(self, command_id: str, *, timeout: float | None = None) -> v1.Command:
        """Cancels a stored command; FailedPrecondition if it has ended."""
        return _wait(self._commands.cancel(command_id, timeout=timeout))

    def watch(self, command_id: str) -> Stream[v1.Command]:
        """A stored command as it is, and after each change; the stream ends when the command does."""
        return Stream(_wait(self._commands.watch(command_id)))


class Latest:
    """The last message of each device on each topic."""

    def __init__(self, latest: aio.Latest) -> None:
        self._latest = latest

    def get(self, topic: str, *, device_id: str | None = None, timeout: float | None = None) -> v1.LatestValue:
        """The last message of a device on a topic, or of any device. NotFound if there is none."""
        return _wait(self._latest.get(topic, device_id=device_id, timeout=timeout))

    def list(
        self, *device_ids: str, topic_filter: str = "", timeout: float | None = None
    ) -> Iterator[v1.LatestValue]:
        """Latest values in order of device and topic."""
        return _walk(self._latest.list(*device_ids, topic_filter=topic_filter, timeout=timeout))

    def watch(
        self,
        *topic_filters: str,
        device_ids: Sequence[str] = (),
        changes_only: bool = False,
        linger: float | None = None,
    ) -> Stream[v1.LatestValue | v1.RemovedValue | v1.SnapshotEnd | Gap]:
        """As `mqtt_gateway.client.Latest.watch`."""
        return Stream(
            _wait(
                self._latest.watch(*topic_filters, device_ids=device_ids, changes_only=changes_only, linger=linger)
            )
        )


class Shadows:
    """What devices are to be, and what they say they are."""

    def __init__(self, shadows: aio.Shadows) -> None:
        self._shadows = shadows

    def get(self, device_id: str, *, name: str = "", timeout: float | None = None) -> v1.Shadow:
        """A shadow. NotFound if there is none."""
        return _wait(self._shadows.get(device_id, name=name, timeout=timeout))

    def update(
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
        """As `mqtt_gateway.client.Shadows.update`."""
        return _wait(
            self._shadows.update(
                device_id,
                desired=desired,
                reported=reported,
                name=name,
                expected_version=expected_version,
                client_token=client_token,
                timeout=timeout,
            )
        )

    def watch(
        self, *device_ids: str, names: Sequence[str] = (), changes_only: bool = False
    ) -> Stream[v1.Shadow | v1.DeletedShadow | v1.SnapshotEnd | Gap]:
        """As `mqtt_gateway.client.Shadows.watch`."""
        return Stream(_wait(self._shadows.watch(*device_ids, names=names, changes_only=changes_only)))


class Devices:
    """Devices and their sessions."""

    def __init__(self, devices: aio.Devices) -> None:
        self._devices = devices

    def get(self, device_id: str, *, timeout: float | None = None) -> v1.Device:
        """A device that has a session. NotFound otherwise."""
        return _wait(self._devices.get(device_id, timeout=timeout))

    def list(
        self, request: v1.ListDevicesRequest | None = None, *, timeout: float | None = None
    ) -> Iterator[v1.Device]:
        """Devices that have a session, those that `request` describes."""
        return _walk(self._devices.list(request, timeout=timeout))
