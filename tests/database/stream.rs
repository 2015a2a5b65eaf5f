//! A backend that reads a gRPC stream all the time.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use mqtt_server::proto::gateway::v1::{
    SubscribeRequest, subscribe_item::Item, subscriber_client::SubscriberClient,
};
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use crate::tables::{RUNTIME, wait_for};

/// Ends with the test's process, or the gateway.
pub(crate) struct Stream {
    received: Arc<AtomicU64>,
    reader: JoinHandle<()>,
}

impl Stream {
    /// Of all messages from now on.
    pub(crate) fn open(channel: Channel) -> Self {
        let mut client = SubscriberClient::new(channel);
        let request = SubscribeRequest { devices_only: true, ..Default::default() };
        let answer = RUNTIME.block_on(client.subscribe(request)).expect("subscribe");
        let received = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&received);
        let reader = RUNTIME.spawn(async move {
            let mut batches = answer.into_inner();
            while let Ok(Some(batch)) = batches.message().await {
                let messages = batch.items.iter().filter(|item| matches!(item.item, Some(Item::Message(_))));
                counter.fetch_add(messages.count() as u64, Relaxed);
            }
        });
        Self { received, reader }
    }

    /// Waits until more messages of devices have come.
    pub(crate) fn goes_on(&self) {
        let before = self.received.load(Relaxed);
        wait_for("messages of a stream", || {
            assert!(!self.reader.is_finished(), "the stream has ended");
            let now = self.received.load(Relaxed);
            if now > before + 100 { Ok(()) } else { Err(format!("{before}, now {now}")) }
        });
    }
}
