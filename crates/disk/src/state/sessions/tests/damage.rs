//! Damage, other formats and kills.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
};

use super::*;

#[test]
fn damaged_records_are_left_out_counted_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for number in 1..=3 {
        put(&store, session(number, 1)).unwrap();
        subscribe(&store, number, "a", 0).unwrap();
        subscribe(&store, number, "b", 0).unwrap();
        store.submit_session(SessionOp::Group(QueueId(number), format!("$share/{number}/a")));
    }
    drop(store);
    let store = open(dir.path());
    let tables = store.tables.sessions;
    let spoil = |table: Table, key: &[u8]| {
        let spoilt = store.environment.writing(|txn| {
            let mut record = table.get(txn, key)?.unwrap().to_vec();
            *record.last_mut().unwrap() ^= 1;
            table.put(txn, key, &record)
        });
        spoilt.unwrap();
    };
    spoil(tables.sessions, &key(QueueId(2)));
    spoil(tables.subscriptions, &tables::subscription_key(QueueId(3), first_hash(b"a")));
    spoil(tables.groups, &key(QueueId(1)));
    let counted = || crate::counters::totals().store_damaged_records;
    let before = counted();
    let found = restored(&store);
    // At least: other tests count in the same process.
    assert!(counted() >= before + 3);
    assert_eq!(found.sessions.keys().copied().collect::<Vec<_>>(), [1, 3]);
    assert_eq!(found.sessions[&1].1.len(), 2);
    assert_eq!(found.sessions[&3].1.keys().collect::<Vec<_>>(), ["b"]);
    assert_eq!(found.groups.keys().copied().collect::<Vec<_>>(), [2, 3]);
    let count = |table: Table| store.environment.reading(|txn| table.len(txn)).unwrap();
    assert_eq!([tables.sessions, tables.subscriptions, tables.groups].map(count), [2, 3, 2]);
}

#[test]
fn a_newer_format_is_refused_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put(&store, session(1, 0)).unwrap();
    store.environment.writing(|txn| store.environment.set_format(txn, 7)).unwrap();
    drop(store);
    let file = dir.path().join("state/data.mdb");
    let before = fs::read(&file).unwrap();
    let error = open_with(dir.path(), &StateOptions::default()).err().unwrap();
    assert!(matches!(error, StoreError::Format(_)) && error.to_string().contains('7'), "{error}");
    assert!(fs::read(&file).unwrap() == before, "the file was changed");
}

#[test]
fn no_record_makes_the_decoders_panic() {
    let mut records = vec![Vec::new(), Vec::new(), Vec::new()];
    record::encode_session(&session(1, 1), &mut records[0]);
    record::encode_subscription(&subscription("a/b", 2), &mut records[1]);
    record::encode_group("$share/g/a", &mut records[2]);
    let seal = |mut bytes: Vec<u8>| {
        if bytes.len() > 4 {
            let crc = crc32fast::hash(&bytes[4..]);
            bytes[..4].copy_from_slice(&crc.to_le_bytes());
        }
        bytes
    };
    let decode = |bytes: &[u8]| {
        let session = record::decode_session(QueueId(1), bytes, &mut Arc::default()).is_some();
        session | record::decode_subscription(bytes).is_some() | record::decode_group(bytes).is_some()
    };
    for record in records {
        for at in 0..record.len() {
            decode(&seal(record[..at].to_vec()));
            for flip in [1, 0x80, 0xFF] {
                let mut bytes = record.clone();
                bytes[at] ^= flip;
                assert!(!decode(&bytes), "checksum catches byte {at}");
                let _ = record::likely_client_id(&bytes);
                decode(&seal(bytes));
            }
        }
    }
}

/// Not a test by itself: the process that `acknowledged_sessions_survive_kill_9` kills.
#[test]
fn child_that_writes_until_killed() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let store = open(Path::new(&path));
    let mut out = std::io::stdout();
    // The last one may lack its subscription.
    let first = restored(&store).sessions.last_key_value().map_or(0, |(last, _)| *last);
    for number in first.. {
        put(&store, session(number, number)).unwrap();
        subscribe(&store, number, "a/b", number).unwrap();
        writeln!(out, "\nacked {number}").unwrap();
        out.flush().unwrap();
    }
}

#[test]
fn acknowledged_sessions_survive_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let mut acked = None;
    for round in 1..=3u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "state::sessions::tests::damage::child_that_writes_until_killed",
                "--nocapture",
            ])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut numbers =
            lines.filter_map(|line| line.strip_prefix("acked ").and_then(|n| n.parse::<u64>().ok()));
        acked = numbers.by_ref().find(|&number| number >= round * 40).max(acked);
        child.kill().unwrap();
        child.wait().unwrap();
        acked = numbers.last().max(acked);
        let store = open(dir.path());
        let found = restored(&store);
        for number in 0..=acked.unwrap() {
            let (stored, subscriptions) = &found.sessions[&number];
            assert_eq!(*stored, format!("{:?}", session(number, number)));
            assert_eq!(subscriptions["a/b"], subscription("a/b", number));
        }
    }
    assert!(acked >= Some(120));
}
