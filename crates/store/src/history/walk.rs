//! Division of history into buckets, and the order in which a page visits them. Shared by all backends.

use std::fmt;

use gateway_core::Timestamp;

use super::super::{LatestValue, StoreError};

/// Time of one bucket, in milliseconds: six hours. The messages of a (device, topic) in one bucket are one partition.
///
/// A message of 256 bytes is a row of about 400. One a second makes 21,600 rows and 9 MB in six hours, ten a second
/// 216,000 rows and 86 MB: within the 100 MB up to which partitions are moderate. A day would be 345 MB then. And a
/// year of a topic that is almost silent is 1,461 buckets, which six calls look through.
pub const BUCKET_MS: u64 = 6 * 60 * 60 * 1000;

/// Buckets looked at for one page.
pub(crate) const PAGE_BUCKETS: usize = 256;

/// Most messages in a page.
const MAX_PAGE: usize = 10_000;

/// A page ends when its payloads reach this many bytes.
const PAGE_BYTES: usize = 8 << 20;

/// Selects messages of one (device, topic).
#[derive(Debug, Clone, Default)]
pub struct HistoryQuery {
    /// Client id.
    pub device: String,
    /// Topic name.
    pub topic: String,
    /// Received at this time or later.
    pub from: Timestamp,
    /// Received before this time.
    pub to: Timestamp,
    /// Begin with the oldest; otherwise with the newest.
    pub oldest_first: bool,
    /// Most messages in the page (1 to 10,000).
    pub limit: usize,
    /// `next` of the page before.
    pub page_token: String,
}

/// One page of history.
///
/// A page may hold fewer messages than the limit, even none, and still have a `next`: it also ends after a number of
/// bytes, or of buckets without a message.
#[derive(Debug, Clone, Default)]
pub struct HistoryPage {
    /// The messages, in the order that was asked for.
    pub values: Vec<LatestValue>,
    /// Token of the next page, a [`HistoryPlace`]; empty at the end.
    pub next: String,
}

/// A place in the time line of a (device, topic): just before what was received then with that version. As text both
/// numbers with a `-` between; it says all that the next page needs, whichever process answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HistoryPlace {
    /// Milliseconds since 1970.
    pub received: u64,
    /// Version of the message.
    pub version: u64,
}

impl HistoryPlace {
    /// Just before everything received at `received` or later.
    pub fn at(received: u64) -> Self {
        Self { received, version: 0 }
    }

    /// Returns the place at which a page goes on after `value`: just after it with the oldest first, else just before it.
    pub fn beyond(value: &LatestValue, oldest_first: bool) -> Self {
        Self { received: value.received.0, version: value.version + u64::from(oldest_first) }
    }

    /// Reads a token; `None` for the empty one.
    fn parse(token: &str) -> Result<Option<Self>, StoreError> {
        if token.is_empty() {
            return Ok(None);
        }
        let (received, version) = token.split_once('-').ok_or(StoreError::BadPageToken)?;
        // Databases have signed numbers.
        let number = |text: &str| match text.parse::<i64>() {
            Ok(number) if number >= 0 && !text.starts_with('+') => Ok(number.cast_unsigned()),
            _ => Err(StoreError::BadPageToken),
        };
        Ok(Some(Self { received: number(received)?, version: number(version)? }))
    }
}

impl fmt::Display for HistoryPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.received, self.version)
    }
}

/// Start of the bucket of what was received at `received`.
pub fn bucket(received: u64) -> u64 {
    received - received % BUCKET_MS
}

/// A part of one bucket: from `low` up to but without `high`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketPart {
    /// Start of the bucket.
    pub bucket: u64,
    /// The first place.
    pub low: HistoryPlace,
    /// The place after the last.
    pub high: HistoryPlace,
}

/// Collects a page of `query`, bucket by bucket: ask for [`Walk::next_part`], push its messages in order until the page
/// is full, and so on until there is no part; then [`Walk::page`].
#[derive(Debug)]
pub struct Walk {
    /// Range of places not yet visited.
    low: HistoryPlace,
    high: HistoryPlace,
    oldest_first: bool,
    limit: usize,
    buckets: usize,
    bytes: usize,
    values: Vec<LatestValue>,
}

impl Walk {
    /// At the beginning of the page.
    ///
    /// # Errors
    /// [`StoreError::BadPageToken`].
    pub fn new(query: &HistoryQuery) -> Result<Self, StoreError> {
        let last = i64::MAX.cast_unsigned() - BUCKET_MS;
        let place = |time: Timestamp| HistoryPlace::at(time.0.min(last));
        let (mut low, mut high) = (place(query.from), place(query.to));
        // A token only narrows what is asked for.
        match HistoryPlace::parse(&query.page_token)? {
            Some(token) if query.oldest_first => low = low.max(token),
            Some(token) => high = high.min(token),
            None => {}
        }
        Ok(Self {
            low,
            high,
            oldest_first: query.oldest_first,
            limit: query.limit.clamp(1, MAX_PAGE),
            buckets: 0,
            bytes: 0,
            values: Vec::new(),
        })
    }

    /// The next part to read; `None` at the end, when the page is full, and when enough was looked at.
    pub fn next_part(&mut self) -> Option<BucketPart> {
        if self.low >= self.high || self.is_full() || self.buckets >= PAGE_BUCKETS {
            return None;
        }
        self.buckets += 1;
        let (low, high) = (self.low, self.high);
        if self.oldest_first {
            let bucket = bucket(low.received);
            let high = high.min(HistoryPlace::at(bucket + BUCKET_MS));
            self.low = high;
            return Some(BucketPart { bucket, low, high });
        }
        // Nothing is received just before the start of a bucket in that bucket.
        let bucket = bucket(high.received - u64::from(high.version == 0));
        let low = low.max(HistoryPlace::at(bucket));
        self.high = low;
        Some(BucketPart { bucket, low, high })
    }

    /// Returns whether nothing more may be pushed.
    pub fn is_full(&self) -> bool {
        self.values.len() >= self.limit || self.bytes >= PAGE_BYTES
    }

    /// Returns the number of messages for which there is room.
    pub fn room(&self) -> usize {
        self.limit - self.values.len()
    }

    /// Adds the next message of a part.
    pub fn push(&mut self, value: LatestValue) {
        self.bytes += value.payload.len();
        self.values.push(value);
    }

    /// The page.
    pub fn page(self) -> HistoryPage {
        let next = match self.values.last() {
            Some(last) if self.is_full() => Some(HistoryPlace::beyond(last, self.oldest_first)),
            _ if self.low >= self.high => None,
            _ if self.oldest_first => Some(self.low),
            _ => Some(self.high),
        };
        HistoryPage { values: self.values, next: next.map(|place| place.to_string()).unwrap_or_default() }
    }
}
