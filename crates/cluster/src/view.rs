//! The view: one document for the whole cluster, replaced by compare-and-set.
//!
//! A home's **epoch** is the time of one owner. Epochs that have ended stand in its **chain** until nothing in them is needed: each is
//! *unsealed* until the next owner, or a clean stop, has said in one vector how far each stream of it goes. A stream's **start** is
//! where a node that has nothing begins to read.
//!
//! All functions here are pure: a document in, the next one out.

use std::collections::BTreeMap;

use bytes::Bytes;
use ledger::{Owner, StoredView};
use serde::{Deserialize, Serialize};

use crate::Node;

/// Format that this version writes, the newest that it reads.
pub const VIEW_FORMAT: u32 = 1;

/// Epochs in a chain from which on it is cleaned at once.
pub const LONG_CHAIN: usize = 16;

/// Homes that a cluster may have: each costs threads and maps at its owner, and a copy at every other node.
pub const MOST_HOMES: usize = 12;

/// Ranges of segments to be deleted that a home may have before no more are added.
const MOST_LEFTOVERS: usize = 256;

/// The document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Its format.
    pub format: u32,
    /// Name of the cluster.
    pub name: String,
    /// Streams of each home.
    pub streams: u8,
    /// Homes, by number.
    pub homes: Vec<HomeView>,
}

/// A home in the view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeView {
    /// Process that runs it.
    pub owner: Option<Incarnation>,
    /// Epoch of that process, or the last one; 0 before the first.
    pub epoch: u64,
    /// Epochs that have ended, in order.
    pub chain: Vec<EndedEpoch>,
    /// Places at which reading begins, by stream.
    pub starts: Vec<Start>,
    /// Segments that nobody needs any more and that may still be there.
    pub leftovers: Vec<Leftover>,
}

/// A process of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incarnation {
    /// Name of the node.
    pub node: String,
    /// Drawn at its start.
    pub incarnation: u64,
}

/// An epoch of the chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedEpoch {
    /// Its number.
    pub epoch: u64,
    /// The last record of each stream, `None` for a stream without records; all of it is `None` while the epoch is unsealed.
    pub sealed: Option<Vec<Option<Sealed>>>,
    /// Streams that an operator has cut off before a record that is lost, with its number.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cut: BTreeMap<u8, u64>,
}

/// The last record of a stream in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    /// Its number.
    pub n: u64,
    /// Number of its segment.
    pub segment: u32,
}

/// A record at which reading begins.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Start {
    /// Its epoch.
    pub epoch: u64,
    /// Its number.
    pub n: u64,
    /// Its segment.
    pub segment: u32,
}

/// Segments `from..to` of a stream in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leftover {
    /// The stream.
    pub stream: u8,
    /// The epoch.
    pub epoch: u64,
    /// First segment.
    pub from: u32,
    /// Segment behind the last.
    pub to: u32,
}

/// A view that cannot be used, or a change of it that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ViewError {
    /// There is none.
    #[error("the cluster is not created: run `mqtt-server cluster create`")]
    NotCreated,
    /// There is one already.
    #[error("the cluster is created already, as '{0}'")]
    Created(String),
    /// Its bytes are no view.
    #[error("read the view of the cluster: {0}")]
    Unreadable(String),
    /// A newer version has written it.
    #[error(
        "the view of the cluster has format {0}, and this version reads up to {VIEW_FORMAT}: upgrade this node"
    )]
    Newer(u32),
    /// The cluster has no such home.
    #[error("the cluster has no home {0}")]
    NoHome(u16),
    /// Another process owns the home, or none.
    #[error("home {home} is in epoch {epoch} and owned by {owner}")]
    NotOwner {
        /// The home.
        home: u16,
        /// Its epoch.
        epoch: u64,
        /// Name of the node, or `nobody`.
        owner: String,
    },
    /// A start that is not behind the present one, or in no epoch that is there.
    #[error("{0:?} is no place at which a stream may begin")]
    NoPlace(Start),
    /// An epoch that is not in the chain.
    #[error("epoch {0} is not in the chain")]
    NoEpoch(u64),
    /// Too many segments wait to be deleted.
    #[error("{MOST_LEFTOVERS} ranges of segments wait to be deleted: the ledger takes no deletes")]
    Leftovers,
}

impl View {
    /// The first view: homes without an owner.
    pub fn create(name: &str, homes: u16, streams: u8) -> Self {
        let home = HomeView {
            owner: None,
            epoch: 0,
            chain: Vec::new(),
            starts: vec![Start::default(); usize::from(streams)],
            leftovers: Vec::new(),
        };
        Self { format: VIEW_FORMAT, name: name.to_owned(), streams, homes: vec![home; usize::from(homes)] }
    }

    /// Reads a document.
    ///
    /// # Errors
    /// `Newer` and `Unreadable`.
    pub fn read(stored: &StoredView) -> Result<Self, ViewError> {
        #[derive(Deserialize)]
        struct FormatOnly {
            format: u32,
        }
        let unreadable = |error: serde_json::Error| ViewError::Unreadable(error.to_string());
        let FormatOnly { format } = serde_json::from_slice(&stored.document).map_err(unreadable)?;
        if format > VIEW_FORMAT {
            return Err(ViewError::Newer(format));
        }
        let view: Self = serde_json::from_slice(&stored.document).map_err(unreadable)?;
        let is_whole = |home: &HomeView| {
            let mut vectors = home.chain.iter().filter_map(|ended| ended.sealed.as_ref());
            home.starts.len() == view.count() && vectors.all(|vector| vector.len() == view.count())
        };
        if !(1..=MOST_HOMES).contains(&view.homes.len()) {
            return Err(ViewError::Unreadable(format!("{} homes, not 1 to {MOST_HOMES}", view.homes.len())));
        }
        match view.homes.iter().all(is_whole) {
            true => Ok(view),
            false => Err(ViewError::Unreadable("a home has other streams than the cluster".to_owned())),
        }
    }

    /// The document with its owners, as the ledger stores it.
    ///
    /// # Errors
    /// `Unreadable`, if it cannot be written as JSON.
    pub fn store(&self, cluster: u128, version: u64) -> Result<StoredView, ViewError> {
        let document = serde_json::to_vec(self).map_err(|error| ViewError::Unreadable(error.to_string()))?;
        Ok(StoredView { cluster, version, document: Bytes::from(document), owners: self.owners() })
    }

    /// Owners of all homes that have one.
    pub fn owners(&self) -> Vec<Owner> {
        let owner = |(home, of): (u16, &HomeView)| {
            let owner = of.owner.as_ref()?;
            Some(Owner {
                home,
                node: owner.node.as_str().into(),
                incarnation: owner.incarnation,
                epoch: of.epoch,
            })
        };
        (0..).zip(&self.homes).filter_map(owner).collect()
    }

    /// Streams of a home, as a length.
    pub(crate) fn count(&self) -> usize {
        usize::from(self.streams)
    }

    /// A home.
    ///
    /// # Errors
    /// `NoHome`.
    pub fn home(&self, home: u16) -> Result<&HomeView, ViewError> {
        self.homes.get(usize::from(home)).ok_or(ViewError::NoHome(home))
    }

    fn with(
        &self,
        home: u16,
        change: impl FnOnce(&mut HomeView) -> Result<(), ViewError>,
    ) -> Result<Self, ViewError> {
        let mut next = self.clone();
        change(next.homes.get_mut(usize::from(home)).ok_or(ViewError::NoHome(home))?)?;
        Ok(next)
    }

    fn with_own(
        &self,
        owner: &Owner,
        change: impl FnOnce(&mut HomeView) -> Result<(), ViewError>,
    ) -> Result<Self, ViewError> {
        self.with(owner.home, |home| {
            if !home.is_of(owner) {
                return Err(home.not_owner(owner.home));
            }
            change(home)
        })
    }

    /// Step (5): a home's next epoch begins, of `me`. The epoch of its owner ends and is unsealed.
    ///
    /// # Errors
    /// `NoHome`.
    pub fn take(&self, home: u16, me: &Node) -> Result<Self, ViewError> {
        self.with(home, |home| {
            if home.owner.is_some() {
                home.chain.push(EndedEpoch { epoch: home.epoch, sealed: None, cut: BTreeMap::new() });
            }
            home.owner = Some(Incarnation { node: me.name().to_string(), incarnation: me.incarnation() });
            home.epoch += 1;
            Ok(())
        })
    }

    /// Step (8): seals all epochs of the chain that are unsealed; `vectors` has one for each epoch of the chain, in its order. Those
    /// of epochs that are sealed already change nothing.
    ///
    /// # Errors
    /// `NotOwner`.
    pub fn seal(&self, owner: &Owner, vectors: &[Vec<Option<Sealed>>]) -> Result<Self, ViewError> {
        self.with_own(owner, |home| {
            for (ended, vector) in home.chain.iter_mut().zip(vectors) {
                ended.sealed.get_or_insert_with(|| vector.clone());
            }
            home.forget(home.epoch);
            Ok(())
        })
    }

    /// A stream's start moves to a later record, and segments before it become leftovers.
    ///
    /// # Errors
    /// `NotOwner`, `NoPlace`, and `Leftovers`, if too many wait to be deleted already.
    pub fn publish_start(&self, owner: &Owner, stream: u8, place: Start) -> Result<Self, ViewError> {
        self.with_own(owner, |home| {
            let before = *home.starts.get(usize::from(stream)).ok_or(ViewError::NoPlace(place))?;
            let is_there =
                place.epoch == home.epoch || home.chain.iter().any(|ended| ended.epoch == place.epoch);
            let goes_on = place.epoch > before.epoch || place.segment >= before.segment;
            if !is_there || place <= before || !goes_on {
                return Err(ViewError::NoPlace(place));
            }
            if home.leftovers.len() + home.chain.len() > MOST_LEFTOVERS {
                return Err(ViewError::Leftovers);
            }
            for ended in home.chain.iter().filter(|ended| (before.epoch..place.epoch).contains(&ended.epoch))
            {
                let from = if ended.epoch == before.epoch { before.segment } else { 0 };
                let to = ended.segments(stream);
                home.leftovers.push(Leftover { stream, epoch: ended.epoch, from, to });
            }
            let from = if place.epoch == before.epoch { before.segment } else { 0 };
            home.leftovers.push(Leftover { stream, epoch: place.epoch, from, to: place.segment });
            home.starts[usize::from(stream)] = place;
            home.forget(home.epoch);
            Ok(())
        })
    }

    /// Homes get further streams, up to so many in all: they begin in the present epoch of each home. A view that has as many is as it
    /// was.
    ///
    /// # Errors
    /// `NotOwner`.
    pub fn widen(&self, owner: &Owner, streams: u8) -> Result<Self, ViewError> {
        let mut next = self.with_own(owner, |_| Ok(()))?;
        if streams <= next.streams {
            return Ok(next);
        }
        next.streams = streams;
        let count = usize::from(streams);
        for home in &mut next.homes {
            home.starts.resize(count, Start { epoch: home.epoch, ..Start::default() });
            for vector in home.chain.iter_mut().filter_map(|ended| ended.sealed.as_mut()) {
                vector.resize(count, None);
            }
        }
        Ok(next)
    }

    /// Segments were deleted.
    ///
    /// # Errors
    /// `NotOwner`.
    pub fn delete(&self, owner: &Owner, gone: &[Leftover]) -> Result<Self, ViewError> {
        self.with_own(owner, |home| {
            home.leftovers.retain(|leftover| !gone.contains(leftover));
            Ok(())
        })
    }

    /// A clean stop: the home has no owner, and its epoch is sealed at once.
    ///
    /// # Errors
    /// `NotOwner`.
    pub fn release(&self, owner: &Owner, vector: Vec<Option<Sealed>>) -> Result<Self, ViewError> {
        self.with_own(owner, |home| {
            home.owner = None;
            home.chain.push(EndedEpoch { epoch: home.epoch, sealed: Some(vector), cut: BTreeMap::new() });
            home.forget(home.epoch + 1);
            Ok(())
        })
    }

    /// An operator's word that a stream's records of an epoch are lost from number `n` on: the next owner restores it as if its
    /// epoch had ended before.
    ///
    /// # Errors
    /// `NoHome` and `NoEpoch`.
    pub fn accept_loss(&self, home: u16, stream: u8, epoch: u64, n: u64) -> Result<Self, ViewError> {
        self.with(home, |home| {
            let ended = home.chain.iter_mut().find(|ended| ended.epoch == epoch);
            let cut = ended.ok_or(ViewError::NoEpoch(epoch))?.cut.entry(stream).or_insert(n);
            *cut = n.min(*cut);
            Ok(())
        })
    }
}

impl HomeView {
    /// Tells whether a process runs this home in this epoch.
    pub fn is_of(&self, owner: &Owner) -> bool {
        let is_own = |own: &Incarnation| *own.node == *owner.node && own.incarnation == owner.incarnation;
        self.epoch == owner.epoch && self.owner.as_ref().is_some_and(is_own)
    }

    pub(crate) fn not_owner(&self, home: u16) -> ViewError {
        let owner = self.owner.as_ref().map_or("nobody", |owner| owner.node.as_str());
        ViewError::NotOwner { home, epoch: self.epoch, owner: owner.to_owned() }
    }

    /// Moves starts past epochs that have nothing of their stream, and drops epochs that nobody reads any more. `next` is the first
    /// epoch that is not in the chain.
    fn forget(&mut self, next: u64) {
        for (stream, start) in (0..).zip(&mut self.starts) {
            let has_records = |ended: &&EndedEpoch| match &ended.sealed {
                None => true,
                Some(_) => {
                    ended.last(stream).is_some_and(|last| ended.epoch > start.epoch || last.n >= start.n)
                }
            };
            let mut needed = self.chain.iter().filter(|ended| ended.epoch >= start.epoch).filter(has_records);
            let first = needed.next().map_or(next, |ended| ended.epoch);
            if first > start.epoch {
                *start = Start { epoch: first, ..Start::default() };
            }
        }
        let first = self.starts.iter().map(|start| start.epoch).min().unwrap_or(next);
        let streams = (0..).take(self.starts.len());
        let leftovers = &mut self.leftovers;
        self.chain.retain(|ended| {
            let mut without = streams.clone().filter(|stream| ended.last(*stream).is_none());
            let is_empty = ended.sealed.is_some() && without.clone().count() == streams.clone().count();
            let is_needed = ended.epoch >= first && !is_empty;
            if !is_needed {
                // Rows that were never sealed.
                leftovers.extend(without.by_ref().map(|stream| Leftover {
                    stream,
                    epoch: ended.epoch,
                    from: 0,
                    to: ended.segments(stream),
                }));
            }
            is_needed
        });
        leftovers.retain(|leftover| leftover.from < leftover.to);
        leftovers.truncate(MOST_LEFTOVERS);
    }
}

impl EndedEpoch {
    /// The last record of a stream, as it was sealed and has not been cut off since.
    pub(crate) fn last(&self, stream: u8) -> Option<Sealed> {
        let sealed = self.sealed.as_ref()?.get(usize::from(stream)).copied().flatten()?;
        match self.cut.get(&stream) {
            Some(cut) => Some(Sealed { n: sealed.n.min(cut.checked_sub(1)?), ..sealed }),
            None => Some(sealed),
        }
    }

    /// Segments in which a stream may have rows: those up to the last that is sealed, and one in which a writer may have begun a
    /// record that is not.
    fn segments(&self, stream: u8) -> u32 {
        let sealed =
            self.sealed.as_ref().and_then(|vector| vector.get(usize::from(stream)).copied().flatten());
        sealed.map_or(1, |sealed| sealed.segment.saturating_add(2))
    }
}

#[cfg(test)]
mod tests;
