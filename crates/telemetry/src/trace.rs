//! Live traces of single clients: into the log, and to those who watch their packets.
//!
//! While nobody is traced, a packet's way pays one relaxed load for each read and each write of a socket. A watch never
//! keeps a client waiting: packets that do not fit into its buffer are counted, and the count is told in their place.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use gateway_core::{QoS, Timestamp};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

use crate::counters::count;

/// The most clients traced into the log at once, besides those of the configuration.
const MOST: usize = 1000;
/// The most watches at once, and of one client.
const MOST_WATCHES: usize = 64;
const MOST_OF_CLIENT: usize = 8;
/// Packets that wait for one who watches, and bytes of them.
const PACKETS: usize = 1024;
/// Bytes that a watch may hold. The caller that begins one sets them aside.
pub const WATCH_BYTES: usize = 256 << 10;

/// A packet as it is shown. Fields that it lacks are empty.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TracedPacket {
    /// Time at which the packet was read, or given to the socket.
    pub at: Timestamp,
    /// Sent by the client.
    pub is_from_client: bool,
    /// Type of the control packet, 1 to 15.
    pub kind: u8,
    /// Bytes of it, fixed header included.
    pub size: usize,
    /// Packet identifier.
    pub packet_id: Option<u16>,
    /// Reason codes of an acknowledgement or an end.
    pub reason_codes: Vec<u8>,
    /// Of SUBSCRIBE and UNSUBSCRIBE: the first, cut.
    pub filters: Vec<String>,
    pub filter_count: usize,
    pub publish: Option<TracedPublish>,
    /// True if the packet could not be read: the connection ends for it.
    pub is_malformed: bool,
}

/// Further fields of a PUBLISH.
#[derive(Debug, Clone, PartialEq)]
pub struct TracedPublish {
    /// Cut; empty where an alias stands for it.
    pub topic: String,
    /// Topic alias.
    pub alias: Option<u16>,
    /// Its quality of service.
    pub qos: QoS,
    /// The flag DUP.
    pub dup: bool,
    /// The flag RETAIN.
    pub retain: bool,
    /// Bytes of the payload.
    pub payload_size: usize,
    /// Its beginning, as much of it as the watch asked for.
    pub payload: Vec<u8>,
}

impl TracedPacket {
    fn bytes(&self) -> usize {
        let filters: usize = self.filters.iter().map(|filter| filter.len() + size_of::<String>()).sum();
        let publish = self.publish.as_ref().map_or(0, |publish| publish.topic.len() + publish.payload.len());
        size_of::<Self>() + self.reason_codes.len() + filters + publish
    }
}

/// One who watches the packets of a client.
pub struct PacketWatch {
    /// Bytes of payloads that are wanted.
    pub payload_bytes: usize,
    held: Mutex<HeldPackets>,
    ready: Notify,
}

#[derive(Default)]
struct HeldPackets {
    packets: VecDeque<TracedPacket>,
    bytes: usize,
    /// Behind them.
    missed: u64,
}

impl PacketWatch {
    fn new(payload_bytes: usize) -> Self {
        Self { payload_bytes, held: Mutex::default(), ready: Notify::new() }
    }

    /// Adds a packet, or counts it where it does not fit.
    pub fn push(&self, packet: TracedPacket) {
        let bytes = packet.bytes();
        {
            let mut held = self.held.lock();
            // Once one packet is missing, so are all later ones until the watch is read: the gap has one place.
            let is_full =
                held.missed > 0 || held.packets.len() >= PACKETS || held.bytes + bytes > WATCH_BYTES;
            if is_full {
                held.missed += 1;
                count(|c| c.trace_missed.add(1));
            } else {
                held.bytes += bytes;
                held.packets.push_back(packet);
            }
        }
        self.ready.notify_one();
    }

    /// Returns the packets that have come, and the number of missing packets after them. Waits for the first one.
    /// Cancel safe.
    pub async fn next(&self) -> (VecDeque<TracedPacket>, u64) {
        loop {
            {
                let mut held = self.held.lock();
                if !held.packets.is_empty() || held.missed > 0 {
                    let HeldPackets { packets, missed, .. } = std::mem::take(&mut *held);
                    return (packets, missed);
                }
            }
            self.ready.notified().await;
        }
    }
}

/// A watch that ends on drop.
pub struct Watching {
    of: &'static TraceClients,
    client_id: String,
    watch: Arc<PacketWatch>,
}

impl Watching {
    /// Returns the watch's settings.
    pub fn watch(&self) -> &PacketWatch {
        &self.watch
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut traced = self.of.traced.write();
        if let Some(watches) = traced.watched.get_mut(&self.client_id) {
            watches.retain(|watch| !Arc::ptr_eq(watch, &self.watch));
            if watches.is_empty() {
                traced.watched.remove(&self.client_id);
            }
        }
        self.of.note(&traced);
    }
}

/// Present trace of a client.
pub struct ClientTrace {
    /// Its packets are told in the log.
    pub is_logged: bool,
    /// Watches that see its packets.
    pub watches: Vec<Arc<PacketWatch>>,
}

/// The clients that are traced now.
#[derive(Default)]
pub struct TraceClients {
    any: AtomicBool,
    traced: RwLock<Traced>,
}

#[derive(Default)]
struct Traced {
    logged: HashSet<String>,
    watched: HashMap<String, Vec<Arc<PacketWatch>>>,
}

impl TraceClients {
    /// Returns whether any client is traced.
    #[inline]
    pub fn any(&self) -> bool {
        self.any.load(Relaxed)
    }

    /// Returns whether packets of this client are told in the log.
    pub fn is_traced(&self, client_id: &str) -> bool {
        self.of(client_id).is_some_and(|trace| trace.is_logged)
    }

    /// Returns the trace of this client; `None` if it is not traced. Costs one relaxed load while nobody is traced.
    #[inline]
    pub fn of(&self, client_id: &str) -> Option<Box<ClientTrace>> {
        if self.any() { self.look(client_id) } else { None }
    }

    #[cold]
    fn look(&self, client_id: &str) -> Option<Box<ClientTrace>> {
        let traced = self.traced.read();
        let is_logged = traced.logged.contains(client_id);
        let watches = traced.watched.get(client_id).cloned().unwrap_or_default();
        (is_logged || !watches.is_empty()).then(|| Box::new(ClientTrace { is_logged, watches }))
    }

    /// Starts tracing a client into the log; false if too many are traced.
    pub fn add(&self, client_id: &str) -> bool {
        let mut traced = self.traced.write();
        if traced.logged.len() >= MOST && !traced.logged.contains(client_id) {
            return false;
        }
        traced.logged.insert(client_id.to_owned());
        self.note(&traced);
        true
    }

    /// Stops tracing a client into the log; false if it was not traced.
    pub fn remove(&self, client_id: &str) -> bool {
        let mut traced = self.traced.write();
        let removed = traced.logged.remove(client_id);
        self.note(&traced);
        removed
    }

    /// Traces exactly these clients into the log.
    pub fn replace(&self, ids: impl IntoIterator<Item = String>) {
        let mut traced = self.traced.write();
        traced.logged = ids.into_iter().collect();
        self.note(&traced);
    }

    /// The clients traced into the log, in order.
    pub fn list(&self) -> Vec<String> {
        let mut list: Vec<String> = self.traced.read().logged.iter().cloned().collect();
        list.sort_unstable();
        list
    }

    /// Watches the packets of a client, with at most `payload_bytes` of each payload; `None` if too many watch already.
    pub fn watch(&'static self, client_id: &str, payload_bytes: usize) -> Option<Watching> {
        let watch = Arc::new(PacketWatch::new(payload_bytes));
        let mut traced = self.traced.write();
        let all: usize = traced.watched.values().map(Vec::len).sum();
        let of_client = traced.watched.get(client_id).map_or(0, Vec::len);
        if all >= MOST_WATCHES || of_client >= MOST_OF_CLIENT {
            return None;
        }
        traced.watched.entry(client_id.to_owned()).or_default().push(Arc::clone(&watch));
        self.note(&traced);
        drop(traced);
        Some(Watching { of: self, client_id: client_id.to_owned(), watch })
    }

    fn note(&self, traced: &Traced) {
        self.any.store(!traced.logged.is_empty() || !traced.watched.is_empty(), Relaxed);
    }
}

/// The set of the process.
pub fn trace_clients() -> &'static TraceClients {
    static CLIENTS: OnceLock<TraceClients> = OnceLock::new();
    CLIENTS.get_or_init(TraceClients::default)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> &'static TraceClients {
        Box::leak(Box::default())
    }

    #[test]
    fn clients_are_traced_from_add_to_remove() {
        let clients = TraceClients::default();
        assert!(!clients.any() && !clients.is_traced("a"));
        assert!(clients.add("a") && clients.add("a"));
        assert!(clients.is_traced("a") && !clients.is_traced("b"));
        assert!(clients.remove("a") && !clients.remove("a"));
        assert!(!clients.any());
        clients.replace(["z".to_owned(), "y".to_owned()]);
        assert_eq!(clients.list(), ["y", "z"]);
    }

    /// Rules out a set that backends let grow without end.
    #[test]
    fn a_thousand_clients_are_traced_and_no_more() {
        let clients = TraceClients::default();
        assert!((0..1000).all(|n| clients.add(&n.to_string())));
        assert!(!clients.add("one more") && clients.add("999"));
        assert!(clients.remove("5") && clients.add("one more"));
    }

    /// Rules out a trace that goes on, and costs every packet something, when nobody looks.
    #[test]
    fn a_watch_ends_with_who_watches_and_leaves_the_log_alone() {
        let clients = all();
        let (first, second) = (clients.watch("a", 0).unwrap(), clients.watch("a", 0).unwrap());
        assert_eq!(clients.of("a").unwrap().watches.len(), 2);
        assert!(clients.of("b").is_none());
        drop(first);
        assert_eq!(clients.of("a").unwrap().watches.len(), 1);
        clients.add("a");
        drop(second);
        assert!(clients.any() && clients.is_traced("a"));
        clients.remove("a");
        assert!(!clients.any());
    }

    #[test]
    fn only_so_many_watch_one_client_and_all() {
        let clients = all();
        let mut watching: Vec<_> =
            (0..MOST_OF_CLIENT).map(|_| clients.watch("a", 0).expect("room")).collect();
        assert!(clients.watch("a", 0).is_none());
        for n in 0..MOST_WATCHES - MOST_OF_CLIENT {
            watching.push(clients.watch(&n.to_string(), 0).expect("room"));
        }
        assert!(clients.watch("b", 0).is_none());
        watching.pop();
        assert!(clients.watch("b", 0).is_some());
    }

    /// Rules out memory without a bound, and a loss that is told in a wrong place or not at all.
    #[tokio::test]
    async fn what_does_not_fit_is_missing_where_it_would_be() {
        let clients = all();
        let watching = clients.watch("a", 0).unwrap();
        let push = |size: usize, topic: usize| {
            let publish = TracedPublish {
                topic: "t".repeat(topic),
                alias: None,
                qos: QoS::AtMostOnce,
                dup: false,
                retain: false,
                payload_size: 0,
                payload: Vec::new(),
            };
            let packet = TracedPacket { size, publish: Some(publish), ..TracedPacket::default() };
            for watch in &clients.of("a").unwrap().watches {
                watch.push(packet.clone());
            }
        };
        (0..PACKETS + 5).for_each(|n| push(n, 0));
        let (packets, missed) = watching.watch().next().await;
        assert_eq!((packets.len(), missed, packets.back().unwrap().size), (PACKETS, 5, PACKETS - 1));
        (0..100).for_each(|n| push(n, 8 << 10));
        push(100, 0);
        let (packets, missed) = watching.watch().next().await;
        let held: usize = packets.iter().map(TracedPacket::bytes).sum();
        assert!(held <= WATCH_BYTES && packets.len() + missed as usize == 101, "{held}");
        push(7, 0);
        assert_eq!(watching.watch().next().await.0.len(), 1);
    }
}
