//! A standby's copy is kept near the end of the ledger.

use bytes::Bytes;
use ledger::{Ledger, Misread, Position, Segment, Stream};

use crate::{
    Clock, HomeCopy, HomeView, MemberNode, TakeError, View,
    chain::{ChainStretch, Standing, StretchEnd, standing, stretches},
    reader::LedgerReader,
};

/// Most bytes of changes that a step reads before it applies them.
const STEP: usize = 16 << 20;

/// A step of a follower.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FollowStep {
    /// Records that it applied.
    pub applied: u64,
    /// The step stopped before the end: the next one goes on at once.
    pub more: bool,
}

/// Reads a home's ledger behind a copy's position, and applies it. The last record of the epoch under way stays out until another
/// follows it: only then it is known to be on a quorum, so that no takeover finds the copy ahead of the seal.
#[derive(Debug)]
pub struct Follower {
    home: u16,
    /// The home as it was seen last.
    seen: Option<HomeView>,
    /// Positions that were compared with the ledger, and their segments, by stream.
    checked: Vec<Option<(Position, u32)>>,
}

struct Unapplied {
    stream: u8,
    position: Position,
    segment: u32,
    changes: Bytes,
    /// The copy had no position.
    is_first: bool,
}

/// Tells whether positions that were compared with the one count in the other.
fn is_unchanged(one: &HomeView, other: &HomeView) -> bool {
    (one.epoch, &one.owner, &one.chain, &one.starts)
        == (other.epoch, &other.owner, &other.chain, &other.starts)
}

impl Follower {
    /// Follows a home.
    pub fn new(home: u16) -> Self {
        Self { home, seen: None, checked: Vec::new() }
    }

    /// One step: reads on behind the copy's position in `view`, a recent one, and applies whole records in order, provided that the
    /// epoch is still the same afterwards. A copy that is not on the chain is emptied, stream by stream, and begins at the start.
    ///
    /// Waits for [`MemberNode::run`], which reads the view once more if there is anything to apply. Cancel safety: the copy has whole
    /// records.
    ///
    /// # Errors
    /// As for [`crate::take`].
    pub async fn step(
        &mut self,
        me: &MemberNode,
        view: &View,
        copy: &mut dyn HomeCopy,
    ) -> Result<FollowStep, TakeError> {
        let of = view.home(self.home)?;
        if !self.seen.as_ref().is_some_and(|seen| is_unchanged(seen, of)) {
            self.checked.clear();
        }
        self.checked.resize(view.count(), None);
        self.seen = Some(of.clone());
        let read = self.read(&*me.ledger, &*me.clock, of, view.streams, copy).await;
        if let Ok((pending, more)) = &read
            && pending.is_empty()
        {
            return Ok(FollowStep { applied: 0, more: *more });
        }

        // Records that were read before this, in an epoch that has not ended since, are before its seal.
        let view = me.view().await?;
        let now = view.home(self.home)?;
        let is_same = now.epoch == of.epoch && now.owner == of.owner;
        let (pending, more) = match read {
            // Of a view that is old: its records may be deleted by now.
            Err(TakeError::Damaged(_)) if !is_unchanged(now, of) => {
                return Ok(FollowStep { applied: 0, more: true });
            }
            _ if !is_same => return Ok(FollowStep { applied: 0, more: true }),
            read => read?,
        };
        let applied = pending.len() as u64;
        for Unapplied { stream, position, segment, changes, is_first } in pending {
            let copied = |error| TakeError::Copy { home: self.home, stream, error };
            if is_first {
                copy.clear(stream).map_err(copied)?;
            }
            copy.apply(stream, position, &changes).map_err(copied)?;
            if let Some(checked) = self.checked.get_mut(usize::from(stream)) {
                *checked = Some((position, segment));
            }
        }
        Ok(FollowStep { applied, more })
    }

    /// Records behind the copy's positions, and whether there are more.
    async fn read(
        &mut self,
        ledger: &dyn Ledger,
        clock: &dyn Clock,
        of: &HomeView,
        streams: u8,
        copy: &mut dyn HomeCopy,
    ) -> Result<(Vec<Unapplied>, bool), TakeError> {
        let (mut pending, mut size, mut more) = (Vec::new(), 0, false);
        for number in 0..streams {
            let stream = Stream { home: self.home, number };
            let position = self.position(ledger, clock, of, stream, copy).await?;
            let mut reached = position;
            let mut predecessor = position.map(|(position, _)| position.sum);
            for ChainStretch { from, n, end, is_cut } in self.stretches(of, stream, position) {
                let until = match end {
                    StretchEnd::Empty => continue,
                    StretchEnd::Sealed(last) => last.n + 1,
                    // A takeover is under way: what of it counts is not known yet.
                    StretchEnd::Open(_) if from.epoch != of.epoch || of.owner.is_none() => break,
                    StretchEnd::Open(until) => until,
                };
                let mut reader = LedgerReader::new(ledger, clock, from, n);
                let mut held: Option<Unapplied> = None;
                let mut next = n;
                while next < until && size < STEP {
                    let Some(record) = reader.next().await? else { break };
                    if predecessor.is_some_and(|predecessor| record.head.predecessor != predecessor) {
                        return Err(record.damaged(Misread::Unconnected).into());
                    }
                    next += 1;
                    predecessor = Some(record.position.sum);
                    size += record.changes.len();
                    let read = Unapplied {
                        stream: number,
                        position: record.position,
                        segment: record.segment(),
                        changes: record.changes,
                        is_first: reached.is_none(),
                    };
                    reached = Some((read.position, read.segment));
                    pending.extend(held.replace(read));
                }
                more |= size >= STEP;
                match end {
                    StretchEnd::Sealed(_) => {
                        pending.extend(held);
                        // The rest comes with the next step, or is missing, which a takeover tells.
                        if next < until {
                            break;
                        }
                    }
                    _ => break,
                }
                if is_cut {
                    predecessor = None;
                }
            }
        }
        Ok((pending, more))
    }

    /// Position of a stream's copy and its segment, if it counts; the copy is emptied otherwise.
    async fn position(
        &mut self,
        ledger: &dyn Ledger,
        clock: &dyn Clock,
        of: &HomeView,
        stream: Stream,
        copy: &mut dyn HomeCopy,
    ) -> Result<Option<(Position, u32)>, TakeError> {
        let number = usize::from(stream.number);
        let Some(claimed) = copy.position(stream.number) else { return Ok(None) };
        let start = of.starts.get(number).copied().unwrap_or_default();
        let is_checked = self.checked[number].is_some_and(|(position, _)| position == claimed);
        if is_checked && (claimed.epoch, claimed.n) >= (start.epoch, start.n) {
            return Ok(self.checked[number]);
        }
        self.checked[number] = match standing(ledger, clock, of, stream, claimed).await? {
            Standing::On(record) => Some((claimed, record.segment())),
            Standing::Off => {
                let copied = |error| TakeError::Copy { home: self.home, stream: stream.number, error };
                copy.clear(stream.number).map_err(copied)?;
                None
            }
        };
        Ok(self.checked[number])
    }

    /// Stretches of the chain, and the epoch under way.
    fn stretches(
        &self,
        of: &HomeView,
        stream: Stream,
        position: Option<(Position, u32)>,
    ) -> Vec<ChainStretch> {
        let mut found = stretches(of, stream, position);
        let start = of.starts.get(usize::from(stream.number)).copied().unwrap_or_default();
        let (number, n) = match position {
            Some((position, segment)) if position.epoch == of.epoch => (segment, position.n + 1),
            _ if start.epoch == of.epoch => (start.segment, start.n),
            _ => (0, 0),
        };
        let from = Segment { stream, epoch: of.epoch, number };
        found.push(ChainStretch { from, n, end: StretchEnd::Open(u64::MAX), is_cut: false });
        found
    }
}
