//! State that outlives a killed process: the places of members, attempts and pauses.

use groups::ClaimedPlace;

use super::*;

const LEASE: Duration = Duration::from_secs(20);

impl Fixture {
    /// As after a kill: what was not written is forgotten.
    async fn killed(self) -> Self {
        let Self { log, state, groups } = self;
        for live in groups.table.all() {
            live.end();
        }
        drop(groups);
        let groups = load(&log, &state).await;
        Self { log, state, groups }
    }

    /// A member comes back, and says that it works on these. Which it does not have.
    async fn back(&self, name: &str, works_on: &[Delivery]) -> (LiveMember, Ranges) {
        let outstanding: Vec<ClaimedPlace> =
            works_on.iter().map(|delivery| Some((delivery.partition, delivery.record.offset))).collect();
        let joining = Joining { outstanding: &outstanding, ..joining(name, LEASE) };
        let mut member = self.groups.open("g", joining).expect("a member");
        let refused = member.resume(outstanding.len()).await.expect("a member");
        (member, refused)
    }

    /// Two members, each with a part of what ten devices sent.
    async fn two_at_work(&self, group: GroupId) -> [Vec<Delivery>; 2] {
        let [mut a, mut b] = ["a", "b"].map(|name| self.open("g", name, LEASE));
        (0..10).for_each(|device| self.append(group, device, &format!("{device}")));
        let (of_a, of_b) = (self.devices_of(&a), self.devices_of(&b));
        let (has_a, has_b) = (some(&mut a, of_a).await, some(&mut b, of_b).await);
        assert_eq!(has_a.len() + has_b.len(), 10);
        assert!(!has_a.is_empty() && !has_b.is_empty(), "each has some");
        // So that it is on disk who has what.
        tokio::time::sleep(Duration::from_secs(1)).await;
        [has_a, has_b]
    }

    /// Returns how many of ten devices are in partitions of the member.
    fn devices_of(&self, member: &LiveMember) -> usize {
        let own: Vec<Partition> = member.live.with(|inner| inner.logic.partitions(member.key).collect());
        let partition = |device: usize| Partition::of(Some(&format!("device-{device}")), "t");
        (0..10).filter(|&device| own.contains(&partition(device))).count()
    }
}

async fn nothing_more(member: &mut LiveMember) {
    let more = timeout(Duration::from_secs(1), messages(member)).await;
    assert!(more.is_err(), "{:?}", more.map(|more| texts(&more)));
}

/// The failure: whoever was first back got all, so that what the others worked on was begun a second time.
#[tokio::test(start_paused = true)]
async fn nobody_gets_what_a_member_works_on_over_a_kill() {
    for late in [false, true] {
        let fixture = Fixture::new(MemoryLogOptions { late, ..MemoryLogOptions::default() }).await;
        let group = fixture.create("g").await;
        let [has_a, has_b] = fixture.two_at_work(group).await;
        let fixture = fixture.killed().await;
        let (mut a, refused) = fixture.back("a", &has_a).await;
        assert!(a.is_resumed() && refused.is_empty(), "{refused:?}");
        nothing_more(&mut a).await;
        let (mut b, refused) = fixture.back("b", &has_b).await;
        assert!(b.is_resumed() && refused.is_empty(), "{refused:?}");
        nothing_more(&mut b).await;
        for (member, has) in [(&mut a, &has_a), (&mut b, &has_b)] {
            let all = ids(1, has.len() as u64);
            member.acknowledge(&all).expect("a member");
            assert_eq!(answer(member).await, (all, Ranges::default()));
        }
        assert_eq!(fixture.groups.get("g").expect("a group").status.lag_messages, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_that_does_not_come_back_within_its_lease_has_lost_its_place() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let [has_a, has_b] = fixture.two_at_work(group).await;
    let fixture = fixture.killed().await;
    let (mut a, _) = fixture.back("a", &has_a).await;
    let got = some(&mut a, has_b.len()).await;
    assert_eq!(got.len(), has_b.len());
    let (b, refused) = fixture.back("b", &has_b).await;
    assert!(!b.is_resumed());
    assert_eq!(refused, ids(1, has_b.len() as u64));
}

/// The failure: what is not a member's, or is not there, is taken for what it works on, and others do not get it.
#[tokio::test(start_paused = true)]
async fn what_a_member_cannot_have_is_not_believed() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let other = fixture.create("other").await;
    let [has_a, has_b] = fixture.two_at_work(group).await;
    let own = &has_a[0];
    fixture.log.append(own.partition, &Arc::from([other]), &own.record.message, None).expect("room");
    let end = fixture.log.bounds(own.partition).end;
    let fixture = fixture.killed().await;
    let others: Vec<ClaimedPlace> = vec![
        Some((own.partition, own.record.offset)),
        Some((own.partition, own.record.offset)),
        Some((has_b[0].partition, has_b[0].record.offset)),
        Some((own.partition, end - 1)),
        Some((own.partition, end)),
        Some((own.partition, u64::MAX)),
        None,
    ];
    let mut a =
        fixture.groups.open("g", Joining { outstanding: &others, ..joining("a", LEASE) }).expect("a member");
    assert_eq!(a.resume(others.len()).await.expect("a member"), ids(2, 7));
    let again = some(&mut a, has_a.len() - 1).await;
    assert_eq!(again.len(), has_a.len() - 1, "the rest of its own");
    assert!(again.iter().all(|delivery| delivery.attempt == 1), "a restart is no failed attempt");
    a.acknowledge(&ids(1, 7)).expect("a member");
    assert_eq!(answer(&mut a).await, (ids(1, 1), ids(2, 7)));
    let (mut b, refused) = fixture.back("b", &has_b).await;
    assert!(refused.is_empty());
    nothing_more(&mut b).await;
}

/// The failure: who fetches without a stream had FENCED for all that it finished over a restart, and got it again.
#[tokio::test(start_paused = true)]
async fn what_was_fetched_before_a_kill_is_acknowledged_after_it() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    (0..3).for_each(|n| fixture.append(group, 1, &format!("{n}")));
    let fetched = fixture.groups.fetch("g", joining("f", LEASE), ROOM, LONG).await.expect("messages");
    let names: Vec<_> = fetched.deliveries.iter().map(|delivery| delivery.ack_id).collect();
    assert_eq!(names.len(), 3);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let fixture = fixture.killed().await;
    let results = fixture.groups.acknowledge("g", &names[..2]).await.expect("answers");
    assert_eq!(results, [AckResult::Ok; 2]);
    let again = fixture.groups.fetch("g", joining("f", LEASE), ROOM, Duration::ZERO).await.expect("messages");
    assert_eq!(texts(&again.deliveries), ["2"]);
    let results = fixture.groups.acknowledge("g", &names).await.expect("answers");
    assert_eq!(results, [AckResult::Ok; 3], "it is with the same member");
    let fixture = fixture.killed().await;
    assert_eq!(fixture.groups.get("g").expect("a group").status.lag_messages, 0);
}

/// The failure: a connection that is cut four times made a dead letter of work in progress.
#[tokio::test(start_paused = true)]
async fn a_reconnect_within_the_lease_is_no_attempt() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    fixture.append(group, 1, "work");
    for _ in 0..5 {
        let mut member = fixture.open("g", "a", LEASE);
        assert_eq!(messages(&mut member).await[0].attempt, 1);
    }
    let mut member = fixture.open("g", "a", LEASE);
    let first = messages(&mut member).await;
    drop(member);
    // The delivery counts as an attempt once the lease is over.
    let mut other = fixture.open("g", "b", LEASE);
    let second = messages(&mut other).await;
    assert_eq!((first[0].attempt, second[0].attempt), (1, 2));
    let status = fixture.groups.get("g").expect("a group").status;
    assert_eq!(status.dead_letters, 0);
}

/// The failure: a gateway that was killed forgot how often a message had failed, and when it was to come again.
#[tokio::test(start_paused = true)]
async fn attempts_and_the_pause_of_a_nack_outlive_a_kill() {
    let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    fixture.append(group, 1, "bad");
    for attempt in 1..=3 {
        let (mut member, _) = fixture.back("a", &[]).await;
        let began = clock();
        let taken = messages(&mut member).await;
        assert_eq!(taken[0].attempt, attempt);
        assert!(attempt == 1 || clock().0 - began.0 > 5_000, "it waits for the rest of its pause");
        let nack = Nack { delay: Some(Duration::from_secs(10)), ..Nack::default() };
        member.nack(&ids(taken[0].id, taken[0].id), &nack).expect("a member");
        tokio::time::sleep(Duration::from_secs(1)).await;
        drop(member);
        fixture = fixture.killed().await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(fixture.groups.get("g").expect("a group").status.dead_letters, 1, "after three");
}
