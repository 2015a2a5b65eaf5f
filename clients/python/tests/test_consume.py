"""A member of a group keeps what it promises, whatever becomes of the gateway."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

import mqtt_gateway as gateway
from mqtt_gateway import v1
from mqtt_gateway.consume import Consumer, Handler
from world import World

LIMIT = 60.0


@contextlib.asynccontextmanager
async def connected(world: World, address: str = "") -> AsyncIterator[gateway.Client]:
    at = world.at
    async with gateway.connect(address or at["address"], ca=at["ca"], token=at["token"]) as client:
        yield client


async def make_group(client: gateway.Client, name: str, topic: str, **fields: object) -> None:
    group = v1.Group(name=name, filter=v1.Filter(topic_filters=[topic]), **fields)  # type: ignore[arg-type]
    group.min_backoff.FromMilliseconds(20)
    await client.stubs.groups.CreateGroup(v1.CreateGroupRequest(group=group), timeout=LIMIT)


async def until(what: str, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, f"not in time: {what}"
        await asyncio.sleep(0.01)


class Judge:
    """What handlers have seen."""

    def __init__(self) -> None:
        self.seen: collections.Counter[str] = collections.Counter()
        self.numbers: dict[str, list[int]] = collections.defaultdict(list)
        self.running: set[str] = set()

    async def handle(self, delivery: gateway.Delivery) -> None:
        device = delivery.device_id
        assert device not in self.running, f"two messages of {device} at once"
        self.running.add(device)
        await asyncio.sleep(0.001)
        self.running.discard(device)
        self.seen[delivery.message_id] += 1
        self.numbers[device].append(int(delivery.payload))

    def complete(self, devices: list[str], count: int) -> bool:
        return all(len(set(self.numbers[device])) >= count for device in devices)

    def check(self, devices: list[str], count: int) -> None:
        """Each message once, none missing, and the first sight of each number in order. A device that was unsure sent a number
        twice, in two messages."""
        assert not [message for message, times in self.seen.items() if times > 1]
        for device in devices:
            first = list(dict.fromkeys(self.numbers[device]))
            assert first == list(range(1, count + 1)), f"{device}: {first}"


async def test_a_killed_gateway_loses_repeats_and_reorders_nothing(world: World) -> None:
    devices, count, judge = [f"killed-{n}" for n in range(4)], 600, Judge()
    async with connected(world) as client:
        await make_group(client, "killed", "killed/#")
        consumer = client.consume("killed", judge.handle, concurrency=3)
        task = asyncio.create_task(consumer.run())
        for device in devices:
            world.do_device(device)
            world.do_publish(device, f"killed/{device}", count, 0.002)
        for share in (0.2, 0.5, 0.8):
            await until("some are handled", lambda: len(judge.seen) >= share * count * len(devices))
            world.do_kill()
            await asyncio.to_thread(world.do_start)
        await until("all are handled", lambda: judge.complete(devices, count))
        for device in devices:
            await asyncio.to_thread(world.do_published, device)
        await consumer.drain()
        await task
        judge.check(devices, count)
        assert consumer.reconnects >= 3
        status = (await client.stubs.groups.GetGroup(v1.GetGroupRequest(name="killed"))).group.status
        assert status.lag_messages == 0, status


async def test_what_fails_comes_again_before_what_came_later(world: World) -> None:
    failed: set[str] = set()
    order: list[str] = []
    async with connected(world) as client:
        await make_group(client, "failing", "failing/#")

        async def handle(delivery: gateway.Delivery) -> None:
            text = delivery.payload.decode()
            if int(text) % 5 == 0 and text not in failed:
                failed.add(text)
                raise gateway.GiveBack("not now")
            order.append(text)

        consumer = client.consume("failing", handle)
        task = asyncio.create_task(consumer.run())
        world.do_device("failing")
        world.do_publish("failing", "failing/x", 60)
        await until("all are handled", lambda: len(order) >= 60)
        await consumer.drain()
        await task
        assert order == [str(number) for number in range(1, 61)]
        assert len(failed) == 12


async def test_what_fails_for_good_is_a_dead_letter_with_its_reason(world: World) -> None:
    attempts: list[int] = []
    handled: list[bytes] = []
    async with connected(world) as client:
        await make_group(client, "poison", "poison/#", max_attempts=2)

        async def handle(delivery: gateway.Delivery) -> None:
            if delivery.payload == b"1":
                attempts.append(delivery.attempt)
                raise ValueError("no number")
            handled.append(delivery.payload)

        consumer = client.consume("poison", handle)
        task = asyncio.create_task(consumer.run())
        world.do_device("poison")
        world.do_publish("poison", "poison/x", 3)
        await until("the others are handled", lambda: len(handled) >= 2)
        await consumer.drain()
        await task
        letters = await client.stubs.groups.ListDeadLetters(v1.ListDeadLettersRequest(name="poison"))
        assert [letter.reason for letter in letters.dead_letters] == ["ValueError: no number"]
        assert attempts == [1, 2]


async def test_a_member_that_drains_leaves_nothing_undone(world: World) -> None:
    devices, count, judge = [f"drained-{n}" for n in range(6)], 300, Judge()
    async with connected(world) as client:
        await make_group(client, "drained", "drained/#")
        leaving = client.consume("drained", judge.handle, max_outstanding=50)
        leaves = asyncio.create_task(leaving.run())
        await leaving.joined()
        staying = client.consume("drained", judge.handle)
        stays = asyncio.create_task(staying.run())
        await staying.joined()
        for device in devices:
            world.do_device(device)
            world.do_publish(device, f"drained/{device}", count, 0.001)
        await until("the first has some", lambda: leaving.handled > 100)
        await leaving.drain()
        await leaves
        gone = leaving.handled
        assert leaving.confirmed == gone, "what was handled is acknowledged, on disk"
        await until("all are handled", lambda: judge.complete(devices, count))
        await staying.drain()
        await stays
        assert leaving.handled == gone
        judge.check(devices, count)


async def test_work_that_outlives_its_stream_is_not_begun_twice(world: World) -> None:
    begun: list[int] = []
    go_on = asyncio.Event()
    async with connected(world, address=world.do_proxy()) as client:
        await make_group(client, "outlives", "outlives/#")

        async def handle(delivery: gateway.Delivery) -> None:
            begun.append(int(delivery.payload))
            await go_on.wait()

        consumer = client.consume("outlives", handle)
        task = asyncio.create_task(consumer.run())
        world.do_device("outlives")
        world.do_publish("outlives", "outlives/x", 2)
        await until("it has begun", lambda: begun == [1])
        world.do_cut()
        world.do_publish("outlives", "outlives/x", 1)
        # The new stream has brought what the old one had, and more.
        await until("all have come again", lambda: consumer.reconnects == 1 and consumer.held == 3)
        assert begun == [1]
        go_on.set()
        await until("all are acknowledged", lambda: consumer.confirmed == 3)
        await consumer.drain()
        await task
        assert begun == [1, 2, 3]


@pytest.mark.parametrize("ended", ["stop", "kill"])
async def test_what_two_members_work_on_is_begun_once_over_a_restart(world: World, ended: str) -> None:
    group, begun = f"restart-{ended}", collections.Counter[str]()
    go_on = asyncio.Event()
    async with connected(world) as client:
        await make_group(client, group, f"{group}/#")

        async def handle(delivery: gateway.Delivery) -> None:
            begun[delivery.device_id] += 1
            await go_on.wait()

        members = [client.consume(group, handle, lease=20.0) for _ in range(2)]
        tasks = [asyncio.create_task(member.run()) for member in members]
        for member in members:
            await member.joined()
        for number in range(10):
            world.do_device(f"{group}-{number}")
            world.do_publish(f"{group}-{number}", f"{group}/x", 1)
        await until("all have begun", lambda: begun.total() == 10 and all(member.held for member in members))
        await asyncio.to_thread(world.do_stop if ended == "stop" else world.do_kill)
        await asyncio.to_thread(world.do_start)
        await until("both are back", lambda: all(member.reconnects for member in members))
        # What is published now is behind whatever would come again.
        for number in range(10):
            world.do_publish(f"{group}-{number}", f"{group}/x", 1)
            await asyncio.to_thread(world.do_published, f"{group}-{number}")
        await until("all have come", lambda: sum(member.held for member in members) == 20)
        assert begun.total() == 10, "begun twice"
        go_on.set()
        await until("all are acknowledged", lambda: sum(member.confirmed for member in members) == 20)
        assert begun.total() == 20
        for member, task in zip(members, tasks):
            await member.drain()
            await task


async def test_work_longer_than_the_lease_is_done_once(world: World) -> None:
    seen: list[int] = []
    async with connected(world) as client:
        group = v1.Group(name="slow", filter=v1.Filter(topic_filters=["slow/#"]))
        group.ack_deadline.FromSeconds(1)
        await client.stubs.groups.CreateGroup(v1.CreateGroupRequest(group=group))

        async def handle(delivery: gateway.Delivery) -> None:
            # Three leases: this is what the test is about, not how it waits.
            await asyncio.sleep(3)
            # Would have grown with a delivery that came in between.
            seen.append(delivery.attempt)

        consumer = client.consume("slow", handle)
        task = asyncio.create_task(consumer.run())
        world.do_device("slow")
        world.do_publish("slow", "slow/x", 1)
        await until("it is acknowledged", lambda: consumer.confirmed == 1)
        await consumer.drain()
        await task
        assert seen == [1]


def unconnected(client: gateway.Client, handler: Handler, monkeypatch: pytest.MonkeyPatch) -> Consumer:
    """A member that is given its messages by the test, and gathers acknowledgements for as long as the test lasts."""
    monkeypatch.setattr("mqtt_gateway.consume.GATHER", LIMIT)
    return client.consume("none", handler, concurrency=4, max_outstanding=100)


def arrive(consumer: Consumer, first: int, count: int) -> None:
    for number in range(first, first + count):
        message = v1.ReceivedMessage(device_id=f"d{number}")
        consumed = v1.ConsumedMessage(delivery_id=number, message_id=f"m{number}", attempt=1, message=message)
        consumer._take(v1.ConsumeItem(message=consumed))
    consumer._pump()


async def test_acknowledgements_share_requests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure: a member that is faster than what comes acknowledged each message with a request of its own."""

    async def handle(_: gateway.Delivery) -> None:
        pass

    async with connected(world) as client:
        consumer = unconnected(client, handle, monkeypatch)
        arrive(consumer, 1, 1)
        await until("the first goes at once", consumer._say.is_set)
        consumer._say.clear()
        consumer._acks.clear()
        consumer._acknowledged_at = asyncio.get_running_loop().time()
        arrive(consumer, 2, 49)
        await until("all are handled", lambda: consumer.handled == 50)
        assert not consumer._say.is_set() and len(consumer._acks) == 49
        arrive(consumer, 51, 1)
        await until("half of what may be outstanding", consumer._say.is_set)
        consumer._gather_no_more()


async def test_handlers_that_do_not_wait_share_tasks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure: a task for each message cost more than the message."""
    tasks = set()

    async def handle(_: gateway.Delivery) -> None:
        tasks.add(asyncio.current_task())

    async with connected(world) as client:
        consumer = unconnected(client, handle, monkeypatch)
        arrive(consumer, 1, 90)
        await until("all are handled", lambda: consumer.handled == 90)
        assert len(tasks) <= 4
        consumer._gather_no_more()
