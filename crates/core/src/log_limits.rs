//! Limits on log lines that peers can cause, so that no peer can fill the log.

use std::{
    collections::HashMap,
    hash::BuildHasher as _,
    net::{IpAddr, Ipv6Addr},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

#[expect(clippy::disallowed_methods, reason = "warnings are limited in real time, wherever they come from")]
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Lets one event pass per interval and counts the others. For a `static`; see [`crate::warn_limited`].
#[derive(Debug)]
pub struct RateLimit {
    interval_ms: u64,
    /// Milliseconds since the first use in the process, plus one; 0 is never.
    last: AtomicU64,
    suppressed: AtomicU64,
}

impl RateLimit {
    /// One event per `interval`.
    pub const fn new(interval: Duration) -> Self {
        let millis = interval.as_millis();
        let interval_ms = if millis > u32::MAX as u128 { u32::MAX as u64 } else { millis as u64 };
        Self { interval_ms, last: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
    }

    /// `Some(n)` lets this event pass, with `n` suppressed since the last one.
    pub fn pass(&self) -> Option<u64> {
        self.pass_at(millis())
    }

    fn pass_at(&self, millis: u64) -> Option<u64> {
        let now = millis.saturating_add(1);
        let last = self.last.load(Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= self.interval_ms;
        if due && self.last.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            return Some(self.suppressed.swap(0, Relaxed));
        }
        self.suppressed.fetch_add(1, Relaxed);
        None
    }
}

/// Milliseconds since the first use in the process.
fn millis() -> u64 {
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Lets five events pass in ten seconds and counts the others.
#[derive(Debug, Default)]
pub struct BurstLimit(Mutex<LineWindow>);

impl BurstLimit {
    /// `Some(n)` lets this event pass, with `n` suppressed since the last one.
    pub fn pass(&self) -> Option<u64> {
        self.0.lock().pass_at(millis(), LINES_PER_WINDOW)
    }
}

/// Kinds of lines about one peer, each limited on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LineKind {
    /// A handshake failed before there was a CONNECT.
    Handshake,
    /// A CONNECT was refused.
    Refused,
    /// A login was denied, since the service that decides about it answered with a status.
    Status,
    /// A connection took a session over.
    Takeover,
    /// A connection ended because of what its client sent.
    Protocol,
    /// A packet over a limit was refused, and the connection goes on.
    Limit,
    /// A connection was not let in.
    Door,
    /// A connection was ended because it may no longer be.
    Evicted,
    /// A request of a device or a backend was denied.
    Denied,
}

/// Lines of one kind about one address within this time.
const WINDOW_MILLIS: u64 = 10_000;
/// Lines written of them.
const LINES_PER_WINDOW: u32 = 5;
/// Kinds and addresses distinguished within a window; all further ones share one place for each kind.
const PLACES: usize = 256;

/// Kinds and clients distinguished within a window; further ones share the places of their addresses.
const CLIENTS: usize = 1_024;
/// Lines of one kind about one client within a window: as many clients may have one.
const LINES_PER_CLIENT: u32 = 1;

/// The party that a line is about.
#[derive(Debug, Clone, Copy)]
pub enum LineSubject<'a> {
    /// An address.
    Address(IpAddr),
    /// A client, by its client id, and where it is: what is said of one hides nothing of another at the same address.
    Client(IpAddr, &'a str),
}

impl From<IpAddr> for LineSubject<'_> {
    fn from(peer: IpAddr) -> Self {
        Self::Address(peer)
    }
}

impl<'a> From<(IpAddr, &'a str)> for LineSubject<'a> {
    fn from((peer, client_id): (IpAddr, &'a str)) -> Self {
        Self::Client(peer, client_id)
    }
}

/// Lets a few lines of each kind and subject pass in ten seconds and counts the others: 5 lines, of at most 256 kinds and
/// addresses, and one line of at most 1,024 clients. An IPv6 address counts as its /64, which is what one site has.
#[derive(Debug, Default)]
pub struct PeerLimits {
    sites: Mutex<HashMap<(LineKind, Option<IpAddr>), LineWindow>>,
    /// By the hash of the client id.
    clients: Mutex<HashMap<(LineKind, u64), (IpAddr, LineWindow)>>,
    hashing: std::hash::RandomState,
}

#[derive(Debug, Default)]
struct LineWindow {
    began: u64,
    lines: u32,
    suppressed: u64,
}

impl LineWindow {
    fn pass_at(&mut self, now: u64, most: u32) -> Option<u64> {
        if now.saturating_sub(self.began) >= WINDOW_MILLIS {
            (self.began, self.lines) = (now, 0);
        }
        if self.lines >= most {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

impl PeerLimits {
    /// `Some(n)` lets this line pass, with `n` of its kind and subject left out before it.
    pub fn pass<'a>(&self, said: LineKind, about: impl Into<LineSubject<'a>>) -> Option<u64> {
        self.pass_at(said, about, millis())
    }

    /// Forgets the windows that are over. Returns what was left out in them and not reported since, by kind and address
    /// (`None` for those beyond the places). To be called about once a second.
    pub fn sweep(&self) -> Vec<(LineKind, Option<IpAddr>, u64)> {
        self.sweep_at(millis())
    }

    fn pass_at<'a>(&self, said: LineKind, about: impl Into<LineSubject<'a>>, now: u64) -> Option<u64> {
        match about.into() {
            LineSubject::Address(peer) => self.pass_site(said, peer, now),
            LineSubject::Client(peer, client_id) => self.pass_client(said, peer, client_id, now),
        }
    }

    fn pass_client(&self, said: LineKind, peer: IpAddr, client_id: &str, now: u64) -> Option<u64> {
        let key = (said, self.hashing.hash_one(client_id));
        let mut windows = self.clients.lock();
        if windows.len() >= CLIENTS && !windows.contains_key(&key) {
            drop(windows);
            return self.pass_site(said, peer, now);
        }
        let new = || (peer, LineWindow { began: now, lines: 0, suppressed: 0 });
        windows.entry(key).or_insert_with(new).1.pass_at(now, LINES_PER_CLIENT)
    }

    fn pass_site(&self, said: LineKind, peer: IpAddr, now: u64) -> Option<u64> {
        let mut windows = self.sites.lock();
        let mut key = (said, Some(site(peer)));
        if windows.len() >= PLACES && !windows.contains_key(&key) {
            key.1 = None;
        }
        let window = windows.entry(key).or_insert(LineWindow { began: now, lines: 0, suppressed: 0 });
        window.pass_at(now, LINES_PER_WINDOW)
    }

    fn sweep_at(&self, now: u64) -> Vec<(LineKind, Option<IpAddr>, u64)> {
        let mut untold = Vec::new();
        let mut stays = |said: LineKind, peer: Option<IpAddr>, window: &LineWindow| {
            let over = now.saturating_sub(window.began) >= WINDOW_MILLIS;
            if over && window.suppressed > 0 {
                untold.push((said, peer, window.suppressed));
            }
            !over
        };
        self.sites.lock().retain(|(said, peer), window| stays(*said, *peer, window));
        self.clients.lock().retain(|(said, _), (peer, window)| stays(*said, Some(*peer), window));
        untold
    }
}

/// An address, or the /64 that it belongs to.
fn site(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(ip) => {
            let [a, b, c, d, ..] = ip.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        ip @ IpAddr::V4(_) => ip,
    }
}

/// The limits of the process.
pub fn peer_limits() -> &'static PeerLimits {
    static LIMITS: LazyLock<PeerLimits> = LazyLock::new(PeerLimits::default);
    &LIMITS
}

/// `tracing::info!` about a peer, limited by its kind and address ([`crate::log_limits::PeerLimits`]): a
/// [`LineKind`](crate::log_limits::LineKind), the `IpAddr`, or that and the client id, then as for `info!`. What was left out
/// before is in the field `suppressed`.
#[macro_export]
macro_rules! info_of_peer {
    ($said:expr, $ip:expr, $($arg:tt)+) => {
        if ::tracing::enabled!(::tracing::Level::INFO)
            && let Some(suppressed) = $crate::log_limits::peer_limits().pass($said, $ip)
        {
            let suppressed = (suppressed > 0).then_some(suppressed);
            ::tracing::info!(suppressed, $($arg)+);
        }
    };
}

/// `tracing::warn!`, at most once in ten seconds from this place in the code. When some were left out, the next
/// one tells how many in the field `suppressed`.
#[macro_export]
macro_rules! warn_limited {
    ($($arg:tt)+) => {{
        static LIMIT: $crate::log_limits::RateLimit =
            $crate::log_limits::RateLimit::new(::std::time::Duration::from_secs(10));
        if let Some(suppressed) = LIMIT.pass() {
            let suppressed = (suppressed > 0).then_some(suppressed);
            ::tracing::warn!(suppressed, $($arg)+);
        }
    }};
}

/// `tracing::error!`, at most once in ten seconds at each place that uses it. What was left out before is in the field
/// `suppressed`.
#[macro_export]
macro_rules! error_limited {
    ($($arg:tt)+) => {{
        static LIMIT: $crate::log_limits::RateLimit =
            $crate::log_limits::RateLimit::new(::std::time::Duration::from_secs(10));
        if let Some(suppressed) = LIMIT.pass() {
            let suppressed = (suppressed > 0).then_some(suppressed);
            ::tracing::error!(suppressed, $($arg)+);
        }
    }};
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn one_event_passes_per_interval_and_the_rest_is_counted() {
        let limit = RateLimit::new(Duration::from_secs(10));
        assert_eq!(limit.pass_at(0), Some(0));
        assert_eq!(limit.pass_at(1), None);
        assert_eq!(limit.pass_at(9_999), None);
        assert_eq!(limit.pass_at(10_000), Some(2));
        assert_eq!(limit.pass_at(10_001), None);
    }

    #[test]
    fn a_few_lines_of_each_kind_and_address_pass_and_the_rest_is_told_later() {
        let limits = PeerLimits::default();
        let [noisy, other]: [IpAddr; 2] = ["192.0.2.1", "192.0.2.2"].map(|ip| ip.parse().unwrap());
        let passed = (0..1_000).filter(|_| limits.pass_at(LineKind::Refused, noisy, 5).is_some()).count();
        assert_eq!(passed, 5);
        assert_eq!(limits.pass_at(LineKind::Refused, other, 6), Some(0), "another address");
        assert_eq!(limits.pass_at(LineKind::Takeover, noisy, 6), Some(0), "another kind");
        assert_eq!(limits.pass_at(LineKind::Refused, noisy, 10_005), Some(995), "the next line tells");
        assert_eq!(limits.sweep_at(20_006), [], "all told");
        assert!(limits.sites.lock().is_empty(), "and forgotten");
        let passed = (0..7).filter(|_| limits.pass_at(LineKind::Refused, noisy, 30_000).is_some()).count();
        assert_eq!(passed, 5);
        assert_eq!(limits.sweep_at(39_999), []);
        assert_eq!(
            limits.sweep_at(40_000),
            [(LineKind::Refused, Some(noisy), 2)],
            "or nobody comes, and it is told so"
        );
    }

    #[test]
    fn many_addresses_neither_fill_the_memory_nor_the_log() {
        let limits = PeerLimits::default();
        let sites = (0..100_000_u32).map(|n| IpAddr::from(Ipv6Addr::from(u128::from(n) << 64)));
        let passed = sites.filter(|ip| limits.pass_at(LineKind::Handshake, *ip, 0).is_some()).count();
        assert_eq!(passed, PLACES + LINES_PER_WINDOW as usize);
        assert_eq!(limits.sites.lock().len(), PLACES + 1);
        let one_site = (0..1_000_u32).map(|n| IpAddr::from(Ipv6Addr::from(u128::from(n))));
        let limits = PeerLimits::default();
        let passed = one_site.filter(|ip| limits.pass_at(LineKind::Handshake, *ip, 0).is_some()).count();
        assert_eq!(passed, LINES_PER_WINDOW as usize, "addresses of one /64 count as one");
    }

    /// The failure: two devices with one client id take over from each other all the time, and the takeover of another at the
    /// same address is not in the log.
    #[test]
    fn a_client_hides_nothing_of_another_at_its_address() {
        let limits = PeerLimits::default();
        let ip: IpAddr = "192.0.2.1".parse().unwrap();
        let pass = |client_id: &str, now| limits.pass_at(LineKind::Takeover, (ip, client_id), now);
        assert_eq!((0..1_000).filter(|_| pass("noisy", 0).is_some()).count(), 1);
        assert_eq!(pass("other", 1), Some(0));
        assert_eq!(pass("noisy", 10_000), Some(999));
        assert_eq!(limits.sweep_at(30_000), []);
        let passed = (0..100_000).filter(|n| pass(&n.to_string(), 30_001).is_some()).count();
        assert_eq!(passed, CLIENTS + LINES_PER_WINDOW as usize, "many fill neither the memory nor the log");
        assert_eq!(limits.clients.lock().len(), CLIENTS);
    }

    /// Keeps the fields of each event, as `name=value`.
    #[derive(Clone, Default)]
    struct Events(Arc<Mutex<Vec<Vec<String>>>>);

    impl tracing::Subscriber for Events {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn event(&self, event: &tracing::Event<'_>) {
            let mut fields = vec![event.metadata().level().to_string()];
            event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
                fields.push(format!("{field}={value:?}"));
            });
            self.0.lock().push(fields);
        }

        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn each_place_logs_its_first_event_with_its_fields_and_its_message() {
        let events = Events::default();
        tracing::subscriber::with_default(events.clone(), || {
            for peer in 0..3 {
                crate::warn_limited!(peer, reason = "test", "refused");
                crate::error_limited!(peer, "failed");
            }
        });
        let expected = [
            &["WARN", "message=refused", "peer=0", "reason=\"test\""][..],
            &["ERROR", "message=failed", "peer=0"],
        ];
        assert_eq!(*events.0.lock(), expected);
    }
}
