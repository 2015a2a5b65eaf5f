//! Surroundings of the group, and the behaviour expected of it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use gateway_core::{ClientId, GroupId, LogRecord, Message, Origin, OriginKind, Partition, Timestamp};

use crate::*;

pub(super) type MessagePlace = (u8, u64);

/// A message of the list.
#[derive(Debug, Clone)]
pub(super) struct ModelEntry {
    pub(super) record: LogRecord,
    /// The group's, or another's.
    pub(super) is_ours: bool,
    /// Its device and topic.
    pub(super) key: String,
    /// The message need not come: retention or a seek went past it.
    pub(super) excused: bool,
    /// An answer said so, or its letter is on disk: it must not come.
    pub(super) is_settled: bool,
    /// Acknowledged or buried, and not on disk yet: it does not come unless there is a crash.
    pub(super) is_settling: bool,
    /// Is given up.
    pub(super) is_dying: bool,
}

/// A consumer that reads.
#[derive(Debug)]
pub(super) struct Consumer {
    pub(super) key: MemberKey,
    pub(super) name: String,
    pub(super) credit: Credit,
    pub(super) lease: u64,
    pub(super) fetches: bool,
    /// Deliveries that hold, by number.
    pub(super) has: BTreeMap<u64, Delivery>,
    /// Consumers that no longer read.
    pub(super) void: BTreeSet<u64>,
    pub(super) last: u64,
    /// Its stream is there.
    pub(super) is_here: bool,
    pub(super) is_draining: bool,
}

impl Consumer {
    pub(super) fn hear(&mut self, revoked: &[IdRange]) {
        for id in revoked.iter().flat_map(|range| range.first..=range.last) {
            assert!(id <= self.last, "what was never delivered is not revoked");
            self.has.remove(&id);
            self.void.insert(id);
        }
    }
}

/// Write under way.
#[derive(Debug, Default)]
pub(super) struct PendingWrite {
    pub(super) changes: Vec<PartitionChange>,
    pub(super) settled: Vec<MessagePlace>,
    pub(super) roster: Option<Bytes>,
}

pub(super) struct World {
    pub(super) random: Random,
    pub(super) now: Timestamp,
    pub(super) config: GroupConfig,
    pub(super) group: Group,
    pub(super) log: BTreeMap<u8, Vec<ModelEntry>>,
    pub(super) trimmed: BTreeMap<u8, u64>,
    pub(super) next_offset: u64,
    pub(super) disk: BTreeMap<u8, Bytes>,
    pub(super) disk_roster: Option<Bytes>,
    pub(super) writes: VecDeque<PendingWrite>,
    /// Settled since the last write was taken.
    pub(super) settled: Vec<MessagePlace>,
    pub(super) reads: Vec<Read>,
    pub(super) consumers: Vec<Consumer>,
    /// Consumers of the last process, which have not come back.
    pub(super) parted: Vec<Consumer>,
    pub(super) awake: BTreeSet<u64>,
    pub(super) life: u32,
    pub(super) generation: u32,
    pub(super) names: u64,
    pub(super) letters: Vec<MessagePlace>,
}

/// SplitMix64.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let a = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        b ^ (b >> 31)
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit.max(1) as u64).expect("fits")
    }

    pub(super) fn chance(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        (!from.is_empty()).then(|| &from[self.below(from.len())])
    }
}

pub(super) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

impl World {
    pub(super) fn run(seed: u64) {
        let mut random = Random(seed);
        let config = GroupConfig {
            order_key: [OrderKey::Device, OrderKey::Device, OrderKey::DeviceTopic, OrderKey::None]
                [random.below(4)],
            ack_deadline: ms([50, 1_000][random.below(2)]),
            max_attempts: [0, 0, 1, 2, 3][random.below(5)],
            min_backoff: ms([0, 10, 100][random.below(3)]),
            max_backoff: ms(200),
            paused: false,
        };
        let mut world = Self {
            random,
            now: Timestamp(1_000),
            config,
            group: Group::new(identity(1, 1), config),
            log: (0..3).map(|partition| (partition * 100, Vec::new())).collect(),
            trimmed: BTreeMap::new(),
            next_offset: 0,
            disk: BTreeMap::new(),
            disk_roster: None,
            writes: VecDeque::new(),
            settled: Vec::new(),
            reads: Vec::new(),
            consumers: Vec::new(),
            parted: Vec::new(),
            awake: BTreeSet::new(),
            life: 1,
            generation: 1,
            names: 0,
            letters: Vec::new(),
        };
        let steps = 10 + world.random.below(90);
        for _ in 0..steps {
            world.step();
            world.check();
        }
        world.finish();
    }

    pub(super) fn append(&mut self, partition: u8, device: usize, topic: usize, is_ours: bool) {
        self.next_offset += 1 + self.random.below(3) as u64;
        let offset = self.next_offset;
        let id = ClientId::new(&format!("device-{partition}-{device}"));
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 0 };
        let topic = format!("t/{topic}");
        let payload = vec![0; self.random.below(200)];
        let message = Message::new(&topic, &payload, self.now, origin);
        let groups: Arc<[GroupId]> =
            if is_ours { [GroupId(1), GroupId(2)].into() } else { [GroupId(2)].into() };
        let record = LogRecord { offset, groups, message: Arc::clone(message.share()) };
        let key = match self.config.order_key {
            OrderKey::Device => id.as_str().to_owned(),
            OrderKey::DeviceTopic => format!("{id} {topic}"),
            OrderKey::None => offset.to_string(),
        };
        let entry = ModelEntry {
            record: record.clone(),
            is_ours,
            key,
            excused: false,
            is_settled: false,
            is_settling: false,
            is_dying: false,
        };
        self.log.get_mut(&partition).expect("a partition").push(entry);
        if is_ours {
            self.group.appended(Partition(partition), &record);
        }
    }

    pub(super) fn entry(&mut self, (partition, offset): MessagePlace) -> &mut ModelEntry {
        let entries = self.log.get_mut(&partition).expect("a partition");
        let at = entries.binary_search_by_key(&offset, |entry| entry.record.offset).expect("was appended");
        &mut entries[at]
    }

    pub(super) fn end(&self, partition: u8) -> u64 {
        self.log[&partition].last().map_or(0, |entry| entry.record.offset + 1)
    }

    /// A read comes back.
    pub(super) fn answer_read(&mut self, read: Read) {
        let partition = read.partition.0;
        let trimmed = self.trimmed.get(&partition).copied().unwrap_or_default();
        let from = read.from.max(trimmed);
        let missing = (read.from < trimmed).then_some(ReadGap { until: trimmed, reason: GapReason::Removed });
        let limit = 1 + self.random.below(read.records);
        let none = Vec::new();
        let all = self.log.get(&partition).unwrap_or(&none);
        let behind = all.iter().filter(|entry| entry.record.offset >= from);
        let mut records: Vec<LogRecord> = behind.map(|entry| entry.record.clone()).collect();
        let is_all = records.len() <= limit;
        records.truncate(limit);
        let end = all.last().map_or(0, |entry| entry.record.offset + 1);
        let last = records.last().map(|record| record.offset + 1);
        let next = if is_all { end.max(from) } else { last.unwrap_or(from) };
        self.group.feed(&read, records, next, missing, |record| record.groups.contains(&GroupId(1)));
    }

    /// A consumer takes what is there, and asks for what is to be read.
    pub(super) fn poll(&mut self, at: usize, most: usize) {
        if most > 0 {
            self.tell_all();
        }
        let key = self.consumers[at].key;
        if most > 0 {
            self.awake.remove(&key.number);
        }
        let room = Room { messages: most, bytes: 200 + self.random.below(2_000) };
        let taken = match self.group.take(key, self.now, room) {
            Ok(taken) => taken,
            Err(MemberGone) => {
                let consumer = self.consumers.remove(at);
                assert!(
                    !consumer.is_here || consumer.fetches || self.replaced(&consumer),
                    "nobody goes unasked"
                );
                return;
            }
        };
        self.consumers[at].hear(&taken.revoked);
        if !taken.deliveries.is_empty() {
            self.awake.insert(key.number);
        }
        assert!(taken.deliveries.len() <= most);
        let deliveries = taken.deliveries;
        for delivery in &deliveries {
            self.delivered(at, delivery);
        }
        let limit = 1 + self.random.below(3);
        let reads = self.group.wants(key, limit).expect("still here");
        if reads.len() == limit {
            self.awake.insert(key.number);
        }
        for read in reads {
            self.reads.push(read);
        }
    }

    /// Tells all consumers of their void messages, which may be another's before that.
    fn tell_all(&mut self) {
        for consumer in &mut self.consumers {
            match self.group.take(consumer.key, self.now, Room { messages: 0, bytes: 0 }) {
                Ok(taken) => consumer.hear(&taken.revoked),
                Err(MemberGone) => consumer.has.clear(),
            }
        }
    }

    fn replaced(&self, gone: &Consumer) -> bool {
        self.consumers.iter().any(|other| other.name == gone.name)
    }

    fn delivered(&mut self, at: usize, delivery: &Delivery) {
        let place = (delivery.partition.0, delivery.record.offset);
        let consumer = &mut self.consumers[at];
        assert!(!consumer.is_draining, "nothing new for who drains");
        let is_next = delivery.id == consumer.last + 1;
        // Numbers of what was acknowledged after a restart are left out.
        assert!(is_next || (consumer.fetches && delivery.id > consumer.last), "numbers count");
        consumer.last = delivery.id;
        consumer.has.insert(delivery.id, delivery.clone());
        let bytes: usize = consumer.has.values().map(|has| has.record.message.cost()).sum();
        let again = consumer.has.values().filter(|has| (has.partition.0, has.record.offset) == place);
        assert_eq!(again.count(), 1, "it has {place:?} already");
        assert!(consumer.has.len() <= consumer.credit.messages, "more than its credit of messages");
        assert!(consumer.has.len() == 1 || bytes <= consumer.credit.bytes, "more than its credit of bytes");
        let name = consumer.name.clone();
        let entry = self.entry(place).clone();
        assert!(entry.is_ours, "of another group: {place:?}");
        assert!(!entry.is_settled, "answered and delivered again: {place:?}");
        assert!(!entry.is_settling, "acknowledged and delivered again: {place:?}");
        assert!(!entry.is_dying, "given up and delivered again: {place:?}");
        let others = self.consumers.iter().filter(|other| other.is_here && other.name != name);
        for other in others {
            let same = other.has.values().any(|has| (has.partition.0, has.record.offset) == place);
            assert!(!same, "two have {place:?}");
        }
        let earlier = self.log[&place.0].iter().take_while(|other| other.record.offset < place.1);
        let earlier: Vec<ModelEntry> =
            earlier.filter(|other| other.is_ours && other.key == entry.key).cloned().collect();
        for other in earlier {
            let with = |consumer: &Consumer| {
                consumer
                    .has
                    .values()
                    .any(|has| (has.partition.0, has.record.offset) == (place.0, other.record.offset))
            };
            let fine = other.is_settled
                || other.is_settling
                || other.is_dying
                || other.excused
                || self.consumers.iter().any(with);
            assert!(fine, "{place:?} before {} of its key", other.record.offset);
        }
    }

    /// Checks that the group's status of itself is true, and within bounds.
    pub(super) fn check(&mut self) {
        if self.random.chance(4) {
            self.group.verify();
        }
        self.find_dying();
        self.awake.extend(self.group.woken());
        let status = self.group.status();
        let held: usize = self.consumers.iter().map(|consumer| consumer.credit.messages).sum();
        assert!(status.outstanding.messages <= held + 100);
    }

    /// Writes what waits to be written, as far as the disk allows.
    pub(super) fn begin_write(&mut self) {
        self.awake.extend(self.group.woken());
        let settled = std::mem::take(&mut self.settled);
        let changes = self.group.changes();
        let roster = self.group.roster_change();
        self.writes.push_back(PendingWrite { changes, settled, roster });
    }

    pub(super) fn end_write(&mut self) {
        let Some(write) = self.writes.pop_front() else { return };
        for change in write.changes {
            let floor = Progress::decode(&change.record).expect("own record").floor();
            assert_eq!(floor, change.floor);
            self.disk.insert(change.partition.0, change.record);
        }
        self.disk_roster = write.roster.or_else(|| self.disk_roster.take());
        for place in write.settled {
            let entry = self.entry(place);
            if std::mem::take(&mut entry.is_settling) {
                entry.is_settled = true;
                if std::mem::take(&mut entry.is_dying) {
                    self.letters.push(place);
                }
            }
        }
    }

    pub(super) fn flush(&mut self) {
        self.begin_write();
        while !self.writes.is_empty() {
            self.end_write();
        }
    }

    pub(super) fn settling(&mut self, place: MessagePlace) {
        self.entry(place).is_settling = true;
        self.settled.push(place);
    }

    pub(super) fn ack_some(&mut self, at: usize, ids: &[u64]) {
        let consumer = &self.consumers[at];
        let ranges = Ranges::of(ids.iter().map(|&id| IdRange { first: id, last: id }));
        let answer = self.group.acknowledge(consumer.key, &ranges).expect("is here");
        for &id in ids {
            let consumer = &mut self.consumers[at];
            let fine = !consumer.void.contains(&id) && (1..=consumer.last).contains(&id);
            assert_eq!((answer.ok.contains(id), answer.lost.contains(id)), (fine, !fine), "answer to {id}");
            if let Some(has) = consumer.has.remove(&id) {
                self.settling((has.partition.0, has.record.offset));
            }
        }
    }

    /// Reads, delivers and acknowledges all that is left; then nothing may be missing.
    fn finish(&mut self) {
        let config = GroupConfig { paused: false, ..self.config };
        self.group.set_config(config);
        self.flush();
        let gone: Vec<usize> = (0..self.consumers.len()).rev().collect();
        for at in gone {
            if self.consumers[at].is_draining || !self.consumers[at].is_here || self.random.chance(2) {
                let consumer = self.consumers.remove(at);
                self.group.close(consumer.key, self.now);
            }
        }
        self.join("last", 0, Credit { messages: 5, bytes: 2_000 }, false, &[]);
        self.check();
        for round in 0.. {
            assert!(round < 400, "stuck: {}", self.left());
            self.bury_all();
            while let Some(read) = self.reads.pop() {
                self.answer_read(read);
            }
            self.check();
            let awake: Vec<usize> = (0..self.consumers.len())
                .filter(|&at| self.awake.contains(&self.consumers[at].key.number))
                .collect();
            let idle = awake.is_empty();
            for at in awake.into_iter().rev() {
                let key = self.consumers[at].key;
                self.poll(at, 3);
                let Some(consumer) = self.consumers.get(at).filter(|consumer| consumer.key == key) else {
                    continue;
                };
                let ids: Vec<u64> = consumer.has.keys().copied().collect();
                self.ack_some(at, &ids);
            }
            self.check();
            if idle && self.reads.is_empty() {
                let next = self.group.tick(self.now);
                self.check();
                let consumers = &self.consumers;
                self.awake.retain(|number| consumers.iter().any(|consumer| consumer.key.number == *number));
                if !self.awake.is_empty() {
                    continue;
                }
                match next {
                    Some(next) => {
                        self.now = next.max(self.now.plus_millis(1));
                        self.group.tick(self.now);
                        self.check();
                    }
                    // Messages that are being given up may hold others up.
                    None if self.find_dying() => {}
                    None => break,
                }
            }
        }
        while self.find_dying() {
            self.bury_all();
        }
        self.flush();
        assert!(self.left().is_empty(), "missing: {}", self.left());
        let status = self.group.status();
        assert_eq!((status.waiting, status.outstanding.messages, status.lagging_keys), (0, 0, 0));
        for (&partition, entries) in &self.log {
            let idle = self.group.is_idle(Partition(partition));
            let end = entries.iter().rfind(|entry| entry.is_ours).map_or(0, |entry| entry.record.offset + 1);
            let floor = self.group.floor(Partition(partition));
            assert!(idle && floor >= end, "{partition}: {floor} before {end}, {idle}");
        }
    }

    fn left(&self) -> String {
        let all = self
            .log
            .iter()
            .flat_map(|(partition, entries)| entries.iter().map(move |entry| (partition, entry)));
        let left = all
            .filter(|(_, entry)| entry.is_ours && !entry.is_settled && !entry.excused && !entry.is_settling);
        left.map(|(partition, entry)| format!("{partition}/{} ", entry.record.offset)).collect()
    }

    /// Joins, and says that it works on these.
    pub(super) fn join(
        &mut self,
        name: &str,
        lease: u64,
        credit: Credit,
        fetches: bool,
        claims: &[Option<MessagePlace>],
    ) {
        let outstanding: Vec<ClaimedPlace> = claims
            .iter()
            .map(|claim| claim.map(|(partition, offset)| (Partition(partition), offset)))
            .collect();
        let options = MemberOptions { name, lease: ms(lease), credit, fetches, outstanding: &outstanding };
        let joined = self.group.join(&options, self.now).expect("room");
        let before = self.consumers.iter().position(|consumer| consumer.name == name);
        if let Some(before) = before {
            if self.consumers[before].key == joined.member {
                self.consumers[before].credit = credit;
                self.awake.insert(joined.member.number);
                return;
            }
            let before = self.consumers.remove(before);
            assert!(matches!(
                self.group.take(before.key, self.now, Room { messages: 1, bytes: 1 }),
                Err(MemberGone)
            ));
        }
        self.awake.insert(joined.member.number);
        self.consumers.push(Consumer {
            key: joined.member,
            name: name.to_owned(),
            credit,
            lease,
            fetches,
            has: BTreeMap::new(),
            void: BTreeSet::new(),
            last: claims.len() as u64,
            is_here: true,
            is_draining: false,
        });
        self.resume(claims);
    }

    /// Finds what the last consumer has named.
    fn resume(&mut self, claims: &[Option<MessagePlace>]) {
        let Some(key) = self.consumers.last().map(|consumer| consumer.key) else { return };
        while let Some(recall) = self.group.next_recall(key).expect("is here") {
            let most = 1 + self.random.below(4);
            let entries = &self.log.get(&recall.partition.0).map_or(&[][..], |entries| entries);
            let trimmed = self.trimmed.get(&recall.partition.0).copied().unwrap_or_default();
            let behind = entries.iter().filter(|entry| entry.record.offset >= recall.from.max(trimmed));
            let records: Vec<LogRecord> = behind.take(most).map(|entry| entry.record.clone()).collect();
            let next = if records.len() < most { self.end(recall.partition.0) } else { 0 };
            let next = records.last().map_or(next, |last| last.offset + 1).max(next).max(recall.from);
            let wanted = |record: &LogRecord| record.groups.contains(&GroupId(1));
            self.group.recall(key, &recall, &records, next, wanted, self.now).expect("is here");
        }
        let refused = self.group.resume(key).expect("is here");
        for (id, claim) in (1..).zip(claims) {
            let Some(place) = claim.filter(|_| !refused.contains(id)) else {
                self.consumers.last_mut().expect("joined").void.insert(id);
                continue;
            };
            let entry = self.entry(place).clone();
            // Its letter may be about to be written.
            assert!(entry.is_ours && (!entry.is_dying || entry.is_settling), "{place:?} cannot be had");
            if self.is_outstanding(place) {
                self.hold(key, id, place);
            } else {
                let is_settled = entry.is_settled || entry.is_settling || entry.excused;
                assert!(is_settled, "{place:?} is not settled");
            }
        }
    }

    fn is_outstanding(&self, place: MessagePlace) -> bool {
        self.group.pending(None, usize::MAX).iter().any(|pending| {
            let is_out = matches!(pending.state, PendingState::Outstanding(_));
            is_out && (pending.partition.0, pending.offset) == place
        })
    }

    /// The last consumer has what it has named.
    fn hold(&mut self, key: MemberKey, id: u64, (partition, offset): MessagePlace) {
        let record = self.entry((partition, offset)).record.clone();
        let identity = self.group.identity();
        let ack_id = AckId {
            group: GroupId(1),
            generation: identity.generation,
            partition: Partition(partition),
            offset,
            key: identity.key(self.config.order_key, offset, &record.message),
            member: key.number,
            delivery: id,
        };
        let place = |has: &Delivery| (has.partition.0, has.record.offset) == (partition, offset);
        let others = self.consumers.iter().filter(|other| other.is_here && other.key != key);
        assert!(!others.flat_map(|other| other.has.values()).any(place), "two have {partition}/{offset}");
        let (partition, deadline) = (Partition(partition), self.now);
        let delivery = Delivery { id, attempt: 1, deadline, partition, record, ack_id };
        self.consumers.last_mut().expect("joined").has.insert(id, delivery);
    }

    /// Makes up the claims of a consumer: some of the messages that it has, and nonsense.
    pub(super) fn claims(&mut self, consumer: &Consumer) -> Vec<Option<MessagePlace>> {
        let mut claims = Vec::new();
        for has in consumer.has.values() {
            if !self.random.chance(3) {
                claims.push(Some((has.partition.0, has.record.offset)));
            }
        }
        while self.random.chance(3) {
            let partition = [0, 100, 200][self.random.below(3)];
            let place = self.random.pick(&self.log[&partition]).map(|entry| (partition, entry.record.offset));
            let at = self.random.below(claims.len() + 1);
            claims.insert(at, place);
        }
        claims
    }

    pub(super) fn bury_all(&mut self) {
        for (partition, offset) in self.group.given_up(usize::MAX) {
            let place = (partition.0, offset);
            if self.random.chance(4) {
                self.group.not_buried(partition, offset);
                continue;
            }
            let Some((attempts, _)) = self.group.bury(partition, offset) else {
                assert!(self.entry(place).excused, "only retention takes it away");
                continue;
            };
            assert!(attempts >= 1);
            self.settling(place);
            self.entry(place).is_dying = true;
        }
    }
}

pub(super) fn identity(life: u32, generation: u32) -> GroupIdentity {
    GroupIdentity { group: GroupId(1), life, generation, seed: 7 }
}
