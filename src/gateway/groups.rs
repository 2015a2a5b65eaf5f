//! The log of consumer groups on disk, and the groups themselves.

use std::{sync::Arc, time::Duration};

use broker::{Broker, EventKinds, GroupFilter, GroupLog, MemoryKind, Selector};
use config::Config;
use consumer_groups::{
    ConsumerGroups, GroupError, GroupMessageFilter, GroupStatus as Status, GroupsOptions, Intake, Marker,
    MessageFilter,
};
use disk::EmbeddedRecords;
use gateway_core::{
    GroupId, clock,
    metrics::{Figure, MetricRow, figures},
};
use segment_log::{EmbeddedLog, LogOptions};
use store::{DataDir, PartitionedLog as _, StoreError, StoreHealth};

use super::{StartError, home::HomeLedger};

/// The engines.
#[derive(Clone)]
pub(super) struct OpenedGroups {
    pub(super) log: Arc<EmbeddedLog>,
    records: Arc<EmbeddedRecords>,
    memory: usize,
}

/// Opens the log in the data directory; what is kept of groups is in `records`. Blocks on the disk.
pub(super) fn open(
    config: &Config,
    directory: &Arc<DataDir>,
    records: &Arc<EmbeddedRecords>,
    ledger: Option<&HomeLedger>,
) -> Result<OpenedGroups, StartError> {
    let (waiting, cache) = config.log_memory();
    let options = LogOptions {
        max_waiting_bytes: waiting.0,
        cache_bytes: cache.0,
        shipping: ledger.map(|ledger| Arc::clone(&ledger.log)),
        ..LogOptions::default()
    };
    let log = Arc::new(EmbeddedLog::open(directory, &options)?);
    Ok(OpenedGroups { log, records: Arc::clone(records), memory: waiting.0 + cache.0 })
}

/// Interval at which groups look for records they need not keep.
const UPKEEP: Duration = Duration::from_secs(1);

impl OpenedGroups {
    /// Brings the groups back, so that from now on messages are appended for them.
    pub(super) async fn start(
        &self,
        config: &Config,
        broker: &Broker,
    ) -> Result<Arc<ConsumerGroups>, StartError> {
        let options = GroupsOptions {
            max_groups: config.groups.max_groups,
            max_dead_letters: config.groups.max_dead_letters,
            max_dead_letter_bytes: config.groups.max_dead_letter_bytes.0,
            max_log_bytes: config.groups.max_bytes.0 as u64,
            upkeep_interval: UPKEEP,
            clock: clock::now,
        };
        let marker = Arc::new(Marking(broker.clone()));
        let loaded =
            ConsumerGroups::load(Arc::clone(&self.log) as _, Arc::clone(&self.records) as _, marker, options);
        loaded.await.map_err(|error| match error {
            GroupError::Store(error) => error.into(),
            error => StartError::Store(StoreError::Damaged(error.to_string())),
        })
    }

    /// The log as the broker needs it.
    pub(super) fn for_broker(&self) -> GroupLog {
        GroupLog { log: Arc::clone(&self.log) as _, memory: self.memory }
    }

    /// Health of the log, by name.
    pub(super) fn health(&self) -> (&'static str, StoreHealth) {
        ("log", self.log.health())
    }
}

/// The broker marks messages as they are appended.
struct Marking(Broker);

impl Marker for Marking {
    fn keep_for(&self, group: GroupId, filter: &GroupMessageFilter) {
        self.0.keep_for(group, Arc::new(build(filter)));
    }

    fn replace(&self, old: GroupId, new: GroupId, filter: &GroupMessageFilter) {
        self.0.replace_group(old, new, Arc::new(build(filter)));
    }

    fn keep_no_more_for(&self, group: GroupId) {
        self.0.keep_no_more_for(group);
    }

    fn set_intake(&self, group: GroupId, intake: Intake) {
        self.0.set_full(group, intake == Intake::Refuses);
        self.0.set_skipped(group, intake == Intake::Skips);
    }

    fn matcher(&self, filter: &GroupMessageFilter) -> Arc<MessageFilter> {
        let filter = build(filter);
        Arc::new(move |message| filter.matches(message))
    }

    fn hold(&self, bytes: usize) -> bool {
        self.0.account().charge(MemoryKind::GrpcStreams, 0, bytes)
    }

    fn release(&self, bytes: usize) {
        self.0.account().release(MemoryKind::GrpcStreams, bytes);
    }
}

/// A filter as the broker wants it.
fn build(filter: &GroupMessageFilter) -> GroupFilter {
    let selector = Selector::new(!filter.include_backends)
        .devices(filter.devices.clone(), filter.device_prefixes.clone())
        .exclude(filter.exclude_devices.clone(), filter.exclude_topics.clone());
    GroupFilter {
        topics: filter.topics.clone(),
        selector,
        min_qos: filter.least_qos(),
        events: filter.events.iter().fold(EventKinds::default(), |kinds, name| kinds.with(name)),
    }
}

/// Value shown of each group: a figure, and the function that reads it.
type OfGroup = (&'static Figure<1>, fn(&Status) -> u64);

const OF_GROUPS: [OfGroup; 8] = [
    (&figures::GROUP_LAG, |status| status.lag_messages),
    (&figures::GROUP_LAG_BYTES, |status| status.lag_bytes),
    (&figures::GROUP_OUTSTANDING, |status| status.outstanding as u64),
    (&figures::GROUP_MEMBERS, |status| status.members as u64),
    (&figures::GROUP_DEAD_LETTERS, |status| status.dead_letters as u64),
    (&figures::GROUP_LOST, |status| status.lost),
    (&figures::GROUP_REDELIVERED, |status| status.totals.redelivered),
    (&figures::GROUP_OLDEST, |status| {
        status.oldest.map_or(0, |oldest| clock::now().0.saturating_sub(oldest.0) / 1000)
    }),
];

impl OpenedGroups {
    /// The log, and each group: as many as groups.max_groups allows.
    pub(super) fn figures(&self, groups: &ConsumerGroups) -> Vec<MetricRow> {
        let memory = self.log.memory();
        let mut all = vec![
            figures::LOG_BYTES.is(self.log.bytes() as f64),
            figures::LOG_WAITING_BYTES.is(memory.waiting as f64),
            figures::LOG_CACHED_BYTES.is(memory.cached as f64),
        ];
        let groups = groups.list(None, usize::MAX);
        for (figure, value) in OF_GROUPS {
            let rows = groups
                .iter()
                .map(|group| figure.of([group.definition.name.as_str()], value(&group.status) as f64));
            all.extend(rows);
        }
        all
    }
}
