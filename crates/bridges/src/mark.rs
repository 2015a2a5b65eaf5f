//! Marks of messages that went through a bridge of this gateway.

use gateway_core::Properties;

/// User property of what a bridge sends, with the mark of its gateway; and of what a bridge brings in, with [`entry`] of that.
pub(super) const MARK: &str = gateway_core::BRIDGE_MARK;

/// The value for what a bridge brings in. It differs from that for what is sent: a message that came in may go out once.
pub(super) fn entry(mark: &str) -> String {
    format!("in-{mark}")
}

/// Returns whether properties show that the gateway with this mark has sent the message before.
pub(super) fn has_mark(properties: Option<&Properties>, mark: &str) -> bool {
    let mut user = properties.into_iter().flat_map(|properties| &properties.user);
    user.any(|(name, value)| name == MARK && value == mark)
}
