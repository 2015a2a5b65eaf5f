//! Kinds of requests, and the slots that each has of its own.
//!
//! A client without credentials has a slot until another stranger needs it: then the oldest leaves, of the address that
//! has most of them. A client that has shown credentials keeps the slot, as one of the share of its caller.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use edge::door::SourceAddress;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::limits::HttpLimits;
use auth::backends::callers::{CallerKey, CallerPlaces, NoPlace};

/// Kind of a request, by the load it may put on others. The path tells the kind, before anything of the request is worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// Of supervisors, who are never kept waiting by others.
    Health,
    /// A page that operators read, such as metrics.
    Page,
    /// A call of the API, which is answered and over.
    Api,
    /// An answer that stays open.
    Stream,
    /// The web page.
    Screen,
    /// A live part of the web page, which stays open.
    Live,
}

impl RequestKind {
    /// Returns the kind of the request for `path`.
    pub(super) fn of(path: &str) -> Self {
        match path {
            "/healthz" | "/readyz" => Self::Health,
            "/openapi.json" => Self::Api,
            _ if path.starts_with("/v1/stream/") => Self::Stream,
            _ if path.starts_with("/v1/") => Self::Api,
            "/" | "/page" => Self::Screen,
            _ if path.starts_with("/page/live/") => Self::Live,
            _ if path.starts_with("/page/") => Self::Screen,
            _ => Self::Page,
        }
    }
}

/// Slots of each kind. A connection has one for its last request, until it asks again or ends.
pub(super) struct RequestSlots {
    health: Arc<SlotsOfKind>,
    pages: Arc<SlotsOfKind>,
    api: Arc<SlotsOfKind>,
    streams: Arc<SlotsOfKind>,
    screens: Arc<SlotsOfKind>,
    live: Arc<SlotsOfKind>,
}

impl RequestSlots {
    pub(super) fn new(limits: &HttpLimits) -> Self {
        let slots = |most: usize, per_caller: usize| {
            let places = CallerPlaces { most: most.max(1), per_caller };
            Arc::new(SlotsOfKind { places, taken: Mutex::default() })
        };
        let few = || slots(limits.max_connections, usize::MAX);
        Self {
            health: few(),
            pages: few(),
            api: slots(limits.max_requests, limits.max_requests_per_caller),
            streams: slots(limits.max_streams, limits.max_streams_per_caller),
            screens: few(),
            live: slots(limits.max_connections.div_ceil(2), usize::MAX),
        }
    }

    /// Returns the number of places of all kinds.
    pub(super) fn places(&self) -> usize {
        let kinds = [&self.health, &self.pages, &self.api, &self.streams, &self.screens, &self.live];
        kinds.iter().fold(0, |all, kind| all.saturating_add(kind.places.most))
    }

    /// Takes a slot of `kind` for a stranger at `address`; `leave` is notified once the slot is needed for another.
    /// `None` if all slots are kept by their callers.
    pub(super) fn take(
        &self,
        kind: RequestKind,
        address: SourceAddress,
        leave: &Arc<Notify>,
    ) -> Option<TakenSlot> {
        let of = match kind {
            RequestKind::Health => &self.health,
            RequestKind::Page => &self.pages,
            RequestKind::Api => &self.api,
            RequestKind::Stream => &self.streams,
            RequestKind::Screen => &self.screens,
            RequestKind::Live => &self.live,
        };
        let id = of.taken.lock().enter(of.places.most, address, leave)?;
        Some(TakenSlot { of: Arc::clone(of), holder: SlotHolder::Stranger(id) })
    }
}

struct SlotsOfKind {
    places: CallerPlaces,
    taken: Mutex<TakenSlots>,
}

#[derive(Default)]
struct TakenSlots {
    next: u64,
    /// In the order in which they came.
    strangers: BTreeMap<u64, Stranger>,
    /// RequestSlots of callers that have shown credentials; callers without a slot are not here.
    callers: HashMap<CallerKey, usize>,
    /// Number of kept slots.
    kept: usize,
}

struct Stranger {
    address: SourceAddress,
    leave: Arc<Notify>,
}

impl TakenSlots {
    fn enter(&mut self, most: usize, address: SourceAddress, leave: &Arc<Notify>) -> Option<u64> {
        if self.strangers.len() + self.kept >= most {
            let oldest = self.oldest_of_many()?;
            if let Some(gone) = self.strangers.remove(&oldest) {
                gone.leave.notify_one();
            }
        }
        let id = self.next;
        self.next += 1;
        self.strangers.insert(id, Stranger { address, leave: Arc::clone(leave) });
        Some(id)
    }

    /// The oldest stranger of the address that has most; of several such addresses the one whose stranger is oldest.
    fn oldest_of_many(&self) -> Option<u64> {
        let mut by_address: HashMap<SourceAddress, (usize, u64)> = HashMap::new();
        for (id, stranger) in &self.strangers {
            by_address.entry(stranger.address).or_insert((0, *id)).0 += 1;
        }
        let most = by_address.values().max_by_key(|(count, oldest)| (*count, std::cmp::Reverse(*oldest)));
        most.map(|(_, oldest)| *oldest)
    }
}

/// A slot, given back on drop.
pub(super) struct TakenSlot {
    of: Arc<SlotsOfKind>,
    holder: SlotHolder,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotHolder {
    Stranger(u64),
    Known(CallerKey),
}

impl TakenSlot {
    /// Tells whether its holder has shown who it is.
    pub(super) fn is_kept(&self) -> bool {
        matches!(self.holder, SlotHolder::Known(_))
    }

    /// Its holder has shown that it is `caller`, and keeps the slot from now on.
    ///
    /// # Errors
    /// The caller has its share of slots, or the slot is another's already.
    pub(super) fn keep(&mut self, caller: CallerKey) -> Result<(), NoPlace> {
        let SlotHolder::Stranger(id) = self.holder else { return Ok(()) };
        let mut taken = self.of.taken.lock();
        if !taken.strangers.contains_key(&id) {
            return Err(NoPlace::All);
        }
        let held = taken.callers.get(&caller).copied().unwrap_or_default();
        self.of.places.check(taken.kept, held)?;
        taken.strangers.remove(&id);
        taken.kept += 1;
        taken.callers.insert(caller, held + 1);
        self.holder = SlotHolder::Known(caller);
        Ok(())
    }
}

impl Drop for TakenSlot {
    fn drop(&mut self) {
        let mut taken = self.of.taken.lock();
        match self.holder {
            SlotHolder::Stranger(id) => drop(taken.strangers.remove(&id)),
            SlotHolder::Known(caller) => {
                taken.kept -= 1;
                if let Some(held) = taken.callers.get_mut(&caller) {
                    *held -= 1;
                    if *held == 0 {
                        taken.callers.remove(&caller);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future as _,
        net::{Ipv4Addr, SocketAddr},
        pin::pin,
        task::{Context, Waker},
    };

    use super::*;

    fn address(host: u32) -> SourceAddress {
        SocketAddr::new(Ipv4Addr::from_bits(host).into(), 1).into()
    }

    fn slots() -> RequestSlots {
        let limits = HttpLimits { max_connections: 4, max_requests_per_caller: 10, ..HttpLimits::default() };
        RequestSlots::new(&limits)
    }

    fn is_told(leave: &Arc<Notify>) -> bool {
        pin!(leave.notified()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    /// Rules out that strangers who send nothing more keep the slots of a kind, and a login is answered 503.
    #[test]
    fn the_oldest_stranger_of_who_has_most_leaves_for_a_newcomer() {
        let slots = slots();
        let leave: Vec<Arc<Notify>> = (0..6).map(|_| Arc::default()).collect();
        let take = |host, n: usize| slots.take(RequestKind::Screen, address(host), &leave[n]).unwrap();
        let _held = [take(1, 0), take(2, 1), take(2, 2), take(3, 3)];
        let _newcomer = take(4, 4);
        assert!(is_told(&leave[1]), "the oldest of the one who has two");
        let _another = take(5, 5);
        assert!(is_told(&leave[0]), "all have one: the oldest");
        assert!(!leave[2..].iter().any(is_told));
    }

    #[test]
    fn who_has_shown_credentials_keeps_the_slot() {
        let slots = slots();
        let leave: Arc<Notify> = Arc::default();
        let take = || slots.take(RequestKind::Screen, address(1), &leave);
        let mut kept: Vec<TakenSlot> = (0..4).map(|_| take().unwrap()).collect();
        for (n, slot) in kept.iter_mut().enumerate() {
            slot.keep(CallerKey::named(&n.to_string())).unwrap();
            assert!(slot.is_kept());
        }
        assert!(take().is_none() && !is_told(&leave));
        kept.pop();
        let mut lost = take().unwrap();
        let _next = take().unwrap();
        assert!(is_told(&leave));
        assert_eq!(lost.keep(CallerKey::named("late")), Err(NoPlace::All), "it is another's");
        drop((kept, lost));
        let taken = slots.screens.taken.lock();
        assert!(taken.kept == 0 && taken.callers.is_empty() && taken.strangers.len() == 1);
    }

    /// Rules out that one token takes all slots of requests, or of streams.
    #[test]
    fn a_caller_has_a_share_of_the_slots() {
        let slots = slots();
        let leave: Arc<Notify> = Arc::default();
        let keep = |caller: &str| {
            let mut slot = slots.take(RequestKind::Api, address(1), &leave)?;
            slot.keep(CallerKey::named(caller)).ok().map(|()| slot)
        };
        let held: Vec<TakenSlot> = std::iter::from_fn(|| keep("one")).collect();
        assert_eq!(held.len(), 10);
        assert!(keep("two").is_some());
    }
}
