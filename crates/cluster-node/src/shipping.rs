//! A store's writer thread waits for the ledger.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc as answers,
    },
    time::Duration,
};

use cluster::{Appended, StreamWriter, Tenure};
use disk::ShippedStore;
use ledger::{Cleaned, Shipped, Shipping};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};

use crate::redo::RedoMemory;

/// While a stream has fewer bytes than this in the ledger, nothing is repeated.
const SMALL: u64 = 1 << 20;

/// Quarters of the bytes that are alive: while a stream has more in the ledger, the oldest keys are repeated, one byte for each that
/// changes. That alone keeps it at twice what is alive; what comes on top, of a first round or the time before a takeover, is hurried.
const REPEAT_ABOVE: u64 = 5;
const HURRY_ABOVE: u64 = 9;
/// Bytes that are repeated for each that changes while it is hurried.
const HURRY: usize = 4;

/// Time for which an append that nobody waits for lets others go first, and the time between two looks whether there are any.
const GIVE_WAY: Duration = Duration::from_millis(100);
const GIVE_WAY_LOOK: Duration = Duration::from_millis(2);

/// A transaction that waits in its writer's thread.
struct QueuedAppend {
    changes: Vec<u8>,
    cleaned: Cleaned,
    answer: answers::SyncSender<Shipped>,
}

/// A stream, as its store uses it. Once the home is lost, every call says so.
pub(crate) struct StreamShipping {
    tenure: Tenure,
    appends: mpsc::Sender<QueuedAppend>,
    /// Bytes of the stream in the ledger.
    bytes: Arc<AtomicU64>,
    /// Of all streams of the home.
    redo: Arc<RedoMemory>,
    /// Epoch and number of the record with which the stream may begin.
    begin: watch::Sender<(u64, u64)>,
}

/// The tasks of a stream, on the cluster's runtime.
pub(crate) struct StreamTasks {
    writer: JoinHandle<StreamWriter>,
    begins: JoinHandle<()>,
}

impl StreamShipping {
    /// Starts the tasks of a stream; they end with `stop`. In the cluster's runtime.
    pub(crate) fn start(
        writer: StreamWriter,
        tenure: &Tenure,
        redo: &Arc<RedoMemory>,
        stop: watch::Receiver<bool>,
    ) -> (Arc<Self>, StreamTasks) {
        // Its writer has one transaction under way.
        let (appends, waiting) = mpsc::channel(1);
        let (begin, begins) = watch::channel((0, 0));
        let bytes = Arc::new(AtomicU64::new(writer.ledger_bytes()));
        let stream = writer.stream();
        let tasks = StreamTasks {
            writer: tokio::spawn(write(writer, tenure.clone(), waiting, Arc::clone(&bytes), stop)),
            begins: tokio::spawn(publish(tenure.clone(), stream, begins)),
        };
        let shipping = Self { tenure: tenure.clone(), appends, bytes, redo: Arc::clone(redo), begin };
        (Arc::new(shipping), tasks)
    }

    /// Bytes of the stream in the ledger.
    pub(crate) fn ledger_bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

impl StreamTasks {
    /// The writer, once its last append has ended; none if it panicked.
    pub(crate) async fn end(self) -> Option<StreamWriter> {
        self.begins.abort();
        self.writer.await.ok()
    }
}

async fn write(
    mut writer: StreamWriter,
    tenure: Tenure,
    mut waiting: mpsc::Receiver<QueuedAppend>,
    bytes: Arc<AtomicU64>,
    mut stop: watch::Receiver<bool>,
) -> StreamWriter {
    // One that the view does not have yet. Its store waits, as for a ledger that does not answer.
    tokio::select! {
        () = tenure.has_stream(writer.stream()) => {}
        _ = stop.wait_for(|stop| *stop) => return writer,
    }
    let gives_way = writer.stream() == ShippedStore::Latest as u8;
    loop {
        let QueuedAppend { changes, cleaned, answer } = tokio::select! {
            biased;
            append = waiting.recv() => match append {
                Some(append) => append,
                None => return writer,
            },
            _ = stop.wait_for(|stop| *stop) => return writer,
        };
        if gives_way {
            give_way(&tenure).await;
        }
        let shipped = match writer.append_cleaned(&changes, cleaned).await {
            Appended::Done(position) => Shipped::Done(position),
            Appended::TooLarge => Shipped::Refused,
            Appended::Lost => Shipped::Lost,
        };
        bytes.store(writer.ledger_bytes(), Relaxed);
        // The thread waits.
        let _ = answer.send(shipped);
    }
}

/// Waits until no other append is under way, for a while: whoever is acknowledged goes first.
async fn give_way(tenure: &Tenure) {
    let others = async {
        while tenure.figures().under_way > 0 {
            tokio::time::sleep(GIVE_WAY_LOOK).await;
        }
    };
    // Under steady load it is its turn then.
    let _ = tokio::time::timeout(GIVE_WAY, others).await;
}

async fn publish(tenure: Tenure, stream: u8, mut begins: watch::Receiver<(u64, u64)>) {
    while begins.changed().await.is_ok() {
        let (epoch, n) = *begins.borrow_and_update();
        if let Err(error) = tenure.publish_start(stream, epoch, n).await {
            tracing::debug!(stream, epoch, n, %error, "the start of a stream was not published");
        }
    }
}

impl Shipping for StreamShipping {
    fn ship(&self, changes: &[u8], cleaned: Cleaned) -> Shipped {
        let _held = self.redo.hold(changes.len());
        let (answer, shipped) = answers::sync_channel(1);
        let mut append = QueuedAppend { changes: changes.to_vec(), cleaned, answer };
        // `blocking_send` is for threads outside every runtime, and a store is opened inside one. There is one writer.
        loop {
            match self.appends.try_send(append) {
                Ok(()) => break,
                Err(mpsc::error::TrySendError::Full(back)) => {
                    append = back;
                    std::thread::yield_now();
                }
                Err(mpsc::error::TrySendError::Closed(_)) => return Shipped::Lost,
            }
        }
        shipped.recv().unwrap_or(Shipped::Lost)
    }

    fn wanted_repeats(&self, alive: u64) -> usize {
        let bytes = self.ledger_bytes();
        let exceeds = |quarters: u64| bytes > alive.saturating_mul(quarters) / 4;
        let times = match exceeds(HURRY_ABOVE) {
            true => HURRY,
            false => usize::from(exceeds(REPEAT_ABOVE) || self.tenure.has_long_chain()),
        };
        if bytes > SMALL { times } else { 0 }
    }

    fn begin_at(&self, epoch: u64, n: u64) {
        let _ = self.begin.send((epoch, n));
    }
}
