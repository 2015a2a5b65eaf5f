//! Groups and callers of limited scope, and filters that stay.

use super::*;

/// Of a caller that may have all of `a/#`.
fn limited() -> Scope {
    Scope::new(Some(vec!["a/#".to_owned()]), None).expect("a scope")
}

impl Fixture {
    /// Makes the group again, as the record says that `change` makes of it.
    async fn rewritten(&mut self, group: GroupId, change: impl FnOnce(&mut serde_json::Value)) {
        self.groups.stop().await;
        let state = self.group_state();
        let epoch = state.epoch(group).await.expect("an epoch");
        let epoch = state.acquire(group, epoch).await.expect("ours");
        let mut record = self.record(group).await;
        change(&mut record);
        let value = Bytes::from(serde_json::to_vec(&record).expect("JSON"));
        let written = vec![records::put(Bytes::from_static(DEFINITION), value)];
        state.write(group, epoch, written).await.expect("written");
        self.groups = load(&self.log, &self.state).await;
    }

    /// The group's definition, as it is on disk.
    async fn record(&self, group: GroupId) -> serde_json::Value {
        let record =
            self.group_state().read(group, Bytes::from_static(DEFINITION), None, 1).await.expect("a record");
        serde_json::from_slice(&record[0].value).expect("JSON")
    }

    /// Nothing comes to the caller of limited scope, and it changes nothing.
    async fn refuses_limited(&self) {
        let scope = &limited();
        assert!(!self.groups.get("g").expect("a group").is_within(scope));
        let joining = |name| Joining { scope: limited(), ..joining(name, Duration::ZERO) };
        let opened = self.groups.open("g", joining("limited")).map(drop);
        let fetched = self.groups.fetch("g", joining("fetches"), ROOM, Duration::ZERO).await.map(drop);
        let pending = self.groups.pending("g", scope, None, 10, 1 << 20, |_| true).await.map(drop);
        let letters = self.groups.dead_letters("g", scope, None, 10).await.map(drop);
        let requeued = self.groups.requeue("g", &[], scope).await.map(drop);
        let purged = self.groups.purge("g", &[], scope).await.map(drop);
        let sought = self.groups.seek("g", &GroupStart::Latest, scope).await.map(drop);
        for (what, answer) in [
            ("open", opened),
            ("fetch", fetched),
            ("pending", pending),
            ("letters", letters),
            ("requeue", requeued),
            ("purge", purged),
            ("seek", sought),
        ] {
            assert!(matches!(answer, Err(GroupError::OutOfScope)), "{what}: {answer:?}");
        }
    }
}

/// The failure: between the check of a name and the call another group took the name, and the caller got what that one has.
#[tokio::test(start_paused = true)]
async fn each_call_checks_the_group_that_it_is_about() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    fixture.groups.create(with_filter("a/#"), &GroupStart::Latest).await.expect("a group");
    let joining = Joining { scope: limited(), ..joining("limited", Duration::ZERO) };
    fixture.groups.open("g", joining).expect("a member");
    fixture.groups.seek("g", &GroupStart::Latest, &limited()).await.expect("moved");
    fixture.groups.delete("g").await.expect("deleted");
    fixture.groups.create(with_filter("#"), &GroupStart::Latest).await.expect("a group");
    fixture.refuses_limited().await;
}

#[tokio::test(start_paused = true)]
async fn an_update_leaves_the_filter() {
    let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
    let (made, _) = fixture.groups.create(with_filter("a/#"), &GroupStart::Latest).await.expect("a group");
    let wider = Definition { paused: true, ..with_filter("#") };
    let changed = fixture.groups.update(wider, None).await.expect("changed").definition;
    assert_eq!(changed, Definition { paused: true, ..with_filter("a/#") });
    let record = fixture.record(made.id).await;
    assert!(record.get("former").is_none() && record.get("had_other_filters").is_none(), "{record}");
    fixture.rewritten(made.id, |_| {}).await;
    assert!(fixture.groups.get("g").expect("a group").is_within(&limited()));
}

/// The failure: a group of an earlier version, which could change filters, gave what the wider one had let in to who may have
/// the narrower one alone.
#[tokio::test(start_paused = true)]
async fn who_may_have_everything_drains_a_group_that_had_other_filters() {
    let mut fixture = Fixture::new(MemoryLogOptions::default()).await;
    let (made, _) = fixture.groups.create(with_filter("a/#"), &GroupStart::Latest).await.expect("a group");
    fixture.append(made.id, 1, "before");
    let former = serde_json::json!([{ "filter": with_filter("#").filter, "until": u64::MAX }]);
    fixture.rewritten(made.id, |record| record["former"] = former).await;
    fixture.refuses_limited().await;
    // The next record says it in one word, and that is read too.
    fixture.groups.update(with_filter("a/#"), None).await.expect("changed");
    let record = fixture.record(made.id).await;
    assert!(record.get("former").is_none() && record["had_other_filters"] == true, "{record}");
    fixture.rewritten(made.id, |_| {}).await;
    fixture.refuses_limited().await;
    let mut member = fixture.open("g", "all", Duration::ZERO);
    assert_eq!(texts(&messages(&mut member).await), ["before"]);
    member.acknowledge(&ids(1, 1)).expect("a member");
    assert_eq!(answer(&mut member).await.0, ids(1, 1));
    drop(member);
    fixture.groups.delete("g").await.expect("deleted");
}

/// The failure: dead letters that came under another filter, of which an earlier version kept no word, were shown to who may not
/// have them, put back for these, and deleted.
#[tokio::test(start_paused = true)]
async fn letters_that_do_not_match_are_for_who_may_have_everything() {
    let fixture = Fixture::new(MemoryLogOptions::default()).await;
    let (made, _) = fixture.groups.create(with_filter("a/#"), &GroupStart::Latest).await.expect("a group");
    for topic in ["a/1", "other/1"] {
        let origin = Origin { kind: OriginKind::Backend, client_id: None, slot: 0 };
        let message = Message::new(topic, b"x", clock(), origin);
        let partition = Partition::of(None, topic);
        fixture.log.append(partition, &Arc::from([made.id]), message.share(), None).expect("room");
    }
    let mut member = fixture.open("g", "all", Duration::ZERO);
    some(&mut member, 2).await;
    member.nack(&ids(1, 2), &Nack { dead_letter: true, ..Nack::default() }).expect("a member");
    let letters = async || {
        let mut found = Vec::new();
        while found.len() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
            found = fixture.groups.dead_letters("g", &Scope::ALL, None, 10).await.expect("letters");
        }
        found
    };
    let found = timeout(LONG, letters()).await.expect("in time");
    for letter in &found {
        assert_eq!(letter.matches, &*letter.message.topic == "a/1", "{letter:?}");
    }
    let other = found.iter().find(|letter| !letter.matches).expect("one").id;
    let (limited, groups) = (&limited(), &fixture.groups);
    assert_eq!(groups.purge("g", &[other], limited).await.expect("passed over"), 0);
    assert_eq!(groups.requeue("g", &[other], limited).await.expect("passed over"), 0);
    assert_eq!(groups.requeue("g", &[other], &Scope::ALL).await.expect("passed over"), 0);
    assert_eq!(groups.requeue("g", &[], limited).await.expect("put back"), 1);
    assert_eq!(groups.purge("g", &[], limited).await.expect("passed over"), 0);
    assert_eq!(groups.purge("g", &[], &Scope::ALL).await.expect("deleted"), 1);
}
