import { Code, ConnectError } from "@connectrpc/connect";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";

export { Code } from "@connectrpc/connect";

/** ErrorInfo.domain of the gateway's errors. */
const DOMAIN = "mqtt-server";

/** Why a call can fail, as the gateway names it (ErrorInfo.reason); docs/api.md says when each comes. */
export const REASONS = [
  "BAN_IN_FILE",
  "BAN_NOT_FOUND",
  "COMMANDS_DISABLED",
  "COMMAND_ENDED",
  "COMMAND_EXISTS",
  "COMMAND_NOT_FOUND",
  "COMMAND_REFUSED",
  "COMMAND_TIMED_OUT",
  "CREDENTIALS_EXPIRED",
  "CREDENTIALS_MISSING",
  "CREDENTIALS_REVOKED",
  "CREDENTIALS_UNKNOWN",
  "DEVICE_NOT_FOUND",
  "DEVICE_OFFLINE",
  "DEVICE_UNKNOWN",
  "ETAG_MISMATCH",
  "FENCED",
  "FILTER_NOT_ALLOWED",
  "FILTER_NOT_SUPPORTED",
  "GROUPS_DISABLED",
  "GROUP_DELETED",
  "GROUP_EXISTS",
  "GROUP_OF_BRIDGE",
  "FILTER_IMMUTABLE",
  "GROUP_DRAINING",
  "GROUP_NOT_FOUND",
  "HISTORY_OFF",
  "IDEMPOTENCY_KEY_REUSED",
  "INTERNAL",
  "INVALID_FIELD",
  "LATEST_OFF",
  "MEMORY_BUDGET",
  "NOT_ACTIVE",
  "NO_TOKENS",
  "OLD_TOKEN",
  "OUTCOME_LOST",
  "OUT_OF_SCOPE",
  "PACKET_TOO_LARGE",
  "PAGE_TOKEN_INVALID",
  "PAGE_TOKEN_MISMATCH",
  "QUEUE_FULL",
  "REQUEST_INCOMPLETE",
  "REQUEST_TOO_LARGE",
  "RETAINED_QUOTA",
  "RETAIN_UNAVAILABLE",
  "ROLE_DENIED",
  "SCHEDULE_FULL",
  "SCHEDULE_NEEDS_STORE",
  "SCHEDULE_NOT_FOUND",
  "SHADOWS_DISABLED",
  "SHADOWS_FULL",
  "SHADOW_NOT_FOUND",
  "SHADOW_TOO_LARGE",
  "SHUTTING_DOWN",
  "SLOW_CONSUMER",
  "STORE_DAMAGED",
  "STORE_LATE",
  "STORE_REFUSED",
  "STORE_UNAVAILABLE",
  "SUBSCRIPTION_QUOTA",
  "TOKEN_NOT_FOUND",
  "TOO_MANY_BANS",
  "TOO_MANY_CALLS",
  "TOO_MANY_COMMANDS",
  "TOO_MANY_GROUPS",
  "TOO_MANY_MEMBERS",
  "TOO_MANY_SHADOWS",
  "TOO_MANY_STREAMS",
  "TOO_MANY_TRACES",
  "UNIMPLEMENTED",
  "VALUE_NOT_FOUND",
  "VERSION_CONFLICT",
  "WAIT_INCOMPLETE",
  /** The gateway gave none, as when it could not be reached, or one that this version of the library does not know. */
  "UNKNOWN",
] as const;

/** One of them. */
export type Reason = (typeof REASONS)[number];

const known: ReadonlySet<string> = new Set(REASONS);

/** What every call of this library fails with, those of the generated clients included: `code` and `reason` tell why. */
export class GatewayError extends ConnectError {
  // The name stays that of ConnectError, by which the transport knows its own errors and hands them on as they are.

  /** ConnectError takes every error of its kind for an instance; this class is one. */
  static override [Symbol.hasInstance](value: unknown): boolean {
    return Function.prototype[Symbol.hasInstance].call(this, value);
  }

  /** Why; UNKNOWN where the gateway gave none. */
  readonly reason: Reason;
  /** More about the reason; the getters have what is in it by name. */
  readonly info: Readonly<Record<string, string>>;
  /** After how many milliseconds it makes sense to try again, where the gateway says so. */
  readonly retryAfterMs: number | undefined;
  /** Of a publish that failed: with the same key the same request can be made again and is not published twice. */
  idempotencyKey: string | undefined;

  constructor(
    message: string,
    code: Code,
    reason: Reason = "UNKNOWN",
    details: Record<string, string> = {},
    retryAfterMs?: number,
    cause?: unknown,
  ) {
    super(message, code, undefined, undefined, cause);
    this.reason = reason;
    this.info = details;
    this.retryAfterMs = retryAfterMs;
  }

  /** The field of the request that is wrong, or not in the caller's scope. */
  get field(): string | undefined {
    return this.info["field"];
  }

  /** The caller's role, where it may not call this. */
  get role(): string | undefined {
    return this.info["role"];
  }

  /** How far a publish had come when its time was over: ACCEPTED, DURABLE, SENT or ACKED. */
  get level(): string | undefined {
    return this.info["level"];
  }

  /** How far a command had come: QUEUED, SENT or DELIVERED. */
  get stage(): string | undefined {
    return this.info["stage"];
  }

  /** The version that a shadow has, where another was expected. */
  get version(): bigint | undefined {
    const version = this.info["version"];
    return version === undefined ? undefined : BigInt(version);
  }
}

/** What was thrown, as an error of this library. `ended` says whether the caller has ended the call. */
export function errorOf(thrown: unknown, ended = true): GatewayError {
  if (thrown instanceof GatewayError) return thrown;
  const error = ConnectError.from(thrown);
  const told = error.findDetails(ErrorInfoSchema).find((detail) => detail.domain === DOMAIN);
  const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
  const wrong = error.findDetails(BadRequestSchema)[0]?.fieldViolations[0]?.field;
  const reason = told !== undefined && known.has(told.reason) ? (told.reason as Reason) : "UNKNOWN";
  // A connection that broke is ABORTED or CANCELED to the transport, words for something else.
  const broke = told === undefined && (error.code === Code.Aborted || (error.code === Code.Canceled && !ended));
  const code = broke ? Code.Unavailable : error.code;
  return new GatewayError(
    error.rawMessage,
    code,
    reason,
    { ...(wrong === undefined ? {} : { field: wrong }), ...told?.metadata },
    delay === undefined ? undefined : Number(delay.seconds) * 1000 + delay.nanos / 1e6,
    thrown,
  );
}
