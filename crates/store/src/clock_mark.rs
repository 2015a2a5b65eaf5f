//! Continues a data directory's time after a restart (file `clock`): see [`gateway_core::clock`].

use std::{
    fs,
    sync::{Arc, Once},
    time::Duration,
};

use gateway_core::clock::{self, Absence, ClockReading};
use tracing::warn;

use super::{DataDir, StoreError};

const NAME: &str = "clock";

/// The mark of a data directory.
#[derive(Debug)]
pub struct ClockMark {
    directory: Arc<DataDir>,
}

impl ClockMark {
    /// Continues from where the previous process left off, and logs it if the wall clock is not trusted. A process does
    /// this once, with its first data directory. `at_most` is as for [`clock::resume`]. Blocks on the disk.
    pub fn resume(directory: &Arc<DataDir>, at_most: Option<Duration>) -> Self {
        static ONCE: Once = Once::new();
        let path = directory.path().join(NAME);
        let mark = fs::read_to_string(&path).ok();
        if let Some(text) = mark {
            match parse(&text) {
                Some(mark) => ONCE.call_once(|| report(clock::resume(mark, at_most))),
                None => {
                    warn!(path = %path.display(), "clock mark is damaged, time goes on from the wall clock")
                }
            }
        }
        Self { directory: Arc::clone(directory) }
    }

    /// Writes both clocks as they are now. Blocks on the disk.
    pub fn keep(&self) -> Result<(), StoreError> {
        let ClockReading { time, wall } = clock::mark();
        self.directory.replace_file(NAME, &format!("{time} {wall}\n"))
    }
}

fn parse(text: &str) -> Option<ClockReading> {
    let (time, wall) = text.trim().split_once(' ')?;
    Some(ClockReading { time: time.parse().ok()?, wall: wall.parse().ok()? })
}

fn report(absence: Absence) {
    match absence {
        Absence::Passed(_) => {}
        Absence::Incredible(away) => warn!(
            days = away.as_secs() / 86_400,
            "wall clock is far ahead of the data directory, sessions and messages age as if no time had passed"
        ),
        Absence::Ahead(by) => warn!(
            seconds = by.as_secs(),
            "wall clock is ahead of that of the gateway that served before, sessions and messages age by the time that has passed"
        ),
        Absence::Behind(by) => warn!(
            seconds = by.as_secs(),
            "wall clock is behind the data directory, sessions and messages age as if no time had passed"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_and_anything_else_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let mark = ClockMark::resume(&DataDir::open(dir.path()).unwrap(), None);
        mark.keep().unwrap();
        let text = fs::read_to_string(dir.path().join(NAME)).unwrap();
        let found = parse(&text).unwrap();
        assert!(clock::mark().time - found.time < 60_000);
        for damaged in ["", "1", "1 x", "-1 2", "1  2"] {
            assert_eq!(parse(damaged), None, "{damaged:?}");
        }
    }
}
