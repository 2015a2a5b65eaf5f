//! Logins that wait for something scarce: a thread that hashes, a place to ask a remote source. The rank of a client, its network
//! and its address decide whose turn is next, and whose login is refused when too many wait.

mod last_logins;
mod turns;

use std::sync::Arc;

use broker::Account;
use edge::door::Address;

pub(in crate::auth) use self::{last_logins::Asker, turns::Ticket};
use self::{
    last_logins::LastLogins,
    turns::{Rank, Turns},
};

/// See the module.
pub(super) struct LoginQueue<J> {
    turns: Turns<(Asker, Rank, J)>,
    last: LastLogins,
}

impl<J> LoginQueue<J> {
    /// Nobody waits.
    pub(super) fn new() -> Self {
        Self { turns: Turns::new(), last: LastLogins::new() }
    }

    /// Names a client by its address and the user name that it claims.
    pub(super) fn asker(&self, address: Option<Address>, user: Option<&str>) -> Asker {
        self.last.asker(address, user)
    }

    /// Remembers what became of a login: it decides whose jobs are done first.
    pub(super) fn told(&mut self, asker: Asker, good: bool) {
        self.last.told(asker, good);
    }

    /// Charges what is remembered of logins to this account from now on; before that nothing is.
    pub(super) fn charge_to(&mut self, account: &Arc<Account>) {
        self.last.charge_to(account);
    }

    /// Lets a job wait. Returns its ticket and the jobs that leave so that at most `most` wait, possibly this one.
    pub(super) fn push(&mut self, asker: Asker, job: J, most: usize) -> (Ticket, Vec<J>) {
        let rank = self.last.rank(asker);
        let ticket = self.turns.push(rank, asker, (asker, rank, job));
        let mut displaced = Vec::new();
        while self.turns.len() > most
            && let Some(waited) = self.turns.displace()
        {
            displaced.push(self.leaves(waited));
        }
        (ticket, displaced)
    }

    /// The job whose turn it is.
    pub(super) fn pop(&mut self) -> Option<J> {
        let waited = self.turns.pop()?;
        Some(self.leaves(waited))
    }

    /// Takes a job out that nobody waits for any more; `None` if it waits no longer.
    pub(super) fn remove(&mut self, ticket: Ticket) -> Option<J> {
        let waited = self.turns.remove(ticket)?;
        Some(self.leaves(waited))
    }

    /// Number of jobs that wait.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.turns.len()
    }

    fn leaves(&mut self, (asker, rank, job): (Asker, Rank, J)) -> J {
        self.last.leaves(asker, rank);
        job
    }
}
