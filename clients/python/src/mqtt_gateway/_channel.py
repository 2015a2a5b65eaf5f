"""A channel whose calls say who makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._calls import Token


class _Method:
    """A method of a channel, called with the token in the metadata."""

    def __init__(self, method: Any, token: Token | None) -> None:
        self._method, self._token = method, token

    def _with_token(self, arguments: dict[str, Any]) -> dict[str, Any]:
        token = self._token() if callable(self._token) else self._token
        if token:
            given: Sequence[tuple[str, Any]] = tuple(arguments.get("metadata") or ())
            arguments["metadata"] = (*given, ("authorization", f"Bearer {token}"))
        return arguments

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._method(*positional, **self._with_token(named))

    def with_call(self, *positional: Any, **named: Any) -> Any:
        return self._method.with_call(*positional, **self._with_token(named))

    def future(self, *positional: Any, **named: Any) -> Any:
        return self._method.future(*positional, **self._with_token(named))


class TokenChannel:
    """As the channel that it wraps, of grpc or grpc.aio, for all that generated stubs ask of one."""

    def __init__(self, channel: Any, token: Token | None) -> None:
        self._channel, self._token = channel, token

    def unary_unary(self, *positional: Any, **named: Any) -> _Method:
        return _Method(self._channel.unary_unary(*positional, **named), self._token)

    def unary_stream(self, *positional: Any, **named: Any) -> _Method:
        return _Method(self._channel.unary_stream(*positional, **named), self._token)

    def stream_unary(self, *positional: Any, **named: Any) -> _Method:
        return _Method(self._channel.stream_unary(*positional, **named), self._token)

    def stream_stream(self, *positional: Any, **named: Any) -> _Method:
        return _Method(self._channel.stream_stream(*positional, **named), self._token)
