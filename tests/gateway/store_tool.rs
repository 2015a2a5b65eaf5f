//! `mqtt-server store` on data directories that a real gateway has made.

use std::{fs, path::Path, time::Duration};

use crate::client::{Client, Got, decoded, hello};
use crate::support::Server;
use codec::{Ack, Connect, Packet};
use gateway_core::{Protocol, QoS};

const MESSAGES: u32 = 200;

/// Runs `mqtt-server store ...`: whether it succeeded, and what it said.
fn store(args: &[&str], paths: &[&Path]) -> (bool, String) {
    let mut command = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server"));
    command.arg("store").args(args).args(paths);
    crate::support::run(&mut command, Duration::from_secs(120))
}

fn persistent(name: &str) -> Connect {
    let mut connect = hello(Protocol::V5, name);
    connect.clean_start = false;
    connect.session_expiry = Some(3600);
    connect
}

fn payload(n: u32) -> Vec<u8> {
    format!("message-{n:04}-end").into_bytes()
}

/// A gateway with two sessions that are away, each with all messages, and one that has a message it has not
/// acknowledged; with retained messages and latest values.
fn filled() -> Server {
    let server = Server::start();
    let port = server.ports.tcp;
    for (name, qos) in [("once", QoS::ExactlyOnce), ("least", QoS::AtLeastOnce)] {
        let mut client = Client::connect_with(port, persistent(name));
        client.subscribe_with("a/#", qos, Some(7));
        leave(client);
    }
    let mut publisher = Client::connect(port, Protocol::V5, "publisher");
    for n in 0..MESSAGES {
        publisher.publish_acked("a/topic", &payload(n), false);
    }
    for n in 0..3 {
        publisher.publish_acked(&format!("kept/{n}"), &payload(n), true);
    }
    let report = b"{\"state\":{\"reported\":{\"a\":1}}}";
    publisher.publish_acked("$gateway/devices/publisher/shadow/update", report, false);
    // Taken over, its PUBREL never came.
    let mut half = Client::connect_with(port, persistent("half"));
    half.publish("a/topic", &payload(MESSAGES), QoS::ExactlyOnce, false);
    assert_eq!(half.next(), Got::Other(0x50));
    leave(half);
    server
}

fn leave(mut client: Client) {
    client.send(&Packet::Disconnect(Box::default()));
    assert_eq!(client.next(), Got::Closed);
}

/// Returns the messages that wait for `least`, in order, and acknowledges them.
fn drain(server: &Server) -> Vec<Vec<u8>> {
    let mut client = Client::connect_with(server.ports.tcp, persistent("least"));
    let mut got = Vec::new();
    while got.len() <= MESSAGES as usize {
        let bytes = client.next_bytes().expect("a packet");
        let Packet::Publish(publish) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:02x?}") };
        assert_eq!((publish.ids.as_slice(), publish.topic), ([7].as_slice(), "a/topic"));
        got.push(publish.payload.to_vec());
        let packet_id = publish.packet_id;
        client.send(&Packet::PubAck(Ack { packet_id, code: 0, reason_string: None, user: Vec::new() }));
    }
    leave(client);
    got
}

/// The retained messages, by topic.
fn retained(server: &Server) -> Vec<Got> {
    let mut client = Client::connect(server.ports.tcp, Protocol::V5, "reader");
    client.subscribe("kept/#");
    let mut got = client.ping();
    got.sort_by_key(|got| format!("{got:?}"));
    got
}

fn everything() -> Vec<Vec<u8>> {
    (0..=MESSAGES).map(payload).collect()
}

/// A gateway on `data`, in the place of `server`.
fn restart_on(mut server: Server, data: &Path) -> Server {
    assert!(server.stop());
    let own = server.dir().join("data");
    fs::rename(&own, server.dir().join("data.old")).expect("move the old directory");
    fs::rename(data, own).expect("move the new directory");
    server.kill_and_restart(&[], "")
}

#[test]
fn a_backup_of_a_running_gateway_has_all_acknowledged_before() {
    let server = filled();
    let (data, copy) = (server.dir().join("data"), server.dir().join("copy"));
    let (success, said) = store(&["check"], &[&data]);
    assert!(!success && said.contains("in use"), "{said}");
    // Under load.
    let mut busy = Client::connect(server.ports.tcp, Protocol::V5, "busy");
    busy.send_all(
        &(0..1000).map(|_| crate::client::message("b/x", b"x", QoS::AtMostOnce, false)).collect::<Vec<_>>(),
    );
    let (success, said) = store(&["backup"], &[&data, &copy]);
    assert!(success, "{said}");
    let (success, said) = store(&["check"], &[&copy]);
    assert!(success && said.contains("state"), "{said}");
    let (success, said) = store(&["backup"], &[&data, &copy]);
    assert!(!success && said.contains("not empty"), "{said}");
    let server = restart_on(server, &copy);
    assert_eq!(drain(&server), everything());
    assert_eq!(retained(&server).len(), 3);
}

#[test]
fn check_finds_one_flipped_byte_and_compact_loses_nothing() {
    let mut server = filled();
    assert!(server.stop());
    let data = server.dir().join("data");
    let (success, said) = store(&["check"], &[&data]);
    assert!(success && !said.contains("problem"), "{said}");
    let (success, said) = store(&["compact"], &[&data]);
    assert!(success, "{said}");
    let (success, said) = store(&["check"], &[&data]);
    assert!(success, "{said}");

    let file = data.join("state/data.mdb");
    let sound = fs::read(&file).expect("read the queues");
    let mut bytes = sound.clone();
    let body = payload(17);
    let at = bytes.windows(body.len()).position(|window| window == body).expect("the message's body");
    bytes[at] ^= 1;
    fs::write(&file, &bytes).expect("damage the queues");
    let (success, said) = store(&["check"], &[&data]);
    assert!(!success && said.contains(", 1 damaged"), "{said}");
    fs::write(&file, &sound).expect("mend the queues");

    let server = server.kill_and_restart(&[], "");
    assert_eq!(drain(&server), everything());
    assert_eq!(retained(&server).len(), 3);
}

#[test]
fn a_damaged_store_is_set_aside_and_shown_and_the_rest_starts() {
    let mut server = filled();
    assert!(server.stop());
    fs::write(server.dir().join("data/latest/data.mdb"), [0x5A; 8192]).expect("damage the latest values");
    let server = server.kill_and_restart(&[], "");
    let answer = server.http_get("/readyz").expect("ask for readiness");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("store: set aside: data/latest/data.mdb.damaged-"), "{answer}");
    assert_eq!(server.metric("gateway_store_set_aside"), 1);
    let page = server.http_get("/metrics").expect("read the metrics");
    for store in ["state", "records"] {
        assert!(page.contains(&format!("gateway_store_healthy{{store=\"{store}\"}} 1\n")), "{store}: {page}");
    }
    assert_eq!(retained(&server).len(), 3);
    assert_eq!(server.metric("gateway_store_sessions"), 3);
}

/// Returns the number of lines of a kind in a file of an export.
fn lines(export: &Path, kind: &str) -> usize {
    let text = fs::read_to_string(export).expect("read the export");
    text.lines().filter(|line| line.starts_with(&format!("{{\"{kind}\":"))).count()
}

#[test]
fn an_imported_export_has_the_same_messages_sessions_and_values() {
    let mut server = filled();
    assert!(server.stop());
    let path = |name: &str| server.dir().join(name);
    let (data, file, new) = (path("data"), path("export.jsonl"), path("new"));
    let (success, said) = store(&["export"], &[&data, &file]);
    assert!(success && said.contains("state"), "{said}");
    let count = |kind| lines(&file, kind);
    assert_eq!((count("session"), count("subscription"), count("retained")), (3, 2, 3));
    // One that is not released. A message is there twice if a commit fell between its two entries.
    assert_eq!((count("entry"), count("received")), (402, 1));
    assert!((201..=402).contains(&count("message")), "{}", count("message"));
    // The topics of the publishers: "a/topic" twice, "kept/...".
    assert_eq!((count("latest"), count("versions"), count("end")), (5, 1, 1));
    assert_eq!(count("shadow"), 1);
    let (success, said) = store(&["export"], &[&data, &file]);
    assert!(!success && said.contains("exists"), "{said}");

    let (success, said) = store(&["import"], &[&file, &data]);
    assert!(!success && said.contains("not empty"), "{said}");
    let (success, said) = store(&["import"], &[&file, &new]);
    assert!(success, "{said}");
    let (success, said) = store(&["check"], &[&new]);
    assert!(success, "{said}");
    // Nothing was lost on the way.
    let again = path("again.jsonl");
    let (success, said) = store(&["export"], &[&new, &again]);
    assert!(success, "{said}");
    assert!(fs::read(&file).expect("read") == fs::read(&again).expect("read"), "another export");

    let server = restart_on(server, &new);
    assert_eq!(drain(&server), everything());
    assert_eq!(retained(&server).len(), 3);
    // The packet identifier is still taken: the same message is not taken over twice.
    let mut half = Client::connect_with(server.ports.tcp, persistent("half"));
    half.publish("a/topic", &payload(MESSAGES), QoS::ExactlyOnce, false);
    assert_eq!(half.next(), Got::Other(0x50));
    leave(half);
    let mut least = Client::connect_with(server.ports.tcp, persistent("least"));
    assert_eq!(least.ping(), []);
}

/// Of 300,000 values that waited for a database that was away, 82,976 were gone after a SIGTERM, without a figure. Here so
/// many as a test has time for.
#[test]
fn all_values_that_wait_for_a_database_that_is_away_are_kept_at_the_end() {
    const DEVICES: usize = 10;
    const TOPICS: usize = 5_000;
    // Nobody listens on the discard port of loopback.
    let away = "db_addr = \"127.0.0.1:9\"\n";
    let mut server = Server::start_with(&[], away);
    let topics: Vec<_> = (0..TOPICS).map(|n| format!("state/{n}")).collect();
    for device in 0..DEVICES {
        let mut client = Client::connect(server.ports.tcp, Protocol::V5, &format!("device-{device}"));
        for part in topics.chunks(500) {
            let values =
                part.iter().map(|topic| crate::client::message(topic, b"value", QoS::AtMostOnce, false));
            client.send_all(&values.collect::<Vec<_>>());
        }
        assert_eq!(client.ping(), []);
    }
    assert_eq!(server.metric("gateway_latest_updates_total"), (DEVICES * TOPICS) as u64);
    assert!(server.stop());
    let (success, said) = store(&["check"], &[&server.dir().join("data")]);
    assert!(success && said.contains(&format!("{} records", DEVICES * TOPICS)), "{said}");
    let server = server.kill_and_restart(&[], away);
    assert_eq!(server.metric("gateway_latest_spilled"), (DEVICES * TOPICS) as u64);
}

#[test]
fn an_import_refuses_cut_changed_or_newer_files_and_leaves_nothing() {
    let mut server = filled();
    assert!(server.stop());
    let path = |name: &str| server.dir().join(name);
    let (data, file, new, bad) = (path("data"), path("export.jsonl"), path("new"), path("bad.jsonl"));
    let (success, said) = store(&["export"], &[&data, &file]);
    assert!(success, "{said}");
    let text = fs::read_to_string(&file).expect("read the export");
    let whole: Vec<&str> = text.lines().collect();
    let without_one = [&whole[..20], &whole[21..]].concat().join("\n") + "\n";
    let newer = text.replacen("\"version\":1", "\"version\":2,\"new\":true", 1);
    let cases = [
        ("its last line is missing", whole[..whole.len() - 1].join("\n") + "\n", "cut short"),
        ("it ends within a line", text[..text.len() / 2].to_owned(), ""),
        ("a line is missing", without_one, ""),
        ("another payload", text.replacen("\"payload\":\"b", "\"payload\":\"c", 1), "checksum"),
        ("a newer format", newer, "format 2"),
        ("another line follows", text.clone() + &text, "follows"),
        ("no export", "hello\n".to_owned(), "not an export"),
    ];
    for (case, text, reason) in cases {
        fs::write(&bad, text).expect("write the bad export");
        let (success, said) = store(&["import"], &[&bad, &new]);
        assert!(!success && said.contains(reason), "{case}: {said}");
        assert!(!new.exists() && !path("new.importing").exists(), "{case}");
    }
}
