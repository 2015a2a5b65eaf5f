use std::collections::BTreeMap;

use gateway_core::{QoS, matches};
use proptest::{prelude::*, sample::select};

use super::*;
use crate::{Method, Principal};

fn rules(text: &str) -> Rules {
    match Rules::parse(text) {
        Ok(rules) => rules,
        Err(mistakes) => panic!("{mistakes:?} in {text}"),
    }
}

fn user(name: &str) -> Principal {
    Principal { method: Method::Password, username: Some(name.into()), ..Principal::default() }
}

fn subject<'a>(client_id: &'a str, principal: &'a Principal) -> Subject<'a> {
    Subject { client_id, listener: "lab", principal }
}

const PLAIN: (QoS, bool, usize) = (QoS::AtMostOnce, false, 0);

fn may(rules: &Rules, subject: &Subject<'_>, topic: &str, how: (QoS, bool, usize)) -> Result<(), Excess> {
    let grant = rules.publish(subject, topic);
    let (qos, retain, bytes) = how;
    let explained = rules.explain(subject, &AccessQuestion::Publish { topic, qos, retain, bytes });
    let result = grant.permits(qos, retain, bytes);
    assert_eq!((explained.allowed, explained.line), (result.is_ok(), grant.line), "{topic}: {explained}");
    result
}

#[test]
fn an_empty_file_denies_everything() {
    let nobody = Principal::default();
    let subject = subject("c", &nobody);
    for text in ["", "[groups]\n", "# nothing\n"] {
        let rules = rules(text);
        assert!(rules.is_empty());
        assert_eq!(may(&rules, &subject, "a", PLAIN), Err(Excess::Topic));
        assert_eq!(rules.subscribe(&subject, "a"), Subscribing::Denied(0));
        assert_eq!(rules.subscribe(&subject, "#"), Subscribing::Denied(0));
    }
}

#[test]
fn the_first_rule_that_names_party_action_and_topic_decides() {
    let rules = rules(
        r##"[[rules]]
deny = "all"
topics = ["devices/+/secret/#"]
[[rules]]
allow = "publish"
users = ["anna", "ops-*"]
topics = ["devices/#"]
[[rules]]
deny = "all"
topics = ["#"]
[[rules]]
allow = "all"
topics = ["#"]
"##,
    );
    let (anna, ben, ops) = (user("anna"), user("ben"), user("ops-7"));
    let (anna, ben, ops) = (subject("c", &anna), subject("c", &ben), subject("c", &ops));
    assert_eq!(may(&rules, &anna, "devices/1/t", PLAIN), Ok(()));
    assert_eq!(may(&rules, &ops, "devices/1/t", PLAIN), Ok(()));
    assert_eq!(rules.publish(&anna, "devices/1/t").line, 5);
    assert_eq!(rules.publish(&anna, "devices/1/secret").line, 2);
    assert_eq!(rules.publish(&ben, "devices/1/t").line, 9);
    assert_eq!(may(&rules, &ben, "devices/1/t", PLAIN), Err(Excess::Topic));
    assert_eq!(rules.receive(&anna, "devices/1/t").line, 9);
}

#[test]
fn limits_are_part_of_the_decision() {
    let rules = rules(
        "[[rules]]\nallow = \"publish\"\ntopics = [\"a\"]\nmax_qos = 1\nretain = false\nmax_bytes = \"1 KiB\"\n\
         [[rules]]\nallow = \"all\"\ntopics = [\"#\"]\n",
    );
    let nobody = Principal::default();
    let subject = subject("c", &nobody);
    assert_eq!(may(&rules, &subject, "a", (QoS::AtLeastOnce, false, 1024)), Ok(()));
    assert_eq!(may(&rules, &subject, "a", (QoS::ExactlyOnce, false, 0)), Err(Excess::Qos));
    assert_eq!(may(&rules, &subject, "a", (QoS::AtMostOnce, true, 0)), Err(Excess::Retain));
    assert_eq!(may(&rules, &subject, "a", (QoS::AtMostOnce, false, 1025)), Err(Excess::Bytes));
    assert_eq!(may(&rules, &subject, "b", (QoS::ExactlyOnce, true, 1 << 30)), Ok(()));
}

#[test]
fn placeholders_stand_for_who_asks() {
    let rules = rules(
        r##"[[rules]]
allow = "publish"
topics = ["c/%c/#", "u/%u", "cn/%cn/x", "site/%{claim.site}/t", "dev-%{c}n/100%%"]
"##,
    );
    let mut principal = user("anna");
    principal.common_name = Some("gate".into());
    principal.claims = BTreeMap::from([("site".into(), ["north".into(), "south".into()].into())]);
    let subject = subject("d1", &principal);
    for (topic, allowed) in [
        ("c/d1", true),
        ("c/d1/a/b", true),
        ("c/d2/a", false),
        ("u/anna", true),
        ("u/ben", false),
        ("cn/gate/x", true),
        ("cn/d1n/x", false),
        ("site/north/t", true),
        ("site/south/t", true),
        ("site/east/t", false),
        ("dev-d1n/100%", true),
    ] {
        assert_eq!(may(&rules, &subject, topic, PLAIN).is_ok(), allowed, "{topic}");
    }
}

/// The failure: a client that calls itself `+` or `a/b` gets what the rules give to others.
#[test]
fn no_name_that_a_client_chooses_gets_it_more() {
    let allow = rules("[[rules]]\nallow = \"all\"\ntopics = [\"d/%c/#\", \"%c/x\", \"%c/#\"]\n");
    let deny = rules(
        "[[rules]]\ndeny = \"all\"\ntopics = [\"d/%c/secret\"]\n[[rules]]\nallow = \"all\"\ntopics = [\"#\"]\n",
    );
    let nobody = Principal::default();
    for id in ["+", "#", "a/b", "a/#", "$SYS", "x+", ""] {
        let subject = subject(id, &nobody);
        for topic in ["d/a/b/c", "d/other/x", "a/b/x", "$SYS/x", "d//x", "/x"] {
            let allowed = may(&allow, &subject, topic, PLAIN).is_ok();
            assert!(!allowed || topic == "d/$SYS/x", "{id} may publish to {topic}");
        }
        for filter in ["d/+/#", "d/#", "+/x", "#", "$SYS/x", "$SYS/#", "d/a/b/#"] {
            assert_eq!(allow.subscribe(&subject, filter), Subscribing::Denied(0), "{id} may have {filter}");
        }
        let denied = may(&deny, &subject, "d/a/b/secret", PLAIN).is_err();
        assert_eq!(denied, id.contains(['+', '#', '/']), "{id}");
    }
}

#[test]
fn wildcards_cover_no_topics_of_the_server() {
    let all = rules("[[rules]]\nallow = \"all\"\ntopics = [\"#\", \"+/x\"]\n");
    let sys = rules("[[rules]]\nallow = \"subscribe\"\ntopics = [\"$SYS/broker/#\"]\n");
    let nobody = Principal::default();
    let subject = subject("c", &nobody);
    for topic in ["$SYS/x", "$SYS/broker/uptime", "$SYS"] {
        assert!(!all.receive(&subject, topic).is_allowed(), "{topic}");
        assert_eq!(all.subscribe(&subject, topic), Subscribing::Denied(0), "{topic}");
    }
    assert_eq!(all.subscribe(&subject, "$SYS/#"), Subscribing::Denied(0));
    assert_eq!(all.subscribe(&subject, "#"), Subscribing::Allowed);
    assert_eq!(sys.subscribe(&subject, "$SYS/broker/+"), Subscribing::Allowed);
    assert_eq!(sys.subscribe(&subject, "$SYS/#"), Subscribing::Denied(0));
    assert_eq!(sys.subscribe(&subject, "#"), Subscribing::Denied(0));
}

#[test]
fn a_filter_is_allowed_only_if_all_its_topics_are() {
    let rules = rules(
        r##"[[rules]]
deny = "subscribe"
topics = ["a/secret/#"]
[[rules]]
allow = "subscribe"
topics = ["a/#", "b/+", "b/+/+/#", "d/%c/#"]
"##,
    );
    let nobody = Principal::default();
    let subject = subject("me", &nobody);
    for (filter, expected) in [
        ("a/b", Subscribing::Allowed),
        ("a/b/#", Subscribing::Allowed),
        ("a/+", Subscribing::Denied(2)),
        ("a/#", Subscribing::Denied(2)),
        ("a/secret/x", Subscribing::Denied(2)),
        ("a/b/+/c", Subscribing::Allowed),
        ("b/+/#", Subscribing::Allowed),
        ("b/#", Subscribing::Denied(0)),
        ("d/me/#", Subscribing::Allowed),
        ("d/you/#", Subscribing::Denied(0)),
        ("d/+/x", Subscribing::Denied(0)),
        ("$share/g/a/b", Subscribing::Allowed),
        ("$share/g/a/#", Subscribing::Denied(2)),
    ] {
        assert_eq!(rules.subscribe(&subject, filter), expected, "{filter}");
    }
    let explained = rules.explain(&subject, &AccessQuestion::Subscribe { filter: "a/+" });
    assert_eq!(explained.lines.last().map(String::as_str), Some("denied: 'a/secret' is denied by line 2"));
}

#[test]
fn a_rule_may_grant_a_filter_and_have_it_filtered_on_delivery() {
    let text = "[[rules]]\ndeny = \"subscribe\"\ntopics = [\"a/secret\"]\n\
                [[rules]]\nallow = \"subscribe\"\ntopics = [\"a/+\", \"%c/#\"]\nfilter = \"on-delivery\"\n";
    let rules = rules(text);
    let nobody = Principal::default();
    let subject = subject("me", &nobody);
    for filter in ["#", "a/#", "a/+", "+/secret", "+/x", "+/+/x"] {
        assert_eq!(rules.subscribe(&subject, filter), Subscribing::OnDelivery, "{filter}");
    }
    assert_eq!(rules.subscribe(&subject, "me/#"), Subscribing::Allowed);
    for filter in ["b/#", "you/+", "$SYS/#", "+/y/z/+", "$share/g/#"] {
        let denied = matches!(rules.subscribe(&subject, filter), Subscribing::Denied(_));
        assert_eq!(denied, filter != "+/y/z/+", "{filter}");
    }
    assert_eq!(rules.subscribe(&subject, "a/secret"), Subscribing::Denied(2), "one topic is no question");
    assert!(rules.receive(&subject, "a/open").is_allowed());
    assert!(!rules.receive(&subject, "a/secret").is_allowed());
    assert!(!rules.receive(&subject, "b/x").is_allowed());
}

#[test]
fn each_condition_of_a_rule_must_hold() {
    let nobody = Principal::default();
    let mut anna = user("anna");
    anna.groups = ["tokens".into()].into();
    anna.common_name = Some("gate-1".into());
    anna.claims = BTreeMap::from([("role".into(), ["x".into(), "admin".into()].into())]);
    for (condition, allowed) in [
        ("clients = [\"me\"]", true),
        ("clients = [\"m*\"]", true),
        ("clients = [\"you\"]", false),
        ("users = [\"anna\"]", true),
        ("users = [\"ben\"]", false),
        ("common_names = [\"gate-*\"]", true),
        ("common_names = [\"x\"]", false),
        ("groups = [\"tokens\"]", true),
        ("groups = [\"named\"]", true),
        ("groups = [\"other\", \"nobody\"]", false),
        ("listeners = [\"lab\"]", true),
        ("listeners = [\"public\"]", false),
        ("claims = { role = \"admin\" }", true),
        ("claims = { role = [\"y\", \"x\"] }", true),
        ("claims = { role = \"y\" }", false),
        ("claims = { none = \"*\" }", false),
        ("anonymous = false", true),
        ("anonymous = true", false),
        ("users = [\"anna\"]\nlisteners = [\"public\"]", false),
        ("users = []", false),
    ] {
        let text = format!(
            "[groups]\nnamed = {{ users = [\"anna\"] }}\nother = {{ clients = [\"you\"], common_names = [\"x\"] }}\n\
             [[rules]]\nallow = \"publish\"\ntopics = [\"#\"]\n{condition}\n"
        );
        let rules = rules(&text);
        assert_eq!(may(&rules, &subject("me", &anna), "a", PLAIN).is_ok(), allowed, "{condition}");
        let for_nobody = may(&rules, &subject("c", &nobody), "a", PLAIN).is_ok();
        assert_eq!(
            for_nobody,
            ["listeners = [\"lab\"]", "anonymous = true"].contains(&condition),
            "{condition}"
        );
    }
}

#[test]
fn every_mistake_is_told_with_its_line() {
    let text = r##"
[groups]
g = { users = ["a*b"] }
[[rules]]
allow = "publish"
topics = ["a/#/b", "ok", "%x"]
[[rules]]
topics = ["a"]
[[rules]]
deny = "publish"
allow = "all"
topics = ["a"]
[[rules]]
deny = "all"
topics = []
max_qos = 3
[[rules]]
allow = "publish"
topics = ["$share/g/a"]
filter = "on-delivery"
"##;
    let mistakes = Rules::parse(text).expect_err("it is full of mistakes");
    let lines: Vec<usize> = mistakes.iter().map(|mistake| mistake.line).collect();
    assert_eq!(lines, [3, 6, 6, 7, 10, 15, 16, 16, 19, 20], "{mistakes:?}");
    for (text, line) in [
        ("[[rules]]\nallow = \"publish\"\n", 1),
        ("[[rules]]\nallow = \"read\"\ntopics = [\"a\"]\n", 2),
        ("\n[[rules]]\nallow = \"all\"\ntopics = [\"a\"]\nfoo = 1\n", 5),
        ("[[rules]\n", 1),
        ("[[rules]]\nallow = \"all\"\ntopics = [\"a\"]\nmax_bytes = \"1 XB\"\n", 4),
    ] {
        let mistakes = Rules::parse(text).expect_err(text);
        assert_eq!(mistakes[0].line, line, "{mistakes:?}");
    }
}

#[test]
fn an_acl_file_of_mosquitto_becomes_rules_that_decide_the_same() {
    let acl = "# comment\ntopic read news/#\n\nuser anna\ntopic lab/+\ntopic deny lab/secret\n\
               topic write cmd/100%\npattern readwrite d/%c/#\npattern write u/%u\npattern x/a%c\n\
               user b*d\ntopic x\n";
    let imported = import_mosquitto(acl);
    // The user with a star, and the placeholder within a level.
    assert_eq!(imported.left_out.len(), 2, "{:?}", imported.left_out);
    let rules = rules(&imported.rules);
    let nobody = Principal::default();
    let anna = user("anna");
    let (nobody, anna) = (subject("c1", &nobody), subject("c2", &anna));
    assert!(rules.receive(&nobody, "news/x").is_allowed() && !rules.receive(&anna, "news/x").is_allowed());
    assert!(!rules.publish(&nobody, "news/x").is_allowed());
    assert!(rules.publish(&anna, "lab/x").is_allowed() && !rules.publish(&anna, "lab/secret").is_allowed());
    assert!(rules.publish(&anna, "cmd/100%").is_allowed() && !rules.receive(&anna, "cmd/100%").is_allowed());
    assert!(rules.publish(&nobody, "d/c1/x").is_allowed() && !rules.publish(&nobody, "d/c2/x").is_allowed());
    assert!(rules.publish(&anna, "u/anna").is_allowed());
    assert!(rules.publish(&anna, "x/a%c").is_allowed(), "not alone in its level, it is text");
    assert_eq!(rules.subscribe(&anna, "#"), Subscribing::OnDelivery, "Mosquitto filters what it delivers");
}

/// The failure: an ACL file whose line cannot be said breaks the file that comes of it.
#[test]
fn what_cannot_be_imported_stays_as_a_comment() {
    let imported = import_mosquitto("user a\u{1}\ntopic x\ntopic \r\u{0} bar\nuser b\ntopic read x\n");
    assert_eq!(imported.left_out.len(), 3, "{:?}", imported.left_out);
    for line in ["# Left out, line 1: ", "# Left out, line 2: ", "# Left out, line 3: "] {
        assert!(imported.rules.contains(line), "{}", imported.rules);
    }
    assert_eq!(rules(&imported.rules).len(), 1);
}

/// The failure: a line that denies, or that says whom lines are for, was left out alone, and what it kept shut was open.
#[test]
fn a_line_that_may_have_denied_leaves_nothing_allowed() {
    let anna = user("anna");
    let anna = subject("c1", &anna);
    for line in [
        "topic deny home/secret/# # the safe",
        "topic Deny home/secret/#",
        "topic\tdeny home/secret/#",
        "Topic deny home/secret/#",
        "pattern deny home/+secret/#",
        "User bob",
        "user\tbob",
        "user",
        "topic none home/secret/#",
    ] {
        let imported = import_mosquitto(&format!("user anna\ntopic home/#\n{line}\ntopic readwrite lab/#\n"));
        let rules = rules(&imported.rules);
        for topic in ["home/secret/x", "home/x", "lab/x"] {
            assert!(!rules.publish(&anna, topic).is_allowed(), "{line} {topic}: {}", imported.rules);
        }
        assert!(imported.left_out.iter().any(|told| told.contains("nothing is allowed")), "{line}");
    }
    // One that only allows is left out by itself.
    for line in
        ["topic read a/# # all", "topic READ a/#", "topic", "topic write a/\u{1}", "  # topic deny home/#"]
    {
        let imported = import_mosquitto(&format!("user anna\r\n  topic  write   home/x  \r\n{line}\r\n"));
        assert!(rules(&imported.rules).publish(&anna, "home/x").is_allowed(), "{line}: {}", imported.rules);
    }
}

/// The failure: what a user with a star, or a pattern with a placeholder within a level, was denied was not any more.
#[test]
fn what_is_denied_stays_denied_where_rules_read_it_otherwise() {
    let acl = "user a*a\ntopic deny x/#\npattern deny d-%c/#\npattern readwrite #\n";
    let rules = rules(&import_mosquitto(acl).rules);
    let (starred, anna) = (user("a*a"), user("anna"));
    assert!(!rules.publish(&subject("c1", &starred), "x/y").is_allowed());
    assert!(rules.publish(&subject("c1", &starred), "y").is_allowed());
    for topic in ["d-c1/x", "d-%c/x"] {
        assert!(!rules.publish(&subject("c1", &anna), topic).is_allowed(), "{topic}");
    }
    assert!(rules.publish(&subject("c1", &anna), "d-c2/x").is_allowed());
}

#[test]
fn a_filter_is_shown_as_it_could_be_written() {
    for text in ["a/%c/#", "+/%u-%cn/%{claim.a b}x", "100%%/%{c}n", "", "/", "$SYS/+"] {
        let Ok(pattern) = Pattern::parse(text) else { continue };
        assert_eq!(Pattern::parse(&pattern.to_string()), Ok(pattern), "{text}");
    }
}

#[test]
fn rules_that_are_too_intricate_to_follow_cover_nothing() {
    let mut text = String::new();
    for n in 0..40 {
        let levels: Vec<String> = (0..40).map(|m| if m == n { "x".into() } else { "+".into() }).collect();
        text += &format!("[[rules]]\ndeny = \"subscribe\"\ntopics = [\"{}\"]\n", levels.join("/"));
    }
    text += "[[rules]]\nallow = \"subscribe\"\ntopics = [\"#\"]\n";
    let rules = rules(&text);
    let nobody = Principal::default();
    assert!(matches!(rules.subscribe(&subject("c", &nobody), "#"), Subscribing::Denied(_)));
    assert_eq!(rules.subscribe(&subject("c", &nobody), "a/+"), Subscribing::Allowed);
}

#[test]
fn random_bytes_as_rules_are_read_or_refused() {
    let words = [
        "[[rules]]\n",
        "allow = ",
        "deny = ",
        "\"all\"\n",
        "\"publish\"\n",
        "\"subscribe\"\n",
        "topics = [\"",
        "%c",
        "%u",
        "/",
        "+",
        "#",
        "a",
        "\"]\n",
        "$SYS",
        "x y z\n",
        "topic ",
        "pattern ",
        "deny ",
        "user a\n",
        "\n",
        "\"",
        "filter = \"on-delivery\"\n",
        "users = [\"a*\"]\n",
        "%{claim.x}",
        "\u{7f}",
        "\\",
        "max_qos = 1\n",
    ];
    let mut state = 1_u64;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for round in 0..1_500 {
        let mut data = Vec::new();
        for _ in 0..random(40) {
            match random(30) {
                0 => data.push(random(256) as u8),
                _ => data.extend_from_slice(words[random(words.len())].as_bytes()),
            }
        }
        if round % 2 == 0 {
            data = format!(
                "a/b {} {} a # +/+ a/#\n[[rules]]\nallow = \"all\"\ntopics = [\"{}\"]\n",
                ["+", "a", "b/a", "$SYS"][random(4)],
                ["#", "a"][random(2)],
                (0..random(4) + 1).map(|_| words[7 + random(6)]).collect::<String>(),
            )
            .into_bytes();
        }
        fuzz_rules(&data);
    }
}

/// Every topic of up to `depth` levels of these texts.
fn all_topics(texts: &[&str], depth: usize) -> Vec<String> {
    let mut all: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
    let mut last = all.clone();
    for _ in 1..depth {
        last =
            last.iter().flat_map(|so_far| texts.iter().map(move |text| format!("{so_far}/{text}"))).collect();
        all.extend(last.iter().cloned());
    }
    all
}

fn filter() -> impl Strategy<Value = String> {
    let level = select(vec!["a", "b", "$d", "+", "%c", "a%u"]);
    (prop::collection::vec(level, 1..=3), any::<bool>()).prop_map(|(mut levels, hash)| {
        if hash {
            levels.truncate(2);
            levels.push("#");
        }
        levels.join("/")
    })
}

fn asked() -> impl Strategy<Value = String> {
    let level = select(vec!["a", "b", "$d", "+", "ab"]);
    (prop::collection::vec(level, 0..=3), any::<bool>()).prop_map(|(mut levels, hash)| {
        if hash || levels.is_empty() {
            levels.push("#");
        }
        levels.join("/")
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Texts that no rule names are `z` and `$z`; filters of rules have three levels, so a fourth and fifth say nothing new.
    #[test]
    fn a_filter_is_covered_if_every_topic_of_it_is_allowed(
        entries in prop::collection::vec((any::<bool>(), prop::collection::vec(filter(), 1..=2), any::<bool>()), 1..=4),
        asked in asked(),
        client_id in select(vec!["a", "b", "+", "a/b", "$d"]),
        username in select(vec!["b", "#", "z"]),
    ) {
        let mut text = String::new();
        for (deny, filters, mine) in &entries {
            let verb = if *deny { "deny" } else { "allow" };
            let whom = if *mine { "clients = [\"a\"]\n" } else { "" };
            text += &format!("[[rules]]\n{verb} = \"subscribe\"\n{whom}topics = {filters:?}\n");
        }
        let rules = rules(&text);
        let principal = user(username);
        let subject = subject(client_id, &principal);
        // With values that are no text of a level it is enough never to allow too much.
        let exact = !client_id.contains(['+', '/']) && username != "#";
        let mut all = true;
        for topic in all_topics(&["a", "b", "$d", "ab", "az", "z", "$z"], 4) {
            let grant = rules.receive(&subject, &topic);
            let explained = rules.explain(&subject, &AccessQuestion::Subscribe { filter: &topic });
            prop_assert_eq!((grant.is_allowed(), grant.line), (explained.allowed, explained.line), "{}", &topic);
            if matches(&asked, &topic) {
                all &= grant.is_allowed();
            }
        }
        let covered = rules.subscribe(&subject, &asked) == Subscribing::Allowed;
        prop_assert!(!covered || all, "{} is too much", &asked);
        prop_assert!(!exact || covered == all, "{} is refused", &asked);
    }

    #[test]
    fn a_filter_that_overlaps_a_rule_is_found(
        filter in filter(), asked in asked(), client_id in select(vec!["a", "b", "$d"]),
    ) {
        let text = format!("[[rules]]\nallow = \"subscribe\"\ntopics = [{filter:?}]\nfilter = \"on-delivery\"\n");
        let rules = rules(&text);
        let principal = user("b");
        let subject = subject(client_id, &principal);
        let topics = all_topics(&["a", "b", "$d", "ab", "z", "$z"], 4);
        let any = topics.iter().any(|topic| matches(&asked, topic) && rules.receive(&subject, topic).is_allowed());
        let refused = matches!(rules.subscribe(&subject, &asked), Subscribing::Denied(_));
        prop_assert_eq!(refused, !any, "{} of {}", &asked, &filter);
    }
}

#[test]
fn a_value_behind_many_others_does_not_escape_a_denial() {
    let rules = rules(
        r##"[[rules]]
deny = "all"
topics = ["site/%{claim.barred}/t"]
[[rules]]
allow = "all"
topics = ["site/#"]
"##,
    );
    let with = |count: usize| {
        let mut principal = user("anna");
        let values = (0..count).map(|n| format!("s{n}").into());
        principal.claims = BTreeMap::from([("barred".into(), values.collect())]);
        principal
    };
    let (few, many) = (with(32), with(33));
    let (few, many) = (subject("c", &few), subject("c", &many));
    assert_eq!(may(&rules, &few, "site/s31/t", PLAIN), Err(Excess::Topic));
    assert_eq!(may(&rules, &few, "site/other/t", PLAIN), Ok(()));
    assert_eq!(may(&rules, &many, "site/s32/t", PLAIN), Err(Excess::Topic));
    assert_eq!(rules.subscribe(&many, "site/s32/t"), Subscribing::Denied(2));
}
