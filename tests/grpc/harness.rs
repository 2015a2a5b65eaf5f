//! A gateway in this process with a gRPC channel, and devices over TCP.

use std::{
    io::Write as _,
    net::{Ipv4Addr, TcpListener},
    time::Duration,
};

use bytes::Bytes;
use codec::{AckKind, Connect, encode_ack};
use gateway_core::Protocol;

use mqtt_server::{
    Gateway,
    config::{Address, Config, Listener, ListenerKind},
    gateway::Builder,
    proto::{
        gateway::v1::{
            self, devices_client::DevicesClient, events_client::EventsClient,
            publisher_client::PublisherClient, security_client::SecurityClient, state_client::StateClient,
            subscriber_client::SubscriberClient,
        },
        rpcserver::published_packet_service_client::PublishedPacketServiceClient,
    },
};
use rumqttc::v5::{
    AsyncClient, Event, MqttOptions,
    mqttbytes::{
        QoS,
        v5::{ConnectProperties, Packet, Publish},
    },
};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};
use tonic::{Code, Status, Streaming, transport::Channel};
use tonic_types::StatusExt as _;

use crate::client::{Client, hello};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(LIMIT, future).await.unwrap_or_else(|_| panic!("{what} did not happen in {LIMIT:?}"))
}

pub(crate) struct Setup {
    pub(crate) gateway: Gateway,
    pub(crate) channel: Channel,
    pub(crate) mqtt: u16,
    _dir: tempfile::TempDir,
}

impl Setup {
    pub(crate) async fn new() -> Self {
        Self::with(|_| {}).await
    }

    /// A gateway whose configuration `change` has changed.
    pub(crate) async fn with(change: impl FnOnce(&mut Config)) -> Self {
        Self::built(change, |builder| builder).await
    }

    /// The same, with what `build` adds.
    pub(crate) async fn built(
        change: impl FnOnce(&mut Config),
        build: impl FnOnce(Builder) -> Builder,
    ) -> Self {
        Self::built_in(tempfile::tempdir().unwrap(), change, build).await
    }

    /// The same on what an earlier gateway has left in `dir`.
    async fn built_in(
        dir: tempfile::TempDir,
        change: impl FnOnce(&mut Config),
        build: impl FnOnce(Builder) -> Builder,
    ) -> Self {
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
        change(&mut config);
        let builder = Gateway::builder(config).socket("tcp", tcp).socket("grpc", grpc).socket("http", http);
        let gateway = build(builder).start().await.unwrap();
        let mqtt = gateway.address("tcp").unwrap().port();
        let address = format!("http://{}", gateway.address("grpc").unwrap());
        let channel = Channel::from_shared(address).unwrap().connect().await.unwrap();
        Self { gateway, channel, mqtt, _dir: dir }
    }

    /// Ends the gateway and starts another on its data directory.
    pub(crate) async fn restarted(self, change: impl FnOnce(&mut Config)) -> Self {
        let Self { gateway, channel, _dir: dir, .. } = self;
        drop(channel);
        soon("a shutdown", gateway.shutdown()).await;
        Self::built_in(dir, change, |builder| builder).await
    }

    pub(crate) fn publisher(&self) -> PublisherClient<Channel> {
        PublisherClient::new(self.channel.clone())
    }

    pub(crate) fn state(&self) -> StateClient<Channel> {
        StateClient::new(self.channel.clone())
    }

    pub(crate) fn precedent(&self) -> PublishedPacketServiceClient<Channel> {
        PublishedPacketServiceClient::new(self.channel.clone())
    }

    pub(crate) fn devices(&self) -> DevicesClient<Channel> {
        DevicesClient::new(self.channel.clone())
    }

    pub(crate) fn security(&self) -> SecurityClient<Channel> {
        SecurityClient::new(self.channel.clone())
    }

    pub(crate) async fn publish(&self, request: v1::PublishRequest) -> Result<v1::PublishResponse, Status> {
        soon("a publish", self.publisher().publish(request)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn devices_page(
        &self,
        request: v1::ListDevicesRequest,
    ) -> Result<v1::ListDevicesResponse, Status> {
        self.devices().list_devices(request).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn device(&self, id: &str) -> Device {
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

    /// A device under the test's control packet by packet, with a session of 600 s; blocks while it waits.
    pub(crate) fn raw(&self, id: &str, change: impl FnOnce(&mut Connect)) -> Client {
        let mut connect = hello(Protocol::V5, id);
        connect.clean_start = false;
        connect.session_expiry = Some(600);
        change(&mut connect);
        Client::connect_with(self.mqtt, connect)
    }

    pub(crate) async fn subscribe(&self, request: v1::SubscribeRequest) -> Messages {
        let mut client = SubscriberClient::new(self.channel.clone());
        Messages(soon("a subscribe", client.subscribe(request)).await.unwrap().into_inner(), Vec::new())
    }

    pub(crate) async fn events(&self, id: &str) -> Streaming<v1::WatchEventsResponse> {
        let request =
            v1::WatchEventsRequest { device_ids: vec![id.to_owned()], ..v1::WatchEventsRequest::default() };
        let mut client = EventsClient::new(self.channel.clone());
        soon("a watch", client.watch_events(request)).await.unwrap().into_inner()
    }
}

pub(crate) struct Device {
    pub(crate) client: AsyncClient,
    pub(crate) incoming: mpsc::Receiver<Publish>,
    pub(crate) task: JoinHandle<()>,
}

impl Device {
    pub(crate) async fn next(&mut self) -> (String, Bytes) {
        let publish = soon("a message to the device", self.incoming.recv()).await.unwrap();
        (String::from_utf8(publish.topic.to_vec()).unwrap(), publish.payload)
    }

    pub(crate) async fn send(&self, topic: &str, payload: &str) {
        self.client.publish(topic, QoS::AtLeastOnce, false, payload.to_owned()).await.unwrap();
    }

    /// Loses the connection; `events` tells when the gateway knows.
    pub(crate) async fn vanish(self, events: &mut Streaming<v1::WatchEventsResponse>) {
        self.task.abort();
        until(events, |detail| matches!(detail, v1::event::Detail::Disconnected(_))).await;
    }
}

pub(crate) struct Messages(pub(crate) Streaming<v1::SubscribeResponse>, Vec<v1::subscribe_item::Item>);

impl Messages {
    pub(crate) async fn item(&mut self) -> v1::subscribe_item::Item {
        while self.1.is_empty() {
            let response = soon("a stream item", self.0.message()).await.unwrap().unwrap();
            self.1 = response.items.into_iter().rev().filter_map(|item| item.item).collect();
        }
        self.1.pop().unwrap()
    }

    pub(crate) async fn next(&mut self) -> v1::ReceivedMessage {
        match self.item().await {
            v1::subscribe_item::Item::Message(message) => message,
            other => panic!("not a message: {other:?}"),
        }
    }
}

pub(crate) async fn until(
    events: &mut Streaming<v1::WatchEventsResponse>,
    wanted: impl Fn(&v1::event::Detail) -> bool,
) {
    let seen = async {
        loop {
            for item in events.message().await.unwrap().unwrap().items {
                if let Some(v1::watch_events_item::Item::Event(event)) = item.item
                    && event.detail.as_ref().is_some_and(&wanted)
                {
                    return;
                }
            }
        }
    };
    soon("an event", seen).await;
}

/// The details of the next events, as many as `count`.
pub(crate) async fn details(
    events: &mut Streaming<v1::WatchEventsResponse>,
    count: usize,
) -> Vec<v1::event::Detail> {
    let mut seen = Vec::new();
    while seen.len() < count {
        let response = soon("an event", events.message()).await.unwrap().unwrap();
        for item in response.items {
            let Some(v1::watch_events_item::Item::Event(event)) = item.item else { panic!("{item:?}") };
            seen.push(event.detail.unwrap());
        }
    }
    seen
}

/// PUBACK with a reason code.
pub(crate) fn puback(client: &mut Client, id: u16, code: u8) {
    let mut bytes = Vec::new();
    encode_ack(AckKind::PubAck, id, code, Protocol::V5, &mut bytes);
    client.stream.write_all(&bytes).unwrap();
}

pub(crate) fn to(topic: &str, payload: &str) -> v1::PublishRequest {
    v1::PublishRequest {
        topic: topic.to_owned(),
        payload: Bytes::copy_from_slice(payload.as_bytes()),
        ..v1::PublishRequest::default()
    }
}

pub(crate) fn to_device(device: &str, payload: &str) -> v1::PublishRequest {
    v1::PublishRequest { device_id: Some(device.to_owned()), ..to("cmd", payload) }
}

pub(crate) fn refusal(status: &Status) -> (Code, String) {
    (status.code(), status.get_details_error_info().map_or_else(String::new, |info| info.reason))
}
