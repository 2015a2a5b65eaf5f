//! Steps of a schedule.

use gateway_core::{Partition, Timestamp};

use super::world::{Consumer, MessagePlace, World, identity, ms};
use crate::*;

const PARTITIONS: [u8; 3] = [0, 100, 200];

impl World {
    pub(super) fn step(&mut self) {
        match self.random.below(100) {
            0..25 => {
                for _ in 0..=self.random.below(4) {
                    let partition = PARTITIONS[self.random.below(3)];
                    let (device, topic) = (self.random.below(3), self.random.below(2));
                    let is_ours = !self.random.chance(4);
                    self.append(partition, device, topic, is_ours);
                }
            }
            25..45 => {
                if !self.consumers.is_empty() {
                    let at = self.random.below(self.consumers.len());
                    if self.consumers[at].is_here {
                        let most = 1 + self.random.below(8);
                        self.poll(at, most);
                    }
                }
            }
            45..60 => {
                if !self.reads.is_empty() {
                    let read = self.reads.swap_remove(self.random.below(self.reads.len()));
                    if self.random.chance(8) {
                        self.group.failed(&read);
                    } else {
                        self.answer_read(read);
                    }
                }
            }
            60..72 => self.acknowledge(),
            72..76 => self.nack(),
            76..78 => self.extend(),
            78..82 => self.pass_time(),
            82..86 => self.come(),
            86..89 => self.go(),
            89..92 => {
                self.begin_write();
                if self.random.chance(2) {
                    self.end_write();
                }
            }
            92..94 => self.end_write(),
            94 => self.restart(),
            95 => self.bury_all(),
            96 => self.requeue(),
            97 => self.retire(),
            98 => self.seek(),
            _ => {
                self.config.paused = !self.config.paused;
                self.config.max_attempts = [0, 2, 3][self.random.below(3)];
                self.group.set_config(self.config);
                self.group.touch(u64::MAX);
            }
        }
        self.awake.extend(self.group.woken());
    }

    fn someone(&mut self) -> Option<usize> {
        let here: Vec<usize> = (0..self.consumers.len()).filter(|&at| self.consumers[at].is_here).collect();
        self.random.pick(&here).copied().filter(|&at| {
            // A consumer that was fenced, or away for too long, finds out when it polls.
            self.group.set_credit(self.consumers[at].key, self.consumers[at].credit).is_ok()
        })
    }

    /// Numbers of deliveries, some of them nonsense.
    fn some_ids(&mut self, at: usize) -> Vec<u64> {
        self.hear(at);
        let consumer = &self.consumers[at];
        let has: Vec<u64> = consumer.has.keys().copied().collect();
        let (last, fetches) = (consumer.last, consumer.fetches);
        let mut ids = Vec::new();
        if self.random.chance(2) {
            // From the first on, in order.
            ids.extend(has.iter().take(1 + self.random.below(6)));
        } else {
            for _ in 0..=self.random.below(3) {
                ids.extend(self.random.pick(&has).copied());
            }
        }
        if self.random.chance(6) && !fetches {
            ids.push(self.random.next() % (last + 2));
        }
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Polls without taking a message, so that the consumer hears its news.
    fn hear(&mut self, at: usize) {
        self.poll(at, 0);
    }

    fn acknowledge(&mut self) {
        let Some(at) = self.someone() else { return };
        if self.random.chance(4) {
            return self.acknowledge_by_name();
        }
        let ids = self.some_ids(at);
        self.ack_some(at, &ids);
    }

    /// Also acknowledges for consumers that are away.
    fn acknowledge_by_name(&mut self) {
        let at = self.random.below(self.consumers.len());
        if self.consumers[at].is_here {
            let count = self.consumers.len();
            self.hear(at);
            if self.consumers.len() < count {
                return;
            }
        }
        let consumer = &self.consumers[at];
        let all: Vec<(u64, Delivery)> = consumer.has.iter().map(|(&id, has)| (id, has.clone())).collect();
        let is_here = consumer.is_here;
        let Some((id, has)) = self.random.pick(&all).cloned() else { return };
        let name = has.ack_id.text().parse().expect("a name");
        let result = self.group.acknowledge_id(&name, self.now);
        assert!(result == AckResult::Ok || !is_here, "what it has it may acknowledge");
        if result == AckResult::Ok {
            self.consumers[at].has.remove(&id);
            self.settling((has.partition.0, has.record.offset));
            assert_eq!(self.group.acknowledge_id(&name, self.now), AckResult::Ok, "again");
        }
        let foreign = AckId { group: gateway_core::GroupId(9), ..name };
        assert_eq!(self.group.acknowledge_id(&foreign, self.now), AckResult::Invalid);
    }

    fn nack(&mut self) {
        let Some(at) = self.someone() else { return };
        let ids = self.some_ids(at);
        let Some(&id) = self.random.pick(&ids) else { return };
        let nack = Nack {
            delay: self.random.chance(3).then(|| ms(20)),
            reason: "no".to_owned(),
            dead_letter: self.random.chance(6),
        };
        let consumer = &mut self.consumers[at];
        let failed = consumer.has.remove(&id);
        if failed.is_some() {
            consumer.void.insert(id);
        }
        let key = consumer.key;
        let ranges = Ranges::of([IdRange { first: id, last: id }]);
        let left = self.group.nack(key, &ranges, &nack, self.now, 1).expect("is here");
        assert!(left.is_empty());
        let Some(failed) = failed else { return };
        let place = (failed.partition.0, failed.record.offset);
        let limit = self.config.max_attempts;
        if nack.dead_letter || (limit != 0 && failed.attempt >= limit) {
            self.entry(place).is_dying = true;
            return;
        }
        let key = self.entry(place).key.clone();
        // Later messages of the key are void at once, whichever consumer has them.
        let streams: Vec<String> =
            self.consumers.iter().filter(|other| other.is_here).map(|other| other.name.clone()).collect();
        for name in streams {
            let Some(at) = self.consumers.iter().position(|other| other.name == name) else { continue };
            let has: Vec<(u64, MessagePlace)> = self.consumers[at]
                .has
                .iter()
                .map(|(&id, has)| (id, (has.partition.0, has.record.offset)))
                .collect();
            self.hear(at);
            let Some(consumer) = self.consumers.iter().position(|other| other.name == name) else { continue };
            for (id, other) in has {
                let is_later = other.0 == place.0 && other.1 > place.1 && self.entry(other).key == key;
                if is_later {
                    assert!(
                        !self.consumers[consumer].has.contains_key(&id),
                        "{other:?} is void after {place:?}"
                    );
                }
            }
        }
    }

    fn extend(&mut self) {
        let Some(at) = self.someone() else { return };
        let ids = self.some_ids(at);
        let ranges = Ranges::of(ids.iter().map(|&id| IdRange { first: id, last: id }));
        let time = ms([0, 10, 5_000][self.random.below(3)]);
        self.group.extend(self.consumers[at].key, &ranges, time, self.now).expect("is here");
    }

    fn pass_time(&mut self) {
        let time = [1, 30, 60, 1_100, 6_000][self.random.below(5)];
        self.now = self.now.plus_millis(time);
        let mut next = self.group.tick(self.now);
        while next == Some(self.now) {
            next = self.group.tick(self.now);
        }
        assert!(next.is_none_or(|next| next > self.now));
        self.find_dying();
    }

    /// Learns from the group which messages are given up: the ones that it had delivered often enough.
    pub(super) fn find_dying(&mut self) -> bool {
        let given_up = self.group.given_up(usize::MAX);
        for &(partition, offset) in &given_up {
            self.group.not_buried(partition, offset);
            self.entry((partition.0, offset)).is_dying = true;
        }
        !given_up.is_empty()
    }

    fn come(&mut self) {
        let mut credit =
            Credit { messages: 1 + self.random.below(20), bytes: 300 + self.random.below(4_000) };
        if self.random.chance(4) {
            credit = Credit::default();
        }
        let known: Vec<String> = self.consumers.iter().map(|consumer| consumer.name.clone()).collect();
        if !known.is_empty() && (known.len() > 4 || self.random.chance(2)) {
            // One comes back, or another takes its name.
            let name = self.random.pick(&known).cloned().expect("not empty");
            let at = self.consumers.iter().position(|consumer| consumer.name == name).expect("known");
            let (lease, fetches) = (self.consumers[at].lease, self.consumers[at].fetches);
            self.drop_reads(self.consumers[at].key);
            self.come_back(at, lease, credit, fetches);
        } else if let Some(consumer) = self.parted.pop()
            && !self.consumers.iter().any(|other| other.name == consumer.name)
        {
            let Consumer { lease, fetches, .. } = consumer;
            let claims = if fetches { Vec::new() } else { self.claims(&consumer) };
            if fetches {
                self.acknowledge_after_restart(&consumer);
            }
            self.join(&consumer.name, lease, credit, fetches, &claims);
        } else {
            self.names += 1;
            let name = format!("member-{}", self.names);
            let fetches = self.random.chance(5);
            let lease = if fetches { 500 } else { [0, 500][self.random.below(2)] };
            self.join(&name, lease, credit, fetches, &[]);
        }
        self.find_dying();
    }

    /// A member comes back in the same process: what it has and names stays with it.
    fn come_back(&mut self, at: usize, lease: u64, credit: Credit, fetches: bool) {
        let name = self.consumers[at].name.clone();
        let Ok(taken) = self.group.take(self.consumers[at].key, self.now, Room { messages: 0, bytes: 0 })
        else {
            self.consumers[at].has.clear();
            return self.join(&name, lease, credit, fetches, &[]);
        };
        self.consumers[at].hear(&taken.revoked);
        if fetches {
            return self.join(&name, lease, credit, fetches, &[]);
        }
        let has: Vec<MessagePlace> =
            self.consumers[at].has.values().map(|has| (has.partition.0, has.record.offset)).collect();
        let consumer = self.consumers.swap_remove(at);
        let claims = self.claims(&consumer);
        self.consumers.push(consumer);
        self.join(&name, lease, credit, fetches, &claims);
        let consumer = self.consumers.last().expect("joined");
        let mut seen = std::collections::BTreeSet::new();
        for (id, claim) in (1..).zip(&claims) {
            let own = claim.filter(|place| seen.insert(*place) && has.contains(place));
            assert!(own.is_none() || consumer.has.contains_key(&id), "{own:?} is its own");
        }
    }

    /// One that fetches acknowledges what an earlier process gave it.
    fn acknowledge_after_restart(&mut self, consumer: &Consumer) {
        for has in consumer.has.values() {
            if self.random.chance(2) {
                continue;
            }
            let Some(key) = self.group.claim_id(&has.ack_id) else { continue };
            while let Some(recall) = self.group.next_recall(key).expect("is missed") {
                let entries = self.log[&recall.partition.0].iter();
                let behind = entries.filter(|entry| entry.record.offset >= recall.from);
                let records: Vec<_> = behind.take(3).map(|entry| entry.record.clone()).collect();
                let end = self.end(recall.partition.0).max(recall.from);
                let next = if records.len() < 3 { end } else { records[2].offset + 1 };
                let wanted =
                    |record: &gateway_core::LogRecord| record.groups.contains(&gateway_core::GroupId(1));
                self.group.recall(key, &recall, &records, next, wanted, self.now).expect("is missed");
            }
            let place = (has.partition.0, has.record.offset);
            if self.group.acknowledge_id(&has.ack_id, self.now) == AckResult::Ok {
                self.settling(place);
            }
        }
    }

    fn go(&mut self) {
        let Some(at) = self.someone() else { return };
        let key = self.consumers[at].key;
        if self.random.chance(4) {
            self.group.drain(key, self.now).expect("is here");
            self.consumers[at].is_draining = true;
            return;
        }
        if self.consumers[at].fetches {
            return;
        }
        self.drop_reads(key);
        self.group.close(key, self.now);
        let Consumer { lease, is_draining, .. } = self.consumers[at];
        if lease == 0 || is_draining {
            self.consumers.remove(at);
        } else {
            self.consumers[at].is_here = false;
        }
        self.find_dying();
    }

    /// The reads of a stream that is gone, as far as they are known to be its own, may never come back.
    fn drop_reads(&mut self, key: MemberKey) {
        let own: Vec<Partition> = self.group.partitions(key).collect();
        if self.random.chance(2) {
            self.reads.retain(|read| !own.contains(&read.partition));
        }
    }

    /// Kill and start again: what was not written is forgotten.
    fn restart(&mut self) {
        while !self.writes.is_empty() && self.random.chance(2) {
            self.end_write();
        }
        self.writes.clear();
        self.settled.clear();
        self.reads.clear();
        self.parted = std::mem::take(&mut self.consumers);
        self.awake.clear();
        self.life += 1;
        self.now = Timestamp(self.now.0 + 1_000);
        for entry in self.log.values_mut().flatten() {
            entry.is_settling = false;
            entry.is_dying = false;
        }
        self.group = Group::new(identity(self.life, self.generation), self.config);
        for (&partition, record) in &self.disk {
            let progress = Progress::decode(record).expect("own record");
            assert_eq!(progress.encode(), *record);
            self.group.restore(Partition(partition), progress, self.now);
        }
        for partition in PARTITIONS {
            self.group.set_end(Partition(partition), self.end(partition));
        }
        if let Some(roster) = &self.disk_roster {
            self.group.restore_members(Roster::decode(roster).expect("own record"), self.now);
        }
    }

    fn requeue(&mut self) {
        let Some(place) = self.letters.pop() else { return };
        let message = self.entry(place).record.message.clone();
        let device = message.client_id.as_ref().map(|id| id.as_str().to_owned()).expect("a device");
        let device = device.rsplit('-').next().and_then(|text| text.parse().ok()).expect("a number");
        let topic = message.topic.trim_start_matches("t/").parse().expect("a number");
        self.append(place.0, device, topic, true);
    }

    /// Retention: what is before a place is gone.
    fn retire(&mut self) {
        let partition = PARTITIONS[self.random.below(3)];
        let entries = &self.log[&partition];
        let Some(floor) = self.random.pick(entries).map(|entry| entry.record.offset) else { return };
        if self.random.chance(2) {
            let seen = self.group.seen_before(Partition(partition), floor);
            let waits = self.group.floor(Partition(partition)) < floor;
            let lost = self.group.raise(Partition(partition), floor, None);
            assert_eq!(lost, if waits { seen } else { 0 });
            self.trimmed.insert(partition, floor.max(self.trimmed.get(&partition).copied().unwrap_or(0)));
        } else {
            // Only what nobody needs, as it is on disk.
            let on_disk =
                self.disk.get(&partition).map(|record| Progress::decode(record).expect("own record"));
            let needed = on_disk.map_or(0, |progress| progress.floor());
            self.trimmed.insert(partition, needed.max(self.trimmed.get(&partition).copied().unwrap_or(0)));
            return;
        }
        let trimmed = self.trimmed[&partition];
        let before = self.log.get_mut(&partition).expect("a partition").iter_mut();
        for entry in before.filter(|entry| entry.record.offset < trimmed) {
            entry.excused = true;
        }
    }

    fn seek(&mut self) {
        let mut to = std::collections::BTreeMap::new();
        for partition in PARTITIONS {
            let least = self.trimmed.get(&partition).copied().unwrap_or_default();
            let most = self.end(partition).max(least);
            to.insert(partition, least + self.random.next() % (most - least + 1));
        }
        self.group.seek(|partition| to.get(&partition.0).copied().unwrap_or_default());
        self.generation += 1;
        assert_eq!(self.group.identity().generation, self.generation);
        self.flush();
        self.letters.clear();
        for (partition, entries) in &mut self.log {
            for entry in entries {
                (entry.is_settled, entry.is_settling, entry.is_dying) = (false, false, false);
                entry.excused = entry.record.offset < to[partition];
            }
        }
        // The consumers' messages are void; a consumer that is away hears nothing of it.
        for consumer in &mut self.consumers {
            let name = consumer.has.first_key_value().map(|(_, has)| has.ack_id);
            if let Some(name) = name {
                assert_eq!(self.group.acknowledge_id(&name, self.now), AckResult::Fenced);
            }
            let has = std::mem::take(&mut consumer.has);
            consumer.void.extend(has.into_keys());
        }
    }
}
