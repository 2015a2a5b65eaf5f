package gateway_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	gateway "example.org/mqtt-server/clients/go"
	"example.org/mqtt-server/clients/go/gatewayv1"
)

// failure checks how a call failed.
func failure(t *testing.T, err error, code codes.Code, reason gateway.Reason) *gateway.Error {
	t.Helper()
	var told *gateway.Error
	if !errors.As(err, &told) || told.Code != code || told.Reason != reason || !errors.Is(err, reason) || status.Code(err) != code {
		t.Fatalf("%v is not %v %v", err, code, reason)
	}
	return told
}

func must[T any](value T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func TestPublishTellsTheOutcomeAndOnceIsOnce(t *testing.T) {
	t.Parallel()
	world, ctx := newWorld(t), context.Background()
	client := world.connect(world.proxy(), gateway.Options{Token: world.Token})
	world.device("once", "once/#")
	nobody := must(client.Publish(ctx, &gatewayv1.PublishRequest{Topic: "nobody/here"}))(t)
	if nobody.Outcome != gatewayv1.Outcome_OUTCOME_NO_MATCH {
		t.Error(nobody)
	}
	message := func(text string) *gatewayv1.PublishRequest {
		return &gatewayv1.PublishRequest{Topic: "once/x", Payload: []byte(text)}
	}
	if acked := must(client.PublishAndWait(ctx, message("1")))(t); acked.Outcome != gatewayv1.Outcome_OUTCOME_ACKED {
		t.Error(acked)
	}
	world.do("swallow", nil, nil)
	answers := make(chan error, 1)
	go func() {
		_, err := client.PublishAndWait(ctx, message("2"))
		answers <- err
	}()
	world.received("once", 2)
	world.do("cut", nil, nil)
	if err := <-answers; err != nil {
		t.Error(err)
	}
	// Without a key there is nothing to know it by, and the failure is told.
	world.do("swallow", nil, nil)
	go func() {
		_, err := client.Publish(ctx, message("3"))
		answers <- err
	}()
	world.received("once", 3)
	world.do("cut", nil, nil)
	failure(t, <-answers, codes.Unavailable, gateway.Unknown)
	must(client.PublishAndWait(ctx, message("4")))(t)
	if received := world.received("once", 4); !slices.Equal(received, []string{"1", "2", "3", "4"}) {
		t.Error(received)
	}
}

func TestAWaitThatEndsEarlyTellsTheLevelAndTheKey(t *testing.T) {
	t.Parallel()
	world := newWorld(t)
	client := world.admin()
	world.device("deaf", "deaf/#")
	request := &gatewayv1.PublishRequest{Topic: "deaf/x", Payload: []byte("1")}
	for range 2 {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		_, err := client.PublishAndWait(ctx, request)
		cancel()
		late := failure(t, err, codes.DeadlineExceeded, gateway.WaitIncomplete)
		if late.Level() != "SENT" || late.IdempotencyKey == "" {
			t.Error(late)
		}
		// The same call goes on waiting, and publishes nothing.
		request.IdempotencyKey = late.IdempotencyKey
	}
	last := &gatewayv1.PublishRequest{Topic: "deaf/x", Payload: []byte("2"), Wait: gatewayv1.Wait_WAIT_SENT}
	must(client.PublishAndWait(context.Background(), last))(t)
	if received := world.received("deaf", 2); !slices.Equal(received, []string{"1", "2"}) {
		t.Error(received)
	}
}

func TestASubscriptionTellsOfTheGapWhenItReconnects(t *testing.T) {
	t.Parallel()
	world, ctx := newWorld(t), context.Background()
	client, other := world.connect(world.proxy(), gateway.Options{Token: world.Token}), world.admin()
	stream := must(client.Subscribe(ctx, &gatewayv1.SubscribeRequest{TopicFilters: []string{"followed/#"}}))(t)
	publish := func(text string) {
		must(other.Publish(ctx, &gatewayv1.PublishRequest{Topic: "followed/x", Payload: []byte(text)}))(t)
	}
	publish("1")
	if first := must(stream.Next())(t); string(first.Message.GetPayload()) != "1" {
		t.Error(first)
	}
	world.do("cut", nil, nil)
	if second := must(stream.Next())(t); second.Gap == nil || second.Gap.Reason != gateway.GapReconnected {
		t.Error(second)
	}
	publish("2")
	if third := must(stream.Next())(t); string(third.Message.GetPayload()) != "2" {
		t.Error(third)
	}
	stream.Close()
	if _, err := stream.Next(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestCommandsAreAnsweredWatchedAndCancelled(t *testing.T) {
	t.Parallel()
	world, ctx := newWorld(t), context.Background()
	client := world.admin()
	world.device("servant", "cmd/servant/#")
	spec := func(device, name, text string) *gatewayv1.CommandSpec {
		return &gatewayv1.CommandSpec{DeviceId: device, Name: name, Payload: []byte(text)}
	}
	reply := must(client.Commands.Send(ctx, &gatewayv1.SendRequest{Spec: spec("servant", "ping", "1")}))(t)
	if string(reply.Payload) != "pong 1" || reply.DeviceStatus != 200 {
		t.Error(reply)
	}
	_, err := client.Commands.Send(ctx, &gatewayv1.SendRequest{Spec: spec("absent", "ping", "1")})
	if offline := failure(t, err, codes.FailedPrecondition, gateway.DeviceOffline); offline.Stage() != "QUEUED" {
		t.Error(offline)
	}
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err = client.Commands.Send(short, &gatewayv1.SendRequest{Spec: spec("servant", "mute", "")})
	failure(t, err, codes.DeadlineExceeded, gateway.CommandTimedOut)

	started := must(client.Commands.Start(ctx, &gatewayv1.StartCommandRequest{Spec: spec("servant", "ping", "2")}))(t)
	watch := must(client.Commands.Watch(ctx, started.CommandId))(t)
	var last *gatewayv1.Command
	for command, err := range watch.All() {
		last = must(command, err)(t)
	}
	if last.GetState() != gatewayv1.CommandState_COMMAND_STATE_REPLIED || string(last.Reply.Payload) != "pong 2" {
		t.Error(last)
	}
	if _, err := watch.Next(); !errors.Is(err, io.EOF) && err != nil {
		t.Error(err)
	}
	waits := must(client.Commands.Start(ctx, &gatewayv1.StartCommandRequest{Spec: spec("absent", "ping", "")}))(t)
	var listed []string
	for command, err := range client.Commands.List(ctx, &gatewayv1.ListCommandsRequest{DeviceId: "absent"}) {
		listed = append(listed, must(command, err)(t).CommandId)
	}
	if !slices.Equal(listed, []string{waits.CommandId}) {
		t.Error(listed)
	}
	if got := must(client.Commands.Get(ctx, waits.CommandId))(t); got.State != gatewayv1.CommandState_COMMAND_STATE_QUEUED {
		t.Error(got)
	}
	must(client.Commands.Cancel(ctx, waits.CommandId))(t)
	_, err = client.Commands.Cancel(ctx, waits.CommandId)
	failure(t, err, codes.FailedPrecondition, gateway.CommandEnded)
}

func TestLatestShadowsAndDevicesAreReadListedAndWatched(t *testing.T) {
	t.Parallel()
	world, ctx := newWorld(t), context.Background()
	client := world.admin()
	_, err := client.Latest.Get(ctx, "no/value", "")
	failure(t, err, codes.NotFound, gateway.ValueNotFound)
	world.device("meter")
	world.publish("meter", "meter/power", 3, 0)
	world.do("published", map[string]any{"id": "meter"}, nil)
	if value := must(client.Latest.Get(ctx, "meter/power", "meter"))(t); string(value.Payload) != "3" {
		t.Error(value)
	}
	values := must(client.Latest.Watch(ctx, &gatewayv1.WatchLatestRequest{DeviceIds: []string{"meter"}}))(t)
	if current := must(values.Next())(t); string(current.Value.GetPayload()) != "3" {
		t.Error(current)
	}
	if end := must(values.Next())(t); !end.SnapshotEnd {
		t.Error(end)
	}
	world.publish("meter", "meter/power", 1, 0)
	if change := must(values.Next())(t); string(change.Value.GetPayload()) != "4" {
		t.Error(change)
	}

	_, err = client.Shadows.Get(ctx, "shadowed", "")
	failure(t, err, codes.NotFound, gateway.ShadowNotFound)
	update := func(desired, reported *string, version *uint64) (*gatewayv1.Shadow, error) {
		return client.Shadows.Update(ctx, &gatewayv1.UpdateShadowRequest{
			DeviceId: "shadowed", Desired: desired, Reported: reported, ExpectedVersion: version,
		})
	}
	first := must(update(proto.String(`{"on": true, "level": 3}`), nil, nil))(t)
	second := must(update(nil, proto.String(`{"on": true}`), nil))(t)
	if second.Delta != `{"level":3}` {
		t.Error(second)
	}
	_, err = update(proto.String("{}"), nil, &first.Version)
	if conflict := failure(t, err, codes.Aborted, gateway.VersionConflict); conflict.Version() != second.Version {
		t.Error(conflict)
	}
	shadows := must(client.Shadows.Watch(ctx, &gatewayv1.WatchShadowRequest{DeviceIds: []string{"shadowed"}}))(t)
	if current := must(shadows.Next())(t); current.Shadow.GetVersion() != second.Version {
		t.Error(current)
	}
	if end := must(shadows.Next())(t); !end.SnapshotEnd {
		t.Error(end)
	}
	must(update(proto.String(`{"level": null}`), nil, nil))(t)
	if change := must(shadows.Next())(t); change.Shadow.GetDesired() != `{"on":true}` {
		t.Error(change)
	}

	for _, device := range []string{"listed-1", "listed-2", "listed-3"} {
		world.device(device)
	}
	if device := must(client.Devices.Get(ctx, "listed-1"))(t); !device.Online {
		t.Error(device)
	}
	listed := 0
	for device, err := range client.Devices.List(ctx, &gatewayv1.ListDevicesRequest{DeviceIdPrefix: "listed-", PageSize: 2}) {
		must(device, err)(t)
		listed++
	}
	if listed != 3 {
		t.Errorf("%d listed", listed)
	}
}

func TestWhoMayNotIsToldByReason(t *testing.T) {
	t.Parallel()
	world, ctx := newWorld(t), context.Background()
	makeGroup(t, world.admin(), &gatewayv1.Group{Name: "guarded"}, "guarded/#")
	as := func(options gateway.Options) *gateway.Client { return world.connect(world.Address, options) }
	message := &gatewayv1.PublishRequest{Topic: "door/open"}
	handle := func(context.Context, *gateway.Delivery) error { return nil }

	_, err := as(gateway.Options{}).Publish(ctx, message)
	failure(t, err, codes.Unauthenticated, gateway.CredentialsMissing)
	_, err = as(gateway.Options{Token: "mqs_wrong"}).Subscribe(ctx, &gatewayv1.SubscribeRequest{})
	failure(t, err, codes.Unauthenticated, gateway.CredentialsUnknown)
	reader := as(gateway.Options{Token: world.token("reader", "", "1h")})
	_, err = reader.Publish(ctx, message)
	if denied := failure(t, err, codes.PermissionDenied, gateway.RoleDenied); denied.Role() != "reader" {
		t.Error(denied)
	}
	failure(t, reader.Consumer("guarded", handle, gateway.ConsumeOptions{}).Run(ctx), codes.PermissionDenied, gateway.RoleDenied)
	failure(t, reader.Consumer("none", handle, gateway.ConsumeOptions{}).Run(ctx), codes.NotFound, gateway.GroupNotFound)
	lamps := as(gateway.Options{Token: world.token("publisher", "lamp/#", "1h")})
	_, err = lamps.Publish(ctx, message)
	if denied := failure(t, err, codes.PermissionDenied, gateway.OutOfScope); denied.Field() != "topic" {
		t.Error(denied)
	}
	_, err = lamps.Publish(ctx, &gatewayv1.PublishRequest{Topic: "lamp/+"})
	if wrong := failure(t, err, codes.InvalidArgument, gateway.InvalidField); wrong.Field() != "topic" {
		t.Error(wrong)
	}
	_, err = reader.Stubs.Devices.GetDevice(ctx, &gatewayv1.GetDeviceRequest{DeviceId: "nobody"})
	failure(t, err, codes.NotFound, gateway.DeviceNotFound)
	_, err = as(gateway.Options{Certificate: world.Cert, Key: world.Key}).Publish(ctx, message)
	if denied := failure(t, err, codes.PermissionDenied, gateway.RoleDenied); denied.Role() != "reader" {
		t.Error(denied)
	}

	// It may have expired before the stream was there, where the machine is busy.
	stream, err := as(gateway.Options{Token: world.token("reader", "", "1s")}).Subscribe(ctx, &gatewayv1.SubscribeRequest{})
	for err == nil {
		_, err = stream.Next()
	}
	failure(t, err, codes.Unauthenticated, gateway.CredentialsExpired)
	// Who gives tokens by a function is asked again.
	var asked atomic.Int32
	short := world.token("reader", "", "4s")
	renewing := as(gateway.Options{TokenSource: func(context.Context) (string, error) {
		if asked.Add(1) == 1 {
			return short, nil
		}
		return world.Token, nil
	}})
	stream = must(renewing.Subscribe(ctx, &gatewayv1.SubscribeRequest{TopicFilters: []string{"renewed"}}))(t)
	if item := must(stream.Next())(t); item.Gap == nil || item.Gap.Reason.String() != "RECONNECTED" {
		t.Error(item)
	}
}
