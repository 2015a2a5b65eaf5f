//! Messages that are given up, and put back.

use std::sync::atomic::Ordering::Relaxed;

use super::{fetching::Slow, *};

impl Fixture {
    /// Waits until the group has so many letters.
    async fn letters(&self, count: usize) -> Vec<DeadLetter> {
        let there = async {
            loop {
                let letters = self.groups.dead_letters("g", &Scope::ALL, None, 100).await.expect("letters");
                if letters.len() == count {
                    return letters;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(LONG, there).await.expect("in time")
    }
}

fn dead() -> Nack {
    Nack { dead_letter: true, ..Nack::default() }
}

/// The failure: a letter that is put back is as old as it was, and the group's unread messages before it were given up with
/// what is older than it may be.
#[tokio::test(start_paused = true)]
async fn an_old_letter_put_back_takes_nothing_with_it() {
    // The log counts at every hundredth message: at the letter, or not.
    for (messages, bytes) in [(98, 0), (5, 0), (5, 1_000_000)] {
        let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
        let keeps = |wanted: &mut Definition| {
            (wanted.retention_age, wanted.retention_bytes) = (60_000, bytes);
        };
        let group = keeping(&fixture, keeps).await;
        let mut member = fixture.open("g", "a", Duration::ZERO);
        fixture.append(group, 1, "letter");
        some(&mut member, 1).await;
        member.nack(&ids(1, 1), &dead()).expect("a member");
        fixture.letters(1).await;
        drop(member);
        tokio::time::sleep(Duration::from_secs(100)).await;
        for number in 0..messages {
            fixture.append(group, 1, &number.to_string());
        }
        if bytes == 0 {
            fixture.groups.stop().await;
            fixture.groups = load(&fixture.log, &fixture.state).await;
        }
        assert_eq!(fixture.groups.requeue("g", &[], &Scope::ALL).await.expect("requeued"), 1);
        fixture.groups.upkeep.keep_up().await;
        let status = fixture.groups.get("g").expect("a group").status;
        assert_eq!((status.lost, status.lag_messages), (0, messages + 1), "{messages} {bytes}");
        // The letter goes together with the messages before it, and messages after those stay.
        for text in ["old by then", "new"] {
            tokio::time::sleep(Duration::from_secs(100)).await;
            fixture.append(group, 1, text);
        }
        fixture.groups.upkeep.keep_up().await;
        let status = fixture.groups.get("g").expect("a group").status;
        assert_eq!((status.lost, status.lag_messages), (messages + 1, 2), "{messages} {bytes}");
    }
}

/// The failure: after a restart a new letter had the number of one that was removed, and a call about that one, made again, hit it.
#[tokio::test(start_paused = true)]
async fn the_number_of_a_letter_is_not_used_again_after_a_restart() {
    let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    for expected in 1..=3 {
        let mut member = fixture.open("g", "a", Duration::ZERO);
        fixture.append(group, 1, "x");
        some(&mut member, 1).await;
        member.nack(&ids(1, 1), &dead()).expect("a member");
        assert_eq!(fixture.letters(1).await[0].id, expected);
        assert_eq!(fixture.groups.purge("g", &[expected], &Scope::ALL).await.expect("purged"), 1);
        drop(member);
        fixture.groups.stop().await;
        fixture.groups = load(&fixture.log, &fixture.state).await;
        assert_eq!(fixture.groups.purge("g", &[expected], &Scope::ALL).await.expect("made again"), 0);
    }
}

/// The failure: each dead letter that could not be read held up all acknowledgements of its group for a second.
#[tokio::test(start_paused = true)]
async fn letters_that_cannot_be_read_hold_up_no_acknowledgement() {
    let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
    let log = Slow::new(&fixture.log);
    fixture.groups.stop().await;
    fixture.groups = load_from(Arc::clone(&log) as _, &fixture.state).await;
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    for device in 0..10 {
        fixture.append(group, device, "x");
    }
    some(&mut member, 10).await;
    log.fails.store(true, Relaxed);
    member.nack(&ids(1, 2), &dead()).expect("a member");
    // In virtual time: long enough for a write, and too short for a try to read again.
    tokio::time::sleep(Duration::from_millis(10)).await;
    member.acknowledge(&ids(3, 10)).expect("a member");
    let answered = timeout(Duration::from_millis(500), answer(&mut member)).await;
    assert_eq!(answered.expect("without the letters").0, ids(3, 10));
    assert!(fixture.letters(0).await.is_empty());
    log.fails.store(false, Relaxed);
    assert_eq!(fixture.letters(2).await.len(), 2);
}

/// The failure: while the disk takes no changes all that is given up is copied into memory, as much as the group has to read.
#[tokio::test(start_paused = true)]
async fn letters_that_cannot_be_written_stop_the_reading() {
    const SENT: usize = 10_000;
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    for number in 0..SENT {
        fixture.append(group, 1, &number.to_string());
    }
    fixture.state.fail(true);
    let mut given_up = 0;
    let mut give_up = async |member: &mut LiveMember| {
        while let Ok(got) = timeout(Duration::from_secs(20), messages(member)).await {
            let first = given_up as u64 + 1;
            given_up += got.len();
            member.nack(&ids(first, given_up as u64), &dead()).expect("a member");
        }
        given_up
    };
    let while_it_fails = give_up(&mut member).await;
    // One credit of the member, which had begun.
    assert!(while_it_fails <= 2_000, "{while_it_fails}");
    fixture.state.fail(false);
    assert_eq!(give_up(&mut member).await, SENT);
}
