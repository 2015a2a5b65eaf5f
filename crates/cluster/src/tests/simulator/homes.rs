//! Several homes at three nodes, in virtual time over a ledger with faults: nodes join, are killed, paused and cut off, homes move, and a
//! process that has lost or given up a home takes it again.
//!
//! `CLUSTER_SEED=7 cargo test -p cluster homes` runs one seed, `CLUSTER_SEEDS=1000` so many. A seed fails if a record that was acknowledged is missing at a later owner,
//! a process acknowledges after another has begun to serve the home, two hold its lease, or, once the faults have ended, a home is not
//! served, nodes have unequal numbers of homes, or homes go on changing hands.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    rc::{Rc, Weak},
    sync::Arc,
    time::Duration,
};

use ledger::{
    Beat, BoxFuture, Finding, Inserted, Ledger, Owner, Row, Rows, Segment, StoredView, Swapped, Unknown,
    twin::{Chance, Engine, Faults, Twin},
};
use tokio::sync::watch;

use super::{
    directory::{Directory, write},
    schedule::{Schedule, Spawner, VirtualClock, pause},
};
use crate::{
    calls::{First, first},
    weakening::{WEAKENING, Weakening},
    *,
};

const NAMES: [&str; 3] = ["a", "b", "c"];
/// Time with faults, and after them.
const ROUGH: Duration = Duration::from_secs(30);
const CALM: Duration = Duration::from_secs(32);
/// No home changes hands in the last part of the calm.
const STILL: Duration = Duration::from_secs(8);
/// Time between two moves of a node.
const MOVE_EVERY: Duration = Duration::from_secs(1);

/// A node's way to the ledger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Way {
    #[default]
    Open,
    /// Calls do not arrive.
    Cut,
    /// Calls are carried out, and answers do not arrive.
    Deaf,
}

/// The ledger, as a node has it.
struct NodeLedger {
    twin: Twin,
    way: Arc<parking_lot::Mutex<Way>>,
}

impl NodeLedger {
    fn call<'a, T: Send + 'a>(
        &'a self,
        begin: impl FnOnce() -> BoxFuture<'a, Result<T, Unknown>>,
    ) -> BoxFuture<'a, Result<T, Unknown>> {
        let unknown = || Unknown("cut off".to_owned());
        if *self.way.lock() == Way::Cut {
            return Box::pin(async move { Err(unknown()) });
        }
        let call = begin();
        Box::pin(async move {
            let answer = call.await;
            if *self.way.lock() == Way::Open { answer } else { Err(unknown()) }
        })
    }
}

impl Ledger for NodeLedger {
    fn insert(&self, owner: &Owner, rows: Arc<[Row]>) -> BoxFuture<'_, Result<Inserted, Unknown>> {
        self.call(|| self.twin.insert(owner, rows))
    }

    fn owners(&self) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        self.call(|| self.twin.owners())
    }

    fn read(&self, segment: Segment, from: (u64, u16), bytes: usize) -> BoxFuture<'_, Result<Rows, Unknown>> {
        self.call(|| self.twin.read(segment, from, bytes))
    }

    fn delete(&self, segment: Segment) -> BoxFuture<'_, Result<(), Unknown>> {
        self.call(|| self.twin.delete(segment))
    }

    fn view(&self) -> BoxFuture<'_, Result<Option<StoredView>, Unknown>> {
        self.call(|| self.twin.view())
    }

    fn swap(&self, new: &StoredView) -> BoxFuture<'_, Result<Swapped, Unknown>> {
        self.call(|| self.twin.swap(new))
    }

    fn beat(&self, beat: &Beat) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        self.call(|| self.twin.beat(beat))
    }

    fn beats(&self) -> BoxFuture<'_, Result<Vec<Beat>, Unknown>> {
        self.call(|| self.twin.beats())
    }

    fn create(&self) -> BoxFuture<'_, Result<(), Unknown>> {
        self.twin.create()
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>, Unknown>> {
        self.twin.findings()
    }
}

/// Counts, to see that the simulator does what it is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Tally {
    acknowledged: usize,
    served: usize,
    /// Tenures of a process that had served the home before.
    again: usize,
    lost: usize,
    moved: usize,
    handed_over: usize,
    abandoned: usize,
}

/// A tenure's lease.
struct HeldLease {
    epoch: u64,
    lease: Arc<Lease>,
    /// Gone once its process has ended.
    node: Weak<SimulatedNode>,
}

impl HeldLease {
    fn is_held(&self) -> bool {
        self.node.upgrade().is_some_and(|node| self.lease.held(node.me.clock().now()))
    }
}

/// A directory of a node, and the process that had it last.
#[derive(Default)]
struct Disk {
    directory: Option<Directory>,
    former: Option<Former>,
}

/// Everything that happened, as nobody in the cluster knows it.
struct Truth {
    chance: RefCell<Chance>,
    twin: Twin,
    homes: u16,
    /// Epochs and numbers of records that were acknowledged, by home.
    acknowledged: RefCell<BTreeMap<u16, BTreeSet<(u64, u64)>>>,
    /// The last epoch in which a home was served.
    served: RefCell<BTreeMap<u16, u64>>,
    leases: RefCell<BTreeMap<u16, Vec<HeldLease>>>,
    disks: RefCell<BTreeMap<(&'static str, u16), Disk>>,
    violation: RefCell<Option<String>>,
    tally: RefCell<Tally>,
    is_calm: Cell<bool>,
}

impl Truth {
    fn violated(&self, text: String) {
        self.violation.borrow_mut().get_or_insert(text);
    }

    /// True in so many of a thousand cases, and never in the calm.
    fn is_rough(&self, per_mille: usize) -> bool {
        !self.is_calm.get() && self.chance.borrow_mut().per_mille(per_mille)
    }

    /// Somebody begins to serve a home.
    fn begins(&self, tenure: &Tenure, node: &Rc<SimulatedNode>, directory: &Directory) {
        let (home, epoch) = (tenure.owner().home, tenure.owner().epoch);
        let found = directory.contents(0);
        let acknowledged = self.acknowledged.borrow();
        // A process that was paused may begin late, and acknowledges nothing.
        let mut before = acknowledged.get(&home).into_iter().flatten().filter(|(of, _)| *of < epoch);
        if let Some(missing) = before.find(|(of, n)| !found.contains_key(&format!("{of}.{n}"))) {
            self.violated(format!(
                "home {home}: {missing:?} was acknowledged, and is missing in epoch {epoch}"
            ));
        }
        let mut leases = self.leases.borrow_mut();
        let leases = leases.entry(home).or_default();
        if let Some(HeldLease { epoch: of, .. }) =
            leases.iter().find(|lease| lease.epoch < epoch && lease.is_held())
        {
            self.violated(format!("home {home}: epoch {epoch} is served while epoch {of} holds its lease"));
        }
        leases.push(HeldLease { epoch, lease: Arc::clone(tenure.lease()), node: Rc::downgrade(node) });
        let mut served = self.served.borrow_mut();
        let last = served.entry(home).or_default();
        *last = epoch.max(*last);
        self.tally.borrow_mut().served += 1;
    }

    fn acknowledges(&self, tenure: &Tenure, n: u64) {
        let (home, epoch) = (tenure.owner().home, tenure.owner().epoch);
        let served = self.served.borrow()[&home];
        if served != epoch {
            self.violated(format!("home {home}: epoch {epoch} acknowledges after epoch {served} has begun"));
        }
        self.acknowledged.borrow_mut().entry(home).or_default().insert((epoch, n));
        self.tally.borrow_mut().acknowledged += 1;
    }
}

/// A node, as its tasks share it.
struct SimulatedNode {
    truth: Rc<Truth>,
    me: Arc<MemberNode>,
    name: &'static str,
    looks: watch::Receiver<Option<Arc<ClusterLook>>>,
    told: RefCell<NodeHomes>,
}

impl SimulatedNode {
    /// Changes what the next beats tell of homes.
    fn tell(&self, change: impl FnOnce(&mut NodeHomes)) {
        let mut told = self.told.borrow_mut();
        change(&mut told);
        self.me.node().set_about(serde_json::to_vec(&*told).unwrap().into());
    }

    fn set_warm(&self, home: u16, is_warm: bool) {
        self.tell(|told| {
            told.copies.retain(|copy| *copy != home);
            told.copies.extend(is_warm.then_some(home));
        });
    }
}

/// Runs a process of a node.
async fn run_node(
    truth: Rc<Truth>,
    spawner: Spawner,
    clock: VirtualClock,
    name: &'static str,
    way: Arc<parking_lot::Mutex<Way>>,
) {
    let clock: Arc<dyn Clock> = Arc::new(clock);
    let ledger = Arc::new(NodeLedger { twin: truth.twin.clone(), way });
    let incarnation = truth.chance.borrow_mut().draw();
    let me = Arc::new(MemberNode::new(ledger, Arc::clone(&clock), Node::new(name, incarnation)));
    let (seen, looks) = watch::channel(None);
    let told = RefCell::new(NodeHomes { takes_over: true, ..NodeHomes::default() });
    let node = Rc::new(SimulatedNode { truth: Rc::clone(&truth), me: Arc::clone(&me), name, looks, told });
    node.tell(|_| ());
    let running = Arc::clone(&me);
    spawner.spawn(async move { running.run().await });
    for home in 0..truth.homes {
        spawner.spawn(run_home(Rc::clone(&node), spawner.clone(), home));
    }
    let mut watcher = Watcher::new(me.node().name(), incarnation);
    let mut moved = Duration::ZERO;
    loop {
        let begun = clock.now();
        let read = async {
            let beats = me.ledger().beats().await.ok()?;
            watcher.observe(&beats, clock.now());
            Some((beats, me.view().await.ok()?))
        };
        if let First::One(Some((beats, view))) = first(read, clock.sleep(Duration::from_secs(3))).await {
            let look = Arc::new(watcher.look(view, &beats, |_| false, (begun, clock.now())));
            if let Some(next) = next_move(&look).filter(|next| *next.from == *name)
                && look.watched >= SUSPECTED_AFTER
                && clock.now() >= moved + MOVE_EVERY
            {
                moved = clock.now();
                truth.tally.borrow_mut().moved += 1;
                let epoch = look.view.homes[usize::from(next.home)].epoch;
                let order = Order { home: next.home, epoch, to: next.to }.beat();
                let _ = first(me.ledger().beat(&order), clock.sleep(Duration::from_secs(3))).await;
            }
            seen.send_replace(Some(look));
        }
        clock.sleep((begun + Duration::from_millis(500)).saturating_sub(clock.now())).await;
    }
}

/// A home at a node: followed, taken, served, and again.
async fn run_home(node: Rc<SimulatedNode>, spawner: Spawner, home: u16) {
    let SimulatedNode { truth, me, name, .. } = &*node;
    let clock = Arc::clone(me.clock());
    let mut given_up = None;
    loop {
        let (mut directory, former) = {
            let mut disks = truth.disks.borrow_mut();
            let disk = disks.entry((name, home)).or_default();
            let former = disk.former;
            let is_own = |former: &Former| former.incarnation == me.node().incarnation();
            let served = former.filter(is_own).and_then(|former| former.served);
            disk.former = Some(Former { incarnation: me.node().incarnation(), served });
            (disk.directory.get_or_insert_with(|| Directory::new(1)).clone(), former)
        };
        let claim = HomeClaim::new(home, former, clock.now(), given_up);
        let Some(tenure) = stand_by(&node, home, claim, &mut directory).await else { return };
        let epoch = tenure.owner().epoch;
        if truth.is_rough(20) {
            // A process that is killed here has served, for all that its directory tells.
            pause().await;
        }
        let disk_of =
            |former| truth.disks.borrow_mut().get_mut(&(*name, home)).map(|disk| disk.former.replace(former));
        let before = disk_of(Former { incarnation: me.node().incarnation(), served: Some(epoch) });
        truth.tally.borrow_mut().again +=
            usize::from(before.flatten().is_some_and(|former| former.served.is_some()));
        truth.begins(&tenure, &node, &directory);
        node.tell(|told| {
            told.serves.push((home, epoch));
            told.leaves.retain(|left| *left != home);
        });
        me.beat_early();
        let running = tenure.clone();
        spawner.spawn(async move { running.run().await });
        let is_handed_over = serve(&node, &tenure, &directory).await;
        given_up = is_handed_over.then(|| clock.now());
        node.set_warm(home, false);
        node.tell(|told| {
            told.serves.retain(|(served, _)| *served != home);
            told.leaves.extend(is_handed_over.then_some(home));
        });
    }
}

/// Follows a home until it is this node's; `None` after a violation.
async fn stand_by(
    node: &SimulatedNode,
    home: u16,
    mut claim: HomeClaim,
    directory: &mut Directory,
) -> Option<Tenure> {
    let SimulatedNode { truth, me, .. } = node;
    let (clock, mut looks, shown) = (me.clock(), node.looks.clone(), node.looks.clone());
    let mut follower = Follower::new(home);
    loop {
        let decided = async {
            loop {
                looks.changed().await.ok()?;
                let look = looks.borrow_and_update().clone()?;
                if !claim.stands_back(look.at) {
                    node.tell(|told| told.leaves.retain(|left| *left != home));
                }
                if let Some(wait) = claim.decide(me, true, &look) {
                    return Some((look, wait));
                }
            }
        };
        let followed = async {
            let view = shown.borrow().as_ref().map(|look| Arc::clone(&look.view));
            let followed = match view {
                Some(view) => follower.step(me, &view, directory).await,
                None => Ok(FollowStep { applied: 0, more: true }),
            };
            clock.sleep(Duration::from_millis(500)).await;
            followed
        };
        let (look, wait) = match first(decided, followed).await {
            First::One(decided) => decided?,
            First::Other(Ok(followed)) => {
                node.set_warm(home, !followed.more);
                continue;
            }
            First::Other(Err(error)) => {
                truth.violated(format!("{} follows home {home}: {error}", node.name));
                return None;
            }
        };
        let from = look.view.homes[usize::from(home)].epoch;
        let taking = take(me, home, Some(from), wait, directory);
        // Some takeovers are given up halfway, as one that fails is.
        let is_given_up = truth.is_rough(100);
        let patience = async {
            match is_given_up {
                true => clock.sleep(Duration::from_secs(1)).await,
                false => std::future::pending().await,
            }
        };
        match first(taking, patience).await {
            First::One(Ok(tenure)) => return Some(tenure),
            First::One(Err(TakeError::View(ViewError::NotOwner { .. }))) | First::Other(()) => {}
            First::One(Err(error)) => {
                truth.violated(format!("{} takes home {home}: {error}", node.name));
                return None;
            }
        }
    }
}

/// Appends records until the home is lost or to be given up. Returns whether it was handed over.
async fn serve(node: &SimulatedNode, tenure: &Tenure, directory: &Directory) -> bool {
    let SimulatedNode { truth, me, name, looks, .. } = node;
    let (clock, owner) = (me.clock(), tenure.owner());
    let mut writer = tenure.writers().remove(0);
    for n in 0.. {
        if tenure.is_lost() || truth.is_rough(5) {
            break;
        }
        let order = looks.borrow().as_ref().and_then(|look| look.order(owner.home).cloned());
        if order.is_some_and(|order| order.epoch == owner.epoch && *order.to != **name) {
            truth.tally.borrow_mut().handed_over += 1;
            // Without an answer, somebody takes it as after a crash, this node too.
            let _ = tenure.release(vec![writer]).await;
            return true;
        }
        let key = format!("{}.{n}", owner.epoch);
        let changes = vec![(key.clone(), Some("1".to_owned()))];
        let Appended::Done(position) = writer.append(&write(&changes, 0)).await else { break };
        directory.commit(0, position, &changes);
        pause().await;
        if tenure.lease().held(clock.now()) {
            truth.acknowledges(tenure, n);
        }
        clock.sleep(Duration::from_millis(600)).await;
    }
    let mut tally = truth.tally.borrow_mut();
    if tenure.is_lost() {
        tally.lost += 1;
    } else {
        tally.abandoned += 1;
        tenure.abandon();
    }
    false
}

/// A process of each node, and what is done to it.
struct Processes {
    running: BTreeMap<&'static str, usize>,
    ways: BTreeMap<&'static str, Arc<parking_lot::Mutex<Way>>>,
}

/// Runs a seed.
fn run(seed: u64, weakening: Option<Weakening>) -> Result<Tally, String> {
    WEAKENING.set(weakening);
    let mut chance = Chance::new(seed);
    let engine = if seed.is_multiple_of(3) { Engine::Stored } else { Engine::Owned };
    let faults = Faults { lost: [0, 70][chance.below(2)], slow: 0, ..Faults::default() };
    let twin = Twin::driven(engine, chance.draw(), faults);
    let homes = 2 + chance.below(4) as u16;
    let first_view = View::create("simulated", homes, 1).store(1, 1).unwrap();
    while twin.history().is_empty() {
        drop(twin.swap(&first_view));
        while twin.deliver() {}
    }
    let truth = Rc::new(Truth {
        chance: RefCell::new(Chance::new(chance.draw())),
        twin: twin.clone(),
        homes,
        acknowledged: RefCell::default(),
        served: RefCell::default(),
        leases: RefCell::default(),
        disks: RefCell::default(),
        violation: RefCell::default(),
        tally: RefCell::default(),
        is_calm: Cell::new(false),
    });
    let mut schedule = Schedule::default();
    let mut processes = Processes { running: BTreeMap::new(), ways: BTreeMap::new() };
    let lag = [20, 100][chance.below(2)];
    // Nodes that are there from the beginning; the others join.
    for name in &NAMES[..1 + chance.below(3)] {
        processes.begin(&truth, &mut schedule, &mut chance, name);
    }
    let mut next_fault = Duration::ZERO;
    while truth.violation.borrow().is_none() && schedule.now() < ROUGH {
        if schedule.now() >= next_fault {
            next_fault = schedule.now() + Duration::from_millis(500 + chance.below(6_000) as u64);
            processes.disturb(&truth, &mut schedule, &mut chance);
        }
        if !step(&mut schedule, &twin, &mut chance, lag) {
            // All are dead or asleep.
            next_fault = schedule.now();
        }
    }

    // The faults end.
    truth.is_calm.set(true);
    for process in schedule.paused() {
        schedule.set_paused(process, false);
    }
    processes.ways.values().for_each(|way| *way.lock() = Way::Open);
    twin.calm();
    for name in NAMES {
        if !processes.running.contains_key(name) {
            processes.begin(&truth, &mut schedule, &mut chance, name);
        }
    }
    let (calm_begun, mut before_the_end) = (schedule.now(), None);
    while truth.violation.borrow().is_none() && schedule.now() < calm_begun + CALM {
        if before_the_end.is_none() && schedule.now() >= calm_begun + CALM - STILL {
            before_the_end = Some(last_view(&twin).owners());
        }
        if !step(&mut schedule, &twin, &mut chance, 0) {
            return Err("nothing goes on".to_owned());
        }
    }
    if let Some(violation) = truth.violation.borrow().clone().or_else(|| twin.written_twice()) {
        return Err(violation);
    }
    let owners = last_view(&twin).owners();
    if Some(&owners) != before_the_end.as_ref() {
        return Err(format!("homes go on changing hands: {before_the_end:?}, then {owners:?}"));
    }
    for owner in &owners {
        if truth.served.borrow().get(&owner.home) != Some(&owner.epoch) {
            return Err(format!("{owner:?} does not serve"));
        }
        let leases = truth.leases.borrow();
        let is_held = |lease: &HeldLease| lease.epoch == owner.epoch && lease.is_held();
        if !leases[&owner.home].iter().any(is_held) {
            return Err(format!("{owner:?} has no lease"));
        }
    }
    let counts = NAMES.map(|name| owners.iter().filter(|owner| &*owner.node == name).count());
    let is_even = counts.iter().max() <= counts.iter().min().map(|least| least + 1).as_ref();
    if owners.len() < usize::from(homes) || !is_even {
        return Err(format!("{homes} homes, and nodes have {counts:?}"));
    }
    let tally = *truth.tally.borrow();
    Ok(tally)
}

fn last_view(twin: &Twin) -> View {
    View::read(&twin.history().pop().unwrap()).unwrap()
}

/// Polls a task, or delivers a message, or lets time go on. Returns whether there was any of it.
fn step(schedule: &mut Schedule, twin: &Twin, chance: &mut Chance, lag: usize) -> bool {
    let ready = schedule.ready();
    if !ready.is_empty() {
        schedule.poll(ready[chance.below(ready.len())]);
        return true;
    }
    let is_late = twin.under_way() == 0 || chance.per_mille(lag);
    (is_late && schedule.advance()) || twin.deliver()
}

impl Processes {
    fn begin(&mut self, truth: &Rc<Truth>, schedule: &mut Schedule, chance: &mut Chance, name: &'static str) {
        let clock = VirtualClock::new(&schedule.time, chance);
        let way = Arc::clone(self.ways.entry(name).or_default());
        let work = |spawner| -> super::schedule::Work {
            Box::pin(run_node(Rc::clone(truth), spawner, clock, name, way))
        };
        self.running.insert(name, schedule.begin(work));
    }

    /// Starts, kills, pauses or cuts off a node.
    fn disturb(&mut self, truth: &Rc<Truth>, schedule: &mut Schedule, chance: &mut Chance) {
        let name = NAMES[chance.below(NAMES.len())];
        let Some(process) = self.running.get(name).copied() else {
            return self.begin(truth, schedule, chance, name);
        };
        let way = &self.ways[name];
        match chance.below(8) {
            0 | 1 => {
                schedule.kill(process);
                self.running.remove(name);
                if chance.per_mille(300) {
                    // Its disk is gone.
                    truth.disks.borrow_mut().retain(|(of, _), _| *of != name);
                }
            }
            2 | 3 => schedule.set_paused(process, true),
            4 => *way.lock() = Way::Cut,
            5 => *way.lock() = Way::Deaf,
            _ => {
                schedule.set_paused(process, false);
                *way.lock() = Way::Open;
            }
        }
    }
}

#[test]
fn several_homes_are_served_evenly_by_whoever_is_there() {
    let seeds = match std::env::var("CLUSTER_SEED").map(|seed| seed.parse::<u64>().unwrap()) {
        Ok(seed) => seed..seed + 1,
        Err(_) => 0..std::env::var("CLUSTER_SEEDS").map_or(300, |seeds| seeds.parse().unwrap()),
    };
    let mut sum = Tally::default();
    for seed in seeds.clone() {
        let tally = run(seed, None).unwrap_or_else(|violation| panic!("CLUSTER_SEED={seed}: {violation}"));
        sum.acknowledged += tally.acknowledged;
        sum.served += tally.served;
        sum.again += tally.again;
        sum.lost += tally.lost;
        sum.moved += tally.moved;
        sum.handed_over += tally.handed_over;
        sum.abandoned += tally.abandoned;
    }
    println!("{seeds:?}: {sum:?}");
    if seeds.end - seeds.start >= 300 {
        let least = [sum.acknowledged / 100, sum.served, sum.again, sum.lost, sum.moved, sum.abandoned];
        assert!(least.iter().all(|count| *count > 50), "the simulator does too little: {sum:?}");
    }
}

#[test]
fn a_seed_with_several_homes_runs_the_same_way_again() {
    assert!((0..3).all(|seed| run(seed, None) == run(seed, None)));
}

/// Some of the seeds must fail with this weakening.
fn caught(weakening: Weakening) {
    let mut failures = (0..2_000).filter_map(|seed| Some((seed, run(seed, Some(weakening)).err()?)));
    let (seed, violation) = failures.next().unwrap_or_else(|| panic!("{weakening:?} passes 2,000 seeds"));
    WEAKENING.set(None);
    println!("{weakening:?} fails with seed {seed}: {violation}");
}

#[test]
fn with_a_second_tenure_in_one_epoch_it_fails() {
    caught(Weakening::SameEpoch);
}

#[test]
fn with_looks_of_an_earlier_time_it_fails() {
    caught(Weakening::OldLook);
}
