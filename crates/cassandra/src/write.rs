//! Writing: groups of values, one request each, as many under way as the limit allows.
//!
//! Failures that may pass (timeouts, absent nodes) are tried again, here if the database was only slow and else by the caller,
//! who is told which values are not written. A value that the database refuses is tried once more alone, with statements for a
//! schema that was looked at; if it is refused then, it is dropped. If the tables are not those of the beginning, the values
//! written first were dropped with the old tables, and all are written again.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
    pin::pin,
    sync::Arc,
};

use gateway_core::warn_limited;
use parking_lot::Mutex;
use scylla::{
    client::session::Session,
    errors::ExecutionError,
    serialize::row::SerializeRow,
    statement::{
        batch::{Batch, BatchType},
        prepared::PreparedStatement,
    },
};
use tokio::{task::JoinSet, time::timeout};

use super::{
    ScyllaOptions, StoreError,
    cluster::{Cluster, ClusterSession},
    errors::{self, ErrorKind},
    options,
};

/// An unlogged batch stays under this, in bytes: where Cassandra begins to warn.
pub(super) const BATCH_BYTES: usize = 5 << 10;

/// Attempts of a request that was only too slow.
const ATTEMPTS: u32 = 3;

/// A write ends once failures outnumber successes by this many: the database is away, and further requests would wait
/// in vain.
const HOPELESS: usize = 8;

/// Division of values into requests, and their order.
pub(super) struct Plan<T> {
    /// Numbers of values, those of a request side by side.
    order: Vec<usize>,
    groups: VecDeque<RequestGroup<T>>,
}

/// Values that one request writes: to one partition.
#[derive(Clone)]
struct RequestGroup<T> {
    /// Destination of the values; [`WriteKind`] knows.
    table: T,
    /// Range of their numbers in [`Plan::order`].
    places: Range<usize>,
    /// Number of this attempt, from 1.
    attempt: u32,
}

impl<T> Plan<T> {
    /// With room for about this many values.
    pub(super) fn new(values: usize) -> Self {
        Self { order: Vec::with_capacity(values), groups: VecDeque::with_capacity(values) }
    }

    /// One request for the values of these numbers.
    pub(super) fn add(&mut self, table: T, numbers: &[usize]) {
        let from = self.order.len();
        self.order.extend_from_slice(numbers);
        self.groups.push_back(RequestGroup::new(table, from..self.order.len()));
    }
}

impl<T> RequestGroup<T> {
    fn new(table: T, places: Range<usize>) -> Self {
        Self { table, places, attempt: 1 }
    }
}

/// Knows how values of a kind become a request.
pub(super) trait WriteKind: Send + Sync + 'static {
    /// Names a table.
    type Table: Copy + Send + 'static;

    /// Writes the values of these numbers, in time.
    fn put(
        &self,
        connection: &ClusterSession,
        table: Self::Table,
        numbers: &[usize],
    ) -> impl Future<Output = Result<(), ExecutionError>> + Send;

    /// Counts and logs that the database refuses the value of this number.
    fn refused(&self, number: usize, error: &str);
}

/// Writes what is planned. Whoever drops it half way leaves nothing under way that it waits for.
///
/// # Errors
/// [`StoreError::Partly`] if some values are written, else what is wrong. [`StoreError::Unavailable`] also if tables were
/// dropped twice meanwhile: none of the values counts as written then.
pub(super) async fn all<P: WriteKind>(
    cluster: &Arc<Cluster>,
    connection: &Arc<ClusterSession>,
    put: Arc<P>,
    plan: Plan<P::Table>,
) -> Result<(), StoreError> {
    let order = Arc::new(plan.order);
    let mut connection = Arc::clone(connection);
    for _ in 0..2 {
        let state = Mutex::new(BatchProgress::new(Arc::clone(&order), plan.groups.clone()));
        let (cluster, put) = (Arc::clone(cluster), Arc::clone(&put));
        let round = Arc::new(Round { cluster, put, order: Arc::clone(&order), state });
        if round.whole(&mut connection).await? {
            return round.state.lock().end();
        }
    }
    Err(StoreError::Unavailable("tables were dropped again and again during a write".to_owned()))
}

/// State shared by the tasks of a write: each takes a group, asks the database and takes the next. A task for each request costs
/// twice as much: the driver's futures are large, and are made in place here.
struct Round<P: WriteKind> {
    cluster: Arc<Cluster>,
    put: Arc<P>,
    /// Of the [`Plan`].
    order: Arc<Vec<usize>>,
    state: Mutex<BatchProgress<P::Table>>,
}

struct BatchProgress<T> {
    order: Arc<Vec<usize>>,
    queue: VecDeque<RequestGroup<T>>,
    /// Groups that the database does not take.
    refused: Vec<(RequestGroup<T>, ExecutionError)>,
    unwritten: BTreeSet<usize>,
    error: Option<StoreError>,
    good: usize,
    bad: usize,
}

impl<P: WriteKind> Round<P> {
    /// Writes all groups, then once more, alone, what was refused. False if tables were dropped and made anew
    /// meanwhile: what was written before is gone and what came after is not, so the two tables differ until all is
    /// written again. `connection` becomes one for the present tables.
    async fn whole(self: &Arc<Self>, connection: &mut Arc<ClusterSession>) -> Result<bool, StoreError> {
        self.run(connection).await?;
        if !self.has_same_tables(connection).await? {
            return Ok(false);
        }
        if self.state.lock().ask_alone() {
            self.run(connection).await?;
            if !self.has_same_tables(connection).await? {
                return Ok(false);
            }
            self.drop_refused();
        }
        Ok(true)
    }

    /// Looks at the schema, if there was a reason to since `connection` was made, and puts the one for it in its place.
    async fn has_same_tables(&self, connection: &mut Arc<ClusterSession>) -> Result<bool, StoreError> {
        if !self.cluster.is_suspected(connection) {
            return Ok(true);
        }
        let current = self.cluster.connection().await?;
        let same = current.tables == connection.tables;
        *connection = current;
        Ok(same)
    }

    /// Until the queue is empty, or hopeless.
    async fn run(self: &Arc<Self>, connection: &Arc<ClusterSession>) -> Result<(), StoreError> {
        let number = self.state.lock().queue.len().min(self.cluster.options.concurrency);
        let mut tasks = JoinSet::new();
        for _ in 0..number {
            // Boxed, it is copied once, else five times on its way into the set.
            tasks.spawn(Box::pin(Arc::clone(self).work(Arc::clone(connection))));
        }
        while let Some(ended) = tasks.join_next().await {
            ended.map_err(|e| StoreError::Unavailable(format!("write: {e}")))?;
        }
        self.state.lock().give_up();
        Ok(())
    }

    async fn work(self: Arc<Self>, connection: Arc<ClusterSession>) {
        loop {
            let permit = self.cluster.writes.permit().await;
            let Some(group) = self.state.lock().next() else { return };
            let numbers = &self.order[group.places.clone()];
            let result = self.put.put(&connection, group.table, numbers).await;
            self.cluster.answered(&connection, permit, &result);
            self.state.lock().done(group, result, &self.cluster.options);
        }
    }

    /// Drops values that were refused alone, with the schema as it should be: they never will be taken.
    fn drop_refused(&self) {
        let mut state = self.state.lock();
        let mut dropped = BTreeMap::new();
        for (group, error) in std::mem::take(&mut state.refused) {
            if errors::kind(&error) == ErrorKind::Rejected {
                dropped.extend(self.order[group.places].iter().map(|number| (*number, error.to_string())));
            } else {
                state.fail(&group, &error, &self.cluster.options);
            }
        }
        for (number, error) in dropped {
            state.unwritten.remove(&number);
            self.put.refused(number, &error);
        }
    }
}

impl<T> BatchProgress<T> {
    fn new(order: Arc<Vec<usize>>, queue: VecDeque<RequestGroup<T>>) -> Self {
        let (refused, unwritten) = (Vec::new(), BTreeSet::new());
        Self { order, queue, refused, unwritten, error: None, good: 0, bad: 0 }
    }

    fn next(&mut self) -> Option<RequestGroup<T>> {
        let hopeless = self.bad > self.good + HOPELESS;
        if hopeless { None } else { self.queue.pop_front() }
    }

    fn done(&mut self, group: RequestGroup<T>, result: Result<(), ExecutionError>, options: &ScyllaOptions) {
        let Err(error) = result else {
            self.good += 1;
            return;
        };
        match errors::kind(&error) {
            kind @ (ErrorKind::Schema | ErrorKind::Rejected) => {
                errors::counted(kind);
                self.refused.push((group, error));
                return;
            }
            ErrorKind::Overloaded if group.attempt < ATTEMPTS => {
                self.note(&error, options);
                self.queue.push_back(RequestGroup { attempt: group.attempt + 1, ..group });
            }
            _ => self.fail(&group, &error, options),
        }
        self.bad += 1;
    }

    fn fail(&mut self, group: &RequestGroup<T>, error: &ExecutionError, options: &ScyllaOptions) {
        self.note(error, options);
        self.unwritten.extend(&self.order[group.places.clone()]);
    }

    fn note(&mut self, error: &ExecutionError, options: &ScyllaOptions) {
        let error = errors::failed("write", error, options);
        self.error.get_or_insert(error);
    }

    /// Counts the groups that are left as not written.
    fn give_up(&mut self) {
        self.unwritten.extend(self.queue.drain(..).flat_map(|group| &self.order[group.places]));
    }

    fn end(&mut self) -> Result<(), StoreError> {
        let Some(error) = self.error.take().filter(|_| !self.unwritten.is_empty()) else { return Ok(()) };
        match error {
            StoreError::Unavailable(reason) if self.good > 0 => {
                Err(StoreError::Partly { unwritten: self.unwritten.iter().copied().collect(), reason })
            }
            error => Err(error),
        }
    }
}

impl<T: Copy> BatchProgress<T> {
    /// Puts each value of the refused groups into a group of its own, to be written next, and returns whether there are any.
    fn ask_alone(&mut self) -> bool {
        let refused = std::mem::take(&mut self.refused).into_iter();
        self.queue = refused
            .flat_map(|(group, _)| group.places.map(move |at| RequestGroup::new(group.table, at..at + 1)))
            .collect();
        !self.queue.is_empty()
    }
}

/// A statement whose timeout and speculative execution are left to [`put`] and not to the driver, which pays for them
/// at each request even if they never happen.
pub(super) fn unhurried(session: &Session, mut statement: PreparedStatement) -> PreparedStatement {
    let profile = session.get_default_execution_profile_handle().pointee_to_builder();
    let profile = profile.speculative_execution_policy(None).request_timeout(None).build();
    statement.set_execution_profile_handle(Some(profile.into_handle()));
    statement
}

/// Writes rows of one partition with an [`unhurried`] statement, in one request; if there is no answer in
/// `speculative_delay` in one more, which the driver may send to several nodes.
pub(super) async fn put(
    session: &Session,
    statement: &PreparedStatement,
    options: &ScyllaOptions,
    rows: &[impl SerializeRow + Sync],
) -> Result<(), ExecutionError> {
    let all = options.request_timeout;
    let alone = options.speculative_delay.filter(|delay| *delay < all);
    let mut first = pin!(send(session, statement, options, rows));
    if let Ok(answer) = timeout(alone.unwrap_or(all), first.as_mut()).await {
        return answer;
    }
    let Some(alone) = alone else { return Err(ExecutionError::RequestTimeout(all)) };
    let mut speculative = statement.clone();
    speculative.set_execution_profile_handle(None);
    let both = Box::pin(async {
        let mut second = pin!(send(session, &speculative, options, rows));
        tokio::select! {
            answer = first.as_mut() => if answer.is_ok() { answer } else { second.await },
            answer = second.as_mut() => if answer.is_ok() { answer } else { first.await },
        }
    });
    timeout(all - alone, both).await.unwrap_or(Err(ExecutionError::RequestTimeout(all)))
}

async fn send(
    session: &Session,
    statement: &PreparedStatement,
    options: &ScyllaOptions,
    rows: &[impl SerializeRow],
) -> Result<(), ExecutionError> {
    if let [row] = rows {
        return session.execute_unpaged(statement, row).await.map(drop);
    }
    let mut batch = Batch::new(BatchType::Unlogged);
    batch.set_is_idempotent(true);
    batch.set_consistency(options::level(options.write_consistency));
    batch.set_execution_profile_handle(statement.get_execution_profile_handle().cloned());
    for _ in rows {
        batch.append_statement(statement.clone());
    }
    session.batch(&batch, rows).await.map(drop)
}

/// Logs that a value was dropped, with a limit on the rate.
pub(super) fn warn_refused(device: &str, topic: &str, error: &str) {
    warn_limited!(device, topic, error, "the database refuses a value, it is dropped");
}
