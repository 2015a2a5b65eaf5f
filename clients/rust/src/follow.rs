//! Streams that go on after a lost connection.

use std::{collections::VecDeque, fmt, future::Future, pin::Pin};

use gateway_api::gateway::v1::{
    Command, SubscribeRequest, SubscribeResponse, WatchCommandRequest, WatchCommandResponse,
    WatchEventsRequest, WatchEventsResponse, WatchLatestRequest, WatchLatestResponse, WatchShadowRequest,
    WatchShadowResponse, subscribe_item, watch_events_item, watch_latest_item, watch_shadow_item,
};
use tokio::time::{Instant, sleep_until};
use tonic::{Response, Status, Streaming};

use crate::{Client, Error, Reason, backoff::Backoff};

type Opening<R> = Pin<Box<dyn Future<Output = Result<Response<Streaming<R>>, Status>> + Send>>;

/// Item or change of state of a stream.
#[derive(Debug, Clone)]
pub enum Update<I> {
    /// An item, as the proto has it.
    Item(I),
    /// The connection was lost and is there again: what came meanwhile is missing, unless the stream can resume. A watch of
    /// latest values or shadows brings the current ones again.
    Reconnected {
        /// Nothing is missing.
        resumed: bool,
    },
    /// The connection was lost; it is tried again after a pause.
    Lost(Error),
}

/// A stream that opens itself anew when it is lost.
pub struct Following<R, I> {
    client: Client,
    open: Box<dyn Fn(Client, String) -> Opening<R> + Send>,
    /// The items of a response, and where to resume after them.
    split: fn(R) -> (Vec<I>, String),
    stream: Option<Streaming<R>>,
    items: VecDeque<I>,
    /// Position at which to resume; empty is none.
    place: String,
    backoff: Backoff,
    /// Instant of the next try.
    due: Option<Instant>,
    opened: bool,
    /// The gateway ends it in order when nothing more can come.
    has_end: bool,
}

impl<R, I> fmt::Debug for Following<R, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Following").field("connected", &self.stream.is_some()).finish_non_exhaustive()
    }
}

impl<R: Send + 'static, I> Following<R, I> {
    fn new(
        client: &Client,
        open: impl Fn(Client, String) -> Opening<R> + Send + 'static,
        split: fn(R) -> (Vec<I>, String),
    ) -> Self {
        Self {
            client: client.clone(),
            open: Box::new(open),
            split,
            stream: None,
            items: VecDeque::new(),
            place: String::new(),
            backoff: Backoff::default(),
            due: None,
            opened: false,
            has_end: false,
        }
    }

    /// Items that were read already and that [`Self::next`] gives without waiting.
    pub fn read_ahead(&self) -> usize {
        self.items.len()
    }

    /// The next update, with a pause between two tries to connect. Safe to cancel: nothing that was read is lost.
    ///
    /// # Errors
    /// What a repetition does not mend: a refusal, or no connection at the first try. The stream is over then.
    pub async fn next(&mut self) -> Result<Update<I>, Error> {
        self.advance().await?.ok_or_else(Error::stream_ended)
    }

    /// The same, or none at the end of a stream that has one.
    async fn advance(&mut self) -> Result<Option<Update<I>>, Error> {
        loop {
            if let Some(item) = self.items.pop_front() {
                return Ok(Some(Update::Item(item)));
            }
            let Some(stream) = &mut self.stream else {
                if let Some(update) = self.reopen().await? {
                    return Ok(Some(update));
                }
                continue;
            };
            let error = match stream.message().await {
                Ok(Some(response)) => {
                    let (items, place) = (self.split)(response);
                    self.items.extend(items);
                    self.place = place;
                    continue;
                }
                Ok(None) if self.has_end => return Ok(None),
                Ok(None) => Error::stream_ended(),
                Err(status) => Error::from(status),
            };
            self.stream = None;
            if !self.client.may_go_on(&error) {
                return Err(error);
            }
            self.due = Some(Instant::now() + self.backoff.after(error.retry_after()));
            return Ok(Some(Update::Lost(error)));
        }
    }

    async fn reopen(&mut self) -> Result<Option<Update<I>>, Error> {
        if let Some(due) = self.due {
            sleep_until(due).await;
        }
        let error = match (self.open)(self.client.clone(), self.place.clone()).await {
            Ok(response) => {
                self.stream = Some(response.into_inner());
                self.due = None;
                self.backoff.reset();
                if std::mem::replace(&mut self.opened, true) {
                    return Ok(Some(Update::Reconnected { resumed: !self.place.is_empty() }));
                }
                return Ok(None);
            }
            Err(status) => Error::from(status),
        };
        if *error.reason() == Reason::OldToken {
            // The place is no longer remembered: continue from now on.
            self.place.clear();
            return Ok(None);
        }
        if !self.opened || !self.client.may_go_on(&error) {
            return Err(error);
        }
        self.due = Some(Instant::now() + self.backoff.after(error.retry_after()));
        Ok(None)
    }
}

/// A stored command and its changes: [`Client::watch_command`].
#[derive(Debug)]
pub struct WatchedCommand(Option<Following<WatchCommandResponse, Command>>);

impl WatchedCommand {
    /// The command as it is, and after each change; none when it has ended. After a lost connection it comes as it is then, and
    /// maybe as it was already. Safe to cancel.
    ///
    /// # Errors
    /// What a repetition does not mend, as [`Following::next`]; [`Reason::CommandNotFound`] if there is none, or no longer.
    pub async fn next(&mut self) -> Result<Option<Command>, Error> {
        while let Some(following) = &mut self.0 {
            match following.advance().await? {
                Some(Update::Item(command)) => return Ok(Some(command)),
                Some(Update::Reconnected { .. } | Update::Lost(_)) => {}
                None => self.0 = None,
            }
        }
        Ok(None)
    }
}

impl Client {
    /// Messages as they are published, at most once. What is published while the connection is lost is missing: a group
    /// ([`crate::consume`]) misses nothing.
    pub fn subscribe(&self, request: SubscribeRequest) -> Following<SubscribeResponse, subscribe_item::Item> {
        let open = move |client: Self, _| -> Opening<_> {
            let (mut client, request) = (client.subscriber(), request.clone());
            Box::pin(async move { client.subscribe(request).await })
        };
        Following::new(self, open, |response| {
            (response.items.into_iter().filter_map(|item| item.item).collect(), String::new())
        })
    }

    /// Latest values and their changes.
    pub fn watch_latest(
        &self,
        request: WatchLatestRequest,
    ) -> Following<WatchLatestResponse, watch_latest_item::Item> {
        let open = move |client: Self, _| -> Opening<_> {
            let (mut client, request) = (client.state(), request.clone());
            Box::pin(async move { client.watch_latest(request).await })
        };
        Following::new(self, open, |response| {
            (response.items.into_iter().filter_map(|item| item.item).collect(), String::new())
        })
    }

    /// Shadows and their changes.
    pub fn watch_shadows(
        &self,
        request: WatchShadowRequest,
    ) -> Following<WatchShadowResponse, watch_shadow_item::Item> {
        let open = move |client: Self, _| -> Opening<_> {
            let (mut client, request) = (client.shadows(), request.clone());
            Box::pin(async move { client.watch_shadow(request).await })
        };
        Following::new(self, open, |response| {
            (response.items.into_iter().filter_map(|item| item.item).collect(), String::new())
        })
    }

    /// Watches events of devices; resumes where it was, as long as the gateway remembers.
    pub fn watch_events(
        &self,
        request: WatchEventsRequest,
    ) -> Following<WatchEventsResponse, watch_events_item::Item> {
        let open = move |client: Self, place: String| -> Opening<_> {
            let (mut client, mut request) = (client.events(), request.clone());
            if !place.is_empty() {
                request.resume_token = place;
            }
            Box::pin(async move { client.watch_events(request).await })
        };
        Following::new(self, open, |response| {
            (response.items.into_iter().filter_map(|item| item.item).collect(), response.resume_token)
        })
    }

    /// A stored command, until it has ended.
    pub fn watch_command(&self, command_id: &str) -> WatchedCommand {
        let command_id = command_id.to_owned();
        let open = move |client: Self, _| -> Opening<_> {
            let (mut client, command_id) = (client.commands(), command_id.clone());
            Box::pin(async move { client.watch_command(WatchCommandRequest { command_id }).await })
        };
        let split = |response: WatchCommandResponse| (response.command.into_iter().collect(), String::new());
        WatchedCommand(Some(Following { has_end: true, ..Following::new(self, open, split) }))
    }
}
