//! Decision of a node to take a home, or to leave it to others.

use std::time::Duration;

use crate::{LEASE_WAIT, Lack, Look, Member, Order, deal};

/// The owner has so long to hand a home over after an order; then it is taken.
const HAND_OVER: Duration = Duration::from_secs(5);

/// A home that was given up is left to others for so long, if there are others.
const COURTESY: Duration = Duration::from_secs(10);

/// A home that was dealt to another node is left to it for so long.
const GRACE: Duration = Duration::from_secs(3);

/// Signs of life are looked at for so long before homes are dealt: nodes that start together see each other first.
const SETTLE: Duration = Duration::from_secs(2);

/// The process of this node that had the directory before this one, and so is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Former {
    /// Its incarnation.
    pub incarnation: u64,
    /// Epoch in which it served the home last; `None` if it did not.
    pub served: Option<u64>,
}

/// See the module. One for each home and each time that this process has no tenure of it.
#[derive(Debug)]
pub struct Claim {
    home: u16,
    former: Option<Former>,
    /// Time from which on this process has no tenure of the home, by [`crate::Clock::now`].
    since: Duration,
    /// The process has given the home up then.
    given_up: Option<Duration>,
    /// The order under way, and since when it is there.
    ordered: Option<(Order, Duration)>,
    /// Epoch that needs a new owner, and since when.
    lacking: Option<(u64, Duration)>,
}

impl Claim {
    /// A claim to a home of which this process has no tenure, from that time of [`crate::Clock::now`] on. `given_up` is the time at
    /// which it gave one up.
    pub fn new(home: u16, former: Option<Former>, since: Duration, given_up: Option<Duration>) -> Self {
        Self { home, former, since, given_up, ordered: None, lacking: None }
    }

    /// Tells whether this node leaves the home to others, for a while.
    pub fn stands_back(&self, now: Duration) -> bool {
        self.given_up.is_some_and(|at| now.saturating_sub(at) < COURTESY)
    }

    /// Looks at the home; returns how long to wait before serving, if it is to be taken now.
    pub fn decide(&mut self, me: &Member, takes_over: bool, look: &Look) -> Option<Duration> {
        let of = look.view.home(self.home).ok()?;
        if look.begun < self.since {
            // This process may be its owner still.
            return None;
        }
        let name = me.node().name();
        let order = look.order(self.home);
        if order != self.ordered.as_ref().map(|(order, _)| order) {
            self.ordered = order.map(|order| (order.clone(), look.at));
        }
        if let Some((order, since)) = &self.ordered {
            let age = look.at.saturating_sub(*since);
            let is_to_me = order.to == *name;
            match &of.owner {
                None if is_to_me => return Some(Duration::ZERO),
                // The home goes to another.
                None if !order.to.is_empty() && age < COURTESY => return None,
                Some(owner) if is_to_me && age > HAND_OVER && *owner.node != **name => {
                    return Some(LEASE_WAIT);
                }
                _ => {}
            }
        }
        if let Some(wait) = self.is_ours(me, look) {
            return Some(wait);
        }
        let Some(lack) = look.lack(self.home) else {
            self.lacking = None;
            return None;
        };
        let since = match self.lacking {
            Some((epoch, since)) if epoch == of.epoch => since,
            _ => self.lacking.insert((of.epoch, look.at)).1,
        };
        let is_one = look.view.homes.len() == 1;
        if !takes_over || self.is_left_to_others(name, is_one, look) {
            return None;
        }
        let wait = match lack {
            Lack::Free | Lack::Ended { has_served: true } => Duration::ZERO,
            Lack::Ended { has_served: false } | Lack::Silent => LEASE_WAIT,
        };
        if is_one {
            return Some(wait);
        }
        if look.watched < SETTLE {
            return None;
        }
        let is_dealt = deal(look).get(&self.home).is_some_and(|dealt| dealt == name);
        (is_dealt || look.at.saturating_sub(since) >= GRACE).then_some(wait)
    }

    /// The home belongs to a process that has no use for it any more: this one, which has no tenure, or the one before it in the same
    /// directory.
    fn is_ours(&self, me: &Member, look: &Look) -> Option<Duration> {
        let of = look.view.home(self.home).ok()?;
        let owner = of.owner.as_ref().filter(|owner| *owner.node == **me.node().name())?;
        let has_served = match self.former {
            _ if owner.incarnation == me.node().incarnation() => me.has_served(self.home, of.epoch),
            Some(Former { incarnation, served }) if owner.incarnation == incarnation => {
                served == Some(of.epoch)
            }
            _ => return None,
        };
        // Otherwise the owner before may have its lease.
        Some(if has_served { Duration::ZERO } else { LEASE_WAIT })
    }

    /// Others go first with what this process has just given up.
    fn is_left_to_others(&self, name: &str, is_one: bool, look: &Look) -> bool {
        let mut others = look.nodes.iter().filter(|node| {
            let takes = (node.homes.takes_over || is_one) && !node.homes.leaves.contains(&self.home);
            node.lives && takes && *node.name != *name
        });
        self.stands_back(look.at) && (look.watched < SETTLE || others.next().is_some())
    }
}
