//! Facts that a start needs, and faults that it puts right.

use super::*;

#[tokio::test]
async fn summaries_tell_what_the_start_needs_after_a_drop_that_wrote_all() {
    let (dir, store) = new();
    for seq in 5..8 {
        append(&store, entry(Q, seq));
    }
    store.submit(QueueOp::Receive { queue: QueueId(2), packet_id: 700, commit: Commit::new() });
    store.submit(QueueOp::Receive { queue: Q, packet_id: 1, commit: Commit::new() });
    store.submit(QueueOp::Receive { queue: Q, packet_id: 2, commit: Commit::new() });
    store.submit(QueueOp::Forget { queue: Q, packet_id: 1, commit: Commit::new() });
    drop(store);
    let store = open(dir.path(), &StateOptions::default());
    let bytes = 3 * message(&text(5), None).cost() as u64;
    let expected = [
        QueueSummary { queue: QueueId(2), received: vec![700], ..QueueSummary::default() },
        QueueSummary {
            queue: Q,
            messages: 3,
            bytes,
            first: 5,
            next: 8,
            exact: 0,
            begun: 8,
            received: vec![2],
        },
    ];
    assert_eq!(store.summaries().unwrap(), expected);
    assert_eq!(store.gauges(), QueueGauges { waiting_bytes: 0, depth: 3 });
}

/// Of earlier processes at most the first `begun` entries were in flight.
#[tokio::test]
async fn the_start_knows_up_to_where_qos_2_may_have_been_sent() {
    let dir = tempfile::tempdir().unwrap();
    let options = StateOptions { begun: 3, ..StateOptions::default() };
    let store = open(dir.path(), &options);
    for (queue, qos) in [(1, [1, 2, 1, 2]), (2, [1, 1, 1, 2]), (3, [2, 2, 2, 2])] {
        for (seq, qos) in (10..).zip(qos) {
            let qos = QoS::from_bits(qos).unwrap();
            append(&store, QueueEntry::new(QueueId(queue), seq, message(b"x", None), qos, None));
        }
    }
    written(&store).await;
    let exact: Vec<u64> = store.summaries().unwrap().iter().map(|summary| summary.exact).collect();
    assert_eq!(exact, [12, 0, 13]);
    assert!(store.summaries().unwrap().iter().all(|summary| summary.begun == 13));
}

#[tokio::test]
async fn what_a_member_did_not_acknowledge_returns_to_its_group_in_order() {
    let (dir, store) = new();
    let group = QueueId(50);
    append(&store, entry(group, 10));
    for (queue, seq, qos) in [(Q, 0, 1), (OTHER, 5, 1), (Q, 1, 2), (Q, 2, 1), (OTHER, 6, 0)] {
        let mut entry = QueueEntry::new(queue, seq, message(&text(seq), None), QoS::AtLeastOnce, None);
        entry.group = if qos == 0 { QueueId::NONE } else { group };
        entry.qos = if qos == 2 { QoS::ExactlyOnce } else { QoS::AtLeastOnce };
        entry.ids = Some([1].into());
        append(&store, entry);
    }
    drop(store);
    let store = open(dir.path(), &StateOptions::default());
    assert_eq!(store.regroup().unwrap(), 3);
    assert_eq!(seqs(&store, Q).await, [1]);
    assert_eq!(seqs(&store, OTHER).await, [6]);
    let found = all(&store, group).await;
    let payloads: Vec<_> = found.iter().map(|e| e.message.as_ref().unwrap().payload.to_vec()).collect();
    assert_eq!(payloads, [text(10), text(0), text(5), text(2)]);
    assert_eq!(found.iter().map(|e| e.seq).collect::<Vec<_>>(), [10, 11, 12, 13]);
    assert!(found.iter().all(|e| e.group == QueueId::NONE && !e.sent));
    assert_eq!(store.regroup().unwrap(), 0);
}

/// Checks that an entry that may have been sent is not forgotten when it expires, nor taken for one that merely waits.
#[tokio::test]
async fn what_was_sent_is_noted_up_to_a_place_and_does_not_expire_by_itself() {
    let (dir, store) = new();
    for seq in 0..4 {
        let mut entry = entry(Q, seq);
        entry.expires = Some(Timestamp(1 << 43));
        append(&store, entry);
    }
    append(&store, entry(OTHER, 0));
    store.submit(QueueOp::NoteSent { queue: Q, below: 2 });
    written(&store).await;
    append(&store, entry(Q, 4));
    drop(store);
    let store = open(dir.path(), &StateOptions::default());
    let sent = |found: Vec<StoredEntry>| found.iter().map(|entry| entry.sent).collect::<Vec<_>>();
    assert_eq!(sent(all(&store, Q).await), [true, true, false, false, false]);
    assert_eq!(sent(all(&store, OTHER).await), [false]);
    let swept = store.environment.reading(|txn| store.tables.queues.expiry.len(txn)).unwrap();
    assert_eq!(swept, 2, "of those that only wait");
}
