//! Members of a group and their partitions, as kept on disk: so that members find their places again after the process has ended.

use bytes::Bytes;
use gateway_core::PARTITIONS;
use thiserror::Error;

use super::{
    config::MAX_MEMBERS,
    progress::{get, put},
};

/// A member that keeps its place for its lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RosterMember {
    pub(crate) name: String,
    pub(crate) number: u64,
    /// In milliseconds.
    pub(crate) lease: u64,
    pub(crate) fetches: bool,
}

/// Members, and for each partition those that may have messages of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roster {
    pub(crate) members: Vec<RosterMember>,
    /// The owner, if it is among the members, and all members that had messages when this was written; by their place above.
    pub(crate) partitions: Vec<(Option<u32>, Vec<u32>)>,
}

/// A record of members that this version cannot read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("damaged, or written by a later version")]
pub struct BadRoster;

const VERSION: u8 = 1;
/// Bytes of a name at most.
const MAX_NAME: usize = 256;

impl Roster {
    /// The record.
    pub(crate) fn encode(&self) -> Bytes {
        let names: usize = self.members.iter().map(|member| member.name.len() + 16).sum();
        let mut out = Vec::with_capacity(names + 4 * PARTITIONS);
        out.push(VERSION);
        put(&mut out, self.members.len() as u64);
        for member in &self.members {
            put(&mut out, member.name.len() as u64);
            out.extend_from_slice(member.name.as_bytes());
            put(&mut out, member.number);
            put(&mut out, member.lease);
            out.push(u8::from(member.fetches));
        }
        for (owner, others) in &self.partitions {
            put(&mut out, owner.map_or(0, |owner| u64::from(owner) + 1));
            put(&mut out, others.len() as u64);
            for &other in others {
                put(&mut out, u64::from(other));
            }
        }
        Bytes::from(out)
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`BadRoster`] if it is not one.
    pub fn decode(mut from: &[u8]) -> Result<Self, BadRoster> {
        let (&version, rest) = from.split_first().ok_or(BadRoster)?;
        from = rest;
        if version != VERSION {
            return Err(BadRoster);
        }
        decode(&mut from).filter(|_| from.is_empty()).ok_or(BadRoster)
    }
}

fn decode(from: &mut &[u8]) -> Option<Roster> {
    let count = usize::try_from(get(from)?).ok().filter(|&count| count <= MAX_MEMBERS)?;
    let mut members = Vec::new();
    for _ in 0..count {
        let length = usize::try_from(get(from)?).ok().filter(|&length| length <= MAX_NAME)?;
        let (name, rest) = from.split_at_checked(length)?;
        *from = rest;
        let name = std::str::from_utf8(name).ok()?.to_owned();
        let (number, lease) = (get(from)?, get(from)?);
        let (&fetches, rest) = from.split_first()?;
        *from = rest;
        members.push(RosterMember { name, number, lease, fetches: fetches != 0 });
    }
    let member = |value: u64| u32::try_from(value).ok().filter(|&at| (at as usize) < count);
    let mut partitions = Vec::with_capacity(PARTITIONS);
    for _ in 0..PARTITIONS {
        let owner = match get(from)? {
            0 => None,
            owner => Some(member(owner - 1)?),
        };
        let others = usize::try_from(get(from)?).ok().filter(|&others| others <= count)?;
        let others = (0..others).map(|_| member(get(from)?)).collect::<Option<_>>()?;
        partitions.push((owner, others));
    }
    Some(Roster { members, partitions })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn roster() -> impl Strategy<Value = Roster> {
        let member = ("[a-zé]{1,9}", any::<u64>(), any::<u64>(), any::<bool>())
            .prop_map(|(name, number, lease, fetches)| RosterMember { name, number, lease, fetches });
        let member_of = |count: u32| (prop::option::of(0..count), prop::collection::vec(0..count, 0..3));
        prop::collection::vec(member, 3..9).prop_flat_map(move |members| {
            let partitions = prop::collection::vec(member_of(3), PARTITIONS);
            (Just(members), partitions).prop_map(|(members, partitions)| Roster { members, partitions })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn a_roster_is_read_back_as_it_was_written(roster in roster()) {
            let record = roster.encode();
            prop_assert_eq!(Roster::decode(&record), Ok(roster));
            prop_assert_eq!(Roster::decode(&record[..record.len() - 1]), Err(BadRoster));
        }

        #[test]
        fn any_bytes_are_a_roster_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = Roster::decode(&[&[VERSION], &bytes[..]].concat());
        }
    }
}
