//! Reports to a waiting publisher: each delivery exactly once, and only those it waits for.

use std::sync::Arc;

use gateway_core::{
    DropReason, Message, Offer, Origin, Outcome, Protocol, QoS, QueueId, Receipt, Timestamp, limits::Limits,
};

use super::*;
use crate::fuzz::Unlimited;

/// A session and the receipt of the messages it is offered.
struct Bench {
    limits: Limits,
    out: Outbound,
    receipt: Arc<Receipt>,
}

impl Bench {
    fn new() -> Self {
        Self { limits: Limits::default(), out: Outbound::new(), receipt: Arc::default() }
    }

    fn online(receive_maximum: u16) -> Self {
        let mut bench = Self::new();
        bench.attach(receive_maximum, u32::MAX);
        bench
    }

    fn env(limits: &Limits) -> Env<'_> {
        Env { limits, now: Timestamp(1), budget: &Unlimited, disk: None }
    }

    fn attach(&mut self, receive_maximum: u16, maximum_packet_size: u32) {
        let link = LinkParams {
            protocol: Protocol::V5,
            receive_maximum,
            maximum_packet_size,
            topic_alias_maximum: 0,
        };
        self.out.attach(link, &[], &Self::env(&self.limits));
    }

    fn offer(&mut self, qos: QoS, group: u32) -> Outcome {
        let mut message = Message::new("t", b"payload", Timestamp(1), Origin::BACKEND);
        message.qos = qos;
        message.receipt = Some(&self.receipt);
        let offer =
            Offer { qos, retain: false, ids: &[], group, group_queue: QueueId::NONE, queue_offline: true };
        self.out.offer(&message, offer, &Self::env(&self.limits))
    }

    /// The socket takes everything.
    fn write(&mut self) {
        self.out.take_out();
        self.out.note_written(0);
    }

    fn puback(&mut self, id: u16) {
        assert_eq!(self.out.handle_puback(id, 0, &Self::env(&self.limits)), Ok(true));
    }

    /// (sent, acked, dropped).
    fn told(&self) -> (u32, u32, u32) {
        let state = self.receipt.state();
        (state.sent, state.acked, state.dropped)
    }
}

#[test]
fn messages_queued_for_an_offline_session_never_count_in_a_receipt() {
    let mut bench = Bench::new();
    assert_eq!(bench.offer(QoS::AtLeastOnce, 0), Outcome::Queued);
    assert_eq!(bench.offer(QoS::ExactlyOnce, 0), Outcome::Queued);
    bench.attach(u16::MAX, u32::MAX);
    bench.write();
    bench.puback(1);
    bench.out.handle_pubrec(2, 0, &Bench::env(&bench.limits)).expect("the next step");
    assert_eq!(bench.out.handle_pubcomp(2, &Bench::env(&bench.limits)), Ok(true));
    assert_eq!(bench.told(), (0, 0, 0));
}

#[test]
fn what_is_queued_offline_and_dropped_later_ends_no_wait() {
    let mut bench = Bench::new();
    bench.limits.offline_messages = 1;
    assert_eq!(bench.offer(QoS::AtLeastOnce, 0), Outcome::Queued);
    bench.limits.overflow = gateway_core::limits::OverflowPolicy::DropOldest;
    assert_eq!(bench.offer(QoS::AtLeastOnce, 0), Outcome::Queued);
    bench.out.end(&Bench::env(&bench.limits));
    assert_eq!(bench.told(), (0, 0, 0));
}

#[test]
fn a_message_that_waits_for_the_window_counts_once_when_it_goes() {
    let mut bench = Bench::online(1);
    assert_eq!(bench.offer(QoS::AtLeastOnce, 0), Outcome::Sent);
    assert_eq!(bench.offer(QoS::AtLeastOnce, 0), Outcome::Sent);
    bench.write();
    assert_eq!(bench.told(), (1, 0, 0));
    bench.puback(1);
    assert_eq!(bench.told(), (1, 1, 0), "appended is not sent");
    bench.write();
    bench.puback(2);
    assert_eq!(bench.told(), (2, 2, 0));
}

#[test]
fn a_lost_connection_drops_qos_0_and_only_delays_qos_1() {
    let mut bench = Bench::online(u16::MAX);
    bench.offer(QoS::AtMostOnce, 0);
    bench.offer(QoS::AtLeastOnce, 0);
    assert_eq!(bench.told(), (0, 0, 0), "nothing has left yet");
    bench.out.detach(&Bench::env(&Limits::default()));
    assert_eq!(bench.told(), (0, 0, 1));
    assert_eq!(bench.receipt.state().reason, Some(DropReason::ConnectionLost));
    bench.attach(u16::MAX, u32::MAX);
    bench.write();
    assert_eq!(bench.told(), (1, 0, 1));
    bench.out.detach(&Bench::env(&Limits::default()));
    bench.attach(u16::MAX, u32::MAX);
    bench.write();
    assert_eq!(bench.told(), (1, 0, 1), "sent again is not sent twice");
    bench.puback(1);
    assert_eq!(bench.told(), (1, 1, 1));
}

#[test]
fn qos_0_is_acknowledged_when_it_is_sent() {
    let mut bench = Bench::online(u16::MAX);
    bench.offer(QoS::AtMostOnce, 0);
    bench.write();
    assert_eq!(bench.told(), (1, 1, 0));
}

#[test]
fn a_message_too_large_for_the_next_connection_is_told_as_dropped() {
    let mut bench = Bench::online(u16::MAX);
    bench.offer(QoS::AtLeastOnce, 0);
    bench.out.detach(&Bench::env(&Limits::default()));
    bench.attach(u16::MAX, 8);
    assert_eq!(bench.told(), (0, 0, 1));
    assert_eq!(bench.receipt.state().reason, Some(DropReason::TooLarge));
}

#[test]
fn a_group_message_handed_to_another_member_counts_as_sent_once() {
    let mut first = Bench::online(u16::MAX);
    first.offer(QoS::AtLeastOnce, 7);
    first.write();
    assert_eq!(first.told(), (1, 0, 0));
    let handed = first.out.end(&Bench::env(&first.limits));
    assert_eq!((handed.len(), handed[0].group), (1, 7));
    assert_eq!(first.told(), (0, 0, 0), "its sending is taken back");
    assert!(handed[0].message.receipt.is_some());

    let mut offline = Bench::new();
    offline.offer(QoS::AtLeastOnce, 7);
    let handed = offline.out.yield_shared(&Bench::env(&offline.limits));
    assert!(handed[0].message.receipt.is_none(), "nobody waits for what was queued");
}

/// Rules out that each of many waits for one device looks at all that waits there.
#[test]
fn ten_thousand_waits_that_end_look_at_each_message_once() {
    let mut bench = Bench::online(1);
    let receipts: Vec<Arc<Receipt>> = (0..1_000).map(|_| Arc::default()).collect();
    for (index, receipt) in receipts.iter().enumerate() {
        let mut message = Message::new("t", b"payload", Timestamp(1), Origin::BACKEND);
        (message.qos, message.receipt) = (QoS::AtLeastOnce, Some(receipt));
        message.expires = (index > 0).then_some(Timestamp(1_000 + index as u64));
        let offer = Offer {
            qos: QoS::AtLeastOnce,
            retain: false,
            ids: &[],
            group: 0,
            group_queue: QueueId::NONE,
            queue_offline: true,
        };
        assert_eq!(bench.out.offer(&message, offer, &Bench::env(&bench.limits)), Outcome::Sent);
    }
    let looked: usize = (0..10_000).map(|now| bench.out.tell_expired(Timestamp(now))).sum();
    assert_eq!(looked, 999);
    assert!(receipts[1..].iter().all(|receipt| receipt.state().reason == Some(DropReason::Expired)));

    bench.write();
    let late = Env { now: Timestamp(10_000), ..Bench::env(&bench.limits) };
    assert_eq!(bench.out.handle_puback(1, 0, &late), Ok(true));
    assert_eq!(bench.out.sizes(), (0, 0, 0, 999), "dropped when it is their turn");
    assert!(receipts[1..].iter().all(|receipt| receipt.state().dropped == 1), "and told once");
    assert_eq!(receipts[0].state().acked, 1);
}
