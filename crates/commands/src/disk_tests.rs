//! Stored commands over a disk that stands still, refuses, and comes back.

use std::task::Waker;

use broker::{Account, ReservedOutcome};
use gateway_core::{ClientId, Commit, CommitRefused, OriginKind, ReceiptState, clock};
use store::MemoryRecords;

use super::{topics::ReplyAddress, *};

struct World {
    disk: Arc<MemoryRecords>,
    account: Arc<Account>,
    registry: Arc<CommandRegistry>,
}

const ACKED: ReceiptState =
    ReceiptState { sent: 1, acked: 1, rejected: 0, dropped: 0, reason: None, code: None };

fn times() -> Times {
    Times { start: Timestamp(0), expire: clock::now().plus_millis(1_000_000), retry: None }
}

/// After an end that was refused is tried again, and before commands expire.
fn later() -> Timestamp {
    clock::now().plus_millis(10_000)
}

impl World {
    fn new() -> Self {
        Self::on(Arc::default())
    }

    fn on(disk: Arc<MemoryRecords>) -> Self {
        let options = CommandRegistryOptions {
            max_outstanding: 10,
            max_outstanding_per_device: 1,
            max_active: 10,
            max_active_per_device: 10,
            max_bytes: 1 << 20,
            keep: Duration::from_secs(60),
            max_kept: 10,
        };
        let account = Arc::new(Account::new(64 << 20));
        let registry = CommandRegistry::open(options, Arc::clone(&disk) as _, &account).unwrap();
        Self { disk, account, registry }
    }

    /// As the next process finds it after a crash now: what waits for the disk is lost.
    fn crashed(self) -> Self {
        self.disk.crash();
        Self::on(self.disk)
    }

    /// The disk goes on, and takes nothing of what has waited.
    fn refuse(&self) {
        self.disk.fail(true);
        self.disk.hold(false);
        self.disk.fail(false);
    }

    async fn start(&self, id: &str) -> Result<Arc<CommandRecord>, CommandStartError> {
        let spec = Spec {
            device: "d".into(),
            name: "reboot".to_owned(),
            payload: Bytes::from_static(b"now"),
            properties: None,
            qos: QoS::AtLeastOnce,
        };
        self.registry.start(Some(id.to_owned()), spec, times(), CommandDigest::default()).await
    }

    /// Begins an attempt at the only command that may go out; its number and the attempt's.
    fn send(&self, now: Timestamp) -> Option<(u64, u32)> {
        self.registry.tick(now, 100);
        let parcel = self.registry.next_parcels()?.into_iter().next()?;
        Some((parcel.number, self.registry.begin(parcel.number)?))
    }

    /// A command that its device has acknowledged.
    async fn delivered(&self, id: &str) {
        self.start(id).await.unwrap();
        let (number, attempt) = self.send(clock::now()).unwrap();
        self.registry.progress(number, attempt, &ACKED);
        assert_eq!(self.state(id), Some(CommandState::Delivered));
    }

    /// The device answers a command at QoS 1: the commit of its PUBACK.
    fn reply(&self, id: &str) -> Arc<Commit> {
        let device = ClientId::new("d");
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 0 };
        let mut message = Message::new("cmd", b"done", clock::now(), origin);
        message.qos = QoS::AtLeastOnce;
        let taken = self.registry.take("d", &ReplyAddress { id, status: Some(200) }, &message);
        assert_eq!(taken, Some(ReservedOutcome::Taken));
        let commit = Arc::clone(message.commit().expect("QoS 1"));
        commit.done();
        commit
    }

    fn state(&self, id: &str) -> Option<CommandState> {
        self.registry.get(id).map(|record| record.machine.state())
    }
}

/// Returns the result of a commit; `None` if it has not ended.
fn result(commit: &Commit) -> Option<Result<(), CommitRefused>> {
    commit.poll(Waker::noop())
}

/// The failure: a reply that a device resends after a reconnect, while the disk is slow to write it, is acknowledged at
/// once. The device forgets the reply, a crash comes before the disk has it, and the command never has one.
#[tokio::test]
async fn a_reply_sent_again_is_acknowledged_with_the_first() {
    let world = World::new();
    world.delivered("c").await;
    world.disk.hold(true);
    let (first, again) = (world.reply("c"), world.reply("c"));
    assert_eq!((result(&first), result(&again)), (None, None), "nothing is on disk");
    let world = world.crashed();
    assert_eq!(
        world.state("c"),
        Some(CommandState::Delivered),
        "so the device must not have forgotten its reply"
    );

    world.disk.hold(true);
    let (first, again) = (world.reply("c"), world.reply("c"));
    world.disk.hold(false);
    assert_eq!((result(&first), result(&again)), (Some(Ok(())), Some(Ok(()))));
    assert_eq!(world.state("c"), Some(CommandState::Replied));
    assert_eq!(result(&world.reply("c")), Some(Ok(())), "what is on disk is nothing to wait for");
    assert_eq!(world.crashed().state("c"), Some(CommandState::Replied));
}

/// The failure: a reply that comes while the command is being cancelled is acknowledged and dropped; the disk refuses the
/// cancellation, the command goes on, and its reply is lost.
#[tokio::test]
async fn a_reply_is_not_dropped_for_an_end_that_is_refused() {
    let world = World::new();
    world.delivered("c").await;
    world.disk.hold(true);
    let registry = Arc::clone(&world.registry);
    let cancelling =
        tokio::spawn(async move { registry.cancel("c").await.map(|record| record.machine.state()) });
    tokio::task::yield_now().await;
    let early = world.reply("c");
    assert_eq!(result(&early), None, "the command has not ended yet");
    world.refuse();
    assert_eq!(result(&early), Some(Err(CommitRefused)));
    assert_eq!(cancelling.await.unwrap(), Err(CancelError::Store));
    assert_eq!(world.state("c"), Some(CommandState::Delivered));
    assert_eq!(result(&world.reply("c")), Some(Ok(())));
    assert_eq!(world.crashed().state("c"), Some(CommandState::Replied));
}

/// The failure: a start that the disk refuses leaves something behind: a place among the active ones, memory, or its id.
#[tokio::test]
async fn a_start_that_is_refused_leaves_nothing() {
    let world = World::new();
    world.disk.hold(true);
    let starts = ["c", "c", "other"].map(|id| {
        let world = World {
            disk: Arc::clone(&world.disk),
            account: Arc::clone(&world.account),
            registry: Arc::clone(&world.registry),
        };
        tokio::spawn(async move { world.start(id).await.map(drop) })
    });
    tokio::task::yield_now().await;
    assert_eq!((world.state("c"), world.registry.active()), (None, 2), "one of the three joins another");
    world.refuse();
    for start in starts {
        assert_eq!(start.await.unwrap(), Err(CommandStartError::Store));
    }
    assert_eq!(world.send(later()), None, "nothing goes out that is not on disk");
    assert_eq!(world.registry.active(), 0);
    assert_eq!(world.account.held(broker::MemoryKind::Commands), 0);
    world.delivered("c").await;
    assert_eq!(world.crashed().state("c"), Some(CommandState::Delivered));
}

/// The failure: the end of a command whose time is over is refused by the disk, and told all the same, or never tried again.
#[tokio::test]
async fn an_expiry_that_is_refused_is_tried_again() {
    let world = World::new();
    world.delivered("c").await;
    let (_, watching) = world.registry.watch("c").unwrap();
    let mut watching = watching.unwrap();
    let over = times().expire.plus_millis(1);
    world.disk.hold(true);
    world.registry.tick(over, 100);
    assert_eq!(world.state("c"), Some(CommandState::Delivered), "it has not ended before that is on disk");
    world.refuse();
    assert!(watching.try_recv().is_err(), "nobody is told of an end that is not one");
    assert_eq!((world.state("c"), world.registry.active()), (Some(CommandState::Delivered), 1));
    let next = world.registry.tick(clock::now(), 100).expect("it is due again");
    assert!(next <= later(), "and soon");
    world.registry.tick(over, 100);
    assert_eq!(watching.try_recv().unwrap().machine.state(), CommandState::TimedOut);
    assert_eq!(world.registry.active(), 0);
    assert_eq!(world.crashed().state("c"), Some(CommandState::TimedOut));
}

/// The failure: the device does not take a command, the disk refuses that end, and the command keeps its place among those that
/// are out, and so holds up all others of its device, until it is over; and then it has ended in another way than it did.
#[tokio::test]
async fn a_refusal_that_is_not_written_is_tried_again() {
    let world = World::new();
    world.start("c").await.unwrap();
    let (number, attempt) = world.send(clock::now()).unwrap();
    world.disk.hold(true);
    let rejected = ReceiptState { acked: 0, rejected: 1, code: Some(0x87), ..ACKED };
    assert!(world.registry.progress(number, attempt, &rejected), "nothing more comes of this attempt");
    world.refuse();
    assert_eq!(world.registry.active(), 1);
    world.start("next").await.unwrap();
    assert_eq!(world.send(later()).map(|(number, _)| number), Some(number + 1), "the device's place is free");
    assert_eq!(world.state("c"), Some(CommandState::Refused));
    let world = world.crashed();
    assert_eq!(
        world.registry.get("c").map(|record| (record.machine.state(), record.code)),
        Some((CommandState::Refused, Some(0x87)))
    );
}

/// The failure: replies that wait for a slow disk are in memory and on nobody's account.
#[tokio::test]
async fn a_reply_that_waits_for_the_disk_is_on_the_account() {
    let world = World::new();
    world.delivered("c").await;
    let held = || world.account.held(broker::MemoryKind::Commands);
    let before = held();
    for is_written in [false, true] {
        world.disk.hold(true);
        world.reply("c");
        assert_eq!(held(), before + "done".len());
        if is_written {
            world.disk.hold(false)
        } else {
            world.refuse()
        }
        assert_eq!(held(), before + if is_written { "done".len() } else { 0 });
    }
}
