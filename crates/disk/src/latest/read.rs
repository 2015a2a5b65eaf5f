//! Reading: point look-ups and pages.

use std::{
    collections::BTreeMap,
    ops::Bound,
    time::{Duration, Instant},
};

use heed::RoTxn;

use super::tables::LatestTables;
use crate::counters::count;
use crate::{keys, record, table::Table};
use store::{LatestPage, LatestValue, PageBuilder, PageToken, Selection};

/// A page ends after this time, so that no read transaction keeps old pages from being reused.
const PAGE_TIME: Duration = Duration::from_millis(50);

/// Number of records between two looks at the clock.
const CLOCK_EVERY: u32 = 256;

/// Most values of one group of long names in a page: they are sorted in memory.
const MAX_GROUP: usize = 1000;

/// Place of a name, or the place where it would go.
pub(super) struct Located<'t> {
    pub(super) key: Vec<u8>,
    /// The sound record of this name, if there is one.
    pub(super) record: Option<&'t [u8]>,
    /// True if a damaged record is there.
    pub(super) damaged: bool,
}

/// Finds `name`, whose records satisfy `owns`. `None` when it is empty or all its hashes are taken.
pub(super) fn locate<'t>(
    table: Table,
    txn: &'t RoTxn<'_>,
    name: &[u8],
    owns: impl Fn(&record::ValueHead<'_>) -> bool,
) -> Result<Option<Located<'t>>, heed::Error> {
    if name.is_empty() {
        return Ok(None);
    }
    for probe in 0..keys::PROBES {
        let key = keys::key(name, probe);
        let Some(record) = table.get(txn, &key)? else {
            return Ok(Some(Located { key, record: None, damaged: false }));
        };
        match record::decode_head(record) {
            Some(head) if owns(&head) => {
                return Ok(Some(Located { key, record: Some(record), damaged: false }));
            }
            Some(_) if keys::is_long(&key) => {}
            _ => return Ok(Some(Located { key, record: None, damaged: true })),
        }
    }
    Ok(None)
}

/// The value of (device, topic), or of the device that wrote `topic` last.
pub(super) fn get(
    shared: &LatestTables,
    txn: &RoTxn<'_>,
    topic: &str,
    device: Option<&str>,
) -> Result<Option<LatestValue>, heed::Error> {
    let device = match device {
        Some(device) => device,
        None => {
            let place = locate(shared.newest, txn, topic.as_bytes(), |head| head.topic == topic)?;
            match place.and_then(|place| place.record).and_then(record::decode_head) {
                Some(head) => head.device,
                None => return Ok(None),
            }
        }
    };
    let name = keys::name(device, topic);
    let place = locate(shared.latest, txn, &name, |head| head.device == device && head.topic == topic)?;
    Ok(match place {
        Some(Located { record: Some(record), .. }) => record::decode_value(record),
        Some(Located { damaged: true, key, .. }) => {
            report_damage(&key);
            None
        }
        _ => None,
    })
}

/// One page.
pub(super) fn list(
    shared: &LatestTables,
    txn: &RoTxn<'_>,
    selection: &Selection,
) -> Result<LatestPage, heed::Error> {
    let mut scan = LatestScan {
        table: shared.latest,
        txn,
        selection,
        page: PageBuilder::new(selection.limit),
        #[expect(clippy::disallowed_methods, reason = "bounds how long a read may hold its transaction")]
        started: Instant::now(),
        looked_at: 0,
    };
    let after = selection.after.as_ref();
    let mut end = ReadEnd::Exhausted;
    if selection.devices.is_empty() {
        end = scan.range(None)?;
    }
    for device in &selection.devices {
        if after.is_some_and(|after| **device < *after.device) {
            continue;
        }
        end = scan.range(Some(device))?;
        if !matches!(end, ReadEnd::Exhausted) {
            break;
        }
    }
    Ok(match end {
        ReadEnd::Exhausted => scan.page.searched_to(None),
        ReadEnd::Full => scan.page.cut(),
        ReadEnd::OutOfTime(token) => scan.page.searched_to(Some(token)),
    })
}

enum ReadEnd {
    Exhausted,
    Full,
    OutOfTime(PageToken),
}

struct LatestScan<'a> {
    table: Table,
    txn: &'a RoTxn<'a>,
    selection: &'a Selection,
    page: PageBuilder,
    started: Instant,
    looked_at: u32,
}

impl LatestScan<'_> {
    /// Goes on through the keys of `device`, or all keys.
    fn range(&mut self, device: Option<&str>) -> Result<ReadEnd, heed::Error> {
        let prefix = device.map(|device| keys::name(device, "")).unwrap_or_default();
        let prefix = keys::head(&prefix);
        let after = self.selection.after.as_ref().map(|after| keys::name(&after.device, &after.topic));
        let start = keys::head(after.as_deref().unwrap_or_default()).max(prefix).to_vec();
        // LMDB has no empty key.
        let mut from = if start.is_empty() { Bound::Unbounded } else { Bound::Included(start) };
        loop {
            let (end, group) = self.short_names(&from, prefix)?;
            let Some(group) = group else { return Ok(end) };
            if !self.group(&group, device)? || self.page.is_full() {
                return Ok(ReadEnd::Full);
            }
            // The next key that does not begin with the group's bytes is above every hash in it.
            let mut last = group;
            last.extend_from_slice(&[0xFF; 16]);
            from = Bound::Excluded(last);
        }
    }

    /// Adds short names until the page or the range ends, or a group begins, whose common bytes it returns.
    fn short_names(
        &mut self,
        from: &Bound<Vec<u8>>,
        prefix: &[u8],
    ) -> Result<(ReadEnd, Option<Vec<u8>>), heed::Error> {
        let range = (from.as_ref().map(Vec::as_slice), Bound::Unbounded);
        for entry in self.table.range(self.txn, &range)? {
            let (key, bytes) = entry?;
            if !key.starts_with(prefix) {
                break;
            }
            if self.page.is_full() {
                return Ok((ReadEnd::Full, None));
            }
            if keys::is_long(key) {
                return Ok((ReadEnd::Exhausted, Some(keys::head(key).to_vec())));
            }
            let Some((device, topic)) = keys::names(key) else {
                report_damage(key);
                continue;
            };
            if self.selection.selects(device, topic) {
                match record::decode_value(bytes) {
                    Some(value) if value.device.as_str() == device && *value.topic == *topic => {
                        self.page.push(value);
                    }
                    _ => report_damage(key),
                }
            }
            self.looked_at += 1;
            if self.looked_at.is_multiple_of(CLOCK_EVERY) && self.started.elapsed() > PAGE_TIME {
                return Ok((ReadEnd::OutOfTime(PageToken::new(device, topic)), None));
            }
        }
        Ok((ReadEnd::Exhausted, None))
    }

    /// Adds the names of a group in order; false if some did not fit.
    fn group(&mut self, head: &[u8], device: Option<&str>) -> Result<bool, heed::Error> {
        let room = self.page.room().min(MAX_GROUP);
        let mut complete = true;
        let mut found = BTreeMap::new();
        for entry in self.table.prefix_iter(self.txn, head)? {
            let (key, bytes) = entry?;
            let Some(names) = record::decode_head(bytes) else {
                report_damage(key);
                continue;
            };
            let asked = device.is_none_or(|device| device == names.device);
            if asked && self.selection.selects(names.device, names.topic) {
                found.insert((names.device, names.topic), bytes);
                if found.len() > room {
                    found.pop_last();
                    complete = false;
                }
            }
        }
        for bytes in found.into_values() {
            if self.page.is_full() {
                return Ok(false);
            }
            match record::decode_value(bytes) {
                Some(value) => self.page.push(value),
                None => report_damage(head),
            }
        }
        Ok(complete)
    }
}

/// Counts the topics stored of `device`.
pub(super) fn count_topics(table: Table, txn: &RoTxn<'_>, device: &str) -> Result<usize, heed::Error> {
    let prefix = keys::name(device, "");
    let exact = prefix.len() <= keys::CUT;
    let mut topics = 0;
    for entry in table.prefix_iter(txn, keys::head(&prefix))? {
        let (_, bytes) = entry?;
        if exact || record::decode_head(bytes).is_some_and(|head| head.device == device) {
            topics += 1;
        }
    }
    Ok(topics)
}

/// Counts and says that a record was skipped.
pub(super) fn report_damage(key: &[u8]) {
    count(|c| c.latest_damaged.add(1));
    gateway_core::error_limited!(key = %String::from_utf8_lossy(key), "latest value is damaged and was skipped");
}
