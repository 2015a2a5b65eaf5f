//! Places at which a group begins, or to which it is moved, and their tokens.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use gateway_core::{PARTITIONS, Partition, Timestamp};
use store::{PartitionBounds, PartitionedLog};

use super::GroupError;

/// Searches of the log at once.
const SEARCHES: usize = 16;

/// Place at which a group begins, or to which it is moved.
#[derive(Debug, Clone)]
pub enum GroupStart {
    /// After everything that is there.
    Latest,
    /// The oldest that is kept.
    Earliest,
    /// The first that was received at this time or later.
    Time(Timestamp),
    /// As a token says.
    Token(String),
}

/// Finds the place in each partition.
///
/// # Errors
/// [`GroupError::BadToken`], [`GroupError::OutOfRange`], [`GroupError::Store`].
pub(super) async fn places(log: &dyn PartitionedLog, start: &GroupStart) -> Result<Vec<u64>, GroupError> {
    let bounds = Partition::all().map(|partition| log.bounds(partition));
    Ok(match start {
        GroupStart::Latest => bounds.map(|bounds| bounds.end).collect(),
        GroupStart::Earliest => bounds.map(|bounds| bounds.start).collect(),
        GroupStart::Time(time) => {
            let mut places = Vec::with_capacity(PARTITIONS);
            let all: Vec<Partition> = Partition::all().collect();
            // Each looks into a file: some at once, and not all.
            for some in all.chunks(SEARCHES) {
                let searches: Vec<_> = some.iter().map(|&partition| log.find(partition, *time)).collect();
                for search in searches {
                    places.push(search.await?);
                }
            }
            places
        }
        GroupStart::Token(token) => {
            let places = read_token(token, log.id())?;
            // A reader at the end of the log may be beyond the end of a partition that has nothing there.
            let place = |(bounds, place): (PartitionBounds, u64)| {
                (place >= bounds.start).then(|| place.min(bounds.end))
            };
            bounds.zip(places).map(place).collect::<Option<_>>().ok_or(GroupError::OutOfRange)?
        }
    })
}

/// Names a place in each partition of a log. Opaque.
pub(super) fn token(log: u64, places: &[u64]) -> String {
    let mut bytes = log.to_le_bytes().to_vec();
    for place in places {
        let length = 8 - place.leading_zeros() as usize / 8;
        bytes.push(u8::try_from(length).unwrap_or(8));
        bytes.extend_from_slice(&place.to_le_bytes()[..length]);
    }
    URL_SAFE_NO_PAD.encode(bytes)
}

fn read_token(token: &str, log: u64) -> Result<Vec<u64>, GroupError> {
    let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| GroupError::BadToken)?;
    let (own, mut rest) = bytes.split_first_chunk::<8>().ok_or(GroupError::BadToken)?;
    let mut places = Vec::with_capacity(PARTITIONS);
    while let Some((&length, behind)) = rest.split_first() {
        let (digits, behind) = behind.split_at_checked(usize::from(length)).ok_or(GroupError::BadToken)?;
        let mut place = [0; 8];
        place.get_mut(..digits.len()).ok_or(GroupError::BadToken)?.copy_from_slice(digits);
        places.push(u64::from_le_bytes(place));
        rest = behind;
    }
    if places.len() != PARTITIONS {
        return Err(GroupError::BadToken);
    }
    // Of a log that no longer exists.
    if u64::from_le_bytes(*own) == log { Ok(places) } else { Err(GroupError::OutOfRange) }
}
