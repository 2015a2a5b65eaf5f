use proptest::prelude::*;

use super::*;

const LIMITS: DocumentLimits = DocumentLimits { bytes: 200, depth: 3 };

fn update(request: &str) -> Result<Update, (Rejection, Option<String>)> {
    Update::parse(request.as_bytes(), &LIMITS)
}

/// As [`update`], with room for more.
fn large(request: &str) -> Update {
    Update::parse(request.as_bytes(), &WIDE).unwrap()
}

/// Returns an empty shadow's state after the requests, the n-th at the time n.
fn after(requests: &[&str]) -> State {
    let mut state = State::default();
    for (now, request) in requests.iter().enumerate() {
        state = state.updated(&large(request), now as u64 + 1, &WIDE).unwrap();
    }
    state
}

fn desired(section: &str) -> String {
    format!("{{\"state\":{{\"desired\":{section}}}}}")
}

#[test]
fn an_update_merges_objects_replaces_arrays_and_removes_nulls() {
    for (first, second, expected) in [
        ("{\"a\":1}", "{\"b\":2}", "{\"a\":1,\"b\":2}"),
        ("{\"a\":1}", "{\"a\":\"x\"}", "{\"a\":\"x\"}"),
        ("{\"a\":1,\"b\":2}", "{\"a\":null}", "{\"b\":2}"),
        ("{\"a\":1}", "{\"b\":null}", "{\"a\":1}"),
        ("{\"a\":{\"b\":1,\"c\":2}}", "{\"a\":{\"b\":null,\"d\":3}}", "{\"a\":{\"c\":2,\"d\":3}}"),
        ("{\"a\":{\"b\":1}}", "{\"a\":{\"b\":null}}", "{\"a\":{}}"),
        ("{\"a\":{\"b\":1}}", "{\"a\":{}}", "{\"a\":{\"b\":1}}"),
        ("{\"a\":{\"b\":1}}", "{\"a\":5}", "{\"a\":5}"),
        ("{\"a\":5}", "{\"a\":{\"b\":1,\"c\":null}}", "{\"a\":{\"b\":1}}"),
        ("{\"a\":[1,2,3]}", "{\"a\":[4]}", "{\"a\":[4]}"),
        ("{\"a\":[1]}", "{\"a\":[{\"b\":1},null,[]]}", "{\"a\":[{\"b\":1},null,[]]}"),
        ("{\"a\":1}", "{}", "{\"a\":1}"),
        ("{\"a\":1}", "null", "{}"),
        ("{}", "{}", "{}"),
        ("{\"a\":18446744073709551617}", "{\"b\":0.10}", "{\"a\":18446744073709551617,\"b\":0.10}"),
    ] {
        let state = after(&[&desired(first), &desired(second)]);
        assert_eq!(state.desired(), expected, "{first} {second}");
        assert_eq!(state.reported(), "{}");
    }
}

#[test]
fn the_delta_has_what_is_desired_and_not_reported() {
    for (desired, reported, expected) in [
        ("{\"a\":1}", "{}", Some("{\"a\":1}")),
        ("{\"a\":1}", "{\"a\":1}", None),
        ("{\"a\":1}", "{\"a\":1.0,\"b\":2}", None),
        ("{}", "{\"a\":1}", None),
        ("{\"a\":1,\"b\":2}", "{\"a\":1,\"b\":3}", Some("{\"b\":2}")),
        ("{\"a\":{\"b\":1,\"c\":2}}", "{\"a\":{\"b\":1}}", Some("{\"a\":{\"c\":2}}")),
        ("{\"a\":{\"b\":1}}", "{\"a\":7}", Some("{\"a\":{\"b\":1}}")),
        ("{\"a\":{}}", "{\"a\":{\"b\":1}}", None),
        ("{\"a\":{}}", "{}", Some("{\"a\":{}}")),
        ("{\"a\":[1,2]}", "{\"a\":[2,1]}", Some("{\"a\":[1,2]}")),
        ("{\"a\":[1,{\"b\":2}]}", "{\"a\":[1,{\"b\":2}]}", None),
        ("{\"a\":\"1\"}", "{\"a\":1}", Some("{\"a\":\"1\"}")),
        ("{\"a\":9007199254740993}", "{\"a\":9007199254740992}", Some("{\"a\":9007199254740993}")),
    ] {
        let request = format!("{{\"state\":{{\"desired\":{desired},\"reported\":{reported}}}}}");
        assert_eq!(after(&[&request]).delta_text().as_deref(), expected, "{desired} {reported}");
    }
}

#[test]
fn a_value_that_was_not_named_keeps_its_time() {
    let state = after(&[
        &desired("{\"a\":1,\"b\":{\"c\":[1,{\"d\":2}],\"e\":[]}}"),
        &desired("{\"a\":1}"),
        &desired("{\"b\":{\"f\":{}}}"),
    ]);
    assert_eq!(
        state.metadata(),
        "{\"desired\":{\"a\":{\"timestamp\":2},\"b\":{\"c\":[{\"timestamp\":1},{\"d\":{\"timestamp\":1}}],\"e\":[],\"f\":{}}}}"
    );
}

#[test]
fn wrong_requests_are_told_what_is_wrong_with_their_token() {
    let long = "x".repeat(MAX_CLIENT_TOKEN + 1);
    for (request, rejection, code) in [
        ("", Rejection::InvalidJson, 400),
        ("[]", Rejection::InvalidJson, 400),
        ("{\"clientToken\":\"t\"}", Rejection::MissingState, 400),
        ("{\"clientToken\":\"t\",\"state\":null}", Rejection::MissingState, 400),
        ("{\"clientToken\":\"t\",\"state\":1}", Rejection::StateNotObject, 400),
        ("{\"clientToken\":\"t\",\"state\":{\"desired\":[]}}", Rejection::DesiredNotObject, 400),
        ("{\"clientToken\":\"t\",\"state\":{\"reported\":\"\"}}", Rejection::ReportedNotObject, 400),
        ("{\"clientToken\":\"t\",\"state\":{\"delta\":{}}}", Rejection::InvalidNode, 400),
        ("{\"clientToken\":\"t\",\"state\":{},\"version\":-1}", Rejection::InvalidVersion, 400),
        ("{\"clientToken\":\"t\",\"state\":{},\"version\":1.5}", Rejection::InvalidVersion, 400),
        ("{\"clientToken\":\"t\",\"state\":{},\"version\":\"1\"}", Rejection::InvalidVersion, 400),
        ("{\"state\":{},\"clientToken\":1}", Rejection::InvalidToken, 400),
        (&format!("{{\"state\":{{}},\"clientToken\":\"{long}\"}}"), Rejection::InvalidToken, 400),
        ("{\"state\":{\"desired\":{\"a\":{\"b\":{\"c\":{}}}}}}", Rejection::TooDeep(3), 400),
    ] {
        let (error, token) = update(request).unwrap_err();
        assert_eq!((&error, error.code()), (&rejection, code), "{request}");
        assert_eq!(token.is_some(), request.contains("\"t\""), "{request}");
    }
    assert_eq!(Update::parse(b"\xFF", &LIMITS), Err((Rejection::NotUtf8, None)));
    assert_eq!(Update::parse(&[b' '; 1425], &LIMITS), Err((Rejection::TooLarge, None)));
    assert_eq!(client_token(b"", &LIMITS), Ok(None));
    assert_eq!(client_token(b"{\"clientToken\":\"t\",\"else\":1}", &LIMITS), Ok(Some("t".to_owned())));
    assert_eq!(client_token(b"hello", &LIMITS), Err(Rejection::InvalidJson));
    assert_eq!(Update::patch("[]", &LIMITS), Ok(None));
    assert_eq!(Update::patch("null", &LIMITS), Ok(Some(Patch::Clear)));
    assert_eq!(Update::patch("{\"a\":{\"b\":{\"c\":{}}}}", &LIMITS), Err(Rejection::TooDeep(3)));
    assert!(update("{\"state\":{\"desired\":{\"a\":{\"b\":{\"c\":1}}}},\"version\":0,\"more\":1}").is_ok());
}

/// Many small updates would otherwise make what one may not.
#[test]
fn the_whole_document_is_bounded_and_not_only_an_update() {
    let value = "x".repeat(60);
    let grown =
        after(&[&desired(&format!("{{\"a\":\"{value}\"}}")), &desired(&format!("{{\"b\":\"{value}\"}}"))]);
    let third = update(&desired(&format!("{{\"c\":\"{value}\"}}"))).unwrap();
    assert_eq!(grown.updated(&third, 9, &LIMITS), Err(Rejection::TooLarge));
    let other = update(&desired(&format!("{{\"a\":null,\"c\":\"{value}\"}}"))).unwrap();
    assert!(grown.updated(&other, 9, &LIMITS).is_ok());
}

#[test]
fn answers_have_the_shape_that_firmware_expects() {
    let request =
        update("{\"state\":{\"desired\":{\"a\":1,\"b\":null},\"reported\":null},\"clientToken\":\"t\"}")
            .unwrap();
    let state = State::default().updated(&request, 7, &LIMITS).unwrap();
    let context = AnswerContext { now: 7, client_token: Some("t") };
    let shadow = Snapshot { state: &state, version: 3 };
    assert_eq!(
        context.update_accepted(&request, 3),
        "{\"state\":{\"desired\":{\"a\":1,\"b\":null},\"reported\":null},\"metadata\":{\"desired\":{\"a\":{\"timestamp\":7}}},\
         \"version\":3,\"timestamp\":7,\"clientToken\":\"t\"}"
    );
    assert_eq!(
        context.delta(shadow).unwrap(),
        "{\"state\":{\"a\":1},\"metadata\":{\"a\":{\"timestamp\":7}},\"version\":3,\"timestamp\":7,\"clientToken\":\"t\"}"
    );
    assert_eq!(
        context.get_accepted(shadow),
        "{\"state\":{\"desired\":{\"a\":1},\"delta\":{\"a\":1}},\"metadata\":{\"desired\":{\"a\":{\"timestamp\":7}}},\
         \"version\":3,\"timestamp\":7,\"clientToken\":\"t\"}"
    );
    let nobody = AnswerContext { now: 8, client_token: None };
    assert_eq!(
        nobody.documents(Some(Snapshot { state: &State::default(), version: 2 }), shadow),
        "{\"previous\":{\"state\":{},\"metadata\":{},\"version\":2},\"current\":{\"state\":{\"desired\":{\"a\":1}},\
         \"metadata\":{\"desired\":{\"a\":{\"timestamp\":7}}},\"version\":3},\"timestamp\":8}"
    );
    assert_eq!(nobody.delete_accepted(3), "{\"version\":3,\"timestamp\":8}");
    assert_eq!(
        nobody.rejected(&Rejection::Conflict { version: 3 }),
        "{\"code\":409,\"message\":\"Version conflict\",\"timestamp\":8}"
    );
    assert_eq!(
        context.rejected(&Rejection::NotFound("x".to_owned())),
        "{\"code\":404,\"message\":\"No shadow exists with name: 'x'\",\"timestamp\":7,\"clientToken\":\"t\"}"
    );
    let both = update("{\"state\":{\"desired\":{\"a\":1},\"reported\":{\"a\":1}}}").unwrap();
    let both = State::default().updated(&both, 1, &LIMITS).unwrap();
    assert_eq!(nobody.delta(Snapshot { state: &both, version: 1 }), None);
}

#[test]
fn only_requests_are_taken_for_requests() {
    use ShadowOperation::{Delete, Get, Update};
    let longest = "n".repeat(MAX_NAME);
    for (rest, expected) in [
        ("shadow/update", Some((Update, ""))),
        ("shadow/delete", Some((Delete, ""))),
        ("shadow/name/n-1:_/get", Some((Get, "n-1:_"))),
        ("shadow/name/shadow/update", Some((Update, "shadow"))),
        (&format!("shadow/name/{longest}/get"), Some((Get, &longest))),
        (&format!("shadow/name/{longest}n/get"), None),
        ("shadow/update/accepted", None),
        ("shadow/update/", None),
        ("shadow/name//update", None),
        ("shadow/name/a b/update", None),
        ("shadow/name/ä/update", None),
        ("shadow/name/n", None),
        ("shadow/name/n/update/delta", None),
        ("shadow/", None),
        ("shadow", None),
        ("shadows/update", None),
    ] {
        assert_eq!(operation(rest), expected, "{rest}");
    }
    let topics = ShadowTopics::new("$aws/things").unwrap();
    assert_eq!(topics.prefix(), "$aws/things/");
    assert_eq!(topics.answer("d", "", "update/delta"), "$aws/things/d/shadow/update/delta");
    assert_eq!(topics.answer("d", "n", "get/accepted"), "$aws/things/d/shadow/name/n/get/accepted");
    for wrong in ["", "$", "things", "$SYS", "$SYS/x", "$share/g", "$aws/", "$aws/+", "$aws/#"] {
        assert!(ShadowTopics::new(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn what_is_not_a_stored_document_is_not_decoded() {
    for wrong in [
        "",
        "{}",
        "{\"state\":{}}",
        "{\"state\":[],\"metadata\":{}}",
        "{\"state\":{\"desired\":{\"a\":1}},\"metadata\":{}}",
        "{\"state\":{\"desired\":{\"a\":1}},\"metadata\":{\"desired\":{}}}",
        "{\"state\":{\"desired\":{\"a\":1}},\"metadata\":{\"desired\":{\"a\":{\"timestamp\":-1}}}}",
        "{\"state\":{\"desired\":{\"a\":[1]}},\"metadata\":{\"desired\":{\"a\":[]}}}",
    ] {
        assert_eq!(State::decode(wrong.as_bytes()), None, "{wrong}");
    }
    assert_eq!(State::decode(State::default().encode().as_bytes()), Some(State::default()));
}

/// A section's text with few keys, so that updates meet what is there.
fn section() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        "[0-9]{1,3}(\\.[0-9]{1,2})?".prop_filter_map("a leading zero", |n| {
            (n.len() == 1 || !n.starts_with('0') || n.starts_with("0.")).then_some(n)
        }),
        "[ab\"\\\\é]{0,2}".prop_map(|text| serde_json::to_string(&text).unwrap()),
    ];
    let value = leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(|items| format!("[{}]", items.join(","))),
            object(inner),
        ]
    });
    object(value)
}

fn object(value: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    prop::collection::vec(("[abc]", value), 0..4).prop_map(|pairs| {
        let pairs: Vec<String> = pairs.into_iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
        format!("{{{}}}", pairs.join(","))
    })
}

fn request() -> impl Strategy<Value = Update> {
    let patch = || prop::option::of(section());
    (patch(), patch()).prop_map(|(desired, reported)| {
        let patch = |text: Option<String>| text.and_then(|text| Update::patch(&text, &WIDE).unwrap());
        Update { desired: patch(desired), reported: patch(reported), ..Update::default() }
    })
}

/// A request with a token, as it is or with one byte of it replaced.
fn damaged_request() -> impl Strategy<Value = Vec<u8>> {
    let damage = prop::option::of((any::<prop::sample::Index>(), any::<u8>()));
    (section(), damage).prop_map(|(section, damage)| {
        let mut payload =
            format!("{{\"state\":{{\"desired\":{section}}},\"clientToken\":\"t\"}}").into_bytes();
        if let Some((place, byte)) = damage {
            let at = place.index(payload.len());
            payload[at] = byte;
        }
        payload
    })
}

const WIDE: DocumentLimits = DocumentLimits { bytes: 1 << 20, depth: 16 };

/// Patches all keys where both are objects, `null` removing one: RFC 7396, whose words are the model here.
fn patched(target: serde_json::Value, patch: &serde_json::Value) -> serde_json::Value {
    let serde_json::Value::Object(patch) = patch else { return patch.clone() };
    let mut target = match target {
        serde_json::Value::Object(target) => target,
        _ => serde_json::Map::new(),
    };
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            let there = target.remove(key).unwrap_or_default();
            target.insert(key.clone(), patched(there, value));
        }
    }
    target.into()
}

fn value(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}

proptest! {
    #[test]
    fn updates_do_what_a_merge_patch_does(sections in prop::collection::vec(section(), 1..6)) {
        let (mut state, mut model) = (State::default(), value("{}"));
        for (now, text) in sections.iter().enumerate() {
            let desired = Update::patch(text, &WIDE).unwrap();
            let update = Update { desired, ..Update::default() };
            state = state.updated(&update, now as u64, &WIDE).unwrap();
            model = patched(model, &value(text));
            prop_assert_eq!(&value(&state.desired()), &model);
            prop_assert_eq!(&state.updated(&update, 9, &WIDE).unwrap(), &state, "twice is once");
        }
    }

    /// A device that does what the delta says is done.
    #[test]
    fn reporting_the_delta_leaves_none(updates in prop::collection::vec(request(), 1..6)) {
        let mut state = State::default();
        for update in &updates {
            state = state.updated(update, 1, &WIDE).unwrap();
        }
        if let Some(delta) = state.delta_text() {
            let update = Update { reported: Update::patch(&delta, &WIDE).unwrap(), ..Update::default() };
            state = state.updated(&update, 2, &WIDE).unwrap();
        }
        prop_assert_eq!(state.delta_text(), None);
    }

    #[test]
    fn a_document_comes_back_from_the_store_as_it_was(updates in prop::collection::vec(request(), 0..6)) {
        let mut state = State::default();
        for (now, update) in updates.iter().enumerate() {
            state = state.updated(update, now as u64, &WIDE).unwrap();
        }
        let read = State::decode(state.encode().as_bytes()).unwrap();
        prop_assert_eq!(read.metadata(), state.metadata());
        prop_assert_eq!(read, state);
    }

    /// The failure: an answer has a token that its sender did not give, or two readers of a payload disagree about it.
    #[test]
    fn whatever_a_device_sends_is_answered(
        payload in prop_oneof![prop::collection::vec(any::<u8>(), 0..64), damaged_request()],
    ) {
        match (Update::parse(&payload, &LIMITS), client_token(&payload, &LIMITS)) {
            (Ok(update), Ok(token)) => {
                prop_assert_eq!(&update.client_token, &token);
                match State::default().updated(&update, 1, &LIMITS) {
                    Ok(state) => prop_assert_eq!(State::decode(state.encode().as_bytes()), Some(state)),
                    Err(rejection) => prop_assert_eq!(rejection, Rejection::TooLarge),
                }
            }
            (Err((_, told)), Ok(token)) => prop_assert_eq!(told, token),
            (Err((rejection, told)), Err(refused)) => {
                prop_assert_eq!(rejection, refused);
                prop_assert_eq!(told, None);
            }
            (Ok(update), Err(refused)) => prop_assert!(false, "{update:?}, and {refused:?}"),
        }
        if let Some(state) = State::decode(&payload) {
            prop_assert_eq!(State::decode(state.encode().as_bytes()), Some(state));
        }
    }
}
