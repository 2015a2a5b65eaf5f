//! Damaged files with several parts: each part that is whole is there at the next start.

use std::{collections::BTreeMap, fs, path::Path};

use ledger::Position;

use super::{
    environment::{Environment, EnvironmentOptions},
    table::Table,
};
use store::DataDir;

const PAGE: usize = 4096;
const TABLES: [&str; 3] = ["answers", "scheduled", "commands"];

/// Keys, and lengths of values: a large value has pages without anything of LMDB's, so its bytes are judged by the record's checksum.
type Content = BTreeMap<Vec<u8>, usize>;

/// An environment of three parts, each a table.
fn open(dir: &Path) -> (Environment, [Table; 3]) {
    let options = EnvironmentOptions {
        name: "records",
        map_size: 1 << 20,
        max_map_size: usize::MAX,
        tables: 3,
        hook: None,
        shipping: None,
    };
    let environment = Environment::open(&DataDir::open(dir).unwrap(), options).unwrap();
    let tables = environment.open_tables(|txn| {
        let mut table = |name| environment.table(txn, name);
        Ok([table(TABLES[0])?, table(TABLES[1])?, table(TABLES[2])?])
    });
    (environment, tables.unwrap())
}

/// Writes entries of several pages into each table, in a transaction for each round and table.
fn fill(environment: &Environment, tables: [Table; 3], rounds: std::ops::Range<u32>) {
    for round in rounds {
        for (number, table) in tables.into_iter().enumerate() {
            environment
                .writing(|txn| {
                    (0..9_u32).try_for_each(|n| {
                        let key = (round * 9 + n).to_be_bytes();
                        let value = vec![number as u8; [20, 900, 6000][(n % 3) as usize]];
                        table.put(txn, &key, &value)
                    })
                })
                .unwrap();
        }
    }
}

fn content(environment: &Environment, table: Table) -> Content {
    let read = environment.reading(|txn| {
        let entries = table.iter(txn)?;
        entries.map(|entry| entry.map(|(key, value)| (key.to_vec(), value.len()))).collect()
    });
    read.unwrap()
}

/// The contents before and after the last transaction, which wrote to all tables, and the file.
fn filled(dir: &Path) -> ([Content; 3], [Content; 3], Vec<u8>) {
    let (environment, tables) = open(dir);
    fill(&environment, tables, 0..3);
    let before = tables.map(|table| content(&environment, table));
    environment.writing(|txn| tables.iter().try_for_each(|table| table.put(txn, b"last", b"x"))).unwrap();
    let after = tables.map(|table| content(&environment, table));
    drop(environment);
    (before, after, fs::read(dir.join("records/data.mdb")).unwrap())
}

fn set_file(dir: &Path, bytes: &[u8]) {
    fs::remove_dir_all(dir.join("records")).unwrap();
    fs::create_dir(dir.join("records")).unwrap();
    fs::write(dir.join("records/format"), "1\n").unwrap();
    fs::write(dir.join("records/data.mdb"), bytes).unwrap();
    fs::write(dir.join("records/state"), "open").unwrap();
}

/// The failure: a store that has lost a part passes for whole at the start after that, and a copy of a home goes on without what is lost.
#[test]
fn a_store_with_a_lost_part_is_at_no_place_of_a_ledger() {
    let dir = tempfile::tempdir().unwrap();
    let (environment, tables) = open(dir.path());
    fill(&environment, tables, 0..3);
    let position = Position { epoch: 1, n: 7, sum: 9 };
    environment.writing(|txn| environment.note_position(txn, position)).unwrap();
    drop(environment);
    let sound = fs::read(dir.path().join("records/data.mdb")).unwrap();
    let mut carried = 0;
    for page in 2..sound.len() / PAGE {
        let mut damaged = sound.clone();
        damaged[page * PAGE..][..PAGE].fill(0xA5);
        set_file(dir.path(), &damaged);
        let (environment, tables) = open(dir.path());
        if environment.set_aside().is_none() {
            assert_eq!(environment.position().unwrap(), Some(position), "page {page} is in use by nothing");
            continue;
        }
        carried += tables.iter().map(|table| content(&environment, *table).len()).sum::<usize>();
        drop(environment);
        let (environment, _) = open(dir.path());
        assert_eq!(environment.position().unwrap(), None, "page {page}");
    }
    assert!(carried > 0, "nothing was carried over");
}

/// A page of retained messages must not cost a session: a damaged page costs the part that it belongs to, and nothing else.
#[test]
fn any_damaged_page_costs_its_own_part_at_most() {
    let dir = tempfile::tempdir().unwrap();
    let (before, after, sound) = filled(dir.path());
    let pages = sound.len() / PAGE;
    let (mut costly, mut older, mut all) = (0, 0, 0);
    for page in 0..pages {
        let mut bytes = sound.clone();
        let damaged = &mut bytes[page * PAGE..(page + 1) * PAGE];
        if page % 2 == 0 {
            damaged.fill(0);
        } else {
            damaged[8..].iter_mut().for_each(|byte| *byte ^= 0x5A);
        }
        set_file(dir.path(), &bytes);
        let (environment, tables) = open(dir.path());
        let mut lost = 0;
        for (number, table) in tables.into_iter().enumerate() {
            let found = content(&environment, table);
            let is_lost = environment.has_lost(TABLES[number]);
            assert_eq!(is_lost, found.is_empty(), "page {page}");
            lost += usize::from(is_lost);
            older += usize::from(found == before[number]);
            assert!(is_lost || found == before[number] || found == after[number], "page {page}");
        }
        assert!(lost <= 1, "page {page} costs {lost} parts");
        costly += lost;
        all += usize::from(environment.set_aside().is_some());
        let asides = fs::read_dir(dir.path().join("records")).unwrap();
        let asides = asides.filter(|entry| {
            entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("data.mdb.damaged-")
        });
        assert_eq!(asides.count(), usize::from(environment.set_aside().is_some()), "page {page}");
    }
    assert!(costly > pages / 4 && older > 0 && all > costly, "{costly} parts, {older} older, {all} files");
}

#[test]
fn a_file_that_was_cut_short_keeps_what_is_before_the_cut() {
    let dir = tempfile::tempdir().unwrap();
    let (_, after, sound) = filled(dir.path());
    let mut kept = Vec::new();
    for part in 1..8 {
        set_file(dir.path(), &sound[..sound.len() / PAGE * part / 8 * PAGE]);
        let (environment, tables) = open(dir.path());
        assert!(environment.set_aside().is_some(), "{part}");
        let whole =
            tables.iter().zip(&after).filter(|(table, after)| content(&environment, **table) == **after);
        kept.push(whole.count());
    }
    assert!(kept.iter().all(|kept| *kept <= 3), "{kept:?}");
}

/// The next start would have found an empty store, and no word of it.
#[test]
fn an_end_while_something_is_carried_over_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (_, after, sound) = filled(dir.path());
    let folder = dir.path().join("records");
    let same = |what: &str| {
        let (environment, tables) = open(dir.path());
        for (table, after) in tables.into_iter().zip(&after) {
            assert_eq!(content(&environment, table), *after, "{what}");
        }
        environment.set_aside().is_some()
    };
    let mut damaged = sound.clone();
    // The meta page that is not the newest.
    let transaction = |page: usize| u64::from_ne_bytes(sound[page * PAGE + 144..][..8].try_into().unwrap());
    let older = usize::from(transaction(1) < transaction(0));
    damaged[older * PAGE..][..PAGE].fill(0);

    set_file(dir.path(), &damaged);
    fs::create_dir(folder.join("carrying-over")).unwrap();
    fs::write(folder.join("carrying-over/data.mdb"), b"torn").unwrap();
    assert!(same("while the new file is written"));

    set_file(dir.path(), &damaged);
    fs::write(folder.join("data.mdb.carried-over"), b"of an earlier try").unwrap();
    assert!(same("before the damaged one is set aside"));

    set_file(dir.path(), &sound);
    fs::rename(folder.join("data.mdb"), folder.join("data.mdb.carried-over")).unwrap();
    assert!(!same("after that"));
    assert!(!folder.join("data.mdb.carried-over").exists() && !folder.join("carrying-over").exists());
}
