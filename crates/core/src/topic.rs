//! Topic names and filters: validation and the matching rule itself.

use std::sync::Arc;

use thiserror::Error;

/// Longest topic the protocol can carry [MQTT-4.7.3-3].
pub const MAX_TOPIC_BYTES: usize = 65_535;

/// Why a topic name or filter is not acceptable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TopicError {
    /// Empty [MQTT-4.7.3-1].
    #[error("topic is empty")]
    Empty,
    /// Contains U+0000 [MQTT-4.7.3-2].
    #[error("topic contains a NUL character")]
    Nul,
    /// A wildcard in a topic name [MQTT-3.3.2-2].
    #[error("topic name contains a wildcard")]
    Wildcard,
    /// A wildcard that does not fill its level, or `#` before the end [MQTT-4.7.1-1] [MQTT-4.7.1-2].
    #[error("wildcard is not alone in its level, or # is not last")]
    Misplaced,
    /// Longer than 65,535 bytes.
    #[error("topic is longer than 65535 bytes")]
    TooLong,
    /// A `$share` filter without a group name or filter [MQTT-4.8.2-1] [MQTT-4.8.2-2].
    #[error("shared subscription needs $share/group/filter")]
    Share,
}

/// A valid topic name. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopicName(Arc<str>);

impl TopicName {
    /// Validates and copies `topic`.
    pub fn new(topic: &str) -> Result<Self, TopicError> {
        Self::check(topic)?;
        Ok(Self(Arc::from(topic)))
    }

    /// Validates without copying.
    pub fn check(topic: &str) -> Result<(), TopicError> {
        check_common(topic)?;
        if has_wildcard(topic) {
            return Err(TopicError::Wildcard);
        }
        Ok(())
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A valid topic filter, without a `$share` prefix. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopicFilter(Arc<str>);

impl TopicFilter {
    /// Validates and copies `filter`.
    pub fn new(filter: &str) -> Result<Self, TopicError> {
        Self::check(filter)?;
        Ok(Self(Arc::from(filter)))
    }

    /// Validates without copying.
    pub fn check(filter: &str) -> Result<(), TopicError> {
        check_common(filter)?;
        if !has_wildcard(filter) {
            return Ok(());
        }
        let bytes = filter.as_bytes();
        let ends_level = |at: usize| bytes.get(at).is_none_or(|byte| *byte == b'/');
        let is_placed = |at: usize, byte: u8| match byte {
            b'+' | b'#' if at > 0 && !ends_level(at - 1) => false,
            b'+' => ends_level(at + 1),
            b'#' => at + 1 == bytes.len(),
            _ => true,
        };
        let all_placed = bytes.iter().enumerate().all(|(at, byte)| is_placed(at, *byte));
        if all_placed { Ok(()) } else { Err(TopicError::Misplaced) }
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns whether `text` has a `+` or a `#`: in a valid filter that is a wildcard, and a topic name has none.
pub fn has_wildcard(text: &str) -> bool {
    // Of bytes, `contains` searches by words.
    text.as_bytes().contains(&b'#') || text.as_bytes().contains(&b'+')
}

/// Levels of a topic name or filter: one more than it has slashes.
pub fn level_count(text: &str) -> usize {
    text.bytes().filter(|byte| *byte == b'/').count() + 1
}

/// Splits `$share/group/filter`. `Ok(None)` when `text` is no shared subscription.
pub fn parse_shared(text: &str) -> Result<Option<(&str, &str)>, TopicError> {
    let Some(rest) = text.strip_prefix("$share/") else {
        return if text == "$share" { Err(TopicError::Share) } else { Ok(None) };
    };
    let (group, filter) = rest.split_once('/').ok_or(TopicError::Share)?;
    let bad_group = group.is_empty() || has_wildcard(group);
    if bad_group || filter.is_empty() {
        return Err(TopicError::Share);
    }
    Ok(Some((group, filter)))
}

/// Returns whether `filter` matches `topic`, both valid. A leading wildcard does not match `$` topics [MQTT-4.7.2-1].
pub fn matches<'a>(filter: &'a str, topic: &'a str) -> bool {
    if topic.starts_with('$') && (filter.starts_with('+') || filter.starts_with('#')) {
        return false;
    }
    // Levels are short: comparing bytes finds their ends faster than `str::split`.
    let levels = |text: &'a str| text.as_bytes().split(|byte| *byte == b'/');
    let mut topic_levels = levels(topic);
    for level in levels(filter) {
        match level {
            b"#" => return true,
            b"+" if topic_levels.next().is_some() => {}
            _ if level != b"+" && topic_levels.next() == Some(level) => {}
            _ => return false,
        }
        // `a/#` also matches `a` [MQTT-4.7.1-2]; handled when "#" follows an exhausted topic.
    }
    topic_levels.next().is_none()
}

fn check_common(text: &str) -> Result<(), TopicError> {
    if text.is_empty() {
        return Err(TopicError::Empty);
    }
    if text.len() > MAX_TOPIC_BYTES {
        return Err(TopicError::TooLong);
    }
    if text.as_bytes().contains(&0) {
        return Err(TopicError::Nul);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The failure: a filter that one rule takes and the other does not, in whatever order its levels come.
    #[test]
    fn a_filter_is_valid_if_each_wildcard_has_its_level_and_hash_is_last() {
        let by_levels = |filter: &str| {
            let levels: Vec<&str> = filter.split('/').collect();
            let (_, before) = levels.split_last().unwrap();
            let alone = levels.iter().all(|level| level.len() < 2 || !level.contains(['+', '#']));
            alone && !before.contains(&"#")
        };
        let mut filters = vec![String::new()];
        for _ in 0..6 {
            filters = filters
                .iter()
                .flat_map(|start| ["", "a", "/", "+", "#"].map(|next| format!("{start}{next}")))
                .collect();
        }
        for filter in filters.iter().filter(|filter| !filter.is_empty()) {
            assert_eq!(TopicFilter::check(filter).is_ok(), by_levels(filter), "{filter}");
        }
    }

    #[test]
    fn wildcards_match_as_the_specification_says() {
        let cases = [
            ("sport/tennis/player1/#", "sport/tennis/player1", true),
            ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", true),
            ("sport/#", "sport", true),
            ("#", "a/b", true),
            ("sport/tennis/+", "sport/tennis/player1", true),
            ("sport/tennis/+", "sport/tennis/player1/ranking", false),
            ("sport/+", "sport", false),
            ("sport/+", "sport/", true),
            ("+/+", "/finance", true),
            ("/+", "/finance", true),
            ("+", "/finance", false),
            ("#", "$SYS/x", false),
            ("+/monitor", "$SYS/monitor", false),
            ("$SYS/#", "$SYS/x", true),
            ("a//b", "a//b", true),
            ("a/+/b", "a//b", true),
            ("a/b", "a/b/c", false),
            ("a/b/c", "a/b", false),
            ("+/#", "a", true),
        ];
        for (filter, topic, expected) in cases {
            assert_eq!(matches(filter, topic), expected, "{filter} on {topic}");
        }
    }

    #[test]
    fn filters_with_misplaced_wildcards_are_refused() {
        for bad in ["a#", "a/#/b", "a+", "+a/b", "##", "a/b+"] {
            assert_eq!(TopicFilter::check(bad), Err(TopicError::Misplaced), "{bad}");
        }
        for good in ["#", "+", "a/+/b", "/", "//", "a/#", "+/+/#"] {
            assert_eq!(TopicFilter::check(good), Ok(()), "{good}");
        }
        assert_eq!(TopicFilter::check(""), Err(TopicError::Empty));
        assert_eq!(TopicFilter::check("a\0"), Err(TopicError::Nul));
        assert_eq!(TopicName::check("a/+"), Err(TopicError::Wildcard));
    }

    #[test]
    fn shared_filters_are_split_or_refused() {
        assert_eq!(parse_shared("a/b"), Ok(None));
        assert_eq!(parse_shared("$share/g/a/+"), Ok(Some(("g", "a/+"))));
        assert_eq!(parse_shared("$shared/g"), Ok(None));
        for bad in ["$share", "$share/", "$share/g", "$share/g/", "$share//a", "$share/g+/a"] {
            assert_eq!(parse_shared(bad), Err(TopicError::Share), "{bad}");
        }
    }
}
