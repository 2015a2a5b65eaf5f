use super::*;
use crate::{Stream, suite};

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

#[test]
fn a_reliable_twin_passes_the_suite() {
    for engine in [Engine::Stored, Engine::Owned] {
        block_on(suite::all(async || {
            let twin = Twin::reliable(engine);
            (Box::new(twin.clone()) as Box<dyn Ledger>, Box::new(twin) as Box<dyn Ledger>)
        }));
    }
}

/// Polls once.
fn poll<T>(future: &mut BoxFuture<'_, T>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => Some(value),
        std::task::Poll::Pending => None,
    }
}

fn segment() -> Segment {
    Segment { stream: Stream { home: 0, number: 0 }, epoch: 1, number: 0 }
}

fn rows(n: u64) -> Arc<[Row]> {
    [Row { segment: segment(), n, part: 0, parts: 1, data: Bytes::from_static(b"row") }].into()
}

fn owner() -> Owner {
    Owner { home: 0, node: "a".into(), incarnation: 1, epoch: 1 }
}

#[test]
fn a_driven_twin_waits_for_its_scheduler_and_meets_a_quorum() {
    let faults = Faults { lost: 0, unknown: 0, ..Faults::default() };
    for seed in 0..200 {
        let twin = Twin::driven(Engine::Stored, seed, faults);
        let mut insert = twin.insert(&owner(), rows(0));
        assert!(poll(&mut insert).is_none());
        let answer = loop {
            if let Some(answer) = poll(&mut insert) {
                break answer;
            }
            assert!(twin.deliver());
        };
        assert_eq!(answer.unwrap(), Inserted::Stored);
        let mut read = twin.read(segment(), (0, 0), 1 << 20);
        let found = loop {
            if let Some(found) = poll(&mut read) {
                break found.unwrap();
            }
            assert!(twin.deliver());
        };
        assert_eq!(found.rows, rows(0).to_vec(), "seed {seed}: a quorum reads what a quorum has");
    }
}

/// Faults that many seeds show: a call without an answer that was carried out, one that was not, a compare-and-set that
/// applies after a read that did not show it.
#[test]
fn faults_occur() {
    let (mut stored, mut lost, mut late) = (0, 0, 0);
    for seed in 0..2_000 {
        let twin = Twin::driven(Engine::Stored, seed, Faults { lost: 400, ..Faults::default() });
        drop(twin.insert(&owner(), rows(0)));
        while twin.deliver() {}
        match twin.rows().len() {
            0 => lost += 1,
            _ => stored += 1,
        }

        let twin = Twin::driven(Engine::Stored, seed, Faults { unknown: 300, ..Faults::default() });
        let view = StoredView { cluster: 1, version: 1, document: Bytes::new(), owners: vec![owner()] };
        let mut swap = twin.swap(&view);
        if poll(&mut swap).is_some_and(|answer| answer.is_err()) {
            let mut read = twin.view();
            let shown = loop {
                if let Some(shown) = poll(&mut read) {
                    break shown;
                }
                assert!(twin.deliver());
            };
            if shown.is_ok_and(|shown| shown.is_none()) {
                twin.calm();
                late += twin.history().len();
            }
        }
    }
    assert!(stored > 10 && lost > 10 && late > 10, "{stored} {lost} {late}");
}

#[test]
fn a_seed_replays() {
    let run = |seed| {
        let twin = Twin::driven(Engine::Stored, seed, Faults::default());
        let mut calls: Vec<_> = (0..20).map(|n| twin.insert(&owner(), rows(n))).collect();
        let mut answered = Vec::new();
        while twin.deliver() {
            for (index, call) in calls.iter_mut().enumerate() {
                if !answered.contains(&index) && poll(call).is_some() {
                    answered.push(index);
                }
            }
        }
        answered
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}
