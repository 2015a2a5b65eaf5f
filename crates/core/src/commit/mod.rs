//! Promises: work that must be on disk, or done otherwise, before an answer may be given. Three words:
//!
//! A **[`Commit`]** is the promise behind one answer: a PUBACK, a SUBACK, the reply to a gRPC call. Parts are added to it
//! while the work is given out, one for each store or session that has to do something first. Each part ends well or is
//! refused, and when the last has ended the commit is done. It is refused if one of its parts was. The maker of a
//! commit holds a part itself until all others are given out, so that the commit cannot be done too early.
//!
//! A **[`Unit`]** is the parts of one message that are written together or not at all, with one more change that closes it:
//! the packet identifier of a QoS 2 message that came in, or the removal from the queue that a message leaves. A crash then
//! never finds one without the other. The store writes none of it, nor what is after it in the same queues, before it is
//! closed.
//!
//! **[`then`](Commit::then)** takes a closure that runs once a commit is done. A task that has something else to do meanwhile
//! asks with [`Commit::poll`] or waits with [`Commit::wait`] instead.
//!
//! Guarantees, whichever threads end the parts, ask and wait:
//!
//! - A part ends once, and a commit too: nothing is added to one that is done.
//! - A refusal is remembered until the end, whichever part it came with.
//! - A waker that was left with a pending commit is woken: at the end, or sooner if too many wait, and then it asks again.
//! - A closure given to `then` runs exactly once: at once if the commit is done, else in the thread that ends the last part.
//! - No foreign code runs under the lock of a commit: neither wakers nor closures given to `then`. A thread that ends a
//!   part must hold no lock that these take.
//!
//! The models in `model.rs` try every interleaving of a few threads for this.

mod lease;
#[cfg(test)]
mod model;
mod state;
#[cfg(test)]
mod tests;
mod unit;
mod unwritten;

use crate::sync;

pub use lease::LeaseGate;
pub use state::{Commit, CommitRefused};
pub use unit::{Received, Unit};
pub(crate) use unwritten::Unwritten;
