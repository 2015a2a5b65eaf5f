//! Bytes that change or are missing.

use std::fs::OpenOptions;

use super::*;
use crate::format::Prefix;

/// As a power cut leaves it: the note that all was synced is cut off, and that of the last place never came to the disk.
fn killed(dir: &Path) -> PathBuf {
    fs::remove_file(dir.join("log/synced")).unwrap();
    let file = segments(dir).pop().unwrap();
    let length = fs::metadata(&file).unwrap().len();
    cut(&file, length - format::BATCH as u64);
    file
}

fn cut(file: &Path, length: u64) {
    OpenOptions::new().write(true).open(file).unwrap().set_len(length).unwrap();
}

#[test]
fn a_torn_tail_is_cut_at_every_byte_and_the_rest_kept() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions::default();
    let log = open(dir.path(), &options);
    assert!(append(&log, 1, "first") && append(&log, 1, "second"));
    let before = log.bytes();
    assert!(append(&log, 1, "last"));
    let after = log.bytes();
    drop(log);
    killed(dir.path());
    for length in before..after {
        let torn = tempfile::tempdir().unwrap();
        copy(dir.path(), torn.path());
        cut(&segments(torn.path())[0], length);
        let log = open(torn.path(), &options);
        assert_eq!(texts(&log, 1), ["first", "second"], "{length} of {after}");
        assert!(missing(&log, 1).is_empty());
        assert_eq!(log.marks(GroupId(5)).last().unwrap().messages, 2);
        assert!(append(&log, 1, "again"));
        drop(log);
        let log = open(torn.path(), &options);
        assert_eq!(texts(&log, 1), ["first", "second", "again"], "{length}");
    }
}

#[test]
fn a_hole_in_the_last_batch_cuts_all_of_it_behind_the_hole() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions { lazy_interval: Duration::from_secs(60), ..LogOptions::default() };
    let log = open(dir.path(), &options);
    assert!(append(&log, 1, "synced"));
    // One batch: the writer is woken by the last only.
    for text in ["a", "b"] {
        log.append(Partition(1), &groups(&[1]), &message(text, 1), None).unwrap();
    }
    assert!(append(&log, 1, "c"));
    let offset = all(&log, Partition(1), 0, EVERYTHING).0[2].offset;
    drop(log);
    let file = killed(dir.path());
    let mut bytes = fs::read(&file).unwrap();
    let (Prefix::Length(head), base) = (format::prefix(&bytes), 0) else { panic!("no header") };
    bytes[head + (offset - base) as usize + format::FRAME + 3] ^= 0x40;
    fs::write(&file, bytes).unwrap();
    let log = open(dir.path(), &options);
    assert_eq!(texts(&log, 1), ["synced", "a"]);
    assert!(missing(&log, 1).is_empty(), "it was never durable");
}

/// Every byte of every file, of segments with a footer and of the last: never a panic, what is readable is what was
/// written, and what is not is told unless it may be a torn tail.
#[test]
fn a_flipped_byte_anywhere_is_told_or_cut_and_harms_no_other_record() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions { segment_bytes: 2600, cache_bytes: 0, ..LogOptions::default() };
    let log = open(dir.path(), &options);
    let expected: Vec<String> = (0..12).map(|n| format!("message {n}")).collect();
    for (n, text) in (0..).zip(&expected) {
        assert!(append(&log, n % 2, text));
    }
    drop(log);
    let files = segments(dir.path());
    assert!(files.len() >= 2, "{}", files.len());
    for (at, file) in files.iter().enumerate() {
        let sound = fs::read(file).unwrap();
        let Prefix::Length(head) = format::prefix(&sound) else { panic!("no header") };
        // Not each: every one takes a start. The table of ends and the directory are long and all alike.
        let places = (0..sound.len()).filter(|place| {
            let dull = (80..head - 40).contains(place) || *place > head + 1000 && *place < sound.len() - 200;
            place % if dull { 397 } else { 5 } == at
        });
        for place in places {
            let damaged = tempfile::tempdir().unwrap();
            copy(dir.path(), damaged.path());
            let mut bytes = sound.clone();
            bytes[place] ^= 1 << (place % 8);
            let file = damaged.path().join("log").join(file.file_name().unwrap());
            fs::write(&file, bytes).unwrap();
            let what = format!("byte {place} of file {at}, header {head}");
            let log = match EmbeddedLog::open(&DataDir::open(damaged.path()).unwrap(), &options) {
                Ok(log) => log,
                Err(error) => panic!("{what}: {error}"),
            };
            let mut lost = 0;
            for partition in 0..2 {
                let texts = texts(&log, partition);
                let of: Vec<_> = expected.iter().skip(usize::from(partition)).step_by(2).collect();
                assert!(texts.iter().all(|text| of.contains(&text)), "{what}: {texts:?}");
                if texts.len() < of.len() {
                    lost += of.len() - texts.len();
                    assert!(missing(&log, partition).contains(&MissingReason::Damaged), "{what}: untold");
                }
            }
            let header = place < head;
            assert!(header || lost <= 1, "{what}: {lost} are lost");
            assert!(append(&log, 0, "goes on"), "{what}");
            assert_eq!(texts(&log, 0).last().unwrap(), "goes on", "{what}");
        }
    }
}

/// The failure: what was acknowledged and is cut off passes for a torn tail, and its places are used again.
#[test]
fn a_log_that_ends_before_what_was_synced_is_told_as_damage() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions { cache_bytes: 0, ..LogOptions::default() };
    let log = open(dir.path(), &options);
    assert!(append(&log, 1, "first") && append(&log, 1, "second"));
    let before = log.bytes();
    assert!(append(&log, 1, "last"));
    let lost = all(&log, Partition(1), 0, EVERYTHING).0[2].offset;
    drop(log);
    let length = fs::metadata(&segments(dir.path())[0]).unwrap().len();
    for left in [Some(before), Some(before + 5), Some(length - 1), None] {
        let damaged = tempfile::tempdir().unwrap();
        copy(dir.path(), damaged.path());
        let file = segments(damaged.path()).pop().unwrap();
        match left {
            Some(length) => cut(&file, length),
            None => fs::remove_file(&file).unwrap(),
        }
        // Of the last only the note that follows it is gone.
        let mut kept = match left {
            None => vec![],
            Some(left) if left == length - 1 => vec!["first", "second", "last"],
            Some(_) => vec!["first", "second"],
        };
        for text in ["again", "and again"] {
            let log = open(damaged.path(), &options);
            assert_eq!(texts(&log, 1), kept, "{left:?}");
            // Without any segment of before, the next start takes what is before the first for trimmed.
            let trimmed = left.is_none() && text == "and again";
            let reason = if trimmed { MissingReason::Trimmed } else { MissingReason::Damaged };
            assert_eq!(missing(&log, 1), [reason], "{left:?}");
            assert!(append(&log, 1, text));
            kept.push(text);
            assert_eq!(texts(&log, 1), kept, "{left:?}");
            let (records, _) = all(&log, Partition(1), 0, EVERYTHING);
            assert!(records.last().unwrap().offset > lost, "a place that was given away before");
        }
        if let Some(left) = left {
            assert_eq!(fs::metadata(&file).unwrap().len(), left, "left as it is");
        }
    }
}

#[test]
fn a_segment_that_is_gone_is_told_as_damage_of_its_partitions_only() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), &small());
    for n in 0..60 {
        assert!(append(&log, if n < 5 { 7 } else { n % 2 }, &n.to_string()));
    }
    drop(log);
    let files = segments(dir.path());
    assert!(files.len() > 2);
    fs::remove_file(&files[1]).unwrap();
    let log = open(dir.path(), &small());
    assert_eq!(texts(&log, 7), ["0", "1", "2", "3", "4"]);
    assert!(missing(&log, 7).is_empty(), "nothing of it was in that segment");
    for partition in 0..2 {
        assert_eq!(missing(&log, partition), [MissingReason::Damaged]);
        assert_eq!(texts(&log, partition).last().unwrap(), if partition == 0 { "58" } else { "59" });
    }
}
