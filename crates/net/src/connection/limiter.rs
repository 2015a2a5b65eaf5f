//! Rate limits of one client, and of the quota holders that it belongs to. They slow reading and sending and drop nothing.
//!
//! The work done is charged at once, and a connection that has taken too much waits until its debt is paid. So
//! connections that share a rate come in turn, without a queue, and none of them wakes in vain.

use std::{num::NonZeroU32, time::Duration};

use broker::QuotaHolders;
use config::Limits;
use gateway_core::{Flow, Timestamp, units::ByteSize};
use session::OUT_BUFFER;

/// The longest pause.
const LONGEST: f64 = 60.0;

/// Allowance of a client for sending and being sent now; may go below zero, then there is a pause.
#[derive(Debug)]
pub(crate) struct Limiter {
    from: Option<Flow>,
    to: Option<Flow>,
    quota_holders: QuotaHolders,
    room: Option<NonZeroU32>,
}

impl Limiter {
    /// `None` when no rate is configured for it.
    pub(crate) fn new(limits: &Limits, quota_holders: &QuotaHolders, now: Timestamp) -> Option<Box<Self>> {
        let from = Flow::new(limits.client_message_rate, limits.client_byte_rate, now);
        let to = Flow::new(limits.client_message_rate_out, limits.client_byte_rate_out, now);
        let quota_holders: QuotaHolders = quota_holders
            .iter()
            .filter(|holder| holder.limits_input() || holder.limits_output())
            .cloned()
            .collect();
        let of_holders = quota_holders.iter().filter(|holder| holder.limits_output()).map(|holder| {
            let quotas = holder.quotas();
            room(quotas.message_rate_out, quotas.byte_rate_out).min(SHARED_ROOM)
        });
        let own = to.as_ref().map(|_| room(limits.client_message_rate_out, limits.client_byte_rate_out));
        let room = of_holders.chain(own).min().and_then(|room| NonZeroU32::new(room as u32));
        let limits_any = from.is_some() || to.is_some() || !quota_holders.is_empty();
        limits_any.then(|| Box::new(Self { from, to, quota_holders, room }))
    }

    /// Takes what was read; how long to pause reading, if at all.
    pub(crate) fn take_input(&mut self, messages: u32, bytes: usize, now: Timestamp) -> Option<Duration> {
        let own = self.from.as_mut().map(|flow| flow.take(messages, bytes, now));
        pause(own, self.quota_holders.iter().map(|holder| holder.take_input(messages, bytes, now)))
    }

    /// Takes what is sent; how long to pause sending after that, if at all.
    pub(crate) fn take_output(&mut self, messages: u32, bytes: usize, now: Timestamp) -> Option<Duration> {
        let own = self.to.as_mut().map(|flow| flow.take(messages, bytes, now));
        pause(own, self.quota_holders.iter().map(|holder| holder.take_output(messages, bytes, now)))
    }

    /// Bytes that may be taken for sending at once; `None` if sending has no rate.
    pub(crate) fn room(&self) -> Option<NonZeroU32> {
        self.room
    }
}

/// The room where many share a rate: each has its turn soon.
const SHARED_ROOM: usize = 1 << 10;

/// A quarter of a second's bytes and a second's messages at most, so that an answer never waits long behind messages. One
/// message always has room.
fn room(messages: u32, bytes: ByteSize) -> usize {
    /// No PUBLISH has fewer.
    const SHORTEST: usize = 5;
    let by_messages = (messages > 0).then(|| messages as usize * SHORTEST);
    let by_bytes = (bytes.0 > 0).then_some(bytes.0 / 4);
    by_messages.into_iter().chain(by_bytes).min().unwrap_or(OUT_BUFFER).clamp(1, OUT_BUFFER)
}

fn pause(own: Option<f64>, quota_holders: impl Iterator<Item = f64>) -> Option<Duration> {
    let pause = quota_holders.chain(own).fold(0.0, f64::max);
    (pause > 0.0).then(|| Duration::from_secs_f64(pause.min(LONGEST)))
}

#[cfg(test)]
mod tests {
    use std::{cmp::Reverse, collections::BinaryHeap};

    use super::*;
    use crate::test_util::shared;
    use config::Quotas;

    /// The failure: of many who share a rate the first take it all, or together they take more than it. In virtual time.
    #[test]
    fn those_who_share_a_rate_have_it_in_equal_parts() {
        const RATE: usize = 100_000;
        const CLIENTS: usize = 50;
        const SECONDS: u64 = 20;
        let identity = Quotas { byte_rate_out: ByteSize(RATE), ..Quotas::default() };
        let limits = Limits { identity, ..Limits::default() };
        let shared = shared(limits.clone());
        let limiter = || {
            let quota_holders = shared.broker.quota_holders(Some("user"), "c", "t");
            Limiter::new(&limits, &quota_holders, Timestamp(0)).expect("a rate is set")
        };
        let mut clients: Vec<_> = (0..CLIENTS).map(|_| (limiter(), 0)).collect();
        // Each has always something to send.
        let mut next: BinaryHeap<_> = (0..CLIENTS).map(|client| Reverse((0, client))).collect();
        while let Some(Reverse((now, client))) = next.pop().filter(|Reverse((now, _))| *now < SECONDS * 1000)
        {
            let (limiter, sent) = &mut clients[client];
            let bytes = limiter.room().map_or(0, |room| room.get() as usize);
            *sent += bytes;
            let pause = limiter.take_output(1, bytes, Timestamp(now)).unwrap_or_default();
            next.push(Reverse((now + (pause.as_millis() as u64).max(1), client)));
        }
        let sent: Vec<usize> = clients.iter().map(|(_, sent)| *sent).collect();
        let (all, rate) = (sent.iter().sum::<usize>(), RATE * SECONDS as usize);
        assert!((rate..=rate + RATE + CLIENTS * SHARED_ROOM).contains(&all), "{all}");
        let (least, most) = (sent.iter().min().expect("some"), sent.iter().max().expect("some"));
        assert!(most - least <= 4 * SHARED_ROOM, "{least} to {most}");
    }

    #[test]
    fn a_burst_over_the_rate_pauses_for_as_long_as_it_takes() {
        let limits = Limits { client_message_rate: 10, client_message_rate_out: 1, ..Limits::default() };
        let mut limiter =
            Limiter::new(&limits, &QuotaHolders::default(), Timestamp(0)).expect("a rate is set");
        assert_eq!(limiter.take_input(10, 0, Timestamp(0)), None);
        assert_eq!(limiter.take_input(5, 0, Timestamp(0)), Some(Duration::from_millis(500)));
        assert_eq!(limiter.take_input(0, 0, Timestamp(600)), None);
        assert_eq!(limiter.take_output(3, 0, Timestamp(0)), Some(Duration::from_secs(2)));
        assert_eq!(limiter.room(), NonZeroU32::new(5), "one message at a time");
        assert!(Limiter::new(&Limits::default(), &QuotaHolders::default(), Timestamp(0)).is_none());
    }

    #[test]
    fn what_may_be_sent_at_once_is_soon_paid() {
        let room = |messages, bytes| {
            let limits = Limits {
                client_message_rate_out: messages,
                client_byte_rate_out: ByteSize(bytes),
                ..Limits::default()
            };
            Limiter::new(&limits, &QuotaHolders::default(), Timestamp(0)).and_then(|limiter| limiter.room())
        };
        assert_eq!(room(0, 512 << 10), NonZeroU32::new(OUT_BUFFER as u32));
        assert_eq!(
            (room(0, 1000), room(10, 1000), room(0, 1)),
            (NonZeroU32::new(250), NonZeroU32::new(50), NonZeroU32::new(1))
        );
        let input_only = Limits { client_byte_rate: ByteSize(1), ..Limits::default() };
        let limiter =
            Limiter::new(&input_only, &QuotaHolders::default(), Timestamp(0)).expect("a rate is set");
        assert_eq!(limiter.room(), None);
    }
}
