//! Tests of the socket that is written, and of the task that is woken, when connections replace each other.

use std::{
    future::Future,
    pin::pin,
    sync::{Arc, atomic::Ordering::SeqCst},
    task::{Context, Poll, Waker},
    time::Duration,
};

use broker::{CloseReason, Session, Target, Turn};
use gateway_core::{Message, Offer, Origin, QoS, QueueId, limits::Limits};
use session::Gate;
use tokio::{io::AsyncReadExt, time::timeout};

use super::{
    Device, Reception, SocketWriter, flush,
    test_util::{NOW, Wakes, attach, attach_with, context, open, socket},
};

const TO_A_MEMBER: Offer<'_> = Offer {
    qos: QoS::AtLeastOnce,
    retain: false,
    ids: &[],
    group: 1,
    group_queue: QueueId::NONE,
    queue_offline: false,
};

#[tokio::test]
async fn the_owner_of_an_earlier_connection_never_writes_for_the_later_one() {
    let context = context(Limits::default());
    let (old, new) = (Arc::new(Wakes::default()), Arc::new(Wakes::default()));
    let (first, ..) = socket().await;
    let (second, _read, _peer) = socket().await;
    let (device, epoch) = open(&context, false);
    assert!(attach(&device, epoch, &old, first));
    let (device, later) = open(&context, false);
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
    let context = context(Limits::default());
    let (writer, _read, mut peer) = socket().await;
    let (device, epoch) = open(&context, false);
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
    let context = context(Limits::default());
    let wakes = Arc::new(Wakes::default());
    let (device, epoch) = open(&context, false);
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
    let context = context(Limits::default());
    let wakes = Arc::new(Wakes::default());
    // Two CONNECTs at once: the second ends the first one's session before the first has its link.
    let (device, epoch) = open(&context, true);
    let (later, later_epoch) = open(&context, true);
    assert!(!attach(&device, epoch, &wakes, SocketWriter::Owner), "a link on a session that is over");
    // The same, but the link comes between the request to close and the session's end.
    assert!(attach(&later, later_epoch, &wakes, SocketWriter::Owner));
    assert_eq!(wakes.0.load(SeqCst), 0);
    later.end();
    assert_eq!(wakes.0.load(SeqCst), 1, "the task must learn that its session is over");
    let close = later.lock().link.as_ref().and_then(|link| link.close);
    assert_eq!(close, Some(CloseReason::SessionEnded));
}

#[test]
fn a_connection_asked_to_close_before_it_attaches_is_not_left_open() {
    let context = context(Limits::default());
    let wakes = Arc::new(Wakes::default());
    let mut turn = Turn::default();
    let close = |device: &Device| device.lock().link.as_ref().and_then(|link| link.close);
    let (device, epoch) = open(&context, false);
    assert!(context.broker.disconnect("c", 0x98, false, NOW, &mut turn).is_some());
    assert!(attach(&device, epoch, &wakes, SocketWriter::Owner));
    assert_eq!(close(&device), Some(CloseReason::Administrative(0x98)));
    // The next connection has nothing to do with it.
    let (device, epoch) = open(&context, false);
    assert!(attach(&device, epoch, &wakes, SocketWriter::Owner));
    assert_eq!(close(&device), None);
    // Nor has one that comes after the request found nobody.
    device.detach(epoch);
    assert!(context.broker.disconnect("c", 0x98, false, NOW, &mut turn).is_some());
    let (device, epoch) = open(&context, false);
    assert!(attach(&device, epoch, &wakes, SocketWriter::Owner));
    assert_eq!(close(&device), None);
}

/// A QoS 2 message that was sent again on the next connection was acknowledged while the connection before routed it: before it
/// was on disk, and even if it was refused then.
#[test]
fn a_connection_waits_for_what_the_one_before_is_handling() {
    let context = context(Limits::default());
    let (device, _) = open(&context, false);
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
    let context = context(Limits::default());
    let wakes = Arc::new(Wakes::default());
    let (device, first) = open(&context, false);
    let (_, second) = open(&context, false);
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
    let context = context(Limits::default());
    let wakes = Arc::new(Wakes::default());
    let (device, epoch) = open(&context, false);
    assert!(attach(&device, epoch, &wakes, SocketWriter::Owner));
    device.detach(epoch);
    let (device, epoch) = open(&context, false);
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
