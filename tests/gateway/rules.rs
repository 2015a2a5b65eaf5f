//! Rights of devices by a rules file, seen from outside: by both protocol versions, and while the file changes.

use std::{fs, path::Path};

use crate::client::{Client, Got, hello, will};
use crate::login::{added, answer as connected, login};
use crate::support::{Server, until};
use gateway_core::{Protocol, QoS};

const RULES: &str = r##"
[[rules]]
allow = "publish"
topics = ["d/%c/#"]
max_qos = 1
max_bytes = 8
[[rules]]
deny = "subscribe"
topics = ["open/secret"]
[[rules]]
allow = "all"
topics = ["open/#"]
filter = "on-delivery"
[[rules]]
allow = "subscribe"
topics = ["d/+/state", "$SYS/broker/uptime"]
"##;

pub(crate) fn start(file: &Path, more: &str) -> Server {
    Server::start_with(&[], &format!("[authorization]\nrules = {:?}\n{more}", file.display().to_string()))
}

/// The answer to a PUBLISH at QoS 1, among whatever else comes.
pub(crate) fn answer(client: &mut Client, topic: &str, payload: &[u8]) -> u8 {
    client.publish(topic, payload, QoS::AtLeastOnce, false);
    loop {
        match client.next() {
            Got::PubAck(code) => return code,
            Got::Publish(..) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn reloads(server: &Server) -> usize {
    server.log().lines().filter(|line| line.contains("eloaded") && line.contains("rules")).count()
}

pub(crate) fn reload(server: &Server, file: &Path, rules: &str) {
    let before = reloads(server);
    let next = file.with_extension("next");
    fs::write(&next, rules).expect("write the rules");
    fs::rename(&next, file).expect("replace the rules");
    server.signal("HUP");
    until(|| reloads(server) > before);
}

#[test]
fn publish_subscribe_and_wills_follow_the_rules_in_both_versions() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("rules.toml");
    fs::write(&file, RULES).expect("write the rules");
    let server = start(&file, "");
    let port = server.ports.tcp;
    let mut five = Client::connect(port, Protocol::V5, "five");
    let mut four = Client::connect(port, Protocol::V4, "four");
    assert_eq!(five.subscribe("d/+/state"), 0);
    assert_eq!(five.subscribe("d/#"), 0x87);
    assert_eq!(four.subscribe("d/#"), 0x80);
    assert_eq!(four.subscribe("$share/g/d/#"), 0x80);
    assert_eq!(five.subscribe("$SYS/#"), 0x87);
    assert_eq!(five.subscribe("open/#"), 0, "filtered on delivery");
    assert_eq!(answer(&mut five, "d/five/x", b"12345678"), 0x10);
    assert_eq!(answer(&mut five, "d/five/x", b"123456789"), 0x87, "above max_bytes");
    assert_eq!(answer(&mut five, "d/four/x", b""), 0x87);
    // MQTT 3.1.1 has no code for it: acknowledged, and forgotten.
    assert_eq!(answer(&mut four, "d/five/state", b""), 0);
    assert_eq!(answer(&mut four, "d/four/state", b"mine"), 0);
    assert_eq!(answer(&mut four, "open/secret", b"s"), 0);
    four.publish("elsewhere", b"", QoS::AtMostOnce, false);
    assert_eq!(answer(&mut four, "open/x", b"o"), 0);
    let got = [five.next(), five.next()];
    assert_eq!(got[0], Got::Publish("d/four/state".to_owned(), b"mine".to_vec()));
    assert_eq!(got[1], Got::Publish("open/x".to_owned(), b"o".to_vec()));
    for (topic, code) in [("d/w/x", 0), ("d/other/x", 0x87)] {
        let mut connect = hello(Protocol::V5, "w");
        connect.will = Some(will(topic, b"w"));
        let mut client = Client::open(port, Protocol::V5);
        client.send(&codec::Packet::Connect(Box::new(connect)));
        assert_eq!(client.next(), Got::ConnAck(code), "{topic}");
    }
    assert!(server.metric("mqtt_subscriptions_denied_total") >= 4);
    assert!(server.metric("mqtt_deliveries_withheld_total") >= 1);
}

#[test]
fn a_denied_publish_closes_the_connection_where_that_is_asked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("rules.toml");
    fs::write(&file, RULES).expect("write the rules");
    let server = start(&file, "denied_publish = \"close\"\n");
    let mut five = Client::connect(server.ports.tcp, Protocol::V5, "five");
    five.publish("x", b"", QoS::AtMostOnce, false);
    assert_eq!(five.next(), Got::Disconnect(0x87));
    let mut four = Client::connect(server.ports.tcp, Protocol::V4, "four");
    four.publish("x", b"", QoS::AtLeastOnce, false);
    assert_eq!(four.next(), Got::Closed);
}

/// In force is what was read before a PUBLISH was sent: each is sent when the log has said that the rules were reloaded.
#[test]
fn rules_changed_100_times_let_through_exactly_what_they_allow() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("rules.toml");
    let text = |open: bool| {
        let verb = if open { "allow" } else { "deny" };
        format!(
            "[[rules]]\n{verb} = \"publish\"\ntopics = [\"p\"]\n[[rules]]\n{verb} = \"subscribe\"\n\
             topics = [\"s\"]\n[[rules]]\nallow = \"all\"\ntopics = [\"#\"]\n"
        )
    };
    fs::write(&file, text(true)).expect("write the rules");
    let server = start(&file, "");
    let mut receiver = Client::connect(server.ports.tcp, Protocol::V5, "receiver");
    for filter in ["p", "s", "end"] {
        assert_eq!(receiver.subscribe(filter), 0);
    }
    let mut sender = Client::connect(server.ports.tcp, Protocol::V5, "sender");
    let mut load = Client::connect(server.ports.tcp, Protocol::V4, "load");
    let mut expected = Vec::new();
    for round in 1..=100_u8 {
        let open = round % 2 == 0;
        for _ in 0..20 {
            load.publish("load", b"x", QoS::AtMostOnce, false);
        }
        reload(&server, &file, &text(open));
        let code = answer(&mut sender, "p", &[round]);
        assert_eq!(code, if open { 0 } else { 0x87 }, "round {round}");
        answer(&mut sender, "s", &[round]);
        if open {
            expected.extend(["p", "s"].map(|topic| Got::Publish(topic.to_owned(), vec![round])));
        }
    }
    answer(&mut sender, "end", b"");
    let mut got = Vec::new();
    loop {
        match receiver.next() {
            Got::Publish(topic, _) if topic == "end" => break,
            other => got.push(other),
        }
    }
    assert_eq!(got, expected);
    // A broken file changes nothing and tells the line.
    fs::write(&file, "[[rules]]\nallow = 1\n").expect("write the rules");
    server.signal("HUP");
    until(|| server.log().contains("line 2"));
    assert_eq!(answer(&mut sender, "p", b""), 0);
}

/// The failure: a client takes the session of another, whose rules and subscriptions it has then, or keeps it after it may not.
#[test]
fn client_ids_are_for_those_whom_the_rules_of_now_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let (file, users) = (dir.path().join("rules.toml"), dir.path().join("users"));
    let text = |people: &str| {
        format!(
            "[groups]\npeople = {{ users = [{people}] }}\n[[rules]]\nconnect = [\"%u\"]\n\
             [[rules]]\nconnect = [\"%u:*\"]\ngroups = [\"people\"]\n"
        )
    };
    fs::write(&file, text("\"anna\"")).expect("write the rules");
    for user in ["anna", "s1"] {
        added(&users, user, "secret");
    }
    let server = start(&file, &format!("[auth]\npassword_file = {:?}\n", users.display().to_string()));
    let connect = |protocol, client_id, user| login(protocol, client_id, Some(user), Some("secret"));
    let open =
        |client_id, user| Client::connect_with(server.ports.tcp, connect(Protocol::V5, client_id, user));
    let (mut plain, mut phone, mut sensor) =
        (open("anna", "anna"), open("anna:phone", "anna"), open("s1", "s1"));
    let tried = [("anna", "s1"), ("anna:phone", "s1"), ("s1:x", "s1"), ("s1", "anna"), ("", "anna")];
    for (client_id, user) in tried {
        for (protocol, code) in [(Protocol::V5, 0x85), (Protocol::V4, 2)] {
            let got = connected(server.ports.tcp, connect(protocol, client_id, user));
            assert_eq!(got, Got::ConnAck(code), "{user} as {client_id:?}");
        }
    }
    for client in [&mut plain, &mut phone, &mut sensor] {
        assert_eq!(client.ping(), [], "no session was touched");
    }
    reload(&server, &file, &text(""));
    assert_eq!(phone.next(), Got::Disconnect(0x87), "anna is none of the people any more");
    assert_eq!((plain.ping(), sensor.ping()), (vec![], vec![]));
    reload(&server, &file, "");
    drop(open("anything", "s1"));
}
