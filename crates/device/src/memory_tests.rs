//! A device's charges to the memory account, and their return when memory is short.

use std::sync::Arc;

use broker::{CloseReason, MemoryKind, Session, Target, Turn};
use gateway_core::{
    Message, Offer, Origin, QoS, QueueId,
    limits::{Limits, OverflowPolicy},
    units::ByteSize,
};

use super::{
    Device, SocketWriter,
    test_util::{NOW, Wakes, attach, context, open_as, socket},
};

const BUDGET: usize = 8 << 20;

fn deliver(device: &Device, qos: QoS, bytes: usize) {
    let payload = vec![0; bytes];
    let mut message = Message::new("t", &payload, NOW, Origin::BACKEND);
    message.qos = qos;
    device.deliver(
        &message,
        Offer { qos, retain: false, ids: &[], group: 0, group_queue: QueueId::NONE, queue_offline: true },
    );
}

/// Rules out that those who hold most keep it while others are refused, and that a small holder must give up its own.
#[test]
fn the_largest_holder_gives_back_by_its_policy_or_is_closed() {
    let cases = [
        (OverflowPolicy::DropNewest, QoS::AtLeastOnce, Some(CloseReason::Memory)),
        (OverflowPolicy::DropOldest, QoS::AtLeastOnce, None),
        (OverflowPolicy::DropNewest, QoS::AtMostOnce, None),
    ];
    for (overflow, qos, closed) in cases {
        let limits = Limits { memory_budget: ByteSize(BUDGET), overflow, ..Limits::default() };
        let context = context(limits);
        let device = |name| {
            let (device, epoch) = open_as(&context, name, true);
            assert!(attach(&device, epoch, &Arc::new(Wakes::default()), SocketWriter::Owner));
            device
        };
        let (large, small) = (device("large"), device("small"));
        (0..40).for_each(|_| deliver(&large, qos, 50_000));
        (0..4).for_each(|_| deliver(&small, qos, 50_000));
        let (before, kept) = (large.held(), small.held());
        assert!(before > 1_500_000 && kept > 0, "{before} and {kept} bytes");
        let closes = |device: &Device| device.lock().link.as_ref().and_then(|link| link.close);
        context.broker.tick(NOW, &mut Turn::default());
        assert_eq!((large.held(), closes(&large)), (before, None), "there is room for all");

        let account = context.broker.account();
        let others = account.limit() * 3 / 4 - account.used() + 1;
        account.force(MemoryKind::Sessions, others);
        assert!(account.is_short());
        context.broker.tick(NOW, &mut Turn::default());
        assert_eq!((closes(&large), closes(&small)), (closed, None));
        assert_eq!(small.held(), kept);
        if closed.is_none() {
            assert!(large.held() <= before / 2 + 64_000, "{} of {before} bytes", large.held());
            assert!(large.queue().dropped > 0);
        }
        account.release(MemoryKind::Sessions, others);
        large.end();
        small.end();
        assert_eq!(account.held(MemoryKind::Queued), 0);
    }
}

/// The failure: a client that does not keep up stays connected although the policy is to end its connection.
#[test]
fn a_full_queue_ends_the_connection_where_that_is_the_policy() {
    for (overflow, closed) in
        [(OverflowPolicy::Disconnect, Some(CloseReason::SlowConsumer)), (OverflowPolicy::DropNewest, None)]
    {
        let context = context(Limits { max_inflight: 1, mailbox_messages: 1, overflow, ..Limits::default() });
        let (device, epoch) = open_as(&context, "c", true);
        assert!(attach(&device, epoch, &Arc::new(Wakes::default()), SocketWriter::Owner));
        let closes = || device.lock().link.as_ref().and_then(|link| link.close);
        (0..2).for_each(|_| deliver(&device, QoS::AtLeastOnce, 1));
        assert_eq!((closes(), device.queue().dropped), (None, 0));
        deliver(&device, QoS::AtLeastOnce, 1);
        assert_eq!((closes(), device.queue().dropped), (closed, 1));
    }
}

/// Rules out buffers of full sockets, and answers behind them, that nobody counts.
#[tokio::test]
async fn what_a_full_socket_does_not_take_is_charged_until_it_goes() {
    let context = context(Limits { memory_budget: ByteSize(BUDGET), ..Limits::default() });
    let (device, epoch) = open_as(&context, "c", true);
    let (writer, _read, peer) = socket().await;
    assert!(attach(&device, epoch, &Arc::new(Wakes::default()), writer));
    let account = context.broker.account();
    for _ in 0..200 {
        deliver(&device, QoS::AtMostOnce, 100_000);
        Arc::clone(&device).flush();
        if account.held(MemoryKind::Replies) > 0 {
            break;
        }
    }
    let standing = account.held(MemoryKind::Replies);
    assert!((100_000..400_000).contains(&standing), "{standing} bytes");
    device.lock().out.append(&[0xD0, 0].repeat(50_000));
    assert!(!device.lock().mark_dirty());
    assert!(account.held(MemoryKind::Replies) >= standing + 90_000, "answers count, too");
    // Memory is used up: who does not read is closed.
    account.force(MemoryKind::Sessions, account.limit() - account.used());
    device.lock().out.append(&[0xD0, 0].repeat(50_000));
    device.lock().mark_dirty();
    assert_eq!(device.lock().link.as_ref().and_then(|link| link.close), Some(CloseReason::Memory));
    device.detach(epoch);
    assert_eq!(account.held(MemoryKind::Replies), 0);
    drop(peer);
}
