//! The clients of a test, what each of them does at random, and the loop that lets them do it.

use std::{thread, time::Duration};

use gateway_core::{
    Protocol::{self, V4, V5},
    QoS,
};

use super::{
    broker::Server,
    client::{Peer, Profile, Will},
    clock,
    history::{Durable, Event, Record, states},
    model::{Cast, Facts, Violation},
    rng::Rng,
};

const MILLI: u64 = 1_000_000;
/// Nothing has come for so long: nothing will, however loaded the machine is.
const SILENCE: u64 = 15_000 * MILLI;
/// The same where something is to be missing.
pub(crate) const SHORT: u64 = 3_000 * MILLI;
/// Everything is there, and nothing more comes for so long.
const CALM: u64 = 400 * MILLI;
/// Longer than draining may take on a loaded machine.
const PATIENCE: u64 = 180_000 * MILLI;
/// Un-acknowledged messages of a publisher.
const WINDOW: usize = 12;

/// Role of a client beside receiving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Publishes; with `restless` it also loses its connection and takes itself over.
    Publisher {
        restless: bool,
    },
    Online,
    /// Takes its own connection over again and again.
    Usurper,
    /// Subscribes, leaves, and comes back at the end.
    Away,
    /// Comes and goes, politely and not.
    Flapping,
    /// Throws its session away now and then.
    Renewing,
    /// Unsubscribes from its last filter and subscribes again.
    Toggling,
}

pub(crate) struct World {
    pub(crate) history: Vec<Record>,
    pub(crate) cast: Cast,
    /// Messages per second of each publisher.
    pub(crate) rate: u64,
    /// Nanoseconds without anything after which nothing more is expected.
    pub(crate) silence: u64,
    peers: Vec<Peer>,
    roles: Vec<Role>,
    /// Time of each client's next action.
    next: Vec<u64>,
    /// Time of each publisher's next message.
    due: Vec<u64>,
    rng: Rng,
}

fn filters(list: &[(&str, u8)]) -> Vec<(String, QoS)> {
    list.iter().map(|(filter, qos)| ((*filter).to_owned(), QoS::from_bits(*qos).expect("a QoS"))).collect()
}

fn client(name: &str, protocol: Protocol, list: &[(&str, u8)]) -> Profile {
    Profile {
        name: name.to_owned(),
        protocol,
        persistent: true,
        window: None,
        lag: 0,
        filters: filters(list),
        renews: false,
        will: Will::No,
    }
}

/// Publishers publish to `t/NUMBER/…` and, retained, to `r/NUMBER/…`; wills come to `w/NUMBER/…`.
fn profiles() -> Vec<(Role, Profile)> {
    use Role::{Away, Flapping, Online, Publisher, Renewing, Toggling, Usurper};
    let slow = |profile: Profile| Profile { window: Some(5), lag: 3, ..profile };
    let late = |profile: Profile| Profile { lag: 30, ..profile };
    let mortal = |profile: Profile| Profile { will: Will::Prompt, ..profile };
    let patient = |profile: Profile| Profile { will: Will::Delayed, ..profile };
    vec![
        (Publisher { restless: false }, client("publisher-calm-3", V4, &[])),
        (Publisher { restless: false }, client("publisher-calm-5", V5, &[])),
        (Publisher { restless: true }, mortal(client("publisher-restless-3", V4, &[]))),
        (Publisher { restless: true }, patient(client("publisher-restless-5", V5, &[]))),
        (Online, client("online-3", V4, &[("t/#", 2), ("w/#", 2)])),
        (Online, slow(client("online-narrow-5", V5, &[("t/+/1", 2), ("t/+/0", 1)]))),
        (Online, late(client("online-late-5", V5, &[("t/#", 1), ("t/+/1", 2)]))),
        (Usurper, mortal(client("usurper-3", V4, &[("t/1/#", 2)]))),
        (Usurper, late(mortal(client("usurper-5", V5, &[("t/2/+", 1), ("t/3/+", 2)])))),
        (Away, client("away-3", V4, &[("t/#", 2), ("w/#", 1)])),
        (Away, client("away-5", V5, &[("t/0/#", 1), ("r/#", 2), ("w/#", 2)])),
        (Flapping, mortal(client("flapping-3", V4, &[("t/+/mixed", 2), ("t/2/#", 1)]))),
        (Flapping, late(patient(client("flapping-5", V5, &[("t/#", 2), ("w/#", 2)])))),
        (Renewing, Profile { renews: true, ..mortal(client("renewing-5", V5, &[("t/#", 2)])) }),
        (Toggling, client("toggling-5", V5, &[("t/+/1", 2), ("t/+/0", 1)])),
        (Online, client("member-online-5", V5, &[("$share/exact/t/#", 2)])),
        (Flapping, late(client("member-flapping-3", V4, &[("$share/exact/t/#", 2)]))),
        (Usurper, late(client("member-usurper-5", V5, &[("$share/exact/t/#", 2)]))),
        (Flapping, client("member-a-3", V4, &[("$share/once/t/#", 1)])),
        (Flapping, late(client("member-b-5", V5, &[("$share/once/t/#", 1)]))),
        (Flapping, Profile { persistent: false, ..client("noise-5", V5, &[("t/#", 1), ("r/#", 2)]) }),
    ]
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        Self::resumed(seed, Vec::new())
    }

    /// The clients with the state they had at the end of this history.
    pub(crate) fn resumed(seed: u64, history: Vec<Record>) -> Self {
        let profiles = profiles();
        let states = states(&history, profiles.len() + 1);
        let (roles, profiles): (Vec<Role>, Vec<Profile>) = profiles.into_iter().unzip();
        let persistent = (0..profiles.len()).filter(|number| profiles[*number].persistent).collect();
        let count = profiles.len();
        let peers = profiles
            .into_iter()
            .zip(states)
            .enumerate()
            .map(|(number, (profile, state))| Peer::new(number, profile, state))
            .collect();
        Self {
            history,
            cast: Cast { persistent, probe: None },
            rate: 60,
            silence: SILENCE,
            peers,
            roles,
            next: vec![0; count],
            due: vec![0; count],
            rng: Rng::new(seed),
        }
    }

    /// Without wills: what another broker does with them at a takeover is its own business.
    pub(crate) fn without_wills(mut self) -> Self {
        for peer in &mut self.peers {
            peer.profile.will = Will::No;
        }
        self
    }

    /// Lets every client have its session and its subscriptions, so that what follows is checked for all.
    pub(crate) fn settle(&mut self, broker: &mut dyn Server) {
        let deadline = clock::now() + PATIENCE;
        while !self.peers.iter().all(|peer| peer.is_open() && peer.is_subscribed()) {
            broker.look_after();
            assert!(clock::now() < deadline, "clients cannot subscribe\n{}", broker.log());
            self.turn(broker);
        }
    }

    /// Load for so many nanoseconds.
    pub(crate) fn run(&mut self, broker: &mut dyn Server, nanoseconds: u64) {
        let end = clock::now() + nanoseconds;
        while clock::now() < end {
            for number in 0..self.peers.len() {
                self.act(number, broker.port());
            }
            self.turn(broker);
        }
    }

    /// Load until a message of after `since` is acknowledged and waits for a client that is away: only a server that has
    /// kept it can still send it.
    pub(crate) fn run_until_something_waits(&mut self, broker: &mut dyn Server, since: u64) {
        let deadline = clock::now() + PATIENCE;
        while !self.something_waits(since) {
            assert!(clock::now() < deadline, "nothing waits for anybody\n{}", broker.log());
            self.run(broker, 100 * MILLI);
        }
    }

    fn something_waits(&self, since: u64) -> bool {
        let facts = Facts::new(&self.history, &self.cast);
        facts.missing(&self.cast).iter().any(|violation| match violation {
            Violation::Lost { client, msg, .. } => {
                !self.peers[*client].online && facts.published_at(*msg) > Some(since)
            }
            _ => false,
        })
    }

    /// Reads what the dead server has sent before it died.
    pub(crate) fn after_kill(&mut self, broker: &dyn Server) {
        for _ in 0..3 {
            for peer in &mut self.peers {
                if peer.is_open() {
                    peer.step(broker.port(), &mut self.history);
                }
            }
        }
    }

    /// Everybody comes back and nothing new is published, until all is there or nothing comes any more.
    pub(crate) fn drain(&mut self, broker: &mut dyn Server) {
        let start = clock::now();
        let mut last = start;
        let mut complete = false;
        loop {
            for peer in &mut self.peers {
                peer.online = true;
                if peer.is_settled() {
                    peer.subscribe(&mut self.history);
                }
            }
            if self.turn(broker) {
                last = clock::now();
                complete = false;
            }
            let quiet = clock::now() - last;
            if quiet > CALM && !complete {
                complete = self.is_complete();
                broker.look_after();
                last = if complete { clock::now() - CALM } else { last };
            }
            if (complete && quiet > CALM) || quiet > self.silence || clock::now() - start > PATIENCE {
                return;
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.peers.iter().all(|peer| peer.is_open() && peer.is_subscribed() && peer.state.inflight.is_empty())
            && Facts::new(&self.history, &self.cast).missing(&self.cast).is_empty()
    }

    /// A last client that reads all retained messages.
    pub(crate) fn probe(&mut self, broker: &mut dyn Server) {
        let number = self.peers.len();
        let profile = Profile { persistent: false, ..client("probe", V5, &[("r/#", 2)]) };
        self.peers.push(Peer::new(number, profile, Durable::default()));
        self.cast.probe = Some(number);
        let start = clock::now();
        let mut last = start;
        while clock::now() - last < 2 * CALM || !self.peers[number].is_subscribed() {
            if self.turn(broker) {
                last = clock::now();
            }
            broker.look_after();
            assert!(clock::now() - start < PATIENCE, "the probe cannot subscribe\n{}", broker.log());
        }
    }

    /// Messages whose publisher still waits for an answer.
    pub(crate) fn unanswered(&self) -> usize {
        self.peers.iter().map(|peer| peer.state.inflight.len()).sum()
    }

    pub(crate) fn name(&self, number: usize) -> &str {
        &self.peers[number].profile.name
    }

    fn turn(&mut self, broker: &mut dyn Server) -> bool {
        let mut busy = false;
        for peer in &mut self.peers {
            busy |= peer.step(broker.port(), &mut self.history) && peer.is_open();
        }
        if !busy {
            broker.look_after();
            thread::sleep(Duration::from_micros(300));
        }
        busy
    }

    fn act(&mut self, number: usize, port: u16) {
        let now = clock::now();
        let role = self.roles[number];
        if matches!(role, Role::Publisher { .. }) && now >= self.due[number] {
            let gap = 1_000_000_000 / self.rate.max(1);
            self.due[number] = now + self.rng.between(gap / 2, gap * 3 / 2);
            if self.peers[number].state.inflight.len() < WINDOW {
                self.publish(number);
            }
        }
        if now < self.next[number] {
            return;
        }
        let peer = &mut self.peers[number];
        let rng = &mut self.rng;
        let history = &mut self.history;
        let first = self.next[number] == 0;
        self.next[number] = now + rng.between(40, 400) * MILLI;
        match role {
            _ if first => {}
            Role::Publisher { restless: true } | Role::Usurper => {
                if rng.one_in(3) {
                    peer.leave(rng.one_in(2), history);
                } else {
                    peer.take_over(port, history);
                }
            }
            Role::Away if peer.is_subscribed() && peer.online => {
                peer.leave(rng.one_in(2), history);
                peer.online = false;
            }
            Role::Flapping if peer.online && (peer.is_subscribed() || rng.one_in(10)) => {
                peer.leave(rng.one_in(2), history);
                peer.online = false;
            }
            Role::Flapping => peer.online = true,
            Role::Renewing if rng.one_in(3) => {
                peer.renew = true;
                peer.leave(rng.one_in(2), history);
            }
            Role::Toggling if peer.is_settled() => {
                let last = peer.profile.filters.last().expect("a filter").0.clone();
                if peer.is_subscribed() {
                    peer.unsubscribe(&last, history);
                } else {
                    peer.subscribe(history);
                }
            }
            _ => {}
        }
    }

    fn publish(&mut self, number: usize) {
        let (topic, qos, retain) = match self.rng.between(0, 8) {
            0..=2 => (format!("t/{number}/0"), QoS::AtLeastOnce, false),
            3..=4 => (format!("t/{number}/1"), QoS::ExactlyOnce, false),
            5 => {
                let qos = if self.rng.one_in(2) { QoS::AtLeastOnce } else { QoS::ExactlyOnce };
                (format!("t/{number}/mixed"), qos, false)
            }
            6 => (format!("r/{number}/1"), QoS::AtLeastOnce, true),
            _ => (format!("r/{number}/2"), QoS::ExactlyOnce, true),
        };
        self.peers[number].publish(&topic, qos, retain, &mut self.history);
    }
}

/// Messages acknowledged so far, cheaply.
pub(crate) fn acknowledged(history: &[Record]) -> usize {
    history.iter().filter(|record| matches!(record.event, Event::Acked { .. })).count()
}
