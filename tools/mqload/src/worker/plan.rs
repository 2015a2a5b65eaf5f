//! Plan of a run: everything that does not change.

use crate::codec::TOPIC_DIGITS;

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Topology {
    /// Publisher i to subscriber i, one topic each
    Pair,
    /// All publishers to one topic, all subscribers on it
    Fanout,
    /// A topic for each publisher, a wildcard for each subscriber
    Fanin,
    /// A topic for each publisher, all subscribers in one shared subscription
    Share,
    /// Publishers only
    None,
}

#[derive(Clone, Copy, Debug)]
pub enum Load {
    /// At most `window` messages outstanding for each publisher.
    Closed { window: u64 },
    /// Messages at fixed times, `interval` ns apart, rounded up to `tick`.
    /// `window` still limits what is outstanding (u64::MAX: no limit).
    Open { interval: f64, tick: u64, window: u64 },
}

/// Everything about a run that does not change.
pub struct Plan {
    pub topology: Topology,
    pub publishers: usize,
    pub subscribers: usize,
    pub qos: u8,
    pub sub_qos: u8,
    pub size: usize,
    pub retain: bool,
    pub v5: bool,
    pub load: Load,
    /// Messages for each publisher; `None`: until the end of the window.
    pub count: Option<u64>,
    pub batch_bytes: usize,
    /// Closed loop: a publisher waits until it may send this many.
    pub refill: u64,
    /// Pause (ns) before each round, so that more gathers; 0: none.
    pub gather: u64,
    pub stall: u64,
    pub threads: usize,
    pub prefix: String,
    /// Levels of the topics, 2 or more.
    pub levels: usize,
    /// Topics of each publisher, taken in turn; 1: always the same.
    pub topics: u64,
    /// Further subscribers (beside `subscribers`) that read nothing.
    pub slow: usize,
}

impl Plan {
    /// Returns the number of subscribers that get each message.
    pub fn copies(&self) -> u64 {
        match self.topology {
            Topology::Pair | Topology::Share => 1,
            Topology::Fanout | Topology::Fanin => self.subscribers as u64,
            Topology::None => 0,
        }
    }

    pub fn topic(&self, publisher: usize) -> String {
        let mut t = match self.topology {
            Topology::Fanout => format!("{}/all", self.prefix),
            _ => format!("{}/{publisher}", self.prefix),
        };
        t.push_str(&self.deeper());
        if self.topics > 1 {
            t.push('/');
            t.push_str(&"0".repeat(TOPIC_DIGITS));
        }
        t
    }

    /// The levels after the second.
    fn deeper(&self) -> String {
        "/l".repeat(self.levels.saturating_sub(2))
    }

    pub fn filter(&self, subscriber: usize) -> String {
        match self.topology {
            Topology::Pair | Topology::None => {
                let any = if self.topics > 1 { "/+" } else { "" };
                format!("{}/{subscriber}{}{any}", self.prefix, self.deeper())
            }
            Topology::Fanout => format!("{}/all{}", self.prefix, self.deeper()),
            Topology::Fanin => format!("{}/#", self.prefix),
            Topology::Share => format!("$share/g/{0}/#", self.prefix),
        }
    }

    /// Tells whether publishing has to follow what subscribers have received.
    pub(super) fn credits(&self) -> bool {
        self.topology != Topology::None
            && !matches!(self.load, Load::Open { window, .. } if window == u64::MAX)
    }

    /// QoS 0 without subscribers: only the socket holds a publisher back.
    pub(super) fn unanswered(&self) -> bool {
        self.topology == Topology::None && self.qos == 0
    }
}
