//! Pages of stored commands.

use std::{ops::Bound, sync::Arc};

use parking_lot::MutexGuard;

use super::{CommandRecord, CommandRegistry, table::Writing};

/// Commands that one page looks at, whether its caller may see them or not.
const LOOKED_AT: usize = 10_000;
/// Commands looked at under one hold of the table's lock: the threads of devices take the lock too, for replies.
const STEP: usize = 64;

impl CommandRegistry {
    /// Commands of a device, or all, newest first, below the number `before`; and where the next page begins. May be fewer than
    /// `most` although there are more.
    pub fn list(
        &self,
        device: Option<&str>,
        active_only: bool,
        before: Option<u64>,
        most: usize,
        wanted: impl Fn(&CommandRecord) -> bool,
    ) -> (Vec<(u64, Arc<CommandRecord>)>, Option<u64>) {
        let mut end = before.map_or(Bound::Unbounded, Bound::Excluded);
        let (mut found, mut looked) = (Vec::new(), 0);
        loop {
            let table = self.table.lock();
            let numbers = match device.map(|device| table.devices.get(device)) {
                None if active_only => &table.active,
                None => &table.numbers,
                Some(None) => return (found, None),
                Some(Some(device)) if active_only => &device.active,
                Some(Some(device)) => &device.all,
            };
            let mut last = None;
            for &number in numbers.range((Bound::Unbounded, end)).rev().take(STEP) {
                if found.len() == most || looked == LOOKED_AT {
                    return (found, Some(number + 1));
                }
                (last, looked) = (Some(number), looked + 1);
                let entry = &table.commands[&number];
                let is_there = !matches!(entry.writing, Writing::Start(_));
                if is_there && wanted(&entry.record) {
                    found.push((number, Arc::new(entry.record.clone())));
                }
            }
            let Some(last) = last else { return (found, None) };
            end = Bound::Excluded(last);
            // Others get their turn.
            MutexGuard::unlock_fair(table);
        }
    }
}
