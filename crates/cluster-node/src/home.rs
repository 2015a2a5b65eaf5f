//! A home at a node: followed until it falls to this node, then given out, then followed again.

use std::{sync::Arc, time::Duration};

use cluster::{Clock, FollowStep, Follower, HomeClaim, HomeView, TakeError, Tenure, ViewError, take};
use ledger::Beat;
use store::{DataDir, StoreError};
use tokio::{sync::mpsc, task::block_in_place, time::sleep};

use crate::{
    NodeError, OwnedHome, STREAMS,
    board::NodePart,
    clock::MachineClock,
    copy::WarmCopy,
    directories::{OpenedCopy, given_back, note_served},
    node::{AbortOnDrop, Looks, NodeLook, NodeParts},
    owned::HomeEnded,
};

/// Time between two steps of the copy, if it has reached the end.
const STEP: Duration = Duration::from_millis(500);

/// Time before a home that could not be restored here is tried again.
const AGAIN: Duration = Duration::from_millis(500);

/// Time before a home whose ledger is damaged is tried again, at a node that has others.
const DAMAGED: Duration = Duration::from_secs(10);

/// See the module.
pub(crate) struct HomeTask {
    parts: Arc<NodeParts>,
    home: u16,
    /// Homes of the cluster.
    homes: usize,
    looks: Looks,
    /// Ends with the last that needs it.
    beating: Arc<AbortOnDrop>,
    signs: OwnerSigns,
}

/// Signs of life of whoever has the home.
#[derive(Debug, Default)]
struct OwnerSigns {
    /// Incarnation and number of the beat that was seen last.
    last: Option<(u64, u64)>,
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
        self.last = seen;
    }
}

impl HomeTask {
    pub(crate) fn new(
        parts: Arc<NodeParts>,
        home: u16,
        homes: usize,
        looks: Looks,
        beating: Arc<AbortOnDrop>,
    ) -> Self {
        Self { parts, home, homes, looks, beating, signs: OwnerSigns::default() }
    }

    /// Runs until nobody receives homes any more.
    pub(crate) async fn run(mut self, homes: mpsc::Sender<OwnedHome>) -> Result<(), NodeError> {
        let mut given_up = None;
        loop {
            let (directory, tenure) = self.stand_by(given_up).await?;
            let epoch = tenure.owner().epoch;
            note_served(&directory, self.parts.member.node(), epoch);
            let node = &self.parts.settings.name;
            tracing::info!(home = self.home, epoch, node, "this gateway serves now");
            let silent_for = self.signs.at.map(|at| MachineClock.now().saturating_sub(at));
            let weak = Arc::downgrade(&directory);
            let shown = (self.looks.clone(), Arc::clone(&self.parts.nodes));
            let (member, beating) = (&self.parts.member, Arc::clone(&self.beating));
            let (owned, ended) =
                OwnedHome::start(directory, member, tenure.clone(), silent_for, shown, beating);
            self.parts.board.update_home(self.home, |home| {
                home.part = NodePart::Serves(epoch);
                (home.warm, home.stands_back, home.trouble) = (true, false, String::new());
            });
            // The next owner need not wait.
            self.parts.member.beat_early();
            if let Err(mpsc::error::SendError(owned)) = homes.send(owned).await {
                let _ = owned.hand_over().await;
                return Ok(());
            }
            tenure.lost().await;
            let follows = |stands_back: bool| {
                self.parts.board.update_home(self.home, |home| {
                    (home.part, home.warm, home.stands_back) = (NodePart::Follows, false, stands_back);
                });
            };
            follows(false);
            let is_handed_over = ended.await == Ok(HomeEnded::HandedOver);
            follows(is_handed_over);
            let now = MachineClock.now();
            given_up = is_handed_over.then_some(now);
            // The home lived until now, here.
            self.signs = OwnerSigns { last: None, at: Some(now) };
            given_back(weak, self.home).await;
        }
    }

    /// Keeps the copy warm until the home is this node's; then the directory is as of the end of the epoch before.
    async fn stand_by(&mut self, given_up: Option<Duration>) -> Result<(Arc<DataDir>, Tenure), NodeError> {
        let parts = Arc::clone(&self.parts);
        let (member, board) = (&parts.member, &parts.board);
        let opened = block_in_place(|| parts.directories.copy(self.home, self.homes, member.node()));
        let OpenedCopy { directory, mut copy, former } = opened?;
        let mut claim = HomeClaim::new(self.home, former, MachineClock.now(), given_up);
        let (mut follower, looks) = (Follower::new(self.home), self.looks.clone());
        loop {
            let decided = tokio::select! {
                decided = self.decided(&mut claim) => decided,
                followed = follow(&parts, &looks, &mut follower, &mut copy) => {
                    let (is_warm, trouble) = followed?;
                    board.update_home(self.home, |home| (home.warm, home.trouble) = (is_warm, trouble));
                    continue;
                }
            };
            let HomeDecision { seen, wait } = decided;
            let of = seen.look.view.home(self.home)?;
            let before = of.owner.as_ref().map_or("nobody", |owner| &owner.node);
            tracing::info!(home = self.home, before, epoch = of.epoch, ?wait, "taking over");
            board.update_home(self.home, |home| home.part = NodePart::Takes);
            match take(member, self.home, Some(of.epoch), wait, &mut copy).await {
                Ok(tenure) => {
                    block_in_place(|| copy.sync()).map_err(StoreError::Unavailable)?;
                    // The stores open the directory again.
                    drop(copy);
                    return Ok((directory, tenure));
                }
                Err(TakeError::View(ViewError::NotOwner { owner, .. })) => {
                    tracing::info!(home = self.home, owner, "another node was faster");
                }
                Err(TakeError::View(error)) => return Err(error.into()),
                Err(error @ TakeError::Damaged(_)) => {
                    let error = NodeError::Damaged(error.to_string());
                    if self.homes == 1 {
                        return Err(error);
                    }
                    tracing::error!(%error, "a home cannot be served, the others are");
                    board.update_home(self.home, |home| home.trouble = error.to_string());
                    sleep(DAMAGED).await;
                }
                Err(error @ TakeError::Copy { .. }) => {
                    tracing::error!(%error, "the home cannot be restored here, it is tried again");
                    board.update_home(self.home, |home| home.trouble = error.to_string());
                    sleep(AGAIN).await;
                }
            }
            board.update_home(self.home, |home| home.part = NodePart::Follows);
        }
    }

    /// Waits until the home is to be taken. Cancel safe.
    async fn decided(&mut self, claim: &mut HomeClaim) -> HomeDecision {
        loop {
            if self.looks.changed().await.is_err() {
                // The node is about to be dropped.
                std::future::pending::<()>().await;
            }
            let Some(seen) = self.looks.borrow_and_update().clone() else { continue };
            let look = &seen.look;
            let Ok(of) = look.view.home(self.home) else { continue };
            self.signs.observe(of, &seen.beats, look.at);
            let stands_back = claim.stands_back(look.at);
            self.parts.board.update_home(self.home, |home| home.stands_back = stands_back);
            // The home of a newer version would not be whole here.
            if look.view.streams > STREAMS {
                continue;
            }
            if let Some(wait) = claim.decide(&self.parts.member, self.parts.settings.takes_over, look) {
                return HomeDecision { seen: Arc::clone(&seen), wait };
            }
        }
    }
}

/// The home is to be taken.
struct HomeDecision {
    seen: Arc<NodeLook>,
    /// Time before it may be served.
    wait: Duration,
}

/// One step of the copy, in its turn, and a pause at the end. Returns whether the copy has reached the end, and why it is not kept.
/// Cancel safe.
async fn follow(
    parts: &NodeParts,
    looks: &Looks,
    follower: &mut Follower,
    copy: &mut WarmCopy,
) -> Result<(bool, String), NodeError> {
    let view = looks.borrow().as_ref().map(|seen| Arc::clone(&seen.look.view));
    let Some(view) = view else {
        sleep(STEP).await;
        return Ok((false, String::new()));
    };
    let step = {
        // Never closed.
        let _turn = parts.reading.acquire().await;
        follower.step(&parts.member, &view, copy).await
    };
    let trouble = match &step {
        Err(TakeError::View(error)) => return Err(error.clone().into()),
        Err(error) => error.to_string(),
        Ok(FollowStep { applied: 0, .. }) => String::new(),
        Ok(_) => block_in_place(|| copy.sync()).err().unwrap_or_default(),
    };
    if !trouble.is_empty() {
        gateway_core::warn_limited!(trouble, "the copy of the home cannot be kept");
    }
    let goes_on = matches!(step, Ok(FollowStep { applied: 1.., more: true }));
    if !goes_on {
        sleep(STEP).await;
    }
    let is_warm = trouble.is_empty() && matches!(step, Ok(FollowStep { more: false, .. }));
    Ok((is_warm, trouble))
}
