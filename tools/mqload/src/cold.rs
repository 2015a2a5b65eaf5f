//! Cold subscriptions: filters that no message of the run matches. They show
//! what a subscription costs in memory, and whether a large table slows the
//! messages of the hot topics down.

use crate::client::{Acked, ClientCfg, Delivery, Engine, Handler, Pace, Spec, State};
use crate::clock;
use crate::codec;
use crate::procstat::{Mem, Usage};
use crate::report::{Report, per};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Filters in one SUBSCRIBE.
const PER_PACKET: usize = 100;
/// So long without any SUBACK, and the broker is given up.
const PATIENCE: u64 = 30 * clock::SEC;

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Kind {
    /// No wildcard, 20 bytes and more
    Exact,
    /// `+` in the first level, or `#` as the last
    Wildcard,
    /// Wildcards in every combination of levels (with --topic-levels 8 more than 100)
    Shapes,
}

#[derive(clap::Args, Clone, Debug)]
pub struct ColdArgs {
    /// Further subscriptions that no message matches
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub cold: usize,
    /// What their filters look like
    #[arg(long, value_enum, default_value = "exact")]
    pub cold_kind: Kind,
}

/// Cold subscriptions of one of `pubsub`'s idle connections: below the limits
/// that brokers have by default.
const PER_CONNECTION: usize = 9_000;

/// Levels of the filters of `conn`: as with topics of devices, a level in the
/// middle is the subscription's own.
pub const LEVELS: usize = 3;

impl ColdArgs {
    /// Returns the number of idle connections that `pubsub` opens for them.
    pub fn connections(&self) -> usize {
        self.cold.div_ceil(PER_CONNECTION)
    }
}

/// Filter number `i` of a kind, for topics of `levels` levels (2 or more).
/// The second level belongs to it alone, so it matches no topic of a run.
pub fn filter(kind: Kind, prefix: &str, levels: usize, i: usize) -> String {
    let own = format!("c{i:010}");
    let mut parts = vec![prefix, own.as_str()];
    parts.resize(levels.max(2), "l");
    match kind {
        Kind::Exact => {}
        Kind::Wildcard if i.is_multiple_of(2) => parts[0] = "+",
        Kind::Wildcard => {
            parts.truncate(2);
            parts.push("#");
        }
        Kind::Shapes => {
            // Every level but the second may be `+`; half of them end in `#`.
            let mask = 1 + (i / 2) % ((1 << (parts.len() - 1).min(16)) - 1);
            for (bit, at) in std::iter::once(0).chain(2..parts.len()).enumerate() {
                if mask & (1 << bit) != 0 {
                    parts[at] = "+";
                }
            }
            if i.is_multiple_of(2) {
                parts.push("#");
            }
        }
    }
    parts.join("/")
}

/// The part of `total` that belongs to `share` of `shares`.
pub fn part(total: usize, share: usize, shares: usize) -> Range<usize> {
    let at = |k: usize| (total as u128 * k as u128 / shares as u128) as usize;
    at(share)..at(share + 1)
}

struct Subscriber {
    left: Vec<Range<usize>>,
    first: usize,
    ready: Vec<usize>,
    outstanding: usize,
    refused: usize,
}

impl Handler for Subscriber {
    fn publish(&mut self, _: usize, _: &Delivery, _: u64) {}
    fn acked(&mut self, _: usize, _: &Acked) {}

    fn subacked(&mut self, idx: usize, codes: &[u8]) {
        self.refused += codes.iter().filter(|&&c| c >= 0x80).count();
        self.outstanding -= 1;
        self.ready.push(idx);
    }
}

/// Subscribes connection `first + k` to the filters `parts[k]`, one SUBSCRIBE
/// at a time on each, and waits for all answers.
///
/// # Errors
/// A refused filter, a connection that ended or a broker that stopped
/// answering, as text.
pub fn subscribe(
    eng: &mut Engine,
    first: usize,
    parts: Vec<Range<usize>>,
    name: impl Fn(usize) -> String,
) -> io::Result<Result<(), String>> {
    let mut h = Subscriber {
        ready: (first..first + parts.len()).collect(),
        left: parts,
        first,
        outstanding: 0,
        refused: 0,
    };
    let v5 = eng.v5();
    let mut packet = Vec::new();
    let mut progress = clock::now();
    loop {
        for idx in std::mem::take(&mut h.ready) {
            progress = clock::now();
            let range = &mut h.left[idx - h.first];
            let end = range.end.min(range.start + PER_PACKET);
            if range.start == end || eng.conns[idx].state != State::Up {
                continue;
            }
            packet.clear();
            let filters: Vec<String> = (range.start..end).map(&name).collect();
            codec::subscribe(&mut packet, v5, 2, &filters, 0);
            range.start = end;
            h.outstanding += 1;
            eng.send(idx, &packet, &mut h);
        }
        if h.refused > 0 {
            return Ok(Err(format!("{} cold subscriptions refused", h.refused)));
        }
        if !eng.drops.is_empty() {
            return Ok(Err("connection dropped while subscribing".into()));
        }
        if h.outstanding == 0 {
            return Ok(Ok(()));
        }
        if clock::now() - progress > PATIENCE {
            return Ok(Err("no SUBACK to cold subscriptions".into()));
        }
        eng.turn(Some(100 * clock::MS), &mut h)?;
    }
}

/// Idle connections that hold the cold subscriptions of `pubsub`.
pub struct Held(Engine);

impl Held {
    /// # Errors
    /// Why a connection could not be made, as text.
    pub fn connect(args: &ColdArgs, cfg: Arc<ClientCfg>, pace: &Pace, prefix: &str) -> Result<Held, String> {
        let mut eng = Engine::new(cfg, None).map_err(|e| e.to_string())?;
        let n = args.connections();
        for k in 0..n {
            eng.add(Spec { client_id: format!("{prefix}-x{k}"), clean: true, filter: None, deaf: false });
        }
        eng.establish(0..n, pace, &mut Nothing).map_err(|e| e.to_string())?;
        match eng.failures.keys().next() {
            Some(why) => Err(why.clone()),
            None => Ok(Held(eng)),
        }
    }

    /// # Errors
    /// As [`subscribe`].
    pub fn subscribe(&mut self, args: &ColdArgs, prefix: &str, levels: usize) -> Result<(), String> {
        let n = args.connections();
        let parts = (0..n).map(|k| part(args.cold, k, n)).collect();
        subscribe(&mut self.0, 0, parts, |i| filter(args.cold_kind, prefix, levels, i))
            .map_err(|e| e.to_string())?
    }

    pub fn end(mut self) {
        let n = self.0.conns.len();
        let _ = self.0.disconnect(0..n, true, &mut Nothing);
    }
}

struct Nothing;

impl Handler for Nothing {
    fn publish(&mut self, _: usize, _: &Delivery, _: u64) {}
    fn acked(&mut self, _: usize, _: &Acked) {}
}

/// Reports the cost of `n` cold subscriptions to the broker.
pub fn report(r: &mut Report, args: &ColdArgs, before: &Mem, after: &Mem, usage: &Usage) {
    r.set("cold", args.cold);
    r.set("cold_kind", format!("{:?}", args.cold_kind).to_lowercase());
    if args.cold == 0 || !usage.broker {
        return;
    }
    let n = args.cold as u64;
    let bytes = per((after.rss_kb as f64 - before.rss_kb as f64) * 1024.0, n, 1);
    let us = per(usage.broker_us, n, 3);
    r.line("cold", format!("{n} subscriptions: RSS {bytes} bytes and {us} us of CPU each"));
    r.set("rss_bytes_per_cold_subscription", bytes);
    r.set("broker_cpu_us_per_cold_subscription", us);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// MQTT's rule, written plainly.
    fn matches(filter: &str, topic: &str) -> bool {
        let (f, t): (Vec<_>, Vec<_>) = (filter.split('/').collect(), topic.split('/').collect());
        for (i, part) in f.iter().enumerate() {
            match (*part, t.get(i)) {
                ("#", _) => return true,
                ("+", Some(_)) => {}
                (p, Some(x)) if p == *x => {}
                _ => return false,
            }
        }
        f.len() == t.len()
    }

    #[test]
    fn cold_filters_match_no_hot_topic_and_are_all_different() {
        for kind in [Kind::Exact, Kind::Wildcard, Kind::Shapes] {
            for levels in [2, 8] {
                let all: BTreeSet<_> = (0..1000).map(|i| filter(kind, "mq1", levels, i)).collect();
                assert_eq!(all.len(), 1000, "{kind:?}");
                let topic = format!("mq1/7{}", "/l".repeat(levels - 2));
                for f in &all {
                    assert!(!matches(f, &topic), "{f}");
                    assert_eq!(kind == Kind::Exact, !f.contains(['+', '#']), "{f}");
                }
            }
        }
    }

    /// Any topic in place of the own level matches: near misses, not filters
    /// that the first level already rules out.
    #[test]
    fn cold_filters_are_near_misses() {
        for kind in [Kind::Exact, Kind::Wildcard, Kind::Shapes] {
            for i in 0..300 {
                let f = filter(kind, "mq1", 4, i);
                assert!(matches(&f, &format!("mq1/c{i:010}/l/l")), "{f}");
            }
        }
    }

    #[test]
    fn shapes_are_many() {
        let shape = |f: String| {
            f.split('/').map(|p| p.replace(|c: char| c.is_alphanumeric(), "")).collect::<Vec<_>>()
        };
        let all: BTreeSet<_> = (0..10_000).map(|i| shape(filter(Kind::Shapes, "mq1", 8, i))).collect();
        assert!(all.len() > 100, "{}", all.len());
    }

    #[test]
    fn parts_cover_everything_once() {
        for (total, shares) in [(0, 3), (10, 3), (1_000_000, 110)] {
            let all: Vec<_> = (0..shares).flat_map(|k| part(total, k, shares)).collect();
            assert_eq!(all, (0..total).collect::<Vec<_>>());
        }
    }
}
