//! Latest values of a home that changes hands.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use cluster::{View, read_view};
use disk::{EmbeddedLatest, EmbeddedOptions, LatestLedger, ShippedStore};
use ledger::{
    Beat, Ledger,
    twin::{Engine, Twin},
};
use store::{
    DataDir, LatestQuery, LatestStore as _, LatestValue,
    suite::latest::{list_all, value},
};

use crate::{
    MachineClock, OwnedHome, STREAMS, create, order_takeover,
    tests::{NAME, contents, directory, open, put, soon, start},
};

fn open_latest(home: &OwnedHome) -> EmbeddedLatest {
    let shipping = home.streams().of(ShippedStore::Latest);
    let ledger = LatestLedger { shipping, interval: Duration::from_millis(20), bytes: 1 << 30 };
    let options = EmbeddedOptions { ledger: Some(ledger), ..EmbeddedOptions::default() };
    EmbeddedLatest::open(home.directory(), &options).unwrap()
}

async fn all(store: &EmbeddedLatest) -> Vec<LatestValue> {
    list_all(store, LatestQuery { limit: 10_000, ..LatestQuery::default() }).await
}

async fn write(store: &EmbeddedLatest, values: impl IntoIterator<Item = LatestValue>) {
    store.upsert(values.into_iter().collect()).await.unwrap();
}

async fn shipped(store: &EmbeddedLatest) {
    soon(async {
        while store.ledger_figures().unwrap().waiting > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// The failures: a gateway that takes over has no latest values, or those that it had when it served last; removed ones come back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn latest_values_come_along() {
    let ledger = Arc::new(Twin::reliable(Engine::Stored));
    create(Arc::clone(&ledger) as _, (NAME, 1), 1, 1, None, true).await.unwrap();
    let (a, b) = (directory(), directory());
    let mut one = start(&ledger, "a", 10, a.path(), true);
    let first = one.home().await;
    let store = open_latest(&first);
    write(&store, (1..=300).map(|n| value("d", &format!("t/{}", n % 100), n))).await;
    shipped(&store).await;
    write(&store, [value("d", "t/1", 1_000), value("e", "t/2", 1_001)]).await;
    store.remove([value("d", "t/3", 1_002)].into()).await.unwrap();
    shipped(&store).await;
    let expected = all(&store).await;
    assert_eq!(expected.len(), 100);

    let mut other = start(&ledger, "b", 11, b.path(), false);
    other.is(|state| state.warm && state.active == "a").await;
    order_takeover(&(Arc::clone(&ledger) as _), 0, "b").await.unwrap();
    // The first does not hand over, as if it were paused.
    let second = other.home().await;
    let taken = open_latest(&second);
    assert_eq!(all(&taken).await, expected);
    write(&taken, [value("d", "t/1", 2_000)]).await;
    // A clean stop leaves nothing behind.
    taken.end_shipping().await;
    let expected = all(&taken).await;
    drop(taken);
    other.end().await;
    second.hand_over().await.unwrap();
    let c = directory();
    let third = start(&ledger, "c", 12, c.path(), true).home().await;
    assert_eq!(all(&open_latest(&third)).await, expected);
    drop((store, first));
}

/// The failures: a cluster that an earlier version made cannot go on, or never gets its latest values into the ledger; it gets them
/// while a gateway stands by that could not take over then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_of_an_earlier_version_goes_on() {
    let ledger = Arc::new(Twin::reliable(Engine::Owned));
    let view = View::create(NAME, 1, STREAMS - 1);
    cluster::create(&*ledger, &MachineClock, 1, &view).await.unwrap();
    let streams = async || read_view(&*ledger, &MachineClock).await.unwrap().1.streams;
    let folder = directory();
    // Values of the time before.
    let a = DataDir::open(folder.path()).unwrap();
    let before = EmbeddedLatest::open(&a, &EmbeddedOptions::default()).unwrap();
    write(&before, [value("d", "old", 1)]).await;
    drop((before, a));
    std::fs::write(folder.path().join("incarnation"), "a 9\n").unwrap();

    let earlier = Arc::new(parking_lot::Mutex::new(r#"{"address":"b.example:10000","warm":true}"#));
    let beating = {
        let (ledger, earlier) = (Arc::clone(&ledger), Arc::clone(&earlier));
        tokio::spawn(async move {
            for number in 1.. {
                let about = Bytes::from_static(earlier.lock().as_bytes());
                let beat = Beat { node: "b".into(), incarnation: 2, number, about };
                ledger.beat(&beat).await.unwrap();
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
    };
    soon(async { while ledger.beats().await.unwrap().is_empty() {} }).await;
    let mut one = start(&ledger, "a", 10, folder.path(), true);
    let first = one.home().await;
    let (records, store) = (open(&first), open_latest(&first));
    put(&records, "key", "value").await;
    write(&store, [value("d", "new", 2)]).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!((streams().await, store.ledger_figures().unwrap().waiting), (STREAMS - 1, 2));
    // An upgrade.
    *earlier.lock() = r#"{"address":"b.example:10000","warm":true,"streams":5}"#;
    shipped(&store).await;
    assert_eq!(streams().await, STREAMS);
    beating.abort();
    let (latest, kept) = (all(&store).await, contents(&records).await);
    assert_eq!(latest.len(), 2);
    drop((records, store));
    one.end().await;
    first.hand_over().await.unwrap();

    let b = directory();
    let mut other = start(&ledger, "b", 11, b.path(), true);
    let second = other.home().await;
    assert_eq!(all(&open_latest(&second)).await, latest);
    assert_eq!(contents(&open(&second)).await, kept);
}
