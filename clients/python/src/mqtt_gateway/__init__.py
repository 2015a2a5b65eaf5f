"""Client of mqtt-server's gRPC API for asyncio; `mqtt_gateway.sync` is the same without."""

from . import v1
from ._calls import Stream
from .client import Client, Gap, GapReason, Stubs, connect
from .consume import Consumer, Delivery, GiveBack
from .errors import (
    Aborted,
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    GatewayError,
    InvalidArgument,
    NotFound,
    OutcomeLost,
    OutOfRange,
    PermissionDenied,
    Reason,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    error_of,
)

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Client",
    "Consumer",
    "DataLoss",
    "DeadlineExceeded",
    "Delivery",
    "FailedPrecondition",
    "Gap",
    "GapReason",
    "GatewayError",
    "GiveBack",
    "InvalidArgument",
    "NotFound",
    "OutOfRange",
    "OutcomeLost",
    "PermissionDenied",
    "Reason",
    "ResourceExhausted",
    "Stream",
    "Stubs",
    "Unauthenticated",
    "Unavailable",
    "connect",
    "error_of",
    "v1",
]
