//! Reports of a member about its deliveries on its stream, the order between them, and letters that are removed.

use mqtt_server::proto::gateway::v1::{self, consume_item::Item, consume_request::Action};

use crate::{
    groups::{Member, group, open, payload},
    harness::*,
};

fn span(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

fn which(ids: &[u64]) -> Option<v1::Ack> {
    Some(v1::Ack { delivery_ids: ids.to_vec(), ranges: Vec::new() })
}

/// Gives a delivery back, to come again in an hour.
async fn give_back(member: &Member, id: u64) {
    let nack = v1::Nack { which: which(&[id]), delay: span(3600), ..v1::Nack::default() };
    member.say(Action::Nack(nack)).await;
}

impl Setup {
    /// Acknowledges one delivery as a range, heartbeats aside.
    pub(crate) async fn acknowledge_by_range(&self, member: &mut Member, id: u64) {
        let ranges = vec![v1::DeliveryRange { first: id, last: id }];
        member.say(Action::Ack(v1::Ack { ranges: ranges.clone(), ..v1::Ack::default() })).await;
        loop {
            match member.item().await {
                Item::Heartbeat(_) => {}
                Item::AckResults(results) => return assert_eq!(results.ok, ranges, "{results:?}"),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// The failure: more credit is only seen once something is acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn flow_lets_more_messages_come_without_an_acknowledgement() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    let mut device = setup.raw("d", |_| {});
    for text in ["1", "2", "3"] {
        device.publish_acked("up/1", text.as_bytes(), false);
    }
    let one = v1::Flow { max_outstanding_messages: 1, ..v1::Flow::default() };
    let heartbeat_interval = Some(prost_types::Duration { seconds: 0, nanos: 100_000_000 });
    let mut member = setup.join(v1::Open { flow: Some(one), heartbeat_interval, ..open("g") }).await;
    assert_eq!(member.payload().await, "1");
    for _ in 0..2 {
        let Item::Heartbeat(beat) = member.item().await else { panic!("more than its credit") };
        assert_eq!(beat.status.unwrap().outstanding, 1);
    }
    member.say(Action::Flow(v1::Flow { max_outstanding_messages: 3, ..v1::Flow::default() })).await;
    assert_eq!((member.payload().await, member.payload().await), ("2".into(), "3".into()));
}

/// The failure: a delivery that was extended comes again at the deadline of the group, and its acknowledgement is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_is_extended_does_not_come_again_at_its_deadline() {
    let setup = Setup::new().await;
    setup.create(v1::Group { ack_deadline: span(1), min_backoff: span(0), ..group("g") }).await;
    for name in ["slow", "fast"] {
        setup.raw(name, |_| {}).publish_acked("up/1", name.as_bytes(), false);
    }
    let mut member = setup.join(open("g")).await;
    let mut slow = None;
    let mut attempts = 0;
    // The other one comes again and again meanwhile.
    while attempts < 3 || slow.is_none() {
        let message = member.message().await;
        if payload(&message) == "slow" {
            assert_eq!(message.attempt, 1);
            slow = Some(message.delivery_id);
            let extend = v1::Extend { which: which(&[message.delivery_id]), deadline: span(3600) };
            member.say(Action::Extend(extend)).await;
        } else {
            attempts = message.attempt;
        }
    }
    member.acknowledge(&[slow.unwrap()]).await;
}

/// The failure: a member that drains gets more, or its stream ends before what it has is settled, or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_drains_gets_nothing_more_and_ends_when_all_is_settled() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    let mut device = setup.raw("d", |_| {});
    device.publish_acked("up/1", b"1", false);
    let heartbeat_interval = Some(prost_types::Duration { seconds: 0, nanos: 100_000_000 });
    let mut member = setup.join(v1::Open { heartbeat_interval, ..open("g") }).await;
    let first = member.message().await;
    member.say(Action::Drain(v1::Drain {})).await;
    // Heard before this is answered.
    let unknown = u64::MAX;
    member.say(Action::Ack(v1::Ack { delivery_ids: vec![unknown], ranges: Vec::new() })).await;
    loop {
        if let Item::AckResults(results) = member.item().await {
            assert_eq!(results.lost, [v1::DeliveryRange { first: unknown, last: unknown }]);
            break;
        }
    }
    device.publish_acked("up/1", b"2", false);
    for _ in 0..2 {
        let item = member.item().await;
        assert!(matches!(item, Item::Heartbeat(_)), "{item:?}");
    }
    setup.acknowledge_by_range(&mut member, first.delivery_id).await;
    member.ends().await;
    let mut other = setup.join(open("g")).await;
    assert_eq!(other.payload().await, "2");
}

/// The failure: a message that waits holds up what it has nothing to do with, or does not hold up what comes after it.
#[tokio::test(flavor = "multi_thread")]
async fn what_waits_holds_up_what_is_in_order_with_it_and_nothing_else() {
    use v1::OrderKey::{Device, DeviceTopic, None as NoOrder};

    // Of what was delivered before, and of what comes after.
    for (order, void, comes) in
        [(Device, vec![2, 3], vec![]), (DeviceTopic, vec![2], vec!["e"]), (NoOrder, vec![], vec!["d", "e"])]
    {
        let setup = Setup::new().await;
        let created = setup.create(v1::Group { order_key: order.into(), ..group("g") }).await;
        assert_eq!(created.order_key(), order);
        let mut device = setup.raw("d", |_| {});
        for (topic, text) in [("up/1", "a"), ("up/1", "b"), ("up/2", "c")] {
            device.publish_acked(topic, text.as_bytes(), false);
        }
        let mut member = setup.join(open("g")).await;
        for expected in ["a", "b", "c"] {
            assert_eq!(member.payload().await, expected);
        }
        give_back(&member, 1).await;
        if !void.is_empty() {
            let Item::Revoked(revoked) = member.item().await else { panic!("nothing is void: {order:?}") };
            let told = revoked.void.iter().flat_map(|range| range.first..=range.last);
            assert_eq!(told.collect::<Vec<_>>(), void, "{order:?}");
        }
        let settled: Vec<u64> = [2, 3].into_iter().filter(|id| !void.contains(id)).collect();
        member.acknowledge(&settled).await;
        for (topic, text) in [("up/1", "d"), ("up/2", "e")] {
            device.publish_acked(topic, text.as_bytes(), false);
        }
        // Nothing has to do with this one.
        setup.raw("other", |_| {}).publish_acked("up/1", b"end", false);
        let mut seen = Vec::new();
        while seen.len() <= comes.len() {
            seen.push(member.payload().await);
        }
        seen.sort();
        let mut expected = comes;
        expected.push("end");
        assert_eq!(seen, expected, "{order:?}");
        let left = 6 - settled.len() as u64;
        assert_eq!(setup.group_status("g").await.lag_messages, left, "{order:?}");
    }
}

/// The failure: a letter that is removed stays, or is counted twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_purged_once() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    // Of one device the second would come again after the first.
    for name in ["one", "two"] {
        setup.raw(name, |_| {}).publish_acked("up/1", b"x", false);
    }
    let mut member = setup.join(open("g")).await;
    for _ in 0..2 {
        let message = member.message().await;
        let which = which(&[message.delivery_id]);
        member.say(Action::Nack(v1::Nack { which, dead_letter: true, ..v1::Nack::default() })).await;
    }
    let list = v1::ListDeadLettersRequest { name: "g".into(), ..Default::default() };
    let letters = soon("both letters", async {
        loop {
            let letters = setup.groups().list_dead_letters(list.clone()).await.unwrap().into_inner();
            if letters.dead_letters.len() == 2 {
                return letters.dead_letters;
            }
        }
    });
    let ids: Vec<String> = letters.await.into_iter().map(|letter| letter.id).collect();
    let purge = async |ids: &[String]| {
        let request = v1::PurgeDeadLettersRequest { name: "g".into(), ids: ids.to_vec() };
        soon("an answer", setup.groups().purge_dead_letters(request)).await.unwrap().into_inner().count
    };
    assert_eq!((purge(&ids[..1]).await, purge(&ids[..1]).await), (1, 0));
    let left = setup.groups().list_dead_letters(list).await.unwrap().into_inner().dead_letters;
    assert_eq!(left.iter().map(|letter| &letter.id).collect::<Vec<_>>(), [&ids[1]]);
    assert_eq!((purge(&[]).await, setup.group_status("g").await.dead_letters), (1, 0));
}
