//! The share that an accepted CONNECT has in a session before its connection stands.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use broker::{Charge, Closed, MemoryKind, Session, Turn, Will};
use codec::Connect;
use gateway_core::{ClientId, Message, Origin, OriginKind, Timestamp, clock};

use crate::{NetShared, connection::ending::finish_alone};

/// An opened session that has no connection yet: without one its claim is given back.
pub(crate) struct SessionClaim<'a> {
    pub session: Option<Arc<dyn Session>>,
    pub epoch: u32,
    /// The session began with it, and nobody was told: it ends with it.
    pub fresh: bool,
    pub shared: &'a NetShared,
}

impl SessionClaim<'_> {
    /// Leaves the session to its connection, which now stands.
    pub(crate) fn keep(mut self) {
        self.session = None;
    }
}

impl Drop for SessionClaim<'_> {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else { return };
        let mut turn = Turn::default();
        let expiry = self.fresh.then_some(0);
        let closed = Closed { publish_will: false, expiry, reason: "handshake_ended" };
        let cleanup = self.shared.broker.closed(&session, self.epoch, closed, clock::now(), &mut turn);
        turn.flush();
        finish_alone(cleanup);
    }
}

/// The will is too large, or wills have used up their share of memory.
pub(crate) struct NoWillRoom;

/// The will that a CONNECT brings, charged to the memory account. `author` is who leaves it, where rules will be asked
/// about it again.
pub(crate) fn will(
    connect: &Connect,
    client_id: &ClientId,
    shared: &NetShared,
    author: impl FnOnce() -> Option<String>,
    now: Timestamp,
) -> Result<Option<Will>, NoWillRoom> {
    let Some(will) = connect.will.as_ref() else { return Ok(None) };
    let author = author().map(Arc::new);
    let origin = Origin { kind: OriginKind::Device, client_id: Some(client_id), slot: 0 };
    let mut message = Message::new(&will.topic, &will.payload, now, origin);
    message.qos = will.qos;
    message.retain = will.retain;
    message.properties = will.properties.as_ref();
    let properties = will.properties.as_ref().map_or(0, |properties| properties.cost());
    let mut charge = Charge::new(shared.broker.account(), MemoryKind::Wills);
    if will.topic.len() + will.payload.len() + properties > shared.limits.will_bytes.0
        || !charge.set(message.cost() + author.as_ref().map_or(0, |author| author.len()))
    {
        broker::counters::count(|c| c.memory_wills.add(1));
        return Err(NoWillRoom);
    }
    let message = Arc::clone(message.share());
    let charge = Some(Arc::new(charge));
    Ok(Some(Will { message, expiry: will.expiry, delay: will.delay, charge, author }))
}

/// A client id for one that has none.
pub(crate) fn assigned_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    use std::hash::{BuildHasher, RandomState};
    static SEED: std::sync::LazyLock<RandomState> = std::sync::LazyLock::new(RandomState::new);
    let number = NEXT.fetch_add(1, Relaxed);
    format!("auto-{:016x}{:016x}", SEED.hash_one(number), SEED.hash_one((number, clock::now())))
}
