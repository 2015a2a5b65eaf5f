package gateway

import (
	"context"
	"iter"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"example.org/mqtt-server/clients/go/gatewayv1"
)

// withHeartbeat is the request with an interval of heartbeats, unless it has one.
func withHeartbeat[Request proto.Message](request Request, field func(Request) **durationpb.Duration) Request {
	request = proto.Clone(request).(Request)
	if place := field(request); *place == nil {
		*place = durationpb.New(heartbeat)
	}
	return request
}

// pages reads pages as they are needed.
func pages[Request, Response, T any](ctx context.Context, c *Client, request Request,
	method func(context.Context, Request, ...grpc.CallOption) (Response, error),
	content func(Response) ([]T, string), next func(Request, string)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for {
			page, err := call(ctx, c, true, method, request)
			if err != nil {
				var none T
				yield(none, err)
				return
			}
			items, token := content(page)
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if token == "" {
				return
			}
			next(request, token)
		}
	}
}

// Commands are requests to devices, with their answers.
type Commands struct{ client *Client }

// Send sends a command and returns the device's answer; what the device calls an error is one, too (DeviceStatus). Sent once: an Error
// tells the Stage.
func (c *Commands) Send(ctx context.Context, request *gatewayv1.SendRequest) (*gatewayv1.Reply, error) {
	answer, err := call(ctx, c.client, false, c.client.Stubs.Commands.Send, request)
	return answer.GetReply(), err
}

// Start stores a command, which goes out when its device is there, and returns when it is on disk. Started once: without a CommandId the
// library makes one, and keeps it over its attempts.
func (c *Commands) Start(ctx context.Context, request *gatewayv1.StartCommandRequest) (*gatewayv1.Command, error) {
	request = proto.Clone(request).(*gatewayv1.StartCommandRequest)
	if request.CommandId == "" {
		request.CommandId = randomID()
	}
	answer, err := call(ctx, c.client, true, c.client.Stubs.Commands.StartCommand, request)
	return answer.GetCommand(), err
}

// Get is a stored command as it is now.
func (c *Commands) Get(ctx context.Context, id string) (*gatewayv1.Command, error) {
	answer, err := call(ctx, c.client, true, c.client.Stubs.Commands.GetCommand, &gatewayv1.GetCommandRequest{CommandId: id})
	return answer.GetCommand(), err
}

// List has stored commands, the newest first. Pages are read as they are needed.
func (c *Commands) List(ctx context.Context, request *gatewayv1.ListCommandsRequest) iter.Seq2[*gatewayv1.Command, error] {
	request = proto.Clone(request).(*gatewayv1.ListCommandsRequest)
	return pages(ctx, c.client, request, c.client.Stubs.Commands.ListCommands,
		func(page *gatewayv1.ListCommandsResponse) ([]*gatewayv1.Command, string) {
			return page.Commands, page.NextPageToken
		},
		func(request *gatewayv1.ListCommandsRequest, token string) { request.PageToken = token })
}

// Cancel cancels a stored command; CommandEnded if it has ended.
func (c *Commands) Cancel(ctx context.Context, id string) (*gatewayv1.Command, error) {
	answer, err := call(ctx, c.client, false, c.client.Stubs.Commands.CancelCommand, &gatewayv1.CancelCommandRequest{CommandId: id})
	return answer.GetCommand(), err
}

// Watch is a stored command as it is, and after each change; the stream ends when the command does.
func (c *Commands) Watch(ctx context.Context, id string) (*Stream[*gatewayv1.Command], error) {
	items := func(response *gatewayv1.WatchCommandResponse) []*gatewayv1.Command {
		return []*gatewayv1.Command{response.Command}
	}
	lost := func() (*gatewayv1.Command, bool) { return nil, false }
	// No heartbeats here: the pings of the connection show that it lives.
	return streaming(ctx, c.client, lost, func(ctx context.Context) (receive[*gatewayv1.Command], error) {
		return opened(ctx, 0, func(ctx context.Context) (grpc.ServerStreamingClient[gatewayv1.WatchCommandResponse], error) {
			return c.client.Stubs.Commands.WatchCommand(ctx, &gatewayv1.WatchCommandRequest{CommandId: id})
		}, items)
	})
}

// Latest has the last message of each device on each topic.
type Latest struct{ client *Client }

// Get is the last message of a device on a topic, or with an empty device of any. ValueNotFound if there is none.
func (l *Latest) Get(ctx context.Context, topic, device string) (*gatewayv1.LatestValue, error) {
	request := &gatewayv1.GetLatestRequest{Topic: topic}
	if device != "" {
		request.DeviceId = &device
	}
	answer, err := call(ctx, l.client, true, l.client.Stubs.State.GetLatest, request)
	return answer.GetValue(), err
}

// List has latest values in order of device and topic. Pages are read as they are needed.
func (l *Latest) List(ctx context.Context, request *gatewayv1.ListLatestRequest) iter.Seq2[*gatewayv1.LatestValue, error] {
	request = proto.Clone(request).(*gatewayv1.ListLatestRequest)
	return pages(ctx, l.client, request, l.client.Stubs.State.ListLatest,
		func(page *gatewayv1.ListLatestResponse) ([]*gatewayv1.LatestValue, string) {
			return page.Values, page.NextPageToken
		},
		func(request *gatewayv1.ListLatestRequest, token string) { request.PageToken = token })
}

// LatestItem of a watch: one of its fields is set.
type LatestItem struct {
	Value   *gatewayv1.LatestValue
	Removed *gatewayv1.RemovedValue
	Gap     *Gap
	// SnapshotEnd: all current values were sent.
	SnapshotEnd bool
}

// Watch brings the values there are, SnapshotEnd, then changes, of which a slow reader gets the last. After a lost connection there is a
// Gap, then all of it again.
func (l *Latest) Watch(ctx context.Context, request *gatewayv1.WatchLatestRequest) (*Stream[LatestItem], error) {
	request = withHeartbeat(request, func(r *gatewayv1.WatchLatestRequest) **durationpb.Duration { return &r.HeartbeatInterval })
	items := func(response *gatewayv1.WatchLatestResponse) []LatestItem {
		var items []LatestItem
		for _, item := range response.Items {
			switch item := item.Item.(type) {
			case *gatewayv1.WatchLatestItem_Value:
				items = append(items, LatestItem{Value: item.Value})
			case *gatewayv1.WatchLatestItem_Removed:
				items = append(items, LatestItem{Removed: item.Removed})
			case *gatewayv1.WatchLatestItem_SnapshotEnd:
				items = append(items, LatestItem{SnapshotEnd: true})
			case *gatewayv1.WatchLatestItem_Gap:
				items = append(items, LatestItem{Gap: gapOf(item.Gap)})
			}
		}
		return items
	}
	lost := func() (LatestItem, bool) { return LatestItem{Gap: &Gap{Reason: GapReconnected}}, true }
	return streaming(ctx, l.client, lost, func(ctx context.Context) (receive[LatestItem], error) {
		return opened(ctx, 3*heartbeat, func(ctx context.Context) (grpc.ServerStreamingClient[gatewayv1.WatchLatestResponse], error) {
			return l.client.Stubs.State.WatchLatest(ctx, request)
		}, items)
	})
}

// Shadows say what devices are to be, and what they say they are. Documents are JSON text, in which numbers have every digit.
type Shadows struct{ client *Client }

// Get is a shadow; an empty name is the classic one. ShadowNotFound if there is none.
func (s *Shadows) Get(ctx context.Context, device, name string) (*gatewayv1.Shadow, error) {
	request := &gatewayv1.GetShadowRequest{DeviceId: device, Name: name}
	answer, err := call(ctx, s.client, true, s.client.Stubs.Shadows.GetShadow, request)
	return answer.GetShadow(), err
}

// Update merges into what is desired or reported. VersionConflict, with the Version there is, if it is not the expected one. Made once: if
// the connection is lost meanwhile, the version tells whether it was.
func (s *Shadows) Update(ctx context.Context, request *gatewayv1.UpdateShadowRequest) (*gatewayv1.Shadow, error) {
	answer, err := call(ctx, s.client, false, s.client.Stubs.Shadows.UpdateShadow, request)
	return answer.GetShadow(), err
}

// ShadowItem of a watch: one of its fields is set.
type ShadowItem struct {
	Shadow  *gatewayv1.Shadow
	Deleted *gatewayv1.DeletedShadow
	Gap     *Gap
	// SnapshotEnd: all current shadows were sent.
	SnapshotEnd bool
}

// Watch brings the shadows of the devices, SnapshotEnd, then changes; without devices the changes of all. After a lost connection there
// is a Gap, then all of it again.
func (s *Shadows) Watch(ctx context.Context, request *gatewayv1.WatchShadowRequest) (*Stream[ShadowItem], error) {
	request = withHeartbeat(request, func(r *gatewayv1.WatchShadowRequest) **durationpb.Duration { return &r.HeartbeatInterval })
	items := func(response *gatewayv1.WatchShadowResponse) []ShadowItem {
		var items []ShadowItem
		for _, item := range response.Items {
			switch item := item.Item.(type) {
			case *gatewayv1.WatchShadowItem_Shadow:
				items = append(items, ShadowItem{Shadow: item.Shadow})
			case *gatewayv1.WatchShadowItem_Deleted:
				items = append(items, ShadowItem{Deleted: item.Deleted})
			case *gatewayv1.WatchShadowItem_SnapshotEnd:
				items = append(items, ShadowItem{SnapshotEnd: true})
			case *gatewayv1.WatchShadowItem_Gap:
				items = append(items, ShadowItem{Gap: gapOf(item.Gap)})
			}
		}
		return items
	}
	lost := func() (ShadowItem, bool) { return ShadowItem{Gap: &Gap{Reason: GapReconnected}}, true }
	return streaming(ctx, s.client, lost, func(ctx context.Context) (receive[ShadowItem], error) {
		return opened(ctx, 3*heartbeat, func(ctx context.Context) (grpc.ServerStreamingClient[gatewayv1.WatchShadowResponse], error) {
			return s.client.Stubs.Shadows.WatchShadow(ctx, request)
		}, items)
	})
}

// Devices and their sessions.
type Devices struct{ client *Client }

// Get is a device that has a session. DeviceNotFound otherwise.
func (d *Devices) Get(ctx context.Context, id string) (*gatewayv1.Device, error) {
	answer, err := call(ctx, d.client, true, d.client.Stubs.Devices.GetDevice, &gatewayv1.GetDeviceRequest{DeviceId: id})
	return answer.GetDevice(), err
}

// List has the devices with a session that request describes. Pages are read as they are needed.
func (d *Devices) List(ctx context.Context, request *gatewayv1.ListDevicesRequest) iter.Seq2[*gatewayv1.Device, error] {
	request = proto.Clone(request).(*gatewayv1.ListDevicesRequest)
	return pages(ctx, d.client, request, d.client.Stubs.Devices.ListDevices,
		func(page *gatewayv1.ListDevicesResponse) ([]*gatewayv1.Device, string) {
			return page.Devices, page.NextPageToken
		},
		func(request *gatewayv1.ListDevicesRequest, token string) { request.PageToken = token })
}
