//! Random operations against a map in memory.

use std::collections::{BTreeMap, BTreeSet};

use gateway_core::{Commit, Journal as _, QoS, QueueEntry, SharedMessage};
use proptest::prelude::*;

use super::{
    tests::{message, open},
    *,
};

use store::StateStore as _;

const QUEUES: u64 = 4;

#[derive(Debug, Clone)]
enum Action {
    /// One message to each of these queues.
    Append(Vec<u64>),
    Remove(u64, usize),
    Release(u64, usize),
    /// Settled by its receiver, perhaps before it is written.
    Settle(u64),
    Trim(u64, usize, usize),
    Purge(u64),
    Receive(u64, u16),
    Forget(u64, u16),
    Load(u64, usize, usize),
    Reopen,
}

fn action() -> impl Strategy<Value = Action> {
    let queue = || 1..=QUEUES;
    prop_oneof![
        10 => prop::collection::vec(queue(), 1..4).prop_map(Action::Append),
        5 => (queue(), 0..20usize).prop_map(|(q, n)| Action::Remove(q, n)),
        2 => (queue(), 0..20usize).prop_map(|(q, n)| Action::Release(q, n)),
        2 => queue().prop_map(Action::Settle),
        1 => (queue(), 0..5usize, 0..5usize).prop_map(|(q, n, count)| Action::Trim(q, n, count)),
        1 => queue().prop_map(Action::Purge),
        2 => (queue(), 1..5u16).prop_map(|(q, id)| Action::Receive(q, id)),
        2 => (queue(), 1..5u16).prop_map(|(q, id)| Action::Forget(q, id)),
        3 => (queue(), 0..20usize, 1..10usize).prop_map(|(q, n, count)| Action::Load(q, n, count)),
        1 => Just(Action::Reopen),
    ]
}

#[derive(Default)]
struct Model {
    /// By queue and place; `None` is released.
    entries: BTreeMap<(u64, u64), Option<Arc<SharedMessage>>>,
    next: BTreeMap<u64, u64>,
    received: BTreeSet<(u64, u16)>,
}

impl Model {
    fn nth(&self, queue: u64, n: usize) -> Option<u64> {
        self.entries.range((queue, 0)..(queue + 1, 0)).nth(n).map(|(&(_, seq), _)| seq)
    }

    fn next(&mut self, queue: u64) -> u64 {
        let next = self.next.entry(queue).or_default();
        *next += 1;
        *next
    }

    fn summaries(&self) -> Vec<QueueSummary> {
        let mut all = Vec::new();
        for queue in 1..=QUEUES {
            let mut summary = QueueSummary { queue: QueueId(queue), ..QueueSummary::default() };
            for (&(_, seq), message) in self.entries.range((queue, 0)..(queue + 1, 0)) {
                summary.first = if summary.messages == 0 { seq } else { summary.first };
                summary.messages += 1;
                summary.bytes += message.as_ref().map_or(0, |message| message.cost() as u64);
                summary.next = seq + 1;
                // All have QoS 2.
                summary.exact = seq + 1;
                summary.begun = seq + 1;
            }
            summary.received.extend(self.received.range((queue, 0)..(queue + 1, 0)).map(|(_, id)| id));
            if summary.messages > 0 || !summary.received.is_empty() {
                all.push(summary);
            }
        }
        all
    }
}

fn entry(queue: u64, seq: u64, message: &Arc<SharedMessage>) -> Arc<QueueEntry> {
    Arc::new(QueueEntry::new(QueueId(queue), seq, Arc::clone(message), QoS::ExactlyOnce, None))
}

fn check(actions: &[Action]) {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let options = StateOptions { map_size: 64 << 10, lazy_count: 3, ..StateOptions::default() };
    let mut store = Some(open(dir.path(), &options));
    let mut model = Model::default();
    for (number, action) in actions.iter().enumerate() {
        let text = format!("{number:0>300}");
        let message = message(text.as_bytes(), None);
        let journal = store.as_ref().unwrap();
        match *action {
            Action::Append(ref queues) => {
                for &queue in queues {
                    let seq = model.next(queue);
                    journal.submit(QueueOp::Append(entry(queue, seq, &message)));
                    model.entries.insert((queue, seq), Some(Arc::clone(&message)));
                }
            }
            Action::Remove(queue, n) => {
                if let Some(seq) = model.nth(queue, n) {
                    journal.submit(QueueOp::Remove { queue: QueueId(queue), seq, unit: None });
                    model.entries.remove(&(queue, seq));
                }
            }
            Action::Release(queue, n) => {
                if let Some(seq) = model.nth(queue, n) {
                    let commit = Commit::new();
                    journal.submit(QueueOp::Release { queue: QueueId(queue), seq, commit });
                    model.entries.insert((queue, seq), None);
                }
            }
            Action::Settle(queue) => {
                let seq = model.next(queue);
                let entry = entry(queue, seq, &message);
                journal.submit(QueueOp::Append(Arc::clone(&entry)));
                if !entry.settle() {
                    journal.submit(QueueOp::Remove { queue: QueueId(queue), seq, unit: None });
                }
            }
            Action::Trim(queue, n, count) => {
                if let Some(from) = model.nth(queue, n) {
                    journal.submit(QueueOp::Trim { queue: QueueId(queue), from, count });
                    for _ in 0..count {
                        let Some(seq) = model.nth(queue, n) else { break };
                        model.entries.remove(&(queue, seq));
                    }
                }
            }
            Action::Purge(queue) => {
                journal.submit(QueueOp::Purge { queue: QueueId(queue) });
                model.entries.retain(|&(other, _), _| other != queue);
                model.received.retain(|&(other, _)| other != queue);
            }
            Action::Receive(queue, packet_id) => {
                let commit = Commit::new();
                journal.submit(QueueOp::Receive { queue: QueueId(queue), packet_id, commit });
                model.received.insert((queue, packet_id));
            }
            Action::Forget(queue, packet_id) => {
                let commit = Commit::new();
                journal.submit(QueueOp::Forget { queue: QueueId(queue), packet_id, commit });
                model.received.remove(&(queue, packet_id));
            }
            Action::Load(queue, n, messages) => {
                let from = model.nth(queue, n).unwrap_or(0);
                let load = journal.load(QueueId(queue), from, messages, usize::MAX);
                let found = runtime.block_on(load).unwrap();
                let expected: Vec<_> =
                    model.entries.range((queue, from)..(queue + 1, 0)).take(messages).collect();
                assert_eq!(found.entries.len(), expected.len());
                for (found, (&(_, seq), message)) in found.entries.iter().zip(expected) {
                    assert_eq!(found.seq, seq);
                    let payload = |message: &Arc<SharedMessage>| message.payload.clone();
                    assert_eq!(found.message.as_ref().map(payload), message.as_ref().map(payload));
                }
            }
            Action::Reopen => {
                drop(store.take());
                store = Some(open(dir.path(), &options));
                assert_eq!(store.as_ref().unwrap().summaries().unwrap(), model.summaries());
            }
        }
    }
    drop(store);
    let store = open(dir.path(), &options);
    assert_eq!(store.summaries().unwrap(), model.summaries());
    // Every body that is left belongs to an entry.
    for &(queue, seq) in model.entries.keys() {
        store.submit(QueueOp::Remove { queue: QueueId(queue), seq, unit: None });
    }
    drop(store);
    let store = open(dir.path(), &options);
    let tables = store.tables.queues;
    let left = store.environment.reading(|txn| {
        Ok((
            tables.entries.len(txn)?,
            tables.bodies.len(txn)?,
            tables.refs.len(txn)?,
            tables.expiry.len(txn)?,
        ))
    });
    assert_eq!(left.unwrap(), (0, 0, 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_operations_leave_what_a_map_would_hold(actions in prop::collection::vec(action(), 1..120)) {
        check(&actions);
    }
}
