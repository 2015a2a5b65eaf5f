//! The seam for programs that decide themselves what devices may do.

pub use access::rules::{RuleGrant, Subscribing};

use super::Subject;

/// Decides what devices may publish, subscribe to and receive, in place of a rules file; given to
/// [`Builder::authorizer`](crate::gateway::Builder::authorizer).
///
/// The authorizer is asked on threads that serve devices, in part under the lock of a session, so it **must not
/// block**: no I/O, no lock that is held for long, no call of the gateway. Each connection remembers the answers about
/// the last few topics of each kind, so on the path of a message the authorizer is asked only about other topics. An
/// answer holds until [`Self::version`] changes.
///
/// ```
/// use std::sync::Arc;
///
/// use mqtt_server::{
///     Gateway,
///     auth::{Authorizer, RuleGrant, Subject, Subscribing},
/// };
///
/// /// Devices publish below their own name, and hear what is for all.
/// struct OwnTopics;
///
/// impl Authorizer for OwnTopics {
///     fn publish(&self, subject: &Subject<'_>, topic: &str) -> RuleGrant {
///         let mut levels = topic.split('/');
///         if levels.next() == Some("devices") && levels.next() == Some(subject.client_id) {
///             RuleGrant::ALLOWED.with_limits(1, false, 64 << 10)
///         } else {
///             RuleGrant::DENIED
///         }
///     }
///
///     fn receive(&self, _subject: &Subject<'_>, topic: &str) -> RuleGrant {
///         if topic.starts_with("news/") { RuleGrant::ALLOWED } else { RuleGrant::DENIED }
///     }
///
///     fn subscribe(&self, _subject: &Subject<'_>, filter: &str) -> Subscribing {
///         if filter.starts_with("news/") { Subscribing::Allowed } else { Subscribing::DENIED }
///     }
/// }
///
/// let gateway = Gateway::builder(Default::default()).authorizer(Arc::new(OwnTopics));
/// # drop(gateway);
/// ```
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
