//! Groups whose filter is replaced, and callers of limited scope.

use super::*;

/// Of a caller that may have all of `a/#`.
fn limited() -> Scope {
    Scope::new(Some(vec!["a/#".to_owned()]), None).expect("a scope")
}

fn with_filter(topic: &str) -> Definition {
    let filter = GroupMessageFilter { topics: vec![topic.to_owned()], ..GroupMessageFilter::default() };
    Definition { filter, ..definition("g") }
}

impl Fixture {
    async fn make(&self, topic: &str) -> GroupId {
        self.groups.create(with_filter(topic), &GroupStart::Latest).await.expect("a group").0.id
    }

    async fn change(&self, topic: &str) {
        self.groups.update(with_filter(topic), None).await.expect("changed");
    }

    fn open_limited(&self, name: &str) -> LiveMember {
        let joining = Joining { scope: limited(), ..joining(name, Duration::ZERO) };
        self.groups.open("g", joining).expect("a member")
    }

    fn is_within(&self) -> bool {
        self.groups.get("g").expect("a group").group_filters.is_within(&limited())
    }

    /// Returns the group's definition, as it is on disk.
    async fn record(&self, group: GroupId) -> String {
        let record = self.state.read(group, Bytes::from_static(DEFINITION), None, 1).await.expect("a record");
        String::from_utf8_lossy(&record[0].value).into_owned()
    }

    async fn reloaded(&mut self) {
        self.groups.stop().await;
        self.groups = load(&self.log, &self.state).await;
    }

    /// Nothing comes to the caller of limited scope, whatever it does.
    async fn refuses_limited(&self) {
        assert!(!self.is_within());
        let mut member = self.open_limited("limited");
        let ended = timeout(LONG, member.next(ROOM)).await.expect("in time").expect_err("refused");
        assert_eq!(ended, MemberEnd::OutOfScope);
        let joining = Joining { scope: limited(), ..joining("fetches", Duration::ZERO) };
        let fetched = self.groups.fetch("g", joining, ROOM, Duration::ZERO).await;
        assert!(matches!(fetched, Err(GroupError::OutOfScope)), "{fetched:?}");
        let pending = self.groups.pending("g", &limited(), None, 10, 1 << 20, |_| true).await;
        assert!(matches!(pending, Err(GroupError::OutOfScope)));
    }
}

/// The failure: who has only the narrower filter in its scope got what the wider one had let in, at once or after a restart.
#[tokio::test(start_paused = true)]
async fn what_a_filter_let_in_is_for_those_who_may_have_all_of_it() {
    let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.make("#").await;
    assert!(!fixture.record(group).await.contains("former"), "as earlier versions have it");
    fixture.append(group, 1, "before");
    fixture.change("a/#").await;
    for _ in 0..3 {
        fixture.refuses_limited().await;
        fixture.groups.upkeep.keep_up().await;
    }
    // The round's findings are written by then.
    tokio::time::sleep(Duration::from_secs(1)).await;
    fixture.append(group, 1, "after");
    fixture.reloaded().await;
    fixture.groups.upkeep.keep_up().await;
    fixture.refuses_limited().await;

    let mut member = fixture.open("g", "all", Duration::ZERO);
    assert_eq!(texts(&some(&mut member, 2).await), ["before", "after"]);
    fixture.groups.upkeep.keep_up().await;
    assert!(!fixture.is_within());
    member.acknowledge(&ids(1, 1)).expect("a member");
    assert_eq!(answer(&mut member).await.0, ids(1, 1));
    drop(member);
    fixture.groups.upkeep.keep_up().await;
    assert!(fixture.is_within());
    let mut member = fixture.open_limited("limited");
    assert_eq!(texts(&messages(&mut member).await), ["after"]);
}

/// The failure: a stream that was there before the filter was widened got what is out of its caller's scope.
#[tokio::test(start_paused = true)]
async fn a_member_goes_when_its_group_gets_what_it_may_not_have() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.make("a/1").await;
    let mut member = fixture.open_limited("limited");
    fixture.append(group, 1, "1");
    assert_eq!(texts(&messages(&mut member).await), ["1"]);
    fixture.change("a/#").await;
    fixture.append(group, 1, "2");
    assert_eq!(texts(&messages(&mut member).await), ["2"], "this is wider, and not too wide");
    let waits = async { member.next(ROOM).await.expect_err("refused") };
    let change = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        fixture.change("#").await;
        fixture.append(group, 1, "3");
    };
    let (ended, ()) = timeout(LONG, async { tokio::join!(waits, change) }).await.expect("in time");
    assert_eq!(ended, MemberEnd::OutOfScope);
    drop(member);
    let mut member = fixture.open("g", "all", Duration::ZERO);
    assert_eq!(texts(&some(&mut member, 3).await), ["1", "2", "3"], "others have its partitions");
}

/// The failure: what the old filter had let in waited for the disk when its end was looked for, and came after that.
#[tokio::test(start_paused = true)]
async fn what_still_waits_for_the_disk_counts_for_the_filter_before() {
    let fixture = Fixture::new(MemoryLogOptions { held: true, ..MemoryLogOptions::default() }).await;
    let group = fixture.make("#").await;
    fixture.append(group, 1, "before");
    fixture.change("a/#").await;
    fixture.append(group, 2, "after");
    for _ in 0..3 {
        fixture.groups.upkeep.keep_up().await;
        assert!(!fixture.is_within());
    }
    fixture.log.settle_all();
    fixture.groups.upkeep.keep_up().await;
    assert!(!fixture.is_within());
    let mut member = fixture.open("g", "all", Duration::ZERO);
    some(&mut member, 2).await;
    member.acknowledge(&ids(1, 2)).expect("a member");
    assert_eq!(answer(&mut member).await.0, ids(1, 2));
    fixture.groups.upkeep.keep_up().await;
    assert!(fixture.is_within());
}

/// The failure: a crash left messages of a new filter in the log, and the record named the one before alone.
#[tokio::test(start_paused = true)]
async fn nothing_is_marked_by_a_filter_that_is_not_on_disk() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let marker = Arc::<Everything>::default();
    let state = Arc::new(MemoryGroupState::new());
    let groups = load_with(&fixture.log, &state, Arc::clone(&marker), u64::MAX).await;
    let (info, _) = groups.create(with_filter("a/#"), &GroupStart::Latest).await.expect("a group");
    let filters = || marker.filters.lock().iter().map(|filter| filter.topics[0].clone()).collect::<Vec<_>>();
    let marked = async |expected: &[&str]| {
        let marked = async {
            while filters() != expected {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(LONG, marked).await.expect("in time");
    };
    state.hold(true);
    let change = groups.update(with_filter("#"), None);
    assert!(timeout(Duration::from_secs(5), change).await.is_err(), "it is not written");
    assert_eq!(filters(), ["a/#"]);
    assert!(!groups.get("g").expect("a group").group_filters.is_within(&limited()), "from now on");
    state.hold(false);
    state.settle(usize::MAX);
    // Nobody waits for it any more.
    marked(&["a/#", "#"]).await;
    state.fail(true);
    let refused = timeout(LONG, groups.update(with_filter("b"), None)).await.expect("in time");
    assert!(matches!(refused, Err(GroupError::Store(_))), "{refused:?}");
    assert_eq!(filters(), ["a/#", "#"]);
    state.fail(false);
    marked(&["a/#", "#", "b"]).await;
    let record = state.read(info.id, Bytes::from_static(DEFINITION), None, 1).await.expect("a record");
    assert!(String::from_utf8_lossy(&record[0].value).contains("former"));
}

/// The failure: a group that was moved back had messages of the wider filter again, for whoever may have the narrower one.
#[tokio::test(start_paused = true)]
async fn a_group_that_is_moved_back_is_for_those_who_may_have_what_is_there() {
    let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group =
        fixture.groups.create(Definition { replay_age: 3_600_000, ..with_filter("#") }, &GroupStart::Latest);
    let group = group.await.expect("a group").0.id;
    let settle = async |fixture: &Fixture, count: usize| {
        let mut member = fixture.open("g", "all", Duration::ZERO);
        some(&mut member, count).await;
        member.acknowledge(&ids(1, count as u64)).expect("a member");
        answer(&mut member).await;
        fixture.groups.upkeep.keep_up().await;
    };
    fixture.append(group, 1, "before");
    let narrower = Definition { replay_age: 3_600_000, ..with_filter("a/#") };
    fixture.groups.update(narrower, None).await.expect("changed");
    settle(&fixture, 1).await;
    fixture.append(group, 1, "after");
    settle(&fixture, 1).await;
    assert!(fixture.is_within());

    let (earliest, limited) = (GroupStart::Earliest, limited());
    let refused = fixture.groups.seek("g", &earliest, &limited).await;
    assert!(matches!(refused, Err(GroupError::OutOfScope)), "{refused:?}");
    let place = fixture.groups.seek("g", &GroupStart::Latest, &limited).await.expect("moved");
    fixture.groups.seek("g", &GroupStart::Token(place.clone()), &limited).await.expect("moved");
    assert!(fixture.is_within());
    fixture.reloaded().await;
    assert!(fixture.is_within());
    let refused = fixture.groups.seek("g", &earliest, &limited).await;
    assert!(matches!(refused, Err(GroupError::OutOfScope)), "{refused:?}");

    fixture.groups.seek("g", &earliest, &Scope::ALL).await.expect("moved");
    fixture.refuses_limited().await;
    fixture.reloaded().await;
    fixture.refuses_limited().await;
    fixture.groups.seek("g", &GroupStart::Token(place), &Scope::ALL).await.expect("moved");
    assert!(fixture.is_within());
    assert!(fixture.record(group).await.contains("former"));
}

#[tokio::test(start_paused = true)]
async fn a_filter_is_forgotten_with_all_that_it_let_in() {
    let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
    let group = fixture.make("#").await;
    fixture.append(group, 1, "before");
    fixture.change("a/#").await;
    assert!(fixture.record(group).await.contains("former"));
    let mut member = fixture.open("g", "all", Duration::ZERO);
    some(&mut member, 1).await;
    member.acknowledge(&ids(1, 1)).expect("a member");
    answer(&mut member).await;
    // The log is trimmed, and that is seen in the next round.
    for _ in 0..2 {
        fixture.groups.upkeep.keep_up().await;
    }
    let forgotten = async {
        while fixture.record(group).await.contains("former") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, forgotten).await.expect("in time");
    fixture.reloaded().await;
    assert!(fixture.is_within());
}
