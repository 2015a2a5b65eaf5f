//! Logins that failed, and those that did not, by address and by the account that they were for.
//!
//! An address that fails too often waits. Somebody who has an account must not end that wait by logging in between two guesses
//! at the account of another, so a login takes back only the failures of its own account. Devices that share the address of one
//! who guesses are not made to wait for it, if they have logged in from there lately.

use std::{
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use access::{Backoff, BackoffRule, RecentKeys};
use edge::door::SourceAddress;
use gateway_core::Timestamp;

/// Addresses whose failures are remembered.
const ADDRESSES: usize = 65_536;
/// Accounts whose failures are remembered, accounts that have logged in, and addresses where some did. Fixed, some 5 MiB at most.
const ACCOUNTS: usize = 16_384;
/// Time for which a login is remembered, so that its account does not wait for others at the same address.
const LATELY: Duration = Duration::from_secs(24 * 60 * 60);

/// The account that a login is for, as far as can be told before it is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoginName<'a> {
    /// User name, if the client gives one.
    pub username: Option<&'a str>,
    /// Client id.
    pub client_id: &'a str,
}

/// An account at an address, by a hash that nobody outside can aim at.
type AccountPlace = (SourceAddress, u64);

/// Remembered logins.
pub(super) struct LoginHistory {
    hasher: RandomState,
    addresses: Backoff<SourceAddress>,
    accounts: Backoff<AccountPlace>,
    proved: RecentKeys<AccountPlace>,
    /// Addresses of accounts that are in `proved`.
    let_in: RecentKeys<SourceAddress>,
}

impl LoginHistory {
    pub(super) fn new(rule: BackoffRule) -> Self {
        Self {
            hasher: RandomState::new(),
            addresses: Backoff::new(rule, ADDRESSES),
            accounts: Backoff::new(rule, ACCOUNTS),
            proved: RecentKeys::new(LATELY, ACCOUNTS),
            let_in: RecentKeys::new(LATELY, ACCOUNTS),
        }
    }

    /// Returns the time for which sockets of an address must still be closed unread. Sockets are read at once from an
    /// address where somebody has logged in lately, who need not wait.
    pub(super) fn wait_at_door(&self, from: SourceAddress, now: Timestamp) -> Option<Duration> {
        let wait = self.addresses.wait(from, now)?;
        (!self.let_in.has(from, now)).then_some(wait)
    }

    /// Returns the time that a login must still wait before it is looked at.
    pub(super) fn wait(
        &self,
        login: &LoginName<'_>,
        from: SourceAddress,
        now: Timestamp,
    ) -> Option<Duration> {
        if self.addresses.is_empty() && self.accounts.is_empty() {
            return None;
        }
        let account = self.account(login, from);
        let own = self.accounts.wait(account, now);
        own.or_else(|| self.addresses.wait(from, now).filter(|_| !self.proved.has(account, now)))
    }

    /// Notes a failed login. Returns whether its address waits now.
    pub(super) fn failed(&mut self, login: &LoginName<'_>, from: SourceAddress, now: Timestamp) -> bool {
        let account = self.account(login, from);
        self.accounts.failed(account, now);
        self.addresses.failed(from, now).is_some()
    }

    /// Somebody has proved to be `username`, or something that has no user name, by a login.
    pub(super) fn succeeded(
        &mut self,
        login: &LoginName<'_>,
        username: Option<&str>,
        from: SourceAddress,
        now: Timestamp,
    ) {
        if let Some(name) = username {
            let account = self.account(&LoginName { username: Some(name), ..*login }, from);
            let failures = self.accounts.succeeded(account);
            self.addresses.forgive(from, failures);
        }
        // A name that was given and not proved is anybody's.
        if login.username.is_none() || login.username == username {
            self.proved.see(self.account(login, from), now);
            self.let_in.see(from, now);
        }
    }

    fn account(&self, login: &LoginName<'_>, from: SourceAddress) -> AccountPlace {
        let client_id = login.username.is_none().then_some(login.client_id);
        (from, self.hasher.hash_one((login.username, client_id)))
    }
}
