//! A data directory that an earlier build has left: this one converts it, and whatever it keeps is there.
//!
//! `earlier_build/data.tar.gz` is the directory, and `earlier_build/told.txt` the list that `ctl` gave of it before it was left.
//! Neither is made anew by a build that changes the format: [`make_the_directory`] is for what is to be kept besides.

use std::{fs, path::Path, process::Command, time::Duration};

use codec::{Ack, Connect, ConnectWill, Packet, Publish};
use gateway_core::{Protocol, QoS};

use crate::{
    client::{Client, Got, decoded, hello, message, will},
    ctl::{ctl, masked, said},
    support::{Server, root, run, until},
};

const FILES: &str = "tests/gateway/earlier_build";
const LIMIT: Duration = Duration::from_secs(60);

/// Time that the clock's mark claims to have passed since the directory was left, in milliseconds: too long to be believed, so
/// that nothing of the directory ages, whenever it is opened.
const AWAY: u64 = 60 * 24 * 3600 * 1000;

/// Nothing of the gateway's own among the latest values.
const CONFIG: &str = "[sys]\nenabled = false\n";

fn persistent(protocol: Protocol, name: &str) -> Connect {
    let mut connect = hello(protocol, name);
    connect.clean_start = false;
    connect.session_expiry = (protocol == Protocol::V5).then_some(30 * 24 * 3600);
    connect
}

fn leave(mut client: Client) {
    client.send(&Packet::Disconnect(Box::default()));
    assert_eq!(client.next(), Got::Closed);
}

fn ack(packet_id: u16) -> Ack {
    Ack { packet_id, code: 0, reason_string: None, user: Vec::new() }
}

/// The output of a command that succeeds.
fn done(server: &Server, args: &[&str]) -> String {
    let output = ctl(server, args).output().expect("run ctl");
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    String::from_utf8(output.stdout).expect("text")
}

/// Sessions with what waits for them at each quality of service, and amid each handshake.
fn fill_sessions(server: &Server) {
    let port = server.ports.tcp;
    for (name, qos, id) in [("least", QoS::AtLeastOnce, Some(7)), ("exact", QoS::ExactlyOnce, None)] {
        let mut client = Client::connect_with(port, persistent(Protocol::V5, name));
        client.subscribe_with("line/#", qos, id);
        leave(client);
    }
    let mut old = Client::connect_with(port, persistent(Protocol::V4, "old"));
    old.subscribe_with("line/+", QoS::AtLeastOnce, None);
    leave(old);
    for member in ["member-1", "member-2"] {
        let mut client = Client::connect_with(port, persistent(Protocol::V5, member));
        client.subscribe_with("$share/pool/pool/#", QoS::AtLeastOnce, None);
        leave(client);
    }
    // Has a message of which the PUBREC came, and not the PUBCOMP.
    let mut released = Client::connect_with(port, persistent(Protocol::V5, "released"));
    released.subscribe_with("released", QoS::ExactlyOnce, None);
    let mut publisher = Client::connect(port, Protocol::V5, "publisher");
    publisher.publish("released", b"once", QoS::ExactlyOnce, false);
    assert_eq!(publisher.next(), Got::Other(0x50));
    publisher.send(&Packet::PubRel(ack(1)));
    assert_eq!(publisher.next(), Got::Other(0x70));
    let bytes = released.next_bytes().expect("a packet");
    let Packet::Publish(got) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:02x?}") };
    released.send(&Packet::PubRec(ack(got.packet_id)));
    assert_eq!(released.next(), Got::Other(0x62));
    leave(released);
    for n in 0..20 {
        publisher.publish_acked("line/1", format!("line {n}").as_bytes(), false);
        publisher.publish_acked("pool/1", format!("pool {n}").as_bytes(), false);
    }
    for n in 0..3 {
        publisher.publish_acked(&format!("kept/{n}"), format!("kept {n}").as_bytes(), true);
    }
    // Has published at QoS 2 to those who are away, and its PUBREL never came.
    let mut half = Client::connect_with(port, persistent(Protocol::V5, "half"));
    half.publish("line/half", b"half", QoS::ExactlyOnce, false);
    assert_eq!(half.next(), Got::Other(0x50));
    leave(half);
    // Gone without DISCONNECT, its will waits.
    let mut dying = persistent(Protocol::V5, "dying");
    dying.will = Some(ConnectWill { delay: 20 * 24 * 3600, ..will("wills", b"gone") });
    drop(Client::connect_with(port, dying));
    until(|| done(server, &["devices", "list", "-o", "json"]).lines().count() == 9);
    until(|| !done(server, &["devices", "get", "dying", "-o", "json"]).contains("\"connected\":true"));
}

/// Records that backends have the gateway keep.
fn fill_records(server: &Server) {
    let group = ["--filter", "work/#", "--include-backends", "--max-attempts", "1"];
    done(server, &[&["groups", "create", "work"][..], &group].concat());
    for n in 0..6 {
        done(server, &["pub", "--qos", "1", &format!("work/{n}"), &format!("job {n}")]);
    }
    let fetch = ["groups", "fetch", "work", "-c", "2", "-o", "json", "--wait", "10s"];
    let fetched = done(server, &fetch);
    let id = |line: &str| {
        line.split("\"ackId\":\"").nth(1).and_then(|rest| rest.split('"').next()).map(str::to_owned)
    };
    let ids: Vec<String> = fetched.lines().filter_map(id).collect();
    assert_eq!(ids.len(), 2, "{fetched}");
    done(server, &["groups", "ack", "work", &ids[0]]);
    done(server, &["groups", "lease", "work", &ids[1], "--for", "0s", "--reason", "broken"]);
    done(server, &["pub", "--qos", "1", "--idempotency-key", "key-1", "line/key", "with a key"]);
    done(server, &["pub", "--qos", "1", "--deliver-at", "+20d", "line/later", "later"]);
    done(server, &["command", "start", "least", "blink", "on", "--id", "blink-1", "--expires", "+20d"]);
    let desired = ["--desired", "{\"color\":\"red\"}", "--reported", "{\"color\":\"blue\"}"];
    done(server, &[&["shadow", "update", "lamp"][..], &desired].concat());
    done(server, &["shadow", "update", "lamp", "--name", "spare", "--reported", "{\"level\":3}"]);
}

/// The lists of all that is kept.
fn told(server: &Server) -> String {
    let mut told = String::new();
    for line in [
        "devices subscriptions least",
        "devices subscriptions exact",
        "devices subscriptions old",
        "devices subscriptions member-1",
        "devices subscriptions released",
        "devices queue least",
        "devices queue exact",
        "devices queue old",
        "devices queue released",
        "retained list",
        "groups dead-letters list work",
        "scheduled list",
        "command get blink-1",
        "shadow get lamp",
        "shadow get lamp --name spare",
        "latest list",
    ] {
        let args: Vec<&str> = line.split(' ').collect();
        told.push_str(&format!("$ ctl {line}\n{}", masked(&done(server, &args))));
    }
    told
}

fn unpack(into: &Path) {
    let mut tar = Command::new("tar");
    tar.arg("xzf").arg(root().join(FILES).join("data.tar.gz")).arg("-C").arg(into);
    let (success, output) = run(&mut tar, LIMIT);
    assert!(success, "{output}");
}

/// Output of a command of the gateway's binary, and its success.
fn gateway(args: &[&str], dir: &Path) -> (bool, String) {
    let mut command = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server"));
    run(command.args(args).arg(dir), LIMIT)
}

/// By hand: `cargo test --test gateway make_the_directory -- --ignored`.
#[test]
#[ignore = "writes the files that the other test reads"]
fn make_the_directory() {
    let mut server = Server::start_with(&[], CONFIG);
    fill_sessions(&server);
    fill_records(&server);
    until(|| done(&server, &["latest", "list"]).contains("line/1"));
    let list = told(&server);
    // Latest values are on disk within a second. An orderly stop would publish the will.
    std::thread::sleep(Duration::from_secs(3));
    server.signal("KILL");
    assert!(!server.wait(), "killed");
    let data = server.dir().join("data");
    let clock = data.join("clock");
    let mark = fs::read_to_string(&clock).expect("read the clock's mark");
    let (time, wall) = mark.trim().split_once(' ').expect("two clocks");
    let wall: u64 = wall.parse().expect("milliseconds");
    fs::write(&clock, format!("{time} {}\n", wall - AWAY)).expect("write the clock's mark");
    let files = root().join(FILES);
    fs::write(files.join("told.txt"), list).expect("write the list");
    // What a start makes anew is left out.
    let mut tar = Command::new("tar");
    tar.args(["--exclude=reserve", "--exclude=lock", "--exclude=lock.mdb", "-czf"])
        .arg(files.join("data.tar.gz"))
        .arg("-C")
        .arg(server.dir())
        .arg("data");
    let (success, output) = run(&mut tar, LIMIT);
    assert!(success, "{output}");
}

/// Rules out a format that changes behind the back of its number, and a conversion that leaves something behind.
#[test]
fn all_that_an_earlier_build_kept_is_there() {
    let dir = tempfile::tempdir().expect("a directory");
    unpack(dir.path());
    let data = dir.path().join("data");
    // Left out of the archive, and there in any directory.
    fs::write(data.join("lock"), "").expect("write the lock");
    for command in [
        &[
            "--non-tls",
            "--addr",
            "127.0.0.1:0",
            "--grpc-addr",
            "127.0.0.1:0",
            "--http-addr",
            "127.0.0.1:0",
            "--data-dir",
        ][..],
        &["store", "check"],
    ] {
        let (success, refused) = gateway(command, &data);
        let remedy = format!("mqtt-server store convert {}", data.display());
        assert!(!success && refused.contains(&remedy), "{command:?}: {refused}");
    }
    let (success, converted) = gateway(&["store", "convert"], &data);
    assert!(
        success && converted.contains("MiB are free") && converted.contains("before-conversion"),
        "{converted}"
    );
    let (success, checked) = gateway(&["store", "check"], &data);
    assert!(success && checked.contains("state"), "{checked}");
    let (success, again) = gateway(&["store", "convert"], &data);
    assert!(success && again.contains("nothing to convert"), "{again}");
    let server = Server::start_in_environment(dir, &[], CONFIG, &[]);
    let before = fs::read_to_string(root().join(FILES).join("told.txt")).expect("read the list");
    let now = told(&server);
    let differs = now.lines().zip(before.lines()).find(|(now, before)| now != before);
    assert!(now == before, "first difference (now, told.txt): {differs:?}\n{now}");

    let port = server.ports.tcp;
    let mut watcher = Client::connect(port, Protocol::V5, "watcher");
    watcher.subscribe("wills");
    watcher.subscribe("line/half");
    watcher.subscribe("line/key");

    // What waited comes, in order.
    let mut least = Client::connect_with(port, persistent(Protocol::V5, "least"));
    let mut lines = Vec::new();
    while lines.len() < 23 {
        let bytes = least.next_bytes().expect("a packet");
        let Packet::Publish(publish) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:02x?}") };
        lines.push((publish.ids.clone(), String::from_utf8_lossy(publish.payload).into_owned()));
        let packet_id = publish.packet_id;
        least.send(&Packet::PubAck(ack(packet_id)));
    }
    let mut expected: Vec<_> = (0..20).map(|n| (vec![7], format!("line {n}"))).collect();
    expected.extend([
        (vec![7], "half".to_owned()),
        (vec![7], "with a key".to_owned()),
        (vec![], "on".to_owned()),
    ]);
    assert_eq!(lines, expected);
    let mut pool = Vec::new();
    for member in ["member-1", "member-2"] {
        let mut client = Client::connect_with(port, persistent(Protocol::V5, member));
        while pool.len() < 20 {
            let bytes = client.next_bytes().expect("a packet");
            let Packet::Publish(publish) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:02x?}") };
            pool.push(String::from_utf8_lossy(publish.payload).into_owned());
            let packet_id = publish.packet_id;
            client.send(&Packet::PubAck(ack(packet_id)));
        }
        leave(client);
    }
    pool.sort();
    let mut all: Vec<_> = (0..20).map(|n| format!("pool {n}")).collect();
    all.sort();
    assert_eq!(pool, all);

    // The handshakes of QoS 2 go on where they were.
    let mut released = Client::connect_with(port, persistent(Protocol::V5, "released"));
    assert_eq!(released.next(), Got::Other(0x62), "PUBREL again, and no second PUBLISH");
    let mut half = Client::connect_with(port, persistent(Protocol::V5, "half"));
    let Packet::Publish(again) = message("line/half", b"half", QoS::ExactlyOnce, false) else {
        unreachable!()
    };
    half.send(&Packet::Publish(Publish { dup: true, ..again }));
    assert_eq!(half.next(), Got::Other(0x50));
    half.send(&Packet::PubRel(ack(1)));
    assert_eq!(half.next(), Got::Other(0x70));
    // The will goes when its session ends; a key is known; the group has the rest.
    done(&server, &["pub", "--qos", "1", "--idempotency-key", "key-1", "line/key", "with a key"]);
    done(&server, &["devices", "delete", "dying"]);
    assert_eq!(watcher.ping(), [Got::Publish("wills".to_owned(), b"gone".to_vec())]);
    let fetched = done(&server, &["groups", "fetch", "work", "--wait", "10s"]);
    let jobs: Vec<bool> = (0..6).map(|n| fetched.contains(&format!("job {n}"))).collect();
    assert_eq!(jobs.iter().filter(|job| **job).count(), 4, "{fetched}");
}
