//! The limit of RFC 9000, section 8.1: an address that has not shown that it gets what is sent to it is sent at most three times
//! the bytes that came from there.
//!
//! quinn has this limit too, but lets a whole datagram pass while a byte is left of it, so that a forged Initial draws
//! more. This one is below quinn, counts whole datagrams, and sees no more than their headers: while a handshake lasts
//! a client's packets have the long one, which names the ids of both sides. An address is proved by an id that the
//! gateway has chosen, since only who got a packet knows it; and for as long as it has a connection.

use std::{
    collections::{HashMap, hash_map::Entry},
    io::{self, IoSliceMut},
    mem,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use gateway_core::{Timestamp, clock};
use parking_lot::Mutex;
use quinn::{
    AsyncUdpSocket, UdpPoller,
    udp::{RecvMeta, Transmit},
};

use crate::counters::count;

/// Bytes that may be sent for each that came.
const FACTOR: usize = 3;
/// Addresses of a generation: with the generation before, and about 200 bytes each, 1.6 MiB for a listener at most.
const MOST_ADDRESSES: usize = 4_096;
/// Milliseconds that a generation lasts at least, unless it is full; longer than any handshake.
const GENERATION: u64 = 60_000;
/// Ids remembered for an address: as many handshakes at once from one socket can prove it.
const MOST_IDS: usize = 4;
/// Longest id of a connection (RFC 9000, section 17.2).
const LONGEST_ID: usize = 20;

/// Knowledge about addresses, shared by a socket and the connections through it.
#[derive(Debug, Default)]
pub(super) struct AmplificationLimit {
    addresses: Mutex<Addresses>,
    /// Addresses that are limited. While there are none, packets of connections are sent without a look at the others.
    unproved: AtomicUsize,
}

/// An address that is not limited, until this is dropped.
pub(super) struct ProvedAddress {
    limit: Arc<AmplificationLimit>,
    peer: SocketAddr,
}

impl AmplificationLimit {
    /// Lifts the limit from the address of a connection.
    pub(super) fn prove(self: &Arc<Self>, peer: SocketAddr) -> ProvedAddress {
        *self.addresses.lock().connected.entry(peer).or_default() += 1;
        ProvedAddress { limit: Arc::clone(self), peer }
    }

    fn received(&self, peer: SocketAddr, datagram: &[u8]) {
        let mut addresses = self.addresses.lock();
        addresses.received(peer, datagram, clock::now());
        self.unproved.store(addresses.unproved, Relaxed);
    }

    /// Returns the bytes of a transmission that may be sent, and counts them as sent.
    fn admit(&self, transmit: &Transmit<'_>) -> usize {
        let (contents, segment) = (transmit.contents, transmit.segment_size);
        let mut addresses = self.addresses.lock();
        let address = if addresses.connected.contains_key(&transmit.destination) {
            None
        } else if has_long_header(contents) {
            Some(addresses.of(transmit.destination, clock::now()))
        } else {
            addresses.known(transmit.destination)
        };
        let Some(address) = address else { return contents.len() };
        let allowed = address.allowed(contents.len(), segment);
        address.sent(&contents[..allowed]);
        self.unproved.store(addresses.unproved, Relaxed);
        allowed
    }

    /// Takes back what the system did not take.
    fn unsent(&self, peer: SocketAddr, bytes: usize) {
        if let Some(address) = self.addresses.lock().known(peer) {
            address.sent = address.sent.saturating_sub(bytes);
        }
    }
}

impl Drop for ProvedAddress {
    fn drop(&mut self) {
        let mut addresses = self.limit.addresses.lock();
        if let Entry::Occupied(mut connections) = addresses.connected.entry(self.peer) {
            *connections.get_mut() -= 1;
            if *connections.get() == 0 {
                connections.remove();
            }
        }
    }
}

/// A socket with that limit.
#[derive(Debug)]
pub(super) struct LimitedSocket {
    inner: Arc<dyn AsyncUdpSocket>,
    limit: Arc<AmplificationLimit>,
}

impl LimitedSocket {
    pub(super) fn new(inner: Arc<dyn AsyncUdpSocket>, limit: Arc<AmplificationLimit>) -> Self {
        Self { inner, limit }
    }
}

impl AsyncUdpSocket for LimitedSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.inner).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        if !has_long_header(transmit.contents) && self.limit.unproved.load(Relaxed) == 0 {
            return self.inner.try_send(transmit);
        }
        let allowed = self.limit.admit(transmit);
        if allowed < transmit.contents.len() {
            count(|c| c.quic_unproved.add(1));
        }
        if allowed == 0 {
            // As if it was lost on the way: it is sent again when more has come.
            return Ok(());
        }
        let contents = &transmit.contents[..allowed];
        let segment_size = transmit.segment_size.filter(|segment| *segment < allowed);
        let sent = self.inner.try_send(&Transmit { contents, segment_size, ..transmit.clone() });
        if sent.is_err() {
            self.limit.unsent(transmit.destination, allowed);
        }
        sent
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let count = ready!(self.inner.poll_recv(cx, bufs, meta))?;
        for (buf, meta) in bufs.iter().zip(meta.iter()).take(count) {
            for datagram in buf[..meta.len].chunks(meta.stride.max(1)).filter(|data| has_long_header(data)) {
                self.limit.received(meta.addr, datagram);
            }
        }
        Poll::Ready(Ok(count))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

/// Returns whether the datagram begins with a packet of a handshake, a Retry or a Version Negotiation. Packets that the
/// gateway sends before it knows the address may have the short header, too.
fn has_long_header(datagram: &[u8]) -> bool {
    datagram.first().is_some_and(|first| first & 0x80 != 0)
}

/// Connection ids of the first packet of a datagram with a long header: the destination's and the source's.
fn ids(datagram: &[u8]) -> Option<(&[u8], &[u8])> {
    // First byte and version.
    let (_, rest) = datagram.split_at_checked(5).filter(|_| has_long_header(datagram))?;
    let (&length, rest) = rest.split_first()?;
    let (to, rest) = rest.split_at_checked(length.into())?;
    let (&length, rest) = rest.split_first()?;
    let (from, _) = rest.split_at_checked(length.into())?;
    (to.len() <= LONGEST_ID && from.len() <= LONGEST_ID).then_some((to, from))
}

/// Bytes that came from an address with long headers, and bytes that went there.
#[derive(Debug, Default)]
struct AddressTraffic {
    received: usize,
    sent: usize,
    /// The last ids that the gateway has chosen for it.
    ids: [Option<Box<[u8]>>; MOST_IDS],
    next_id: usize,
    is_proved: bool,
}

impl AddressTraffic {
    fn received(&mut self, datagram: &[u8]) {
        self.received = self.received.saturating_add(datagram.len());
        let Some((to, _)) = ids(datagram) else { return };
        self.is_proved |= self.ids.iter().flatten().any(|id| **id == *to);
    }

    /// Returns the number of `bytes` that may be sent, in whole segments.
    fn allowed(&self, bytes: usize, segment: Option<usize>) -> usize {
        let left = self.received.saturating_mul(FACTOR).saturating_sub(self.sent);
        if self.is_proved || bytes <= left {
            return bytes;
        }
        segment.filter(|segment| *segment > 0).map_or(0, |segment| left / segment * segment)
    }

    fn sent(&mut self, contents: &[u8]) {
        self.sent = self.sent.saturating_add(contents.len());
        let Some((_, from)) = ids(contents) else { return };
        // An empty one proves nothing.
        if self.is_proved || from.is_empty() || self.ids.iter().flatten().any(|id| **id == *from) {
            return;
        }
        self.ids[self.next_id] = Some(from.into());
        self.next_id = (self.next_id + 1) % MOST_IDS;
    }
}

/// Addresses in two generations: when the younger is full or old it becomes the older, and the older is forgotten. A
/// forgotten address may be sent nothing until more comes from there.
#[derive(Debug, Default)]
struct Addresses {
    young: HashMap<SocketAddr, AddressTraffic>,
    old: HashMap<SocketAddr, AddressTraffic>,
    began: Timestamp,
    /// Number of limited addresses in both generations.
    unproved: usize,
    /// Connections of each address that has one.
    connected: HashMap<SocketAddr, usize>,
}

impl Addresses {
    /// An address from which something has come.
    fn known(&mut self, peer: SocketAddr) -> Option<&mut AddressTraffic> {
        self.young.get_mut(&peer).or_else(|| self.old.get_mut(&peer))
    }

    fn of(&mut self, peer: SocketAddr, now: Timestamp) -> &mut AddressTraffic {
        let is_full = self.young.len() >= MOST_ADDRESSES && !self.young.contains_key(&peer);
        if is_full || now >= self.began.plus_millis(GENERATION) {
            let gone = mem::replace(&mut self.old, mem::take(&mut self.young));
            self.unproved -= gone.values().filter(|address| !address.is_proved).count();
            self.began = now;
        }
        let Self { young, old, unproved, .. } = self;
        young.entry(peer).or_insert_with(|| {
            old.remove(&peer).unwrap_or_else(|| {
                *unproved += 1;
                AddressTraffic::default()
            })
        })
    }

    fn received(&mut self, peer: SocketAddr, datagram: &[u8], now: Timestamp) {
        let address = self.of(peer, now);
        let was_proved = address.is_proved;
        address.received(datagram);
        let is_new = address.is_proved && !was_proved;
        self.unproved -= usize::from(is_new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(1);

    fn peer(number: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], number))
    }

    /// A datagram of an Initial.
    fn initial(to: &[u8], from: &[u8], length: usize) -> Vec<u8> {
        let mut datagram = vec![0xC3, 0, 0, 0, 1];
        for id in [to, from] {
            datagram.push(id.len() as u8);
            datagram.extend_from_slice(id);
        }
        datagram.resize(length, 0);
        datagram
    }

    #[test]
    fn an_address_that_never_answers_is_sent_three_times_its_bytes() {
        let mut addresses = Addresses::default();
        let address = addresses.of(peer(1), NOW);
        assert_eq!(address.allowed(100, None), 0, "nothing came from there");
        address.received(&initial(b"theirs-1", b"theirs-2", 1_200));
        let flight = initial(b"theirs-2", b"ours-123", 2_260);
        assert_eq!(address.allowed(flight.len(), Some(1_200)), flight.len());
        address.sent(&flight);
        // Half of the segments fit; alone, the datagram would not.
        assert_eq!(address.allowed(2_400, Some(1_200)), 1_200);
        address.sent(&initial(b"theirs-2", b"ours-123", 1_200));
        assert_eq!([address.allowed(1_200, None), address.allowed(140, None)], [0, 140]);
        // A forger knows no id of ours.
        address.received(&initial(b"guessed!", b"theirs-2", 10));
        assert_eq!(address.allowed(1_200, None), 0);
    }

    #[test]
    fn who_names_an_id_of_ours_has_got_it_and_is_sent_everything() {
        let mut addresses = Addresses::default();
        let address = addresses.of(peer(1), NOW);
        address.received(&initial(b"theirs-1", b"theirs-2", 1_200));
        // Several handshakes of one socket.
        for id in [b"ours-001", b"ours-002", b"ours-003", b"ours-004"] {
            address.sent(&initial(b"theirs-2", id, 100));
        }
        addresses.received(peer(1), &initial(b"ours-001", b"theirs-2", 50), NOW);
        assert_eq!(addresses.unproved, 0);
        let address = addresses.of(peer(1), NOW);
        assert_eq!(address.allowed(1 << 20, Some(1_200)), 1 << 20);
        assert_eq!(addresses.of(peer(2), NOW).allowed(1, None), 0, "another port is another address");
    }

    /// The failure: before the client has answered the gateway sends a packet with the short header, too, which nobody counts.
    #[test]
    fn short_headers_count_until_the_address_has_a_connection() {
        let limit = Arc::new(AmplificationLimit::default());
        let admitted = |contents: &[u8], number: u16| {
            let destination = peer(number);
            limit.admit(&Transmit { destination, ecn: None, contents, segment_size: None, src_ip: None })
        };
        limit.received(peer(1), &initial(b"theirs-1", b"theirs-2", 100));
        assert_eq!(admitted(&initial(b"theirs-2", b"ours-123", 200), 1), 200);
        assert_eq!([admitted(&[0x40; 90], 1), admitted(&[0x40; 90], 1)], [90, 0]);
        assert_eq!(admitted(&[0x40; 90], 2), 90, "nothing of a handshake came from there");
        // A connection that has long been there is not slowed by a forged Initial.
        let proved = [limit.prove(peer(1)), limit.prove(peer(1))];
        assert_eq!(admitted(&[0x40; 1_200], 1), 1_200);
        drop(proved);
        assert_eq!(admitted(&[0x40; 1_200], 1), 0);
        assert!(limit.addresses.lock().connected.is_empty());
    }

    #[test]
    fn headers_that_end_early_or_say_too_much_name_no_ids() {
        let whole = initial(b"12345678", b"abcdefgh", 30);
        assert_eq!(ids(&whole), Some((&b"12345678"[..], &b"abcdefgh"[..])));
        for length in 0..23 {
            assert_eq!(ids(&whole[..length]), None, "{length}");
        }
        assert_eq!(ids(&initial(&[7; 21], b"", 100)), None);
        // An empty id that is named back proves nothing.
        let mut address = AddressTraffic::default();
        address.sent(&initial(b"theirs-1", b"", 100));
        address.received(&initial(b"", b"theirs-1", 100));
        assert!(!address.is_proved);
    }

    #[test]
    fn addresses_that_are_remembered_are_bounded() {
        let mut addresses = Addresses::default();
        for number in 0..u16::MAX {
            addresses.received(peer(number), &initial(b"a", b"b", 1_200), NOW);
            assert!(addresses.young.len() + addresses.old.len() <= 2 * MOST_ADDRESSES);
            assert_eq!(addresses.unproved, addresses.young.len() + addresses.old.len());
        }
        assert_eq!(addresses.of(peer(u16::MAX - 1), NOW).received, 1_200);
        assert_eq!(addresses.of(peer(0), NOW).received, 0);
        let later = NOW.plus_millis(GENERATION);
        assert_eq!(addresses.of(peer(u16::MAX - 1), later).received, 1_200);
        assert_eq!(addresses.of(peer(u16::MAX - 1), later.plus_millis(GENERATION)).received, 1_200);
        addresses.of(peer(0), later.plus_millis(3 * GENERATION));
        addresses.of(peer(0), later.plus_millis(5 * GENERATION));
        assert_eq!(addresses.of(peer(u16::MAX - 1), later.plus_millis(5 * GENERATION)).received, 0);
    }
}
