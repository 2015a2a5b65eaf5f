//! Writing latest values: which of a batch are taken, and what goes where.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use ahash::RandomState;
use gateway_core::warn_limited;
use scylla::errors::ExecutionError;
use tokio::task::JoinSet;

use super::{
    ScyllaOptions, StoreError,
    cluster::{Cluster, ClusterSession},
    read, row,
    topics::{KnownTopics, Stored, TopicAdmission},
    write::{self, BATCH_BYTES, Plan, WriteKind},
};
use store::LatestValue;

/// Larger values are dropped and counted: Cassandra takes no mutation above half a commit log segment (16 MiB by
/// default), and one that it never takes would be tried for ever.
const MAX_VALUE_BYTES: usize = 4 << 20;

/// Devices whose topics are read at once.
const LOADS: usize = 32;

pub(super) async fn upsert(cluster: &Arc<Cluster>, batch: Arc<[LatestValue]>) -> Result<(), StoreError> {
    let mut connection = cluster.connection().await?;
    let mut admission = Admission { known: &cluster.known, fresh: Vec::new(), dropped: Dropped::default() };
    let admitted = match admit(cluster, &connection, &batch, &mut admission).await {
        // The tables were dropped or replaced: try once more with those that exist now.
        Err(_) if cluster.is_suspected(&connection) => {
            connection = cluster.connection().await?;
            admission.dropped = Dropped::default();
            admit(cluster, &connection, &batch, &mut admission).await?
        }
        admitted => admitted?,
    };
    let newest = row::newest_by_topic(&batch, &admitted);
    let mut plan = Plan::new(2 * admitted.len());
    // A value goes to both tables in quick succession, while it is in the processor's cache.
    for numbers in row::by_device(&batch, &admitted, BATCH_BYTES) {
        plan.add(LatestTable::ByDevice, &numbers);
        for number in numbers.iter().filter(|number| newest[**number]) {
            plan.add(LatestTable::ByTopic, std::slice::from_ref(number));
        }
    }
    let values = Arc::new(LatestBatch { batch: Arc::clone(&batch), options: Arc::clone(&cluster.options) });
    let written = write::all(cluster, &connection, values, plan).await;
    if matches!(written, Ok(()) | Err(StoreError::Partly { .. })) {
        admission.dropped.count();
    }
    if written.is_ok() {
        // Only now it is certain that the tables have what is noted.
        admission.fresh.clear();
    }
    written
}

/// Removes values with the timestamp of their version: what is older does not come back, whenever it arrives, and what is
/// newer stays. The row of a topic goes if it is of that device, with its own timestamp: others may have written since.
pub(super) async fn remove(cluster: &Arc<Cluster>, batch: Arc<[LatestValue]>) -> Result<(), StoreError> {
    let connection = cluster.connection().await?;
    let session = &connection.session;
    let doing = "remove a value";
    for value in batch.iter() {
        let (device, topic) = (value.device.as_str(), &*value.topic);
        if !row::is_name(device) || !row::is_name(topic) {
            continue;
        }
        let request =
            session.execute_unpaged(&connection.drop_by_device, (value.version.cast_signed(), device, topic));
        cluster.ask(&connection, doing, request).await?;
        let newest = read::get(cluster, topic, None).await?;
        if let Some(newest) = newest.filter(|newest| newest.device == value.device)
            && newest.version <= value.version
        {
            let request =
                session.execute_unpaged(&connection.drop_by_topic, (newest.version.cast_signed(), topic));
            cluster.ask(&connection, doing, request).await?;
        }
    }
    let devices: Vec<_> = batch.iter().map(|value| value.device.as_str().to_owned()).collect();
    cluster.known.forget(&devices);
    Ok(())
}

#[derive(Clone, Copy)]
pub(super) enum LatestTable {
    ByDevice,
    ByTopic,
}

pub(super) struct LatestBatch {
    pub(super) batch: Arc<[LatestValue]>,
    pub(super) options: Arc<ScyllaOptions>,
}

impl WriteKind for LatestBatch {
    type Table = LatestTable;

    async fn put(
        &self,
        connection: &ClusterSession,
        table: LatestTable,
        numbers: &[usize],
    ) -> Result<(), ExecutionError> {
        let statement = match table {
            LatestTable::ByDevice => &connection.put_by_device,
            LatestTable::ByTopic => &connection.put_by_topic,
        };
        let rows: Vec<_> = numbers.iter().map(|number| self.options.row(&self.batch[*number])).collect();
        write::put(&connection.session, statement, &self.options, &rows).await
    }

    fn refused(&self, number: usize, error: &str) {
        store::counters::count(|c| c.latest_dropped_rejected.add(1));
        let value = &self.batch[number];
        write::warn_refused(value.device.as_str(), &value.topic, error);
    }
}

/// Devices with newly noted topics whose write may fail; on drop these devices are forgotten.
struct Admission<'a> {
    known: &'a KnownTopics,
    fresh: Vec<String>,
    dropped: Dropped,
}

/// Values that are not written, counted once the rest is: a write that fails is repeated whole.
#[derive(Default)]
struct Dropped {
    topics: usize,
    names: usize,
    large: usize,
    /// Written, and of no use: the tables have newer ones, of the future.
    older: usize,
}

impl Dropped {
    fn count(&self) {
        store::counters::count(|c| {
            c.latest_dropped_topics.add(self.topics as u64);
            c.latest_dropped_name.add(self.names as u64);
            c.latest_dropped_too_large.add(self.large as u64);
            c.latest_dropped_clock.add(self.older as u64);
        });
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        self.known.forget(&self.fresh);
    }
}

/// Logs that values of a device are of no use, with a limit on the rate.
fn warn_if_ahead<'a>(cluster: &Cluster, values: impl IntoIterator<Item = &'a LatestValue>, stored: &Stored) {
    for value in values {
        let hash = || cluster.known.hash(&value.topic);
        let Some(newer) = stored.ahead.get(&hash()).filter(|newer| **newer > value.version) else { continue };
        warn_limited!(
            device = value.device.as_str(),
            topic = &*value.topic,
            ahead_secs = (newer - value.version) / 1_000_000,
            written_by = stored.writer.as_deref(),
            "the database has a value from the future, so newer ones are lost until its time has come: the clock of this \
             machine is behind, or that of the gateway that wrote it was ahead; see docs/storage.md"
        );
        return;
    }
}

/// Chooses the values of `batch` to write: all but those of topics beyond the bound and the ones that no database takes.
async fn admit(
    cluster: &Arc<Cluster>,
    connection: &Arc<ClusterSession>,
    batch: &Arc<[LatestValue]>,
    admission: &mut Admission<'_>,
) -> Result<Vec<usize>, StoreError> {
    let mut devices: HashMap<&str, Vec<usize>, RandomState> = HashMap::default();
    for (number, value) in batch.iter().enumerate() {
        if !row::is_name(value.device.as_str()) || !row::is_name(&value.topic) {
            admission.dropped.names += 1;
        } else if row::size(value) > MAX_VALUE_BYTES {
            admission.dropped.large += 1;
        } else {
            devices.entry(value.device.as_str()).or_default().push(number);
        }
    }
    let mut admitted = Vec::with_capacity(batch.len());
    let mut take = |device: &str, numbers: &[usize], found: TopicAdmission| {
        if found.fresh {
            admission.fresh.push(device.to_owned());
        }
        let may = numbers.iter().zip(found.may).filter_map(|(number, may)| may.then_some(*number));
        let before = admitted.len();
        admitted.extend(may);
        admission.dropped.topics += numbers.len() - (admitted.len() - before);
        let taken = admitted[before..].iter().map(|number| &batch[*number]);
        admission.dropped.older +=
            cluster.known.void(device, taken.map(|value| (&*value.topic, value.version)));
    };
    let mut unknown = BTreeMap::new();
    for (device, numbers) in devices {
        match cluster.known.admit(device, numbers.iter().map(|number| &*batch[*number].topic)) {
            Some(found) => take(device, &numbers, found),
            None => drop(unknown.insert(device, numbers)),
        }
    }
    let mut loads = JoinSet::new();
    let mut unknown = unknown.into_iter().peekable();
    while unknown.peek().is_some() || !loads.is_empty() {
        if loads.len() < LOADS
            && let Some((device, numbers)) = unknown.next()
        {
            let (cluster, connection, device) =
                (Arc::clone(cluster), Arc::clone(connection), device.to_owned());
            loads.spawn(async move {
                let topics = read::topics(&cluster, &connection, &device).await;
                (device, numbers, topics)
            });
        } else if let Some(loaded) = loads.join_next().await {
            let (device, numbers, stored) =
                loaded.map_err(|e| StoreError::Unavailable(format!("read topics: {e}")))?;
            let stored = stored?;
            warn_if_ahead(cluster, numbers.iter().map(|number| &batch[*number]), &stored);
            let topics = numbers.iter().map(|number| &*batch[*number].topic);
            take(&device, &numbers, cluster.known.load(&device, stored, topics));
        }
    }
    Ok(admitted)
}
