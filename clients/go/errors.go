package gateway

import (
	"fmt"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// domain is ErrorInfo.domain of the gateway's errors.
const domain = "mqtt-server"

// Reason is why a call failed, as the gateway names it (ErrorInfo.reason); docs/api.md says when each comes. errors.Is(err,
// gateway.DeviceOffline) asks for one.
type Reason string

// Error makes a Reason a target of errors.Is.
func (r Reason) Error() string { return string(r) }

// The reasons.
const (
	BanInFile            Reason = "BAN_IN_FILE"
	BanNotFound          Reason = "BAN_NOT_FOUND"
	CommandsDisabled     Reason = "COMMANDS_DISABLED"
	CommandEnded         Reason = "COMMAND_ENDED"
	CommandExists        Reason = "COMMAND_EXISTS"
	CommandNotFound      Reason = "COMMAND_NOT_FOUND"
	CommandRefused       Reason = "COMMAND_REFUSED"
	CommandTimedOut      Reason = "COMMAND_TIMED_OUT"
	CredentialsExpired   Reason = "CREDENTIALS_EXPIRED"
	CredentialsMissing   Reason = "CREDENTIALS_MISSING"
	CredentialsRevoked   Reason = "CREDENTIALS_REVOKED"
	CredentialsUnknown   Reason = "CREDENTIALS_UNKNOWN"
	DeviceNotFound       Reason = "DEVICE_NOT_FOUND"
	DeviceOffline        Reason = "DEVICE_OFFLINE"
	DeviceUnknown        Reason = "DEVICE_UNKNOWN"
	EtagMismatch         Reason = "ETAG_MISMATCH"
	Fenced               Reason = "FENCED"
	FilterNotAllowed     Reason = "FILTER_NOT_ALLOWED"
	FilterNotSupported   Reason = "FILTER_NOT_SUPPORTED"
	GroupsDisabled       Reason = "GROUPS_DISABLED"
	GroupDeleted         Reason = "GROUP_DELETED"
	GroupExists          Reason = "GROUP_EXISTS"
	GroupOfBridge        Reason = "GROUP_OF_BRIDGE"
	FilterImmutable      Reason = "FILTER_IMMUTABLE"
	GroupDraining        Reason = "GROUP_DRAINING"
	GroupNotFound        Reason = "GROUP_NOT_FOUND"
	HistoryOff           Reason = "HISTORY_OFF"
	IdempotencyKeyReused Reason = "IDEMPOTENCY_KEY_REUSED"
	Internal             Reason = "INTERNAL"
	InvalidField         Reason = "INVALID_FIELD"
	LatestOff            Reason = "LATEST_OFF"
	MemoryBudget         Reason = "MEMORY_BUDGET"
	NotActive            Reason = "NOT_ACTIVE"
	NoTokens             Reason = "NO_TOKENS"
	OldToken             Reason = "OLD_TOKEN"
	OutcomeLost          Reason = "OUTCOME_LOST"
	OutOfScope           Reason = "OUT_OF_SCOPE"
	PacketTooLarge       Reason = "PACKET_TOO_LARGE"
	PageTokenInvalid     Reason = "PAGE_TOKEN_INVALID"
	PageTokenMismatch    Reason = "PAGE_TOKEN_MISMATCH"
	QueueFull            Reason = "QUEUE_FULL"
	RequestIncomplete    Reason = "REQUEST_INCOMPLETE"
	RequestTooLarge      Reason = "REQUEST_TOO_LARGE"
	RetainedQuota        Reason = "RETAINED_QUOTA"
	RetainUnavailable    Reason = "RETAIN_UNAVAILABLE"
	RoleDenied           Reason = "ROLE_DENIED"
	ScheduleFull         Reason = "SCHEDULE_FULL"
	ScheduleNeedsStore   Reason = "SCHEDULE_NEEDS_STORE"
	ScheduleNotFound     Reason = "SCHEDULE_NOT_FOUND"
	ShadowsDisabled      Reason = "SHADOWS_DISABLED"
	ShadowsFull          Reason = "SHADOWS_FULL"
	ShadowNotFound       Reason = "SHADOW_NOT_FOUND"
	ShadowTooLarge       Reason = "SHADOW_TOO_LARGE"
	ShuttingDown         Reason = "SHUTTING_DOWN"
	SlowConsumer         Reason = "SLOW_CONSUMER"
	StoreDamaged         Reason = "STORE_DAMAGED"
	StoreLate            Reason = "STORE_LATE"
	StoreRefused         Reason = "STORE_REFUSED"
	StoreUnavailable     Reason = "STORE_UNAVAILABLE"
	SubscriptionQuota    Reason = "SUBSCRIPTION_QUOTA"
	TokenNotFound        Reason = "TOKEN_NOT_FOUND"
	TooManyBans          Reason = "TOO_MANY_BANS"
	TooManyCalls         Reason = "TOO_MANY_CALLS"
	TooManyCommands      Reason = "TOO_MANY_COMMANDS"
	TooManyGroups        Reason = "TOO_MANY_GROUPS"
	TooManyMembers       Reason = "TOO_MANY_MEMBERS"
	TooManyShadows       Reason = "TOO_MANY_SHADOWS"
	TooManyStreams       Reason = "TOO_MANY_STREAMS"
	TooManyTraces        Reason = "TOO_MANY_TRACES"
	Unimplemented        Reason = "UNIMPLEMENTED"
	ValueNotFound        Reason = "VALUE_NOT_FOUND"
	VersionConflict      Reason = "VERSION_CONFLICT"
	WaitIncomplete       Reason = "WAIT_INCOMPLETE"
	// Unknown: the gateway gave none, as when it could not be reached.
	Unknown Reason = "UNKNOWN"
)

// Error is what every call of this package fails with, those of the generated stubs included. errors.As finds it, and
// status.FromError takes it.
type Error struct {
	// Code of the gRPC status.
	Code codes.Code
	// Reason why; Unknown where the gateway gave none.
	Reason Reason
	// Message for people.
	Message string
	// Metadata is more about the reason; the methods have what is in it by name.
	Metadata map[string]string
	// RetryAfter is when it makes sense to try again, where the gateway says so.
	RetryAfter time.Duration
	// IdempotencyKey of a publish that failed: with the same key the same request can be made again and is not published twice.
	IdempotencyKey string

	status *status.Status
}

func (e *Error) Error() string { return fmt.Sprintf("%s %s: %s", e.Code, e.Reason, e.Message) }

// Is reports whether target is the error's Reason.
func (e *Error) Is(target error) bool {
	reason, ok := target.(Reason)
	return ok && reason == e.Reason
}

// GRPCStatus is the status as it came.
func (e *Error) GRPCStatus() *status.Status { return e.status }

// Field of the request that is wrong, or not in the caller's scope.
func (e *Error) Field() string { return e.Metadata["field"] }

// Role of the caller, where it may not call this.
func (e *Error) Role() string { return e.Metadata["role"] }

// Level that a publish had reached when its time was over: ACCEPTED, DURABLE, SENT or ACKED.
func (e *Error) Level() string { return e.Metadata["level"] }

// Stage that a command had reached: QUEUED, SENT or DELIVERED.
func (e *Error) Stage() string { return e.Metadata["stage"] }

// Version that a shadow has, where another was expected.
func (e *Error) Version() uint64 {
	version, _ := strconv.ParseUint(e.Metadata["version"], 10, 64)
	return version
}

// errorOf makes an Error of what grpc returned; nil and io.EOF are what they are.
func errorOf(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(*Error); ok {
		return err
	}
	// An error that is no status, such as io.EOF, is left alone; one of a context becomes a status.
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); !ok {
		return err
	}
	told, _ := status.FromError(err)
	made := &Error{Code: told.Code(), Reason: Unknown, Message: told.Message(), Metadata: map[string]string{}, status: told}
	for _, detail := range told.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == domain {
				made.Reason = Reason(detail.Reason)
				for key, value := range detail.Metadata {
					made.Metadata[key] = value
				}
			}
		case *errdetails.RetryInfo:
			made.RetryAfter = detail.RetryDelay.AsDuration()
		case *errdetails.BadRequest:
			if len(detail.FieldViolations) > 0 && made.Metadata["field"] == "" {
				made.Metadata["field"] = detail.FieldViolations[0].Field
			}
		}
	}
	return made
}

// unavailable is an error that this package found by itself.
func unavailable(message string) *Error {
	told := status.New(codes.Unavailable, message)
	return &Error{Code: codes.Unavailable, Reason: Unknown, Message: message, Metadata: map[string]string{}, status: told}
}
