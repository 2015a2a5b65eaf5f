//! Data out of a caller's scope is denied if it is named, and left out if it is described.

use access::backends::Role;
use mqtt_server::proto::{
    gateway::v1::{
        self, commands_client::CommandsClient, devices_client::DevicesClient, events_client::EventsClient,
        publisher_client::PublisherClient, state_client::StateClient, subscribe_item,
        subscriber_client::SubscriberClient, watch_events_item, watch_latest_item,
    },
    rpcserver::{self, published_packet_service_client::PublishedPacketServiceClient},
};
use rumqttc::v5::mqttbytes::QoS;
use tonic::{Code, Status};

use super::{Authorized, Guarded};
use crate::harness::*;

const TOPICS: &[&str] = &["t/a/#", "only"];
const DEVICES: &[&str] = &["a-*"];

/// Tokens of everybody, and of a tenant whose devices are `a-...` and whose topics are below `t/a`.
async fn tenant() -> Guarded {
    Guarded::with(
        &[
            ("root", Role::Admin, None, None),
            ("tenant", Role::Publisher, Some(TOPICS), Some(DEVICES)),
            ("topics", Role::Admin, Some(TOPICS), None),
            ("operator", Role::Operator, None, Some(DEVICES)),
        ],
        |_| {},
    )
    .await
}

fn denied<T: std::fmt::Debug>(answer: Result<tonic::Response<T>, Status>, field: &str) {
    let status = answer.unwrap_err();
    assert_eq!(refusal(&status), (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned()));
    assert!(status.message().starts_with(field), "{status}");
}

fn get(topic: &str, device: Option<&str>) -> v1::GetLatestRequest {
    v1::GetLatestRequest { topic: topic.to_owned(), device_id: device.map(str::to_owned) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_reaches_its_topics_and_devices_alone() {
    let guarded = tenant().await;
    let mut device = guarded.setup.device("a-1").await;
    device.client.subscribe("#", QoS::AtLeastOnce).await.unwrap();
    let other = guarded.setup.device("b-1").await;
    let mut tenant = PublisherClient::new(guarded.channel("tenant"));
    let to_one = |device: &str, topic: &str| v1::PublishRequest {
        device_id: Some(device.to_owned()),
        ..to(topic, "direct")
    };
    denied(tenant.publish(to("t/b", "x")).await, "topic");
    denied(tenant.publish(to_one("b-1", "t/a")).await, "device_id");
    denied(tenant.publish(to_one("a-1", "t/b")).await, "topic");
    tenant.publish(to_one("a-1", "t/a/own")).await.unwrap();
    assert_eq!(device.next().await.0, "t/a/own");

    let requests = vec![to("t/a/1", "x"), to("t/b/1", "x"), to_one("b-1", "t/a"), to("t/a/2", "x")];
    let batch = v1::PublishBatchRequest { requests: requests.clone() };
    let results = tenant.publish_batch(batch).await.unwrap().into_inner().results;
    let reasons = |results: Vec<v1::PublishResult>| -> Vec<String> {
        let of = |result: v1::PublishResult| match result.result.unwrap() {
            v1::publish_result::Result::Error(error) => error.reason,
            v1::publish_result::Result::Response(_) => String::new(),
        };
        results.into_iter().map(of).collect()
    };
    let expected = ["", "OUT_OF_SCOPE", "OUT_OF_SCOPE", ""];
    assert_eq!(reasons(results), expected);
    assert_eq!((device.next().await.0, device.next().await.0), ("t/a/1".to_owned(), "t/a/2".to_owned()));
    let frame = v1::PublishStreamRequest { requests, ..v1::PublishStreamRequest::default() };
    let mut stream = tenant.publish_stream(tokio_stream::once(frame)).await.unwrap().into_inner();
    let mut results = Vec::new();
    while let Some(response) = soon("results", stream.message()).await.unwrap() {
        results.extend(response.results.into_iter().filter_map(|result| result.result));
    }
    assert_eq!(reasons(results), expected);

    let mut old = PublishedPacketServiceClient::new(guarded.channel("tenant"));
    let request = |device: &str, topic: &str| rpcserver::PublishRequest {
        device_id: device.to_owned(),
        topic: topic.to_owned(),
        payload: "x".into(),
    };
    denied(old.publish_payload_to_device(request("b-1", "t/a")).await, "device_id");
    denied(old.publish_payload_to_device(request("a-1", "t/b")).await, "topic");
    old.publish_payload_to_device(request("a-1", "t/a")).await.unwrap();
    let mut state = StateClient::new(guarded.channel("tenant"));
    let set = |topic: &str| v1::SetRetainedRequest {
        topic: topic.to_owned(),
        payload: "x".into(),
        ..Default::default()
    };
    denied(state.set_retained(set("t/b")).await, "topic");
    state.set_retained(set("t/a/r")).await.unwrap();
    drop(other);
}

/// One message after the other, of which only the last is in the tenant's scope, then what streams show.
#[tokio::test(flavor = "multi_thread")]
async fn streams_carry_what_is_in_scope_and_nothing_else() {
    let guarded = tenant().await;
    let (own, other) = (guarded.setup.device("a-1").await, guarded.setup.device("b-1").await);
    let tenant: Authorized = guarded.channel("tenant");
    let mut subscriber = SubscriberClient::new(tenant.clone());
    let filters = |filters: &[&str]| v1::SubscribeRequest {
        topic_filters: filters.iter().map(|filter| (*filter).to_owned()).collect(),
        ..v1::SubscribeRequest::default()
    };
    denied(subscriber.subscribe(filters(&["t/b"])).await, "topic_filters");
    denied(subscriber.subscribe(filters(&["t/b/#", "x/+"])).await, "topic_filters");
    denied(subscriber.subscribe(filters(&["t/a/#", "t/b"])).await, "topic_filters");
    let of_other = v1::SubscribeRequest { device_ids: vec!["b-1".to_owned()], ..filters(&[]) };
    denied(subscriber.subscribe(of_other).await, "device_ids");
    let prefix = v1::SubscribeRequest { device_id_prefixes: vec![String::from("b")], ..filters(&["t/+/#"]) };
    let mut nothing = subscriber.subscribe(prefix).await.unwrap().into_inner();
    let mut all = subscriber.subscribe(filters(&[])).await.unwrap().into_inner();
    let mut wild = subscriber.subscribe(filters(&["+/+/#"])).await.unwrap().into_inner();
    let mut old = PublishedPacketServiceClient::new(tenant.clone());
    let request =
        |device: Option<&str>| rpcserver::PublishedPacketRequest { device_id: device.map(str::to_owned) };
    denied(old.stream_published_payload(request(Some("b-1"))).await, "device_id");
    let mut packets = old.stream_published_payload(request(None)).await.unwrap().into_inner();
    let mut state = StateClient::new(tenant.clone());
    let mut events = EventsClient::new(tenant);
    let of =
        |device: &str| v1::WatchEventsRequest { device_ids: vec![device.to_owned()], ..Default::default() };
    denied(events.watch_events(of("b-1")).await, "device_ids");
    let mut events = events.watch_events(v1::WatchEventsRequest::default()).await.unwrap().into_inner();
    assert!(soon("its beginning", events.message()).await.unwrap().unwrap().items.is_empty());
    let watch = v1::WatchLatestRequest { topic_filters: vec!["t/b".to_owned()], ..Default::default() };
    denied(state.watch_latest(watch).await, "topic_filters");
    let watch = v1::WatchLatestRequest { device_ids: vec!["b-1".to_owned()], ..Default::default() };
    denied(state.watch_latest(watch).await, "device_ids");

    other.send("t/a/theirs", "of another device").await;
    own.send("t/b/theirs", "on another topic").await;
    own.send("$SYSX/x", "on a hidden topic").await;
    // A message without a device is out of scope where devices are limited.
    PublisherClient::new(guarded.channel("root")).publish(to("t/a/backend", "x")).await.unwrap();
    // The broker has had all of the messages when it has this one.
    let mut root = StateClient::new(guarded.channel("root"));
    let there = async |state: &mut StateClient<Authorized>, device: &str, topic: &str| {
        soon(topic, async { while state.get_latest(get(topic, Some(device))).await.is_err() {} }).await;
    };
    there(&mut root, "b-1", "t/a/theirs").await;
    there(&mut root, "a-1", "t/b/theirs").await;
    own.send("t/a/own", "mine").await;
    there(&mut root, "a-1", "t/a/own").await;

    for stream in [&mut all, &mut wild] {
        let items = soon("a message", stream.message()).await.unwrap().unwrap().items;
        let Some(subscribe_item::Item::Message(message)) = &items[0].item else { panic!("{items:?}") };
        assert_eq!((message.topic.as_str(), message.device_id.as_str(), items.len()), ("t/a/own", "a-1", 1));
    }
    let packet = soon("a packet", packets.message()).await.unwrap().unwrap();
    assert_eq!((packet.topic.as_str(), packet.device_id.as_str()), ("t/a/own", "a-1"));

    // A snapshot, then what changes and what is deleted.
    let mut values = state.watch_latest(v1::WatchLatestRequest::default()).await.unwrap().into_inner();
    let mut next = async || soon("a value", values.message()).await.unwrap().unwrap().items;
    let mut seen = next().await;
    while !matches!(
        seen.last().and_then(|item| item.item.as_ref()),
        Some(watch_latest_item::Item::SnapshotEnd(_))
    ) {
        seen.extend(next().await);
    }
    let topics: Vec<_> = seen
        .iter()
        .filter_map(|item| match item.item.as_ref()? {
            watch_latest_item::Item::Value(value) => Some((value.device_id.as_str(), value.topic.as_str())),
            _ => None,
        })
        .collect();
    assert_eq!(topics, [("a-1", "t/a/own")]);
    let delete = |device: &str| v1::DeleteLatestRequest {
        device_id: device.to_owned(),
        topic_filter: "#".to_owned(),
        ..Default::default()
    };
    root.delete_latest(delete("b-1")).await.unwrap();
    root.delete_latest(delete("a-1")).await.unwrap();
    let removed = next().await;
    let [v1::WatchLatestItem { item: Some(watch_latest_item::Item::Removed(removed)) }] = removed.as_slice()
    else {
        panic!("{removed:?}");
    };
    assert_eq!((removed.device_id.as_str(), removed.topic.as_str()), ("a-1", "t/a/own"));

    // Events of its own devices, and of subscriptions on its own topics.
    for device in [&other, &own] {
        for filter in ["t/b/#", "$share/g/t/b/x", "$share/g/t/a/+"] {
            device.client.subscribe(filter, QoS::AtMostOnce).await.unwrap();
        }
    }
    let items = soon("an event", events.message()).await.unwrap().unwrap().items;
    let Some(watch_events_item::Item::Event(event)) = &items[0].item else { panic!("{items:?}") };
    let Some(v1::event::Detail::Subscribed(subscribed)) = &event.detail else { panic!("{event:?}") };
    assert_eq!((event.device_id.as_str(), subscribed.topic_filter.as_str()), ("a-1", "$share/g/t/a/+"));
    drop(guarded);
    // The gateway's end ends it, and it had nothing until then.
    while let Ok(Some(response)) = soon("the end", nothing.message()).await {
        assert!(response.items.is_empty(), "{response:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn values_and_retained_messages_out_of_scope_are_not_shown() {
    let guarded = tenant().await;
    let (own, other) = (guarded.setup.device("a-1").await, guarded.setup.device("b-1").await);
    let mut root = StateClient::new(guarded.channel("root"));
    let mut tenant = StateClient::new(guarded.channel("tenant"));
    // One after the other: a retained message is that of the last one.
    for (id, device) in [("a-1", &own), ("b-1", &other)] {
        for topic in ["t/a/x", "t/b/x"] {
            device.client.publish(topic, QoS::AtLeastOnce, true, topic.to_owned()).await.unwrap();
        }
        soon("values", async { while root.get_latest(get("t/b/x", Some(id))).await.is_err() {} }).await;
    }
    tenant.get_latest(get("t/a/x", Some("a-1"))).await.unwrap();
    denied(tenant.get_latest(get("t/a/x", Some("b-1"))).await, "device_id");
    denied(tenant.get_latest(get("t/b/x", Some("a-1"))).await, "topic");
    denied(tenant.get_latest(get("t/a/x", None)).await, "device_id");
    let requests = vec![get("t/a/x", Some("a-1")), get("t/a/x", Some("b-1"))];
    let batch = v1::BatchGetLatestRequest { requests };
    denied(tenant.batch_get_latest(batch.clone()).await, "requests[1].device_id");
    assert_eq!(root.batch_get_latest(batch).await.unwrap().into_inner().entries.len(), 2);

    let list = |devices: &[&str], filter: &str| v1::ListLatestRequest {
        device_ids: devices.iter().map(|device| (*device).to_owned()).collect(),
        topic_filter: filter.to_owned(),
        ..Default::default()
    };
    for request in [list(&[], ""), list(&["a-1"], ""), list(&[], "t/+/x")] {
        let values = tenant.list_latest(request).await.unwrap().into_inner().values;
        let seen: Vec<_> = values.iter().map(|v| (v.device_id.as_str(), v.topic.as_str())).collect();
        assert_eq!(seen, [("a-1", "t/a/x")]);
    }
    denied(tenant.list_latest(list(&["a-1", "b-1"], "")).await, "device_ids");
    denied(tenant.list_latest(list(&[], "t/b/+")).await, "topic_filter");
    // Page by page, some of them empty, to the end.
    let mut request = v1::ListLatestRequest { page_size: 1, ..list(&[], "") };
    let mut seen = 0;
    loop {
        let page = tenant.list_latest(request.clone()).await.unwrap().into_inner();
        seen += page.values.len();
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!(seen, 1);

    let history = |device: &str, topic: &str| v1::ListHistoryRequest {
        device_id: device.to_owned(),
        topic: topic.to_owned(),
        ..Default::default()
    };
    denied(tenant.list_history(history("b-1", "t/a/x")).await, "device_id");
    denied(tenant.list_history(history("a-1", "t/b/x")).await, "topic");
    let off = tenant.list_history(history("a-1", "t/a/x")).await.unwrap_err();
    assert_eq!(refusal(&off).1, "HISTORY_OFF");

    // The last one to set it was the other device.
    let retained = |topic: &str| v1::GetRetainedRequest { topic: topic.to_owned() };
    assert_eq!(tenant.get_retained(retained("t/a/x")).await.unwrap_err().code(), Code::NotFound);
    denied(tenant.get_retained(retained("t/b/x")).await, "topic");
    let all = v1::ListRetainedRequest::default();
    assert!(tenant.list_retained(all.clone()).await.unwrap().into_inner().messages.is_empty());
    let mut topics = StateClient::new(guarded.channel("topics"));
    topics.get_retained(retained("t/a/x")).await.unwrap();
    let messages = topics.list_retained(all).await.unwrap().into_inner().messages;
    assert_eq!(messages.iter().map(|message| message.topic.as_str()).collect::<Vec<_>>(), ["t/a/x"]);
    let of_others = v1::ListRetainedRequest { topic_filter: "t/b/#".to_owned(), ..Default::default() };
    denied(topics.list_retained(of_others).await, "topic_filter");

    // A filter deletes only messages in scope.
    let named = v1::DeleteRetainedRequest { topic: "t/b/x".to_owned(), ..Default::default() };
    denied(topics.delete_retained(named).await, "topic");
    let wide = v1::DeleteRetainedRequest { topic_filter: "#".to_owned(), ..Default::default() };
    assert_eq!(topics.delete_retained(wide).await.unwrap().into_inner().count, 1);
    root.get_retained(retained("t/b/x")).await.unwrap();
    let delete = v1::DeleteLatestRequest {
        device_id: "a-1".to_owned(),
        topic_filter: "#".to_owned(),
        ..Default::default()
    };
    let mut operator = StateClient::new(guarded.channel("operator"));
    let theirs = v1::DeleteLatestRequest { device_id: "b-1".to_owned(), ..delete.clone() };
    denied(operator.delete_latest(theirs).await, "device_id");
    let named =
        v1::DeleteLatestRequest { topic: "t/b/x".to_owned(), topic_filter: String::new(), ..delete.clone() };
    denied(topics.delete_latest(named).await, "topic");
    assert_eq!(topics.delete_latest(delete.clone()).await.unwrap().into_inner().count, 1);
    assert_eq!(operator.delete_latest(delete).await.unwrap().into_inner().count, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_out_of_scope_are_not_shown_and_not_touched() {
    let guarded = tenant().await;
    let (own, _other) = (guarded.setup.device("a-1").await, guarded.setup.device("b-1").await);
    for filter in ["t/a/1", "t/b/1", "$share/g/t/+/2"] {
        own.client.subscribe(filter, QoS::AtMostOnce).await.unwrap();
    }
    let mut root = DevicesClient::new(guarded.channel("root"));
    let mut tenant = DevicesClient::new(guarded.channel("tenant"));
    let mut operator = DevicesClient::new(guarded.channel("operator"));
    let get = |device: &str| v1::GetDeviceRequest { device_id: device.to_owned(), view: 0 };
    let all = async |client: &mut DevicesClient<Authorized>| {
        client.get_device(get("a-1")).await.unwrap().into_inner().device.unwrap().subscriptions.len()
    };
    soon("subscriptions", async { while all(&mut root).await < 3 {} }).await;
    assert_eq!(all(&mut tenant).await, 2, "those on its topics");
    denied(tenant.get_device(get("b-1")).await, "device_id");
    let list = v1::ListDevicesRequest { view: v1::DeviceView::Full.into(), ..Default::default() };
    let devices = tenant.list_devices(list).await.unwrap().into_inner().devices;
    let seen: Vec<_> =
        devices.iter().map(|device| (device.device_id.as_str(), device.subscriptions.len())).collect();
    assert_eq!(seen, [("a-1", 2)]);
    let subscriptions =
        |device: &str| v1::ListSubscriptionsRequest { device_id: device.to_owned(), ..Default::default() };
    denied(tenant.list_subscriptions(subscriptions("b-1")).await, "device_id");
    let seen = tenant.list_subscriptions(subscriptions("a-1")).await.unwrap().into_inner().subscriptions;
    assert_eq!(seen.len(), 2);

    let disconnect =
        |device: &str| v1::DisconnectDeviceRequest { device_id: device.to_owned(), ..Default::default() };
    denied(operator.disconnect_device(disconnect("b-1")).await, "device_id");
    let trace = |device: &str| v1::SetDeviceTraceRequest { device_id: device.to_owned(), enabled: false };
    denied(operator.set_device_trace(trace("b-1")).await, "device_id");
    operator.set_device_trace(trace("a-1")).await.unwrap();
    let delete = |device: &str| v1::DeleteDeviceRequest { device_id: device.to_owned() };
    denied(operator.delete_device(delete("b-1")).await, "device_id");
    let mut topics = DevicesClient::new(guarded.channel("topics"));
    denied(topics.delete_device(delete("a-1")).await, "device_id");
    operator.disconnect_device(disconnect("a-1")).await.unwrap();
    assert!(operator.delete_device(delete("a-1")).await.unwrap().into_inner().session_ended);
    assert!(root.get_device(get("b-1")).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_are_for_devices_and_topics_in_scope_alone() {
    let guarded = tenant().await;
    let start = |id: &str, device: &str| v1::StartCommandRequest {
        command_id: id.to_owned(),
        spec: Some(crate::commands::spec(device)),
        ..v1::StartCommandRequest::default()
    };
    let send = |device: &str| v1::SendRequest {
        spec: Some(crate::commands::spec(device)),
        ..v1::SendRequest::default()
    };
    let of = |id: &str| v1::GetCommandRequest { command_id: id.to_owned() };
    let mut root = CommandsClient::new(guarded.channel("root"));
    root.start_command(start("1", "a-1")).await.unwrap();
    root.start_command(start("2", "b-1")).await.unwrap();
    // By device, and by the topic that a command has.
    let mut tenant = CommandsClient::new(guarded.channel("tenant"));
    denied(tenant.send(send("b-1")).await, "spec.device_id");
    denied(tenant.start_command(start("3", "a-1")).await, "spec.name");
    let mut operator = CommandsClient::new(guarded.channel("operator"));
    assert_eq!(operator.get_command(of("1")).await.unwrap().into_inner().command.unwrap().command_id, "1");
    let unknown = operator.get_command(of("3")).await.unwrap_err();
    let hidden = operator.get_command(of("2")).await.unwrap_err();
    assert_eq!((refusal(&hidden), hidden.message()), (refusal(&unknown), unknown.message()));
    assert_eq!(hidden.code(), Code::NotFound);
    let watched = operator.watch_command(v1::WatchCommandRequest { command_id: "2".to_owned() }).await;
    assert_eq!(watched.unwrap_err().code(), Code::NotFound);
    let all = operator.list_commands(v1::ListCommandsRequest::default()).await.unwrap().into_inner();
    assert_eq!(all.commands.iter().map(|command| &*command.command_id).collect::<Vec<_>>(), ["1"]);
    let other = v1::ListCommandsRequest { device_id: "b-1".to_owned(), ..Default::default() };
    denied(operator.list_commands(other).await, "device_id");
}
