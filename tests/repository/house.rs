//! The size of each crate, the names of types, and the English of the comments.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use super::{
    layers::{gateway_sources, is_tests},
    support::root,
};

/// Lines of a crate outside tests, suites and fuzz code. A larger one has outgrown its walls (docs/adr/0005-workspace.md).
const MOST_LINES: usize = 14_000;

/// The same for the crate at the top, which is to wire the others: lowered with each wall that is put up.
const MOST_LINES_AT_TOP: usize = 47_500;

/// Words that stand for a noun and hide it.
const HIDING: &[&str] = &[
    "How", "It", "That", "They", "Those", "What", "Whatever", "When", "Where", "Wherever", "Whether",
    "Which", "Who", "Whoever", "Whom", "Whose",
];

/// Of a thousand comments so many may open with a word that hides its noun.
const MOST_HIDING: usize = 20;

#[test]
fn no_crate_outgrows_its_walls() {
    let mut lines = BTreeMap::<String, usize>::new();
    for source in gateway_sources().iter().filter(|source| !is_tests(&source.path)) {
        let parts: Vec<&str> = source.path.split('/').collect();
        let name = if parts[0] == "crates" { parts[1] } else { "mqtt-server" };
        *lines.entry(name.to_owned()).or_default() += source.lines;
    }
    let most = |name: &str| if name == "mqtt-server" { MOST_LINES_AT_TOP } else { MOST_LINES };
    let large: Vec<_> = lines.iter().filter(|(name, lines)| **lines > most(name)).collect();
    assert!(large.is_empty(), "{large:?}: put up a wall");
}

/// The failure: comments in a language of their own, in which a relative clause stands for every noun.
#[test]
fn comments_open_with_a_noun_or_a_verb() {
    let mut all = 0;
    let mut hiding = Vec::new();
    for source in gateway_sources() {
        let text = fs::read_to_string(root().join(&source.path)).expect("read a source file");
        for opening in openings(&text) {
            all += 1;
            if HIDING.contains(&opening.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default()) {
                hiding.push(format!("{}: {opening}", source.path));
            }
        }
    }
    assert!(all > 1_000, "only {all} comments were found");
    let most = all * MOST_HIDING / 1_000;
    assert!(hiding.len() <= most, "{} of {all}, more than {most}:\n{}", hiding.len(), hiding.join("\n"));
}

/// The first lines of all comments that have lines of their own.
fn openings(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut before = "";
    for line in text.lines().map(str::trim_start) {
        let marker = ["///", "//!", "//"].into_iter().find(|marker| line.starts_with(marker)).unwrap_or("");
        if !marker.is_empty() && marker != before {
            found.push(line[marker.len()..].trim());
        }
        before = marker;
    }
    found
}

#[test]
fn openings_are_those_of_blocks() {
    let text = "//! What is it\n//! It is\n\n/// A noun\nfn f() {} // What\n    // Who\n    // They\n";
    assert_eq!(openings(text), ["What is it", "A noun", "Who"]);
}

/// Most type names that more than one file defines, tests, suites and fuzz code left out.
const MOST_SHARED_NAMES: usize = 10;

/// The failure: a reader meets `Queue` or `Status`, and has to look for the one that is meant.
#[test]
fn a_type_name_has_one_meaning() {
    let mut files = BTreeMap::<String, BTreeSet<String>>::new();
    for source in gateway_sources().iter().filter(|source| !is_tests(&source.path)) {
        if source.path.contains("/fuzz/") {
            continue;
        }
        for name in source.code.lines().filter_map(type_name) {
            files.entry(name.to_owned()).or_default().insert(source.path.clone());
        }
    }
    assert!(files.len() > 1_000, "only {} types were found", files.len());
    let shared: Vec<_> = files.iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(shared.len() <= MOST_SHARED_NAMES, "{} names have several meanings: {shared:#?}", shared.len());
}

/// The name of the type that a line begins to define. Aliases count in the first column only: further in they are those of traits.
fn type_name(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let code = code.strip_prefix("pub").map_or(code, |rest| {
        let scope = rest.strip_prefix('(').and_then(|rest| rest.split_once(')'));
        scope.map_or(rest, |(_, rest)| rest).trim_start()
    });
    let code = code.strip_prefix("unsafe ").unwrap_or(code);
    let (kind, rest) = code.split_once(' ')?;
    let defines = matches!(kind, "struct" | "enum" | "trait") || kind == "type" && !line.starts_with(' ');
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    (defines && !name.is_empty()).then_some(name)
}

#[test]
fn names_are_those_of_definitions() {
    assert_eq!(type_name("pub(in crate::net) struct Link<'a> {"), Some("Link"));
    assert_eq!(type_name("    pub(super) enum Kind {"), Some("Kind"));
    assert_eq!(type_name("type Alias = u8;"), Some("Alias"));
    assert_eq!((type_name("    type Item = u8;"), type_name("let enum_of = 1;")), (None, None));
}
