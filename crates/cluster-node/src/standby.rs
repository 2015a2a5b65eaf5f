//! Until the home is this node's.

use std::{fs, path::Path, sync::Arc, time::Duration};

use cluster::{
    Clock, Follower, HomeView, LEASE_WAIT, Node, Suspicion, TakeError, Tenure, View, ViewError, read_view,
    take,
};
use disk::empty_directory;
use ledger::{Beat, Ledger};
use store::{DataDir, StoreError, replace_file};
use thiserror::Error;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use crate::{
    HOME, OwnedHome, STREAMS, about::About, clock::MachineClock, copy::WarmCopy, order::Order,
    process::ProcessId,
};

/// Time between two looks at beats and view.
const LOOK: Duration = Duration::from_millis(500);

/// Time between two beats.
const BEAT: Duration = Duration::from_secs(1);

/// Time between two steps of the copy, if it has reached the end.
const STEP: Duration = Duration::from_millis(500);

/// A call that takes longer counts as unanswered, for what is told: it goes on.
const ANSWER: Duration = Duration::from_secs(3);

/// Told while calls are unanswered.
const UNANSWERED: &str = "the ledger does not answer";

/// The node that serves has so long to hand the home over after an order; then it is taken.
const HAND_OVER: Duration = Duration::from_secs(5);

/// A home that was given up is left to others for so long, if there are others.
const COURTESY: Duration = Duration::from_secs(10);

/// File in the data directory that names the process of a cluster which has it, or had it last.
const INCARNATION: &str = "incarnation";

/// Settings of a node.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// Name of the cluster.
    pub cluster: String,
    /// Its name, which no other node has.
    pub name: String,
    /// Address under which backends reach it.
    pub address: String,
    /// Address under which other gateways reach it; empty without links.
    pub link: String,
    /// The node takes the home over by itself when its owner is gone.
    pub takes_over: bool,
    /// The node has just given the home up: others go first.
    pub stands_back: bool,
    /// Drawn at the start of the process.
    pub incarnation: u64,
}

/// Why a node cannot stand by.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The view cannot be used.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The ledger is damaged: nobody can take the home before the loss is accepted.
    #[error(
        "{0}; mend the ledger, or give up what comes from there on with `mqtt-server cluster accept-loss`"
    )]
    Damaged(String),
    /// The data directory cannot be used.
    #[error(transparent)]
    Directory(#[from] StoreError),
    /// The directory holds a home that was never in a cluster.
    #[error(
        "data directory {0} was used by a gateway alone: make the cluster of it (mqtt-server cluster create), or name another one"
    )]
    OwnContent(String),
    /// The ledger does not answer.
    #[error("the ledger does not answer: {0}")]
    Unanswered(String),
}

/// State of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Phase {
    /// The ledger has not answered yet, or does not answer.
    #[default]
    Unreachable,
    /// Another node serves, or none, and this one has a copy.
    Standby,
    /// The node takes the home.
    Taking,
    /// The node serves.
    Active,
}

/// State of a node, as it is shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeState {
    /// Its present part in the cluster.
    pub phase: Phase,
    /// Node that serves; empty if none does.
    pub active: String,
    /// Address under which backends reach that one; empty if it has not said.
    pub address: String,
    /// Address under which other gateways reach that one; empty if it has no links.
    pub link: String,
    /// The copy has reached the end of the ledger.
    pub warm: bool,
    /// Epoch of the home.
    pub epoch: u64,
    /// Last trouble, empty if there is none.
    pub trouble: String,
}

impl NodeState {
    /// A line for people.
    pub fn line(&self) -> String {
        let trouble = if self.trouble.is_empty() { String::new() } else { format!("; {}", self.trouble) };
        match self.phase {
            Phase::Unreachable => format!("standby: the ledger does not answer{trouble}"),
            Phase::Taking => format!("standby: taking over{trouble}"),
            Phase::Active => format!("active in epoch {}{trouble}", self.epoch),
            Phase::Standby if self.active.is_empty() => format!("standby: nobody serves{trouble}"),
            Phase::Standby => {
                let warm = if self.warm { "the copy is warm" } else { "the copy is being made" };
                format!("standby: {} serves, {warm}{trouble}", self.active)
            }
        }
    }
}

/// A node that does not serve.
pub struct StandbyNode {
    ledger: Arc<dyn Ledger>,
    clock: Arc<dyn Clock>,
    node: Arc<Node>,
    settings: NodeSettings,
    directory: Arc<DataDir>,
    state: watch::Sender<NodeState>,
    /// The process that had the directory before this one.
    before: String,
    signs: OwnerSigns,
}

/// Signs of life of all nodes as they were read last, and the nodes that are suspected by them.
#[derive(Clone)]
struct Look {
    beats: Vec<Beat>,
    suspicion: Suspicion,
}

/// Looks at the signs of life, or why the last one had no answer.
type Looks = watch::Receiver<Result<Look, String>>;

/// Signs of life of whoever has the home.
#[derive(Debug, Default)]
struct OwnerSigns {
    /// Incarnation and number of the beat that was seen last.
    last: Option<(u64, u64)>,
    /// Process that it was of, which a later one of the same node does not replace.
    process: Option<ProcessId>,
    /// Time at which it was seen to change.
    at: Option<Duration>,
}

impl OwnerSigns {
    fn observe(&mut self, of: &HomeView, beats: &[Beat], now: Duration) {
        let Some(owner) = &of.owner else { return };
        let is_of = |beat: &&Beat| *beat.node == *owner.node && beat.incarnation == owner.incarnation;
        let Some(beat) = beats.iter().find(is_of) else { return };
        let seen = Some((beat.incarnation, beat.number));
        // A beat that was there before this process looked may be old.
        if self.last.is_some_and(|last| Some(last) != seen) {
            self.at = Some(now);
        }
        (self.last, self.process) = (seen, About::of(beat).process);
    }

    /// Process of an incarnation, if a beat of it was seen last.
    fn process_of(&self, incarnation: u64) -> Option<&ProcessId> {
        self.process.as_ref().filter(|_| self.last.is_some_and(|(of, _)| of == incarnation))
    }
}

impl StandbyNode {
    /// A node over an engine that is open, and what it shows of itself. Takes no part in the cluster before [`Self::run`].
    pub fn new(
        ledger: Arc<dyn Ledger>,
        settings: NodeSettings,
        directory: Arc<DataDir>,
    ) -> (Self, watch::Receiver<NodeState>) {
        let (state, shown) = watch::channel(NodeState::default());
        let node = Arc::new(Node::new(&settings.name, settings.incarnation));
        let clock = Arc::new(MachineClock) as Arc<dyn Clock>;
        (
            Self {
                ledger,
                clock,
                node,
                settings,
                directory,
                state,
                before: String::new(),
                signs: OwnerSigns::default(),
            },
            shown,
        )
    }

    /// Stands by, and keeps the copy warm, until the home is this node's; then the directory is as of the end of the epoch before. In the
    /// cluster's runtime.
    ///
    /// # Errors
    /// [`NodeError`]: nothing that goes by itself.
    pub async fn run(mut self) -> Result<OwnedHome, NodeError> {
        let mut copy = open_copy(&self.directory)?;
        if copy.directory().has_own_content() && !is_of_cluster(self.directory.path()) {
            return Err(NodeError::OwnContent(self.directory.path().display().to_string()));
        }
        self.before = fs::read_to_string(self.directory.path().join(INCARNATION)).unwrap_or_default();
        note_incarnation(&self.directory, &self.node);
        let beating = self.start_beats();
        let (looking, looks) = self.start_looks();
        let ended = self.stand_by(looks, &mut copy).await;
        beating.abort();
        looking.abort();
        let tenure = ended?;
        self.node.set_about(About { warm: true, ..self.about() }.encode());
        copy.sync().map_err(StoreError::Unavailable)?;
        // The stores open the directory again.
        drop(copy);
        let epoch = tenure.owner().epoch;
        self.state.send_modify(|state| {
            *state = NodeState {
                phase: Phase::Active,
                active: self.settings.name.clone(),
                address: self.settings.address.clone(),
                link: self.settings.link.clone(),
                warm: true,
                epoch,
                trouble: String::new(),
            };
        });
        tracing::info!(epoch, node = self.settings.name, "this gateway serves now");
        let silent_for = self.signs.at.map(|at| self.clock.now().saturating_sub(at));
        Ok(OwnedHome::start(self.directory, self.ledger, tenure, silent_for))
    }

    /// Beats each second, whatever the copy does.
    fn start_beats(&self) -> tokio::task::JoinHandle<()> {
        let (ledger, node) = (Arc::clone(&self.ledger), Arc::clone(&self.node));
        let (mut about, shown) = (self.about(), self.state.subscribe());
        node.set_about(about.encode());
        tokio::spawn(async move {
            loop {
                about.warm = shown.borrow().warm;
                node.set_about(about.encode());
                let _ = timeout(ANSWER, ledger.beat(&node.next_beat())).await;
                tokio::time::sleep(BEAT).await;
            }
        })
    }

    /// Looks at the beats twice a second, whatever the copy does: a look that comes late has seen nobody silent.
    fn start_looks(&self) -> (tokio::task::JoinHandle<()>, Looks) {
        let (ledger, clock) = (Arc::clone(&self.ledger), Arc::clone(&self.clock));
        let (shown, looks) = watch::channel(Err(UNANSWERED.to_owned()));
        let looking = tokio::spawn(async move {
            let mut suspicion = Suspicion::default();
            loop {
                let look = match timeout(ANSWER, ledger.beats()).await {
                    Ok(Ok(beats)) => {
                        suspicion.observe(&beats, clock.now());
                        Ok(Look { beats, suspicion: suspicion.clone() })
                    }
                    Ok(Err(unknown)) => Err(unknown.to_string()),
                    Err(_) => Err(UNANSWERED.to_owned()),
                };
                drop(shown.send_replace(look));
                tokio::time::sleep(LOOK).await;
            }
        });
        (looking, looks)
    }

    fn about(&self) -> About {
        About {
            address: self.settings.address.clone(),
            link: self.settings.link.clone(),
            process: ProcessId::current(),
            warm: false,
            streams: STREAMS,
        }
    }

    async fn stand_by(&mut self, mut looks: Looks, copy: &mut WarmCopy) -> Result<Tenure, NodeError> {
        let mut follower = Follower::new(HOME);
        let begun = Instant::now();
        // And since when it is there.
        let mut ordered = (None, begun);
        loop {
            let looked = Instant::now();
            match self.look(&mut looks).await {
                Ok((view, _)) if view.name != self.settings.cluster => self.state.send_modify(|state| {
                    state.phase = Phase::Unreachable;
                    state.trouble = format!("the cluster is still being made, as '{}'", view.name);
                }),
                Ok((view, Look { beats, suspicion })) => {
                    let of = view.home(HOME)?;
                    self.signs.observe(of, &beats, self.clock.now());
                    self.show(of, &beats);
                    let order = Order::find(&beats, of.epoch);
                    if order != ordered.0 {
                        ordered = (order, Instant::now());
                    }
                    let stands_back = self.settings.stands_back && begun.elapsed() < COURTESY;
                    let wait = match self.by_order(of, &ordered) {
                        Some(by_order) => by_order,
                        None => self.may_take(of, &suspicion, stands_back),
                    };
                    // The home of a newer version would not be whole here.
                    if let Some(wait) = wait.filter(|_| view.streams <= STREAMS)
                        && let Some(tenure) = self.take(of, wait, copy).await?
                    {
                        return Ok(tenure);
                    }
                }
                Err(LookError::View(error)) => return Err(error.into()),
                Err(LookError::Unanswered(why)) => self.state.send_modify(|state| {
                    state.phase = Phase::Unreachable;
                    state.trouble = why;
                }),
            }
            while looked.elapsed() < LOOK {
                if self.follow(&mut follower, copy).await? {
                    tokio::time::sleep(STEP).await;
                }
            }
        }
    }

    /// The view, and the next look at the signs of life.
    async fn look(&self, looks: &mut Looks) -> Result<(View, Look), LookError> {
        let view = match timeout(ANSWER, read_view(&*self.ledger, &*self.clock)).await {
            Ok(read) => read.map_err(LookError::View)?.1,
            Err(_) => return Err(LookError::Unanswered(UNANSWERED.to_owned())),
        };
        // The sender goes on for as long as this node stands by.
        let _ = looks.changed().await;
        let look = looks.borrow_and_update().clone();
        Ok((view, look.map_err(LookError::Unanswered)?))
    }

    fn show(&self, of: &HomeView, beats: &[Beat]) {
        let active = of.owner.as_ref().map_or_else(String::new, |owner| owner.node.to_string());
        let beat = beats.iter().find(|beat| *beat.node == *active);
        let About { address, link, .. } = beat.map(About::of).unwrap_or_default();
        self.state.send_if_modified(|state| {
            let warm = state.warm;
            let next = NodeState {
                phase: Phase::Standby,
                active,
                address,
                link,
                warm,
                epoch: of.epoch,
                trouble: String::new(),
            };
            let changed = *state != next;
            *state = next;
            changed
        });
    }

    /// Returns what an order says about this node: nothing, or whether it takes the home, and after which wait.
    fn by_order(&self, of: &HomeView, (order, since): &(Option<Order>, Instant)) -> Option<Option<Duration>> {
        let order = order.as_ref()?;
        let is_mine = order.is_to(&self.settings.name);
        match &of.owner {
            None if is_mine => Some(Some(Duration::ZERO)),
            // The home goes to another, or to the first that comes.
            None if !order.to.is_empty() && since.elapsed() < COURTESY => Some(None),
            Some(_) if is_mine && since.elapsed() > HAND_OVER => Some(Some(LEASE_WAIT)),
            _ => None,
        }
    }

    /// Returns how long to wait before serving, if the home may be taken.
    fn may_take(&self, of: &HomeView, suspicion: &Suspicion, stands_back: bool) -> Option<Duration> {
        let takes_over = self.settings.takes_over && !stands_back;
        let Some(owner) = &of.owner else { return takes_over.then_some(Duration::ZERO) };
        let process = self.signs.process_of(owner.incarnation);
        // The directory of this node's process before, which is locked by this one now. One that was copied has another node's name.
        let is_mine = *owner.node == self.settings.name
            && self.before.trim() == format!("{} {}", owner.node, owner.incarnation);
        if is_mine || process.is_some_and(ProcessId::has_ended) {
            return (takes_over || is_mine).then_some(Duration::ZERO);
        }
        let is_suspected = suspicion.suspects(&owner.node, owner.incarnation, self.clock.now());
        (takes_over && is_suspected).then_some(LEASE_WAIT)
    }

    /// Takes the home; nothing if another node was faster, or it has to be tried again.
    async fn take(
        &self,
        of: &HomeView,
        wait: Duration,
        copy: &mut WarmCopy,
    ) -> Result<Option<Tenure>, NodeError> {
        let before = of.owner.as_ref().map_or("nobody", |owner| &owner.node);
        tracing::info!(before, epoch = of.epoch, ?wait, "taking over");
        self.state.send_modify(|state| state.phase = Phase::Taking);
        let taken = take(&self.ledger, &self.clock, &self.node, HOME, Some(of.epoch), wait, copy).await;
        match taken {
            Ok(tenure) => Ok(Some(tenure)),
            Err(TakeError::View(ViewError::NotOwner { owner, .. })) => {
                tracing::info!(owner, "another node was faster");
                Ok(None)
            }
            Err(TakeError::View(error)) => Err(error.into()),
            Err(error @ TakeError::Damaged(_)) => Err(NodeError::Damaged(error.to_string())),
            Err(error @ TakeError::Copy { .. }) => {
                tracing::error!(%error, "the home cannot be restored here, it is tried again");
                self.state.send_modify(|state| state.trouble = error.to_string());
                tokio::time::sleep(LOOK).await;
                Ok(None)
            }
        }
    }

    /// One step of the copy. Returns whether it has reached the end.
    async fn follow(&self, follower: &mut Follower, copy: &mut WarmCopy) -> Result<bool, NodeError> {
        let step = timeout(ANSWER, follower.step(&*self.ledger, &*self.clock, copy)).await;
        let (warm, trouble) = match step {
            Ok(Ok(followed)) => (!followed.more, None),
            Ok(Err(TakeError::View(error))) => return Err(error.into()),
            Ok(Err(error)) => (true, Some(error.to_string())),
            Err(_) => (self.state.borrow().warm, None),
        };
        if let Some(trouble) = &trouble {
            gateway_core::warn_limited!(trouble, "the copy of the home cannot be kept");
        }
        if let Err(error) = copy.sync() {
            gateway_core::warn_limited!(error, "the copy of the home cannot be kept");
        }
        self.state.send_if_modified(|state| {
            let is_warm = warm && trouble.is_none();
            let changed = state.warm != is_warm;
            state.warm = is_warm;
            state.trouble = trouble.unwrap_or_default();
            changed
        });
        Ok(warm)
    }
}

enum LookError {
    View(ViewError),
    Unanswered(String),
}

/// Opens the directory as a copy. One whose files cannot be opened is emptied: it is only a copy.
fn open_copy(directory: &Arc<DataDir>) -> Result<WarmCopy, NodeError> {
    match WarmCopy::open(directory) {
        Ok(copy) => Ok(copy),
        Err(error @ StoreError::Format(_)) => Err(error.into()),
        Err(error) => {
            tracing::error!(%error, "the copy of the home cannot be opened, it is made anew");
            let failed = |error: std::io::Error| StoreError::Unavailable(error.to_string());
            empty_directory(directory.path()).map_err(failed)?;
            Ok(WarmCopy::open(directory)?)
        }
    }
}

fn note_incarnation(directory: &DataDir, node: &Node) {
    let text = format!("{} {}\n", node.name(), node.incarnation());
    if let Err(error) = replace_file(directory.path(), INCARNATION, &text) {
        // The next process waits as for one on another host.
        tracing::debug!(%error, "the process that has the home is not noted");
    }
}

/// Returns whether a process of a cluster had the directory last.
fn is_of_cluster(directory: &Path) -> bool {
    directory.join(INCARNATION).exists()
}

/// Makes a directory that was of a cluster one of a gateway alone, which keeps what is in it; any other is left as it is. Blocks on the
/// disk.
///
/// # Errors
/// The disk.
pub fn leave_cluster(directory: &Arc<DataDir>) -> Result<(), StoreError> {
    if !is_of_cluster(directory.path()) {
        return Ok(());
    }
    tracing::info!("the data directory was of a cluster, and is of this gateway alone from now on");
    WarmCopy::open(directory)?.forget_ledger()?;
    let failed = |error: std::io::Error| StoreError::Unavailable(error.to_string());
    fs::remove_file(directory.path().join(INCARNATION)).map_err(failed)
}
