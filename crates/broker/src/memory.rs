//! The memory account: every byte that peers make the process hold beyond what each connection has anyway.
//!
//! One total stands against `limits.memory_budget`, and most kinds have a share of it. The last quarter of the total,
//! and of each share, is kept for those who hold little: large holders are refused first. When small holders begin to
//! need that quarter, the largest give some back (`sessions/shed.rs`). Everything else is released when it is sent, when it expires
//! or when its owner ends.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use gateway_core::Budget;

/// Purpose for which bytes are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Messages that wait for a session or a shared group or are not acknowledged, and pages read from disk for them.
    Queued,
    /// Packets of connected clients that have not arrived completely, and what they present to authenticate again.
    Partial,
    /// Output that clients' sockets do not accept, in whichever layer it waits.
    Replies,
    /// Wills.
    Wills,
    /// Subscriptions.
    Filters,
    /// Sessions.
    Sessions,
    /// Topic aliases that clients set.
    Aliases,
    /// Retained messages: all of a message that is in memory, only the topic of one that is on disk.
    Retained,
    /// Requests and answers of gRPC calls under way.
    GrpcMessages,
    /// gRPC connections that have not shown credentials, with their calls.
    GrpcUnauthenticated,
    /// Requests of gRPC streams, and messages that wait for their readers.
    GrpcStreams,
    /// Memory of the Publisher: keys and their answers.
    Publisher,
    /// Input from clients that have not authenticated.
    Unauthenticated,
    /// Set aside for the log of consumer groups, as long as there are groups: what waits for the disk, and the last messages.
    Log,
    /// Commands that wait for their device or its reply, and replies that were not told yet.
    Commands,
    /// Requests for device shadows that wait.
    Shadows,
    /// Requests and answers over HTTP under way, of the API and of the web page, with its logins and live parts.
    Http,
    /// Memory that QUIC may hold for connections: its state, and data on the way in both directions.
    Quic,
    /// Memory of logins: proofs of passwords, and the identities and addresses that have logged in lately.
    Logins,
    /// Changes on their way to the ledger of a cluster, and answers that wait for its lease.
    Ledger,
}

impl MemoryKind {
    /// All kinds, in the order of their declaration.
    pub const ALL: [Self; 20] = [
        Self::Queued,
        Self::Partial,
        Self::Replies,
        Self::Wills,
        Self::Filters,
        Self::Sessions,
        Self::Aliases,
        Self::Retained,
        Self::GrpcMessages,
        Self::GrpcUnauthenticated,
        Self::GrpcStreams,
        Self::Publisher,
        Self::Unauthenticated,
        Self::Log,
        Self::Commands,
        Self::Shadows,
        Self::Http,
        Self::Quic,
        Self::Logins,
        Self::Ledger,
    ];

    /// As metrics name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Partial => "partial_packets",
            Self::Replies => "replies",
            Self::Wills => "wills",
            Self::Filters => "filters",
            Self::Sessions => "sessions",
            Self::Aliases => "topic_aliases",
            Self::Retained => "retained",
            Self::GrpcMessages => "grpc_messages",
            Self::GrpcUnauthenticated => "grpc_unauthenticated",
            Self::GrpcStreams => "grpc_streams",
            Self::Publisher => "publisher",
            Self::Unauthenticated => "unauthenticated",
            Self::Log => "log",
            Self::Commands => "commands",
            Self::Shadows => "shadows",
            Self::Http => "http",
            Self::Quic => "quic",
            Self::Logins => "logins",
            Self::Ledger => "ledger",
        }
    }

    /// The part of the budget that bytes of this kind may take, as a divisor. What lasts as long as a session must
    /// leave room for traffic, and clients that have not authenticated get little.
    fn divisor(self) -> usize {
        match self {
            Self::Queued | Self::Partial | Self::Replies | Self::GrpcStreams => 1,
            // Each gRPC or QUIC connection costs something whatever it sends, so that many could leave nothing for others.
            Self::Sessions | Self::GrpcMessages | Self::Quic => 2,
            Self::Filters | Self::Aliases | Self::Retained => 4,
            Self::Http | Self::Wills | Self::Log | Self::Publisher | Self::Commands | Self::Shadows => 8,
            Self::Ledger => 8,
            Self::GrpcUnauthenticated => 8,
            Self::Unauthenticated | Self::Logins => 16,
        }
    }
}

/// Any holder may have this much as long as there is any room.
pub(crate) const FLOOR: usize = 64 << 10;
/// In the last quarter nobody may hold more than one part in this many of what is left, or the floor.
const PART: usize = 16;

/// Bytes held in the process against their bound.
#[derive(Debug)]
pub struct Account {
    used: AtomicUsize,
    limit: usize,
    /// Bytes by kind. [`MemoryKind::Queued`] is not counted here: it is the rest of the total, so that a message
    /// touches one counter only.
    kinds: [AtomicUsize; MemoryKind::ALL.len()],
}

impl Account {
    /// An empty account.
    pub fn new(limit: usize) -> Self {
        Self { used: AtomicUsize::new(0), limit, kinds: Default::default() }
    }

    /// Charges `bytes` to a holder that has `held` already. Charges nothing and returns false if they do not fit, are
    /// too much for one holder while memory is short, or exceed the share of their kind.
    pub fn charge(&self, kind: MemoryKind, held: usize, bytes: usize) -> bool {
        let before = self.used.fetch_add(bytes, Relaxed);
        if fits(self.limit, before, held, bytes) && self.note(kind, held, bytes) {
            return true;
        }
        self.used.fetch_sub(bytes, Relaxed);
        false
    }

    /// Returns whether retained messages may take `bytes` more. They belong to no holder, so while memory is short only small
    /// ones may.
    pub(crate) fn takes_retained(&self, bytes: usize) -> bool {
        self.takes(MemoryKind::Retained, bytes) && (bytes <= FLOOR || !self.is_short())
    }

    /// Charges `bytes` even beyond all limits: for what is bounded in another way and must not fail.
    pub fn force(&self, kind: MemoryKind, bytes: usize) {
        self.used.fetch_add(bytes, Relaxed);
        if kind != MemoryKind::Queued {
            self.kinds[kind as usize].fetch_add(bytes, Relaxed);
        }
    }

    /// Gives bytes back.
    pub fn release(&self, kind: MemoryKind, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let before = self.used.fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes, "more bytes released than charged");
        if kind != MemoryKind::Queued {
            let before = self.kinds[kind as usize].fetch_sub(bytes, Relaxed);
            debug_assert!(before >= bytes, "more bytes of {kind:?} released than charged");
        }
    }

    /// Returns whether `bytes` would fit now.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.used().saturating_add(bytes) <= self.limit
    }

    /// Returns whether `bytes` of a kind would fit now, for a holder that has nothing yet.
    pub fn takes(&self, kind: MemoryKind, bytes: usize) -> bool {
        self.has_room(bytes) && self.held(kind).saturating_add(bytes) <= self.share(kind)
    }

    /// Returns the part of the limit that bytes of a kind may take.
    pub fn share(&self, kind: MemoryKind) -> usize {
        self.limit / kind.divisor()
    }

    /// Returns whether memory is so short that only small holders get more.
    pub fn is_short(&self) -> bool {
        !self.has_room(self.limit / 4)
    }

    /// Bytes held in all.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// The bound.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes held of a kind.
    pub fn held(&self, kind: MemoryKind) -> usize {
        if kind != MemoryKind::Queued {
            return self.kinds[kind as usize].load(Relaxed);
        }
        let others: usize = self.kinds.iter().map(|held| held.load(Relaxed)).sum();
        self.used().saturating_sub(others)
    }

    /// Counts `bytes` of a kind. Counts nothing and returns false if its share is used up.
    fn note(&self, kind: MemoryKind, held: usize, bytes: usize) -> bool {
        if kind == MemoryKind::Queued {
            return true;
        }
        let all = &self.kinds[kind as usize];
        let before = all.fetch_add(bytes, Relaxed);
        let share = self.share(kind);
        let fits = match kind {
            // Newcomers may use all of it: those who came before make room.
            MemoryKind::Unauthenticated | MemoryKind::GrpcUnauthenticated => {
                before.saturating_add(bytes) <= share
            }
            _ => fits(share, before, held, bytes),
        };
        if !fits {
            all.fetch_sub(bytes, Relaxed);
        }
        fits
    }
}

/// Returns whether a holder that has `held` may have `bytes` more of `limit`, of which `before` are taken.
fn fits(limit: usize, before: usize, held: usize, bytes: usize) -> bool {
    let left = limit.saturating_sub(before);
    let is_short = left < bytes.saturating_add(limit / 4);
    bytes <= left && (!is_short || held.saturating_add(bytes) <= FLOOR.max(left / PART))
}

/// Bytes of one kind that one holder has; given back on drop.
#[derive(Debug)]
pub struct Charge {
    account: Arc<Account>,
    kind: MemoryKind,
    bytes: usize,
}

impl Charge {
    /// Nothing so far.
    pub fn new(account: &Arc<Account>, kind: MemoryKind) -> Self {
        Self { account: Arc::clone(account), kind, bytes: 0 }
    }

    /// Charges `bytes` even beyond all limits, for what was granted before.
    pub fn forced(account: &Arc<Account>, kind: MemoryKind, bytes: usize) -> Self {
        account.force(kind, bytes);
        Self { account: Arc::clone(account), kind, bytes }
    }

    /// Changes the charge to `bytes`. Changes nothing and returns false if it would have to grow and may not.
    pub fn set(&mut self, bytes: usize) -> bool {
        if bytes > self.bytes {
            if !self.account.charge(self.kind, self.bytes, bytes - self.bytes) {
                return false;
            }
        } else {
            self.account.release(self.kind, self.bytes - bytes);
        }
        self.bytes = bytes;
        true
    }

    /// Changes the charge to `bytes` even beyond all limits, for what is bounded in another way.
    pub fn force(&mut self, bytes: usize) {
        self.account.release(self.kind, self.bytes.saturating_sub(bytes));
        self.account.force(self.kind, bytes.saturating_sub(self.bytes));
        self.bytes = bytes;
    }

    /// Bytes charged.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.release(self.kind, self.bytes);
    }
}

/// The account as those see it who hold bytes of one kind and do not know the others.
#[derive(Debug)]
pub struct KindBudget {
    account: Arc<Account>,
    kind: MemoryKind,
}

impl KindBudget {
    /// Bytes of `kind` on `account`.
    pub fn new(account: &Arc<Account>, kind: MemoryKind) -> Self {
        Self { account: Arc::clone(account), kind }
    }
}

impl Budget for KindBudget {
    fn charge(&self, held: usize, bytes: usize) -> bool {
        self.account.charge(self.kind, held, bytes)
    }

    fn force(&self, bytes: usize) {
        self.account.force(self.kind, bytes);
    }

    fn release(&self, bytes: usize) {
        self.account.release(self.kind, bytes);
    }
}

/// Budget of the messages that wait for sessions.
impl Budget for Account {
    fn charge(&self, held: usize, bytes: usize) -> bool {
        Self::charge(self, MemoryKind::Queued, held, bytes)
    }

    fn force(&self, bytes: usize) {
        Self::force(self, MemoryKind::Queued, bytes);
    }

    fn release(&self, bytes: usize) {
        Self::release(self, MemoryKind::Queued, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn the_last_quarter_is_for_those_who_hold_little() {
        const STEP: usize = 16 << 10;
        let account = Account::new(64 * MIB);
        let mut large = 0;
        while account.charge(MemoryKind::Queued, large, STEP) {
            large += STEP;
        }
        assert_eq!(large, 48 * MIB);
        // Many more arrive, and each takes what it can get.
        let mut held = vec![0; 40];
        for mine in &mut held {
            while account.charge(MemoryKind::Queued, *mine, STEP) {
                *mine += STEP;
            }
        }
        assert!(held[0] >= MIB / 2 && held.iter().all(|mine| *mine >= FLOOR), "{held:?}");
        assert_eq!(account.held(MemoryKind::Queued), large + held.iter().sum::<usize>());
        assert!(account.is_short() && account.used() <= 64 * MIB);
    }

    #[test]
    fn a_kind_keeps_to_its_share_and_is_shown_by_itself() {
        let account = Arc::new(Account::new(16 * MIB));
        let mut first = Charge::new(&account, MemoryKind::Unauthenticated);
        assert!(first.set(MIB));
        assert!(!Charge::new(&account, MemoryKind::Unauthenticated).set(1), "a sixteenth is used up");
        assert!(account.charge(MemoryKind::Queued, 0, MIB));
        assert_eq!((account.held(MemoryKind::Unauthenticated), account.held(MemoryKind::Queued)), (MIB, MIB));
        assert!(first.set(10) && !first.set(2 * MIB));
        assert_eq!(first.bytes(), 10);
        drop(first);
        assert_eq!((account.used(), account.held(MemoryKind::Unauthenticated)), (MIB, 0));
    }
}
