//! This process at its ledger: one sign of life a second and one read of the owners at a time, for all homes.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use ledger::{BoxFuture, Ledger, Owner, Unknown};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{
    Clock, Node, View, ViewError,
    calls::{both, first, until_answered},
    change::read_view,
    shared::SharedCall,
    tenure::Core,
};

/// Time between beats.
const BEAT: Duration = Duration::from_secs(1);

/// A process of a cluster, whatever homes it owns or follows.
///
/// Appends and followers wait for [`Self::run`], which makes their calls: it must be polled all the time.
pub struct MemberNode {
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) clock: Arc<dyn Clock>,
    node: Node,
    /// Homes of this process. Those that are lost are dropped with the next answer.
    tenures: Mutex<Vec<Weak<Core>>>,
    /// The last epoch of each home in which this process has served.
    served: Mutex<BTreeMap<u16, u64>>,
    /// Reads of the owners that have begun.
    reads: AtomicU64,
    /// The validating reads of step (3). An append asks after its insert was answered.
    validation: SharedCall<()>,
    views: SharedCall<Result<Arc<View>, ViewError>>,
    /// Changes when a beat is to come before its time.
    early_beat: watch::Sender<()>,
    repeats: AtomicU64,
}

impl MemberNode {
    /// A process at its ledger. Does nothing before [`Self::run`].
    pub fn new(ledger: Arc<dyn Ledger>, clock: Arc<dyn Clock>, node: Node) -> Self {
        Self {
            ledger,
            clock,
            node,
            tenures: Mutex::default(),
            served: Mutex::default(),
            reads: AtomicU64::new(0),
            validation: SharedCall::new(),
            views: SharedCall::new(),
            early_beat: watch::Sender::new(()),
            repeats: AtomicU64::new(0),
        }
    }

    /// The ledger.
    pub fn ledger(&self) -> &Arc<dyn Ledger> {
        &self.ledger
    }

    /// Clocks of this machine.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// The process, as others see it.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Beats each second, which renews the leases of all homes, and reads the owners for appends and the view for followers. Does not
    /// end.
    ///
    /// Cancel safety: nothing is lost if it is dropped and called again; appends wait meanwhile, and leases run out.
    pub async fn run(&self) {
        both(self.beat(), both(self.validate(), self.read_views())).await;
    }

    /// Lets the next beat come at once: what it tells matters to others, and is rare.
    pub fn beat_early(&self) {
        self.early_beat.send_replace(());
    }

    /// The view, by a read that began after this call. Cancel safe. Waits for [`Self::run`].
    ///
    /// # Errors
    /// As [`read_view`].
    pub async fn view(&self) -> Result<Arc<View>, ViewError> {
        self.views.ask().await
    }

    /// Tells whether this process has served a home in that epoch: then leases of earlier owners have run out.
    pub fn has_served(&self, home: u16, epoch: u64) -> bool {
        self.served.lock().get(&home) == Some(&epoch)
    }

    /// Calls for all homes that were repeated since they had no answer in time.
    pub(crate) fn repeats(&self) -> u64 {
        self.repeats.load(SeqCst)
    }

    /// Reads of the owners that have begun, those of beats among them.
    #[cfg(test)]
    pub(crate) fn reads(&self) -> u64 {
        self.reads.load(SeqCst)
    }

    /// A home is this process's. Returns the number of the first read of the owners that can tell its loss: one that began before may
    /// not show it yet.
    pub(crate) fn begin(&self, owner: &Owner) -> u64 {
        self.served.lock().insert(owner.home, owner.epoch);
        self.reads.load(SeqCst)
    }

    /// Lets reads of the owners renew and end a tenure.
    pub(crate) fn watch(&self, core: &Arc<Core>) {
        self.tenures.lock().push(Arc::downgrade(core));
    }

    /// Step (3) of an append whose rows are all answered: ends when a read of the owners that began after this call has been answered.
    /// Homes that it does not show as this process's are lost by then.
    pub(crate) async fn validated(&self) {
        self.validation.ask().await;
    }

    /// Owners were read by a call with that number that began then.
    fn shown(&self, number: u64, begun: Duration, owners: &[Owner]) {
        self.tenures.lock().retain(|tenure| {
            let Some(core) = tenure.upgrade() else { return false };
            core.shown(number, begun, owners);
            !core.is_lost()
        });
    }

    /// Numbers a read of the owners.
    fn numbered<'a>(
        &'a self,
        read: impl FnOnce() -> BoxFuture<'a, Result<Vec<Owner>, Unknown>>,
    ) -> BoxFuture<'a, Result<(u64, Vec<Owner>), Unknown>> {
        let number = self.reads.fetch_add(1, SeqCst);
        let read = read();
        Box::pin(async move { Ok((number, read.await?)) })
    }

    async fn beat(&self) {
        let mut early = self.early_beat.subscribe();
        loop {
            let begun = self.clock.now();
            early.mark_unchanged();
            let beat = || self.numbered(|| self.ledger.beat(&self.node.next_beat()));
            let (answered, (number, owners)) = until_answered(&*self.clock, &self.repeats, beat).await;
            self.shown(number, answered, &owners);
            let pause = self.clock.sleep((begun + BEAT).saturating_sub(self.clock.now()));
            let _ = first(early.changed(), pause).await;
        }
    }

    /// Reads the owners as long as appends wait for it. Only appends that asked before a read began are valid by it: one that joins a
    /// read under way could be of rows that were stored after a taker had read.
    async fn validate(&self) {
        loop {
            let mut question = self.validation.question().await;
            let read = || self.numbered(|| self.ledger.owners());
            let (begun, (number, owners)) = until_answered(&*self.clock, &self.repeats, read).await;
            self.shown(number, begun, &owners);
            if weakened!(JoinRead) {
                question = self.validation.last_question();
            }
            self.validation.answer(question, ());
        }
    }

    async fn read_views(&self) {
        loop {
            let question = self.views.question().await;
            let view = read_view(&*self.ledger, &*self.clock).await.map(|(_, view)| Arc::new(view));
            self.views.answer(question, view);
        }
    }
}
