//! Writing: groups of values, each one request, so many under way as the limit allows.
//!
//! What may pass (timeouts, absent nodes) is tried again, here if the database was only slow and else by the caller,
//! who is told which values are not written. What the database refuses is tried once more alone, with statements
//! for a schema that was looked at; if it is refused then, the value is dropped.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use scylla::{
    client::session::Session,
    errors::ExecutionError,
    serialize::row::SerializeRow,
    statement::{
        batch::{Batch, BatchType},
        prepared::PreparedStatement,
    },
};
use tokio::task::JoinSet;

use super::{
    Consistency, StoreError,
    cluster::{Cluster, Connection},
    errors::{self, Kind},
    limit::Permit,
};
use crate::{store::BoxFuture, warn_limited};

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
    fn put<'a>(
        &'a self,
        connection: &'a Connection,
        group: &'a Group<Self::Table>,
    ) -> BoxFuture<'a, Result<(), ExecutionError>>;

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
    let mut round = Round::new(cluster, put, groups);
    round.run(connection).await?;
    if !round.refused.is_empty() {
        let alone = round.refused.drain(..).flat_map(|(Group { table, numbers }, _)| {
            numbers.into_iter().map(move |number| Group { table, numbers: vec![number] })
        });
        round.queue = alone.map(|group| (group, 1)).collect();
        match cluster.connection().await {
            Ok(connection) => round.run(&connection).await?,
            Err(e) => round.give_up(e),
        }
        round.drop_refused();
    }
    round.end()
}

struct Round<'a, P: Put> {
    cluster: &'a Arc<Cluster>,
    put: Arc<P>,
    /// With the number of the attempt.
    queue: VecDeque<(Group<P::Table>, u32)>,
    /// What the database does not take.
    refused: Vec<(Group<P::Table>, ExecutionError)>,
    unwritten: BTreeSet<usize>,
    error: Option<StoreError>,
    good: usize,
    bad: usize,
}

type Done<T> = (Group<T>, u32, Result<(), ExecutionError>, Permit);

impl<'a, P: Put> Round<'a, P> {
    fn new(cluster: &'a Arc<Cluster>, put: Arc<P>, groups: Vec<Group<P::Table>>) -> Self {
        Self {
            cluster,
            put,
            queue: groups.into_iter().map(|group| (group, 1)).collect(),
            refused: Vec::new(),
            unwritten: BTreeSet::new(),
            error: None,
            good: 0,
            bad: 0,
        }
    }

    /// Until the queue is empty, or hopeless.
    async fn run(&mut self, connection: &Arc<Connection>) -> Result<(), StoreError> {
        let mut under_way: JoinSet<Done<P::Table>> = JoinSet::new();
        loop {
            let hopeless = self.bad > self.good + HOPELESS;
            tokio::select! {
                permit = self.cluster.writes.permit(), if !self.queue.is_empty() && !hopeless => {
                    let Some((group, attempt)) = self.queue.pop_front() else { continue };
                    let (put, connection) = (Arc::clone(&self.put), Arc::clone(connection));
                    under_way.spawn(async move {
                        let result = put.put(&connection, &group).await;
                        (group, attempt, result, permit)
                    });
                }
                Some(done) = under_way.join_next(), if !under_way.is_empty() => {
                    let done = done.map_err(|e| StoreError::Unavailable(format!("write: {e}")))?;
                    self.done(connection, done);
                }
                else => break,
            }
        }
        let rest = self.queue.drain(..).flat_map(|(group, _)| group.numbers);
        self.unwritten.extend(rest);
        Ok(())
    }

    fn done(&mut self, connection: &Arc<Connection>, (group, attempt, result, permit): Done<P::Table>) {
        self.cluster.answered(connection, permit, &result);
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
                self.note(&error);
                self.queue.push_back((group, attempt + 1));
            }
            _ => self.fail(group, &error),
        }
        self.bad += 1;
    }

    fn fail(&mut self, group: Group<P::Table>, error: &ExecutionError) {
        self.note(error);
        self.unwritten.extend(group.numbers);
    }

    fn note(&mut self, error: &ExecutionError) {
        let error = errors::failed("write", error, &self.cluster.options);
        self.error.get_or_insert(error);
    }

    /// The schema is not right: what is left is not written.
    fn give_up(&mut self, error: StoreError) {
        self.error = Some(error);
        let rest = self.queue.drain(..).flat_map(|(group, _)| group.numbers);
        self.unwritten.extend(rest);
    }

    /// What was refused alone, with the schema as it should be, never will be taken.
    fn drop_refused(&mut self) {
        let mut dropped = BTreeMap::new();
        for (group, error) in std::mem::take(&mut self.refused) {
            if errors::kind(&error) == Kind::Rejected {
                dropped.extend(group.numbers.iter().map(|number| (*number, error.to_string())));
            } else {
                self.fail(group, &error);
            }
        }
        for (number, error) in dropped {
            self.unwritten.remove(&number);
            self.put.refused(number, &error);
        }
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

/// Writes rows of one partition with `statement`, in one request.
pub(super) async fn put(
    session: &Session,
    statement: &PreparedStatement,
    level: Consistency,
    mut rows: Vec<impl SerializeRow>,
) -> Result<(), ExecutionError> {
    if rows.len() == 1
        && let Some(row) = rows.pop()
    {
        return session.execute_unpaged(statement, row).await.map(drop);
    }
    let mut batch = Batch::new(BatchType::Unlogged);
    batch.set_is_idempotent(true);
    batch.set_consistency(level.level());
    for _ in &rows {
        batch.append_statement(statement.clone());
    }
    session.batch(&batch, rows).await.map(drop)
}

/// Says that a value is dropped, not for each.
pub(super) fn warn_refused(device: &str, topic: &str, error: &str) {
    warn_limited!(device, topic, error, "the database refuses a value, it is dropped");
}
