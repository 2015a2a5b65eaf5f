//! Members of a group: messages with acknowledgement.
//!
//! [`Client::consume`] is the whole of it: a handler for each message, many at once but in order for each device, over lost
//! connections, until it is told to stop. [`Client::join`] is one stream, without any of that.

mod lanes;

use std::{any::Any, collections::VecDeque, fmt, future::Future, pin::pin, time::Duration};

use gateway_api::gateway::v1::{
    Ack, ConsumeRequest, ConsumeResponse, ConsumedMessage, Drain, Extend, Flow, Gap, Nack, Open,
    consume_item::Item, consume_request::Action,
};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use self::lanes::{Ended, Finished, Lanes};
use crate::{Client, Error, backoff::Backoff};

/// A message or event that a member got.
pub type Delivery = ConsumedMessage;

/// Requests of a stream that wait for the connection.
const REQUESTS: usize = 16;
/// Most ids in one request.
const IDS: usize = 10_000;

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

/// How to consume.
#[derive(Debug, Clone)]
pub struct Options {
    group: String,
    member_id: String,
    concurrency: usize,
    outstanding: u32,
    keep: Option<Duration>,
    drain: Duration,
}

impl Options {
    /// Of this group, by a member that has its name from the gateway, 16 messages at a time.
    pub fn of(group: impl Into<String>) -> Self {
        Self {
            group: group.into(),
            member_id: String::new(),
            concurrency: 16,
            outstanding: 256,
            keep: None,
            drain: Duration::from_secs(30),
        }
    }

    /// A name over reconnects and restarts: what was with this member comes back to it first, for its lease.
    #[must_use]
    pub fn member(mut self, id: impl Into<String>) -> Self {
        self.member_id = id.into();
        self
    }

    /// How many handlers run at once, at least 1; never two of one device.
    #[must_use]
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = handlers.max(1);
        self
    }

    /// How many messages this member may have that are not acknowledged, running and waiting; 256 otherwise.
    #[must_use]
    pub fn outstanding(mut self, messages: u32) -> Self {
        self.outstanding = messages.max(1);
        self
    }

    /// For handlers that need longer than the group's `ack_deadline`: what this member has stays with it for so long, again and
    /// again, until its handler is done. At least 3 s.
    #[must_use]
    pub fn keep(mut self, time: Duration) -> Self {
        self.keep = Some(time.max(Duration::from_secs(3)));
        self
    }

    /// How long, once it is told to stop, [`Client::consume`] lets handlers finish; 30 s otherwise.
    #[must_use]
    pub fn drain(mut self, time: Duration) -> Self {
        self.drain = time;
        self
    }
}

/// What became of a consumption.
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
    /// A lost connection is made again, with growing pauses and without an end: what was outstanding comes again, and
    /// what this member has done already is acknowledged without a second call of the handler as far as it remembers (the last
    /// 10,000 messages). At least once holds: a message comes twice if this process ends between the work and the
    /// acknowledgement.
    ///
    /// Once told to stop it takes no more, lets what it has be done, and returns when all is acknowledged, or after the time of
    /// [`Options::drain`], which stops handlers where they wait. Dropping the future stops them at once.
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
        let mut work = Work::new(&options);
        let mut backoff = Backoff::default();
        let mut joined_before = false;
        loop {
            let joining = self.join(work.open(&options));
            let lost = tokio::select! {
                joined = joining => match joined {
                    Ok(member) => {
                        joined_before = true;
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
                },
                () = stop.as_mut() => {
                    work.stop_at.get_or_insert_with(|| Instant::now() + options.drain);
                    return Ok(work.finish().await);
                }
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

/// What outlives a stream: handlers that run, and what is known of their messages.
struct Work {
    tasks: JoinSet<(u64, Result<(), GiveBack>)>,
    lanes: Lanes,
    /// The lanes' name of each task, for those that panic.
    names: std::collections::HashMap<tokio::task::Id, u64>,
    concurrency: usize,
    told: Consumed,
    stop_at: Option<Instant>,
    /// Waits for the connection.
    actions: VecDeque<Action>,
}

impl Work {
    fn new(options: &Options) -> Self {
        Self {
            tasks: JoinSet::new(),
            lanes: Lanes::default(),
            names: std::collections::HashMap::new(),
            concurrency: options.concurrency,
            told: Consumed::default(),
            stop_at: None,
            actions: VecDeque::new(),
        }
    }

    fn open(&self, options: &Options) -> Open {
        let flow = Flow { max_outstanding_messages: options.outstanding, ..Flow::default() };
        Open {
            group: options.group.clone(),
            member_id: options.member_id.clone(),
            flow: Some(flow),
            ..Open::default()
        }
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
        let mut keeping = interval(options.keep.unwrap_or(Duration::from_secs(3600)) / 3);
        keeping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            while self.tasks.len() < self.concurrency
                && let Some((name, delivery)) = self.lanes.start()
            {
                let running = handle(delivery);
                let task = self.tasks.spawn(async move { (name, running.await) });
                self.names.insert(task.id(), name);
            }
            self.gather_acknowledgements();
            let say = member.say.clone();
            let (stop_at, waiting) = (self.stop_at, !self.actions.is_empty());
            let blocked_until = self.lanes.blocked_until();
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
                    }
                    None if self.stop_at.is_some() => return Ok(()),
                    None => return Err(Error::stream_ended()),
                },
                _ = keeping.tick(), if options.keep.is_some() => {
                    let (delivery_ids, deadline) = (self.lanes.unfinished(IDS), options.keep);
                    if !delivery_ids.is_empty() {
                        let which = Some(Ack { delivery_ids, ..Ack::default() });
                        let deadline = deadline.and_then(|time| time.try_into().ok());
                        self.actions.push_back(Action::Extend(Extend { which, deadline }));
                    }
                }
                () = sleep_until(blocked_until.unwrap_or_else(Instant::now)), if blocked_until.is_some() => {
                    self.lanes.unblock(Instant::now());
                }
                () = stop.as_mut(), if stop_at.is_none() => {
                    self.stop_at = Some(Instant::now() + options.drain);
                    self.actions.push_back(Action::Drain(Drain {}));
                }
                () = sleep_until(stop_at.unwrap_or_else(Instant::now)), if stop_at.is_some() => {
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
            Item::Opened(_) | Item::Heartbeat(_) => {}
        }
    }

    /// Waits for a handler; none if none runs.
    async fn finished(&mut self) -> Option<()> {
        let (name, result) = match self.tasks.join_next_with_id().await? {
            Ok((id, (name, result))) => {
                self.names.remove(&id);
                (name, result)
            }
            Err(error) => {
                let name = self.names.remove(&error.id())?;
                let reason =
                    error.try_into_panic().map_or_else(|_| "stopped".to_owned(), |panic| panicked(&*panic));
                (name, Err(GiveBack { reason, ..GiveBack::default() }))
            }
        };
        let ended = match &result {
            Ok(()) => Ended::Done,
            Err(GiveBack { dead_letter: true, .. }) => Ended::Up,
            Err(_) => Ended::Back,
        };
        match self.lanes.finish(name, ended, Instant::now()) {
            Finished::Settled => {}
            Finished::GiveBack(delivery_id) => {
                let GiveBack { reason, delay, dead_letter } = result.err().unwrap_or_default();
                self.told.given_back += 1;
                let which = Some(Ack { delivery_ids: vec![delivery_id], ..Ack::default() });
                let delay = delay.and_then(|delay| delay.try_into().ok());
                let reason = reason[..reason.floor_char_boundary(1024)].to_owned();
                self.actions.push_back(Action::Nack(Nack { which, delay, reason, dead_letter }));
            }
        }
        Some(())
    }

    fn gather_acknowledgements(&mut self) {
        let delivery_ids = self.lanes.acknowledge(IDS);
        if !delivery_ids.is_empty() {
            self.actions.push_back(Action::Ack(Ack { delivery_ids, ..Ack::default() }));
        }
    }

    fn lose_stream(&mut self) {
        self.actions.clear();
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
