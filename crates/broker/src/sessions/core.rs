//! The broker's part of one session. Small: there is one per connection, busy or idle.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{Acquire, Release},
        },
    },
};

use gateway_core::{ClientId, Commit, Peer, Protocol, QueueId, Timestamp};
use parking_lot::Mutex;
use store::{StoredSession, StoredWill};

use super::leaving::Leaving;
use crate::{
    Account, Charge, ConnectionInfo, MemoryKind, QuotaHolderKind, QuotaHolders, Will,
    quota_holders::SessionQuotaUse,
};

/// A CONNECT that passed validation and authentication.
pub struct OpenRequest {
    /// Client id, assigned if it was empty.
    pub client_id: ClientId,
    /// Discard an earlier session.
    pub clean_start: bool,
    /// Session expiry in seconds after the connection ends; `u32::MAX` never.
    pub expiry: u32,
    /// Will.
    pub will: Option<Will>,
    /// Connection details.
    pub info: ConnectionInfo,
    /// Quota holders whose quotas the session counts for: see [`crate::Broker::quota_holders`].
    pub quota_holders: QuotaHolders,
    /// Time.
    pub now: Timestamp,
}

/// The broker's part of one session. It is embedded in the connection layer's session object, so that both are one
/// allocation.
pub struct SessionCore {
    client_id: ClientId,
    /// Queue of the durable state; [`QueueId::NONE`] if there is none.
    queue: QueueId,
    slot: u32,
    /// A connection handles what it has read. It is the connection layer's, and here, where padding makes it free.
    handling: AtomicBool,
    /// Locked after a registry shard and before the index; never while a target is called.
    pub(crate) state: Mutex<SessionState>,
}

/// The part of a session that changes.
pub(crate) struct SessionState {
    /// Number of the connection that owns the session, counted from 1 in each session.
    pub(crate) epoch: u32,
    /// Time at which `online` last changed.
    pub(crate) since: Timestamp,
    peer: Peer,
    pub(crate) listener: Arc<String>,
    protocol: Protocol,
    keep_alive: u16,
    /// Boxed, since most sessions have none of it.
    extra: Option<Box<Extra>>,
    pub(crate) subscriptions: References,
    /// Seconds after the connection's end; `u32::MAX` is never.
    pub(crate) expiry: u32,
    pub(crate) online: bool,
    /// The session is over: it takes no subscription and its connection no longer counts.
    pub(crate) ended: bool,
}

#[derive(Default)]
struct Extra {
    will: Option<Will>,
    /// Boxed, since it exists only for moments.
    leaving: Option<Box<Leaving>>,
    username: Option<Box<str>>,
    identity: Option<Arc<dyn Any + Send + Sync>>,
    /// Share of the session in its quota holders' quotas.
    quota_use: Option<Box<SessionQuotaUse>>,
}

impl SessionCore {
    pub(crate) fn new(
        request: OpenRequest,
        quota_use: Option<Box<SessionQuotaUse>>,
        slot: u32,
        queue: QueueId,
    ) -> Self {
        let ConnectionInfo { peer, listener, protocol, keep_alive, username, identity } = request.info;
        let state = SessionState {
            epoch: 1,
            since: request.now,
            peer,
            listener,
            protocol,
            keep_alive,
            extra: Extra::boxed(request.will, username, identity, quota_use),
            subscriptions: References::None,
            expiry: request.expiry,
            online: true,
            ended: false,
        };
        let handling = AtomicBool::new(false);
        Self { client_id: request.client_id, queue, slot, handling, state: Mutex::new(state) }
    }

    /// Notes that a connection of the session begins to handle what it has read, or has done so.
    pub fn set_handling(&self, handling: bool) {
        self.handling.store(handling, Release);
    }

    /// Returns whether a connection of the session handles the packets that it has read. A caller that gets `false` sees all the
    /// effects of those before.
    pub fn is_handling(&self) -> bool {
        self.handling.load(Acquire)
    }

    /// A session of an earlier process. Its deadlines count from `now` if it was connected when that process ended.
    pub(crate) fn restored(
        session: StoredSession,
        quota_use: Option<Box<SessionQuotaUse>>,
        slot: u32,
        now: Timestamp,
        account: &Arc<Account>,
    ) -> Self {
        let StoredSession { queue, client_id, expiry, since, protocol, listener, username, will, .. } =
            session;
        let will = will.map(|StoredWill { message, expiry, delay, author }| {
            let bytes = message.cost() + author.as_ref().map_or(0, |author| author.len());
            let charge = Some(Arc::new(Charge::forced(account, MemoryKind::Wills, bytes)));
            Will { message, expiry, delay, charge, author }
        });
        let state = SessionState {
            epoch: 0,
            since: since.unwrap_or(now),
            peer: Peer::UNIX,
            listener,
            protocol,
            keep_alive: 0,
            extra: Extra::boxed(will, username, None, quota_use),
            subscriptions: References::None,
            expiry,
            online: false,
            ended: false,
        };
        Self { client_id, queue, slot, handling: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// The durable queue of the session's messages, [`QueueId::NONE`] if the session does not outlive the process.
    pub fn queue(&self) -> QueueId {
        self.queue
    }

    /// The client id.
    pub fn client_id(&self) -> &ClientId {
        &self.client_id
    }

    /// The connection of this epoch; `None` once another has taken the session over.
    pub fn connection(&self, epoch: u32) -> Option<ConnectionInfo> {
        let state = self.state.lock();
        (state.epoch == epoch).then(|| state.info())
    }

    /// The quota holders whose quotas the session uses, or has used.
    pub(crate) fn quota_holders(&self) -> QuotaHolders {
        self.state.lock().quota_holders()
    }

    /// The session's slot; never 0, reused only after the session ended.
    pub fn slot(&self) -> u32 {
        self.slot
    }
}

/// Bytes of a session on the memory account, beside its subscriptions and its will.
pub(crate) fn cost(client_id: &ClientId, username: Option<&str>) -> usize {
    const SESSION: usize = 512;
    SESSION + client_id.as_str().len() + username.map_or(0, str::len)
}

impl Extra {
    fn boxed(
        will: Option<Will>,
        username: Option<Box<str>>,
        identity: Option<Arc<dyn Any + Send + Sync>>,
        quota_use: Option<Box<SessionQuotaUse>>,
    ) -> Option<Box<Self>> {
        let is_used = will.is_some() || username.is_some() || identity.is_some() || quota_use.is_some();
        is_used.then(|| Box::new(Self { will, leaving: None, username, identity, quota_use }))
    }
}

impl SessionState {
    /// The record that is kept on disk.
    pub(crate) fn stored(&self, core: &SessionCore) -> StoredSession {
        let extra = self.extra.as_ref();
        let leaving = extra.and_then(|extra| extra.leaving.as_ref()).map(|leaving| leaving.will());
        let will = leaving.or_else(|| self.will());
        let quota_use = extra.and_then(|extra| extra.quota_use.as_deref());
        let holder = |kind| quota_use.and_then(|quota_use| quota_use.holder(kind));
        let username = extra.and_then(|extra| extra.username.clone());
        StoredSession {
            queue: core.queue,
            client_id: core.client_id.clone(),
            expiry: self.expiry,
            since: (!self.online).then_some(self.since),
            protocol: self.protocol,
            listener: Arc::clone(&self.listener),
            proved: holder(QuotaHolderKind::User).is_some(),
            tenant: holder(QuotaHolderKind::Tenant)
                .filter(|name| *name != self.listener.as_str())
                .map(Box::from),
            username,
            will: will.map(|will| StoredWill {
                message: Arc::clone(&will.message),
                expiry: will.expiry,
                delay: will.delay,
                author: will.author.clone(),
            }),
        }
    }

    /// The connection that owns the session, or owned it last.
    pub(crate) fn info(&self) -> ConnectionInfo {
        ConnectionInfo {
            peer: self.peer,
            listener: Arc::clone(&self.listener),
            protocol: self.protocol,
            keep_alive: self.keep_alive,
            username: self.extra.as_ref().and_then(|extra| extra.username.clone()),
            identity: self.extra.as_ref().and_then(|extra| extra.identity.clone()),
        }
    }

    /// Gives the session to a new connection. A will that the earlier one left is forgotten, and its quota_use given
    /// back.
    pub(crate) fn reconnect(&mut self, request: OpenRequest, quota_use: Option<Box<SessionQuotaUse>>) {
        let leaving = self.extra.as_mut().and_then(|extra| extra.leaving.take());
        let ConnectionInfo { peer, listener, protocol, keep_alive, username, identity } = request.info;
        self.epoch = self.epoch.wrapping_add(1);
        self.online = true;
        self.since = request.now;
        self.expiry = request.expiry;
        (self.peer, self.listener) = (peer, listener);
        (self.protocol, self.keep_alive) = (protocol, keep_alive);
        self.extra = Extra::boxed(request.will, username, identity, quota_use);
        if leaving.is_some() {
            self.extra.get_or_insert_default().leaving = leaving;
        }
    }

    /// Returns the session's share in its quota holders' quotas.
    pub(crate) fn quota_use(&mut self) -> Option<&mut SessionQuotaUse> {
        self.extra.as_mut()?.quota_use.as_deref_mut()
    }

    /// The session is over: gives back what it has of its quota holders' quotas.
    pub(crate) fn leave_quota_holders(&mut self) {
        if let Some(quota_use) = self.quota_use() {
            quota_use.end();
        }
    }

    /// Returns the quota holders whose quotas the session uses, or has used.
    pub(crate) fn quota_holders(&self) -> QuotaHolders {
        let quota_use = self.extra.as_ref().and_then(|extra| extra.quota_use.as_ref());
        quota_use.map(|quota_use| quota_use.quota_holders().clone()).unwrap_or_default()
    }

    /// Bytes of the session on the memory account, as [`cost`].
    pub(crate) fn cost(&self, client_id: &ClientId) -> usize {
        cost(client_id, self.extra.as_ref().and_then(|extra| extra.username.as_deref()))
    }

    /// The will, if there is one that is not being published.
    pub(crate) fn will(&self) -> Option<&Will> {
        self.extra.as_ref()?.will.as_ref()
    }

    /// Replaces the identity of the connection, and who leaves its will by what `author` makes of who that was.
    pub(crate) fn reauthenticate(
        &mut self,
        identity: Option<Arc<dyn Any + Send + Sync>>,
        author: impl FnOnce(&str) -> String,
    ) {
        let Some(extra) = &mut self.extra else {
            self.extra = Extra::boxed(None, None, identity, None);
            return;
        };
        extra.identity = identity;
        let Some(will) = &mut extra.will else { return };
        let Some(before) = &will.author else { return };
        let author = author(before);
        if let Some(charge) = will.charge.as_mut().and_then(Arc::get_mut) {
            // A will in force may not fail: if memory is short it counts as much as before.
            charge.set(will.message.cost() + author.len());
        }
        will.author = Some(Arc::new(author));
    }

    /// Takes the will out without publishing it.
    pub(crate) fn forget_will(&mut self) {
        if let Some(extra) = &mut self.extra {
            extra.will = None;
        }
    }

    /// Takes the will out to be published. If the session is kept on disk, its record keeps the will until
    /// [`Self::will_is_safe`] is called for it.
    pub(crate) fn give_will(&mut self, queue: QueueId) -> Option<Will> {
        let extra = self.extra.as_mut()?;
        let will = extra.will.take()?;
        if queue != QueueId::NONE {
            match &mut extra.leaving {
                Some(leaving) => leaving.hold(),
                None => extra.leaving = Some(Box::new(Leaving::new(will.clone()))),
            }
        }
        Some(will)
    }

    /// The wills that are being published, if there are any.
    pub(crate) fn leaving(&mut self) -> Option<&mut Leaving> {
        self.extra.as_mut()?.leaving.as_deref_mut()
    }

    /// One will fewer is being published. After the last one the session's record may change: returns who waits for
    /// that.
    pub(crate) fn will_is_safe(&mut self) -> Option<Option<Arc<Commit>>> {
        let extra = self.extra.as_mut()?;
        let last = extra.leaving.take_if(|leaving| leaving.release())?;
        Some(last.into_waiting())
    }

    /// Returns the time at which the will is due, if the session waits with one: after its delay or when the session expires,
    /// whichever is first [MQTT-3.1.3-9].
    pub(crate) fn will_at(&self) -> Option<Timestamp> {
        let will = self.will()?;
        if self.online || self.ended {
            return None;
        }
        Some(self.since.plus_secs(will.delay.min(self.expiry)))
    }

    /// Returns the time at which the session expires, if it is going to [MQTT-3.1.2-23].
    pub(crate) fn expires_at(&self) -> Option<Timestamp> {
        if self.online || self.ended || self.expiry == u32::MAX {
            return None;
        }
        Some(self.since.plus_secs(self.expiry))
    }

    /// Returns the time of the next thing to do, if no connection comes.
    pub(crate) fn deadline(&self) -> Option<Timestamp> {
        match (self.will_at(), self.expires_at()) {
            (Some(will), Some(expiry)) => Some(will.min(expiry)),
            (will, expiry) => will.or(expiry),
        }
    }
}

/// A session's subscriptions as the index numbers them, and their bytes on the memory account; filter texts are only in
/// the index.
#[derive(Debug, Default)]
pub(crate) enum References {
    #[default]
    None,
    One(u32, u32),
    Two([u32; 2], u32),
    /// Boxed, so that the usual one or two cost 16 bytes.
    Many(Box<ManySubscriptions>),
}

/// The subscriptions of a session that has several.
#[derive(Debug)]
pub(crate) struct ManySubscriptions {
    references: Vec<u32>,
    /// Shapes of its wildcard filters and how many filters have each; the first two filters are not counted.
    shapes: Vec<(u64, u32)>,
    bytes: u32,
}

impl References {
    pub(crate) fn as_slice(&self) -> &[u32] {
        match self {
            Self::None => &[],
            Self::One(reference, _) => std::slice::from_ref(reference),
            Self::Two(references, _) => references,
            Self::Many(many) => &many.references,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Their bytes on the memory account.
    pub(crate) fn bytes(&self) -> u32 {
        match self {
            Self::None => 0,
            Self::One(_, bytes) | Self::Two(_, bytes) => *bytes,
            Self::Many(many) => many.bytes,
        }
    }

    /// Returns whether a filter of this shape may be added, if at most `most` shapes are allowed.
    pub(crate) fn may_have(&self, shape: Option<u64>, most: usize) -> bool {
        let (Self::Many(many), Some(shape)) = (self, shape) else { return true };
        many.shapes.len() < most || many.shapes.iter().any(|(other, _)| *other == shape)
    }

    /// Adds a subscription that costs `bytes`, with its filter's shape if it has wildcards.
    pub(crate) fn push(&mut self, reference: u32, shape: Option<u64>, bytes: u32) {
        let all = self.bytes() + bytes;
        *self = match self {
            Self::None => Self::One(reference, all),
            Self::One(first, _) => Self::Two([*first, reference], all),
            Self::Two([first, second], _) => {
                let mut many =
                    ManySubscriptions { references: vec![*first, *second], shapes: Vec::new(), bytes: all };
                many.push(reference, shape);
                Self::Many(Box::new(many))
            }
            Self::Many(many) => {
                many.bytes = all;
                return many.push(reference, shape);
            }
        };
    }

    /// Removes a subscription, which must be there.
    pub(crate) fn remove(&mut self, reference: u32, shape: Option<u64>, bytes: u32) {
        let all = self.bytes().saturating_sub(bytes);
        *self = match self {
            Self::One(first, _) if *first == reference => Self::None,
            Self::Two([first, second], _) if *first == reference => Self::One(*second, all),
            Self::Two([first, second], _) if *second == reference => Self::One(*first, all),
            Self::Many(many) => {
                many.remove(reference, shape);
                many.bytes = all;
                match many.references.as_slice() {
                    [first, second] => Self::Two([*first, *second], all),
                    _ => return,
                }
            }
            _ => return,
        };
    }
}

impl ManySubscriptions {
    fn push(&mut self, reference: u32, shape: Option<u64>) {
        let references = &mut self.references;
        if references.len() == references.capacity() && references.len() >= 64 {
            // Grow by a quarter instead of doubling: sessions with many subscriptions are what costs memory.
            references.reserve_exact(references.len() / 4);
        }
        references.push(reference);
        let Some(shape) = shape else { return };
        match self.shapes.iter_mut().find(|(other, _)| *other == shape) {
            Some((_, count)) => *count += 1,
            None => self.shapes.push((shape, 1)),
        }
    }

    fn remove(&mut self, reference: u32, shape: Option<u64>) {
        let Some(position) = self.references.iter().position(|other| *other == reference) else { return };
        self.references.swap_remove(position);
        let Some(position) = self.shapes.iter().position(|(other, _)| Some(*other) == shape) else { return };
        self.shapes[position].1 -= 1;
        if self.shapes[position].1 == 0 {
            self.shapes.swap_remove(position);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_keep_what_was_pushed() {
        let mut references = References::None;
        for reference in 1..=100 {
            references.push(reference, None, 10);
        }
        assert_eq!((references.len(), references.bytes()), (100, 1000));
        for reference in 3..=100 {
            references.remove(reference, None, 10);
        }
        assert!(matches!(references, References::Two(_, 20)));
        references.remove(2, None, 10);
        assert_eq!(references.bytes(), 10);
        assert_eq!(references.as_slice(), [1]);
        references.remove(1, None, 10);
        assert_eq!((references.len(), references.bytes()), (0, 0));
    }

    #[test]
    fn a_session_core_is_small() {
        assert!(size_of::<References>() <= 16);
        assert!(size_of::<SessionCore>() <= 112, "{}", size_of::<SessionCore>());
    }
}
