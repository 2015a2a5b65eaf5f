//! Calls of Fetch over a log whose reads take time.

use super::*;

/// A log whose reads end one after the other, a millisecond apart, or fail.
pub(super) struct Slow {
    pub(super) log: Arc<MemoryLog>,
    pub(super) reads: std::sync::atomic::AtomicU64,
    pub(super) fails: std::sync::atomic::AtomicBool,
}

impl Slow {
    pub(super) fn new(log: &Arc<MemoryLog>) -> Arc<Self> {
        Arc::new(Self { log: Arc::clone(log), reads: 0.into(), fails: false.into() })
    }
}

impl PartitionedLog for Slow {
    fn append(
        &self,
        partition: Partition,
        groups: &Arc<[GroupId]>,
        message: &Arc<gateway_core::SharedMessage>,
        commit: Option<Arc<gateway_core::Commit>>,
    ) -> Result<(), store::LogFull> {
        self.log.append(partition, groups, message, commit)
    }
    fn admit(&self, message: &Message<'_>) -> Result<(), gateway_core::NoRoom> {
        self.log.admit(message)
    }
    fn submitted(&self) -> u64 {
        self.log.submitted()
    }
    fn ended(&self) -> u64 {
        self.log.ended()
    }
    fn read(&self, partition: Partition, from: u64, limit: ReadLimit) -> LogRead {
        let LogRead::Now(slice) = self.log.read(partition, from, limit) else {
            unreachable!("it is in memory")
        };
        if self.fails.load(std::sync::atomic::Ordering::Relaxed) {
            let error = StoreError::Unavailable("too many reads of the log wait".to_owned());
            return LogRead::Later(Box::pin(async move { Err(error) }));
        }
        let millis = 1 + self.reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 3;
        LogRead::Later(Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(millis)).await;
            Ok(slice)
        }))
    }
    fn find(
        &self,
        partition: Partition,
        time: Timestamp,
    ) -> store::BoxFuture<'static, Result<u64, StoreError>> {
        self.log.find(partition, time)
    }
    fn bounds(&self, partition: Partition) -> PartitionBounds {
        self.log.bounds(partition)
    }
    fn trim(&self, partition: Partition, before: u64) {
        self.log.trim(partition, before);
    }
    fn marks(&self, group: GroupId) -> Vec<store::Mark> {
        self.log.marks(group)
    }
    fn bytes(&self) -> u64 {
        self.log.bytes()
    }
    fn id(&self) -> u64 {
        self.log.id()
    }
    fn watch(&self, watcher: Arc<dyn store::LogWatcher>) {
        self.log.watch(watcher);
    }
    fn health(&self) -> store::StoreHealth {
        self.log.health()
    }
}

/// Rules out that a call gets what the first of several reads of the disk has brought, and the others are made again.
#[tokio::test(start_paused = true)]
async fn a_fetch_has_all_that_it_asks_for_although_it_is_read_in_pieces() {
    let _ = clock();
    let log = Slow::new(&Arc::new(MemoryLog::new(MemoryLogOptions::default())));
    let state = Arc::new(MemoryRecords::new());
    let groups = load_from(Arc::clone(&log) as _, &state).await;
    let (info, _) = groups.create(definition("g"), &GroupStart::Latest).await.expect("a group");
    for number in 0..600 {
        let id = ClientId::new(&format!("device-{}", number % 3));
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 0 };
        let message = Message::new("t", b"x", clock(), origin);
        let partition = Partition::of(Some(id.as_str()), "t");
        log.append(partition, &Arc::from([info.id]), message.share(), None).expect("room");
    }
    let room = Room { messages: 500, ..ROOM };
    // A caller who does not wait gets the full batch too.
    let fetch = || groups.fetch("g", joining("m", LONG), room, Duration::ZERO);
    assert_eq!(fetch().await.expect("a batch").deliveries.len(), 500);
    assert_eq!(fetch().await.expect("the rest").deliveries.len(), 100);
    assert_eq!(fetch().await.expect("nothing").deliveries.len(), 0);
}
