//! Homes in this process, each a whole gateway without listeners, behind one front.

use std::{
    any::Any,
    pin::Pin,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use ::commands::{
    CommandRegistry, CommandRegistryOptions, CommandService, CommandTopics, CommandsOptions, ReplyDispatcher,
};
use auth::{abuse::BanRegistry, backends::BackendAuthenticator};
use broker::{
    Account, Broker, BrokerConfig, ConnectionInfo, Delivered, OpenRequest, QueueInfo, QueueSummary,
    QuotaHolders, Session, SessionCore, SubscribeRequest, Target, Turn,
};
use bytes::Bytes;
use device_shadows::{ShadowOptions, ShadowService};
use edge::{reload::Reloads, tls::TlsStore};
use gateway_core::{
    ClientId, Levels, Message, Offer, Origin, OriginKind, Outcome, Protocol, QoS, Yielded, clock::now,
};
use hyper::body::{Body as HttpBody, Frame};
use parking_lot::Mutex;
use shadow::{DocumentLimits, ShadowTopics};
use store::{MemoryLatest, MemoryRecords, RecordShadows};
use tokio::sync::watch;
use values::{LatestCache, LatestOptions};

use super::super::*;
use grpc::{GrpcApi, GrpcConfig, Hooks, LatestValues, Operated, PublisherMemory, StoresAnswer, TopicSpread};

/// A home.
pub(super) struct TestHome {
    pub(super) broker: Broker,
    pub(super) service: LocalService,
    is_away: watch::Sender<bool>,
}

/// Homes of texts are told by their last digit.
pub(super) struct TestHomes {
    pub(super) homes: Vec<TestHome>,
    /// Answers whose body is still there.
    pub(super) open: Arc<AtomicUsize>,
    /// Calls that are not answered yet.
    pub(super) running: Arc<AtomicUsize>,
    /// Calls by home.
    pub(super) calls: Vec<AtomicUsize>,
    _stop: watch::Sender<bool>,
}

/// The homes, for those that are made before them.
struct LateHomes {
    count: u16,
    homes: OnceLock<Weak<TestHomes>>,
}

impl HomeWays for LateHomes {
    fn count(&self) -> u16 {
        self.count
    }

    fn of(&self, text: &str) -> u16 {
        self.homes.get().and_then(Weak::upgrade).map_or(0, |homes| homes.of(text))
    }

    fn call(
        &self,
        home: u16,
        caller: &PassedCaller,
        request: Request<LinkBody>,
    ) -> BoxFuture<Response<LinkBody>, NotServed> {
        match self.homes.get().and_then(Weak::upgrade) {
            Some(homes) => homes.call(home, caller, request),
            None => Box::pin(std::future::ready(Err(NotServed))),
        }
    }
}

/// A front and its homes.
pub(super) struct Bench {
    pub(super) homes: Arc<TestHomes>,
    pub(super) front: LocalService,
}

impl HomeWays for TestHomes {
    fn count(&self) -> u16 {
        u16::try_from(self.homes.len()).unwrap()
    }

    fn of(&self, text: &str) -> u16 {
        text.bytes().last().map_or(0, |last| u16::from(last - b'0') % self.count())
    }

    fn call(
        &self,
        home: u16,
        caller: &PassedCaller,
        request: Request<LinkBody>,
    ) -> BoxFuture<Response<LinkBody>, NotServed> {
        let TestHome { service, is_away, .. } = &self.homes[usize::from(home)];
        self.calls[usize::from(home)].fetch_add(1, SeqCst);
        if *is_away.borrow() {
            return Box::pin(std::future::ready(Err(NotServed)));
        }
        let mut is_away = is_away.subscribe();
        let answer = service.passed(caller, request).unwrap();
        let open = Arc::clone(&self.open);
        let running = RunningCall::new(&self.running);
        Box::pin(async move {
            let _running = running;
            let answer = answer.await.unwrap();
            open.fetch_add(1, SeqCst);
            let ends = Box::pin(async move { drop(is_away.wait_for(|away| *away).await) });
            Ok(answer.map(|body| LinkBody::new(BreakingBody { body, ends, open })))
        })
    }
}

/// Counts a call until it is answered or dropped.
struct RunningCall(Arc<AtomicUsize>);

impl RunningCall {
    fn new(running: &Arc<AtomicUsize>) -> Self {
        running.fetch_add(1, SeqCst);
        Self(Arc::clone(running))
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// A body that breaks off when its home goes away.
struct BreakingBody {
    body: LinkBody,
    ends: Pin<Box<dyn Future<Output = ()> + Send>>,
    open: Arc<AtomicUsize>,
}

impl HttpBody for BreakingBody {
    type Data = Bytes;
    type Error = links::BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.ends.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Some(Err("the link is gone".into()))),
            Poll::Pending => Pin::new(&mut self.body).poll_frame(cx),
        }
    }
}

impl Drop for BreakingBody {
    fn drop(&mut self) {
        self.open.fetch_sub(1, SeqCst);
    }
}

impl TestHomes {
    /// Has nobody serve a home, or somebody.
    pub(super) fn set_away(&self, home: usize, is_away: bool) {
        self.homes[home].is_away.send_replace(is_away);
    }

    fn home_of(&self, device: &str) -> &TestHome {
        &self.homes[usize::from(self.of(device))]
    }

    /// Publishes as a device, at its home.
    pub(super) fn say(&self, device: &str, topic: &str, payload: &str) {
        let client_id = ClientId::new(device);
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot: 1 };
        let mut turn = Turn::default();
        self.home_of(device)
            .broker
            .publish(&Message::new(topic, payload.as_bytes(), now(), origin), &mut turn);
        turn.flush();
    }

    /// Connects a device at its home, with these subscriptions.
    pub(super) async fn connect(&self, device: &str, filters: &[&str]) -> Arc<TestSession> {
        let broker = &self.home_of(device).broker;
        let request = OpenRequest {
            client_id: ClientId::new(device),
            clean_start: false,
            expiry: 3_600,
            will: None,
            info: ConnectionInfo {
                peer: std::net::SocketAddr::from(([127, 0, 0, 1], 1)).into(),
                listener: Arc::default(),
                protocol: Protocol::V5,
                keep_alive: 0,
                username: None,
                identity: None,
            },
            quota_holders: QuotaHolders::default(),
            now: now(),
        };
        let make = |core| -> Arc<dyn Session> { Arc::new(TestSession { core, got: Mutex::default() }) };
        let mut turn = Turn::default();
        let opened = broker.open(request, make, &mut turn).await.unwrap_or_else(|_| panic!("within quotas"));
        broker.online(&opened.session, now(), &mut turn);
        for filter in filters {
            let request = SubscribeRequest {
                filter,
                qos: QoS::AtLeastOnce,
                no_local: false,
                retain_as_published: false,
                retain_handling: 0,
                id: None,
                commit: None,
            };
            broker.subscribe(&opened.session, &request, now()).unwrap();
        }
        turn.flush();
        opened.session.into_any().downcast().unwrap()
    }
}

/// A connected device that takes everything.
pub(super) struct TestSession {
    core: SessionCore,
    got: Mutex<Vec<String>>,
}

impl TestSession {
    /// Number of messages that it got and were not taken.
    pub(super) fn count(&self) -> usize {
        self.got.lock().len()
    }

    /// Takes the payloads that it got.
    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.got.lock())
    }
}

impl Target for TestSession {
    fn deliver(&self, message: &Message<'_>, _: Offer<'_>) -> Delivered {
        self.got.lock().push(String::from_utf8_lossy(message.payload).into_owned());
        if let Some(receipt) = message.receipt {
            receipt.update(|state| state.sent += 1);
        }
        Delivered { outcome: Outcome::Sent, flush: false }
    }
    fn flush(self: Arc<Self>) {}
    fn is_online(&self) -> bool {
        true
    }
    fn into_session(self: Arc<Self>) -> Option<Arc<dyn Session>> {
        Some(self)
    }
    fn load(&self) -> usize {
        0
    }
}

impl Session for TestSession {
    fn core(&self) -> &SessionCore {
        &self.core
    }
    fn close(&self, _: u32, _: broker::CloseReason) -> bool {
        true
    }
    fn end(&self) -> Vec<Yielded> {
        Vec::new()
    }
    fn yield_shared(&self) -> Vec<Yielded> {
        Vec::new()
    }
    fn restore(&self, _: &QueueSummary) {}
    fn may_have_sent(&self, _: u64, _: QoS) -> bool {
        false
    }
    fn note_expired(&self, _: usize, _: u64) {}
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
    fn queue(&self) -> QueueInfo {
        QueueInfo { pending: self.got.lock().len(), ..QueueInfo::default() }
    }
}

/// A front with so many homes.
pub(super) async fn bench(count: usize) -> Bench {
    let (homes, front) = bench_with(count, GrpcConfig::default()).await;
    Bench { homes, front: front.local() }
}

/// The same, with these bounds at the front and at each home.
pub(super) async fn bench_with(count: usize, config: GrpcConfig) -> (Arc<TestHomes>, GrpcApi) {
    let (stop, shutdown) = watch::channel(false);
    let known = Arc::new(LateHomes { count: u16::try_from(count).unwrap(), homes: OnceLock::new() });
    let account = Arc::new(Account::new(256 << 20));
    let mut homes = Vec::new();
    for number in 0..count {
        let place = u16::try_from(number).unwrap();
        let spread = topic_spread(Arc::clone(&known) as _, place, Arc::clone(&account));
        homes.push(home(format!("problem of {number}"), Some(spread), config, &shutdown).await);
    }
    let here = home(String::new(), None, config, &shutdown).await.service;
    let calls = homes.iter().map(|_| AtomicUsize::new(0)).collect();
    let homes =
        Arc::new(TestHomes { homes, open: Arc::default(), running: Arc::default(), calls, _stop: stop });
    assert!(known.homes.set(Arc::downgrade(&homes)).is_ok());
    let api = GrpcApi::standing_by(
        config,
        Arc::clone(&account),
        Arc::new(BackendAuthenticator::open(&Default::default()).unwrap()),
        Duration::from_secs(30),
        over_homes(Arc::clone(&homes) as _, Some(here), account),
        shutdown,
    );
    (homes, api)
}

async fn home(
    problems: String,
    spread: Option<TopicSpread>,
    config: GrpcConfig,
    shutdown: &watch::Receiver<bool>,
) -> TestHome {
    let latest = LatestCache::new(Arc::new(MemoryLatest::new(1_000)), LatestOptions::default());
    let dispatcher = ReplyDispatcher::new(CommandsOptions {
        topics: CommandTopics::new(
            "cmd/".to_owned(),
            Levels::parse("{id}/{name}", &["id", "name"]).unwrap(),
            Levels::parse("{id}/reply/{status}", &["id", "status"]).unwrap(),
        ),
        max_outstanding: 10,
        max_outstanding_per_device: 10,
    });
    let broker = Broker::new(BrokerConfig {
        latest: Some(Arc::clone(&latest) as _),
        tenants: ["a", "b", "c"].map(|name| (name.to_owned(), Default::default())).into(),
        ..BrokerConfig::default()
    });
    let options = CommandRegistryOptions {
        max_outstanding: 100,
        max_outstanding_per_device: 100,
        max_active: 100,
        max_active_per_device: 100,
        max_bytes: 1 << 20,
        keep: Duration::from_secs(60),
        max_kept: 100,
    };
    let records = || Arc::new(MemoryRecords::new());
    let registry = CommandRegistry::open(options, records(), broker.account()).unwrap();
    let shadows = ShadowOptions {
        topics: ShadowTopics::new("$gateway/devices").unwrap(),
        limits: DocumentLimits { bytes: 8 << 10, depth: 8 },
        max_names: 5,
        max_requests: 10,
        max_wait: Duration::from_secs(10),
    };
    let operated = Operated {
        version: "1",
        started: now(),
        metrics: Box::new(Vec::new),
        problems: Box::new(move || problems.clone()),
        bridges: Default::default(),
        tls: Arc::new(TlsStore::new()),
        config: Arc::default(),
    };
    let there: Arc<dyn Fn() -> bool + Send + Sync> = Arc::new(|| true);
    let hooks = Hooks {
        traces: telemetry::trace_clients(),
        latest: Some(latest as Arc<dyn LatestValues>),
        history: None,
        backends: Arc::new(BackendAuthenticator::open(&Default::default()).unwrap()),
        reloads: Reloads::new(),
        authority: None,
        bans: Arc::new(BanRegistry::open(&Default::default(), None).unwrap()),
        publisher: PublisherMemory::open_home(&config, Some(records()), &broker, spread, shutdown)
            .await
            .unwrap(),
        groups: Err("groups.enabled"),
        commands: Ok(CommandService::new(broker.clone(), dispatcher, registry)),
        shadows: Ok(ShadowService::new(Arc::new(RecordShadows::new(records())), shadows)),
        stores: StoresAnswer { groups: Arc::clone(&there), shadows: there },
        operated: Arc::new(operated),
    };
    let api = GrpcApi::open(broker.clone(), config, hooks, shutdown.clone()).unwrap();
    TestHome { broker, service: api.without_listener(), is_away: watch::channel(false).0 }
}
