use std::{collections::BTreeMap, path::Path};

use super::*;
use crate::environment::EnvironmentOptions;
use store::DataDir;

fn open(dir: &Path, map_size: usize) -> Environment {
    let options = EnvironmentOptions {
        name: "records",
        map_size,
        max_map_size: usize::MAX,
        tables: 5,
        hook: None,
        shipping: None,
    };
    let environment = Environment::open(&DataDir::open(dir).unwrap(), options).unwrap();
    environment.writing(|txn| environment.all_tables(txn).map(drop)).unwrap();
    environment
}

type Contents = BTreeMap<Vec<u8>, Vec<u8>>;

fn contents(environment: &Environment) -> Contents {
    let table: Table = environment.writing(|txn| environment.table(txn, "commands")).unwrap();
    let read = environment.reading(|txn| {
        let entries = table.iter(txn)?;
        entries.map(|entry| entry.map(|(key, value)| (key.to_vec(), value.to_vec()))).collect()
    });
    read.unwrap()
}

/// Changes of transactions as they are shipped, and what is there after all of them.
fn records(count: u32) -> (Vec<Vec<u8>>, Contents) {
    let dir = tempfile::tempdir().unwrap();
    let environment = open(dir.path(), 64 << 20);
    let record = |n: u32| {
        let changes = environment.writing(|txn| {
            txn.want_redo();
            let table = environment.table(txn, "commands")?;
            for part in 0..3 {
                let value = vec![n as u8; (n as usize * 3_571 + part * 977) % 24_000];
                table.put(txn, format!("{} {part}", n % 17).as_bytes(), &value)?;
            }
            table.delete(txn, format!("{} 0", n * 7 % 17).as_bytes())?;
            Ok(txn.take_redo().unwrap().bytes().to_vec())
        });
        changes.unwrap()
    };
    let records = (0..count).map(record).collect();
    (records, contents(&environment))
}

/// The failures: a record that the ledger has is missing here, or is there in part, because the map was full when it was applied, or when
/// the transaction that was shipped was committed. Each first size of the map is full at other places of the same records.
#[test]
fn what_the_ledger_has_is_applied_wherever_the_map_is_full() {
    let (records, expected) = records(24);
    let position = |n: usize| Position { epoch: 1, n: n as u64, sum: 7 };
    let mut grown = 0;
    for pages in (12..=96).step_by(4) {
        let dir = tempfile::tempdir().unwrap();
        let size = pages << 12;
        let environment = open(dir.path(), size);
        for (n, changes) in records.iter().enumerate() {
            // Every third as of a commit that found the map full, and the others as of a copy.
            if n % 3 == 0 {
                environment.commit_record(changes, position(n), heed::Error::Mdb(MdbError::MapFull));
            } else {
                assert!(environment.apply_record(changes, position(n)).unwrap());
            }
        }
        assert_eq!(contents(&environment), expected, "a map of {size} bytes");
        assert_eq!(environment.position().unwrap(), Some(position(records.len() - 1)));
        grown += usize::from(environment.env.info().map_size > size);
    }
    assert_eq!(grown, 22, "a map was never full");
}
