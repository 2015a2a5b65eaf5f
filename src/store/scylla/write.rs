//! Writing: groups of values, each one request, so many under way as the limit allows.
//!
//! What may pass (timeouts, absent nodes) is tried again, here if the database was only slow and else by the caller,
//! who is told which values are not written. What the database refuses is tried once more alone, with statements
//! for a schema that was looked at; if it is refused then, the value is dropped.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    pin::pin,
    sync::Arc,
};

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
    cluster::{Cluster, Connection},
    errors::{self, Kind},
};
use crate::warn_limited;

/// An unlogged batch stays under this, in bytes: where Cassandra begins to warn.
pub(super) const BATCH_BYTES: usize = 5 << 10;

/// Attempts of a request that was only too slow.
const ATTEMPTS: u32 = 3;

/// So many more failures than successes end a write: the database is away, and each further request would wait in vain.
const HOPELESS: usize = 8;

/// Values that one request writes: to one partition.
#[derive(Debug, Clone)]
pub(super) struct Group<T> {
    /// Where they go; [`Put`] knows.
    pub(super) table: T,
    /// Their places in what is written.
    pub(super) numbers: Vec<usize>,
}

/// Knows how values of a kind become a request.
pub(super) trait Put: Send + Sync + 'static {
    /// Names a table.
    type Table: Copy + Send + 'static;

    /// Writes the values of `group`.
    fn put(
        &self,
        connection: &Connection,
        group: &Group<Self::Table>,
    ) -> impl Future<Output = Result<(), ExecutionError>> + Send;

    /// Counts and tells that the database refuses the value of this number.
    fn refused(&self, number: usize, error: &str);
}

/// Writes `groups`. Whoever drops it half way leaves nothing under way that it waits for.
///
/// # Errors
/// [`StoreError::Partly`] if some values are written, else what is wrong.
pub(super) async fn all<P: Put>(
    cluster: &Arc<Cluster>,
    connection: &Arc<Connection>,
    put: Arc<P>,
    groups: Vec<Group<P::Table>>,
) -> Result<(), StoreError> {
    let round = Arc::new(Round { cluster: Arc::clone(cluster), put, state: Mutex::new(State::new(groups)) });
    round.run(connection).await?;
    if round.state.lock().ask_alone() {
        match cluster.connection().await {
            Ok(connection) => round.run(&connection).await?,
            Err(e) => round.state.lock().give_up(Some(e)),
        }
        round.drop_refused();
    }
    let mut state = round.state.lock();
    std::mem::take(&mut *state).end()
}

/// What the tasks of a write have in common: each takes a group, asks the database and takes the next. A task for each
/// request costs twice as much: the driver's futures are large, and are made in place here.
struct Round<P: Put> {
    cluster: Arc<Cluster>,
    put: Arc<P>,
    state: Mutex<State<P::Table>>,
}

struct State<T> {
    /// With the number of the attempt.
    queue: VecDeque<(Group<T>, u32)>,
    /// What the database does not take.
    refused: Vec<(Group<T>, ExecutionError)>,
    unwritten: BTreeSet<usize>,
    error: Option<StoreError>,
    good: usize,
    bad: usize,
}

impl<P: Put> Round<P> {
    /// Until the queue is empty, or hopeless.
    async fn run(self: &Arc<Self>, connection: &Arc<Connection>) -> Result<(), StoreError> {
        let number = self.state.lock().queue.len().min(self.cluster.options.concurrency);
        let mut tasks = JoinSet::new();
        for _ in 0..number {
            // Boxed, it is copied once, else five times on its way into the set.
            tasks.spawn(Box::pin(Arc::clone(self).work(Arc::clone(connection))));
        }
        while let Some(ended) = tasks.join_next().await {
            ended.map_err(|e| StoreError::Unavailable(format!("write: {e}")))?;
        }
        self.state.lock().give_up(None);
        Ok(())
    }

    async fn work(self: Arc<Self>, connection: Arc<Connection>) {
        loop {
            let permit = self.cluster.writes.permit().await;
            let Some((group, attempt)) = self.state.lock().next() else { return };
            let result = self.put.put(&connection, &group).await;
            self.cluster.answered(&connection, permit, &result);
            self.state.lock().done(group, attempt, result, &self.cluster.options);
        }
    }

    /// What was refused alone, with the schema as it should be, never will be taken.
    fn drop_refused(&self) {
        let mut state = self.state.lock();
        let mut dropped = BTreeMap::new();
        for (group, error) in std::mem::take(&mut state.refused) {
            if errors::kind(&error) == Kind::Rejected {
                dropped.extend(group.numbers.iter().map(|number| (*number, error.to_string())));
            } else {
                state.fail(group, &error, &self.cluster.options);
            }
        }
        for (number, error) in dropped {
            state.unwritten.remove(&number);
            self.put.refused(number, &error);
        }
    }
}

impl<T> Default for State<T> {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl<T> State<T> {
    fn new(groups: Vec<Group<T>>) -> Self {
        Self {
            queue: groups.into_iter().map(|group| (group, 1)).collect(),
            refused: Vec::new(),
            unwritten: BTreeSet::new(),
            error: None,
            good: 0,
            bad: 0,
        }
    }

    fn next(&mut self) -> Option<(Group<T>, u32)> {
        let hopeless = self.bad > self.good + HOPELESS;
        if hopeless { None } else { self.queue.pop_front() }
    }

    fn done(
        &mut self,
        group: Group<T>,
        attempt: u32,
        result: Result<(), ExecutionError>,
        options: &ScyllaOptions,
    ) {
        let Err(error) = result else {
            self.good += 1;
            return;
        };
        match errors::kind(&error) {
            kind @ (Kind::Schema | Kind::Rejected) => {
                errors::counted(kind);
                self.refused.push((group, error));
                return;
            }
            Kind::Overloaded if attempt < ATTEMPTS => {
                self.note(&error, options);
                self.queue.push_back((group, attempt + 1));
            }
            _ => self.fail(group, &error, options),
        }
        self.bad += 1;
    }

    fn fail(&mut self, group: Group<T>, error: &ExecutionError, options: &ScyllaOptions) {
        self.note(error, options);
        self.unwritten.extend(group.numbers);
    }

    fn note(&mut self, error: &ExecutionError, options: &ScyllaOptions) {
        let error = errors::failed("write", error, options);
        self.error.get_or_insert(error);
    }

    /// What is left is not written, for this reason if it is another than before.
    fn give_up(&mut self, error: Option<StoreError>) {
        self.error = error.or_else(|| self.error.take());
        self.unwritten.extend(self.queue.drain(..).flat_map(|(group, _)| group.numbers));
    }

    fn end(self) -> Result<(), StoreError> {
        let Some(error) = self.error.filter(|_| !self.unwritten.is_empty()) else { return Ok(()) };
        match error {
            StoreError::Unavailable(reason) if self.good > 0 => {
                Err(StoreError::Partly { unwritten: self.unwritten.into_iter().collect(), reason })
            }
            error => Err(error),
        }
    }
}

impl<T: Copy> State<T> {
    /// Whether something was refused; each value of it alone is next.
    fn ask_alone(&mut self) -> bool {
        let refused = std::mem::take(&mut self.refused);
        let alone = refused.into_iter().flat_map(|(Group { table, numbers }, _)| {
            numbers.into_iter().map(move |number| Group { table, numbers: vec![number] })
        });
        self.queue = alone.map(|group| (group, 1)).collect();
        !self.queue.is_empty()
    }
}

/// A statement of which [`put`] decides how long it takes and when it goes to further nodes, not the driver: that it may
/// costs the driver something at each request, also if it never happens.
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
    rows: Vec<impl SerializeRow + Sync>,
) -> Result<(), ExecutionError> {
    let all = options.request_timeout;
    let alone = options.speculative_delay.filter(|delay| *delay < all);
    let mut first = pin!(send(session, statement, options, &rows));
    if let Ok(answer) = timeout(alone.unwrap_or(all), first.as_mut()).await {
        return answer;
    }
    let Some(alone) = alone else { return Err(ExecutionError::RequestTimeout(all)) };
    let mut speculative = statement.clone();
    speculative.set_execution_profile_handle(None);
    let both = Box::pin(async {
        let mut second = pin!(send(session, &speculative, options, &rows));
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
    batch.set_consistency(options.write_consistency.level());
    batch.set_execution_profile_handle(statement.get_execution_profile_handle().cloned());
    for _ in rows {
        batch.append_statement(statement.clone());
    }
    session.batch(&batch, rows).await.map(drop)
}

/// Says that a value is dropped, not for each.
pub(super) fn warn_refused(device: &str, topic: &str, error: &str) {
    warn_limited!(device, topic, error, "the database refuses a value, it is dropped");
}
