//! Groups over the engines in memory, in virtual time.

mod changing;
mod fetching;
mod letters;
mod quiet;
mod resuming;
mod scope;
mod succession;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, LazyLock},
    time::Duration,
};

use access::backends::Scope;
use bytes::Bytes;
use gateway_core::{ClientId, GroupId, Message, Origin, OriginKind, Partition, Timestamp};
use groups::{AckResult, Credit, IdRange, Nack, Ranges, Room};
use parking_lot::Mutex;
use store::{
    LogRead, MemoryLog, MemoryLogOptions, MemoryRecords, PartitionBounds, PartitionedLog, ReadLimit,
    StoreError,
};
use tokio::time::{Instant, timeout};

use super::{records::DEFINITION, start::token, state::GroupState, *};

static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
const ROOM: Room = Room { messages: 100, bytes: 1 << 20 };
const LONG: Duration = Duration::from_secs(1_000);

fn clock() -> Timestamp {
    let begin = *BEGIN;
    let elapsed = Instant::now().saturating_duration_since(begin);
    Timestamp(1_000_000 + u64::try_from(elapsed.as_millis()).expect("fits"))
}

thread_local! {
    /// Memory that members of this test have set aside; its runtime has one thread.
    static HOLDS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Marks nothing: the tests append with the group's number.
#[derive(Default)]
struct Everything {
    full: Mutex<BTreeSet<GroupId>>,
    skipped: Mutex<BTreeSet<GroupId>>,
    /// The groups for which it was told to mark.
    kept: Mutex<Vec<GroupId>>,
    replaced: Mutex<Vec<(GroupId, GroupId, GroupMessageFilter)>>,
}

impl Marker for Everything {
    fn keep_for(&self, group: GroupId, _filter: &GroupMessageFilter) {
        self.kept.lock().push(group);
    }
    fn replace(&self, old: GroupId, new: GroupId, filter: &GroupMessageFilter) {
        self.replaced.lock().push((old, new, filter.clone()));
    }
    fn keep_no_more_for(&self, _group: GroupId) {}
    fn set_intake(&self, group: GroupId, intake: Intake) {
        let mut groups = self.full.lock();
        if intake == Intake::Refuses {
            groups.insert(group)
        } else {
            groups.remove(&group)
        };
        let mut skipped = self.skipped.lock();
        if intake == Intake::Skips {
            skipped.insert(group)
        } else {
            skipped.remove(&group)
        };
    }
    fn matcher(&self, _filter: &GroupMessageFilter) -> Arc<MessageFilter> {
        Arc::new(|message| !message.topic.starts_with("other/"))
    }
    fn hold(&self, bytes: usize) -> bool {
        HOLDS.with(|holds| {
            let held = holds.get() + bytes;
            let fits = held <= 1 << 30;
            if fits {
                holds.set(held);
            }
            fits
        })
    }
    fn release(&self, bytes: usize) {
        HOLDS.with(|holds| holds.set(holds.get() - bytes));
    }
}

struct Fixture {
    log: Arc<MemoryLog>,
    state: Arc<MemoryRecords>,
    groups: Arc<ConsumerGroups>,
}

impl Fixture {
    async fn new(options: MemoryLogOptions) -> Self {
        let _ = clock();
        let (log, state) = (Arc::new(MemoryLog::new(options)), Arc::new(MemoryRecords::new()));
        let groups = load(&log, &state).await;
        Self { log, state, groups }
    }

    async fn create(&self, name: &str) -> GroupId {
        let (info, _) = self.groups.create(definition(name), &GroupStart::Latest).await.expect("a group");
        info.id
    }

    fn append(&self, group: GroupId, device: usize, text: &str) {
        let id = ClientId::new(&format!("device-{device}"));
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 0 };
        let message = Message::new("t", text.as_bytes(), clock(), origin);
        let partition = Partition::of(Some(id.as_str()), "t");
        self.log.append(partition, &Arc::from([group]), message.share(), None).expect("room");
    }

    fn open(&self, group: &str, name: &str, lease: Duration) -> LiveMember {
        self.groups.open(group, joining(name, lease)).expect("a member")
    }
}

async fn load(log: &Arc<MemoryLog>, state: &Arc<MemoryRecords>) -> Arc<ConsumerGroups> {
    load_with(log, state, Arc::default(), u64::MAX).await
}

async fn load_with(
    log: &Arc<MemoryLog>,
    state: &Arc<MemoryRecords>,
    marker: Arc<Everything>,
    max_log_bytes: u64,
) -> Arc<ConsumerGroups> {
    let options = GroupsOptions { max_log_bytes, ..options() };
    ConsumerGroups::load(Arc::clone(log) as _, Arc::clone(state) as _, marker, options).await.expect("loads")
}

async fn load_from(log: Arc<dyn PartitionedLog>, state: &Arc<MemoryRecords>) -> Arc<ConsumerGroups> {
    let marker = Arc::<Everything>::default();
    ConsumerGroups::load(log, Arc::clone(state) as _, marker, options()).await.expect("loads")
}

fn options() -> GroupsOptions {
    GroupsOptions {
        max_groups: 3,
        max_dead_letters: 2,
        max_dead_letter_bytes: 1 << 20,
        max_log_bytes: u64::MAX,
        // The tests call it.
        upkeep_interval: Duration::from_secs(1_000_000),
        clock,
    }
}

fn definition(name: &str) -> Definition {
    Definition {
        name: name.to_owned(),
        filter: GroupMessageFilter::default(),
        order: KeptOrder::Device,
        ack_deadline: 30_000,
        max_attempts: 3,
        min_backoff: 1_000,
        max_backoff: 10_000,
        retention_age: 0,
        retention_bytes: 0,
        replay_age: 0,
        when_full: RetentionPolicy::DropOldest,
        paused: false,
        labels: BTreeMap::new(),
    }
}

fn with_filter(topic: &str) -> Definition {
    let filter = GroupMessageFilter { topics: vec![topic.to_owned()], ..GroupMessageFilter::default() };
    Definition { filter, ..definition("g") }
}

fn joining(name: &str, lease: Duration) -> Joining<'_> {
    Joining { name, lease, credit: Credit::default(), scope: Scope::ALL, outstanding: &[] }
}

/// The next messages, at least one.
async fn messages(member: &mut LiveMember) -> Vec<Delivery> {
    loop {
        let batch = timeout(LONG, member.next(ROOM)).await.expect("in time").expect("a member");
        if !batch.deliveries.is_empty() {
            return batch.deliveries;
        }
    }
}

async fn some(member: &mut LiveMember, count: usize) -> Vec<Delivery> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(messages(member).await);
    }
    all
}

/// The next answer: what is fine, and what is lost.
async fn answer(member: &mut LiveMember) -> (Ranges, Ranges) {
    loop {
        let batch = timeout(LONG, member.next(ROOM)).await.expect("in time").expect("a member");
        if let Some(answer) = batch.answers.into_iter().next() {
            return (answer.ok, answer.lost);
        }
    }
}

fn texts(deliveries: &[Delivery]) -> Vec<String> {
    let text = |delivery: &Delivery| String::from_utf8_lossy(&delivery.record.message.payload).into_owned();
    deliveries.iter().map(text).collect()
}

fn ids(first: u64, last: u64) -> Ranges {
    Ranges::of([IdRange { first, last }])
}

use groups::Delivery;

#[tokio::test(start_paused = true)]
async fn who_keeps_up_gets_messages_in_order_and_settles_them() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    for text in ["1", "2", "3"] {
        fixture.append(group, 1, text);
    }
    assert_eq!(texts(&some(&mut member, 3).await), ["1", "2", "3"]);
    assert_eq!(fixture.groups.get("g").expect("a group").status.lag_messages, 3);
    member.acknowledge(&ids(1, 4)).expect("a member");
    assert_eq!(answer(&mut member).await, (ids(1, 3), ids(4, 4)));
    let status = fixture.groups.get("g").expect("a group").status;
    assert_eq!((status.lag_messages, status.outstanding, status.members), (0, 0, 1));
}

#[tokio::test(start_paused = true)]
async fn an_ack_is_answered_only_once_it_is_written() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    fixture.append(group, 1, "1");
    let taken = messages(&mut member).await;
    fixture.state.hold(true);
    member.acknowledge(&ids(1, 1)).expect("a member");
    assert!(timeout(Duration::from_secs(5), answer(&mut member)).await.is_err(), "not on disk yet");
    let names = [taken[0].ack_id];
    let again = fixture.groups.acknowledge("g", &names);
    assert!(timeout(Duration::from_secs(5), again).await.is_err(), "nor for who says it again");
    fixture.state.hold(false);
    fixture.state.settle(usize::MAX);
    assert_eq!(answer(&mut member).await.0, ids(1, 1));
    let again = fixture.groups.acknowledge("g", &[taken[0].ack_id]).await.expect("a group");
    assert_eq!(again, [AckResult::Ok]);
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_fails_delays_answers_and_loses_none() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    fixture.append(group, 1, "1");
    messages(&mut member).await;
    fixture.state.fail(true);
    member.acknowledge(&ids(1, 1)).expect("a member");
    assert!(timeout(Duration::from_secs(20), answer(&mut member)).await.is_err());
    fixture.state.fail(false);
    assert_eq!(answer(&mut member).await.0, ids(1, 1));
}

#[tokio::test(start_paused = true)]
async fn what_a_member_had_that_is_gone_another_gets() {
    let fixture = Fixture::new(MemoryLogOptions { late: true, ..MemoryLogOptions::default() }).await;
    let group = fixture.create("g").await;
    let (mut a, mut b) = (fixture.open("g", "a", Duration::ZERO), fixture.open("g", "b", Duration::ZERO));
    for device in 0..64 {
        fixture.append(group, device, &device.to_string());
    }
    let (of_a, of_b) = (messages(&mut a).await, messages(&mut b).await);
    assert_eq!(of_a.len() + of_b.len(), 64);
    assert!(!of_a.is_empty() && !of_b.is_empty());
    b.acknowledge(&ids(1, 64)).expect("a member");
    drop(a);
    let again = some(&mut b, of_a.len()).await;
    let sorted = |deliveries: &[Delivery]| texts(deliveries).into_iter().collect::<BTreeSet<_>>();
    assert_eq!(sorted(&again), sorted(&of_a));
    assert!(again.iter().all(|delivery| delivery.attempt == 2));
}

#[tokio::test(start_paused = true)]
async fn a_member_that_comes_back_in_time_keeps_what_it_had() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let lease = Duration::from_secs(10);
    let mut a = fixture.open("g", "a", lease);
    let mut b = fixture.open("g", "b", lease);
    for device in 0..64 {
        fixture.append(group, device, &device.to_string());
    }
    let (of_a, of_b) = (messages(&mut a).await.len(), messages(&mut b).await.len());
    drop(a);
    assert!(timeout(Duration::from_secs(5), messages(&mut b)).await.is_err(), "the lease lasts");
    let mut a = fixture.open("g", "a", lease);
    assert!(a.is_resumed());
    assert_eq!(some(&mut a, of_a).await.len(), of_a);
    let another = fixture.open("g", "a", lease);
    let fenced = timeout(LONG, a.next(ROOM)).await.expect("in time").expect_err("fenced");
    assert_eq!(fenced, MemberEnd::Fenced);
    drop((a, another));
    b.acknowledge(&ids(1, of_b as u64)).expect("a member");
    assert_eq!(some(&mut b, of_a).await.len(), of_a, "the lease is over");
}

#[tokio::test(start_paused = true)]
async fn what_is_not_settled_in_time_comes_again_then_is_given_up() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    fixture.append(group, 1, "1");
    fixture.append(group, 1, "2");
    let first = some(&mut member, 2).await;
    let again = messages(&mut member).await;
    assert_eq!((texts(&again), again[0].attempt), (vec!["1".to_owned()], 2), "alone");
    assert!(clock() > first[0].deadline);
    let late = fixture.groups.acknowledge("g", &[first[0].ack_id]).await.expect("a group");
    assert_eq!(late, [AckResult::Fenced]);
    member.acknowledge(&ids(2, 2)).expect("a member");
    let nack = Nack { reason: "bad".to_owned(), dead_letter: true, ..Nack::default() };
    member.nack(&ids(3, 3), &nack).expect("a member");
    assert_eq!(texts(&messages(&mut member).await), ["2"]);
    let letters = async {
        loop {
            let letters = fixture.groups.dead_letters("g", &Scope::ALL, None, 10).await.expect("letters");
            if let [letter] = letters.as_slice() {
                return letter.clone();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let letter = timeout(LONG, letters).await.expect("in time");
    assert_eq!((&*letter.message.payload, letter.attempts, &*letter.reason), (&b"1"[..], 2, "bad"));
    assert_eq!(fixture.groups.requeue("g", &[letter.id, 99], &Scope::ALL).await.expect("requeued"), 1);
    let again = messages(&mut member).await;
    assert_eq!((texts(&again), again[0].attempt), (vec!["1".to_owned()], 1));
    assert_eq!(fixture.groups.requeue("g", &[letter.id], &Scope::ALL).await.expect("idempotent"), 0);
}

/// Rules out that backends which ask twice, or give up, make two messages of one letter.
#[tokio::test(start_paused = true)]
async fn a_letter_is_put_back_once_by_two_calls_and_by_one_that_is_given_up() {
    let fixture = Fixture::new(MemoryLogOptions { held: true, ..MemoryLogOptions::default() }).await;
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    fixture.append(group, 1, "1");
    fixture.log.settle_all();
    messages(&mut member).await;
    member.nack(&ids(1, 1), &Nack { dead_letter: true, ..Nack::default() }).expect("a member");
    let there = async {
        while fixture.groups.get("g").expect("a group").status.dead_letters == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, there).await.expect("a letter");
    let given_up = timeout(Duration::from_secs(5), fixture.groups.requeue("g", &[], &Scope::ALL));
    assert!(given_up.await.is_err(), "the log has not written it");
    assert_eq!(fixture.log.waiting(), 1);
    assert_eq!(
        fixture.groups.requeue("g", &[], &Scope::ALL).await.expect("a group"),
        0,
        "the other call does it"
    );
    assert_eq!(fixture.log.settle_all(), 1);
    assert_eq!(texts(&messages(&mut member).await), ["1"]);
    let gone = async {
        while fixture.groups.get("g").expect("a group").status.dead_letters > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, gone).await.expect("the letter went although nobody waits");
    assert_eq!(fixture.log.waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn after_a_restart_only_what_was_not_answered_comes() {
    let fixture = Fixture::new(MemoryLogOptions { late: true, ..MemoryLogOptions::default() }).await;
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    for text in ["1", "2", "3", "4"] {
        fixture.append(group, 1, text);
    }
    some(&mut member, 4).await;
    member.acknowledge(&ids(2, 3)).expect("a member");
    answer(&mut member).await;
    fixture.groups.stop().await;
    drop(member);
    let groups = load(&fixture.log, &fixture.state).await;
    let mut member = groups.open("g", joining("a", Duration::ZERO)).expect("a member");
    assert_eq!(texts(&some(&mut member, 2).await), ["1", "4"]);
    let other = groups.create(definition("h"), &GroupStart::Latest).await.expect("a group").0;
    assert!(other.id > group, "a number is used once");
}

#[tokio::test(start_paused = true)]
async fn a_group_that_begins_in_the_past_gets_what_its_filter_wants() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    fixture.append(GroupId(77), 1, "before");
    let (info, _) = fixture.groups.create(definition("g"), &GroupStart::Earliest).await.expect("a group");
    fixture.append(GroupId(77), 1, "not its own");
    fixture.append(info.id, 1, "after");
    let mut member = fixture.open("g", "a", Duration::ZERO);
    assert_eq!(texts(&some(&mut member, 2).await), ["before", "after"]);
    let before = fixture.groups.seek("g", &GroupStart::Latest, &Scope::ALL).await.expect("moved");
    fixture.groups.seek("g", &GroupStart::Token(before), &Scope::ALL).await.expect("moved back");
    assert_eq!(texts(&some(&mut member, 2).await), ["before", "after"]);
    let bad = fixture.groups.seek("g", &GroupStart::Token("zz".to_owned()), &Scope::ALL).await;
    assert!(matches!(bad, Err(GroupError::BadToken)));
}

#[tokio::test(start_paused = true)]
async fn what_every_group_has_settled_is_trimmed_and_no_more() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    for text in ["1", "2", "3"] {
        fixture.append(group, 1, text);
    }
    let taken = some(&mut member, 3).await;
    member.acknowledge(&ids(1, 2)).expect("a member");
    answer(&mut member).await;
    fixture.groups.upkeep.keep_up().await;
    let start = fixture.log.bounds(taken[0].partition).start;
    assert_eq!(start, taken[2].record.offset);
    member.acknowledge(&ids(3, 3)).expect("a member");
    answer(&mut member).await;
    fixture.groups.upkeep.keep_up().await;
    assert!(fixture.log.bounds(taken[0].partition).start > taken[2].record.offset);
}

#[tokio::test(start_paused = true)]
async fn a_call_fetches_waits_and_acknowledges_by_name() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let lease = Duration::from_secs(10);
    let fetch = |wait| fixture.groups.fetch("g", joining("a", lease), ROOM, wait);
    let nothing = fetch(Duration::from_secs(3)).await.expect("a batch");
    assert!(nothing.is_empty());
    fixture.append(group, 1, "1");
    let batch = fetch(Duration::ZERO).await.expect("a batch");
    let batch = if batch.is_empty() { fetch(Duration::from_secs(1)).await.expect("a batch") } else { batch };
    assert_eq!(texts(&batch.deliveries), ["1"]);
    let results = fixture.groups.acknowledge("g", &[batch.deliveries[0].ack_id]).await.expect("a group");
    assert_eq!(results, [AckResult::Ok]);
    assert!(matches!(fixture.groups.get("none"), Err(GroupError::NotFound)));
}

#[tokio::test(start_paused = true)]
async fn a_group_that_is_deleted_ends_its_members_and_stays_away() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    let again = fixture.groups.create(definition("g"), &GroupStart::Latest).await;
    assert!(again.is_ok(), "the same again does no harm");
    let other = Definition { max_attempts: 7, ..definition("g") };
    let exists = fixture.groups.create(other.clone(), &GroupStart::Latest).await;
    assert!(matches!(exists, Err(GroupError::Exists)));
    let changed = fixture.groups.update(other, Some("1")).await.expect("changed");
    assert_eq!((changed.etag.as_str(), changed.definition.max_attempts), ("2", 7));
    let stale = fixture.groups.update(definition("g"), Some("1")).await;
    assert!(matches!(stale, Err(GroupError::EtagMismatch)));
    fixture.groups.delete("g").await.expect("deleted");
    let ended = timeout(LONG, member.next(ROOM)).await.expect("in time").expect_err("gone");
    assert_eq!(ended, MemberEnd::GroupGone);
    let groups = load(&fixture.log, &fixture.state).await;
    assert!(groups.list(None, 10).is_empty());
}

/// Answers that nobody takes filled the memory: nothing held up a member that only acknowledges.
#[tokio::test(start_paused = true)]
async fn a_member_that_takes_no_answers_is_not_heard_for_ever() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    fixture.create("group").await;
    let mut member = fixture.open("group", "a", Duration::ZERO);
    let sparse = Ranges::of((1..=10_000).map(|n| IdRange { first: 2 * n, last: 2 * n }));
    let mut heard = 0;
    while member.is_ahead().is_none() {
        member.acknowledge(&sparse).expect("a member");
        heard += 1;
        assert!(heard <= 7, "it is held up");
    }
    let answered = member.is_ahead().expect("held up");
    let batch = timeout(LONG, member.next(ROOM)).await.expect("in time").expect("a member");
    assert_eq!(batch.answers.iter().map(|answer| answer.lost.len()).sum::<usize>(), 10_000 * heard);
    timeout(LONG, answered.notified()).await.expect("it is told");
    assert!(member.is_ahead().is_none());
}

/// Two messages with a member, of which the first is acknowledged; and what they are called.
async fn half_settled(fixture: &Fixture) -> (LiveMember, Vec<Delivery>) {
    let group = fixture.create("g").await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    fixture.append(group, 1, "1");
    fixture.append(group, 1, "2");
    let taken = some(&mut member, 2).await;
    member.acknowledge(&ids(1, 1)).expect("a member");
    answer(&mut member).await;
    (member, taken)
}

#[tokio::test(start_paused = true)]
async fn on_a_full_disk_groups_start_and_refuse_acks_until_there_is_room() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    drop(half_settled(&fixture).await);
    fixture.groups.stop().await;
    fixture.state.fail(true);
    let groups = load(&fixture.log, &fixture.state).await;
    let mut member = groups.open("g", joining("a", Duration::ZERO)).expect("a member");
    let again = messages(&mut member).await;
    assert_eq!(texts(&again), ["2"]);
    let names = [again[0].ack_id];
    let refused = timeout(LONG, groups.acknowledge("g", &names)).await.expect("in time");
    assert!(matches!(refused, Err(GroupError::Store(_))), "{refused:?}");
    fixture.state.fail(false);
    let settled = async {
        while groups.acknowledge("g", &names).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, settled).await.expect("in time");
    groups.stop().await;
    let groups = load(&fixture.log, &fixture.state).await;
    assert_eq!(groups.get("g").expect("a group").status.lag_messages, 0);
}

#[tokio::test(start_paused = true)]
async fn who_was_overtaken_since_its_start_settles_nothing() {
    for same_epoch in [true, false] {
        let fixture = Fixture::new(MemoryLogOptions::default()).await;
        let (mut member, _) = half_settled(&fixture).await;
        let late = load(&fixture.log, &fixture.state).await;
        let mut of_late = late.open("g", joining("b", Duration::ZERO)).expect("a member");
        let taken = messages(&mut of_late).await;
        assert_eq!(texts(&taken), ["2"]);
        if same_epoch {
            // By the owner from before, who is not fenced yet.
            member.acknowledge(&ids(2, 2)).expect("a member");
            answer(&mut member).await;
        } else {
            let next = load(&fixture.log, &fixture.state).await;
            let mut of_next = next.open("g", joining("c", Duration::ZERO)).expect("a member");
            messages(&mut of_next).await;
            of_next.acknowledge(&ids(1, 1)).expect("a member");
            answer(&mut of_next).await;
        }
        let nack = Nack { delay: Some(Duration::ZERO), ..Nack::default() };
        of_late.nack(&ids(1, 1), &nack).expect("a member");
        let refused = timeout(LONG, late.acknowledge("g", &[taken[0].ack_id])).await.expect("in time");
        assert!(refused.is_err(), "{refused:?}");
        let groups = load(&fixture.log, &fixture.state).await;
        assert_eq!(groups.get("g").expect("a group").status.lag_messages, 0, "what was settled is");
    }
}

/// A group of which `change` says what it keeps.
async fn keeping(fixture: &Fixture, change: impl FnOnce(&mut Definition)) -> GroupId {
    let mut wanted = definition("g");
    change(&mut wanted);
    fixture.groups.create(wanted, &GroupStart::Latest).await.expect("a group").0.id
}

/// All that a member gets in one go, and the gaps before it.
async fn all(member: &mut LiveMember) -> (Vec<groups::Gap>, Vec<Delivery>) {
    let (mut gaps, mut all) = (Vec::new(), Vec::new());
    while let Ok(batch) = timeout(Duration::from_secs(1), member.next(ROOM)).await {
        let batch = batch.expect("a member");
        gaps.extend(batch.gaps);
        all.extend(batch.deliveries);
    }
    (gaps, all)
}

#[tokio::test(start_paused = true)]
async fn a_group_over_its_bytes_loses_the_oldest_and_no_more() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let cost = 10_000;
    let group = keeping(&fixture, |wanted| wanted.retention_bytes = 10 * cost).await;
    let text = "x".repeat(cost as usize - 200);
    for number in 0..100 {
        fixture.append(group, 1, &format!("{number} {text}"));
    }
    fixture.groups.upkeep.keep_up().await;
    let status = fixture.groups.get("g").expect("a group").status;
    assert!((8..=10).contains(&status.lag_messages), "{status:?}");
    assert_eq!(status.lost + status.lag_messages, 100, "{status:?}");
    assert!(status.lag_bytes <= 10 * cost, "{status:?}");
    let mut member = fixture.open("g", "a", Duration::ZERO);
    let (gaps, left) = all(&mut member).await;
    assert_eq!(gaps.len(), 1, "told to who comes later");
    assert_eq!(gaps[0].count, Some(status.lost));
    let numbers: Vec<String> =
        texts(&left).iter().filter_map(|text| Some(text.split_once(' ')?.0.to_owned())).collect();
    let expected: Vec<String> = (status.lost..100).map(|number| number.to_string()).collect();
    assert_eq!(numbers, expected, "the newest, in order");
}

#[tokio::test(start_paused = true)]
async fn a_member_is_told_of_the_gap_that_retention_makes() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group =
        keeping(&fixture, |wanted| (wanted.retention_age, wanted.ack_deadline) = (60_000, 3_600_000)).await;
    let few = Credit { messages: 2, ..Credit::default() };
    let mut member =
        fixture.groups.open("g", Joining { credit: few, ..joining("a", Duration::ZERO) }).expect("a member");
    for number in 0..10 {
        fixture.append(group, 1, &number.to_string());
        if number == 1 {
            some(&mut member, 2).await;
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    // The first two it has; those that came more than a minute ago and that it has not are gone.
    fixture.groups.upkeep.keep_up().await;
    fixture.groups.upkeep.keep_up().await;
    let (gaps, more) = all(&mut member).await;
    assert_eq!((gaps.len(), more.len()), (1, 0), "told once");
    let status = fixture.groups.get("g").expect("a group").status;
    assert_eq!(gaps[0].count, Some(status.lost));
    assert!((1..=4).contains(&status.lost), "{status:?}");
    member.acknowledge(&ids(1, 2)).expect("a member");
    let (_, left) = all(&mut member).await;
    assert_eq!(texts(&left)[0], (2 + status.lost).to_string(), "and then what is left");
    assert_eq!(fixture.groups.get("g").expect("a group").status.lag_messages, 8 - status.lost);
}

#[tokio::test(start_paused = true)]
async fn what_is_settled_stays_for_its_replay_and_no_longer() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = keeping(&fixture, |wanted| wanted.replay_age = 60_000).await;
    let mut member = fixture.open("g", "a", Duration::ZERO);
    for text in ["1", "2"] {
        fixture.append(group, 1, text);
    }
    let taken = some(&mut member, 2).await;
    member.acknowledge(&ids(1, 2)).expect("a member");
    answer(&mut member).await;
    fixture.groups.upkeep.keep_up().await;
    fixture.groups.seek("g", &GroupStart::Earliest, &Scope::ALL).await.expect("moved");
    assert_eq!(texts(&some(&mut member, 2).await), ["1", "2"], "they come again");
    member.acknowledge(&ids(3, 4)).expect("a member");
    answer(&mut member).await;
    tokio::time::sleep(Duration::from_secs(70)).await;
    fixture.groups.upkeep.keep_up().await;
    assert!(fixture.log.bounds(taken[0].partition).start > taken[1].record.offset, "nothing needs them");
    fixture.groups.seek("g", &GroupStart::Earliest, &Scope::ALL).await.expect("moved");
    assert_eq!(all(&mut member).await.1.len(), 0);
}

/// A slow member's losses must not be hidden by the messages that another has settled meanwhile.
#[tokio::test(start_paused = true)]
async fn what_one_member_loses_counts_whatever_others_have_settled() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let cost = 10_000;
    let group = keeping(&fixture, |wanted| {
        (wanted.retention_bytes, wanted.ack_deadline) = (10 * cost, 3_600_000);
    })
    .await;
    let few = Credit { messages: 1, ..Credit::default() };
    let mut slow = fixture
        .groups
        .open("g", Joining { credit: few, ..joining("slow", Duration::ZERO) })
        .expect("a member");
    let mut fast = fixture.open("g", "fast", Duration::ZERO);
    let text = "x".repeat(cost as usize - 200);
    let (mut settled, mut of_slow) = (0, 0);
    // Messages beyond the bound go, and are told, as others come.
    let mut gaps = Vec::new();
    for number in 0..50 {
        for device in 0..4 {
            fixture.append(group, device, &format!("{number} {text}"));
        }
        let (more, got) = all(&mut fast).await;
        gaps.extend(more);
        settled += got.len();
        let which = got.iter().map(|delivery| IdRange { first: delivery.id, last: delivery.id });
        fast.acknowledge(&Ranges::of(which)).expect("a member");
        let (more, got) = all(&mut slow).await;
        gaps.extend(more);
        of_slow += got.len();
    }
    assert!(settled >= 50 && of_slow == 1, "{settled} {of_slow}");
    fixture.groups.upkeep.keep_up().await;
    let status = fixture.groups.get("g").expect("a group").status;
    let (more, left) = all(&mut fast).await;
    assert_eq!(left.len(), 0);
    gaps.extend(more);
    gaps.extend(all(&mut slow).await.0);
    let told: u64 = gaps.iter().map(|gap| gap.count.expect("known")).sum();
    assert_eq!(told, status.lost, "what they are told");
    assert_eq!(status.lost + status.lag_messages + settled as u64, 200, "{status:?}");
    drop(slow);
    let (_, rest) = all(&mut fast).await;
    assert_eq!(status.lost + rest.len() as u64 + settled as u64, 200, "{status:?}, and {} come", rest.len());
}

#[tokio::test(start_paused = true)]
async fn a_group_that_refuses_and_stands_still_does_not_fill_the_disk() {
    let _ = clock();
    let log = Arc::new(MemoryLog::new(MemoryLogOptions::default()));
    let (state, marker) = (Arc::new(MemoryRecords::new()), Arc::<Everything>::default());
    let cost: u64 = 10_000;
    let groups = load_with(&log, &state, Arc::clone(&marker), 16 * cost).await;
    let fixture = Fixture { log, state, groups };
    let refusing = keeping(&fixture, |wanted| wanted.when_full = RetentionPolicy::Refuse).await;
    let dropping = keeping(&fixture, |wanted| wanted.name = "other".to_owned()).await;
    let text = "x".repeat(cost as usize);
    let full = async |more: usize| {
        for _ in 0..more {
            fixture.append(refusing, 1, &text);
        }
        fixture.groups.upkeep.keep_up().await;
        marker.full.lock().clone()
    };
    assert_eq!(full(15).await, BTreeSet::new());
    assert_eq!(full(2).await, BTreeSet::from([refusing]), "the others go on");
    assert_eq!(full(3).await, BTreeSet::from([refusing]), "one that drops refuses nothing");
    assert_eq!(*marker.skipped.lock(), BTreeSet::from([dropping]), "and gets nothing more");
    let mut member = fixture.open("g", "a", Duration::ZERO);
    let (_, got) = all(&mut member).await;
    assert_eq!(got.len(), 20, "nothing of a group that refuses is lost");
    member.acknowledge(&ids(1, 20)).expect("a member");
    answer(&mut member).await;
    full(0).await;
    assert_eq!(full(0).await, BTreeSet::new());
}

#[tokio::test(start_paused = true)]
async fn members_beyond_the_memory_are_refused_until_others_have_gone() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    fixture.create("g").await;
    let mut members = Vec::new();
    let refused = loop {
        match fixture.groups.open("g", joining(&members.len().to_string(), Duration::ZERO)) {
            Ok(member) => members.push(member),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(refused, GroupError::Memory) && members.len() > 100,
        "{refused:?} after {}",
        members.len()
    );
    let fetch = fixture.groups.fetch("g", joining("f", LONG), ROOM, Duration::ZERO);
    assert!(matches!(fetch.await, Err(GroupError::Memory)));
    members.pop();
    fixture.groups.open("g", joining("another", Duration::ZERO)).expect("there is room again");
    drop(members);
    assert_eq!(HOLDS.get(), 0, "all of it is given back");
}

/// The failure: what was read for a member that fetches is in nobody's account between its calls.
#[tokio::test(start_paused = true)]
async fn what_is_read_ahead_of_the_next_fetch_is_on_the_account() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    for _ in 0..3 {
        fixture.append(group, 1, "x");
    }
    let fetch = async |messages: usize| {
        let room = Room { messages, ..ROOM };
        let batch = fixture.groups.fetch("g", joining("f", LONG), room, Duration::ZERO).await;
        (batch.expect("a batch").deliveries.len(), HOLDS.get() > 0)
    };
    assert_eq!(fetch(1).await, (1, true), "two are read");
    assert_eq!(fetch(1).await, (1, true), "one is");
    assert_eq!(fetch(1).await, (1, false));
    fixture.append(group, 1, "x");
    fixture.append(group, 1, "x");
    assert_eq!(fetch(1).await, (1, true));
    tokio::time::sleep(2 * LONG).await;
    assert_eq!(HOLDS.get(), 0, "its lease is over");
}

/// The failure: OLD_TOKEN for a token of just now, since a group that has read to the end of the log is beyond the last message
/// of most partitions.
#[tokio::test(start_paused = true)]
async fn a_token_beyond_the_end_of_a_partition_leads_to_its_end() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.create("g").await;
    let beyond: Vec<u64> = Partition::all().map(|partition| fixture.log.bounds(partition).end + 5).collect();
    let place = token(fixture.log.id(), &beyond);
    fixture.groups.seek("g", &GroupStart::Token(place), &Scope::ALL).await.expect("moved");
    let mut member = fixture.open("g", "a", Duration::ZERO);
    fixture.append(group, 1, "next");
    assert_eq!(texts(&messages(&mut member).await), ["next"]);
}
