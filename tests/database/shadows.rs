//! Shadows in the database: two gateways on one keyspace, and a database that is away.

use std::thread;

use gateway_core::{Protocol, QoS};
use mqtt_server::proto::gateway::v1::{GetShadowRequest, Shadow, UpdateShadowRequest};
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::{
    cassandra,
    client::{Client, Got},
    gateway::Gateway,
    proxy::Proxy,
    tables::{Tables, wait_for},
};

/// The name under which gRPC health tells of shadows.
const SERVICE: &str = "gateway.v1.Shadows";

fn topic(device: &str, rest: &str) -> String {
    format!("$gateway/devices/{device}/shadow/{rest}")
}

fn desire(device: &str, desired: String) -> UpdateShadowRequest {
    UpdateShadowRequest { device_id: device.into(), desired: Some(desired), ..Default::default() }
}

fn get(device: &str) -> GetShadowRequest {
    GetShadowRequest { device_id: device.into(), ..Default::default() }
}

/// Returns the number of keys in a section.
fn keys(section: &str) -> usize {
    section.matches(':').count()
}

#[test]
fn two_gateways_that_change_the_same_shadow_lose_no_change() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let both = [0, 1].map(|_| Gateway::start(&cassandra.address, &tables, ""));
    // Each is there: the tables are made.
    both.iter().for_each(Gateway::is_well);
    let mut device = Client::connect(both[0].mqtt(), Protocol::V5, "shared");
    thread::scope(|scope| {
        for (number, gateway) in both.iter().enumerate() {
            scope.spawn(move || {
                for round in 0..20 {
                    let desired = format!("{{\"g{number}r{round}\":1}}");
                    gateway.update_shadow(desire("shared", desired)).expect("an update");
                }
            });
        }
        for round in 0..20 {
            let report = format!("{{\"state\":{{\"reported\":{{\"r{round}\":1}}}}}}");
            device.publish_acked(&topic("shared", "update"), report.as_bytes(), false);
        }
    });
    let seen: Vec<Shadow> =
        both.iter().map(|gateway| gateway.shadow(get("shared")).expect("the shadow")).collect();
    assert_eq!(seen[0], seen[1]);
    assert_eq!((seen[0].version, keys(&seen[0].desired), keys(&seen[0].reported)), (60, 40, 20));
}

#[test]
fn while_the_database_is_away_a_device_is_answered_and_stays_connected() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let proxy = Proxy::start(&cassandra.address);
    let gateway = Gateway::start(&proxy.address, &tables, "");
    gateway.is_well();
    // At MQTT 3 a refusal could only be the end of the connection.
    let mut device = Client::connect(gateway.mqtt(), Protocol::V4, "away");
    device.subscribe(&topic("away", "update/+"));
    let mut report = |number: u32| {
        let report = format!("{{\"state\":{{\"reported\":{{\"n\":{number}}}}}}}");
        device.publish(&topic("away", "update"), report.as_bytes(), QoS::AtLeastOnce, false);
        let (mut acked, mut answer) = (false, None);
        while !acked || answer.is_none() {
            match device.next() {
                Got::PubAck(0) => acked = true,
                Got::Publish(topic, _) if topic.ends_with("/documents") => {}
                Got::Publish(topic, payload) => answer = Some((topic, payload)),
                other => panic!("{other:?}"),
            }
        }
        let (topic, payload) = answer.expect("an answer");
        (topic.rsplit('/').next().map(str::to_owned), String::from_utf8(payload).expect("text"))
    };
    assert_eq!(report(1).0.as_deref(), Some("accepted"));
    assert_eq!(gateway.health(SERVICE), ServingStatus::Serving);
    proxy.cut();
    gateway.is_degraded();
    wait_for("health of shadows", || match gateway.health(SERVICE) {
        ServingStatus::NotServing => Ok(()),
        status => Err(format!("{status:?}")),
    });
    let (kind, answer) = report(2);
    assert_eq!(kind.as_deref(), Some("rejected"));
    assert!(answer.contains("\"code\":503"), "{answer}");
    let refused = gateway.update_shadow(desire("away", "{}".to_owned())).expect_err("the database is away");
    assert_eq!(refused.code(), Code::Unavailable);
    proxy.mend();
    wait_for("an accepted update", || match report(3) {
        (Some(kind), _) if kind == "accepted" => Ok(()),
        (_, answer) => Err(answer),
    });
    assert_eq!(gateway.shadow(get("away")).expect("the shadow").reported, "{\"n\":3}");
}
