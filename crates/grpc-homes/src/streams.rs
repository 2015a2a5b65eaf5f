//! Streams of several homes as one. A home is read when the caller takes more, so a slow caller is slow at every home, where the
//! buffers and their bounds are. A stream that breaks off at one home ends as a whole, with the error of that home.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use grpc_messages::{convert::MAX_BATCH, status::Error};
use prost::Message as _;
use tokio_stream::Stream;
use tonic::{Status, Streaming};

use super::{
    FIRST,
    channel::{CallHomes, PassedOn, together},
    merged::Responses,
    route,
};
use grpc::{
    RawMessage,
    proto::{gateway::v1, rpcserver},
};

/// Field of the items in the responses of all these streams.
const ITEMS: u32 = 1;

/// The responses of several homes, each as it comes. `map` makes a response of that of a home, or none.
struct MergedStream<F> {
    /// Responses that come first.
    first: VecDeque<RawMessage>,
    homes: Vec<(u16, Streaming<RawMessage>)>,
    /// Place of the home that is read first: none is always behind the others.
    turn: usize,
    map: F,
}

impl<F> MergedStream<F>
where
    F: FnMut(u16, Bytes) -> Option<RawMessage> + Unpin + Send + 'static,
{
    fn new(homes: Vec<(u16, Streaming<RawMessage>)>, map: F) -> Self {
        Self { first: VecDeque::new(), homes, turn: 0, map }
    }

    fn boxed(self) -> Responses<RawMessage> {
        Box::pin(self)
    }
}

impl<F> Stream for MergedStream<F>
where
    F: FnMut(u16, Bytes) -> Option<RawMessage> + Unpin,
{
    type Item = Result<RawMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Some(first) = this.first.pop_front() {
            return Poll::Ready(Some(Ok(first)));
        }
        let mut waiting = 0;
        while waiting < this.homes.len() {
            this.turn %= this.homes.len();
            let (home, stream) = &mut this.homes[this.turn];
            match Pin::new(stream).poll_next(cx) {
                Poll::Pending => {
                    waiting += 1;
                    this.turn += 1;
                }
                Poll::Ready(Some(Ok(response))) => {
                    if let Some(response) = (this.map)(*home, response.0) {
                        this.turn += 1;
                        return Poll::Ready(Some(Ok(response)));
                    }
                }
                Poll::Ready(Some(Err(status))) => {
                    this.homes.clear();
                    return Poll::Ready(Some(Err(status)));
                }
                Poll::Ready(None) => {
                    this.homes.remove(this.turn);
                    waiting = 0;
                }
            }
        }
        if this.homes.is_empty() { Poll::Ready(None) } else { Poll::Pending }
    }
}

/// `Subscriber/Subscribe`. Each home has what its devices publish. What backends publish is at every home, and is taken from the
/// first.
pub(super) async fn subscribe(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::SubscribeRequest,
) -> Result<Responses<RawMessage>, Status> {
    let devices = match request.device_id_prefixes.is_empty() {
        true => request.device_ids.clone(),
        false => Vec::new(),
    };
    let mut requests = for_devices(&cluster, devices, |device_ids| {
        let mut request = request.clone();
        if let Some(device_ids) = device_ids {
            request.device_ids = device_ids;
        }
        request
    });
    for (place, (home, request)) in requests.iter_mut().enumerate() {
        request.devices_only |= *home != FIRST;
        if place > 0 {
            request.heartbeat_interval = None;
        }
    }
    let homes = cluster.open_each(&call, requests).await?;
    Ok(MergedStream::new(homes, |_, response| Some(RawMessage(response))).boxed())
}

/// `PublishedPacketService/StreamPublishedPayload` of all devices.
pub(super) async fn published_payload(
    cluster: CallHomes,
    call: PassedOn,
    request: rpcserver::PublishedPacketRequest,
) -> Result<Responses<RawMessage>, Status> {
    let requests = cluster.all().map(|home| (home, request.clone()));
    let homes = cluster.open_each(&call, requests).await?;
    Ok(MergedStream::new(homes, |_, response| Some(RawMessage(response))).boxed())
}

/// `State/WatchLatest`.
pub(super) async fn watch_latest(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::WatchLatestRequest,
) -> Result<Responses<RawMessage>, Status> {
    let mut requests = for_devices(&cluster, request.device_ids.clone(), |device_ids| {
        let mut request = request.clone();
        request.device_ids = device_ids.unwrap_or_default();
        request
    });
    requests.iter_mut().skip(1).for_each(|(_, request)| request.heartbeat_interval = None);
    let homes = cluster.open_each(&call, requests).await?;
    let mut snapshot = SnapshotEnds { left: homes.len(), tag: 4, end: &[0x0a, 2, 0x22, 0] };
    Ok(MergedStream::new(homes, move |_, response| snapshot.pass(response)).boxed())
}

/// `Shadows/WatchShadow`.
pub(super) async fn watch_shadow(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::WatchShadowRequest,
) -> Result<Responses<RawMessage>, Status> {
    let mut requests = for_devices(&cluster, request.device_ids.clone(), |device_ids| {
        let mut request = request.clone();
        request.device_ids = device_ids.unwrap_or_default();
        request
    });
    requests.iter_mut().skip(1).for_each(|(_, request)| request.heartbeat_interval = None);
    let homes = cluster.open_each(&call, requests).await?;
    let mut snapshot = SnapshotEnds { left: homes.len(), tag: 5, end: &[0x0a, 2, 0x2a, 0] };
    Ok(MergedStream::new(homes, move |_, response| snapshot.pass(response)).boxed())
}

/// `Events/WatchEvents`. The resume token has that of each home, and the first response comes once all homes have sent theirs.
pub(super) async fn watch_events(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::WatchEventsRequest,
) -> Result<Responses<RawMessage>, Status> {
    let before = match request.resume_token.as_str() {
        "" => vec![String::new(); usize::from(cluster.count())],
        token => token.split('.').map(str::to_owned).collect(),
    };
    if before.len() != usize::from(cluster.count()) {
        return Err(Error::invalid("resume_token", "is not a token of this RPC").into());
    }
    let requests = cluster.all().zip(before).map(|(home, resume_token)| {
        let heartbeat_interval = request.heartbeat_interval.filter(|_| home == FIRST);
        (home, v1::WatchEventsRequest { resume_token, heartbeat_interval, ..request.clone() })
    });
    let mut homes = cluster.open_each(&call, requests).await?;
    let started = together(homes.iter_mut().map(async |(_, stream)| stream.message().await)).await;
    let mut tokens = Vec::new();
    for started in started {
        let started = started?.ok_or(Error::Internal)?;
        tokens.push(resume_token(&started.0).to_owned());
    }
    let first = v1::WatchEventsResponse { items: Vec::new(), resume_token: tokens.join(".") };
    let mut merged = MergedStream::new(homes, move |home, response| {
        if let Some(token) = tokens.get_mut(usize::from(home)) {
            resume_token(&response).clone_into(token);
        }
        let mut bytes = without(&response, RESUME_TOKEN);
        let rest = v1::WatchEventsResponse { items: Vec::new(), resume_token: tokens.join(".") };
        rest.encode(&mut bytes).ok()?;
        Some(RawMessage(bytes.into()))
    });
    merged.first.push_back(RawMessage(first.encode_to_vec().into()));
    Ok(merged.boxed())
}

/// `Publisher/PublishToDevices`: each device at its home.
pub(super) async fn publish_to_devices(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::PublishToDevicesRequest,
) -> Result<Responses<RawMessage>, Status> {
    if request.device_ids.len() > MAX_BATCH {
        return Err(Error::invalid("device_ids", format!("has more than {MAX_BATCH} items")).into());
    }
    // Each home checks the rest, also that there are either devices or a prefix.
    let devices = match request.device_id_prefix.is_empty() {
        true => request.device_ids.clone(),
        false => Vec::new(),
    };
    let requests = for_devices(&cluster, devices, |device_ids| {
        let device_ids = device_ids.unwrap_or_else(|| request.device_ids.clone());
        v1::PublishToDevicesRequest { device_ids, ..request.clone() }
    });
    let homes = cluster.open_each(&call, requests).await?;
    let mut issued = vec![0; usize::from(cluster.count())];
    let merged = MergedStream::new(homes, move |home, response| {
        let found = route::fields(&response).filter(|field| field.tag == ISSUED).last();
        issued[usize::from(home)] = found.map_or(0, |field| field.number);
        let mut bytes = without(&response, ISSUED);
        let rest = v1::PublishToDevicesResponse { results: Vec::new(), issued: issued.iter().sum() };
        rest.encode(&mut bytes).ok()?;
        Some(RawMessage(bytes.into()))
    });
    Ok(merged.boxed())
}

/// The requests for the homes of these devices, or for every home if there are none; `with` makes each, of the devices that it has.
fn for_devices<Q>(
    cluster: &CallHomes,
    devices: Vec<String>,
    with: impl Fn(Option<Vec<String>>) -> Q,
) -> Vec<(u16, Q)> {
    match devices.is_empty() {
        true => cluster.all().map(|home| (home, with(None))).collect(),
        false => {
            cluster.split(devices).into_iter().map(|(home, devices)| (home, with(Some(devices)))).collect()
        }
    }
}

/// Ends of the snapshots of several homes: only the last is passed on.
struct SnapshotEnds {
    /// Homes whose snapshot has not ended.
    left: usize,
    /// Field of the end in an item.
    tag: u32,
    /// A response that has only the end.
    end: &'static [u8],
}

impl SnapshotEnds {
    fn pass(&mut self, response: Bytes) -> Option<RawMessage> {
        let is_end = |item: &route::RawField<'_>| {
            item.tag == ITEMS && route::fields(item.content).any(|field| field.tag == self.tag)
        };
        let ends = match self.left {
            0 => 0,
            _ => route::fields(&response).filter(is_end).count(),
        };
        if ends == 0 {
            return Some(RawMessage(response));
        }
        let kept = route::fields(&response).filter(|item| !is_end(item));
        let mut bytes: Vec<u8> = kept.flat_map(|item| item.whole).copied().collect();
        self.left = self.left.saturating_sub(ends);
        if self.left == 0 {
            bytes.extend(self.end);
        }
        (!bytes.is_empty()).then(|| RawMessage(bytes.into()))
    }
}

/// Field of the token in a response of WatchEvents.
const RESUME_TOKEN: u32 = 2;

/// Field of the count in a response of PublishToDevices.
const ISSUED: u32 = 2;

fn resume_token(response: &[u8]) -> &str {
    route::text(response, &[RESUME_TOKEN]).unwrap_or_default()
}

/// A message without one of its fields.
fn without(message: &[u8], tag: u32) -> Vec<u8> {
    route::fields(message).filter(|field| field.tag != tag).flat_map(|field| field.whole).copied().collect()
}
