//! The beginning of a packet whose rest has not come. Its buffer grows with the bytes that have come, never by the
//! length that the packet announces, and is on the memory account; the part that every connection may have anyway is
//! not.

use broker::{Account, MemoryKind};

/// Capacity that is not charged: a header, a small packet.
const FREE: usize = 1 << 10;
/// Bytes of a packet that renew its time, see [`super::started`].
const STEP: usize = 64 << 10;

/// The account has no room.
pub(crate) struct NoPacketRoom;

/// See the module. [`Self::clear`] before it is dropped.
#[derive(Default)]
pub(crate) struct Partial {
    bytes: Vec<u8>,
    charged: u32,
}

impl Partial {
    /// Bytes that came early. They are charged when what is left of them is.
    pub(crate) fn of(bytes: Vec<u8>) -> Self {
        Self { bytes, charged: 0 }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Steps of the packet that have come.
    pub(crate) fn steps(&self) -> usize {
        self.bytes.len() / STEP
    }

    /// Takes the bytes out, to be replaced by [`Self::keep`] or [`Self::put_back`]; they stay charged until then.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Keeps a copy of the bytes that were taken and not used.
    ///
    /// # Errors
    /// The account has no room. Nothing is kept then.
    #[inline]
    pub(crate) fn keep(&mut self, rest: &[u8], account: &Account) -> Result<(), NoPacketRoom> {
        if rest.is_empty() && self.charged == 0 {
            self.bytes = Vec::new();
            return Ok(());
        }
        self.put_back(rest.to_vec(), account)
    }

    /// Keeps what was taken, from its byte `used` on.
    ///
    /// # Errors
    /// As [`Self::keep`].
    pub(crate) fn put_back_from(
        &mut self,
        used: usize,
        mut taken: Vec<u8>,
        account: &Account,
    ) -> Result<(), NoPacketRoom> {
        if used == 0 {
            return self.put_back(taken, account);
        }
        if used < taken.len() / 2 {
            taken.drain(..used);
            return self.put_back(taken, account);
        }
        self.keep(&taken[used..], account)
    }

    fn put_back(&mut self, bytes: Vec<u8>, account: &Account) -> Result<(), NoPacketRoom> {
        self.bytes = bytes;
        if self.settle(account) {
            return Ok(());
        }
        self.clear(account);
        Err(NoPacketRoom)
    }

    /// Gives everything back.
    pub(crate) fn clear(&mut self, account: &Account) {
        self.bytes = Vec::new();
        self.settle(account);
    }

    fn settle(&mut self, account: &Account) -> bool {
        let capacity = self.bytes.capacity();
        let charged = self.charged as usize;
        let due = if capacity <= FREE { 0 } else { capacity };
        if due > charged {
            if !account.charge(MemoryKind::Partial, charged, due - charged) {
                return false;
            }
        } else {
            account.release(MemoryKind::Partial, charged - due);
        }
        // Packets have 256 MiB at most.
        self.charged = u32::try_from(due).unwrap_or(u32::MAX);
        true
    }
}

/// Appends to the beginning of a packet, with room for a quarter more at most.
pub(crate) fn append(bytes: &mut Vec<u8>, more: &[u8]) {
    if bytes.capacity() - bytes.len() < more.len() {
        bytes.reserve_exact(more.len().max(bytes.len() / 4));
    }
    bytes.extend_from_slice(more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_charged_by_what_has_come_and_given_back() {
        let account = Account::new(1 << 20);
        let mut partial = Partial::default();
        assert!(partial.keep(&[0; FREE], &account).is_ok());
        assert_eq!(account.used(), 0, "what every connection may have");
        let piece = [0; 16 << 10];
        loop {
            let mut taken = partial.take();
            append(&mut taken, &piece);
            let len = taken.len();
            if partial.put_back_from(0, taken, &account).is_err() {
                break;
            }
            assert!((len..=len * 5 / 4 + piece.len()).contains(&account.held(MemoryKind::Partial)));
        }
        assert_eq!((partial.len(), account.used()), (0, 0), "who is refused holds nothing");
        assert!(partial.keep(&[0; 5000], &account).is_ok());
        assert!(partial.put_back_from(4000, vec![0; 5000], &account).is_ok());
        assert_eq!((partial.len(), account.used()), (1000, 0));
    }
}
