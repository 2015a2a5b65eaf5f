"""Consuming a group: what arrives, who works on it, and what is said about it.

A member holds what it was given until it is settled. Messages of one key (mostly: one device) are worked on one after the other,
keys beside each other. The life of a message here:

    queued -> running -> acknowledged -> confirmed (on the gateway's disk: it never comes again)
                     \\-> given back: comes again

When the stream ends, what is queued is forgotten, as it comes again. What is running goes on, and the next stream begins by naming
it, and what was acknowledged and not confirmed: the gateway does not deliver these again, also after a restart, and they are
acknowledged by their new delivery ids. What comes again all the same, as from a gateway that does not know of this, is the same work
under a new delivery, not another. What was acknowledged and not confirmed is remembered for a while; if it comes again it
is acknowledged again, and the handler does not see it twice.

After a message was given back, its key is blocked until it comes again. The gateway revokes what it had sent of that key
meanwhile, and that may be on its way still: without the block it would be worked on out of order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from . import v1
from ._calls import HEARTBEAT, Pauses, Token, call, duration, resumes
from .errors import GatewayError, Reason, Unavailable, error_of

if TYPE_CHECKING:
    from .v1.groups_pb2_grpc import ConsumerAsyncStub, GroupsAsyncStub

_log = logging.getLogger("mqtt_gateway")

#: Ids and ranges that one request may have.
MOST_IDS = 10_000
#: Seconds for which a key stays blocked whose message does not come again, as when it became a dead letter after all.
BLOCKED = 5.0
#: Least seconds from one request with acknowledgements to the next, unless there are many: what comes meanwhile shares it.
GATHER = 0.003
#: Handlers that one worker runs before others have their turn, though none of them waited.
AT_A_TIME = 64
#: Seconds for which an acknowledgement that nobody confirmed is remembered after the stream ended.
REMEMBERED = 120.0
#: Most acknowledgements that are remembered.
MOST_REMEMBERED = 10_000
#: Longest that work on one message may take before its lease is no longer extended.
LONGEST_WORK = 3600.0
MOST_REASON = 1024


class GiveBack(Exception):
    """Raised by a handler: the message comes again, not sooner than after `delay` seconds, or becomes a dead letter at once."""

    def __init__(self, reason: str = "", *, delay: float | None = None, dead_letter: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.delay, self.dead_letter = reason, delay, dead_letter


@dataclass(eq=False, slots=True)
class Delivery:
    """What a handler gets: a message, or an event where the group has those."""

    message_id: str
    """Names the message over redelivery and replay: what must be done once can be remembered by it."""
    attempt: int
    """1, and 1 more for each earlier delivery that ended in a failure, an expired deadline or the loss of its member."""
    message: v1.ReceivedMessage | None
    event: v1.Event | None

    @property
    def device_id(self) -> str:
        """The device that published it, or to which the event happened."""
        if self.message is not None:
            return self.message.device_id
        return self.event.device_id if self.event is not None else ""

    @property
    def topic(self) -> str:
        """Its topic; empty for an event."""
        return self.message.topic if self.message is not None else ""

    @property
    def payload(self) -> bytes:
        """Its payload; empty for an event."""
        return self.message.payload if self.message is not None else b""


Handler = Callable[[Delivery], Awaitable[None]]


@dataclass(eq=False, slots=True)
class _Work:
    delivery: Delivery
    key: Hashable
    #: On this stream; None if it ended, or the delivery was revoked.
    delivery_id: int | None
    #: Seconds of its lease, and when half of it is over.
    lease: float
    extend_at: float
    since: float
    task: asyncio.Task[None] | None = None


@dataclass(eq=False, slots=True)
class _Key:
    """What is held of one key, in order."""

    queue: deque[_Work] = field(default_factory=deque)
    running: _Work | None = None
    #: Whether it is among those that may begin.
    offered: bool = False
    #: The message that must come again before others, and until when that is waited for.
    blocked: str | None = None
    until: float = 0.0


class Consumer:
    """A member of a group. `run` consumes until `stop` was called and everything is settled, or until it fails for good: the group is
    gone, the caller may not, or another process has the same member id (Aborted, FENCED)."""

    def __init__(
        self,
        consumer: ConsumerAsyncStub,
        groups: GroupsAsyncStub,
        token: Token | None,
        group: str,
        handler: Handler,
        *,
        concurrency: int,
        member_id: str,
        lease: float,
        max_outstanding: int,
        drain_timeout: float,
        on_gap: Callable[[v1.Gap], None],
    ) -> None:
        assert concurrency > 0 and max_outstanding > 0
        self._consumer, self._groups, self._token = consumer, groups, token
        self._handler, self._on_gap = handler, on_gap
        self._concurrency, self._max_outstanding = concurrency, max_outstanding
        self._lease, self._drain_timeout = lease, drain_timeout
        self.group = group
        self.member_id = member_id
        self.handled = 0
        """Messages for which the handler returned."""
        self.confirmed = 0
        """Acknowledgements that are on the gateway's disk."""
        self.reconnects = 0
        """Streams that were opened after the first."""
        self.status: v1.GroupStatus | None = None
        """How far the group is, as the last heartbeat said."""
        self._ready_event = asyncio.Event()
        self._stopping = asyncio.Event()
        self._order = v1.ORDER_KEY_DEVICE
        self._max_attempts = 0
        self._ack_deadline = 30.0
        # What is held, by message id, by delivery id of this stream, and by key.
        self._works: dict[str, _Work] = {}
        self._deliveries: dict[int, _Work] = {}
        self._keys: dict[Hashable, _Key] = {}
        self._ready: deque[_Key] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        # Acknowledged, by delivery id, until confirmed; and by message id, with the time until when it is remembered.
        self._unconfirmed: dict[int, str] = {}
        self._done: OrderedDict[str, float] = OrderedDict()
        # The message ids that this stream began with, in order, and work on these that failed before the stream was there.
        self._named: list[str] = []
        self._late: dict[str, tuple[_Work, BaseException]] = {}
        # What is to be said on this stream.
        self._acks: list[int] = []
        self._others: list[v1.ConsumeRequest] = []
        self._say = asyncio.Event()
        # While acknowledgements are gathered.
        self._gathering: asyncio.TimerHandle | None = None
        self._acknowledged_at = 0.0
        self._gather_most = max(1, min(MOST_IDS, max_outstanding // 2))
        self._drain_sent = False
        self._drain_from = 0.0
        self._giving_up = False
        self._ended = asyncio.Event()

    @property
    def held(self) -> int:
        """Messages that wait for the handler, or are with it."""
        return len(self._works)

    async def joined(self) -> None:
        """Waits until the member has joined for the first time."""
        await self._ready_event.wait()

    def stop(self) -> None:
        """Takes no more, finishes what it has, acknowledges, and leaves: then `run` returns. From the loop's own thread, as by
        `loop.add_signal_handler(signal.SIGTERM, consumer.stop)`."""
        self._stopping.set()
        self._say.set()

    async def drain(self) -> None:
        """Calls `stop` and waits until everything is settled."""
        self.stop()
        await self._ended.wait()

    async def run(self) -> None:
        """Consumes. Cancelled, it stops at once: what is not settled comes again after the lease, to whichever member."""
        pauses = Pauses()
        ticker = asyncio.create_task(self._tick())
        try:
            await self._learn()
            while True:
                error = await self._stream(pauses)
                self._forget_stream()
                if error is None:
                    return
                if self._stopping.is_set() and not self._works and not self._done:
                    return
                if self._giving_up or not resumes(error, self._token):
                    raise error
                pause = pauses.next(error.retry_after)
                _log.warning("group %s: %s; opening another stream in %.1f s", self.group, error, pause)
                await asyncio.sleep(pause)
                self.reconnects += 1
                with contextlib.suppress(GatewayError):
                    await self._learn(5.0)
        finally:
            ticker.cancel()
            self._giving_up = True
            workers = list(self._workers)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._ended.set()

    async def _learn(self, timeout: float = 30.0) -> None:
        """What the group keeps in order, and after how many attempts it gives up."""
        answer = await call(self._groups.GetGroup, v1.GetGroupRequest(name=self.group), timeout, again=True)
        self._order = answer.group.order_key or v1.ORDER_KEY_DEVICE
        self._ack_deadline = max(answer.group.ack_deadline.ToTimedelta().total_seconds(), 1.0)
        self._max_attempts = answer.group.max_attempts

    async def _stream(self, pauses: Pauses) -> GatewayError | None:
        """One stream, to its end: None if it was drained."""
        stream = self._consumer.Consume()
        writer = asyncio.create_task(self._write(stream))
        try:
            while True:
                response = await asyncio.wait_for(stream.read(), HEARTBEAT * 3)
                if not isinstance(response, v1.ConsumeResponse):
                    if self._drain_sent:
                        return None
                    raise asyncio.TimeoutError
                pauses.reset()
                for item in response.items:
                    self._take(item)
                self._pump()
        except grpc.aio.AioRpcError as failed:
            return error_of(failed)
        except asyncio.TimeoutError:
            return Unavailable(grpc.StatusCode.UNAVAILABLE, Reason.UNKNOWN, "the stream was silent, or ended early")
        finally:
            writer.cancel()
            stream.cancel()

    async def _write(self, stream: grpc.aio.StreamStreamCall[v1.ConsumeRequest, v1.ConsumeResponse]) -> None:
        """Says on one stream what there is to say. Its errors are the reader's, too."""
        opening = v1.Open(
            group=self.group,
            member_id=self.member_id,
            lease=duration(self._lease),
            flow=v1.Flow(max_outstanding_messages=self._max_outstanding),
            heartbeat_interval=duration(HEARTBEAT),
        )
        # Since the last stream ended, nothing is held but what is running.
        self._named = [*self._works, *self._done][:MOST_IDS]
        opening.outstanding.extend(self._named)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.write(v1.ConsumeRequest(open=opening))
            while True:
                await self._say.wait()
                self._say.clear()
                self._gather_no_more()
                if self._acks:
                    self._acknowledged_at = asyncio.get_running_loop().time()
                while self._acks:
                    ids, self._acks = self._acks[:MOST_IDS], self._acks[MOST_IDS:]
                    await stream.write(v1.ConsumeRequest(ack=_ranges(ids)))
                others, self._others = self._others, []
                for request in others:
                    await stream.write(request)
                if self._stopping.is_set() and not self._drain_sent and self._may_drain():
                    self._drain_sent = True
                    await stream.write(v1.ConsumeRequest(drain=v1.Drain()))

    def _may_drain(self) -> bool:
        """Where a stream was lost, what was acknowledged on it and not confirmed has to come again first."""
        return time.monotonic() >= self._drain_from

    def _take(self, item: v1.ConsumeItem) -> None:
        if item.HasField("message"):
            self._arrived(item.message)
        elif item.HasField("ack_results"):
            for delivery_id in _each(item.ack_results.ok, self._unconfirmed):
                self._done.pop(self._unconfirmed.pop(delivery_id), None)
                self.confirmed += 1
            for delivery_id in _each(item.ack_results.lost, self._unconfirmed):
                # It comes again; it was handled, so it is acknowledged then.
                self._remember(self._unconfirmed.pop(delivery_id))
        elif item.HasField("revoked"):
            for delivery_id in _each(item.revoked.void, self._deliveries):
                self._revoked(self._deliveries.pop(delivery_id))
        elif item.HasField("gap"):
            self._on_gap(item.gap)
        elif item.HasField("heartbeat"):
            self.status = item.heartbeat.status
        elif item.HasField("opened"):
            _log.info("group %s: joined as %s, resumed %s", self.group, item.opened.member_id, item.opened.resumed)
            self._resumed(item.opened)
            if len(self._done) > len(self._unconfirmed):
                # What was not confirmed comes at once if it comes again.
                self._drain_from = time.monotonic() + 1.0
            self._ready_event.set()
            self._say.set()

    def _resumed(self, opened: v1.Opened) -> None:
        """What the stream began with has delivery ids on it, unless the gateway does not know of this."""
        named, self._named = self._named, []
        late, self._late = self._late, {}
        if opened.outstanding != len(named):
            return
        void = set(_each(opened.void, dict.fromkeys(range(1, len(named) + 1))))
        now = time.monotonic()
        for delivery_id, message_id in enumerate(named, 1):
            if delivery_id in void:
                continue
            work = self._works.get(message_id)
            if work is not None:
                work.delivery_id, work.lease = delivery_id, self._ack_deadline
                work.extend_at = now + work.lease / 2
                self._deliveries[delivery_id] = work
            elif message_id in self._done:
                self._acknowledge(delivery_id, message_id)
            elif message_id in late:
                work, failure = late[message_id]
                work.delivery_id = delivery_id
                self._give_back(work, self._keys.setdefault(work.key, _Key()), failure)

    def _arrived(self, consumed: v1.ConsumedMessage) -> None:
        # Each look at a field makes a value of it anew.
        message_id, delivery_id = consumed.message_id, consumed.delivery_id
        if message_id in self._done:
            self._acknowledge(delivery_id, message_id)
            return
        now = time.monotonic()
        # The group's, and not the time in the message: that is by the clock of the gateway.
        lease = self._ack_deadline
        work = self._works.get(message_id)
        if work is not None:
            # Running since an earlier delivery.
            work.delivery_id, work.lease, work.extend_at = delivery_id, lease, now + lease / 2
            work.delivery.attempt = consumed.attempt
            self._deliveries[delivery_id] = work
            return
        message = consumed.message if consumed.HasField("message") else None
        event = consumed.event if message is None and consumed.HasField("event") else None
        delivery = Delivery(message_id, consumed.attempt, message, event)
        name = self._key(delivery)
        work = _Work(delivery, name, delivery_id, lease, now + lease / 2, now)
        self._works[message_id] = self._deliveries[delivery_id] = work
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key()
        if key.blocked == message_id:
            key.blocked = None
            key.queue.appendleft(work)
        else:
            key.queue.append(work)
        self._offer(key)

    def _key(self, delivery: Delivery) -> Hashable:
        if self._order == v1.ORDER_KEY_NONE:
            return delivery.message_id
        if self._order == v1.ORDER_KEY_DEVICE_TOPIC:
            return (delivery.device_id, delivery.topic)
        return delivery.device_id

    def _revoked(self, work: _Work) -> None:
        work.delivery_id = None
        if work.task is None:
            self._works.pop(work.delivery.message_id, None)
            key = self._keys[work.key]
            key.queue.remove(work)
            self._tidy(work.key, key)

    def _offer(self, key: _Key) -> None:
        """Notes that a key has work that may begin."""
        if key.queue and key.running is None and key.blocked is None and not key.offered:
            key.offered = True
            self._ready.append(key)

    def _pump(self) -> None:
        """Starts workers for what may begin, as many as may run at once."""
        if self._giving_up:
            return
        for _ in range(min(len(self._ready), self._concurrency - len(self._workers))):
            worker = asyncio.create_task(self._work_through())
            self._workers.add(worker)

    async def _work_through(self) -> None:
        """Runs one handler after the other as long as there is something to begin. A task for each message would cost more than
        the message."""
        worker = asyncio.current_task()
        assert worker is not None
        try:
            begun = 0
            while self._ready and not self._giving_up:
                key = self._ready.popleft()
                key.offered = False
                if not key.queue or key.running is not None or key.blocked is not None:
                    continue
                work = key.queue.popleft()
                key.running, work.task = work, worker
                if await self._work(work, key):
                    return
                begun += 1
                if begun % AT_A_TIME == 0:
                    await asyncio.sleep(0)
        finally:
            self._workers.discard(worker)
            self._pump()

    async def _work(self, work: _Work, key: _Key) -> bool:
        """Runs the handler, and says what became of it. Returns whether it was cancelled."""
        failure: BaseException | None = None
        try:
            await self._handler(work.delivery)
            self.handled += 1
        except asyncio.CancelledError as cancelled:
            failure = cancelled
        except GiveBack as given:
            failure = given
        except Exception as error:  # What a handler raises is its own affair: the message comes again.
            _log.exception("group %s: the handler failed, the message comes again", self.group)
            failure = error
        key.running = None
        message_id, delivery_id = work.delivery.message_id, work.delivery_id
        self._works.pop(message_id, None)
        if delivery_id is not None:
            self._deliveries.pop(delivery_id, None)
        if failure is None:
            if delivery_id is None:
                self._remember(message_id)
            else:
                self._acknowledge(delivery_id, message_id)
        elif delivery_id is not None:
            self._give_back(work, key, failure)
        elif message_id in self._named:
            self._late[message_id] = work, failure
        if key.queue:
            self._offer(key)
        else:
            self._tidy(work.key, key)
        return isinstance(failure, asyncio.CancelledError)

    def _acknowledge(self, delivery_id: int, message_id: str) -> None:
        self._acks.append(delivery_id)
        self._unconfirmed[delivery_id] = message_id
        self._done[message_id] = float("inf")
        if len(self._acks) >= self._gather_most:
            self._say.set()
        elif self._gathering is None and not self._say.is_set():
            loop = asyncio.get_running_loop()
            wait = self._acknowledged_at + GATHER - loop.time()
            if wait > 0:
                self._gathering = loop.call_later(wait, self._say.set)
            else:
                self._say.set()

    def _gather_no_more(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _remember(self, message_id: str) -> None:
        self._done[message_id] = time.monotonic() + REMEMBERED
        self._done.move_to_end(message_id)
        while len(self._done) > MOST_REMEMBERED:
            self._done.popitem(last=False)

    def _give_back(self, work: _Work, key: _Key, failure: BaseException) -> None:
        assert work.delivery_id is not None
        nack = v1.Nack(which=_ranges([work.delivery_id]))
        if isinstance(failure, asyncio.CancelledError):
            nack.reason = "the member stopped"
        elif isinstance(failure, GiveBack):
            nack.reason, nack.dead_letter = _cut(failure.reason), failure.dead_letter
            if failure.delay is not None:
                nack.delay.CopyFrom(duration(failure.delay))
        else:
            nack.reason = _cut(f"{type(failure).__name__}: {failure}")
        self._others.append(v1.ConsumeRequest(nack=nack))
        self._say.set()
        gives_up = nack.dead_letter or (self._max_attempts and work.delivery.attempt >= self._max_attempts)
        if self._order != v1.ORDER_KEY_NONE and not gives_up:
            key.blocked, key.until = work.delivery.message_id, time.monotonic() + BLOCKED

    def _tidy(self, name: Hashable, key: _Key) -> None:
        if not key.queue and key.running is None and key.blocked is None:
            self._keys.pop(name, None)

    def _forget_stream(self) -> None:
        """The stream has ended: nothing can be said about its deliveries any more."""
        for work in self._deliveries.values():
            work.delivery_id = None
            if work.task is None:
                self._works.pop(work.delivery.message_id, None)
        self._deliveries.clear()
        for message_id in self._unconfirmed.values():
            self._remember(message_id)
        self._unconfirmed.clear()
        self._gather_no_more()
        self._acks.clear()
        self._others.clear()
        self._ready.clear()
        self._named.clear()
        self._late.clear()
        for name, key in list(self._keys.items()):
            key.queue.clear()
            key.blocked, key.offered = None, False
            self._tidy(name, key)
        self._drain_sent = False

    async def _tick(self) -> None:
        """Extends leases, lets go of what was blocked or remembered for long enough, and ends a drain that takes too long."""
        stopped: float | None = None
        while True:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            late = [work for work in self._deliveries.values() if work.extend_at <= now]
            by_lease: dict[float, list[int]] = {}
            for work in late:
                if work.delivery_id is not None and now - work.since < LONGEST_WORK:
                    work.extend_at = now + work.lease / 2
                    by_lease.setdefault(round(work.lease, 1), []).append(work.delivery_id)
            for lease, ids in by_lease.items():
                for at in range(0, len(ids), MOST_IDS):
                    extend = v1.Extend(which=_ranges(ids[at : at + MOST_IDS]), deadline=duration(lease))
                    self._others.append(v1.ConsumeRequest(extend=extend))
                self._say.set()
            for name, key in list(self._keys.items()):
                if key.blocked is not None and key.until <= now:
                    key.blocked = None
                    self._offer(key)
                    self._tidy(name, key)
            while self._done and (first := next(iter(self._done.items())))[1] <= now:
                self._done.pop(first[0])
            self._pump()
            if self._stopping.is_set():
                self._say.set()
                stopped = stopped if stopped is not None else now
                if now - stopped > self._drain_timeout and not self._giving_up:
                    self._give_up()

    def _give_up(self) -> None:
        """The drain took too long: what is held goes to others."""
        self._giving_up = True
        queued = [work.delivery_id for key in self._keys.values() for work in key.queue if work.delivery_id is not None]
        for at in range(0, len(queued), MOST_IDS):
            nack = v1.Nack(which=_ranges(queued[at : at + MOST_IDS]), delay=duration(0), reason="the member stopped")
            self._others.append(v1.ConsumeRequest(nack=nack))
        for work in list(self._works.values()):
            if work.task is not None:
                work.task.cancel()
            else:
                self._works.pop(work.delivery.message_id)
        self._say.set()


def _cut(text: str) -> str:
    return text.encode()[:MOST_REASON].decode(errors="ignore")


def _ranges(ids: Iterable[int]) -> v1.Ack:
    """The same as ranges, in order."""
    ack = v1.Ack()
    first = last = 0
    for delivery_id in sorted(ids):
        if delivery_id == last + 1 and first:
            last = delivery_id
            continue
        if first:
            ack.ranges.add(first=first, last=last)
        first = last = delivery_id
    if first:
        ack.ranges.add(first=first, last=last)
    return ack


T = TypeVar("T")


def _each(ranges: Iterable[v1.DeliveryRange], known: dict[int, T]) -> list[int]:
    """Those of `known` in the ranges, at the price of the smaller of both."""
    found: list[int] = []
    for span in ranges:
        if span.last - span.first < len(known):
            found += [delivery_id for delivery_id in range(span.first, span.last + 1) if delivery_id in known]
        else:
            found += [delivery_id for delivery_id in known if span.first <= delivery_id <= span.last]
    return sorted(found)
