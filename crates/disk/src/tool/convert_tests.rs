//! Directories of earlier versions, made entry by entry, since nothing else writes them any more.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use heed::types::Bytes;

use super::{conversion_room, convert};
use crate::{
    EmbeddedState, StateOptions, earlier,
    environment::{Environment, EnvironmentOptions},
};
use store::{DataDir, StoreError};

type Content = BTreeMap<Vec<u8>, Vec<u8>>;

/// Tables of earlier versions, with the lengths of their keys.
const TABLES: [(&str, &[(&str, usize)]); 6] = [
    ("sessions", &[("sessions", 8), ("subscriptions", 24), ("groups", 8)]),
    ("queues", &[("bodies", 6), ("refs", 6), ("entries", 11), ("received", 7), ("expiry", 16)]),
    ("retained", &[("retained", 20)]),
    ("groups", &[("groups", 12)]),
    ("publisher", &[("answers", 30), ("scheduled", 16), ("commands", 16)]),
    ("shadows", &[("shadows", 25)]),
];

/// Room for so many tables, and for that of the format.
fn environment(dir: &Path, name: &'static str, tables: usize) -> Environment {
    let options = EnvironmentOptions {
        name,
        map_size: 1 << 20,
        max_map_size: usize::MAX,
        tables: tables as u32,
        hook: None,
        shipping: None,
    };
    Environment::open(&DataDir::open(dir).unwrap(), options).unwrap()
}

/// Fills a directory as an earlier version did.
fn fill(dir: &Path, entries: u32) {
    for (name, tables) in TABLES {
        let environment = environment(dir, name, tables.len());
        environment.open_tables(|_| Ok(())).unwrap();
        let fill = environment.writing(|txn| {
            for (table, length) in tables {
                let table = environment.env.create_database::<Bytes, Bytes>(txn.bare(), Some(table))?;
                for n in 0..entries {
                    // Numbers began with zeros.
                    let mut key = vec![0; *length];
                    key[length - 5..length - 1].copy_from_slice(&(n * 7919).to_be_bytes());
                    table.put(txn.bare(), &key, format!("{name} {n}").repeat(8).as_bytes())?;
                }
            }
            Ok(())
        });
        fill.unwrap();
    }
}

fn content(dir: &Path, name: &'static str, table: &str) -> Content {
    let environment = environment(dir, name, 20);
    let content = environment.reading(|txn| {
        let table = environment.env.open_database::<Bytes, Bytes>(txn, Some(table))?.expect("the table");
        table.iter(txn)?.map(|entry| entry.map(|(key, value)| (key.to_vec(), value.to_vec()))).collect()
    });
    content.unwrap()
}

/// Everything that the directory must have once it is converted, by environment and table.
fn expected(dir: &Path) -> BTreeMap<(&'static str, &'static str), Content> {
    let mut expected = BTreeMap::new();
    for (name, tables) in TABLES {
        for (table, _) in tables {
            let at = match *table {
                "entries" | "received" => Some(0),
                "expiry" => Some(5),
                _ => None,
            };
            let found = content(dir, name, table).into_iter().map(|(mut key, value)| {
                // Two bytes of the home and six of the number, where five of the number were.
                at.into_iter().for_each(|at| drop(key.splice(at..at, [0, 0, 0])));
                (key, value)
            });
            let place = match name {
                "sessions" if *table == "groups" => ("state", "shared_groups"),
                "sessions" | "queues" | "retained" => ("state", *table),
                _ => ("records", *table),
            };
            expected.insert(place, found.collect());
        }
    }
    expected
}

fn assert_converted(dir: &Path, expected: &BTreeMap<(&'static str, &'static str), Content>) {
    for ((name, table), wanted) in expected {
        assert!(content(dir, name, table) == *wanted, "{name}/{table}");
    }
    let mut left: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "lock")
        .collect();
    left.sort();
    assert_eq!(left, ["before-conversion", "records", "sessions", "state"]);
    assert_eq!(fs::read_dir(dir.join("before-conversion")).unwrap().count(), TABLES.len());
}

#[test]
fn a_directory_of_an_earlier_version_is_converted_and_only_then_opened() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), 300);
    let expected = expected(dir.path());
    let open = || EmbeddedState::open(&DataDir::open(dir.path()).unwrap(), &StateOptions::default());
    let error = open().err().expect("refused").to_string();
    let command = format!("mqtt-server store convert {}", dir.path().display());
    assert!(error.contains(&command), "{error}");
    let room = conversion_room(dir.path()).unwrap().expect("something to convert");
    assert!(room.needed > 100_000 && room.free > room.needed, "{room:?}");
    let mut told = 0;
    let reports = convert(dir.path(), &mut |_| told += 1).unwrap();
    assert_eq!(reports.iter().map(|report| report.store).collect::<Vec<_>>(), ["state", "records"]);
    assert!(told > 20);
    assert_converted(dir.path(), &expected);
    assert!(convert(dir.path(), &mut |_| ()).unwrap().is_empty(), "nothing more to do");
    assert_eq!(conversion_room(dir.path()).unwrap(), None);
    open().unwrap();
}

/// An earlier version would have begun anew beside what is kept.
#[test]
fn an_earlier_version_refuses_what_this_one_keeps() {
    let dir = tempfile::tempdir().unwrap();
    drop(EmbeddedState::open(&DataDir::open(dir.path()).unwrap(), &StateOptions::default()).unwrap());
    // As it did, and with the format that it knew.
    let environment = environment(dir.path(), "sessions", 3);
    let refused = environment.open_tables(|_| Ok(())).unwrap_err();
    assert!(matches!(&refused, StoreError::Format(text) if text.contains("have format 2")), "{refused}");
}

#[test]
fn a_damaged_environment_and_two_generations_are_not_converted() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), 50);
    let file = dir.path().join("queues/data.mdb");
    let sound = fs::read(&file).unwrap();
    fs::write(&file, &sound[..sound.len() / 2]).unwrap();
    let error = convert(dir.path(), &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains("queues") && error.contains("sets it aside"), "{error}");
    fs::write(&file, &sound).unwrap();
    fs::create_dir(dir.path().join("state")).unwrap();
    let error = convert(dir.path(), &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains("state is there already"), "{error}");
}

/// The failure: an earlier version that runs between two tries writes what the second takes for copied.
#[test]
fn a_conversion_begins_anew_if_the_directory_was_used_since() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), 300);
    let mut progress = 0;
    let cut = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        convert(dir.path(), &mut |told| {
            progress += usize::from(told.store == "records");
            assert!(progress < 3, "cut short");
        })
    }));
    assert!(cut.is_err() && dir.path().join("converting").exists());
    {
        let environment = environment(dir.path(), "queues", 5);
        environment.open_tables(|_| Ok(())).unwrap();
        let table = |txn: &mut crate::table::WriteTxn<'_>| environment.table(txn, "bodies");
        // The first key, which is copied already.
        environment.writing(|txn| table(txn)?.delete(txn, &[0; 6])).unwrap();
    }
    let wanted = expected(dir.path());
    assert_eq!(wanted[&("state", "bodies")].len(), 299);
    convert(dir.path(), &mut |_| ()).unwrap();
    assert_converted(dir.path(), &wanted);
}

/// Tells the child of the test below which directory to convert.
const CHILD: &str = "MQTT_SERVER_TEST_CONVERTED_DIRECTORY";

/// Not a test by itself: a conversion that is killed.
#[test]
fn child_that_converts_until_killed() {
    let Ok(path) = std::env::var(CHILD) else { return };
    writeln!(io::stdout(), "\nbegins").unwrap();
    convert(Path::new(&path), &mut |_| ()).unwrap();
}

#[test]
fn a_conversion_that_is_killed_60_times_goes_on_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), 1_500);
    let wanted = expected(dir.path());
    let (mut amid, mut delay) = (0, 0);
    for _ in 0..60 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tool::convert_tests::child_that_converts_until_killed", "--nocapture"])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.take_while(|line| line != "begins").count() < 20);
        delay = (delay + 7) % 40;
        thread::sleep(Duration::from_millis(delay));
        child.kill().unwrap();
        child.wait().unwrap();
        let is_earlier = earlier::is_earlier(dir.path());
        amid += usize::from(is_earlier && dir.path().join("converting").exists());
        if is_earlier && !dir.path().join(earlier::CONVERTED).exists() {
            for (name, _) in TABLES {
                assert!(dir.path().join(name).join("data.mdb").exists(), "{name} is gone");
            }
        }
        if !is_earlier {
            // Begun anew, so that each kill has something to do.
            assert_converted(dir.path(), &wanted);
            for name in ["state", "records", "sessions"] {
                fs::remove_dir_all(dir.path().join(name)).unwrap();
            }
            for (name, _) in TABLES {
                fs::rename(dir.path().join("before-conversion").join(name), dir.path().join(name)).unwrap();
            }
            fs::remove_dir(dir.path().join("before-conversion")).unwrap();
        }
    }
    assert!(amid > 10, "{amid} kills amid a conversion");
    convert(dir.path(), &mut |_| ()).unwrap();
    assert_converted(dir.path(), &wanted);
}
