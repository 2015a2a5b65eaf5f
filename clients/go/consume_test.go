package gateway_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gateway "example.org/mqtt-server/clients/go"
	"example.org/mqtt-server/clients/go/gatewayv1"
)

func makeGroup(t *testing.T, client *gateway.Client, group *gatewayv1.Group, topic string) {
	t.Helper()
	group.Filter = &gatewayv1.Filter{TopicFilters: []string{topic}}
	group.MinBackoff = durationpb.New(20 * time.Millisecond)
	if _, err := client.Stubs.Groups.CreateGroup(context.Background(), &gatewayv1.CreateGroupRequest{Group: group}); err != nil {
		t.Fatal(err)
	}
}

// judge has what handlers have seen.
type judge struct {
	lock    sync.Mutex
	seen    map[string]int
	numbers map[string][]int
	running map[string]bool
	wrong   []string
}

func newJudge() *judge {
	return &judge{seen: map[string]int{}, numbers: map[string][]int{}, running: map[string]bool{}}
}

func (j *judge) handle(_ context.Context, delivery *gateway.Delivery) error {
	device := delivery.DeviceID()
	number, err := strconv.Atoi(string(delivery.Payload()))
	j.lock.Lock()
	if j.running[device] || err != nil {
		j.wrong = append(j.wrong, fmt.Sprintf("two messages of %s at once, or %v", device, err))
	}
	j.running[device] = true
	j.lock.Unlock()
	time.Sleep(time.Millisecond)
	j.lock.Lock()
	defer j.lock.Unlock()
	j.running[device] = false
	j.seen[delivery.MessageID]++
	j.numbers[device] = append(j.numbers[device], number)
	return nil
}

func (j *judge) count() int {
	j.lock.Lock()
	defer j.lock.Unlock()
	return len(j.seen)
}

// first is each number at its first sight. A device that was unsure sent a number twice, in two messages.
func (j *judge) first(device string) (first []int) {
	for _, number := range j.numbers[device] {
		if !slices.Contains(first, number) {
			first = append(first, number)
		}
	}
	return first
}

func (j *judge) complete(devices []string, count int) bool {
	j.lock.Lock()
	defer j.lock.Unlock()
	return !slices.ContainsFunc(devices, func(device string) bool { return len(j.first(device)) < count })
}

// check: each message once, none missing, and in order.
func (j *judge) check(t *testing.T, devices []string, count int) {
	t.Helper()
	j.lock.Lock()
	defer j.lock.Unlock()
	for message, times := range j.seen {
		if times > 1 {
			t.Errorf("%s was handled %d times", message, times)
		}
	}
	for _, device := range devices {
		if first := j.first(device); len(first) != count || !slices.IsSorted(first) {
			t.Errorf("%s: %v", device, first)
		}
	}
	for _, wrong := range j.wrong {
		t.Error(wrong)
	}
}

// running starts a consumer; what it returns ends it, and waits for that.
func running(t *testing.T, consumer *gateway.Consumer) (drain func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	drain = func() {
		t.Helper()
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			ended <- nil
		case <-time.After(limit):
			t.Error("the consumer did not end")
		}
	}
	t.Cleanup(cancel)
	select {
	case <-consumer.Joined():
	case err := <-ended:
		t.Fatal(err)
	}
	return drain
}

func TestAKilledGatewayLosesRepeatsAndReordersNothing(t *testing.T) {
	t.Parallel()
	world, judge, count := newWorld(t), newJudge(), 600
	devices := []string{"killed-1", "killed-2", "killed-3", "killed-4"}
	client := world.admin()
	makeGroup(t, client, &gatewayv1.Group{Name: "killed"}, "killed/#")
	consumer := client.Consumer("killed", judge.handle, gateway.ConsumeOptions{Concurrency: 3})
	drain := running(t, consumer)
	for _, device := range devices {
		world.device(device)
		world.publish(device, "killed/"+device, count, 0.002)
	}
	for share := 1; share <= 3; share++ {
		until(t, "some are handled", func() bool { return judge.count() >= share*count*len(devices)/4 })
		world.do("kill", nil, nil)
		world.do("start", nil, nil)
	}
	until(t, "all are handled", func() bool { return judge.complete(devices, count) })
	for _, device := range devices {
		world.do("published", map[string]any{"id": device}, nil)
	}
	drain()
	judge.check(t, devices, count)
	if consumer.Reconnects() < 3 {
		t.Errorf("%d reconnects", consumer.Reconnects())
	}
	group, err := client.Stubs.Groups.GetGroup(context.Background(), &gatewayv1.GetGroupRequest{Name: "killed"})
	if err != nil || group.Group.Status.LagMessages != 0 {
		t.Errorf("%v %v", group, err)
	}
}

func TestWhatFailsComesAgainBeforeWhatCameLater(t *testing.T) {
	t.Parallel()
	world := newWorld(t)
	client := world.admin()
	makeGroup(t, client, &gatewayv1.Group{Name: "failing"}, "failing/#")
	var lock sync.Mutex
	failed, order := map[string]bool{}, []string{}
	consumer := client.Consumer("failing", func(_ context.Context, delivery *gateway.Delivery) error {
		lock.Lock()
		defer lock.Unlock()
		text := string(delivery.Payload())
		if number, _ := strconv.Atoi(text); number%5 == 0 && !failed[text] {
			failed[text] = true
			return gateway.GiveBack{Reason: "not now"}
		}
		order = append(order, text)
		return nil
	}, gateway.ConsumeOptions{})
	drain := running(t, consumer)
	world.device("failing")
	world.publish("failing", "failing/x", 60, 0)
	until(t, "all are handled", func() bool { lock.Lock(); defer lock.Unlock(); return len(order) >= 60 })
	drain()
	for at, text := range order {
		if text != strconv.Itoa(at+1) {
			t.Fatalf("out of order: %v", order)
		}
	}
	if len(failed) != 12 {
		t.Errorf("%d failed", len(failed))
	}
}

func TestWhatFailsForGoodIsADeadLetterWithItsReason(t *testing.T) {
	t.Parallel()
	world := newWorld(t)
	client := world.admin()
	makeGroup(t, client, &gatewayv1.Group{Name: "poison", MaxAttempts: 2}, "poison/#")
	consumer := client.Consumer("poison", func(_ context.Context, delivery *gateway.Delivery) error {
		switch {
		case string(delivery.Payload()) != "1":
			return nil
		case delivery.Attempt == 1:
			panic("no number")
		default:
			return errors.New("still no number")
		}
	}, gateway.ConsumeOptions{})
	drain := running(t, consumer)
	world.device("poison")
	world.publish("poison", "poison/x", 3, 0)
	until(t, "the others are handled", func() bool { return consumer.Handled() >= 2 })
	drain()
	letters, err := client.Stubs.Groups.ListDeadLetters(context.Background(), &gatewayv1.ListDeadLettersRequest{Name: "poison"})
	if err != nil || len(letters.DeadLetters) != 1 || letters.DeadLetters[0].Reason != "still no number" {
		t.Errorf("%v %v", letters, err)
	}
}

func TestAMemberThatDrainsLeavesNothingUndone(t *testing.T) {
	t.Parallel()
	world, judge, count := newWorld(t), newJudge(), 300
	devices := []string{"drained-1", "drained-2", "drained-3", "drained-4", "drained-5", "drained-6"}
	client := world.admin()
	makeGroup(t, client, &gatewayv1.Group{Name: "drained"}, "drained/#")
	leaving := client.Consumer("drained", judge.handle, gateway.ConsumeOptions{MaxOutstanding: 50})
	leave := running(t, leaving)
	staying := client.Consumer("drained", judge.handle, gateway.ConsumeOptions{})
	drain := running(t, staying)
	for _, device := range devices {
		world.device(device)
		world.publish(device, "drained/"+device, count, 0.001)
	}
	until(t, "the first has some", func() bool { return leaving.Handled() > 100 })
	leave()
	gone := leaving.Handled()
	if leaving.Confirmed() != gone {
		t.Errorf("%d handled, %d acknowledged on disk", gone, leaving.Confirmed())
	}
	until(t, "all are handled", func() bool { return judge.complete(devices, count) })
	drain()
	judge.check(t, devices, count)
}

func TestWorkThatOutlivesItsStreamIsNotBegunTwice(t *testing.T) {
	t.Parallel()
	world := newWorld(t)
	client := world.connect(world.proxy(), gateway.Options{Token: world.Token})
	makeGroup(t, client, &gatewayv1.Group{Name: "outlives"}, "outlives/#")
	begun, goOn := make(chan string, 10), make(chan struct{})
	consumer := client.Consumer("outlives", func(_ context.Context, delivery *gateway.Delivery) error {
		begun <- string(delivery.Payload())
		<-goOn
		return nil
	}, gateway.ConsumeOptions{})
	drain := running(t, consumer)
	world.device("outlives")
	world.publish("outlives", "outlives/x", 2, 0)
	until(t, "it has begun", func() bool { return len(begun) == 1 })
	world.do("cut", nil, nil)
	world.publish("outlives", "outlives/x", 1, 0)
	// The new stream has brought what the old one had, and more.
	until(t, "all have come again", func() bool { return consumer.Reconnects() == 1 && consumer.Held() == 3 })
	if len(begun) != 1 {
		t.Error("it was begun twice")
	}
	close(goOn)
	until(t, "all are acknowledged", func() bool { return consumer.Confirmed() == 3 })
	drain()
	if len(begun) != 3 {
		t.Errorf("begun %d times", len(begun))
	}
}

func TestWhatTwoMembersWorkOnIsBegunOnceOverARestart(t *testing.T) {
	t.Parallel()
	for _, ended := range []string{"stop", "kill"} {
		world := newWorld(t)
		client := world.admin()
		makeGroup(t, client, &gatewayv1.Group{Name: "restart"}, "restart/#")
		begun, goOn := make(chan string, 100), make(chan struct{})
		var members []*gateway.Consumer
		var drains []func()
		for range 2 {
			member := client.Consumer("restart", func(_ context.Context, delivery *gateway.Delivery) error {
				begun <- delivery.DeviceID()
				<-goOn
				return nil
			}, gateway.ConsumeOptions{Lease: 20 * time.Second})
			members, drains = append(members, member), append(drains, running(t, member))
		}
		sum := func(count func(*gateway.Consumer) int64) int64 { return count(members[0]) + count(members[1]) }
		for number := range 10 {
			id := fmt.Sprintf("restart-%d", number)
			world.device(id)
			world.publish(id, "restart/x", 1, 0)
		}
		until(t, "all have begun", func() bool { return len(begun) == 10 })
		if members[0].Held() == 0 || members[1].Held() == 0 {
			t.Error("one member has all")
		}
		world.do(ended, nil, nil)
		world.do("start", nil, nil)
		until(t, "both are back", func() bool { return members[0].Reconnects() > 0 && members[1].Reconnects() > 0 })
		// What is published now is behind whatever would come again.
		for number := range 10 {
			id := fmt.Sprintf("restart-%d", number)
			world.publish(id, "restart/x", 1, 0)
			world.do("published", map[string]any{"id": id}, nil)
		}
		until(t, "all have come", func() bool { return sum((*gateway.Consumer).Held) == 20 })
		if len(begun) != 10 {
			t.Errorf("%d began, of 10", len(begun))
		}
		close(goOn)
		until(t, "all are acknowledged", func() bool { return sum((*gateway.Consumer).Confirmed) == 20 })
		if len(begun) != 20 {
			t.Errorf("%d began, of 20", len(begun))
		}
		for _, drain := range drains {
			drain()
		}
	}
}

func TestWorkLongerThanTheLeaseIsDoneOnce(t *testing.T) {
	t.Parallel()
	world := newWorld(t)
	client := world.admin()
	makeGroup(t, client, &gatewayv1.Group{Name: "slow", AckDeadline: durationpb.New(time.Second)}, "slow/#")
	attempts := make(chan uint32, 10)
	consumer := client.Consumer("slow", func(_ context.Context, delivery *gateway.Delivery) error {
		attempts <- delivery.Attempt
		if len(attempts) == 1 {
			// Three leases: this is what the test is about, not how it waits.
			time.Sleep(3 * time.Second)
			return errors.New("once more, to see the attempt")
		}
		return nil
	}, gateway.ConsumeOptions{})
	drain := running(t, consumer)
	world.device("slow")
	world.publish("slow", "slow/x", 1, 0)
	until(t, "it is acknowledged", func() bool { return consumer.Confirmed() == 1 })
	drain()
	if first, second := <-attempts, <-attempts; first != 1 || second != 2 {
		t.Errorf("attempts %d and %d", first, second)
	}
}
