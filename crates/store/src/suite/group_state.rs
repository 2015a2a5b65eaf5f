//! Suite that every [`GroupState`] must pass. Each engine runs all of it.

use bytes::Bytes;
use gateway_core::GroupId;

use crate::{Epoch, Expect, GroupState, StateChange, StateError, StateRecord};

const G: GroupId = GroupId(7);
const OTHER: GroupId = GroupId(8);

pub fn set(key: &str, value: &str) -> StateChange {
    let (key, value) = (Bytes::from(key.to_owned()), Some(Bytes::from(value.to_owned())));
    StateChange { key, value, expect: Expect::Any }
}

fn unset(key: &str) -> StateChange {
    StateChange { value: None, ..set(key, "") }
}

fn expecting(change: StateChange, value: Option<&str>) -> StateChange {
    let expect = value.map_or(Expect::Absent, |value| Expect::Value(Bytes::from(value.to_owned())));
    StateChange { expect, ..change }
}

/// Acquires the group, whether or not another has it.
pub async fn own(state: &dyn GroupState, group: GroupId) -> Epoch {
    let last = state.epoch(group).await.unwrap();
    state.acquire(group, last).await.unwrap()
}

/// Keys and values of all records with this prefix, read `limit` at a time.
pub async fn records(
    state: &dyn GroupState,
    group: GroupId,
    prefix: &str,
    limit: usize,
) -> Vec<(String, String)> {
    let mut all: Vec<StateRecord> = Vec::new();
    loop {
        let after = all.last().map(|record| record.key.clone());
        let some = state.read(group, Bytes::from(prefix.to_owned()), after, limit).await.unwrap();
        assert!(some.len() <= limit);
        if some.is_empty() {
            let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
            return all.into_iter().map(|record| (text(record.key), text(record.value))).collect();
        }
        all.extend(some);
    }
}

/// Runs the whole suite on an empty store.
pub async fn run(state: &dyn GroupState) {
    assert_eq!(state.groups().await.unwrap(), []);
    writes_need_the_epoch(state).await;
    a_write_is_made_whole_or_not_at_all(state).await;
    records_are_read_by_prefix_in_order(state).await;
    writes_are_made_in_the_order_of_the_calls(state).await;
    a_group_is_removed_under_its_epoch(state).await;
}

async fn writes_need_the_epoch(state: &dyn GroupState) {
    assert!(matches!(state.write(G, Epoch(1), vec![set("a", "0")]).await, Err(StateError::Fenced)));
    assert_eq!(state.epoch(G).await.unwrap(), Epoch(0));
    let first = own(state, G).await;
    assert_eq!(state.groups().await.unwrap(), [], "a group has no records by being acquired");
    state.write(G, first, vec![set("a", "1")]).await.unwrap();
    let second = own(state, G).await;
    assert!(second > first);
    assert_eq!(state.epoch(G).await.unwrap(), second);
    // An owner that began before another comes too late, and does no harm to the one that was in time.
    for late in [Epoch(0), first] {
        assert!(matches!(state.acquire(G, late).await, Err(StateError::Fenced)));
    }
    assert_eq!(state.epoch(G).await.unwrap(), second);
    assert!(matches!(state.write(G, first, vec![set("a", "2")]).await, Err(StateError::Fenced)));
    assert!(matches!(state.remove(G, first).await, Err(StateError::Fenced)));
    assert_eq!(records(state, G, "", 10).await, [("a".into(), "1".into())]);
    state.write(G, second, vec![set("a", "2")]).await.unwrap();
    let other = own(state, OTHER).await;
    state.write(OTHER, other, vec![set("a", "other")]).await.unwrap();
    assert_eq!(state.groups().await.unwrap(), [G, OTHER]);
    assert_eq!(records(state, G, "", 10).await, [("a".into(), "2".into())]);
}

async fn a_write_is_made_whole_or_not_at_all(state: &dyn GroupState) {
    let epoch = own(state, G).await;
    for wrong in [
        expecting(set("b", "1"), Some("0")),
        expecting(set("a", "1"), None),
        expecting(unset("a"), Some("3")),
    ] {
        let write = state.write(G, epoch, vec![set("c", "1"), wrong, unset("a")]);
        assert!(matches!(write.await, Err(StateError::Conflict)));
        assert_eq!(records(state, G, "", 10).await, [("a".into(), "2".into())]);
    }
    let right = vec![expecting(set("b", "1"), None), expecting(unset("a"), Some("2")), unset("never there")];
    state.write(G, epoch, right).await.unwrap();
    assert_eq!(records(state, G, "", 10).await, [("b".into(), "1".into())]);
    state.write(G, epoch, Vec::new()).await.unwrap();
    // An empty value is a value, an empty key a key.
    state.write(G, epoch, vec![set("", ""), expecting(set("b", ""), Some("1"))]).await.unwrap();
    assert_eq!(
        records(state, G, "", 10).await,
        [(String::new(), String::new()), ("b".into(), String::new())]
    );
    state.write(G, epoch, vec![unset(""), unset("b")]).await.unwrap();
    assert_eq!(state.groups().await.unwrap(), [OTHER]);
}

async fn records_are_read_by_prefix_in_order(state: &dyn GroupState) {
    let epoch = own(state, G).await;
    let long = "k".repeat(400);
    let mut changes: Vec<_> = (0..50).rev().map(|n| set(&format!("p/{n:02}"), &n.to_string())).collect();
    changes.extend([set("o", ""), set("q", ""), set("p", ""), set(&long, "long")]);
    state.write(G, epoch, changes).await.unwrap();
    for limit in [1, 7, 1_000] {
        let found = records(state, G, "p/", limit).await;
        assert_eq!(found.len(), 50);
        assert!(found.iter().enumerate().all(|(n, (_, value))| *value == n.to_string()));
        assert_eq!(records(state, G, "p/4", limit).await.len(), 10);
        assert_eq!(records(state, G, "", limit).await.len(), 54);
        assert_eq!(records(state, G, "z", limit).await, []);
    }
    assert_eq!(records(state, G, "k", 10).await, [(long, "long".into())]);
    let too_long = "k".repeat(401);
    let _ = state.write(G, epoch, vec![set(&too_long, "")]).await;
    assert_eq!(records(state, OTHER, "", 10).await, [("a".into(), "other".into())]);
    // Behind a key that is not there, and before the prefix.
    let read = |after: &str| state.read(G, Bytes::from("p/"), Some(Bytes::from(after.to_owned())), 100);
    assert_eq!(read("p/30a").await.unwrap().len(), 19);
    assert_eq!(read("a").await.unwrap().len(), 50);
    assert_eq!(read("z").await.unwrap().len(), 0);
}

async fn writes_are_made_in_the_order_of_the_calls(state: &dyn GroupState) {
    let epoch = own(state, G).await;
    state.write(G, epoch, vec![set("n", "0")]).await.unwrap();
    let step = |n: u32| {
        let change = expecting(set("n", &(n + 1).to_string()), Some(&n.to_string()));
        state.write(G, epoch, vec![change])
    };
    let writes: Vec<_> = (0..200).map(step).collect();
    for write in writes {
        write.await.unwrap();
    }
    assert_eq!(records(state, G, "n", 10).await, [("n".into(), "200".into())]);
}

async fn a_group_is_removed_under_its_epoch(state: &dyn GroupState) {
    let epoch = own(state, G).await;
    for part in 0..25 {
        let changes = (0..1_000).map(|n| set(&format!("x/{part}/{n}"), "x")).collect();
        state.write(G, epoch, changes).await.unwrap();
    }
    state.remove(G, epoch).await.unwrap();
    assert_eq!(records(state, G, "", 100).await, []);
    assert_eq!(state.groups().await.unwrap(), [OTHER]);
    let later = own(state, G).await;
    assert!(later > epoch, "an epoch is never given twice");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryGroupState;

    #[tokio::test]
    async fn memory() {
        run(&MemoryGroupState::new()).await;
    }

    #[tokio::test]
    async fn memory_that_is_held_and_fails() {
        let state = MemoryGroupState::new();
        let epoch = own(&state, G).await;
        state.hold(true);
        let (first, second) =
            (state.write(G, epoch, vec![set("a", "1")]), state.write(G, epoch, vec![set("a", "2")]));
        assert_eq!((records(&state, G, "", 10).await.len(), state.waiting()), (0, 2));
        assert_eq!(state.settle(1), 1);
        first.await.unwrap();
        state.fail(true);
        state.settle(10);
        assert!(matches!(second.await, Err(StateError::Store(_))));
        assert_eq!(records(&state, G, "", 10).await, [("a".into(), "1".into())]);
    }
}
