//! Reading: one value, pages of the values of devices, and the topics that a device has.

use std::{collections::HashMap, ops::ControlFlow, sync::Arc};

use gateway_core::clock;
use scylla::{
    response::{PagingState, PagingStateResponse},
    statement::prepared::PreparedStatement,
};
use tokio::task::JoinSet;

use super::{
    StoreError,
    cluster::{Cluster, ClusterSession},
    errors::damaged,
    row::{self, LatestRow},
    topics::Stored,
};
use store::{LatestPage, LatestQuery, LatestValue, PageBuilder, PageToken, Selection};

/// A page ends after this many rows or devices looked at.
const PAGE_WORK: usize = 20_000;

/// Devices that are read at once at most.
const AHEAD: usize = 16;

/// Rows of the first answer for a device, and most of any.
pub(super) const ROWS: (usize, usize) = (25, 500);

/// Lead over this machine's clock, in milliseconds, beyond which a value counts as of the future: more than synchronized clocks
/// differ.
const FUTURE: u64 = 1_000;

/// Target weight of an answer, in bytes: the database counts rows only.
const ANSWER_BYTES: usize = 1 << 20;

pub(super) async fn get(
    cluster: &Arc<Cluster>,
    topic: &str,
    device: Option<&str>,
) -> Result<Option<LatestValue>, StoreError> {
    if !row::is_name(topic) || device.is_some_and(|device| !row::is_name(device)) {
        return Ok(None);
    }
    let connection = cluster.connection().await?;
    let session = &connection.session;
    let doing = "read a value";
    let answer = match device {
        Some(device) => {
            let request = session.execute_unpaged(&connection.get_by_device, (device, topic));
            cluster.ask(&connection, doing, request).await?
        }
        None => {
            let request = session.execute_unpaged(&connection.get_by_topic, (topic,));
            cluster.ask(&connection, doing, request).await?
        }
    };
    let rows = answer.into_rows_result().map_err(damaged)?;
    let row = rows.maybe_first_row::<LatestRow>().map_err(damaged)?;
    row.map(|row| row.into_value(&cluster.options.server_id)).transpose()
}

/// Factor by which a device may exceed its bound of topics in the tables: gateways that share them count for themselves, and the
/// bound may have been higher. The values of topics that are not read are refused.
const OVER: usize = 8;

/// The topics of a device.
pub(super) async fn topics(
    cluster: &Arc<Cluster>,
    connection: &Arc<ClusterSession>,
    device: &str,
) -> Result<Stored, StoreError> {
    let limit = cluster.options.topics_per_device.saturating_mul(OVER);
    let limit = i32::try_from(limit).unwrap_or(i32::MAX);
    let now = clock::to_wall(clock::now()).0.saturating_add(FUTURE).saturating_mul(1000);
    let (mut found, mut newest) = (Stored::default(), now);
    let mut state = PagingState::start();
    loop {
        let request = connection.session.execute_single_page(&connection.topics, (device, limit), state);
        let (rows, next) = cluster.ask(connection, "read the topics of a device", request).await?;
        let rows = rows.into_rows_result().map_err(damaged)?;
        for row in rows.rows::<(&str, i64, Option<&str>)>().map_err(damaged)? {
            let (topic, version, server) = row.map_err(damaged)?;
            let (hash, version) = (cluster.known.hash(topic), version.cast_unsigned());
            found.topics.insert(hash);
            if version > now {
                found.ahead.insert(hash, version);
            }
            if version > newest {
                newest = version;
                found.writer = server.map(str::to_owned);
            }
        }
        match next.into_paging_control_flow() {
            ControlFlow::Break(()) => return Ok(found),
            ControlFlow::Continue(next) => state = next,
        }
    }
}

/// One page. Devices are read ahead, a few at once as long as they are small, and put in order.
pub(super) async fn list(cluster: &Arc<Cluster>, query: LatestQuery) -> Result<LatestPage, StoreError> {
    let selection = Selection::new(query)?;
    if selection.devices.is_empty() {
        return Err(StoreError::NeedsDevices);
    }
    if selection.after.as_ref().is_some_and(|after| !after.topic.is_empty() && !row::is_name(&after.topic)) {
        return Err(StoreError::BadPageToken);
    }
    let connection = cluster.connection().await?;
    let mut page = PageBuilder::new(selection.limit);
    let mut ahead = ReadAhead::new(cluster, &connection, &selection);
    let mut work = 0;
    while let Some((device, after, mut answer)) = ahead.next().await? {
        // Covers everything before this device: no topic is empty.
        if work >= PAGE_WORK {
            return Ok(page.searched_to(Some(PageToken::new(&device, ""))));
        }
        work += 1;
        loop {
            let mut last = None;
            let rows = answer.values.len();
            for value in answer.values {
                if page.is_full() {
                    return Ok(page.cut());
                }
                work += 1;
                last = Some(PageToken::new(&device, &value.topic));
                if selection.selects(&device, &value.topic) {
                    page.push(value);
                }
            }
            let ControlFlow::Continue(next) = answer.next.into_paging_control_flow() else { break };
            if work >= PAGE_WORK && last.is_some() {
                return Ok(page.searched_to(last));
            }
            let rows = next_rows(rows, answer.bytes);
            answer = ask(cluster, &connection, &device, &after, rows, next).await?;
        }
    }
    Ok(page.searched_to(None))
}

/// Returns the number of rows to ask for after `rows` that had `bytes` together.
pub(super) fn next_rows(rows: usize, bytes: usize) -> usize {
    let weight = (bytes / rows.max(1)).max(1);
    (ANSWER_BYTES / weight).clamp(1, ROWS.1)
}

/// Rows of a device.
struct DeviceRows {
    values: Vec<LatestValue>,
    bytes: usize,
    next: PagingStateResponse,
}

async fn ask(
    cluster: &Arc<Cluster>,
    connection: &Arc<ClusterSession>,
    device: &str,
    after: &str,
    rows: usize,
    state: PagingState,
) -> Result<DeviceRows, StoreError> {
    let mut statement: PreparedStatement = connection.list.clone();
    statement.set_page_size(i32::try_from(rows).unwrap_or(i32::MAX));
    let request = connection.session.execute_single_page(&statement, (device, after), state);
    let (rows, next) = cluster.ask(connection, "list values", request).await?;
    let rows = rows.into_rows_result().map_err(damaged)?;
    let mut answer = DeviceRows { values: Vec::new(), bytes: 0, next };
    for row in rows.rows::<LatestRow>().map_err(damaged)? {
        let value = row.map_err(damaged)?.into_value(&cluster.options.server_id)?;
        answer.bytes += row::size(&value);
        answer.values.push(value);
    }
    Ok(answer)
}

/// The first answers for the devices of a selection, in order.
struct ReadAhead<'a> {
    cluster: &'a Arc<Cluster>,
    connection: &'a Arc<ClusterSession>,
    /// Each with the topic to begin after.
    devices: Vec<(String, String)>,
    /// The next to ask for, and the next to return.
    asked: usize,
    returned: usize,
    /// Most devices that may be asked for ahead of the next to return.
    width: usize,
    under_way: JoinSet<(usize, Result<DeviceRows, StoreError>)>,
    arrived: HashMap<usize, Result<DeviceRows, StoreError>>,
}

impl<'a> ReadAhead<'a> {
    fn new(cluster: &'a Arc<Cluster>, connection: &'a Arc<ClusterSession>, selection: &Selection) -> Self {
        let begin = |device: &String| match &selection.after {
            Some(after) if after.device > *device => None,
            Some(after) if after.device == *device => Some((device.clone(), after.topic.clone())),
            _ => Some((device.clone(), String::new())),
        };
        let devices =
            selection.devices.iter().filter(|device| row::is_name(device)).filter_map(begin).collect();
        Self {
            cluster,
            connection,
            devices,
            asked: 0,
            returned: 0,
            width: 1,
            under_way: JoinSet::new(),
            arrived: HashMap::new(),
        }
    }

    /// A device, the topic that its rows begin after, and the first of them.
    async fn next(&mut self) -> Result<Option<(String, String, DeviceRows)>, StoreError> {
        if self.returned == self.devices.len() {
            return Ok(None);
        }
        while self.asked < self.devices.len().min(self.returned + self.width) {
            let (number, (device, after)) = (self.asked, self.devices[self.asked].clone());
            let (cluster, connection) = (Arc::clone(self.cluster), Arc::clone(self.connection));
            self.under_way.spawn(async move {
                (number, ask(&cluster, &connection, &device, &after, ROWS.0, PagingState::start()).await)
            });
            self.asked += 1;
        }
        let answer = loop {
            if let Some(answer) = self.arrived.remove(&self.returned) {
                break answer?;
            }
            match self.under_way.join_next().await {
                Some(Ok((number, answer))) => drop(self.arrived.insert(number, answer)),
                Some(Err(e)) => return Err(StoreError::Unavailable(format!("list values: {e}"))),
                None => return Err(StoreError::Unavailable("list values: no answer".to_owned())),
            }
        };
        self.width = if answer.bytes > ANSWER_BYTES { 1 } else { (self.width * 2).min(AHEAD) };
        let (device, after) = std::mem::take(&mut self.devices[self.returned]);
        self.returned += 1;
        Ok(Some((device, after, answer)))
    }
}
