//! Keys of the environments `sessions`, `queues` and `retained`, which kept the state before this one did. Records are the same, byte
//! for byte; where a queue was named by 5 bytes, 2 bytes of its home and 6 of its number are now.

use gateway_core::QueueId;

/// Bytes of a queue in the keys of the former tables `entries`, `received` and `expiry`.
const QUEUE: usize = 5;
/// Bytes of a second in the keys of `expiry`.
const SECOND: usize = 5;

/// Gives the table and the key of a record that the former table `table` had under `key`; `None` if no such record can have been
/// there.
pub fn converted_key<'a>(table: &'a str, key: &[u8]) -> Option<(&'a str, Vec<u8>)> {
    let place = match table {
        "entries" if key.len() == QUEUE + 6 => 0,
        "received" if key.len() == QUEUE + 2 => 0,
        "expiry" if key.len() == SECOND + QUEUE + 6 => SECOND,
        // Eight bytes of a number are a home, 0 so far, and six of a number.
        "sessions" | "subscriptions" if key.starts_with(&[0, 0]) => return Some((table, key.to_vec())),
        "groups" if key.starts_with(&[0, 0]) => return Some(("shared_groups", key.to_vec())),
        "bodies" | "refs" | "retained" => return Some((table, key.to_vec())),
        _ => return None,
    };
    let (before, rest) = key.split_at(place);
    let [home @ .., _, _, _, _, _] = QueueId::of(QueueId::HOME, 0).0.to_be_bytes();
    Some((table, [before, &home, rest].concat()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{queues, sessions};

    #[test]
    fn a_former_key_becomes_that_of_the_same_record() {
        let number = 0x01_0203_0405_u64;
        let former = |parts: &[&[u8]]| parts.concat();
        let queue = &number.to_be_bytes()[3..];
        let place = 9_u64.to_be_bytes();
        let (_, entry) = converted_key("entries", &former(&[queue, &place[2..]])).unwrap();
        assert_eq!(queues::place(&entry), Some((QueueId(number), 9)));
        let (_, expiry) = converted_key("expiry", &former(&[&[0, 0, 0, 0, 7], queue, &place[2..]])).unwrap();
        assert_eq!(queues::expiry(&expiry), Some((7, QueueId(number), 9)));
        let (_, received) = converted_key("received", &former(&[queue, &[1, 2]])).unwrap();
        assert_eq!(queues::received(&received), Some((QueueId(number), 0x0102)));
        for (table, now) in [("sessions", "sessions"), ("groups", "shared_groups")] {
            let (found, key) = converted_key(table, &number.to_be_bytes()).unwrap();
            assert_eq!((found, &key[..]), (now, &sessions::key(QueueId(number))[..]));
        }
        assert_eq!(converted_key("bodies", b"123456"), Some(("bodies", b"123456".to_vec())));
        for (table, key) in [("entries", &b"short"[..]), ("sessions", &[1; 8]), ("nobody", b"x")] {
            assert_eq!(converted_key(table, key), None, "{table}");
        }
    }
}
