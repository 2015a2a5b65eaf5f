//! Messages that wait in a group, page by page.

use access::backends::Scope;
use gateway_core::{LogRecord, Partition};
use groups::Pending;
use store::{LogRead, ReadLimit};

use super::{ConsumerGroups, GroupError, MemberMemory};

/// A message that waits, with its content if it can still be read.
#[derive(Debug, Clone)]
pub struct PendingMessage {
    /// Place and state of the message.
    pub pending: Pending,
    /// The message, as it is in the log.
    pub record: Option<LogRecord>,
}

/// Some of the messages that wait.
pub struct PendingPage {
    /// The pending messages, ordered by partition and offset.
    pub messages: Vec<PendingMessage>,
    /// The last that was looked at, if there are more behind it.
    pub last: Option<(Partition, u64)>,
    /// Memory for them.
    _held: MemberMemory,
}

impl ConsumerGroups {
    /// Messages that wait (outstanding, delayed) behind `after`, for a caller of this scope: at most `limit` are looked at, and
    /// those that are `wanted` returned until they have so many bytes, which are set aside meanwhile.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::OutOfScope`], [`GroupError::Memory`], [`GroupError::Store`].
    pub async fn pending(
        &self,
        group: &str,
        scope: &Scope,
        after: Option<(Partition, u64)>,
        limit: usize,
        bytes: usize,
        wanted: impl Fn(Option<&LogRecord>) -> bool,
    ) -> Result<PendingPage, GroupError> {
        let live = self.find_within(group, scope)?;
        let held = self.set_aside(bytes)?;
        let found = live.with(|inner| inner.logic.pending(after, limit + 1));
        let mut page = PendingPage { messages: Vec::new(), last: None, _held: held };
        let (mut last, mut room) = (after, bytes);
        for (at, pending) in found.into_iter().enumerate() {
            if at >= limit || room == 0 {
                page.last = last;
                break;
            }
            last = Some((pending.partition, pending.offset));
            let limit = ReadLimit { records: 1, bytes: 1 };
            let slice = match self.log.read(pending.partition, pending.offset, limit) {
                LogRead::Now(slice) => slice,
                LogRead::Later(slice) => slice.await?,
            };
            let record = slice.records.into_iter().find(|record| record.offset == pending.offset);
            if wanted(record.as_ref()) {
                room = room.saturating_sub(record.as_ref().map_or(0, |record| record.message.cost()));
                page.messages.push(PendingMessage { pending, record });
            }
        }
        Ok(page)
    }
}
