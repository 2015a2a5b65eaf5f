//! The gRPC API against a real gateway in this process, with real devices over TCP.
#![expect(clippy::unwrap_used, reason = "helpers of tests panic like the tests")]

use std::{
    net::{Ipv4Addr, TcpListener},
    time::Duration,
};

use bytes::Bytes;
use mqtt_server::{
    Gateway,
    config::{Address, Config, Listener, ListenerKind},
    grpc::proto::{
        gateway::v1::{
            self, devices_client::DevicesClient, events_client::EventsClient,
            publisher_client::PublisherClient, state_client::StateClient,
            subscriber_client::SubscriberClient,
        },
        rpcserver::{self, published_packet_service_client::PublishedPacketServiceClient},
    },
};
use rumqttc::v5::{
    AsyncClient, Event, MqttOptions,
    mqttbytes::{
        QoS,
        v5::{ConnectProperties, Packet, Publish, PublishProperties},
    },
};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};
use tonic::{Code, Status, Streaming, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_types::StatusExt as _;

const LIMIT: Duration = Duration::from_secs(20);

async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(LIMIT, future).await.unwrap_or_else(|_| panic!("{what} did not happen in {LIMIT:?}"))
}

struct Setup {
    gateway: Gateway,
    channel: Channel,
    mqtt: u16,
    _dir: tempfile::TempDir,
}

impl Setup {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = || {
            let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let (tcp, grpc, http) = (socket(), socket(), socket());
        let mut config = Config { addr: None, ..Config::default() };
        config.listeners = vec![Listener {
            name: "tcp".to_owned(),
            kind: ListenerKind::Tcp,
            address: Some(Address::Ip(tcp.local_addr().unwrap())),
            ..Listener::default()
        }];
        config.grpc_addr = grpc.local_addr().unwrap();
        config.http_addr = http.local_addr().unwrap();
        config.grpc.tls = false;
        config.insecure_grpc = true;
        config.shards = 1;
        config.data_dir = dir.path().join("data");
        let builder = Gateway::builder(config).socket("tcp", tcp).socket("grpc", grpc).socket("http", http);
        let gateway = builder.start().await.unwrap();
        let mqtt = gateway.address("tcp").unwrap().port();
        let address = format!("http://{}", gateway.address("grpc").unwrap());
        let channel = Channel::from_shared(address).unwrap().connect().await.unwrap();
        Self { gateway, channel, mqtt, _dir: dir }
    }

    fn publisher(&self) -> PublisherClient<Channel> {
        PublisherClient::new(self.channel.clone())
    }

    fn state(&self) -> StateClient<Channel> {
        StateClient::new(self.channel.clone())
    }

    fn devices(&self) -> DevicesClient<Channel> {
        DevicesClient::new(self.channel.clone())
    }

    async fn publish(&self, request: v1::PublishRequest) -> Result<v1::PublishResponse, Status> {
        soon("a publish", self.publisher().publish(request)).await.map(tonic::Response::into_inner)
    }

    async fn device(&self, id: &str) -> Device {
        let mut options = MqttOptions::new(id, "127.0.0.1", self.mqtt);
        options.set_clean_start(false);
        let properties = ConnectProperties { session_expiry_interval: Some(600), ..ConnectProperties::new() };
        options.set_connect_properties(properties);
        let (client, mut events) = AsyncClient::new(options, 100);
        let (sender, incoming) = mpsc::channel(1_000);
        let connected =
            async { while !matches!(events.poll().await.unwrap(), Event::Incoming(Packet::ConnAck(_))) {} };
        soon("a connect", connected).await;
        let task = tokio::spawn(async move {
            while let Ok(event) = events.poll().await {
                if let Event::Incoming(Packet::Publish(publish)) = event
                    && sender.send(publish).await.is_err()
                {
                    break;
                }
            }
        });
        Device { client, incoming, task }
    }

    async fn subscribe(&self, request: v1::SubscribeRequest) -> Messages {
        let mut client = SubscriberClient::new(self.channel.clone());
        Messages(soon("a subscribe", client.subscribe(request)).await.unwrap().into_inner(), Vec::new())
    }

    async fn events(&self, id: &str) -> Streaming<v1::WatchResponse> {
        let request = v1::WatchRequest { client_ids: vec![id.to_owned()], ..v1::WatchRequest::default() };
        let mut client = EventsClient::new(self.channel.clone());
        soon("a watch", client.watch(request)).await.unwrap().into_inner()
    }
}

struct Device {
    client: AsyncClient,
    incoming: mpsc::Receiver<Publish>,
    task: JoinHandle<()>,
}

impl Device {
    async fn next(&mut self) -> (String, Bytes) {
        let publish = soon("a message to the device", self.incoming.recv()).await.unwrap();
        (String::from_utf8(publish.topic.to_vec()).unwrap(), publish.payload)
    }

    async fn send(&self, topic: &str, payload: &str) {
        self.client.publish(topic, QoS::AtLeastOnce, false, payload.to_owned()).await.unwrap();
    }

    /// Loses the connection; `events` tells when the gateway knows.
    async fn vanish(self, events: &mut Streaming<v1::WatchResponse>) {
        self.task.abort();
        until(events, |detail| matches!(detail, v1::event::Detail::Disconnected(_))).await;
    }
}

struct Messages(Streaming<v1::SubscribeResponse>, Vec<v1::subscribe_item::Item>);

impl Messages {
    async fn item(&mut self) -> v1::subscribe_item::Item {
        while self.1.is_empty() {
            let response = soon("a stream item", self.0.message()).await.unwrap().unwrap();
            self.1 = response.items.into_iter().rev().filter_map(|item| item.item).collect();
        }
        self.1.pop().unwrap()
    }

    async fn next(&mut self) -> v1::ReceivedMessage {
        match self.item().await {
            v1::subscribe_item::Item::Message(message) => message,
            other => panic!("not a message: {other:?}"),
        }
    }
}

async fn until(events: &mut Streaming<v1::WatchResponse>, wanted: impl Fn(&v1::event::Detail) -> bool) {
    let seen = async {
        loop {
            for item in events.message().await.unwrap().unwrap().items {
                if let Some(v1::watch_item::Item::Event(event)) = item.item
                    && event.detail.as_ref().is_some_and(&wanted)
                {
                    return;
                }
            }
        }
    };
    soon("an event", seen).await;
}

fn to(topic: &str, payload: &str) -> v1::PublishRequest {
    v1::PublishRequest {
        topic: topic.to_owned(),
        payload: Bytes::copy_from_slice(payload.as_bytes()),
        ..v1::PublishRequest::default()
    }
}

fn to_device(device: &str, payload: &str) -> v1::PublishRequest {
    v1::PublishRequest { device_id: Some(device.to_owned()), ..to("cmd", payload) }
}

fn refusal(status: &Status) -> (Code, String) {
    (status.code(), status.get_details_error_info().map_or_else(String::new, |info| info.reason))
}

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

    let durable = v1::PublishRequest { wait: v1::Wait::Durable.into(), ..to("a", "x") };
    let keyed = v1::PublishRequest { idempotency_key: "k".to_owned(), ..to("a", "x") };
    for request in [durable, keyed] {
        assert_eq!(setup.publish(request).await.unwrap_err().code(), Code::Unimplemented);
    }
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
    let delete = v1::DeleteRetainedRequest { topic: "r/1".to_owned() };
    assert!(state.delete_retained(delete.clone()).await.unwrap().into_inner().deleted);
    assert!(!state.delete_retained(delete).await.unwrap().into_inner().deleted);
    assert_eq!(state.get_retained(get).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_are_listed_and_disconnected() {
    let setup = Setup::new().await;
    let mut events = setup.events("dev").await;
    let _device = setup.device("dev").await;
    let list = setup.devices().list(v1::ListRequest::default()).await.unwrap().into_inner();
    assert_eq!((list.devices.len(), list.devices[0].client_id.as_str()), (1, "dev"));
    let get = v1::GetRequest { client_id: "dev".to_owned() };
    let found = setup.devices().get(get).await.unwrap().into_inner().device.unwrap();
    assert_eq!((found.online, found.session_expiry_seconds), (true, 600));
    assert_eq!(found.connection.unwrap().protocol(), v1::ProtocolVersion::V50);
    let disconnect =
        |id: &str| v1::DisconnectRequest { client_id: id.to_owned(), ..v1::DisconnectRequest::default() };
    setup.devices().disconnect(disconnect("dev")).await.unwrap();
    until(&mut events, |detail| matches!(detail, v1::event::Detail::Disconnected(_))).await;
    let unknown = setup.devices().disconnect(disconnect("stranger")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_precedent_api_publishes_and_streams() {
    let setup = Setup::new().await;
    let mut device = setup.device("dev").await;
    let mut client = PublishedPacketServiceClient::new(setup.channel.clone());
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
