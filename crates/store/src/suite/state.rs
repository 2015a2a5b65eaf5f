//! Suite of [`StateStore`]. Each test gets an empty store.

use std::sync::Arc;

use gateway_core::{
    ClientId, Commit, CommitRefused, Message, Origin, Protocol, QoS, QueueEntry, QueueId, QueueOp,
    SharedMessage, Timestamp,
};

use crate::{QueueSummary, Restore, SessionOp, StateStore, StoredSession, StoredSubscription};

const Q: QueueId = QueueId(7);
const OTHER: QueueId = QueueId(8);

/// A session of this client.
pub fn session(queue: QueueId, client_id: &str) -> StoredSession {
    StoredSession {
        queue,
        client_id: ClientId::new(client_id),
        expiry: 60,
        since: None,
        protocol: Protocol::V5,
        listener: Arc::new("listener".to_owned()),
        username: None,
        proved: false,
        tenant: None,
        will: None,
    }
}

/// A subscription to this filter.
pub fn subscription(filter: &str) -> StoredSubscription {
    StoredSubscription {
        filter: filter.to_owned(),
        qos: QoS::AtLeastOnce,
        no_local: false,
        retain_as_published: false,
        id: None,
    }
}

/// A message of QoS 2 that is retained.
pub fn message(topic: &str, payload: &str) -> Arc<SharedMessage> {
    let mut message = Message::new(topic, payload.as_bytes(), Timestamp(1_700_000_000_000), Origin::BACKEND);
    (message.qos, message.retain) = (QoS::ExactlyOnce, true);
    Arc::clone(message.share())
}

fn append(store: &dyn StateStore, queue: QueueId, seq: u64, commit: &Arc<Commit>) -> Arc<QueueEntry> {
    let message = message("t", &seq.to_string());
    let entry = QueueEntry::new(queue, seq, message, QoS::ExactlyOnce, Some(Arc::clone(commit)));
    let entry = Arc::new(entry);
    store.submit(QueueOp::Append(Arc::clone(&entry)));
    entry
}

async fn done(store: &dyn StateStore, commit: &Commit) -> Result<(), CommitRefused> {
    store.hurry();
    commit.done();
    commit.wait().await
}

/// Place, QoS 2 state and payload of each entry.
async fn entries(store: &dyn StateStore, queue: QueueId) -> Vec<(u64, bool, Option<String>)> {
    let loaded = store.load(queue, 0, usize::MAX, usize::MAX).await.unwrap();
    assert!(loaded.end && loaded.damaged == 0);
    let text = |message: Arc<SharedMessage>| String::from_utf8_lossy(&message.payload).into_owned();
    loaded.entries.into_iter().map(|entry| (entry.seq, entry.sent, entry.message.map(text))).collect()
}

fn retained(store: &dyn StateStore) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut take = |message: Arc<SharedMessage>| {
        found.push((message.topic.to_string(), String::from_utf8_lossy(&message.payload).into_owned()));
    };
    store.restore_retained(&mut take).unwrap();
    found
}

#[derive(Default)]
struct Found {
    sessions: Vec<(u64, String, Vec<String>)>,
    groups: Vec<(u64, String)>,
}

impl Restore for Found {
    fn session(&mut self, session: StoredSession, subscriptions: Vec<StoredSubscription>) {
        let mut filters: Vec<_> = subscriptions.into_iter().map(|subscription| subscription.filter).collect();
        filters.sort();
        self.sessions.push((session.queue.0, session.client_id.to_string(), filters));
    }

    fn group(&mut self, queue: QueueId, full_name: &str) {
        self.groups.push((queue.0, full_name.to_owned()));
    }
}

fn restored(store: &dyn StateStore) -> Found {
    let mut found = Found::default();
    store.restore_sessions(&mut found).unwrap();
    found
}

/// Sessions come back in order with what they subscribe to, and of two of one client the later.
pub async fn sessions_and_groups(store: &dyn StateStore) {
    let commit = Commit::new();
    for (queue, client_id) in [(Q, "a"), (OTHER, "b"), (QueueId(9), "a"), (QueueId(10), "gone")] {
        store.submit_session(SessionOp::Put(Box::new(session(queue, client_id)), Some(commit.part())));
        for filter in ["x", "y"] {
            store.submit_session(SessionOp::Subscribe(queue, subscription(filter), commit.part()));
        }
        store.submit_session(SessionOp::Group(queue, format!("$share/{}/t", queue.0)));
    }
    store.submit_session(SessionOp::Unsubscribe(OTHER, "x".to_owned(), commit.part()));
    store.submit_session(SessionOp::RemoveGroup(QueueId(10)));
    // The last, so that the commit waits for all of them.
    store.submit_session(SessionOp::Remove(QueueId(10), Some(commit.part())));
    done(store, &commit).await.unwrap();
    for _ in 0..2 {
        let found = restored(store);
        let all = |filters: &[&str]| filters.iter().map(|filter| (*filter).to_owned()).collect::<Vec<_>>();
        assert_eq!(found.sessions, [(8, "b".to_owned(), all(&["y"])), (9, "a".to_owned(), all(&["x", "y"]))]);
        assert_eq!(found.groups.iter().map(|group| group.0).collect::<Vec<_>>(), [7, 8, 9]);
    }
}

/// Queues keep their order, page by page, and what is removed, released or noted of them.
pub async fn queues(store: &dyn StateStore) {
    let commit = Commit::new();
    for seq in 0..6 {
        append(store, Q, seq, &commit);
    }
    append(store, OTHER, 0, &commit);
    let settled = append(store, Q, 6, &commit);
    if !settled.settle() {
        store.submit(QueueOp::Remove { queue: Q, seq: 6, unit: None });
    }
    store.submit(QueueOp::Remove { queue: Q, seq: 0, unit: None });
    store.submit(QueueOp::Release { queue: Q, seq: 1, commit: commit.part() });
    store.submit(QueueOp::Trim { queue: Q, from: 4, count: 1 });
    store.submit(QueueOp::Receive { queue: Q, packet_id: 5, commit: commit.part() });
    store.submit(QueueOp::Receive { queue: Q, packet_id: 6, commit: commit.part() });
    store.submit(QueueOp::Forget { queue: Q, packet_id: 5, commit: commit.part() });
    done(store, &commit).await.unwrap();
    let text = |seq: u64| Some(seq.to_string());
    let left = [(1, true, None), (2, false, text(2)), (3, false, text(3)), (5, false, text(5))];
    assert_eq!(entries(store, Q).await, left);
    let page = store.load(Q, 2, 2, usize::MAX).await.unwrap();
    assert_eq!((page.entries.len(), page.next, page.end), (2, 4, false));
    let page = store.load(Q, 0, 10, 1).await.unwrap();
    assert!(!page.entries.is_empty(), "at least one, however few bytes are asked for");
    store.submit(QueueOp::NoteSent { queue: Q, below: 3 });
    let sent: Vec<_> = entries(store, Q).await.into_iter().map(|(_, sent, _)| sent).collect();
    assert_eq!(sent, [true, true, false, false], "a read that comes after it sees it");
    let summaries = store.summaries().unwrap();
    let bytes = 3 * message("t", "2").cost() as u64;
    let whole =
        QueueSummary { queue: Q, messages: 4, first: 1, next: 6, exact: 6, begun: 6, ..summaries[0].clone() };
    assert_eq!(summaries[0], whole);
    assert!(summaries[0].bytes == bytes && summaries[0].received == [6], "{:?}", summaries[0]);
    store.submit(QueueOp::Purge { queue: Q });
    assert!(entries(store, Q).await.is_empty());
    let left: Vec<_> = store.summaries().unwrap().iter().map(|summary| summary.queue).collect();
    assert_eq!(left, [OTHER], "with what was received");
}

/// Each topic has its last message.
pub async fn retained_messages(store: &dyn StateStore) {
    let commit = Commit::new();
    for (topic, payload) in [("b", "1"), ("a", "1"), ("c", "1"), ("b", "2")] {
        store.set_retained(message(topic, payload), Some(commit.part()));
    }
    store.clear_retained(Arc::from("c"), Some(commit.part()));
    store.clear_retained(Arc::from("none"), None);
    done(store, &commit).await.unwrap();
    let pair = |topic: &str, payload: &str| (topic.to_owned(), payload.to_owned());
    assert_eq!(retained(store), [pair("a", "1"), pair("b", "2")]);
    let topics = ["b", "c", "a"].map(Arc::from).to_vec();
    let found = store.load_retained(topics).await.unwrap();
    let payloads = found.iter().map(|message| message.as_ref().map(|message| &*message.payload));
    assert_eq!(payloads.collect::<Vec<_>>(), [Some(&b"2"[..]), None, Some(&b"1"[..])]);
}

/// Parts of a unit are there together, and hold back only what comes after them in their queues.
pub async fn units(store: &dyn StateStore) {
    let (unit, free) = (Commit::of_unit(), Commit::new());
    store.set_retained(message("t", "unit"), Some(unit.part()));
    append(store, Q, 0, &unit);
    append(store, OTHER, 0, &free);
    store.submit_session(SessionOp::Put(Box::new(session(Q, "a")), Some(free.part())));
    done(store, &free).await.unwrap();
    assert_eq!((entries(store, OTHER).await.len(), restored(store).sessions.len()), (1, 1));
    assert!(retained(store).is_empty());
    assert!(store.summaries().unwrap().iter().all(|summary| summary.queue == OTHER));
    let plain = Commit::new();
    store.set_retained(message("t", "plain"), Some(plain.part()));
    done(store, &plain).await.unwrap();
    store.submit(QueueOp::Receive { queue: Q, packet_id: 9, commit: unit.part() });
    done(store, &unit).await.unwrap();
    assert_eq!(store.summaries().unwrap()[0].received, [9]);
    assert_eq!(entries(store, Q).await.len(), 1);
    let found = retained(store);
    assert!(found.contains(&("t".to_owned(), "plain".to_owned())), "it came after the unit's: {found:?}");
}
