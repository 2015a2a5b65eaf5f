package gateway

import (
	"context"
	"errors"
	"io"
	"iter"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	"example.org/mqtt-server/clients/go/gatewayv1"
)

// GapReason is why something is missing from a stream.
type GapReason int

// The gateway's reasons, by the same numbers, and one of this package.
const (
	GapUnknown    = GapReason(gatewayv1.GapReason_GAP_REASON_UNSPECIFIED)
	GapBufferFull = GapReason(gatewayv1.GapReason_GAP_REASON_BUFFER_FULL)
	GapConflated  = GapReason(gatewayv1.GapReason_GAP_REASON_CONFLATED)
	GapTooLarge   = GapReason(gatewayv1.GapReason_GAP_REASON_TOO_LARGE)
	GapMemory     = GapReason(gatewayv1.GapReason_GAP_REASON_MEMORY)
	GapRetention  = GapReason(gatewayv1.GapReason_GAP_REASON_RETENTION)
	GapDamaged    = GapReason(gatewayv1.GapReason_GAP_REASON_DAMAGED)
	// GapReconnected: the stream's connection was lost, and what came until it was back is missing. This package says so, not the gateway.
	GapReconnected GapReason = -1
)

func (r GapReason) String() string {
	if r == GapReconnected {
		return "RECONNECTED"
	}
	return strings.TrimPrefix(gatewayv1.GapReason(r).String(), "GAP_REASON_")
}

// Gap is a place in a stream where something is missing.
type Gap struct {
	// Count of messages; 0 where nobody knows.
	Count uint64
	// Reason why.
	Reason GapReason
}

func gapOf(gap *gatewayv1.Gap) *Gap { return &Gap{gap.GetCount(), GapReason(gap.GetReason())} }

// Stream is what a stream of the gateway brings, item by item. It is opened again when its connection is lost. It ends with the context
// it was made with, or by Close. For one goroutine at a time, but for Close.
type Stream[T any] struct {
	client  *Client
	ctx     context.Context
	cancel  context.CancelFunc
	open    func(context.Context) (receive[T], error)
	lost    func() (T, bool)
	current receive[T]
	ready   []T
	pauses  pauses
}

// receive is the next items of one stream.
type receive[T any] func() ([]T, error)

// streaming opens a stream and returns when the gateway has.
func streaming[T any](ctx context.Context, client *Client, lost func() (T, bool),
	open func(context.Context) (receive[T], error)) (*Stream[T], error) {
	stream := &Stream[T]{client: client, open: open, lost: lost}
	stream.ctx, stream.cancel = context.WithCancel(ctx)
	for attempt := 0; ; attempt++ {
		current, err := open(stream.ctx)
		if err == nil {
			stream.current = current
			return stream, nil
		}
		if attempt == 2 || !passes(err) || sleep(ctx, stream.pauses.next(err)) != nil {
			stream.cancel()
			return nil, err
		}
	}
}

// Next waits for the next item. io.EOF is the end of a stream that has one.
func (s *Stream[T]) Next() (T, error) {
	var none T
	for {
		if len(s.ready) > 0 {
			item := s.ready[0]
			s.ready = s.ready[1:]
			return item, nil
		}
		if s.current == nil {
			current, err := s.open(s.ctx)
			if err != nil {
				if err = s.pause(err); err != nil {
					return none, err
				}
				continue
			}
			s.current = current
			if item, told := s.lost(); told {
				return item, nil
			}
		}
		items, err := s.current()
		if err == nil {
			s.pauses.reset()
			s.ready = items
			continue
		}
		if errors.Is(err, io.EOF) {
			return none, io.EOF
		}
		s.current = nil
		if err = s.pause(err); err != nil {
			return none, err
		}
	}
}

// All is for range: it ends with the stream, or with the error that is its last value.
func (s *Stream[T]) All() iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for {
			item, err := s.Next()
			if errors.Is(err, io.EOF) {
				return
			}
			if !yield(item, err) || err != nil {
				return
			}
		}
	}
}

// Close ends the stream.
func (s *Stream[T]) Close() { s.cancel() }

// pause waits before the stream is opened again, or returns why it is not.
func (s *Stream[T]) pause(err error) error {
	if s.ctx.Err() != nil {
		return s.ctx.Err()
	}
	if !s.client.resumes(err) {
		return err
	}
	return sleep(s.ctx, s.pauses.next(err))
}

// opened makes receive of a generated stream. A stream that is silent for too long is given up.
func opened[Response, T any](ctx context.Context, silence time.Duration,
	open func(context.Context) (grpc.ServerStreamingClient[Response], error), items func(*Response) []T) (receive[T], error) {
	ctx, cancel := context.WithCancelCause(ctx)
	watch := newWatchdog(silence, cancel)
	stream, err := open(ctx)
	var first *Response
	if err == nil {
		// The gateway answers when the stream is there; where it refuses there are no headers, and the error comes as the first message.
		var header metadata.MD
		if header, err = stream.Header(); err == nil && header.Len() == 0 {
			first, err = stream.Recv()
		}
	}
	if err != nil {
		watch.stop()
		cancel(nil)
		return nil, watch.told(ctx, errorOf(err))
	}
	// Only waiting for the gateway counts as its silence, not how long the application works on what came.
	watch.stop()
	return func() ([]T, error) {
		if response := first; response != nil {
			first = nil
			return items(response), nil
		}
		watch.fed()
		response, err := stream.Recv()
		watch.stop()
		if err != nil {
			err = watch.told(ctx, err)
			cancel(nil)
			return nil, err
		}
		return items(response), nil
	}, nil
}

// watchdog ends a stream that is silent.
type watchdog struct {
	timer *time.Timer
	span  time.Duration
}

var errSilent = errors.New("the stream was silent for too long")

func newWatchdog(span time.Duration, cancel context.CancelCauseFunc) *watchdog {
	if span == 0 {
		return &watchdog{}
	}
	return &watchdog{time.AfterFunc(span, func() { cancel(errSilent) }), span}
}

// fed gives the stream its whole time again, after a stop as well.
func (w *watchdog) fed() {
	if w.timer != nil {
		w.timer.Reset(w.span)
	}
}

func (w *watchdog) stop() {
	if w.timer != nil {
		w.timer.Stop()
	}
}

// told is the error, or that the stream was silent if that is why it ended.
func (w *watchdog) told(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), errSilent) {
		return unavailable(errSilent.Error())
	}
	return err
}

// Item of a subscription: one of its fields is set.
type Item struct {
	Message *gatewayv1.ReceivedMessage
	Gap     *Gap
}

// Subscribe follows what is published from now on, at most once, and returns when the gateway has the subscription. What a slow reader
// has lost, and what came while the connection was away, is told by a Gap in its place. Who must not miss anything consumes a group.
func (c *Client) Subscribe(ctx context.Context, request *gatewayv1.SubscribeRequest) (*Stream[Item], error) {
	request = withHeartbeat(request, func(r *gatewayv1.SubscribeRequest) **durationpb.Duration { return &r.HeartbeatInterval })
	items := func(response *gatewayv1.SubscribeResponse) []Item {
		var items []Item
		for _, item := range response.Items {
			switch item := item.Item.(type) {
			case *gatewayv1.SubscribeItem_Message:
				items = append(items, Item{Message: item.Message})
			case *gatewayv1.SubscribeItem_Gap:
				items = append(items, Item{Gap: gapOf(item.Gap)})
			}
		}
		return items
	}
	lost := func() (Item, bool) { return Item{Gap: &Gap{Reason: GapReconnected}}, true }
	return streaming(ctx, c, lost, func(ctx context.Context) (receive[Item], error) {
		return opened(ctx, 3*heartbeat, func(ctx context.Context) (grpc.ServerStreamingClient[gatewayv1.SubscribeResponse], error) {
			return c.Stubs.Subscriber.Subscribe(ctx, request)
		}, items)
	})
}
