//! Enhanced authentication of MQTT 5: SCRAM-SHA-256 and tokens by AUTH packets, before CONNACK and on live connections.

use std::{
    fs,
    io::{Read, Write},
    path::Path,
};

use access::scram;
use bytes::Bytes;
use codec::{AuthPacket, Connect, ConnectWill, Packet};
use gateway_core::{Protocol, QoS};
use serde_json::json;

use crate::{
    client::{Client, Got, decoded, hello, message, will},
    login::{added, login, passwd, seconds_from_now, token},
    memory::held,
    support::{Server, until, write_secret},
};

const METHOD: &str = "SCRAM-SHA-256";
const PASSWORD: &str = "correct-horse-7";
const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

/// Packet of the server in an authentication.
#[derive(Debug, PartialEq)]
pub(crate) enum Said {
    /// AUTH.
    Auth(u8, Vec<u8>),
    /// CONNACK that accepts, with Authentication Data.
    Accepted(Option<Vec<u8>>),
    Other(Got),
}

pub(crate) fn connect(client_id: &str, method: &str, data: &[u8]) -> Connect {
    Connect {
        auth_method: Some(method.to_owned()),
        auth_data: Some(Bytes::copy_from_slice(data)),
        ..hello(Protocol::V5, client_id)
    }
}

pub(crate) fn open(server: &Server, connect: Connect) -> Client {
    let mut client = Client::open(server.ports.tcp, Protocol::V5);
    client.send(&Packet::Connect(Box::new(connect)));
    client
}

pub(crate) fn auth(code: u8, method: &str, data: &[u8]) -> Packet<'static> {
    let data = Some(Bytes::copy_from_slice(data));
    Packet::Auth(Box::new(AuthPacket {
        code,
        method: Some(method.to_owned()),
        data,
        ..AuthPacket::default()
    }))
}

/// The next packet; each that belongs to an authentication has to name the method [MQTT-4.12.0-5].
pub(crate) fn said<S: Read + Write>(client: &mut Client<S>, method: &str) -> Said {
    let Some(bytes) = client.next_bytes() else { return Said::Other(Got::Closed) };
    match decoded(&bytes, Protocol::V5) {
        Packet::Auth(auth) => {
            assert_eq!(auth.method.as_deref(), Some(method));
            Said::Auth(auth.code, auth.data.unwrap_or_default().to_vec())
        }
        Packet::ConnAck(ack) if ack.code == 0 => {
            assert_eq!(ack.auth_method.as_deref(), Some(method));
            Said::Accepted(ack.auth_data.map(|data| data.to_vec()))
        }
        Packet::ConnAck(ack) => Said::Other(Got::ConnAck(ack.code)),
        Packet::Disconnect(disconnect) => Said::Other(Got::Disconnect(disconnect.code)),
        Packet::Publish(publish) => {
            Said::Other(Got::Publish(publish.topic.to_owned(), publish.payload.to_vec()))
        }
        _ => Said::Other(Got::Other(bytes[0])),
    }
}

/// The challenge that the server answers the first message with.
fn challenge(client: &mut Client) -> Vec<u8> {
    match said(client, METHOD) {
        Said::Auth(0x18, challenge) => challenge,
        other => panic!("{other:?} instead of a challenge"),
    }
}

/// Says the last message; what it has to be answered with.
fn prove(client: &mut Client, first: &str, password: &str) -> Vec<u8> {
    let challenge = challenge(client);
    let (last, proof) = scram::client::last(first, &challenge, password.as_bytes()).expect("a challenge");
    client.send(&auth(0x18, METHOD, last.as_bytes()));
    proof.into_bytes()
}

/// Sends a CONNECT by SCRAM and proves the password where that is asked for; what is said to it in the end.
pub(crate) fn answer_by_scram<S: Read + Write>(
    client: &mut Client<S>,
    connect: Connect,
    user: &str,
    password: &str,
) -> Got {
    let first = scram::client::first(user, "nonce-of-the-client");
    let (auth_method, auth_data) = (Some(METHOD.to_owned()), Some(Bytes::from(first.clone())));
    client.send(&Packet::Connect(Box::new(Connect { auth_method, auth_data, ..connect })));
    match said(client, METHOD) {
        Said::Auth(0x18, challenge) => {
            let last = scram::client::last(&first, &challenge, password.as_bytes()).expect("a challenge").0;
            client.send(&auth(0x18, METHOD, last.as_bytes()));
            client.next()
        }
        Said::Other(got) => got,
        other => panic!("{other:?} for CONNECT"),
    }
}

/// A CONNECT by SCRAM, and what comes of it.
fn by_scram(server: &Server, client_id: &str, user: &str, password: &str) -> (Client, Said) {
    let first = scram::client::first(user, "nonce-of-the-client");
    let mut client = open(server, connect(client_id, METHOD, first.as_bytes()));
    let proof = prove(&mut client, &first, password);
    let said = said(&mut client, METHOD);
    if let Said::Accepted(data) = &said {
        assert_eq!(data.as_deref(), Some(&*proof), "the server has to prove itself, too");
    }
    (client, said)
}

/// Authenticates a live connection once more, and what comes of it.
fn again(client: &mut Client, user: &str, password: &str) -> Said {
    let first = scram::client::first(user, "another-nonce");
    client.send(&auth(0x19, METHOD, first.as_bytes()));
    let proof = prove(client, &first, password);
    let said = said(client, METHOD);
    if let Said::Auth(code, data) = &said {
        assert_eq!((*code, data), (0, &proof));
    }
    said
}

pub(crate) fn with_keys(file: &Path, user: &str) {
    let output = passwd(&["add", "--scram"], file, user, &format!("{PASSWORD}\n"));
    assert!(output.status.success(), "{output:?}");
}

/// A server whose users ann and bob have keys, and eve a hash alone.
fn server(dir: &Path, more: &str) -> Server {
    let file = dir.join("passwords");
    with_keys(&file, "ann");
    with_keys(&file, "bob");
    added(&file, "eve", PASSWORD);
    Server::start_with(&[], &config(dir, more))
}

fn config(dir: &Path, more: &str) -> String {
    format!("{more}\n[auth]\npassword_file = \"{}\"\n", dir.join("passwords").display())
}

#[test]
fn scram_lets_in_who_knows_the_password_and_nobody_else() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = server(dir.path(), "");
    let (mut ann, accepted) = by_scram(&server, "d1", "ann", PASSWORD);
    assert!(matches!(accepted, Said::Accepted(Some(_))), "{accepted:?}");
    assert_eq!(ann.ping(), []);
    for (user, password) in [("ann", "guess"), ("nobody", PASSWORD), ("eve", PASSWORD)] {
        let (mut client, refused) = by_scram(&server, "d1", user, password);
        assert_eq!(refused, Said::Other(Got::ConnAck(0x86)), "{user}");
        assert_eq!(client.next(), Got::Closed);
    }
    assert_eq!(ann.ping(), [], "nobody has taken the session");
    let page = server.http_get("/metrics").expect("read the metrics");
    assert!(page.contains("mqtt_auth_failures_total{reason=\"credentials\"} 3"), "{page}");
    // The keys are good for plain passwords, too.
    let plain = login(Protocol::V4, "d2", Some("ann"), Some(PASSWORD));
    drop(Client::connect_with(server.ports.tcp, plain));
    assert!(!server.log().contains(PASSWORD) && !server.log().contains("guess"));
}

/// The failure: SCRAM lets a user in under the client id of another, which a plain password would not.
#[test]
fn scram_is_good_for_the_client_id_of_its_user_only() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = server(dir.path(), "[auth.password]\nclient_id = \"{username}\"\n");
    let (mut ann, accepted) = by_scram(&server, "ann", "ann", PASSWORD);
    assert!(matches!(accepted, Said::Accepted(Some(_))), "{accepted:?}");
    let (_, refused) = by_scram(&server, "ann", "bob", PASSWORD);
    assert_eq!(refused, Said::Other(Got::ConnAck(0x85)));
    let (_, refused) = by_scram(&server, "ann", "bob", "guess");
    assert_eq!(refused, Said::Other(Got::ConnAck(0x86)));
    assert!(matches!(again(&mut ann, "ann", PASSWORD), Said::Auth(0, _)));
    assert_eq!(again(&mut ann, "bob", PASSWORD), Said::Other(Got::Disconnect(0x87)));
}

/// The failure: groups or claims that a client proves later leave it under a client id that it may no longer have.
#[test]
fn connect_rules_apply_to_who_a_connection_is_later() {
    let dir = tempfile::tempdir().expect("make a directory");
    let rules = dir.path().join("rules.toml");
    let text =
        "[[rules]]\nconnect = [\"d*\"]\ngroups = [\"a\"]\n[[rules]]\nconnect = [\"e\"]\ngroups = [\"b\"]\n";
    fs::write(&rules, text).expect("write the rules");
    let more = format!("[authorization]\nrules = \"{}\"\n", rules.display());
    let server = Server::start_with(&[], &jwt(&dir.path().join("secret"), &more));
    let mut refused = open(&server, connect("d1", "JWT", claims(3600, &["b"]).as_bytes()));
    assert_eq!(said(&mut refused, "JWT"), Said::Other(Got::ConnAck(0x85)));
    let mut client = open(&server, connect("d1", "JWT", claims(3600, &["a"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Accepted(None));
    client.send(&auth(0x19, "JWT", claims(3600, &["a", "b"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Auth(0, Vec::new()));
    client.send(&auth(0x19, "JWT", claims(3600, &["b"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Other(Got::Disconnect(0x87)));
}

/// The failure: salts or iterations tell which users there are.
#[test]
fn who_is_not_there_is_challenged_like_who_is() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = server(dir.path(), "");
    let shape = |user: &str| {
        let first = scram::client::first(user, "n");
        let mut client = open(&server, connect("d1", METHOD, first.as_bytes()));
        let text = String::from_utf8(challenge(&mut client)).expect("text");
        let fields: Vec<_> = text.split(',').map(str::to_owned).collect();
        let [nonce, salt, iterations] = &fields[..] else { panic!("{text}") };
        (nonce.len(), salt.clone(), iterations.clone())
    };
    let (ann, nobody) = (shape("ann"), shape("nobody"));
    assert_eq!((ann.0, ann.1.len(), &ann.2), (nobody.0, nobody.1.len(), &nobody.2));
    assert_eq!(shape("nobody").1, nobody.1, "a salt that changes is nobody's");
    assert_ne!(shape("no one").1, nobody.1, "and one that many have, too");
    let eve = shape("eve");
    assert_eq!(
        (eve.0, eve.1.len(), &eve.2),
        (ann.0, ann.1.len(), &ann.2),
        "who has another kind of hash, too"
    );
    let server = server.stop_and_restart(&[], &config(dir.path(), ""));
    let first = scram::client::first("nobody", "n");
    let mut client = open(&server, connect("d1", METHOD, first.as_bytes()));
    let text = String::from_utf8(challenge(&mut client)).expect("text");
    assert!(text.contains(&nobody.1), "a salt that changes with the process is nobody's");
}

/// A client that is connected holds it until it has proved who it is.
#[test]
fn what_a_live_connection_authenticates_by_is_on_the_account() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = server(dir.path(), "");
    let (mut ann, _) = by_scram(&server, "d1", "ann", PASSWORD);
    let first = scram::client::first("ann", &"n".repeat(3_000));
    ann.send(&auth(0x19, METHOD, first.as_bytes()));
    let asked = challenge(&mut ann);
    assert!(held(&server, "partial_packets") >= 3_000);
    let (last, _) = scram::client::last(&first, &asked, PASSWORD.as_bytes()).expect("a challenge");
    ann.send(&auth(0x18, METHOD, last.as_bytes()));
    assert!(matches!(said(&mut ann, METHOD), Said::Auth(0, _)));
    assert_eq!(held(&server, "partial_packets"), 0);
}

/// [MQTT-4.12.0-5], [MQTT-3.1.2-30].
#[test]
fn what_is_out_of_order_before_connack_ends_the_handshake() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = server(dir.path(), "");
    let first = scram::client::first("ann", "n");
    let begin = || {
        let mut client = open(&server, connect("d1", METHOD, first.as_bytes()));
        let challenge = challenge(&mut client);
        let (last, _) = scram::client::last(&first, &challenge, PASSWORD.as_bytes()).expect("a challenge");
        (client, last)
    };
    let (mut good, replayed) = begin();
    good.send(&auth(0x18, METHOD, replayed.as_bytes()));
    assert!(matches!(said(&mut good, METHOD), Said::Accepted(_)));
    type Say = fn(&str) -> Packet<'static>;
    let rows: [(&str, Say, u8); 7] = [
        ("a proof of another exchange", |old| auth(0x18, METHOD, old.as_bytes()), 0x86),
        ("no message of SCRAM", |_| auth(0x18, METHOD, b"\xff"), 0x87),
        ("no data at all", |_| auth(0x18, METHOD, b""), 0x87),
        ("another method", |_| auth(0x18, "JWT", b""), 0x82),
        ("a new authentication", |_| auth(0x19, METHOD, b""), 0x82),
        ("a success of its own", |_| auth(0x00, METHOD, b""), 0x82),
        ("another packet", |_| message("t", b"", QoS::AtMostOnce, false), 0x82),
    ];
    for (what, packet, code) in rows {
        let (mut client, _) = begin();
        client.send(&packet(&replayed));
        assert_eq!(said(&mut client, METHOD), Said::Other(Got::ConnAck(code)), "{what}");
        assert_eq!(client.next(), Got::Closed, "{what}");
    }
    for (method, data, code) in
        [(METHOD, &b"n,,"[..], 0x87), (METHOD, b"", 0x87), ("PLAIN", b"x", 0x8c), ("JWT", b"x", 0x8c)]
    {
        let mut client = open(&server, connect("d1", method, data));
        assert_eq!(client.next(), Got::ConnAck(code), "{method} {data:?}");
    }
    let (mut leaves, _) = begin();
    leaves.send(&Packet::Disconnect(Box::default()));
    assert_eq!(leaves.next(), Got::Closed);
    assert_eq!(good.ping(), []);
}

#[test]
fn who_falls_silent_in_an_authentication_is_not_waited_for() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = server(dir.path(), "[limits]\nconnect_timeout = \"1s\"\n");
    let first = scram::client::first("ann", "n");
    let mut silent = open(&server, connect("d1", METHOD, first.as_bytes()));
    let _ = challenge(&mut silent);
    assert_eq!(silent.next(), Got::Closed);
    let (mut live, _) = by_scram(&server, "d1", "ann", PASSWORD);
    live.send(&auth(0x19, METHOD, first.as_bytes()));
    let _ = challenge(&mut live);
    assert_eq!(live.ping(), [], "everything else goes on meanwhile");
    assert_eq!(live.next(), Got::Disconnect(0x87));
    let (mut other, _) = by_scram(&server, "d2", "ann", PASSWORD);
    assert!(matches!(again(&mut other, "ann", PASSWORD), Said::Auth(0, _)));
    let mut watch =
        Client::connect_with(server.ports.tcp, login(Protocol::V5, "w", Some("ann"), Some(PASSWORD)));
    assert_eq!(watch.subscribe("will"), 0);
    // Later than the deadline of an authentication that is over.
    let mut silent = open(&server, connect("d1", METHOD, first.as_bytes()));
    let _ = challenge(&mut silent);
    assert_eq!(silent.next(), Got::Closed);
    assert_eq!(other.ping(), []);
    let page = server.http_get("/metrics").expect("read the metrics");
    assert!(page.contains("mqtt_reauthentications_total{result=\"timeout\"} 1"), "{page}");
}

/// [MQTT-4.12.1-1], [MQTT-4.12.1-2].
#[test]
fn a_live_connection_goes_on_only_with_a_good_authentication() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = server(dir.path(), "");
    let accepted = |client_id: &str| {
        let (client, said) = by_scram(&server, client_id, "ann", PASSWORD);
        assert!(matches!(said, Said::Accepted(_)), "{said:?}");
        client
    };
    let mut stays = accepted("stays");
    assert!(matches!(again(&mut stays, "ann", PASSWORD), Said::Auth(0, _)));
    assert!(matches!(again(&mut stays, "ann", PASSWORD), Said::Auth(0, _)));
    for (user, password) in [("ann", "guess"), ("nobody", PASSWORD), ("bob", PASSWORD)] {
        let mut client = accepted("d1");
        assert_eq!(again(&mut client, user, password), Said::Other(Got::Disconnect(0x87)), "{user}");
        assert_eq!(client.next(), Got::Closed);
    }
    for (packet, code) in [
        (auth(0x19, "JWT", b""), 0x82),
        (auth(0x18, METHOD, b""), 0x82),
        (auth(0x00, METHOD, b""), 0x82),
        (auth(0x19, METHOD, b"n,,"), 0x87),
    ] {
        let mut client = accepted("d1");
        client.send(&packet);
        assert_eq!(client.next(), Got::Disconnect(code), "{packet:?}");
    }
    // Two in one write: the second is within the first.
    let mut hasty = accepted("d1");
    let first = scram::client::first("ann", "n");
    hasty.send_all(&[auth(0x19, METHOD, first.as_bytes()), auth(0x19, METHOD, first.as_bytes())]);
    assert_eq!(hasty.next(), Got::Disconnect(0x82));
    // A client that authenticates without end loses its own connection, and costs nothing more.
    let mut eager = accepted("d1");
    let ended = (0..100).find_map(|_| {
        eager.send(&auth(0x19, METHOD, first.as_bytes()));
        match said(&mut eager, METHOD) {
            Said::Auth(0x18, challenge) => {
                let (last, _) =
                    scram::client::last(&first, &challenge, PASSWORD.as_bytes()).expect("a challenge");
                eager.send(&auth(0x18, METHOD, last.as_bytes()));
                assert!(matches!(said(&mut eager, METHOD), Said::Auth(0, _)));
                None
            }
            other => Some(other),
        }
    });
    assert_eq!(ended, Some(Said::Other(Got::Disconnect(0x97))));
    // Without a method in CONNECT there is none to authenticate with again.
    let mut plain =
        Client::connect_with(server.ports.tcp, login(Protocol::V5, "d1", Some("ann"), Some(PASSWORD)));
    plain.send(&auth(0x19, METHOD, first.as_bytes()));
    assert_eq!(plain.next(), Got::Disconnect(0x82));
    assert_eq!(stays.ping(), []);
    let page = server.http_get("/metrics").expect("read the metrics");
    assert!(page.contains("mqtt_reauthentications_total{result=\"refused\"} 4"), "{page}");
    assert!(!server.log().contains(PASSWORD) && !server.log().contains("guess"));
}

pub(crate) fn jwt(file: &Path, more: &str) -> String {
    write_secret(file, SECRET);
    format!(
        "{more}\n[auth.jwt]\nsecret_file = \"{}\"\nleeway = \"0s\"\nclient_id = \"device\"\ngroups = \"groups\"\n",
        file.display()
    )
}

pub(crate) fn claims(seconds: i64, groups: &[&str]) -> String {
    token(SECRET, &json!({"sub": "ann", "exp": seconds_from_now(seconds), "device": "d1", "groups": groups}))
}

/// The failure: who renews its token is cut off all the same, or is never cut off again.
#[test]
fn a_renewed_token_counts_until_it_expires_itself() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = Server::start_with(&[], &jwt(&dir.path().join("secret"), ""));
    let brief = claims(4, &[]);
    let mut renewed = open(&server, connect("d1", "JWT", brief.as_bytes()));
    assert_eq!(said(&mut renewed, "JWT"), Said::Accepted(None));
    let reference = token(SECRET, &json!({"sub": "ann", "exp": seconds_from_now(4), "device": "d2"}));
    let mut ends = open(&server, connect("d2", "JWT", reference.as_bytes()));
    assert_eq!(said(&mut ends, "JWT"), Said::Accepted(None));
    renewed.send(&auth(0x19, "JWT", claims(8, &[]).as_bytes()));
    assert_eq!(said(&mut renewed, "JWT"), Said::Auth(0, Vec::new()));
    assert_eq!(ends.next(), Got::Disconnect(0x87));
    assert_eq!(renewed.ping(), []);
    assert_eq!(renewed.next(), Got::Disconnect(0x87));
    let page = server.http_get("/metrics").expect("read the metrics");
    assert!(page.contains("reason=\"expired\"} 2"), "{page}");
    assert!(page.contains("mqtt_reauthentications_total{result=\"ok\"} 1"), "{page}");
    assert!(!server.log().contains(&brief), "a token is in the log");
}

#[test]
fn a_token_that_is_not_good_enough_renews_nothing() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = Server::start_with(&[], &jwt(&dir.path().join("secret"), ""));
    let good = claims(3600, &[]);
    for (what, token) in [
        ("expired", claims(-5, &[])),
        (
            "of another device",
            token(SECRET, &json!({"sub": "ann", "exp": seconds_from_now(60), "device": "d2"})),
        ),
        (
            "of another user",
            token(SECRET, &json!({"sub": "bob", "exp": seconds_from_now(60), "device": "d1"})),
        ),
        ("forged", token(b"another secret, which nobody here knows", &json!({"sub": "ann"}))),
        ("none", "no token".to_owned()),
    ] {
        let mut client = open(&server, connect("d1", "JWT", good.as_bytes()));
        assert_eq!(said(&mut client, "JWT"), Said::Accepted(None));
        client.send(&auth(0x19, "JWT", token.as_bytes()));
        assert_eq!(client.next(), Got::Disconnect(0x87), "{what}");
    }
    let mut client = open(&server, connect("d1", "JWT", b"no token"));
    assert_eq!(client.next(), Got::ConnAck(0x86));
    let mut client = open(&server, connect("d2", "JWT", good.as_bytes()));
    assert_eq!(client.next(), Got::ConnAck(0x85));
}

/// The failure: what a connection may do is decided, or remembered, by who it was before.
#[test]
fn rules_apply_to_who_a_connection_is_after_it_has_authenticated_again() {
    let dir = tempfile::tempdir().expect("make a directory");
    let rules = dir.path().join("rules.toml");
    let text = "[[rules]]\nallow = \"all\"\ntopics = [\"a/#\"]\ngroups = [\"a\"]\n\
                [[rules]]\nallow = \"all\"\ntopics = [\"b/#\"]\ngroups = [\"b\"]\n\
                [[rules]]\nallow = \"publish\"\ntopics = [\"#\"]\nusers = [\"all\"]\n";
    fs::write(&rules, text).expect("write the rules");
    let more = format!("[authorization]\nrules = \"{}\"\n", rules.display());
    let server = Server::start_with(&[], &jwt(&dir.path().join("secret"), &more));
    let mut client = open(&server, connect("d1", "JWT", claims(3600, &["a"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Accepted(None));
    let all = token(SECRET, &json!({"sub": "all", "exp": seconds_from_now(3600), "device": "w"}));
    let mut other = Client::connect_with(server.ports.tcp, login(Protocol::V5, "w", None, Some(&all)));
    let try_both = |client: &mut Client, other: &mut Client| {
        let mut codes = Vec::new();
        for topic in ["a/1", "b/1"] {
            client.publish(topic, b"mine", QoS::AtLeastOnce, false);
            loop {
                match client.next() {
                    Got::PubAck(code) => break codes.push(code),
                    Got::Publish(..) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        let _ = client.ping();
        other.publish_acked("a/1", b"other", false);
        other.publish_acked("b/1", b"other", false);
        (codes, client.ping())
    };
    assert_eq!((client.subscribe("a/#"), client.subscribe("b/#")), (0, 0x87));
    let got = |topic: &str| vec![Got::Publish(topic.to_owned(), b"other".to_vec())];
    assert_eq!(try_both(&mut client, &mut other), (vec![0, 0x87], got("a/1")));
    client.send(&auth(0x19, "JWT", claims(3600, &["b"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Auth(0, Vec::new()));
    assert_eq!((client.subscribe("b/#"), client.subscribe("a/#")), (0, 0x87));
    assert_eq!(try_both(&mut client, &mut other), (vec![0x87, 0], got("b/1")));
    client.send(&auth(0x19, "JWT", claims(3600, &["a", "b"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Auth(0, Vec::new()));
    let (codes, both) = try_both(&mut client, &mut other);
    assert_eq!((codes, both.len()), (vec![0, 0], 2), "the subscription was there all the time");
}

/// The failure: a will is published by the rights of who its client was.
#[test]
fn a_will_is_left_by_who_its_client_is_after_all() {
    let dir = tempfile::tempdir().expect("make a directory");
    let rules = dir.path().join("rules.toml");
    let text = "[[rules]]\nallow = \"all\"\ntopics = [\"w/#\"]\ngroups = [\"a\"]\n";
    fs::write(&rules, text).expect("write the rules");
    let more = format!("[authorization]\nrules = \"{}\"\n", rules.display());
    let toml = jwt(&dir.path().join("secret"), &more);
    let server = Server::start_with(&[], &toml);
    let token = |device: &str, groups: &[&str]| {
        let end = seconds_from_now(3600);
        token(SECRET, &json!({"sub": device, "exp": end, "device": device, "groups": groups}))
    };
    let watch = |server: &Server| {
        let watcher = login(Protocol::V5, "watcher", None, Some(&token("watcher", &["a"])));
        let mut watcher = Client::connect_with(server.ports.tcp, watcher);
        assert_eq!(watcher.subscribe("w/#"), 0);
        watcher
    };
    // With a delay it is on disk.
    let renewed = |device: &str, delay: u32| {
        let topic = format!("w/{device}");
        let hello = connect(device, "JWT", token(device, &["a"]).as_bytes());
        let will = Some(ConnectWill { delay, ..will(&topic, b"gone") });
        let session_expiry = (delay > 0).then_some(600);
        let mut client = open(&server, Connect { will, session_expiry, ..hello });
        assert_eq!(said(&mut client, "JWT"), Said::Accepted(None));
        let groups: &[&str] = if device.starts_with("lost") { &["b"] } else { &["a", "b"] };
        client.send(&auth(0x19, "JWT", token(device, groups).as_bytes()));
        assert_eq!(said(&mut client, "JWT"), Said::Auth(0, Vec::new()));
        client
    };
    let mut watcher = watch(&server);
    drop([renewed("lost", 0), renewed("kept", 0)]);
    assert_eq!(watcher.next(), Got::Publish("w/kept".to_owned(), b"gone".to_vec()));
    until(|| server.metric("mqtt_wills_denied_total") == 1);
    assert_eq!(watcher.ping(), []);
    let mut clients = [renewed("lost-later", 2), renewed("kept-later", 2)];
    // The mark is written behind the records that are to be looked at.
    assert_eq!(clients[1].subscribe("w/mark"), 0);
    let server = server.kill_and_restart(&[], &toml);
    let mut watcher = watch(&server);
    assert_eq!(watcher.next(), Got::Publish("w/kept-later".to_owned(), b"gone".to_vec()));
    until(|| server.metric("mqtt_wills_denied_total") == 1);
    assert_eq!(watcher.ping(), []);
}

/// Messages that come while an authentication is under way reach who the client was, and wait for nothing.
#[test]
fn messages_flow_while_a_client_authenticates_again() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = server(dir.path(), "");
    let (mut client, _) = by_scram(&server, "d1", "ann", PASSWORD);
    assert_eq!(client.subscribe("t"), 0);
    let first = scram::client::first("ann", "n");
    client.send(&auth(0x19, METHOD, first.as_bytes()));
    let challenge = challenge(&mut client);
    client.publish("t", b"between", QoS::AtMostOnce, false);
    assert_eq!(client.ping(), [Got::Publish("t".to_owned(), b"between".to_vec())]);
    let (last, _) = scram::client::last(&first, &challenge, PASSWORD.as_bytes()).expect("a challenge");
    client.send_all(&[auth(0x18, METHOD, last.as_bytes()), message("t", b"after", QoS::AtMostOnce, false)]);
    let mut came = vec![said(&mut client, METHOD), said(&mut client, METHOD)];
    came.sort_by_key(|said| matches!(said, Said::Other(_)));
    assert!(matches!(came[0], Said::Auth(0, _)), "{came:?}");
    assert_eq!(came[1], Said::Other(Got::Publish("t".to_owned(), b"after".to_vec())));
    until(|| server.metric("mqtt_reauthentications_total") == 1);
}
