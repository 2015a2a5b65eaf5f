"""Errors of the gateway, by code and by reason: nothing has to be read out of a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "mqtt-server"


class Reason(str, Enum):
    """Why a call failed, as the gateway names it: `ErrorInfo.reason`. docs/api.md says when each comes."""

    BAN_IN_FILE = "BAN_IN_FILE"
    BAN_NOT_FOUND = "BAN_NOT_FOUND"
    COMMANDS_DISABLED = "COMMANDS_DISABLED"
    COMMAND_ENDED = "COMMAND_ENDED"
    COMMAND_EXISTS = "COMMAND_EXISTS"
    COMMAND_NOT_FOUND = "COMMAND_NOT_FOUND"
    COMMAND_REFUSED = "COMMAND_REFUSED"
    COMMAND_TIMED_OUT = "COMMAND_TIMED_OUT"
    CREDENTIALS_EXPIRED = "CREDENTIALS_EXPIRED"
    CREDENTIALS_MISSING = "CREDENTIALS_MISSING"
    CREDENTIALS_REVOKED = "CREDENTIALS_REVOKED"
    CREDENTIALS_UNKNOWN = "CREDENTIALS_UNKNOWN"
    DEVICE_NOT_FOUND = "DEVICE_NOT_FOUND"
    DEVICE_OFFLINE = "DEVICE_OFFLINE"
    DEVICE_UNKNOWN = "DEVICE_UNKNOWN"
    ETAG_MISMATCH = "ETAG_MISMATCH"
    FENCED = "FENCED"
    FILTER_NOT_ALLOWED = "FILTER_NOT_ALLOWED"
    FILTER_NOT_SUPPORTED = "FILTER_NOT_SUPPORTED"
    GROUPS_DISABLED = "GROUPS_DISABLED"
    GROUP_DELETED = "GROUP_DELETED"
    GROUP_EXISTS = "GROUP_EXISTS"
    GROUP_OF_BRIDGE = "GROUP_OF_BRIDGE"
    FILTER_IMMUTABLE = "FILTER_IMMUTABLE"
    GROUP_DRAINING = "GROUP_DRAINING"
    GROUP_NOT_FOUND = "GROUP_NOT_FOUND"
    HISTORY_OFF = "HISTORY_OFF"
    IDEMPOTENCY_KEY_REUSED = "IDEMPOTENCY_KEY_REUSED"
    INTERNAL = "INTERNAL"
    INVALID_FIELD = "INVALID_FIELD"
    LATEST_OFF = "LATEST_OFF"
    MEMORY_BUDGET = "MEMORY_BUDGET"
    NOT_ACTIVE = "NOT_ACTIVE"
    NO_TOKENS = "NO_TOKENS"
    OLD_TOKEN = "OLD_TOKEN"
    OUTCOME_LOST = "OUTCOME_LOST"
    OUT_OF_SCOPE = "OUT_OF_SCOPE"
    PACKET_TOO_LARGE = "PACKET_TOO_LARGE"
    PAGE_TOKEN_INVALID = "PAGE_TOKEN_INVALID"
    PAGE_TOKEN_MISMATCH = "PAGE_TOKEN_MISMATCH"
    QUEUE_FULL = "QUEUE_FULL"
    REQUEST_INCOMPLETE = "REQUEST_INCOMPLETE"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    RETAINED_QUOTA = "RETAINED_QUOTA"
    RETAIN_UNAVAILABLE = "RETAIN_UNAVAILABLE"
    ROLE_DENIED = "ROLE_DENIED"
    SCHEDULE_FULL = "SCHEDULE_FULL"
    SCHEDULE_NEEDS_STORE = "SCHEDULE_NEEDS_STORE"
    SCHEDULE_NOT_FOUND = "SCHEDULE_NOT_FOUND"
    SHADOWS_DISABLED = "SHADOWS_DISABLED"
    SHADOWS_FULL = "SHADOWS_FULL"
    SHADOW_NOT_FOUND = "SHADOW_NOT_FOUND"
    SHADOW_TOO_LARGE = "SHADOW_TOO_LARGE"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    SLOW_CONSUMER = "SLOW_CONSUMER"
    STORE_DAMAGED = "STORE_DAMAGED"
    STORE_LATE = "STORE_LATE"
    STORE_REFUSED = "STORE_REFUSED"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    SUBSCRIPTION_QUOTA = "SUBSCRIPTION_QUOTA"
    TOKEN_NOT_FOUND = "TOKEN_NOT_FOUND"
    TOO_MANY_BANS = "TOO_MANY_BANS"
    TOO_MANY_CALLS = "TOO_MANY_CALLS"
    TOO_MANY_COMMANDS = "TOO_MANY_COMMANDS"
    TOO_MANY_GROUPS = "TOO_MANY_GROUPS"
    TOO_MANY_MEMBERS = "TOO_MANY_MEMBERS"
    TOO_MANY_SHADOWS = "TOO_MANY_SHADOWS"
    TOO_MANY_STREAMS = "TOO_MANY_STREAMS"
    TOO_MANY_TRACES = "TOO_MANY_TRACES"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    VALUE_NOT_FOUND = "VALUE_NOT_FOUND"
    VERSION_CONFLICT = "VERSION_CONFLICT"
    WAIT_INCOMPLETE = "WAIT_INCOMPLETE"
    UNKNOWN = "UNKNOWN"
    """The gateway gave none, as when it could not be reached, or one that this version of the library does not know."""


class GatewayError(Exception):
    """A call failed. Subclasses tell its code, `reason` tells why."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: Reason,
        message: str,
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{code.name} {reason.value}: {message}")
        self.code = code
        """The gRPC status code."""
        self.reason = reason
        self.message = message
        """For people."""
        self.metadata: Mapping[str, str] = dict(metadata or {})
        """More about the reason; the properties below have what is in it by name."""
        self.retry_after = retry_after
        """Seconds after which it makes sense to try again, where the gateway says so."""
        self.idempotency_key: str | None = None
        """Of a publish that failed: with the same key the same request can be made again and is not published twice."""

    @property
    def field(self) -> str | None:
        """The field of the request that is wrong, or not in the caller's scope."""
        return self.metadata.get("field")

    @property
    def role(self) -> str | None:
        """The caller's role, where it may not call this."""
        return self.metadata.get("role")

    @property
    def level(self) -> str | None:
        """How far a publish had come when its time was over: ACCEPTED, DURABLE, SENT or ACKED."""
        return self.metadata.get("level")

    @property
    def stage(self) -> str | None:
        """How far a command had come: QUEUED, SENT or DELIVERED."""
        return self.metadata.get("stage")

    @property
    def version(self) -> int | None:
        """The version that a shadow has, where another was expected."""
        version = self.metadata.get("version")
        return None if version is None else int(version)


class InvalidArgument(GatewayError):
    """Something in the request is wrong; `field` says what."""


class Unauthenticated(GatewayError):
    """Who calls is not known, or no longer."""


class PermissionDenied(GatewayError):
    """Who calls may not do this."""


class NotFound(GatewayError):
    """There is no such device, value, group, command, shadow or token."""


class AlreadyExists(GatewayError):
    """The name or key stands for something else."""


class FailedPrecondition(GatewayError):
    """Not as things stand: the device is offline, or what is asked for is switched off."""


class Aborted(GatewayError):
    """Somebody else was first: VERSION_CONFLICT, ETAG_MISMATCH, FENCED."""


class OutOfRange(GatewayError):
    """The place of a token is no longer kept."""


class ResourceExhausted(GatewayError):
    """A queue, a quota or a budget is full."""


class DeadlineExceeded(GatewayError):
    """It was not done in time; `level` or `stage` says how far it came."""


class Unavailable(GatewayError):
    """The gateway cannot be reached, shuts down, or its store is away."""


class DataLoss(GatewayError):
    """What is stored cannot be read."""


class OutcomeLost(GatewayError):
    """The message was published, and nobody knows what became of it. Do not send it again."""


_BY_CODE: dict[grpc.StatusCode, type[GatewayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DATA_LOSS: DataLoss,
}


def reason_of(text: str) -> Reason:
    """The reason of that name, UNKNOWN if this version of the library does not know it."""
    try:
        return Reason(text)
    except ValueError:
        return Reason.UNKNOWN


def make_error(
    code: grpc.StatusCode,
    reason: Reason,
    message: str,
    metadata: Mapping[str, str] | None = None,
    retry_after: float | None = None,
) -> GatewayError:
    """The error of the class that fits."""
    kind = _BY_CODE.get(code, GatewayError)
    if reason is Reason.OUTCOME_LOST:
        kind = OutcomeLost
    return kind(code, reason, message, metadata, retry_after)


def error_of(error: grpc.RpcError) -> GatewayError:
    """What a generated stub raised, as an error of this library."""
    # What grpc raises is a call, too, of which the types of grpcio say nothing.
    code, details = grpc.StatusCode.UNKNOWN, ""
    trailers: Iterable[tuple[str, str | bytes]] = ()
    for name in ("code", "details", "trailing_metadata"):
        method = getattr(error, name, None)
        value: Any = method() if callable(method) else None
        if name == "code" and isinstance(value, grpc.StatusCode):
            code = value
        elif name == "details" and isinstance(value, str):
            details = value
        elif name == "trailing_metadata" and value is not None:
            trailers = value
    reason, retry_after = Reason.UNKNOWN, None
    metadata: dict[str, str] = {}
    for key, value in trailers:
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            retry = error_details_pb2.RetryInfo()
            wrong = error_details_pb2.BadRequest()
            if detail.Unpack(info) and info.domain == DOMAIN:
                reason = reason_of(info.reason)
                metadata.update(info.metadata)
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToTimedelta().total_seconds()
            elif detail.Unpack(wrong) and wrong.field_violations:
                metadata.setdefault("field", wrong.field_violations[0].field)
    return make_error(code, reason, details or code.name, metadata, retry_after)
