//! Many logins at once: who waits for whose hashes, who need not wait at all, and where the credentials are counted that wait for
//! a decision. Work is counted, not time.

use std::path::Path;

use access::passwords::{PasswordDigest, Scratch, with_user};
use bytes::Bytes;
use codec::{Connect, Packet};
use gateway_core::Protocol;
use serde_json::json;

use crate::{
    client::{Client, Got, from_host},
    hooks::{Hook, Mood},
    login::{answer, login, seconds_from_now, token},
    memory::{LIMITS, held},
    support::{Server, until},
};

const SECRET: &str = "correct-horse-7";

/// A password file in which each of these has [`SECRET`]; the hash of `slow` takes six times as long, so that a flood of guesses
/// waits longer than it takes to connect, however busy the machine.
fn file(dir: &Path, users: &[String]) -> String {
    let path = dir.join("passwords");
    let hash = PasswordDigest::argon2id(SECRET.as_bytes(), b"0123456789abcdef", &mut Scratch::default());
    let slow = format!("slow:{hash}\n").replace("t=2", "t=12");
    let text: String = users.iter().map(|user| format!("{user}:{hash}\n")).chain([slow]).collect();
    std::fs::write(&path, text).expect("write the users");
    path.display().to_string()
}

/// One thread hashes, nobody gives up, and no address waits for having failed.
fn config(dir: &Path, users: &[String], more: &str) -> String {
    format!(
        "[limits]\nconnect_timeout = \"10m\"\n[bans]\nfailed_logins = 0\n\
         [auth]\nhash_threads = 1\npassword_file = \"{}\"\n{more}\n",
        file(dir, users)
    )
}

/// Asks with a CONNECT, and does not wait for the answer.
fn begin(host: u8, port: u16, connect: Connect) -> Client {
    let mut client = Client::over(from_host(host, port), connect.protocol);
    client.send(&Packet::Connect(Box::new(connect)));
    client
}

fn wrong(client_id: &str) -> Connect {
    login(Protocol::V5, client_id, Some("slow"), Some("guess"))
}

fn right(client_id: &str, user: &str) -> Connect {
    login(Protocol::V5, client_id, Some(user), Some(SECRET))
}

fn checks(server: &Server, result: &str) -> u64 {
    server.metric_of("mqtt_login_checks_total", &format!("result=\"{result}\""))
}

/// Twenty addresses with twenty wrong logins each.
fn flood(server: &Server) -> Vec<Client> {
    let guess = |n: u8, host: u8| begin(host, server.ports.tcp, wrong(&format!("flood-{host}-{n}")));
    let flood: Vec<Client> = (0..20).flat_map(|n| (2..22).map(move |host| guess(n, host))).collect();
    until(|| server.metric("mqtt_packets_received_total") >= 400);
    flood
}

#[test]
fn a_right_login_does_not_wait_for_all_wrong_ones_that_came_before() {
    let dir = tempfile::tempdir().expect("make a directory");
    let server = Server::start_with(&[], &config(dir.path(), &["ann".to_owned()], ""));
    let _flood = flood(&server);
    let failed = || server.metric_of("mqtt_auth_failures_total", "reason=\"credentials\"");
    let before = failed();
    assert!(before < 300, "there is still a queue");
    assert_eq!(answer(server.ports.tcp, right("d1", "ann")), Got::ConnAck(0));
    let after = failed();
    assert!(after < before + (400 - before) / 2, "{before} hashes of others were done before, {after} after");
}

#[test]
fn a_full_queue_refuses_whoever_holds_most_of_it() {
    let dir = tempfile::tempdir().expect("make a directory");
    let more = "max_waiting_hashes = 30";
    let server = Server::start_with(&[], &config(dir.path(), &["ann".to_owned()], more));
    let many: Vec<Client> =
        (0..200).map(|n| begin(2, server.ports.tcp, wrong(&format!("flood-{n}")))).collect();
    until(|| checks(&server, "displaced") >= 100);
    assert_eq!(answer(server.ports.tcp, right("d1", "ann")), Got::ConnAck(0));
    let busy = server.metric_of("mqtt_auth_failures_total", "reason=\"busy\"");
    assert!(busy >= 100, "{busy} were told at once");
    drop(many);
}

#[test]
fn devices_that_come_back_together_need_no_hashes() {
    let dir = tempfile::tempdir().expect("make a directory");
    let users: Vec<String> = (0..20).map(|n| format!("u{n}")).collect();
    let server = Server::start_with(&[], &config(dir.path(), &users, ""));
    for user in &users {
        assert_eq!(answer(server.ports.tcp, right(user, user)), Got::ConnAck(0));
    }
    // Counted after the answer.
    until(|| checks(&server, "done") == 20);
    assert_eq!(checks(&server, "remembered"), 0);
    // A flood of others does not keep them waiting.
    let flood = flood(&server);
    for n in 0..200 {
        let user = &users[n % users.len()];
        assert_eq!(answer(server.ports.tcp, right(&format!("{user}-{n}"), user)), Got::ConnAck(0));
    }
    assert_eq!(checks(&server, "remembered"), 200);
    assert!(held(&server, "logins") > 0, "what is remembered is on the account");
    drop(flood);
    // A new password counts at once, and nobody is let in by what was right before.
    let path = dir.path().join("passwords");
    let text = std::fs::read_to_string(&path).expect("read the users");
    let hash = PasswordDigest::argon2id(b"another", b"0123456789abcdef", &mut Scratch::default());
    std::fs::write(&path, with_user(&text, "u0", &hash)).expect("write the users");
    server.signal("HUP");
    until(|| answer(server.ports.tcp, right("u0", "u0")) == Got::ConnAck(0x86));
    let changed = login(Protocol::V5, "u0", Some("u0"), Some("another"));
    assert_eq!(answer(server.ports.tcp, changed), Got::ConnAck(0));
    assert_eq!(answer(server.ports.tcp, right("u1", "u1")), Got::ConnAck(0));
}

#[test]
fn a_cache_that_is_off_hashes_each_login() {
    let dir = tempfile::tempdir().expect("make a directory");
    let more = "password_cache_ttl = \"0s\"";
    let server = Server::start_with(&[], &config(dir.path(), &["ann".to_owned()], more));
    for _ in 0..3 {
        assert_eq!(answer(server.ports.tcp, right("d1", "ann")), Got::ConnAck(0));
    }
    until(|| checks(&server, "done") == 3);
    assert_eq!(checks(&server, "remembered"), 0);
}

/// A CONNECT whose user name and password have so many bytes each.
fn large(client_id: &str, bytes: usize) -> Connect {
    let text = "x".repeat(bytes);
    login(Protocol::V5, client_id, Some(&text), Some(&text))
}

#[test]
fn credentials_that_wait_for_a_service_are_on_the_account() {
    let hook = Hook::start();
    hook.feel(Mood::Slow);
    let server = Server::start_with(&[], &(LIMITS.to_owned() + &hook.config("", "deadline = \"4s\"")));
    let mut alone = begin(2, server.ports.tcp, large("alone", 10_000));
    // As decoded, as asked about, and as sent: at least three times 20 KB.
    until(|| held(&server, "unauthenticated") >= 60_000);
    let mut many: Vec<Client> =
        (0..30).map(|n| begin(3, server.ports.tcp, large(&format!("many-{n}"), 10_000))).collect();
    until(|| server.metric_of("mqtt_memory_refused_total", "kind=\"unauthenticated\"") >= 15);
    assert!(held(&server, "unauthenticated") <= 512 << 10);
    assert_eq!(alone.next(), Got::ConnAck(0x88), "it was not sent away for those of another address");
    let closed = many.iter_mut().filter_map(|client| (client.next() == Got::Closed).then_some(())).count();
    assert!(closed >= 15, "{closed} have left for each other");
    until(|| held(&server, "unauthenticated") == 0);
}

#[test]
fn claims_of_a_token_are_on_the_account_while_it_is_connected() {
    let dir = tempfile::tempdir().expect("make a directory");
    let path = dir.path().join("secret");
    let secret = b"0123456789abcdef0123456789abcdef";
    crate::support::write_secret(&path, secret);
    let server = Server::start_with(&[], &format!("[auth.jwt]\nsecret_file = \"{}\"\n", path.display()));
    let connect = |client_id: &str, claim: usize| {
        let claims = json!({"sub": "ann", "exp": seconds_from_now(3600), "c": "x".repeat(claim)});
        Connect {
            password: Some(Bytes::from(token(secret, &claims))),
            ..login(Protocol::V5, client_id, None, None)
        }
    };
    let _small = Client::connect_with(server.ports.tcp, connect("small", 1));
    let before = held(&server, "sessions");
    let large = Client::connect_with(server.ports.tcp, connect("large", 8_000));
    assert!(held(&server, "sessions") >= before + 8_000);
    drop(large);
    until(|| held(&server, "sessions") < before + 8_000);
}
