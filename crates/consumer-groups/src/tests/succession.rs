//! Groups that come in the place of others.

use super::*;

impl Fixture {
    /// The records of groups.
    pub(super) fn group_state(&self) -> GroupState {
        GroupState::new(Arc::clone(&self.state) as _)
    }

    /// Puts another group in the place of the one there is, and returns its number.
    async fn succeed(&self, topic: &str) -> GroupId {
        self.groups.succeed(with_filter(topic)).await.expect("a successor").id
    }

    /// Takes all that the group gives out, as a member that comes back whenever it is sent away.
    async fn drained(&self) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            let mut member = self.open("g", "a", Duration::ZERO);
            let mut acknowledged = 0;
            loop {
                match timeout(Duration::from_secs(5), member.next(ROOM)).await {
                    Ok(Ok(batch)) => {
                        let count = batch.deliveries.len() as u64;
                        all.extend(texts(&batch.deliveries));
                        if count > 0 {
                            member
                                .acknowledge(&ids(acknowledged + 1, acknowledged + count))
                                .expect("a member");
                            acknowledged += count;
                        }
                    }
                    Ok(Err(MemberEnd::GroupGone)) => break,
                    Ok(Err(ended)) => panic!("{ended:?}"),
                    Err(_) => return all,
                }
            }
        }
    }

    async fn restarted(&mut self) -> Arc<Everything> {
        self.groups.stop().await;
        let marker = Arc::<Everything>::default();
        self.groups = load_with(&self.log, &self.state, Arc::clone(&marker), u64::MAX).await;
        marker
    }

    fn topics(&self) -> Vec<String> {
        self.groups.list(None, 10).into_iter().flat_map(|info| info.definition.filter.topics).collect()
    }

    /// Waits until the group has no predecessor.
    async fn alone(&self) {
        let alone = async {
            while self.groups.get("g").expect("a group").predecessors > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(LONG, alone).await.expect("in time");
    }
}

/// The failure: messages of the time before are lost, or come later than those of the time after.
#[tokio::test(start_paused = true)]
async fn what_waits_goes_out_first() {
    for restarts in [false, true] {
        let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
        let (made, _) = fixture.groups.create(with_filter("a"), &GroupStart::Latest).await.expect("a group");
        let mut group = made.id;
        let mut wanted = Vec::new();
        // Also back to what it was.
        for (round, topic) in ["b", "a", "a/#"].into_iter().enumerate() {
            for device in [1, 1, 2] {
                let text = format!("{round} of {device}: {}", wanted.len());
                fixture.append(group, device, &text);
                wanted.push(text);
            }
            let next = fixture.succeed(topic).await;
            assert!(next > group);
            group = next;
            if restarts {
                let marker = fixture.restarted().await;
                assert_eq!(*marker.kept.lock(), [group], "nothing is marked for predecessors");
            }
            assert_eq!(fixture.topics(), [topic]);
        }
        fixture.append(group, 1, "last");
        wanted.push("last".to_owned());
        let info = fixture.groups.get("g").expect("a group");
        assert_eq!((info.predecessors, info.status.lag_messages), (3, wanted.len() as u64));
        assert!(!info.is_within(&Scope::new(Some(vec!["a/#".to_owned()]), None).expect("a scope")));
        let sought = fixture.groups.seek("g", &GroupStart::Latest, &Scope::ALL).await;
        assert!(matches!(sought, Err(GroupError::Draining)), "{sought:?}");

        let got = fixture.drained().await;
        let of = |all: &[String], from: usize| {
            let mut part = all[from..(from + 3).min(all.len())].to_vec();
            part.sort_unstable();
            part
        };
        for from in (0..wanted.len()).step_by(3) {
            assert_eq!(of(&got, from), of(&wanted, from), "{restarts}: {got:?}");
        }
        assert_eq!(got.len(), wanted.len());
        fixture.alone().await;
        fixture.groups.seek("g", &GroupStart::Latest, &Scope::ALL).await.expect("moved");
        fixture.restarted().await;
        assert!(
            fixture.drained().await.is_empty()
                && fixture.group_state().groups().await.expect("groups").contains(&group)
        );
    }
}

/// The failure: a crash, or a disk that refuses, between two writes of a change loses what waited, or leaves two groups.
#[tokio::test(start_paused = true)]
async fn a_change_is_cut_anywhere() {
    let mut is_done = false;
    for writes in 0..20 {
        let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
        let (made, _) = fixture.groups.create(with_filter("a"), &GroupStart::Latest).await.expect("a group");
        fixture.append(made.id, 1, "1");
        fixture.state.hold(true);
        let groups = Arc::clone(&fixture.groups);
        let change = tokio::spawn(async move { groups.succeed(with_filter("b")).await });
        for _ in 0..writes {
            tokio::time::sleep(Duration::from_millis(100)).await;
            fixture.state.settle(1);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        is_done = change.is_finished();
        // Waiting writes are never made.
        fixture.state.crash();
        let marker = fixture.restarted().await;
        let info = fixture.groups.get("g").expect("a group");
        assert_eq!(*marker.kept.lock(), [info.id]);
        assert!(!is_done || fixture.topics() == ["b"]);
        assert_eq!((fixture.topics() == ["b"]), info.predecessors == 1);
        // Once more, as a bridge does at its start.
        let last = if info.predecessors == 1 { info.id } else { fixture.succeed("b").await };
        fixture.append(last, 1, "2");
        assert_eq!(fixture.drained().await, ["1", "2"], "{writes}");
        fixture.alone().await;
        if is_done {
            break;
        }
    }
    assert!(is_done);

    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let (made, _) = fixture.groups.create(with_filter("a"), &GroupStart::Latest).await.expect("a group");
    fixture.state.fail(true);
    let refused = fixture.groups.succeed(with_filter("b")).await;
    assert!(matches!(refused, Err(GroupError::Store(_))), "{refused:?}");
    let info = fixture.groups.get("g").expect("a group");
    assert_eq!((info.id, info.predecessors, fixture.topics()), (made.id, 0, vec!["a".to_owned()]));
}

/// The failure: dead letters go with the group that had them, or come to have the numbers of others.
#[tokio::test(start_paused = true)]
async fn letters_stay_under_their_numbers() {
    let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
    let (made, _) = fixture.groups.create(with_filter("a"), &GroupStart::Latest).await.expect("a group");
    let numbers = async |fixture: &Fixture| -> Vec<u64> {
        let letters = fixture.groups.dead_letters("g", &Scope::ALL, None, 10).await.expect("letters");
        letters.into_iter().map(|letter| letter.id).collect()
    };
    let give_up = async |fixture: &Fixture, group: GroupId, expected: &[u64]| {
        fixture.append(group, 1, "x");
        let mut member = fixture.open("g", "a", Duration::ZERO);
        some(&mut member, 1).await;
        member.nack(&ids(1, 1), &Nack { dead_letter: true, ..Nack::default() }).expect("a member");
        while numbers(fixture).await != expected {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, give_up(&fixture, made.id, &[1])).await.expect("in time");
    timeout(LONG, give_up(&fixture, made.id, &[1, 2])).await.expect("in time");
    assert_eq!(fixture.groups.purge("g", &[1], &Scope::ALL).await.expect("deleted"), 1);
    let second = fixture.succeed("b").await;
    assert_eq!(numbers(&fixture).await, [2], "whoever has them");
    fixture.alone().await;
    for _ in 0..2 {
        assert_eq!(numbers(&fixture).await, [2]);
        assert_eq!(fixture.groups.get("g").expect("a group").status.dead_letters, 1);
        fixture.restarted().await;
    }
    timeout(LONG, give_up(&fixture, second, &[2, 3])).await.expect("in time");
    assert_eq!(fixture.groups.requeue("g", &[2], &Scope::ALL).await.expect("put back"), 1);
    assert_eq!(fixture.drained().await, ["x"]);
}

/// The failure: a letter that is put back into a group that ends just then is in neither.
#[tokio::test(start_paused = true)]
async fn a_letter_that_is_put_back_keeps_a_predecessor() {
    let fixture = Fixture::new(MemoryLogOptions { held: true, ..MemoryLogOptions::default() }).await;
    let (made, _) = fixture.groups.create(with_filter("a"), &GroupStart::Latest).await.expect("a group");
    fixture.append(made.id, 1, "1");
    fixture.log.settle_all();
    let mut member = fixture.open("g", "a", Duration::ZERO);
    some(&mut member, 1).await;
    member.nack(&ids(1, 1), &Nack { dead_letter: true, ..Nack::default() }).expect("a member");
    while fixture.groups.get("g").expect("a group").status.dead_letters == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let groups = Arc::clone(&fixture.groups);
    let requeue = tokio::spawn(async move { groups.requeue("g", &[], &Scope::ALL).await });
    while fixture.log.waiting() == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    fixture.succeed("b").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(fixture.groups.get("g").expect("a group").predecessors, 1);
    fixture.log.settle_all();
    assert_eq!(requeue.await.expect("ends").expect("put back"), 1);
    assert_eq!(texts(&messages(&mut member).await), ["1"]);
    member.acknowledge(&ids(2, 2)).expect("a member");
    fixture.alone().await;
}

/// The failure: a pause, or the end of a group, leaves out what is before it.
#[tokio::test(start_paused = true)]
async fn predecessors_are_paused_and_deleted_with_the_group() {
    let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
    let (made, _) = fixture.groups.create(with_filter("a"), &GroupStart::Latest).await.expect("a group");
    fixture.append(made.id, 1, "1");
    fixture.succeed("b").await;
    fixture.groups.update(Definition { paused: true, ..with_filter("b") }, None).await.expect("changed");
    assert!(fixture.drained().await.is_empty());
    fixture.restarted().await;
    assert!(fixture.drained().await.is_empty());
    fixture.groups.delete("g").await.expect("deleted");
    fixture.restarted().await;
    assert!(fixture.topics().is_empty());
}
