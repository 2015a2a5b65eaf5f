//! Messages for which the other side fails, among others that it takes.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use gateway_core::Protocol;

use super::{
    carried, lag,
    scripted::{Answer, ScriptedBroker},
};
use crate::{
    client::Client,
    support::{Server, until},
};

/// The deadline is long enough for an answer on a busy machine.
fn config(broker: &ScriptedBroker, level: &str) -> String {
    format!(
        "[bridges.plant]\ntopics = [\"d/#\"]\nretry_max = \"500ms\"\ndeadline = \"2s\"\n\
         [bridges.plant.mqtt]\nurl = \"mqtt://127.0.0.1:{}\"\nlevel = \"{level}\"\n",
        broker.port
    )
}

/// The failure: one message ends each connection on which it is sent, and everything behind it waits for ever. The
/// messages are all of one device, and the bad ones are next to each other.
#[test]
fn a_message_that_ends_connections_stops_no_others() {
    for (answer, level, protocol) in [
        (Answer::Close, "5", Protocol::V5),
        (Answer::Close, "3.1.1", Protocol::V4),
        (Answer::Disconnect(0x99), "5", Protocol::V5),
    ] {
        passes_over_poison(answer, level, protocol, 2, "closed");
    }
}

/// The failure: a message that is never answered is sent again for ever.
#[test]
fn a_message_that_has_no_answer_stops_no_others() {
    passes_over_poison(Answer::Ignore, "5", Protocol::V5, 1, "deadline");
}

/// All arrives in order but so many bad messages, which become dead letters for that reason.
fn passes_over_poison(answer: Answer, level: &str, protocol: Protocol, bad: u64, reason: &str) {
    let broker = ScriptedBroker::start(protocol, move |_, payload| match payload {
        b"poison" => answer,
        _ => Answer::Take,
    });
    let server = Server::start_with(&[], &config(&broker, level));
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    let wanted: Vec<String> = (0..60).map(|number| number.to_string()).collect();
    for (number, payload) in wanted.iter().enumerate() {
        if (20..20 + bad).contains(&(number as u64)) {
            device.publish_acked("d/bad", b"poison", false);
        }
        device.publish_acked("d/1", payload.as_bytes(), false);
    }
    until(|| carried(&server) == 60 && lag(&server) == 0);
    assert_eq!(broker.taken(), wanted, "{answer:?}: in order");
    let label = format!("reason=\"{reason}\"");
    assert_eq!(server.metric_of("gateway_bridge_refused_total", &label), bad, "{answer:?}");
    assert_eq!(server.metric("gateway_group_dead_letters"), bad);
    let bridges = server.http_get("/v1/bridges").expect("an answer");
    assert!(bridges.contains("\"topic\":\"d/bad\""), "the state names the topic: {bridges}");
}

/// The failure: a broker that ends every connection for a while makes dead letters of messages that it would take later.
#[test]
fn a_broker_that_takes_nothing_for_a_while_makes_no_dead_letters() {
    let well = Arc::new(AtomicBool::new(false));
    let is_well = Arc::clone(&well);
    let broker = ScriptedBroker::start(Protocol::V5, move |_, _| match is_well.load(Relaxed) {
        true => Answer::Take,
        false => Answer::Close,
    });
    let server = Server::start_with(&[], &config(&broker, "5"));
    for device in ["d1", "d2"] {
        let mut client = Client::connect(server.ports.tcp, Protocol::V5, device);
        for number in 0..20 {
            client.publish_acked("d/1", format!("{device} {number}").as_bytes(), false);
        }
    }
    // More attempts than would convict a message.
    until(|| broker.connects() > 20);
    well.store(true, Relaxed);
    until(|| carried(&server) == 40 && lag(&server) == 0);
    assert_eq!(server.metric("gateway_group_dead_letters"), 0);
    for device in ["d1", "d2"] {
        let of_device: Vec<String> =
            broker.taken().into_iter().filter(|payload| payload.starts_with(device)).collect();
        let wanted: Vec<String> = (0..20).map(|number| format!("{device} {number}")).collect();
        assert_eq!(of_device, wanted, "in order");
    }
}
