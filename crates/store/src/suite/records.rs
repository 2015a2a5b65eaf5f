//! Suite that every [`RecordStore`] must pass. Each engine runs all of it.

use bytes::Bytes;
use gateway_core::{Commit, CommitRefused};

use crate::{
    DAMAGED_VERSION, Expect, Record, RecordChange, RecordFence, RecordKind, RecordOutcome, RecordRange,
    RecordStore, RecordWrite, StoreError,
};

use RecordKind::{Answers, Commands, Groups, Scheduled};

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

pub fn put(kind: RecordKind, key: &str, value: &str) -> RecordChange {
    RecordChange::put(kind, bytes(key), bytes(value))
}

pub fn remove(kind: RecordKind, key: &str) -> RecordChange {
    RecordChange::remove(kind, bytes(key))
}

pub fn expecting(change: RecordChange, value: Option<&str>) -> RecordChange {
    RecordChange { expect: value.map_or(Expect::Absent, |value| Expect::Value(bytes(value))), ..change }
}

fn versioned(kind: RecordKind, key: &str, from: u64, to: u64) -> RecordChange {
    let value = Bytes::copy_from_slice(&to.to_le_bytes());
    RecordChange { expect: Expect::Version(from), ..RecordChange::put(kind, bytes(key), value) }
}

/// Writes without a fence.
pub async fn write(store: &dyn RecordStore, changes: Vec<RecordChange>) -> Result<RecordOutcome, StoreError> {
    store.write(RecordWrite { changes, fence: None }).await
}

/// Submits with a commit; waits for it.
pub async fn submit(store: &dyn RecordStore, changes: Vec<RecordChange>) -> Result<(), CommitRefused> {
    let commit = Commit::new();
    store.submit(changes, Some(commit.part()));
    commit.done();
    commit.wait().await
}

/// Keys and values of all records with this prefix, read `limit` at a time; damaged ones have none.
pub async fn records(
    store: &dyn RecordStore,
    kind: RecordKind,
    prefix: &str,
    limit: usize,
) -> Vec<(String, Option<String>)> {
    let mut range = RecordRange { limit, ..RecordRange::of(kind, bytes(prefix)) };
    let mut all: Vec<Record> = Vec::new();
    loop {
        let some = store.read(range.clone()).await.unwrap();
        assert!(some.len() <= limit);
        let Some(last) = some.last() else { break };
        range.after = Some(last.key.clone());
        all.extend(some);
    }
    let text = |bytes: Bytes| String::from_utf8_lossy(&bytes).into_owned();
    all.into_iter().map(|record| (text(record.key), record.value.map(text))).collect()
}

/// All keys and values that a start finds.
pub fn restored(store: &dyn RecordStore, kind: RecordKind) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let text = |bytes: Bytes| String::from_utf8_lossy(&bytes).into_owned();
    store.restore(kind, &mut |key, value| found.push((text(key), text(value)))).unwrap();
    found
}

fn pair(key: &str, value: &str) -> (String, Option<String>) {
    (key.to_owned(), Some(value.to_owned()))
}

/// Runs the whole suite on an empty store.
pub async fn run(store: &dyn RecordStore) {
    for kind in RecordKind::ALL {
        assert_eq!(restored(store, kind), []);
    }
    kinds_are_apart(store).await;
    a_write_is_made_whole_or_not_at_all(store).await;
    a_write_needs_the_version_it_was_made_from(store).await;
    an_epoch_that_is_over_changes_nothing(store).await;
    records_are_read_by_prefix_in_order(store).await;
    writes_are_made_in_the_order_of_the_calls(store).await;
    changes_nobody_waits_for_are_made(store).await;
    keys_without_a_possible_length_are_refused(store).await;
}

async fn kinds_are_apart(store: &dyn RecordStore) {
    for kind in RecordKind::ALL {
        assert_eq!(store.get(kind, bytes("same")).await.unwrap(), None);
        submit(store, vec![put(kind, "same", kind.name()), put(kind, "same2", "")]).await.unwrap();
    }
    for kind in RecordKind::ALL {
        assert_eq!(store.get(kind, bytes("same")).await.unwrap(), Some(bytes(kind.name())));
        assert_eq!(store.get(kind, bytes("sam")).await.unwrap(), None, "a prefix is no key");
        assert_eq!(store.get(kind, bytes("same2")).await.unwrap(), Some(Bytes::new()), "it is a value");
        assert_eq!(restored(store, kind).len(), 2);
        submit(store, vec![remove(kind, "same"), remove(kind, "same2"), remove(kind, "none")]).await.unwrap();
        assert_eq!(restored(store, kind), []);
    }
    submit(store, vec![put(Answers, "k", "1"), put(Scheduled, "s", "2")]).await.unwrap();
    assert_eq!(records(store, Answers, "", 10).await, [pair("k", "1")]);
    assert_eq!(records(store, Scheduled, "", 10).await, [pair("s", "2")]);
}

async fn a_write_is_made_whole_or_not_at_all(store: &dyn RecordStore) {
    assert_eq!(write(store, vec![put(Groups, "g1-a", "2")]).await.unwrap(), RecordOutcome::Done);
    for wrong in [
        expecting(put(Groups, "g1-b", "1"), Some("0")),
        expecting(put(Groups, "g1-a", "1"), None),
        expecting(remove(Groups, "g1-a"), Some("3")),
    ] {
        let changes = vec![put(Groups, "g1-c", "1"), wrong, remove(Groups, "g1-a")];
        assert_eq!(write(store, changes).await.unwrap(), RecordOutcome::Conflict);
        assert_eq!(records(store, Groups, "", 10).await, [pair("g1-a", "2")]);
    }
    let right = vec![
        expecting(put(Groups, "g1-b", "1"), None),
        expecting(remove(Groups, "g1-a"), Some("2")),
        remove(Groups, "never there"),
    ];
    assert_eq!(write(store, right).await.unwrap(), RecordOutcome::Done);
    assert_eq!(records(store, Groups, "", 10).await, [pair("g1-b", "1")]);
    assert_eq!(write(store, Vec::new()).await.unwrap(), RecordOutcome::Done);
    submit(store, Vec::new()).await.unwrap();
    let empty = vec![expecting(put(Groups, "g1-b", ""), Some("1"))];
    assert_eq!(write(store, empty).await.unwrap(), RecordOutcome::Done);
    assert_eq!(records(store, Groups, "", 10).await, [pair("g1-b", "")]);
    assert_eq!(write(store, vec![remove(Groups, "g1-b")]).await.unwrap(), RecordOutcome::Done);
}

async fn a_write_needs_the_version_it_was_made_from(store: &dyn RecordStore) {
    let step = async |from, to| write(store, vec![versioned(Commands, "v", from, to)]).await.unwrap();
    assert_eq!(step(7, 8).await, RecordOutcome::Conflict, "there is none");
    assert_eq!(step(0, 1).await, RecordOutcome::Done);
    for wrong in [0, 2, u64::MAX] {
        assert_eq!(step(wrong, 3).await, RecordOutcome::Conflict);
    }
    assert_eq!(step(1, 9).await, RecordOutcome::Done);
    assert_eq!(step(1, 9).await, RecordOutcome::Conflict, "not twice");
    submit(store, vec![remove(Commands, "v")]).await.unwrap();
    assert_eq!(step(0, 1).await, RecordOutcome::Done);
    submit(store, vec![remove(Commands, "v")]).await.unwrap();
}

async fn an_epoch_that_is_over_changes_nothing(store: &dyn RecordStore) {
    let fenced = async |version, changes| {
        let fence = Some(RecordFence { kind: Groups, key: bytes("e1-epoch"), version });
        store.write(RecordWrite { changes, fence }).await.unwrap()
    };
    let begin =
        async |after| write(store, vec![versioned(Groups, "e1-epoch", after, after + 1)]).await.unwrap();
    assert_eq!(fenced(1, vec![put(Groups, "e1-a", "0")]).await, RecordOutcome::Fenced);
    assert_eq!(fenced(0, vec![put(Groups, "e1-a", "0")]).await, RecordOutcome::Done, "nobody has it");
    assert_eq!(begin(0).await, RecordOutcome::Done);
    assert_eq!(begin(0).await, RecordOutcome::Conflict, "it comes too late");
    assert_eq!(fenced(1, vec![put(Groups, "e1-a", "1")]).await, RecordOutcome::Done);
    assert_eq!(begin(1).await, RecordOutcome::Done);
    let both = vec![put(Groups, "e1-a", "2"), expecting(remove(Groups, "e1-b"), Some("never"))];
    assert_eq!(fenced(1, both.clone()).await, RecordOutcome::Fenced, "rather than a conflict");
    assert_eq!(fenced(2, both).await, RecordOutcome::Conflict);
    assert_eq!(fenced(1, Vec::new()).await, RecordOutcome::Fenced);
    assert_eq!(store.get(Groups, bytes("e1-a")).await.unwrap(), Some(bytes("1")));
    assert_eq!(
        fenced(2, vec![remove(Groups, "e1-a"), remove(Groups, "e1-epoch")]).await,
        RecordOutcome::Done
    );
}

async fn records_are_read_by_prefix_in_order(store: &dyn RecordStore) {
    let long = "k".repeat(400);
    let mut changes: Vec<_> =
        (0..50).rev().map(|n| put(Groups, &format!("page/{n:02}"), &n.to_string())).collect();
    changes.extend([
        put(Groups, "o", ""),
        put(Groups, "q", ""),
        put(Groups, "page", ""),
        put(Groups, &long, "long"),
    ]);
    for change in changes {
        submit(store, vec![change]).await.unwrap();
    }
    for limit in [1, 7, 1_000] {
        let found = records(store, Groups, "page/", limit).await;
        assert_eq!(found.len(), 50);
        assert!(found.iter().enumerate().all(|(n, (_, value))| *value == Some(n.to_string())));
        assert_eq!(records(store, Groups, "page/4", limit).await.len(), 10);
        assert_eq!(records(store, Groups, "", limit).await.len(), 54);
        assert_eq!(records(store, Groups, "z", limit).await, []);
    }
    assert_eq!(records(store, Groups, "k", 10).await, [pair(&long, "long")]);
    // Behind a key that is not there, and before the prefix.
    let range = RecordRange::of(Groups, bytes("page/"));
    let behind = async |after: &str| {
        store.read(RecordRange { after: Some(bytes(after)), ..range.clone() }).await.unwrap().len()
    };
    assert_eq!((behind("page/30a").await, behind("a").await, behind("z").await), (19, 50, 0));
    let cut =
        store.read(RecordRange { value_bytes: 2, ..RecordRange::of(Groups, bytes("k")) }).await.unwrap();
    assert_eq!(cut[0].value, Some(bytes("lo")));
}

async fn writes_are_made_in_the_order_of_the_calls(store: &dyn RecordStore) {
    write(store, vec![put(Groups, "n", "0")]).await.unwrap();
    let step = |n: u32| {
        let change = expecting(put(Groups, "n", &(n + 1).to_string()), Some(&n.to_string()));
        store.write(RecordWrite { changes: vec![change], fence: None })
    };
    let writes: Vec<_> = (0..200).map(step).collect();
    for write in writes {
        assert_eq!(write.await.unwrap(), RecordOutcome::Done);
    }
    assert_eq!(store.get(Groups, bytes("n")).await.unwrap(), Some(bytes("200")));
}

async fn changes_nobody_waits_for_are_made(store: &dyn RecordStore) {
    for n in 0..100 {
        store.submit(vec![put(Commands, "c", &n.to_string()), put(Commands, "gone", "")], None);
        store.submit(vec![remove(Commands, "gone")], None);
    }
    submit(store, vec![put(Commands, "d", "")]).await.unwrap();
    assert_eq!(records(store, Commands, "", 10).await, [pair("c", "99"), pair("d", "")]);
    store.submit(vec![remove(Commands, "c")], None);
    submit(store, vec![put(Commands, "c", "later")]).await.unwrap();
    assert_eq!(store.get(Commands, bytes("c")).await.unwrap(), Some(bytes("later")));
}

async fn keys_without_a_possible_length_are_refused(store: &dyn RecordStore) {
    for key in [String::new(), "k".repeat(crate::MAX_RECORD_KEY + 1)] {
        let changes = vec![put(Commands, "fits", ""), put(Commands, &key, "")];
        assert!(write(store, changes.clone()).await.is_err());
        assert_eq!(submit(store, changes.clone()).await, Err(CommitRefused));
        store.submit(changes, None);
    }
    submit(store, vec![put(Commands, "behind", "")]).await.unwrap();
    assert_eq!(store.get(Commands, bytes("fits")).await.unwrap(), None);
}

/// Checks a store whose disk fails once `fail(true)` was called: refusals are whole, and removals are made in the end.
pub async fn run_failing(store: &dyn RecordStore, fail: &dyn Fn(bool)) {
    submit(store, vec![put(Answers, "old", "1"), put(Answers, "older", "1")]).await.unwrap();
    fail(true);
    let mixed = vec![put(Answers, "new", "2"), put(Scheduled, "new", "3"), remove(Answers, "old")];
    assert_eq!(submit(store, mixed).await, Err(CommitRefused));
    store.submit(vec![remove(Answers, "older")], None);
    assert!(write(store, vec![put(Groups, "g", "1")]).await.is_err());
    assert_eq!(store.health(), crate::StoreHealth::Failing);
    assert_eq!(records(store, Groups, "", 9).await, [], "reads go on");
    fail(false);
    submit(store, vec![put(Answers, "later", "4")]).await.unwrap();
    assert_eq!(write(store, vec![put(Groups, "g", "2")]).await.unwrap(), RecordOutcome::Done);
    assert_eq!(store.health(), crate::StoreHealth::Sound);
    assert_eq!(records(store, Answers, "", 9).await, [pair("later", "4")]);
    assert_eq!(records(store, Scheduled, "", 9).await, []);
}

/// Checks an empty store in which `damage` damages a record.
pub async fn run_damaged(store: &dyn RecordStore, damage: &dyn Fn(RecordKind, &str)) {
    submit(store, vec![put(Answers, "a", "1"), put(Answers, "b", "2")]).await.unwrap();
    damage(Answers, "a");
    assert_eq!(restored(store, Answers), [("b".to_owned(), "2".to_owned())]);
    // It is removed.
    submit(store, vec![put(Answers, "c", "")]).await.unwrap();
    assert_eq!(records(store, Answers, "", 9).await, [pair("b", "2"), pair("c", "")]);

    submit(store, vec![put(Groups, "g1-a", "1"), put(Groups, "g1-b", "1")]).await.unwrap();
    damage(Groups, "g1-a");
    assert!(matches!(store.get(Groups, bytes("g1-a")).await, Err(StoreError::Damaged(_))));
    assert_eq!(records(store, Groups, "", 9).await, [("g1-a".to_owned(), None), pair("g1-b", "1")]);
    let range = RecordRange { limit: 1, ..RecordRange::of(Groups, Bytes::new()) };
    assert_eq!(store.read_sound(range).await.unwrap(), [(bytes("g1-b"), bytes("1"))]);
    // Damaged, it is as nobody expects it.
    for expected in [Some("1"), None] {
        let wrong = vec![expecting(put(Groups, "g1-a", "2"), expected)];
        assert_eq!(write(store, wrong).await.unwrap(), RecordOutcome::Conflict);
    }
    let under = async |version| {
        let fence = Some(RecordFence { kind: Groups, key: bytes("g1-a"), version });
        store.write(RecordWrite { changes: vec![put(Groups, "g1-b", "2")], fence }).await.unwrap()
    };
    assert_eq!((under(0).await, under(1).await), (RecordOutcome::Fenced, RecordOutcome::Fenced));
    // Another epoch can be begun.
    let begin = versioned(Groups, "g1-a", DAMAGED_VERSION, DAMAGED_VERSION + 1);
    assert_eq!(write(store, vec![begin]).await.unwrap(), RecordOutcome::Done);
    assert_eq!(under(DAMAGED_VERSION + 1).await, RecordOutcome::Done);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryRecords;

    #[tokio::test]
    async fn memory() {
        run(&MemoryRecords::new()).await;
        let store = MemoryRecords::new();
        run_failing(&store, &|failing| store.fail(failing)).await;
        let store = MemoryRecords::new();
        run_damaged(&store, &|kind, key| store.damage(kind, key.as_bytes())).await;
    }

    #[tokio::test]
    async fn memory_that_is_held_and_fails() {
        let store = MemoryRecords::new();
        store.hold(true);
        let change = |value| RecordWrite { changes: vec![put(Groups, "a", value)], fence: None };
        let (first, second) = (store.write(change("1")), store.write(change("2")));
        assert_eq!((records(&store, Groups, "", 10).await.len(), store.waiting()), (0, 2));
        assert_eq!(store.settle(1), 1);
        assert_eq!(first.await.unwrap(), RecordOutcome::Done);
        store.fail(true);
        store.settle(10);
        assert!(second.await.is_err());
        assert_eq!(records(&store, Groups, "", 10).await, [pair("a", "1")]);
    }
}
