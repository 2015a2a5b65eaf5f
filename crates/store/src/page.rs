//! Selection of a page's values, and the token that continues it. Shared by all backends.

use gateway_core::matches;

use super::{LatestPage, LatestQuery, LatestValue, StoreError};

/// Most values in a page.
pub(super) const MAX_PAGE: usize = 10_000;

/// A page ends when its payloads reach this many bytes.
pub const PAGE_BYTES: usize = 8 << 20;

/// The last (device, topic) a page covers. As text: the device's length, `:`, device and topic.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageToken {
    /// Device.
    pub device: String,
    /// Topic.
    pub topic: String,
}

impl PageToken {
    /// Names a position.
    pub fn new(device: &str, topic: &str) -> Self {
        Self { device: device.to_owned(), topic: topic.to_owned() }
    }

    /// Reads a token; `None` for the empty one.
    pub fn parse(token: &str) -> Result<Option<Self>, StoreError> {
        if token.is_empty() {
            return Ok(None);
        }
        let (length, rest) = token.split_once(':').ok_or(StoreError::BadPageToken)?;
        let length: usize = length.parse().map_err(|_| StoreError::BadPageToken)?;
        let (device, topic) = rest.split_at_checked(length).ok_or(StoreError::BadPageToken)?;
        Ok(Some(Self::new(device, topic)))
    }
}

impl std::fmt::Display for PageToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}{}", self.device.len(), self.device, self.topic)
    }
}

/// A query made ready: devices sorted, token read, limit in bounds.
#[derive(Debug, Clone)]
pub struct Selection {
    /// Sorted, without duplicates; empty is all.
    pub devices: Vec<String>,
    /// MQTT filter on topics.
    pub filter: Option<String>,
    /// Only what comes after it.
    pub after: Option<PageToken>,
    /// Most values.
    pub limit: usize,
}

impl Selection {
    /// Reads `query`.
    pub fn new(query: LatestQuery) -> Result<Self, StoreError> {
        let after = PageToken::parse(&query.page_token)?;
        let mut devices = query.devices;
        devices.sort_unstable();
        devices.dedup();
        Ok(Self { devices, filter: query.filter, after, limit: query.limit.clamp(1, MAX_PAGE) })
    }

    /// Returns whether the (device, topic) is asked for and not on an earlier page.
    pub fn selects(&self, device: &str, topic: &str) -> bool {
        let later = self.after.as_ref().is_none_or(|after| (device, topic) > (&*after.device, &*after.topic));
        later
            && (self.devices.is_empty() || self.devices.binary_search_by(|d| (**d).cmp(device)).is_ok())
            && self.filter.as_ref().is_none_or(|filter| matches(filter, topic))
    }
}

/// Collects a page in order, until it is full.
#[derive(Debug)]
pub struct PageBuilder {
    values: Vec<LatestValue>,
    bytes: usize,
    limit: usize,
}

impl PageBuilder {
    /// An empty page of at most `limit` values.
    pub fn new(limit: usize) -> Self {
        Self { values: Vec::new(), bytes: 0, limit }
    }

    /// Returns whether nothing more should be pushed.
    pub fn is_full(&self) -> bool {
        self.values.len() >= self.limit || self.bytes >= PAGE_BYTES
    }

    /// Returns the number of values for which there is room.
    pub fn room(&self) -> usize {
        self.limit - self.values.len()
    }

    /// Adds the next value.
    pub fn push(&mut self, value: LatestValue) {
        self.bytes += value.payload.len();
        self.values.push(value);
    }

    /// A page that ends after its last value: more may follow.
    pub fn cut(self) -> LatestPage {
        let next = self.values.last().map(|v| PageToken::new(v.device.as_str(), &v.topic).to_string());
        LatestPage { values: self.values, next: next.unwrap_or_default() }
    }

    /// A page that was searched up to `next`, or to the end.
    pub fn searched_to(self, next: Option<PageToken>) -> LatestPage {
        LatestPage { values: self.values, next: next.map(|token| token.to_string()).unwrap_or_default() }
    }
}
