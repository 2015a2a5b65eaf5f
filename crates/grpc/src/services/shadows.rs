//! `gateway.v1.Shadows`.

use std::{collections::HashSet, convert::Infallible, pin::pin, sync::Arc, time::Duration};

use access::backends::{Scope, TokenGrant};
use device_shadows::{ShadowChange, ShadowDocument, ShadowKey, ShadowService as All};
use gateway_core::{
    ClientId,
    clock::{self, now},
};
use shadow::{MAX_CLIENT_TOKEN, Patch, Rejection, ShadowTopics, Update, is_name};
use store::MAX_SHADOW_DEVICE;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::{
    context::Context,
    proto::{gateway::v1, server::shadows_server::Shadows},
    server::{access::Call, deadline::within},
    stream::{ResponseQueue, ResponseSender, StreamEnd, responses, size_of_names},
};
use grpc_messages::{
    answers, convert,
    page::{PAGE_BYTES, RequestPages, fit},
    status::Error,
};

/// Bytes of a batch of a watch, not counting its last item.
const BATCH_BYTES: usize = 256 << 10;
/// Shadows of one read of a snapshot.
const SNAPSHOT_PAGE: usize = 64;

/// The service.
pub(crate) struct ShadowsService {
    pub(crate) context: Context,
}

impl ShadowsService {
    fn all(&self) -> Result<&Arc<All>, Error> {
        match &self.context.hooks.shadows {
            Ok(shadows) => Ok(shadows),
            Err(key) => Err(Error::ShadowsOff(key)),
        }
    }

    /// The shadow, if it is in the caller's scope. `operation` is what a device would do for the same: whose topics are limited
    /// must have the topic of that.
    fn key(&self, call: &Call, device: String, name: &str, operation: &str) -> Result<ShadowKey, Error> {
        let topics = &self.all()?.options().topics;
        self.check_device(call, &device)?;
        check_name("name", name)?;
        if call.scope().topics().is_some() {
            call.check_topic("name", &topics.answer(&device, name, operation))?;
        }
        Ok(ShadowKey { device: ClientId::new(&device), name: Arc::from(name) })
    }

    fn check_device(&self, call: &Call, device: &str) -> Result<(), Error> {
        convert::check_client_id("device_id", device, self.context.broker.limits())?;
        if device.len() > MAX_SHADOW_DEVICE {
            return Err(Error::invalid("device_id", format!("is longer than {MAX_SHADOW_DEVICE} bytes")));
        }
        call.about(device);
        call.check_device("device_id", device)
    }
}

fn check_name(field: &str, name: &str) -> Result<(), Error> {
    if name.is_empty() || is_name(name) {
        return Ok(());
    }
    Err(Error::invalid(field, "is not 1 to 64 of letters, digits, \":\", \"_\" and \"-\""))
}

/// A section of an update.
fn patch(field: &str, text: Option<&str>, limits: &shadow::DocumentLimits) -> Result<Option<Patch>, Error> {
    let Some(text) = text else { return Ok(None) };
    match Update::patch(text, limits) {
        Ok(Some(patch)) => Ok(Some(patch)),
        Ok(None) => Err(Error::invalid(field, "is neither a JSON object nor null")),
        Err(Rejection::InvalidJson) => Err(Error::invalid(field, "is not JSON")),
        Err(Rejection::TooDeep(depth)) => {
            Err(Error::invalid(field, format!("has more than {depth} levels of objects and arrays")))
        }
        Err(rejection) => Err(rejection.into()),
    }
}

fn to_proto(shadow: &ShadowDocument) -> v1::Shadow {
    let state = shadow.state.as_deref();
    v1::Shadow {
        device_id: shadow.device.as_str().to_owned(),
        name: shadow.name.to_string(),
        version: shadow.version,
        update_time: Some(answers::time(shadow.changed)),
        desired: state.map(shadow::State::desired).unwrap_or_default(),
        reported: state.map(shadow::State::reported).unwrap_or_default(),
        delta: state.and_then(shadow::State::delta_text).unwrap_or_default(),
        metadata: state.map(shadow::State::metadata).unwrap_or_default(),
    }
}

#[tonic::async_trait]
impl Shadows for ShadowsService {
    type WatchShadowStream = ResponseQueue;

    async fn get_shadow(
        &self,
        request: Request<v1::GetShadowRequest>,
    ) -> Result<Response<v1::GetShadowResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let key = self.key(&call, request.device_id, &request.name, "get")?;
        let all = self.all()?;
        let get = async { Ok(all.get(&key).await?) };
        let shadow = within(&metadata, self.context.config.wait_timeout, get).await?;
        Ok(Response::new(v1::GetShadowResponse { shadow: Some(to_proto(&shadow)) }))
    }

    async fn update_shadow(
        &self,
        request: Request<v1::UpdateShadowRequest>,
    ) -> Result<Response<v1::UpdateShadowResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let key = self.key(&call, request.device_id, &request.name, "update")?;
        let all = self.all()?;
        let limits = &all.options().limits;
        if request.client_token.len() > MAX_CLIENT_TOKEN {
            let problem = format!("is longer than {MAX_CLIENT_TOKEN} bytes");
            return Err(Error::invalid("client_token", problem).into());
        }
        let update = Update {
            desired: patch("desired", request.desired.as_deref(), limits)?,
            reported: patch("reported", request.reported.as_deref(), limits)?,
            version: request.expected_version,
            client_token: Some(request.client_token).filter(|token| !token.is_empty()),
        };
        if update.desired.is_none() && update.reported.is_none() {
            return Err(Error::invalid("desired", "is missing, and so is reported").into());
        }
        let update = async { Ok(all.update(&self.context.broker, key, update).await?) };
        let shadow = within(&metadata, self.context.config.wait_timeout, update).await?;
        Ok(Response::new(v1::UpdateShadowResponse { shadow: Some(to_proto(&shadow)) }))
    }

    async fn delete_shadow(
        &self,
        request: Request<v1::DeleteShadowRequest>,
    ) -> Result<Response<v1::DeleteShadowResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let key = self.key(&call, request.device_id, &request.name, "delete")?;
        let all = self.all()?;
        let delete = async { Ok(all.delete(&self.context.broker, key, request.expected_version).await?) };
        let left = within(&metadata, self.context.config.wait_timeout, delete).await?;
        Ok(Response::new(v1::DeleteShadowResponse { version: left.version }))
    }

    async fn list_shadows(
        &self,
        request: Request<v1::ListShadowsRequest>,
    ) -> Result<Response<v1::ListShadowsResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, mut request) = request.into_parts();
        let (limit, token) =
            (convert::page_size(request.page_size)?, std::mem::take(&mut request.page_token));
        request.page_size = 0;
        let pages = RequestPages::of("ListShadows", &request);
        self.check_device(&call, &request.device_id)?;
        let all = self.all()?;
        // The last name of the page before.
        let after = pages.start(&token)?;
        let list = async { Ok(all.list(&request.device_id, after.as_deref(), limit).await?) };
        let (found, last) = within(&metadata, self.context.config.wait_timeout, list).await?;
        let visible = found.iter().filter(|shadow| is_visible(call.scope(), &all.options().topics, shadow));
        let (shadows, cut) = fit(visible.map(to_proto), PAGE_BYTES);
        let next = match shadows.last() {
            Some(shadow) if cut => Some(shadow.name.as_str()),
            _ => last.as_deref(),
        };
        Ok(Response::new(v1::ListShadowsResponse { next_page_token: pages.token(next), shadows }))
    }

    async fn watch_shadow(
        &self,
        request: Request<v1::WatchShadowRequest>,
    ) -> Result<Response<Self::WatchShadowStream>, Status> {
        let call = Call::of(request.extensions())?;
        let request = request.into_inner();
        convert::check_entries(request.device_ids.len() + request.names.len())?;
        convert::check_client_ids("device_ids", &request.device_ids, self.context.broker.limits())?;
        call.check_devices("device_ids", &request.device_ids)?;
        request.names.iter().try_for_each(|name| check_name("names", name))?;
        let heartbeat = convert::heartbeat("heartbeat_interval", request.heartbeat_interval)?;
        let all = Arc::clone(self.all()?);
        let mut slot = self.context.streams.open(&call)?;
        // The devices also for the snapshot.
        slot.select(2 * size_of_names(&request.device_ids) + size_of_names(&request.names))?;
        let wanted = Arc::new(ShadowSelection {
            devices: request.device_ids.iter().cloned().collect(),
            names: request.names.into_iter().collect(),
            topics: all.options().topics.clone(),
            grant: Arc::clone(&call.caller().grant),
        });
        // Begun before the snapshot is read: a change is durable before it is told, so it is in one of them or in both.
        let of = Arc::clone(&wanted);
        let watch = all.watch(slot.caller_memory().clone(), move |shadow| of.is(shadow));
        let mut shutdown = self.context.shutdown.clone();
        // Behind what waits here changes are conflated.
        let (sender, queue) = responses(slot);
        let snapshot = (!request.changes_only).then_some(request.device_ids);
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = follow(&sender, (&all, snapshot), &wanted, watch, heartbeat) => ended,
                _ = shutdown.wait_for(|stop| *stop) => Err(StreamEnd::Error(Error::ShuttingDown)),
                () = sender.closed() => return,
            };
            let Err(end) = ended;
            sender.end(end).await;
        });
        Ok(Response::new(queue))
    }
}

/// Sends the snapshot, if there is to be one of these devices, and then changes, until they cannot be sent.
async fn follow(
    sender: &ResponseSender,
    (all, snapshot): (&All, Option<Vec<String>>),
    wanted: &ShadowSelection,
    mut watch: device_shadows::ShadowWatch,
    heartbeat: Option<Duration>,
) -> Result<Infallible, StreamEnd> {
    if let Some(devices) = snapshot {
        send_snapshot(all, &devices, wanted, sender).await?;
    }
    loop {
        let items = next_items(&mut watch, heartbeat).await;
        send(sender, items).await?;
    }
}

/// Shadows that a watch selects.
struct ShadowSelection {
    devices: HashSet<String>,
    names: HashSet<String>,
    topics: ShadowTopics,
    grant: Arc<TokenGrant>,
}

impl ShadowSelection {
    fn is(&self, shadow: &ShadowDocument) -> bool {
        (self.devices.is_empty() || self.devices.contains(shadow.device.as_str()))
            && (self.names.is_empty() || self.names.contains(&*shadow.name))
            && is_visible(&self.grant.scope, &self.topics, shadow)
    }
}

/// Tells whether a shadow is in scope.
fn is_visible(scope: &Scope, topics: &ShadowTopics, shadow: &ShadowDocument) -> bool {
    let device = shadow.device.as_str();
    scope.has_device(device)
        && (scope.topics().is_none() || scope.has_topic(&topics.answer(device, &shadow.name, "get")))
}

fn item(item: v1::watch_shadow_item::Item) -> v1::WatchShadowItem {
    v1::WatchShadowItem { item: Some(item) }
}

/// Returns the number of changes that its caller is told are missing.
fn missed(items: &[v1::WatchShadowItem]) -> u64 {
    let gaps = items.iter().filter_map(|item| match &item.item {
        Some(v1::watch_shadow_item::Item::Gap(gap)) => Some(gap.count),
        _ => None,
    });
    gaps.sum()
}

/// Sends items in batches that are not too large.
async fn send(sender: &ResponseSender, items: Vec<v1::WatchShadowItem>) -> Result<(), StreamEnd> {
    let mut items = items.into_iter().peekable();
    while items.peek().is_some() {
        let mut size = 0;
        let mut batch = Vec::new();
        while size < BATCH_BYTES
            && let Some(item) = items.next()
        {
            size += prost::Message::encoded_len(&item);
            batch.push(item);
        }
        sender.slot().lost(missed(&batch));
        let messages = batch.len() as u64;
        sender.send(v1::WatchShadowResponse { items: batch }, messages).await?;
    }
    Ok(())
}

/// Sends the current shadows, and that these were all.
async fn send_snapshot(
    all: &All,
    devices: &[String],
    wanted: &ShadowSelection,
    to: &ResponseSender,
) -> Result<(), StreamEnd> {
    use v1::watch_shadow_item::Item;

    for device in devices {
        let mut after: Option<Arc<str>> = None;
        loop {
            let page = all.list(device, after.as_deref(), SNAPSHOT_PAGE).await;
            let (found, last) = page.map_err(Error::from)?;
            let current = found.iter().filter(|shadow| wanted.is(shadow));
            send(to, current.map(|shadow| item(Item::Shadow(to_proto(shadow)))).collect()).await?;
            if last.is_none() {
                break;
            }
            after = last;
        }
    }
    send(to, vec![item(Item::SnapshotEnd(v1::SnapshotEnd {}))]).await
}

/// Changes, or a heartbeat if none comes for so long.
async fn next_items(
    watch: &mut device_shadows::ShadowWatch,
    heartbeat: Option<Duration>,
) -> Vec<v1::WatchShadowItem> {
    use v1::watch_shadow_item::Item;

    let changes = pin!(watch.next());
    let changes = match heartbeat {
        None => changes.await,
        Some(interval) => match tokio::time::timeout_at(Instant::now() + interval, changes).await {
            Ok(changes) => changes,
            Err(_) => {
                return vec![item(Item::Heartbeat(v1::Heartbeat {
                    time: Some(answers::time(clock::to_wall(now()))),
                }))];
            }
        },
    };
    let to_item = |change| match change {
        ShadowChange::Missed(count) => {
            item(Item::Gap(v1::Gap { count, reason: v1::GapReason::Memory.into() }))
        }
        ShadowChange::Shadow(shadow) if shadow.state.is_some() => item(Item::Shadow(to_proto(&shadow))),
        ShadowChange::Shadow(ShadowDocument { device, name, version, changed, .. }) => {
            item(Item::Deleted(v1::DeletedShadow {
                device_id: device.as_str().to_owned(),
                name: name.to_string(),
                version,
                delete_time: Some(answers::time(changed)),
            }))
        }
    };
    changes.into_iter().map(to_item).collect()
}
