//! The client at the other end of a connection: a stranger until credentials were shown, whose place, slot and memory
//! are needed for others sooner or later.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use broker::{Account, Charge, MemoryKind};
use edge::door::PendingConnection;
use hyper::http::Extensions;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    held::HeldBytes,
    slots::{RequestKind, RequestSlots, TakenSlot},
};
use crate::counters::count;
use auth::backends::callers::{CallerKey, NoPlace};

/// Bytes that a connection is taken to hold: its task, a header and a piece of an answer.
pub(super) const PLAIN: usize = 24 << 10;
/// The same with TLS.
pub(super) const ENCRYPTED: usize = 48 << 10;

/// Address of the sender, among a request's extensions.
#[derive(Debug, Clone, Copy)]
pub(super) struct SenderAddress(pub(super) SocketAddr);

/// Strangers who find room also while those of other listeners have used up what there is for all.
const FEW: usize = 64;

/// Holdings of strangers, charged to the part of the memory account for clients that have not authenticated.
pub(super) struct Strangers {
    account: Arc<Account>,
    number: Arc<AtomicUsize>,
    /// Bytes of each.
    cost: usize,
}

impl Strangers {
    /// Makes an account of strangers, each of which holds `cost` bytes of `account`.
    pub(super) fn new(account: Arc<Account>, cost: usize) -> Self {
        Self { account, number: Arc::default(), cost }
    }

    /// Tells whether one has to leave before the next comes in.
    pub(super) fn are_too_many(&self) -> bool {
        self.number.load(Relaxed) >= FEW && !self.account.takes(MemoryKind::Unauthenticated, self.cost)
    }

    /// One more. There are never more than places.
    pub(super) fn enter(&self) -> StrangerCharge {
        self.number.fetch_add(1, Relaxed);
        let charge = Charge::forced(&self.account, MemoryKind::Unauthenticated, self.cost);
        StrangerCharge { _charge: charge, cost: self.cost, number: Arc::clone(&self.number) }
    }
}

/// Charge of one stranger; given back on drop.
pub(super) struct StrangerCharge {
    _charge: Charge,
    cost: usize,
    number: Arc<AtomicUsize>,
}

impl Drop for StrangerCharge {
    fn drop(&mut self) {
        self.number.fetch_sub(1, Relaxed);
    }
}

/// Reason for which a client with credentials gets no further all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoSlot {
    /// The caller has its share of slots.
    Share,
    /// The memory budget is used up.
    Memory,
}

/// The client of a connection; among the extensions of its requests.
pub(super) struct HttpClient {
    pending: PendingConnection,
    peer: SocketAddr,
    cost: usize,
    account: Arc<Account>,
    /// Told when the slot is needed for another.
    leave: Arc<Notify>,
    held: Mutex<ClientHolding>,
}

struct ClientHolding {
    /// Charge as a stranger.
    charge: Option<StrangerCharge>,
    /// Bytes held since credentials were shown.
    known: Option<HeldBytes>,
    slot: Option<(RequestKind, TakenSlot)>,
}

impl HttpClient {
    /// A stranger at `peer`, who holds `charge` of the memory account.
    pub(super) fn new(
        pending: PendingConnection,
        peer: SocketAddr,
        account: Arc<Account>,
        charge: StrangerCharge,
    ) -> Self {
        let cost = charge.cost;
        let held = Mutex::new(ClientHolding { charge: Some(charge), known: None, slot: None });
        Self { pending, peer, cost, account, leave: Arc::default(), held }
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn pending(&self) -> &PendingConnection {
        &self.pending
    }

    /// Takes a slot for the next request, in place of the one for the request before; false if there is none.
    pub(super) fn take_slot(&self, slots: &RequestSlots, kind: RequestKind) -> bool {
        let mut held = self.held.lock();
        held.slot = None;
        held.slot = slots.take(kind, self.peer.into(), &self.leave).map(|slot| (kind, slot));
        held.slot.is_some()
    }

    /// Waits until the slot is needed for another. Cancel safe.
    pub(super) async fn lost(&self) {
        self.leave.notified().await;
    }

    /// Notes that the client of the request with these extensions has shown to be `caller`: it keeps its slot, and its
    /// holdings are no longer a stranger's.
    ///
    /// # Errors
    /// The reason for which the client may not stay all the same.
    pub(super) fn identified(extensions: &Extensions, caller: CallerKey) -> Result<(), NoSlot> {
        extensions.get::<Arc<Self>>().map_or(Ok(()), |client| client.keep(caller))
    }

    /// As [`Self::identified`], for a request that needs no credentials or has had them checked: the address is the
    /// caller.
    pub(super) fn keep_at_address(&self) -> Result<(), NoSlot> {
        self.keep(CallerKey::at(self.peer))
    }

    fn keep(&self, caller: CallerKey) -> Result<(), NoSlot> {
        let mut held = self.held.lock();
        let Some((kind, slot)) = &mut held.slot else { return Ok(()) };
        let kind = *kind;
        slot.keep(caller).map_err(|none| {
            count(|c| match none {
                NoPlace::All => c.http_refused_silent.add(1),
                NoPlace::Caller => c.http_refused_caller.add(1),
            });
            NoSlot::Share
        })?;
        if kind == RequestKind::Page {
            // The connection may yet be closed for a newcomer while places at the door are short, and is one of few.
            held.charge = None;
            return Ok(());
        }
        if held.known.is_none() {
            let mut known = HeldBytes::new(&self.account);
            known.more(self.cost).map_err(|_| NoSlot::Memory)?;
            held.known = Some(known);
        }
        held.charge = None;
        drop(held);
        self.pending.heard();
        Ok(())
    }

    /// Returns whether the connection ends with the answer, so that no client keeps a slot by asking now and then:
    /// supervisors come with a new connection each time, and an unknown client needs none, whatever the answer is: a
    /// login form, a description, an error.
    pub(super) fn leaves(&self) -> bool {
        self.held.lock().slot.as_ref().is_none_or(|(_, slot)| !slot.is_kept())
    }
}
