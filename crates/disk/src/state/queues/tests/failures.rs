//! Disks that fail, are full or hang, and the end of the store.

use std::sync::mpsc;

use gateway_core::{ClientId, OriginKind};

use super::*;

/// Drops the store in its writer thread, where a waiter for the disk may be the last to hold it.
#[test]
fn a_store_that_ends_in_its_own_writer_thread_does_not_wait_for_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let store = Arc::new(open(dir.path(), &options));
    let environment = Arc::downgrade(&store.environment);
    disk.stop(&store);
    let commit = Commit::new();
    append(&store, waited_for(Q, 0, &commit));
    let (sender, ended) = mpsc::sync_channel(1);
    commit.then(move |_| {
        drop(store);
        sender.send(()).unwrap();
    });
    commit.done();
    disk.go_on();
    ended.recv().expect("the thread goes on");
    while environment.strong_count() > 0 {
        std::thread::yield_now();
    }
    let store = open(dir.path(), &StateOptions::default());
    assert_eq!(store.summaries().unwrap()[0].messages, 1);
}

#[tokio::test]
async fn a_unit_is_written_with_its_last_operation_or_not_at_all() {
    for fails in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (disk, options) = Disk::new();
        let store = open(dir.path(), &options);
        disk.stop(&store);
        let (before, unit, behind) = (Commit::new(), Commit::of_unit(), Commit::new());
        append(&store, waited_for(OTHER, 0, &before));
        append(&store, waited_for(Q, 0, &unit));
        append(&store, waited_for(Q, 1, &behind));
        disk.go_on();
        before.done();
        before.wait().await.unwrap();
        assert_eq!(store.summaries().unwrap().iter().map(|s| s.messages).sum::<usize>(), 1);
        disk.fails.store(fails, SeqCst);
        append(&store, waited_for(Q, 2, &unit));
        unit.add();
        store.submit(QueueOp::Receive { queue: QueueId(1), packet_id: 5, commit: Arc::clone(&unit) });
        unit.done();
        behind.done();
        assert_eq!((unit.wait().await.is_err(), behind.wait().await.is_err()), (fails, fails));
        disk.fails.store(false, SeqCst);
        let queues: Vec<_> = store.summaries().unwrap();
        let received = queues.iter().map(|s| s.received.len()).sum::<usize>();
        let messages = queues.iter().map(|s| s.messages).sum::<usize>();
        assert_eq!((messages, received), if fails { (1, 0) } else { (4, 1) });
    }
}

/// A unit may wait for another store or for its receivers' turns; queues of others must not wait with it.
#[tokio::test]
async fn an_open_unit_holds_back_only_the_queues_that_it_concerns() {
    let (_dir, store) = new();
    let [open, tied] = [Commit::of_unit(), Commit::of_unit()];
    let [free, behind] = [Commit::new(), Commit::new()];
    append(&store, waited_for(Q, 0, &open));
    // A unit that is closed, but has a part after the open one: it goes as a whole, and what is after it waits.
    append(&store, waited_for(OTHER, 0, &tied));
    append(&store, waited_for(Q, 1, &tied));
    tied.add();
    store.submit(QueueOp::Receive { queue: QueueId(1), packet_id: 1, commit: Arc::clone(&tied) });
    append(&store, waited_for(OTHER, 1, &behind));
    append(&store, waited_for(QueueId(9), 0, &free));
    free.done();
    free.wait().await.unwrap();
    assert_eq!(seqs(&store, QueueId(9)).await, [0], "also read past the open unit");
    let there: Vec<_> = store.summaries().unwrap().iter().map(|queue| queue.queue.0).collect();
    assert_eq!(there, [9]);
    // Held operations keep their order: the read finds the entries that came before it.
    let read = store.load(OTHER, 0, 10, usize::MAX);
    remove(&store, OTHER, 0);
    open.add();
    store.submit(QueueOp::Receive { queue: QueueId(2), packet_id: 1, commit: Arc::clone(&open) });
    for commit in [&open, &tied, &behind] {
        commit.done();
        commit.wait().await.unwrap();
    }
    read.await.unwrap();
    written(&store).await;
    assert_eq!((seqs(&store, Q).await, seqs(&store, OTHER).await), (vec![0, 1], vec![1]));
    assert_eq!(store.gauges().waiting_bytes, 0);
}

/// Chains of units longer than anybody looks: what passes is whole and in order, and all comes in the end.
#[tokio::test]
async fn units_that_hold_each_other_are_written_whole_once_the_first_is_closed() {
    let (_dir, store) = new();
    let open = Commit::of_unit();
    let tied: Vec<_> = (0..20).map(|_| Commit::of_unit()).collect();
    // Each unit has its second part in the queue where the one before it in the chain has its first, and they come in
    // the opposite order.
    for (place, unit) in tied.iter().enumerate().rev() {
        append(&store, waited_for(QueueId(101 + place as u64), 0, unit));
    }
    append(&store, waited_for(QueueId(100), 0, &open));
    for (place, unit) in tied.iter().enumerate() {
        append(&store, waited_for(QueueId(100 + place as u64), 1, unit));
        unit.add();
        let queue = QueueId(200 + place as u64);
        store.submit(QueueOp::Receive { queue, packet_id: 1, commit: Arc::clone(unit) });
        unit.done();
    }
    let free = Commit::new();
    append(&store, waited_for(QueueId(50), 0, &free));
    store.submit(QueueOp::Remove { queue: QueueId::NONE, seq: 0, unit: Some(Arc::clone(&open)) });
    free.done();
    for commit in tied.iter().chain([&free, &open]) {
        commit.wait().await.unwrap();
    }
    for place in 0..20 {
        assert_eq!(seqs(&store, QueueId(100 + place)).await, [0, 1]);
    }
}

#[tokio::test]
async fn a_failed_commit_refuses_what_is_new_keeps_the_rest_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let store = open(dir.path(), &options);
    for seq in 0..4 {
        append(&store, entry(Q, seq));
    }
    written(&store).await;
    disk.stop(&store);
    disk.fails.store(true, SeqCst);
    let (new, moved, release) = (Commit::new(), Commit::of_unit(), Commit::new());
    append(&store, waited_for(Q, 4, &new));
    remove(&store, Q, 0);
    append(&store, waited_for(OTHER, 0, &moved));
    moved.add();
    store.submit(QueueOp::Remove { queue: Q, seq: 1, unit: Some(Arc::clone(&moved)) });
    release.add();
    store.submit(QueueOp::Release { queue: Q, seq: 2, commit: Arc::clone(&release) });
    disk.go_on();
    for commit in [&new, &moved] {
        commit.done();
        assert!(commit.wait().await.is_err());
    }
    assert_eq!(store.health(), StoreHealth::Failing);
    let probes = (0..1000).filter(|_| store.accepts()).count();
    assert!(probes <= 2, "{probes} publishes were let through");
    // Another queue can be read though the disk takes nothing.
    assert!(seqs(&store, OTHER).await.is_empty());
    disk.fails.store(false, SeqCst);
    release.done();
    release.wait().await.unwrap();
    assert_eq!(store.health(), StoreHealth::Sound);
    assert!(store.accepts());
    assert_eq!(seqs(&store, Q).await, [1, 2, 3]);
    assert_eq!(store.gauges().waiting_bytes, 0);
}

#[tokio::test]
async fn a_full_map_refuses_and_harms_nothing_that_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let options = StateOptions { map_size: 1 << 20, max_map_size: 2 << 20, ..StateOptions::default() };
    let store = open(dir.path(), &options);
    let large = message(&[7; 1000], None);
    let mut kept = 0;
    loop {
        let commit = Commit::new();
        append(
            &store,
            QueueEntry::new(Q, kept, Arc::clone(&large), QoS::AtLeastOnce, Some(Arc::clone(&commit))),
        );
        commit.done();
        match commit.wait().await {
            Ok(()) => kept += 1,
            Err(_) => break,
        }
    }
    assert!(kept > 500, "{kept}");
    assert_eq!(store.health(), StoreHealth::Failing);
    assert_eq!(seqs(&store, Q).await.len() as u64, kept);
    // A device takes all that waits; nothing is started anew.
    for seq in 0..kept {
        remove(&store, Q, seq);
        if seq % 50 == 0 {
            written(&store).await;
        }
    }
    while store.gauges().depth > 0 {
        // A removal that found no room is tried again.
        let commit = Commit::new();
        store.submit(QueueOp::Forget { queue: QueueId(1 << 30), packet_id: 1, commit: Arc::clone(&commit) });
        let _ = commit.wait().await;
    }
    for seq in kept..kept + 500 {
        let commit = Commit::new();
        append(
            &store,
            QueueEntry::new(Q, seq, Arc::clone(&large), QoS::AtLeastOnce, Some(Arc::clone(&commit))),
        );
        commit.done();
        commit.wait().await.unwrap();
    }
    assert_eq!(store.health(), StoreHealth::Sound);
    assert_eq!(seqs(&store, Q).await.len(), 500);
}

#[tokio::test]
async fn a_full_disk_is_left_by_removals_alone() {
    let dir = tempfile::tempdir().unwrap();
    let full = Arc::new(AtomicBool::new(false));
    let (disk, reserve) = (Arc::clone(&full), dir.path().join("state/reserve"));
    let kept_room = reserve.clone();
    // Commits succeed as long as the reserve's room is free for them.
    let hook = move |_: &crate::Redo| match disk.load(SeqCst) && kept_room.exists() {
        true => Err(io::ErrorKind::StorageFull.into()),
        false => Ok(()),
    };
    let store = open(dir.path(), &StateOptions { hook: Some(Arc::new(hook)), ..StateOptions::default() });
    for seq in 0..10 {
        append(&store, entry(Q, seq));
    }
    written(&store).await;
    assert!(reserve.exists());
    full.store(true, SeqCst);
    let commit = Commit::new();
    append(&store, waited_for(Q, 10, &commit));
    commit.done();
    assert!(commit.wait().await.is_err());
    assert!(!reserve.exists());
    // Nothing can be made where the reserve was: the disk has no room for it.
    std::fs::create_dir(&reserve).unwrap();
    full.store(false, SeqCst);
    for seq in 0..10 {
        remove(&store, Q, seq);
    }
    written(&store).await;
    assert_eq!(store.gauges().depth, 0);
    assert_eq!(store.health(), StoreHealth::Failing, "a removal does not make room for more");
    let commit = Commit::new();
    append(&store, waited_for(Q, 11, &commit));
    commit.done();
    assert!(commit.wait().await.is_err(), "added what only removals have room for");
    std::fs::remove_dir(&reserve).unwrap();
    while store.health() == StoreHealth::Failing {
        std::thread::yield_now();
        let _ = tokio::task::yield_now().await;
        let commit = Commit::new();
        append(&store, waited_for(Q, 12, &commit));
        commit.done();
        let _ = commit.wait().await;
    }
    assert!(reserve.exists());
}

#[tokio::test]
async fn a_disk_that_stands_still_costs_no_memory_for_what_is_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let options = StateOptions { max_waiting_bytes: 1 << 20, ..options };
    let store = open(dir.path(), &options);
    disk.stop(&store);
    let commit = Commit::new();
    for seq in 0..200_000 {
        let one = append(&store, waited_for(Q, seq, &commit));
        assert!(one.settle());
        assert!(store.accepts());
    }
    for seq in 200_000..220_000 {
        append(&store, entry(Q, seq));
    }
    assert!(!store.accepts());
    disk.go_on();
    written(&store).await;
    assert_eq!(store.gauges(), QueueGauges { waiting_bytes: 0, depth: 20_000 });
    commit.done();
    assert_eq!(commit.result(), Some(Ok(())));
}

#[tokio::test]
async fn a_sender_that_floods_does_not_take_the_room_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let options = StateOptions { max_waiting_bytes: 1 << 20, ..options };
    let store = open(dir.path(), &options);
    disk.stop(&store);
    let from = |device: &str| {
        let id = ClientId::new(device);
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 0 };
        let mut message = Message::new("t", &[b'x'; 500], Timestamp(1), origin);
        message.qos = QoS::AtLeastOnce;
        Arc::clone(message.share())
    };
    let mut seq = 0;
    for flooder in ["f1", "f2", "f3", "f4"] {
        let message = from(flooder);
        while store.admit(&message.borrow()).is_ok() {
            let entry = QueueEntry::new(Q, seq, Arc::clone(&message), QoS::AtLeastOnce, None);
            store.submit(QueueOp::Append(Arc::new(entry)));
            seq += 1;
        }
    }
    assert_eq!(store.admit(&from("f1").borrow()), Err(NoRoom::Share));
    assert_eq!(store.admit(&from("bystander").borrow()), Ok(()));
    disk.go_on();
    written(&store).await;
    assert_eq!(store.gauges(), QueueGauges { waiting_bytes: 0, depth: seq });
}
