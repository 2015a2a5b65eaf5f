//! The directories of a node's homes.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

use cluster::{Former, Node};
use disk::empty_directory;
use parking_lot::Mutex;
use store::{DataDir, StoreError, Verify, replace_file};
use tokio::{task::block_in_place, time::sleep};

use crate::{NodeError, copy::WarmCopy};

/// File in a home's directory that names the process of a cluster which has it, or had it last, and the epoch in which that served.
const INCARNATION: &str = "incarnation";

/// Folder in the data directory with those of several homes.
const HOMES: &str = "homes";

/// Time between two looks whether a directory was given back, and time after which it is told that it was not.
const GIVEN_BACK: Duration = Duration::from_millis(20);
const HELD_LONG: Duration = Duration::from_secs(10);

/// Directories of the homes of a cluster: the data directory itself if there is one home, folders in it if there are more.
pub struct HomeDirectories {
    path: PathBuf,
    verify: Verify,
    /// Locked by this process, until the one home of a cluster has it.
    whole: Mutex<Option<Arc<DataDir>>>,
}

impl HomeDirectories {
    /// Makes the data directory if need be, and locks it. Stores in it are verified as `verify` says. Blocks.
    ///
    /// # Errors
    /// As [`DataDir::open`].
    pub fn open(path: &Path, verify: Verify) -> Result<Self, StoreError> {
        let whole = Mutex::new(Some(DataDir::open_with(path, verify)?));
        Ok(Self { path: path.to_owned(), verify, whole })
    }

    /// The directory of a home, as a copy, and the process of `node` that had it last. The stores in it are closed. One whose files
    /// cannot be opened is emptied: it is only a copy. Blocks on the disk.
    ///
    /// # Errors
    /// The disk, and `OwnContent`.
    pub(crate) fn copy(&self, home: u16, homes: usize, node: &Node) -> Result<OpenedCopy, NodeError> {
        let directory = match homes {
            1 => match self.whole.lock().take() {
                Some(whole) => whole,
                None => DataDir::open_with(&self.path, self.verify)?,
            },
            _ if self.path.join("state").exists() && !is_of_cluster(&self.path) => {
                return Err(own_content(&self.path));
            }
            _ => DataDir::open_with(&self.path.join(HOMES).join(home.to_string()), self.verify)?,
        };
        let copy = open_copy(&directory)?;
        if copy.directory().has_own_content() && !is_of_cluster(directory.path()) {
            return Err(own_content(directory.path()));
        }
        let former = former(directory.path(), node.name());
        note_process(&directory, node, former.filter(|former| former.incarnation == node.incarnation()));
        Ok(OpenedCopy { directory, copy, former })
    }
}

/// A directory that is open as a copy.
pub(crate) struct OpenedCopy {
    pub(crate) directory: Arc<DataDir>,
    pub(crate) copy: WarmCopy,
    pub(crate) former: Option<Former>,
}

/// Notes that the process serves the home in the directory.
pub(crate) fn note_served(directory: &DataDir, node: &Node, epoch: u64) {
    let former = Former { incarnation: node.incarnation(), served: Some(epoch) };
    block_in_place(|| note_process(directory, node, Some(former)));
}

/// Waits until all stores of a directory are closed. Cancel safe.
pub(crate) async fn given_back(directory: Weak<DataDir>, home: u16) {
    let mut waited = Duration::ZERO;
    while directory.strong_count() > 0 {
        sleep(GIVEN_BACK).await;
        waited += GIVEN_BACK;
        if waited > HELD_LONG {
            gateway_core::warn_limited!(
                home,
                "the stores of a home that is another gateway's are still open"
            );
        }
    }
}

fn own_content(path: &Path) -> NodeError {
    NodeError::OwnContent(path.display().to_string())
}

fn open_copy(directory: &Arc<DataDir>) -> Result<WarmCopy, NodeError> {
    match WarmCopy::open(directory) {
        Ok(copy) => Ok(copy),
        Err(error @ StoreError::Format(_)) => Err(error.into()),
        Err(error) => {
            tracing::error!(%error, "the copy of the home cannot be opened, it is made anew");
            empty_directory(directory.path()).map_err(unavailable)?;
            Ok(WarmCopy::open(directory)?)
        }
    }
}

/// The process that had the directory last, if it was one of this node: a directory that was copied has another node's name.
fn former(directory: &Path, name: &str) -> Option<Former> {
    let text = fs::read_to_string(directory.join(INCARNATION)).ok()?;
    let mut words = text.split_ascii_whitespace();
    if words.next() != Some(name) {
        return None;
    }
    let incarnation = words.next()?.parse().ok()?;
    Some(Former { incarnation, served: words.next().and_then(|epoch| epoch.parse().ok()) })
}

fn note_process(directory: &DataDir, node: &Node, served: Option<Former>) {
    let epoch = served.and_then(|former| former.served).map_or_else(String::new, |epoch| format!(" {epoch}"));
    let text = format!("{} {}{epoch}\n", node.name(), node.incarnation());
    if let Err(error) = replace_file(directory.path(), INCARNATION, &text) {
        // The next process waits as for one on another host.
        tracing::debug!(%error, "the process that has the home is not noted");
    }
}

/// Returns whether a process of a cluster had the directory last.
fn is_of_cluster(directory: &Path) -> bool {
    directory.join(INCARNATION).exists()
}

fn unavailable(error: std::io::Error) -> StoreError {
    StoreError::Unavailable(error.to_string())
}

/// Makes a directory that was of a cluster one of a gateway alone, which keeps what is in it; any other is left as it is. Blocks on the
/// disk.
///
/// # Errors
/// The disk, and `Format` for a directory with several homes.
pub fn leave_cluster(directory: &Arc<DataDir>) -> Result<(), StoreError> {
    let path = directory.path();
    if path.join(HOMES).exists() {
        return Err(StoreError::Format(format!(
            "{} has the homes of a cluster, and a gateway alone has one: name another data directory",
            path.display()
        )));
    }
    if !is_of_cluster(path) {
        return Ok(());
    }
    tracing::info!("the data directory was of a cluster, and is of this gateway alone from now on");
    WarmCopy::open(directory)?.forget_ledger()?;
    fs::remove_file(path.join(INCARNATION)).map_err(unavailable)
}
