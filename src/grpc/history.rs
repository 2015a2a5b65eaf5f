//! `gateway.v1.State/History`: what a device has sent on a topic, page by page.

use super::{PAGE_BYTES, answers, convert, fit, now, proto::gateway::v1, status::Error};
use crate::{
    broker::Broker,
    store::{HistoryPlace, HistoryQuery},
    types::Timestamp,
};

/// One page. Reads only.
pub(super) async fn page(broker: &Broker, request: v1::HistoryRequest) -> Result<v1::HistoryResponse, Error> {
    let limits = broker.limits();
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
    let history = broker.history().ok_or(Error::HistoryOff)?;
    let page = history.page(query, now()).await?;
    let places: Vec<_> = page.values.iter().map(|value| HistoryPlace::beyond(value, oldest_first)).collect();
    let (values, cut) = fit(page.values.into_iter().map(answers::latest_value), PAGE_BYTES);
    let last = values.len().checked_sub(1).and_then(|last| places.get(last)).filter(|_| cut);
    let next_page_token = last.map_or(page.next, HistoryPlace::to_string);
    Ok(v1::HistoryResponse { values, next_page_token })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::Ordering::SeqCst};

    use super::*;
    use crate::{
        broker::{BrokerConfig, DurabilityRules, Turn},
        config::Limits,
        store::{History, HistoryOptions, HistoryRule, MemoryHistory},
        types::{ClientId, Message, Origin, OriginKind},
    };

    fn setup(on: bool) -> (Arc<MemoryHistory>, Broker) {
        let store = Arc::new(MemoryHistory::default());
        let rule = HistoryRule { filter: "kept/#".to_owned(), ttl: std::time::Duration::from_secs(3_600) };
        let options = HistoryOptions { rules: vec![rule], ..HistoryOptions::default() };
        let broker = Broker::new(BrokerConfig {
            limits: Arc::new(Limits::default()),
            non_broker: false,
            namespace: "devices/{client_id}/#".to_owned(),
            listener_strategies: Default::default(),
            latest: None,
            history: on.then(|| History::new(Arc::clone(&store) as _, options)),
            stores: None,
            durability: DurabilityRules::default(),
        });
        (store, broker)
    }

    async fn publish(broker: &Broker, payloads: &[Vec<u8>]) {
        let device = ClientId::new("d");
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 1 };
        let mut turn = Turn::default();
        for payload in payloads {
            broker.publish(&Message::new("kept/a", payload, now(), origin), &mut turn);
            broker.publish(&Message::new("other", payload, now(), origin), &mut turn);
        }
        broker.history().unwrap().flush().await.unwrap();
    }

    fn request() -> v1::HistoryRequest {
        v1::HistoryRequest {
            device_id: "d".to_owned(),
            topic: "kept/a".to_owned(),
            ..v1::HistoryRequest::default()
        }
    }

    /// First bytes of all payloads, page by page.
    async fn pages(broker: &Broker, mut request: v1::HistoryRequest) -> Vec<Vec<u8>> {
        let mut pages = Vec::new();
        loop {
            let response = page(broker, request.clone()).await.unwrap();
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
        let (_, broker) = setup(true);
        publish(&broker, &[vec![1], vec![2], vec![3; 2 << 20], vec![4; 2 << 20], vec![5; 3 << 20], vec![6]])
            .await;
        assert_eq!(pages(&broker, request()).await.concat(), [6, 5, 4, 3, 2, 1]);
        let oldest = v1::HistoryRequest { oldest_first: true, page_size: 2, ..request() };
        assert_eq!(pages(&broker, oldest).await[..3], [vec![1, 2], vec![3], vec![4]]);
        let other = v1::HistoryRequest { topic: "other".to_owned(), ..request() };
        assert_eq!(pages(&broker, other).await.concat(), [0_u8; 0], "a topic without a rule has no history");
    }

    #[tokio::test]
    async fn bad_requests_name_the_field_and_no_history_is_not_an_empty_one() {
        let (store, broker) = setup(true);
        let field = |error: Error| match error {
            Error::Invalid { field, .. } => field,
            other => panic!("{other}"),
        };
        for (bad, name) in [
            (v1::HistoryRequest { device_id: String::new(), ..request() }, "device_id"),
            (v1::HistoryRequest { topic: "a/#".to_owned(), ..request() }, "topic"),
            (v1::HistoryRequest { from_ms: 5, to_ms: 5, ..request() }, "to_ms"),
            (v1::HistoryRequest { page_size: 1_001, ..request() }, "page_size"),
            (v1::HistoryRequest { page_token: "x".to_owned(), ..request() }, "page_token"),
        ] {
            assert_eq!(field(page(&broker, bad).await.unwrap_err()), name);
        }
        store.away.store(true, SeqCst);
        assert_eq!(page(&broker, request()).await, Err(Error::StoreUnavailable));
        assert_eq!(page(&setup(false).1, request()).await, Err(Error::HistoryOff));
    }
}
