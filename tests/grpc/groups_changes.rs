//! Groups that are moved and changed while devices publish: by time, paused; their filter stays.

use std::time::Duration;

use mqtt_server::proto::gateway::v1::{self, consume_item::Item, consumed_message::Content, position::At};
use tonic::Code;

use crate::{
    groups::{group, open, payload},
    harness::*,
};

fn seconds(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

/// Returns the time at which a message was received.
fn received(message: &v1::ConsumedMessage) -> prost_types::Timestamp {
    let Some(Content::Message(received)) = &message.content else { panic!("{message:?}") };
    received.receive_time.unwrap()
}

impl Setup {
    async fn update(&self, group: v1::Group, field: &str) {
        let update_mask = Some(prost_types::FieldMask { paths: vec![field.to_owned()] });
        let request = v1::UpdateGroupRequest { group: Some(group), update_mask };
        soon("a change", self.groups().update_group(request)).await.unwrap();
    }
}

/// The failure: a place that is found by its time is not the first message of that time, or not found by one of the two calls.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_begins_and_is_moved_to_the_first_message_of_a_time() {
    let setup = Setup::new().await;
    setup.create(v1::Group { replay_age: seconds(3600), ..group("g") }).await;
    let mut device = setup.raw("d", |_| {});
    for text in ["a", "b", "c"] {
        device.publish_acked("up/1", text.as_bytes(), false);
        // Each in a millisecond of its own.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut member = setup.join(open("g")).await;
    let [a, b, c] = [member.message().await, member.message().await, member.message().await];
    assert_eq!([&a, &b, &c].map(payload), ["a", "b", "c"]);
    member.acknowledge(&[1, 2, 3]).await;
    let at = |message| Some(v1::Position { at: Some(At::Time(received(message))) });

    let seek = v1::SeekGroupRequest { name: "g".into(), to: at(&b) };
    soon("a seek", setup.groups().seek_group(seek)).await.unwrap();
    assert_eq!((member.payload().await, member.payload().await), ("b".into(), "c".into()));

    let create = |name: &str, start| v1::CreateGroupRequest {
        group: Some(group(name)),
        start,
        ..v1::CreateGroupRequest::default()
    };
    soon("a group", setup.groups().create_group(create("h", at(&c)))).await.unwrap();
    let mut other = setup.join(open("h")).await;
    assert_eq!(other.payload().await, "c", "and neither of those before");
    // Behind all that is there.
    let later = prost_types::Timestamp { seconds: received(&c).seconds + 3600, nanos: 0 };
    let later = Some(v1::Position { at: Some(At::Time(later)) });
    soon("a group", setup.groups().create_group(create("i", later))).await.unwrap();
    let mut last = setup.join(open("i")).await;
    device.publish_acked("up/1", b"d", false);
    assert_eq!(last.payload().await, "d");
}

/// The failure: a group that is paused delivers, or does not go on where it was.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_paused_keeps_messages_and_takes_acknowledgements() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    let heartbeat_interval = Some(prost_types::Duration { seconds: 0, nanos: 100_000_000 });
    let mut member = setup.join(v1::Open { heartbeat_interval, ..open("g") }).await;
    let mut device = setup.raw("d", |_| {});
    device.publish_acked("up/1", b"before", false);
    let before = member.message().await;
    assert_eq!(payload(&before), "before");

    setup.update(v1::Group { paused: true, ..group("g") }, "paused").await;
    device.publish_acked("up/1", b"meanwhile", false);
    let mut beats = 0;
    while beats < 3 {
        match member.item().await {
            // The first may be from before.
            Item::Heartbeat(beat) => beats += usize::from(beat.status.unwrap().lag_messages == 2),
            other => panic!("delivered: {other:?}"),
        }
    }
    setup.acknowledge_by_range(&mut member, before.delivery_id).await;
    assert_eq!(setup.group_status("g").await.lag_messages, 1);

    setup.update(v1::Group { paused: false, ..group("g") }, "paused").await;
    assert_eq!(member.payload().await, "meanwhile");
}

/// The failure: a change that names the filter it has already is refused, or one with another filter is half made.
#[tokio::test(flavor = "multi_thread")]
async fn the_filter_of_a_group_stays() {
    let setup = Setup::new().await;
    let filter = |topic: &str| v1::Filter { topic_filters: vec![topic.to_owned()], ..Default::default() };
    let named = |topic| v1::Group { filter: Some(filter(topic)), ..group("g") };
    setup.create(named("up/#")).await;
    setup.update(named("up/#"), "filter").await;
    let paths = vec!["paused".to_owned(), "filter".to_owned()];
    let request = v1::UpdateGroupRequest {
        group: Some(v1::Group { paused: true, ..named("#") }),
        update_mask: Some(prost_types::FieldMask { paths }),
    };
    let status = soon("a refusal", setup.groups().update_group(request)).await.unwrap_err();
    assert_eq!(refusal(&status), (Code::FailedPrecondition, "FILTER_IMMUTABLE".to_owned()));
    for step in ["create a group", "drain this one", "delete it"] {
        assert!(status.message().contains(step), "{status}");
    }
    let get = v1::GetGroupRequest { name: "g".to_owned() };
    let shown = soon("a group", setup.groups().get_group(get)).await.unwrap().into_inner().group.unwrap();
    let topics = shown.filter.unwrap_or_default().topic_filters;
    assert_eq!((shown.paused, topics), (false, filter("up/#").topic_filters));
}
