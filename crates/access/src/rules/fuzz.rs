//! One function that a fuzzer can call: whatever is read as rules decides without a panic, and the fast way as the slow.

use gateway_core::{QoS, TopicFilter, TopicName};

use super::{AccessQuestion, Rules, Subscribing, import_mosquitto};
use crate::{Principal, Subject};

/// Reads `data` as a rules file and as an ACL file of Mosquitto, and asks what comes of it.
///
/// # Panics
/// When two ways to the same decision differ: a fault of this crate.
pub fn fuzz_rules(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (names, text) = text.split_once('\n').unwrap_or(("", &text));
    if let Ok(rules) = Rules::parse(text) {
        ask(&rules, names);
    }
    let imported = import_mosquitto(text);
    let rules = Rules::parse(&imported.rules);
    assert!(rules.is_ok(), "what was imported is refused: {rules:?}");
    ask(&rules.unwrap_or_default(), names);
}

/// The words of `names` are client id, user name, common name, and then topics and filters.
fn ask(rules: &Rules, names: &str) {
    let mut words = names.split(' ');
    let client_id = words.next().unwrap_or_default();
    let principal = Principal {
        username: words.next().map(Box::from),
        common_name: words.next().map(Box::from),
        ..Principal::default()
    };
    let subject = Subject { client_id, listener: "default", principal: &principal };
    let explained = rules.explain(&subject, &AccessQuestion::Connect);
    assert_eq!(rules.connect(&subject), explained.allowed, "{client_id}");
    for topic in words.take(8).chain(["a", "a/b", "$SYS/x", "#", "+/a"]) {
        if TopicName::check(topic).is_ok() {
            let grant = rules.publish(&subject, topic);
            let asked = AccessQuestion::Publish { topic, qos: QoS::AtMostOnce, retain: false, bytes: 0 };
            let explained = rules.explain(&subject, &asked);
            assert_eq!((grant.is_allowed(), grant.line), (explained.allowed, explained.line), "{topic}");
        }
        if TopicFilter::check(topic).is_ok() {
            let decided = rules.subscribe(&subject, topic);
            let explained = rules.explain(&subject, &AccessQuestion::Subscribe { filter: topic });
            let denied = matches!(decided, Subscribing::Denied(_));
            assert_eq!(denied, !explained.allowed, "{topic}");
        }
    }
}
