//! Queues, stores that are away, and watchers that do not read: what a device cannot do to others.

use std::sync::Arc;

use broker::{BrokerConfig, Reserved, ReservedOutcome, Shortage};
use gateway_core::{Commit, limits::Limits as BrokerLimits, units::ByteSize};
use store::{MemoryRecords, RecordShadows};
use tokio::time::timeout;

use super::*;

const LONG: Duration = Duration::from_secs(60);

struct Bench {
    broker: Broker,
    store: Arc<MemoryRecords>,
    shadows: Arc<ShadowService>,
    part: DeviceShadows,
}

impl Bench {
    fn new() -> Self {
        Self::with(BrokerLimits::default())
    }

    fn with(limits: BrokerLimits) -> Self {
        Self::waiting(limits, LONG)
    }

    fn waiting(limits: BrokerLimits, max_wait: Duration) -> Self {
        let options = ShadowOptions {
            topics: ShadowTopics::new("$gateway/devices").unwrap(),
            limits: DocumentLimits { bytes: 8 << 10, depth: 8 },
            max_names: 5,
            max_requests: 10,
            max_wait,
        };
        let store = Arc::new(MemoryRecords::remote());
        let shadows = ShadowService::new(shadows_in(&store), options);
        let broker = Broker::new(BrokerConfig { limits: Arc::new(limits), ..BrokerConfig::default() });
        Self { broker, store, part: DeviceShadows(Arc::clone(&shadows)), shadows }
    }

    /// A device publishes at QoS 1; what its acknowledgement waits for.
    fn request(&self, device: &str, rest: &str, payload: &str) -> (ReservedOutcome, Option<Arc<Commit>>) {
        let device = ClientId::new(device);
        let origin = Origin { kind: gateway_core::OriginKind::Device, client_id: Some(&device), slot: 0 };
        let mut message = Message::new("", payload.as_bytes(), clock::now(), origin);
        message.qos = QoS::AtLeastOnce;
        let mut turn = Turn::default();
        let taken = self.part.take(&message, rest, &self.broker, &mut turn);
        turn.flush();
        let commit = message.issued().cloned();
        if let Some(commit) = &commit {
            // The sender's own part.
            commit.done();
        }
        (taken, commit)
    }

    fn report(&self, device: &str, number: usize) -> (ReservedOutcome, Option<Arc<Commit>>) {
        let payload = format!("{{\"state\":{{\"reported\":{{\"n\":{number}}}}}}}");
        self.request(device, "shadow/update", &payload)
    }

    async fn version(&self, device: &str) -> u64 {
        let found = shadows_in(&self.store).get(device, "").await.unwrap();
        found.map_or(0, |record| record.version)
    }

    fn held(&self) -> usize {
        self.broker.account().held(broker::MemoryKind::Shadows)
    }

    /// Returns the budget that watchers share with all other memory for shadows.
    fn budget(&self) -> Arc<OfShadows> {
        Arc::new(OfShadows(Arc::clone(self.broker.account())))
    }
}

fn shadows_in(records: &Arc<MemoryRecords>) -> Arc<dyn ShadowStore> {
    Arc::new(RecordShadows::new(Arc::clone(records) as _))
}

struct OfShadows(Arc<broker::Account>);

impl Budget for OfShadows {
    fn charge(&self, held: usize, bytes: usize) -> bool {
        self.0.charge(broker::MemoryKind::Shadows, held, bytes)
    }

    fn force(&self, bytes: usize) {
        self.0.force(broker::MemoryKind::Shadows, bytes);
    }

    fn release(&self, bytes: usize) {
        self.0.release(broker::MemoryKind::Shadows, bytes);
    }
}

fn key(device: &str) -> ShadowKey {
    ShadowKey { device: ClientId::new(device), name: Arc::from("") }
}

fn desire(value: &str) -> Update {
    let limits = DocumentLimits { bytes: 8 << 10, depth: 8 };
    Update { desired: Update::patch(value, &limits).unwrap(), ..Update::default() }
}

#[tokio::test]
async fn requests_of_a_device_are_carried_out_in_their_order() {
    let bench = Bench::new();
    bench.store.hold(true);
    let commits: Vec<_> = (0..10).map(|number| bench.report("d", number).1.unwrap()).collect();
    tokio::task::yield_now().await;
    assert!(commits.iter().all(|commit| commit.result().is_none()), "nothing is durable yet");
    bench.store.hold(false);
    bench.shadows.settle().await;
    assert!(commits.iter().all(|commit| commit.result() == Some(Ok(()))));
    let shadow = bench.shadows.get(&key("d")).await.unwrap();
    assert_eq!((shadow.version, shadow.state.unwrap().reported()), (10, "{\"n\":9}".to_owned()));
    assert_eq!(bench.held(), 0);
}

#[tokio::test]
async fn a_device_that_floods_is_rejected_and_holds_up_nobody_else() {
    let bench = Bench::new();
    bench.store.hold(true);
    for number in 0..1_000 {
        let (taken, commit) = bench.report("flood", number);
        assert_eq!(taken, ReservedOutcome::Taken);
        let is_rejected = commit.is_none_or(|commit| commit.result().is_some());
        assert_eq!(is_rejected, number >= 10, "{number}");
    }
    assert!(bench.held() < 20 << 10, "{}", bench.held());
    bench.store.hold(false);
    bench.report("other", 1);
    let update = bench.shadows.update(&bench.broker, key("third"), desire("{}"));
    assert_eq!(timeout(LONG, update).await.unwrap().unwrap().version, 1);
    bench.shadows.settle().await;
    assert_eq!((bench.version("flood").await, bench.version("other").await), (10, 1));
    assert_eq!(bench.report("flood", 11).1.map(|commit| commit.result()), Some(None), "it may go on");
}

#[tokio::test]
async fn many_devices_that_flood_hold_no_more_than_their_share_of_memory() {
    let limits = BrokerLimits { memory_budget: ByteSize(64 << 20), ..BrokerLimits::default() };
    let bench = Bench::with(limits);
    bench.store.hold(true);
    let mut refused = 0;
    for device in 0..2_000 {
        for number in 0..10 {
            let (taken, _) = bench.report(&format!("d{device}"), number);
            refused += usize::from(taken == ReservedOutcome::Refused(Shortage::Memory));
        }
    }
    let account = bench.broker.account();
    assert!(refused > 0 && bench.held() <= account.share(broker::MemoryKind::Shadows), "{refused}");
    bench.store.hold(false);
    timeout(LONG, bench.shadows.settle()).await.unwrap();
    assert_eq!(bench.held(), 0);
}

#[tokio::test]
async fn while_the_store_is_away_requests_are_answered_and_nothing_is_changed() {
    let bench = Bench::new();
    bench.report("d", 1);
    bench.shadows.settle().await;
    bench.store.fail(true);
    let (_, commit) = bench.report("d", 2);
    bench.shadows.settle().await;
    assert_eq!(commit.unwrap().result(), Some(Ok(())), "it has its answer");
    let failed = bench.shadows.update(&bench.broker, key("d"), desire("{}")).await;
    assert_eq!(failed.err(), Some(Rejection::Unavailable));
    assert_eq!(bench.shadows.get(&key("d")).await.err(), Some(Rejection::Unavailable));
    bench.store.fail(false);
    assert_eq!(bench.version("d").await, 1);
}

/// Each would otherwise wait as long as the store may take, one after the other.
#[tokio::test]
async fn what_has_waited_too_long_is_answered_and_not_begun() {
    let bench = Bench::waiting(BrokerLimits::default(), Duration::ZERO);
    let (_, commit) = bench.report("d", 1);
    bench.shadows.settle().await;
    assert_eq!(commit.unwrap().result(), Some(Ok(())), "it has its answer");
    let late = bench.shadows.update(&bench.broker, key("d"), desire("{}")).await;
    assert_eq!(late.err(), Some(Rejection::Unavailable));
    assert_eq!(bench.version("d").await, 0);
}

/// Nobody would be told of the delta, and the device's shadow would stay behind.
#[tokio::test]
async fn a_backend_that_gives_up_has_its_update_made_all_the_same() {
    let bench = Bench::new();
    bench.store.hold(true);
    let update = bench.shadows.update(&bench.broker, key("d"), desire("{\"a\":1}"));
    assert!(timeout(Duration::from_millis(1), update).await.is_err());
    let mut watch = bench.shadows.watch(bench.budget(), |_| true);
    bench.store.hold(false);
    let changes = timeout(LONG, watch.next()).await.unwrap();
    assert!(matches!(&changes[..], [ShadowChange::Shadow(shadow)] if shadow.version == 1));
}

/// Two gateways on one database.
#[tokio::test]
async fn two_who_change_the_same_shadow_at_once_lose_nothing() {
    let bench = Bench::new();
    let other = ShadowService::new(shadows_in(&bench.store), bench.shadows.options().clone());
    for round in 0..20 {
        let (a, b) = (format!("{{\"a{round}\":1}}"), format!("{{\"b{round}\":1}}"));
        let first = bench.shadows.update(&bench.broker, key("d"), desire(&a));
        let second = other.update(&bench.broker, key("d"), desire(&b));
        let (first, second) = tokio::join!(first, second);
        assert_ne!(first.unwrap().version, second.unwrap().version);
    }
    let shadow = bench.shadows.get(&key("d")).await.unwrap();
    let desired: serde_json::Value = serde_json::from_str(&shadow.state.unwrap().desired()).unwrap();
    assert_eq!((shadow.version, desired.as_object().unwrap().len()), (40, 40));
}

#[tokio::test]
async fn a_watcher_that_does_not_read_holds_only_the_newest_of_each() {
    let bench = Bench::new();
    let mut watch = bench.shadows.watch(bench.budget(), |shadow| shadow.device.as_str() != "c");
    for round in 1..=50 {
        for device in ["b", "a", "c"] {
            let update = desire(&format!("{{\"v\":{round}}}"));
            bench.shadows.update(&bench.broker, key(device), update).await.unwrap();
        }
    }
    assert!(bench.held() < 3 << 10, "{}", bench.held());
    let changes = watch.next().await;
    let told: Vec<_> = changes
        .iter()
        .map(|change| match change {
            ShadowChange::Shadow(shadow) => (shadow.device.as_str(), shadow.version),
            ShadowChange::Missed(_) => panic!("nothing is missing"),
        })
        .collect();
    assert_eq!(told, [("b", 50), ("a", 50)]);
    bench.shadows.delete(&bench.broker, key("a"), None).await.unwrap();
    assert!(matches!(
        &watch.next().await[..],
        [ShadowChange::Shadow(ShadowDocument { state: None, version: 51, .. })]
    ));
    drop(watch);
    assert_eq!(bench.held(), 0);
}

/// The failure: all that waits for a watcher leaves the account at once, and is in memory still until its caller has read it.
#[tokio::test]
async fn what_a_watcher_takes_is_on_the_account_until_it_is_sent() {
    let bench = Bench::new();
    let mut watch = bench.shadows.watch(bench.budget(), |_| true);
    let devices = 100;
    let value = format!("{{\"a\":\"{}\"}}", "x".repeat(7_000));
    for device in 0..devices {
        bench.shadows.update(&bench.broker, key(&device.to_string()), desire(&value)).await.unwrap();
    }
    let all = bench.held();
    assert!(all > devices * 7_000, "{all}");
    let mut told = watch.next().await.len();
    assert_eq!(bench.held(), all, "it is not sent yet");
    assert!(told < devices / 2, "{told} at once");
    while told < devices {
        told += watch.next().await.len();
        let left = devices - told;
        assert!(bench.held() > left * 7_000 && bench.held() < all, "{} with {left} left", bench.held());
    }
    assert!(timeout(Duration::ZERO, watch.next()).await.is_err(), "there is no more");
    assert_eq!(bench.held(), 0);
}

#[tokio::test]
async fn a_watcher_is_told_what_it_missed_for_want_of_memory() {
    let limits = BrokerLimits { memory_budget: ByteSize(64 << 20), ..BrokerLimits::default() };
    let bench = Bench::with(limits);
    let mut watch = bench.shadows.watch(bench.budget(), |_| true);
    let share = bench.broker.account().share(broker::MemoryKind::Shadows);
    let value = format!("{{\"a\":\"{}\"}}", "x".repeat(7_000));
    let devices = share / 7_000 + 50;
    for device in 0..devices {
        let key = key(&device.to_string());
        let made = bench.shadows.update(&bench.broker, key, desire(&value)).await;
        // While a watcher holds the rest of the share an update may find none.
        assert!(matches!(made, Ok(_) | Err(Rejection::TooManyRequests)), "{made:?}");
    }
    let first = watch.next().await;
    assert!(matches!(first[0], ShadowChange::Missed(missed) if missed > 0));
    let mut shadows = first.len() - 1;
    while let Ok(more) = timeout(Duration::ZERO, watch.next()).await {
        shadows += more.len();
    }
    assert!(shadows > 100, "what was not missed is told, {shadows}");
    assert_eq!(bench.held(), 0);
}

#[tokio::test]
async fn what_is_no_request_is_nobodys_and_counts_for_nothing() {
    let bench = Bench::new();
    for rest in ["shadow", "shadow/update/accepted", "shadow/name/a b/update", "other"] {
        assert_eq!(bench.request("d", rest, "{}").0, ReservedOutcome::Taken);
    }
    bench.shadows.settle().await;
    assert_eq!((bench.version("d").await, bench.held()), (0, 0));
}

/// The failure: a queue without a task, in which all later requests of the device wait for ever.
#[tokio::test]
async fn work_that_panics_takes_nothing_but_its_queue_with_it() {
    let bench = Bench::new();
    let (account, device) = (bench.broker.account(), || ClientId::new("d"));
    let device_queues = &bench.shadows.device_queues;
    let first = device_queues.run::<()>(account, device(), 0, async { panic!("on purpose") });
    let second = device_queues.run(account, device(), 0, async { Ok(()) });
    assert_eq!(tokio::join!(first, second), (Err(Rejection::Unavailable), Err(Rejection::Unavailable)));
    assert_eq!(device_queues.run(account, device(), 0, async { Ok(3) }).await, Ok(3));
    device_queues.settle().await;
}
