"""Each call does what it says, and what fails is told by type and reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import grpc
import mqtt_gateway as gateway
import pytest
from mqtt_gateway import Reason, sync, v1
from world import World, until

LIMIT = 60.0


@contextlib.asynccontextmanager
async def connected(world: World, **others: object) -> AsyncIterator[gateway.Client]:
    at = world.at
    arguments = {"ca": at["ca"], "token": at["token"], **others}
    address = arguments.pop("address", at["address"])
    async with gateway.connect(address, **arguments) as client:
        yield client


async def test_publish_tells_the_outcome(world: World) -> None:
    world.do_device("ear", ["told/#"])
    async with connected(world) as client:
        nobody = await client.publish("nobody/here", b"x")
        assert nobody.outcome == v1.OUTCOME_NO_MATCH
        acked = await client.publish_and_wait("told/x", "on")
        assert (acked.outcome, acked.sent) == (v1.OUTCOME_ACKED, 1)
        alone = await client.publish_and_wait("any", b"y", device_id="ear", wait=v1.WAIT_SENT)
        assert alone.outcome == v1.OUTCOME_SENT
    assert world.do_received("ear", 2) == [["told/x", "on"], ["any", "y"]]


async def test_a_publish_over_a_cut_connection_is_published_once(world: World) -> None:
    world.do_device("once", ["once/#"])
    async with connected(world, address=world.do_proxy()) as client:
        # Opens the connection.
        await client.publish_and_wait("once/x", b"1")
        world.do_swallow()
        waiting = asyncio.create_task(client.publish_and_wait("once/x", b"2"))
        await asyncio.to_thread(world.do_received, "once", 2)
        world.do_cut()
        answer = await waiting
        assert answer.outcome == v1.OUTCOME_ACKED
        # Without a key there is nothing to know it by, and the failure is told.
        world.do_swallow()
        sending = asyncio.create_task(client.publish("once/x", b"3"))
        await asyncio.to_thread(world.do_received, "once", 3)
        world.do_cut()
        with pytest.raises(gateway.Unavailable) as lost:
            await sending
        assert lost.value.idempotency_key is None
        await client.publish_and_wait("once/x", b"4")
    assert [payload for _, payload in world.do_received("once", 4)] == ["1", "2", "3", "4"]


async def test_a_wait_that_ends_early_tells_the_level_and_the_key(world: World) -> None:
    world.do_device("deaf", ["deaf/#"])
    async with connected(world) as client:
        with pytest.raises(gateway.DeadlineExceeded) as late:
            await client.publish_and_wait("deaf/x", b"1", timeout=3.0)
        assert (late.value.reason, late.value.level) == (Reason.WAIT_INCOMPLETE, "SENT")
        # The same call goes on waiting, and publishes nothing.
        with pytest.raises(gateway.DeadlineExceeded) as still:
            await client.publish_and_wait("deaf/x", b"1", timeout=3.0, idempotency_key=late.value.idempotency_key or "")
        assert still.value.level == "SENT"
        await client.publish_and_wait("deaf/x", b"2", wait=v1.WAIT_SENT)
    assert [payload for _, payload in world.do_received("deaf", 2)] == ["1", "2"]


async def test_a_subscription_tells_of_the_gap_when_it_reconnects(world: World) -> None:
    async with connected(world, address=world.do_proxy()) as client, connected(world) as other:
        async with await client.subscribe("followed/#") as stream:
            items = aiter(stream)
            await other.publish("followed/x", b"1")
            first = await anext(items)
            assert isinstance(first, v1.ReceivedMessage) and first.payload == b"1"
            world.do_cut()
            second = await anext(items)
            assert second == gateway.Gap(None, gateway.GapReason.RECONNECTED)
            await other.publish("followed/x", b"2")
            third = await anext(items)
            assert isinstance(third, v1.ReceivedMessage) and third.payload == b"2"


async def test_commands_are_answered_watched_and_cancelled(world: World) -> None:
    world.do_device("servant", ["cmd/servant/#"])
    async with connected(world) as client:
        reply = await client.commands.send("servant", "ping", b"1")
        assert (reply.payload, reply.device_status) == (b"pong 1", 200)
        with pytest.raises(gateway.FailedPrecondition) as offline:
            await client.commands.send("absent", "ping")
        assert (offline.value.reason, offline.value.stage) == (Reason.DEVICE_OFFLINE, "QUEUED")
        with pytest.raises(gateway.DeadlineExceeded) as late:
            await client.commands.send("servant", "mute", timeout=1.0)
        assert late.value.reason is Reason.COMMAND_TIMED_OUT

        started = await client.commands.start("servant", "ping", b"2")
        states = [command.state async for command in await client.commands.watch(started.command_id)]
        assert states[-1] == v1.COMMAND_STATE_REPLIED
        assert (await client.commands.get(started.command_id)).reply.payload == b"pong 2"
        waits = await client.commands.start("absent", "ping")
        listed = [command.command_id async for command in client.commands.list("absent", active_only=True)]
        assert listed == [waits.command_id]
        assert (await client.commands.cancel(waits.command_id)).state == v1.COMMAND_STATE_CANCELLED
        with pytest.raises(gateway.FailedPrecondition) as ended:
            await client.commands.cancel(waits.command_id)
        assert ended.value.reason is Reason.COMMAND_ENDED


async def test_latest_values_are_read_listed_and_watched(world: World) -> None:
    world.do_device("meter")
    async with connected(world) as client:
        with pytest.raises(gateway.NotFound) as nothing:
            await client.latest.get("no/value")
        assert nothing.value.reason is Reason.VALUE_NOT_FOUND
        world.do_publish("meter", "meter/power", 3)
        world.do_published("meter")
        assert (await client.latest.get("meter/power", device_id="meter")).payload == b"3"
        assert [value.payload async for value in client.latest.list("meter")] == [b"3"]
        async with await client.latest.watch(device_ids=["meter"]) as stream:
            items = aiter(stream)
            current, end = await anext(items), await anext(items)
            assert isinstance(current, v1.LatestValue) and current.payload == b"3"
            assert isinstance(end, v1.SnapshotEnd)
            world.do_publish("meter", "meter/power", 1)
            change = await anext(items)
            assert isinstance(change, v1.LatestValue) and change.payload == b"4"


async def test_shadows_are_merged_guarded_and_watched(world: World) -> None:
    async with connected(world) as client:
        with pytest.raises(gateway.NotFound) as none:
            await client.shadows.get("shadowed")
        assert none.value.reason is Reason.SHADOW_NOT_FOUND
        first = await client.shadows.update("shadowed", desired={"on": True, "level": 3})
        second = await client.shadows.update("shadowed", reported='{"on": true}')
        assert json.loads(second.delta) == {"level": 3}
        with pytest.raises(gateway.Aborted) as conflict:
            await client.shadows.update("shadowed", desired={"on": False}, expected_version=first.version)
        assert (conflict.value.reason, conflict.value.version) == (Reason.VERSION_CONFLICT, second.version)
        async with await client.shadows.watch("shadowed") as stream:
            items = aiter(stream)
            assert isinstance(await anext(items), v1.Shadow)
            assert isinstance(await anext(items), v1.SnapshotEnd)
            await client.shadows.update("shadowed", desired={"level": None})
            change = await anext(items)
            assert isinstance(change, v1.Shadow) and json.loads(change.desired) == {"on": True}


async def test_devices_are_found_and_listed(world: World) -> None:
    for number in range(3):
        world.do_device(f"listed-{number}")
    async with connected(world) as client:
        assert (await client.devices.get("listed-1")).online
        request = v1.ListDevicesRequest(device_id_prefix="listed-", page_size=2)
        assert sorted([device.device_id async for device in client.devices.list(request)]) == [
            f"listed-{number}" for number in range(3)
        ]
        with pytest.raises(gateway.NotFound) as unknown:
            await client.devices.get("nobody")
        assert unknown.value.reason is Reason.DEVICE_NOT_FOUND


async def test_who_may_not_is_told_by_type_and_reason(world: World) -> None:
    async with connected(world, token=None) as client:
        with pytest.raises(gateway.Unauthenticated) as missing:
            await client.publish("x")
        assert missing.value.reason is Reason.CREDENTIALS_MISSING
    async with connected(world, token="mqs_wrong") as client:
        with pytest.raises(gateway.Unauthenticated) as wrong:
            await client.subscribe("#")
        assert wrong.value.reason is Reason.CREDENTIALS_UNKNOWN
    async with connected(world) as client:
        await client.stubs.groups.CreateGroup(v1.CreateGroupRequest(group=v1.Group(name="guarded")))
    async with connected(world, token=world.do_token("reader")) as client:
        with pytest.raises(gateway.PermissionDenied) as role:
            await client.publish("x")
        assert (role.value.reason, role.value.role) == (Reason.ROLE_DENIED, "reader")
        with pytest.raises(gateway.PermissionDenied):
            await client.consume("guarded", lambda _: asyncio.sleep(0)).run()
    async with connected(world, token=world.do_token("publisher", topics="lamp/#")) as client:
        with pytest.raises(gateway.PermissionDenied) as scope:
            await client.publish("door/open")
        assert (scope.value.reason, scope.value.field) == (Reason.OUT_OF_SCOPE, "topic")
        with pytest.raises(gateway.InvalidArgument) as invalid:
            await client.publish("lamp/+")
        assert (invalid.value.reason, invalid.value.field) == (Reason.INVALID_FIELD, "topic")
    async with connected(world) as client:
        with pytest.raises(gateway.NotFound) as group:
            await client.consume("no-such-group", lambda _: asyncio.sleep(0)).run()
        assert group.value.reason is Reason.GROUP_NOT_FOUND
        with pytest.raises(grpc.RpcError) as plain:
            await client.stubs.devices.GetDevice(v1.GetDeviceRequest(device_id="nobody"))
        assert gateway.error_of(plain.value).reason is Reason.DEVICE_NOT_FOUND


async def test_an_expired_token_ends_a_stream_and_a_new_one_goes_on(world: World) -> None:
    short = world.do_token("reader", expires="1s")
    async with connected(world, token=short) as client:
        with pytest.raises(gateway.Unauthenticated) as expired:
            async for _ in await client.subscribe("expiring/#"):
                pass
        assert expired.value.reason is Reason.CREDENTIALS_EXPIRED
    # Who gives tokens by a function is asked again. Long enough to begin with, also where the machine is busy.
    tokens = iter([world.do_token("reader", expires="4s")])
    async with connected(world, token=lambda: next(tokens, world.at["token"])) as client:
        items = aiter(await client.subscribe("expiring/#"))
        assert await anext(items) == gateway.Gap(None, gateway.GapReason.RECONNECTED)
        await client.publish("expiring/x", b"1")
        assert isinstance(await anext(items), v1.ReceivedMessage)


async def test_a_client_certificate_is_who_calls(world: World) -> None:
    certificate = (world.at["certificate"], world.at["key"])
    async with connected(world, token=None, certificate=certificate) as client:
        assert [device async for device in client.devices.list(v1.ListDevicesRequest(device_id_prefix="no"))] == []
        with pytest.raises(gateway.PermissionDenied) as role:
            await client.publish("x")
        assert role.value.role == "reader"


def test_without_asyncio_all_of_it_works(world: World) -> None:
    at = world.at
    world.do_device("plain", ["cmd/plain/#", "plain/#"])
    with sync.connect(at["address"], ca=at["ca"], token=at["token"]) as client:
        with client.subscribe("plain/#") as stream:
            assert client.publish_and_wait("plain/x", b"1").outcome == v1.OUTCOME_ACKED
            first = next(iter(stream))
            assert isinstance(first, v1.ReceivedMessage) and first.payload == b"1"
        assert client.commands.send("plain", "ping", b"1").payload == b"pong 1"
        command = client.commands.start("plain", "ping", b"2")
        assert [one.state for one in client.commands.watch(command.command_id)][-1] == v1.COMMAND_STATE_REPLIED
        assert [one.command_id for one in client.commands.list("plain")] == [command.command_id]
        client.shadows.update("plain", desired={"on": True})
        assert json.loads(client.shadows.get("plain").desired) == {"on": True}
        assert client.devices.get("plain").online
        with pytest.raises(gateway.NotFound):
            client.latest.get("no/value")
        client.stubs.groups.CreateGroup(
            v1.CreateGroupRequest(group=v1.Group(name="plain", filter=v1.Filter(topic_filters=["plain/#"])))
        )
        seen: list[int] = []
        consumer = client.consume("plain", lambda delivery: seen.append(int(delivery.payload)))
        with consumer:
            world.do_publish("plain", "plain/x", 50)
            world.do_published("plain")
            until("all are handled", lambda: len(seen) >= 50)
        assert seen == list(range(1, 51))
        assert consumer.confirmed == 50
