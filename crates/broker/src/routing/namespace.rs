//! Non-broker mode: a device subscribes only inside its own namespace.

use gateway_core::{ReservedTopics, parse_shared};

use super::SubscriptionRules;

const PLACE: &str = "{client_id}";

impl SubscriptionRules {
    /// Returns whether `filter`, shared or not, lies in the namespace of `client_id`, or in its reserved topics. In broker mode
    /// only a filter made for reserved topics of others is refused.
    pub(crate) fn namespace_allows(
        &self,
        client_id: &str,
        filter: &str,
        reserved: Option<&ReservedTopics>,
    ) -> bool {
        if reserved.is_some_and(|reserved| reserved.reaches_foreign(client_id, filter)) {
            return false;
        }
        let Some(namespace) = &self.namespace else { return true };
        allows(namespace, client_id, filter)
            || reserved.is_some_and(|reserved| reserved.owns(client_id, filter))
    }
}

/// Returns whether every topic that `filter` can match lies in the namespace of `client_id`: literal levels of the pattern are
/// repeated exactly, `+` stands for any one level, a final `#` for any rest. Of a shared subscription the filter after the group
/// counts.
fn allows(pattern: &str, client_id: &str, filter: &str) -> bool {
    // A client id with these could name somebody else's levels; the session layer refuses it anyway.
    if client_id.bytes().any(|byte| matches!(byte, b'/' | b'+' | b'#')) {
        return false;
    }
    let filter = match parse_shared(filter) {
        Ok(Some((_, inner))) => inner,
        Ok(None) => filter,
        Err(_) => return false,
    };
    let mut levels = filter.split('/');
    for own in pattern.split('/') {
        if own == "#" {
            return true;
        }
        let Some(level) = levels.next() else { return false };
        let allowed = match own {
            "+" => level != "#",
            _ if own.contains(PLACE) => level == own.replace(PLACE, client_id),
            _ => level == own,
        };
        if !allowed {
            return false;
        }
    }
    levels.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_filters_inside_the_namespace_are_allowed() {
        let cases = [
            ("devices/{client_id}/#", "a", "devices/a/#", true),
            ("devices/{client_id}/#", "a", "devices/a", true),
            ("devices/{client_id}/#", "a", "devices/a/+/x", true),
            ("devices/{client_id}/#", "a", "$share/g/devices/a/x", true),
            ("devices/{client_id}/#", "a", "$share/g/devices/b/x", false),
            ("devices/{client_id}/#", "a", "$share/g/#", false),
            ("devices/{client_id}/#", "a", "devices/b/#", false),
            ("devices/{client_id}/#", "a", "devices/+/x", false),
            ("devices/{client_id}/#", "a", "devices/#", false),
            ("devices/{client_id}/#", "a", "+/a/x", false),
            ("devices/{client_id}/#", "a", "#", false),
            ("devices/{client_id}/#", "a", "devices", false),
            ("devices/{client_id}/#", "+", "devices/+/x", false),
            ("devices/{client_id}/#", "a/b", "devices/a/b/x", false),
            ("d-{client_id}/+/cmd", "a", "d-a/+/cmd", true),
            ("d-{client_id}/+/cmd", "a", "d-a/x/cmd", true),
            ("d-{client_id}/+/cmd", "a", "d-a/#", false),
            ("d-{client_id}/+/cmd", "a", "d-a/x/cmd/y", false),
        ];
        for (pattern, client_id, filter, expected) in cases {
            assert_eq!(allows(pattern, client_id, filter), expected, "{pattern} {client_id} {filter}");
        }
    }
}
