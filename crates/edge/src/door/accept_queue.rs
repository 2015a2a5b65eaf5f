//! Waiting room of accepted sockets that need a handshake's place: by address, and each address in turn.

use std::collections::{HashMap, VecDeque};

use super::{DoorRefusal, NotNow, SourceAddress};

/// Waiting sockets: a limited number, however few addresses they come from.
#[derive(Debug)]
pub struct AcceptQueue<W> {
    most: usize,
    waiting: usize,
    queues: HashMap<Option<SourceAddress>, VecDeque<W>>,
    /// Addresses that have a queue, in the order of their turns.
    turns: VecDeque<Option<SourceAddress>>,
}

impl<W> AcceptQueue<W> {
    /// With room for `most`.
    pub fn new(most: usize) -> Self {
        Self { most, waiting: 0, queues: HashMap::new(), turns: VecDeque::new() }
    }

    /// Returns whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Lets `who` wait. When there is no room, the oldest of the address with most waiting is turned away and returned.
    pub fn push(&mut self, address: Option<SourceAddress>, who: W) -> Option<W> {
        let queue = self.queues.entry(address).or_default();
        if queue.is_empty() {
            self.turns.push_back(address);
        }
        queue.push_back(who);
        self.waiting += 1;
        if self.waiting <= self.most {
            return None;
        }
        let longest = self.queues.iter().max_by_key(|(_, queue)| queue.len()).map(|(address, _)| *address)?;
        let turned_away = self.queues.get_mut(&longest)?.pop_front();
        self.waiting -= 1;
        self.forget_if_empty(longest);
        turned_away
    }

    /// The next one who is let in, with its places, or is refused. The youngest of an address goes first: among many
    /// silent ones it is the likeliest to have something to say, and in a storm as many are served either way.
    pub fn next<T>(
        &mut self,
        mut enter: impl FnMut(Option<SourceAddress>) -> Result<T, NotNow>,
    ) -> Option<(W, Result<T, DoorRefusal>)> {
        for _ in 0..self.turns.len() {
            let address = self.turns.pop_front()?;
            self.turns.push_back(address);
            let entered = match enter(address) {
                Ok(entered) => Ok(entered),
                Err(NotNow::Refused(refusal)) => Err(refusal),
                Err(NotNow::Wait) => continue,
            };
            let who = self.queues.get_mut(&address)?.pop_back()?;
            self.waiting -= 1;
            self.forget_if_empty(address);
            return Some((who, entered));
        }
        None
    }

    fn forget_if_empty(&mut self, address: Option<SourceAddress>) {
        if self.queues.get(&address).is_some_and(VecDeque::is_empty) {
            self.queues.remove(&address);
            self.turns.retain(|known| *known != address);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;

    fn address(number: u32) -> Option<SourceAddress> {
        Some(SocketAddr::new(Ipv4Addr::from_bits(number).into(), 1).into())
    }

    fn all(accept_queue: &mut AcceptQueue<u32>) -> Vec<u32> {
        std::iter::from_fn(|| accept_queue.next(|_| Ok(())).map(|(who, _)| who)).collect()
    }

    #[test]
    fn addresses_take_turns_and_one_that_is_at_its_limit_holds_up_nobody() {
        let mut accept_queue = AcceptQueue::new(100);
        for number in 10..20 {
            assert_eq!(accept_queue.push(address(1), number), None);
        }
        assert_eq!(accept_queue.push(address(2), 20), None);
        assert_eq!(accept_queue.push(None, 30), None);
        assert_eq!(all(&mut accept_queue)[..4], [19, 20, 30, 18], "the youngest of each");

        accept_queue.push(address(1), 10);
        accept_queue.push(address(2), 20);
        let barred = |from| if from == address(1) { Err(NotNow::Wait) } else { Ok(()) };
        assert_eq!(accept_queue.next(barred), Some((20, Ok(()))));
        assert_eq!(accept_queue.next(barred), None);
        assert!(!accept_queue.is_empty());
        let refused = accept_queue.next::<()>(|_| Err(NotNow::Refused(DoorRefusal::Connections)));
        assert_eq!(refused, Some((10, Err(DoorRefusal::Connections))));
        assert!(accept_queue.is_empty());
    }

    #[test]
    fn a_full_queue_turns_away_who_takes_most_of_it() {
        let mut accept_queue = AcceptQueue::new(3);
        for number in 0..3 {
            assert_eq!(accept_queue.push(address(1), number), None);
        }
        assert_eq!(accept_queue.push(address(2), 10), Some(0), "the oldest of the address that has all");
        assert_eq!(accept_queue.push(address(1), 3), Some(1));
        assert_eq!(all(&mut accept_queue), [3, 10, 2]);
        assert!(accept_queue.is_empty() && accept_queue.turns.is_empty() && accept_queue.queues.is_empty());
    }
}
