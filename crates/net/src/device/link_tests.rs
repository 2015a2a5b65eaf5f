//! Tests of the socket that is written, and of the task that is woken, when connections replace each other.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use broker::{Broker, BrokerConfig, CloseReason, ConnectionInfo, OpenRequest, Session, Target, Turn};
use config::Limits;
use gateway_core::{ClientId, Message, Offer, Origin, Protocol, QoS, QueueId, Timestamp};
use session::{Gate, LinkParams};
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, TcpStream, tcp::OwnedReadHalf},
    time::timeout,
};

use super::{Device, Link, Reception, SocketWriter, flush};
use crate::{NetShared, wheel};
use auth::AllowAll;

const NOW: Timestamp = Timestamp(1_000);

/// Counts how often a connection's task is woken.
#[derive(Default)]
pub(crate) struct Wakes(pub AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

pub(crate) fn shared() -> Arc<NetShared> {
    shared_with(Limits::default())
}

pub(crate) fn shared_with(limits: Limits) -> Arc<NetShared> {
    let broker = Broker::new(BrokerConfig { limits: Arc::new(limits), ..BrokerConfig::default() });
    let guard = auth::abuse::AbuseGuard::idle();
    NetShared::new(broker, Arc::new(AllowAll), None, guard, String::new(), String::new())
}

/// Does the work of a CONNECT before it attaches; returns the device and the epoch.
pub(crate) fn open(shared: &Arc<NetShared>, clean_start: bool) -> (Arc<Device>, u32) {
    open_as(shared, "c", clean_start)
}

pub(crate) fn open_as(shared: &Arc<NetShared>, client_id: &str, clean_start: bool) -> (Arc<Device>, u32) {
    let info = ConnectionInfo {
        peer: std::net::SocketAddr::from(([127, 0, 0, 1], 1)).into(),
        listener: Arc::new("test".to_owned()),
        protocol: Protocol::V5,
        keep_alive: 0,
        username: None,
        identity: None,
    };
    let request = OpenRequest {
        client_id: ClientId::new(client_id),
        clean_start,
        expiry: 60,
        will: None,
        info,
        quota_holders: Default::default(),
        now: NOW,
    };
    let maker = Arc::clone(shared);
    let mut turn = Turn::default();
    let opening = shared.broker.open(
        request,
        move |core| Arc::new(Device::new(core, maker)) as Arc<dyn Session>,
        &mut turn,
    );
    let Poll::Ready(opened) = pin!(opening).poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("an open that waits")
    };
    let opened = opened.expect("no quotas");
    let device = opened.session.into_any().downcast::<Device>().expect("a device");
    (device, opened.epoch)
}

pub(crate) fn attach(device: &Device, epoch: u32, waker: &Arc<Wakes>, writer: SocketWriter) -> bool {
    attach_with(device, epoch, waker, writer, Reception::default())
}

fn attach_with(
    device: &Device,
    epoch: u32,
    waker: &Arc<Wakes>,
    writer: SocketWriter,
    reception: Reception,
) -> bool {
    let params = LinkParams {
        protocol: Protocol::V5,
        receive_maximum: 10,
        maximum_packet_size: u32::MAX,
        topic_alias_maximum: 0,
    };
    let link = Link::new(epoch, Waker::from(Arc::clone(waker)), writer);
    device.attach(link, params, reception, b"connack", NOW).is_ok()
}

const TO_A_MEMBER: Offer<'_> = Offer {
    qos: QoS::AtLeastOnce,
    retain: false,
    ids: &[],
    group: 1,
    group_queue: QueueId::NONE,
    queue_offline: false,
};

pub(crate) async fn socket() -> (SocketWriter, OwnedReadHalf, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let peer = TcpStream::connect(listener.local_addr().expect("address")).await.expect("connect");
    let (read, write) = listener.accept().await.expect("accept").0.into_split();
    // Before the runtime has seen that, no write is tried.
    write.writable().await.expect("writable");
    (SocketWriter::Direct(Some(write)), read, peer)
}

#[tokio::test]
async fn the_owner_of_an_earlier_connection_never_writes_for_the_later_one() {
    let shared = shared();
    let (old, new) = (Arc::new(Wakes::default()), Arc::new(Wakes::default()));
    let (first, ..) = socket().await;
    let (second, _read, _peer) = socket().await;
    let (device, epoch) = open(&shared, false);
    assert!(attach(&device, epoch, &old, first));
    let (device, later) = open(&shared, false);
    assert!(attach(&device, later, &new, second));
    // The old task looked before and found the link still its own and the socket full.
    let mut cx = Context::from_waker(Waker::noop());
    assert!(matches!(flush::poll_flush(&device, epoch, &mut cx), Poll::Ready(Ok(()))));
    flush::flush_owned(&device, epoch);
    assert_eq!(device.lock().out.buffered(), b"connack".len(), "the later link's bytes are its own");
    flush::flush_owned(&device, later);
    assert_eq!(device.lock().out.buffered(), 0);
}

/// Waiting for the sockets behind it would add to its latency; writing each of many at once would cost a system call each.
#[tokio::test]
async fn the_first_delivery_of_a_turn_can_go_early_and_the_rest_at_its_end() {
    let shared = shared();
    let (writer, _read, mut peer) = socket().await;
    let (device, epoch) = open(&shared, false);
    assert!(attach(&device, epoch, &Arc::default(), writer));
    flush::flush_owned(&device, epoch);
    let mut turn = Turn::default();
    let message = Message::new("t", b"p", NOW, Origin::BACKEND);
    let deliver = || device.deliver(&message, TO_A_MEMBER).flush;
    assert!(deliver());
    turn.dirty.push(Arc::clone(&device) as Arc<dyn Target>);
    let waiting = || device.lock().out.buffered();
    let mut sent = vec![0; b"connack".len() + waiting()];
    turn.flush_early(0);
    let arrived = timeout(Duration::from_secs(10), peer.read_exact(&mut sent)).await;
    arrived.expect("before the turn has ended").expect("read");
    assert!(sent.starts_with(b"connack") && sent.ends_with(b"p"), "{sent:?}");
    assert!(!deliver(), "it is on the list already");
    turn.flush_early(1);
    assert_ne!(waiting(), 0, "nothing has joined the list since");
    turn.flush();
    assert_eq!(waiting(), 0);
    assert!(deliver(), "it is on no list any more");
}

#[test]
fn the_owner_of_a_tls_connection_is_woken_once_for_a_turn() {
    let shared = shared();
    let wakes = Arc::new(Wakes::default());
    let (device, epoch) = open(&shared, false);
    assert!(attach(&device, epoch, &wakes, SocketWriter::Owner));
    let mut turn = Turn::default();
    assert!(device.deliver(&Message::new("t", b"p", NOW, Origin::BACKEND), TO_A_MEMBER).flush);
    turn.dirty.push(Arc::clone(&device) as Arc<dyn Target>);
    turn.flush_early(0);
    assert_eq!(wakes.0.load(SeqCst), 0);
    turn.flush();
    assert_eq!(wakes.0.load(SeqCst), 1);
}

#[test]
fn a_connection_never_outlives_its_session_whenever_that_ends() {
    let shared = shared();
    let wakes = Arc::new(Wakes::default());
    // Two CONNECTs at once: the second ends the first one's session before the first has its link.
    let (device, epoch) = open(&shared, true);
    let (later, later_epoch) = open(&shared, true);
    assert!(!attach(&device, epoch, &wakes, SocketWriter::Owner), "a link on a session that is over");
    // The same, but the link comes between the request to close and the session's end.
    assert!(attach(&later, later_epoch, &wakes, SocketWriter::Owner));
    assert_eq!(wakes.0.load(SeqCst), 0);
    later.end();
    assert_eq!(wakes.0.load(SeqCst), 1, "the task must learn that its session is over");
    let close = later.lock().link.as_ref().and_then(|link| link.close);
    assert_eq!(close, Some(CloseReason::SessionEnded));
}

/// Its bytes may wait in its socket all the time: only the shard was silent.
#[test]
fn what_a_shard_stood_still_is_nobody_s_silence() {
    let shared = shared();
    let close = |device: &Device| device.lock().link.as_ref().and_then(|link| link.close);
    let (device, epoch) = open(&shared, true);
    assert!(attach(&device, epoch, &Arc::default(), SocketWriter::Owner));
    wheel::tick_after(1_000);
    device.heard(epoch, wheel::now());
    wheel::watch(&device, epoch, 10);
    // A minute, and then all ticks at once.
    for _ in 0..60 {
        wheel::tick_after(61_000);
    }
    assert_eq!(close(&device), None);
    ticks(61_000, 75_750);
    assert_eq!(close(&device), None, "15 seconds, of which the stall counts for a quarter of one");
    ticks(75_750, 76_500);
    assert_eq!(close(&device), Some(CloseReason::KeepAlive), "real silence is found as before");
}

/// All ticks between two times, in milliseconds.
fn ticks(from: u64, to: u64) {
    (from..=to).step_by(125).for_each(wheel::tick_after);
}

/// [MQTT-3.1.2-24] of 3.1.1, [MQTT-3.1.2-22] of 5.0: whenever the last packet comes between two ticks, and though ticks
/// are late.
#[test]
fn silence_ends_a_connection_within_a_second_of_its_time_and_never_early() {
    let shared = shared();
    let tick_time = |tick: u64| tick * 125 + tick * 37 % 100;
    let mut open_connections = Vec::new();
    let mut closed = 0;
    for tick in 0..100 {
        wheel::tick_after(tick_time(tick));
        open_connections.retain(|(device, heard): &(Arc<Device>, u64)| {
            let close = device.lock().link.as_ref().and_then(|link| link.close);
            if close == Some(CloseReason::KeepAlive) {
                let silent = tick_time(tick) - heard;
                assert!((1_500..2_500).contains(&silent), "{silent} ms");
                closed += 1;
            }
            close.is_none()
        });
        if tick < 70 {
            let (device, epoch) = open_as(&shared, &format!("c{tick}"), true);
            assert!(attach(&device, epoch, &Arc::default(), SocketWriter::Owner));
            let time_to_next = tick_time(tick + 1) - tick_time(tick);
            device.heard(epoch, wheel::now());
            wheel::watch(&device, epoch, 1);
            open_connections.push((device, tick_time(tick) + (tick * 29) % time_to_next));
        }
    }
    assert_eq!(closed, 70);
}

/// The earlier connection may be on another shard, in the middle of a poll, when its session is taken over.
#[test]
fn what_a_taken_over_connection_notes_does_not_count_for_its_successor() {
    let shared = shared();
    let close = |device: &Device| device.lock().link.as_ref().and_then(|link| link.close);
    let (device, earlier) = open(&shared, false);
    assert!(attach(&device, earlier, &Arc::default(), SocketWriter::Owner));
    let (device, epoch) = open(&shared, false);
    device.heard(epoch, wheel::now());
    assert!(attach(&device, epoch, &Arc::default(), SocketWriter::Owner));
    wheel::watch(&device, epoch, 10);
    device.heard(earlier, wheel::PAUSED);
    ticks(1_000, 40_000);
    assert_eq!(close(&device), Some(CloseReason::KeepAlive), "silent since it attached");
}

#[test]
fn connections_that_come_and_go_leave_no_memory_in_the_wheel() {
    let shared = shared();
    for _ in 0..5_000 {
        let (device, epoch) = open(&shared, true);
        wheel::watch(&device, epoch, 60_000);
        wheel::ended();
    }
    assert!(wheel::entries() <= 1_024, "{} entries of ended connections", wheel::entries());
}

#[test]
fn a_connection_asked_to_close_before_it_attaches_is_not_left_open() {
    let shared = shared();
    let wakes = Arc::new(Wakes::default());
    let mut turn = Turn::default();
    let close = |device: &Device| device.lock().link.as_ref().and_then(|link| link.close);
    let (device, epoch) = open(&shared, false);
    assert!(shared.broker.disconnect("c", 0x98, false, NOW, &mut turn).is_some());
    assert!(attach(&device, epoch, &wakes, SocketWriter::Owner));
    assert_eq!(close(&device), Some(CloseReason::Administrative(0x98)));
    // The next connection has nothing to do with it.
    let (device, epoch) = open(&shared, false);
    assert!(attach(&device, epoch, &wakes, SocketWriter::Owner));
    assert_eq!(close(&device), None);
    // Nor has one that comes after the request found nobody.
    device.detach(epoch);
    assert!(shared.broker.disconnect("c", 0x98, false, NOW, &mut turn).is_some());
    let (device, epoch) = open(&shared, false);
    assert!(attach(&device, epoch, &wakes, SocketWriter::Owner));
    assert_eq!(close(&device), None);
}

/// A QoS 2 message that was sent again on the next connection was acknowledged while the connection before routed it: before it
/// was on disk, and even if it was refused then.
#[test]
fn a_connection_waits_for_what_the_one_before_is_handling() {
    let shared = shared();
    let (device, _) = open(&shared, false);
    device.core().set_handling(true);
    let mut written = pin!(device.is_written(None));
    let mut poll = || written.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert_eq!(poll(), Poll::Pending);
    assert_eq!(poll(), Poll::Pending);
    device.core().set_handling(false);
    assert_eq!(poll(), Poll::Ready(true));
}

/// Admits messages on one topic.
#[derive(Debug)]
struct Only(&'static str);

impl Gate for Only {
    fn admits(&mut self, topic: &str) -> bool {
        topic == self.0
    }
}

/// A CONNECT that waited for a disk or a service, and was overtaken, left its user's rights to the one who had come since.
#[test]
fn a_connection_that_comes_too_late_leaves_its_rights_to_nobody() {
    let shared = shared();
    let wakes = Arc::new(Wakes::default());
    let (device, first) = open(&shared, false);
    let (_, second) = open(&shared, false);
    let only = |topic| Reception { gate: Some(Box::new(Only(topic))), room: None };
    assert!(attach_with(&device, second, &wakes, SocketWriter::Owner, only("bob")));
    assert!(!attach_with(&device, first, &wakes, SocketWriter::Owner, only("alice")));
    let mut slot = device.lock();
    let gate = slot.out.gate().expect("somebody is asked");
    assert!(gate.admits("bob") && !gate.admits("alice"));
}

/// Otherwise messages would be moved to the disk behind the back of the new connection's task, which nobody would tell
/// to read them.
#[test]
fn the_end_of_a_connection_takes_nothing_from_one_that_has_come_since() {
    let shared = shared();
    let wakes = Arc::new(Wakes::default());
    let (device, epoch) = open(&shared, false);
    assert!(attach(&device, epoch, &wakes, SocketWriter::Owner));
    device.detach(epoch);
    let (device, epoch) = open(&shared, false);
    assert!(attach(&device, epoch, &wakes, SocketWriter::Owner));
    let mut message = Message::new("t", b"p", NOW, Origin::BACKEND);
    message.qos = QoS::AtLeastOnce;
    for _ in 0..11 {
        device.deliver(&message, TO_A_MEMBER);
    }
    let waiting = || device.queue().pending;
    assert_eq!((device.yield_shared().len(), waiting()), (0, 1));
    device.detach(epoch);
    assert_eq!((device.yield_shared().len(), waiting()), (1, 0));
}
