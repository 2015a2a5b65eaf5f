//! Expiry of entries on disk.

use super::*;

/// A receiver that has begun with some places.
#[derive(Default)]
struct Receiver {
    begun: Vec<u64>,
    told: Mutex<Vec<(QueueId, usize, u64)>>,
}

impl Expiry for Receiver {
    fn keeps(&self, _queue: QueueId, seq: u64, _qos: QoS) -> bool {
        self.begun.contains(&seq)
    }
    fn expired(&self, queue: QueueId, messages: usize, bytes: u64) {
        self.told.lock().push((queue, messages, bytes));
    }
}

#[tokio::test]
async fn expired_messages_go_and_their_queue_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let options = StateOptions { clock: || Timestamp(NOW.load(SeqCst)), ..StateOptions::default() };
    let store = open(dir.path(), &options);
    let receiver = Arc::new(Receiver::default());
    store.begin_expiry(Arc::clone(&receiver) as _);
    let at = |seq, seconds: u64| {
        let message = message(b"x", Some(1_700_000_000_000 + seconds * 1000));
        QueueEntry::new(Q, seq, message, QoS::AtLeastOnce, None)
    };
    append(&store, at(0, 5));
    append(&store, at(1, 500));
    append(&store, at(2, 6));
    let sent = at(3, 5);
    sent.note_sent();
    append(&store, sent);
    append(&store, at(4, 5));
    remove(&store, Q, 4);
    append(&store, entry(Q, 5));
    written(&store).await;
    NOW.fetch_add(4_999, SeqCst);
    written(&store).await;
    assert_eq!(seqs(&store, Q).await, [0, 1, 2, 3, 5]);
    NOW.fetch_add(2_000, SeqCst);
    written(&store).await;
    assert_eq!(seqs(&store, Q).await, [1, 3, 5]);
    assert_eq!(*receiver.told.lock(), [(Q, 2, 2 * message(b"x", None).cost() as u64)]);
    assert_eq!(bodies(&store), (3, 0));
}

/// Checks that an expired entry that a session may have sent is left to it and read back as expired. An entry with time left is
/// read back as it was published. Nothing goes before it is known which entries were sent.
#[tokio::test]
async fn an_entry_may_expire_before_its_message_unless_it_may_be_sent() {
    static NOW: AtomicU64 = AtomicU64::new(1_700_000_000_000);
    let dir = tempfile::tempdir().unwrap();
    let options = StateOptions { clock: || Timestamp(NOW.load(SeqCst)), ..StateOptions::default() };
    let store = open(dir.path(), &options);
    let body = message(b"x", Some(1_700_000_500_000));
    for seq in 0..4 {
        let qos = if seq == 0 { QoS::AtLeastOnce } else { QoS::ExactlyOnce };
        let mut entry = QueueEntry::new(Q, seq, Arc::clone(&body), qos, None);
        if seq != 2 {
            entry.expires = Some(Timestamp(1_700_000_005_000));
        }
        append(&store, entry);
    }
    written(&store).await;
    let read = async || {
        let loaded = store.load(Q, 0, 10, 1 << 20).await.unwrap();
        let expires = |message: &Arc<SharedMessage>| message.expires.map(|at| at.0);
        let seen = |entry: &StoredEntry| (entry.seq, entry.message.as_ref().and_then(expires));
        loaded.entries.iter().map(seen).collect::<Vec<_>>()
    };
    let whole = Some(1_700_000_500_000);
    assert_eq!(read().await, [(0, whole), (1, whole), (2, whole), (3, whole)]);
    NOW.fetch_add(6_000, SeqCst);
    written(&store).await;
    assert_eq!(read().await, [(0, Some(0)), (1, Some(0)), (2, whole), (3, Some(0))]);
    store.begin_expiry(Arc::new(Receiver { begun: vec![1], ..Receiver::default() }));
    NOW.fetch_add(1_000, SeqCst);
    written(&store).await;
    assert_eq!(read().await, [(1, Some(0)), (2, whole)]);
    remove(&store, Q, 1);
    remove(&store, Q, 2);
    written(&store).await;
    assert_eq!(bodies(&store), (0, 0));
    assert!(store.environment.reading(|txn| store.tables.queues.expiry.is_empty(txn)).unwrap());
}
