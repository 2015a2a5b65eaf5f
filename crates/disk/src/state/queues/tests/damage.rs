//! Damage, other formats and kills.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
};

use super::*;

#[tokio::test]
async fn a_damaged_record_is_skipped_counted_and_removed() {
    let (_dir, store) = new();
    for seq in 0..4 {
        append(&store, entry(Q, seq));
    }
    written(&store).await;
    let tables = store.tables.queues;
    let damage = |txn: &mut crate::table::WriteTxn<'_>| {
        let (key, record) = tables.bodies.first(txn)?.unwrap();
        let (key, mut record) = (key.to_vec(), record.to_vec());
        record[20] ^= 1;
        tables.bodies.put(txn, &key, &record)?;
        tables.entries.put(txn, &tables::entry_key(Q, 2).unwrap(), b"bad")
    };
    store.environment.writing(damage).unwrap();
    let counted = || crate::counters::totals().store_damaged_records;
    let before = counted();
    let loaded = store.load(Q, 0, usize::MAX, usize::MAX).await.unwrap();
    assert_eq!(loaded.damaged, 2, "told to whoever knows the session's name");
    assert_eq!(loaded.entries.iter().map(|entry| entry.seq).collect::<Vec<_>>(), [1, 3]);
    // At least: other tests count in the same process.
    assert!(counted() >= before + 2);
    written(&store).await;
    assert_eq!(store.summaries().unwrap()[0].messages, 2);
}

#[test]
fn a_newer_format_is_refused_and_left_as_it_is() {
    let (dir, store) = new();
    store.environment.writing(|txn| store.environment.set_format(txn, 2)).unwrap();
    drop(store);
    let file = dir.path().join("state/data.mdb");
    let before = std::fs::read(&file).unwrap();
    let data = DataDir::open(dir.path()).unwrap();
    let error = EmbeddedState::open(&data, &StateOptions::default()).err().unwrap();
    assert!(matches!(&error, StoreError::Format(text) if text.contains("format 2")), "{error}");
    assert!(before == std::fs::read(&file).unwrap());
}

#[test]
fn a_damaged_store_is_set_aside_and_says_so() {
    let (dir, store) = new();
    assert_eq!(store.set_aside(), None);
    drop(store);
    std::fs::write(dir.path().join("state/data.mdb"), [0x5A; 8192]).unwrap();
    let store = open(dir.path(), &StateOptions::default());
    let aside = store.set_aside().unwrap();
    assert!(aside.exists() && aside.to_string_lossy().contains("data.mdb.damaged-1"), "{aside:?}");
}

/// Not a test by itself: the process that `acknowledged_entries_survive_kill_9` kills.
#[tokio::test]
async fn child_that_appends_until_killed() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let store = open(Path::new(&path), &StateOptions::default());
    let summaries = store.summaries().unwrap();
    let start = summaries.iter().filter(|s| s.queue.0 < WIDTH).map(|s| s.next).min().unwrap_or(0);
    let mut out = io::stdout();
    for seq in start.. {
        let commit = Commit::new();
        for queue in 1..=WIDTH {
            append(&store, waited_for(QueueId(queue), seq, &commit));
        }
        if seq % 3 == 0 {
            remove(&store, QueueId(WIDTH), seq);
        }
        commit.done();
        commit.wait().await.unwrap();
        writeln!(out, "\nacked {seq}").unwrap();
        out.flush().unwrap();
    }
}

#[tokio::test]
async fn acknowledged_entries_survive_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let mut acked = 0;
    for _ in 0..3 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "state::queues::tests::damage::child_that_appends_until_killed", "--nocapture"])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let number = |line: String| line.strip_prefix("acked ").and_then(|n| n.parse::<u64>().ok());
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let reached = lines.by_ref().filter_map(number).find(|&n| n >= acked + 40);
        child.kill().unwrap();
        child.wait().unwrap();
        acked = lines.filter_map(number).last().or(reached).unwrap();
        let store = open(dir.path(), &StateOptions::default());
        for queue in 1..WIDTH {
            let found = all(&store, QueueId(queue)).await;
            assert!(found.len() as u64 > acked, "queue {queue} has {} of {acked}", found.len());
            for (seq, entry) in (0..).zip(found) {
                assert_eq!(entry.seq, seq);
                assert_eq!(entry.message.unwrap().payload, text(seq));
            }
        }
    }
}
