package gateway

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// numbers is a stream of a gateway that counts to last, and then says nothing. As grpc's own it fails when its context has ended.
type numbers struct {
	grpc.ServerStreamingClient[int]
	ctx        context.Context
	said, last int
}

func (n *numbers) Header() (metadata.MD, error) {
	return metadata.Pairs("content-type", "application/grpc"), nil
}

func (n *numbers) Recv() (*int, error) {
	if n.said == n.last {
		<-n.ctx.Done()
	}
	if err := n.ctx.Err(); err != nil {
		return nil, status.FromContextError(err).Err()
	}
	n.said++
	return &n.said, nil
}

// Rules out that a healthy stream is cancelled as silent, and what it had buffered lost, because the application took longer over what
// came than the stream may be silent; and that a stream is no longer given up once it is silent after such a pause.
func TestOnlyWaitingForTheGatewayIsSilence(t *testing.T) {
	t.Parallel()
	const silence, work = 100 * time.Millisecond, 250 * time.Millisecond
	open := func(ctx context.Context) (grpc.ServerStreamingClient[int], error) {
		return &numbers{ctx: ctx, last: 2}, nil
	}
	items := func(number *int) []int { return []int{*number} }
	next, err := opened(context.Background(), silence, open, items)
	if err != nil {
		t.Fatal(err)
	}
	for number := 1; number <= 2; number++ {
		// Before the first as well: the stream is open, and the application comes to it later.
		time.Sleep(work)
		if got, err := next(); err != nil || got[0] != number {
			t.Fatal(number, got, err)
		}
	}
	time.Sleep(work)
	var told *Error
	if _, err := next(); !errors.As(err, &told) || told.Code != codes.Unavailable || told.Message != errSilent.Error() {
		t.Error(err)
	}
}
