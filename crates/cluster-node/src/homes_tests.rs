//! Several homes at several nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
    time::Duration,
};

use cluster::read_view;
use disk::EmbeddedRecords;
use ledger::{
    Ledger,
    twin::{Engine, Twin},
};
use parking_lot::Mutex;
use store::DataDir;
use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet, block_in_place},
};

use crate::{
    HomeEnd, ImportError, MachineClock, NodeError, NodeState, OwnedHome, create, leave_cluster,
    order_takeover, rebalance, status,
    tests::{NAME, contents, directory, open, put, soon, start},
};

const HOMES: u16 = 6;

/// Keys that were acknowledged, by home.
type Acknowledged = Arc<Mutex<BTreeMap<u16, BTreeSet<Vec<u8>>>>>;

/// A gateway that serves whatever homes it gets, and hands over those that are to go.
struct Gateway {
    state: watch::Receiver<NodeState>,
    killed: watch::Sender<bool>,
    running: JoinHandle<()>,
}

impl Gateway {
    fn start(
        ledger: &Arc<impl Ledger + 'static>,
        name: &str,
        incarnation: u64,
        directory: &Path,
        acknowledged: &Acknowledged,
    ) -> Self {
        let mut node = start(ledger, name, incarnation, directory, true);
        let (state, acknowledged) = (node.state.clone(), Arc::clone(acknowledged));
        let (killed, is_killed) = watch::channel(false);
        let running = tokio::spawn(async move {
            let (mut serving, mut ends) = (JoinSet::new(), is_killed.clone());
            loop {
                tokio::select! {
                    home = node.homes.recv() => {
                        serving.spawn(serve(home.unwrap(), Arc::clone(&acknowledged), is_killed.clone()));
                    }
                    _ = ends.wait_for(|killed| *killed) => break,
                    Some(served) = serving.join_next() => served.unwrap(),
                }
            }
            node.end().await;
            serving.join_all().await;
        });
        Self { state, killed, running }
    }

    /// Waits until it serves so many homes, and all are served by somebody.
    async fn serves(&mut self, count: usize) {
        let own = |state: &NodeState| state.homes.iter().filter(|home| home.own).count();
        let is_whole = |state: &NodeState| state.homes.iter().all(|home| !home.node.is_empty());
        let is_so = self.state.wait_for(|state| own(state) == count && is_whole(state));
        tokio::time::timeout(Duration::from_secs(60), is_so).await.unwrap().unwrap();
    }

    /// Ends as if the process were killed.
    async fn kill(self) {
        self.killed.send_replace(true);
        self.running.await.unwrap();
    }
}

/// Finds what was acknowledged before, and adds a record.
async fn serve(home: OwnedHome, acknowledged: Acknowledged, mut killed: watch::Receiver<bool>) {
    let (number, epoch) = (home.number(), home.figures()().epoch);
    let store = block_in_place(|| open(&home));
    let found: BTreeSet<_> = contents(&store).await.into_keys().collect();
    let before = acknowledged.lock().get(&number).cloned().unwrap_or_default();
    assert_eq!(found, before, "home {number} in epoch {epoch}");
    let key = format!("home {number} epoch {epoch}");
    tokio::select! {
        () = put(&store, &key, "value") => {
            acknowledged.lock().entry(number).or_default().insert(key.into_bytes());
        }
        _ = killed.wait_for(|killed| *killed) => {}
    }
    let end = tokio::select! {
        end = home.ends() => end,
        _ = killed.wait_for(|killed| *killed) => HomeEnd::Lost,
    };
    if end == HomeEnd::Ordered {
        block_in_place(|| drop(store));
        home.hand_over().await.unwrap();
    } else {
        drop(home);
        block_in_place(|| drop(store));
    }
}

async fn owners(ledger: &dyn Ledger) -> String {
    let (_, view) = read_view(ledger, &MachineClock).await.unwrap();
    let owner =
        |of: &cluster::HomeView| of.owner.as_ref().map_or_else(|| "-".to_owned(), |owner| owner.node.clone());
    view.homes.iter().map(owner).collect()
}

/// The failures: one node takes all homes; a node that joins gets none; homes of a node that died stay without an owner; a home that
/// moves loses what was acknowledged, or is never served again by a process that has had it before.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn homes_are_dealt_evenly_whoever_comes_and_goes() {
    let ledger = Arc::new(Twin::reliable(Engine::Stored));
    create(Arc::clone(&ledger) as _, (NAME, HOMES), 1, 1, None, true).await.unwrap();
    let (folders, acknowledged) = ([directory(), directory(), directory()], Acknowledged::default());
    let mut a = Gateway::start(&ledger, "a", 10, folders[0].path(), &acknowledged);
    let mut b = Gateway::start(&ledger, "b", 11, folders[1].path(), &acknowledged);
    a.serves(3).await;
    b.serves(3).await;
    let mut c = Gateway::start(&ledger, "c", 12, folders[2].path(), &acknowledged);
    c.serves(2).await;
    a.serves(2).await;
    b.serves(2).await;
    let found = status(&(Arc::clone(&ledger) as _), 1).await.unwrap();
    assert_eq!((found.owners.len(), found.owners.concat()), (6, owners(&*ledger).await));
    let of_c = found.nodes.iter().find(|node| node.name == "c").unwrap();
    assert!(of_c.is_warm && of_c.serves.len() == 2, "{of_c:?}");
    assert!(rebalance(&(Arc::clone(&ledger) as _)).await.unwrap().is_empty(), "all is even");

    c.kill().await;
    a.serves(3).await;
    b.serves(3).await;
    assert!(acknowledged.lock().values().all(|keys| !keys.is_empty()), "all homes were served");
    assert!(folders[0].path().join("homes/5/state").is_dir() && !folders[0].path().join("state").exists());

    // An operator moves a home, which comes back by itself, to the same process.
    let home = owners(&*ledger).await.find('a').unwrap() as u16;
    order_takeover(&(Arc::clone(&ledger) as _), home, "b").await.unwrap();
    b.serves(4).await;
    b.serves(3).await;
    a.serves(3).await;
    a.kill().await;
    b.serves(6).await;
    b.kill().await;
}

/// The failures: a gateway alone serves one of several homes, or none of them; a directory that was used alone is passed over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_with_several_homes_is_of_a_cluster_for_good() {
    let ledger = Arc::new(Twin::reliable(Engine::Owned));
    for wrong in [0, 13] {
        let refused = create(Arc::clone(&ledger) as _, (NAME, wrong), 1, 1, None, true).await;
        assert!(matches!(refused, Err(ImportError::Homes(_))));
    }
    create(Arc::clone(&ledger) as _, (NAME, 2), 1, 1, None, true).await.unwrap();
    let used = directory();
    let alone = DataDir::open(used.path()).unwrap();
    drop(EmbeddedRecords::open(&alone, &disk::RecordOptions::default()).unwrap());
    std::fs::create_dir(used.path().join("state")).unwrap();
    drop(alone);
    let refused = start(&ledger, "a", 9, used.path(), true).error().await;
    assert!(matches!(refused, NodeError::OwnContent(_)));

    let folder = directory();
    let mut node = start(&ledger, "a", 10, folder.path(), true);
    let homes = [node.home().await, node.home().await];
    assert_ne!(homes[0].number(), homes[1].number());
    // A process that ends: nothing is taken back meanwhile.
    node.end().await;
    for home in homes {
        soon(home.hand_over()).await.unwrap();
    }
    assert_eq!(owners(&*ledger).await, "--");
    let alone = DataDir::open(folder.path()).unwrap();
    assert!(leave_cluster(&alone).is_err());
}
