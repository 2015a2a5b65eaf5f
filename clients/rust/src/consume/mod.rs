//! Members of a group: messages with acknowledgement.
//!
//! [`Client::consume`] is the whole of it: a handler for each message, many at once but in order for each device, over lost
//! connections, until it is told to stop. [`Client::join`] is one stream, without any of that.

mod lanes;

use std::{any::Any, collections::VecDeque, fmt, future::Future, pin::pin, time::Duration};

use gateway_api::gateway::v1::{
    Ack, ConsumeRequest, ConsumeResponse, ConsumedMessage, Drain, Extend, Flow, Gap, GetGroupRequest, Nack,
    Open, consume_item::Item, consume_request::Action,
};
use tokio::{
    sync::mpsc,
    task::{JoinError, JoinSet},
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use self::lanes::{Finished, HandlerEnd, Lanes};
use crate::{Client, Error, backoff::Backoff, new_key};

/// A message or event that a member got.
pub type Delivery = ConsumedMessage;

/// Requests of a stream that wait for the connection.
const REQUESTS: usize = 16;
/// Most ids in one request.
const IDS: usize = 10_000;
/// Least time from one request with acknowledgements to the next, unless there are many: what comes meanwhile shares it.
const GATHER: Duration = Duration::from_millis(3);
/// Interval of looking for deadlines that are to be moved. The shortest `ack_deadline` is 1 s, and half of it is waited.
const LOOK: Duration = Duration::from_millis(250);
/// The longest deadline that the gateway takes.
const LONGEST_DEADLINE: Duration = Duration::from_secs(3600);
/// Time limit for asking about the group anew after a stream was lost.
const LEARN: Duration = Duration::from_secs(5);
/// Time for which a member that is told to stop waits for a stream that opens.
const JOIN: Duration = Duration::from_secs(5);
/// Least time that the gateway has to hear that a member leaves: otherwise the member's messages stay with it for its
/// lease.
const HEAR: Duration = Duration::from_millis(100);

/// Why a handler gives a message back. Made from any error by `?`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GiveBack {
    /// For people; kept with a dead letter. At most 1,024 bytes, the rest is cut off.
    pub reason: String,
    /// Not again sooner than after this; without it after the group's own pause.
    pub delay: Option<Duration>,
    /// Never again: a dead letter.
    pub dead_letter: bool,
}

impl<E: std::error::Error> From<E> for GiveBack {
    fn from(error: E) -> Self {
        Self { reason: crate::error::in_words(&error), ..Self::default() }
    }
}

/// Options of a consumption.
#[derive(Debug, Clone)]
pub struct Options {
    group: String,
    member_id: String,
    concurrency: usize,
    outstanding: u32,
    lease: Duration,
    keep: Option<Duration>,
    drain: Duration,
}

impl Options {
    /// Of this group, by a member whose name is drawn for each call of [`Client::consume`], 16 messages at a time.
    pub fn of(group: impl Into<String>) -> Self {
        Self {
            group: group.into(),
            member_id: String::new(),
            concurrency: 16,
            outstanding: 256,
            lease: Duration::from_secs(15),
            keep: None,
            drain: Duration::from_secs(30),
        }
    }

    /// A name that holds over restarts of this process too: what was with this member comes back to it first, for its lease. At
    /// most 64 bytes. Only one stream has a name: where two use it, one fails with [`Reason::Fenced`](crate::Reason::Fenced).
    #[must_use]
    pub fn member(mut self, id: impl Into<String>) -> Self {
        self.member_id = id.into();
        self
    }

    /// Sets the number of handlers that run at once, at least 1; never two of one device.
    #[must_use]
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = handlers.max(1);
        self
    }

    /// Sets the number of unacknowledged messages, running and waiting, that this member may have; 256 otherwise.
    #[must_use]
    pub fn outstanding(mut self, messages: u32) -> Self {
        self.outstanding = messages.max(1);
        self
    }

    /// Sets the time for which messages stay with this member after its stream was lost, or its process ended: then
    /// others get them. 15 s otherwise; at most 1 h.
    #[must_use]
    pub fn lease(mut self, time: Duration) -> Self {
        self.lease = time;
        self
    }

    /// The deadline that a message gets, again and again, while its handler runs or it waits behind others; the group's
    /// `ack_deadline` otherwise. From 3 s to 1 h. After an hour with one message its deadline is not moved again.
    #[must_use]
    pub fn keep(mut self, time: Duration) -> Self {
        self.keep = Some(time.clamp(Duration::from_secs(3), LONGEST_DEADLINE));
        self
    }

    /// Sets the time for which [`Client::consume`], once it is told to stop, lets handlers finish; 30 s otherwise.
    /// Messages that they have not finished then are given back.
    #[must_use]
    pub fn drain(mut self, time: Duration) -> Self {
        self.drain = time;
        self
    }
}

/// Summary of a consumption.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Consumed {
    /// Messages whose acknowledgement is on the gateway's disk.
    pub acknowledged: u64,
    /// Messages that handlers gave back.
    pub given_back: u64,
    /// Messages that are missing, by the gaps of the group.
    pub missing: u64,
    /// Handlers that were done, or were stopped, and whose acknowledgement is not on the disk: these messages come again.
    pub unsettled: u64,
}

/// One stream of a member. Dropping it leaves the group: what is outstanding is given back, at once if the member has no id.
pub struct Member {
    say: mpsc::Sender<ConsumeRequest>,
    stream: Streaming<ConsumeResponse>,
    items: VecDeque<Item>,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("items", &self.items.len()).finish_non_exhaustive()
    }
}

impl Member {
    /// The next item; none when the stream ended in order, after [`Action::Drain`]. Safe to cancel.
    ///
    /// # Errors
    /// What ended the stream.
    pub async fn next(&mut self) -> Result<Option<Item>, Error> {
        loop {
            if let Some(item) = self.items.pop_front() {
                return Ok(Some(item));
            }
            match self.stream.message().await? {
                Some(response) => self.items.extend(response.items.into_iter().filter_map(|item| item.item)),
                None => return Ok(None),
            }
        }
    }

    /// Items that were read already and that [`Self::next`] gives without waiting.
    pub fn read_ahead(&self) -> usize {
        self.items.len()
    }

    /// Says something: acknowledges, gives back, changes the flow, drains. Waits while the connection takes no more.
    ///
    /// # Errors
    /// When the stream has ended; [`Self::next`] tells why.
    pub async fn say(&self, action: Action) -> Result<(), Error> {
        let request = ConsumeRequest { action: Some(action) };
        self.say.send(request).await.map_err(|_| Error::stream_ended())
    }
}

impl Client {
    /// Joins a group with one stream.
    ///
    /// # Errors
    /// What the gateway refuses.
    pub async fn join(&self, open: Open) -> Result<Member, Error> {
        let (say, said) = mpsc::channel(REQUESTS);
        // There is room: nothing was said before.
        let _ = say.send(ConsumeRequest { action: Some(Action::Open(open)) }).await;
        let stream = self.consumer().consume(ReceiverStream::new(said)).await?.into_inner();
        Ok(Member { say, stream, items: VecDeque::new() })
    }

    /// Consumes a group until `stop` is there. For each message `handle` makes a task; what it answers decides: `Ok` acknowledges the
    /// message, [`GiveBack`] gives it back, and so does a panic. Tasks of different devices run at the same time, those of one device
    /// one after the other in the order of its messages.
    ///
    /// A lost connection is made again, with growing pauses and without an end, under the same member id: what runs stays with
    /// this member, also over a restart of the gateway, what waited comes again first, and what this member has done already is
    /// acknowledged without a second call of the handler as far as it remembers (the last 10,000 messages). While a handler runs, and for what waits behind it, deadlines are moved, up to an hour
    /// for a message. At least once holds: a message comes twice if this process ends between the work and the
    /// acknowledgement.
    ///
    /// Once told to stop it takes no more, lets what it has be done, and returns when all is acknowledged, or after the time of
    /// [`Options::drain`], which stops handlers where they wait and gives back what is left. Dropping the future stops them at once;
    /// others get what they had after the lease.
    ///
    /// # Errors
    /// What a repetition does not mend, such as a group that is not there, and no connection at the first try.
    pub async fn consume<H, F>(
        &self,
        options: Options,
        handle: H,
        stop: impl Future<Output = ()>,
    ) -> Result<Consumed, Error>
    where
        H: Fn(Delivery) -> F,
        F: Future<Output = Result<(), GiveBack>> + Send + 'static,
    {
        let mut stop = pin!(stop);
        let mut work = MemberWork::new(&options);
        let mut backoff = Backoff::default();
        let mut joined_before = false;
        loop {
            let (first, open) = (!joined_before, work.open(&options));
            let joining = async {
                // A deadline that cannot be learned anew stays as it was.
                let learned = self.ack_deadline(&options.group, first).await;
                let deadline = if first { Some(learned?) } else { learned.ok() };
                Ok::<_, Error>((deadline, self.join(open).await?))
            };
            let mut joining = pin!(joining);
            let joined = tokio::select! {
                joined = &mut joining => joined,
                () = stop.as_mut() => {
                    work.stop_at = Some(Instant::now() + options.drain);
                    // The gateway may have let it in already: who does not say that it leaves keeps its place for its lease.
                    match timeout(JOIN, joining).await {
                        Ok(joined) => joined,
                        Err(_) => return Ok(work.finish().await),
                    }
                }
            };
            let lost = match joined {
                Ok((deadline, member)) => {
                    joined_before = true;
                    if let Some(deadline) = deadline {
                        work.learn(deadline, &options);
                    }
                    let mut reached = false;
                    let ended = work.over(member, &options, &handle, stop.as_mut(), &mut reached).await;
                    if reached {
                        backoff.reset();
                    }
                    match ended {
                        Ok(()) => return Ok(work.told),
                        Err(error) => error,
                    }
                }
                Err(error) => error,
            };
            work.lose_stream();
            if work.stop_at.is_some() {
                return Ok(work.finish().await);
            }
            if !joined_before || !self.may_go_on(&lost) {
                return Err(lost);
            }
            let until = Instant::now() + backoff.after(lost.retry_after());
            // Handlers go on meanwhile.
            loop {
                tokio::select! {
                    () = sleep_until(until) => break,
                    Some(()) = work.finished() => {}
                    () = stop.as_mut() => {
                        work.stop_at = Some(Instant::now() + options.drain);
                        return Ok(work.finish().await);
                    }
                }
            }
        }
    }
}

impl Client {
    /// After how long a message of this group comes again that nobody has acknowledged. The time in the message would tell, too,
    /// but by the clock of the gateway.
    async fn ack_deadline(&self, group: &str, first: bool) -> Result<Duration, Error> {
        let within = if first { self.patience } else { self.patience.min(LEARN) };
        let mut groups = self.groups();
        let asked = groups.get_group(GetGroupRequest { name: group.to_owned() });
        let told = timeout(within, asked).await.map_err(|_| Error::no_answer(within))??.into_inner();
        let deadline = told.group.unwrap_or_default().ack_deadline.unwrap_or_default();
        Ok(Duration::try_from(deadline).unwrap_or_default().max(Duration::from_secs(1)))
    }
}

/// The name of a message in its lane, and how its handler ended.
type HandlerResult = (u64, Result<(), GiveBack>);

/// State that outlives a stream: handlers that run, and the standing of their messages.
struct MemberWork {
    tasks: JoinSet<HandlerResult>,
    lanes: Lanes,
    /// The lanes' name of each task, for those that panic.
    names: std::collections::HashMap<tokio::task::Id, u64>,
    concurrency: usize,
    told: Consumed,
    member_id: String,
    /// Answers that give back messages whose delivery on the stream is not known yet.
    late: std::collections::HashMap<String, GiveBack>,
    /// The deadline that messages get while they are worked on.
    keep: Duration,
    stop_at: Option<Instant>,
    /// Acknowledgements that are not gathered any longer.
    many: usize,
    /// Time from which fewer may go.
    gather_until: Instant,
    /// Waits for the connection.
    actions: VecDeque<Action>,
}

impl MemberWork {
    fn new(options: &Options) -> Self {
        Self {
            tasks: JoinSet::new(),
            lanes: Lanes::default(),
            names: std::collections::HashMap::new(),
            concurrency: options.concurrency,
            told: Consumed::default(),
            member_id: match options.member_id.as_str() {
                // The same one over reconnects, or what it had would not come back to it.
                "" => format!("member-{}", new_key()),
                given => given.to_owned(),
            },
            late: std::collections::HashMap::new(),
            keep: Duration::ZERO,
            stop_at: None,
            many: (options.outstanding / 2).max(1) as usize,
            gather_until: Instant::now(),
            actions: VecDeque::new(),
        }
    }

    fn open(&mut self, options: &Options) -> Open {
        let flow = Flow { max_outstanding_messages: options.outstanding, ..Flow::default() };
        Open {
            group: options.group.clone(),
            member_id: self.member_id.clone(),
            lease: options.lease.try_into().ok(),
            flow: Some(flow),
            outstanding: self.lanes.name(IDS),
            ..Open::default()
        }
    }

    /// The group's deadline may have changed while there was no stream.
    fn learn(&mut self, ack_deadline: Duration, options: &Options) {
        self.keep = options.keep.unwrap_or(ack_deadline);
        // Half of it is left for a connection that is slow.
        self.lanes.set_extend_every(self.keep.min(ack_deadline) / 2);
    }

    /// Works on one stream until it ends. `Ok` is an orderly end.
    async fn over<H, F>(
        &mut self,
        mut member: Member,
        options: &Options,
        handle: &H,
        mut stop: std::pin::Pin<&mut impl Future<Output = ()>>,
        reached: &mut bool,
    ) -> Result<(), Error>
    where
        H: Fn(Delivery) -> F,
        F: Future<Output = Result<(), GiveBack>> + Send + 'static,
    {
        if let Some(stop_at) = self.stop_at {
            self.stop_at = Some(stop_at.max(Instant::now() + HEAR));
            self.actions.push_back(Action::Drain(Drain {}));
        }
        let mut keeping = interval(LOOK);
        keeping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            while self.tasks.len() < self.concurrency
                && let Some((name, delivery)) = self.lanes.start()
            {
                let running = handle(delivery);
                let task = self.tasks.spawn(async move { (name, running.await) });
                self.names.insert(task.id(), name);
            }
            self.gather_acknowledgements(Instant::now());
            let say = member.say.clone();
            let gather_until = (self.lanes.acknowledgements() > 0).then_some(self.gather_until);
            let (stop_at, waiting) = (self.stop_at, !self.actions.is_empty());
            let blocked_until = self.lanes.blocked_until();
            // Not while the connection takes nothing: what is to be said would pile up.
            let may_extend = self.lanes.is_holding() && self.actions.len() < REQUESTS;
            tokio::select! {
                biased;
                permit = say.reserve(), if waiting => {
                    let Ok(permit) = permit else {
                        // The stream says why it ended.
                        self.actions.clear();
                        continue;
                    };
                    permit.send(ConsumeRequest { action: self.actions.pop_front() });
                }
                Some(()) = self.finished() => {}
                item = member.next() => match item? {
                    Some(item) => {
                        *reached = true;
                        self.take(item);
                        // Handlers that begin together mostly end together.
                        while let Some(item) = member.items.pop_front() {
                            self.take(item);
                        }
                    }
                    None if self.stop_at.is_some() => return Ok(()),
                    None => return Err(Error::stream_ended()),
                },
                _ = keeping.tick(), if may_extend => {
                    let delivery_ids = self.lanes.extend(Instant::now(), IDS);
                    if !delivery_ids.is_empty() {
                        let which = Some(Ack { delivery_ids, ..Ack::default() });
                        let deadline = self.keep.try_into().ok();
                        self.actions.push_back(Action::Extend(Extend { which, deadline }));
                    }
                }
                () = sleep_until(blocked_until.unwrap_or_else(Instant::now)), if blocked_until.is_some() => {
                    self.lanes.unblock(Instant::now());
                }
                () = sleep_until(gather_until.unwrap_or_else(Instant::now)), if gather_until.is_some() => {}
                () = stop.as_mut(), if stop_at.is_none() => {
                    self.stop_at = Some(Instant::now() + options.drain.max(HEAR));
                    self.actions.push_back(Action::Drain(Drain {}));
                }
                () = sleep_until(stop_at.unwrap_or_else(Instant::now)), if stop_at.is_some() => {
                    // A member that has said that it leaves gives back what it has with the end of its stream.
                    self.told.unsettled += self.lanes.unsettled() as u64;
                    self.tasks.abort_all();
                    return Ok(());
                }
            }
        }
    }

    fn take(&mut self, item: Item) {
        match item {
            Item::Message(message) => self.lanes.deliver(message, Instant::now()),
            Item::AckResults(results) => {
                for range in results.ok {
                    self.told.acknowledged += self.lanes.confirm(range.first, range.last);
                }
                for range in results.lost {
                    self.lanes.lose(range.first, range.last, Instant::now());
                }
            }
            Item::Revoked(revoked) => {
                for range in revoked.void {
                    self.lanes.revoke(range.first, range.last);
                }
            }
            Item::Gap(Gap { count, .. }) => self.told.missing += count,
            Item::Opened(opened) => {
                let mut late = std::mem::take(&mut self.late);
                for (id, message_id) in self.lanes.resume(opened.outstanding, &opened.void, Instant::now()) {
                    self.give_back(id, late.remove(&message_id).unwrap_or_default());
                }
            }
            Item::Heartbeat(_) => {}
        }
    }

    /// Waits for a handler, and takes all others that have ended by then, so that their acknowledgements share a request; none if
    /// none runs.
    async fn finished(&mut self) -> Option<()> {
        let ended = self.tasks.join_next_with_id().await?;
        self.take_ended(ended);
        while let Some(ended) = self.tasks.try_join_next_with_id() {
            self.take_ended(ended);
        }
        Some(())
    }

    fn take_ended(&mut self, ended: Result<(tokio::task::Id, HandlerResult), JoinError>) {
        let (name, result) = match ended {
            Ok((id, (name, result))) => {
                self.names.remove(&id);
                (name, result)
            }
            Err(error) => {
                let Some(name) = self.names.remove(&error.id()) else { return };
                let reason =
                    error.try_into_panic().map_or_else(|_| "stopped".to_owned(), |panic| panicked(&*panic));
                (name, Err(GiveBack { reason, ..GiveBack::default() }))
            }
        };
        let ended = match &result {
            Ok(()) => HandlerEnd::Done,
            Err(GiveBack { dead_letter: true, .. }) => HandlerEnd::Up,
            Err(_) => HandlerEnd::Back,
        };
        match self.lanes.finish(name, ended, Instant::now()) {
            Finished::Settled => {}
            Finished::GiveBack(delivery_id) => self.give_back(delivery_id, result.err().unwrap_or_default()),
            Finished::Later(message_id) => {
                self.late.insert(message_id, result.err().unwrap_or_default());
            }
        }
    }

    fn give_back(&mut self, delivery_id: u64, GiveBack { reason, delay, dead_letter }: GiveBack) {
        self.told.given_back += 1;
        let which = Some(Ack { delivery_ids: vec![delivery_id], ..Ack::default() });
        let delay = delay.and_then(|delay| delay.try_into().ok());
        let reason = reason[..reason.floor_char_boundary(1024)].to_owned();
        self.actions.push_back(Action::Nack(Nack { which, delay, reason, dead_letter }));
    }

    fn gather_acknowledgements(&mut self, now: Instant) {
        if now < self.gather_until && self.lanes.acknowledgements() < self.many {
            return;
        }
        let delivery_ids = self.lanes.acknowledge(IDS);
        if !delivery_ids.is_empty() {
            self.gather_until = now + GATHER;
            self.actions.push_back(Action::Ack(Ack { delivery_ids, ..Ack::default() }));
        }
    }

    fn lose_stream(&mut self) {
        self.actions.clear();
        self.late.clear();
        self.lanes.lose_stream(Instant::now());
    }

    /// Without a stream: lets the handlers that run finish. Nothing of it is acknowledged.
    async fn finish(mut self) -> Consumed {
        let end = self.stop_at.unwrap_or_else(Instant::now);
        self.lose_stream();
        self.told.unsettled += self.tasks.len() as u64;
        loop {
            tokio::select! {
                finished = self.finished() => if finished.is_none() { break },
                () = sleep_until(end) => break,
            }
        }
        self.told
    }
}

fn panicked(panic: &(dyn Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the handler panicked: {}", text.unwrap_or("without a text"))
}

#[cfg(test)]
mod tests {
    use gateway_api::gateway::v1::{ReceivedMessage, consumed_message::Content};

    use super::*;

    /// So many messages are handled, each of another device; handler 4 gives back.
    async fn handle(work: &mut MemberWork, ids: std::ops::RangeInclusive<u64>) {
        for delivery_id in ids {
            let device_id = format!("d{delivery_id}");
            let content = Some(Content::Message(ReceivedMessage { device_id, ..ReceivedMessage::default() }));
            let message_id = format!("m{delivery_id}");
            let message = ConsumedMessage { delivery_id, message_id, content, ..ConsumedMessage::default() };
            work.take(Item::Message(message));
        }
        while let Some((name, _)) = work.lanes.start() {
            let result = if name == 4 { Err(GiveBack::default()) } else { Ok(()) };
            let task = work.tasks.spawn(async move { (name, result) });
            work.names.insert(task.id(), name);
        }
        // All have a turn before this task has its next.
        tokio::task::yield_now().await;
        work.finished().await;
        assert!(work.tasks.is_empty() && work.names.is_empty());
    }

    /// The failure: one request for each message, where handlers take no time, cost the gateway more than the messages did.
    #[tokio::test]
    async fn acknowledgements_share_requests() {
        let mut work = MemberWork::new(&Options::of("g").outstanding(20));
        let begin = work.gather_until;
        handle(&mut work, 1..=5).await;
        work.gather_acknowledgements(begin);
        let [Action::Nack(nack), Action::Ack(ack)] = work.actions.make_contiguous() else {
            panic!("{:?}", work.actions)
        };
        assert_eq!(nack.which.as_ref().unwrap().delivery_ids, [4]);
        ack.delivery_ids.sort_unstable();
        assert_eq!(ack.delivery_ids, [1, 2, 3, 5]);
        work.actions.clear();
        handle(&mut work, 6..=6).await;
        work.gather_acknowledgements(begin);
        assert!(work.actions.is_empty(), "the last has just gone");
        handle(&mut work, 7..=15).await;
        work.gather_acknowledgements(begin);
        assert_eq!(work.actions.len(), 1, "half of what may be outstanding");
        handle(&mut work, 16..=16).await;
        work.gather_acknowledgements(begin + GATHER);
        assert_eq!(work.actions.len(), 2);
    }
}
