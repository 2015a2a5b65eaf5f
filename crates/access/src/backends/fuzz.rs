//! Body of the fuzz target `backends`.

use gateway_core::{TopicFilter, matches};

use super::{Tokens, covers, intersection, pattern_matches};

/// Takes bytes as a file of tokens, what is read as it is written again; and as filters, topics and patterns, whose
/// intersections and containments must be those of the topics that match. Panics where that does not hold.
#[doc(hidden)]
pub fn fuzz_backends(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(tokens) = Tokens::parse(text) {
        let again = tokens.list().iter().try_fold(String::new(), |text, grant| Tokens::with(&text, grant));
        let again = Tokens::parse(&again.expect("what was read can be written")).expect("and read again");
        assert_eq!(again.list(), tokens.list());
        assert!(tokens.list().iter().all(|grant| again.has(grant)));
    }
    let parts: Vec<&str> = text.lines().take(3).collect();
    let [one, other, topic] = parts.as_slice() else { return };
    // Containment of patterns is taken from what matches them as text.
    if pattern_matches(one, other) && pattern_matches(other, topic) {
        assert!(pattern_matches(one, topic), "{one} {other} {topic}");
    }
    if TopicFilter::check(one).is_err() || TopicFilter::check(other).is_err() {
        return;
    }
    if topic.is_empty() || topic.contains(['+', '#', '\0']) {
        return;
    }
    let both = matches(one, topic) && matches(other, topic);
    let common = intersection(one, other);
    assert_eq!(common.is_some_and(|common| matches(&common, topic)), both, "{one} {other} {topic}");
    assert!(!covers(one, other) || !matches(other, topic) || both, "{one} {other} {topic}");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn filters_topics_and_patterns_agree(text in "[ab$+#*/\n]{1,24}") {
            fuzz_backends(text.as_bytes());
        }

        #[test]
        fn no_text_of_a_file_is_too_strange(
            text in "\\{\"id\":\"[ab]\",\"role\":\"(reader|x)\",(\"topics\":\\[(\"#\")?\\],)?\"created\":\"2026-11-2[0-9]T00:00:00Z\",\"sha256\":\"[0-9a-fA-F]{64}\"\\}\n.{0,20}"
        ) {
            fuzz_backends(text.as_bytes());
        }
    }
}
