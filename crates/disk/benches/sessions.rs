//! Time and room that a million sessions with a subscription each take: `cargo bench -p disk --bench sessions`.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

mod support;

use std::{fs, path::Path, sync::Arc};

use disk::{EmbeddedState, StateOptions};
use gateway_core::{ClientId, Commit, Protocol, QoS, QueueId, Timestamp};
use store::{DataDir, Restore, SessionOp, StateStore as _, StoredSession, StoredSubscription};
use support::Watch;

const SESSIONS: u64 = 1_000_000;

#[derive(Default)]
struct Recovered {
    sessions: u64,
    subscriptions: u64,
}

impl Restore for Recovered {
    fn session(&mut self, _: StoredSession, subscriptions: Vec<StoredSubscription>) {
        self.sessions += 1;
        self.subscriptions += subscriptions.len() as u64;
    }

    fn group(&mut self, _: QueueId, _: &str) {}
}

fn open(dir: &Path) -> EmbeddedState {
    EmbeddedState::open(&DataDir::open(dir).unwrap(), &StateOptions::default()).unwrap()
}

fn session(number: u64) -> StoredSession {
    StoredSession {
        queue: QueueId(number),
        client_id: ClientId::new(&format!("device-{number:08}")),
        expiry: 60,
        since: Some(Timestamp(1_700_000_000_000)),
        protocol: Protocol::V5,
        listener: Arc::new("listener".to_owned()),
        username: None,
        proved: false,
        tenant: None,
        will: None,
    }
}

fn main() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let store = open(dir.path());
    let watch = Watch::start();
    for number in 1..=SESSIONS {
        store.submit_session(SessionOp::Put(Box::new(session(number)), None));
        let subscription = StoredSubscription {
            filter: format!("devices/{number}/commands/#"),
            qos: QoS::AtLeastOnce,
            no_local: false,
            retain_as_published: false,
            id: Some(2000),
        };
        let commit = Commit::new();
        store.submit_session(SessionOp::Subscribe(QueueId(number), subscription, Arc::clone(&commit)));
        // As many at once as a thousand connections send.
        if number % 1000 == 0 {
            while commit.result().is_none() {
                std::thread::yield_now();
            }
        }
    }
    drop(store);
    watch.report("written", SESSIONS);
    let bytes = fs::metadata(dir.path().join("sessions/data.mdb")).unwrap().len();
    println!("  {} bytes on disk each", bytes / SESSIONS);
    let watch = Watch::start();
    let store = open(dir.path());
    let mut restored = Recovered::default();
    store.restore_sessions(&mut restored).unwrap();
    watch.report("restored", SESSIONS);
    assert_eq!((restored.sessions, restored.subscriptions), (SESSIONS, SESSIONS));
}
