//! Shadows: devices by their topics, backends by gRPC, and who is told of what.

use access::backends::Role;
use mqtt_server::proto::gateway::v1::{self, shadows_client::ShadowsClient, watch_shadow_item::Item};
use rumqttc::v5::mqttbytes::QoS;
use serde_json::{Value, json};
use tonic::{Code, Streaming, transport::Channel};
use tonic_types::StatusExt as _;

use crate::{access::Guarded, client::Got, harness::*};

const PREFIX: &str = "$gateway/devices";

impl Setup {
    fn shadows(&self) -> ShadowsClient<Channel> {
        ShadowsClient::new(self.channel.clone())
    }

    async fn desire(&self, device: &str, name: &str, desired: &str) -> v1::Shadow {
        let request = v1::UpdateShadowRequest { desired: Some(desired.into()), ..update(device, name) };
        soon("an update", self.shadows().update_shadow(request)).await.unwrap().into_inner().shadow.unwrap()
    }

    async fn shadow(&self, device: &str, name: &str) -> Option<v1::Shadow> {
        match soon("a shadow", self.shadows().get_shadow(get(device, name))).await {
            Ok(answer) => answer.into_inner().shadow,
            Err(status) => {
                assert_eq!(refusal(&status), (Code::NotFound, "SHADOW_NOT_FOUND".to_owned()));
                None
            }
        }
    }

    async fn watch(&self, request: v1::WatchShadowRequest) -> Watched {
        let stream = soon("a watch", self.shadows().watch_shadow(request)).await.unwrap().into_inner();
        Watched { stream, items: Vec::new() }
    }
}

fn get(device: &str, name: &str) -> v1::GetShadowRequest {
    v1::GetShadowRequest { device_id: device.into(), name: name.into() }
}

fn update(device: &str, name: &str) -> v1::UpdateShadowRequest {
    v1::UpdateShadowRequest { device_id: device.into(), name: name.into(), ..Default::default() }
}

fn delete(device: &str, name: &str) -> v1::DeleteShadowRequest {
    v1::DeleteShadowRequest { device_id: device.into(), name: name.into(), expected_version: None }
}

fn reported(section: &Value) -> String {
    json!({"state": {"reported": section}, "clientToken": "t"}).to_string()
}

struct Watched {
    stream: Streaming<v1::WatchShadowResponse>,
    items: Vec<Item>,
}

impl Watched {
    async fn next(&mut self) -> Item {
        while self.items.is_empty() {
            let response = soon("an item", self.stream.message()).await.unwrap().unwrap();
            self.items = response.items.into_iter().rev().filter_map(|item| item.item).collect();
        }
        self.items.pop().unwrap()
    }
}

/// The next answer: the topic behind the device's, and the document without its time.
async fn answer(device: &mut Device) -> (String, Value) {
    let (topic, payload) = device.next().await;
    let (_, answer) = topic.split_once("/shadow/").unwrap();
    let mut document: Value = serde_json::from_slice(&payload).unwrap();
    assert!(document.as_object_mut().unwrap().remove("timestamp").unwrap().is_u64());
    (answer.to_owned(), document)
}

/// A device that hears all about its shadows.
async fn listening(setup: &Setup, id: &str) -> Device {
    let device = setup.device(id).await;
    let filter = format!("{PREFIX}/{id}/shadow/#");
    device.client.subscribe(filter, QoS::ExactlyOnce).await.unwrap();
    device
}

async fn ask(device: &Device, topic: &str, payload: &str, qos: QoS) {
    device.client.publish(topic, qos, false, payload.to_owned()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_reports_a_backend_desires_and_the_device_gets_the_delta() {
    let setup = Setup::new().await;
    let mut device = listening(&setup, "d").await;
    let topic = format!("{PREFIX}/d/shadow/update");
    for (version, qos) in [(1, QoS::AtMostOnce), (2, QoS::AtLeastOnce), (3, QoS::ExactlyOnce)] {
        ask(&device, &topic, &reported(&json!({"on": version})), qos).await;
        let (name, accepted) = answer(&mut device).await;
        assert_eq!(name, "update/accepted");
        assert_eq!(accepted["state"], json!({"reported": {"on": version}}));
        assert_eq!((&accepted["version"], &accepted["clientToken"]), (&json!(version), &json!("t")));
        let (name, documents) = answer(&mut device).await;
        assert_eq!(name, "update/documents", "no delta: nothing is desired");
        assert_eq!(documents["current"]["version"], json!(version));
        assert_eq!(documents.get("previous").is_some(), version > 1);
    }
    let shadow = setup.desire("d", "", "{\"on\": 5, \"big\": 9007199254740993}").await;
    assert_eq!((shadow.version, shadow.reported.as_str()), (4, "{\"on\":3}"));
    assert_eq!(shadow.delta, "{\"big\":9007199254740993,\"on\":5}");
    assert_eq!(answer(&mut device).await.0, "update/accepted");
    let (name, delta) = answer(&mut device).await;
    assert_eq!((name.as_str(), &delta["version"]), ("update/delta", &json!(4)));
    assert_eq!(delta["state"], json!({"on": 5, "big": 9_007_199_254_740_993_u64}));
    assert_eq!(answer(&mut device).await.0, "update/documents");
    ask(&device, &topic, &reported(&json!({"on": 5, "big": 9_007_199_254_740_993_u64})), QoS::AtLeastOnce)
        .await;
    assert_eq!(answer(&mut device).await.0, "update/accepted");
    assert_eq!(answer(&mut device).await.0, "update/documents");
    ask(&device, &format!("{PREFIX}/d/shadow/get"), "", QoS::AtMostOnce).await;
    let (name, document) = answer(&mut device).await;
    assert_eq!((name.as_str(), &document["version"]), ("get/accepted", &json!(5)));
    assert_eq!(document["state"]["desired"], document["state"]["reported"]);
    assert!(document["state"].get("delta").is_none());
    let shadow = setup.shadow("d", "").await.unwrap();
    assert_eq!((shadow.version, shadow.delta.as_str()), (5, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_request_is_told_and_changes_nothing() {
    let setup = Setup::with(|config| config.shadow.max_named = 2).await;
    let mut device = listening(&setup, "d").await;
    let mut rejected = async |name: &str, operation: &str, payload: &str| {
        let name = if name.is_empty() { String::new() } else { format!("name/{name}/") };
        ask(&device, &format!("{PREFIX}/d/shadow/{name}{operation}"), payload, QoS::AtLeastOnce).await;
        let (topic, answer) = answer(&mut device).await;
        assert_eq!(topic, format!("{name}{operation}/rejected"));
        (answer["code"].as_u64().unwrap(), answer["clientToken"].as_str().map(str::to_owned))
    };
    assert_eq!(rejected("", "get", "").await, (404, None));
    assert_eq!(rejected("", "delete", "{\"clientToken\":\"x\"}").await, (404, Some("x".to_owned())));
    assert_eq!(rejected("", "update", "no").await, (400, None));
    let wrong = "{\"state\":{\"reported\":1},\"clientToken\":\"x\"}";
    assert_eq!(rejected("n", "update", wrong).await, (400, Some("x".to_owned())));
    let conflict = "{\"state\":{\"reported\":{}},\"version\":3}";
    assert_eq!(rejected("", "update", conflict).await, (409, None));
    let large = reported(&json!({"a": "x".repeat(9_000)}));
    assert_eq!(rejected("", "update", &large).await, (413, Some("t".to_owned())));
    assert_eq!(rejected("", "update", &" ".repeat(60_000)).await, (413, None));
    let deep = format!("{}1{}", "{\"a\":".repeat(9), "}".repeat(9));
    let deep = format!("{{\"state\":{{\"reported\":{deep}}}}}");
    assert_eq!(rejected("", "update", &deep).await, (400, None));
    for name in ["a", "b"] {
        setup.desire("d", name, "{}").await;
    }
    // Changes by backends are told, too.
    let mut told = Vec::new();
    while told.len() < 4 {
        told.push(answer(&mut device).await.0);
    }
    let mut rejected = async |name: &str| {
        let topic = format!("{PREFIX}/d/shadow/name/{name}/update");
        ask(&device, &topic, &reported(&json!({})), QoS::AtLeastOnce).await;
        answer(&mut device).await
    };
    let (topic, answer_of_third) = rejected("c").await;
    assert_eq!((topic.as_str(), &answer_of_third["code"]), ("name/c/update/rejected", &json!(403)));
    // The remains of a deleted shadow make room.
    setup.shadows().delete_shadow(delete("d", "a")).await.unwrap();
    assert_eq!(answer(&mut device).await.0, "name/a/delete/accepted");
    ask(&device, &format!("{PREFIX}/d/shadow/name/c/update"), &reported(&json!({})), QoS::AtLeastOnce).await;
    assert_eq!(answer(&mut device).await.0, "name/c/update/accepted");
    assert_eq!(setup.shadow("d", "").await, None, "nothing was made by what was rejected");
}

/// An update of one of two would be lost.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_updates_each_count_and_a_conflict_is_told() {
    let setup = Setup::new().await;
    let tasks: Vec<_> = (0..40)
        .map(|number| {
            let mut shadows = setup.shadows();
            tokio::spawn(async move {
                let desired = Some(format!("{{\"k{number}\":{number}}}"));
                shadows.update_shadow(v1::UpdateShadowRequest { desired, ..update("d", "n") }).await.unwrap();
            })
        })
        .collect();
    for task in tasks {
        soon("an update", task).await.unwrap();
    }
    let shadow = setup.shadow("d", "n").await.unwrap();
    let desired: Value = serde_json::from_str(&shadow.desired).unwrap();
    assert_eq!((shadow.version, desired.as_object().unwrap().len()), (40, 40));
    let expecting = |version| v1::UpdateShadowRequest {
        desired: Some("{}".into()),
        expected_version: Some(version),
        ..update("d", "n")
    };
    let refused = setup.shadows().update_shadow(expecting(39)).await.unwrap_err();
    assert_eq!(refusal(&refused), (Code::Aborted, "VERSION_CONFLICT".to_owned()));
    assert_eq!(refused.get_details_error_info().unwrap().metadata["version"], "40");
    let made = setup.shadows().update_shadow(expecting(40)).await.unwrap().into_inner().shadow.unwrap();
    assert_eq!(made.version, 41, "a change of nothing is one");
    let old = v1::DeleteShadowRequest { expected_version: Some(40), ..delete("d", "n") };
    assert_eq!(setup.shadows().delete_shadow(old).await.unwrap_err().code(), Code::Aborted);
}

/// A device would take what is newer for older.
#[tokio::test(flavor = "multi_thread")]
async fn a_version_never_goes_back_by_deletion_or_restart() {
    let mut setup = Setup::new().await;
    assert_eq!(setup.desire("d", "", "{\"a\":1}").await.version, 1);
    assert_eq!(setup.desire("d", "", "{\"a\":2}").await.version, 2);
    setup = setup.restarted(|_| {}).await;
    assert_eq!(setup.shadow("d", "").await.unwrap().desired, "{\"a\":2}");
    assert_eq!(setup.shadows().delete_shadow(delete("d", "")).await.unwrap().into_inner().version, 3);
    assert_eq!(setup.shadow("d", "").await, None);
    let again = setup.shadows().delete_shadow(delete("d", "")).await.unwrap_err();
    assert_eq!(again.code(), Code::NotFound);
    setup = setup.restarted(|_| {}).await;
    let anew =
        v1::UpdateShadowRequest { desired: Some("{}".into()), expected_version: Some(0), ..update("d", "") };
    let anew = setup.shadows().update_shadow(anew).await.unwrap().into_inner().shadow.unwrap();
    assert_eq!((anew.version, anew.desired.as_str()), (4, "{}"), "what was deleted is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_reaches_the_shadows_of_another_device() {
    for non_broker in [false, true] {
        let setup = Setup::with(|config| config.non_broker = non_broker).await;
        let mut device = setup.raw("d", |_| {});
        for filter in ["e/shadow/#", "+/shadow/update/accepted", "#", "e/#"] {
            assert_eq!(device.subscribe(&format!("{PREFIX}/{filter}")), 0x87, "{filter}");
            assert_eq!(device.subscribe(&format!("$share/g/{PREFIX}/{filter}")), 0x87, "{filter}");
        }
        assert_eq!(device.subscribe("$gateway/#"), 0x87);
        assert_eq!(device.subscribe(&format!("{PREFIX}/d/shadow/#")), 0);
        let topic = format!("{PREFIX}/e/shadow/update");
        device.publish(&topic, reported(&json!({"a": 1})).as_bytes(), gateway_core::QoS::AtLeastOnce, false);
        assert_eq!(device.next(), Got::PubAck(0x87));
        let own = format!("{PREFIX}/d/shadow/update");
        device.publish(&own, reported(&json!({"a": 1})).as_bytes(), gateway_core::QoS::AtLeastOnce, false);
        let (mut acked, mut answered) = (false, 0);
        while !acked || answered < 2 {
            match device.next() {
                Got::PubAck(0) => acked = true,
                Got::Publish(topic, _) if topic.starts_with(&own) => answered += 1,
                other => panic!("{other:?}"),
            }
        }
        // A topic that is none of these is nobody's.
        device.publish_acked(&format!("{PREFIX}/d/shadow/other"), b"x", true);
        assert_eq!(device.ping(), []);
        assert_eq!((setup.shadow("e", "").await, setup.shadow("d", "").await.unwrap().version), (None, 1));
    }
}

/// The topics of `a/b` would be below those of `a`.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_id_of_several_levels_has_shadows_by_grpc_alone() {
    let setup = Setup::new().await;
    let mut above = setup.raw("a", |_| {});
    assert_eq!(above.subscribe(&format!("{PREFIX}/a/#")), 0);
    let mut device = setup.raw("a/b", |_| {});
    assert_eq!(device.subscribe(&format!("{PREFIX}/a/b/shadow/#")), 0x87);
    device.publish(&format!("{PREFIX}/a/b/shadow/get"), b"", gateway_core::QoS::AtLeastOnce, false);
    assert_eq!(device.next(), Got::PubAck(0x87));
    for odd in ["a/b", "a+", "#", "a/shadow"] {
        assert_eq!(setup.desire(odd, "", "{\"x\":1}").await.version, 1);
        assert_eq!(setup.shadow(odd, "").await.unwrap().desired, "{\"x\":1}");
    }
    assert_eq!(above.ping(), [], "nobody is told below another's name");
}

#[tokio::test(flavor = "multi_thread")]
async fn shadows_are_listed_in_pages_and_watched_from_what_is_there() {
    let setup = Setup::new().await;
    for name in ["", "b", "a", "c"] {
        setup.desire("d", name, "{\"v\":1}").await;
    }
    setup.desire("other", "a", "{}").await;
    setup.shadows().delete_shadow(delete("d", "b")).await.unwrap();
    let (mut names, mut token) = (Vec::new(), String::new());
    loop {
        let request = v1::ListShadowsRequest { device_id: "d".into(), page_size: 1, page_token: token };
        let page = setup.shadows().list_shadows(request).await.unwrap().into_inner();
        names.extend(page.shadows.into_iter().map(|shadow| shadow.name));
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(names, ["", "a", "c"]);
    let request = v1::WatchShadowRequest {
        device_ids: vec!["d".into()],
        names: vec![String::new(), "c".into()],
        ..Default::default()
    };
    let mut watched = setup.watch(request).await;
    for name in ["", "c"] {
        assert!(matches!(watched.next().await, Item::Shadow(shadow) if shadow.name == name));
    }
    assert!(matches!(watched.next().await, Item::SnapshotEnd(_)));
    setup.desire("d", "a", "{\"v\":2}").await;
    setup.desire("other", "a", "{\"v\":2}").await;
    setup.desire("d", "c", "{\"v\":2}").await;
    assert!(
        matches!(watched.next().await, Item::Shadow(shadow) if shadow.version == 2 && shadow.name == "c")
    );
    setup.shadows().delete_shadow(delete("d", "c")).await.unwrap();
    let Item::Deleted(deleted) = watched.next().await else { panic!("not deleted") };
    assert_eq!((deleted.name.as_str(), deleted.version), ("c", 3));
    // Of all devices only changes.
    let heartbeat_interval = Some(prost_types::Duration { seconds: 0, nanos: 100_000_000 });
    let mut all = setup.watch(v1::WatchShadowRequest { heartbeat_interval, ..Default::default() }).await;
    assert!(matches!(all.next().await, Item::SnapshotEnd(_)));
    assert!(matches!(all.next().await, Item::Heartbeat(_)));
    let device = setup.device("third").await;
    ask(&device, &format!("{PREFIX}/third/shadow/update"), &reported(&json!({"a": 1})), QoS::AtMostOnce)
        .await;
    let shadow = loop {
        match all.next().await {
            Item::Shadow(shadow) => break shadow,
            other => assert!(matches!(other, Item::Heartbeat(_)), "{other:?}"),
        }
    };
    assert_eq!((shadow.device_id.as_str(), shadow.reported.as_str()), ("third", "{\"a\":1}"));
}

/// Before, clients under ever new ids filled the disk.
#[tokio::test(flavor = "multi_thread")]
async fn shadows_of_ever_new_devices_fill_no_more_than_their_bound() {
    let setup = Setup::with(|config| config.shadow.max_total_bytes.0 = 1 << 20).await;
    let mut shadows = setup.shadows();
    let document = format!("{{\"a\":\"{}\"}}", "x".repeat(7_000));
    let with =
        |device: &str| v1::UpdateShadowRequest { desired: Some(document.clone()), ..update(device, "") };
    let mut taken = 0;
    let refused = loop {
        match shadows.update_shadow(with(&format!("d{taken}"))).await {
            Ok(_) => taken += 1,
            Err(refused) => break refused,
        }
        assert!(taken < 200, "1 MiB is full some time");
    };
    assert_eq!(refusal(&refused), (Code::ResourceExhausted, "SHADOWS_FULL".to_owned()));
    assert!(taken > 50, "{taken}");
    // A device is told, too, and what is there goes on.
    let mut device = setup.raw("late", |_| {});
    device.subscribe(&format!("{PREFIX}/late/shadow/update/rejected"));
    let update = reported(&json!({"a": "x".repeat(7_000)}));
    device.publish(
        &format!("{PREFIX}/late/shadow/update"),
        update.as_bytes(),
        gateway_core::QoS::AtMostOnce,
        false,
    );
    let Got::Publish(_, payload) = device.next() else { panic!("no answer") };
    let rejected: Value = serde_json::from_slice(&payload).unwrap();
    assert_eq!(rejected["code"], 507);
    setup.desire("d0", "", "{\"a\":\"y\"}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_make_no_sense_are_told_why() {
    let setup = Setup::with(|config| config.shadow.max_named = 1).await;
    let mut shadows = setup.shadows();
    setup.desire("d", "one", "{}").await;
    let with = |desired: &str| v1::UpdateShadowRequest { desired: Some(desired.into()), ..update("d", "") };
    let deep = format!("{}1{}", "{\"a\":".repeat(9), "}".repeat(9));
    let large = format!("{{\"a\":\"{}\"}}", "x".repeat(9_000));
    let token = v1::UpdateShadowRequest { client_token: "x".repeat(65), ..with("{}") };
    for (request, code, reason) in [
        (update("d", ""), Code::InvalidArgument, "INVALID_FIELD"),
        (
            v1::UpdateShadowRequest { device_id: String::new(), ..with("{}") },
            Code::InvalidArgument,
            "INVALID_FIELD",
        ),
        (
            v1::UpdateShadowRequest { device_id: "x".repeat(401), ..with("{}") },
            Code::InvalidArgument,
            "INVALID_FIELD",
        ),
        (
            v1::UpdateShadowRequest { name: "a/b".into(), ..with("{}") },
            Code::InvalidArgument,
            "INVALID_FIELD",
        ),
        (with("{"), Code::InvalidArgument, "INVALID_FIELD"),
        (with("[]"), Code::InvalidArgument, "INVALID_FIELD"),
        (with(&deep), Code::InvalidArgument, "INVALID_FIELD"),
        (token, Code::InvalidArgument, "INVALID_FIELD"),
        (with(&large), Code::ResourceExhausted, "SHADOW_TOO_LARGE"),
        (
            v1::UpdateShadowRequest { name: "two".into(), ..with("{}") },
            Code::ResourceExhausted,
            "TOO_MANY_SHADOWS",
        ),
    ] {
        let refused = shadows.update_shadow(request.clone()).await.unwrap_err();
        assert_eq!(refusal(&refused), (code, reason.to_owned()), "{request:?}");
    }
    let off = Setup::with(|config| config.shadow.enabled = false).await;
    let refused = off.shadows().get_shadow(get("d", "")).await.unwrap_err();
    assert_eq!(refusal(&refused), (Code::FailedPrecondition, "SHADOWS_DISABLED".to_owned()));
    assert_eq!(refused.get_details_error_info().unwrap().metadata["key"], "shadow.enabled");
    // Then the topics are like any other.
    let mut device = off.raw("d", |_| {});
    assert_eq!(device.subscribe(&format!("{PREFIX}/+/shadow/#")), 0);
}

/// Firmware made for AWS IoT has the prefix in it.
#[tokio::test(flavor = "multi_thread")]
async fn another_prefix_moves_all_topics() {
    let setup = Setup::with(|config| config.shadow.topic_prefix = "$aws/things".into()).await;
    let mut device = setup.device("d").await;
    device.client.subscribe("$aws/things/d/shadow/name/n/+/accepted", QoS::AtLeastOnce).await.unwrap();
    ask(&device, "$aws/things/d/shadow/name/n/update", &reported(&json!({"a": 1})), QoS::AtLeastOnce).await;
    let (topic, _) = device.next().await;
    assert_eq!(topic, "$aws/things/d/shadow/name/n/update/accepted");
    assert_eq!(setup.shadow("d", "n").await.unwrap().reported, "{\"a\":1}");
}

/// State reported by a device's will is taken as reported, and a backend's publish is only a message.
#[tokio::test(flavor = "multi_thread")]
async fn a_will_reports_and_a_message_of_a_backend_is_only_a_message() {
    let setup = Setup::new().await;
    let topic = format!("{PREFIX}/d/shadow/update");
    let will = reported(&json!({"online": false}));
    let device = setup.raw("d", |connect| {
        connect.session_expiry = None;
        connect.will = Some(crate::client::will(&topic, will.leak().as_bytes()));
    });
    let filter = vec![format!("{PREFIX}/#")];
    let mut listener =
        setup.subscribe(v1::SubscribeRequest { topic_filters: filter, ..Default::default() }).await;
    setup.publish(to(&topic, &reported(&json!({"online": true})))).await.unwrap();
    assert_eq!(setup.shadow("d", "").await, None);
    let mut watched = setup.watch(v1::WatchShadowRequest { changes_only: true, ..Default::default() }).await;
    drop(device);
    let Item::Shadow(shadow) = watched.next().await else { panic!("no shadow") };
    assert_eq!(shadow.reported, "{\"online\":false}");
    // Nobody else got the will, but whoever listens gets what backends publish, and the answers.
    let told = ["update", "update/accepted", "update/documents"];
    for wanted in told {
        assert_eq!(listener.next().await.topic, format!("{PREFIX}/d/shadow/{wanted}"));
    }
    let end = format!("{PREFIX}/end");
    setup.publish(to(&end, "")).await.unwrap();
    assert_eq!(listener.next().await.topic, end);
}

/// Rules out that a backend reads, changes or watches shadows out of its scope, be it of devices or of topics.
#[tokio::test(flavor = "multi_thread")]
async fn a_backend_meets_the_shadows_in_its_scope_only() {
    let led = ["$gateway/devices/+/shadow/name/led/#"];
    let guarded = Guarded::with(
        &[
            ("all", Role::Admin, None, None),
            ("devices", Role::Admin, None, Some(&["d*"])),
            ("topics", Role::Admin, Some(&led), None),
        ],
        |_| {},
    )
    .await;
    let desired = Some("{\"v\":1}".to_owned());
    let set = async |who: &str, device: &str, name: &str| {
        let request = v1::UpdateShadowRequest { desired: desired.clone(), ..update(device, name) };
        let mut client = ShadowsClient::new(guarded.channel(who));
        soon("an update", client.update_shadow(request)).await.map(|_| ())
    };
    for (device, name) in [("d1", ""), ("d1", "led"), ("x1", ""), ("x1", "led")] {
        set("all", device, name).await.unwrap();
    }
    let denied = (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned());
    let all = v1::WatchShadowRequest { changes_only: true, ..Default::default() };
    for (who, own, others, in_list) in [
        ("devices", ("d1", ""), [("x1", ""), ("x1", "led")], vec!["", "led"]),
        ("topics", ("x1", "led"), [("x1", ""), ("d1", "")], vec!["led"]),
    ] {
        let mut client = ShadowsClient::new(guarded.channel(who));
        let mut changes = soon("a watch", client.watch_shadow(all.clone())).await.unwrap().into_inner();
        for (device, name) in others {
            let status = client.get_shadow(get(device, name)).await.unwrap_err();
            assert_eq!(refusal(&status), denied, "{who} gets {device} {name}");
            let status = set(who, device, name).await.unwrap_err();
            assert_eq!(refusal(&status), denied, "{who} updates {device} {name}");
            let status = client.delete_shadow(delete(device, name)).await.unwrap_err();
            assert_eq!(refusal(&status), denied, "{who} deletes {device} {name}");
            set("all", device, name).await.unwrap();
        }
        set(who, own.0, own.1).await.unwrap();
        client.get_shadow(get(own.0, own.1)).await.unwrap();
        let page = v1::ListShadowsRequest { device_id: own.0.into(), ..Default::default() };
        let page = client.list_shadows(page).await.unwrap().into_inner();
        let names: Vec<_> = page.shadows.iter().map(|shadow| shadow.name.as_str()).collect();
        assert_eq!(names, in_list, "{who}");
        // Its own change is the first it hears of, although those of others came before.
        let items = soon("a change", changes.message()).await.unwrap().unwrap().items;
        let Some(Item::Shadow(shadow)) = &items[0].item else { panic!("{items:?}") };
        assert_eq!((shadow.device_id.as_str(), shadow.name.as_str()), own, "{who}");
    }
    let mut client = ShadowsClient::new(guarded.channel("devices"));
    let page = v1::ListShadowsRequest { device_id: "x1".into(), ..Default::default() };
    assert_eq!(refusal(&client.list_shadows(page).await.unwrap_err()), denied);
    let watch = v1::WatchShadowRequest { device_ids: vec!["x1".into()], ..Default::default() };
    assert_eq!(refusal(&client.watch_shadow(watch).await.unwrap_err()), denied);
}
