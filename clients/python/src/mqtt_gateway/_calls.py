"""How calls are made: the channel, who calls, deadlines, and which failures are tried again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from .errors import GatewayError, Reason, error_of

Token = str | Callable[[], str]
Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)
T = TypeVar("T")
R = TypeVar("R")

#: Seconds between pings of a connection that is silent.
KEEPALIVE = 20
#: Seconds between heartbeats that streams ask for; three without one and the stream is opened anew.
HEARTBEAT = 15.0
#: The first and the longest pause before something is tried again; each is drawn from 0 to its bound.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0

OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE * 1000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # grpc's own pauses between connections grow to two minutes, which is long for a gateway that was restarted.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A page has 3 MiB at most, but for one item that is larger.
    ("grpc.max_receive_message_length", 64 << 20),
]


class Unary(Protocol[Request, Response]):
    """A method with one request and one answer."""

    def __call__(self, request: Request, *, timeout: float | None = None) -> Awaitable[Response]: ...


class Pauses:
    """Pauses that grow, with full jitter: clients that lost the same gateway do not come back all at once."""

    def __init__(self) -> None:
        self._bound = FIRST_PAUSE

    def next(self, at_least: float | None = None) -> float:
        pause = random.uniform(0, self._bound)
        self._bound = min(self._bound * 2, LONGEST_PAUSE)
        return max(pause, at_least or 0.0)

    def reset(self) -> None:
        self._bound = FIRST_PAUSE


def duration(seconds: float) -> Duration:
    """The same as protobuf has it."""
    span = Duration()
    span.FromNanoseconds(round(seconds * 1e9))
    return span


def pem(source: str | bytes | Path | None) -> bytes | None:
    """PEM: as it is if it is bytes, or from a file."""
    return Path(source).read_bytes() if isinstance(source, (str, Path)) else source


def credentials_of(
    ca: str | bytes | Path | None, certificate: tuple[str | bytes | Path, str | bytes | Path] | None
) -> grpc.ChannelCredentials:
    """Of a TLS channel. Without `ca` the authorities that grpc comes with are believed."""
    chain, key = (pem(certificate[0]), pem(certificate[1])) if certificate else (None, None)
    return grpc.ssl_channel_credentials(pem(ca), key, chain)


def passes(error: GatewayError) -> bool:
    """Whether the same call may go better a little later."""
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return True
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after is not None


def is_broken(error: GatewayError) -> bool:
    """Whether the connection broke, which grpc says in one way or another; the gateway itself gives a reason."""
    broken = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
    return error.code in broken and error.reason is Reason.UNKNOWN


def resumes(error: GatewayError, token: Token | None) -> bool:
    """Whether a stream that ended so is opened again: not where the gateway has said that it is of no use."""
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        # Whoever gives tokens may have a new one.
        return callable(token) and error.reason in (Reason.CREDENTIALS_EXPIRED, Reason.CREDENTIALS_REVOKED)
    if error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return error.reason is not Reason.SLOW_CONSUMER
    return is_broken(error)


async def call(method: Unary[T, R], request: T, timeout: float, again: bool) -> R:
    """One answer within `timeout` seconds, over as many attempts as it takes where doing it `again` does no harm."""
    now = asyncio.get_running_loop().time
    deadline, pauses = now() + timeout, Pauses()
    while True:
        try:
            return await method(request, timeout=max(deadline - now(), 0.001))
        except grpc.aio.AioRpcError as failed:
            error = error_of(failed)
        pause = pauses.next(error.retry_after)
        if not (again and (passes(error) or is_broken(error))) or now() + pause >= deadline:
            raise error from None
        await asyncio.sleep(pause)


class Stream(Generic[T]):
    """What a stream of the gateway brings, item by item. It is opened again when its connection is lost; `on_reconnect` is then
    the item that tells of it. Made by the methods that subscribe and watch; `async for` reads it, `close` ends it."""

    def __init__(
        self,
        open_call: Callable[[], grpc.aio.UnaryStreamCall[Any, Any]],
        items: Callable[[Any], Iterable[T]],
        token: Token | None,
        on_reconnect: Callable[[], T] | None,
        silence: float | None = HEARTBEAT * 3,
    ) -> None:
        self._open_call = open_call
        self._items = items
        self._token = token
        self._on_reconnect = on_reconnect
        self._silence = silence
        self._call: grpc.aio.UnaryStreamCall[Any, Any] | None = None
        self._reader = self._read()
        self._closed = False

    async def _start(self) -> None:
        """Opens the stream, and returns when the gateway has."""
        call = self._open_call()
        self._call = call
        try:
            await asyncio.wait_for(call.initial_metadata(), self._silence)
        except asyncio.TimeoutError:
            call.cancel()
            raise
        if call.done() and await call.code() is not grpc.StatusCode.OK:
            # Refused: with nothing but trailers there are no failures of initial_metadata.
            await call.read()

    async def open(self) -> Stream[T]:
        """Opens it. Whatever happens from the return on comes."""
        pauses = Pauses()
        for attempt in range(3):
            try:
                await self._start()
                return self
            except (grpc.aio.AioRpcError, asyncio.TimeoutError) as failed:
                error = _stream_error(failed)
            if attempt == 2 or not passes(error):
                raise error
            await asyncio.sleep(pauses.next(error.retry_after))
        raise AssertionError

    async def _read(self) -> AsyncIterator[T]:
        pauses = Pauses()
        while not self._closed:
            try:
                if self._call is None:
                    await self._start()
                    if self._on_reconnect is not None:
                        yield self._on_reconnect()
                assert self._call is not None
                while True:
                    response = await asyncio.wait_for(self._call.read(), self._silence)
                    if response is grpc.aio.EOF:
                        return
                    pauses.reset()
                    for item in self._items(response):
                        yield item
            except (grpc.aio.AioRpcError, asyncio.TimeoutError) as failed:
                error = _stream_error(failed)
            except asyncio.CancelledError:
                if self._closed:
                    return
                raise
            finally:
                if self._call is not None:
                    self._call.cancel()
                    self._call = None
            if self._closed:
                return
            if not resumes(error, self._token):
                raise error
            await asyncio.sleep(pauses.next(error.retry_after))

    def __aiter__(self) -> AsyncIterator[T]:
        return self._reader

    async def close(self) -> None:
        """Ends the stream. Harmless if it has ended."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _stream_error(failed: BaseException) -> GatewayError:
    if isinstance(failed, grpc.aio.AioRpcError):
        return error_of(failed)
    from .errors import Unavailable

    return Unavailable(grpc.StatusCode.UNAVAILABLE, Reason.UNKNOWN, "the stream was silent for too long")
