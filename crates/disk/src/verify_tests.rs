//! Damaged files: whatever bytes are flipped, what passes is safe for LMDB to read and to write, and what LMDB wrote
//! always passes.

use std::{fs, ops::Bound, path::Path};

use proptest::prelude::Rng as _;
use proptest::test_runner::{RngAlgorithm, TestRng};

use lmdb_0_9_pages::{Look, Terms, look, verify};

use super::{
    environment::{Environment, EnvironmentOptions},
    format,
    marker::{self, ShutdownState},
    table::Table,
};
use store::{DataDir, StoreError, Verify};

const PAGE: usize = 4096;

fn rng(seed: u64) -> TestRng {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
}

fn below(rng: &mut TestRng, bound: usize) -> usize {
    (rng.next_u64() % bound as u64) as usize
}

fn open(dir: &Path) -> Result<(Environment, Table, Table), StoreError> {
    open_as(dir, Verify::default())
}

/// An environment with two tables, as the store of latest values has them.
fn open_as(dir: &Path, verify: Verify) -> Result<(Environment, Table, Table), StoreError> {
    let options = EnvironmentOptions {
        name: "latest",
        map_size: 1 << 20,
        max_map_size: usize::MAX,
        tables: 2,
        hook: None,
        shipping: None,
    };
    let environment = Environment::open(&DataDir::open_with(dir, verify)?, options)?;
    let (one, other) = environment.open_tables(|txn| {
        let one = environment.table(txn, "latest")?;
        Ok((one, environment.table(txn, "newest")?))
    })?;
    Ok((environment, one, other))
}

/// Puts and removes entries of all sizes, in transactions of all sizes, some of which are given up.
fn churn(environment: &Environment, tables: [Table; 2], rng: &mut TestRng, transactions: usize) {
    for _ in 0..transactions {
        let puts = below(rng, 60);
        let removes = below(rng, 60);
        let give_up = below(rng, 10) == 0;
        let seed = rng.next_u64();
        let written = environment.writing(|txn| {
            let mut rng = self::rng(seed);
            for _ in 0..puts {
                let table = tables[below(&mut rng, 2)];
                let key = format!("key-{:0width$}", below(&mut rng, 2000), width = 1 + below(&mut rng, 60));
                let size = [10, 100, 100, 1000, 3000, 70_000][below(&mut rng, 6)];
                let value = vec![7; below(&mut rng, size)];
                table.put(txn, key.as_bytes(), &value)?;
            }
            for _ in 0..removes {
                let table = tables[below(&mut rng, 2)];
                let from = format!("key-{}", below(&mut rng, 10));
                let next = table.get_greater_than_or_equal_to(txn, from.as_bytes())?;
                if let Some(key) = next.map(|(key, _)| key.to_vec()) {
                    table.delete(txn, &key)?;
                }
            }
            if give_up { Err(heed::Error::Io(std::io::ErrorKind::Other.into())) } else { Ok(()) }
        });
        assert_eq!(written.is_err(), give_up);
    }
}

fn verified(file: &Path) -> Look {
    verify(file, Terms { layout: format::layout("latest"), until: None, progress: &mut |_, _| {} }).unwrap()
}

/// Setting a sound store aside would be worse than what it guards against.
#[test]
fn whatever_lmdb_wrote_is_sound() {
    for seed in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("latest/data.mdb");
        let mut rng = rng(seed);
        for _ in 0..3 {
            let (environment, one, other) = open(dir.path()).unwrap();
            assert_eq!(environment.set_aside(), None, "seed {seed}");
            for _ in 0..6 {
                churn(&environment, [one, other], &mut rng, 8);
                // Nobody writes now.
                assert_eq!(verified(&file), Look::Sound, "seed {seed}");
            }
            if below(&mut rng, 2) == 0 {
                environment
                    .writing(|txn| one.delete_range(txn, &(Bound::Unbounded, Bound::Unbounded)))
                    .unwrap();
                assert_eq!(verified(&file), Look::Sound, "seed {seed}, one table is empty");
            }
        }
    }
}

/// Before, LMDB met such pages by signals, by assertions and by errors that ended the start.
#[test]
fn flipped_bytes_never_end_the_process_and_are_set_aside_or_harmless() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("latest/data.mdb");
    {
        let (environment, one, other) = open(dir.path()).unwrap();
        churn(&environment, [one, other], &mut rng(99), 20);
    }
    let sound = fs::read(&file).unwrap();
    let (mut aside, mut harmless) = (0, 0);
    for seed in 0..60_u64 {
        let mut rng = rng(seed);
        let mut bytes = sound.clone();
        for _ in 0..1 + below(&mut rng, 4) {
            // Descriptions of trees are hit more often than elsewhere: meta pages and heads of pages.
            let at = match below(&mut rng, 4) {
                0 => below(&mut rng, 2 * PAGE).min(bytes.len() - 1) / PAGE * PAGE + below(&mut rng, 152),
                1 => below(&mut rng, bytes.len() / PAGE) * PAGE + below(&mut rng, 64),
                _ => below(&mut rng, bytes.len()),
            };
            bytes[at] ^= 1 + below(&mut rng, 255) as u8;
        }
        fs::write(&file, &bytes).unwrap();
        let (environment, one, other) = open(dir.path()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let damaged = environment.set_aside().cloned();
        for table in [one, other] {
            environment.reading(|txn| table.iter(txn)?.try_for_each(|entry| entry.map(drop))).unwrap();
        }
        churn(&environment, [one, other], &mut rng, 2);
        assert!(!environment.is_damaged(), "seed {seed}");
        assert_eq!(verified(&file), Look::Sound, "seed {seed}");
        match damaged {
            Some(damaged) => {
                aside += 1;
                fs::remove_file(damaged).unwrap();
            }
            None => harmless += 1,
        }
    }
    // Values, free pages and what lies between nodes are most of a file.
    assert!(aside > 8 && harmless > 3, "{aside} set aside, {harmless} harmless");
}

#[test]
fn every_byte_that_describes_the_tables_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("latest/data.mdb");
    {
        let (environment, one, _) = open(dir.path()).unwrap();
        environment.writing(|txn| one.put(txn, b"key", b"value")).unwrap();
    }
    let sound = fs::read(&file).unwrap();
    let changed = |at: &usize| sound[*at] != 0;
    for at in (0..sound.len()).filter(changed) {
        let mut bytes = sound.clone();
        bytes[at] ^= 0x81;
        fs::write(&file, &bytes).unwrap();
        // A start goes through, whichever byte was changed.
        if verified(&file) == Look::Sound {
            let (environment, one, _) = open(dir.path()).unwrap_or_else(|e| panic!("byte {at}: {e}"));
            environment.reading(|txn| one.get(txn, b"key").map(drop)).unwrap();
        }
    }
}

#[test]
fn a_changed_table_name_is_damage_and_a_table_more_or_less_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("latest/data.mdb");
    drop(open(dir.path()).unwrap());
    let mut bytes = fs::read(&file).unwrap();
    for at in 0..bytes.len() - 6 {
        if bytes[at..at + 6] == *b"newest" {
            bytes[at] = b'o';
        }
    }
    fs::write(&file, &bytes).unwrap();
    assert!(matches!(verified(&file), Look::Damaged(reason) if reason.contains("name")));
    let (environment, ..) = open(dir.path()).unwrap();
    assert!(environment.set_aside().is_some());
    environment.writing(|txn| environment.table(txn, "t").map(drop)).ok();
}

#[test]
fn a_file_of_no_bytes_is_damage_where_there_was_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("latest/data.mdb");
    fs::create_dir(dir.path().join("latest")).unwrap();
    fs::write(&file, "").unwrap();
    let (environment, ..) = open(dir.path()).unwrap();
    assert_eq!(environment.set_aside(), None, "LMDB was interrupted before its first write");
    drop(environment);
    fs::write(&file, "").unwrap();
    let (environment, ..) = open(dir.path()).unwrap();
    assert!(environment.set_aside().is_some());
}

/// The failure: a store whose file was removed starts empty, and nobody is told.
#[test]
fn a_file_that_was_removed_is_told_as_damage() {
    let dir = tempfile::tempdir().unwrap();
    let (environment, ..) = open(dir.path()).unwrap();
    drop(environment);
    let file = dir.path().join("latest/data.mdb");
    fs::remove_file(&file).unwrap();
    let reports = crate::tool::check(dir.path(), &mut |_| ()).unwrap();
    assert!(reports[0].problem.as_deref().is_some_and(|problem| problem.contains("gone")), "{reports:?}");
    assert!(matches!(crate::tool::compact(dir.path(), &mut |_| ()), Err(StoreError::Damaged(_))));
    let (environment, ..) = open(dir.path()).unwrap();
    assert_eq!(environment.set_aside(), Some(&file));
    drop(environment);
    let (environment, ..) = open(dir.path()).unwrap();
    assert_eq!(environment.set_aside(), None, "once");
    drop(environment);
    // Removed as a whole, nothing says that there was one.
    fs::remove_dir_all(dir.path().join("latest")).unwrap();
    let (environment, ..) = open(dir.path()).unwrap();
    assert_eq!(environment.set_aside(), None);
}

#[test]
fn what_was_closed_is_clean_until_somebody_changes_it() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("latest");
    let (environment, one, _) = open(dir.path()).unwrap();
    assert_eq!(marker::left(&folder), ShutdownState::Unclean, "in use");
    environment.writing(|txn| one.put(txn, b"key", b"value")).unwrap();
    drop(environment);
    assert_eq!(marker::left(&folder), ShutdownState::Clean);
    let bytes = fs::read(folder.join("data.mdb")).unwrap();
    fs::write(folder.join("data.mdb"), bytes).unwrap();
    assert_eq!(marker::left(&folder), ShutdownState::Unclean, "written by somebody else");
}

/// Damage that LMDB meets while the gateway runs: the file changes under it.
#[test]
fn damage_met_later_ends_the_store_until_the_next_start_sets_it_aside() {
    use std::os::unix::fs::FileExt as _;
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("latest");
    let (environment, one, other) = open(dir.path()).unwrap();
    churn(&environment, [one, other], &mut rng(5), 30);
    let depth = environment.reading(|txn| Ok(one.stat(txn)?.depth)).unwrap();
    assert!(depth >= 2, "the tree has branches");
    // All pages that may be branches name children far beyond the end.
    let file = fs::OpenOptions::new().read(true).write(true).open(folder.join("data.mdb")).unwrap();
    let bytes = fs::read(folder.join("data.mdb")).unwrap();
    for (number, page) in
        bytes.chunks(PAGE).enumerate().filter(|(_, page)| page.len() == PAGE && page[10] == 1)
    {
        let nodes = (usize::from(u16::from_ne_bytes([page[12], page[13]])) - 16) / 2;
        for node in 0..nodes {
            let at = usize::from(u16::from_ne_bytes([page[16 + 2 * node], page[17 + 2 * node]]));
            file.write_all_at(&[0xFF; 4], (number * PAGE + at) as u64).unwrap();
        }
    }
    let read = environment.reading(|txn| one.get(txn, b"key-1").map(|found| found.is_some()));
    assert!(matches!(read, Err(StoreError::Damaged(_))), "{read:?}");
    assert!(environment.is_damaged());
    assert!(environment.writing(|txn| one.put(txn, b"key", b"value")).is_err(), "nothing more is written");
    drop(environment);
    assert_eq!(marker::left(&folder), ShutdownState::Suspect);
    // The file is set aside whatever the limit is.
    let hurried = Verify { always: false, limit: std::time::Duration::from_nanos(1) };
    let (environment, one, _) = open_as(dir.path(), hurried).unwrap();
    assert!(environment.set_aside().is_some());
    environment.writing(|txn| one.put(txn, b"key", b"value")).unwrap();
}

#[test]
fn a_verification_ends_when_its_time_is_up() {
    let dir = tempfile::tempdir().unwrap();
    let (environment, one, other) = open(dir.path()).unwrap();
    let value = vec![1; 1000];
    let fill = |n: u32| environment.writing(|txn| one.put(txn, &n.to_be_bytes(), &value));
    environment
        .writing(|txn| (0..20_000_u32).try_for_each(|n| other.put(txn, &n.to_be_bytes(), &value)))
        .unwrap();
    fill(1).unwrap();
    drop(environment);
    let file = dir.path().join("latest/data.mdb");
    #[expect(clippy::disallowed_methods, reason = "a time that is over")]
    let until = Some(std::time::Instant::now());
    let mut told = 0;
    let terms = Terms { layout: format::layout(""), until, progress: &mut |done, _| told = done };
    assert_eq!(verify(&file, terms).unwrap(), Look::Unfinished);
    assert!(told > 0, "progress is told");
    assert_eq!(look(&file).unwrap(), Look::Sound);
}
