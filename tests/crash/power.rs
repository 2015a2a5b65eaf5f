//! Power cuts: one run is recorded, and from many moments of it images of the disk are made, opened and drained.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    broker::{Broker, MemoryKind},
    model::{Facts, Violation},
    number, recorder, report,
    rng::Rng,
    seed,
    world::{SHORT, World, acknowledged},
};

/// Images of one recording.
const BATCH: u64 = 8;

#[test]
fn a_power_cut_loses_repeats_or_reorders_nothing() {
    let Some(library) = recorder::library() else { return };
    let mut images = number("CRASH_IMAGES", 6);
    let mut seeds = Rng::new(seed());
    while images > 0 {
        let (seed, batch) = (seeds.next(), images.min(BATCH));
        println!("CRASH_SEED={seed} (a batch of {batch} images)");
        one_recording(library, seed, batch);
        images -= batch;
    }
}

/// The harness itself: all that was recorded makes the very files that are there.
#[test]
fn the_recorder_misses_no_write() {
    let Some(library) = recorder::library() else { return };
    let control = tempfile::tempdir().expect("make a directory for the log");
    let (mut broker, data) = recorded(library, control.path());
    let mut world = World::new(seed());
    broker.start();
    world.settle(&mut broker);
    world.run(&mut broker, 700_000_000);
    broker.stop();
    let operations = recorder::read(&control.path().join("recorder.log"));
    let copy = tempfile::tempdir().expect("make a directory for the image");
    recorder::image(&operations, u64::MAX, &data, copy.path(), None);
    let mut files = Vec::new();
    collect(&data, &mut files);
    let mut compared = 0;
    for file in files {
        let name = file.strip_prefix(&data).expect("a file of the data directory");
        // LMDB's table of readers is a mapping, and nothing after a crash.
        if name.ends_with("lock.mdb") {
            continue;
        }
        let same = fs::read(&file).ok() == fs::read(copy.path().join(name)).ok();
        assert!(same, "{} differs from what was recorded", name.display());
        compared += usize::from(name.ends_with("data.mdb"));
    }
    assert!(compared > 0, "no store was recorded");
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("list a directory") {
        let path = entry.expect("read a directory entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            files.push(path);
        }
    }
}

/// A broker whose data directory, the second value, is recorded.
fn recorded(library: &Path, control: &Path) -> (Broker, PathBuf) {
    let broker = Broker::new(MemoryKind::Own);
    let data = fs::canonicalize(broker.data()).expect("the data directory");
    (broker.with(recorder::environment(library, &data, control), ""), data)
}

fn one_recording(library: &Path, seed: u64, images: u64) {
    let mut rng = Rng::new(seed);
    let control = tempfile::tempdir().expect("make a directory for the log");
    let (mut broker, data) = recorded(library, control.path());
    let mut world = World::new(rng.next());
    broker.start();
    world.settle(&mut broker);
    let begin = super::clock::now();
    world.run(&mut broker, 2_500_000_000);
    let end = super::clock::now();
    broker.kill();
    let operations = recorder::read(&control.path().join("recorder.log"));
    println!("{} acknowledged, {} operations", acknowledged(&world.history), operations.len());
    // Moments of operations, just before, in or after one, as nothing changes between them.
    let moments: Vec<u64> = operations
        .iter()
        .flat_map(|operation| [operation.begin, operation.end])
        .filter(|at| (begin..end).contains(at))
        .collect();
    assert!(!moments.is_empty(), "the server wrote nothing to its disk\n{}", broker.log());
    for number in 0..images {
        let cut = moments[rng.between(0, moments.len() as u64) as usize];
        let mut again = Broker::new(MemoryKind::Own);
        recorder::image(&operations, cut, &data, &again.data(), Some(&mut rng));
        let known = world.history.iter().take_while(|record| record.at < cut).cloned().collect();
        let mut resumed = World::resumed(rng.next(), known);
        println!("image {number}: {} acknowledged", acknowledged(&resumed.history));
        again.start();
        resumed.drain(&mut again);
        resumed.probe(&mut again);
        let violations = Facts::new(&resumed.history, &resumed.cast).violations(&resumed.cast);
        assert!(
            violations.is_empty(),
            "seed {seed}, image {number}:\n{}{}",
            report(&resumed, &violations),
            again.log()
        );
        assert_eq!(resumed.unanswered(), 0, "seed {seed}, image {number}: publishers wait for ever");
        assert!(!again.log().contains("damaged"), "a power cut damaged a store\n{}", again.log());
    }
}

/// The harness itself: a disk that forgets what was synced has less than was acknowledged.
#[test]
fn a_disk_that_lies_about_its_syncs_is_found() {
    let Some(library) = recorder::library() else { return };
    let mut rng = Rng::new(seed());
    let control = tempfile::tempdir().expect("make a directory for the log");
    let (mut broker, data) = recorded(library, control.path());
    let mut world = World::new(rng.next());
    broker.start();
    world.settle(&mut broker);
    world.run(&mut broker, 300_000_000);
    let forgotten = super::clock::now();
    world.run_until_something_waits(&mut broker, forgotten);
    broker.kill();
    let operations = recorder::read(&control.path().join("recorder.log"));
    let mut again = Broker::new(MemoryKind::Own);
    recorder::image(&operations, forgotten, &data, &again.data(), Some(&mut rng));
    let mut resumed = World::resumed(rng.next(), world.history);
    resumed.silence = SHORT;
    again.start();
    resumed.drain(&mut again);
    let violations = Facts::new(&resumed.history, &resumed.cast).violations(&resumed.cast);
    let lost = |violation: &Violation| matches!(violation, Violation::Lost { .. });
    assert!(violations.iter().any(lost), "{}", report(&resumed, &violations));
}
