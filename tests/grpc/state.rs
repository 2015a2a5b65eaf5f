//! State: latest values and retained messages.

use bytes::Bytes;
use mqtt_server::proto::gateway::v1;
use tonic::Code;

use crate::{client::Got, harness::*};

#[tokio::test(flavor = "multi_thread")]
async fn latest_values_are_read_listed_and_watched() {
    use v1::watch_latest_item::Item;

    let setup = Setup::new().await;
    let device = setup.device("dev").await;
    let mut stream = setup.subscribe(v1::SubscribeRequest::default()).await;
    device.send("t/1", "one").await;
    stream.next().await;
    let get = v1::GetLatestRequest { topic: "t/1".to_owned(), device_id: Some("dev".to_owned()) };
    let value = setup.state().get_latest(get).await.unwrap().into_inner().value.unwrap();
    assert_eq!((value.device_id.as_str(), &value.payload[..]), ("dev", &b"one"[..]));
    let list = v1::ListLatestRequest { topic_filter: "t/#".to_owned(), ..v1::ListLatestRequest::default() };
    assert_eq!(
        setup.state().list_latest(list).await.unwrap().into_inner().values,
        std::slice::from_ref(&value)
    );

    let watch = v1::WatchLatestRequest { topic_filters: vec!["t/#".into()], ..Default::default() };
    let mut watch = setup.state().watch_latest(watch).await.unwrap().into_inner();
    let mut items = Vec::new();
    while !matches!(items.last(), Some(Item::SnapshotEnd(_))) {
        let response = soon("the snapshot", watch.message()).await.unwrap().unwrap();
        items.extend(response.items.into_iter().filter_map(|item| item.item));
    }
    assert_eq!(items[0], Item::Value(value));
    device.send("t/1", "two").await;
    let response = soon("a change", watch.message()).await.unwrap().unwrap();
    let Some(Item::Value(value)) = &response.items[0].item else { panic!("{response:?}") };
    assert_eq!(value.payload, "two");
}

/// Before, each filter that matched sent it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_with_overlapping_filters_sends_each_current_value_once() {
    use v1::watch_latest_item::Item;

    let setup = Setup::new().await;
    let device = setup.device("dev").await;
    let mut stream = setup.subscribe(v1::SubscribeRequest::default()).await;
    for topic in ["t/1", "t/2", "u"] {
        device.send(topic, "x").await;
        stream.next().await;
    }
    let filters = ["t/#", "t/1", "+/2", "#", "u"].map(str::to_owned).to_vec();
    let watch = v1::WatchLatestRequest { topic_filters: filters, ..Default::default() };
    let mut watch = setup.state().watch_latest(watch).await.unwrap().into_inner();
    let mut topics = Vec::new();
    'snapshot: loop {
        let response = soon("the snapshot", watch.message()).await.unwrap().unwrap();
        for item in response.items.into_iter().filter_map(|item| item.item) {
            match item {
                Item::Value(value) => topics.push(value.topic),
                Item::SnapshotEnd(_) => break 'snapshot,
                _ => {}
            }
        }
    }
    topics.sort();
    assert_eq!(topics, ["t/1", "t/2", "u"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn retained_messages_are_set_read_listed_and_deleted() {
    let setup = Setup::new().await;
    let mut state = setup.state();
    let set = |payload: &'static str| v1::SetRetainedRequest {
        topic: "r/1".to_owned(),
        payload: Bytes::from(payload),
        ..v1::SetRetainedRequest::default()
    };
    assert!(!state.set_retained(set("a")).await.unwrap().into_inner().replaced);
    assert!(state.set_retained(set("b")).await.unwrap().into_inner().replaced);
    let get = v1::GetRetainedRequest { topic: "r/1".to_owned() };
    let got = state.get_retained(get.clone()).await.unwrap().into_inner().message.unwrap();
    assert_eq!(got.payload, "b");
    let list = v1::ListRetainedRequest { topic_filter: "r/+".to_owned(), ..Default::default() };
    assert_eq!(state.list_retained(list).await.unwrap().into_inner().messages.len(), 1);
    let delete = v1::DeleteRetainedRequest { topic: "r/1".to_owned(), ..Default::default() };
    assert!(state.delete_retained(delete.clone()).await.unwrap().into_inner().count > 0);
    assert!(state.delete_retained(delete).await.unwrap().into_inner().count == 0);
    assert_eq!(state.get_retained(get).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_latest_values_answers_in_order_with_holes() {
    let setup = Setup::new().await;
    let (first, second) = (setup.device("d1").await, setup.device("d2").await);
    let mut stream = setup.subscribe(v1::SubscribeRequest::default()).await;
    first.send("t", "1").await;
    stream.next().await;
    second.send("t", "2").await;
    stream.next().await;
    setup.publish(to("t", "of a backend")).await.unwrap();
    let get = |topic: &str, device: Option<&str>| v1::GetLatestRequest {
        topic: topic.to_owned(),
        device_id: device.map(str::to_owned),
    };
    let requests = vec![
        get("t", Some("d1")),
        get("u", Some("d1")),
        get("t", None),
        get("t", Some("d3")),
        get("t", Some("d2")),
    ];
    let answer = setup.state().batch_get_latest(v1::BatchGetLatestRequest { requests }).await.unwrap();
    let payloads: Vec<Option<Bytes>> =
        answer.into_inner().entries.into_iter().map(|entry| entry.value.map(|value| value.payload)).collect();
    let expected = [Some("1"), None, Some("2"), None, Some("2")].map(|text| text.map(Bytes::from));
    assert_eq!(payloads, expected);
    let missing = setup.state().get_latest(get("u", None)).await.unwrap_err();
    assert_eq!(refusal(&missing), (Code::NotFound, "VALUE_NOT_FOUND".to_owned()));
    let requests = vec![get("t", None), get("t/#", None)];
    let bad = setup.state().batch_get_latest(v1::BatchGetLatestRequest { requests }).await.unwrap_err();
    assert_eq!(bad.code(), Code::InvalidArgument);
}

/// Values that do not fit the answer are asked for again, from the place it names; no default client is ever sent more
/// than it takes.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_large_values_ends_early_and_says_where() {
    let setup = Setup::new().await;
    let mut stream = setup.subscribe(v1::SubscribeRequest::default()).await;
    let device = setup.device("big").await;
    for n in 0..8 {
        device.send(&format!("t/{n}"), &n.to_string().repeat(700_000)).await;
        stream.next().await;
    }
    let topics: Vec<_> = (0..9).map(|n| format!("t/{n}")).collect();
    let mut requests: Vec<_> = topics
        .iter()
        .map(|topic| v1::GetLatestRequest { topic: topic.clone(), device_id: Some("big".to_owned()) })
        .collect();
    let (mut seen, mut calls) = (Vec::new(), 0);
    loop {
        let request = v1::BatchGetLatestRequest { requests: requests.clone() };
        let answer = setup.state().batch_get_latest(request).await.unwrap().into_inner();
        calls += 1;
        seen.extend(answer.entries.into_iter().map(|entry| entry.value.map(|value| value.topic)));
        match answer.next_index {
            0 => break,
            next => drop(requests.drain(..next as usize)),
        }
    }
    let expected = topics.into_iter().map(|topic| Some(topic).filter(|topic| topic != "t/8"));
    assert_eq!((seen, calls), (expected.collect(), 2));
}

/// Above the limit a caller must learn that from the status, whatever the kind of call, and a packed request by what it
/// is unpacked: a few kilobytes could otherwise fill the memory.
#[tokio::test(flavor = "multi_thread")]
async fn requests_above_the_limit_are_refused_by_name_packed_or_not() {
    use mqtt_server::proto::gateway::v1::publisher_client::PublisherClient;
    use tonic::codec::CompressionEncoding::Gzip;

    let setup = Setup::new().await;
    let limit: usize = 16 << 20;
    let large =
        |size: usize| v1::PublishBatchRequest { requests: vec![to("a", &"x".repeat(1 << 20)); size >> 20] };
    let refused = (Code::ResourceExhausted, "REQUEST_TOO_LARGE".to_owned());
    let packing = || PublisherClient::new(setup.channel.clone()).send_compressed(Gzip);
    for mut client in [setup.publisher(), packing()] {
        let error = client.publish_batch(large(limit + (1 << 20))).await.unwrap_err();
        assert_eq!(refusal(&error), refused);
        let frame = v1::PublishStreamRequest {
            requests: large(limit + (1 << 20)).requests,
            ..v1::PublishStreamRequest::default()
        };
        let mut stream = client.publish_stream(tokio_stream::iter([frame])).await.unwrap().into_inner();
        assert_eq!(refusal(&stream.message().await.unwrap_err()), refused);
    }
    // Packed and small enough it is taken, and the answer is packed if the caller can read that, too.
    let mut both = packing().accept_compressed(Gzip);
    let answer = both.publish(to("a", "x")).await.unwrap();
    assert_eq!(answer.metadata().get("grpc-encoding").unwrap(), "gzip");
    assert_eq!(answer.into_inner().outcome(), v1::Outcome::NoMatch);
    let mut reading = PublisherClient::new(setup.channel.clone()).accept_compressed(Gzip);
    let plain = reading.publish(to("a", "x")).await.unwrap();
    assert!(plain.metadata().get("grpc-encoding").is_none(), "who does not pack is not made to unpack");
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_latest_values_hold_each_once_in_order() {
    let setup = Setup::new().await;
    let mut stream = setup.subscribe(v1::SubscribeRequest::default()).await;
    let mut expected = Vec::new();
    for id in ["a", "b", "c"] {
        let device = setup.device(id).await;
        for n in 0..10 {
            device.send(&format!("t/{n}"), "x").await;
            stream.next().await;
            expected.push((id.to_owned(), format!("t/{n}")));
        }
    }
    for (devices, size) in [(vec![], 1), (vec![], 7), (vec![], 100), (vec!["b".to_owned()], 4)] {
        let mut request =
            v1::ListLatestRequest { device_ids: devices.clone(), page_size: size, ..Default::default() };
        let mut seen = Vec::new();
        loop {
            let page = setup.state().list_latest(request.clone()).await.unwrap().into_inner();
            assert!(page.values.len() <= size as usize);
            seen.extend(page.values.into_iter().map(|value| (value.device_id, value.topic)));
            if page.next_page_token.is_empty() {
                break;
            }
            request.page_token = page.next_page_token;
        }
        let wanted = expected.iter().filter(|(id, _)| devices.is_empty() || devices.contains(id));
        assert_eq!(seen, wanted.cloned().collect::<Vec<_>>(), "{devices:?} {size}");
    }
    let bad = v1::ListLatestRequest { page_token: "?".to_owned(), ..Default::default() };
    assert_eq!(setup.state().list_latest(bad).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn retained_messages_of_rpcs_reach_devices_and_those_of_devices_rpcs() {
    let setup = Setup::new().await;
    let mut listening = setup.raw("listening", |_| {});
    listening.subscribe("r/#");
    let mut state = setup.state();
    for n in 0..5 {
        let set = v1::SetRetainedRequest {
            topic: format!("r/{n}"),
            payload: Bytes::from("set"),
            expiry_seconds: Some(600),
            ..Default::default()
        };
        assert!(!state.set_retained(set).await.unwrap().into_inner().replaced);
    }
    assert!(listening.ping().is_empty(), "setting sends to nobody");
    let mut device = setup.raw("dev", |_| {});
    device.publish_acked("r/dev", b"mine", true);
    device.subscribe("r/3");
    assert_eq!(device.next(), Got::Publish("r/3".to_owned(), b"set".to_vec()));

    let mut request =
        v1::ListRetainedRequest { topic_filter: "r/+".to_owned(), page_size: 4, ..Default::default() };
    let mut topics = Vec::new();
    loop {
        let page = state.list_retained(request.clone()).await.unwrap().into_inner();
        assert!(page.messages.len() <= 4);
        for message in page.messages {
            let of_device = message.topic == "r/dev";
            assert_eq!(message.device_id, if of_device { "dev" } else { "" });
            assert_eq!(message.expiry_seconds.is_some_and(|left| left <= 600), !of_device);
            topics.push(message.topic);
        }
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!(topics, ["r/0", "r/1", "r/2", "r/3", "r/4", "r/dev"]);

    let delete = v1::DeleteRetainedRequest { topic: "r/dev".to_owned(), ..Default::default() };
    assert!(state.delete_retained(delete).await.unwrap().into_inner().count > 0);
    device.subscribe("r/dev");
    assert!(device.ping().is_empty(), "what is deleted is not replayed");
    let empty = v1::SetRetainedRequest { topic: "r/0".to_owned(), ..Default::default() };
    assert_eq!(state.set_retained(empty).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_deletes_every_match_beyond_one_page_and_nothing_else() {
    let setup = Setup::new().await;
    let mut state = setup.state();
    let topics: Vec<String> = (0..1_100).map(|number| format!("many/{number}/x")).collect();
    for topic in topics.iter().map(String::as_str).chain(["many", "many/1/y", "other/1/x"]) {
        let (topic, payload) = (topic.to_owned(), Bytes::from("a"));
        state.set_retained(v1::SetRetainedRequest { topic, payload, ..Default::default() }).await.unwrap();
    }
    let delete =
        |filter: &str| v1::DeleteRetainedRequest { topic_filter: filter.to_owned(), ..Default::default() };
    let gone = state.delete_retained(delete("many/+/x")).await.unwrap().into_inner();
    assert_eq!(gone.count, 1_100);
    let gone = state.delete_retained(delete("many/+/x")).await.unwrap().into_inner();
    assert_eq!(gone.count, 0);
    let left = state.list_retained(v1::ListRetainedRequest::default()).await.unwrap().into_inner().messages;
    let left: Vec<&str> = left.iter().map(|message| message.topic.as_str()).collect();
    assert_eq!(left, ["many", "many/1/y", "other/1/x"]);
    for wrong in [delete("a#"), v1::DeleteRetainedRequest { topic: "many".to_owned(), ..delete("many") }] {
        assert_eq!(state.delete_retained(wrong).await.unwrap_err().code(), Code::InvalidArgument);
    }
}
