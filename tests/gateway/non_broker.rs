//! `--non-broker` from outside: devices talk to backends and never to each other.

use crate::client::{Client, Got, WAIT, hello, will};
use codec::Packet;
use gateway_core::Protocol;

use crate::support::{Server, until};
use mqtt_server::proto::gateway::v1::{
    PublishRequest, SubscribeRequest, publisher_client::PublisherClient, subscribe_item::Item,
    subscriber_client::SubscriberClient,
};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

pub(crate) async fn channel(server: &Server) -> Channel {
    let ca = Certificate::from_pem(std::fs::read(server.ca()).expect("read the authority"));
    Endpoint::try_from(format!("https://localhost:{}", server.ports.grpc))
        .expect("address of gRPC")
        .tls_config(ClientTlsConfig::new().ca_certificate(ca))
        .expect("TLS of gRPC")
        .connect()
        .await
        .expect("connect to gRPC")
}

#[test]
fn nothing_passes_from_device_to_device() {
    let server = Server::start_with(&["--non-broker"], "");
    for protocol in [Protocol::V4, Protocol::V5] {
        let mut receiver = Client::connect(server.ports.tcp, protocol, "b");
        for filter in ["devices/b/#", "devices/b/+", "devices/b/x", "$share/g/devices/b/x"] {
            assert_eq!(receiver.subscribe(filter), 0, "{filter}");
        }
        let refused = if protocol.is_v5() { 0x87 } else { 0x80 };
        for filter in ["#", "+/+/x", "devices/#", "devices/+/x", "devices/a/x", "$share/g/#", "other"] {
            assert_eq!(receiver.subscribe(filter), refused, "{filter}");
        }
        let mut sender = Client::connect(server.ports.tcp, protocol, "a");
        sender.publish_acked("devices/b/x", b"live", false);
        sender.publish_acked("devices/b/x", b"kept", true);
        sender.publish_acked("other", b"live", false);
        assert_eq!(receiver.ping(), []);

        // A new subscription gets no retained message of another device.
        assert_eq!(receiver.subscribe("devices/b/x"), 0);
        assert_eq!(receiver.ping(), []);

        let mut dying = hello(protocol, "c");
        dying.will = Some(will("devices/b/x", b"last words"));
        let before = server.metric("mqtt_wills_published_total");
        drop(Client::connect_with(server.ports.tcp, dying));
        until(|| server.metric("mqtt_wills_published_total") > before);
        assert_eq!(receiver.ping(), []);
    }
}

#[test]
fn client_ids_that_could_name_other_levels_are_refused() {
    let server = Server::start_with(&["--non-broker"], "");
    for (protocol, code) in [(Protocol::V3, 2), (Protocol::V4, 2), (Protocol::V5, 0x85)] {
        for id in ["a/b", "+", "a#"] {
            let mut client = Client::open(server.ports.tcp, protocol);
            client.send(&Packet::Connect(Box::new(hello(protocol, id))));
            assert_eq!(client.next(), Got::ConnAck(code), "{id}");
            assert_eq!(client.next(), Got::Closed, "{id}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn backends_reach_devices_and_hear_them() {
    let server = Server::start_with(&["--non-broker"], "");
    let channel = channel(&server).await;
    let request = SubscribeRequest { topic_filters: vec!["up/#".to_owned()], ..SubscribeRequest::default() };
    let mut stream =
        SubscriberClient::new(channel.clone()).subscribe(request).await.expect("subscribe").into_inner();

    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "b");
    assert_eq!(device.subscribe("devices/b/#"), 0);
    device.publish_acked("up/temperature", b"21", false);
    let heard = tokio::time::timeout(WAIT, async {
        loop {
            let response = stream.message().await.expect("stream").expect("stream goes on");
            for item in response.items {
                if let Some(Item::Message(message)) = item.item
                    && message.device_id == "b"
                {
                    return (message.topic, message.payload.to_vec());
                }
            }
        }
    });
    let heard = heard.await.expect("the stream sees the device's message");
    assert_eq!(heard, ("up/temperature".to_owned(), b"21".to_vec()));

    let request = PublishRequest {
        topic: "devices/b/cmd".to_owned(),
        payload: b"on".to_vec().into(),
        ..PublishRequest::default()
    };
    let response = PublisherClient::new(channel).publish(request).await.expect("publish").into_inner();
    assert_eq!(response.matched, 1);
    assert_eq!(device.next(), Got::Publish("devices/b/cmd".to_owned(), b"on".to_vec()));
}
