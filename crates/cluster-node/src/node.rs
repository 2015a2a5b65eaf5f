//! A node: one beat and one look for all its homes.

use std::{sync::Arc, time::Duration};

use cluster::{Clock, ClusterLook, MemberNode, Node, Order, SUSPECTED_AFTER, ViewError, Watcher, next_move};
use ledger::{Beat, Ledger};
use parking_lot::Mutex;
use tokio::{
    sync::{Semaphore, mpsc, watch},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep_until, timeout},
};

use crate::{
    HomeDirectories, NodeError, NodeSettings, NodeState, OwnedHome,
    about::About,
    board::Board,
    clock::MachineClock,
    home::HomeTask,
    status::{NodeStatus, nodes},
};

/// Time between two looks at beats and view.
const LOOK: Duration = Duration::from_millis(500);

/// A call that takes longer counts as unanswered, for what is told: it goes on.
const ANSWER: Duration = Duration::from_secs(3);

/// Copies that read on at a time. The others come in turn, so that one that has much to read keeps no other from the end.
const COPIES_AT_A_TIME: usize = 2;

/// View and beats, as they were seen at one time.
pub(crate) struct NodeLook {
    pub(crate) look: ClusterLook,
    pub(crate) beats: Vec<Beat>,
}

/// The looks of a node, as they come.
pub(crate) type Looks = watch::Receiver<Option<Arc<NodeLook>>>;

/// Ends a task when the last that needs it is gone.
pub(crate) struct AbortOnDrop(pub(crate) AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Parts that the homes of a node share.
pub(crate) struct NodeParts {
    pub(crate) member: Arc<MemberNode>,
    pub(crate) settings: NodeSettings,
    pub(crate) directories: HomeDirectories,
    pub(crate) board: Board,
    /// All nodes, as they were seen last.
    pub(crate) nodes: Arc<Mutex<Vec<NodeStatus>>>,
    /// Copies that may read on.
    pub(crate) reading: Semaphore,
}

/// A process of a cluster: it keeps copies of all homes, takes those that fall to it, and goes on as a standby of those that it gives up
/// or loses.
pub struct ClusterNode {
    parts: Arc<NodeParts>,
}

impl ClusterNode {
    /// A node over an engine that is open, and what it shows of itself. Takes no part in the cluster before [`Self::run`].
    pub fn new(
        ledger: Arc<dyn Ledger>,
        settings: NodeSettings,
        directories: HomeDirectories,
    ) -> (Self, watch::Receiver<NodeState>) {
        let node = Node::new(&settings.name, settings.incarnation);
        let member = Arc::new(MemberNode::new(ledger, Arc::new(MachineClock), node));
        let (board, shown) = Board::new(Arc::clone(&member), settings.clone());
        let (nodes, reading) = (Arc::default(), Semaphore::new(COPIES_AT_A_TIME));
        (Self { parts: Arc::new(NodeParts { member, settings, directories, board, nodes, reading }) }, shown)
    }

    /// Takes part in the cluster. Sends each home that becomes this node's, with a directory as of the end of the epoch before. One that
    /// is handed over, lost or dropped is followed again, as soon as its stores are closed. In the cluster's runtime, which has several
    /// threads.
    ///
    /// Cancel safety: if dropped, the node keeps no copies and takes nothing any more, and homes that were sent go on until they are
    /// handed over: so a process that ends drops this first.
    ///
    /// # Errors
    /// [`NodeError`]: nothing that goes by itself. Ends without one when nobody receives homes any more.
    pub async fn run(self, homes: mpsc::Sender<OwnedHome>) -> Result<(), NodeError> {
        let parts = self.parts;
        let member = Arc::clone(&parts.member);
        let beating = Arc::new(AbortOnDrop(tokio::spawn(async move { member.run().await }).abort_handle()));
        let node = parts.member.node();
        let mut watcher = Watcher::new(node.name(), node.incarnation());
        let (seen, looks) = watch::channel(None);
        let mut tasks = JoinSet::new();
        let mut moved: Option<Instant> = None;
        loop {
            let next = Instant::now() + LOOK;
            match parts.look(&mut watcher).await {
                Ok(look) if look.look.view.name != parts.settings.cluster => parts.board.update(|facts| {
                    facts.answers = false;
                    facts.trouble = format!("the cluster is still being made, as '{}'", look.look.view.name);
                }),
                Ok(look) => {
                    let look = Arc::new(look);
                    let count = look.look.view.homes.len();
                    *parts.nodes.lock() = nodes(&look.beats, watcher.suspicion(), SUSPECTED_AFTER);
                    parts.board.update(|facts| {
                        (facts.answers, facts.trouble) = (true, String::new());
                        facts.look = Some(Arc::clone(&look));
                        facts.homes.resize_with(count, Default::default);
                    });
                    seen.send_replace(Some(Arc::clone(&look)));
                    for home in (0..).take(count).skip(tasks.len()) {
                        let (parts, homes, beating) =
                            (Arc::clone(&parts), homes.clone(), Arc::clone(&beating));
                        let task = HomeTask::new(parts, home, count, looks.clone(), beating);
                        tasks.spawn(task.run(homes));
                    }
                    if moved.is_none_or(|moved| moved.elapsed() >= parts.settings.move_every)
                        && parts.move_one(&look.look).await
                    {
                        moved = Some(Instant::now());
                    }
                }
                Err(LookError::View(error)) => return Err(error.into()),
                Err(LookError::Unanswered(why)) => parts.board.update(|facts| {
                    (facts.answers, facts.trouble) = (false, why);
                }),
            }
            tokio::select! {
                () = sleep_until(next) => {}
                Some(ended) = tasks.join_next() => {
                    return ended.unwrap_or_else(|error| match error.try_into_panic() {
                        Ok(panic) => std::panic::resume_unwind(panic),
                        Err(_) => Ok(()),
                    });
                }
            }
        }
    }
}

enum LookError {
    View(ViewError),
    Unanswered(String),
}

impl NodeParts {
    async fn look(&self, watcher: &mut Watcher) -> Result<NodeLook, LookError> {
        let begun = MachineClock.now();
        let unanswered = || LookError::Unanswered("the ledger does not answer".to_owned());
        let beats = match timeout(ANSWER, self.member.ledger().beats()).await {
            Ok(Ok(beats)) => beats,
            Ok(Err(unknown)) => return Err(LookError::Unanswered(unknown.to_string())),
            Err(_) => return Err(unanswered()),
        };
        watcher.observe(&beats, MachineClock.now());
        let view = match timeout(ANSWER, self.member.view()).await {
            Ok(view) => view.map_err(LookError::View)?,
            Err(_) => return Err(unanswered()),
        };
        let has_ended = |beat: &Beat| About::of(beat).process.is_some_and(|process| process.has_ended());
        let look = watcher.look(view, &beats, has_ended, (begun, MachineClock.now()));
        Ok(NodeLook { look, beats })
    }

    /// Orders that a home moves from this node to one that has fewer. Returns whether one does.
    async fn move_one(&self, look: &ClusterLook) -> bool {
        let Some(next) = next_move(look).filter(|next| *next.from == *self.settings.name) else {
            return false;
        };
        if look.watched < SUSPECTED_AFTER || !self.board.is_settled() {
            return false;
        }
        let Ok(of) = look.view.home(next.home) else { return false };
        tracing::info!(home = next.home, to = &*next.to, "a home moves to a gateway that has fewer");
        let order = Order { home: next.home, epoch: of.epoch, to: next.to };
        // Without an answer it may come about, or another look finds the same move.
        let _ = timeout(ANSWER, self.member.ledger().beat(&order.beat())).await;
        true
    }
}
