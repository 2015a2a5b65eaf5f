//! Publisher and the precedent service: what became of a message.

use bytes::Bytes;
use gateway_core::limits::OverflowPolicy;

use mqtt_server::proto::{gateway::v1, rpcserver};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::{
    client::{Client, Got},
    harness::*,
};

#[tokio::test(flavor = "multi_thread")]
async fn publish_reaches_a_device_and_tells_what_became_of_it() {
    let setup = Setup::new().await;
    let mut events = setup.events("dev").await;
    let mut device = setup.device("dev").await;
    until(&mut events, |detail| matches!(detail, v1::event::Detail::Connected(_))).await;
    for (wait, outcome) in [(v1::Wait::Acked, v1::Outcome::Acked), (v1::Wait::Sent, v1::Outcome::Sent)] {
        let request = v1::PublishRequest { wait: wait.into(), ..to_device("dev", wait.as_str_name()) };
        assert_eq!(setup.publish(request).await.unwrap().outcome(), outcome);
        assert_eq!(device.next().await, ("cmd".to_owned(), Bytes::from(wait.as_str_name())));
    }
    assert_eq!(setup.publish(to("nobody", "x")).await.unwrap().outcome(), v1::Outcome::NoMatch);

    device.vanish(&mut events).await;
    let offline = |offline: v1::Offline| v1::PublishRequest {
        offline: offline.into(),
        ..to_device("dev", offline.as_str_name())
    };
    let error = setup.publish(offline(v1::Offline::Fail)).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::FailedPrecondition, "DEVICE_OFFLINE".to_owned()));
    let error = setup.publish(to_device("stranger", "x")).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::NotFound, "DEVICE_NOT_FOUND".to_owned()));
    let queued = setup.publish(offline(v1::Offline::Queue)).await.unwrap();
    assert_eq!((queued.outcome(), queued.queued), (v1::Outcome::Queued, 1));
    assert_eq!(setup.device("dev").await.next().await.1, "OFFLINE_QUEUE");

    let durable = v1::PublishRequest {
        wait: v1::Wait::Durable.into(),
        qos: v1::Qos::AtMostOnce.into(),
        ..to("a", "x")
    };
    let error = setup.publish(durable).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "QoS 0 is never durable");
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_and_publish_streams_answer_per_item_in_order() {
    use v1::publish_result::Result as Item;

    let setup = Setup::new().await;
    let mut device = setup.device("dev").await;
    let requests = vec![to_device("dev", "1"), to_device("stranger", "2"), to("a/#", "3"), to("a", "4")];
    let batch = setup.publisher().publish_batch(v1::PublishBatchRequest { requests }).await.unwrap();
    let results: Vec<_> = batch.into_inner().results.into_iter().filter_map(|result| result.result).collect();
    assert!(matches!(&results[0], Item::Response(r) if r.outcome() == v1::Outcome::Sent), "{results:?}");
    assert!(matches!(&results[1], Item::Error(e) if e.reason == "DEVICE_NOT_FOUND"), "{results:?}");
    assert!(matches!(&results[2], Item::Error(e) if e.code == Code::InvalidArgument as i32), "{results:?}");
    assert!(matches!(&results[3], Item::Response(r) if r.outcome() == v1::Outcome::NoMatch), "{results:?}");
    assert_eq!(device.next().await.1, "1");

    let acked =
        |n: u32| v1::PublishRequest { wait: v1::Wait::Acked.into(), ..to_device("dev", &n.to_string()) };
    let frames: Vec<_> = (0..10u32)
        .map(|frame| v1::PublishStreamRequest {
            requests: (frame * 10..frame * 10 + 10).map(acked).collect(),
            ..v1::PublishStreamRequest::default()
        })
        .collect();
    let stream = setup.publisher().publish_stream(tokio_stream::iter(frames)).await.unwrap();
    let mut stream = stream.into_inner();
    let mut sequence = 0;
    while let Some(response) = soon("a result", stream.message()).await.unwrap() {
        assert_eq!(response.first_sequence, sequence + 1);
        for result in response.results {
            sequence += 1;
            assert_eq!(result.sequence, sequence);
            let Some(Item::Response(response)) = result.result.unwrap().result else { panic!() };
            assert_eq!(response.outcome(), v1::Outcome::Acked);
        }
    }
    assert_eq!(sequence, 100);
    for n in 0..100 {
        assert_eq!(device.next().await.1, n.to_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_precedent_api_publishes_and_streams() {
    let setup = Setup::new().await;
    let mut device = setup.device("dev").await;
    let mut client = setup.precedent();
    let request = rpcserver::PublishedPacketRequest { device_id: Some("dev".to_owned()) };
    let mut stream = client.stream_published_payload(request).await.unwrap().into_inner();
    let request = rpcserver::PublishRequest {
        device_id: "dev".to_owned(),
        topic: "cmd".to_owned(),
        payload: Bytes::from("go"),
    };
    assert_eq!(client.publish_payload_to_device(request).await.unwrap().into_inner().code, "Success");
    assert_eq!(device.next().await, ("cmd".to_owned(), Bytes::from("go")));
    device.send("up", "done").await;
    let packet = soon("a packet", stream.message()).await.unwrap().unwrap();
    assert_eq!((packet.device_id.as_str(), packet.topic.as_str()), ("dev", "up"));
    assert_eq!(packet.payload, "done");
}

/// Waits until the gateway has seen all acknowledgements of a device.
async fn settled(setup: &Setup, id: &str) {
    let idle = async {
        loop {
            let request = v1::GetDeviceRequest { device_id: id.to_owned(), ..Default::default() };
            let device = setup.devices().get_device(request).await.unwrap().into_inner().device.unwrap();
            if device.queue.is_some_and(|queue| queue.inflight + queue.pending == 0) {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    soon("an idle queue", idle).await;
}

fn acked(request: v1::PublishRequest) -> v1::PublishRequest {
    v1::PublishRequest { wait: v1::Wait::Acked.into(), ..request }
}

/// A persistent session without a connection.
async fn offline(setup: &Setup, id: &str, filter: Option<&str>) {
    let mut events = setup.events(id).await;
    let mut client = setup.raw(id, |_| {});
    if let Some(filter) = filter {
        assert_eq!(subscribe(&mut client, filter), 1);
    }
    drop(client);
    until(&mut events, |detail| matches!(detail, v1::event::Detail::Disconnected(_))).await;
}

/// Subscribes at QoS 1; the granted QoS.
fn subscribe(client: &mut Client, filter: &str) -> u8 {
    use codec::{Packet, Subscribe, SubscribeFilter};

    client.send(&Packet::Subscribe(Subscribe {
        packet_id: 1,
        id: None,
        user: Vec::new(),
        filters: vec![SubscribeFilter {
            filter: filter.to_owned(),
            qos: gateway_core::QoS::AtLeastOnce,
            no_local: false,
            retain_as_published: false,
            retain_handling: 0,
        }],
    }));
    match client.next() {
        Got::SubAck(codes) => codes[0],
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn offline_drop_is_an_outcome_and_nothing_arrives_later() {
    let setup = Setup::new().await;
    offline(&setup, "dev", None).await;
    let request = v1::PublishRequest {
        offline: v1::Offline::Drop.into(),
        wait: v1::Wait::Acked.into(),
        ..to_device("dev", "no")
    };
    let response = setup.publish(request).await.unwrap();
    assert_eq!((response.outcome(), response.drop_reason()), (v1::Outcome::Dropped, v1::DropReason::Offline));
    assert_eq!((response.matched, response.sent, response.queued, response.dropped), (1, 0, 0, 1));
    let fail = v1::PublishRequest { offline: v1::Offline::Fail.into(), ..to_device("dev", "no") };
    let error = setup.publish(fail).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::FailedPrecondition, "DEVICE_OFFLINE".to_owned()));
    setup.publish(to_device("dev", "yes")).await.unwrap();
    let mut client = setup.raw("dev", |_| {});
    assert_eq!(client.next(), Got::Publish("cmd".to_owned(), b"yes".to_vec()));

    let unaddressed = v1::PublishRequest { offline: v1::Offline::Fail.into(), ..to("t", "x") };
    assert_eq!(setup.publish(unaddressed).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_acked_tells_the_devices_reason_code() {
    let setup = Setup::new().await;
    let mut client = setup.raw("dev", |_| {});
    for (id, code) in [(1, 0), (2, 0x10), (3, 0x97)] {
        let call = {
            let mut publisher = setup.publisher();
            tokio::spawn(async move { publisher.publish(acked(to_device("dev", "go"))).await })
        };
        assert_eq!(client.next(), Got::Publish("cmd".to_owned(), b"go".to_vec()));
        puback(&mut client, id, code);
        let response = soon("an answer", call).await.unwrap().unwrap().into_inner();
        let outcome = if code < 0x80 { v1::Outcome::Acked } else { v1::Outcome::Rejected };
        assert_eq!((response.outcome(), response.sent), (outcome, 1));
        assert_eq!(response.reason_code, Some(u32::from(code)));
        assert_eq!(response.rejected, u32::from(code >= 0x80));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_one_of_two_receivers_refuses_is_not_acked() {
    let setup = Setup::new().await;
    let mut clients = [setup.raw("one", |_| {}), setup.raw("two", |_| {})];
    for client in &mut clients {
        assert_eq!(subscribe(client, "both"), 1);
    }
    let call = {
        let mut publisher = setup.publisher();
        tokio::spawn(async move { publisher.publish(acked(to("both", "x"))).await })
    };
    for (client, code) in clients.iter_mut().zip([0x83, 0]) {
        assert_eq!(client.next(), Got::Publish("both".to_owned(), b"x".to_vec()));
        puback(client, 1, code);
    }
    let response = soon("an answer", call).await.unwrap().unwrap().into_inner();
    assert_eq!((response.outcome(), response.sent, response.rejected), (v1::Outcome::Rejected, 2, 1));
    assert_eq!(response.reason_code, Some(0x83), "whichever answered last");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_waits_at_shutdown_is_told_how_far_it_came() {
    use v1::publish_result::Result as Item;

    let setup = Setup::new().await;
    let mut client = setup.raw("dev", |_| {});
    let call = {
        let mut publisher = setup.publisher();
        tokio::spawn(async move { publisher.publish(acked(to_device("dev", "go"))).await })
    };
    let frame =
        v1::PublishStreamRequest { requests: vec![acked(to_device("dev", "on"))], ..Default::default() };
    // The caller's side stays open: only the gateway ends this stream.
    let frames = tokio_stream::StreamExt::chain(tokio_stream::iter([frame]), tokio_stream::pending());
    let mut stream = setup.publisher().publish_stream(frames).await.unwrap().into_inner();
    for _ in 0..2 {
        assert!(matches!(client.next(), Got::Publish(..)));
    }
    // Its answer leaves after the gateway has noted what left before.
    assert_eq!(subscribe(&mut client, "any"), 1);
    let answers = async {
        let error = call.await.unwrap().unwrap_err();
        assert_eq!(refusal(&error), (Code::Unavailable, "SHUTTING_DOWN".to_owned()));
        assert_eq!(error.get_details_error_info().unwrap().metadata["level"], "SENT");
        let response = stream.message().await.unwrap().unwrap();
        let Some(Item::Error(item)) = &response.results[0].result.as_ref().unwrap().result else { panic!() };
        assert_eq!((item.reason.as_str(), item.metadata["level"].as_str()), ("SHUTTING_DOWN", "SENT"));
        let end = stream.message().await.unwrap_err();
        assert_eq!(refusal(&end), (Code::Unavailable, "SHUTTING_DOWN".to_owned()));
    };
    tokio::join!(setup.gateway.shutdown(), soon("answers", answers));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_is_for_receivers_that_were_online_not_for_later_ones() {
    let setup = Setup::with(|config| {
        config.limits.mailbox_messages = 1;
        config.limits.offline_messages = 1;
        config.limits.overflow = OverflowPolicy::DropNewest;
    })
    .await;
    let mut online = setup.raw("online", |_| {});
    assert_eq!(subscribe(&mut online, "mixed"), 1);
    offline(&setup, "back", Some("mixed")).await;
    offline(&setup, "full", Some("mixed")).await;
    setup.publish(to_device("full", "fills the queue")).await.unwrap();

    let call = {
        let mut publisher = setup.publisher();
        tokio::spawn(async move { publisher.publish(acked(to("mixed", "x"))).await })
    };
    assert_eq!(online.next(), Got::Publish("mixed".to_owned(), b"x".to_vec()));
    let mut back = setup.raw("back", |_| {});
    assert_eq!(back.next(), Got::Publish("mixed".to_owned(), b"x".to_vec()));
    puback(&mut back, 1, 0);
    settled(&setup, "back").await;
    // A wait that the two others could end would have ended, with the code of the one that came back.
    puback(&mut online, 1, 0x10);
    let response = soon("an answer", call).await.unwrap().unwrap().into_inner();
    assert_eq!(response.outcome(), v1::Outcome::Acked);
    assert_eq!((response.matched, response.sent, response.queued, response.dropped), (3, 1, 1, 1));
    assert_eq!((response.drop_reason(), response.reason_code), (v1::DropReason::QueueFull, Some(0x10)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_too_large_for_the_device_is_refused_and_the_next_arrives() {
    let setup = Setup::new().await;
    let mut client = setup.raw("small", |connect| connect.maximum_packet_size = Some(100));
    let error = setup.publish(acked(to_device("small", &"x".repeat(1000)))).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::FailedPrecondition, "PACKET_TOO_LARGE".to_owned()));
    assert_eq!(setup.publish(to_device("small", "y")).await.unwrap().outcome(), v1::Outcome::Sent);
    assert_eq!(client.next(), Got::Publish("cmd".to_owned(), b"y".to_vec()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_has_every_outcome_side_by_side() {
    use v1::{Outcome, publish_result::Result as Item};

    let setup = Setup::with(|config| config.limits.offline_messages = 1).await;
    let mut online = setup.raw("online", |connect| connect.maximum_packet_size = Some(100));
    assert_eq!(subscribe(&mut online, "t"), 1);
    offline(&setup, "away", Some("t")).await;
    let devices = v1::SubscribeRequest { devices_only: true, ..v1::SubscribeRequest::default() };
    let _picky = setup.subscribe(devices).await;

    let drop = v1::PublishRequest { offline: v1::Offline::Drop.into(), ..to_device("away", "d") };
    let requests = vec![
        to_device("online", "sent"),
        drop,
        to_device("away", "queued"),
        to("t", "online takes it, away is full"),
        to("nobody", "only a stream that leaves it out"),
        to_device("stranger", "x"),
        to_device("away", "full"),
        to_device("online", &"x".repeat(200)),
        to("bad/#", "x"),
    ];
    let batch = setup.publisher().publish_batch(v1::PublishBatchRequest { requests }).await.unwrap();
    let results = batch.into_inner().results.into_iter().map(|result| match result.result.unwrap() {
        Item::Response(response) => Ok((response.outcome(), response.matched, response.dropped)),
        Item::Error(error) => Err((Code::from_i32(error.code), error.reason)),
    });
    let error = |code, reason: &str| Err((code, reason.to_owned()));
    let expected = [
        Ok((Outcome::Sent, 1, 0)),
        Ok((Outcome::Dropped, 1, 1)),
        Ok((Outcome::Queued, 1, 0)),
        Ok((Outcome::Sent, 2, 1)),
        Ok((Outcome::NoMatch, 0, 0)),
        error(Code::NotFound, "DEVICE_NOT_FOUND"),
        error(Code::ResourceExhausted, "QUEUE_FULL"),
        error(Code::FailedPrecondition, "PACKET_TOO_LARGE"),
        error(Code::InvalidArgument, "INVALID_FIELD"),
    ];
    assert_eq!(results.collect::<Vec<_>>(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_batch_for_one_device_that_keeps_up_does_not_overflow_its_queue() {
    let setup = Setup::with(|config| config.limits.mailbox_messages = 1000).await;
    let mut device = setup.raw("device", |_| ());
    let request =
        v1::PublishRequest { qos: v1::Qos::AtMostOnce.into(), ..to_device("device", &"x".repeat(50)) };
    let requests = vec![request; 5000];
    let batch = setup.publisher().publish_batch(v1::PublishBatchRequest { requests }).await.unwrap();
    let dropped = batch.into_inner().results.into_iter().filter(
        |result| !matches!(&result.result, Some(v1::publish_result::Result::Response(r)) if r.dropped == 0),
    );
    assert_eq!(dropped.count(), 0);
    assert!((0..5000).all(|_| matches!(device.next(), Got::Publish(..))));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_precedent_api_says_queued_and_refuses_by_status() {
    let setup = Setup::new().await;
    offline(&setup, "away", None).await;
    let send = async |device: &str, topic: &str, size: usize| -> Result<String, Status> {
        let request = rpcserver::PublishRequest {
            device_id: device.to_owned(),
            topic: topic.to_owned(),
            payload: Bytes::from(vec![b'x'; size]),
        };
        let answer = soon("an answer", setup.precedent().publish_payload_to_device(request)).await?;
        Ok(answer.into_inner().code)
    };
    assert_eq!(send("away", "cmd", 1).await.unwrap(), "Queued");
    let mut client = setup.raw("away", |connect| connect.maximum_packet_size = Some(100));
    assert_eq!(client.next(), Got::Publish("cmd".to_owned(), b"x".to_vec()));
    assert_eq!(send("away", "cmd", 2).await.unwrap(), "Success");
    for (device, topic, size, code, reason) in [
        ("stranger", "cmd", 1, Code::NotFound, "DEVICE_NOT_FOUND"),
        ("away", "cmd/#", 1, Code::InvalidArgument, "INVALID_FIELD"),
        ("", "cmd", 1, Code::InvalidArgument, "INVALID_FIELD"),
        ("away", "cmd", 1000, Code::FailedPrecondition, "PACKET_TOO_LARGE"),
    ] {
        let error = send(device, topic, size).await.unwrap_err();
        assert_eq!(refusal(&error), (code, reason.to_owned()), "{device} {topic} {size}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn options_of_a_later_frame_are_refused_not_ignored() {
    let setup = Setup::new().await;
    let options = Some(v1::PublishStreamOptions { window: 10, ..v1::PublishStreamOptions::default() });
    let frame = v1::PublishStreamRequest { options, ..v1::PublishStreamRequest::default() };
    let stream = setup.publisher().publish_stream(tokio_stream::iter([frame.clone(), frame])).await.unwrap();
    let error = soon("the end", stream.into_inner().message()).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::InvalidArgument, "INVALID_FIELD".to_owned()));
}

/// A call that waits for DURABLE must not return before the message is on disk for a device that is away.
#[tokio::test(flavor = "multi_thread")]
async fn a_durable_message_is_on_disk_when_the_call_returns() {
    let setup = Setup::new().await;
    let mut away = setup.raw("away", |_| {});
    away.subscribe_with("cmd/#", gateway_core::QoS::AtLeastOnce, None);
    drop(away);
    let broker = setup.gateway.broker();
    while broker.gauges().online > 0 {
        tokio::task::yield_now().await;
    }
    for number in 1..=5 {
        let durable = v1::PublishRequest {
            qos: v1::Qos::AtLeastOnce.into(),
            wait: v1::Wait::Durable.into(),
            ..to("cmd/x", "kept")
        };
        let answer = setup.publish(durable).await.unwrap();
        assert_eq!((answer.outcome(), answer.queued), (v1::Outcome::Queued, 1));
        let on_disk = broker.stores().unwrap().state.summaries().unwrap();
        assert_eq!(on_disk.iter().map(|queue| queue.messages).sum::<usize>(), number);
    }
}
