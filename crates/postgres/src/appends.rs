//! Appends of all streams, batched: while one statement is under way, what comes waits for the next, which takes all of it.
//!
//! One statement at a time also leaves a gap between two locks of a home's row, in which a change of its owner gets its turn.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    error::Error,
    sync::Arc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use ledger::{Inserted, Owner, Row, Stream, Unknown};
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};

use super::{
    keeper::KeptSession,
    session::{Param, StatementError},
    sql::Query,
};

/// Records that wait; further ones are refused.
const WAITING: usize = 1024;

/// Bytes of a batch, unless a single record has more.
const BATCH: usize = 4 << 20;

/// Record that is inserted: it is under way once.
type Key = (Stream, u64, u64);

/// Appends that wait or are under way.
pub(super) struct Appends {
    queue: mpsc::Sender<Key>,
    waiting: Arc<Mutex<HashMap<Key, Append>>>,
    limit: Duration,
}

struct Append {
    owner: Owner,
    rows: Arc<[Row]>,
    /// Of the calls that began before its statement was sent.
    replies: Vec<InsertReply>,
    is_under_way: bool,
    /// Of those that came since: an answer tells nothing about the time after they began, from which a lease would count.
    late: Vec<InsertReply>,
}

type InsertReply = oneshot::Sender<Result<Inserted, StatementError>>;

impl Appends {
    /// Starts the task that batches, over a session of its own.
    pub(super) fn start(cluster: Arc<str>, session: KeptSession, limit: Duration) -> Self {
        let (queue, keys) = mpsc::channel(WAITING);
        let waiting = Arc::default();
        let task =
            AppendTask { cluster, session, waiting: Arc::clone(&waiting), keys, first: VecDeque::new() };
        tokio::spawn(task.run());
        Self { queue, waiting, limit: limit + Duration::from_secs(1) }
    }

    /// Inserts the rows of a record. A repeat joins a try that waits; behind one that is under way it is the next.
    pub(super) async fn insert(&self, owner: Owner, rows: Arc<[Row]>) -> Result<Inserted, Unknown> {
        let Some(first) = rows.first() else { return Err(Unknown("a record without rows".into())) };
        let key = (first.segment.stream, first.segment.epoch, first.n);
        let (reply, answer) = oneshot::channel();
        {
            let mut waiting = self.waiting.lock();
            match waiting.entry(key) {
                Entry::Occupied(mut entry) => {
                    let append = entry.get_mut();
                    if append.owner != owner || append.rows != rows {
                        return Err(Unknown("another insert of that record is under way".into()));
                    }
                    let replies = if append.is_under_way { &mut append.late } else { &mut append.replies };
                    replies.retain(|reply| !reply.is_closed());
                    replies.push(reply);
                }
                Entry::Vacant(entry) => {
                    if self.queue.try_send(key).is_err() {
                        return Err(Unknown(format!("{WAITING} records wait already for PostgreSQL")));
                    }
                    entry.insert(Append {
                        owner,
                        rows,
                        replies: vec![reply],
                        is_under_way: false,
                        late: Vec::new(),
                    });
                }
            }
        }
        match timeout(self.limit, answer).await {
            Ok(Ok(inserted)) => inserted.map_err(Unknown::from),
            _ => Err(Unknown(format!("PostgreSQL: no answer in {:?}", self.limit))),
        }
    }
}

struct AppendTask {
    cluster: Arc<str>,
    session: KeptSession,
    waiting: Arc<Mutex<HashMap<Key, Append>>>,
    keys: mpsc::Receiver<Key>,
    /// Appends that come before the queue: repeats, and one that did not fit into the batch before.
    first: VecDeque<Key>,
}

impl AppendTask {
    async fn run(mut self) {
        while let Some(batch) = self.next().await {
            if batch.appends.is_empty() {
                continue;
            }
            let (numbers, params) = batch.params(&self.cluster);
            let answer = self.session.query(Query::Append, params).await;
            let owned =
                answer.map(|rows| rows.first().map_or_else(Vec::new, |row| row.get::<_, Vec<i64>>(0)));
            for ((key, _, _), number) in batch.appends.iter().zip(numbers) {
                let inserted = owned
                    .as_ref()
                    .map_err(StatementError::clone)
                    .map(|owned| if owned.contains(&number) { Inserted::Owned } else { Inserted::Fenced });
                for reply in self.end(*key) {
                    let _ = reply.send(inserted.clone());
                }
            }
        }
    }

    /// Waits for an append, and takes what waits with it; `None` if nobody can ask any more.
    async fn next(&mut self) -> Option<Batch> {
        let mut key = match self.first.pop_front() {
            Some(key) => key,
            None => self.keys.recv().await?,
        };
        let (mut batch, mut bytes) = (Batch::default(), 0);
        loop {
            if let Some((owner, rows)) = self.wanted(key) {
                bytes += rows.iter().map(|row| row.data.len()).sum::<usize>();
                if bytes > BATCH && !batch.appends.is_empty() {
                    self.first.push_front(key);
                    return Some(batch.under_way(&self.waiting));
                }
                batch.appends.push((key, owner, rows));
            }
            match self.first.pop_front().or_else(|| self.keys.try_recv().ok()) {
                Some(next) => key = next,
                None => return Some(batch.under_way(&self.waiting)),
            }
        }
    }

    /// Ends a try: whom its answer is for. What came meanwhile is the next.
    fn end(&mut self, key: Key) -> Vec<InsertReply> {
        let mut waiting = self.waiting.lock();
        let Some(append) = waiting.get_mut(&key) else { return Vec::new() };
        let late = std::mem::take(&mut append.late);
        let replies = std::mem::replace(&mut append.replies, late);
        append.is_under_way = false;
        if append.replies.is_empty() {
            waiting.remove(&key);
        } else {
            self.first.push_back(key);
        }
        replies
    }

    /// An append, unless nobody waits for it any more.
    fn wanted(&self, key: Key) -> Option<(Owner, Arc<[Row]>)> {
        let mut waiting = self.waiting.lock();
        let append = waiting.get(&key)?;
        if append.replies.iter().all(oneshot::Sender::is_closed) {
            waiting.remove(&key);
            return None;
        }
        Some((append.owner.clone(), Arc::clone(&append.rows)))
    }
}

#[derive(Default)]
struct Batch {
    appends: Vec<(Key, Owner, Arc<[Row]>)>,
}

impl Batch {
    /// Notes that its appends are about to be sent.
    fn under_way(self, waiting: &Mutex<HashMap<Key, Append>>) -> Self {
        let mut waiting = waiting.lock();
        for (key, ..) in &self.appends {
            if let Some(append) = waiting.get_mut(key) {
                append.is_under_way = true;
            }
        }
        self
    }

    /// Parameters of [`Query::Append`], and for each append the number of its owner in them, from 1.
    fn params(&self, cluster: &str) -> (Vec<i64>, Vec<Param>) {
        let mut owners: Vec<&Owner> = Vec::new();
        let numbers: Vec<i64> = self
            .appends
            .iter()
            .map(|(_, owner, _)| {
                let at = owners.iter().position(|known| *known == owner).unwrap_or_else(|| {
                    owners.push(owner);
                    owners.len() - 1
                });
                at as i64 + 1
            })
            .collect();
        let rows = || {
            self.appends
                .iter()
                .zip(&numbers)
                .flat_map(|((_, _, rows), number)| rows.iter().map(move |row| (row, *number)))
        };
        let params: Vec<Param> = vec![
            Box::new(cluster.to_owned()),
            Box::new(owners.iter().map(|owner| i32::from(owner.home)).collect::<Vec<_>>()),
            Box::new(owners.iter().map(|owner| owner.node.to_string()).collect::<Vec<_>>()),
            Box::new(owners.iter().map(|owner| owner.incarnation.cast_signed()).collect::<Vec<_>>()),
            Box::new(owners.iter().map(|owner| owner.epoch.cast_signed()).collect::<Vec<_>>()),
            Box::new(rows().map(|(_, number)| number).collect::<Vec<_>>()),
            Box::new(rows().map(|(row, _)| i32::from(row.segment.stream.home)).collect::<Vec<_>>()),
            Box::new(rows().map(|(row, _)| i16::from(row.segment.stream.number)).collect::<Vec<_>>()),
            Box::new(rows().map(|(row, _)| row.segment.epoch.cast_signed()).collect::<Vec<_>>()),
            Box::new(rows().map(|(row, _)| i64::from(row.segment.number)).collect::<Vec<_>>()),
            Box::new(rows().map(|(row, _)| row.n.cast_signed()).collect::<Vec<_>>()),
            Box::new(rows().map(|(row, _)| row.part.cast_signed()).collect::<Vec<_>>()),
            Box::new(rows().map(|(row, _)| row.parts.cast_signed()).collect::<Vec<_>>()),
            Box::new(rows().map(|(row, _)| Data(row.data.clone())).collect::<Vec<_>>()),
        ];
        (numbers, params)
    }
}

/// Parameters of one append.
#[cfg(test)]
pub(super) fn params_of(cluster: &str, owner: &Owner, rows: &Arc<[Row]>) -> Vec<Param> {
    let key = (rows[0].segment.stream, rows[0].segment.epoch, rows[0].n);
    Batch { appends: vec![(key, owner.clone(), Arc::clone(rows))] }.params(cluster).1
}

/// Bytes as a parameter.
#[derive(Debug)]
pub(super) struct Data(pub(super) Bytes);

impl ToSql for Data {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        (&*self.0).to_sql(ty, out)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::BYTEA
    }

    to_sql_checked!();
}
