//! The protocol of a cluster: who owns a home, what is acknowledged, and how another node takes over.
//!
//! Steps have the numbers of docs/dev/cluster.md.
//!
//! ```text
//! view        one document: owners, epochs, chains of ended epochs, starts; pure functions from one to the next
//! change      reads the view, makes the next, swaps it, until it is known what became of it
//! take        a home changes hands: steps (5) to (8), and what a directory lacks
//! tenure      an owner's time: beats, validating reads, starts that are published, what is deleted, a clean stop
//! writer      a stream's appends: steps (2) to (4)
//! lease       until when an owner may acknowledge
//! follow      a standby's copy is kept near the end of the ledger
//! chain       whether a copy's position is one of the ledger, and in which segment a record is
//! reader      rows of a stream as records, in order
//! suspicion   nodes whose beats do not change
//! calls       a call is repeated until it is answered
//! ```
//!
//! No runtime, no I/O and no clock of its own: asynchronous functions over [`ledger::Ledger`] and [`Clock`]. The simulator in the
//! tests runs them in virtual time over a ledger with faults.

#[macro_use]
mod weakening;

mod calls;
mod chain;
mod change;
mod clock;
mod copy;
mod follow;
mod lease;
mod node;
mod reader;
mod suspicion;
mod take;
mod tenure;
mod view;
mod writer;

#[cfg(test)]
mod tests;

pub use change::{change, create, read_view};
pub use clock::Clock;
pub use copy::HomeCopy;
pub use follow::{FollowStep, Follower};
pub use lease::{LEASE, LEASE_WAIT, Lease};
pub use node::Node;
pub use reader::{Damage, DamagedRecord};
pub use suspicion::{SUSPECTED_AFTER, Suspicion};
pub use take::{TakeError, take};
pub use tenure::{Figures, ReleaseError, Tenure};
pub use view::{
    EndedEpoch, HomeView, Incarnation, LONG_CHAIN, Leftover, Sealed, Start, VIEW_FORMAT, View, ViewError,
};
pub use writer::{Appended, Pace, SEGMENT, StreamWriter};
