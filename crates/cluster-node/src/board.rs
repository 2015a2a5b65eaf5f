//! State of a node, as it is shown and told to others.

use std::sync::Arc;

use cluster::{MemberNode, NodeHomes};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{NodeSettings, STREAMS, about::About, node::NodeLook, process::ProcessId};

/// State of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Phase {
    /// The ledger has not answered yet, or does not answer.
    #[default]
    Unreachable,
    /// The node serves no home, and has copies.
    Standby,
    /// The node takes a home, and serves none yet.
    Taking,
    /// The node serves a home.
    Active,
}

/// A home and the node that has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HomePlace {
    /// Its epoch.
    pub epoch: u64,
    /// Node that has it; empty if none has.
    pub node: String,
    /// Address under which backends reach that one; empty if it has not said.
    pub address: String,
    /// Address under which other gateways reach that one; empty if it has no links.
    pub link: String,
    /// This process serves it.
    pub own: bool,
}

/// State of a node, as it is shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeState {
    /// Its present part in the cluster.
    pub phase: Phase,
    /// Node that serves home 0; empty if none does.
    pub active: String,
    /// Address under which backends reach that one; empty if it has not said.
    pub address: String,
    /// Address under which other gateways reach that one; empty if it has no links.
    pub link: String,
    /// All copies have reached the end of the ledger.
    pub warm: bool,
    /// Epoch of home 0.
    pub epoch: u64,
    /// All homes, by number; none before the ledger has answered.
    pub homes: Vec<HomePlace>,
    /// Last trouble, empty if there is none.
    pub trouble: String,
}

impl NodeState {
    /// A line for people.
    pub fn line(&self) -> String {
        let trouble = if self.trouble.is_empty() { String::new() } else { format!("; {}", self.trouble) };
        let warm = if self.warm { "the copy is warm" } else { "the copy is being made" };
        if self.homes.len() > 1 && self.phase != Phase::Unreachable {
            let numbers = (0..self.homes.len()).filter(|number| self.homes[*number].own);
            let own: Vec<String> = numbers.map(|number| number.to_string()).collect();
            let serves = match own.is_empty() {
                true => "standby".to_owned(),
                false => format!("active in homes {}", own.join(", ")),
            };
            let nobody = self.homes.iter().filter(|home| home.node.is_empty()).count();
            let nobody = if nobody > 0 { format!(", {nobody} served by nobody") } else { String::new() };
            let warm = if self.warm { "all copies are warm" } else { "copies are being made" };
            return format!("{serves} of {} homes{nobody}, {warm}{trouble}", self.homes.len());
        }
        match self.phase {
            Phase::Unreachable => format!("standby: the ledger does not answer{trouble}"),
            Phase::Taking => format!("standby: taking over{trouble}"),
            Phase::Active => format!("active in epoch {}{trouble}", self.epoch),
            Phase::Standby if self.active.is_empty() => format!("standby: nobody serves{trouble}"),
            Phase::Standby => format!("standby: {} serves, {warm}{trouble}", self.active),
        }
    }
}

/// A home in this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum NodePart {
    /// A copy is kept.
    #[default]
    Follows,
    /// The home is taken.
    Takes,
    /// The home is served in this epoch.
    Serves(u64),
}

/// Facts about a home in this process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HomeFacts {
    pub(crate) part: NodePart,
    /// The copy has reached the end of the ledger.
    pub(crate) warm: bool,
    /// The home was given up, and is left to others.
    pub(crate) stands_back: bool,
    pub(crate) trouble: String,
}

/// Facts about this process.
#[derive(Default)]
pub(crate) struct NodeFacts {
    /// The ledger answers.
    pub(crate) answers: bool,
    pub(crate) trouble: String,
    pub(crate) look: Option<Arc<NodeLook>>,
    /// By number.
    pub(crate) homes: Vec<HomeFacts>,
}

/// Keeps the facts, shows them, and tells them with each beat.
pub(crate) struct Board {
    member: Arc<MemberNode>,
    settings: NodeSettings,
    process: Option<ProcessId>,
    facts: Mutex<NodeFacts>,
    state: watch::Sender<NodeState>,
}

impl Board {
    pub(crate) fn new(member: Arc<MemberNode>, settings: NodeSettings) -> (Self, watch::Receiver<NodeState>) {
        let (state, shown) = watch::channel(NodeState::default());
        let process = ProcessId::current();
        let board = Self { member, settings, process, facts: Mutex::default(), state };
        board.update(|_| ());
        (board, shown)
    }

    /// Changes the facts.
    pub(crate) fn update(&self, change: impl FnOnce(&mut NodeFacts)) {
        let mut facts = self.facts.lock();
        change(&mut facts);
        self.member.node().set_about(self.about(&facts).encode());
        let next = self.state_of(&facts);
        self.state.send_if_modified(|state| {
            let changed = *state != next;
            *state = next;
            changed
        });
    }

    /// Changes the facts of a home.
    pub(crate) fn update_home(&self, home: u16, change: impl FnOnce(&mut HomeFacts)) {
        self.update(|facts| {
            if let Some(of) = facts.homes.get_mut(usize::from(home)) {
                change(of);
            }
        });
    }

    /// Tells whether homes that are this node's in the view are served.
    pub(crate) fn is_settled(&self) -> bool {
        self.facts.lock().homes.iter().all(|home| home.part != NodePart::Takes)
    }

    fn about(&self, facts: &NodeFacts) -> About {
        let homes = || (0..).zip(&facts.homes);
        let numbers = |has: fn(&HomeFacts) -> bool| {
            homes().filter(|(_, home)| has(home)).map(|(number, _)| number).collect::<Vec<u16>>()
        };
        let serves = homes().filter_map(|(number, home)| match home.part {
            NodePart::Serves(epoch) => Some((number, epoch)),
            _ => None,
        });
        About {
            address: self.settings.address.clone(),
            link: self.settings.link.clone(),
            process: self.process.clone(),
            warm: is_warm(facts),
            streams: STREAMS,
            homes: NodeHomes {
                takes_over: self.settings.takes_over,
                copies: numbers(|home| home.warm),
                leaves: numbers(|home| home.stands_back),
                serves: serves.collect(),
            },
        }
    }

    fn state_of(&self, facts: &NodeFacts) -> NodeState {
        let has = |wanted: fn(&NodePart) -> bool| facts.homes.iter().any(|home| wanted(&home.part));
        let phase = match () {
            () if has(|part| matches!(part, NodePart::Serves(_))) => Phase::Active,
            () if has(|part| *part == NodePart::Takes) => Phase::Taking,
            () if facts.answers => Phase::Standby,
            () => Phase::Unreachable,
        };
        let homes: Vec<_> =
            (0..).zip(&facts.homes).map(|(number, home)| self.place(facts, number, home)).collect();
        let HomePlace { epoch, node, address, link, .. } = homes.first().cloned().unwrap_or_default();
        let mut troubles =
            std::iter::once(&facts.trouble).chain(facts.homes.iter().map(|home| &home.trouble));
        let trouble = troubles.find(|trouble| !trouble.is_empty()).cloned().unwrap_or_default();
        NodeState { phase, active: node, address, link, warm: is_warm(facts), epoch, homes, trouble }
    }

    fn place(&self, facts: &NodeFacts, number: u16, home: &HomeFacts) -> HomePlace {
        if let NodePart::Serves(epoch) = home.part {
            let NodeSettings { name, address, link, .. } = &self.settings;
            let (node, address, link) = (name.clone(), address.clone(), link.clone());
            return HomePlace { epoch, node, address, link, own: true };
        }
        let Some(seen) = &facts.look else { return HomePlace::default() };
        let Ok(of) = seen.look.view.home(number) else { return HomePlace::default() };
        let node = of.owner.as_ref().map_or_else(String::new, |owner| owner.node.clone());
        let beat = seen.beats.iter().find(|beat| *beat.node == *node);
        let About { address, link, .. } = beat.map(About::of).unwrap_or_default();
        HomePlace { epoch: of.epoch, node, address, link, own: false }
    }
}

fn is_warm(facts: &NodeFacts) -> bool {
    !facts.homes.is_empty() && facts.homes.iter().all(|home| home.warm)
}
