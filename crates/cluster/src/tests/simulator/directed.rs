//! Single cases, step by step, over a ledger without faults.

use std::{cell::Cell, collections::BTreeMap, sync::Arc, task::Waker, time::Duration};

use bytes::Bytes;
use ledger::{
    Beat, BoxFuture, Finding, Inserted, Ledger, Misread, Owner, Row, Rows, Segment, StoredView, Swapped,
    Unknown,
    twin::{Chance, Engine, Twin},
};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{
    directory::{Directory, read, write},
    process::STREAMS,
    schedule::{Schedule, VirtualClock},
};
use crate::{
    weakening::{WEAKENING, Weakening},
    *,
};

/// A ledger whose reads of the owners answer what they saw when they began, and only when they are let go.
struct Held {
    twin: Twin,
    are_free: watch::Sender<bool>,
}

impl Ledger for Held {
    fn insert(&self, owner: &Owner, rows: Arc<[Row]>) -> BoxFuture<'_, Result<Inserted, Unknown>> {
        self.twin.insert(owner, rows)
    }

    fn owners(&self) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        let seen = self.twin.owners();
        Box::pin(async move {
            let seen = seen.await;
            let _ = self.are_free.subscribe().wait_for(|are_free| *are_free).await;
            seen
        })
    }

    fn read(&self, segment: Segment, from: (u64, u16), bytes: usize) -> BoxFuture<'_, Result<Rows, Unknown>> {
        self.twin.read(segment, from, bytes)
    }

    fn delete(&self, segment: Segment) -> BoxFuture<'_, Result<(), Unknown>> {
        self.twin.delete(segment)
    }

    fn view(&self) -> BoxFuture<'_, Result<Option<StoredView>, Unknown>> {
        self.twin.view()
    }

    fn swap(&self, new: &StoredView) -> BoxFuture<'_, Result<Swapped, Unknown>> {
        self.twin.swap(new)
    }

    /// None, so that only validating reads tell who the owner is.
    fn beat(&self, _: &Beat) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        Box::pin(std::future::pending())
    }

    fn beats(&self) -> BoxFuture<'_, Result<Vec<Beat>, Unknown>> {
        self.twin.beats()
    }

    fn create(&self) -> BoxFuture<'_, Result<(), Unknown>> {
        self.twin.create()
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>, Unknown>> {
        self.twin.findings()
    }
}

struct Cluster {
    twin: Twin,
    clock: Arc<dyn Clock>,
    schedule: Schedule,
    /// So many were begun.
    processes: Cell<u64>,
}

impl Cluster {
    fn new(engine: Engine) -> Self {
        Self::with_homes(engine, 1)
    }

    fn with_homes(engine: Engine, homes: u16) -> Self {
        let (twin, schedule) = (Twin::reliable(engine), Schedule::default());
        let clock: Arc<dyn Clock> = Arc::new(VirtualClock::new(&schedule.time, &mut Chance::new(1)));
        let mut cluster = Self { twin, clock, schedule, processes: Cell::new(0) };
        let (twin, clock) = (cluster.twin.clone(), Arc::clone(&cluster.clock));
        let create =
            async move { create(&twin, &*clock, 7, &View::create("directed", homes, STREAMS)).await };
        cluster.run(create).unwrap();
        cluster
    }

    /// Runs until a future ends; time goes on as needed.
    fn run<T: 'static>(&mut self, work: impl Future<Output = T> + 'static) -> T {
        let output = Arc::new(Mutex::new(None));
        let found = Arc::clone(&output);
        self.schedule.begin(|_| Box::pin(async move { *found.lock() = Some(work.await) }));
        for _ in 0..10_000 {
            if let Some(output) = output.lock().take() {
                return output;
            }
            match self.schedule.ready().first() {
                Some(task) => self.schedule.poll(*task),
                None => assert!(self.schedule.advance(), "waits for nothing"),
            }
        }
        panic!("does not end");
    }

    /// A process at an engine, which is not run.
    fn member(&self, ledger: Arc<dyn Ledger>, name: &str) -> Arc<MemberNode> {
        self.processes.set(self.processes.get() + 1);
        let node = Node::new(name, self.processes.get());
        Arc::new(MemberNode::new(ledger, Arc::clone(&self.clock), node))
    }

    fn take(&mut self, me: &Arc<MemberNode>, directory: &Directory) -> Result<Tenure, TakeError> {
        let (me, mut directory) = (Arc::clone(me), directory.clone());
        self.run(async move { take(&me, 0, None, LEASE_WAIT, &mut directory).await })
    }

    /// Takes in a new process with an engine without faults.
    fn take_anew(&mut self, name: &str, directory: &Directory) -> Result<Tenure, TakeError> {
        let me = self.member(Arc::new(self.twin.clone()), name);
        self.take(&me, directory)
    }

    /// Takes in a new process with an engine without faults, and runs it.
    fn serve(&mut self, name: &str, directory: &Directory) -> (Tenure, Vec<StreamWriter>) {
        let me = self.member(Arc::new(self.twin.clone()), name);
        self.serve_in(&me, directory)
    }

    fn serve_in(&mut self, me: &Arc<MemberNode>, directory: &Directory) -> (Tenure, Vec<StreamWriter>) {
        let tenure = self.take(me, directory).unwrap();
        let (running, me) = (tenure.clone(), Arc::clone(me));
        self.schedule.begin(|_| Box::pin(async move { calls::both(running.run(), me.run()).await }));
        let writers = tenure.writers();
        (tenure, writers)
    }

    /// Appends a record and commits it locally.
    fn append(&mut self, mut writer: StreamWriter, directory: &Directory, key: &str) -> StreamWriter {
        let changes = vec![(key.to_owned(), Some("1".to_owned()))];
        let record = write(&changes, 0);
        let (writer, appended) = self.run(async move {
            let appended = writer.append(&record).await;
            (writer, appended)
        });
        let Appended::Done(position) = appended else { panic!("{appended:?}") };
        directory.commit(writer.stream(), position, &changes);
        writer
    }

    fn view(&self) -> View {
        View::read(&self.twin.history().pop().unwrap()).unwrap()
    }
}

/// The case of [`Weakening::JoinRead`], step by step. Returns how the second append ended.
fn append_while_a_read_is_under_way(weakening: Option<Weakening>) -> Option<Appended> {
    WEAKENING.set(weakening);
    let mut cluster = Cluster::new(Engine::Stored);
    let held = Arc::new(Held { twin: cluster.twin.clone(), are_free: watch::Sender::new(false) });
    let me = cluster.member(held.clone(), "a");
    let tenure = cluster.take(&me, &Directory::new(STREAMS)).unwrap();
    let mut writers = tenure.writers();
    let (mut second, mut first) = (writers.pop().unwrap(), writers.pop().unwrap());
    let mut running = Box::pin(me.run());
    let mut context = std::task::Context::from_waker(Waker::noop());
    // A read begins, and sees `a`.
    let mut one = Box::pin(first.append(b"one 1\n"));
    assert!(one.as_mut().poll(&mut context).is_pending() && running.as_mut().poll(&mut context).is_pending());
    // `b` takes the home and reads all of it.
    cluster.take_anew("b", &Directory::new(STREAMS)).unwrap();
    // Another record is stored, and its append waits for a read.
    let mut two = Box::pin(second.append(b"two 2\n"));
    assert!(two.as_mut().poll(&mut context).is_pending());
    // The read that is under way ends.
    held.are_free.send_replace(true);
    let (mut ended, mut is_running) = (None, true);
    for _ in 0..4 {
        is_running = is_running && running.as_mut().poll(&mut context).is_pending();
        if ended.is_none() {
            ended = match two.as_mut().poll(&mut context) {
                std::task::Poll::Ready(appended) => Some(appended),
                std::task::Poll::Pending => None,
            };
        }
    }
    WEAKENING.set(None);
    ended
}

#[test]
fn an_append_waits_for_a_read_that_begins_after_it() {
    assert_eq!(append_while_a_read_is_under_way(None), Some(Appended::Lost));
    let joined = append_while_a_read_is_under_way(Some(Weakening::JoinRead));
    assert!(matches!(joined, Some(Appended::Done(_))), "acknowledged, and {joined:?} is behind the seal");
}

/// The failure: each home of a node beats and reads the owners by itself.
#[test]
fn homes_of_a_node_share_beats_and_validating_reads() {
    let mut cluster = Cluster::with_homes(Engine::Stored, 4);
    let me = cluster.member(Arc::new(cluster.twin.clone()), "a");
    let running = Arc::clone(&me);
    cluster.schedule.begin(|_| Box::pin(async move { running.run().await }));
    let mut writers = Vec::new();
    let mut tenures = Vec::new();
    for home in 0..4 {
        let (me, mut directory) = (Arc::clone(&me), Directory::new(STREAMS));
        let taken = async move { take(&me, home, None, LEASE_WAIT, &mut directory).await };
        let tenure = cluster.run(taken).unwrap();
        writers.push(tenure.writers().remove(0));
        tenures.push(tenure);
    }
    let before = me.reads();
    let appended = cluster.run(async move {
        let mut appends: Vec<_> =
            writers.iter_mut().map(|writer| Box::pin(writer.append(b"k 1\n"))).collect();
        let mut appended = 0;
        std::future::poll_fn(|context| {
            appends.retain_mut(|append| {
                let done = append.as_mut().poll(context);
                appended += usize::from(matches!(done, std::task::Poll::Ready(Appended::Done(_))));
                done.is_pending()
            });
            if appends.is_empty() { std::task::Poll::Ready(appended) } else { std::task::Poll::Pending }
        })
        .await
    });
    assert_eq!((appended, me.reads() - before), (4, 1));

    let (before, clock) = (me.reads(), Arc::clone(&cluster.clock));
    cluster.run(async move { clock.sleep(Duration::from_secs(20)).await });
    assert!((19..=21).contains(&(me.reads() - before)), "{}", me.reads() - before);
    assert!(tenures.iter().all(|tenure| tenure.lease().held(cluster.clock.now())));
}

#[test]
fn a_home_is_handed_over_by_a_clean_stop_without_a_wait() {
    for engine in [Engine::Stored, Engine::Owned] {
        let mut cluster = Cluster::new(engine);
        let directory = Directory::new(STREAMS);
        let (tenure, mut writers) = cluster.serve("a", &directory);
        let writer = writers.remove(0);
        let writer = cluster.append(writer, &directory, "k");
        assert!(tenure.lease().held(cluster.clock.now()));
        assert_eq!((tenure.figures().records, tenure.figures().under_way), (1, 0));
        writers.insert(0, writer);
        let owner = tenure.owner().clone();
        let releasing = tenure.clone();
        cluster.run(async move { releasing.release(writers).await }).unwrap();
        assert!(!tenure.lease().held(cluster.clock.now()) && tenure.is_lost());
        assert_eq!((owner.epoch, cluster.view().owners()), (1, Vec::new()));

        let (before, empty) = (cluster.clock.now(), Directory::new(STREAMS));
        cluster.serve("b", &empty);
        assert!(cluster.clock.now() - before < Duration::from_millis(100));
        assert_eq!(empty.contents(0), BTreeMap::from([("k".to_owned(), "1".to_owned())]));
    }
}

/// The failures: a stream of which takers know nothing is acknowledged; a cluster of an earlier version never gets it; a stop before
/// that leaves a view that nobody can read.
#[test]
fn a_stream_that_the_view_lacks_waits_until_it_has_it() {
    for engine in [Engine::Stored, Engine::Owned] {
        let mut cluster = Cluster::new(engine);
        let directory = Directory::new(STREAMS + 1);
        let (tenure, mut writers) = cluster.serve("a", &directory);
        assert!(tenure.is_narrow() && writers.len() == usize::from(STREAMS) + 1);
        let writer = writers.remove(0);
        writers.insert(0, cluster.append(writer, &directory, "old"));
        let releasing = tenure.clone();
        cluster.run(async move { releasing.release(writers).await }).unwrap();

        let (tenure, mut writers) = cluster.serve("a", &directory);
        let new = Arc::new(Mutex::new(Some(writers.pop().unwrap())));
        let ended = Arc::new(Mutex::new(None));
        let (appending, appended) = (Arc::clone(&new), Arc::clone(&ended));
        cluster.schedule.begin(|_| {
            Box::pin(async move {
                let mut writer = appending.lock().take().unwrap();
                let outcome = writer.append(b"new 1\n").await;
                *appended.lock() = Some(outcome);
                *appending.lock() = Some(writer);
            })
        });
        let clock = Arc::clone(&cluster.clock);
        cluster.run(async move { clock.sleep(Duration::from_secs(3)).await });
        assert_eq!(*ended.lock(), None, "no taker would read it");
        assert_eq!(cluster.view().streams, STREAMS);

        let widening = tenure.clone();
        cluster.run(async move { widening.widen().await }).unwrap();
        let clock = Arc::clone(&cluster.clock);
        cluster.run(async move { clock.sleep(Duration::from_secs(1)).await });
        assert!(matches!(*ended.lock(), Some(Appended::Done(_))) && !tenure.is_narrow());
        let (empty, known) =
            (Directory::new(STREAMS + 1), |key: &str| BTreeMap::from([(key.to_owned(), "1".to_owned())]));
        cluster.serve("b", &empty);
        assert_eq!((empty.contents(0), empty.contents(STREAMS)), (known("old"), known("new")));
        assert!(tenure.is_lost());
    }
}

/// The failure: two standbys suspect the same owner, and the second takes the home from the first.
#[test]
fn a_home_that_has_changed_hands_is_left_alone() {
    let mut cluster = Cluster::new(Engine::Stored);
    cluster.serve("a", &Directory::new(STREAMS));
    let take_from = |cluster: &mut Cluster, name: &'static str, from| {
        let (me, mut directory) =
            (cluster.member(Arc::new(cluster.twin.clone()), name), Directory::new(STREAMS));
        cluster.run(async move { take(&me, 0, Some(from), Duration::ZERO, &mut directory).await.map(|_| ()) })
    };
    assert_eq!(take_from(&mut cluster, "b", 1), Ok(()));
    let not_owner = ViewError::NotOwner { home: 0, epoch: 2, owner: "b".to_owned() };
    assert_eq!(take_from(&mut cluster, "c", 1), Err(TakeError::View(not_owner)));
}

/// The failure: connections that are dead without telling use up all attempts of a call, which is never made again.
#[test]
fn a_call_is_made_again_when_all_its_attempts_are_dead() {
    let mut cluster = Cluster::new(Engine::Stored);
    let clock = Arc::clone(&cluster.clock);
    let answered = async move {
        let (mut attempts, repeats) = (0, std::sync::atomic::AtomicU64::new(0));
        let call = || -> BoxFuture<'static, Result<u32, Unknown>> {
            attempts += 1;
            let attempt = attempts;
            if attempt < 5 { Box::pin(std::future::pending()) } else { Box::pin(async move { Ok(attempt) }) }
        };
        calls::until_answered(&*clock, &repeats, call).await.1
    };
    assert_eq!(cluster.run(answered), 5);
}

/// The failure: an append that its caller gave up is in the ledger, and the next record takes its number.
#[test]
fn an_append_that_is_dropped_ends_the_tenure() {
    let mut cluster = Cluster::new(Engine::Stored);
    let tenure = cluster.take_anew("a", &Directory::new(STREAMS)).unwrap();
    let mut writers = tenure.writers();
    let mut append = Box::pin(writers[0].append(b"one"));
    assert!(append.as_mut().poll(&mut std::task::Context::from_waker(Waker::noop())).is_pending());
    drop(append);
    assert!(tenure.is_lost());
    let releasing = tenure.clone();
    assert_eq!(cluster.run(async move { releasing.release(writers).await }), Err(ReleaseError::Busy));
}

#[test]
fn a_stream_begins_where_its_owner_says() {
    let mut cluster = Cluster::new(Engine::Stored);
    let directory = Directory::new(STREAMS);
    let (tenure, mut writers) = cluster.serve("a", &directory);
    let mut writer = writers.remove(0);
    writer.set_pace(Pace { segment: 100, ..Pace::default() });
    for n in 0..9 {
        writer = cluster.append(writer, &directory, &format!("k{n}"));
    }
    let publishing = tenure.clone();
    cluster.run(async move { publishing.publish_start(0, 1, 5).await }).unwrap();
    let clock = Arc::clone(&cluster.clock);
    cluster.run(async move { clock.sleep(Duration::from_secs(1)).await });
    let view = cluster.view();
    assert_eq!((view.homes[0].starts[0].n, view.homes[0].leftovers.len()), (5, 0));
    let first = cluster.twin.rows().first().map(|row| row.n);
    assert!(first >= Some(4), "segments before it are gone: {first:?}");
    let publishing = tenure.clone();
    cluster.run(async move {
        assert_eq!(publishing.publish_start(0, 1, 3).await, Ok(()), "it never goes back");
        assert!(matches!(publishing.publish_start(0, 3, 0).await, Err(ViewError::NoPlace(_))));
    });
    let empty = Directory::new(STREAMS);
    cluster.serve("b", &empty);
    assert_eq!(empty.contents(0).len(), 4, "what is not read any more is not restored");
}

/// The failure: a damaged row is taken for the end, and everything behind it is lost in silence.
#[test]
fn a_takeover_stops_at_damage_and_goes_on_when_its_loss_is_accepted() {
    let mut cluster = Cluster::new(Engine::Stored);
    let directory = Directory::new(STREAMS);
    let (_, mut writers) = cluster.serve("a", &directory);
    let mut writer = writers.remove(0);
    for n in 0..6 {
        writer = cluster.append(writer, &directory, &format!("k{n}"));
    }
    cluster.twin.damage(&mut |row| {
        let mut row = row.clone();
        if row.n == 3 {
            row.data = Bytes::from([&row.data[..row.data.len() - 1], b"?"].concat());
        }
        Some(row)
    });
    let ledger: Arc<dyn Ledger> = Arc::new(cluster.twin.clone());
    let damaged = cluster.take_anew("b", &Directory::new(STREAMS)).map(|_| ()).unwrap_err();
    let damage = Damage::Misread(Misread::Damaged);
    assert_eq!(damaged, TakeError::Damaged(DamagedRecord { home: 0, stream: 0, epoch: 1, n: 3, damage }));
    assert_eq!(damaged.to_string(), "home 0, stream 0: record 3 of epoch 1 is damaged");

    let (accepting, clock) = (Arc::clone(&ledger), Arc::clone(&cluster.clock));
    cluster.run(async move {
        change(&*accepting, &*clock, |view| view.accept_loss(0, 0, 1, 3).map(Some)).await.unwrap();
    });
    let restored = Directory::new(STREAMS);
    let (_, mut writers) = cluster.serve("b", &restored);
    assert_eq!(restored.contents(0).into_keys().collect::<Vec<_>>(), ["k0", "k1", "k2"]);
    // The home goes on from there.
    let writer = writers.remove(0);
    cluster.append(writer, &restored, "k9");
    let empty = Directory::new(STREAMS);
    cluster.serve("c", &empty);
    assert_eq!(empty.contents(0).into_keys().collect::<Vec<_>>(), ["k0", "k1", "k2", "k9"]);
}

#[test]
fn a_record_that_is_sealed_and_gone_stops_a_takeover() {
    let mut cluster = Cluster::new(Engine::Owned);
    let directory = Directory::new(STREAMS);
    let (_, mut writers) = cluster.serve("a", &directory);
    let mut writer = writers.remove(0);
    for n in 0..3 {
        writer = cluster.append(writer, &directory, &format!("k{n}"));
    }
    cluster.serve("b", &Directory::new(STREAMS));
    cluster.twin.damage(&mut |row| (row.n != 1).then(|| row.clone()));
    let missing = cluster.take_anew("c", &Directory::new(STREAMS)).map(|_| ()).unwrap_err();
    assert_eq!(missing.to_string(), "home 0, stream 0: record 1 of epoch 1 is sealed and not there");
    // The directory that has it needs nothing of the ledger before it.
    cluster.serve("a", &directory);
    assert_eq!(directory.contents(0).len(), 3);
}

#[test]
fn changes_come_back_as_they_were_written() {
    let changes = vec![("a".to_owned(), Some("1".to_owned())), ("b".to_owned(), None)];
    assert_eq!(read(&write(&changes, 9)), changes);
}
