//! A process that is killed while it appends.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Command, Stdio},
};

use super::*;

/// Tells the child of the test below where to write.
const CHILD: &str = "MQTT_SERVER_TEST_LOG_CHILD";

/// Not a test by itself: it appends, and says what is durable, until it is killed.
#[test]
fn child_that_appends_until_killed() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let log = open(Path::new(&path), &LogOptions { segment_bytes: 20_000, ..LogOptions::default() });
    let mut next = [0; 4];
    for (partition, next) in (0..).zip(&mut next) {
        *next = texts(&log, partition).len();
    }
    loop {
        let commit = Commit::new();
        for (partition, next) in (0..).zip(&mut next) {
            for _ in 0..5 {
                let message = message(&next.to_string(), 1);
                log.append(Partition(partition), &groups(&[1]), &message, Some(commit.part())).unwrap();
                *next += 1;
            }
        }
        commit.done();
        suite::wait(commit.wait()).unwrap();
        let least = next.iter().min().unwrap();
        writeln!(io::stdout().lock(), "durable {least}").unwrap();
    }
}

#[test]
fn kill_9_in_the_middle_of_appends_loses_and_repeats_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for round in 1..=8 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::crash::child_that_appends_until_killed", "--nocapture"])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let durable = lines.filter_map(|line| line.strip_prefix("durable ").and_then(|n| n.parse().ok()));
        let durable: usize = durable.take(round * 3).last().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        if round % 2 == 0 {
            // And a tail that was torn.
            let file = segments(dir.path()).pop().unwrap();
            let mut file = fs::OpenOptions::new().append(true).open(file).unwrap();
            file.write_all(&[7; 100]).unwrap();
        }
        let log = open(dir.path(), &LogOptions::default());
        for partition in 0..4 {
            let texts = texts(&log, partition);
            assert!(texts.len() >= durable, "{} of {durable}", texts.len());
            assert!(texts.iter().enumerate().all(|(n, text)| *text == n.to_string()));
            assert!(missing(&log, partition).is_empty());
        }
    }
}
