//! A client that is the bridge of another broker. Mosquitto's bridges say so by a bit in the protocol level, and tell by a retained
//! message on a `$SYS` topic whether they are connected.

use codec::{Connect, SubscribeFilter};

/// Topic on which a bridge tells whether it is connected: prefix, its name, suffix.
const STATE_PREFIX: &str = "$SYS/broker/connection/";
const STATE_SUFFIX: &str = "/state";

/// Rights and options of a connection that is a bridge.
#[derive(Debug)]
pub(super) struct BridgePeer {
    /// The protocol level had the bridge bit.
    has_bit: bool,
    /// The only `$SYS` topic that the connection may write: that of its will, or else the first that it writes.
    state_topic: Option<Box<str>>,
}

impl BridgePeer {
    /// `None` for a client that neither has the bridge bit nor a will on such a topic.
    pub(super) fn of(connect: &Connect) -> Option<Self> {
        let will = connect.will.as_ref().map(|will| will.topic.as_str());
        let state_topic = will.filter(|topic| is_connection_state(topic)).map(Box::from);
        let is_peer = connect.bridge || state_topic.is_some();
        is_peer.then_some(Self { has_bit: connect.bridge, state_topic })
    }

    /// Returns whether the connection may write this topic of `$SYS`.
    pub(super) fn may_write(&mut self, topic: &str) -> bool {
        if let Some(own) = &self.state_topic {
            return **own == *topic;
        }
        let may = self.has_bit && is_connection_state(topic);
        if may {
            self.state_topic = Some(Box::from(topic));
        }
        may
    }

    /// Gives a subscription of MQTT 3 what bridges of MQTT 5 ask for: messages with RETAIN as it was, and none of its own.
    pub(super) fn adapt(&self, wanted: &mut SubscribeFilter) {
        if self.has_bit {
            wanted.retain_as_published = true;
            // A member of a shared subscription has no option of this kind [MQTT-3.8.3-4].
            wanted.no_local = !wanted.filter.starts_with("$share/");
        }
    }
}

/// Returns whether a bridge of any name tells its state on this topic.
pub(crate) fn is_connection_state(topic: &str) -> bool {
    let name = topic.strip_prefix(STATE_PREFIX).and_then(|rest| rest.strip_suffix(STATE_SUFFIX));
    name.is_some_and(|name| !name.is_empty())
}
