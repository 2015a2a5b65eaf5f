use std::{future::poll_fn, sync::atomic::AtomicUsize, task::Waker};

use auth::backends::callers::CallerPlaces;
use broker::{Account, BrokerConfig, Delivered, MemoryKind, Selector, Target};
use config::{ByteSize, Limits};
use gateway_core::{
    ClientId, DropReason, Message, Offer, Origin, OriginKind, Outcome, QoS, Receipt, ReceiptState, Timestamp,
};
use prost::Message as _;
use tokio_stream::StreamExt as _;
use tonic::Code;

use super::{super::proto::gateway::v1, *};
use crate::server::{access::Call, caller_memory::CallerMemory};
use grpc_messages::convert::SlowPolicy;
use grpc_messages::encode::StreamForm;

const OPTIONS: Offer<'_> = Offer {
    qos: QoS::AtMostOnce,
    retain: false,
    ids: &[],
    group: 0,
    group_queue: gateway_core::QueueId::NONE,
    queue_offline: false,
};

fn target(policy: SlowPolicy, buffer: usize, batch: usize) -> Arc<StreamTarget> {
    let options = StreamOptions { form: StreamForm::Item, policy, buffer, batch };
    Arc::new(StreamTarget::new(caller_memory(&broker(Limits::default())), Selector::default(), options))
}

fn broker(limits: Limits) -> Broker {
    Broker::new(BrokerConfig {
        limits: Arc::new(limits),
        namespace: "devices/{client_id}/#".to_owned(),
        ..BrokerConfig::default()
    })
}

fn deliver(target: &StreamTarget, device: &str, topic: &str, payload: &[u8]) -> Delivered {
    let id = ClientId::new(device);
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 1 };
    target.deliver(&Message::new(topic, payload, Timestamp(1), origin), OPTIONS)
}

/// So many streams at once, and a budget of so many bytes.
fn streams(most: usize, budget: usize) -> Arc<OpenStreams> {
    Arc::new(OpenStreams::new(CallerPlaces { most, per_caller: most }, Arc::new(Account::new(budget))))
}

/// Returns the memory of a caller for streams on the account of this broker.
fn caller_memory(broker: &Broker) -> Arc<CallerMemory> {
    CallerMemory::of_streams(Arc::clone(broker.account()))
}

fn call() -> Arc<Call> {
    Arc::new(Call::unlimited())
}

fn stream(target: &Arc<StreamTarget>, pace: StreamTimers) -> Subscription {
    let slot = streams(10, 1 << 30).open(&call()).unwrap();
    slot.feeds(target, &[]);
    Subscription::new(Arc::clone(target), None, slot, pace)
}

/// Drains the items that are ready now, each as its payload length, or as -gap.
fn drain(target: &StreamTarget) -> Vec<i64> {
    let mut seen = Vec::new();
    let cx = Context::from_waker(Waker::noop());
    while let StreamTake::Batch { bytes, messages } = target.take(&cx, false) {
        let response = v1::SubscribeResponse::decode(bytes).unwrap();
        let mut count = 0;
        for item in response.items {
            match item.item.unwrap() {
                v1::subscribe_item::Item::Message(message) => {
                    seen.push(message.payload.len() as i64);
                    count += 1;
                }
                v1::subscribe_item::Item::Gap(gap) => seen.push(-(gap.count as i64)),
                v1::subscribe_item::Item::Heartbeat(_) => {}
            }
        }
        assert_eq!(count, messages);
    }
    seen
}

#[test]
fn batches_decode_as_the_generated_response_and_keep_order() {
    let target = target(SlowPolicy::DropNewest, 1 << 20, 4096);
    for length in 0..300 {
        assert_eq!(deliver(&target, "d", "t", &vec![1; length]).outcome, Outcome::Sent);
    }
    assert_eq!(drain(&target), (0..300).collect::<Vec<i64>>());
    assert!(drain(&target).is_empty());
}

#[test]
fn a_batch_stays_within_its_limit() {
    let target = target(SlowPolicy::DropNewest, 1 << 20, 4096);
    for _ in 0..300 {
        deliver(&target, "d", "t", &[1; 100]);
    }
    let cx = Context::from_waker(Waker::noop());
    let mut batches = 0;
    while let StreamTake::Batch { bytes, .. } = target.take(&cx, false) {
        assert!(bytes.len() <= 4096);
        batches += 1;
    }
    assert!(batches > 5);
}

#[test]
fn drop_newest_keeps_the_old_and_says_where_the_new_are_missing() {
    let target = target(SlowPolicy::DropNewest, 8192, 1024);
    let mut kept = 0;
    while deliver(&target, "d", "t", &[0; 500]).outcome == Outcome::Sent {
        kept += 1;
    }
    for _ in 0..9 {
        let outcome = deliver(&target, "d", "t", &[0; 500]).outcome;
        assert_eq!(outcome, Outcome::Dropped(DropReason::QueueFull));
    }
    let cx = Context::from_waker(Waker::noop());
    let StreamTake::Batch { messages, .. } = target.take(&cx, false) else { panic!() };
    deliver(&target, "d", "t", &[0; 7]);
    let mut expected = vec![500; kept - messages as usize];
    expected.extend([-10, 7]);
    assert_eq!(drain(&target), expected);
}

#[test]
fn drop_oldest_keeps_the_new_and_says_what_went() {
    let target = target(SlowPolicy::DropOldest, 8192, 1024);
    for length in 1..=500 {
        assert_eq!(deliver(&target, "d", "t", &vec![0; length]).outcome, Outcome::Sent);
    }
    let seen = drain(&target);
    let lost = usize::try_from(-seen[0]).unwrap();
    assert_eq!(seen[1..], ((lost as i64 + 1)..=500).collect::<Vec<_>>());
    assert!(lost > 400);
}

#[test]
fn a_message_larger_than_the_buffer_is_a_gap_of_its_own() {
    for policy in [SlowPolicy::DropOldest, SlowPolicy::DropNewest] {
        let target = target(policy, 4096, 1024);
        deliver(&target, "d", "t", &[0; 1]);
        let outcome = deliver(&target, "d", "t", &[0; 5000]).outcome;
        assert_eq!(outcome, Outcome::Dropped(DropReason::TooLarge));
        deliver(&target, "d", "t", &[0; 2]);
        assert_eq!(drain(&target), [1, -1, 2]);
    }
}

#[test]
fn a_gap_is_told_even_if_nothing_follows() {
    let target = target(SlowPolicy::DropNewest, 4096, 1024);
    deliver(&target, "d", "t", &[0; 5000]);
    assert_eq!(drain(&target), [-1]);
}

#[test]
fn conflation_keeps_the_last_of_each_device_and_topic_within_the_bound() {
    let target = target(SlowPolicy::Conflate, 4096, 1024);
    for length in 1..=50 {
        deliver(&target, "a", "t", &vec![0; length]);
        deliver(&target, "b", "t", &vec![0; length + 100]);
        deliver(&target, "a", "u", &vec![0; length + 200]);
    }
    assert_eq!(drain(&target), [-147, 50, 150, 250]);
    deliver(&target, "b", "t", &[0; 3]);
    assert_eq!(drain(&target), [3]);

    for n in 0..100 {
        deliver(&target, "a", &format!("t/{n}"), &[0; 50]);
    }
    let few = target.load();
    assert!(few > 5 && few < 40, "{few}");
    // A known value that grows past the bound goes, rather than stay as an old one.
    let outcome = deliver(&target, "a", "t/0", &[0; 3000]).outcome;
    assert_eq!(outcome, Outcome::Dropped(DropReason::QueueFull));
    let seen = drain(&target);
    assert_eq!(seen.iter().filter(|&&item| item == 50).count(), few - 1);
    assert_eq!(seen.iter().filter(|&&item| item < 0).sum::<i64>(), -(100 - few as i64 + 2));
}

#[tokio::test]
async fn close_ends_the_stream_after_what_was_buffered() {
    let target = target(SlowPolicy::Close, 4096, 1024);
    while deliver(&target, "d", "t", &[0; 500]).outcome == Outcome::Sent {}
    let outcome = deliver(&target, "d", "t", &[]).outcome;
    assert_eq!(outcome, Outcome::Dropped(DropReason::SessionEnded));
    let mut stream = stream(&target, StreamTimers::default());
    let mut batches = 0;
    let status = loop {
        match stream.next().await.unwrap() {
            Ok(_) => batches += 1,
            Err(status) => break status,
        }
    };
    assert!(batches > 2);
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn shutdown_ends_streams_with_unavailable() {
    let streams = streams(1, 1 << 30);
    let target = target(SlowPolicy::DropOldest, 4096, 1024);
    let slot = streams.open(&call()).unwrap();
    slot.feeds(&target, &[]);
    assert_eq!(streams.open(&call()).unwrap_err(), Error::TooManyStreams("in all"));
    let mut stream = Subscription::new(Arc::clone(&target), None, slot, StreamTimers::default());
    let waiting = tokio::spawn(async move { stream.next().await.unwrap().unwrap_err().code() });
    tokio::task::yield_now().await;
    streams.close();
    assert_eq!(waiting.await.unwrap(), Code::Unavailable);
    assert_eq!(streams.open(&call()).unwrap_err(), Error::ShuttingDown);
}

#[test]
fn devices_prefixes_and_exclusions_are_filtered() {
    let selector = Selector::new(false)
        .devices(vec!["one".into()], ["a-", "a-b", "z", "a-c-"].map(String::from).into())
        .exclude(vec!["a-bad".into()], vec!["secret/#".into(), "x/y".into()]);
    let wants = |device: Option<&str>, topic: &str| {
        let id = device.map(ClientId::new);
        let kind = if id.is_some() { OriginKind::Device } else { OriginKind::Backend };
        let origin = Origin { kind, client_id: id.as_ref(), slot: 0 };
        selector.wants(&Message::new(topic, b"", Timestamp(0), origin))
    };
    for device in ["one", "a-", "a-bb", "a-z", "a-c-d", "zz"] {
        assert!(wants(Some(device), "t"), "{device}");
    }
    for device in ["on", "one1", "a", "b", "a-bad", ""] {
        assert!(!wants(Some(device), "t"), "{device}");
    }
    assert!(!wants(Some("one"), "secret/a") && !wants(Some("one"), "secret") && !wants(Some("one"), "x/y"));
    assert!(wants(Some("one"), "x/y/z"));
    assert!(!wants(None, "t"));

    let origin = Origin::BACKEND;
    let message = Message::new("t", b"", Timestamp(0), origin);
    assert!(Selector::new(false).wants(&message) && !Selector::new(true).wants(&message));
}

#[test]
fn a_message_left_out_is_ignored_and_tells_the_publisher_nothing() {
    let options =
        StreamOptions { form: StreamForm::Item, policy: SlowPolicy::DropOldest, buffer: 4096, batch: 1024 };
    let target = StreamTarget::new(caller_memory(&broker(Limits::default())), Selector::new(true), options);
    let receipt = Arc::new(Receipt::default());
    let mut message = Message::new("t", b"", Timestamp(0), Origin::BACKEND);
    message.receipt = Some(&receipt);
    let delivered = target.deliver(&message, OPTIONS);
    assert_eq!(delivered, Delivered { outcome: Outcome::Ignored, flush: false });
    assert_eq!(receipt.state(), ReceiptState::default());
    assert!(drain(&target).is_empty());
}

#[tokio::test]
async fn a_waiting_reader_is_flushed_once_per_turn() {
    struct Wakes(AtomicUsize);
    impl std::task::Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let wakes = Arc::new(Wakes(AtomicUsize::new(0)));
    let waker = Waker::from(Arc::clone(&wakes));
    let target = target(SlowPolicy::DropOldest, 1 << 20, 1024);
    assert!(!deliver(&target, "d", "t", b"nobody waits").flush);
    drain(&target);
    let cx = Context::from_waker(&waker);
    assert!(matches!(target.take(&cx, false), StreamTake::Nothing));
    assert!(deliver(&target, "d", "t", b"1").flush);
    assert!(!deliver(&target, "d", "t", b"2").flush, "already in the turn's list");
    Arc::clone(&target).flush();
    assert_eq!(wakes.0.load(std::sync::atomic::Ordering::Relaxed), 1);
    assert!(!deliver(&target, "d", "t", b"3").flush, "the reader is on its way");
}

/// Left alone, a stream must neither hold a lone message back nor wake its reader for each of many.
#[tokio::test(start_paused = true)]
async fn unset_linger_sends_a_lone_message_and_gathers_the_others() {
    let target = target(SlowPolicy::DropOldest, 1 << 20, 1024);
    let mut stream = stream(&target, StreamTimers::default());
    let ready = |stream: &mut Subscription| {
        let polled = Pin::new(stream).poll_next(&mut Context::from_waker(Waker::noop()));
        let Poll::Ready(Some(Ok(response))) = polled else { return 0 };
        v1::SubscribeResponse::decode(response.0).unwrap().items.len()
    };
    assert_eq!(ready(&mut stream), 0);
    deliver(&target, "d", "t", b"1");
    assert_eq!(ready(&mut stream), 1, "after a silence at once");
    deliver(&target, "d", "t", b"2");
    assert_eq!(ready(&mut stream), 0, "just after a batch not");
    for _ in 0..3 {
        assert!(!deliver(&target, "d", "t", b"3").flush, "what gathers wakes nobody");
    }
    tokio::time::advance(Duration::from_millis(5)).await;
    assert_eq!(ready(&mut stream), 4);
    assert_eq!(ready(&mut stream), 0);
    assert!(!deliver(&target, "d", "t", b"4").flush, "nor does the first after many");
    tokio::time::advance(Duration::from_millis(5)).await;
    assert_eq!(ready(&mut stream), 1);
    assert_eq!(ready(&mut stream), 0);
    tokio::time::advance(Duration::from_millis(5)).await;
    deliver(&target, "d", "t", b"5");
    assert_eq!(ready(&mut stream), 1, "a silence again");
    for _ in 0..30 {
        deliver(&target, "d", "t", &[0; 100]);
    }
    assert!(ready(&mut stream) > 1, "a full batch does not wait");
}

#[tokio::test(start_paused = true)]
async fn linger_gathers_and_heartbeats_fill_the_silence() {
    let target = target(SlowPolicy::DropOldest, 1 << 20, 1024);
    let second = Duration::from_secs(1);
    let pace = StreamTimers { linger: Linger::Fixed(second), heartbeat: Some(10 * second) };
    let mut stream = stream(&target, pace);
    let start = Instant::now();
    let beat = stream.next().await.unwrap().unwrap();
    assert_eq!(start.elapsed().as_secs(), 10);
    let response = v1::SubscribeResponse::decode(beat.0).unwrap();
    assert!(matches!(response.items[0].item, Some(v1::subscribe_item::Item::Heartbeat(_))));

    deliver(&target, "d", "t", b"1");
    let pending = poll_fn(|cx| Poll::Ready(Pin::new(&mut stream).poll_next(cx).is_pending())).await;
    assert!(pending, "waits for company");
    deliver(&target, "d", "t", b"2");
    let start = Instant::now();
    let batch = stream.next().await.unwrap().unwrap();
    assert_eq!(v1::SubscribeResponse::decode(batch.0).unwrap().items.len(), 2);
    assert_eq!(start.elapsed(), second);

    for _ in 0..30 {
        deliver(&target, "d", "t", &[0; 100]);
    }
    let start = Instant::now();
    stream.next().await.unwrap().unwrap();
    assert!(start.elapsed().is_zero(), "a full batch does not wait");
}

#[tokio::test]
async fn packets_come_one_by_one() {
    let options =
        StreamOptions { form: StreamForm::Packet, policy: SlowPolicy::DropOldest, buffer: 4096, batch: 1024 };
    let target =
        Arc::new(StreamTarget::new(caller_memory(&broker(Limits::default())), Selector::default(), options));
    deliver(&target, "d", "t", &[0; 5000]); // lost; packets cannot tell, and must not end the stream
    for payload in [&b"1"[..], b"", b"333"] {
        deliver(&target, "d", "t", payload);
    }
    let mut stream = stream(&target, StreamTimers::default());
    for payload in [&b"1"[..], b"", b"333"] {
        let packet = stream.next().await.unwrap().unwrap();
        let packet = crate::proto::rpcserver::PublishedPacket::decode(packet.0).unwrap();
        assert_eq!((packet.device_id.as_str(), &packet.payload[..]), ("d", payload));
    }
}

#[test]
fn a_taken_message_is_sent_and_acknowledged_at_once() {
    let target = target(SlowPolicy::DropOldest, 4096, 1024);
    let receipt = Arc::new(Receipt::default());
    let mut message = Message::new("t", b"", Timestamp(0), Origin::BACKEND);
    message.receipt = Some(&receipt);
    target.deliver(&message, OPTIONS);
    let state = receipt.state();
    assert_eq!((state.sent, state.acked), (1, 1));
}

#[test]
fn buffers_are_charged_to_the_memory_budget_and_given_back() {
    let broker = broker(Limits::default());
    let used = || broker.gauges().queued_bytes;
    for policy in [SlowPolicy::DropOldest, SlowPolicy::DropNewest, SlowPolicy::Conflate, SlowPolicy::Close] {
        let options = StreamOptions { form: StreamForm::Item, policy, buffer: 256 << 10, batch: 4096 };
        let target = Arc::new(StreamTarget::new(caller_memory(&broker), Selector::default(), options));
        for n in 0..1000 {
            deliver(&target, "d", &format!("t/{n}"), &[0; 500]);
            assert!(used() >= target.state_bytes(), "{policy:?}");
        }
        assert!(used() > 200 << 10 && used() <= 256 << 10, "{policy:?}: {}", used());
        drain(&target);
        assert_eq!(used(), 0, "{policy:?}: all was read");
        let stream = stream(&target, StreamTimers::default());
        deliver(&target, "d", "t", &[0; 500]);
        assert_eq!(used() == 0, policy == SlowPolicy::Close, "{policy:?}");
        drop(stream);
        assert_eq!(used(), 0, "{policy:?}: the reader is gone, the target is not");
        let late = deliver(&target, "d", "t", b"late").outcome;
        assert_eq!(late, Outcome::Dropped(DropReason::SessionEnded));
        assert_eq!(used(), 0);
    }
}

#[test]
fn over_the_memory_budget_a_stream_loses_by_its_slow_policy_and_says_why() {
    const BUDGET: usize = 64 << 10;
    let gaps = |target: &StreamTarget| {
        let cx = Context::from_waker(Waker::noop());
        let (mut got, mut lost) = (0, 0);
        while let StreamTake::Batch { bytes, .. } = target.take(&cx, false) {
            for item in v1::SubscribeResponse::decode(bytes).unwrap().items {
                match item.item.unwrap() {
                    v1::subscribe_item::Item::Gap(gap) => {
                        assert_eq!(gap.reason(), v1::GapReason::Memory);
                        lost += gap.count;
                    }
                    _ => got += 1,
                }
            }
        }
        (got, lost)
    };
    for policy in [SlowPolicy::DropOldest, SlowPolicy::DropNewest, SlowPolicy::Conflate, SlowPolicy::Close] {
        let broker = broker(Limits { memory_budget: ByteSize(BUDGET), ..Limits::default() });
        let options = StreamOptions { form: StreamForm::Item, policy, buffer: 1 << 20, batch: 4096 };
        let target = StreamTarget::new(caller_memory(&broker), Selector::default(), options);
        let mut refused = 0;
        for n in 0..500u64 {
            let outcome = deliver(&target, "d", &format!("t/{n}"), &[0; 500]).outcome;
            refused += u64::from(matches!(outcome, Outcome::Dropped(_)));
            assert!(broker.gauges().queued_bytes <= BUDGET);
        }
        assert_eq!(refused == 0, policy == SlowPolicy::DropOldest, "{policy:?}");
        let (got, lost) = gaps(&target);
        assert!(got > 50, "{policy:?}: {got}");
        let ended = target.is_closed();
        assert_eq!(
            (ended, lost),
            (policy == SlowPolicy::Close, if ended { 0 } else { 500 - got }),
            "{policy:?}"
        );
        if ended {
            let cx = Context::from_waker(Waker::noop());
            assert!(matches!(target.take(&cx, false), StreamTake::Closed(Error::MemoryBudget)));
        }
    }
    // Others have it all: nothing of our own can make room.
    let broker = broker(Limits { memory_budget: ByteSize(BUDGET), ..Limits::default() });
    assert!(broker.account().charge(MemoryKind::GrpcStreams, 0, BUDGET));
    let options = StreamOptions {
        form: StreamForm::Item,
        policy: SlowPolicy::DropOldest,
        buffer: 1 << 20,
        batch: 4096,
    };
    let target = StreamTarget::new(caller_memory(&broker), Selector::default(), options);
    assert_eq!(deliver(&target, "d", "t", b"1").outcome, Outcome::Dropped(DropReason::Memory));
    broker.account().release(MemoryKind::GrpcStreams, BUDGET);
    assert_eq!(deliver(&target, "d", "t", b"2").outcome, Outcome::Sent);
    assert_eq!(gaps(&target), (1, 1));
    drop(target);
    assert_eq!(broker.gauges().queued_bytes, 0);
}

#[test]
fn the_backlog_of_a_stream_is_what_its_reader_has_not_taken() {
    let at = |target: &StreamTarget, topic: &str, at: u64| {
        let id = ClientId::new("d");
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 1 };
        target.deliver(&Message::new(topic, &[0; 700], Timestamp(at), origin), OPTIONS);
    };
    let cx = Context::from_waker(Waker::noop());
    for (policy, kept, oldest, dropped, conflated) in [
        (SlowPolicy::DropOldest, 5, Some(13), 3, 0),
        (SlowPolicy::DropNewest, 5, Some(10), 3, 0),
        (SlowPolicy::Conflate, 2, Some(10), 0, 6),
    ] {
        let target = target(policy, 4_900, 1_024);
        for n in 0..8 {
            at(&target, if n % 2 == 0 { "even" } else { "odd" }, 10 + n);
        }
        let backlog = target.backlog();
        assert_eq!((backlog.waiting, backlog.oldest), (kept, oldest.map(Timestamp)), "{policy:?}");
        assert_eq!((backlog.sent, backlog.dropped, backlog.conflated), (0, dropped, conflated), "{policy:?}");
        assert!((1..=4_900).contains(&backlog.bytes), "{policy:?}");
        while let StreamTake::Batch { .. } = target.take(&cx, false) {}
        let after = StreamBacklog { sent: kept, dropped, conflated, ..StreamBacklog::default() };
        assert_eq!(target.backlog(), after, "{policy:?}");
    }
}

/// Rules out that one caller holds memory by what its streams ask for: 1,000 devices or filters each, on no account.
#[test]
fn what_streams_are_asked_for_is_on_the_account_until_they_end() {
    const BUDGET: usize = 16 << 20;
    let streams = streams(10_000, BUDGET);
    let names: Vec<String> = (0..1_000).map(|n| format!("device-{n}")).collect();
    let mut open = Vec::new();
    let refused = loop {
        let mut slot = streams.open(&call()).unwrap();
        if let Err(error) = slot.select(size_of_names(&names) + size_of_filters(&names)) {
            break error;
        }
        open.push(slot);
    };
    assert_eq!(refused, Error::MemoryBudget);
    let held = open[0].caller_memory().account().held(MemoryKind::GrpcStreams);
    assert!(held >= open.len() * 1_000 * 100 && held <= BUDGET * 3 / 4, "{held} of {} streams", open.len());
    let account = Arc::clone(open[0].caller_memory().account());
    drop(open);
    assert_eq!(account.used(), 0);
}

/// Rules out that responses wait unread for one caller's streams on no account.
#[tokio::test]
async fn responses_that_wait_are_on_the_account_until_they_are_taken() {
    let streams = streams(10, 1 << 20);
    let (sender, mut queue) = responses(streams.open(&call()).unwrap());
    let account = Arc::clone(sender.slot().caller_memory().account());
    let response = RawMessage(vec![0; 100_000].into());
    sender.send(response.clone(), 1).await.unwrap();
    assert_eq!(account.held(MemoryKind::GrpcStreams), 100_000);
    queue.next().await.unwrap().unwrap();
    assert_eq!(account.used(), 0, "taken");
    let large = RawMessage(vec![0; 1 << 20].into());
    let end = sender.send(large, 1).await.unwrap_err();
    assert!(matches!(end, StreamEnd::Error(Error::MemoryBudget)));
    sender.end(end).await;
    assert_eq!(queue.next().await.unwrap().unwrap_err().code(), Code::ResourceExhausted);
    assert!(queue.next().await.is_none());
}

/// Rules out that one caller has every stream of the gateway.
#[test]
fn a_caller_has_a_share_of_all_streams_and_leaves_some_to_others() {
    let places = CallerPlaces { most: 100, per_caller: 50 };
    let streams = Arc::new(OpenStreams::new(places, Arc::new(Account::new(1 << 30))));
    let [one, two] = [1, 2].map(|host| Arc::new(Call::from_host(host)));
    let open: Vec<StreamSlot> = std::iter::from_fn(|| streams.open(&one).ok()).collect();
    assert_eq!(open.len(), 50);
    assert_eq!(streams.open(&one).unwrap_err(), Error::TooManyStreams("of this caller"));
    let more: Vec<StreamSlot> = std::iter::from_fn(|| streams.open(&two).ok()).collect();
    assert_eq!(more.len(), 25, "the last quarter is for others");
    streams.open(&Arc::new(Call::from_host(3))).unwrap();
    drop(open);
    streams.open(&one).unwrap();
}

/// Rules out that an unread stream of small batches holds several times what it is charged for.
#[test]
fn what_a_buffer_takes_besides_its_messages_is_charged() {
    let broker = broker(Limits::default());
    let options =
        StreamOptions { form: StreamForm::Item, policy: SlowPolicy::DropNewest, buffer: 1 << 20, batch: 1 };
    let target = StreamTarget::new(caller_memory(&broker), Selector::default(), options);
    let mut sent = 0;
    while deliver(&target, "d", "t", b"").outcome == Outcome::Sent {
        sent += 1;
    }
    let held = broker.account().held(MemoryKind::GrpcStreams);
    assert!(held >= sent * 100, "{held} for {sent} batches");
    assert!(sent * 100 <= 1 << 20, "{sent} batches in the buffer");
    drop(target);
    assert_eq!(broker.account().used(), 0);
}

/// Rules out that a stream whose reader has stopped holds room for a whole batch, or for the largest value ever, uncharged.
#[test]
fn room_that_a_buffer_sets_aside_is_charged_and_not_kept() {
    let broker = broker(Limits::default());
    let held = || broker.account().held(MemoryKind::GrpcStreams);
    let options = |policy| StreamOptions { form: StreamForm::Item, policy, buffer: 1 << 20, batch: 64 << 10 };
    let target =
        StreamTarget::new(caller_memory(&broker), Selector::default(), options(SlowPolicy::DropOldest));
    for _ in 0..60 {
        deliver(&target, "d", "t", &[0; 1_000]);
    }
    drain(&target);
    deliver(&target, "d", "t", b"");
    assert!(held() >= 60_000, "{} for a batch like the last", held());
    drop(target);
    let target =
        StreamTarget::new(caller_memory(&broker), Selector::default(), options(SlowPolicy::Conflate));
    deliver(&target, "d", "t", &[0; 500_000]);
    deliver(&target, "d", "t", b"small");
    assert!(target.room_of_values() < 1_000, "{}", target.room_of_values());
    drop(target);
    assert_eq!(broker.account().used(), 0);
}
