//! Recent decisions about topics, and their charge to the memory account.

use std::sync::Arc;

use access::rules::{RecentDecisions, RuleGrant};
use broker::{Account, Charge, MemoryKind};

use super::Authority;

/// Decisions that one connection or session remembers. Charged with who holds it: a client chooses how long its topics are.
pub(crate) struct Remembered {
    recent: RecentDecisions,
    charge: Charge,
    /// Bytes of its holder.
    beside: usize,
}

impl Remembered {
    /// Nothing yet, in something of `beside` bytes that is there in any case.
    pub(crate) fn new(account: &Arc<Account>, beside: usize) -> Self {
        let beside = size_of::<Self>() + beside;
        let charge = Charge::forced(account, MemoryKind::Sessions, beside);
        Self { recent: RecentDecisions::default(), charge, beside }
    }

    /// The decision about a topic, made by `decide` if it is not remembered.
    #[inline]
    pub(crate) fn find(
        &mut self,
        authority: &Authority,
        topic: &str,
        decide: impl FnOnce() -> RuleGrant,
    ) -> RuleGrant {
        let grant = self.recent.find(authority.version(), topic, decide);
        if self.beside + self.recent.bytes() != self.charge.bytes() {
            self.settle();
        }
        grant
    }

    /// Forgets all decisions; who holds it has `bytes` more or less now, and they are bounded there.
    pub(crate) fn forget(&mut self, bytes: isize) {
        self.recent = RecentDecisions::default();
        self.beside = self.beside.saturating_add_signed(bytes);
        self.settle();
    }

    #[cold]
    fn settle(&mut self) {
        if !self.charge.set(self.beside + self.recent.bytes()) {
            // Short of memory: each is made anew.
            self.recent = RecentDecisions::default();
            self.charge.force(self.beside);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authorizer, Subject, Subscribing};

    struct All;

    impl Authorizer for All {
        fn publish(&self, _subject: &Subject<'_>, _topic: &str) -> RuleGrant {
            RuleGrant::ALLOWED
        }
        fn receive(&self, _subject: &Subject<'_>, _topic: &str) -> RuleGrant {
            RuleGrant::ALLOWED
        }
        fn subscribe(&self, _subject: &Subject<'_>, _filter: &str) -> Subscribing {
            Subscribing::Allowed
        }
    }

    /// The failure: clients with long topics make the process hold kilobytes each of which no limit knows.
    #[test]
    fn what_is_remembered_is_on_the_account_within_its_bounds() {
        let authority = Authority::of_program(Arc::new(All), false);
        for (limit, remembers) in [(1 << 20, true), (600, false)] {
            let account = Arc::new(Account::new(limit));
            let held = || account.held(MemoryKind::Sessions);
            let mut remembered = Remembered::new(&account, 100);
            let empty = held();
            assert!(empty >= 100 + size_of::<RecentDecisions>());
            for number in 0..20 {
                let topic = format!("{number}/{}", "t".repeat(200));
                assert!(remembered.find(&authority, &topic, || RuleGrant::ALLOWED).is_allowed());
            }
            assert_eq!(held() > empty + 8 * 200, remembers, "{limit}: {}", held());
            assert!(held() <= empty + RecentDecisions::MOST_BYTES, "{}", held());
            remembered.forget(50);
            assert_eq!(held(), empty + 50);
            remembered.forget(2000);
            assert_eq!(held(), empty + 2050, "what is held is charged, whether it fits or not");
            drop(remembered);
            assert_eq!(held(), 0);
        }
    }
}
