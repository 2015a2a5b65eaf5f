//! Shadows of the real binary: what was acknowledged is there after a kill.

use gateway_core::{Protocol, QoS};

use crate::{
    client::{Client, Got},
    support::Server,
};

const TOPIC: &str = "$gateway/devices/d/shadow/name/n";

/// The shadow as the device gets it.
fn shadow(server: &Server) -> String {
    let mut device = Client::connect(server.ports.tcp, Protocol::V4, "d");
    assert_eq!(device.subscribe(&format!("{TOPIC}/get/+")), 0);
    device.publish(&format!("{TOPIC}/get"), b"", QoS::AtMostOnce, false);
    match device.next() {
        Got::Publish(topic, document) if topic.ends_with("/get/accepted") => {
            String::from_utf8(document).expect("text")
        }
        other => panic!("{other:?}"),
    }
}

/// A device would go on from a state that its shadow does not have.
#[test]
fn what_a_device_was_acknowledged_of_its_shadow_survives_kill_9() {
    let mut server = Server::start();
    for round in 1..=3 {
        let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d");
        for number in 0..20 {
            let report = format!("{{\"state\":{{\"reported\":{{\"r{round}\":{number}}}}}}}");
            device.publish_acked(&format!("{TOPIC}/update"), report.as_bytes(), false);
        }
        server = server.kill_and_restart(&[], "");
        let document = shadow(&server);
        assert!(document.contains(&format!("\"r{round}\":19")), "{document}");
        assert!(document.contains(&format!("\"version\":{}", 20 * round)), "{document}");
    }
}
