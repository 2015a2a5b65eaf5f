//! Rules that change while something waits: a will, a message in flight, one in a queue, one of a shared group.

use std::{fs, path::Path};

use codec::{Connect, ConnectWill};
use gateway_core::{Protocol, QoS};

use crate::{
    client::{Client, Got, hello, will},
    durable::{lasting, leave, resume},
    rules::{answer, reload, start},
    support::{Server, until},
};

/// Returns rules that allow everything, behind a rule about one topic.
fn rules(verb: &str, action: &str, topic: &str) -> String {
    format!(
        "[[rules]]\n{verb} = \"{action}\"\ntopics = [\"{topic}\"]\n[[rules]]\nallow = \"all\"\ntopics = [\"#\"]\n"
    )
}

fn begin(file: &Path, rules: &str) -> Server {
    fs::write(file, rules).expect("write the rules");
    start(file, "")
}

fn config(file: &Path) -> String {
    format!("[authorization]\nrules = {:?}\n", file.display().to_string())
}

#[test]
fn a_will_is_not_published_once_its_client_has_lost_the_right() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("rules.toml");
    let server = begin(&file, &rules("allow", "publish", "w/gone"));
    let port = server.ports.tcp;
    let mut watcher = Client::connect(port, Protocol::V5, "watcher");
    assert_eq!(watcher.subscribe("w/#"), 0);
    let with =
        |id: &str, protocol, topic: &str| Connect { will: Some(will(topic, b"w")), ..hello(protocol, id) };
    let clients = [
        Client::connect_with(port, with("a", Protocol::V5, "w/gone")),
        Client::connect_with(port, with("b", Protocol::V4, "w/gone")),
        Client::connect_with(port, with("c", Protocol::V4, "w/kept")),
    ];
    reload(&server, &file, &rules("deny", "publish", "w/gone"));
    drop(clients);
    assert_eq!(watcher.next(), Got::Publish("w/kept".to_owned(), b"w".to_vec()));
    until(|| server.metric("mqtt_wills_denied_total") == 2);
    assert_eq!(watcher.ping(), [], "and no other");
    assert!(server.log().contains("will not published"), "{}", server.log());
}

/// The author of a will is kept with it, so that the next process needs no guess: not that all are lost, nor that one
/// is published by the rights of another client with the same id.
#[test]
fn after_a_crash_wills_are_judged_by_who_left_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("rules.toml");
    let text = |verb: &str| {
        format!(
            "[[rules]]\n{verb} = \"publish\"\nclients = [\"lost\"]\ntopics = [\"w/lost\"]\n\
             [[rules]]\nallow = \"all\"\nanonymous = true\nlisteners = [\"test-*\"]\ntopics = [\"#\"]\n"
        )
    };
    let server = begin(&file, &text("allow"));
    let mut watcher = resume(server.ports.tcp, lasting("watcher", 600)).0;
    watcher.subscribe_with("w/#", QoS::AtLeastOnce, None);
    leave(&mut watcher);
    let mut clients = Vec::new();
    for id in ["kept", "lost"] {
        let last = ConnectWill { delay: 1, ..will(&format!("w/{id}"), b"gone") };
        clients.push(resume(server.ports.tcp, Connect { will: Some(last), ..lasting(id, 600) }));
    }
    // Both are written without anybody waiting for it; a subscription of the last one's is waited for.
    let mut mark = resume(server.ports.tcp, lasting("mark", 600)).0;
    assert_eq!(mark.subscribe("mark"), 0);
    fs::write(&file, text("deny")).expect("write the rules");
    let server = server.kill_and_restart(&[], &config(&file));
    until(|| server.metric("mqtt_wills_denied_total") == 1);
    let mut watcher = resume(server.ports.tcp, lasting("watcher", 600)).0;
    assert_eq!(watcher.next(), Got::Publish("w/kept".to_owned(), b"gone".to_vec()));
    assert_eq!(watcher.ping(), [], "and no other");
}

/// The failure: it goes out on the next connection, since it was allowed when it was sent first.
#[test]
fn what_was_in_flight_is_not_resent_to_who_may_no_longer_have_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("rules.toml");
    let server = begin(&file, &rules("allow", "subscribe", "t/lost"));
    let mut receiver = resume(server.ports.tcp, lasting("receiver", 600)).0;
    assert_eq!(receiver.subscribe_with("t/+", QoS::ExactlyOnce, None), 2);
    let mut sender = Client::connect(server.ports.tcp, Protocol::V5, "sender");
    let topics = ["t/lost", "t/kept"];
    for topic in topics {
        assert_eq!(answer(&mut sender, topic, b"in flight"), 0);
    }
    for topic in topics {
        assert_eq!(receiver.next(), Got::Publish(topic.to_owned(), b"in flight".to_vec()));
    }
    // Neither was acknowledged.
    leave(&mut receiver);
    for topic in topics {
        assert_eq!(answer(&mut sender, topic, b"waiting"), 0);
    }
    reload(&server, &file, &rules("deny", "subscribe", "t/lost"));
    let (mut receiver, present) = resume(server.ports.tcp, lasting("receiver", 600));
    assert!(present);
    for payload in ["in flight", "waiting"] {
        assert_eq!(receiver.next(), Got::Publish("t/kept".to_owned(), payload.into()));
    }
    assert_eq!(receiver.ping(), [], "and nothing else");
    assert_eq!(server.metric("mqtt_messages_dropped_total"), 2, "counted with their reason");
    // Messages that the client may have again come again.
    reload(&server, &file, &rules("allow", "subscribe", "t/lost"));
    assert_eq!(answer(&mut sender, "t/lost", b"new"), 0);
    assert_eq!(receiver.next(), Got::Publish("t/lost".to_owned(), b"new".to_vec()));
}

/// The failure: what the connected member may not have waits in the group's queue, and what it may have waits behind that.
#[test]
fn a_member_that_is_away_gets_what_no_connected_one_may_have() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("rules.toml");
    let server = begin(&file, &rules("allow", "subscribe", "t/x"));
    let [mut a, mut b] = ["a", "b"].map(|id| resume(server.ports.tcp, lasting(id, 600)).0);
    for member in [&mut a, &mut b] {
        assert_eq!(member.subscribe_with("$share/g/t/+", QoS::AtLeastOnce, None), 1);
    }
    leave(&mut b);
    let denied = rules("deny", "subscribe", "t/x");
    reload(&server, &file, &denied.replacen("topics", "clients = [\"a\"]\ntopics", 1));
    let mut sender = Client::connect(server.ports.tcp, Protocol::V5, "sender");
    for (topic, payload) in [("t/x", b"1"), ("t/y", b"2")] {
        assert_eq!(answer(&mut sender, topic, payload), 0);
    }
    assert_eq!(a.next(), Got::Publish("t/y".to_owned(), b"2".to_vec()));
    assert_eq!(a.ping(), [], "and not what it may not have");
    let mut b = resume(server.ports.tcp, lasting("b", 600)).0;
    assert_eq!(b.next(), Got::Publish("t/x".to_owned(), b"1".to_vec()));
    assert_eq!(server.metric("mqtt_messages_dropped_total"), 0);
    reload(&server, &file, &denied);
    for (topic, payload) in [("t/x", b"3"), ("t/y", b"4"), ("t/y", b"5")] {
        answer(&mut sender, topic, payload);
    }
    let mut got = [a.ping(), b.ping()].concat();
    got.sort_by_key(|got| format!("{got:?}"));
    let expected = [b"4", b"5"].map(|payload| Got::Publish("t/y".to_owned(), payload.to_vec()));
    assert_eq!(got, expected, "what nobody may have is in the way of nothing");
    assert_eq!(server.metric("mqtt_messages_dropped_total"), 1);
}
