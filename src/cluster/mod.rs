//! A gateway of a cluster, from the start of its process to its end: it stands by, serves when the home is its own, and stands by again
//! when it no longer is.
//!
//! ```text
//! engine    opens the database that keeps the ledger
//! links     the other gateways
//! member    stands by, then serves
//! ```

mod engine;
mod links;
mod member;

pub(crate) use engine::{EngineError, LedgerEngine};
pub(crate) use member::ClusterMember;
