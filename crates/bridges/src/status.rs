//! State of a bridge: its carried messages, its failures, and whether the other side answers.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use gateway_core::{
    Timestamp, clock,
    metrics::{MetricRow, figures},
};
use parking_lot::Mutex;
use tracing::{debug, info, warn};

/// Why the other side did not take something, or cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// No connection could be made.
    Connect,
    /// The other side does not let the bridge in.
    Denied,
    /// The connection ended.
    Closed,
    /// There was no answer in time.
    Deadline,
    /// The other side has too much to do, and says so.
    Busy,
    /// The other side failed, or its answer cannot be understood.
    Failed,
    /// The gateway's own log or disk.
    Store,
}

impl Reason {
    const ALL: [Self; 7] =
        [Self::Connect, Self::Denied, Self::Closed, Self::Deadline, Self::Busy, Self::Failed, Self::Store];

    fn as_str(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Denied => "denied",
            Self::Closed => "closed",
            Self::Deadline => "deadline",
            Self::Busy => "busy",
            Self::Failed => "failed",
            Self::Store => "store",
        }
    }
}

/// Why a message will never be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BridgeRefusal {
    /// The other side says so, for a reason of its own.
    Other,
    /// The receiving side takes no such topic.
    Topic,
    /// Lacks what its topic is made of.
    Field,
    /// The message has a header whose name is no text.
    Header,
    /// Longer than the receiving side takes.
    Size,
    /// A policy of the other side forbids it.
    Policy,
    /// The other side cannot use a record like it, such as one without a key in a compacted topic.
    Record,
    /// The other side takes no record of its time.
    Timestamp,
    /// The other side ends each connection on which it is sent, and no other.
    Closed,
    /// The other side answers everything but this message in time.
    Deadline,
    /// The other side fails on it again and again, and on nothing else.
    Failed,
}

impl BridgeRefusal {
    const ALL: [Self; 11] = [
        Self::Other,
        Self::Topic,
        Self::Field,
        Self::Header,
        Self::Size,
        Self::Policy,
        Self::Record,
        Self::Timestamp,
        Self::Closed,
        Self::Deadline,
        Self::Failed,
    ];

    /// The reason as metrics and the API name it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Other => "other_side",
            Self::Topic => "topic",
            Self::Field => "field",
            Self::Header => "header",
            Self::Size => "size",
            Self::Policy => "policy",
            Self::Record => "record",
            Self::Timestamp => "timestamp",
            Self::Closed => "closed",
            Self::Deadline => "deadline",
            Self::Failed => "failed",
        }
    }
}

/// One failure.
#[derive(Debug)]
pub(super) struct BridgeFailure {
    pub(super) reason: Reason,
    /// For the log; nothing secret.
    pub(super) detail: String,
    /// The other side asked not to be asked sooner.
    pub(super) after: Option<Duration>,
    /// The other side gave a reason that is about a message, and not about the bridge.
    pub(super) names_message: bool,
}

impl BridgeFailure {
    pub(super) fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into(), after: None, names_message: false }
    }

    /// The other side did not answer in time.
    pub(super) fn late() -> Self {
        Self::new(Reason::Deadline, "no answer in time")
    }

    /// Says that only this message was under way.
    pub(super) fn alone(mut self, topic: &str) -> Self {
        self.detail = format!("{}; with nothing under way but a message on {topic}", self.detail);
        self
    }

    /// Returns whether what was being sent may have caused it: the other side was reached, and neither lacks rights to give nor
    /// time.
    pub(super) fn may_be_caused_by_a_message(&self) -> bool {
        self.names_message || matches!(self.reason, Reason::Closed | Reason::Deadline | Reason::Failed)
    }
}

/// Failures in a row after which the other side counts as away.
const AWAY: u32 = 3;

/// Most bytes of a failure's words that are kept.
const DETAIL: usize = 500;

/// Values of `state`.
const STARTING: u8 = 0;
const UP: u8 = 1;
const DOWN: u8 = 2;

/// See the module. Written by the bridge's task, read for metrics.
pub(super) struct BridgeStatus {
    name: String,
    kind: &'static str,
    direction: &'static str,
    carried: AtomicU64,
    bytes: AtomicU64,
    refused: [AtomicU64; BridgeRefusal::ALL.len()],
    expired: AtomicU64,
    looped: AtomicU64,
    failures: [AtomicU64; Reason::ALL.len()],
    in_flight: AtomicUsize,
    state: AtomicU8,
    /// In a row.
    failed: AtomicU64,
    last: Mutex<Last>,
}

/// The last failure and the last refusal, to be shown.
#[derive(Default)]
struct Last {
    failure: Option<LastFailure>,
    refusal: Option<LastRefusal>,
    /// While the other side is left alone.
    retry: Option<Timestamp>,
}

/// A failure as it is shown.
#[derive(Clone)]
pub struct LastFailure {
    /// On the wall clock.
    pub at: Timestamp,
    pub reason: &'static str,
    pub detail: String,
}

/// A message that was refused, as it is shown.
#[derive(Clone)]
pub struct LastRefusal {
    /// On the wall clock.
    pub at: Timestamp,
    pub reason: &'static str,
    pub topic: String,
    pub detail: String,
}

/// State of the other side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reachability {
    /// The other side was not reached yet.
    Starting,
    /// The other side answers.
    Up,
    /// The other side failed several times in a row: it is tried with pauses.
    Down,
}

/// State of a bridge at one moment.
pub struct BridgeReport {
    pub name: String,
    pub kind: &'static str,
    pub state: Reachability,
    pub carried: u64,
    pub bytes: u64,
    pub in_flight: u64,
    /// Messages refused since the start, by reason; those that happened.
    pub refusals: BTreeMap<&'static str, u64>,
    pub expired: u64,
    pub looped: u64,
    /// Since the start, by reason; those that happened.
    pub failures: BTreeMap<&'static str, u64>,
    /// In a row.
    pub failed: u64,
    pub last: Option<LastFailure>,
    pub last_refusal: Option<LastRefusal>,
    /// On the wall clock; `None` while nothing is waited for.
    pub retry: Option<Timestamp>,
}

impl BridgeStatus {
    pub(super) fn new(name: &str, kind: &'static str, direction: &'static str) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            direction,
            carried: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            refused: Default::default(),
            expired: AtomicU64::new(0),
            looped: AtomicU64::new(0),
            failures: Default::default(),
            in_flight: AtomicUsize::new(0),
            state: AtomicU8::new(STARTING),
            failed: AtomicU64::new(0),
            last: Mutex::default(),
        }
    }

    /// Returns the current state of the bridge. Its figures are read one after the other, not at one point in time.
    pub(super) fn seen(&self) -> BridgeReport {
        let failures = Reason::ALL.iter().zip(&self.failures);
        let failures = failures.map(|(reason, count)| (reason.as_str(), count.load(Relaxed)));
        let refusals = BridgeRefusal::ALL.iter().zip(&self.refused);
        let refusals = refusals.map(|(reason, count)| (reason.as_str(), count.load(Relaxed)));
        let (last, last_refusal, retry) = {
            let last = self.last.lock();
            (last.failure.clone(), last.refusal.clone(), last.retry)
        };
        BridgeReport {
            name: self.name.clone(),
            kind: self.kind,
            state: match self.state.load(Relaxed) {
                UP => Reachability::Up,
                DOWN => Reachability::Down,
                _ => Reachability::Starting,
            },
            carried: self.carried.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            in_flight: self.in_flight.load(Relaxed) as u64,
            refusals: refusals.filter(|(_, count)| *count > 0).collect(),
            expired: self.expired.load(Relaxed),
            looped: self.looped.load(Relaxed),
            failures: failures.filter(|(_, count)| *count > 0).collect(),
            failed: self.failed.load(Relaxed),
            last,
            last_refusal,
            retry,
        }
    }

    /// The other side is left alone for so long.
    pub(super) fn waits(&self, pause: Duration) {
        let millis = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
        self.last.lock().retry = Some(clock::to_wall(clock::now()).plus_millis(millis));
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Messages reached the other side, or came from it.
    pub(super) fn carried(&self, messages: usize, bytes: usize) {
        self.carried.fetch_add(messages as u64, Relaxed);
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// Messages carried since the start.
    pub(super) fn total(&self) -> u64 {
        self.carried.load(Relaxed)
    }

    /// Counts a message that will never be taken, and keeps its topic and the reason to be shown.
    pub(super) fn refused(&self, refusal: BridgeRefusal, topic: &str, detail: &str) {
        if let Some(at) = BridgeRefusal::ALL.iter().position(|&known| known == refusal) {
            self.refused[at].fetch_add(1, Relaxed);
        }
        let cut = |text: &str| text[..text.floor_char_boundary(DETAIL)].to_owned();
        self.last.lock().refusal = Some(LastRefusal {
            at: clock::to_wall(clock::now()),
            reason: refusal.as_str(),
            topic: cut(topic),
            detail: cut(detail),
        });
    }

    /// Messages expired before their turn.
    pub(super) fn expired(&self, messages: usize) {
        self.expired.fetch_add(messages as u64, Relaxed);
    }

    /// A message has been here before, and is not passed on.
    pub(super) fn looped(&self) {
        self.looped.fetch_add(1, Relaxed);
    }

    /// So many are with the other side and not acknowledged.
    pub(super) fn set_in_flight(&self, messages: usize) {
        self.in_flight.store(messages, Relaxed);
    }

    /// The other side answers.
    pub(super) fn up(&self) {
        self.failed.store(0, Relaxed);
        let before = self.state.swap(UP, Relaxed);
        self.last.lock().retry = None;
        if before != UP {
            let (bridge, kind) = (self.name.as_str(), self.kind);
            let again = before == DOWN;
            info!(bridge, kind, direction = self.direction, again, "bridge is up");
        }
    }

    /// Counts a failure. Returns how many there have been in a row.
    pub(super) fn failed(&self, failure: &BridgeFailure, progressed: bool) -> u32 {
        if let Some(at) = Reason::ALL.iter().position(|&reason| reason == failure.reason) {
            self.failures[at].fetch_add(1, Relaxed);
        }
        if progressed {
            self.failed.store(0, Relaxed);
        }
        let count = u32::try_from(self.failed.fetch_add(1, Relaxed) + 1).unwrap_or(u32::MAX);
        let (bridge, kind, direction) = (self.name.as_str(), self.kind, self.direction);
        let (reason, detail) = (failure.reason.as_str(), failure.detail.as_str());
        self.last.lock().failure = Some(LastFailure {
            at: clock::to_wall(clock::now()),
            reason,
            detail: detail[..detail.floor_char_boundary(DETAIL)].to_owned(),
        });
        if count >= AWAY && self.state.swap(DOWN, Relaxed) != DOWN {
            warn!(bridge, kind, direction, reason, detail, "bridge is down, it is tried again with pauses");
        } else {
            debug!(bridge, kind, direction, reason, detail, count, "bridge failed");
        }
        count
    }

    /// Writes the bridge's rows for `/metrics`; `lag` counts the messages that wait on the disk, and their bytes.
    pub(super) fn rows(&self, lag: (u64, u64), rows: &mut Vec<MetricRow>) {
        let of = [self.name.as_str(), self.kind, self.direction];
        let is_up = u64::from(self.state.load(Relaxed) == UP);
        for (figure, value) in [
            (&figures::BRIDGE_UP, is_up),
            (&figures::BRIDGE_IN_FLIGHT, self.in_flight.load(Relaxed) as u64),
            (&figures::BRIDGE_LAG, lag.0),
            (&figures::BRIDGE_LAG_BYTES, lag.1),
            (&figures::BRIDGE_MESSAGES, self.carried.load(Relaxed)),
            (&figures::BRIDGE_BYTES, self.bytes.load(Relaxed)),
            (&figures::BRIDGE_EXPIRED, self.expired.load(Relaxed)),
            (&figures::BRIDGE_LOOPED, self.looped.load(Relaxed)),
        ] {
            rows.push(figure.of(of, value as f64));
        }
        for (reason, counter) in BridgeRefusal::ALL.iter().zip(&self.refused) {
            let [name, kind, direction] = of;
            let of = [name, kind, direction, reason.as_str()];
            rows.push(figures::BRIDGE_REFUSED.of(of, counter.load(Relaxed) as f64));
        }
        for (reason, counter) in Reason::ALL.iter().zip(&self.failures) {
            let [name, kind, direction] = of;
            let of = [name, kind, direction, reason.as_str()];
            rows.push(figures::BRIDGE_FAILURES.of(of, counter.load(Relaxed) as f64));
        }
    }
}
