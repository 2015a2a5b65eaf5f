//! End and restart of the real process: what survives, and what is told to whom.

use std::{fs, path::Path, time::SystemTime};

use crate::client::{Client, Got, hello, will};
use codec::{Connect, Packet};
use disk::{EmbeddedState, StateOptions};
use gateway_core::{Protocol, QoS, QueueId, Timestamp};
use store::{DataDir, Restore, SessionOp, StateStore, StoredSession, StoredSubscription};

use crate::support::{Server, until};
use mqtt_server::proto::gateway::v1::{GetLatestRequest, state_client::StateClient};
use tonic::{
    Code,
    transport::{Certificate, ClientTlsConfig, Endpoint},
};

/// A CONNECT of a session that outlives its connection.
fn lasting(client_id: &str, expiry: u32) -> Connect {
    let mut connect = hello(Protocol::V5, client_id);
    connect.clean_start = false;
    connect.session_expiry = Some(expiry);
    connect
}

fn leave(mut client: Client) {
    client.send(&Packet::Disconnect(Box::default()));
    assert_eq!(client.next(), Got::Closed);
}

/// The latest payload of a device's topic as a backend sees it.
async fn latest(server: &Server, device: &str, topic: &str) -> Option<Vec<u8>> {
    let ca = Certificate::from_pem(fs::read(server.ca()).expect("read the authority"));
    let channel = Endpoint::try_from(format!("https://localhost:{}", server.ports.grpc))
        .expect("address of gRPC")
        .tls_config(ClientTlsConfig::new().ca_certificate(ca))
        .expect("TLS of gRPC")
        .connect()
        .await
        .expect("connect to gRPC");
    let request = GetLatestRequest { topic: topic.to_owned(), device_id: Some(device.to_owned()) };
    match StateClient::new(channel).get_latest(request).await {
        Ok(response) => response.into_inner().value.map(|value| value.payload.to_vec()),
        Err(status) if status.code() == Code::NotFound => None,
        Err(status) => panic!("{status}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn latest_values_survive_kill_9() {
    let server = Server::start();
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "dev");
    for n in 0..100 {
        device.publish_acked(&format!("t/{n}"), format!("old {n}").as_bytes(), false);
        device.publish_acked(&format!("t/{n}"), format!("value {n}").as_bytes(), false);
    }
    until(|| {
        server.metric("gateway_latest_written_total") >= 100 && server.metric("gateway_latest_pending") == 0
    });
    let server = server.kill_and_restart(&[], "");
    for n in [0, 50, 99] {
        let value = latest(&server, "dev", &format!("t/{n}")).await;
        assert_eq!(value, Some(format!("value {n}").into_bytes()), "t/{n}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_tells_clients_publishes_wills_and_exits_0() {
    let mut server = Server::start();
    let mut connect = hello(Protocol::V5, "dev");
    connect.will = Some(will("status/dev", b"gone"));
    let mut device = Client::connect_with(server.ports.tcp, connect);
    let mut old = Client::connect(server.ports.tcp, Protocol::V4, "old");
    server.signal("TERM");
    assert_eq!(device.next(), Got::Disconnect(0x8B));
    assert_eq!(device.next(), Got::Closed);
    assert_eq!(old.next(), Got::Closed);
    assert!(server.wait(), "exit code 0");
    // The will is a message of the device, and so the latest value that the next start finds.
    let server = server.kill_and_restart(&[], "");
    assert_eq!(latest(&server, "dev", "status/dev").await, Some(b"gone".to_vec()));
}

#[test]
fn the_will_of_a_device_that_kill_9_cut_off_is_published_after_its_delay() {
    let server = Server::start();
    let mut watcher = Client::connect_with(server.ports.tcp, lasting("watcher", 600));
    assert_eq!(watcher.subscribe_with("status/#", QoS::AtLeastOnce, None), 1);
    let mut connect = lasting("dev", 600);
    let mut last = will("status/dev", b"gone");
    last.delay = 1;
    connect.will = Some(last);
    let _device = Client::connect_with(server.ports.tcp, connect);
    let server = server.kill_and_restart(&[], "");
    let mut watcher = Client::connect_with(server.ports.tcp, lasting("watcher", 600));
    assert_eq!(watcher.next(), Got::Publish("status/dev".to_owned(), b"gone".to_vec()));
}

#[test]
fn a_session_expires_after_a_restart_too_and_no_other_goes_with_it() {
    let server = Server::start();
    for (name, expiry) in [("short", 1), ("long", 600)] {
        let mut client = Client::connect_with(server.ports.tcp, lasting(name, expiry));
        assert_eq!(client.subscribe_with("a/#", QoS::AtLeastOnce, None), 1);
        leave(client);
    }
    let server = server.kill_and_restart(&[], "");
    until(|| server.metric("mqtt_sessions") == 1);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    publisher.publish_acked("a/b", b"x", false);
    let mut long = Client::connect_with(server.ports.tcp, lasting("long", 600));
    assert_eq!(long.next(), Got::Publish("a/b".to_owned(), b"x".to_vec()));
}

/// Makes all sessions in a data directory end their connections at `since`, and the process there at the same time.
fn leave_behind(data: &Path, since: Timestamp) {
    struct Found(Vec<StoredSession>);
    impl Restore for Found {
        fn session(&mut self, session: StoredSession, _subscriptions: Vec<StoredSubscription>) {
            self.0.push(session);
        }
        fn group(&mut self, _queue: QueueId, _full_name: &str) {}
    }
    let directory = DataDir::open(data).expect("open the data directory");
    let store = EmbeddedState::open(&directory, &StateOptions::default()).expect("open the sessions");
    let mut found = Found(Vec::new());
    store.restore_sessions(&mut found).expect("read the sessions");
    assert!(!found.0.is_empty());
    for session in found.0 {
        store.submit_session(SessionOp::Put(Box::new(StoredSession { since: Some(since), ..session }), None));
    }
    drop(store);
    fs::write(data.join("clock"), format!("{0} {0}\n", since.0)).expect("write the clock");
}

/// A start whose wall clock is far ahead of, or behind, what is stored takes no time for passed; deadlines go on from there.
#[test]
fn an_implausible_wall_clock_neither_ends_nor_keeps_sessions() {
    const DAY: i64 = 24 * 60 * 60;
    for (days, expiry, stays) in [
        (-400, 24 * 60 * 60, true), // The wall clock is far ahead.
        (-2, 24 * 60 * 60, false),  // Two days have passed.
        (400, 1, false),            // The wall clock is far behind: the second passes all the same.
        (400, 24 * 60 * 60, true),
    ] {
        let mut server = Server::start();
        leave(Client::connect_with(server.ports.tcp, lasting("device", expiry)));
        assert!(server.stop());
        #[expect(clippy::disallowed_methods, reason = "what the gateway's file is compared with")]
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs();
        let since = Timestamp(now.saturating_add_signed(days * DAY) * 1000);
        leave_behind(&server.dir().join("data"), since);
        let server = server.kill_and_restart(&[], "");
        if stays {
            let mut device = Client::open(server.ports.tcp, Protocol::V5);
            device.send(&Packet::Connect(lasting("device", expiry).into()));
            let connack = device.next_bytes().expect("CONNACK");
            assert_eq!((connack[2], connack[3]), (1, 0), "{days} days: session present");
        } else {
            until(|| server.metric("mqtt_sessions") == 0);
        }
        let warned = server.log().contains("as if no time had passed");
        assert_eq!(warned, days != -2, "{days} days: {}", server.log());
    }
}

/// State that broker mode allowed must not be a way from device to device later.
#[test]
fn non_broker_mode_forgets_stored_state_that_it_would_not_allow() {
    let server = Server::start();
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    publisher.publish_acked("devices/dev/kept", b"x", true);
    let mut device = Client::connect_with(server.ports.tcp, lasting("dev", 600));
    for filter in ["others/#", "devices/dev/#"] {
        assert_eq!(device.subscribe_with(filter, QoS::AtMostOnce, None), 0);
    }
    assert_eq!(device.ping(), [Got::Publish("devices/dev/kept".to_owned(), b"x".to_vec())]);
    leave(device);
    let server = server.kill_and_restart(&["--non-broker"], "");
    assert_eq!(server.metric("mqtt_subscriptions"), 1, "only the one inside the namespace");
    let mut device = Client::connect_with(server.ports.tcp, lasting("dev", 600));
    assert_eq!(device.subscribe_with("devices/dev/#", QoS::AtMostOnce, None), 0);
    assert_eq!(device.ping(), [], "a retained message of another device");
}

#[test]
fn sighup_keeps_serving() {
    let server = Server::start();
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "dev");
    server.signal("HUP");
    until(|| server.log().contains("SIGHUP"));
    assert_eq!(device.ping(), []);
    assert_eq!(Client::connect(server.ports.tcp, Protocol::V4, "new").ping(), []);
}
