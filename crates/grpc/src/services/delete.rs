//! Deleting what is kept of a device.

use std::sync::Arc;

use broker::{RetainError, Turn};
use gateway_core::{
    Message, Origin,
    clock::{self, now},
};
use store::LatestQuery;

use crate::context::Context;
use grpc_messages::{page::PAGE_BYTES, status::Error};

/// MQTT 5 reason code "administrative action".
pub(crate) const ADMINISTRATIVE: u8 = 0x98;

/// Retained messages looked at at once.
const PAGE: usize = 256;
/// Topics whose history is deleted at once: a year of one is 1,461 partitions.
const TOPICS: usize = 16;

/// Deletes latest values, tells watchers, and returns how many there were.
pub(crate) async fn latest(context: &Context, device: &str, filter: &str) -> Result<u64, Error> {
    let Some(latest) = &context.hooks.latest else { return Ok(0) };
    let deleted = latest.delete(device, filter, now()).await?;
    context.streams.removed(device, &deleted);
    Ok(deleted.len() as u64)
}

/// Deletes latest values as [`latest`] does, and the history of their topics, which goes first, since only the latest
/// values say which topics a device has. Stopped half way, it has done some topics completely.
pub(crate) async fn latest_and_history(context: &Context, device: &str) -> Result<u64, Error> {
    let (Some(values), Some(history)) = (&context.hooks.latest, &context.hooks.history) else {
        return latest(context, device, "#").await;
    };
    let mut query = LatestQuery { devices: vec![device.to_owned()], limit: TOPICS, ..LatestQuery::default() };
    let mut deleted = 0;
    loop {
        let page = values.list(query.clone()).await?;
        let topics = page.values.iter().map(|value| (Arc::clone(&value.topic), value.received));
        history.delete(device, topics, clock::to_wall(now())).await?;
        for value in &page.values {
            deleted += latest(context, device, &value.topic).await?;
        }
        if page.next.is_empty() {
            // Values that have come meanwhile.
            return Ok(deleted + latest(context, device, "#").await?);
        }
        query.page_token = page.next;
    }
}

/// Ends the connection of a device and, with `discard`, its session. Whether it had one.
pub(crate) async fn disconnect(context: &Context, device: &str, code: u8, discard: bool) -> bool {
    let cleanup = {
        let mut turn = Turn::default();
        let cleanup = context.broker.disconnect(device, code, discard, now(), &mut turn);
        turn.flush();
        cleanup
    };
    let found = cleanup.is_some();
    if let Some(cleanup) = cleanup {
        cleanup.settle().await;
    }
    found
}

/// Deletes the retained messages that a device set, page by page, each on disk before the next, and returns how many
/// there were. Only a message itself says who set it, so all of them are looked at.
pub(crate) async fn retained(context: &Context, device: &str) -> Result<u64, Error> {
    let broker = &context.broker;
    let (mut deleted, mut after) = (0, None::<String>);
    loop {
        let at = now();
        let page = broker.list_retained("#", after.as_deref(), PAGE, PAGE_BYTES, at).await?;
        let mut changed = false;
        for message in &page.messages {
            if message.client_id.as_ref().is_some_and(|id| id.as_str() == device) {
                let clear = Message::new(&message.topic, b"", at, Origin::BACKEND);
                changed |= broker.set_retained(&clear).map_err(retain_error)?;
                deleted += 1;
            }
        }
        if changed && let Some(stores) = broker.stores() {
            stores.flush_retained().await.map_err(|_| Error::StoreRefused)?;
        }
        tokio::task::yield_now().await;
        match page.next {
            Some(next) => after = Some(next.to_string()),
            None => return Ok(deleted),
        }
    }
}

/// Why a retained message cannot be changed.
pub(crate) fn retain_error(error: RetainError) -> Error {
    match error {
        RetainError::Quota | RetainError::QuotaHolder => Error::RetainedQuota,
        RetainError::Memory => Error::MemoryBudget,
        RetainError::Unavailable => Error::RetainUnavailable,
    }
}
