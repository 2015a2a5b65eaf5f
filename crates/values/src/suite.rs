//! Suite that every store of latest values must pass with the write-behind in front of it.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "tests of other crates")]

use std::sync::Arc;

use gateway_core::{ClientId, Effort, Message, Origin, OriginKind, clock};
use store::{LatestQuery, LatestStore, Recorder as _, suite::latest::list_all};

use crate::{LatestCache, LatestOptions};

/// A device with as many topics as it may have, `bound`, publishes others before these: on an empty store.
pub async fn known_topics_stay_current(store: Arc<dyn LatestStore>, bound: usize) {
    let options = LatestOptions { topics_per_device: bound, ..LatestOptions::default() };
    let latest = LatestCache::new(Arc::clone(&store), options);
    let device = ClientId::new("over");
    let publish = |name: &str, topics: usize, payload: &[u8]| {
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 1 };
        for number in 0..topics {
            latest.record(
                &Message::new(&format!("{name}/{number}"), payload, clock::now(), origin),
                &mut Effort::default(),
            );
        }
    };
    publish("known", bound, b"old");
    // Until memory has forgotten them.
    for _ in 0..12 {
        latest.flush().await.unwrap();
    }
    let query = LatestQuery { devices: vec!["over".into()], limit: 1000, ..LatestQuery::default() };
    for (others_are_written, payload) in [(true, b"newer"), (false, b"newst")] {
        publish("other", bound / 2, b"x");
        if others_are_written {
            latest.flush().await.unwrap();
        }
        publish("known", bound, payload);
        latest.flush().await.unwrap();
        let kept = list_all(&*store, query.clone()).await;
        assert_eq!(kept.len(), bound);
        assert!(kept.iter().all(|value| value.topic.starts_with("known/") && value.payload == payload[..]));
        for _ in 0..12 {
            latest.flush().await.unwrap();
        }
    }
}
