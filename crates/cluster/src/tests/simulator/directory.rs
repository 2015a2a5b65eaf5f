//! A node's directory: keys and values of each stream, as of a position.

use std::{collections::BTreeMap, sync::Arc};

use ledger::Position;
use parking_lot::Mutex;

use crate::HomeCopy;

/// Keys and values of a stream.
pub(super) type Contents = BTreeMap<String, String>;

/// A change of one key: put or deleted.
pub(super) type Change = (String, Option<String>);

/// Applies changes in order.
pub(super) fn apply(contents: &mut Contents, changes: &[Change]) {
    for (key, value) in changes {
        match value {
            Some(value) => contents.insert(key.clone(), value.clone()),
            None => contents.remove(key),
        };
    }
}

/// Bytes of changes, with so many that mean nothing.
pub(super) fn write(changes: &[Change], padding: usize) -> Vec<u8> {
    let line = |(key, value): &Change| format!("{key} {}\n", value.as_deref().unwrap_or_default());
    let mut text: String = changes.iter().map(line).collect();
    text.extend(std::iter::repeat_n('#', padding));
    text.into_bytes()
}

/// Changes that were written.
pub(super) fn read(bytes: &[u8]) -> Vec<Change> {
    let lines = std::str::from_utf8(bytes).unwrap().lines().filter(|line| !line.starts_with('#'));
    let change = |line: &str| {
        let (key, value) = line.split_once(' ').unwrap();
        (key.to_owned(), (!value.is_empty()).then(|| value.to_owned()))
    };
    lines.map(change).collect()
}

/// A directory; a handle of it.
#[derive(Clone, Default)]
pub(super) struct Directory(Arc<Mutex<Vec<(Option<Position>, Contents)>>>);

impl Directory {
    pub(super) fn new(streams: u8) -> Self {
        Self(Arc::new(Mutex::new(vec![(None, Contents::new()); usize::from(streams)])))
    }

    /// Bytes of it, copied to another place.
    pub(super) fn copy(&self) -> Self {
        Self(Arc::new(Mutex::new(self.0.lock().clone())))
    }

    pub(super) fn contents(&self, stream: u8) -> Contents {
        self.0.lock()[usize::from(stream)].1.clone()
    }

    /// Takes another directory's contents.
    pub(super) fn replace(&self, stream: u8, contents: &Contents) {
        self.0.lock()[usize::from(stream)].1 = contents.clone();
    }

    /// A local commit.
    pub(super) fn commit(&self, stream: u8, position: Position, changes: &[Change]) {
        let (last, contents) = &mut self.0.lock()[usize::from(stream)];
        *last = Some(position);
        apply(contents, changes);
    }
}

impl HomeCopy for Directory {
    fn streams(&self) -> u8 {
        self.0.lock().len() as u8
    }

    fn position(&self, stream: u8) -> Option<Position> {
        self.0.lock()[usize::from(stream)].0
    }

    fn apply(&mut self, stream: u8, position: Position, changes: &[u8]) -> Result<(), String> {
        self.commit(stream, position, &read(changes));
        Ok(())
    }

    fn clear(&mut self, stream: u8) -> Result<(), String> {
        self.0.lock()[usize::from(stream)] = (None, Contents::new());
        Ok(())
    }
}
