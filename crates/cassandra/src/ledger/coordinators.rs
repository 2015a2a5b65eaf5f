//! Nodes that are asked first: not those that were silent.
//!
//! The driver sends a request to a second node if the first has not answered in [`SILENCE`]. By itself it would go on asking the
//! silent one first, as the answer that it waits no longer for says nothing about it: a third of all appends would take so long
//! until the connections are found dead. So each request has a policy of its own, which sees that the driver asks for the next node
//! and thus that the one before did not answer. From then on that node is asked last, until it answers a small question.

use std::{
    collections::HashSet,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use scylla::{
    client::session::Session,
    cluster::{ClusterState, NodeRef},
    policies::load_balancing::{
        FallbackPlan, LoadBalancingPolicy, NodeIdentifier, RoutingInfo, SingleTargetLoadBalancingPolicy,
    },
    routing::Shard,
    statement::{Consistency, Statement, prepared::PreparedStatement},
};
use uuid::Uuid;

/// A request without an answer for this long goes to another node as well.
pub(super) const SILENCE: Duration = Duration::from_millis(200);

/// Time between two questions to a silent node.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// The order in which nodes are asked.
#[derive(Debug)]
pub(super) struct Coordinators {
    order: Arc<dyn LoadBalancingPolicy>,
    /// Nodes of the cluster that are asked last; each is being probed.
    silent: Mutex<HashSet<Uuid>>,
    session: Weak<Session>,
}

impl Coordinators {
    /// `order` is the order while all nodes answer.
    pub(super) fn new(order: Arc<dyn LoadBalancingPolicy>, session: &Arc<Session>) -> Arc<Self> {
        Arc::new(Self { order, silent: Mutex::default(), session: Arc::downgrade(session) })
    }

    /// `statement` for one request.
    pub(super) fn watched(self: &Arc<Self>, statement: &PreparedStatement) -> PreparedStatement {
        let mut statement = statement.clone();
        let request = WatchedRequest { coordinators: Arc::clone(self), first: Mutex::default() };
        statement.set_load_balancing_policy(Some(Arc::new(request)));
        statement
    }

    fn is_silent(&self, node: NodeRef<'_>) -> bool {
        self.silent.lock().contains(&node.host_id)
    }

    /// Nodes that are asked last.
    #[cfg(test)]
    pub(super) fn silent(&self) -> usize {
        self.silent.lock().len()
    }

    fn note_silence(self: &Arc<Self>, node: Uuid) {
        if self.silent.lock().insert(node) {
            tracing::debug!(%node, "a node of the ledger's database does not answer, it is asked last");
            tokio::spawn(Arc::clone(self).probe(node));
        }
    }

    /// Asks `node` until it answers, or is no node of the cluster any more.
    async fn probe(self: Arc<Self>, node: Uuid) {
        let mut question = Statement::new("SELECT key FROM system.local");
        question.set_consistency(Consistency::One);
        question.set_request_timeout(Some(SILENCE));
        let only = SingleTargetLoadBalancingPolicy::new(NodeIdentifier::HostId(node), None);
        question.set_load_balancing_policy(Some(only));
        loop {
            tokio::time::sleep(PROBE_INTERVAL).await;
            let Some(session) = self.session.upgrade() else { return };
            let is_member = session.get_cluster_state().get_node_by_host_id(node).is_some();
            if !is_member || session.query_unpaged(question.clone(), ()).await.is_ok() {
                self.silent.lock().remove(&node);
                return;
            }
        }
    }
}

/// Policy of one request.
#[derive(Debug)]
struct WatchedRequest {
    coordinators: Arc<Coordinators>,
    /// Node that is asked first.
    first: Mutex<Option<Uuid>>,
}

impl LoadBalancingPolicy for WatchedRequest {
    fn pick<'a>(
        &'a self,
        request: &'a RoutingInfo<'_>,
        cluster: &'a ClusterState,
    ) -> Option<(NodeRef<'a>, Option<Shard>)> {
        let Coordinators { order, .. } = &*self.coordinators;
        let answers = |(node, _): &(NodeRef<'a>, Option<Shard>)| !self.coordinators.is_silent(node);
        let picked = order.pick(request, cluster);
        let picked =
            picked.filter(answers).or_else(|| order.fallback(request, cluster).find(answers)).or(picked);
        *self.first.lock() = picked.map(|(node, _)| node.host_id);
        picked
    }

    /// Called only once the first node has failed or is silent, and each further item once those before it are.
    fn fallback<'a>(&'a self, request: &'a RoutingInfo<'_>, cluster: &'a ClusterState) -> FallbackPlan<'a> {
        let mut asked = self.first.lock().take();
        let (answering, silent): (Vec<_>, Vec<_>) = self
            .coordinators
            .order
            .fallback(request, cluster)
            .partition(|(node, _)| !self.coordinators.is_silent(node));
        let mut nodes = answering.into_iter().chain(silent);
        Box::new(std::iter::from_fn(move || {
            let next = nodes.next();
            let before = std::mem::replace(&mut asked, next.map(|(node, _)| node.host_id));
            if let Some(before) = before {
                self.coordinators.note_silence(before);
            }
            next
        }))
    }

    fn name(&self) -> String {
        "silent nodes last".to_owned()
    }
}
