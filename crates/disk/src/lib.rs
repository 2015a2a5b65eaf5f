//! The gateway's data directory: one LMDB environment (folder) for each of the stores, and the tools for the whole of it; the log of
//! consumer groups in it is of `segment-log`. The traits are of `store`; nothing here knows the protocol.
//!
//! ```text
//! open environment reserve         opening, growing, shipping to a ledger, room for removals on a full disk
//! carry marker                     damage: parts that are whole go into a new file; which files were closed cleanly
//! format upgrades                  tables of each store, and the way to them from older formats
//! files copy                       the ledger of a cluster: small files in it; a directory made of it
//! committer waiting pending        one writer thread per environment, group commit
//! readers                          reads on the blocking pool
//! keys record                      records and their keys
//! state records latest             tables and writers; `state` has readers of its own
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
mod cut_tests;
#[cfg(test)]
mod damage_tests;
mod earlier;
mod environment;
mod files;
mod format;
mod keys;
mod latest;
mod marker;
mod open;
mod options;
mod pending;
mod readers;
mod record;
mod records;
mod reserve;
mod state;
mod table;
pub mod tool;
mod upgrades;
#[cfg(test)]
mod verify_tests;
mod waiting;

pub use copy::{DirectoryCopy, ShippedStore, empty_directory};
pub use environment::CommitHook;
pub use files::ShippedFiles;
pub use latest::{EmbeddedLatest, EmbeddedOptions, LatestLedger, LatestLedgerFigures};
pub use options::DurableOptions;
pub use records::{EmbeddedRecords, RecordOptions};
pub use state::{EmbeddedState, QueueGauges, StateOptions};
pub use table::Redo;
