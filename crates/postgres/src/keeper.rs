//! A task with a session of its own, which it replaces for ever.

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use ledger::Unknown;
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_postgres::Row;

use super::{
    PostgresSettings,
    session::{Param, ServerSession, StatementError, Verdict},
    sql::Query,
};

/// Statements that wait for a session; more wait at its door.
const WAITING: usize = 64;

/// Pause after no host could be used; it doubles up to the other.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(2);

/// Time for the other hosts once one can be used: one of them may be a newer primary.
const GRACE: Duration = Duration::from_millis(300);

/// Sessions that were given up and whose statements the server still carries out, such as those that wait for a standby that is away.
/// With so many, no more statements are sent: a server has few sessions.
const MAX_LEFT: i64 = 4;

/// Way to a session: statements one after the other.
pub(super) struct KeptSession {
    jobs: mpsc::Sender<Job>,
    state: Arc<KeptState>,
    limit: Duration,
}

/// Facts about a session that are known outside its task.
#[derive(Default)]
struct KeptState {
    /// Why there is no session.
    trouble: Mutex<Option<StatementError>>,
}

struct Job {
    work: JobKind,
    reply: oneshot::Sender<Result<Vec<Row>, StatementError>>,
}

enum JobKind {
    Statement(Query, Vec<Param>),
    MakeTables,
}

impl KeptSession {
    /// Starts its task. `newest` is the newest timeline that any session has seen.
    pub(super) fn start(name: &str, settings: &Arc<PostgresSettings>, newest: &Arc<AtomicU32>) -> Self {
        let (jobs, waiting) = mpsc::channel(WAITING);
        let state = Arc::new(KeptState::default());
        let task = Keeper {
            name: format!("mqtt-server {name} {:016x}", RandomState::new().hash_one(name)),
            settings: Arc::clone(settings),
            state: Arc::clone(&state),
            newest: Arc::clone(newest),
        };
        tokio::spawn(task.run(waiting));
        // A little more, so that the own answer of the task comes first.
        Self { jobs, state, limit: settings.answer_limit + Duration::from_millis(500) }
    }

    /// Has a statement carried out, also if nobody waits for it any more.
    pub(super) async fn query(&self, query: Query, params: Vec<Param>) -> Result<Vec<Row>, StatementError> {
        self.ask(JobKind::Statement(query, params)).await
    }

    /// Makes the tables unless they are there.
    pub(super) async fn make_tables(&self) -> Result<(), StatementError> {
        self.ask(JobKind::MakeTables).await.map(drop)
    }

    async fn ask(&self, work: JobKind) -> Result<Vec<Row>, StatementError> {
        let (reply, answer) = oneshot::channel();
        let asked = async {
            self.jobs.send(Job { work, reply }).await.ok()?;
            answer.await.ok()
        };
        match timeout(self.limit, asked).await {
            Ok(Some(answer)) => answer,
            _ => Err(self.trouble().unwrap_or_else(|| StatementError {
                text: format!("no answer in {:?}", self.limit),
                verdict: Verdict::Silent,
            })),
        }
    }

    /// Why there is no session, if there is none.
    pub(super) fn trouble(&self) -> Option<StatementError> {
        self.state.trouble.lock().clone()
    }
}

impl From<StatementError> for Unknown {
    fn from(failure: StatementError) -> Self {
        Self(format!("PostgreSQL: {}", failure.text))
    }
}

impl fmt::Display for StatementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The task of a session that is kept.
struct Keeper {
    /// Application name of its sessions, of no other task anywhere.
    name: String,
    settings: Arc<PostgresSettings>,
    state: Arc<KeptState>,
    newest: Arc<AtomicU32>,
}

impl Keeper {
    async fn run(self, mut jobs: mpsc::Receiver<Job>) {
        while let Some(mut session) = self.connect(&jobs).await {
            let lost = match self.let_leftovers_end(&mut session, &jobs).await {
                Ok(()) => self.serve(&mut session, &mut jobs).await,
                Err(failure) => Some(failure),
            };
            let Some(failure) = lost else { return };
            tracing::warn!(host = session.host, error = %failure, "lost a session of the ledger's database");
            *self.state.trouble.lock() = Some(failure);
        }
    }

    /// Carries statements out until the session is to be replaced, which it says why; `None` if nobody can ask any more.
    async fn serve(
        &self,
        session: &mut ServerSession,
        jobs: &mut mpsc::Receiver<Job>,
    ) -> Option<StatementError> {
        *self.state.trouble.lock() = None;
        loop {
            let job = tokio::select! {
                job = jobs.recv() => job?,
                () = session.closed() => {
                    return Some(StatementError { text: format!("{}: has closed the connection", session.host), verdict: Verdict::Broken });
                }
            };
            // Not begun, nobody waits: its caller repeats it.
            if job.reply.is_closed() {
                continue;
            }
            let answer = match job.work {
                JobKind::Statement(query, params) => session.query(query, &params).await,
                JobKind::MakeTables => session.make_tables().await.map(|()| Vec::new()),
            };
            let failure = answer.as_ref().err().cloned();
            let _ = job.reply.send(answer);
            match failure {
                Some(failure) if !matches!(failure.verdict, Verdict::Sound | Verdict::NoTables) => {
                    return Some(failure);
                }
                _ => {}
            }
        }
    }

    /// Opens a session, for as long as it takes; `None` if nobody can ask any more.
    async fn connect(&self, jobs: &mpsc::Receiver<Job>) -> Option<ServerSession> {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.open_newest().await {
                Ok(session) => {
                    tracing::debug!(
                        host = session.host,
                        timeline = session.timeline,
                        "opened a session of the ledger's database"
                    );
                    return Some(session);
                }
                Err(failure) => {
                    if pause == FIRST_PAUSE {
                        tracing::warn!(error = %failure, "the ledger's database cannot be used");
                    }
                    *self.state.trouble.lock() = Some(failure);
                }
            }
            if jobs.is_closed() && jobs.is_empty() {
                return None;
            }
            sleep(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// Asks all hosts at once, and takes the primary that was promoted last: one that was cut off from its standby before that still
    /// believes to be one.
    async fn open_newest(&self) -> Result<ServerSession, StatementError> {
        let mut opening = JoinSet::new();
        for host in &self.settings.hosts {
            opening.spawn(ServerSession::open(host.clone(), self.name.clone(), Arc::clone(&self.settings)));
        }
        let (mut best, mut refused) = (None::<ServerSession>, Vec::new());
        let mut until = None;
        loop {
            let next = match until {
                None => opening.join_next().await,
                Some(until) => timeout_at(until, opening.join_next()).await.ok().flatten(),
            };
            match next {
                None => break,
                Some(Ok(Ok(session))) => {
                    until.get_or_insert_with(|| Instant::now() + GRACE);
                    if best.as_ref().is_none_or(|best| best.timeline < session.timeline) {
                        best = Some(session);
                    }
                }
                Some(Ok(Err(failure))) => refused.push(failure),
                Some(Err(_)) => {}
            }
        }
        let Some(session) = best else {
            let is_unfit = |failure: &&StatementError| failure.verdict == Verdict::Unfit;
            let texts: Vec<&str> = refused.iter().map(|failure| &*failure.text).collect();
            let verdict = refused.iter().find(is_unfit).map_or(Verdict::Broken, |failure| failure.verdict);
            return Err(StatementError { text: texts.join("; "), verdict });
        };
        let newest = self.newest.fetch_max(session.timeline, Relaxed);
        if session.timeline < newest {
            let text = format!(
                "{}: is a former primary (timeline {}, and another has {newest})",
                session.host, session.timeline
            );
            return Err(StatementError { text, verdict: Verdict::Broken });
        }
        Ok(session)
    }

    /// Waits while the server still carries out too many statements of sessions that were given up.
    async fn let_leftovers_end(
        &self,
        session: &mut ServerSession,
        jobs: &mpsc::Receiver<Job>,
    ) -> Result<(), StatementError> {
        loop {
            let rows = session.query(Query::Leftovers, &[]).await?;
            let left = rows.first().map_or(0, |row| row.get::<_, i64>(0));
            if left < MAX_LEFT || jobs.is_closed() {
                return Ok(());
            }
            let text = format!(
                "{}: {left} statements wait for its synchronous standby, or for locks: no more are sent until one of them ends",
                session.host
            );
            *self.state.trouble.lock() = Some(StatementError { text, verdict: Verdict::Silent });
            sleep(Duration::from_secs(1)).await;
        }
    }
}
