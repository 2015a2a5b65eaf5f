//! Single cases; what holds in all of them is in `model`.

use std::sync::Arc;

use gateway_core::{ClientId, GroupId, LogRecord, Message, Origin, OriginKind, Partition, Timestamp};

use super::*;

const PARTITION: Partition = Partition(7);
const ROOM: Room = Room { messages: 1_000, bytes: usize::MAX };

fn identity() -> GroupIdentity {
    GroupIdentity { group: GroupId(1), life: 1, generation: 1, seed: 42 }
}

fn record(offset: u64, device: &str) -> LogRecord {
    let id = ClientId::new(device);
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 0 };
    let message = Message::new("t", b"payload", Timestamp(0), origin);
    LogRecord { offset, groups: Arc::new([GroupId(1)]), message: Arc::clone(message.share()) }
}

fn join(group: &mut Group, name: &str, lease: u64) -> Joined {
    let lease = std::time::Duration::from_millis(lease);
    let options = MemberOptions { name, lease, credit: Credit::default(), fetches: false, outstanding: &[] };
    group.join(&options, Timestamp(0)).expect("room for a member")
}

fn offsets(taken: &TakenDeliveries) -> Vec<u64> {
    taken.deliveries.iter().map(|delivery| delivery.record.offset).collect()
}

fn all() -> Ranges {
    Ranges::of([IdRange { first: 1, last: u64::MAX }])
}

#[test]
fn who_keeps_up_gets_messages_without_a_read_and_settles_them() {
    let mut group = Group::new(identity(), GroupConfig::default());
    let member = join(&mut group, "a", 0).member;
    for offset in [3, 5, 6] {
        group.appended(PARTITION, &record(offset, "d"));
    }
    assert_eq!(group.woken(), [member.number]);
    assert!(group.wants(member, 10).expect("here").is_empty());
    let taken = group.take(member, Timestamp(5), ROOM).expect("here");
    assert_eq!(offsets(&taken), [3, 5, 6]);
    let answer = group.acknowledge(member, &Ranges::of([IdRange { first: 2, last: 9 }])).expect("here");
    assert_eq!(answer.ok, Ranges::of([IdRange { first: 2, last: 3 }]));
    assert_eq!(answer.lost, Ranges::of([IdRange { first: 4, last: 9 }]));
    let changes = group.changes();
    assert_eq!((changes.len(), changes[0].partition, changes[0].floor), (1, PARTITION, 3));
    group.acknowledge(member, &all()).expect("here");
    assert_eq!(group.changes()[0].floor, 7);
}

/// Reads what the member waits for from a log with these places, then takes it.
fn read_and_take(group: &mut Group, member: MemberKey, places: &[u64], now: Timestamp) -> TakenDeliveries {
    for _ in 0..10 {
        for read in group.wants(member, 10).expect("here") {
            let found = places.iter().filter(|&&place| place >= read.from).take(read.records);
            let records: Vec<LogRecord> = found.map(|&place| record(place, "d")).collect();
            let next = records.last().map_or(read.from, |last| last.offset + 1);
            group.feed(&read, records, next, None, |_| true);
        }
    }
    group.take(member, now, ROOM).expect("here")
}

/// With the pause of each growing by what fails before it, a device with some bad messages stood still for hours.
#[test]
fn what_fails_before_a_message_neither_delays_it_nor_gives_it_up() {
    let config = GroupConfig { max_attempts: 5, ..GroupConfig::default() };
    let mut group = Group::new(identity(), config);
    let member = join(&mut group, "a", 0).member;
    let places = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    for offset in places {
        group.appended(PARTITION, &record(offset, "d"));
    }
    let mut now = Timestamp(0);
    // Each fails once, and takes back all behind it each time.
    for failing in places {
        let taken = read_and_take(&mut group, member, &places, now);
        let id = taken.deliveries.iter().find(|delivery| delivery.record.offset == failing);
        let id = id.expect("it comes, and is not given up").id;
        let nack = Nack::default();
        group.nack(member, &Ranges::of([IdRange { first: id, last: id }]), &nack, now, 1).expect("here");
        let due = group.tick(now).expect("it comes again");
        // The second delivery of an unlucky one counts as one.
        assert!(due <= now.plus_millis(2_000), "{failing} waits until {due:?} from {now:?}");
        now = due;
        group.tick(now);
        let again = read_and_take(&mut group, member, &places, now);
        assert_eq!(offsets(&again), [failing], "alone");
        assert!(again.deliveries[0].attempt <= 3);
        group.acknowledge(member, &all()).expect("here");
    }
    assert!(group.given_up(10).is_empty());
}

/// The failure: a request that gave back everything a member had went through all of it in one go, and held up the log's writer
/// meanwhile.
#[test]
fn what_is_given_back_at_once_is_given_back_in_steps() {
    let mut group = Group::new(identity(), GroupConfig::default());
    let member = join(&mut group, "a", 0).member;
    let places = [1, 2, 3, 4, 5];
    for offset in places {
        group.appended(PARTITION, &record(offset, &format!("d{offset}")));
    }
    let taken = read_and_take(&mut group, member, &places, Timestamp(0));
    let [first, .., last] = &taken.deliveries[..] else { panic!("{taken:?}") };
    // As a caller may write them: with numbers that it never had.
    let ranges = [
        IdRange { first: first.id, last: first.id + 1 },
        IdRange { first: first.id + 2, last: first.id + 2 },
        IdRange { first: last.id - 1, last: u64::MAX },
    ];
    let mut left = Ranges::of(ranges);
    for given_back in [2, 4, 5] {
        assert!(!left.is_empty());
        left = group.nack(member, &left, &Nack::default(), Timestamp(0), 2).expect("here");
        assert_eq!(group.status().totals.nacked, given_back);
    }
    assert!(left.is_empty());
}

#[test]
fn a_member_that_takes_nothing_has_little_read_for_it_and_gets_all_later() {
    let mut group = Group::new(identity(), GroupConfig::default());
    let member = join(&mut group, "a", 0).member;
    let places: Vec<u64> = (0..500).collect();
    for &offset in &places {
        group.appended(PARTITION, &record(offset, "d"));
    }
    let room = Room { messages: usize::MAX, bytes: usize::MAX };
    let taken = group.take(member, Timestamp(0), room).expect("here");
    let bytes: usize = taken.deliveries.iter().map(|delivery| delivery.record.message.cost()).sum();
    assert!((1..=MAX_AHEAD).contains(&bytes), "{bytes}");
    let mut all = offsets(&taken);
    while all.len() < 500 {
        let before = all.len();
        all.extend(offsets(&read_and_take(&mut group, member, &places, Timestamp(0))));
        assert!(all.len() > before, "it is not told of the rest");
    }
    assert_eq!(all, places);
}

#[test]
fn nothing_is_written_of_members_that_have_no_lease_nor_for_a_delivery() {
    let mut group = Group::new(identity(), GroupConfig::default());
    join(&mut group, "passing", 0);
    assert!(!group.has_changes());
    let member = join(&mut group, "staying", 500).member;
    assert!(group.roster_change().is_some());
    for device in 0..20 {
        group.appended(Partition(255 - device), &record(u64::from(device), &format!("d{device}")));
    }
    assert!(!group.take(member, Timestamp(5), ROOM).expect("here").deliveries.is_empty());
    assert!(!group.has_changes(), "a delivery is on no disk");
}
