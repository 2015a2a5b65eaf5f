//! The devices of which most waits, found in one walk over all sessions: a few at a time, under no lock, and one walk after the
//! other, so that callers together take no more than a part of one thread.

use std::{cmp::Reverse, collections::BinaryHeap};

use broker::{Broker, QueueInfo, Turn};
use gateway_core::Effort;
use tokio::sync::Semaphore;

use crate::{proto::gateway::v1, publishing::routing::pause, server::access::Call};
use grpc_messages::{answers, convert, status::Error};

/// Most devices that are shown, and how many if nothing is said.
const MOST: usize = 100;
const DEFAULT: usize = 10;
/// Effort of one step, which looks at 256 sessions and their queues.
const LOOK: u32 = 256 * Effort::DELIVERY;

/// The most of something, at most a number of them.
struct TopList<T> {
    most: usize,
    /// The least of them first.
    heap: BinaryHeap<Reverse<(u64, T)>>,
}

impl<T: Ord> TopList<T> {
    fn new(most: usize) -> Self {
        Self { most, heap: BinaryHeap::with_capacity(most + 1) }
    }

    /// Offers one of this value; `make` is called if it is among the most for now. Nothing is not among them.
    fn offer(&mut self, value: u64, make: impl FnOnce() -> T) {
        let is_full = self.heap.len() >= self.most;
        if value == 0 || is_full && self.heap.peek().is_some_and(|Reverse((least, _))| value <= *least) {
            return;
        }
        self.heap.push(Reverse((value, make())));
        if is_full {
            self.heap.pop();
        }
    }

    /// The most first.
    fn into_sorted(self) -> impl Iterator<Item = T> {
        self.heap.into_sorted_vec().into_iter().map(|Reverse((_, item))| item)
    }
}

/// Ranks the devices in scope, once `walk` has room for one more. Cancel safe.
pub(super) async fn rank(
    broker: &Broker,
    walk: &Semaphore,
    call: &Call,
    request: &v1::ListTopDevicesRequest,
) -> Result<v1::ListTopDevicesResponse, Error> {
    let by: fn(&QueueInfo) -> u64 = match convert::known(request.rank_by, "rank_by")? {
        v1::DeviceRank::Unspecified | v1::DeviceRank::PendingMessages => |queue| queue.pending as u64,
        v1::DeviceRank::PendingBytes => |queue| queue.pending_bytes as u64,
        v1::DeviceRank::Inflight => |queue| queue.inflight as u64,
        v1::DeviceRank::Dropped => |queue| queue.dropped,
    };
    let most = match usize::try_from(request.limit) {
        Ok(0) => DEFAULT,
        Ok(most @ ..=MOST) => most,
        _ => return Err(Error::invalid("limit", format!("is not between 0 and {MOST}"))),
    };
    let (scope, prefix) = (call.scope(), request.device_id_prefix.as_str());
    let mut top = TopList::new(most);
    let mut ranked = 0;
    {
        let _one = walk.acquire().await.map_err(|_| Error::Internal)?;
        let mut turn = Turn::default();
        let mut next = Some(1);
        while let Some(start) = next {
            next = broker.queues_step(start, |id, online, queue| {
                if (online || !request.online_only) && id.starts_with(prefix) && scope.has_device(id) {
                    ranked += 1;
                    let queue = queue();
                    top.offer(by(&queue), || RankedDevice { id: id.to_owned(), queue });
                }
            });
            turn.effort.spend(LOOK);
            if turn.effort.is_spent() {
                pause(&mut turn).await;
            }
        }
    }
    let shown = top.into_sorted().filter_map(|RankedDevice { id, queue }| {
        // The session may have ended meanwhile.
        let mut info = broker.device(&id)?;
        info.queue = queue;
        Some(answers::device(info))
    });
    Ok(v1::ListTopDevicesResponse { devices: shown.collect(), ranked })
}

/// A device, in order of its id where as much waits for another.
struct RankedDevice {
    id: String,
    queue: QueueInfo,
}

impl PartialEq for RankedDevice {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for RankedDevice {}

impl PartialOrd for RankedDevice {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for RankedDevice {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.id.cmp(&other.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_are_kept_in_order_and_no_more_is_made_than_that() {
        let mut top = TopList::new(3);
        let mut made = 0;
        for value in [5, 1, 9, 0, 7, 2, 8, 1] {
            top.offer(value, || {
                made += 1;
                value
            });
        }
        assert_eq!(made, 5, "what is not among them for now is not made");
        assert_eq!(top.into_sorted().collect::<Vec<_>>(), [9, 8, 7]);
    }
}
