//! The gateway's data directory: one LMDB environment (folder) for each of the stores, and the log of consumer groups in segment
//! files. The traits are of `store`; nothing here knows the protocol.
//!
//! ```text
//! open environment reserve         opening, growing, room for removals on a full disk
//! check verify page marker         damage: files read page by page, and which were closed cleanly
//! format upgrades                  tables of each store, and the way to them from older formats
//! committer waiting pending        one writer thread per environment, group commit
//! answered readers                 changes that are answered one by one; reads on the blocking pool
//! fields keys message record       records and their keys
//! state latest publisher shadows   tables and writers; `state` has readers of its own
//! groups log                       state of consumer groups, and their log in segment files
//! tool                             check, compact, back up, export, import
//! ```

mod answered;
mod check;
mod committer;
pub mod counters;
mod environment;
mod fields;
mod format;
mod groups;
mod keys;
mod latest;
mod log;
mod marker;
mod message;
mod open;
mod options;
mod page;
mod pending;
mod publisher;
mod readers;
mod record;
mod reserve;
mod shadows;
mod state;
pub mod tool;
mod upgrades;
mod verify;
#[cfg(test)]
mod verify_tests;
mod waiting;

use store::StoreError;

pub use environment::CommitHook;
pub use groups::EmbeddedGroupState;
pub use latest::{EmbeddedLatest, EmbeddedOptions};
pub use log::{EmbeddedLog, LogHook, LogMemory, LogOptions, LogStep};
#[cfg(any(test, feature = "fuzz"))]
pub use log::{fuzz_log, fuzz_log_frame};
pub use options::DurableOptions;
pub use publisher::EmbeddedPublisher;
pub use shadows::EmbeddedShadows;
pub use state::{EmbeddedState, QueueGauges, StateOptions, converted_key};

fn closed() -> StoreError {
    StoreError::Unavailable("the store is closed".to_owned())
}
