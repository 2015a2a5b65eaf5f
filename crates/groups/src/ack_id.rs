//! The name of one delivery, by which it is acknowledged without a stream.

use std::{fmt, str::FromStr};

use gateway_core::{GroupId, Partition};

use super::progress::{get, put};

/// Names one delivery of one message. Opaque to clients: as text it is letters and digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AckId {
    /// Group that delivered the message.
    pub group: GroupId,
    /// Of how many seeks it knows.
    pub generation: u32,
    /// Partition of the message.
    pub partition: Partition,
    /// Place of the message in its partition.
    pub offset: u64,
    /// Order key of the message, as a number.
    pub(crate) key: u64,
    /// Number of the member that got the delivery.
    pub(crate) member: u64,
    /// Its number with the member.
    pub(crate) delivery: u64,
}

impl AckId {
    /// As text.
    pub fn text(&self) -> String {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut bytes = Vec::with_capacity(LONGEST);
        bytes.push(self.partition.0);
        for value in
            [u64::from(self.group.0), u64::from(self.generation), self.offset, self.member, self.delivery]
        {
            put(&mut bytes, value);
        }
        bytes.extend_from_slice(&self.key.to_le_bytes());
        let mut text = String::with_capacity(2 * bytes.len());
        for byte in bytes {
            text.push(char::from(DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        text
    }
}

/// Bytes of the longest, before they are text.
const LONGEST: usize = 1 + 2 * 5 + 3 * 10 + 8;

impl fmt::Display for AckId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

/// Not an [`AckId`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadAckId;

impl FromStr for AckId {
    type Err = BadAckId;

    fn from_str(text: &str) -> Result<Self, BadAckId> {
        parse(text).ok_or(BadAckId)
    }
}

fn parse(text: &str) -> Option<AckId> {
    let mut bytes = [0; LONGEST];
    let length = text.len() / 2;
    if !text.len().is_multiple_of(2) || length > bytes.len() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digit = |letter: u8| match letter {
            b'0'..=b'9' => Some(letter - b'0'),
            b'a'..=b'f' => Some(letter - b'a' + 10),
            _ => None,
        };
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    let (&partition, mut rest) = bytes[..length].split_first()?;
    let from = &mut rest;
    let group = GroupId(u32::try_from(get(from)?).ok()?);
    let generation = u32::try_from(get(from)?).ok()?;
    let (offset, member, delivery) = (get(from)?, get(from)?, get(from)?);
    let key = u64::from_le_bytes((**from).try_into().ok()?);
    Some(AckId { group, generation, partition: Partition(partition), offset, key, member, delivery })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_ack_id_is_read_back_as_it_was_written(
            (group, generation, partition) in any::<(u32, u32, u8)>(),
            (offset, key, member, delivery) in any::<(u64, u64, u64, u64)>(),
        ) {
            let (group, partition) = (GroupId(group), Partition(partition));
            let id = AckId { group, generation, partition, offset, key, member, delivery };
            let text = id.to_string();
            prop_assert!(text.len() <= 128);
            prop_assert_eq!(text.parse(), Ok(id));
        }

        #[test]
        fn any_text_is_an_ack_id_or_an_error(text in "[0-9a-fA-Fé]{0,140}") {
            let _ = text.parse::<AckId>();
        }
    }

    #[test]
    fn what_is_no_ack_id_is_refused() {
        for text in ["", "0", "zz", "00", &"00".repeat(50), "é"] {
            assert_eq!(text.parse::<AckId>(), Err(BadAckId), "{text}");
        }
    }
}
