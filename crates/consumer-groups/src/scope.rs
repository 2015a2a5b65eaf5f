//! Access to a group's messages: a caller's scope must cover the group's filter.

use access::backends::Scope;

use super::GroupMessageFilter;

/// Tells whether all messages of a group with this filter lie within a scope: each topic filter in one of the scope's, and
/// devices named where the scope limits them.
pub fn in_scope(scope: &Scope, filter: &GroupMessageFilter) -> bool {
    if scope.is_all() {
        return true;
    }
    if scope.topics().is_some() && filter.events.iter().any(|name| tells_filters(name)) {
        return false;
    }
    let devices = filter.devices.iter().cloned();
    let devices: Vec<String> =
        devices.chain(filter.device_prefixes.iter().map(|prefix| format!("{prefix}*"))).collect();
    let devices = (!devices.is_empty()).then_some(devices);
    Scope::new(Some(filter.topics.clone()), devices).is_ok_and(|wanted| scope.covers(&wanted))
}

/// Tells whether events of this kind name filters of devices, which may be any.
fn tells_filters(name: &str) -> bool {
    matches!(name, "subscribed" | "unsubscribed")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> Vec<String> {
        entries.iter().map(|&entry| entry.to_owned()).collect()
    }

    fn of(topics: &[&str]) -> GroupMessageFilter {
        GroupMessageFilter { topics: list(topics), ..GroupMessageFilter::default() }
    }

    /// Otherwise a caller would get by a group what it may not have by a stream.
    #[test]
    fn a_group_is_in_scope_only_if_all_that_it_gets_is() {
        let topics = Scope::new(Some(list(&["a/#", "b"])), None).unwrap();
        let devices = Scope::new(None, Some(list(&["lamp-*"]))).unwrap();
        let filter = |topics: &[&str], ids: &[&str], prefixes: &[&str]| GroupMessageFilter {
            devices: list(ids),
            device_prefixes: list(prefixes),
            ..of(topics)
        };
        for (scope, wanted, expected) in [
            (&Scope::ALL, filter(&["#"], &[], &[]), true),
            (&topics, filter(&["a/+", "b"], &[], &[]), true),
            (&topics, filter(&["#"], &[], &[]), false),
            (&topics, filter(&["a/1", "c"], &[], &[]), false),
            (&devices, filter(&["#"], &[], &[]), false),
            (&devices, filter(&["#"], &["lamp-1"], &["lamp-2"]), true),
            (&devices, filter(&["#"], &["lamp-1", "door"], &[]), false),
            (&devices, filter(&["#"], &[], &["la"]), false),
        ] {
            assert_eq!(in_scope(scope, &wanted), expected, "{wanted:?}");
        }
        let events = |name: &str| GroupMessageFilter { events: list(&[name]), ..of(&["b"]) };
        assert!(in_scope(&topics, &events("connected")) && !in_scope(&topics, &events("subscribed")));
    }
}
