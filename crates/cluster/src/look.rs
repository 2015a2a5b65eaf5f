//! The view and the signs of life, seen at one time.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use ledger::Beat;
use serde::{Deserialize, Serialize};

use crate::{Suspicion, View};

/// Place of orders among the signs of life: that of home 0, and the first part of the others'.
const ORDER: &str = "@takeover";

/// Facts that a node tells of homes with each beat. Fields that a newer version adds are passed over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeHomes {
    /// The node takes homes over by itself.
    pub takes_over: bool,
    /// Homes of which its copy is near the end of the ledger.
    pub copies: Vec<u16>,
    /// Homes that it has given up, and leaves to others for a while.
    pub leaves: Vec<u16>,
    /// Homes that it serves, with their epochs.
    pub serves: Vec<(u16, u64)>,
}

impl NodeHomes {
    /// The facts of a sign of life; none of one that says nothing.
    pub fn of(beat: &Beat) -> Self {
        serde_json::from_slice(&beat.about).unwrap_or_default()
    }
}

/// An order that a home goes to another node: a row among the signs of life, which every node reads. It is one of a certain epoch; with
/// the next one it is carried out, or void.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The home.
    pub home: u16,
    /// Its epoch, which ends.
    pub epoch: u64,
    /// Node that is to serve; empty is any other.
    pub to: Arc<str>,
}

impl Order {
    /// Reads an order among the signs of life; `None` of a node's.
    pub fn of(beat: &Beat) -> Option<Self> {
        let home = match beat.node.strip_prefix(ORDER)? {
            "" => 0,
            number => number.strip_prefix('/')?.parse().ok()?,
        };
        Some(Self { home, epoch: beat.incarnation, to: String::from_utf8_lossy(&beat.about).into() })
    }

    /// Its row.
    pub fn beat(&self) -> Beat {
        let node = match self.home {
            0 => ORDER.into(),
            home => format!("{ORDER}/{home}").into(),
        };
        Beat { node, incarnation: self.epoch, number: 0, about: Bytes::copy_from_slice(self.to.as_bytes()) }
    }

    /// Tells whether a sign of life is a node's.
    pub fn is_node(beat: &Beat) -> bool {
        !beat.node.starts_with('@')
    }
}

/// A node, as its last sign of life tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenNode {
    /// Its name.
    pub name: Arc<str>,
    /// The process.
    pub incarnation: u64,
    /// Facts about homes.
    pub homes: NodeHomes,
    /// The node has been seen to beat, and not to stop.
    pub lives: bool,
}

/// Why a home needs an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lack {
    /// The home has none.
    Free,
    /// The owner's process is known to have ended.
    Ended {
        /// The process had served in this epoch, so that leases of earlier owners have run out.
        has_served: bool,
    },
    /// The owner is suspected.
    Silent,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct ClusterLook {
    /// Time of [`crate::Clock::now`] at which its reads began.
    pub begun: Duration,
    /// Time at which they had ended.
    pub at: Duration,
    /// Time for which the signs of life have been looked at without a pause.
    pub watched: Duration,
    /// The view.
    pub view: Arc<View>,
    /// All nodes that have ever given a sign of life.
    pub nodes: Vec<SeenNode>,
    /// Orders of the present epochs.
    pub orders: Vec<Order>,
    /// Homes without an owner that lives, by number.
    pub lacks: Vec<Option<Lack>>,
}

impl ClusterLook {
    /// The order about a home, if there is one of its epoch.
    pub fn order(&self, home: u16) -> Option<&Order> {
        self.orders.iter().find(|order| order.home == home)
    }

    /// Why a home needs an owner; `None` if it does not.
    pub fn lack(&self, home: u16) -> Option<Lack> {
        self.lacks.get(usize::from(home)).copied().flatten()
    }

    /// A node that has been seen to beat.
    pub fn living(&self, name: &str) -> Option<&SeenNode> {
        self.nodes.iter().find(|node| node.lives && *node.name == *name)
    }
}

/// Makes looks, one after the other.
#[derive(Debug)]
pub struct Watcher {
    /// Name and incarnation of this process, which lives.
    me: (Arc<str>, u64),
    suspicion: Suspicion,
    /// The last sign of life of each home's owner, which a later process of the same node does not replace.
    owners: BTreeMap<u16, Beat>,
}

impl Watcher {
    /// A watcher in a process of that name and incarnation.
    pub fn new(name: &Arc<str>, incarnation: u64) -> Self {
        Self { me: (Arc::clone(name), incarnation), suspicion: Suspicion::default(), owners: BTreeMap::new() }
    }

    /// Takes in all signs of life as they are read at a time of [`crate::Clock::now`]: each second.
    pub fn observe(&mut self, beats: &[Beat], now: Duration) {
        self.suspicion.observe(beats, now);
    }

    /// Nodes whose beats do not change.
    pub fn suspicion(&self) -> &Suspicion {
        &self.suspicion
    }

    /// A look, of signs of life that were observed just now and a view that was read after them; the first of these reads began at
    /// `begun`. `has_ended` knows processes that have ended, by their signs of life.
    pub fn look(
        &mut self,
        view: Arc<View>,
        beats: &[Beat],
        has_ended: impl Fn(&Beat) -> bool,
        (begun, now): (Duration, Duration),
    ) -> ClusterLook {
        let mut nodes = Vec::new();
        for beat in beats.iter().filter(|beat| Order::is_node(beat)) {
            let is_me = beat.node == self.me.0 && beat.incarnation == self.me.1;
            let beats = self.suspicion.lives(&beat.node, beat.incarnation, now);
            let lives = is_me || (beats && !has_ended(beat));
            let (name, incarnation) = (Arc::clone(&beat.node), beat.incarnation);
            nodes.push(SeenNode { name, incarnation, homes: NodeHomes::of(beat), lives });
        }
        let homes = || (0..).zip(&view.homes);
        let lacks = homes().map(|(home, _)| self.lack(home, &view, beats, &has_ended, now)).collect();
        let orders = beats.iter().filter_map(Order::of);
        let of_epoch = |order: &Order| view.home(order.home).is_ok_and(|of| of.epoch == order.epoch);
        let orders = orders.filter(of_epoch).collect();
        ClusterLook { begun, at: now, watched: self.suspicion.watched(now), view, nodes, orders, lacks }
    }

    fn lack(
        &mut self,
        home: u16,
        view: &View,
        beats: &[Beat],
        has_ended: &impl Fn(&Beat) -> bool,
        now: Duration,
    ) -> Option<Lack> {
        let of = view.home(home).ok()?;
        let Some(owner) = &of.owner else { return Some(Lack::Free) };
        let is_of = |beat: &&Beat| *beat.node == *owner.node && beat.incarnation == owner.incarnation;
        if let Some(beat) = beats.iter().find(is_of) {
            self.owners.insert(home, beat.clone());
        }
        if let Some(beat) = self.owners.get(&home).filter(is_of).filter(|beat| has_ended(beat)) {
            let has_served = NodeHomes::of(beat).serves.contains(&(home, of.epoch));
            return Some(Lack::Ended { has_served });
        }
        self.suspicion.suspects(&owner.node, owner.incarnation, now).then_some(Lack::Silent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Incarnation;

    #[test]
    fn an_order_has_a_row_of_its_home() {
        for (home, row) in [(0, "@takeover"), (7, "@takeover/7")] {
            let order = Order { home, epoch: 3, to: "b".into() };
            assert_eq!(&*order.beat().node, row, "that of home 0 is the one that earlier versions know");
            assert_eq!(Order::of(&order.beat()), Some(order.clone()));
            assert!(!Order::is_node(&order.beat()));
        }
        let beat = |node: &str| Beat { node: node.into(), incarnation: 1, number: 1, about: Bytes::new() };
        assert!(Order::of(&beat("a")).is_none() && Order::is_node(&beat("a")));
        assert!(Order::of(&beat("@takeover/x")).is_none() && !Order::is_node(&beat("@other")));
    }

    /// The failure: a node that comes back at once without its disk beats under the owner's name, so that nobody ever takes its home.
    #[test]
    fn an_owner_whose_name_another_process_has_is_silent() {
        let mut view = View::create("c", 1, 2);
        view.homes[0].owner = Some(Incarnation { node: "a".to_owned(), incarnation: 1 });
        view.homes[0].epoch = 1;
        let view = Arc::new(view);
        let mut watcher = Watcher::new(&"b".into(), 9);
        let mut look = |second: u64, incarnation: u64| {
            let now = Duration::from_secs(second);
            let beat = Beat { node: "a".into(), incarnation, number: second, about: Bytes::new() };
            watcher.observe(std::slice::from_ref(&beat), now);
            watcher.look(Arc::clone(&view), &[beat], |_| false, (now, now))
        };
        assert!((0..10).all(|second| look(second, 1).lack(0).is_none()));
        assert!((10..15).all(|second| look(second, 2).lack(0).is_none()));
        assert_eq!(look(15, 2).lack(0), Some(Lack::Silent));
        assert!(look(15, 2).living("a").is_some(), "the new process lives");
        assert_eq!(look(16, 1).lack(0), None, "two processes of one name: the owner is there still");
        assert!((17..22).all(|second| look(second, 2).lack(0).is_none()));
    }

    /// The failure: a process that is known to have ended is waited for, since a later one has overwritten its last sign of life.
    #[test]
    fn an_owner_that_has_ended_is_known_by_its_last_sign_of_life() {
        let mut view = View::create("c", 1, 2);
        view.homes[0].owner = Some(Incarnation { node: "a".to_owned(), incarnation: 1 });
        view.homes[0].epoch = 1;
        let (view, mut watcher) = (Arc::new(view), Watcher::new(&"b".into(), 9));
        let about = |homes: &NodeHomes| Bytes::from(serde_json::to_vec(homes).unwrap());
        let serves = NodeHomes { serves: vec![(0, 1)], ..NodeHomes::default() };
        let mut look = |second: u64, incarnation: u64, has_ended: bool| {
            let now = Duration::from_secs(second);
            let homes = if incarnation == 1 { &serves } else { &NodeHomes::default() };
            let beat = Beat { node: "a".into(), incarnation, number: second, about: about(homes) };
            watcher.observe(std::slice::from_ref(&beat), now);
            let has_ended = |beat: &Beat| has_ended && beat.incarnation == 1;
            watcher.look(Arc::clone(&view), &[beat], has_ended, (now, now)).lack(0)
        };
        assert_eq!((look(1, 1, false), look(2, 2, false)), (None, None));
        assert_eq!(look(3, 2, true), Some(Lack::Ended { has_served: true }));
    }
}
