//! Groups that have nothing to do beside busy ones, and groups at their bounds.

use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    task::{Context, Wake, Waker},
};

use super::{fetching::Slow, *};

impl Fixture {
    /// Partitions in which the log still has something.
    fn kept(&self) -> usize {
        let is_there = |partition: &Partition| {
            let bounds = self.log.bounds(*partition);
            bounds.start < bounds.end
        };
        Partition::all().filter(is_there).count()
    }

    /// Lets the writers of groups run, and then a round of the upkeep.
    async fn rounds(&self, rounds: usize) {
        for _ in 0..rounds {
            self.groups.upkeep.keep_up().await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

async fn acknowledge_all(member: &mut LiveMember, count: u64) {
    let got = some(member, usize::try_from(count).expect("fits")).await;
    let (first, last) = (got[0].id, got[got.len() - 1].id);
    member.acknowledge(&ids(first, last)).expect("a member");
    answer(member).await;
}

/// Before, a group passed over what is not its own at 256 records a round, and the log filled behind it until everybody's
/// messages were refused.
#[tokio::test(start_paused = true)]
async fn a_quiet_group_neither_keeps_nor_reads_what_others_get() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let slow = Slow::new(&fixture.log);
    let groups = load_from(Arc::clone(&slow) as _, &fixture.state).await;
    let fixture = Fixture { groups, ..fixture };
    let (quiet, busy) = (fixture.create("quiet").await, fixture.create("busy").await);
    let (mut of_quiet, mut of_busy) =
        (fixture.open("quiet", "a", Duration::ZERO), fixture.open("busy", "b", Duration::ZERO));
    fixture.append(quiet, 1, "own");
    acknowledge_all(&mut of_quiet, 1).await;
    for round in 0..20 {
        for device in 0..100 {
            fixture.append(busy, device, &round.to_string());
        }
        acknowledge_all(&mut of_busy, 100).await;
    }
    let reads = slow.reads.load(SeqCst);
    fixture.rounds(2).await;
    assert_eq!(fixture.kept(), 0, "nothing is kept for a group that has everything");
    assert_eq!(slow.reads.load(SeqCst), reads, "and nothing is read for it");
    // Later messages still reach the group.
    fixture.append(quiet, 7, "later");
    assert_eq!(texts(&some(&mut of_quiet, 1).await), ["later"]);
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_group_keeps_its_own_and_nothing_else() {
    let _ = clock();
    let log = Arc::new(MemoryLog::new(MemoryLogOptions::default()));
    let (state, marker) = (Arc::new(MemoryRecords::new()), Arc::<Everything>::default());
    let groups = load_with(&log, &state, Arc::clone(&marker), 200_000).await;
    let fixture = Fixture { log, state, groups };
    let (left, busy) = (fixture.create("left").await, fixture.create("busy").await);
    for number in 0..50 {
        fixture.append(left, 1, &number.to_string());
    }
    let mut member = fixture.open("busy", "b", Duration::ZERO);
    let text = "x".repeat(1_000);
    for _ in 0..10 {
        for device in 2..102 {
            fixture.append(busy, device, &text);
        }
        acknowledge_all(&mut member, 100).await;
        fixture.rounds(2).await;
    }
    let status = fixture.groups.get("left").expect("a group").status;
    assert_eq!((status.lag_messages, status.lost), (50, 0));
    assert!(marker.full.lock().is_empty() && marker.skipped.lock().is_empty());
    let got: Vec<String> = texts(&some(&mut fixture.open("left", "a", Duration::ZERO), 50).await);
    assert_eq!(got.len(), 50);
}

/// Before, it was looked at once a second.
#[tokio::test(start_paused = true)]
async fn a_group_that_refuses_is_full_with_the_commit_that_fills_it() {
    let _ = clock();
    let log = Arc::new(MemoryLog::new(MemoryLogOptions::default()));
    let (state, marker) = (Arc::new(MemoryRecords::new()), Arc::<Everything>::default());
    let groups = load_with(&log, &state, Arc::clone(&marker), u64::MAX).await;
    let fixture = Fixture { log, state, groups };
    let group = keeping(&fixture, |wanted| {
        (wanted.retention_bytes, wanted.when_full) = (20_000, RetentionPolicy::Refuse);
    })
    .await;
    let text = "x".repeat(1_000);
    let mut taken = 0;
    while marker.full.lock().is_empty() {
        fixture.append(group, 1, &text);
        taken += 1;
        assert!(taken < 100, "it is full some time");
    }
    let held = fixture.groups.get("g").expect("a group").status.lag_bytes;
    assert!((20_000..22_000).contains(&held), "{held}");
    let mut member = fixture.open("g", "a", Duration::ZERO);
    acknowledge_all(&mut member, taken).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert!(marker.full.lock().is_empty(), "with what was acknowledged there is room at once");
}

/// Before, it was looked at once a second.
#[tokio::test(start_paused = true)]
async fn a_group_that_drops_keeps_within_a_part_of_its_bound() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = keeping(&fixture, |wanted| wanted.retention_bytes = 640_000).await;
    let text = "x".repeat(1_000);
    for number in 0..3_000 {
        fixture.append(group, 1, &text);
        tokio::time::sleep(Duration::from_millis(5)).await;
        let held = fixture.groups.get("g").expect("a group").status.lag_bytes;
        assert!(held <= 640_000 + 640_000 / 32, "{held} after {number}");
    }
    let status = fixture.groups.get("g").expect("a group").status;
    assert!(status.lag_bytes > 560_000, "no more goes than must: {status:?}");
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// Before, a stream was not woken for an answer for which nothing is written: it came with the next message, or never.
#[tokio::test(start_paused = true)]
async fn acknowledgements_of_what_is_void_or_never_was_are_answered() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    fixture.append(group, 1, "1");
    messages(&mut member).await;
    fixture.groups.seek("g", &GroupStart::Latest, &Scope::ALL).await.expect("moved");
    let wakes = Arc::<Wakes>::default();
    let waker = Waker::from(Arc::clone(&wakes));
    let mut context = Context::from_waker(&waker);
    // The news of the seek.
    while member.poll_next(&mut context, ROOM).is_ready() {}
    for id in [1, 77] {
        let before = wakes.0.load(SeqCst);
        member.acknowledge(&ids(id, id)).expect("a member");
        assert!(wakes.0.load(SeqCst) > before, "the stream is woken for the answer to {id}");
        assert_eq!(answer(&mut member).await, (Ranges::default(), ids(id, id)));
        while member.poll_next(&mut context, ROOM).is_ready() {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_longer_than_its_lease_keeps_its_member() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let fetch =
        || fixture.groups.fetch("g", joining("a", Duration::from_secs(1)), ROOM, Duration::from_secs(10));
    let begun = Instant::now();
    let nothing = fetch().await.expect("the member stays");
    assert!(nothing.deliveries.is_empty());
    assert_eq!(begun.elapsed(), Duration::from_secs(10), "it ends at its time");
    let (got, ()) = tokio::join!(fetch(), async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        fixture.append(group, 1, "meanwhile");
    });
    assert_eq!(texts(&got.expect("the member stays").deliveries), ["meanwhile"]);
}
