//! Reading entries back, on threads of their own.

use std::{
    collections::VecDeque,
    ops::Bound,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use gateway_core::{QueueId, SharedMessage, StoredEntry, Timestamp};
use hashbrown::HashMap;
use heed::{RoTxn, WithoutTls};
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::tables::{self, EntryHead, QueueTables};
use crate::{
    counters::count,
    environment::{Environment, PAGE},
};
use store::encoding::message;
use store::{Loaded, StoreError};

/// A read transaction ends after this time, so that old pages can be reused.
const READ_TIME: Duration = Duration::from_millis(50);

/// Requests answered from one transaction; they share decoded messages.
const MAX_REQUESTS: usize = 64;

/// Number of entries between two looks at the clock.
const CLOCK_EVERY: usize = 64;

/// One stretch that somebody waits for.
pub(crate) struct PageRequest {
    pub(super) queue: QueueId,
    pub(super) from: u64,
    pub(super) messages: usize,
    pub(super) bytes: usize,
    pub(super) reply: oneshot::Sender<Result<Loaded, StoreError>>,
}

/// Requests for the reader threads. Bounded by their callers: a session waits for one answer before it asks again.
#[derive(Default)]
pub(super) struct QueueReaders {
    requests: Mutex<Requests>,
    wake: Condvar,
}

#[derive(Default)]
struct Requests {
    waiting: VecDeque<PageRequest>,
    closed: bool,
}

impl QueueReaders {
    /// Starts a reader thread. It ends after [`Self::close`].
    pub(super) fn start(self: &Arc<Self>, reader: QueueReader) -> Result<JoinHandle<()>, StoreError> {
        let readers = Arc::clone(self);
        std::thread::Builder::new()
            .name("queue-reader".to_owned())
            .spawn(move || readers.run(&reader))
            .map_err(|e| StoreError::Unavailable(format!("cannot start a reader thread: {e}")))
    }

    /// Hands over a request.
    pub(super) fn submit(&self, request: PageRequest) {
        self.requests.lock().waiting.push_back(request);
        self.wake.notify_one();
    }

    /// Lets the threads end once they have answered what is there.
    pub(super) fn close(&self) {
        self.requests.lock().closed = true;
        self.wake.notify_all();
    }

    fn run(&self, reader: &QueueReader) {
        let mut taken = Vec::new();
        loop {
            {
                let mut requests = self.requests.lock();
                while requests.waiting.is_empty() {
                    if requests.closed {
                        return;
                    }
                    self.wake.wait(&mut requests);
                }
                let length = requests.waiting.len().div_ceil(2).min(MAX_REQUESTS);
                taken.extend(requests.waiting.drain(..length));
            }
            taken.reverse();
            while !taken.is_empty() {
                reader.answer(&mut taken);
            }
        }
    }
}

/// Sources of a reader thread.
pub(super) struct QueueReader {
    pub(super) environment: Arc<Environment>,
    pub(super) tables: QueueTables,
    /// Places of entries that cannot be read, for the writer to remove.
    pub(super) damaged: Arc<Mutex<Vec<(QueueId, u64)>>>,
    /// The time, by which entries expire.
    pub(super) clock: fn() -> Timestamp,
}

type KnownMessages = HashMap<u64, Arc<SharedMessage>, ahash::RandomState>;

enum MessageBody {
    Message(Arc<SharedMessage>),
    Damaged,
}

impl QueueReader {
    /// Answers requests from the end of `requests` until there are none or the transaction is old.
    fn answer(&self, requests: &mut Vec<PageRequest>) {
        let mut known = KnownMessages::default();
        let started = now();
        let mut answers = Vec::new();
        let result = self.environment.reading(|txn| {
            while let Some(request) = requests.pop() {
                // Nobody waits for a request whose future was dropped.
                if !request.reply.is_closed() {
                    let loaded = self.load(txn, &request, started, &mut known);
                    answers.push((request.reply, loaded));
                }
                if started.elapsed() > READ_TIME {
                    break;
                }
            }
            Ok(())
        });
        let mut read = 0;
        for (reply, loaded) in answers {
            let entries = loaded.iter().flat_map(|loaded| &loaded.entries);
            let messages = entries.flat_map(|entry| &entry.message).map(|message| message.cost());
            read += PAGE + messages.sum::<usize>();
            // A caller that is gone wants no answer.
            let _ = reply.send(loaded.map_err(|e| self.environment.failed(&e)));
        }
        self.environment.note_read(read);
        if let Err(error) = result {
            gateway_core::error_limited!(%error, "cannot read queues");
            for request in requests.drain(..) {
                let _ = request.reply.send(Err(StoreError::Unavailable(error.to_string())));
            }
        }
    }

    fn load(
        &self,
        txn: &RoTxn<'_, WithoutTls>,
        request: &PageRequest,
        started: Instant,
        known: &mut KnownMessages,
    ) -> Result<Loaded, heed::Error> {
        let mut loaded = Loaded { next: request.from, ..Loaded::default() };
        let bounds = (tables::entry_key(request.queue, request.from), tables::last_key(request.queue));
        let (Some(first), Some(last)) = bounds else {
            return Ok(Loaded { end: true, ..loaded });
        };
        let range = (Bound::Included(&first[..]), Bound::Included(&last[..]));
        let mut bytes = 0;
        for (index, entry) in self.tables.entries.range(txn, &range)?.enumerate() {
            let (key, value) = entry?;
            let Some((_, seq)) = tables::place(key) else { continue };
            let late = index.is_multiple_of(CLOCK_EVERY) && index > 0 && started.elapsed() > READ_TIME;
            if loaded.entries.len() >= request.messages || late {
                return Ok(loaded);
            }
            let head = EntryHead::decode(value);
            let cost = head.as_ref().map_or(0, |head| head.cost as usize);
            if !loaded.entries.is_empty() && bytes + cost > request.bytes {
                return Ok(loaded);
            }
            loaded.next = seq + 1;
            match head.map(|head| self.entry(txn, seq, head, known)).transpose()?.flatten() {
                Some(entry) => {
                    bytes += cost;
                    loaded.entries.push(entry);
                }
                None => {
                    loaded.damaged += 1;
                    self.skip(request.queue, seq);
                }
            }
        }
        loaded.end = true;
        Ok(loaded)
    }

    /// An entry with its message; `None` if that is damaged.
    fn entry(
        &self,
        txn: &RoTxn<'_, WithoutTls>,
        seq: u64,
        head: EntryHead,
        known: &mut KnownMessages,
    ) -> Result<Option<StoredEntry>, heed::Error> {
        let message = if head.number == 0 {
            None
        } else {
            match self.message(txn, &head, known)? {
                MessageBody::Message(message) => Some(message),
                MessageBody::Damaged => return Ok(None),
            }
        };
        // An entry may expire before its message, and the sweep may be late or leave it to the session.
        let over = head.expiry.is_some_and(|second| second.saturating_mul(1000) <= (self.clock)().0);
        let message = message.map(|message| if over { message.expired() } else { message });
        Ok(Some(StoredEntry {
            seq,
            qos: head.qos,
            retain: head.retain,
            sent: head.sent,
            group: head.group,
            ids: head.ids,
            message,
        }))
    }

    fn message(
        &self,
        txn: &RoTxn<'_, WithoutTls>,
        head: &EntryHead,
        known: &mut KnownMessages,
    ) -> Result<MessageBody, heed::Error> {
        if let Some(message) = known.get(&head.number) {
            return Ok(MessageBody::Message(Arc::clone(message)));
        }
        let record = self.tables.bodies.get(txn, &tables::number_key(head.number))?;
        let Some(message) = record.and_then(message::decode) else { return Ok(MessageBody::Damaged) };
        let message = Arc::new(message);
        if !head.sole {
            known.insert(head.number, Arc::clone(&message));
        }
        Ok(MessageBody::Message(message))
    }

    fn skip(&self, queue: QueueId, seq: u64) {
        count(|c| c.store_damaged_records.add(1));
        gateway_core::error_limited!(queue = queue.0, seq, "queued message is damaged and was skipped");
        self.damaged.lock().push((queue, seq));
    }
}

#[expect(clippy::disallowed_methods, reason = "bounds how long a read may hold its transaction")]
fn now() -> Instant {
    Instant::now()
}
