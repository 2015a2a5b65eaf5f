//! The seam for programs that decide themselves what devices may do.

pub use access::rules::{RuleGrant, Subscribing};

use super::Subject;

/// Decides what devices may publish, subscribe to and receive, in place of a rules file; given to the gateway's
/// builder, whose method `authorizer` has an example.
///
/// The authorizer is asked on threads that serve devices, in part under the lock of a session, so it **must not
/// block**: no I/O, no lock that is held for long, no call of the gateway. Each connection remembers the answers about
/// the last few topics of each kind, so on the path of a message the authorizer is asked only about other topics. An
/// answer holds until [`Self::version`] changes.
pub trait Authorizer: Send + Sync {
    /// Decides on publishing to a topic name, also as a will. A client id or user name may be anything that a client
    /// chooses, `/`, `+` and `#` included.
    fn publish(&self, subject: &Subject<'_>, topic: &str) -> RuleGrant;

    /// Decides whether messages of a topic may be delivered, by any subscription. Limits in the answer mean nothing.
    fn receive(&self, subject: &Subject<'_>, topic: &str) -> RuleGrant;

    /// Decides whether a subscription may be made. Its filter is valid and may begin with `$share/group/`. Each message
    /// is asked about by [`Self::receive`] all the same.
    fn subscribe(&self, subject: &Subject<'_>, filter: &str) -> Subscribing;

    /// Changes when an answer may be another than before, after that is so. Read for each message, so it should be one atomic
    /// number.
    fn version(&self) -> u32 {
        0
    }
}
