//! `gateway.v1.State`: latest values, history and retained messages.

use std::{collections::HashSet, sync::Arc};

use access::backends::TokenGrant;
use broker::Selector;
use bytes::Bytes;
use gateway_core::{Message, Origin, SharedMessage, clock::now, has_wildcard, matches};
use prost::Message as _;
use store::LatestQuery;
use tokio::task::JoinSet;
use tonic::{Request, Response, Status, metadata::MetadataMap};

use super::{
    delete::{self, retain_error},
    history,
};
use crate::{
    context::{Context, LatestValues},
    proto::{gateway::v1, server::state_server::State},
    server::{
        access::{Call, devices_of},
        deadline::within,
    },
    stream::{
        RawMessage, StreamOptions, StreamTarget, StreamTimers, Subscription, size_of_filters, size_of_names,
    },
};
use grpc_messages::convert::SlowPolicy;
use grpc_messages::{
    answers,
    convert::{self, MAX_FILTERS, MAX_STREAM_BATCH},
    encode::StreamForm,
    page::{PAGE_BYTES, RequestPages, fit},
    status::Error,
};

/// Most requests in BatchGetLatest.
const MAX_GETS: usize = 1_000;
/// Reads of one BatchGetLatest under way at once.
const CONCURRENT_GETS: usize = 32;
/// Retained messages deleted at once.
const DELETE_PAGE: usize = 256;
/// Values in a page of a snapshot.
const SNAPSHOT_PAGE: usize = 256;

/// The service.
pub(crate) struct StateService {
    pub(crate) context: Context,
}

impl StateService {
    /// A change of a retained message is answered when it is on disk.
    async fn settle_retained(&self) -> Result<(), Error> {
        match self.context.broker.stores() {
            Some(stores) => stores.flush_retained().await.map_err(|_| Error::StoreRefused),
            None => Ok(()),
        }
    }

    /// Deletes the retained messages that match, page by page, each on disk before the next, and returns how many. If
    /// cancelled, it has deleted a part.
    async fn delete_matching(&self, filter: &str) -> Result<u64, Error> {
        let broker = &self.context.broker;
        if !broker.limits().retain_available {
            return Err(Error::RetainUnavailable);
        }
        let (mut deleted, mut after) = (0, None::<Arc<str>>);
        loop {
            let at = now();
            let page = broker.retained_topics(filter, after.as_deref(), DELETE_PAGE, at);
            for topic in &page {
                let clear = Message::new(topic, b"", at, Origin::BACKEND);
                deleted += u64::from(broker.set_retained(&clear).map_err(retain_error)?);
            }
            self.settle_retained().await?;
            tokio::task::yield_now().await;
            match page.last() {
                Some(last) if page.len() == DELETE_PAGE => after = Some(Arc::clone(last)),
                _ => return Ok(deleted),
            }
        }
    }

    fn latest(&self) -> Result<&Arc<dyn LatestValues>, Error> {
        self.context.hooks.latest.as_ref().ok_or(Error::LatestOff)
    }

    /// `read`, unless the call's deadline comes first.
    async fn within<T>(
        &self,
        metadata: &MetadataMap,
        read: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        within(metadata, self.context.config.wait_timeout, read).await
    }

    /// The values asked for, in their order, several reads at once, as many as fit in an answer. Cancelled, no read goes
    /// on.
    async fn get_all(
        &self,
        requests: Vec<v1::GetLatestRequest>,
    ) -> Result<Vec<v1::BatchGetLatestEntry>, Error> {
        let latest = self.latest()?;
        let mut entries: Vec<Option<v1::BatchGetLatestEntry>> = vec![None; requests.len()];
        let mut waiting = requests.into_iter().enumerate();
        let mut reads = JoinSet::new();
        let (mut complete, mut size) = (0, 0);
        loop {
            while reads.len() < CONCURRENT_GETS
                && let Some((place, request)) = waiting.next()
            {
                let latest = Arc::clone(latest);
                reads.spawn(async move { (place, get(latest.as_ref(), &request).await) });
            }
            let Some(read) = reads.join_next().await else { break };
            let (place, value) = read.map_err(|_| Error::Internal)?;
            if let Some(entry) = entries.get_mut(place) {
                *entry = Some(v1::BatchGetLatestEntry { value: value? });
            }
            while let Some(Some(entry)) = entries.get(complete) {
                size += entry.encoded_len() + 8;
                if size > PAGE_BYTES && complete > 0 {
                    entries.truncate(complete);
                    return Ok(entries.into_iter().flatten().collect());
                }
                complete += 1;
            }
        }
        Ok(entries.into_iter().flatten().collect())
    }

    fn check_get(&self, call: &Call, field: &str, request: &v1::GetLatestRequest) -> Result<(), Error> {
        let limits = self.context.broker.limits();
        let (topic, device) = (format!("{field}topic"), format!("{field}device_id"));
        convert::check_topic_name(&topic, &request.topic, limits)?;
        call.check_topic(&topic, &request.topic)?;
        match &request.device_id {
            Some(id) => {
                convert::check_client_id(&device, id, limits)?;
                call.check_device(&device, id)
            }
            // The newest value of all devices may be of another than those in scope.
            None if call.scope().devices().is_some() => Err(call.out_of_scope(&device, "")),
            None => Ok(()),
        }
    }
}

async fn get(
    latest: &dyn LatestValues,
    request: &v1::GetLatestRequest,
) -> Result<Option<v1::LatestValue>, Error> {
    let value = latest.get(&request.topic, request.device_id.as_deref()).await?;
    Ok(value.map(answers::latest_value))
}

/// A page whose response fits in `budget` bytes, if one value does. The store's tokens stand at page ends
/// only, so a page that is too large is asked for again with fewer values.
async fn page(
    latest: &dyn LatestValues,
    mut query: LatestQuery,
    budget: usize,
) -> Result<(Vec<v1::LatestValue>, String), Error> {
    loop {
        let page = latest.list(query.clone()).await?;
        let values: Vec<_> = page.values.into_iter().map(answers::latest_value).collect();
        let size: usize = values.iter().map(|value| value.encoded_len() + 8).sum();
        if size <= budget || query.limit <= 1 {
            return Ok((values, page.next));
        }
        query.limit = (values.len() / 2).clamp(1, query.limit - 1);
    }
}

#[tonic::async_trait]
impl State for StateService {
    async fn get_latest(
        &self,
        request: Request<v1::GetLatestRequest>,
    ) -> Result<Response<v1::GetLatestResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        self.check_get(&call, "", &request)?;
        let value = self.within(&metadata, get(self.latest()?.as_ref(), &request)).await?;
        let value = value.ok_or(Error::ValueNotFound)?;
        Ok(Response::new(v1::GetLatestResponse { value: Some(value) }))
    }

    async fn batch_get_latest(
        &self,
        request: Request<v1::BatchGetLatestRequest>,
    ) -> Result<Response<v1::BatchGetLatestResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let requests = request.requests;
        if requests.len() > MAX_GETS {
            return Err(Error::invalid("requests", format!("has more than {MAX_GETS} items")).into());
        }
        for (place, request) in requests.iter().enumerate() {
            self.check_get(&call, &format!("requests[{place}]."), request)?;
        }
        let asked = requests.len();
        let entries = self.within(&metadata, self.get_all(requests)).await?;
        let next = if entries.len() < asked { entries.len() } else { 0 };
        let next_index = u32::try_from(next).unwrap_or(u32::MAX);
        Ok(Response::new(v1::BatchGetLatestResponse { entries, next_index }))
    }

    async fn list_latest(
        &self,
        request: Request<v1::ListLatestRequest>,
    ) -> Result<Response<v1::ListLatestResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, mut request) = request.into_parts();
        let limits = self.context.broker.limits();
        let (limit, token) =
            (convert::page_size(request.page_size)?, std::mem::take(&mut request.page_token));
        request.page_size = 0;
        let pages = RequestPages::of("ListLatest", &request);
        let page_token = pages.start(&token)?.unwrap_or_default();
        convert::check_entries(request.device_ids.len())?;
        convert::check_client_ids("device_ids", &request.device_ids, limits)?;
        call.check_devices("device_ids", &request.device_ids)?;
        let filter = (!request.topic_filter.is_empty()).then_some(request.topic_filter);
        if let Some(filter) = &filter {
            convert::check_filter(|| "topic_filter".to_owned(), filter, limits)?;
            call.check_filter("topic_filter", filter)?;
        }
        let query = LatestQuery { devices: request.device_ids, filter, limit, page_token };
        let read = page(self.latest()?.as_ref(), query, PAGE_BYTES);
        let (mut values, next) = self.within(&metadata, read).await?;
        values.retain(|value| call.scope().has_message(Some(&value.device_id), &value.topic));
        let next_page_token = pages.token(Some(next.as_str()).filter(|next| !next.is_empty()));
        Ok(Response::new(v1::ListLatestResponse { values, next_page_token }))
    }

    async fn delete_latest(
        &self,
        request: Request<v1::DeleteLatestRequest>,
    ) -> Result<Response<v1::DeleteLatestResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let limits = self.context.broker.limits();
        convert::check_client_id("device_id", &request.device_id, limits)?;
        call.about(&request.device_id);
        call.check_device("device_id", &request.device_id)?;
        let filter = match (request.topic.as_str(), request.topic_filter.as_str()) {
            (topic, "") => {
                convert::check_topic_name("topic", topic, limits)?;
                topic
            }
            ("", filter) => {
                convert::check_filter(|| "topic_filter".to_owned(), filter, limits)?;
                filter
            }
            _ => return Err(Error::invalid("topic_filter", "cannot be combined with topic").into()),
        };
        self.latest()?;
        let filters = call.narrow("topic_filter", vec![filter.to_owned()], MAX_FILTERS)?;
        let deleting = async {
            let mut count = 0;
            for filter in &filters {
                count += delete::latest(&self.context, &request.device_id, filter).await?;
            }
            Ok(count)
        };
        let count = self.within(&metadata, deleting).await?;
        Ok(Response::new(v1::DeleteLatestResponse { count }))
    }

    type WatchLatestStream = WatchStream;

    async fn watch_latest(
        &self,
        request: Request<v1::WatchLatestRequest>,
    ) -> Result<Response<Self::WatchLatestStream>, Status> {
        let call = Call::of(request.extensions())?;
        let request = request.into_inner();
        let broker = &self.context.broker;
        let limits = broker.limits();
        convert::check_entries(request.device_ids.len() + request.topic_filters.len())?;
        convert::check_client_ids("device_ids", &request.device_ids, limits)?;
        convert::check_filters("topic_filters", &request.topic_filters, limits)?;
        call.check_devices("device_ids", &request.device_ids)?;
        let latest = Arc::clone(self.latest()?);
        let pace = StreamTimers {
            linger: convert::linger(request.linger)?,
            heartbeat: convert::heartbeat("heartbeat_interval", request.heartbeat_interval)?,
        };
        let options = StreamOptions {
            form: StreamForm::Latest,
            policy: SlowPolicy::Conflate,
            buffer: limits.stream_buffer.0,
            batch: MAX_STREAM_BATCH,
        };
        let filters = call.narrow("topic_filters", convert::or_all(request.topic_filters), MAX_FILTERS)?;
        let grant = &call.caller().grant;
        let mut slot = self.context.streams.open(&call)?;
        // The devices also for the snapshot, and the filters for that and for deletions.
        slot.select(
            2 * size_of_names(&request.device_ids) + size_of_filters(&filters) + 2 * size_of_names(&filters),
        )?;
        let selector =
            Selector::new(true).devices(request.device_ids.clone(), Vec::new()).within(devices_of(grant));
        let target =
            StreamTarget::new(Arc::clone(slot.caller_memory()), selector, options).watching(filters.clone());
        let target = Arc::new(target);
        // Attached before the snapshot is read: a change is recorded before it is delivered, so it is in one
        // of them or in both, never in none; and changes come after the snapshot.
        let changes = Subscription::attach(broker, slot, target, &filters, pace);
        // A store that lists values by device only has no snapshot of all devices: the snapshot ends at once.
        let listed = latest.lists_all() || !request.device_ids.is_empty();
        let snapshot_of = if listed { filters.into_iter().rev().collect() } else { Vec::new() };
        let snapshot = (!request.changes_only).then(|| WatchSnapshot {
            latest,
            devices: request.device_ids,
            filters: snapshot_of,
            done: DoneFilters::default(),
            page_token: String::new(),
            limit: SNAPSHOT_PAGE,
            grant: Arc::clone(grant),
        });
        Ok(Response::new(WatchStream::new(changes, snapshot)))
    }

    async fn list_history(
        &self,
        request: Request<v1::ListHistoryRequest>,
    ) -> Result<Response<v1::ListHistoryResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        call.check_topic("topic", &request.topic)?;
        call.check_device("device_id", &request.device_id)?;
        let page =
            history::page(self.context.broker.limits(), self.context.hooks.history.as_deref(), request);
        Ok(Response::new(self.within(&metadata, page).await?))
    }

    async fn get_retained(
        &self,
        request: Request<v1::GetRetainedRequest>,
    ) -> Result<Response<v1::GetRetainedResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let topic = request.into_inner().topic;
        let broker = &self.context.broker;
        convert::check_topic_name("topic", &topic, broker.limits())?;
        call.check_topic("topic", &topic)?;
        let at = now();
        let message = broker.retained(&topic, at).await.map_err(Error::from)?;
        let message = message.filter(|message| is_visible(&call, message)).ok_or(Error::ValueNotFound)?;
        Ok(Response::new(v1::GetRetainedResponse { message: Some(answers::retained_message(&message, at)) }))
    }

    async fn set_retained(
        &self,
        request: Request<v1::SetRetainedRequest>,
    ) -> Result<Response<v1::SetRetainedResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let broker = &self.context.broker;
        let publication = convert::retained(request.into_inner(), broker.limits())?;
        call.check_topic("topic", &publication.topic)?;
        let replaced = broker.set_retained(&publication.message(now())).map_err(retain_error)?;
        self.settle_retained().await?;
        Ok(Response::new(v1::SetRetainedResponse { replaced }))
    }

    async fn delete_retained(
        &self,
        request: Request<v1::DeleteRetainedRequest>,
    ) -> Result<Response<v1::DeleteRetainedResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let broker = &self.context.broker;
        let request = request.into_inner();
        if !request.topic_filter.is_empty() {
            if !request.topic.is_empty() {
                return Err(Error::invalid("topic_filter", "cannot be combined with topic").into());
            }
            let filter = &request.topic_filter;
            call.about(filter);
            convert::check_filter(|| "topic_filter".to_owned(), filter, broker.limits())?;
            let mut count = 0;
            for filter in call.narrow("topic_filter", vec![filter.clone()], MAX_FILTERS)? {
                count += self.delete_matching(&filter).await?;
            }
            return Ok(Response::new(v1::DeleteRetainedResponse { count }));
        }
        let request =
            v1::PublishRequest { topic: request.topic, retain: true, ..v1::PublishRequest::default() };
        let publication = convert::publication(request, broker.limits())?;
        call.about(&publication.topic);
        call.check_topic("topic", &publication.topic)?;
        let deleted = broker.set_retained(&publication.message(now())).map_err(retain_error)?;
        self.settle_retained().await?;
        Ok(Response::new(v1::DeleteRetainedResponse { count: deleted.into() }))
    }

    async fn list_retained(
        &self,
        request: Request<v1::ListRetainedRequest>,
    ) -> Result<Response<v1::ListRetainedResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let mut request = request.into_inner();
        let (limit, token) =
            (convert::page_size(request.page_size)?, std::mem::take(&mut request.page_token));
        request.page_size = 0;
        let pages = RequestPages::of("ListRetained", &request);
        let broker = &self.context.broker;
        let limits = broker.limits();
        let filter = if request.topic_filter.is_empty() { "#" } else { &request.topic_filter };
        convert::check_filter(|| "topic_filter".to_owned(), filter, limits)?;
        call.check_filter("topic_filter", filter)?;
        // The last topic of the page before.
        let after = pages.start(&token)?;
        let at = now();
        let found = broker.list_retained(filter, after.as_deref(), limit, PAGE_BYTES, at).await;
        let found = found.map_err(Error::from)?;
        let in_scope = found.messages.iter().filter(|message| is_visible(&call, message));
        let messages = in_scope.map(|message| answers::retained_message(message, at));
        let (messages, cut) = fit(messages, PAGE_BYTES);
        let last = messages.last().filter(|_| cut).map(|message| message.topic.as_str());
        let next_page_token = pages.token(last.or(found.next.as_deref()));
        Ok(Response::new(v1::ListRetainedResponse { messages, next_page_token }))
    }
}

/// Tells whether a retained message is in scope.
fn is_visible(call: &Call, message: &SharedMessage) -> bool {
    call.scope().has_message(message.client_id.as_ref().map(|id| id.as_str()), &message.topic)
}

/// Topics of a page times filters that they are held against, at most.
const MOST_MATCHES: usize = 200_000;

/// Filters of a snapshot that were read to the end: what they match was sent, and is not sent again for another.
#[derive(Default)]
struct DoneFilters {
    topics: HashSet<String>,
    wildcards: Vec<String>,
}

impl DoneFilters {
    fn add(&mut self, filter: String) {
        match has_wildcard(&filter) {
            true => self.wildcards.push(filter),
            false => {
                self.topics.insert(filter);
            }
        }
    }

    fn have(&self, topic: &str) -> bool {
        self.topics.contains(topic) || self.wildcards.iter().any(|filter| matches(filter, topic))
    }
}

/// The part of a watch that reads current values, page by page as the caller takes them.
struct WatchSnapshot {
    latest: Arc<dyn LatestValues>,
    devices: Vec<String>,
    /// Still to read; the last one is being read.
    filters: Vec<String>,
    done: DoneFilters,
    page_token: String,
    limit: usize,
    /// Grant that limits the snapshot to its devices.
    grant: Arc<TokenGrant>,
}

impl WatchSnapshot {
    /// The next response; true if it is the last.
    async fn next(mut self) -> (Self, Result<(RawMessage, bool), Error>) {
        let result = self.read().await;
        (self, result)
    }

    async fn read(&mut self) -> Result<(RawMessage, bool), Error> {
        use v1::watch_latest_item::Item;

        let mut items = Vec::new();
        if let Some(filter) = self.filters.last() {
            let query = LatestQuery {
                devices: self.devices.clone(),
                filter: Some(filter.clone()).filter(|filter| filter != "#"),
                limit: self.limit,
                page_token: std::mem::take(&mut self.page_token),
            };
            let (values, next) = page(self.latest.as_ref(), query, 2 * MAX_STREAM_BATCH).await?;
            // Large values make small pages: do not read each page many times.
            let most = SNAPSHOT_PAGE.min(MOST_MATCHES / (1 + self.done.wildcards.len())).max(1);
            self.limit = if next.is_empty() { most } else { values.len().clamp(1, most) };
            let in_scope = values.into_iter().filter(|value| self.grant.scope.has_device(&value.device_id));
            let is_new = |value: &v1::LatestValue| !self.done.have(&value.topic);
            items.extend(in_scope.filter(is_new).map(Item::Value));
            if next.is_empty()
                && let Some(filter) = self.filters.pop()
            {
                self.done.add(filter);
            }
            self.page_token = next;
        }
        let last = self.filters.is_empty();
        if last {
            items.push(Item::SnapshotEnd(v1::SnapshotEnd {}));
        }
        let items = items.into_iter().map(|item| v1::WatchLatestItem { item: Some(item) }).collect();
        let response = v1::WatchLatestResponse { items };
        Ok((RawMessage(Bytes::from(response.encode_to_vec())), last))
    }
}

/// A snapshot, then changes.
pub(crate) struct WatchStream {
    changes: Subscription,
    snapshot: Option<SnapshotRead>,
}

type SnapshotRead =
    std::pin::Pin<Box<dyn Future<Output = (WatchSnapshot, Result<(RawMessage, bool), Error>)> + Send>>;

impl WatchStream {
    fn new(changes: Subscription, snapshot: Option<WatchSnapshot>) -> Self {
        Self { changes, snapshot: snapshot.map(|snapshot| Box::pin(snapshot.next()) as SnapshotRead) }
    }
}

impl tokio_stream::Stream for WatchStream {
    type Item = Result<RawMessage, Status>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        use std::task::Poll;

        let this = &mut *self;
        if let Some(read) = &mut this.snapshot {
            if this.changes.is_closed() {
                this.snapshot = None;
                return Poll::Ready(Some(Err(Error::ShuttingDown.into())));
            }
            let Poll::Ready((snapshot, result)) = read.as_mut().poll(cx) else { return Poll::Pending };
            let (response, last) = match result {
                Ok(read) => read,
                Err(error) => {
                    this.snapshot = None;
                    this.changes.end();
                    return Poll::Ready(Some(Err(error.into())));
                }
            };
            this.snapshot = (!last).then(|| Box::pin(snapshot.next()) as SnapshotRead);
            return Poll::Ready(Some(Ok(response)));
        }
        std::pin::Pin::new(&mut this.changes).poll_next(cx)
    }
}
