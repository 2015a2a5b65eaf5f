//! The order in which waiting jobs are done, without threads and clock: by rank, then networks in turn, in each its addresses, at
//! each address the user names, and for one user name as they came.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
};

use edge::door::{SourceAddress, SourceNetwork};

use super::last_logins::{LoginClient, LoginDigest};

/// Jobs of the middle rank that are done for each of the lowest while both wait.
const FRESH_PER_FAILING: u32 = 4;

/// Precedence of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoginRank {
    /// Before all others: its identity was let in from its address lately.
    Known,
    /// Most jobs.
    Fresh,
    /// One in five while others wait: logins from there have failed lately.
    Failing,
}

/// Finds a job that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoginTicket {
    rank: LoginRank,
    login_client: LoginClient,
    number: u64,
}

/// Jobs that wait. A client without an address, of a Unix socket, has its turns like one address more.
#[derive(Debug)]
pub(super) struct Turns<J> {
    /// By [`LoginRank`].
    queues: [RankQueue<J>; 3],
    next: u64,
    /// Jobs of the middle rank since the last one of the lowest.
    in_a_row: u32,
}

type RankQueue<J> = Rotation<Option<SourceNetwork>, AddressJobs<J>>;
type AddressJobs<J> = Rotation<Option<SourceAddress>, UserJobs<J>>;
type UserJobs<J> = Rotation<Option<LoginDigest>, VecDeque<(u64, J)>>;

impl<J> Turns<J> {
    /// Nobody waits.
    pub(super) fn new() -> Self {
        Self { queues: [RankQueue::new(), RankQueue::new(), RankQueue::new()], next: 0, in_a_row: 0 }
    }

    /// Number of jobs that wait.
    pub(super) fn len(&self) -> usize {
        self.queues.iter().map(WaitingJobs::len).sum()
    }

    /// Lets a job wait for its turn.
    pub(super) fn push(&mut self, rank: LoginRank, login_client: LoginClient, job: J) -> LoginTicket {
        let number = self.next;
        self.next += 1;
        self.queues[rank as usize].change(login_client.network(), |network| {
            network.newest = number;
            network.change(login_client.address, |address| {
                address.newest = number;
                address.change(login_client.identity, |queue| queue.push_back((number, job)));
            });
        });
        LoginTicket { rank, login_client, number }
    }

    /// The job whose turn it is.
    pub(super) fn pop(&mut self) -> Option<J> {
        let [known, fresh, failing] = &mut self.queues;
        if let Some((_, job)) = known.pop() {
            return Some(job);
        }
        let turn_of_failing = self.in_a_row >= FRESH_PER_FAILING || fresh.len() == 0;
        if turn_of_failing && let Some((_, job)) = failing.pop() {
            self.in_a_row = 0;
            return Some(job);
        }
        self.in_a_row = self.in_a_row.saturating_add(1);
        fresh.pop().map(|(_, job)| job)
    }

    /// Takes a job out that nobody waits for any more; `None` if it waits no longer.
    pub(super) fn remove(&mut self, ticket: LoginTicket) -> Option<J> {
        let LoginTicket { rank, login_client, number } = ticket;
        self.queues[rank as usize].change_known(login_client.network(), |network| {
            network.change_known(login_client.address, |address| {
                address.change_known(login_client.identity, |queue| {
                    let at = queue.binary_search_by_key(&number, |(number, _)| *number).ok()?;
                    queue.remove(at).map(|(_, job)| job)
                })
            })
        })
    }

    /// Takes out the job that has the least claim to wait: of the network with most jobs, of its address and there of the user
    /// name with most jobs, the one that came last. Of equals it is one to whom somebody came last. Jobs of the lowest rank leave
    /// first, but for the part of the places that is like their part of the turns.
    pub(super) fn displace(&mut self) -> Option<J> {
        let places = self.len() / (FRESH_PER_FAILING as usize + 1);
        let [known, fresh, failing] = &mut self.queues;
        let queue = if failing.len() > places || fresh.len() + known.len() == 0 {
            failing
        } else if fresh.len() > 0 {
            fresh
        } else {
            known
        };
        queue.pop_last_of_most().map(|(_, job)| job)
    }
}

/// Something that waits, possibly many.
trait WaitingJobs {
    type Job;
    fn empty() -> Self;
    fn len(&self) -> usize;
    /// Number of the job that came last, whether or not it still waits.
    fn newest(&self) -> u64;
    fn pop(&mut self) -> Option<Self::Job>;
    /// The last one of the part that has most.
    fn pop_last_of_most(&mut self) -> Option<Self::Job>;
}

impl<J> WaitingJobs for VecDeque<(u64, J)> {
    type Job = (u64, J);

    fn empty() -> Self {
        Self::new()
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn newest(&self) -> u64 {
        self.back().map_or(0, |(number, _)| *number)
    }

    fn pop(&mut self) -> Option<(u64, J)> {
        self.pop_front()
    }

    fn pop_last_of_most(&mut self) -> Option<(u64, J)> {
        self.pop_back()
    }
}

/// Queues by key that have their turns one after the other. An empty queue is not kept.
#[derive(Debug)]
struct Rotation<K, Q> {
    queues: HashMap<K, Q>,
    turns: VecDeque<K>,
    len: usize,
    newest: u64,
}

impl<K: Copy + Eq + Hash, Q: WaitingJobs> Rotation<K, Q> {
    fn new() -> Self {
        Self { queues: HashMap::new(), turns: VecDeque::new(), len: 0, newest: 0 }
    }

    /// Changes the queue of `key`, which is made if need be.
    fn change<T>(&mut self, key: K, change: impl FnOnce(&mut Q) -> T) -> T {
        let turns = &mut self.turns;
        let queue = self.queues.entry(key).or_insert_with(|| {
            turns.push_back(key);
            Q::empty()
        });
        let before = queue.len();
        let out = change(queue);
        self.len = self.len + queue.len() - before;
        if queue.len() == 0 {
            self.queues.remove(&key);
            self.turns.retain(|known| *known != key);
        }
        out
    }

    fn change_known<T>(&mut self, key: K, change: impl FnOnce(&mut Q) -> Option<T>) -> Option<T> {
        self.queues.contains_key(&key).then(|| self.change(key, change)).flatten()
    }
}

impl<K: Copy + Eq + Hash, Q: WaitingJobs> WaitingJobs for Rotation<K, Q> {
    type Job = Q::Job;

    fn empty() -> Self {
        Self::new()
    }

    fn len(&self) -> usize {
        self.len
    }

    fn newest(&self) -> u64 {
        self.newest
    }

    fn pop(&mut self) -> Option<Q::Job> {
        let key = self.turns.pop_front()?;
        let queue = self.queues.get_mut(&key)?;
        let job = queue.pop();
        self.len -= usize::from(job.is_some());
        if queue.len() == 0 {
            self.queues.remove(&key);
        } else {
            self.turns.push_back(key);
        }
        job
    }

    fn pop_last_of_most(&mut self) -> Option<Q::Job> {
        let most = self.queues.iter().max_by_key(|(_, queue)| (queue.len(), queue.newest()));
        let most = most.map(|(key, _)| *key)?;
        self.change_known(most, WaitingJobs::pop_last_of_most)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn login_client(text: &str, user: Option<u64>) -> LoginClient {
        let address = Some(SocketAddr::new(text.parse().unwrap(), 1).into());
        LoginClient { address, identity: user.map(LoginDigest) }
    }

    fn at(text: &str) -> LoginClient {
        login_client(text, None)
    }

    const UNIX: LoginClient = LoginClient { address: None, identity: None };

    fn all(turns: &mut Turns<u32>) -> Vec<u32> {
        std::iter::from_fn(|| turns.pop()).collect()
    }

    #[test]
    fn networks_take_turns_and_in_each_the_addresses() {
        let mut turns = Turns::new();
        for job in 0..4 {
            turns.push(LoginRank::Fresh, at("192.0.2.1"), job);
        }
        turns.push(LoginRank::Fresh, at("192.0.2.2"), 10);
        for host in 1..=3 {
            turns.push(LoginRank::Fresh, at(&format!("2001:db8:7:{host}::1")), 20 + host);
        }
        turns.push(LoginRank::Fresh, UNIX, 30);
        assert_eq!(turns.len(), 9);
        assert_eq!(all(&mut turns), [0, 21, 30, 10, 22, 1, 23, 2, 3]);
        assert_eq!(turns.len(), 0);
    }

    /// A neighbour behind the same address may be guessing.
    #[test]
    fn at_one_address_user_names_take_turns() {
        let mut turns = Turns::new();
        for job in 0..4 {
            turns.push(LoginRank::Fresh, login_client("192.0.2.1", Some(1)), job);
        }
        turns.push(LoginRank::Fresh, login_client("192.0.2.1", Some(2)), 10);
        assert_eq!(all(&mut turns), [0, 10, 1, 2, 3]);
    }

    #[test]
    fn known_identities_go_first_and_failing_addresses_are_not_starved() {
        let mut turns = Turns::new();
        for job in 0..10 {
            turns.push(LoginRank::Failing, at("192.0.2.1"), job);
            turns.push(LoginRank::Fresh, at("198.51.100.1"), 100 + job);
        }
        turns.push(LoginRank::Known, at("192.0.2.1"), 1_000);
        let order = all(&mut turns);
        assert_eq!(order[..7], [1_000, 100, 101, 102, 103, 0, 104]);
        assert_eq!(order.len(), 21);
    }

    #[test]
    fn a_job_that_is_taken_out_leaves_nothing_behind() {
        let mut turns = Turns::new();
        let tickets: Vec<LoginTicket> = (0..5).map(|job| turns.push(LoginRank::Fresh, UNIX, job)).collect();
        assert_eq!((turns.remove(tickets[2]), turns.remove(tickets[2])), (Some(2), None));
        assert_eq!(turns.pop(), Some(0));
        assert_eq!(turns.remove(tickets[0]), None, "it was done");
        for ticket in tickets {
            turns.remove(ticket);
        }
        assert_eq!((turns.len(), turns.pop()), (0, None));
        assert!(turns.queues.iter().all(|queue| queue.queues.is_empty() && queue.turns.is_empty()));
    }

    #[test]
    fn who_holds_most_is_displaced_first_and_those_who_fail_before_others() {
        let mut turns = Turns::new();
        for job in 0..3 {
            turns.push(LoginRank::Fresh, login_client("192.0.2.1", Some(1)), job);
        }
        turns.push(LoginRank::Fresh, at("198.51.100.1"), 10);
        turns.push(LoginRank::Failing, at("203.0.113.1"), 20);
        turns.push(LoginRank::Known, at("192.0.2.1"), 30);
        let displaced: Vec<u32> = std::iter::from_fn(|| turns.displace()).collect();
        assert_eq!(displaced, [2, 1, 20, 10, 0, 30]);
    }

    /// Otherwise a flood that began before its first failure keeps out its neighbours, whose network has failed since.
    #[test]
    fn those_who_fail_keep_a_fifth_of_the_places() {
        let mut turns = Turns::new();
        for job in 0..30 {
            turns.push(LoginRank::Fresh, at("192.0.2.2"), job);
        }
        turns.push(LoginRank::Failing, at("192.0.2.1"), 100);
        assert_eq!(turns.displace(), Some(29));
        for job in 200..220 {
            turns.push(LoginRank::Failing, at("192.0.2.2"), job);
            turns.displace();
        }
        let kept = all(&mut turns);
        assert_eq!(kept.len(), 30);
        assert!(kept.contains(&100), "the flood's own leave");
        assert_eq!(kept.iter().filter(|job| **job >= 100).count(), 6);
    }

    /// Otherwise those who have waited longest could be turned away in a storm, again and again.
    #[test]
    fn of_devices_with_one_login_each_the_last_is_displaced() {
        let mut turns = Turns::new();
        for job in 0..100 {
            turns.push(LoginRank::Fresh, login_client("192.0.2.1", Some(job.into())), job);
        }
        for job in 100..200 {
            turns.push(LoginRank::Fresh, at(&format!("198.51.100.{job}")), job);
        }
        let displaced: Vec<u32> = std::iter::from_fn(|| turns.displace()).take(100).collect();
        let mut kept = all(&mut turns);
        kept.sort_unstable();
        assert_eq!(kept, (0..50).chain(100..150).collect::<Vec<u32>>());
        assert_eq!(displaced.len(), 100);
    }
}
