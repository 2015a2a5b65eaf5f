//! A stream's chain of epochs: in which order it is read, and whether a copy's position is on it.

use ledger::{Ledger, Position, Segment, Stream};

use crate::{
    Clock, EndedEpoch, HomeView, Sealed,
    reader::{Damage, DamagedRecord, LedgerReader, WholeRecord, damaged, locate},
};

/// A part of a stream that is read in one go: an epoch, from a record on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChainStretch {
    /// Epoch, and the segment of the first record.
    pub(crate) from: Segment,
    /// Number of the first record.
    pub(crate) n: u64,
    /// Its end.
    pub(crate) end: StretchEnd,
    /// Records behind it do not follow its last one: a loss was accepted.
    pub(crate) is_cut: bool,
}

/// End of a stretch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StretchEnd {
    /// Nothing of it counts.
    Empty,
    /// The last record that is sealed.
    Sealed(Sealed),
    /// The first gap, or the record with this number.
    Open(u64),
}

/// Stretches of a stream in its home's chain, one for each epoch that is not before the start or `position`, from the record behind it on.
/// `position` has its segment.
pub(crate) fn stretches(
    of: &HomeView,
    stream: Stream,
    position: Option<(Position, u32)>,
) -> Vec<ChainStretch> {
    let start = of.starts.get(usize::from(stream.number)).copied().unwrap_or_default();
    let begin = position.map_or(start.epoch, |(position, _)| position.epoch);
    let mut is_open = false;
    let mut found = Vec::new();
    for ended in of.chain.iter().filter(|ended| ended.epoch >= begin) {
        let (number, n) = match position {
            Some((position, segment)) if position.epoch == ended.epoch => (segment, position.n + 1),
            _ if start.epoch == ended.epoch => (start.segment, start.n),
            _ => (0, 0),
        };
        let end = match (&ended.sealed, ended.last(stream.number)) {
            (Some(_), Some(last)) => StretchEnd::Sealed(last),
            (Some(_), None) => StretchEnd::Empty,
            // Behind an unsealed epoch nobody has written.
            (None, _) if is_open => StretchEnd::Empty,
            (None, _) => StretchEnd::Open(cut(ended, stream)),
        };
        is_open |= ended.sealed.is_none();
        let from = Segment { stream, epoch: ended.epoch, number };
        found.push(ChainStretch { from, n, end, is_cut: ended.cut.contains_key(&stream.number) });
    }
    found
}

fn cut(ended: &EndedEpoch, stream: Stream) -> u64 {
    ended.cut.get(&stream.number).copied().unwrap_or(u64::MAX)
}

/// A copy's position in the ledger.
pub(crate) enum Standing {
    /// The position is that of this record.
    On(Box<WholeRecord>),
    /// The position is none of the ledger's: the copy is emptied.
    Off,
}

/// Looks whether a position counts: on the chain or in the epoch under way, not before the start, not behind a seal, and its record is
/// there with the same checksum.
///
/// # Errors
/// Its record is sealed and missing, or misread.
pub(crate) async fn standing(
    ledger: &dyn Ledger,
    clock: &dyn Clock,
    of: &HomeView,
    stream: Stream,
    position: Position,
) -> Result<Standing, DamagedRecord> {
    let start = of.starts.get(usize::from(stream.number)).copied().unwrap_or_default();
    if (position.epoch, position.n) < (start.epoch, start.n) {
        return Ok(Standing::Off);
    }
    let ended = of.chain.iter().find(|ended| ended.epoch == position.epoch);
    if ended.is_none() && position.epoch != of.epoch {
        return Ok(Standing::Off);
    }
    let last = ended.and_then(|ended| ended.last(stream.number));
    let is_sealed = ended.is_some_and(|ended| ended.sealed.is_some());
    let is_behind = match last {
        Some(last) => position.n > last.n,
        None => is_sealed || ended.is_some_and(|ended| position.n >= cut(ended, stream)),
    };
    if is_behind {
        return Ok(Standing::Off);
    }
    let number = if position.epoch == start.epoch { start.segment } else { 0 };
    let first = Segment { stream, epoch: position.epoch, number };
    let bound = last.map(|last| last.segment);
    let record = match locate(ledger, clock, first, bound, position.n).await {
        Some(number) => {
            LedgerReader::new(ledger, clock, Segment { number, ..first }, position.n).next().await?
        }
        None => None,
    };
    match record {
        Some(record) if record.position == position => Ok(Standing::On(Box::new(record))),
        None if is_sealed && !is_behind => Err(damaged(stream, position.epoch, position.n, Damage::Missing)),
        _ => Ok(Standing::Off),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{Start, View};

    fn home() -> HomeView {
        let mut home = View::create("c", 1, 2).homes.remove(0);
        let sealed = |n, segment| Some(Sealed { n, segment });
        let ended = |epoch, sealed| EndedEpoch { epoch, sealed, cut: BTreeMap::new() };
        home.chain = vec![
            ended(2, Some(vec![sealed(9, 3), None])),
            ended(4, Some(vec![sealed(5, 1), sealed(0, 0)])),
            ended(5, None),
            ended(6, None),
        ];
        home.epoch = 7;
        home.starts[0] = Start { epoch: 2, n: 4, segment: 1 };
        home.starts[1] = Start { epoch: 4, n: 0, segment: 0 };
        home
    }

    fn segment(stream: u8, epoch: u64, number: u32) -> Segment {
        Segment { stream: Stream { home: 0, number: stream }, epoch, number }
    }

    #[test]
    fn a_stream_is_read_from_its_start_over_all_epochs() {
        let stretch = |from, n, end| ChainStretch { from, n, end, is_cut: false };
        let sealed = |n, segment| StretchEnd::Sealed(Sealed { n, segment });
        let found = stretches(&home(), segment(0, 0, 0).stream, None);
        let rest = [
            stretch(segment(0, 4, 0), 0, sealed(5, 1)),
            stretch(segment(0, 5, 0), 0, StretchEnd::Open(u64::MAX)),
            stretch(segment(0, 6, 0), 0, StretchEnd::Empty),
        ];
        assert_eq!(found[0], stretch(segment(0, 2, 1), 4, sealed(9, 3)));
        assert_eq!(found[1..], rest);
        let behind =
            stretches(&home(), segment(0, 0, 0).stream, Some((Position { epoch: 4, n: 3, sum: 0 }, 1)));
        assert_eq!(behind[0], stretch(segment(0, 4, 1), 4, sealed(5, 1)));
        assert_eq!(behind[1..], rest[1..]);
        assert_eq!(stretches(&home(), segment(1, 0, 0).stream, None).len(), 3);
    }

    #[test]
    fn a_loss_that_was_accepted_ends_a_stretch() {
        let mut home = home();
        home.chain[1].cut.insert(0, 3);
        home.chain[2].cut.insert(0, 0);
        home.chain[0].cut.insert(0, 0);
        let found = stretches(&home, segment(0, 0, 0).stream, None);
        let ends: Vec<StretchEnd> = found.iter().map(|stretch| stretch.end).collect();
        let cut = StretchEnd::Sealed(Sealed { n: 2, segment: 1 });
        assert_eq!(ends, [StretchEnd::Empty, cut, StretchEnd::Open(0), StretchEnd::Empty]);
    }
}
