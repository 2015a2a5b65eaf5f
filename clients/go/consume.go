package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"

	"example.org/mqtt-server/clients/go/gatewayv1"
)

const (
	// mostIDs is how many ids and ranges one request may have.
	mostIDs = 10_000
	// blockedFor is how long a key stays blocked whose message does not come again, as when it became a dead letter after all.
	blockedFor = 5 * time.Second
	// rememberedFor is how long an acknowledgement that nobody confirmed is remembered after the stream ended.
	rememberedFor = 2 * time.Minute
	// mostRemembered is how many of those are remembered.
	mostRemembered = 10_000
	// longestWork on one message; after that its lease is no longer extended.
	longestWork = time.Hour
	mostReason  = 1024
)

// Delivery is what a handler gets: a message, or an event where the group has those.
type Delivery struct {
	// MessageID names the message over redelivery and replay: what must be done once can be remembered by it.
	MessageID string
	// Attempt is 1, and 1 more for each earlier delivery that ended in a failure, an expired deadline or the loss of its member.
	Attempt uint32
	// Message, unless it is an event.
	Message *gatewayv1.ReceivedMessage
	// Event, of groups that have event_kinds in their filter.
	Event *gatewayv1.Event
}

// DeviceID is the device that published it, or to which the event happened.
func (d *Delivery) DeviceID() string {
	if d.Message != nil {
		return d.Message.DeviceId
	}
	return d.Event.GetDeviceId()
}

// Topic of the message; empty for an event.
func (d *Delivery) Topic() string { return d.Message.GetTopic() }

// Payload of the message; nil for an event.
func (d *Delivery) Payload() []byte { return d.Message.GetPayload() }

// Handler works on a message. It is acknowledged when nil is returned, and comes again otherwise, as GiveBack says if that is the error.
// The context ends when the consumer does not wait for the work any more.
type Handler func(context.Context, *Delivery) error

// GiveBack is an error for handlers that say how a message comes again.
type GiveBack struct {
	// Reason is kept with a dead letter.
	Reason string
	// Delay before it comes again; nil is the pause of the group.
	Delay *time.Duration
	// DeadLetter: it does not come again.
	DeadLetter bool
}

func (g GiveBack) Error() string { return g.Reason }

// ConsumeOptions of a Consumer; the zero value is good.
type ConsumeOptions struct {
	// Concurrency is how many handlers run at once, each for another key (mostly: another device); 0 is 16.
	Concurrency int
	// MemberID names the member over reconnects; empty draws one.
	MemberID string
	// Lease is how long the member keeps its share after its stream ended; 0 is 15 seconds.
	Lease time.Duration
	// MaxOutstanding is how many messages it holds at once; 0 is 500.
	MaxOutstanding int
	// DrainTimeout is how long a drain may take before what is held is given back; 0 is 30 seconds.
	DrainTimeout time.Duration
	// OnGap is told of messages that retention removed, or the disk has lost.
	OnGap func(Gap)
	// Logger; nil is slog.Default().
	Logger *slog.Logger
}

// Consumer is a member of a group. Run consumes.
type Consumer struct {
	client  *Client
	group   string
	handler Handler
	options ConsumeOptions

	handled, confirmed, reconnects, held atomic.Int64
	join, end                            sync.Once
	joined, stopped                      chan struct{}
}

// Consumer makes a member of a group, whose messages handler gets.
func (c *Client) Consumer(group string, handler Handler, options ConsumeOptions) *Consumer {
	if options.Concurrency <= 0 {
		options.Concurrency = 16
	}
	if options.MemberID == "" {
		options.MemberID = "member-" + randomID()
	}
	if options.Lease <= 0 {
		options.Lease = 15 * time.Second
	}
	if options.MaxOutstanding <= 0 {
		options.MaxOutstanding = 500
	}
	if options.DrainTimeout <= 0 {
		options.DrainTimeout = 30 * time.Second
	}
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	return &Consumer{
		client: c, group: group, handler: handler, options: options,
		joined: make(chan struct{}), stopped: make(chan struct{}),
	}
}

// MemberID of this member.
func (c *Consumer) MemberID() string { return c.options.MemberID }

// Handled is how many messages the handler returned nil for.
func (c *Consumer) Handled() int64 { return c.handled.Load() }

// Confirmed is how many acknowledgements are on the gateway's disk.
func (c *Consumer) Confirmed() int64 { return c.confirmed.Load() }

// Reconnects is how many streams were opened after the first.
func (c *Consumer) Reconnects() int64 { return c.reconnects.Load() }

// Held is how many messages wait for the handler, or are with it.
func (c *Consumer) Held() int64 { return c.held.Load() }

// Joined is closed when the member has joined for the first time.
func (c *Consumer) Joined() <-chan struct{} { return c.joined }

// Stop takes no more, finishes what it has, acknowledges, and leaves; then Run returns. As the end of Run's context.
func (c *Consumer) Stop() { c.end.Do(func() { close(c.stopped) }) }

// Run consumes until ctx ends or Stop is called, and then until everything is settled: it returns nil. It returns an error where it failed
// for good: the group is gone, the caller may not, or another process has the same member id (Fenced).
func (c *Consumer) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, c.Stop)
	defer stop()
	// Streams and handlers outlive the context that asks for the drain.
	life, die := context.WithCancel(context.WithoutCancel(ctx))
	defer die()
	working, cancel := context.WithCancel(life)
	defer cancel()
	run := &consuming{
		Consumer: c, life: life, die: die, working: working, cancel: cancel,
		works: map[string]*work{}, deliveries: map[uint64]*work{}, keys: map[string]*keyed{},
		unconfirmed: map[uint64]string{}, done: map[string]time.Time{},
		results: make(chan result, c.options.Concurrency),
	}
	defer run.wait()
	if err := run.learn(life); err != nil {
		return err
	}
	var pauses pauses
	for {
		drained, err := run.stream(&pauses)
		run.forgetStream()
		if drained || run.isStopping() && len(run.works) == 0 && len(run.done) == 0 {
			return nil
		}
		if run.givingUp || !c.client.resumes(err) {
			return err
		}
		pause := pauses.next(err)
		c.options.Logger.Warn("consuming: opening another stream", "group", c.group, "error", err, "pause", pause)
		if run.rest(pause); run.givingUp {
			return err
		}
		c.reconnects.Add(1)
		// What cannot be learned anew now stays as it was.
		bounded, done := context.WithTimeout(life, 5*time.Second)
		_ = run.learn(bounded)
		done()
	}
}

// work on one message.
//
//	queued -> running -> acknowledged -> confirmed (on the gateway's disk: it never comes again)
//	                 \-> given back: comes again
//
// When the stream ends, what is queued is forgotten, as it comes again. What is running goes on, and the next stream begins by naming it,
// and what was acknowledged and not confirmed: the gateway does not deliver these again, also after a restart, and they are
// acknowledged by their new delivery ids. What comes again all the same, as from a gateway that does not know of this, is the same work
// under a new delivery, not another. What was acknowledged and not confirmed is remembered for a while; if it comes again it is
// acknowledged again, and the handler does not see it twice.
type work struct {
	delivery *Delivery
	key      string
	// On this stream, with the attempt; 0 if it ended, or the delivery was revoked.
	id      uint64
	attempt uint32
	// When half of its lease is over, and when it came first.
	extendAt, since time.Time
	running         bool
}

// keyed is what is held of one key, in order. After a message was given back its key is blocked until it comes again: the gateway
// revokes what it had sent of that key meanwhile, and that may be on its way still.
type keyed struct {
	queue   []*work
	running *work
	offered bool
	blocked string
	until   time.Time
}

type result struct {
	work *work
	err  error
}

// consuming is the state of a run. One goroutine has it; handlers and the two ends of a stream only have channels.
type consuming struct {
	*Consumer
	// Of streams, and of handlers.
	life, working context.Context
	die, cancel   context.CancelFunc

	order       gatewayv1.OrderKey
	maxAttempts uint32
	ackDeadline time.Duration

	works      map[string]*work
	deliveries map[uint64]*work
	keys       map[string]*keyed
	ready      []string
	running    int
	results    chan result
	// Acknowledged, by delivery id, until confirmed; and by message id, with the time until when it is remembered (zero: unconfirmed).
	unconfirmed map[uint64]string
	done        map[string]time.Time
	// The message ids that this stream began with, in order, and work on these that failed before the stream was there.
	named []string
	late  map[string]result
	// What is to be said on this stream.
	acks      []uint64
	others    []*gatewayv1.ConsumeRequest
	drainSent bool
	drainFrom time.Time
	stopAt    time.Time
	givingUp  bool
}

// learn asks what the group keeps in order, and after how many attempts it gives up.
func (c *consuming) learn(ctx context.Context) error {
	answer, err := call(ctx, c.client, true, c.client.Stubs.Groups.GetGroup, &gatewayv1.GetGroupRequest{Name: c.group})
	if err != nil {
		return err
	}
	c.order, c.maxAttempts = answer.Group.OrderKey, answer.Group.MaxAttempts
	c.ackDeadline = max(answer.Group.AckDeadline.AsDuration(), time.Second)
	return nil
}

func (c *consuming) isStopping() bool {
	select {
	case <-c.stopped:
		return true
	default:
		return false
	}
}

// stream consumes on one stream, to its end: drained, or with an error.
func (c *consuming) stream(pauses *pauses) (drained bool, err error) {
	ctx, cancel := context.WithCancelCause(c.life)
	defer cancel(nil)
	watch := newWatchdog(3*heartbeat, cancel)
	defer watch.stop()
	stream, err := c.client.Stubs.Consumer.Consume(ctx)
	if err != nil {
		return false, err
	}
	opening := &gatewayv1.Open{
		Group: c.group, MemberId: c.options.MemberID, Lease: durationpb.New(c.options.Lease),
		Flow:              &gatewayv1.Flow{MaxOutstandingMessages: uint32(c.options.MaxOutstanding)},
		HeartbeatInterval: durationpb.New(heartbeat),
		Outstanding:       c.name(),
	}
	if err := stream.Send(&gatewayv1.ConsumeRequest{Action: &gatewayv1.ConsumeRequest_Open{Open: opening}}); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	responses, ended := make(chan *gatewayv1.ConsumeResponse), make(chan error, 1)
	go func() {
		for {
			response, err := stream.Recv()
			if err != nil {
				ended <- watch.told(ctx, err)
				return
			}
			watch.fed()
			select {
			case responses <- response:
			case <-ctx.Done():
				return
			}
		}
	}()
	requests := make(chan *gatewayv1.ConsumeRequest)
	go func() {
		for {
			select {
			case request := <-requests:
				// What goes wrong is told to who reads.
				if stream.Send(request) != nil {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	stopped := c.stopped
	var next *gatewayv1.ConsumeRequest
	for {
		if next == nil {
			next = c.say()
		}
		var out chan *gatewayv1.ConsumeRequest
		if next != nil {
			out = requests
		}
		select {
		case out <- next:
			next = nil
		case response := <-responses:
			pauses.reset()
			for _, item := range response.Items {
				c.take(item)
			}
		case result := <-c.results:
			c.finished(result)
		case <-tick.C:
			c.tick()
		case <-stopped:
			stopped = nil
		case err := <-ended:
			if errors.Is(err, io.EOF) {
				return c.drainSent, unavailable("the stream ended early")
			}
			return false, err
		}
		c.pump()
		c.held.Store(int64(len(c.works)))
	}
}

// name is what the next stream begins with: since the last one ended, nothing is held but what is running.
func (c *consuming) name() []string {
	c.named = append(slices.Collect(maps.Keys(c.works)), slices.Collect(maps.Keys(c.done))...)
	c.named = c.named[:min(len(c.named), mostIDs)]
	return c.named
}

// resumed: what the stream began with has delivery ids on it, unless the gateway does not know of this.
func (c *consuming) resumed(opened *gatewayv1.Opened) {
	named, late := c.named, c.late
	c.named, c.late = nil, nil
	if int(opened.Outstanding) != len(named) {
		return
	}
	own := make(map[uint64]string, len(named))
	for at, message := range named {
		own[uint64(at)+1] = message
	}
	each(opened.Void, own, func(uint64, string) {})
	for id, message := range own {
		_, isDone := c.done[message]
		failed, isLate := late[message]
		switch work := c.works[message]; {
		case work != nil:
			work.id, work.extendAt = id, time.Now().Add(c.ackDeadline/2)
			c.deliveries[id] = work
		case isDone:
			c.acknowledge(id, message)
		case isLate:
			failed.work.id = id
			c.giveBack(failed.work, c.keyed(failed.work.key), failed.err)
		}
	}
}

// rest is the pause between two streams, in which handlers finish.
func (c *consuming) rest(pause time.Duration) {
	timer, tick := time.NewTimer(pause), time.NewTicker(250*time.Millisecond)
	defer timer.Stop()
	defer tick.Stop()
	for {
		select {
		case result := <-c.results:
			c.finished(result)
		case <-tick.C:
			c.tick()
		case <-timer.C:
			return
		}
	}
}

// wait is for handlers, which were told to end; some do not listen.
func (c *consuming) wait() {
	c.cancel()
	enough := time.After(c.options.DrainTimeout)
	for c.running > 0 {
		select {
		case <-c.results:
			c.running--
		case <-enough:
			return
		}
	}
}

// say is the next request to be sent; nil if there is none.
func (c *consuming) say() *gatewayv1.ConsumeRequest {
	if len(c.acks) > 0 {
		ids := c.acks
		c.acks = nil
		if len(ids) > mostIDs {
			ids, c.acks = ids[:mostIDs], ids[mostIDs:]
		}
		return &gatewayv1.ConsumeRequest{Action: &gatewayv1.ConsumeRequest_Ack{Ack: rangesOf(ids)}}
	}
	if len(c.others) > 0 {
		request := c.others[0]
		c.others = c.others[1:]
		return request
	}
	// Where a stream was lost, what was acknowledged on it and not confirmed has to come again first.
	if c.isStopping() && !c.drainSent && !time.Now().Before(c.drainFrom) {
		c.drainSent = true
		return &gatewayv1.ConsumeRequest{Action: &gatewayv1.ConsumeRequest_Drain{Drain: &gatewayv1.Drain{}}}
	}
	return nil
}

func (c *consuming) take(item *gatewayv1.ConsumeItem) {
	switch item := item.Item.(type) {
	case *gatewayv1.ConsumeItem_Message:
		c.arrived(item.Message)
	case *gatewayv1.ConsumeItem_AckResults:
		each(item.AckResults.Ok, c.unconfirmed, func(id uint64, message string) {
			delete(c.done, message)
			c.confirmed.Add(1)
		})
		each(item.AckResults.Lost, c.unconfirmed, func(id uint64, message string) {
			// It comes again; it was handled, so it is acknowledged then.
			c.remember(message)
		})
	case *gatewayv1.ConsumeItem_Revoked:
		each(item.Revoked.Void, c.deliveries, func(_ uint64, work *work) { c.revoked(work) })
	case *gatewayv1.ConsumeItem_Gap:
		if c.options.OnGap != nil {
			c.options.OnGap(*gapOf(item.Gap))
		}
	case *gatewayv1.ConsumeItem_Opened:
		c.resumed(item.Opened)
		if len(c.done) > len(c.unconfirmed) {
			// What was not confirmed comes at once if it comes again.
			c.drainFrom = time.Now().Add(time.Second)
		}
		c.join.Do(func() { close(c.joined) })
	}
}

func (c *consuming) arrived(consumed *gatewayv1.ConsumedMessage) {
	now := time.Now()
	if _, known := c.done[consumed.MessageId]; known {
		c.acknowledge(consumed.DeliveryId, consumed.MessageId)
		return
	}
	extendAt := now.Add(c.ackDeadline / 2)
	if work := c.works[consumed.MessageId]; work != nil {
		// Running since an earlier delivery.
		work.id, work.attempt, work.extendAt = consumed.DeliveryId, consumed.Attempt, extendAt
		c.deliveries[consumed.DeliveryId] = work
		return
	}
	delivery := &Delivery{consumed.MessageId, consumed.Attempt, consumed.GetMessage(), consumed.GetEvent()}
	work := &work{
		delivery: delivery, key: c.keyOf(delivery), id: consumed.DeliveryId, attempt: consumed.Attempt, extendAt: extendAt, since: now,
	}
	c.works[consumed.MessageId] = work
	c.deliveries[consumed.DeliveryId] = work
	key := c.keyed(work.key)
	if key.blocked == consumed.MessageId {
		key.blocked = ""
		key.queue = slices.Insert(key.queue, 0, work)
	} else {
		key.queue = append(key.queue, work)
	}
	c.offer(work.key, key)
}

// keyed is what is held of a key, perhaps nothing yet.
func (c *consuming) keyed(name string) *keyed {
	key := c.keys[name]
	if key == nil {
		key = &keyed{}
		c.keys[name] = key
	}
	return key
}

func (c *consuming) keyOf(delivery *Delivery) string {
	switch c.order {
	case gatewayv1.OrderKey_ORDER_KEY_NONE:
		return delivery.MessageID
	case gatewayv1.OrderKey_ORDER_KEY_DEVICE_TOPIC:
		return delivery.DeviceID() + "\x00" + delivery.Topic()
	default:
		return delivery.DeviceID()
	}
}

func (c *consuming) revoked(revoked *work) {
	revoked.id = 0
	if revoked.running {
		return
	}
	delete(c.works, revoked.delivery.MessageID)
	key := c.keys[revoked.key]
	key.queue = slices.DeleteFunc(key.queue, func(one *work) bool { return one == revoked })
	c.tidy(revoked.key, key)
}

// offer notes that a key has work that may begin.
func (c *consuming) offer(name string, key *keyed) {
	if len(key.queue) > 0 && key.running == nil && key.blocked == "" && !key.offered {
		key.offered = true
		c.ready = append(c.ready, name)
	}
}

// pump starts as much work as may run at once.
func (c *consuming) pump() {
	for len(c.ready) > 0 && c.running < c.options.Concurrency && !c.givingUp {
		name := c.ready[0]
		c.ready = c.ready[1:]
		key := c.keys[name]
		if key == nil {
			continue
		}
		key.offered = false
		if len(key.queue) == 0 || key.running != nil || key.blocked != "" {
			continue
		}
		work := key.queue[0]
		key.queue = key.queue[1:]
		key.running, work.running = work, true
		c.running++
		go func() {
			c.results <- result{work, c.handle(work.delivery)}
		}()
	}
}

// handle calls the handler; what panics has failed.
func (c *consuming) handle(delivery *Delivery) (err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = fmt.Errorf("panic: %v", panicked)
		}
	}()
	return c.handler(c.working, delivery)
}

func (c *consuming) finished(result result) {
	work, key := result.work, c.keys[result.work.key]
	c.running--
	key.running = nil
	delete(c.works, work.delivery.MessageID)
	delete(c.deliveries, work.id)
	switch {
	case result.err == nil && work.id == 0:
		c.handled.Add(1)
		c.remember(work.delivery.MessageID)
	case result.err == nil:
		c.handled.Add(1)
		c.acknowledge(work.id, work.delivery.MessageID)
	case work.id != 0:
		c.giveBack(work, key, result.err)
	case slices.Contains(c.named, work.delivery.MessageID):
		c.giveBackLater(result)
	}
	c.offer(work.key, key)
	c.tidy(work.key, key)
}

func (c *consuming) acknowledge(id uint64, message string) {
	c.acks = append(c.acks, id)
	c.unconfirmed[id] = message
	c.done[message] = time.Time{}
}

func (c *consuming) remember(message string) {
	if len(c.done) >= mostRemembered {
		for other, until := range c.done {
			if !until.IsZero() {
				delete(c.done, other)
				break
			}
		}
	}
	c.done[message] = time.Now().Add(rememberedFor)
}

func (c *consuming) giveBack(work *work, key *keyed, failure error) {
	nack := &gatewayv1.Nack{Which: rangesOf([]uint64{work.id}), Reason: cut(failure.Error())}
	var given GiveBack
	if errors.As(failure, &given) {
		nack.DeadLetter = given.DeadLetter
		if given.Delay != nil {
			nack.Delay = durationpb.New(*given.Delay)
		}
	}
	c.others = append(c.others, &gatewayv1.ConsumeRequest{Action: &gatewayv1.ConsumeRequest_Nack{Nack: nack}})
	givesUp := nack.DeadLetter || c.maxAttempts > 0 && work.attempt >= c.maxAttempts
	if c.order != gatewayv1.OrderKey_ORDER_KEY_NONE && !givesUp {
		key.blocked, key.until = work.delivery.MessageID, time.Now().Add(blockedFor)
	}
}

// giveBackLater is giveBack for work whose delivery on the new stream is not known yet.
func (c *consuming) giveBackLater(failed result) {
	if c.late == nil {
		c.late = map[string]result{}
	}
	c.late[failed.work.delivery.MessageID] = failed
}

func (c *consuming) tidy(name string, key *keyed) {
	if len(key.queue) == 0 && key.running == nil && key.blocked == "" {
		delete(c.keys, name)
	}
}

// forgetStream: the stream has ended, nothing can be said about its deliveries any more.
func (c *consuming) forgetStream() {
	for _, work := range c.deliveries {
		work.id = 0
		if !work.running {
			delete(c.works, work.delivery.MessageID)
		}
	}
	clear(c.deliveries)
	for _, message := range c.unconfirmed {
		c.remember(message)
	}
	clear(c.unconfirmed)
	c.acks, c.others, c.ready, c.drainSent = nil, nil, nil, false
	c.named, c.late = nil, nil
	for name, key := range c.keys {
		key.queue, key.blocked, key.offered = nil, "", false
		c.tidy(name, key)
	}
	c.held.Store(int64(len(c.works)))
}

// tick extends leases, lets go of what was blocked or remembered for long enough, and ends a drain that takes too long.
func (c *consuming) tick() {
	now := time.Now()
	var late []uint64
	for id, work := range c.deliveries {
		if work.extendAt.After(now) || now.Sub(work.since) > longestWork {
			continue
		}
		work.extendAt = now.Add(c.ackDeadline / 2)
		late = append(late, id)
	}
	for ids := range slices.Chunk(late, mostIDs) {
		extend := &gatewayv1.Extend{Which: rangesOf(ids), Deadline: durationpb.New(c.ackDeadline)}
		c.others = append(c.others, &gatewayv1.ConsumeRequest{Action: &gatewayv1.ConsumeRequest_Extend{Extend: extend}})
	}
	for name, key := range c.keys {
		if key.blocked != "" && key.until.Before(now) {
			key.blocked = ""
			c.offer(name, key)
			c.tidy(name, key)
		}
	}
	for message, until := range c.done {
		if !until.IsZero() && until.Before(now) {
			delete(c.done, message)
		}
	}
	if !c.isStopping() {
		return
	}
	if c.stopAt.IsZero() {
		c.stopAt = now
	}
	if now.Sub(c.stopAt) > c.options.DrainTimeout && !c.givingUp {
		c.giveUp()
	}
	if c.givingUp && now.Sub(c.stopAt) > 2*c.options.DrainTimeout {
		// Handlers that do not end hold the stream open.
		c.die()
	}
}

// giveUp: the drain took too long, and what is held goes to others.
func (c *consuming) giveUp() {
	c.givingUp = true
	var queued []uint64
	for id, work := range c.deliveries {
		if !work.running {
			queued = append(queued, id)
			delete(c.works, work.delivery.MessageID)
		}
	}
	for ids := range slices.Chunk(queued, mostIDs) {
		nack := &gatewayv1.Nack{Which: rangesOf(ids), Delay: durationpb.New(0), Reason: "the member stopped"}
		c.others = append(c.others, &gatewayv1.ConsumeRequest{Action: &gatewayv1.ConsumeRequest_Nack{Nack: nack}})
	}
	c.cancel()
}

// rangesOf is the same as ranges, in order.
func rangesOf(ids []uint64) *gatewayv1.Ack {
	ids = slices.Clone(ids)
	slices.Sort(ids)
	ack := &gatewayv1.Ack{}
	for _, id := range ids {
		if last := len(ack.Ranges) - 1; last >= 0 && ack.Ranges[last].Last+1 == id {
			ack.Ranges[last].Last = id
		} else {
			ack.Ranges = append(ack.Ranges, &gatewayv1.DeliveryRange{First: id, Last: id})
		}
	}
	return ack
}

// each takes those in the ranges out of known, in order, at the price of the smaller of both.
func each[T any](ranges []*gatewayv1.DeliveryRange, known map[uint64]T, do func(uint64, T)) {
	for _, span := range ranges {
		var found []uint64
		if span.Last-span.First < uint64(len(known)) {
			for id := span.First; id <= span.Last; id++ {
				if _, there := known[id]; there {
					found = append(found, id)
				}
			}
		} else {
			for id := range known {
				if span.First <= id && id <= span.Last {
					found = append(found, id)
				}
			}
			slices.Sort(found)
		}
		for _, id := range found {
			one := known[id]
			delete(known, id)
			do(id, one)
		}
	}
}

// cut is as much of a text as a reason may have.
func cut(text string) string {
	for len(text) > mostReason {
		_, size := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-size]
	}
	return text
}
