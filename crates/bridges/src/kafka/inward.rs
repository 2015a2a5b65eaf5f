//! Messages from Kafka, as a member of a consumer group there. Its offsets are committed by hand, and only after messages that
//! the gateway has on its disk.
//!
//! ```text
//! taken from librdkafka ── published ── unwritten: not on the disk ── safe: not committed ── gone
//!                     └─ held: the gateway takes nothing for now
//! ```
//!
//! Records that are unwritten or safe are bounded, and so are those that come again when the gateway ends. While something is
//! held all partitions are paused; the consumer stays a member of its group.

use std::{
    collections::{BTreeMap, VecDeque},
    future::{Future, pending},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use broker::Turn;
use bytes::Bytes;
use config::{Bridge, KafkaBridge, KafkaStart, RecordFields, RecordTopic};
use gateway_core::{Commit, Properties, QoS};
use rdkafka::{
    ClientContext, Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, CommitMode, Consumer as _, ConsumerContext, Rebalance, StreamConsumer},
    error::{KafkaError, KafkaResult, RDKafkaErrorCode as Code},
    message::{BorrowedMessage, Headers as _, OwnedMessage},
};
use tokio::{
    select,
    task::{JoinHandle, spawn_blocking},
    time::{Instant, sleep_until},
};
use tracing::debug;

use super::{
    ASKING, header, settings, why,
    witness::{ClientErrors, answers},
};
use crate::{
    inward::{BridgePublisher, In, InwardMessage},
    mark::MARK,
    outward::pause,
    status::{BridgeFailure, BridgeRefusal, BridgeStatus, Reason},
};

/// Messages that are taken and not committed.
const WINDOW: usize = 1_000;
/// Bytes of payloads of these.
const WINDOW_BYTES: usize = 4 << 20;
/// Messages that are published before others of the thread have their turn.
const BURST: usize = 64;
/// The least time between two commits, unless half of the window waits for one.
const BETWEEN: Duration = Duration::from_millis(50);
/// The least time between a commit that failed and the next.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// User property of what came from Kafka: topic, partition and offset, which stay the same when it comes again.
const RECORD: &str = "kafka-record";
/// The longest text of MQTT.
const MOST_TEXT: usize = u16::MAX as usize;

/// See the module.
pub(crate) struct KafkaIn {
    sink: Sink,
    /// Topics that were not there when they were first asked for: they are read from their beginning.
    absent: Vec<String>,
    /// Names this gateway to the group there.
    member: String,
    reader: Option<KafkaMember>,
}

/// Destination of records.
struct Sink {
    kafka: KafkaBridge,
    config: Bridge,
    status: Arc<BridgeStatus>,
    door: BridgePublisher,
    /// The longest message that the gateway takes.
    most: usize,
}

/// A member of the group, and what it has in hand.
struct KafkaMember {
    consumer: Arc<KafkaConsumer>,
    /// In the order in which they were published.
    unwritten: VecDeque<UncommittedRecord>,
    /// Sum of `unwritten`.
    owing: MessageCount,
    commits: Commits,
    held: HeldRecords,
}

/// Offsets, and where they are.
struct Commits {
    consumer: Arc<KafkaConsumer>,
    /// On the disk, and not in a commit.
    safe: MessageCount,
    /// A commit that is under way, and what is in it.
    under_way: Option<(JoinHandle<KafkaResult<()>>, MessageCount)>,
    /// Earliest time of the next commit.
    next: Instant,
}

/// Records that the gateway did not take: one, and those that arrive before a pause takes hold.
struct HeldRecords {
    messages: VecDeque<OwnedMessage>,
    bytes: usize,
    retries: u32,
    retry: Instant,
}

type KafkaConsumer = StreamConsumer<Moves>;

/// A message that is published here and not committed there.
struct UncommittedRecord {
    topic: Arc<str>,
    partition: i32,
    offset: i64,
    bytes: usize,
    /// True if the message was published, and not left out.
    is_carried: bool,
    commit: Option<Arc<Commit>>,
}

/// Messages, and the bytes of their payloads.
#[derive(Debug, Clone, Copy, Default)]
struct MessageCount {
    messages: usize,
    bytes: usize,
}

impl MessageCount {
    fn add(&mut self, messages: usize, bytes: usize) {
        self.messages += messages;
        self.bytes += bytes;
    }
}

/// Hears when partitions come and go.
#[derive(Default)]
struct Moves(AtomicBool);

impl ClientContext for Moves {}

impl ConsumerContext for Moves {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        // Records that are safe are committed before another member begins after them; without waiting, as this is a thread
        // of the gateway.
        if matches!(rebalance, Rebalance::Revoke(_)) {
            let _ = consumer.commit_consumer_state(CommitMode::Async);
        }
    }

    fn post_rebalance(&self, _: &BaseConsumer<Self>, _: &Rebalance<'_>) {
        self.0.store(true, Relaxed);
    }
}

impl KafkaIn {
    /// `most` is the longest message that the gateway takes, and `member` names the gateway to the group there.
    pub(crate) fn new(
        kafka: KafkaBridge,
        config: Bridge,
        status: Arc<BridgeStatus>,
        door: BridgePublisher,
        most: usize,
        member: String,
    ) -> Self {
        Self { sink: Sink { kafka, config, status, door, most }, absent: Vec::new(), member, reader: None }
    }

    /// Joins the group. A group that was never there begins as the configuration says.
    async fn join(&mut self) -> Result<KafkaMember, BridgeFailure> {
        let Sink { kafka, config, status, .. } = &self.sink;
        let denied =
            |(key, text): (&str, String)| BridgeFailure::new(Reason::Denied, format!("{key}: {text}"));
        let mut settings = settings(status.name(), kafka).map_err(denied)?;
        let unusable = |error: KafkaError| BridgeFailure::new(Reason::Denied, error.to_string());
        // Nobody hears the errors of a consumer that has not subscribed: a producer makes the first connection.
        let errors = ClientErrors::default();
        let first = settings.create_with_context(errors.clone()).map_err(unusable)?;
        answers(first, errors, kafka.brokers.join(", ")).await?;
        let group = kafka.group.clone().unwrap_or_else(|| format!("mqtt-server-{}", status.name()));
        // The same in each run, and another for each bridge: two of one group would put each other out.
        let instance = format!("{}-{}", self.member, status.name());
        for (key, value) in [
            ("group.id", group.as_str()),
            // A gateway that comes back has its partitions at once, and not when the cluster has given up its predecessor.
            ("group.instance.id", instance.as_str()),
            ("enable.auto.commit", "false"),
            ("enable.auto.offset.store", "false"),
            // A partition that was made later, or whose offset was forgotten, is read whole rather than not at all.
            ("auto.offset.reset", "earliest"),
            // Partitions that stay are not read again when others move.
            ("partition.assignment.strategy", "cooperative-sticky"),
            ("topic.metadata.refresh.interval.ms", "30000"),
            // The records that librdkafka reads ahead are in memory.
            ("queued.min.messages", "1000"),
            ("queued.max.messages.kbytes", "4096"),
            ("fetch.max.bytes", "4194304"),
        ] {
            settings.set(key, value);
        }
        let consumer: KafkaConsumer = settings.create_with_context(Moves::default()).map_err(unusable)?;
        let reader = KafkaMember::new(Arc::new(consumer));
        let consumer = Arc::clone(&reader.consumer);
        let (topics, start, absent) = (config.topics.clone(), kafka.start, self.absent.clone());
        let begun = spawn_blocking(move || begin(&consumer, &topics, start, &absent)).await;
        match begun.unwrap_or_else(|_| {
            Err(StartFailure::Failed(BridgeFailure::new(Reason::Failed, "the client has ended")))
        }) {
            Ok(()) => Ok(reader),
            Err(StartFailure::Absent(topic)) => {
                let failure = BridgeFailure::new(Reason::Denied, format!("there is no topic \"{topic}\""));
                if !self.absent.contains(&topic) {
                    self.absent.push(topic);
                }
                Err(failure)
            }
            Err(StartFailure::Failed(failure)) => Err(failure),
        }
    }
}

impl In for KafkaIn {
    async fn serve(&mut self) -> BridgeFailure {
        if self.reader.is_none() {
            match self.join().await {
                Ok(reader) => self.reader = Some(reader),
                Err(failure) => return failure,
            }
        }
        let Some(reader) = &mut self.reader else { return BridgeFailure::new(Reason::Failed, "no consumer") };
        let failure = self.sink.bring(reader).await;
        // Records that are not committed come again.
        self.reader = None;
        failure
    }

    async fn finish(&mut self) {
        let Some(reader) = &mut self.reader else { return };
        while !reader.unwritten.is_empty() {
            if written(&reader.unwritten).await.is_err() {
                return;
            }
            reader.settle(&self.sink.status);
        }
        while reader.commits.total().messages > 0 && reader.commits.next().await.is_ok() {}
    }
}

impl Sink {
    /// Brings records in until the consumer can do nothing more.
    async fn bring(&self, reader: &mut KafkaMember) -> BridgeFailure {
        let consumer = Arc::clone(&reader.consumer);
        let mut question = Question::default();
        self.status.up();
        loop {
            let full = reader.is_full();
            let message = select! {
                written = written(&reader.unwritten) => {
                    if written.is_err() {
                        return BridgeFailure::new(Reason::Store, "the disk has not taken a message");
                    }
                    reader.settle(&self.status);
                    None
                }
                committed = reader.commits.next() => {
                    if let Err(error) = committed {
                        // Its offsets go with the next one.
                        self.status.failed(&why(&error), true);
                    }
                    None
                }
                () = reader.held.due() => {
                    self.publish_held(reader).await;
                    None
                }
                answers = question.answer(&consumer) => {
                    if answers {
                        self.status.up();
                    } else {
                        let brokers = self.kafka.brokers.join(", ");
                        let failure = BridgeFailure::new(Reason::Connect, format!("no answer from {brokers}"));
                        question.ask_in(self.failed(&failure));
                    }
                    None
                }
                message = consumer.recv(), if !full => Some(message),
            };
            if consumer.context().0.swap(false, Relaxed) {
                reader.forget_lost();
            }
            if let Some(first) = message
                && let Err(failure) = self.take(first, &consumer, reader, &mut question).await
            {
                return failure;
            }
            self.status.set_in_flight(reader.waiting().messages);
        }
    }

    /// Takes this message and those that are there already, in one turn.
    ///
    /// # Errors
    /// The consumer can do nothing more.
    async fn take<'a>(
        &self,
        first: KafkaResult<BorrowedMessage<'a>>,
        consumer: &'a KafkaConsumer,
        reader: &mut KafkaMember,
        question: &mut Question,
    ) -> Result<(), BridgeFailure> {
        let mut turn = Turn::default();
        let mut next = Some(first);
        let mut left = BURST;
        while let Some(message) = next.take() {
            match message {
                Ok(message) if reader.held.messages.is_empty() => {
                    if let Err(failure) = self.publish(reader, &message, &mut turn).await {
                        reader.hold(message.detach());
                        self.delay(reader, &failure);
                    }
                }
                Ok(message) => reader.hold(message.detach()),
                Err(error) if is_final(&error) => {
                    turn.flush();
                    return Err(why(&error));
                }
                // The client goes on by itself; whether the cluster answers is asked.
                Err(error) => question.ask_in(self.failed(&why(&error))),
            }
            left -= 1;
            if left > 0 && !reader.is_full() {
                next = ready(consumer.recv());
            }
        }
        turn.flush();
        Ok(())
    }

    /// Notes a failure; returns how long to wait.
    fn failed(&self, failure: &BridgeFailure) -> Duration {
        let count = self.status.failed(failure, false);
        let pause = pause(&self.config, count, failure.after);
        self.status.waits(pause);
        pause
    }

    /// The gateway takes nothing for now.
    fn delay(&self, reader: &mut KafkaMember, failure: &BridgeFailure) {
        self.status.failed(failure, true);
        reader.held.retries += 1;
        let pause = pause(&self.config, reader.held.retries, None);
        self.status.waits(pause);
        reader.held.retry = Instant::now() + pause;
    }

    async fn publish_held(&self, reader: &mut KafkaMember) {
        let mut turn = Turn::default();
        while let Some(message) = reader.held.messages.pop_front() {
            if let Err(failure) = self.publish(reader, &message, &mut turn).await {
                reader.held.messages.push_front(message);
                return self.delay(reader, &failure);
            }
            reader.held.bytes -= bytes_of(&message);
        }
        turn.flush();
        reader.held.retries = 0;
        if let Ok(all) = reader.consumer.assignment() {
            let _ = reader.consumer.resume(&all);
        }
        self.status.up();
    }

    /// Publishes a record, or leaves it out; it is unwritten then.
    ///
    /// # Errors
    /// The gateway takes nothing for now.
    async fn publish(
        &self,
        reader: &mut KafkaMember,
        message: &(impl rdkafka::Message + Sync),
        turn: &mut Turn,
    ) -> Result<(), BridgeFailure> {
        let payload = message.payload().unwrap_or_default();
        let published = match understand(&self.kafka.mqtt_topic, message, &self.door) {
            Ok(Some((topic, properties))) if self.door.takes(&topic) => {
                if topic.len() + payload.len() + properties.cost() > self.most {
                    self.leave_out(message, BridgeRefusal::Size);
                    None
                } else {
                    let incoming = InwardMessage {
                        topic: &topic,
                        payload,
                        qos: QoS::from_bits(self.kafka.qos).unwrap_or_default(),
                        retain: self.kafka.retain,
                        properties: Some(Arc::new(properties)),
                        expiry: None,
                    };
                    Some(self.door.publish(&incoming, turn).await?)
                }
            }
            Ok(Some(_)) => {
                self.leave_out(message, BridgeRefusal::Topic);
                None
            }
            Ok(None) => {
                self.status.looped();
                None
            }
            Err(refusal) => {
                self.leave_out(message, refusal);
                None
            }
        };
        reader.owe(message, published);
        Ok(())
    }

    fn leave_out(&self, message: &impl rdkafka::Message, refusal: BridgeRefusal) {
        let (topic, partition, offset) = (message.topic(), message.partition(), message.offset());
        debug!(bridge = self.status.name(), topic, partition, offset, ?refusal, "record is left out");
        let record = format!("record {topic}/{partition}/{offset} is left out");
        self.status.refused(refusal, topic, &record);
    }
}

impl KafkaMember {
    fn new(consumer: Arc<KafkaConsumer>) -> Self {
        let now = Instant::now();
        Self {
            unwritten: VecDeque::new(),
            owing: MessageCount::default(),
            commits: Commits {
                consumer: Arc::clone(&consumer),
                safe: MessageCount::default(),
                under_way: None,
                next: now,
            },
            held: HeldRecords { messages: VecDeque::new(), bytes: 0, retries: 0, retry: now },
            consumer,
        }
    }

    /// Counts the records that are taken and not committed.
    fn waiting(&self) -> MessageCount {
        let mut all = self.commits.total();
        all.add(self.owing.messages, self.owing.bytes);
        all.add(self.held.messages.len(), self.held.bytes);
        all
    }

    fn is_full(&self) -> bool {
        let waiting = self.waiting();
        waiting.messages >= WINDOW || waiting.bytes >= WINDOW_BYTES
    }

    /// `published` is what to wait for, if anything; `None` if it was left out.
    fn owe(&mut self, message: &impl rdkafka::Message, published: Option<Option<Arc<Commit>>>) {
        let topic = match self.unwritten.back() {
            Some(last) if *last.topic == *message.topic() => Arc::clone(&last.topic),
            _ => message.topic().into(),
        };
        let bytes = bytes_of(message);
        self.owing.add(1, bytes);
        self.unwritten.push_back(UncommittedRecord {
            topic,
            partition: message.partition(),
            offset: message.offset(),
            bytes,
            is_carried: published.is_some(),
            commit: published.flatten(),
        });
    }

    /// The gateway does not take it: nothing more is asked for until it does.
    fn hold(&mut self, message: OwnedMessage) {
        self.held.bytes += bytes_of(&message);
        self.held.messages.push_back(message);
        if let Ok(all) = self.consumer.assignment() {
            let _ = self.consumer.pause(&all);
        }
    }

    /// The first that is unwritten is on the disk, and maybe others: their offsets go with the next commit.
    fn settle(&mut self, status: &BridgeStatus) {
        let mut offsets = BTreeMap::new();
        let mut carried = MessageCount::default();
        let is_safe = |unwritten: &mut UncommittedRecord| {
            unwritten.commit.as_ref().is_none_or(|commit| commit.result() == Some(Ok(())))
        };
        while let Some(done) = self.unwritten.pop_front_if(is_safe) {
            self.owing.messages -= 1;
            self.owing.bytes -= done.bytes;
            self.commits.safe.add(1, done.bytes);
            if done.is_carried {
                carried.add(1, done.bytes);
            }
            offsets.insert((done.topic, done.partition), done.offset + 1);
        }
        status.carried(carried.messages, carried.bytes);
        let mut list = TopicPartitionList::new();
        for ((topic, partition), offset) in offsets {
            let _ = list.add_partition_offset(&topic, partition, Offset::Offset(offset));
        }
        // A partition that is no longer this member's has another that says where it is.
        let _ = self.consumer.store_offsets(&list);
    }

    /// Forgets the held records of partitions that are gone: another member has them.
    fn forget_lost(&mut self) {
        if self.held.messages.is_empty() {
            return;
        }
        let Ok(all) = self.consumer.assignment() else { return };
        self.held
            .messages
            .retain(|message| all.find_partition(message.topic(), message.partition()).is_some());
        self.held.bytes = self.held.messages.iter().map(bytes_of).sum();
        let _ = self.consumer.pause(&all);
        if self.held.messages.is_empty() {
            self.held.retry = Instant::now();
        }
    }
}

impl Drop for KafkaMember {
    /// The consumer leaves its group, which may take a while, on a thread that may wait.
    fn drop(&mut self) {
        let consumers = (Arc::clone(&self.consumer), Arc::clone(&self.commits.consumer));
        drop(spawn_blocking(move || drop(consumers)));
    }
}

impl Commits {
    /// Counts the records that are not committed.
    fn total(&self) -> MessageCount {
        let mut all = self.safe;
        if let Some((_, under_way)) = &self.under_way {
            all.add(under_way.messages, under_way.bytes);
        }
        all
    }

    /// Commits when it is time; returns when that is done, and never if there is nothing to commit. Cancel safe.
    async fn next(&mut self) -> KafkaResult<()> {
        if self.under_way.is_none() {
            if self.safe.messages == 0 {
                return pending().await;
            }
            if self.safe.messages < WINDOW / 2 && self.safe.bytes < WINDOW_BYTES / 2 {
                sleep_until(self.next).await;
            }
        }
        let consumer = &self.consumer;
        let safe = &mut self.safe;
        let (commit, _) = self.under_way.get_or_insert_with(|| {
            let consumer = Arc::clone(consumer);
            let commit = spawn_blocking(move || consumer.commit_consumer_state(CommitMode::Sync));
            (commit, std::mem::take(safe))
        });
        let done = commit.await.unwrap_or(Err(KafkaError::Canceled));
        self.next = Instant::now() + BETWEEN;
        let Some((_, under_way)) = self.under_way.take() else { return Ok(()) };
        match done {
            // There is none for a partition that has gone.
            Err(error) if error.rdkafka_error_code() != Some(Code::NoOffset) => {
                self.safe.add(under_way.messages, under_way.bytes);
                self.next = Instant::now() + AFTER_FAILURE;
                Err(error)
            }
            _ => Ok(()),
        }
    }
}

impl HeldRecords {
    /// Until it is time to try again; never if nothing is held.
    async fn due(&self) {
        if self.retries == 0 {
            return pending().await;
        }
        sleep_until(self.retry).await;
    }
}

/// Question whether the cluster answers again, after it did not.
#[derive(Default)]
struct Question {
    at: Option<Instant>,
    asked: Option<JoinHandle<bool>>,
}

impl Question {
    fn ask_in(&mut self, pause: Duration) {
        self.at = self.at.or_else(|| Some(Instant::now() + pause));
    }

    /// The answer, when one was asked for; never otherwise. Cancel safe.
    async fn answer(&mut self, consumer: &Arc<KafkaConsumer>) -> bool {
        let Some(at) = self.at else { return pending().await };
        sleep_until(at).await;
        let asked = self.asked.get_or_insert_with(|| {
            let consumer = Arc::clone(consumer);
            spawn_blocking(move || consumer.client().fetch_metadata(None, ASKING).is_ok())
        });
        let answers = asked.await.unwrap_or(false);
        *self = Self::default();
        answers
    }
}

fn bytes_of(message: &impl rdkafka::Message) -> usize {
    message.payload().map_or(0, <[u8]>::len)
}

/// Until the first that is unwritten is on the disk; never if nothing is.
async fn written(unwritten: &VecDeque<UncommittedRecord>) -> Result<(), gateway_core::CommitRefused> {
    match unwritten.front().map(|unwritten| &unwritten.commit) {
        Some(Some(commit)) => commit.wait().await,
        Some(None) => Ok(()),
        None => pending().await,
    }
}

/// Returns the output of a future that is ready at once.
fn ready<F: Future>(future: F) -> Option<F::Output> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// Tells whether the consumer has to be made anew: its files or topics may be different then.
fn is_final(error: &KafkaError) -> bool {
    matches!(error, KafkaError::MessageConsumptionFatal(_))
        || matches!(
            error.rdkafka_error_code(),
            Some(
                Code::Authentication
                    | Code::SaslAuthenticationFailed
                    | Code::TopicAuthorizationFailed
                    | Code::GroupAuthorizationFailed
                    | Code::ClusterAuthorizationFailed
                    | Code::UnknownTopic
                    | Code::UnknownTopicOrPartition
                    | Code::PollExceeded
            )
        )
}

/// Why a consumer has not begun.
enum StartFailure {
    /// This topic is not there.
    Absent(String),
    Failed(BridgeFailure),
}

impl From<KafkaError> for StartFailure {
    fn from(error: KafkaError) -> Self {
        Self::Failed(why(&error))
    }
}

/// Subscribes. Before that a group that has no offsets gets those where the topics end now, if it is to begin there: from then on
/// nothing is passed over, whenever the consumer gets its partitions. Blocks.
fn begin(
    consumer: &KafkaConsumer,
    topics: &[String],
    start: KafkaStart,
    absent: &[String],
) -> Result<(), StartFailure> {
    let mut all = TopicPartitionList::new();
    for name in topics {
        let metadata = consumer.client().fetch_metadata(Some(name), ASKING)?;
        let topic = metadata.topics().iter().find(|topic| topic.name() == name);
        let partitions = topic.map(|topic| topic.partitions()).unwrap_or_default();
        if partitions.is_empty() {
            return Err(StartFailure::Absent(name.clone()));
        }
        for partition in partitions {
            all.add_partition(name, partition.id());
        }
    }
    let committed = consumer.committed_offsets(all, ASKING)?;
    let known = |offset: Offset| matches!(offset, Offset::Offset(_));
    let is_new = !committed.elements().iter().any(|place| known(place.offset()));
    if is_new && start == KafkaStart::Latest {
        let mut ends = TopicPartitionList::new();
        for place in committed.elements() {
            let (topic, partition) = (place.topic(), place.partition());
            let (first, end) = consumer.fetch_watermarks(topic, partition, ASKING)?;
            let from = if absent.iter().any(|name| name == topic) { first } else { end };
            ends.add_partition_offset(topic, partition, Offset::Offset(from))?;
        }
        consumer.commit(&ends, CommitMode::Sync)?;
    }
    let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
    consumer.subscribe(&topics)?;
    Ok(())
}

/// Translates a record to MQTT: its topic and properties; `None` if it was in this gateway before.
fn understand(
    template: &RecordTopic,
    message: &impl rdkafka::Message,
    door: &BridgePublisher,
) -> Result<Option<(String, Properties)>, BridgeRefusal> {
    let headers = headers(message)?;
    let (mark, entry) = (door.mark.as_bytes(), door.entry.as_bytes());
    if headers.iter().any(|(name, value)| *name == MARK && (*value == mark || *value == entry)) {
        return Ok(None);
    }
    let record = RecordView { message, headers: &headers };
    let topic = template.fill(&record).ok_or(BridgeRefusal::Field)?;
    let mut properties = Properties::default();
    let place = format!("{}/{}/{}", message.topic(), message.partition(), message.offset());
    properties.user.push((RECORD.to_owned(), place));
    for (name, value) in headers {
        match name {
            header::TOPIC | header::CLIENT | header::QOS | header::RETAIN | header::ID => {}
            header::CORRELATION_DATA if value.len() <= MOST_TEXT => {
                properties.correlation_data = Some(Bytes::copy_from_slice(value));
            }
            name => {
                let (true, Some(value)) = (is_text(name), text(value)) else { continue };
                match name {
                    header::CONTENT_TYPE => properties.content_type = Some(value.to_owned()),
                    header::RESPONSE_TOPIC if !value.contains(['+', '#']) && !value.is_empty() => {
                        properties.response_topic = Some(value.to_owned());
                    }
                    _ => properties.user.push((name.to_owned(), value.to_owned())),
                }
            }
        }
    }
    door.mark(&mut properties, None);
    Ok(Some((topic, properties)))
}

/// The headers of a record, by name.
///
/// # Errors
/// One has a name that is no text.
fn headers(message: &impl rdkafka::Message) -> Result<Vec<(&str, &[u8])>, BridgeRefusal> {
    let Some(headers) = message.headers() else { return Ok(Vec::new()) };
    // The client panics on a name that is no UTF-8, which whoever writes to the topic chooses.
    let read = || headers.iter().map(|header| (header.key, header.value.unwrap_or_default())).collect();
    catch_unwind(AssertUnwindSafe(read)).map_err(|_| BridgeRefusal::Header)
}

/// Returns the value as a text that MQTT allows, if it is one.
fn text(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(value).ok().filter(|value| is_text(value))
}

fn is_text(value: &str) -> bool {
    value.len() <= MOST_TEXT && !value.contains('\0')
}

/// A record, for its topic.
struct RecordView<'a, M> {
    message: &'a M,
    headers: &'a [(&'a str, &'a [u8])],
}

impl<M: rdkafka::Message> RecordFields for RecordView<'_, M> {
    fn topic(&self) -> &str {
        self.message.topic()
    }

    fn partition(&self) -> i32 {
        self.message.partition()
    }

    fn key(&self) -> Option<&str> {
        self.message.key().and_then(text)
    }

    fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| *known == name);
        found.and_then(|(_, value)| text(value))
    }
}
