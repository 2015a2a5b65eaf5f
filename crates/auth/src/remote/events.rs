//! Tells the service of the user what happens to devices (`HookProvider.OnEvents`): in batches, in order, one at a time. Nobody
//! waits for it: while it does not take them events wait in a bounded queue, from which the oldest are dropped and counted.
//!
//! Clients choose names that are in events, so one event may be what the service does not take. Halves of its batch
//! find it, and it is left out.

use std::{collections::VecDeque, future::Future, pin::Pin, sync::Arc, time::Duration};

use access::breaker::QuestionFailure;
use broker::{Event, EventKind};
use config::{AuthGrpc, ConfigError, HookEvent};
use edge::reload::Reload;
use gateway_api::gateway::v1;
use gateway_core::warn_limited;
use prost::Message as _;
use tokio::{
    sync::{
        broadcast::{self, error::RecvError},
        watch,
    },
    time::{Instant, Sleep, sleep, timeout},
};
use tracing::{info, warn};

use super::{guard::LONGEST_PAUSE, provider::Provider, status::NoAnswer};
use crate::{counters::count, hooks::v1::OnEventsRequest};

/// Most events of a batch, and most bytes, not counting the last event.
const BATCH: usize = 256;
const BATCH_BYTES: usize = 256 << 10;
/// Most bytes of events that wait.
const QUEUE_BYTES: usize = 16 << 20;
/// Time that the first event of a batch waits for others.
const LINGER: Duration = Duration::from_millis(100);

/// See the module.
pub struct EventSender {
    provider: Provider,
    kinds: Vec<HookEvent>,
    deadline: Duration,
    retry: Retry,
    queue: EventQueue,
    /// Batch that is under way, or to be sent again.
    batch: Option<OnEventsRequest>,
    sequence: u64,
    /// Most events of the next batch: fewer while one of them may be what the service does not take.
    most: usize,
}

/// Pauses after failures.
struct Retry {
    /// After so many the service counts as away.
    threshold: u32,
    first: Duration,
    /// In a row.
    failures: u32,
}

/// Events that wait.
struct EventQueue {
    events: VecDeque<(v1::Event, usize)>,
    bytes: usize,
    most: usize,
    /// Since the last batch was made.
    dropped: u64,
}

/// Reason for which an event is left out.
#[derive(Clone, Copy)]
enum LeftOut<'a> {
    /// The service answers it with a status.
    Refused(&'a str),
    /// The queue is full, and the service fails.
    Full,
}

type EventSend = Pin<Box<dyn Future<Output = Result<(), NoAnswer>> + Send>>;

impl EventSender {
    /// For the service that is configured; `None` if it is told nothing. To be called within the runtime that carries the
    /// connection.
    ///
    /// # Errors
    /// The URL or a file cannot be used.
    pub fn new(config: &AuthGrpc) -> Result<Option<Self>, ConfigError> {
        if !config.hears() {
            return Ok(None);
        }
        let limits = &config.limits;
        Ok(Some(Self {
            provider: Provider::new(config, "credentials for telling events")?,
            kinds: config.events.clone(),
            deadline: limits.deadline.0,
            retry: Retry { threshold: limits.failures, first: limits.retry_after.0, failures: 0 },
            queue: EventQueue { events: VecDeque::new(), bytes: 0, most: config.max_events, dropped: 0 },
            batch: None,
            sequence: 0,
            most: BATCH,
        }))
    }

    /// Returns the files that can be read again.
    pub fn reloads(&self) -> Arc<dyn Reload> {
        Arc::new(self.provider.clone())
    }

    /// Tells what comes until `stop`, and then what is left, if the service takes it within one deadline. `translate` makes
    /// of an event what the API shows.
    pub async fn run(
        mut self,
        mut events: broadcast::Receiver<Event>,
        translate: fn(Event) -> v1::Event,
        mut stop: watch::Receiver<bool>,
    ) {
        let mut sending: Option<EventSend> = None;
        let mut next: Pin<Box<Sleep>> = Box::pin(sleep(LINGER));
        let mut stopping = false;
        loop {
            if stopping && sending.is_none() && self.is_idle() {
                return;
            }
            let waits = sending.is_none() && !self.is_idle();
            tokio::select! {
                event = events.recv(), if !stopping => match event {
                    Ok(event) => {
                        let was_idle = self.is_idle();
                        if self.wants(&event.kind) {
                            self.queue.push(translate(event));
                        }
                        if was_idle && sending.is_none() {
                            next.as_mut().reset(Instant::now() + LINGER);
                        } else if self.batch.is_none() && self.queue.events.len() >= BATCH {
                            next.as_mut().reset(Instant::now());
                        }
                    }
                    Err(RecvError::Lagged(missed)) => {
                        self.queue.dropped += missed;
                        count(|c| c.hook_events_lagged.add(missed));
                    }
                    Err(RecvError::Closed) => stopping = true,
                },
                told = told(&mut sending) => {
                    sending = None;
                    let again = self.take(told);
                    if stopping && self.batch.is_some() {
                        self.give_up();
                        return;
                    }
                    next.as_mut().reset(Instant::now() + again);
                }
                () = &mut next, if waits => sending = Some(self.send()),
                _ = stop.wait_for(|stop| *stop), if !stopping => {
                    stopping = true;
                    // Events sent before the stop, such as the end of the last connection.
                    while let Ok(event) = events.try_recv() {
                        if self.wants(&event.kind) {
                            self.queue.push(translate(event));
                        }
                    }
                    next.as_mut().reset(Instant::now());
                }
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.batch.is_none() && self.queue.events.is_empty()
    }

    fn wants(&self, kind: &EventKind) -> bool {
        let kind = match kind {
            EventKind::Connected { .. } => HookEvent::Connected,
            EventKind::Disconnected { .. } => HookEvent::Disconnected,
            EventKind::TakenOver => HookEvent::TakenOver,
            EventKind::Subscribed { .. } => HookEvent::Subscribed,
            EventKind::Unsubscribed { .. } => HookEvent::Unsubscribed,
            EventKind::SessionEnded { .. } => HookEvent::SessionEnded,
            EventKind::Dropped { .. } => HookEvent::Dropped,
            EventKind::AuthFailed => HookEvent::AuthFailed,
        };
        self.kinds.contains(&kind)
    }

    /// Begins to send a batch: the one that was not taken, or another.
    fn send(&mut self) -> EventSend {
        if self.batch.is_none() {
            self.sequence += 1;
            self.batch = Some(OnEventsRequest {
                dropped: std::mem::take(&mut self.queue.dropped),
                events: self.queue.take_batch(self.most),
                sequence: self.sequence,
            });
        }
        let request = self.batch.clone().unwrap_or_default();
        let (provider, deadline) = (self.provider.clone(), self.deadline);
        Box::pin(async move {
            let asked = async { provider.client().on_events(provider.request(request)).await };
            match timeout(deadline, asked).await {
                Ok(answer) => answer.map(drop).map_err(NoAnswer::from),
                Err(_) => Err(NoAnswer::Failed(QuestionFailure::Unreachable, "no answer in time".to_owned())),
            }
        })
    }

    /// Takes the outcome of a batch. Returns the time after which to go on.
    fn take(&mut self, told: Result<(), NoAnswer>) -> Duration {
        match told {
            Ok(()) => {
                let events = self.batch.take().map_or(0, |batch| batch.events.len() as u64);
                count(|c| c.hook_events_told.add(events));
                self.most = self.most.saturating_mul(2).min(BATCH);
                if self.retry.succeeded() {
                    info!(source = "auth.grpc", "takes events again");
                }
                if self.queue.events.len() >= BATCH { Duration::ZERO } else { LINGER }
            }
            Err(NoAnswer::Denied(problem)) => {
                count(|c| c.hook_events_failures.add(1));
                self.narrow(LeftOut::Refused(&problem));
                Duration::ZERO
            }
            Err(NoAnswer::Failed(failure, problem)) => {
                count(|c| c.hook_events_failures.add(1));
                let pause = self.retry.failed();
                if self.retry.failures == self.retry.threshold {
                    warn!(
                        source = "auth.grpc",
                        problem, "does not take events, it is left alone for a while"
                    );
                }
                // While there is room nothing is left out. Then the oldest events are, and those of this batch are.
                let may_be_its_fault = failure == QuestionFailure::Unusable;
                if may_be_its_fault && self.retry.failures >= self.retry.threshold && self.queue.dropped > 0 {
                    self.narrow(LeftOut::Full);
                }
                pause
            }
        }
    }

    /// Goes on with the first half of a batch that is not taken; an event that is alone in it is left out.
    fn narrow(&mut self, why: LeftOut<'_>) {
        let Some(batch) = &mut self.batch else { return };
        let half = batch.events.len().div_ceil(2);
        let rest = batch.events.split_off(half);
        self.most = half.max(1);
        if !rest.is_empty() {
            self.queue.put_back(rest);
            return;
        }
        match why {
            LeftOut::Refused(problem) => {
                let device_id = batch.events.first().map(|event| event.device_id.as_str());
                warn_limited!(
                    source = "auth.grpc",
                    problem,
                    device_id,
                    "event left out, the service answers it with a status"
                );
                count(|c| c.hook_events_refused.add(1));
            }
            LeftOut::Full => count(|c| c.hook_events_full.add(1)),
        }
        let dropped = self.batch.take().map_or(0, |batch| batch.dropped);
        self.queue.dropped += dropped + 1;
        // Of no batch that the service has.
        self.sequence -= 1;
    }

    /// Nobody will be told of the events that are left.
    fn give_up(&mut self) {
        let batch = self.batch.take().map_or(0, |batch| batch.events.len());
        let lost = (batch + self.queue.events.len()) as u64;
        count(|c| c.hook_events_shutdown.add(lost));
        warn!(source = "auth.grpc", lost, "events were not taken before the end");
    }
}

/// Returns the outcome of the batch under way; never, if none is.
async fn told(sending: &mut Option<EventSend>) -> Result<(), NoAnswer> {
    match sending {
        Some(sending) => sending.await,
        None => std::future::pending().await,
    }
}

impl Retry {
    /// Returns whether the service was away.
    fn succeeded(&mut self) -> bool {
        std::mem::take(&mut self.failures) >= self.threshold
    }

    /// Returns the pause before the next try.
    fn failed(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let doublings = self.failures.saturating_sub(self.threshold).min(16);
        self.first.saturating_mul(1 << doublings).min(LONGEST_PAUSE)
    }
}

impl EventQueue {
    fn push(&mut self, event: v1::Event) {
        let bytes = event.encoded_len();
        self.events.push_back((event, bytes));
        self.bytes += bytes;
        while self.events.len() > self.most || self.bytes > QUEUE_BYTES {
            let Some((_, bytes)) = self.events.pop_front() else { return };
            self.bytes -= bytes;
            self.dropped += 1;
            count(|c| c.hook_events_full.add(1));
        }
    }

    /// Puts events of a batch back to the front.
    fn put_back(&mut self, events: Vec<v1::Event>) {
        for event in events.into_iter().rev() {
            let bytes = event.encoded_len();
            self.bytes += bytes;
            self.events.push_front((event, bytes));
        }
    }

    fn take_batch(&mut self, most: usize) -> Vec<v1::Event> {
        let (mut batch, mut taken) = (Vec::new(), 0);
        while batch.len() < most && taken < BATCH_BYTES {
            let Some((event, bytes)) = self.events.pop_front() else { break };
            self.bytes -= bytes;
            taken += bytes;
            batch.push(event);
        }
        if self.events.is_empty() {
            self.events = VecDeque::new();
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: &str) -> v1::Event {
        v1::Event { device_id: id.to_owned(), ..v1::Event::default() }
    }

    #[test]
    fn the_oldest_events_give_way_by_number_and_by_bytes() {
        let mut queue = EventQueue { events: VecDeque::new(), bytes: 0, most: 3, dropped: 0 };
        for id in ["a", "b", "c", "d", "e"] {
            queue.push(event(id));
        }
        assert_eq!(queue.dropped, 2);
        let ids: Vec<_> = queue.take_batch(BATCH).into_iter().map(|event| event.device_id).collect();
        assert_eq!((ids.join(""), queue.bytes), ("cde".to_owned(), 0));
        queue.most = usize::MAX;
        let long = "x".repeat(1 << 20);
        for _ in 0..20 {
            queue.push(event(&long));
        }
        assert!(queue.bytes <= QUEUE_BYTES && queue.dropped > 2, "{} bytes", queue.bytes);
        assert_eq!(queue.take_batch(BATCH).len(), 1, "a batch ends with the event that is too much");
    }
}
