//! `gateway.v1.State/History`: what a device has sent on a topic, page by page.

use super::{Context, PAGE_BYTES, answers, convert, fit, now, proto::gateway::v1, status::Error};
use crate::{
    store::{HistoryPlace, HistoryQuery},
    types::Timestamp,
};

/// One page. Reads only.
pub(super) async fn page(
    context: &Context,
    request: v1::HistoryRequest,
) -> Result<v1::HistoryResponse, Error> {
    let limits = context.broker.limits();
    convert::check_client_id("device_id", &request.device_id, limits)?;
    convert::check_topic_name("topic", &request.topic, limits)?;
    let to = if request.to_ms == 0 { u64::MAX } else { request.to_ms };
    if to <= request.from_ms {
        return Err(Error::invalid("to_ms", "is not after from_ms"));
    }
    let oldest_first = request.oldest_first;
    let query = HistoryQuery {
        device: request.device_id,
        topic: request.topic,
        from: Timestamp(request.from_ms),
        to: Timestamp(to),
        oldest_first,
        limit: convert::page_size(request.page_size)?,
        page_token: request.page_token,
    };
    let history = context.broker.history().ok_or(Error::HistoryOff)?;
    let page = history.page(query, now()).await?;
    let places: Vec<_> = page.values.iter().map(|value| HistoryPlace::beyond(value, oldest_first)).collect();
    let (values, cut) = fit(page.values.into_iter().map(answers::latest_value), PAGE_BYTES);
    let last = values.len().checked_sub(1).and_then(|last| places.get(last)).filter(|_| cut);
    let next_page_token = last.map_or(page.next, HistoryPlace::to_string);
    Ok(v1::HistoryResponse { values, next_page_token })
}
