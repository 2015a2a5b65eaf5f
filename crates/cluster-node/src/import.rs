//! A directory that was used alone becomes the home of a new cluster.

use std::{io, sync::Arc};

use cluster::{Appended, MOST_HOMES, MemberNode, Node, StreamWriter, View, ViewError, take};
use disk::ShippedStore;
use ledger::{Ledger, Position};
use store::{DataDir, StoreError};
use thiserror::Error;
use tokio::runtime::Handle;

use crate::{STREAMS, clock::MachineClock, copy::WarmCopy};

/// The home that a directory becomes.
const HOME: u16 = 0;

/// A cluster that was not made.
#[derive(Debug, Error)]
pub enum ImportError {
    /// There is one already, or the engine does not answer.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The directory cannot be read, or the ledger did not take it.
    #[error(transparent)]
    Directory(#[from] StoreError),
    /// A cluster cannot have so many homes.
    #[error("a cluster has 1 to {MOST_HOMES} homes, and not {0}")]
    Homes(u16),
    /// The homes of the directory's clients would be several.
    #[error(
        "a data directory that was used alone can only become the home of a cluster of one, and not of {0}: make it with one home, or begin with an empty data directory"
    )]
    SeveralHomes(u16),
    /// The home could not be taken for the import.
    #[error("{0}; the cluster is there and has a home that is not whole: drop its tables and begin anew")]
    Interrupted(String),
}

/// Makes a cluster of so many homes, and puts the home in `directory` into its ledger, if there is one, with its latest values if the ledger
/// `keeps_latest`. Returns the bytes that it put there. In the cluster's runtime; `cluster` and `incarnation` are drawn.
///
/// # Errors
/// [`ImportError`].
pub async fn create(
    ledger: Arc<dyn Ledger>,
    (name, homes): (&str, u16),
    cluster: u128,
    incarnation: u64,
    directory: Option<Arc<DataDir>>,
    keeps_latest: bool,
) -> Result<u64, ImportError> {
    if !(1..=MOST_HOMES).contains(&usize::from(homes)) {
        return Err(ImportError::Homes(homes));
    }
    if homes > 1 && directory.is_some() {
        return Err(ImportError::SeveralHomes(homes));
    }
    let clock = Arc::new(MachineClock) as Arc<dyn cluster::Clock>;
    let mut copy = match &directory {
        Some(directory) => Some(WarmCopy::open(directory)?),
        None => None,
    };
    // The name says what it is to who finds it.
    let name_while = if copy.is_some() { format!("{name} (import)") } else { name.to_owned() };
    cluster::create(&*ledger, &*clock, cluster, &View::create(&name_while, homes, STREAMS)).await?;
    let Some(copy) = &mut copy else { return Ok(()).map(|()| 0) };
    let node = Node::new("cluster-create", incarnation);
    let member = Arc::new(MemberNode::new(Arc::clone(&ledger), Arc::clone(&clock), node));
    let mut empty = NoCopy;
    let interrupted = |error: &dyn std::fmt::Display| ImportError::Interrupted(error.to_string());
    let tenure = take(&member, HOME, Some(0), std::time::Duration::ZERO, &mut empty)
        .await
        .map_err(|error| interrupted(&error))?;
    let running = tokio::spawn({
        let member = Arc::clone(&member);
        async move { member.run().await }
    });
    let mut writers = tenure.writers();
    let mut bytes = 0;
    let handle = Handle::current();
    let exported = tokio::task::block_in_place(|| {
        let mut ship = |store: ShippedStore, changes: &[u8]| -> io::Result<Position> {
            bytes += changes.len() as u64;
            handle.block_on(append(&mut writers[store as usize], changes))
        };
        copy.directory_mut().export(keeps_latest, &mut ship)
    });
    exported?;
    copy.sync().map_err(|error| interrupted(&error))?;
    tenure.release(writers).await.map_err(|error| interrupted(&error))?;
    running.abort();
    cluster::change(&*ledger, &*clock, |view: &View| -> Result<Option<View>, ViewError> {
        Ok((view.name != name).then(|| View { name: name.to_owned(), ..view.clone() }))
    })
    .await?;
    Ok(bytes)
}

async fn append(writer: &mut StreamWriter, changes: &[u8]) -> io::Result<Position> {
    match writer.append(changes).await {
        Appended::Done(position) => Ok(position),
        Appended::Lost => Err(io::Error::other("another process has taken the home")),
        Appended::TooLarge => Err(io::ErrorKind::FileTooLarge.into()),
    }
}

/// A home that has no records yet.
struct NoCopy;

impl cluster::HomeCopy for NoCopy {
    fn streams(&self) -> u8 {
        STREAMS
    }

    fn position(&self, _stream: u8) -> Option<Position> {
        None
    }

    fn apply(&mut self, _stream: u8, _position: Position, _changes: &[u8]) -> Result<(), String> {
        Err("the home of a new cluster is not empty".to_owned())
    }

    fn clear(&mut self, _stream: u8) -> Result<(), String> {
        Ok(())
    }
}
