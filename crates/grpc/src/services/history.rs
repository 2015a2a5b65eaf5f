//! `gateway.v1.State/ListHistory`: what a device has sent on a topic, page by page.

use gateway_core::{
    Timestamp,
    clock::{self, now},
    limits::Limits,
};
use store::{HistoryPlace, HistoryQuery};
use values::History;

use crate::proto::gateway::v1;
use grpc_messages::{
    answers, convert,
    page::{PAGE_BYTES, RequestPages, fit},
    status::Error,
};

/// One page. Reads only.
pub(crate) async fn page(
    limits: &Limits,
    history: Option<&History>,
    mut request: v1::ListHistoryRequest,
) -> Result<v1::ListHistoryResponse, Error> {
    let (limit, token) = (convert::page_size(request.page_size)?, std::mem::take(&mut request.page_token));
    request.page_size = 0;
    let pages = RequestPages::of("ListHistory", &request);
    let page_token = pages.start(&token)?.unwrap_or_default();
    convert::check_client_id("device_id", &request.device_id, limits)?;
    convert::check_topic_name("topic", &request.topic, limits)?;
    let from = convert::time("start_time", request.start_time)?.unwrap_or_default();
    let to = convert::time("end_time", request.end_time)?.unwrap_or(Timestamp(u64::MAX));
    if to <= from {
        return Err(Error::invalid("end_time", "is not after start_time"));
    }
    let oldest_first = request.oldest_first;
    let query = HistoryQuery {
        device: request.device_id,
        topic: request.topic,
        from,
        to,
        oldest_first,
        limit,
        page_token,
    };
    let history = history.ok_or(Error::HistoryOff)?;
    let page = history.page(query, clock::to_wall(now())).await?;
    let places: Vec<_> = page.values.iter().map(|value| HistoryPlace::beyond(value, oldest_first)).collect();
    let (values, cut) = fit(page.values.into_iter().map(answers::latest_value), PAGE_BYTES);
    let last = values.len().checked_sub(1).and_then(|last| places.get(last)).filter(|_| cut);
    let next = last.map_or(page.next, HistoryPlace::to_string);
    let next_page_token = pages.token(Some(next.as_str()).filter(|next| !next.is_empty()));
    Ok(v1::ListHistoryResponse { values, next_page_token })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::Ordering::SeqCst};

    use broker::{Broker, BrokerConfig, Turn};
    use gateway_core::{ClientId, Message, Origin, OriginKind};
    use store::{MemoryHistory, Recorder};
    use values::{HistoryOptions, HistoryRule};

    use super::*;

    fn setup() -> (Arc<MemoryHistory>, Arc<History>, Broker) {
        let store = Arc::new(MemoryHistory::default());
        let rule = HistoryRule { filter: "kept/#".to_owned(), ttl: std::time::Duration::from_secs(3_600) };
        let options = HistoryOptions { rules: vec![rule], ..HistoryOptions::default() };
        let history = History::new(Arc::clone(&store) as _, options);
        let broker = Broker::new(BrokerConfig {
            namespace: "devices/{client_id}/#".to_owned(),
            history: Some(Arc::clone(&history) as Arc<dyn Recorder>),
            ..BrokerConfig::default()
        });
        (store, history, broker)
    }

    async fn ask(
        history: &History,
        request: v1::ListHistoryRequest,
    ) -> Result<v1::ListHistoryResponse, Error> {
        page(&Limits::default(), Some(history), request).await
    }

    fn publish(broker: &Broker, payloads: &[Vec<u8>]) {
        let device = ClientId::new("d");
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 1 };
        let mut turn = Turn::default();
        for payload in payloads {
            broker.publish(&Message::new("kept/a", payload, now(), origin), &mut turn);
            broker.publish(&Message::new("other", payload, now(), origin), &mut turn);
        }
    }

    fn request() -> v1::ListHistoryRequest {
        v1::ListHistoryRequest {
            device_id: "d".to_owned(),
            topic: "kept/a".to_owned(),
            ..v1::ListHistoryRequest::default()
        }
    }

    /// First bytes of all payloads, page by page.
    async fn pages(history: &History, mut request: v1::ListHistoryRequest) -> Vec<Vec<u8>> {
        let mut pages = Vec::new();
        loop {
            let response = ask(history, request.clone()).await.unwrap();
            let size: usize = response.values.iter().map(|value| value.payload.len()).sum();
            assert!(size <= PAGE_BYTES || response.values.len() == 1);
            pages.push(response.values.iter().map(|value| value.payload[0]).collect());
            if response.next_page_token.is_empty() {
                return pages;
            }
            request.page_token = response.next_page_token;
        }
    }

    #[tokio::test]
    async fn what_a_device_published_comes_page_by_page_whatever_its_size() {
        let (_, history, broker) = setup();
        publish(&broker, &[vec![1], vec![2], vec![3; 2 << 20], vec![4; 2 << 20], vec![5; 3 << 20], vec![6]]);
        history.flush().await.unwrap();
        assert_eq!(pages(&history, request()).await.concat(), [6, 5, 4, 3, 2, 1]);
        let oldest = v1::ListHistoryRequest { oldest_first: true, page_size: 2, ..request() };
        assert_eq!(pages(&history, oldest).await[..3], [vec![1, 2], vec![3], vec![4]]);
        let other = v1::ListHistoryRequest { topic: "other".to_owned(), ..request() };
        assert_eq!(pages(&history, other).await.concat(), [0_u8; 0], "a topic without a rule has no history");
    }

    #[tokio::test]
    async fn bad_requests_name_the_field_and_no_history_is_not_an_empty_one() {
        let (store, history, _) = setup();
        let field = |error: Error| match error {
            Error::Invalid { field, .. } => field,
            other => panic!("{other}"),
        };
        let five = Some(answers::time(Timestamp(5)));
        for (bad, name) in [
            (v1::ListHistoryRequest { device_id: String::new(), ..request() }, "device_id"),
            (v1::ListHistoryRequest { topic: "a/#".to_owned(), ..request() }, "topic"),
            (v1::ListHistoryRequest { start_time: five, end_time: five, ..request() }, "end_time"),
            (v1::ListHistoryRequest { page_size: 1_001, ..request() }, "page_size"),
        ] {
            assert_eq!(field(ask(&history, bad).await.unwrap_err()), name);
        }
        let foreign = v1::ListHistoryRequest { page_token: "x".to_owned(), ..request() };
        assert_eq!(ask(&history, foreign).await, Err(Error::PageTokenInvalid));
        store.away.store(true, SeqCst);
        assert_eq!(ask(&history, request()).await, Err(Error::StoreUnavailable));
        assert_eq!(page(&Limits::default(), None, request()).await, Err(Error::HistoryOff));
    }
}
