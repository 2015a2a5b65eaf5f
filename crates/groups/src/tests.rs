//! Single cases; what holds in all of them is in `model`.

use std::sync::Arc;

use gateway_core::{ClientId, GroupId, LogRecord, Message, Origin, OriginKind, Partition, Timestamp};

use super::*;

const PARTITION: Partition = Partition(7);
const ROOM: Room = Room { messages: 1_000, bytes: usize::MAX };

fn identity() -> Identity {
    Identity { group: GroupId(1), epoch: 1, generation: 1, seed: 42 }
}

fn record(offset: u64, device: &str) -> LogRecord {
    let id = ClientId::new(device);
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 0 };
    let message = Message::new("t", b"payload", Timestamp(0), origin);
    LogRecord { offset, groups: Arc::new([GroupId(1)]), message: Arc::clone(message.share()) }
}

fn join(group: &mut Group, name: &str, lease: u64) -> Joined {
    let lease = std::time::Duration::from_millis(lease);
    let options = MemberOptions { name, lease, credit: Credit::default(), fetches: false };
    group.join(&options, Timestamp(0)).expect("room for a member")
}

fn offsets(taken: &Taken) -> Vec<u64> {
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
