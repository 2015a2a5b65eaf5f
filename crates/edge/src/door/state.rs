//! The places of a door without clock, lock or socket: who has one, who must give it up, who finds none.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use super::{DoorBounds, DoorRefusal, NotNow, SourceAddress, rates::Rates};

/// `K` is what ends a pending connection.
#[derive(Debug)]
pub(super) struct Occupancy<K> {
    bounds: DoorBounds,
    connections: usize,
    handshakes: usize,
    held: HashMap<SourceAddress, AddressUse>,
    pending_ones: BTreeMap<u64, PendingRecord<K>>,
    /// Pending connections in their handshake who owe us bytes.
    silent: PendingOrder,
    /// Pending connections beyond it who ask for nothing.
    idle: PendingOrder,
    next: u64,
    rates: Rates,
}

/// Places that one address holds.
#[derive(Debug, Default)]
struct AddressUse {
    connections: usize,
    handshakes: usize,
}

#[derive(Debug)]
struct PendingRecord<K> {
    address: Option<SourceAddress>,
    /// Time at which the handshake began.
    since: Duration,
    /// Gone once the pending connection was told to leave.
    end_signal: Option<K>,
    in_handshake: bool,
    /// True once the pending connection has said everything: the next move is ours.
    heard: bool,
}

/// Pending connections by age, also those of one address.
#[derive(Debug, Default)]
struct PendingOrder {
    all: BTreeSet<u64>,
    by_address: BTreeSet<(Option<SourceAddress>, u64)>,
}

impl PendingOrder {
    fn insert(&mut self, address: Option<SourceAddress>, id: u64) {
        self.all.insert(id);
        self.by_address.insert((address, id));
    }

    fn remove(&mut self, address: Option<SourceAddress>, id: u64) {
        self.all.remove(&id);
        self.by_address.remove(&(address, id));
    }

    /// The oldest pending connection: of all, or of one address.
    fn oldest(&self, of: Option<SourceAddress>) -> Option<u64> {
        match of {
            None => self.all.first().copied(),
            Some(_) => self.by_address.range((of, 0)..=(of, u64::MAX)).next().map(|(_, id)| *id),
        }
    }
}

impl<K> Occupancy<K> {
    pub(super) fn new(bounds: DoorBounds) -> Self {
        Self {
            bounds,
            connections: 0,
            handshakes: 0,
            held: HashMap::new(),
            pending_ones: BTreeMap::new(),
            silent: PendingOrder::default(),
            idle: PendingOrder::default(),
            next: 0,
            rates: Rates::new(bounds.rate_per_address),
        }
    }

    /// Returns whether `address` does not come too often.
    pub(super) fn arrive(&mut self, address: Option<SourceAddress>, now: Duration) -> bool {
        address.is_none_or(|address| self.rates.take(address, now))
    }

    /// Returns whether half of the places for handshakes are taken.
    pub(super) fn is_half_full(&self) -> bool {
        self.handshakes >= self.bounds.handshakes.div_ceil(2)
    }

    /// Takes the places of a connection and of its handshake, and says who leaves for them. Gives `end_signal` back if there
    /// are none.
    pub(super) fn enter(
        &mut self,
        address: Option<SourceAddress>,
        now: Duration,
        end_signal: K,
    ) -> Result<(u64, Option<K>), (K, NotNow)> {
        let own = address.and_then(|address| self.held.get(&address));
        let (own_connections, own_handshakes) = own.map_or((0, 0), |own| (own.connections, own.handshakes));
        let own_connections = own_connections >= self.bounds.connections_per_address;
        let own_handshakes = own_handshakes >= self.bounds.handshakes_per_address;
        let connections = self.connections >= self.bounds.connections;
        let handshakes = self.handshakes >= self.bounds.handshakes;
        let mut leaves = None;
        if own_connections || own_handshakes {
            leaves = self.close_oldest(address, own_connections, now);
        } else if connections || handshakes {
            leaves = self.close_oldest(None, connections, now);
        }
        if leaves.is_none() && (own_connections || own_handshakes || connections || handshakes) {
            let mut not_now = NotNow::Wait;
            if own_connections && !self.may_leave(address) {
                not_now = NotNow::Refused(DoorRefusal::AddressConnections);
            } else if connections && !self.may_leave(None) {
                not_now = NotNow::Refused(DoorRefusal::Connections);
            }
            return Err((end_signal, not_now));
        }
        self.connections += 1;
        if let Some(address) = address {
            self.held.entry(address).or_default().connections += 1;
        }
        Ok((self.insert(address, now, end_signal), leaves))
    }

    /// Returns whether a pending connection may have to leave for a connection, now or soon.
    pub(super) fn may_leave(&self, of: Option<SourceAddress>) -> bool {
        self.silent.oldest(of).or_else(|| self.idle.oldest(of)).is_some()
    }

    /// Gives a connection's place back.
    pub(super) fn leave(&mut self, address: Option<SourceAddress>) {
        self.connections -= 1;
        self.change(address, |held| held.connections -= 1);
    }

    fn insert(&mut self, address: Option<SourceAddress>, now: Duration, end_signal: K) -> u64 {
        let id = self.next;
        self.next += 1;
        self.handshakes += 1;
        if let Some(address) = address {
            self.held.entry(address).or_default().handshakes += 1;
        }
        self.silent.insert(address, id);
        let end_signal = Some(end_signal);
        self.pending_ones
            .insert(id, PendingRecord { address, since: now, end_signal, in_handshake: true, heard: false });
        id
    }

    /// The pending connection's address is known only now, from its proxy; connection and handshake count for that address from
    /// here on. Returns who leaves for it.
    pub(super) fn named(
        &mut self,
        id: u64,
        address: SourceAddress,
        now: Duration,
    ) -> Result<Option<K>, DoorRefusal> {
        if !self.rates.take(address, now) {
            return Err(DoorRefusal::Rate);
        }
        let own = self.held.get(&address).map_or((0, 0), |own| (own.connections, own.handshakes));
        let mut leaves = None;
        if own.0 >= self.bounds.connections_per_address {
            let left = self.close_oldest(Some(address), true, now);
            leaves = Some(left.ok_or(DoorRefusal::AddressConnections)?);
        } else if own.1 >= self.bounds.handshakes_per_address {
            let left = self.close_oldest(Some(address), false, now);
            leaves = Some(left.ok_or(DoorRefusal::AddressHandshakes)?);
        }
        let held = self.held.entry(address).or_default();
        held.connections += 1;
        if let Some(pending) = self.pending_ones.get_mut(&id) {
            pending.address = Some(address);
            held.handshakes += usize::from(pending.in_handshake);
            for order in [&mut self.silent, &mut self.idle] {
                if order.all.contains(&id) {
                    order.remove(None, id);
                    order.insert(Some(address), id);
                }
            }
        }
        Ok(leaves)
    }

    /// The pending connection has said what it came for: it is our turn, and it is not closed for others.
    pub(super) fn heard(&mut self, id: u64) {
        self.withdraw(id);
        if let Some(pending) = self.pending_ones.get_mut(&id) {
            pending.heard = true;
        }
    }

    /// Gives the turn back to the pending connection, which is to go: it is closed for others as a silent one.
    pub(super) fn answered(&mut self, id: u64) {
        if let Some(pending) = self.pending_ones.get_mut(&id)
            && pending.end_signal.is_some()
        {
            pending.heard = false;
            self.silent.insert(pending.address, id);
        }
    }

    fn withdraw(&mut self, id: u64) {
        if let Some(pending) = self.pending_ones.get(&id) {
            self.silent.remove(pending.address, id);
            self.idle.remove(pending.address, id);
        }
    }

    /// The pending connection's handshake is over; an idle one has asked for nothing yet.
    pub(super) fn settled(&mut self, id: u64, idle: bool) {
        self.withdraw(id);
        let Some(pending) = self.pending_ones.get_mut(&id) else { return };
        let address = pending.address;
        if std::mem::replace(&mut pending.in_handshake, false) {
            self.handshakes -= 1;
            self.change(address, |held| held.handshakes -= 1);
        }
        let told_to_leave = self.pending_ones.get(&id).is_none_or(|pending| pending.end_signal.is_none());
        if idle && !told_to_leave {
            self.idle.insert(address, id);
        }
    }

    /// Forgets a connection that is gone, or no longer pending.
    pub(super) fn exit(&mut self, id: u64) {
        self.settled(id, false);
        self.pending_ones.remove(&id);
    }

    /// The pending connection was told to leave although what it owed had arrived: it stays, as the youngest.
    pub(super) fn revive(&mut self, id: u64, end_signal: K, now: Duration) -> u64 {
        if let Some(pending) = self.pending_ones.get_mut(&id)
            && pending.heard
        {
            pending.end_signal = Some(end_signal);
            return id;
        }
        let address = self.pending_ones.get(&id).and_then(|pending| pending.address);
        self.exit(id);
        self.insert(address, now, end_signal)
    }

    /// Returns the pending connection that leaves now, however briefly it has been silent: the system has no more sockets.
    pub(super) fn shed(&mut self) -> Option<K> {
        self.close_oldest(None, true, Duration::MAX)
    }

    /// Since when the oldest silent pending connection has been one.
    pub(super) fn oldest_since(&self) -> Option<Duration> {
        self.pending_ones.get(&self.silent.oldest(None)?).map(|pending| pending.since)
    }

    /// Returns the pending connection that leaves now for a connection of another door.
    pub(super) fn make_room(&mut self, now: Duration) -> Option<K> {
        self.close_oldest(None, true, now)
    }

    /// Everybody.
    pub(super) fn close(&mut self) -> Vec<K> {
        self.silent = PendingOrder::default();
        self.idle = PendingOrder::default();
        self.pending_ones.values_mut().filter_map(|pending| pending.end_signal.take()).collect()
    }

    /// Tells the oldest pending connection that may be closed to leave. It counts until it has left; until then there is one too
    /// many.
    fn close_oldest(&mut self, of: Option<SourceAddress>, also_idle: bool, now: Duration) -> Option<K> {
        let id = self.silent.oldest(of).filter(|id| self.is_patience_over(*id, now));
        let idle = || self.idle.oldest(of).filter(|id| also_idle && self.is_patience_over(*id, now));
        let id = id.or_else(idle)?;
        self.withdraw(id);
        self.pending_ones.get_mut(&id)?.end_signal.take()
    }

    fn is_patience_over(&self, id: u64, now: Duration) -> bool {
        self.pending_ones.get(&id).is_some_and(|pending| pending.since + self.bounds.patience <= now)
    }

    fn change(&mut self, address: Option<SourceAddress>, change: impl FnOnce(&mut AddressUse)) {
        let Some(address) = address else { return };
        let Some(held) = self.held.get_mut(&address) else { return };
        change(held);
        if held.connections == 0 && held.handshakes == 0 {
            self.held.remove(&address);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);

    fn address(number: u32) -> Option<SourceAddress> {
        Some(SocketAddr::new(Ipv4Addr::from_bits(number).into(), 1).into())
    }

    fn bounds() -> DoorBounds {
        DoorBounds {
            connections: 4,
            connections_per_address: 3,
            handshakes: 3,
            handshakes_per_address: 2,
            rate_per_address: 0,
            patience: PATIENCE,
        }
    }

    fn come(
        state: &mut Occupancy<&'static str>,
        address: Option<SourceAddress>,
        now: u64,
        name: &'static str,
    ) -> (u64, Option<&'static str>) {
        state.enter(address, Duration::from_secs(now), name).unwrap()
    }

    fn go(state: &mut Occupancy<&'static str>, address: Option<SourceAddress>, id: u64) {
        state.exit(id);
        state.leave(address);
    }

    #[test]
    fn one_who_was_refused_stays_no_longer_than_the_silent() {
        let mut state = Occupancy::new(bounds());
        let (refused, _) = come(&mut state, address(1), 0, "refused");
        let (decided, _) = come(&mut state, address(2), 0, "decided");
        come(&mut state, address(3), 0, "silent");
        state.heard(refused);
        state.heard(decided);
        state.answered(refused);
        let early = state.enter(address(4), Duration::from_millis(999), "fourth");
        assert_eq!(early, Err(("fourth", NotNow::Wait)));
        let entered = state.enter(address(4), PATIENCE, "fourth").unwrap();
        assert_eq!(entered.1, Some("refused"));
        go(&mut state, address(1), refused);
        let entered = state.enter(address(5), 2 * PATIENCE, "fifth").unwrap();
        assert_eq!(entered.1, Some("silent"), "our turn is not its silence");
    }

    #[test]
    fn the_oldest_silent_handshake_leaves_once_patience_is_over() {
        let mut state = Occupancy::new(bounds());
        let (first, _) = come(&mut state, address(1), 0, "first");
        let (second, _) = come(&mut state, address(2), 0, "second");
        come(&mut state, address(3), 0, "third");
        let early = state.enter(address(4), Duration::from_millis(999), "fourth");
        assert_eq!(early, Err(("fourth", NotNow::Wait)));
        // The first has said all: it is not closed for others.
        state.heard(first);
        let entered = state.enter(address(4), PATIENCE, "fourth").unwrap();
        assert_eq!(entered.1, Some("second"));
        go(&mut state, address(2), second);
        assert_eq!((state.handshakes, state.connections), (3, 3));
    }

    #[test]
    fn an_address_at_its_limit_loses_its_own_and_nobody_elses() {
        let mut state = Occupancy::new(bounds());
        come(&mut state, address(2), 0, "other");
        let (own, _) = come(&mut state, address(1), 0, "own");
        come(&mut state, address(1), 0, "own too");
        let late = Duration::from_secs(9);
        assert_eq!(state.enter(address(1), late, "own three").unwrap().1, Some("own"));
        go(&mut state, address(1), own);
        assert_eq!(state.enter(address(1), late, "own four").unwrap().1, Some("own too"));
        assert_eq!(state.held[&address(1).unwrap()].connections, 3);
    }

    #[test]
    fn connections_that_work_are_never_closed_for_others() {
        let mut state = Occupancy::new(bounds());
        for number in 0..4 {
            let (id, _) = come(&mut state, address(number), 0, "works");
            state.exit(id);
        }
        let late = Duration::from_secs(9);
        let full = state.enter(address(9), late, "new");
        assert_eq!(full, Err(("new", NotNow::Refused(DoorRefusal::Connections))));
        state.leave(address(0));
        assert_eq!(state.enter(address(9), late, "new"), Ok((4, None)));
        // The newcomer that was just let in may yet leave.
        assert_eq!(state.enter(address(8), late, "newer"), Err(("newer", NotNow::Wait)));
        state.exit(4);
        let own = Occupancy::enter(&mut state, address(8), late, "newer");
        assert_eq!(own, Err(("newer", NotNow::Refused(DoorRefusal::Connections))));
    }

    #[test]
    fn idle_connections_leave_for_connections_and_not_for_handshakes() {
        let mut state = Occupancy::new(DoorBounds { handshakes: 2, ..bounds() });
        let (idle, _) = come(&mut state, address(1), 0, "idle");
        state.settled(idle, true);
        let (busy, _) = come(&mut state, address(2), 0, "busy");
        state.settled(busy, true);
        state.heard(busy);
        assert_eq!(state.handshakes, 0);
        come(&mut state, address(3), 8, "silent");
        let (asks, _) = come(&mut state, address(4), 8, "asks");
        state.exit(asks);
        // The handshake is too young: the idle one leaves.
        assert_eq!(come(&mut state, address(5), 8, "new").1, Some("idle"));
        go(&mut state, address(1), idle);
        let next = state.enter(address(6), Duration::from_secs(8), "next");
        assert_eq!(next, Err(("next", NotNow::Wait)));
    }

    #[test]
    fn one_whose_bytes_were_there_stays_as_the_youngest() {
        let mut state = Occupancy::new(DoorBounds { handshakes: 2, ..bounds() });
        let (first, _) = come(&mut state, address(1), 0, "first");
        come(&mut state, address(2), 1, "second");
        let late = Duration::from_secs(5);
        assert_eq!(state.enter(address(3), late, "third").unwrap().1, Some("first"));
        let first = state.revive(first, "first again", late);
        assert_eq!(state.handshakes, 3, "for as long as it takes");
        assert_eq!(state.enter(address(4), late, "fourth").unwrap().1, Some("second"));
        assert_eq!(state.pending_ones[&first].since, late);
    }

    #[test]
    fn a_proxys_clients_count_for_their_own_address_once_it_is_known() {
        let mut state = Occupancy::new(bounds());
        for name in ["a", "b", "c"] {
            let (id, _) = come(&mut state, None, 0, name);
            let named = state.named(id, address(1).unwrap(), Duration::ZERO);
            let full = name == "c";
            assert_eq!(named, if full { Err(DoorRefusal::AddressHandshakes) } else { Ok(None) });
            if full {
                go(&mut state, None, id);
            }
        }
        assert_eq!((state.connections, state.handshakes), (2, 2));
        let (id, leaves) = state.enter(None, PATIENCE, "d").unwrap();
        assert_eq!(leaves, None);
        assert_eq!(state.named(id, address(1).unwrap(), PATIENCE), Ok(Some("a")));
    }

    #[test]
    fn nothing_is_left_of_those_who_left() {
        let mut state = Occupancy::new(bounds());
        for round in 0..100 {
            let (id, _) = come(&mut state, address(round), u64::from(round) * 2, "x");
            if round % 2 == 0 {
                state.settled(id, true);
            }
            go(&mut state, address(round), id);
        }
        assert!(state.held.is_empty() && state.pending_ones.is_empty());
        assert!(state.silent.all.is_empty() && state.idle.by_address.is_empty());
        assert_eq!((state.connections, state.handshakes), (0, 0));
        assert_eq!(state.shed(), None);
    }
}
