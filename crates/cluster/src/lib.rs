//! The protocol of a cluster: who owns a home, what is acknowledged, and how another node takes over.
//!
//! Steps have the numbers of docs/dev/cluster.md.
//!
//! ```text
//! view        one document: owners, epochs, chains of ended epochs, starts; pure functions from one to the next
//! change      reads the view, makes the next, swaps it, until it is known what became of it
//! take        a home changes hands: steps (5) to (8), and what a directory lacks
//! member      this process: beats, and reads of the owners and of the view that all its homes share
//! tenure      an owner's time: starts that are published, what is deleted, a clean stop
//! writer      a stream's appends: steps (2) to (4)
//! lease       until when an owner may acknowledge
//! follow      a standby's copy is kept near the end of the ledger
//! chain       whether a copy's position is one of the ledger, and in which segment a record is
//! reader      rows of a stream as records, in order
//! suspicion   nodes whose beats do not change
//! look        view and beats at one time: homes without an owner that beats, orders
//! deal        nodes that such homes go to, and homes that move to other nodes
//! claim       the decision of a node to take a home
//! calls       a call is repeated until it is answered; shared: one call for many that wait
//! ```
//!
//! No runtime, no I/O and no clock of its own: asynchronous functions over [`ledger::Ledger`] and [`Clock`]. The simulator in the
//! tests runs them in virtual time over a ledger with faults.

#[macro_use]
mod weakening;

mod calls;
mod chain;
mod change;
mod claim;
mod clock;
mod copy;
mod deal;
mod follow;
mod lease;
mod look;
mod member;
mod node;
mod reader;
mod shared;
mod suspicion;
mod take;
mod tenure;
mod view;
mod writer;

#[cfg(test)]
mod tests;

pub use change::{change, create, read_view};
pub use claim::{Former, HomeClaim};
pub use clock::Clock;
pub use copy::HomeCopy;
pub use deal::{Move, deal, moves, next_move};
pub use follow::{FollowStep, Follower};
pub use lease::{LEASE, LEASE_WAIT, Lease};
pub use look::{ClusterLook, Lack, NodeHomes, Order, SeenNode, Watcher};
pub use member::MemberNode;
pub use node::Node;
pub use reader::{Damage, DamagedRecord};
pub use suspicion::{SUSPECTED_AFTER, Suspicion};
pub use take::{TakeError, take};
pub use tenure::{Figures, ReleaseError, Tenure};
pub use view::{
    EndedEpoch, HomeView, Incarnation, LONG_CHAIN, Leftover, MOST_HOMES, Sealed, Start, VIEW_FORMAT, View,
    ViewError,
};
pub use writer::{Appended, Pace, SEGMENT, StreamWriter};
