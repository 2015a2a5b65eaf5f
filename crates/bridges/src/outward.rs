//! Carries messages out: takes those of a group that the bridge makes for itself, brings them to the other side in batches, and
//! acknowledges only what the other side has acknowledged.
//!
//! One batch is in hand at a time, so that a device's messages arrive in order whatever fails: what is not acknowledged is tried
//! again before anything after it. While the other side is away the batch stays in hand and everything else on the disk, in the
//! log; nobody who publishes waits for it.

use std::{collections::BTreeMap, future::Future, pin::pin, sync::Arc, time::Duration};

use access::backends::Scope;
use aws_lc_rs::rand;
use config::{Bridge, WhenFull};
use consumer_groups::{
    ConsumerGroups, Definition, GroupError, GroupMessageFilter, GroupStart, Joining, KeptOrder, LiveMember,
};
use gateway_core::clock;
use groups::{Credit, Nack, Room};
use tokio::{
    select,
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};
use tracing::warn;

use super::{
    status::{BridgeFailure, BridgeStatus, Reason},
    work::{BridgeBatch, RefusedMessage},
};

/// The other side of a bridge that leads out.
pub(super) trait BridgeSink: Send {
    /// Brings open messages of `work` to the other side, in order, and says of each what became of it. Ends within the deadline
    /// of the bridge, which a connection has for itself. Cancelled, or failed, it is followed by [`Self::reset`].
    ///
    /// # Errors
    /// The other side has failed; what is open is tried again after a pause.
    fn deliver(
        &mut self,
        work: &mut BridgeBatch,
    ) -> impl Future<Output = Result<OutboundProgress, BridgeFailure>> + Send;

    /// Looks after the other side while there is nothing to deliver. Returns when it is known to answer, or not to; never if
    /// nothing is to be done. Cancel safe.
    fn idle(&mut self) -> impl Future<Output = Result<(), BridgeFailure>> + Send;

    /// Forgets what is under way.
    fn reset(&mut self);
}

/// Progress of a batch after a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutboundProgress {
    /// Nothing is open.
    All,
    /// A part of it has come to an end, or is known to need smaller parts. The rest is to go now.
    Part,
}

impl OutboundProgress {
    /// [`Self::All`] if nothing of `work` is open.
    pub(super) fn of(work: &BridgeBatch) -> Self {
        if work.open().is_empty() { Self::All } else { Self::Part }
    }
}

/// Time for which the group leaves a message with the bridge without a sign of life.
const HOLD: Duration = Duration::from_secs(60);
/// Interval of the bridge's signs of life.
const KEEP: Duration = Duration::from_secs(15);
/// Pause before the bridge goes on with the next group.
const NEXT: Duration = Duration::from_millis(10);
/// Longest time for which the last acknowledgements may be written, at the end.
pub(super) const LAST: Duration = Duration::from_secs(2);

/// See the module.
pub(super) struct Outward<O> {
    pub(super) config: Bridge,
    pub(super) status: Arc<BridgeStatus>,
    pub(super) groups: Arc<ConsumerGroups>,
    pub(super) out: O,
    /// The gateway ends.
    pub(super) drain: watch::Receiver<bool>,
}

/// The group of a bridge.
pub(super) fn group_of(bridge: &str) -> String {
    format!("bridge.{bridge}")
}

fn definition(name: &str, bridge: &Bridge) -> Definition {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Definition {
        name: group_of(name),
        filter: GroupMessageFilter {
            topics: if bridge.topics.is_empty() { vec!["#".to_owned()] } else { bridge.topics.clone() },
            exclude_topics: bridge.exclude_topics.clone(),
            include_backends: bridge.include_backends,
            min_qos: bridge.least_qos() as u8,
            ..GroupMessageFilter::default()
        },
        order: KeptOrder::Device,
        ack_deadline: millis(HOLD),
        max_attempts: 0,
        min_backoff: 1_000,
        max_backoff: 10_000,
        retention_age: millis(bridge.max_age.0),
        retention_bytes: bridge.max_bytes.0 as u64,
        replay_age: 0,
        when_full: match bridge.when_full {
            WhenFull::DropOldest => consumer_groups::RetentionPolicy::DropOldest,
            WhenFull::Refuse => consumer_groups::RetentionPolicy::Refuse,
        },
        paused: false,
        labels: BTreeMap::from([("bridge".to_owned(), name.to_owned())]),
    }
}

/// Makes the group of a bridge, or makes it as the configuration is now: another in its place if the filter changes. Whether it
/// is paused an operator says.
///
/// # Errors
/// Those of the store, or [`GroupError::TooManyGroups`].
pub(super) async fn make_group(
    groups: &Arc<ConsumerGroups>,
    name: &str,
    bridge: &Bridge,
) -> Result<(), GroupError> {
    let mut wanted = definition(name, bridge);
    match groups.get(&wanted.name) {
        Ok(info) => {
            wanted.paused = info.definition.paused;
            match info.definition {
                same if same == wanted => Ok(()),
                group if group.filter == wanted.filter => groups.update(wanted, None).await.map(drop),
                _ => groups.succeed(wanted).await.map(drop),
            }
        }
        Err(GroupError::NotFound) => groups.create(wanted, &GroupStart::Latest).await.map(drop),
        Err(error) => Err(error),
    }
}

impl<O: BridgeSink> Outward<O> {
    /// Runs until the gateway ends.
    pub(super) async fn run(mut self) {
        loop {
            let info = self.groups.get(&group_of(self.status.name()));
            let has_predecessors = info.is_ok_and(|info| info.predecessors > 0);
            let pause = match self.serve().await {
                Ok(()) => return,
                // All that waited in one of them has gone out.
                Err(GroupError::Gone) if has_predecessors => NEXT,
                Err(error) => self.failed(&BridgeFailure::new(Reason::Store, error.to_string()), false),
            };
            select! {
                () = ended(&mut self.drain) => return,
                () = sleep(pause) => {}
            }
        }
    }

    /// As long as the group has the bridge for a member.
    async fn serve(&mut self) -> Result<(), GroupError> {
        make_group(&self.groups, self.status.name(), &self.config).await?;
        let credit = Credit { messages: self.config.batch_messages, bytes: self.config.batch_bytes.0 };
        let _held = self.groups.set_aside(credit.bytes)?;
        let group = group_of(self.status.name());
        let joining =
            Joining { name: "bridge", lease: Duration::ZERO, credit, scope: Scope::ALL, outstanding: &[] };
        let mut member = self.groups.open(&group, joining)?;
        while let Some(mut work) = self.take(&mut member).await? {
            self.status.set_in_flight(work.len());
            let done = self.carry(&mut member, &mut work).await;
            self.status.set_in_flight(0);
            if !done? {
                break;
            }
        }
        // The last acknowledgements are on disk before the end.
        let last = async {
            member.drain()?;
            while !member.next(Room { messages: 0, bytes: 0 }).await?.is_drained {}
            Ok::<_, consumer_groups::MemberEnd>(())
        };
        let _ = timeout(LAST, last).await;
        Ok(())
    }

    /// The next batch: what there is, and what comes within the time that is allowed for it. `None` at the end.
    async fn take(&mut self, member: &mut LiveMember) -> Result<Option<BridgeBatch>, GroupError> {
        let mut work = BridgeBatch::default();
        let mut until: Option<Instant> = None;
        loop {
            let messages = self.config.batch_messages.saturating_sub(work.len());
            let bytes = self.config.batch_bytes.0.saturating_sub(work.bytes());
            if messages == 0 || bytes == 0 {
                return Ok(Some(work));
            }
            let waits = work.len() == 0;
            let filled = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            select! {
                biased;
                () = ended(&mut self.drain) => return Ok((!waits).then_some(work)),
                batch = member.next(Room { messages, bytes }) => {
                    let batch = batch?;
                    if batch.deliveries.is_empty() {
                        continue;
                    }
                    work.add(batch.deliveries);
                    if self.config.linger.0.is_zero() {
                        return Ok(Some(work));
                    }
                    until.get_or_insert_with(|| Instant::now() + self.config.linger.0);
                }
                () = filled => return Ok(Some(work)),
                up = self.out.idle(), if waits => match up {
                    Ok(()) => self.status.up(),
                    Err(failure) => {
                        self.out.reset();
                        let pause = self.failed(&failure, false);
                        select! {
                            () = ended(&mut self.drain) => return Ok(None),
                            () = sleep(pause) => {}
                        }
                    }
                },
            }
        }
    }

    /// Brings a batch to the other side, however long that takes. False if the gateway ends before.
    async fn carry(&mut self, member: &mut LiveMember, work: &mut BridgeBatch) -> Result<bool, GroupError> {
        loop {
            self.status.expired(work.expire(clock::now()));
            let sent = self.attempt(member, work).await?;
            let count = self.settle(member, work)?;
            match sent {
                Ok(OutboundProgress::All) => {
                    self.status.up();
                    return Ok(true);
                }
                Ok(OutboundProgress::Part) => {
                    if count > 0 {
                        self.status.up();
                    }
                    if *self.drain.borrow() {
                        member.nack(&work.held(), &Nack::default())?;
                        return Ok(false);
                    }
                }
                Err(failure) => {
                    self.out.reset();
                    let pause = self.failed(&failure, count > 0);
                    if !self.wait(member, work, pause).await? {
                        return Ok(false);
                    }
                }
            }
            member.extend(&work.held(), HOLD)?;
        }
    }

    /// Tells the group what became of messages. Returns how many the other side has got.
    fn settle(&self, member: &mut LiveMember, work: &mut BridgeBatch) -> Result<usize, GroupError> {
        let (done, count, bytes) = work.take_done();
        if count > 0 {
            member.acknowledge(&done)?;
            self.status.carried(count, bytes);
        }
        for refused in work.take_refused() {
            let RefusedMessage { delivery, topic, refusal, why, attempts } = refused;
            self.status.refused(refusal, &topic, &why);
            let (bridge, cause) = (self.status.name(), refusal.as_str());
            warn!(bridge, topic = &*topic, cause, reason = why, attempts, "message becomes a dead letter");
            let reason = if attempts > 1 { format!("{why} (after {attempts} attempts)") } else { why };
            member.nack(&delivery, &Nack { delay: None, reason, dead_letter: true })?;
        }
        self.status.set_in_flight(work.len());
        Ok(count)
    }

    /// Waits until the other side is tried again. Meanwhile more messages are taken as there is room, so that the first of the
    /// batch is not the only one to be tried. False if the gateway ends.
    async fn wait(
        &mut self,
        member: &mut LiveMember,
        work: &mut BridgeBatch,
        pause: Duration,
    ) -> Result<bool, GroupError> {
        let mut pause = pin!(sleep(pause));
        loop {
            let messages = self.config.batch_messages.saturating_sub(work.len());
            let bytes = self.config.batch_bytes.0.saturating_sub(work.bytes());
            let has_room = messages > 0 && bytes > 0;
            select! {
                () = &mut pause => break,
                () = ended(&mut self.drain) => {
                    member.nack(&work.held(), &Nack::default())?;
                    return Ok(false);
                }
                batch = member.next(Room { messages, bytes }), if has_room => work.add(batch?.deliveries),
                () = sleep(KEEP) => member.extend(&work.held(), HOLD)?,
            }
        }
        self.status.set_in_flight(work.len());
        Ok(true)
    }

    /// One try.
    async fn attempt(
        &mut self,
        member: &mut LiveMember,
        work: &mut BridgeBatch,
    ) -> Result<Result<OutboundProgress, BridgeFailure>, GroupError> {
        let held = work.held();
        let mut sent = pin!(self.out.deliver(work));
        loop {
            select! {
                sent = &mut sent => return Ok(sent),
                () = sleep(KEEP) => member.extend(&held, HOLD)?,
            }
        }
    }

    /// Notes a failure. Returns how long to wait: less than the full time by chance, so that bridges do not come together.
    fn failed(&self, failure: &BridgeFailure, progressed: bool) -> Duration {
        let count = self.status.failed(failure, progressed);
        let pause = pause(&self.config, count, failure.after);
        self.status.waits(pause);
        pause
    }
}

/// The pause after `count` failures in a row.
pub(super) fn pause(config: &Bridge, count: u32, after: Option<Duration>) -> Duration {
    let doubled = 1_u32.checked_shl(count.saturating_sub(1).min(31)).unwrap_or(u32::MAX);
    let longest = config.retry_max.0;
    let full = config.retry_min.0.saturating_mul(doubled).min(longest);
    let mut chance = [0];
    let _ = rand::fill(&mut chance);
    let pause = full - full * u32::from(chance[0]) / 1024;
    // A pause that the other side asks for is honoured within reason.
    pause.max(after.unwrap_or_default().min(MOST_AFTER))
}

/// The longest pause that the other side may ask for.
const MOST_AFTER: Duration = Duration::from_mins(10);

/// Until the gateway ends.
pub(super) async fn ended(drain: &mut watch::Receiver<bool>) {
    let _ = drain.wait_for(|&drain| drain).await;
}
