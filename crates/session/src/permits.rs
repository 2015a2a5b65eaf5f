//! Authorization of what the client publishes, as the session asks for it.

use codec::Publish;

/// Rights of the client, lent to [`Inbound::handle`](crate::Inbound::handle) with each packet.
pub trait Permits {
    /// Decides whether the client may publish this message to this topic name, which an alias may stand for.
    fn may_publish(&mut self, topic: &str, publish: &Publish<'_>) -> PublishPermit;
}

/// Decision about a message that the client wants to publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishPermit {
    /// The client may publish it.
    Granted,
    /// The client may not. Where no acknowledgement can say so, the message is forgotten.
    Dropped,
    /// The client may not. Where no acknowledgement can say so, the connection ends.
    Closed,
    /// The client's rights are not known yet.
    Later,
}
