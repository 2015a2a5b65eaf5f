//! Shows and drops the messages that wait for a device.

use std::sync::Arc;

use broker::Session;
use gateway_core::{OriginKind, QoS, SharedMessage, clock};

use crate::{context::Context, proto::gateway::v1, server::access::Call};
use grpc_messages::{
    answers, convert,
    page::{PAGE_BYTES, RequestPages, fit},
    status::Error,
};

/// Most bytes of a payload that are shown.
const MOST_SHOWN: u32 = 64 << 10;
/// Bytes of messages that are read from disk for a page.
const READ: usize = 1 << 20;

/// Beginning of a page.
#[derive(Clone, Copy)]
enum PageStart {
    /// At this index of the queue in memory.
    Memory(usize),
    /// At this place on disk.
    Disk(u64),
}

impl PageStart {
    fn read(text: &str) -> Option<Self> {
        let (kind, number) = text.split_at_checked(1)?;
        match kind {
            "m" => number.parse().ok().map(Self::Memory),
            "d" => number.parse().ok().map(Self::Disk),
            _ => None,
        }
    }

    fn text(self) -> String {
        match self {
            Self::Memory(index) => format!("m{index}"),
            Self::Disk(place) => format!("d{place}"),
        }
    }
}

/// A message of a page, and where the page goes on after it.
struct ListedMessage {
    state: v1::QueueState,
    message: Arc<SharedMessage>,
    qos: QoS,
    next: PageStart,
}

/// A page of a queue. Cancel safe.
pub(super) async fn list(
    context: &Context,
    call: &Call,
    mut request: v1::ListQueueRequest,
) -> Result<v1::ListQueueResponse, Error> {
    if request.payload_bytes > MOST_SHOWN {
        return Err(Error::invalid("payload_bytes", format!("is more than {MOST_SHOWN}")));
    }
    let limit = convert::page_size(std::mem::take(&mut request.page_size))?;
    let token = std::mem::take(&mut request.page_token);
    let pages = RequestPages::of("ListQueue", &request);
    let start = pages.start(&token)?;
    let start = start.map_or(Some(PageStart::Memory(0)), |start| PageStart::read(&start));
    let start = start.ok_or(Error::PageTokenInvalid)?;
    let session = context.broker.session(&request.device_id).ok_or(Error::DeviceNotFound)?;
    let (listed, next) = match start {
        PageStart::Memory(index) => in_memory(&session, index, limit),
        PageStart::Disk(place) => on_disk(context, &session, place, limit).await?,
    };
    let starts: Vec<PageStart> = listed.iter().map(|listed| listed.next).collect();
    let shown = (request.payload_bytes as usize).min(PAGE_BYTES / 8);
    // Messages out of scope count too, so that the end of the page is known.
    let messages = listed.into_iter().map(|listed| match call.scope().has_topic(&listed.message.topic) {
        true => queued(&listed, shown),
        false => v1::QueuedMessage::default(),
    });
    let (mut messages, cut) = fit(messages, PAGE_BYTES);
    let next = if cut { messages.len().checked_sub(1).map(|last| starts[last]) } else { next };
    messages.retain(|message| message.state != i32::from(v1::QueueState::Unspecified));
    let next_page_token = pages.token(next.map(PageStart::text).as_deref());
    Ok(v1::ListQueueResponse { messages, next_page_token })
}

fn in_memory(
    session: &Arc<dyn Session>,
    index: usize,
    limit: usize,
) -> (Vec<ListedMessage>, Option<PageStart>) {
    let queued = session.queued(index, limit);
    let is_full = queued.messages.len() >= limit;
    let state = |sent| if sent { v1::QueueState::Inflight } else { v1::QueueState::Pending };
    let listed = queued.messages.into_iter().enumerate().map(|(at, (message, qos, sent))| ListedMessage {
        state: state(sent),
        message,
        qos,
        next: PageStart::Memory(index + at + 1),
    });
    let next =
        if is_full { Some(PageStart::Memory(index + limit)) } else { queued.tail.map(PageStart::Disk) };
    (listed.collect(), next)
}

async fn on_disk(
    context: &Context,
    session: &Arc<dyn Session>,
    place: u64,
    limit: usize,
) -> Result<(Vec<ListedMessage>, Option<PageStart>), Error> {
    // Messages that were read into memory meanwhile have been listed, or have gone.
    let Some(tail) = session.queued(0, 0).tail else { return Ok((Vec::new(), None)) };
    let core = session.core();
    let from = place.max(tail);
    let page = context.broker.read_queue(core.client_id(), core.queue(), from, READ).await?;
    let more = (!page.end || page.entries.len() > limit).then_some(page.next);
    let listed: Vec<ListedMessage> = page
        .entries
        .into_iter()
        .take(limit)
        .filter_map(|entry| {
            let next = PageStart::Disk(entry.seq + 1);
            Some(ListedMessage {
                state: v1::QueueState::Stored,
                message: entry.message?,
                qos: entry.qos,
                next,
            })
        })
        .collect();
    let next = match (more, listed.last()) {
        (Some(_), Some(last)) => Some(last.next),
        (more, _) => more.map(PageStart::Disk),
    };
    Ok((listed, next))
}

fn queued(listed: &ListedMessage, shown: usize) -> v1::QueuedMessage {
    let ListedMessage { state, message, qos, .. } = listed;
    let device = message.client_id.as_ref().filter(|_| message.kind == OriginKind::Device);
    v1::QueuedMessage {
        state: (*state).into(),
        device_id: device.map(|id| id.as_str().to_owned()).unwrap_or_default(),
        topic: message.topic.to_string(),
        qos: answers::qos_to_proto(*qos),
        payload_size: message.payload.len() as u64,
        payload: message.payload.slice(..shown.min(message.payload.len())),
        receive_time: Some(answers::time(clock::to_wall(message.received))),
        expire_time: message.expires.map(|at| answers::time(clock::to_wall(at))),
    }
}

/// Drops what waits and was not sent; returns when the disk has that. About how many messages. Cancel safe: what is dropped stays
/// so.
pub(super) async fn purge(context: &Context, device: &str) -> Result<u64, Error> {
    let session = context.broker.session(device).ok_or(Error::DeviceNotFound)?;
    let count = session.purge() as u64;
    if let Some(stores) = context.broker.stores().filter(|_| session.is_durable()) {
        stores.flush_queues().await;
    }
    Ok(count)
}
