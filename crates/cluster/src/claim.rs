//! Decision of a node to take a home, or to leave it to others.

use std::time::Duration;

use crate::{ClusterLook, LEASE_WAIT, Lack, MemberNode, Order, deal};

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
pub struct HomeClaim {
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

impl HomeClaim {
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
    pub fn decide(&mut self, me: &MemberNode, takes_over: bool, look: &ClusterLook) -> Option<Duration> {
        let of = look.view.home(self.home).ok()?;
        if look.begun < self.since && !weakened!(OldLook) {
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
    fn is_ours(&self, me: &MemberNode, look: &ClusterLook) -> Option<Duration> {
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
    fn is_left_to_others(&self, name: &str, is_one: bool, look: &ClusterLook) -> bool {
        let mut others = look.nodes.iter().filter(|node| {
            let takes = (node.homes.takes_over || is_one) && !node.homes.leaves.contains(&self.home);
            node.lives && takes && *node.name != *name
        });
        self.stands_back(look.at) && (look.watched < SETTLE || others.next().is_some())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ledger::{
        BoxFuture,
        twin::{Engine, Twin},
    };

    use super::*;
    use crate::{Clock, Incarnation, Node, NodeHomes, SeenNode, View};

    struct NoClock;

    impl Clock for NoClock {
        fn now(&self) -> Duration {
            Duration::ZERO
        }

        fn wall(&self) -> u64 {
            0
        }

        fn sleep(&self, _: Duration) -> BoxFuture<'_, ()> {
            Box::pin(std::future::pending())
        }
    }

    /// Node `a`, incarnation 10.
    fn member() -> MemberNode {
        MemberNode::new(Arc::new(Twin::reliable(Engine::Owned)), Arc::new(NoClock), Node::new("a", 10))
    }

    /// A look at a second: nodes `a` and `b` live, and home 0 of so many is in epoch 3 and owned by an incarnation of a node.
    fn look(second: u64, homes: u16, owner: Option<(&str, u64)>, lack: Option<Lack>) -> ClusterLook {
        let mut view = View::create("c", homes, 1);
        let incarnation =
            |(node, incarnation): (&str, u64)| Incarnation { node: node.to_owned(), incarnation };
        view.homes[0].owner = owner.map(incarnation);
        view.homes[0].epoch = 3;
        let mut lacks = vec![None; usize::from(homes)];
        lacks[0] = lack;
        for of in &mut view.homes[1..] {
            of.owner = Some(incarnation(("a", 10)));
        }
        let node = |name: &str, incarnation| SeenNode {
            name: name.into(),
            incarnation,
            homes: NodeHomes { takes_over: true, copies: vec![0], ..NodeHomes::default() },
            lives: true,
        };
        let nodes = vec![node("a", 10), node("b", 20)];
        let at = Duration::from_secs(second);
        ClusterLook { begun: at, at, watched: at, view: Arc::new(view), nodes, orders: Vec::new(), lacks }
    }

    fn claim(former: Option<Former>) -> HomeClaim {
        HomeClaim::new(0, former, Duration::ZERO, None)
    }

    const NOW: Option<Duration> = Some(Duration::ZERO);

    /// The failure: a process that took the home and ended before it served is not waited for, while the owner before has its lease.
    #[test]
    fn the_wait_is_left_out_only_after_an_owner_that_has_served() {
        let me = member();
        let former = |served| Some(Former { incarnation: 9, served });
        let ours = look(5, 1, Some(("a", 9)), None);
        assert_eq!(claim(former(Some(3))).decide(&me, false, &ours), NOW);
        assert_eq!(claim(former(Some(2))).decide(&me, false, &ours), Some(LEASE_WAIT));
        assert_eq!(claim(former(None)).decide(&me, false, &ours), Some(LEASE_WAIT));
        assert_eq!(claim(None).decide(&me, true, &ours), None, "a process that lives, for all that is known");
        let own = look(5, 1, Some(("a", 10)), None);
        assert_eq!(claim(None).decide(&me, true, &own), Some(LEASE_WAIT), "a takeover that failed");
        me.begin(&me.node().owner(0, 3));
        assert_eq!(claim(None).decide(&me, true, &own), NOW, "a tenure that ended");
        for (lack, wait) in [
            (Lack::Free, NOW),
            (Lack::Silent, Some(LEASE_WAIT)),
            (Lack::Ended { has_served: true }, NOW),
            (Lack::Ended { has_served: false }, Some(LEASE_WAIT)),
        ] {
            let owner = (lack != Lack::Free).then_some(("b", 20));
            let look = look(5, 1, owner, Some(lack));
            assert_eq!(claim(None).decide(&me, true, &look), wait, "{lack:?}");
            assert_eq!(claim(None).decide(&me, false, &look), None, "it takes nothing by itself");
        }
    }

    /// The failures: everybody jumps at a home; nobody takes it, since the node that it is dealt to does not.
    #[test]
    fn a_home_is_left_to_the_node_it_is_dealt_to_for_a_while() {
        let (me, mut claim) = (member(), claim(None));
        let mut at = |second| claim.decide(&me, true, &look(second, 3, None, Some(Lack::Free)));
        assert_eq!([at(1), at(2), at(3), at(4)], [None, None, None, NOW], "b has fewer");
        let mut other = HomeClaim::new(2, None, Duration::ZERO, None);
        let mut look = look(1, 3, Some(("b", 20)), None);
        Arc::make_mut(&mut look.view).homes[2].owner =
            Some(Incarnation { node: "c".to_owned(), incarnation: 30 });
        look.lacks[2] = Some(Lack::Silent);
        assert_eq!(other.decide(&me, true, &look), None, "who else is there is not known yet");
        look.watched = SETTLE;
        assert_eq!(other.decide(&me, true, &look), Some(LEASE_WAIT));
    }

    /// The failures: an order is passed over; a home that was just handed over is taken back; a look of before shows the old owner.
    #[test]
    fn orders_and_courtesy_go_before_what_is_dealt() {
        let me = member();
        let ordered = |second, owner: Option<(&str, u64)>, to: &str, claim: &mut HomeClaim| {
            let lack = owner.is_none().then_some(Lack::Free);
            let mut look = look(second, 1, owner, lack);
            look.orders.push(Order { home: 0, epoch: 3, to: to.into() });
            claim.decide(&me, true, &look)
        };
        let (mut to_us, mut away, b) = (claim(None), claim(None), Some(("b", 20)));
        assert_eq!(ordered(1, b, "a", &mut to_us), None, "it is handed over first");
        assert_eq!(ordered(6, b, "a", &mut to_us), None);
        assert_eq!(ordered(7, b, "a", &mut to_us), Some(LEASE_WAIT));
        assert_eq!(ordered(8, None, "a", &mut to_us), NOW);
        assert_eq!(ordered(1, None, "b", &mut away), None);
        assert_eq!(ordered(11, None, "b", &mut away), NOW, "b does not take it");

        let at = Duration::from_secs(20);
        let mut given_up = HomeClaim::new(0, None, at, Some(at));
        let free = |second| look(second, 1, None, Some(Lack::Free));
        assert_eq!(given_up.decide(&me, true, &free(19)), None, "from before");
        assert_eq!(given_up.decide(&me, true, &free(21)), None, "b goes first");
        assert_eq!(given_up.decide(&me, true, &free(30)), NOW);
        let mut alone = free(22);
        alone.nodes.retain(|node| &*node.name == "a");
        assert_eq!(given_up.decide(&me, true, &alone), NOW, "there is nobody else");
    }
}
