//! The gateway's data directory: one LMDB environment (folder) for each of the stores, and the log of consumer groups in segment
//! files. The traits are of `store`; nothing here knows the protocol.
//!
//! ```text
//! open environment reserve         opening, growing, room for removals on a full disk
//! carry marker                     damage: parts that are whole go into a new file; which files were closed cleanly
//! format upgrades                  tables of each store, and the way to them from older formats
//! shipping files copy              the ledger of a cluster: what is committed is in it before; a directory made of it
//! committer waiting pending        one writer thread per environment, group commit
//! readers                          reads on the blocking pool
//! fields keys message record       records and their keys
//! state records latest             tables and writers; `state` has readers of its own
//! log                              log of consumer groups in segment files
//! earlier                          directories of earlier versions
//! tool                             check, compact, back up, export, import
//! ```

mod carry;
#[cfg(test)]
mod carry_tests;
mod committer;
mod copy;
#[cfg(test)]
mod copy_tests;
pub mod counters;
#[cfg(test)]
mod damage_tests;
mod earlier;
mod environment;
mod fields;
mod files;
mod format;
mod keys;
mod latest;
mod log;
mod marker;
mod message;
mod open;
mod options;
mod pending;
mod readers;
mod record;
mod records;
mod reserve;
mod shipping;
mod state;
mod table;
pub mod tool;
mod upgrades;
#[cfg(test)]
mod verify_tests;
mod waiting;

use store::StoreError;

pub use copy::{DirectoryCopy, ShippedStore, empty_directory};
pub use environment::CommitHook;
pub use files::ShippedFiles;
pub use latest::{EmbeddedLatest, EmbeddedOptions};
pub use ledger::Position;
pub use log::{EmbeddedLog, LogHook, LogMemory, LogOptions, LogStep};
#[cfg(any(test, feature = "fuzz"))]
pub use log::{fuzz_log, fuzz_log_frame};
pub use options::DurableOptions;
pub use records::{EmbeddedRecords, RecordOptions};
pub use shipping::{Shipped, Shipping};
pub use state::{EmbeddedState, QueueGauges, StateOptions};
pub use table::Redo;

fn closed() -> StoreError {
    StoreError::Unavailable("the store is closed".to_owned())
}
