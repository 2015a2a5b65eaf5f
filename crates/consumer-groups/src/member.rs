//! A member of a group: what it gets, polled by the task of its stream.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use access::backends::Scope;
use groups::{
    ClaimedPlace, Credit, Delivery, Gap, IdRange, MAX_AHEAD, MemberKey, MemberOptions, Nack, Ranges, Read,
    Room, SettlingAnswer,
};
use store::{BoxFuture, LogRead, ReadLimit, Slice, StoreError};
use tokio::sync::Notify;

use super::{
    GroupError, MemberEnd, MemberMemory,
    live::{GroupInner, Live, STEP},
};

/// Reads of a member under way at most.
const MOST_READS: usize = 4;
/// Rounds in which one poll looks for more, before others have their turn.
const ROUNDS: usize = 8;
/// A read that has failed is tried again after this.
const PAUSE: Duration = Duration::from_secs(1);

/// Ranges in answers that were not taken yet, beyond which a member must not be heard: it does not read, or the disk hangs.
const MOST_UNANSWERED: usize = 16_384;
/// Memory that a member may take: what was read for it, and answers, with those of one request more.
pub(super) const HELD: usize = MAX_AHEAD + 2 * MOST_UNANSWERED * size_of::<IdRange>();
/// Ranges up to which the answers of one write are merged: merging costs as much as there are.
const MERGED: usize = 256;

/// News for a member.
#[derive(Debug, Default)]
pub struct MemberBatch {
    /// Deliveries that are void now.
    pub revoked: Vec<IdRange>,
    /// Messages it will not get.
    pub gaps: Vec<Gap>,
    /// Messages.
    pub deliveries: Vec<Delivery>,
    /// Answers to its acknowledgements, which are on disk.
    pub answers: Vec<SettlingAnswer>,
    /// True once the member asked for no more, and everything is settled and answered.
    pub is_drained: bool,
}

impl MemberBatch {
    /// Tells whether there is no news.
    pub fn is_empty(&self) -> bool {
        self.revoked.is_empty()
            && self.gaps.is_empty()
            && self.deliveries.is_empty()
            && self.answers.is_empty()
            && !self.is_drained
    }
}

/// Request to become a member.
#[derive(Debug, Clone)]
pub struct Joining<'a> {
    /// Its name.
    pub name: &'a str,
    /// Time for which the member keeps its deliveries after its stream has ended, or without a call.
    pub lease: Duration,
    /// Most messages and bytes that the member may have unacknowledged.
    pub credit: Credit,
    /// Scope of the member, which must have all messages of the group.
    pub scope: Scope,
    /// Deliveries from an earlier connection on which the member still works: see [`LiveMember::resume`].
    pub outstanding: &'a [ClaimedPlace],
}

/// A member with a stream, or one call of Fetch. Dropped, its stream has ended: what it has is given back, at once or after
/// its lease.
pub struct LiveMember {
    pub(super) live: Arc<Live>,
    pub(super) key: MemberKey,
    name: String,
    resumed: bool,
    /// Lives from call to call.
    fetches: bool,
    reads: Vec<(Read, BoxFuture<'static, Result<Slice, StoreError>>)>,
    /// Answers, each with the number of the write that it waits for.
    answers: VecDeque<(u64, SettlingAnswer)>,
    /// Ranges in `answers`.
    unanswered: usize,
    /// Told when some of them were taken.
    answered: Arc<Notify>,
    /// There until the end.
    held: Option<MemberMemory>,
}

impl LiveMember {
    /// # Errors
    /// [`GroupError::OutOfScope`], [`GroupError::TooManyMembers`].
    pub(super) fn join(
        live: &Arc<Live>,
        Joining { name, lease, credit, scope, outstanding }: Joining<'_>,
        fetches: bool,
        held: MemberMemory,
    ) -> Result<Self, GroupError> {
        let now = (live.clock)();
        let options = MemberOptions { name, lease, credit, fetches, outstanding };
        let joined = live.with(|inner| {
            if !inner.is_within(&scope) {
                return Err(GroupError::OutOfScope);
            }
            let joined = inner.logic.join(&options, now);
            let joined = joined.map_err(|groups::TooManyMembers| GroupError::TooManyMembers)?;
            inner.ahead.remove(&joined.member.number);
            Ok(joined)
        })?;
        live.timer.notify_one();
        Ok(Self {
            live: Arc::clone(live),
            key: joined.member,
            name: name.to_owned(),
            resumed: joined.resumed,
            fetches,
            reads: Vec::new(),
            answers: VecDeque::new(),
            unanswered: 0,
            answered: Arc::default(),
            held: Some(held),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Tells whether the member came back within its lease: none of its partitions was given to others meanwhile.
    pub fn is_resumed(&self) -> bool {
        self.resumed
    }

    /// Returns news for the member, within `room`; never empty. Wakes when there is some.
    ///
    /// # Errors
    /// [`MemberEnd`], and from then on always.
    pub fn poll_next(&mut self, cx: &mut Context<'_>, room: Room) -> Poll<Result<MemberBatch, MemberEnd>> {
        let mut batch = MemberBatch::default();
        for _ in 0..ROUNDS {
            let progressed = self.look(cx.waker(), room, &mut batch)?;
            let progressed = self.poll_reads(cx) || progressed;
            if !batch.is_empty() {
                return Poll::Ready(Ok(batch));
            }
            if !progressed {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Reads ahead until there is as much as `room`, or nothing more can be read for now: what is on the disk comes in several
    /// reads, and a call that took what the first has brought would give up the others. Takes nothing. Cancel safe.
    ///
    /// # Errors
    /// [`MemberEnd`].
    pub(super) async fn fill(&mut self, room: Room) -> Result<(), MemberEnd> {
        poll_fn(|cx| {
            for _ in 0..ROUNDS {
                if self.live.is_ended() {
                    return Poll::Ready(Err(MemberEnd::GroupGone));
                }
                let (key, limit) = (self.key, MOST_READS - self.reads.len());
                let looked = self.live.with(|inner| {
                    let ahead = inner.logic.ahead(key);
                    let is_enough = ahead.messages >= room.messages || ahead.bytes >= room.bytes;
                    if is_enough { Ok(None) } else { inner.logic.wants(key, limit).map(Some) }
                });
                let wanted = looked.map_err(|groups::MemberGone| MemberEnd::Fenced)?;
                let Some(reads) = wanted else { return Poll::Ready(Ok(())) };
                let brought = self.begin(reads);
                if !(self.poll_reads(cx) || brought) {
                    return if self.reads.is_empty() { Poll::Ready(Ok(())) } else { Poll::Pending };
                }
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    }

    /// [`Self::poll_next`] as a future. Cancel safe.
    ///
    /// # Errors
    /// [`MemberEnd`].
    pub async fn next(&mut self, room: Room) -> Result<MemberBatch, MemberEnd> {
        poll_fn(|cx| self.poll_next(cx, room)).await
    }

    /// Takes what is there. True if reads brought something at once, and it is worth looking again.
    fn look(&mut self, waker: &Waker, room: Room, batch: &mut MemberBatch) -> Result<bool, MemberEnd> {
        if self.live.is_ended() {
            return Err(MemberEnd::GroupGone);
        }
        let now = (self.live.clock)();
        let limit = MOST_READS - self.reads.len();
        let key = self.key;
        let looked = self.live.with(|inner| {
            inner.wait(key.number, waker);
            let taken = inner.logic.take(key, now, room)?;
            let reads = if taken.deliveries.is_empty() { inner.logic.wants(key, limit)? } else { Vec::new() };
            Ok((taken, reads))
        });
        let (taken, reads) = looked.map_err(|groups::MemberGone| MemberEnd::Fenced)?;
        if !taken.deliveries.is_empty() {
            // The first deadline may be nearer than any before.
            self.live.timer.notify_one();
        }
        batch.revoked.extend(taken.revoked);
        batch.gaps.extend(taken.gaps);
        batch.deliveries.extend(taken.deliveries);
        while let Some((number, _)) = self.answers.front()
            && self.live.is_written(*number)
        {
            let Some((_, answer)) = self.answers.pop_front() else { break };
            self.unanswered -= size(&answer);
            batch.answers.push(answer);
        }
        if !batch.answers.is_empty() {
            self.answered.notify_one();
        }
        batch.is_drained = taken.is_drained && self.answers.is_empty();
        Ok(self.begin(reads))
    }

    /// Begins reads. True if some of them brought something at once.
    fn begin(&mut self, reads: Vec<Read>) -> bool {
        let mut brought = false;
        for read in reads {
            let limit = ReadLimit { records: read.records, bytes: read.bytes };
            match self.live.log.read(read.partition, read.from, limit) {
                LogRead::Now(slice) => {
                    feed(&self.live, &read, slice);
                    brought = true;
                }
                LogRead::Later(slice) => {
                    let slice = async move {
                        let slice = slice.await;
                        if slice.is_err() {
                            tokio::time::sleep(PAUSE).await;
                        }
                        slice
                    };
                    self.reads.push((read, Box::pin(slice)));
                }
            }
        }
        brought
    }

    /// True if a read has ended.
    fn poll_reads(&mut self, cx: &mut Context<'_>) -> bool {
        let before = self.reads.len();
        let live = &self.live;
        self.reads.retain_mut(|(read, slice)| match slice.as_mut().poll(cx) {
            Poll::Pending => true,
            Poll::Ready(Ok(slice)) => {
                feed(live, read, slice);
                false
            }
            Poll::Ready(Err(error)) => {
                tracing::warn!(group = live.id.0, %error, "log cannot be read, trying again");
                live.with(|inner| inner.logic.failed(read));
                false
            }
        });
        self.reads.len() < before
    }

    /// Acknowledges. The answer comes with [`Self::poll_next`], once it is on disk.
    ///
    /// # Errors
    /// [`MemberEnd`].
    pub fn acknowledge(&mut self, ranges: &Ranges) -> Result<(), MemberEnd> {
        let (key, live) = (self.key, &self.live);
        let (number, answer, wakers) = live
            .with(|inner| {
                let answer = inner.logic.acknowledge(key, ranges)?;
                let number = Live::wait_number(inner);
                let mut wakers = Vec::new();
                if live.is_written(number) {
                    // Nothing is to be written of what was void: no write will wake the stream.
                    wakers = inner.take_wakers(key.number);
                } else {
                    inner.await_write(key.number, number);
                }
                Ok::<_, groups::MemberGone>((number, answer, wakers))
            })
            .map_err(|groups::MemberGone| MemberEnd::Fenced)?;
        match self.answers.back_mut() {
            // Answers of one write are merged.
            Some((last, before)) if *last == number && size(before) + size(&answer) <= MERGED => {
                self.unanswered -= size(before);
                before.ok = Ranges::of(before.ok.iter().chain(answer.ok.iter()));
                before.lost = Ranges::of(before.lost.iter().chain(answer.lost.iter()));
                self.unanswered += size(before);
            }
            _ => {
                self.unanswered += size(&answer);
                self.answers.push_back((number, answer));
            }
        }
        wakers.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// Begins the lease anew of one that fetches, whose call goes on.
    ///
    /// # Errors
    /// [`MemberEnd`].
    pub(super) fn renew(&self) -> Result<(), MemberEnd> {
        let now = (self.live.clock)();
        self.act(|inner, key| inner.logic.renew(key, now))
    }

    /// Returns a signal to wait for before the member is heard again, if too many of its acknowledgements have no answer
    /// yet or the member does not take the answers; `None` if it may be heard now.
    pub fn is_ahead(&self) -> Option<Arc<Notify>> {
        (self.unanswered > MOST_UNANSWERED).then(|| Arc::clone(&self.answered))
    }

    /// Gives back. Others come to the group's lock in between.
    ///
    /// # Errors
    /// [`MemberEnd`].
    pub fn nack(&self, ranges: &Ranges, nack: &Nack) -> Result<(), MemberEnd> {
        let now = (self.live.clock)();
        let mut left = ranges.clone();
        loop {
            let step = self.live.with(|inner| inner.logic.nack(self.key, &left, nack, now, STEP));
            left = step.map_err(|groups::MemberGone| MemberEnd::Fenced)?;
            if left.is_empty() {
                break;
            }
        }
        self.live.timer.notify_one();
        Ok(())
    }

    /// Keeps so long, from now on.
    ///
    /// # Errors
    /// [`MemberEnd`].
    pub fn extend(&self, ranges: &Ranges, time: Duration) -> Result<(), MemberEnd> {
        let now = (self.live.clock)();
        self.act(|inner, key| inner.logic.extend(key, ranges, time, now))
    }

    /// Changes how much may be unacknowledged.
    ///
    /// # Errors
    /// [`MemberEnd`].
    pub fn set_credit(&self, credit: Credit) -> Result<(), MemberEnd> {
        self.act(|inner, key| inner.logic.set_credit(key, credit))
    }

    /// Asks for no more. The stream may end with the batch that is [drained](MemberBatch::is_drained).
    ///
    /// # Errors
    /// [`MemberEnd`].
    pub fn drain(&self) -> Result<(), MemberEnd> {
        let now = (self.live.clock)();
        self.act(|inner, key| inner.logic.drain(key, now))
    }

    fn act(
        &self,
        act: impl FnOnce(&mut GroupInner, MemberKey) -> Result<(), groups::MemberGone>,
    ) -> Result<(), MemberEnd> {
        let result =
            self.live.with(|inner| act(inner, self.key)).map_err(|groups::MemberGone| MemberEnd::Fenced);
        self.live.timer.notify_one();
        result
    }
}

impl Drop for LiveMember {
    fn drop(&mut self) {
        if self.live.is_ended() {
            return;
        }
        let now = (self.live.clock)();
        self.live.with(|inner| {
            if self.fetches {
                for (read, _) in &self.reads {
                    inner.logic.failed(read);
                }
                // Messages that were read and not taken stay for the next call, and their memory with them.
                if inner.logic.ahead(self.key).messages > 0
                    && let Some(held) = self.held.take()
                {
                    inner.ahead.insert(self.key.number, held);
                }
            } else {
                inner.logic.close(self.key, now);
            }
        });
        self.live.timer.notify_one();
    }
}

/// Returns the weight of an answer, counted in ranges.
fn size(answer: &SettlingAnswer) -> usize {
    1 + answer.ok.len() + answer.lost.len()
}

fn feed(live: &Live, read: &Read, slice: Slice) {
    let missing = slice.missing.map(|missing| groups::ReadGap {
        until: missing.until,
        reason: match missing.reason {
            store::MissingReason::Trimmed => groups::GapReason::Removed,
            store::MissingReason::Damaged => groups::GapReason::Damaged,
        },
    });
    live.with(|inner| {
        let wanted = inner.is_own(live.id, read.partition);
        inner.logic.feed(read, slice.records, slice.next, missing, wanted);
    });
}
