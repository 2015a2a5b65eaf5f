//! The devices of which most waits, and the streams.

use access::backends::Role;
use mqtt_server::proto::gateway::v1::{
    self, DeviceRank, devices_client::DevicesClient, subscriber_client::SubscriberClient,
};
use tokio::task::block_in_place;

use crate::{access::Guarded, client::Got, harness::*};

/// Rules out a ranking by something else, of devices that have nothing, or of those that the caller may not know of.
#[tokio::test(flavor = "multi_thread")]
async fn devices_with_most_waiting_come_first_and_none_out_of_scope() {
    let guarded = Guarded::with(
        &[("all", Role::Admin, None, None), ("some", Role::Reader, None, Some(&["d*"]))],
        |config| {
            config.limits.mailbox_messages = 2;
            config.limits.offline_messages = 4;
        },
    )
    .await;
    let setup = &guarded.setup;
    // More sessions than are looked at in one step.
    let _idle: Vec<_> = block_in_place(|| (0..300).map(|n| setup.raw(&format!("i{n}"), |_| {})).collect());
    let connect = |id: &str| block_in_place(|| setup.raw(id, |connect| connect.receive_maximum = Some(1)));
    let (mut d1, mut d2, _x) = (connect("d1"), connect("d2"), connect("x"));
    let mut publisher = v1::publisher_client::PublisherClient::new(guarded.channel("all"));
    for (id, count, bytes) in [("d1", 3, 10), ("d2", 2, 1_000), ("x", 3, 2_000)] {
        for _ in 0..count {
            let request = v1::PublishRequest { payload: vec![7; bytes].into(), ..to_device(id, "") };
            soon("a publish", publisher.publish(request)).await.unwrap();
        }
    }
    for client in [&mut d1, &mut d2] {
        assert!(matches!(block_in_place(|| client.next()), Got::Publish(..)));
    }
    let top = async |who: &str, rank_by: DeviceRank, limit: i32| {
        let mut devices = DevicesClient::new(guarded.channel(who));
        let request = v1::ListTopDevicesRequest { rank_by: rank_by.into(), limit, ..Default::default() };
        let answer = soon("a ranking", devices.list_top_devices(request)).await.unwrap().into_inner();
        let ids: Vec<String> = answer.devices.into_iter().map(|device| device.device_id).collect();
        (ids.join(" "), answer.ranked)
    };
    assert_eq!(top("all", DeviceRank::PendingBytes, 0).await, ("x d2 d1".to_owned(), 303));
    assert_eq!(top("some", DeviceRank::PendingBytes, 0).await, ("d2 d1".to_owned(), 2));
    assert_eq!(top("some", DeviceRank::Unspecified, 1).await, ("d1".to_owned(), 2));
    assert_eq!(top("some", DeviceRank::Inflight, 0).await.0.len(), 5);
    assert_eq!(top("all", DeviceRank::Dropped, 0).await, (String::new(), 303));
}

/// Rules out that the slowest is not first, that a caller learns of others, and that a stream is listed after its end.
#[tokio::test(flavor = "multi_thread")]
async fn the_slowest_stream_comes_first_and_nobody_sees_those_of_others() {
    let tokens = [
        ("admin", Role::Admin, None, None),
        ("operator", Role::Operator, None, None),
        ("slow", Role::Reader, None, None),
        ("fast", Role::Reader, None, None),
    ];
    let guarded = Guarded::with(&tokens, |_| {}).await;
    let list = async |who: &str, rank_by: v1::StreamRank| {
        let mut streams = SubscriberClient::new(guarded.channel(who));
        let request = v1::ListStreamsRequest { rank_by: rank_by.into(), ..Default::default() };
        let answer = soon("a list", streams.list_streams(request)).await.unwrap().into_inner();
        assert_eq!(answer.ranked, answer.streams.len() as u64);
        answer.streams
    };
    let callers = |streams: &[v1::OpenStream]| {
        streams.iter().map(|stream| stream.caller.clone()).collect::<Vec<_>>().join(" ")
    };
    let subscribe = async |who: &str, filter: &str| {
        let mut client = SubscriberClient::new(guarded.channel(who));
        let request = v1::SubscribeRequest {
            topic_filters: vec![filter.to_owned()],
            buffer_bytes: 1 << 20,
            ..Default::default()
        };
        soon("a subscribe", client.subscribe(request)).await.unwrap().into_inner()
    };
    let _fast = subscribe("fast", "fast/#").await;
    let slow = subscribe("slow", "slow/#").await;
    let mut groups = v1::groups_client::GroupsClient::new(guarded.channel("admin"));
    let group = v1::Group {
        name: "g".into(),
        filter: Some(v1::Filter { topic_filters: vec!["work".into()], ..Default::default() }),
        ..Default::default()
    };
    let create = v1::CreateGroupRequest { group: Some(group), ..Default::default() };
    soon("a group", groups.create_group(create)).await.unwrap();
    let mut member = v1::consumer_client::ConsumerClient::new(guarded.channel("admin"));
    let open = v1::Open { group: "g".into(), member_id: "m".into(), ..Default::default() };
    let open = v1::ConsumeRequest { action: Some(v1::consume_request::Action::Open(open)) };
    let said = tokio_stream::StreamExt::chain(tokio_stream::iter([open]), tokio_stream::pending());
    let mut work = soon("a stream", member.consume(said)).await.unwrap().into_inner();
    let mut publisher = v1::publisher_client::PublisherClient::new(guarded.channel("admin"));
    block_in_place(|| guarded.setup.raw("d", |_| {}).publish_acked("work", b"1", false));
    let got = async {
        let is_message =
            |item: &v1::ConsumeItem| matches!(item.item, Some(v1::consume_item::Item::Message(_)));
        while !work.message().await.unwrap().unwrap().items.iter().any(is_message) {}
    };
    soon("a message", got).await;
    // Bytes that the system takes for a reader do not wait here.
    let lost = async {
        loop {
            let request = v1::PublishRequest { payload: vec![7; 100_000].into(), ..to("slow/1", "") };
            publisher.publish(request).await.unwrap();
            let streams = list("operator", v1::StreamRank::Dropped).await;
            if streams[0].dropped > 0 {
                return streams;
            }
        }
    };
    let streams = soon("a loss", lost).await;
    assert_eq!(callers(&streams), "slow fast admin");
    let first = &streams[0];
    assert_eq!(first.method, "gateway.v1.Subscriber/Subscribe");
    assert_eq!((&first.topic_filters[..], first.topic_filter_count), (&["slow/#".to_owned()][..], 1));
    assert_eq!((first.slow_policy(), first.buffer_bytes), (v1::SlowPolicy::DropOldest, 1 << 20));
    assert!(first.waiting > 0 && first.waiting_bytes > 100_000 && first.waiting_time.is_some(), "{first:?}");
    assert!(first.peer.starts_with("127.0.0.1:") && first.open_time.is_some(), "{first:?}");
    let streams = list("operator", v1::StreamRank::WaitingTime).await;
    assert_eq!(callers(&streams).rsplit(' ').next(), Some("fast"), "nothing waits for it");
    let member = streams.iter().find(|stream| stream.caller == "admin").unwrap();
    assert_eq!((member.group.as_str(), member.member_id.as_str()), ("g", "m"));
    assert_eq!((member.waiting, member.sent, member.method.as_str()), (1, 1, "gateway.v1.Consumer/Consume"));
    assert!(member.waiting_time.is_some(), "{member:?}");

    assert_eq!(callers(&list("slow", v1::StreamRank::WaitingBytes).await), "slow");
    assert_eq!(callers(&list("fast", v1::StreamRank::WaitingBytes).await), "fast");
    drop(slow);
    let gone = async { while list("operator", v1::StreamRank::Dropped).await.len() > 2 {} };
    soon("the end of a stream", gone).await;
}
