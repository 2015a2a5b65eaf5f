//! Tests of the broker with a session that only records what it gets.

mod cleanup;
mod disk;
mod group_queue;
mod log;
mod non_broker;
mod publishing;
mod quota_holders;
mod reserved;
mod retained;
mod sessions;
mod shared;
mod wills;

use std::{
    any::Any,
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
};

use gateway_core::{
    ClientId, Commit, DropReason, Message, Offer, Origin, OriginKind, Outcome, Protocol, QoS, SharedMessage,
    Timestamp, Yielded, limits::Limits,
};
use parking_lot::Mutex;
use store::Recorder;

use super::*;

/// Message that a test receiver got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Got {
    pub(super) topic: String,
    pub(super) payload: String,
    pub(super) qos: QoS,
    pub(super) retain: bool,
    pub(super) ids: Vec<u32>,
    pub(super) group: u32,
}

#[derive(Default)]
struct Receiver {
    offline: AtomicBool,
    durable: AtomicBool,
    nudges: AtomicUsize,
    /// More was at hand for it when it asked.
    told: AtomicBool,
    /// Takes this many more messages, then its queue is full.
    room: Mutex<Option<usize>>,
    load: AtomicUsize,
    /// Its client may have nothing.
    denied: AtomicBool,
    got: Mutex<Vec<Got>>,
    /// Disk for the deliveries of a persistent session, and the place of the next one.
    disk: Mutex<Option<(disk::Disk, u64)>>,
    /// Shared messages not yet sent.
    held: Mutex<Vec<(u32, Arc<SharedMessage>)>>,
    /// Parts of commits of what it got, if it keeps that on a disk.
    parts: Mutex<Option<Vec<Arc<Commit>>>>,
    closes: Mutex<Vec<(u32, CloseReason)>>,
    ended: AtomicBool,
    flushes: AtomicUsize,
    /// Runs once, when somebody next asks whether it is connected.
    when_asked: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Receiver {
    fn take(&self, message: &Message<'_>, offer: Offer<'_>) -> Delivered {
        let dropped = |reason| Delivered { outcome: Outcome::Dropped(reason), flush: false };
        if self.ended.load(SeqCst) {
            return dropped(DropReason::SessionEnded);
        }
        if self.denied.load(SeqCst) {
            return dropped(DropReason::NotAuthorized);
        }
        let offline = self.offline.load(SeqCst);
        if offline && !offer.queue_offline {
            return dropped(DropReason::Offline);
        }
        if let Some(room) = &mut *self.room.lock() {
            if *room == 0 {
                return dropped(DropReason::QueueFull);
            }
            *room -= 1;
        }
        self.got.lock().push(Got {
            topic: message.topic.to_owned(),
            payload: String::from_utf8_lossy(message.payload).into_owned(),
            qos: message.qos.min(offer.qos),
            retain: offer.retain,
            ids: offer.ids.to_vec(),
            group: offer.group,
        });
        if let Some(parts) = &mut *self.parts.lock()
            && let Some(commit) = message.commit()
        {
            commit.add();
            parts.push(Arc::clone(commit));
        }
        let outcome = if offline { Outcome::Queued } else { Outcome::Sent };
        Delivered { outcome, flush: !offline }
    }
}

/// A session that records.
pub(super) struct TestSession {
    core: SessionCore,
    receiver: Receiver,
}

impl Target for TestSession {
    fn deliver(&self, message: &Message<'_>, offer: Offer<'_>) -> Delivered {
        let delivered = self.receiver.take(message, offer);
        let qos = message.qos.min(offer.qos);
        if let Some((disk, place)) = &mut *self.receiver.disk.lock()
            && qos > QoS::AtMostOnce
            && !matches!(delivered.outcome, Outcome::Dropped(_))
        {
            disk.append(self.core.queue(), *place, message, qos);
            *place += 1;
        }
        delivered
    }
    fn flush(self: Arc<Self>) {
        self.receiver.flushes.fetch_add(1, SeqCst);
    }
    fn is_online(&self) -> bool {
        let happens = self.receiver.when_asked.lock().take();
        if let Some(happens) = happens {
            happens();
        }
        !self.receiver.offline.load(SeqCst)
    }
    fn into_session(self: Arc<Self>) -> Option<Arc<dyn Session>> {
        Some(self)
    }
    fn is_durable(&self) -> bool {
        self.receiver.durable.load(SeqCst)
    }
    fn nudge(&self) {
        self.receiver.nudges.fetch_add(1, SeqCst);
    }
    fn load(&self) -> usize {
        self.receiver.load.load(SeqCst)
    }
}

impl Session for TestSession {
    fn core(&self) -> &SessionCore {
        &self.core
    }
    fn close(&self, epoch: u32, reason: CloseReason) -> bool {
        self.receiver.closes.lock().push((epoch, reason));
        true
    }
    fn end(&self) -> Vec<Yielded> {
        self.receiver.ended.store(true, SeqCst);
        self.receiver.offline.store(true, SeqCst);
        self.yield_shared()
    }
    fn yield_shared(&self) -> Vec<Yielded> {
        let held = std::mem::take(&mut *self.receiver.held.lock());
        held.into_iter().map(|(group, message)| Yielded { group, message, place: None }).collect()
    }
    fn restore(&self, _stored: &QueueSummary) {}
    fn may_have_sent(&self, _place: u64, _qos: QoS) -> bool {
        false
    }
    fn note_expired(&self, _messages: usize, _bytes: u64) {}
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
    fn queue(&self) -> QueueInfo {
        QueueInfo::default()
    }
}

/// A stream that records.
#[derive(Default)]
pub(super) struct TestStream {
    receiver: Receiver,
}

impl Target for TestStream {
    fn deliver(&self, message: &Message<'_>, offer: Offer<'_>) -> Delivered {
        self.receiver.take(message, offer)
    }
    fn flush(self: Arc<Self>) {}
    fn is_online(&self) -> bool {
        true
    }
    fn load(&self) -> usize {
        0
    }
}

/// A broker with virtual time.
pub(super) struct Bench {
    pub(super) broker: Broker,
    pub(super) turn: Turn,
    pub(super) now: Timestamp,
}

/// A connected test device.
#[derive(Clone)]
pub(super) struct Device {
    session: Arc<dyn Session>,
    test: Arc<TestSession>,
    epoch: u32,
    present: bool,
}

/// Options of a connection.
#[derive(Default)]
pub(super) struct Connect {
    pub(super) clean: bool,
    pub(super) expiry: u32,
    pub(super) will: Option<Will>,
    pub(super) quota_holders: QuotaHolders,
}

/// Runs a future that never waits.
pub(super) fn ready<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("the future waits"),
    }
}

pub(super) fn info() -> ConnectionInfo {
    ConnectionInfo {
        peer: std::net::SocketAddr::from(([127, 0, 0, 1], 1)).into(),
        listener: Arc::new("test".to_owned()),
        protocol: Protocol::V5,
        keep_alive: 60,
        username: None,
        identity: None,
    }
}

pub(super) fn request(filter: &str) -> SubscribeRequest<'_> {
    SubscribeRequest {
        filter,
        qos: QoS::ExactlyOnce,
        no_local: false,
        retain_as_published: false,
        retain_handling: 0,
        id: None,
        commit: None,
    }
}

impl Bench {
    pub(super) fn new(limits: Limits) -> Self {
        Self::with_mode(limits, false)
    }

    pub(super) fn with_mode(limits: Limits, non_broker: bool) -> Self {
        Self::with_stores(limits, non_broker, None)
    }

    fn with_stores(limits: Limits, non_broker: bool, stores: Option<Stores>) -> Self {
        Self::with_parts(limits, non_broker, stores, None, Vec::new())
    }

    fn with_log(
        limits: Limits,
        non_broker: bool,
        stores: Option<Stores>,
        log: Option<Arc<dyn store::PartitionedLog>>,
    ) -> Self {
        Self::with_parts(limits, non_broker, stores, log, Vec::new())
    }

    fn with_parts(
        limits: Limits,
        non_broker: bool,
        stores: Option<Stores>,
        log: Option<Arc<dyn store::PartitionedLog>>,
        reserved: Vec<Arc<dyn Reserved>>,
    ) -> Self {
        let broker = Broker::new(BrokerConfig {
            limits: Arc::new(limits),
            non_broker,
            namespace: "devices/{client_id}/#".to_owned(),
            stores,
            log: log.map(|log| GroupLog { log, memory: 1 << 20 }),
            reserved,
            ..BrokerConfig::default()
        });
        Self { broker, turn: Turn::default(), now: Timestamp(1_000_000) }
    }

    pub(super) fn connect(&mut self, id: &str, connect: Connect) -> Device {
        self.open(id, connect).0
    }

    /// As [`Self::connect`]; also returns the commit that the answer waits for.
    pub(super) fn open(&mut self, id: &str, connect: Connect) -> (Device, Option<Arc<Commit>>) {
        let (device, commit) = self.try_open(id, connect).expect("within quotas");
        device.test.receiver.offline.store(false, SeqCst);
        self.broker.online(&device.session, self.now, &mut self.turn);
        (device, commit)
    }

    /// As [`Self::open`], up to the answer.
    pub(super) fn try_open(
        &mut self,
        id: &str,
        connect: Connect,
    ) -> Result<(Device, Option<Arc<Commit>>), QuotaExceeded> {
        let request = OpenRequest {
            client_id: ClientId::new(id),
            clean_start: connect.clean,
            expiry: connect.expiry,
            will: connect.will,
            info: info(),
            quota_holders: connect.quota_holders,
            now: self.now,
        };
        let make =
            |core| -> Arc<dyn Session> { Arc::new(TestSession { core, receiver: Receiver::default() }) };
        let OpenedSession { session, present, epoch, commit, .. } =
            ready(self.broker.open(request, make, &mut self.turn))?;
        let test = Arc::clone(&session).into_any().downcast::<TestSession>().unwrap();
        Ok((Device { session, test, epoch, present }, commit))
    }

    /// A persistent session.
    pub(super) fn device(&mut self, id: &str) -> Device {
        self.connect(id, Connect { expiry: 3600, ..Connect::default() })
    }

    pub(super) fn subscribe(&mut self, device: &Device, filter: &str) -> Subscribed {
        self.try_subscribe(device, &request(filter)).unwrap()
    }

    pub(super) fn try_subscribe(
        &mut self,
        device: &Device,
        request: &SubscribeRequest<'_>,
    ) -> Result<Subscribed, SubscribeError> {
        self.broker.subscribe(&device.session, request, self.now)
    }

    pub(super) fn unsubscribe(&mut self, device: &Device, filter: &str) -> bool {
        self.broker.unsubscribe(&device.session, filter, self.now, None)
    }

    pub(super) fn close(&mut self, device: &Device) {
        self.close_with(device, Closed { publish_will: true, expiry: None, reason: "test" });
    }

    pub(super) fn close_with(&mut self, device: &Device, closed: Closed) {
        device.test.receiver.offline.store(true, SeqCst);
        self.broker.closed(&device.session, device.epoch, closed, self.now, &mut self.turn);
    }

    /// Publishes as a backend.
    pub(super) fn publish(&mut self, topic: &str, payload: &str, qos: QoS) -> Published {
        self.publish_with(topic, payload, |message| message.qos = qos)
    }

    pub(super) fn publish_with(
        &mut self,
        topic: &str,
        payload: &str,
        change: impl FnOnce(&mut Message<'_>),
    ) -> Published {
        let mut message = Message::new(topic, payload.as_bytes(), self.now, Origin::BACKEND);
        change(&mut message);
        self.broker.publish(&message, &mut self.turn)
    }

    /// Publishes as a device.
    pub(super) fn publish_from(
        &mut self,
        from: &Device,
        topic: &str,
        payload: &str,
        retain: bool,
    ) -> Published {
        let client_id = from.session.core().client_id().clone();
        let slot = from.session.core().slot();
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot };
        let mut message = Message::new(topic, payload.as_bytes(), self.now, origin);
        message.qos = QoS::AtLeastOnce;
        message.retain = retain;
        self.broker.publish(&message, &mut self.turn)
    }

    /// Lets seconds pass and ticks.
    pub(super) fn pass(&mut self, seconds: u32) {
        self.now = self.now.plus_secs(seconds);
        self.broker.tick(self.now, &mut self.turn);
        disk::go_on();
    }
}

impl Device {
    /// Takes what it got.
    pub(super) fn got(&self) -> Vec<Got> {
        std::mem::take(&mut *self.test.receiver.got.lock())
    }

    /// Takes the payloads of what it got.
    pub(super) fn payloads(&self) -> Vec<String> {
        self.got().into_iter().map(|got| got.payload).collect()
    }

    pub(super) fn set_offline(&self, offline: bool) {
        self.test.receiver.offline.store(offline, SeqCst);
    }

    pub(super) fn set_denied(&self, denied: bool) {
        self.test.receiver.denied.store(denied, SeqCst);
    }

    pub(super) fn set_durable(&self) {
        self.test.receiver.durable.store(true, SeqCst);
    }

    /// Returns the number of nudges so far.
    pub(super) fn nudges(&self) -> usize {
        self.test.receiver.nudges.load(SeqCst)
    }

    fn is_told(&self) -> bool {
        self.test.receiver.told.load(SeqCst)
    }

    fn set_told(&self, told: bool) {
        self.test.receiver.told.store(told, SeqCst);
    }

    /// Messages that it has got and the test has not taken.
    fn taken(&self) -> usize {
        self.test.receiver.got.lock().len()
    }

    pub(super) fn set_room(&self, room: Option<usize>) {
        *self.test.receiver.room.lock() = room;
    }

    /// Sets what runs when somebody next asks whether it is connected.
    fn when_asked(&self, happens: impl FnOnce() + Send + 'static) {
        *self.test.receiver.when_asked.lock() = Some(Box::new(happens));
    }

    pub(super) fn set_load(&self, load: usize) {
        self.test.receiver.load.store(load, SeqCst);
    }

    /// Has what it takes go to disk, as a persistent session does.
    fn use_disk(&self, disk: &disk::Disk) {
        *self.test.receiver.disk.lock() = Some((disk.clone(), 0));
        self.set_durable();
    }

    pub(super) fn hold(&self, group: u32, message: Arc<SharedMessage>) {
        self.test.receiver.held.lock().push((group, message));
    }

    pub(super) fn closes(&self) -> Vec<CloseReason> {
        self.test.receiver.closes.lock().iter().map(|(_, reason)| *reason).collect()
    }

    pub(super) fn is_ended(&self) -> bool {
        self.test.receiver.ended.load(SeqCst)
    }
}

impl TestStream {
    pub(super) fn payloads(&self) -> Vec<String> {
        std::mem::take(&mut *self.receiver.got.lock()).into_iter().map(|got| got.payload).collect()
    }
}

pub(super) fn will(topic: &str, payload: &str, delay: u32) -> Will {
    let message = Message::new(topic, payload.as_bytes(), Timestamp(0), Origin::SERVER);
    Will { message: Arc::clone(message.share()), expiry: None, delay, charge: None, author: None }
}
