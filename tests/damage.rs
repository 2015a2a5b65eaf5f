//! Bytes flipped in the files of stopped and killed gateways: whatever they are, the gateway starts, sets aside what
//! cannot be used and serves.

#[path = "support/client.rs"]
mod client;
mod support;

use std::{fs, path::Path};

use client::{Client, hello};
use mqtt_server::{
    codec::{Connect, Packet},
    types::{Protocol, QoS},
};
use support::Server;

const ROLES: [&str; 4] = ["latest", "queues", "retained", "sessions"];

/// Files that are damaged in turn.
const SEEDS: u64 = 12;

fn persistent(name: &str) -> Connect {
    let mut connect = hello(Protocol::V5, name);
    connect.clean_start = false;
    connect.session_expiry = Some(3600);
    connect
}

/// Sessions with subscriptions and queues, retained messages and latest values, of several pages each.
fn fill(server: &Server) {
    for n in 0..40 {
        let mut client = Client::connect_with(server.ports.tcp, persistent(&format!("session-{n}")));
        client.subscribe_with(&format!("to/{}/#", n % 8), QoS::AtLeastOnce, None);
        client.send(&Packet::Disconnect(Box::default()));
    }
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    for n in 0..300_u32 {
        let payload = vec![b'x'; (n as usize * 37) % 5000];
        publisher.publish_acked(&format!("to/{}/{n}", n % 8), &payload, n % 3 == 0);
    }
}

fn random(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 16) as usize
}

/// Flips some bytes of a file, more often where pages begin.
fn flip(file: &Path, state: &mut u64) {
    let mut bytes = fs::read(file).expect("read a store");
    for _ in 0..1 + random(state) % 6 {
        let page = random(state) % (bytes.len() / 4096) * 4096;
        let within = if random(state).is_multiple_of(2) { 160 } else { 4096 };
        bytes[page + random(state) % within] ^= 1 + (random(state) % 255) as u8;
    }
    fs::write(file, bytes).expect("damage a store");
}

#[test]
fn no_flipped_byte_keeps_a_gateway_from_starting_and_serving() {
    let mut server = Server::start();
    fill(&server);
    assert!(server.stop());
    let data = server.dir().join("data");
    let sound: Vec<_> = ROLES.map(|role| fs::read(data.join(role).join("data.mdb")).expect("read")).into();
    let mut state = 0x9E37_79B9_7F4A_7C15;
    let mut set_aside = 0;
    for seed in 0..SEEDS {
        for role in ROLES {
            flip(&data.join(role).join("data.mdb"), &mut state);
        }
        // Starts, or this fails with the log.
        server = server.kill_and_restart(&[], "");
        set_aside += server.metric("gateway_store_set_aside");
        let _returns = Client::connect_with(server.ports.tcp, persistent("session-1"));
        let mut client = Client::connect_with(server.ports.tcp, persistent("new"));
        client.subscribe_with("new/#", QoS::AtLeastOnce, None);
        let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
        publisher.publish_acked("to/1/again", b"x", true);
        assert!(server.stop(), "seed {seed}: it served, and ended as it should");
        for (role, bytes) in ROLES.iter().zip(&sound) {
            fs::write(data.join(role).join("data.mdb"), bytes).expect("mend a store");
        }
    }
    assert!(set_aside > SEEDS, "{set_aside} files were set aside");
}

#[test]
fn an_empty_file_is_damage_and_a_clean_end_is_noted() {
    let mut server = Server::start();
    fill(&server);
    assert!(server.stop());
    for role in ROLES {
        let state =
            fs::read_to_string(server.dir().join("data").join(role).join("state")).expect("its state");
        assert!(state.starts_with("closed "), "{role}: {state}");
        fs::write(server.dir().join("data").join(role).join("data.mdb"), "").expect("empty a store");
    }
    let server = server.kill_and_restart(&["--verify-store"], "");
    assert_eq!(server.metric("gateway_store_set_aside"), 4);
    let state = fs::read_to_string(server.dir().join("data/queues/state")).expect("its state");
    assert_eq!(state.trim(), "open");
}
