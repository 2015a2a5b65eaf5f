//! Logins that wait for something scarce: a thread that hashes, a place to ask a remote source. The rank of a client, its network
//! and its address decide whose turn is next, and whose login is refused when too many wait.

mod last_logins;
mod turns;

use std::sync::Arc;

use broker::Account;
use edge::door::SourceAddress;

use self::{
    last_logins::LastLogins,
    turns::{LoginRank, Turns},
};
pub(crate) use self::{last_logins::LoginClient, turns::LoginTicket};

/// See the module.
pub(super) struct LoginQueue<J> {
    turns: Turns<(LoginClient, LoginRank, J)>,
    last: LastLogins,
}

impl<J> LoginQueue<J> {
    /// Nobody waits.
    pub(super) fn new() -> Self {
        Self { turns: Turns::new(), last: LastLogins::new() }
    }

    /// Names a client by its address and the user name that it claims.
    pub(super) fn login_client(&self, address: Option<SourceAddress>, user: Option<&str>) -> LoginClient {
        self.last.login_client(address, user)
    }

    /// Remembers what became of a login: it decides whose jobs are done first.
    pub(super) fn told(&mut self, login_client: LoginClient, good: bool) {
        self.last.told(login_client, good);
    }

    /// Charges what is remembered of logins to this account from now on; before that nothing is.
    pub(super) fn charge_to(&mut self, account: &Arc<Account>) {
        self.last.charge_to(account);
    }

    /// Lets a job wait. Returns its ticket and the jobs that leave so that at most `most` wait, possibly this one.
    pub(super) fn push(&mut self, login_client: LoginClient, job: J, most: usize) -> (LoginTicket, Vec<J>) {
        let rank = self.last.rank(login_client);
        let ticket = self.turns.push(rank, login_client, (login_client, rank, job));
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
    pub(super) fn remove(&mut self, ticket: LoginTicket) -> Option<J> {
        let waited = self.turns.remove(ticket)?;
        Some(self.leaves(waited))
    }

    /// Number of jobs that wait.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.turns.len()
    }

    fn leaves(&mut self, (login_client, rank, job): (LoginClient, LoginRank, J)) -> J {
        self.last.leaves(login_client, rank);
        job
    }
}
