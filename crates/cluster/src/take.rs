//! A home changes hands.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ledger::{Inserted, Ledger, Misread, Owner, Position, Row, Stream, Swapped};

use crate::{
    Clock, HomeCopy, HomeView, MemberNode, Sealed, Tenure, View, ViewError,
    calls::until_answered,
    chain::{ChainStretch, Standing, StretchEnd, standing, stretches},
    change::{change, read_view, swap},
    reader::{Damage, DamagedRecord, LedgerReader, damaged},
};

/// A takeover that did not come about.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// The view cannot be used, or another node was faster: `ViewError::NotOwner`.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The ledger is damaged. The home keeps no owner that serves until the loss is accepted or the ledger is mended.
    #[error(transparent)]
    Damaged(#[from] DamagedRecord),
    /// The directory does not take a record.
    #[error("restore home {home}, stream {stream}: {error}")]
    Copy {
        /// The home.
        home: u16,
        /// The stream.
        stream: u8,
        /// The failure, as the directory tells it.
        error: String,
    },
}

/// Takes a home, restores what `copy` lacks, and returns the tenure of its new owner, which may serve at once.
///
/// `from` is the epoch whose owner the caller has given up: if the home is in another meanwhile, it is left alone. `wait` is
/// [`crate::LEASE_WAIT`], or less if the caller knows that the old process has served in that epoch and is dead; after a clean stop
/// there is none in any case. Does not end while the ledger does not answer. `copy` is called in between, and blocks.
///
/// A home that is this process's in an epoch in which it has not served, since an earlier call was dropped or failed, stays in that
/// epoch. One in which it has served gets a new epoch, tenure and lease, like anybody else's.
///
/// Cancel safety: if dropped, the home may be this node's without anybody running it; the next call goes on.
///
/// # Errors
/// [`TakeError`]. The home may have a new epoch, and no owner that serves.
pub async fn take(
    me: &Arc<MemberNode>,
    home: u16,
    from: Option<u64>,
    wait: Duration,
    copy: &mut dyn HomeCopy,
) -> Result<Tenure, TakeError> {
    let (engine, time) = (&*me.ledger, &*me.clock);
    // (5) The view gets a new owner and epoch: from now on a validating read that begins does not show the old one.
    let (owner, was_released) = begin_epoch(me, home, from).await?;
    let mut owned_since = None;
    let (view, restored) = loop {
        // (6) A serial read of the view. An owner of it that is somebody else has been faster.
        let (stored, view) = read_view(engine, time).await?;
        let of = view.home(home)?;
        if !of.is_of(&owner) {
            return Err(of.not_owner(home).into());
        }
        owned_since.get_or_insert_with(|| time.now());

        // (7) All streams are read behind (5) and (6): each record that was acknowledged is met.
        let mut restored = Vec::new();
        let mut vectors = vec![Vec::new(); of.chain.len()];
        for number in 0..view.streams {
            let stream = Stream { home, number };
            let stream = restore(engine, time, of, &owner, stream, copy, &mut vectors).await;
            if let Err(TakeError::Damaged(_)) = stream {
                // A next owner, if there is one, may have deleted what this view still needs.
                let (_, now) = read_view(engine, time).await?;
                let now = now.home(home)?;
                if !now.is_of(&owner) {
                    return Err(now.not_owner(home).into());
                }
            }
            restored.push(stream?);
        }

        // (8) One vector for all streams: how far the ended epoch goes. What an old owner still writes is behind it.
        if of.chain.iter().all(|ended| ended.sealed.is_some()) || weakened!(NoSeal) {
            break (view, restored);
        }
        let sealed = view.seal(&owner, &vectors)?;
        if weakened!(ServeBeforeSeal) {
            drop(engine.swap(&sealed.store(stored.cluster, stored.version + 1)?));
            break (sealed, restored);
        }
        let swapped = swap(engine, time, &stored, &sealed).await?;
        if swapped == Some(Swapped::Applied) {
            break (sealed, restored);
        }
        if weakened!(SealBlind) {
            let (_, now) = read_view(engine, time).await?;
            if now.home(home)?.is_of(&owner)
                && now.home(home)?.chain.iter().all(|ended| ended.sealed.is_some())
            {
                break (sealed, restored);
            }
        }
        // Unknown, or another home's change came between: what the view says is sealed counts, not what was meant.
    };

    // (9) The last record of each stream was held back until it was sealed.
    let mut restored = restored;
    for (number, stream) in (0..).zip(&mut restored) {
        stream.flush(home, number, copy)?;
    }
    // The old owner may hold a lease until then.
    let wait = if was_released { Duration::ZERO } else { wait };
    let served_from = owned_since.unwrap_or_default() + wait;
    let left = served_from.saturating_sub(time.now());
    if !left.is_zero() {
        time.sleep(left).await;
    }
    let mut ends: Vec<_> = restored.into_iter().map(|stream| (stream.last, stream.bytes)).collect();
    // Streams that the view does not have yet: they are written once it has them.
    ends.resize(ends.len().max(usize::from(copy.streams())), (None, 0));
    Ok(Tenure::new(me, owner, &view, ends))
}

/// Step (5). Returns the new owner, and whether the home had none.
async fn begin_epoch(me: &MemberNode, home: u16, from: Option<u64>) -> Result<(Owner, bool), TakeError> {
    let mut taken: Option<u64> = None;
    let mut was_released = false;
    let view = change(&*me.ledger, &*me.clock, |view: &View| -> Result<Option<View>, TakeError> {
        let of = view.home(home)?;
        let expected = taken.or(from).unwrap_or(of.epoch);
        // A compare-and-set of this call or of an earlier one, unknown until now, has applied; `wait` is for the epoch before.
        let has_served = me.has_served(home, of.epoch) && !weakened!(SameEpoch);
        let is_mine = of.is_of(&me.node().owner(home, of.epoch)) && !has_served;
        if is_mine && (expected..=expected + 1).contains(&of.epoch) {
            return Ok(None);
        }
        if of.epoch != expected {
            return Err(of.not_owner(home).into());
        }
        was_released = of.owner.is_none();
        taken = Some(of.epoch);
        Ok(Some(view.take(home, me.node())?))
    })
    .await?;
    Ok((me.node().owner(home, view.home(home)?.epoch), was_released))
}

/// A stream that was restored.
#[derive(Default)]
struct RestoredStream {
    /// The last record, which is applied or held back.
    last: Option<Position>,
    /// A record that is applied as soon as it is known to be sealed.
    held: Option<(Position, Bytes)>,
    /// Bytes of the stream in the ledger, about.
    bytes: u64,
}

impl RestoredStream {
    fn flush(&mut self, home: u16, stream: u8, copy: &mut dyn HomeCopy) -> Result<(), TakeError> {
        let Some((position, changes)) = self.held.take() else { return Ok(()) };
        copy.apply(stream, position, &changes).map_err(|error| TakeError::Copy { home, stream, error })
    }
}

/// Step (7) of one stream: reads it from the copy's position or its start on, and applies it to the copy but for the last record of an
/// epoch that is not sealed. Adds the last record of each epoch to its vector.
async fn restore(
    ledger: &dyn Ledger,
    clock: &dyn Clock,
    of: &HomeView,
    owner: &Owner,
    stream: Stream,
    copy: &mut dyn HomeCopy,
    vectors: &mut [Vec<Option<Sealed>>],
) -> Result<RestoredStream, TakeError> {
    let Stream { home, number } = stream;
    let copied = |error| TakeError::Copy { home, stream: number, error };
    let mut restored = RestoredStream::default();

    // A directory counts only if its position is the ledger's.
    let mut position = None;
    let mut last_rows: Vec<Row> = Vec::new();
    if let Some(claimed) = copy.position(number) {
        let start = of.starts.get(usize::from(number)).copied().unwrap_or_default();
        let is_stale = (claimed.epoch, claimed.n) < (start.epoch, start.n);
        match standing(ledger, clock, of, stream, claimed).await? {
            Standing::On(record) => {
                position = Some((claimed, record.segment()));
                last_rows = record.rows;
            }
            Standing::Off if weakened!(StaleDirectory) && is_stale => {}
            Standing::Off if weakened!(DirectoryAhead | LocalFirst) && !is_stale => {
                position = Some((claimed, 0));
            }
            Standing::Off => copy.clear(number).map_err(copied)?,
        }
    }
    restored.last = position.map(|(position, _)| position);
    let mut predecessor = restored.last.map(|last| last.sum);
    let mut is_known = position.is_some() || weakened!(StaleDirectory);

    let stretches = stretches(of, stream, position);
    restored.bytes = bytes_before(of, number, position);
    // Epochs before the first stretch are sealed, or have nothing.
    let before = of.chain.len() - stretches.len();
    for (vector, ended) in vectors.iter_mut().zip(&of.chain).take(before) {
        vector.push(
            ended.sealed.as_ref().and_then(|sealed| sealed.get(usize::from(number)).copied().flatten()),
        );
    }
    for (index, stretch) in stretches.iter().enumerate() {
        let ChainStretch { from, n, end, is_cut } = *stretch;
        // The position itself, if this is its epoch.
        let mut last = position.filter(|(position, _)| position.epoch == from.epoch);
        let mut last = last.take().map(|(position, segment)| Sealed { n: position.n, segment });
        let mut reader = LedgerReader::new(ledger, clock, from, n);
        let until = match end {
            StretchEnd::Empty => 0,
            StretchEnd::Sealed(sealed) => sealed.n + 1,
            StretchEnd::Open(until) => until,
        };
        while last.map_or(n, |last| last.n + 1) < until {
            let Some(record) = reader.next().await? else { break };
            if predecessor.is_some_and(|predecessor| record.head.predecessor != predecessor) {
                return Err(record.damaged(Misread::Unconnected).into());
            }
            if !is_known {
                // A directory without a position, which may hold anything.
                copy.clear(number).map_err(copied)?;
                is_known = true;
            }
            restored.flush(home, number, copy)?;
            last = Some(Sealed { n: record.head.n, segment: record.segment() });
            predecessor = Some(record.position.sum);
            restored.last = Some(record.position);
            restored.bytes += record.rows.iter().map(|row| row.data.len() as u64).sum::<u64>();
            restored.held = Some((record.position, record.changes));
            last_rows = record.rows;
            if matches!(end, StretchEnd::Sealed(_)) {
                restored.flush(home, number, copy)?;
            }
        }
        let next = last.map_or(n, |last| last.n + 1);
        let is_short = match end {
            StretchEnd::Empty => false,
            StretchEnd::Sealed(_) => next < until,
            // A stream does not begin behind its epoch's end.
            StretchEnd::Open(_) => last.is_none() && n > 0 && n < until,
        };
        if is_short {
            return Err(damaged(stream, from.epoch, next, Damage::Missing).into());
        }
        let mut entry = of.chain[before + index]
            .sealed
            .as_ref()
            .map_or(last, |sealed| sealed.get(usize::from(number)).copied().flatten());
        if let StretchEnd::Open(_) = end {
            if weakened!(PartsMissing) && reader.parts_only {
                entry = Some(Sealed { n: next, segment: entry.map_or(0, |entry| entry.segment) });
            }
            // All rows of the last record once more: then a quorum has them, and a reader of any other quorum finds them. Those
            // before it were on a quorum when it was begun.
            if last.is_some() && !weakened!(NoRewrite) {
                let rows = last_rows.drain(..).take(if weakened!(HalfRewrite) { 1 } else { usize::MAX });
                write_again(ledger, clock, of, owner, rows.collect()).await?;
            }
        }
        vectors[before + index].push(entry);
        if is_cut {
            predecessor = None;
        }
    }
    Ok(restored)
}

async fn write_again(
    ledger: &dyn Ledger,
    clock: &dyn Clock,
    of: &HomeView,
    owner: &Owner,
    rows: Arc<[Row]>,
) -> Result<(), ViewError> {
    let insert = || ledger.insert(owner, Arc::clone(&rows));
    match until_answered(clock, &Default::default(), insert).await.1 {
        Inserted::Stored | Inserted::Owned => Ok(()),
        Inserted::Fenced => Err(of.not_owner(owner.home)),
    }
}

/// Bytes of a stream in the ledger before a position, as its segments tell.
fn bytes_before(of: &HomeView, stream: u8, position: Option<(Position, u32)>) -> u64 {
    let Some((position, segment)) = position else { return 0 };
    let start = of.starts.get(usize::from(stream)).copied().unwrap_or_default();
    let first = |epoch: u64| if epoch == start.epoch { start.segment } else { 0 };
    let whole = of.chain.iter().filter(|ended| (start.epoch..position.epoch).contains(&ended.epoch));
    let whole = whole.filter_map(|ended| {
        let last = ended.last(stream)?;
        Some(u64::from(last.segment.saturating_sub(first(ended.epoch))) + 1)
    });
    let segments = whole.sum::<u64>() + u64::from(segment.saturating_sub(first(position.epoch)));
    segments * crate::writer::SEGMENT as u64
}
