//! Retained messages for callers that ask for one or list them, wherever the messages are.

use std::sync::Arc;

use gateway_core::{SharedMessage, Timestamp};
use store::StoreError;

use super::{FoundTopic, RetainedMessages, SCAN, Scanned};

/// Some retained messages.
#[derive(Debug, Default)]
pub struct RetainedPage {
    /// In order of topic.
    pub messages: Vec<Arc<SharedMessage>>,
    /// The topic after which there may be more; `None` at the end.
    pub next: Option<Arc<str>>,
}

impl RetainedMessages {
    /// A retained message, if set and not expired. Cancel safe.
    pub(crate) async fn message(
        &self,
        topic: &str,
        now: Timestamp,
    ) -> Result<Option<Arc<SharedMessage>>, StoreError> {
        let mut found = self.get(topic, now);
        self.read_missing(found.as_mut_slice(), now).await?;
        Ok(found.and_then(|found| found.message))
    }

    /// Topics that match `filter` and have a message, after topic `after`, at most `limit`.
    pub(crate) fn topics(
        &self,
        filter: &str,
        after: Option<&str>,
        limit: usize,
        now: Timestamp,
    ) -> Vec<Arc<str>> {
        let (found, _) = self.find_some(filter, after, limit, usize::MAX, now);
        found.into_iter().map(|found| found.topic).collect()
    }

    /// Messages that match `filter`, after topic `after`, at most `limit` and about `bytes`. Cancel safe.
    pub(crate) async fn list(
        &self,
        filter: &str,
        after: Option<&str>,
        limit: usize,
        bytes: usize,
        now: Timestamp,
    ) -> Result<RetainedPage, StoreError> {
        let (mut found, next) = self.find_some(filter, after, limit, bytes, now);
        self.read_missing(&mut found, now).await?;
        Ok(RetainedPage { messages: found.into_iter().filter_map(|found| found.message).collect(), next })
    }

    /// Reads what is on disk only.
    async fn read_missing(&self, found: &mut [FoundTopic], now: Timestamp) -> Result<(), StoreError> {
        let topics = FoundTopic::to_read(&*found);
        if !topics.is_empty() {
            let read = self.load(topics).await?;
            self.fill(found, read, now);
        }
        Ok(())
    }

    fn find_some(
        &self,
        filter: &str,
        after: Option<&str>,
        limit: usize,
        bytes: usize,
        now: Timestamp,
    ) -> (Vec<FoundTopic>, Option<Arc<str>>) {
        let (mut list, mut sum) = (Vec::new(), 0);
        let mut position: Option<Arc<str>> = after.map(Arc::from);
        while list.len() < limit && sum < bytes {
            match self.scan(filter, position.as_deref(), SCAN, now).0 {
                Scanned::End => return (list, None),
                Scanned::Paused(topic) => position = Some(topic),
                Scanned::Found(found) => {
                    position = Some(Arc::clone(&found.topic));
                    sum += found.cost;
                    list.push(found);
                }
            }
        }
        (list, position)
    }
}
