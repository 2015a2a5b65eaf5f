use broker::Published;
use gateway_core::Receipt;
use store::MemoryRecords;

use super::*;
use grpc_messages::wait::Wait;

struct World {
    store: Arc<MemoryRecords>,
    account: Arc<Account>,
    keys: Arc<RequestKeys>,
    _stop: watch::Sender<bool>,
}

impl World {
    fn new(most: usize) -> Self {
        Self::on(Arc::default(), Arc::new(Account::new(64 << 20)), most)
    }

    fn on(store: Arc<MemoryRecords>, account: Arc<Account>, most: usize) -> Self {
        let (stop, shutdown) = watch::channel(false);
        let options = KeyOptions { most, time: Duration::from_secs(600) };
        let keys = RequestKeys::open(options, Some(Arc::clone(&store) as _), &account, shutdown).unwrap();
        Self { store, account, keys, _stop: stop }
    }

    /// As another process would find it.
    fn restarted(&self) -> Self {
        Self::on(Arc::clone(&self.store), Arc::clone(&self.account), 100)
    }

    fn first(&self, n: u8) -> KeyedPublish {
        match self.keys.claim(key(n)).unwrap() {
            KeyClaim::First(flight) => flight,
            KeyClaim::Before(_) => panic!("key {n} is known"),
        }
    }

    fn before(&self, n: u8) -> Keyed {
        match self.keys.claim(key(n)).unwrap() {
            KeyClaim::First(_) => panic!("key {n} is not known"),
            KeyClaim::Before(keyed) => keyed,
        }
    }

    fn error(&self, key: RequestKey) -> Error {
        self.keys.claim(key).err().unwrap()
    }

    fn stop(&self) -> watch::Receiver<bool> {
        self.keys.shutdown.clone()
    }

    async fn told(&self, keyed: &Keyed) -> PublishOutcome {
        keyed.finish(Instant::now() + Duration::from_secs(60), &self.stop()).await
    }
}

fn key(n: u8) -> RequestKey {
    RequestKey { id: [n; 32], content: [n; 32] }
}

fn routed(wait: Wait, receipt: Option<Arc<Receipt>>) -> Routed {
    Routed {
        published: Published { matched: 1, sent: 1, ..Published::default() },
        wait,
        receipt,
        commit: None,
        scheduled: None,
        expiry: None,
    }
}

#[tokio::test]
async fn an_answer_is_kept_for_the_same_content_and_over_a_restart() {
    let mut world = World::new(100);
    let first = world.first(1).land(routed(Wait::Accepted, None));
    let answer = world.told(&first).await.unwrap();
    for _ in 0..2 {
        assert_eq!(world.told(&world.before(1)).await.unwrap(), answer);
        assert_eq!(world.error(RequestKey { content: [9; 32], ..key(1) }), Error::KeyReused);
        world = world.restarted();
    }
    assert_eq!(world.account.held(MemoryKind::Publisher), ANSWERED);
}

#[tokio::test]
async fn who_comes_while_the_first_waits_gets_its_answer() {
    let world = World::new(100);
    let receipt = Arc::<Receipt>::default();
    let first = world.first(1).land(routed(Wait::Acked, Some(Arc::clone(&receipt))));
    let second = world.before(1);
    assert!(first.ready().is_none() && second.ready().is_none());
    let soon = Instant::now();
    assert!(matches!(first.finish(soon, &world.stop()).await, Err(Error::Deadline(_))));
    drop(first);
    receipt.update(|state| state.answered(0));
    let answer = world.told(&second).await.unwrap();
    assert_eq!(answer.outcome(), v1::Outcome::Acked);
    assert_eq!(world.told(&world.before(1)).await.unwrap(), answer);
}

/// The message was published; a second publish would duplicate it.
#[tokio::test]
async fn a_crash_while_it_waits_is_told_and_publishes_nothing_again() {
    let world = World::new(100);
    let _waits = world.first(1).land(routed(Wait::Acked, Some(Arc::default())));
    assert_eq!(world.restarted().error(key(1)), Error::OutcomeLost);
    drop(world.first(2));
    assert_eq!(world.error(key(2)), Error::OutcomeLost, "the call ended while receivers got it");
    assert_eq!(world.restarted().error(key(2)), Error::OutcomeLost);
}

#[tokio::test]
async fn what_was_refused_is_forgotten_and_may_be_tried_again() {
    let world = World::new(100);
    let flight = world.first(1);
    let joined = world.before(1);
    flight.refuse(&Error::DeviceOffline);
    assert_eq!(world.told(&joined).await, Err(Error::DeviceOffline));
    let again = world.first(1);
    assert_eq!(world.store.stored(), 0);
    // A claim that is gone changes nothing of the next one.
    again.refuse(&Error::DeviceOffline);
    assert_eq!((world.keys.len(), world.account.used()), (0, 0));
}

#[tokio::test]
async fn an_answer_is_not_given_before_it_is_written_and_is_tried_again() {
    let world = World::new(100);
    world.store.fail(true);
    let first = world.first(1).land(routed(Wait::Accepted, None));
    assert_eq!(world.told(&first).await, Err(Error::StoreRefused));
    assert_eq!(world.told(&world.before(1)).await, Err(Error::StoreRefused));
    world.store.fail(false);
    assert!(world.told(&world.before(1)).await.is_ok());
    assert!(world.told(&world.restarted().before(1)).await.is_ok());
    assert_eq!(world.account.held(MemoryKind::Publisher), ANSWERED);
}

#[tokio::test]
async fn of_too_many_keys_the_oldest_go_from_memory_and_disk() {
    let world = World::new(3);
    for n in 1..=5 {
        let keyed = world.first(n).land(routed(Wait::Accepted, None));
        world.told(&keyed).await.unwrap();
    }
    assert_eq!((world.keys.len(), world.store.stored()), (3, 3));
    world.first(1).refuse(&Error::DeviceOffline);
    assert!(world.told(&world.before(5)).await.is_ok());
    let few = World::on(Arc::clone(&world.store), Arc::new(Account::new(64 << 20)), 1);
    assert_eq!((few.keys.len(), few.store.stored()), (1, 1), "also at the start");
    assert!(few.told(&few.before(5)).await.is_ok());
}

#[tokio::test]
async fn memory_for_keys_is_bounded_by_the_account_and_given_back() {
    let world = World::on(Arc::default(), Arc::new(Account::new(1 << 20)), usize::MAX);
    let keyed: Vec<_> = (0..=255).map(|n| world.first(n).land(routed(Wait::Accepted, None))).collect();
    for keyed in &keyed {
        world.told(keyed).await.unwrap();
    }
    let share = world.account.share(MemoryKind::Publisher);
    assert!(world.account.held(MemoryKind::Publisher) <= share && world.keys.len() < 256);
    assert_eq!(world.account.held(MemoryKind::Publisher), world.keys.len() * ANSWERED);
    assert_eq!(world.store.stored(), world.keys.len());
    drop(world.keys);
    assert_eq!(world.account.used(), 0);
}

#[tokio::test]
async fn a_task_that_nobody_waits_for_ends_with_its_key() {
    let world = World::new(1);
    let receipt = Arc::<Receipt>::default();
    drop(world.first(1).land(routed(Wait::Acked, Some(Arc::clone(&receipt)))));
    tokio::task::yield_now().await;
    assert_eq!(Arc::strong_count(&receipt), 2);
    drop(world.first(2).land(routed(Wait::Accepted, None)));
    while Arc::strong_count(&receipt) > 1 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_key_belongs_to_its_caller_and_to_all_fields_of_the_request() {
    let call = Call::unlimited();
    let request = v1::PublishRequest {
        idempotency_key: "k".to_owned(),
        topic: "t".to_owned(),
        payload: Bytes::from(vec![7; 1 << 20]),
        ..Default::default()
    };
    let of = async |request: &v1::PublishRequest| RequestKey::of(&call, request).await.unwrap().unwrap();
    let first = of(&request).await;
    let again = of(&request).await;
    assert!(first.id == again.id && first.content == again.content);
    for other in [
        v1::PublishRequest { payload: Bytes::from(vec![7; (1 << 20) + 1]), ..request.clone() },
        v1::PublishRequest { topic: "u".to_owned(), ..request.clone() },
        v1::PublishRequest { wait: v1::Wait::Acked.into(), ..request.clone() },
    ] {
        let other = of(&other).await;
        assert!(first.id == other.id && first.content != other.content);
    }
    let long = v1::PublishRequest { idempotency_key: "k".repeat(129), ..request };
    assert!(matches!(RequestKey::of(&call, &long).await, Err(Error::Invalid { .. })));
}

#[test]
fn no_record_makes_the_decoder_panic() {
    let claimed = Claimed { id: [1; 32], content: [2; 32], since: Timestamp(3), number: 4 };
    let response = v1::PublishResponse { matched: 300, ..Default::default() };
    let change = record(&claimed, Some(&response));
    let value = change.value.unwrap();
    let Some((content, since, KeyState::Answered(found))) = decode(&value) else { panic!() };
    assert_eq!((content, since, found), ([2; 32], Timestamp(3), response));
    for at in 0..value.len() {
        let _ = decode(&value[..at]);
        let mut bytes = value.to_vec();
        bytes[at] ^= 0xFF;
        let _ = decode(&bytes);
    }
}
