//! A front before several homes: each method answers as one gateway with all of their devices would.

mod bench;
mod lists;
mod publishing;
mod streams;

use std::sync::atomic::Ordering::SeqCst;

use gateway_core::{ClientId, Message, Origin, OriginKind, clock};
use prost::Message as _;
use prost_types::FileDescriptorSet;
use tokio::net::TcpListener;
use tonic::{Code, transport::Endpoint};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_types::StatusExt as _;

use self::bench::{Bench, bench, bench_with};
use super::merged::merge_of;
use grpc::{
    GrpcConfig, LocalService,
    methods::{AnsweredAt, method},
    proto::{
        DESCRIPTORS,
        gateway::v1::{
            self, commands_client::CommandsClient, devices_client::DevicesClient,
            groups_client::GroupsClient, operations_client::OperationsClient,
            security_client::SecurityClient, state_client::StateClient,
        },
        rpcserver::{self, published_packet_service_client::PublishedPacketServiceClient},
    },
};

/// The reason of an error.
fn reason(status: &tonic::Status) -> String {
    status.get_details_error_info().unwrap().reason
}

/// A time so many seconds from now.
fn in_seconds(seconds: u64) -> Option<prost_types::Timestamp> {
    let at = clock::to_wall(clock::now()).plus_millis(seconds * 1_000);
    Some(grpc_messages::answers::time(at))
}

fn command(device: &str, id: &str) -> v1::StartCommandRequest {
    v1::StartCommandRequest {
        command_id: id.to_owned(),
        spec: Some(v1::CommandSpec {
            device_id: device.to_owned(),
            name: "reboot".to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// The failure: UNIMPLEMENTED in a cluster only.
#[test]
fn every_method_of_several_homes_is_merged() {
    let mut merged = 0;
    for file in FileDescriptorSet::decode(DESCRIPTORS).unwrap().file {
        for service in &file.service {
            for of in &service.method {
                let path = format!("/{}.{}/{}", file.package(), service.name(), of.name());
                let at = method(&path).unwrap().at;
                let wants = matches!(at, AnsweredAt::EveryHome | AnsweredAt::HomeOfDeviceOrEvery(_));
                assert_eq!(merge_of(&path).is_some(), wants, "{path}");
                if matches!(at, AnsweredAt::AnyHome | AnsweredAt::HomeThatHas) {
                    assert!(!of.client_streaming(), "{path}: is read as one message");
                }
                merged += usize::from(wants);
            }
        }
    }
    assert!(merged > 20, "{merged}");
}

/// The failure: a device is looked for at a home that is not its own; details of errors are lost on the way.
#[tokio::test]
async fn calls_about_a_device_go_to_its_home() {
    let bench = bench(3).await;
    let mut devices = DevicesClient::new(bench.front.clone());
    for (home, id) in ["d0", "d1", "d2"].into_iter().enumerate() {
        bench.homes.connect(id, &["a/#"]).await;
        let before: Vec<_> = bench.homes.calls.iter().map(|calls| calls.load(SeqCst)).collect();
        let request = v1::GetDeviceRequest { device_id: id.to_owned(), ..Default::default() };
        let found = devices.get_device(request.clone()).await.unwrap().into_inner();
        let direct = DevicesClient::new(bench.homes.homes[home].service.clone()).get_device(request).await;
        assert_eq!(found, direct.unwrap().into_inner());
        for (other, calls) in bench.homes.calls.iter().enumerate() {
            assert_eq!(calls.load(SeqCst) - before[other], usize::from(other == home), "{id}");
        }
        // An error of the home, as it said it.
        let request = v1::DisconnectDeviceRequest {
            device_id: id.to_owned(),
            reason_code: Some(1),
            ..Default::default()
        };
        let refused = devices.disconnect_device(request).await.unwrap_err();
        assert_eq!(refused.get_details_error_info().unwrap().metadata["field"], "reason_code");
        assert!(refused.get_details_bad_request().is_some());
    }
    let publish =
        rpcserver::PublishRequest { device_id: "d1".to_owned(), topic: "t".to_owned(), ..Default::default() };
    let mut precedent = PublishedPacketServiceClient::new(bench.front.clone());
    assert_eq!(precedent.publish_payload_to_device(publish).await.unwrap().into_inner().code, "Success");
    bench.homes.set_away(1, true);
    let request = v1::GetDeviceRequest { device_id: "d1".to_owned(), ..Default::default() };
    let away = devices.get_device(request).await.unwrap_err();
    assert_eq!((away.code(), reason(&away).as_str()), (Code::Unavailable, "NOT_ACTIVE"));
    assert_eq!(away.get_details_error_info().unwrap().metadata["home"], "1");
    let request = v1::GetDeviceRequest { device_id: "d2".to_owned(), ..Default::default() };
    assert!(devices.get_device(request).await.is_ok(), "other homes go on");
}

/// The failure: a call that costs more than it did, or is answered differently, because there could be more homes.
#[tokio::test]
async fn with_one_home_everything_goes_there() {
    let bench = bench(1).await;
    let caller = OperationsClient::new(bench.front.clone()).get_caller(v1::GetCallerRequest {}).await;
    assert_eq!(caller.unwrap().into_inner().name, "anybody");
    assert_eq!(bench.homes.calls[0].load(SeqCst), 1);
    let list = v1::ListTenantsRequest { page_token: "?".to_owned(), ..Default::default() };
    let refused = SecurityClient::new(bench.front.clone()).list_tenants(list).await.unwrap_err();
    assert_eq!(reason(&refused), "PAGE_TOKEN_INVALID");
    assert_eq!(bench.homes.calls[0].load(SeqCst), 2, "not read here");
}

/// The failure: nobody may ask how the node is because a home is away.
#[tokio::test]
async fn the_node_answers_for_itself_while_all_homes_are_away() {
    let bench = bench(2).await;
    bench.homes.set_away(0, true);
    bench.homes.set_away(1, true);
    let mut operations = OperationsClient::new(bench.front.clone());
    assert!(operations.get_caller(v1::GetCallerRequest {}).await.is_ok());
    assert!(operations.get_configuration(v1::GetConfigurationRequest {}).await.is_ok());
    let mut health = HealthClient::new(bench.front.clone());
    assert!(health.check(HealthCheckRequest::default()).await.is_ok());
    let away = operations.get_status(v1::GetStatusRequest {}).await.unwrap_err();
    assert_eq!(reason(&away), "NOT_ACTIVE");
    bench.homes.set_away(1, false);
    let status = operations.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.version, "1");
    let expected = ["home 0: no gateway of the cluster serves home 0 now", "home 1: problem of 1"];
    assert_eq!(status.problems, expected);
}

/// The failure: a call counts among those of its connection once more for each home.
#[tokio::test]
async fn a_call_at_every_home_is_one_call_of_its_connection() {
    let config = GrpcConfig { max_calls_per_connection: 1, ..GrpcConfig::default() };
    let (_homes, front) = bench_with(3, config).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(front.serve(listener, None));
    let channel = Endpoint::try_from(endpoint).unwrap().connect().await.unwrap();
    let mut devices = DevicesClient::new(channel);
    assert!(devices.list_top_devices(v1::ListTopDevicesRequest::default()).await.is_ok());
    let request = v1::GetDeviceRequest { device_id: "d1".to_owned(), ..Default::default() };
    assert_eq!(reason(&devices.get_device(request).await.unwrap_err()), "DEVICE_NOT_FOUND");
    server.abort();
}

/// The failure: a command is not found because its id does not say where it is.
#[tokio::test]
async fn a_command_is_found_by_its_id_alone() {
    let bench = bench(3).await;
    let mut commands = CommandsClient::new(bench.front.clone());
    for (device, id) in [("d0", "c-a"), ("d1", "c-b"), ("d2", "c-c")] {
        commands.start_command(command(device, id)).await.unwrap();
        let request = v1::GetCommandRequest { command_id: id.to_owned() };
        let found = commands.get_command(request).await.unwrap().into_inner().command.unwrap();
        assert_eq!((found.command_id.as_str(), found.spec.unwrap().device_id.as_str()), (id, device));
        let request = v1::WatchCommandRequest { command_id: id.to_owned() };
        let mut watch = commands.watch_command(request).await.unwrap().into_inner();
        assert_eq!(watch.message().await.unwrap().unwrap().command.unwrap().command_id, id);
    }
    let request = v1::CancelCommandRequest { command_id: "c-c".to_owned() };
    let cancelled = commands.cancel_command(request).await.unwrap().into_inner().command.unwrap();
    assert_eq!(cancelled.state(), v1::CommandState::Cancelled);
    let unknown = v1::GetCommandRequest { command_id: "c-d".to_owned() };
    let missing = commands.get_command(unknown.clone()).await.unwrap_err();
    assert_eq!(reason(&missing), "COMMAND_NOT_FOUND");
    bench.homes.set_away(1, true);
    let request = v1::GetCommandRequest { command_id: "c-c".to_owned() };
    assert!(commands.get_command(request).await.is_ok(), "its home is there");
    let missing = commands.get_command(unknown).await.unwrap_err();
    assert_eq!(reason(&missing), "NOT_ACTIVE", "the home that is away may have it");
}

/// The failure: a group that is made at one home and looked for at another.
#[tokio::test]
async fn groups_are_at_the_first_home() {
    let bench = bench(3).await;
    let mut groups = GroupsClient::new(bench.front.clone());
    for name in ["g1", "g2"] {
        let refused = groups.get_group(v1::GetGroupRequest { name: name.to_owned() }).await.unwrap_err();
        assert_eq!(reason(&refused), "GROUPS_DISABLED");
    }
    assert_eq!(bench.homes.calls.iter().map(|calls| calls.load(SeqCst)).collect::<Vec<_>>(), [2, 0, 0]);
}

/// The failure: homes whose copies of retained messages differ.
#[tokio::test]
async fn retained_messages_are_changed_at_every_home() {
    let bench = bench(3).await;
    let mut state = StateClient::new(bench.front.clone());
    for topic in ["a/1", "a/2", "b/0"] {
        let set = v1::SetRetainedRequest {
            topic: topic.to_owned(),
            payload: b"x".as_slice().into(),
            ..Default::default()
        };
        assert!(!state.set_retained(set.clone()).await.unwrap().into_inner().replaced);
        assert!(state.set_retained(set).await.unwrap().into_inner().replaced);
        let get = v1::GetRetainedRequest { topic: topic.to_owned() };
        assert_eq!(state.get_retained(get).await.unwrap().into_inner().message.unwrap().topic, topic);
    }
    let topics = async |service: &LocalService| {
        let mut state = StateClient::new(service.clone());
        let (mut topics, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = v1::ListRetainedRequest { page_size: 1, page_token, ..Default::default() };
            let page = state.list_retained(request).await.unwrap().into_inner();
            topics.extend(page.messages.into_iter().map(|message| message.topic));
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return topics;
            }
        }
    };
    assert_eq!(topics(&bench.front).await, ["a/1", "a/2", "b/0"]);
    let delete = v1::DeleteRetainedRequest { topic_filter: "a/#".to_owned(), ..Default::default() };
    assert_eq!(state.delete_retained(delete).await.unwrap().into_inner().count, 2);
    for home in &bench.homes.homes {
        assert_eq!(topics(&home.service).await, ["b/0"]);
    }
    bench.homes.set_away(0, true);
    assert_eq!(topics(&bench.front).await, ["b/0"], "any home has them");
}

/// The failure: the newest value of the first home that has one.
#[tokio::test]
async fn the_latest_value_is_the_newest_of_all_homes() {
    let bench = bench(3).await;
    let mut state = StateClient::new(bench.front.clone());
    for (device, payload) in [("d0", "old"), ("d2", "new")] {
        bench.homes.say(device, "t", payload);
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    let get = |device: Option<&str>| v1::GetLatestRequest {
        topic: "t".to_owned(),
        device_id: device.map(str::to_owned),
    };
    let mut values = Vec::new();
    for device in [None, Some("d0"), Some("d2")] {
        let value = state.get_latest(get(device)).await.unwrap().into_inner().value.unwrap();
        values.push(String::from_utf8_lossy(&value.payload).into_owned());
    }
    assert_eq!(values, ["new", "old", "new"]);
    let missing = v1::GetLatestRequest { topic: "other".to_owned(), device_id: None };
    assert_eq!(reason(&state.get_latest(missing).await.unwrap_err()), "VALUE_NOT_FOUND");
    let requests = [Some("d1"), Some("d2"), None, Some("d0")].map(get).to_vec();
    let batch = state.batch_get_latest(v1::BatchGetLatestRequest { requests }).await.unwrap().into_inner();
    let payload = |entry: v1::BatchGetLatestEntry| entry.value.map(|value| value.payload);
    let payloads: Vec<_> = batch.entries.into_iter().map(payload).collect();
    let new = Some(b"new".as_slice().into());
    assert_eq!(payloads, [None, new.clone(), new, Some(b"old".as_slice().into())]);
    assert_eq!(batch.next_index, 0);
}

/// The failure: a device that is deleted lives on at another home.
#[tokio::test]
async fn a_deleted_device_is_gone_from_every_home() {
    let Bench { homes, front } = bench(2).await;
    homes.connect("d1", &[]).await;
    homes.say("d1", "t", "x");
    for home in &homes.homes {
        let client_id = ClientId::new("d1");
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot: 1 };
        let message = Message::new("kept", b"x", clock::now(), origin);
        home.broker.set_retained(&message).unwrap();
    }
    let mut devices = DevicesClient::new(front.clone());
    let request = v1::DeleteDeviceRequest { device_id: "d1".to_owned() };
    let deleted = devices.delete_device(request.clone()).await.unwrap().into_inner();
    let expected = v1::DeleteDeviceResponse { session_ended: true, latest_values: 1, retained_messages: 1 };
    assert_eq!(deleted, expected);
    assert_eq!(devices.delete_device(request).await.unwrap().into_inner(), Default::default());
}
