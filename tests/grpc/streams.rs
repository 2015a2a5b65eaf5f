//! Subscriber: what streams get, lose and say; how they end.

use gateway_core::units::ByteSize;
use mqtt_server::proto::gateway::v1::{self, subscriber_client::SubscriberClient};
use rumqttc::v5::mqttbytes::{QoS, v5::PublishProperties};
use tonic::{Code, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::harness::*;

#[tokio::test(flavor = "multi_thread")]
async fn every_stream_gets_everything_in_order_and_a_slow_one_holds_up_nobody() {
    let setup = Setup::new().await;
    let device = setup.device("dev").await;
    let wanted =
        v1::SubscribeRequest { topic_filters: vec!["up/#".into()], ..v1::SubscribeRequest::default() };
    let mut slow = setup.subscribe(v1::SubscribeRequest { buffer_bytes: 16 << 10, ..wanted.clone() }).await;
    let mut streams = [setup.subscribe(wanted.clone()).await, setup.subscribe(wanted).await];

    let properties = PublishProperties {
        content_type: Some("text/plain".to_owned()),
        user_properties: vec![("k".to_owned(), "v".to_owned())],
        ..PublishProperties::default()
    };
    let body = "x".repeat(4 << 10);
    let publish = device.client.publish_with_properties("up/0", QoS::AtLeastOnce, false, "0", properties);
    publish.await.unwrap();
    let feed = async {
        for n in 1..400 {
            device.send(&format!("up/{n}"), &body).await;
        }
        device.send("up/end", "end").await;
    };
    let [first, second] = &mut streams;
    let read = async |stream: &mut Messages| {
        for n in 0..400 {
            let message = stream.next().await;
            assert_eq!((message.device_id.as_str(), &message.topic), ("dev", &format!("up/{n}")));
            assert_eq!(message.origin(), v1::Origin::Device);
            if n == 0 {
                let properties = message.properties.unwrap();
                assert_eq!(properties.content_type.as_deref(), Some("text/plain"));
                assert_eq!(properties.user_properties[0].value, "v");
            }
        }
        assert_eq!(stream.next().await.topic, "up/end");
    };
    tokio::join!(feed, read(first), read(second));

    let (mut got, mut lost) = (0, 0);
    loop {
        match slow.item().await {
            v1::subscribe_item::Item::Gap(gap) => {
                assert_eq!(gap.reason(), v1::GapReason::BufferFull);
                lost += gap.count;
            }
            v1::subscribe_item::Item::Message(message) => {
                got += 1;
                if message.topic == "up/end" {
                    break;
                }
            }
            v1::subscribe_item::Item::Heartbeat(_) => {}
        }
    }
    assert!(lost > 0, "the slow stream lost nothing");
    assert_eq!(got + lost, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_ends_streams_with_unavailable() {
    let setup = Setup::new().await;
    let mut health = HealthClient::new(setup.channel.clone());
    let answer = health.check(HealthCheckRequest { service: "gateway.v1.Publisher".to_owned() }).await;
    assert_eq!(answer.unwrap().into_inner().status, 1);
    let mut stream = setup.subscribe(v1::SubscribeRequest::default()).await;
    let ended = tokio::join!(setup.gateway.shutdown(), soon("the end", stream.0.message())).1;
    assert_eq!(refusal(&ended.unwrap_err()), (Code::Unavailable, "SHUTTING_DOWN".to_owned()));
}

/// Few enough for one turn.
const MESSAGES: usize = 250;

/// 1 KiB each on three topics in turn, all routed in one turn of the gateway; the first byte pair numbers them.
async fn burst(setup: &Setup) {
    let message = |n: usize| to(&format!("p/{}", n % 3), &format!("{n:04}{}", "x".repeat(1020)));
    let requests = (0..MESSAGES).map(message).collect();
    soon("a batch", setup.publisher().publish_batch(v1::PublishBatchRequest { requests })).await.unwrap();
}

/// Reads until `total` messages came or are told missing, or the stream ends. (numbers, losses by reason, end)
async fn read(
    stream: &mut Messages,
    total: usize,
) -> (Vec<usize>, Vec<(v1::GapReason, usize)>, Option<tonic::Status>) {
    let (mut numbers, mut gaps) = (Vec::new(), Vec::new());
    while numbers.len() + gaps.iter().map(|(_, count)| count).sum::<usize>() < total {
        let response = match soon("an item", stream.0.message()).await {
            Ok(response) => response.unwrap(),
            Err(status) => return (numbers, gaps, Some(status)),
        };
        for item in response.items {
            match item.item.unwrap() {
                v1::subscribe_item::Item::Message(message) => {
                    numbers.push(std::str::from_utf8(&message.payload[..4]).unwrap().parse().unwrap());
                }
                v1::subscribe_item::Item::Gap(gap) => {
                    gaps.push((gap.reason(), usize::try_from(gap.count).unwrap()));
                }
                v1::subscribe_item::Item::Heartbeat(_) => {}
            }
        }
    }
    (numbers, gaps, None)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_slow_policy_loses_what_it_says_and_tells_how_much() {
    let setup = Setup::new().await;
    let request = |policy: v1::SlowPolicy| v1::SubscribeRequest {
        topic_filters: vec!["p/#".to_owned()],
        slow_policy: policy.into(),
        buffer_bytes: 64 << 10,
        ..v1::SubscribeRequest::default()
    };
    let mut oldest = setup.subscribe(request(v1::SlowPolicy::DropOldest)).await;
    let mut newest = setup.subscribe(request(v1::SlowPolicy::DropNewest)).await;
    let mut conflated = setup.subscribe(request(v1::SlowPolicy::Conflate)).await;
    let mut closed = setup.subscribe(request(v1::SlowPolicy::Close)).await;
    burst(&setup).await;

    let (numbers, gaps, _) = read(&mut oldest, MESSAGES).await;
    assert_eq!(numbers.last(), Some(&(MESSAGES - 1)), "the newest is kept");
    assert!(numbers.is_sorted() && numbers.len() < 100, "{}", numbers.len());
    assert!(gaps.iter().all(|(reason, _)| *reason == v1::GapReason::BufferFull), "{gaps:?}");

    let (numbers, gaps, _) = read(&mut newest, MESSAGES).await;
    assert_eq!(numbers.first(), Some(&0), "the oldest is kept");
    assert!(numbers.is_sorted() && numbers.len() < 200, "{}", numbers.len());
    assert!(gaps.iter().all(|(reason, _)| *reason == v1::GapReason::BufferFull), "{gaps:?}");

    let (numbers, gaps, _) = read(&mut conflated, MESSAGES).await;
    let mut last = numbers[numbers.len() - 3..].to_vec();
    last.sort_unstable();
    assert_eq!(last, [MESSAGES - 3, MESSAGES - 2, MESSAGES - 1], "the last of each topic");
    assert!(gaps.iter().all(|(reason, _)| *reason == v1::GapReason::Conflated), "{gaps:?}");

    let (numbers, gaps, end) = read(&mut closed, MESSAGES).await;
    assert!(gaps.is_empty() && numbers.iter().copied().eq(0..numbers.len()), "{numbers:?}");
    assert_eq!(refusal(&end.unwrap()), (Code::ResourceExhausted, "SLOW_CONSUMER".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_share_the_memory_budget_and_give_it_back_when_they_end() {
    let setup = Setup::with(|config| {
        let limits = &mut config.limits;
        // Room for the request, and for what some of the streams wait to read.
        (limits.memory_budget, limits.stream_buffer) = (ByteSize(4 << 20), ByteSize(1 << 20));
        (limits.mailbox_bytes, limits.offline_bytes) = (ByteSize(64 << 10), ByteSize(64 << 10));
        limits.max_packet_size = ByteSize(32 << 10);
    })
    .await;
    let request = v1::SubscribeRequest {
        topic_filters: vec!["p/#".to_owned()],
        slow_policy: v1::SlowPolicy::DropNewest.into(),
        ..v1::SubscribeRequest::default()
    };
    let mut streams = Vec::new();
    for _ in 0..8 {
        streams.push(setup.subscribe(request.clone()).await);
    }
    let mut requests: Vec<_> =
        (0..MESSAGES).map(|n| to("p/x", &format!("{n:04}{}", "x".repeat(1020)))).collect();
    requests.iter_mut().for_each(|request| request.qos = v1::Qos::AtMostOnce.into());
    setup.publisher().publish_batch(v1::PublishBatchRequest { requests }).await.unwrap();
    let mut told = 0;
    for stream in &mut streams {
        let (_, gaps, _) = read(stream, MESSAGES).await;
        told += gaps.iter().filter(|(reason, _)| *reason == v1::GapReason::Memory).count();
    }
    assert!(told > 0, "none was told of the budget");
    drop(streams);
    let released = async {
        while setup.gateway.broker().gauges().queued_bytes > 0 {
            tokio::task::yield_now().await;
        }
    };
    soon("the release of the budget", released).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_says_not_serving_while_the_gateway_shuts_down() {
    let setup = Setup::new().await;
    let mut health = HealthClient::new(setup.channel.clone());
    let request = HealthCheckRequest { service: "gateway.v1.Subscriber".to_owned() };
    let mut watch = soon("a watch", health.watch(request)).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let told = async {
        let answer = soon("a change", watch.message()).await.unwrap().unwrap().status();
        drop(watch);
        answer
    };
    assert_eq!(tokio::join!(setup.gateway.shutdown(), told).1, ServingStatus::NotServing);
}

/// The failure: a backend that asks for the health of the services it needs is sent to a gateway that refuses each of its calls.
#[tokio::test(flavor = "multi_thread")]
async fn services_that_are_switched_off_are_not_serving() {
    let statuses = async |change: fn(&mut config::Config)| {
        let setup = Setup::with(change).await;
        let mut health = HealthClient::new(setup.channel.clone());
        let mut off = Vec::new();
        for service in
            ["", "Publisher", "State", "Devices", "Groups", "Consumer", "Shadows", "Commands", "Security"]
        {
            let full = if service.is_empty() { String::new() } else { format!("gateway.v1.{service}") };
            let answer = soon("health", health.check(HealthCheckRequest { service: full })).await.unwrap();
            match answer.into_inner().status() {
                ServingStatus::Serving => {}
                ServingStatus::NotServing => off.push(service),
                other => panic!("{service}: {other:?}"),
            }
        }
        off
    };
    assert_eq!(statuses(|_| {}).await, [""; 0]);
    assert_eq!(statuses(|config| config.groups.enabled = false).await, ["Groups", "Consumer"]);
    assert_eq!(statuses(|config| config.shadow.enabled = false).await, ["Shadows"]);
    assert_eq!(statuses(|config| config.commands.enabled = false).await, ["Commands"]);
    assert_eq!(statuses(|config| config.latest.enabled = false).await, ["State"]);
    assert_eq!(statuses(|config| config.store.enabled = false).await, ["Groups", "Consumer"]);
}

/// Bytes on the account for what streams hold.
async fn held_by_streams(setup: &Setup) -> u64 {
    let mut operations = v1::operations_client::OperationsClient::new(setup.channel.clone());
    let name_prefixes = vec!["gateway_memory_bytes".to_owned()];
    let metrics = operations.get_metrics(v1::GetMetricsRequest { name_prefixes }).await.unwrap();
    let is_of_streams = |metric: &&v1::Metric| metric.labels.values().any(|label| label == "grpc_streams");
    metrics.into_inner().metrics.iter().find(is_of_streams).map_or(0, |metric| metric.value as u64)
}

/// The failure: one reader without topics holds a gigabyte by streams that ask for 1,000 devices each.
#[tokio::test(flavor = "multi_thread")]
async fn devices_and_filters_of_every_stream_are_on_the_account() {
    let setup = Setup::new().await;
    let ids: Vec<String> = (0..1_000).map(|n| format!("a-device-of-many-{n}")).collect();
    let least = 1_000 * 100;
    assert_eq!(held_by_streams(&setup).await, 0);
    let check = async |what: &str| {
        let held = held_by_streams(&setup).await;
        assert!(held >= least, "{what}: {held}");
    };
    let ended = async || {
        let given_back = async { while held_by_streams(&setup).await > 0 {} };
        soon("memory given back", given_back).await;
    };
    let subscribed =
        setup.subscribe(v1::SubscribeRequest { device_ids: ids.clone(), ..Default::default() }).await;
    check("Subscribe by devices").await;
    drop(subscribed);
    ended().await;
    let subscribed =
        setup.subscribe(v1::SubscribeRequest { topic_filters: ids.clone(), ..Default::default() }).await;
    check("Subscribe by filters").await;
    drop(subscribed);
    ended().await;
    let request = v1::WatchLatestRequest { device_ids: ids.clone(), ..Default::default() };
    let watched = setup.state().watch_latest(request).await.unwrap();
    check("WatchLatest").await;
    drop(watched);
    ended().await;
    let mut events = v1::events_client::EventsClient::new(setup.channel.clone());
    let request = v1::WatchEventsRequest { device_ids: ids.clone(), ..Default::default() };
    let watched = events.watch_events(request).await.unwrap();
    check("WatchEvents").await;
    drop(watched);
    ended().await;
    let mut shadows = v1::shadows_client::ShadowsClient::new(setup.channel.clone());
    let request = v1::WatchShadowRequest { device_ids: ids, changes_only: true, ..Default::default() };
    let watched = shadows.watch_shadow(request).await.unwrap();
    check("WatchShadow").await;
    drop(watched);
    ended().await;
}

/// The failure: one caller has every stream and every call, and others have none.
#[tokio::test(flavor = "multi_thread")]
async fn a_caller_has_a_share_of_streams_and_calls_and_leaves_some_to_others() {
    let setup = Setup::with(|config| {
        config.grpc.max_streams = 8;
        config.grpc.max_calls = 16;
    })
    .await;
    // Nobody is asked who it is: addresses are told apart.
    let address = format!("http://{}", setup.gateway.address("grpc").unwrap());
    let at = async |host: u8| {
        let endpoint = Channel::from_shared(address.clone()).unwrap();
        endpoint.local_address(Some([127, 0, 0, host].into())).connect().await.unwrap()
    };
    let (other, third) = (at(2).await, at(3).await);
    let mut held = Vec::new();
    let refused = loop {
        match SubscriberClient::new(setup.channel.clone()).subscribe(v1::SubscribeRequest::default()).await {
            Ok(stream) => held.push(stream),
            Err(status) => break status,
        }
    };
    assert_eq!(held.len(), 6, "the last quarter is for others");
    assert_eq!(refusal(&refused), (Code::ResourceExhausted, "TOO_MANY_STREAMS".to_owned()));
    assert!(refused.message().contains("of this caller"), "{}", refused.message());
    let of_other = SubscriberClient::new(other).subscribe(v1::SubscribeRequest::default()).await.unwrap();

    let mut watches = Vec::new();
    let refused = loop {
        match HealthClient::new(setup.channel.clone()).watch(HealthCheckRequest::default()).await {
            Ok(watch) => watches.push(watch),
            Err(status) => break status,
        }
    };
    assert_eq!(refusal(&refused), (Code::ResourceExhausted, "TOO_MANY_CALLS".to_owned()));
    assert!(refused.message().contains("of this caller"), "{}", refused.message());
    assert_eq!(held.len() + watches.len(), 11, "with that of the other three quarters of 16");
    HealthClient::new(third).watch(HealthCheckRequest::default()).await.unwrap();
    drop((held, watches, of_other));
    let given_back = async {
        let mut client = SubscriberClient::new(setup.channel.clone());
        while client.subscribe(v1::SubscribeRequest::default()).await.is_err() {}
    };
    soon("places given back", given_back).await;
}
