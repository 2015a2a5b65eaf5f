//! Reading retained messages back, on a thread of its own.

use std::{
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use super::tables::RetainedTables;
use crate::environment::{Environment, PAGE};
use store::join;
use store::{BoxFuture, LoadedRetained, StoreError};

/// A read transaction ends after this time, so that old pages can be reused.
const READ_TIME: Duration = Duration::from_millis(50);

/// Topics that somebody waits for.
struct TopicsRequest {
    topics: Vec<Arc<str>>,
    reply: oneshot::Sender<Result<LoadedRetained, StoreError>>,
}

/// Answers requests in their order.
pub(crate) struct RetainedReader {
    /// `None` only while it is dropped.
    requests: Option<mpsc::Sender<TopicsRequest>>,
    thread: Option<JoinHandle<()>>,
}

impl RetainedReader {
    pub(crate) fn start(environment: Arc<Environment>, tables: RetainedTables) -> Result<Self, StoreError> {
        #[expect(
            clippy::disallowed_methods,
            reason = "whoever asks waits for one answer before it asks again"
        )]
        let (requests, inbox) = mpsc::channel::<TopicsRequest>();
        let run = move || {
            for TopicsRequest { topics, reply } in inbox {
                // Nobody waits for a request whose future was dropped.
                if !reply.is_closed() {
                    let _ = reply.send(read(&environment, &tables, &topics));
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("retained-reader".to_owned())
            .spawn(run)
            .map_err(|e| StoreError::Unavailable(format!("cannot start a reader thread: {e}")))?;
        Ok(Self { requests: Some(requests), thread: Some(thread) })
    }

    pub(crate) fn load(
        &self,
        topics: Vec<Arc<str>>,
    ) -> BoxFuture<'static, Result<LoadedRetained, StoreError>> {
        let (reply, answer) = oneshot::channel();
        if let Some(requests) = &self.requests {
            // Without the thread the answer's sender is dropped.
            let _ = requests.send(TopicsRequest { topics, reply });
        }
        Box::pin(async move { answer.await.map_err(|_| StoreError::closed())? })
    }
}

impl Drop for RetainedReader {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            join(thread);
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "bounds how long a read may hold its transaction")]
fn now() -> Instant {
    Instant::now()
}

fn read(
    environment: &Environment,
    tables: &RetainedTables,
    topics: &[Arc<str>],
) -> Result<LoadedRetained, StoreError> {
    let mut loaded = LoadedRetained::with_capacity(topics.len());
    while loaded.len() < topics.len() {
        let begun = now();
        let before = loaded.len();
        let result = environment.reading(|txn| {
            for topic in &topics[loaded.len()..] {
                loaded.push(tables.get(txn, topic)?.map(Arc::new));
                if begun.elapsed() > READ_TIME {
                    break;
                }
            }
            Ok(())
        });
        let read = loaded[before..].iter().map(|found| PAGE + found.as_ref().map_or(0, |found| found.cost()));
        environment.note_read(read.sum());
        result?;
    }
    Ok(loaded)
}
