//! Messages that wait for a device, as a backend sees and drops them.

use std::net::Shutdown;

use access::backends::Role;
use codec::Connect;
use gateway_core::Protocol;
use mqtt_server::proto::gateway::v1::{
    self, devices_client::DevicesClient, publisher_client::PublisherClient,
};
use tokio::task::block_in_place;
use tonic::Code;

use crate::{
    access::{Guarded, audit::channel},
    client::{Client, Got, hello},
    harness::*,
    support::Server,
};

fn of(page_size: i32, page_token: String, payload_bytes: u32) -> v1::ListQueueRequest {
    v1::ListQueueRequest { device_id: "dev".to_owned(), page_size, page_token, payload_bytes }
}

/// All pages of a queue, with the state, payload and size of each message.
async fn listed(setup: &Setup, page_size: i32, payload_bytes: u32) -> Vec<(v1::QueueState, String, u64)> {
    let (mut all, mut token) = (Vec::new(), String::new());
    loop {
        let page =
            setup.devices().list_queue(of(page_size, token, payload_bytes)).await.unwrap().into_inner();
        assert!(page.messages.len() <= page_size as usize);
        for message in page.messages {
            assert_eq!((message.topic.as_str(), message.device_id.as_str()), ("cmd", ""));
            assert!(message.receive_time.is_some());
            let payload = String::from_utf8(message.payload.to_vec()).unwrap();
            all.push((message.state(), payload, message.payload_size));
        }
        token = page.next_page_token;
        if token.is_empty() {
            return all;
        }
    }
}

fn next(client: &mut Client) -> String {
    let Got::Publish(_, payload) = block_in_place(|| client.next()) else { panic!("not a message") };
    String::from_utf8(payload).unwrap()
}

/// Rules out a page that leaves out a part of the queue, in memory or on disk; a purge that keeps a caller waiting,
/// takes what the device may have, or is not counted; and a queue that takes nothing after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_shown_whole_and_purged_but_for_what_is_in_flight() {
    for stored in [true, false] {
        let setup = Setup::with(|config| {
            config.store.enabled = stored;
            config.grpc.default_deadline = "1h".parse().unwrap();
            config.limits.mailbox_messages = if stored { 2 } else { 1_000 };
        })
        .await;
        let mut client = block_in_place(|| setup.raw("dev", |connect| connect.receive_maximum = Some(1)));
        let mut waiting = Vec::new();
        for number in 0..200 {
            let mut publisher = setup.publisher();
            let request = to_device("dev", &format!("{number}"));
            let request = v1::PublishRequest { wait: v1::Wait::Acked.into(), ..request };
            waiting.push(tokio::spawn(async move { publisher.publish(request).await }));
            // In this order.
            let there = async {
                while listed(&setup, 1_000, 0).await.len() <= number {
                    tokio::task::yield_now().await;
                }
            };
            soon("a message in the queue", there).await;
        }
        assert_eq!(next(&mut client), "0");
        for page_size in [7, 1_000] {
            let all = listed(&setup, page_size, 2).await;
            let payloads: Vec<_> = all.iter().map(|(_, payload, _)| payload.clone()).collect();
            let cut = |number: usize| format!("{number}").chars().take(2).collect::<String>();
            assert_eq!(payloads, (0..200).map(cut).collect::<Vec<_>>(), "stored: {stored}");
            assert_eq!(all[0].0, v1::QueueState::Inflight);
            assert!(all[1..].iter().all(|(state, ..)| *state != v1::QueueState::Inflight));
            assert_eq!(all.iter().any(|(state, ..)| *state == v1::QueueState::Stored), stored);
            assert_eq!(all[150].2, 3);
        }

        let request = || v1::PurgeQueueRequest { device_id: "dev".to_owned() };
        let purged = soon("a purge", setup.devices().purge_queue(request())).await.unwrap().into_inner();
        assert_eq!(purged.count, 199, "stored: {stored}");
        assert_eq!(listed(&setup, 10, 2).await, [(v1::QueueState::Inflight, "0".to_owned(), 1)]);
        let mut waiting = waiting.into_iter();
        let first = waiting.next().unwrap();
        for call in waiting {
            let answer = soon("an answer", call).await.unwrap().unwrap().into_inner();
            assert_eq!(
                (answer.outcome(), answer.drop_reason()),
                (v1::Outcome::Dropped, v1::DropReason::Purged)
            );
        }
        let later = {
            let mut publisher = setup.publisher();
            let request = v1::PublishRequest { wait: v1::Wait::Acked.into(), ..to_device("dev", "later") };
            tokio::spawn(async move { publisher.publish(request).await })
        };
        puback(&mut client, 1, 0);
        assert_eq!(
            soon("the first", first).await.unwrap().unwrap().into_inner().outcome(),
            v1::Outcome::Acked
        );
        let bytes = block_in_place(|| client.next_bytes()).unwrap();
        let codec::Packet::Publish(publish) = crate::client::decoded(&bytes, Protocol::V5) else {
            panic!("{bytes:?}")
        };
        assert_eq!(publish.payload, b"later");
        puback(&mut client, publish.packet_id, 0);
        assert_eq!(
            soon("the later", later).await.unwrap().unwrap().into_inner().outcome(),
            v1::Outcome::Acked
        );
        let device = v1::GetDeviceRequest { device_id: "dev".to_owned(), ..Default::default() };
        let device = setup.devices().get_device(device).await.unwrap().into_inner().device.unwrap();
        assert_eq!(device.queue.map(|queue| queue.dropped), Some(199));
        assert_eq!(listed(&setup, 10, 2).await, []);
    }
}

/// Rules out an answer before the disk has the purge: the gateway is killed as soon as it has answered.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_purged_does_not_come_back_after_kill_9() {
    let server = block_in_place(Server::start);
    let away = |server: &Server| {
        let connect = Connect { clean_start: false, session_expiry: Some(600), ..hello(Protocol::V5, "dev") };
        Client::connect_with(server.ports.tcp, connect)
    };
    let client = block_in_place(|| away(&server));
    client.stream.shutdown(Shutdown::Both).unwrap();
    let send = async |server: &Server, payload: &str| {
        let request = v1::PublishRequest { wait: v1::Wait::Durable.into(), ..to_device("dev", payload) };
        let mut publisher = PublisherClient::new(channel(server, None).await);
        soon("a publish", publisher.publish(request)).await.unwrap();
    };
    send(&server, "gone").await;
    let mut devices = DevicesClient::new(channel(&server, None).await);
    let request = v1::PurgeQueueRequest { device_id: "dev".to_owned() };
    let purged = soon("a purge", devices.purge_queue(request)).await.unwrap().into_inner();
    let server = block_in_place(|| server.kill_and_restart(&[], ""));
    send(&server, "kept").await;
    let mut client = block_in_place(|| away(&server));
    assert_eq!((next(&mut client).as_str(), purged.count), ("kept", 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_out_of_scope_is_neither_shown_nor_purged() {
    let guarded = Guarded::with(
        &[
            ("all", Role::Admin, None, None),
            ("topics", Role::Operator, Some(&["a/#"]), None),
            ("devices", Role::Operator, None, Some(&["other"])),
        ],
        |_| {},
    )
    .await;
    let _client = block_in_place(|| {
        guarded.setup.raw("dev", |connect| {
            connect.receive_maximum = Some(1);
        })
    });
    let mut publisher = PublisherClient::new(guarded.channel("all"));
    for topic in ["a/1", "b", "a/2"] {
        let request = v1::PublishRequest { device_id: Some("dev".to_owned()), ..to(topic, "x") };
        soon("a publish", publisher.publish(request)).await.unwrap();
    }
    let list = async |who: &str| {
        let mut devices = DevicesClient::new(guarded.channel(who));
        let page = devices.list_queue(of(0, String::new(), 0)).await.map_err(|status| refusal(&status))?;
        Ok(page.into_inner().messages.into_iter().map(|message| message.topic).collect::<Vec<_>>())
    };
    let purge = async |who: &str| {
        let mut devices = DevicesClient::new(guarded.channel(who));
        let request = v1::PurgeQueueRequest { device_id: "dev".to_owned() };
        devices.purge_queue(request).await.map(drop).map_err(|status| refusal(&status))
    };
    let denied = (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned());
    assert_eq!(list("all").await.unwrap(), ["a/1", "b", "a/2"]);
    assert_eq!(list("topics").await.unwrap(), ["a/1", "a/2"]);
    assert_eq!(list("devices").await, Err(denied.clone()));
    assert_eq!(purge("topics").await, Err(denied.clone()));
    assert_eq!(purge("devices").await, Err(denied));
    assert_eq!(list("all").await.unwrap().len(), 3);
}
