//! Entry point for fuzzing.

use crate::{DocumentLimits, Json, Patch, State, Update, client_token};

/// Small, so that fuzzing reaches the bounds.
const SMALL: DocumentLimits = DocumentLimits { bytes: 256, depth: 4 };
/// Never reached by what fits [`SMALL`].
const WIDE: DocumentLimits = DocumentLimits { bytes: 1 << 16, depth: 16 };

/// Takes each line of bytes as JSON, and as an update of a shadow by its device and by a backend. Panics if what was read is
/// not written so that it can be read again, a document is larger than it may be or cannot be read from the disk, the same update
/// changes anything a second time, or reporting all that is desired leaves a delta.
#[doc(hidden)]
pub fn fuzz_shadow(data: &[u8]) {
    let mut state = State::default();
    for (line, now) in data.split(|byte| *byte == b'\n').take(16).zip(1..) {
        // A token is read of anything, or it is not.
        let _ = client_token(line, &SMALL);
        let Ok(text) = std::str::from_utf8(line) else { continue };
        if let Ok(json) = Json::parse(text, SMALL.depth) {
            check_text(&json);
        }
        let patch = Update::patch(text, &SMALL).ok().flatten();
        let by_backend = patch.map(|patch| Update { desired: Some(patch), ..Update::default() });
        let by_device = Update::parse(line, &SMALL).ok();
        for update in by_backend.into_iter().chain(by_device) {
            let Ok(next) = state.updated(&update, now, &SMALL) else { continue };
            check_state(&next, &update, now);
            state = next;
        }
    }
}

fn check_text(json: &Json) {
    let mut text = String::new();
    json.write(&mut text);
    let again = Json::parse(&text, SMALL.depth).expect("what was read can be read again");
    let mut twice = String::new();
    again.write(&mut twice);
    assert_eq!(text, twice);
    assert!(*json == again, "{text}");
}

fn check_state(state: &State, update: &Update, now: u64) {
    let mut text = String::new();
    state.write_state(false, &mut text);
    assert!(text.len() <= SMALL.bytes, "{text}");
    let stored = state.encode();
    assert_eq!(State::decode(stored.as_bytes()).as_ref(), Some(state), "{stored}");
    let again = state.updated(update, now, &SMALL).expect("it fitted before");
    assert_eq!(&again, state, "the same update once more");
    let desired = Update::patch(&state.desired(), &WIDE).expect("desired is JSON").expect("and an object");
    let Patch::Merge(_) = &desired else { panic!("desired is an object") };
    let reported = Update { reported: Some(desired), ..Update::default() };
    let reported = state.updated(&reported, now, &WIDE).expect("there is room");
    assert_eq!(reported.delta_text(), None, "{stored}");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn updates_of_any_text_keep_what_shadows_promise(
            lines in prop::collection::vec(
                "\\{(\"[ab]\":([0-9]{1,3}|-?0\\.[0-9]e?|null|\\[[12]?\\]|\\{(\"[ab]\":(1|null|\"\\\\u00e9\"))?\\}),?){0,3}\\}|[\\[\\]{},:\"0-9.e+-]{0,12}",
                0..6
            ),
            device in any::<bool>(),
        ) {
            let line = |line: String| match device {
                true => format!("{{\"state\":{{\"reported\":{line},\"desired\":{line}}}}}"),
                false => line,
            };
            fuzz_shadow(lines.into_iter().map(line).collect::<Vec<_>>().join("\n").as_bytes());
        }

        #[test]
        fn no_bytes_are_too_strange_for_a_shadow(data in prop::collection::vec(any::<u8>(), 0..300)) {
            fuzz_shadow(&data);
        }
    }
}
