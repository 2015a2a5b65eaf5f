//! No packet and no flood does more in one poll than its account holds. The tests read the account, not a clock.

use std::{
    future::poll_fn,
    io::Read,
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Waker},
};

use broker::{Charge, CloseReason, MemoryKind, Session, SubscribeRequest};
use codec::{Packet, Subscribe, SubscribeFilter, Unsubscribe, reason};
use config::Limits;
use gateway_core::{Effort, Message, Origin, Protocol, QoS, Timestamp};
use session::Inbound;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Connection, ending::End};
use crate::{
    NetShared,
    layers::{Layers, layered::Io, socket::Socket},
    local::ShardLocal,
    test_util::shared,
};
use auth::Permissions;
use device::{
    Device, SocketWriter,
    test_util::{Wakes, attach, open, open_as, socket},
};

/// One step may go beyond the account: the largest is a read, whose bytes are paid for before they are handled.
const STEP: u64 = 100_000;

/// A connection whose peer has sent `input` already, with its task's wakes.
struct Scene {
    connection: Connection,
    device: Arc<Device>,
    wakes: Arc<Wakes>,
    peer: TcpStream,
}

impl Scene {
    async fn new(shared: &Arc<NetShared>, input: Vec<u8>) -> Self {
        Self::of(shared, true, input).await
    }

    async fn of(shared: &Arc<NetShared>, clean_start: bool, input: Vec<u8>) -> Self {
        let wakes = Arc::new(Wakes::default());
        let (writer, read, peer) = socket().await;
        let (device, epoch) = open(&shared.devices, clean_start);
        assert!(attach(&device, epoch, &wakes, writer));
        let connection = Connection::new(
            shared,
            Arc::clone(&device),
            epoch,
            Io::Plain(read),
            Inbound::new(Protocol::V5, 60),
            Permissions::new(Arc::default()),
            None,
            input,
            None,
        );
        let peer = peer.into_std().expect("a socket");
        Self { connection, device, wakes, peer }
    }

    /// One poll: what it spent, whether the task goes on by itself, and the end, if it came.
    async fn poll(&mut self) -> (u64, bool, Option<End>) {
        let before = self.wakes.0.load(SeqCst);
        let waker = Waker::from(Arc::clone(&self.wakes));
        let end = match self.connection.poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(end) => Some(end),
            Poll::Pending => None,
        };
        // Tasks that go on behind others are woken by now.
        tokio::task::yield_now().await;
        let local = ShardLocal::take();
        let spent = local.work.turn.effort.spent();
        local.put_back();
        (spent, self.wakes.0.load(SeqCst) > before, end)
    }

    /// Polls until the task waits for something outside; the number of polls.
    async fn run(&mut self, what: &str) -> usize {
        let most = u64::from(Effort::TURN) + STEP;
        for polls in 1..1_000_000 {
            let (spent, goes_on, end) = self.poll().await;
            assert!(spent <= most, "{what}: a poll spent {spent} of {most}");
            assert_eq!(end, None, "{what}");
            if !goes_on {
                return polls;
            }
        }
        panic!("{what} never ends");
    }

    /// Returns the bytes written to the peer and the bytes that wait to be written.
    fn answers(&mut self) -> Vec<u8> {
        let mut answers = Vec::new();
        // Nothing more to read is no fault.
        let _ = self.peer.read_to_end(&mut answers);
        answers.extend(self.device.lock().out.take_out());
        answers
    }
}

fn packet(packet: &Packet<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    codec::encode(packet, Protocol::V5, &mut bytes);
    bytes
}

fn subscribe(filters: impl Iterator<Item = String>) -> Vec<u8> {
    let filters = filters.map(|filter| SubscribeFilter {
        filter,
        qos: QoS::AtMostOnce,
        no_local: false,
        retain_as_published: false,
        retain_handling: 0,
    });
    packet(&Packet::Subscribe(Subscribe {
        packet_id: 1,
        id: None,
        user: Vec::new(),
        filters: filters.collect(),
    }))
}

fn unsubscribe(filters: impl Iterator<Item = String>) -> Vec<u8> {
    packet(&Packet::Unsubscribe(Unsubscribe { packet_id: 2, user: Vec::new(), filters: filters.collect() }))
}

/// A broker with retained messages on `t/0`, `t/1`, ….
fn with_retained(topics: usize, limits: Limits) -> Arc<NetShared> {
    let shared = shared(limits);
    for number in 0..topics {
        let topic = format!("t/{number}");
        let mut message = Message::new(&topic, b"payload", Timestamp(1), Origin::BACKEND);
        message.retain = true;
        shared.broker.set_retained(&message).expect("within the limits");
    }
    shared
}

#[tokio::test]
async fn whatever_a_peer_sends_a_poll_ends_when_its_account_is_spent() {
    let plain = 60_000;
    // The bytes sent, and the least number of polls that they are worth.
    let mixes: [(&str, Vec<u8>, usize); 7] = [
        ("filters with retained messages", subscribe((0..8_000).map(|n| format!("t/{n}"))), 40),
        ("filters to remove", unsubscribe((0..8_000).map(|n| format!("t/{n}"))), 40),
        ("SUBSCRIBE packets", subscribe(std::iter::once("t/1".to_owned())).repeat(5_000), 25),
        ("PUBACK packets", [0x40, 2, 0, 7].repeat(plain), 10),
        ("PUBREL packets", [0x62, 2, 0, 7].repeat(plain / 4), 4),
        ("PINGREQ packets", [0xC0, 0].repeat(plain), 10),
        ("searches in vain", subscribe((0..300).map(|n| format!("+/none/{n}"))), 100),
    ];
    for (what, input, polls) in mixes {
        let limits = Limits { retained_scan_rate: 0, ..Limits::default() };
        let shared = with_retained(2_000, limits);
        let mut scene = Scene::new(&shared, input).await;
        let needed = scene.run(what).await;
        assert!(needed >= polls, "{what}: {needed} polls");
        assert!(scene.connection.rare.as_ref().is_none_or(|rare| rare.replays.is_none()), "{what}");
    }
}

#[tokio::test]
async fn what_follows_an_unfinished_packet_waits_for_its_answer() {
    let shared = with_retained(0, Limits::default());
    let mut input = subscribe((0..2_000).map(|n| format!("a/{n}")));
    input.extend(unsubscribe((0..2_000).map(|n| format!("a/{}", n / 2))));
    input.extend([0xC0, 0]);
    let mut scene = Scene::new(&shared, input).await;
    scene.answers();
    let (_, goes_on, _) = scene.poll().await;
    assert!(goes_on);
    assert_eq!(scene.answers(), b"", "the first of three packets is not done");
    scene.run("three packets").await;
    let answers = scene.answers();
    let mut types = Vec::new();
    let mut at = 0;
    while let Some(len) = codec::frame_len(&answers[at..]).expect("frames") {
        types.push((answers[at] >> 4, len));
        at += len;
    }
    // A header of 3 bytes, the identifier, no properties, and a code for each filter.
    assert_eq!(types, [(9, 2_006), (11, 2_006), (13, 2)]);
    assert_eq!(answers[2_006..4_012].iter().filter(|code| **code == 0x11).count(), 1_000);
    assert_eq!(shared.broker.gauges().subscriptions, 1_000);
}

#[tokio::test]
async fn a_packet_cut_off_by_a_close_is_not_answered_and_what_it_did_stands() {
    let shared = with_retained(0, Limits::default());
    let mut scene = Scene::new(&shared, subscribe((0..2_000).map(|n| format!("a/{n}")))).await;
    scene.answers();
    scene.poll().await;
    let done = shared.broker.gauges().subscriptions;
    assert!((1..2_000).contains(&done), "{done}");
    scene.device.close(1, CloseReason::Administrative(0x98));
    let (_, _, end) = scene.poll().await;
    assert_eq!(end, Some(End::Close(CloseReason::Administrative(0x98))));
    assert_eq!(scene.answers(), b"");
    assert_eq!(shared.broker.gauges().subscriptions, done);
}

#[tokio::test]
async fn a_packet_with_too_many_filters_is_refused_before_it_is_decoded() {
    let limits = Limits { max_filters_per_packet: 3, ..Limits::default() };
    let shared = with_retained(0, limits);
    for (filters, refused) in [(3, false), (4, true)] {
        let names = || (0..filters).map(|n| format!("a/{n}"));
        for input in [subscribe(names()), unsubscribe(names())] {
            let mut scene = Scene::new(&shared, input).await;
            let (_, _, end) = scene.poll().await;
            assert_eq!(end, refused.then_some(End::Protocol(reason::QUOTA_EXCEEDED)), "{filters} filters");
        }
    }
}

/// With 2,000 retained topics and 1,000 a second, ten searches take 20 seconds instead of the shard's time.
#[tokio::test]
async fn a_client_that_searches_too_much_waits_and_is_served_meanwhile() {
    let limits = Limits { retained_scan_rate: 1_000, ..Limits::default() };
    let shared = with_retained(2_000, limits);
    let mut input = subscribe((0..10).map(|n| format!("+/none/{n}")));
    input.extend([0xC0, 0]);
    let mut scene = Scene::new(&shared, input).await;
    scene.answers();
    let polls = scene.run("ten searches").await;
    assert!(polls < 10, "{polls} polls");
    assert!(scene.connection.rare.as_ref().is_some_and(|rare| rare.replays.is_some()), "searches are left");
    assert!(scene.answers().ends_with(&[0xD0, 0]), "the ping behind them is answered");
}

/// The failure: ten who flood had sixty polls of half a millisecond before anybody else's bytes were seen.
#[tokio::test]
async fn who_did_much_goes_on_behind_a_look_at_the_sockets() {
    let shared = with_retained(0, Limits::default());
    let input = unsubscribe((0..8_000).map(|n| format!("t/{n}")));
    let Scene { mut connection, .. } = Scene::new(&shared, input).await;
    let polls = Arc::new(AtomicUsize::new(0));
    let (_, mut bystander, mut peer) = socket().await;
    peer.write_all(b"x").await.expect("to a socket that is read");
    let polled = Arc::clone(&polls);
    tokio::spawn(poll_fn(move |cx| {
        polled.fetch_add(1, SeqCst);
        connection.poll(cx).map(drop)
    }));
    bystander.read_u8().await.expect("what was sent before");
    assert!(polls.load(SeqCst) <= 3, "{} polls", polls.load(SeqCst));
}

/// The failure: a read of nothing but pings was charged as if it had cost two system calls.
#[tokio::test]
async fn what_a_websocket_frame_costs_is_charged() {
    const PINGS: usize = 5_000;
    let shared = with_retained(0, Limits::default());
    let mut scene = Scene::new(&shared, Vec::new()).await;
    let (writer, read, mut peer) = socket().await;
    let SocketWriter::Direct(Some(write)) = writer else { panic!("a socket") };
    let layers = Layers { websocket: Some(Box::default()), ..Layers::default() };
    let charge = Charge::new(shared.broker.account(), MemoryKind::Replies);
    scene.connection.io = Io::layered(Socket::Stream(read, write), layers, charge);
    if let Some(link) = &mut scene.device.lock().link {
        link.writer = SocketWriter::Owner;
    }
    peer.write_all(&[0x89, 0x80, 0, 0, 0, 0].repeat(PINGS)).await.expect("to a socket that is read");
    let mut spent = 0;
    for _ in 0..100 {
        spent += scene.poll().await.0;
    }
    assert!(spent >= PINGS as u64 * u64::from(Effort::FRAME), "{spent}");
    let mut pongs = vec![0; PINGS * 2];
    peer.read_exact(&mut pongs).await.expect("an answer to each");
}

const RECEIVERS: usize = 12_000;

/// Very many receivers of topic `t`, without connections.
fn subscribed(shared: &Arc<NetShared>) -> Vec<Arc<Device>> {
    let subscribed = |number| {
        let (device, _) = open_as(&shared.devices, &format!("r{number}"), true);
        let session = Arc::clone(&device) as Arc<dyn Session>;
        let request = SubscribeRequest {
            filter: "t",
            qos: QoS::AtLeastOnce,
            no_local: false,
            retain_as_published: false,
            retain_handling: 0,
            id: None,
            commit: None,
        };
        shared.broker.subscribe(&session, &request, Timestamp(1)).expect("allowed");
        device
    };
    (0..RECEIVERS).map(subscribed).collect()
}

/// The acknowledgement waits for all of them, and the publisher's later packets wait for the acknowledgement.
#[tokio::test]
async fn a_message_for_many_takes_several_polls_and_outlives_its_publisher() {
    let shared = shared(Limits::default());
    let receivers = subscribed(&shared);
    let waiting = || receivers.iter().map(|device| device.queue().pending).sum::<usize>();
    // QoS 1, topic `t`, packet identifier 9, no properties, payload `p`; then a ping.
    let input = b"\x32\x07\x00\x01t\x00\x09\x00p\xC0\x00".to_vec();
    let mut scene = Scene::new(&shared, input.clone()).await;
    scene.answers();
    let (_, goes_on, _) = scene.poll().await;
    assert!(goes_on && (1..RECEIVERS).contains(&waiting()), "{}", waiting());
    assert_eq!(scene.answers(), b"", "not all have it");
    scene.run("many receivers").await;
    assert_eq!(waiting(), RECEIVERS);
    assert_eq!(scene.answers(), b"\x40\x02\x00\x09\xD0\x00");
    let mut scene = Scene::new(&shared, input).await;
    scene.answers();
    scene.poll().await;
    assert!(waiting() < 2 * RECEIVERS);
    scene.connection.finish(End::Failed);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(waiting(), 2 * RECEIVERS, "the rest gets it without the connection");
    assert!(!scene.answers().starts_with(&[0x40]));
}

/// The client has lost its connection and sends the message again on the next: a PUBREC lets it forget the message.
#[tokio::test]
async fn a_duplicate_of_an_unfinished_message_is_acknowledged_when_it_is_safe() {
    let shared = shared(Limits::default());
    let receivers = subscribed(&shared);
    let waiting = || receivers.iter().map(|device| device.queue().pending).sum::<usize>();
    let mut first = Scene::new(&shared, b"\x34\x07\x00\x01t\x00\x09\x00p".to_vec()).await;
    first.poll().await;
    assert!((1..RECEIVERS).contains(&waiting()), "{}", waiting());
    let mut second = Scene::of(&shared, false, b"\x3C\x07\x00\x01t\x00\x09\x00p".to_vec()).await;
    second.answers();
    second.run("a duplicate").await;
    assert_eq!(second.answers(), b"", "not all of the message is safe");
    first.connection.finish(End::Superseded);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    second.run("a duplicate").await;
    assert_eq!((waiting(), second.answers()), (RECEIVERS, b"\x50\x02\x00\x09".to_vec()), "once");
}
