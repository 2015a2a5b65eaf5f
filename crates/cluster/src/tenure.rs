//! An owner's time.

use std::{
    sync::{
        Arc,
        atomic::{
            AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};

use ledger::{Ledger, Owner, Position, Segment, Stream};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{
    Clock, LONG_CHAIN, Lease, Leftover, MemberNode, Start, StreamWriter, View, ViewError,
    calls::{first, until_answered},
    change::{change, read_view},
    reader::locate,
};

/// Time between looks for segments that are still to be deleted.
const TIDY: Duration = Duration::from_secs(60);

/// A home that this process owns, until it is lost or released. Clones are of one tenure.
///
/// Its lease is renewed, and its appends are validated, by [`MemberNode::run`].
#[derive(Clone)]
pub struct Tenure {
    core: Arc<Core>,
}

/// Figures of a tenure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Appends under way.
    pub under_way: usize,
    /// Age of the oldest of them.
    pub oldest: Option<Duration>,
    /// Records appended.
    pub records: u64,
    /// Bytes of their changes.
    pub bytes: u64,
    /// Calls that were repeated since they had no answer in time, those for all homes of the process among them.
    pub repeats: u64,
    /// Bytes of all streams in the ledger since the places with which they may begin, about.
    pub ledger_bytes: u64,
}

/// A clean stop that did not come about: the home is sealed by its next owner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseError {
    /// A stream's writer was not given back, or was dropped in the middle of an append.
    #[error("an append is under way")]
    Busy,
    /// The home is another's already, or the view cannot be used.
    #[error(transparent)]
    View(#[from] ViewError),
}

/// The part of a tenure that its streams share.
pub(crate) struct Core {
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) owner: Owner,
    member: Arc<MemberNode>,
    /// The first read of the owners that can tell the loss of the home.
    first_read: u64,
    lease: Arc<Lease>,
    lost: watch::Sender<bool>,
    tidying: watch::Sender<u64>,
    pub(crate) streams: Vec<StreamState>,
    pub(crate) repeats: AtomicU64,
    writers: Mutex<Vec<StreamWriter>>,
    epochs: AtomicUsize,
    /// Streams that the view has: the first of `streams`.
    in_view: watch::Sender<u8>,
}

/// A stream, as others than its writer see it.
#[derive(Default)]
pub(crate) struct StreamState {
    /// Time at which the append under way began, in microseconds and one; 0 if none is.
    pub(crate) begun: AtomicU64,
    pub(crate) records: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// Bytes in the ledger, those that came before this tenure included, and how many of them nobody needs.
    pub(crate) written: AtomicU64,
    pub(crate) dropped: AtomicU64,
    /// Bytes that came before this tenure.
    inherited: u64,
    /// A start that is to be published, and the bytes before it.
    publication: Mutex<Option<(Start, u64)>>,
}

impl Tenure {
    /// `ends` has, for each stream, its last record and about how many bytes of it are in the ledger; those that `view` does not have
    /// come last.
    pub(crate) fn new(
        member: &Arc<MemberNode>,
        owner: Owner,
        view: &View,
        ends: Vec<(Option<Position>, u64)>,
    ) -> Self {
        let state = |(_, inherited): &(Option<Position>, u64)| StreamState {
            written: AtomicU64::new(*inherited),
            inherited: *inherited,
            ..StreamState::default()
        };
        let epochs = view.home(owner.home).map_or(0, |of| of.chain.len());
        let core = Arc::new(Core {
            ledger: Arc::clone(&member.ledger),
            clock: Arc::clone(&member.clock),
            first_read: member.begin(&owner),
            owner,
            member: Arc::clone(member),
            lease: Arc::default(),
            lost: watch::Sender::new(false),
            tidying: watch::Sender::new(1),
            streams: ends.iter().map(state).collect(),
            repeats: AtomicU64::new(0),
            writers: Mutex::default(),
            epochs: AtomicUsize::new(epochs),
            in_view: watch::Sender::new(view.streams),
        });
        let writer = |(number, (last, _)): (u8, (Option<Position>, u64))| {
            StreamWriter::new(Arc::clone(&core), number, last.map_or(0, |last| last.sum))
        };
        *core.writers.lock() = (0..).zip(ends).map(writer).collect();
        member.watch(&core);
        Self { core }
    }

    /// This process as the owner of the home, and its epoch.
    pub fn owner(&self) -> &Owner {
        &self.core.owner
    }

    /// The writers of all streams, in their order. They are given out once; afterwards the list is empty.
    pub fn writers(&self) -> Vec<StreamWriter> {
        std::mem::take(&mut self.core.writers.lock())
    }

    /// Until when this process may acknowledge. It is not held before the first beat that shows the home as this process's.
    pub fn lease(&self) -> &Arc<Lease> {
        &self.core.lease
    }

    /// Waits until the home is lost to this process, or released. Everything is lost then: what is under way is neither acknowledged
    /// nor refused.
    pub async fn lost(&self) {
        self.core.lost().await;
    }

    /// Tells whether the home is lost to this process.
    pub fn is_lost(&self) -> bool {
        self.core.is_lost()
    }

    /// Gives the home up without a word to others: what is under way is neither acknowledged nor refused, and the lease has ended. The
    /// view has this process as the owner until somebody takes the home.
    pub fn abandon(&self) {
        self.core.lose();
    }

    /// Tells whether so many epochs are in the chain that a round of cleaning begins at once.
    pub fn has_long_chain(&self) -> bool {
        self.core.has_long_chain()
    }

    /// Tells whether the view lacks a stream of this tenure.
    pub fn is_narrow(&self) -> bool {
        usize::from(*self.core.in_view.borrow()) < self.core.streams.len()
    }

    /// Gives the view the streams of this tenure that it lacks. From then on a node of a version that does not know them takes nothing
    /// over: the caller has looked whether there is one.
    ///
    /// Cancel safety: if dropped, the view may have them or not; the next call finds out.
    ///
    /// # Errors
    /// `NotOwner` if the home is lost.
    pub async fn widen(&self) -> Result<(), ViewError> {
        let core = &self.core;
        let streams = u8::try_from(core.streams.len()).unwrap_or(u8::MAX);
        let widened = change(&*core.ledger, &*core.clock, |view: &View| -> Result<Option<View>, ViewError> {
            let next = view.widen(&core.owner, streams)?;
            Ok((next != *view).then_some(next))
        });
        core.in_view.send_replace(widened.await?.streams);
        Ok(())
    }

    /// Waits until the view has a stream. Cancel safe.
    pub async fn has_stream(&self, number: u8) {
        self.core.has_stream(number).await;
    }

    /// Its figures.
    pub fn figures(&self) -> Figures {
        let now = micros(self.core.clock.now());
        let repeats = self.core.repeats.load(Relaxed) + self.core.member.repeats();
        let mut figures = Figures { repeats, ..Figures::default() };
        for stream in &self.core.streams {
            figures.records += stream.records.load(Relaxed);
            figures.bytes += stream.bytes.load(Relaxed);
            figures.ledger_bytes += stream.ledger_bytes();
            if let Some(begun) = stream.begun.load(Relaxed).checked_sub(1) {
                figures.under_way += 1;
                let age = Duration::from_micros(now.saturating_sub(begun));
                figures.oldest = figures.oldest.max(Some(age));
            }
        }
        figures
    }

    /// Publishes starts and deletes what lies before them. Ends when the home is lost.
    ///
    /// Cancel safety: nothing is lost if it is dropped and called again.
    pub async fn run(&self) {
        first(self.core.lost(), self.core.tidy()).await;
    }

    /// Lets a stream begin with a record, this or a later epoch's than at present; nothing before it is ever read again. Segments before
    /// it are deleted by [`Self::run`]. A place that is not behind the present start changes nothing.
    ///
    /// Cancel safety: if dropped, the start may be published or not.
    ///
    /// # Errors
    /// `NoPlace` if the record is not in the ledger, `NotOwner` if the home is lost, `Leftovers` if the ledger takes no deletes.
    pub async fn publish_start(&self, stream: u8, epoch: u64, n: u64) -> Result<(), ViewError> {
        let core = &self.core;
        let place = Start { epoch, n, segment: 0 };
        let (_, view) = read_view(&*core.ledger, &*core.clock).await?;
        let of = view.home(core.owner.home)?;
        let start = of.starts.get(usize::from(stream)).copied().ok_or(ViewError::NoPlace(place))?;
        if (epoch, n) <= (start.epoch, start.n) {
            return Ok(());
        }
        let number = if epoch == start.epoch { start.segment } else { 0 };
        let first = Segment { stream: Stream { home: core.owner.home, number: stream }, epoch, number };
        let segment = locate(&*core.ledger, &*core.clock, first, None, n).await;
        let place = Start { segment: segment.ok_or(ViewError::NoPlace(place))?, ..place };
        let state = &core.streams[usize::from(stream)];
        let before = u64::from(place.segment) * crate::writer::SEGMENT as u64;
        let before = if epoch == core.owner.epoch { state.inherited + before } else { 0 };
        core.publish(stream, place, before).await?;
        core.tidying.send_modify(|count| *count += 1);
        Ok(())
    }

    /// A clean stop: seals the epoch as it is and leaves the home without an owner, so that the next one neither waits nor suspects.
    /// Takes the writers back, so that all streams are quiet; the lease ends first.
    ///
    /// Cancel safety: if dropped, the home may be released or not; it is lost to this process in any case.
    ///
    /// # Errors
    /// [`ReleaseError`]: the next owner takes the home as after a crash.
    pub async fn release(&self, writers: Vec<StreamWriter>) -> Result<(), ReleaseError> {
        let core = &self.core;
        let was_lost = core.is_lost();
        core.lose();
        let vector = writers.iter().map(StreamWriter::last).collect::<Option<Vec<_>>>();
        let vector = vector.filter(|vector| vector.len() == core.streams.len() && !was_lost);
        let vector = vector.ok_or(ReleaseError::Busy)?;
        let mut is_sent = false;
        change(&*core.ledger, &*core.clock, |view: &View| -> Result<Option<View>, ReleaseError> {
            let of = view.home(core.owner.home)?;
            if is_sent && !of.is_of(&core.owner) {
                // An unknown compare-and-set has applied, or the next owner has taken it: it is free in both cases.
                return Ok(None);
            }
            is_sent = true;
            // Streams that the view lacks have no record.
            let vector = vector.iter().copied().take(view.count()).collect();
            Ok(Some(view.release(&core.owner, vector)?))
        })
        .await?;
        Ok(())
    }
}

impl StreamState {
    pub(crate) fn ledger_bytes(&self) -> u64 {
        self.written.load(Relaxed).saturating_sub(self.dropped.load(Relaxed))
    }
}

impl Core {
    pub(crate) async fn lost(&self) {
        // The sender is this.
        let _ = self.lost.subscribe().wait_for(|is_lost| *is_lost).await;
    }

    pub(crate) fn is_lost(&self) -> bool {
        *self.lost.borrow()
    }

    /// Waits until the view has a stream.
    pub(crate) async fn has_stream(&self, number: u8) {
        // The sender is this.
        let _ = self.in_view.subscribe().wait_for(|streams| number < *streams).await;
    }

    /// Ends the tenure.
    pub(crate) fn lose(&self) {
        self.lease.end();
        self.lost.send_replace(true);
    }

    pub(crate) fn has_long_chain(&self) -> bool {
        self.epochs.load(Relaxed) >= LONG_CHAIN
    }

    /// Owners were read by a call with that number that began then.
    pub(crate) fn shown(&self, number: u64, begun: Duration, owners: &[Owner]) {
        if owners.contains(&self.owner) {
            self.lease.renew(begun);
        } else if number >= self.first_read {
            self.lose();
        }
    }

    /// This process owned the home at a time after that.
    pub(crate) fn owned(&self, begun: Duration) {
        self.lease.renew(begun);
    }

    /// Step (3) of an append whose rows are all answered: ends when a read of the owners that began after this call has shown this
    /// process. Does not end otherwise.
    pub(crate) async fn validated(&self) {
        self.member.validated().await;
        if self.is_lost() {
            std::future::pending().await
        }
    }

    /// A start that [`Self::tidy`] publishes.
    pub(crate) fn to_publish(&self, stream: u8, place: Start, bytes_before: u64) {
        *self.streams[usize::from(stream)].publication.lock() = Some((place, bytes_before));
        self.tidying.send_modify(|count| *count += 1);
    }

    /// Publishes starts as they come, and only then deletes the segments before them.
    async fn tidy(&self) {
        let mut asked = self.tidying.subscribe();
        asked.mark_changed();
        loop {
            let _ = first(asked.changed(), self.clock.sleep(TIDY)).await;
            for (number, stream) in (0..).zip(&self.streams) {
                let publication = stream.publication.lock().take();
                let Some((place, bytes_before)) = publication else { continue };
                if weakened!(DeleteUnpublished) {
                    self.delete_unpublished(number, place).await;
                }
                match self.publish(number, place, bytes_before).await {
                    Ok(()) => {}
                    Err(ViewError::NotOwner { .. }) => return self.lose(),
                    // Tried again, unless a later place comes.
                    Err(_) => drop(stream.publication.lock().get_or_insert((place, bytes_before))),
                }
            }
            self.delete_leftovers().await;
        }
    }

    async fn publish(&self, stream: u8, place: Start, bytes_before: u64) -> Result<(), ViewError> {
        let view = change(&*self.ledger, &*self.clock, |view: &View| {
            let of = view.home(self.owner.home)?;
            let is_done = of.starts.get(usize::from(stream)).is_some_and(|start| *start >= place);
            if is_done && of.is_of(&self.owner) {
                return Ok(None);
            }
            view.publish_start(&self.owner, stream, place).map(Some)
        });
        self.epochs.store(view.await?.home(self.owner.home)?.chain.len(), Relaxed);
        self.streams[usize::from(stream)].dropped.fetch_max(bytes_before, SeqCst);
        Ok(())
    }

    async fn delete_leftovers(&self) {
        let Ok((_, view)) = read_view(&*self.ledger, &*self.clock).await else { return };
        let Ok(of) = view.home(self.owner.home) else { return };
        if !of.is_of(&self.owner) {
            return self.lose();
        }
        if of.leftovers.is_empty() {
            return;
        }
        let gone = of.leftovers.clone();
        for leftover in &gone {
            self.delete(*leftover).await;
        }
        // Entries that stay are deleted once more.
        let _ = change(&*self.ledger, &*self.clock, |view: &View| {
            let is_left =
                view.home(self.owner.home)?.leftovers.iter().any(|leftover| gone.contains(leftover));
            if !is_left {
                return Ok::<_, ViewError>(None);
            }
            view.delete(&self.owner, &gone).map(Some)
        })
        .await;
    }

    async fn delete(&self, leftover: Leftover) {
        let Leftover { stream, epoch, from, to } = leftover;
        let stream = Stream { home: self.owner.home, number: stream };
        for number in from..to {
            let segment = Segment { stream, epoch, number };
            until_answered(&*self.clock, &self.repeats, || self.ledger.delete(segment)).await;
        }
    }

    /// Deletes as if a place were published.
    async fn delete_unpublished(&self, stream: u8, place: Start) {
        let Ok((_, view)) = read_view(&*self.ledger, &*self.clock).await else { return };
        let Ok(next) = view.publish_start(&self.owner, stream, place) else { return };
        let Ok(of) = next.home(self.owner.home) else { return };
        for leftover in &of.leftovers {
            self.delete(*leftover).await;
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
