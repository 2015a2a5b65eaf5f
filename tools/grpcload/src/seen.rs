//! Record of mqload's messages that a member got: how late, and whether each of a publisher's was settled once and in
//! order.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::proto::{ConsumedMessage, DeliveryRange, consumed_message::Content};

/// mqload's stamp, with which its payloads begin.
struct Stamp {
    /// Monotonic nanoseconds.
    sent: u64,
    publisher: u32,
    sequence: u64,
}

/// Messages of mqload, as far as a member knows them.
#[derive(Default)]
pub struct Seen {
    /// Messages that are not settled yet, by the number of their delivery.
    delivered: HashMap<u64, (u32, u64)>,
    /// Sequence number that should be settled next, by publisher.
    next: HashMap<u32, u64>,
    /// Microseconds from being sent until here, of first deliveries.
    waits: Vec<u32>,
    /// The same of the messages that share a partition with those given back.
    beside: Vec<u32>,
    /// Partition of the messages that are given back, as it is in a message's id.
    partition: Option<String>,
    settled: u64,
    skipped: u64,
    late: u64,
}

impl Seen {
    /// A message has come. True if it is of the publisher `poison`.
    pub fn got(&mut self, message: &ConsumedMessage, poison: Option<u32>) -> bool {
        let Some(Content::Message(content)) = &message.content else { return false };
        let Some(stamp) = stamp(&content.payload) else { return false };
        let partition = message.message_id.get(17..19);
        if poison == Some(stamp.publisher) {
            self.partition = partition.map(str::to_owned);
            return true;
        }
        self.delivered.insert(message.delivery_id, (stamp.publisher, stamp.sequence));
        if message.attempt == 1 {
            let wait = u32::try_from(now().saturating_sub(stamp.sent) / 1_000).unwrap_or(u32::MAX);
            if self.partition.is_some() && self.partition.as_deref() == partition {
                self.beside.push(wait);
            }
            self.waits.push(wait);
        }
        false
    }

    /// These are settled.
    pub fn settled(&mut self, ranges: &[DeliveryRange]) {
        for id in ranges.iter().flat_map(|range| range.first..=range.last) {
            let Some((publisher, sequence)) = self.delivered.remove(&id) else { continue };
            let next = self.next.entry(publisher).or_default();
            self.settled += 1;
            if sequence < *next {
                self.late += 1;
            } else {
                self.skipped += sequence - *next;
                *next = sequence + 1;
            }
        }
    }

    /// These are void: they come again.
    pub fn revoked(&mut self, ranges: &[DeliveryRange]) {
        for id in ranges.iter().flat_map(|range| range.first..=range.last) {
            self.delivered.remove(&id);
        }
    }

    /// Latencies from here on only.
    pub fn forget(&mut self) {
        self.waits.clear();
        self.beside.clear();
    }

    /// `out_of_order` are messages that were settled after a later one of their publisher, or twice; `skipped` those that were
    /// not there when a later one was settled.
    pub fn report(&mut self) -> Value {
        json!({
            "settled": self.settled,
            "skipped": self.skipped,
            "out_of_order": self.late,
            "publishers": self.next.len(),
            "latency_us": quantiles(&mut self.waits),
            "latency_us_beside": quantiles(&mut self.beside),
        })
    }
}

/// Of samples in any order; null without any.
pub fn quantiles(samples: &mut [u32]) -> Value {
    samples.sort_unstable();
    let at = |share: f64| samples.get(((samples.len() as f64 * share) as usize).min(samples.len() - 1));
    match samples.last() {
        None => Value::Null,
        Some(max) => json!({
            "count": samples.len(), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "p999": at(0.999), "max": max,
        }),
    }
}

fn stamp(payload: &[u8]) -> Option<Stamp> {
    Some(Stamp {
        sent: u64::from_le_bytes(payload.get(..8)?.try_into().ok()?),
        publisher: u32::from_le_bytes(payload.get(8..12)?.try_into().ok()?),
        sequence: u64::from_le_bytes(payload.get(12..20)?.try_into().ok()?),
    })
}

/// Monotonic nanoseconds, as mqload has them.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid and writable.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}
