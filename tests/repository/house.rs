//! The size of each crate, the names of types, and the English of the comments.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use super::{
    layers::{Source, gateway_sources, heads, identifier, is_tests, names},
    support::root,
};

/// Lines of a crate outside tests, suites and fuzz code. A larger one has outgrown its walls (docs/adr/0005-workspace.md).
const MOST_LINES: usize = 14_000;

/// The same for the crate at the top, which only wires the others.
const MOST_LINES_AT_TOP: usize = 6_000;

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

/// Sources of a crate, tests left out.
fn sources_of(name: &str) -> Vec<Source> {
    let folder = format!("crates/{name}/src/");
    let sources = gateway_sources().into_iter();
    sources.filter(|source| source.path.starts_with(&folder) && !is_tests(&source.path)).collect()
}

/// The failure: one type that knows everything, whose methods are spread over all files.
#[test]
fn the_broker_is_a_facade_in_one_file() {
    let is_impl =
        |line: &str| line.starts_with("impl") && line.ends_with(" Broker {") && !line.contains(" for ");
    let sources = sources_of("broker");
    let files: Vec<_> = sources.iter().filter(|source| source.code.lines().any(is_impl)).collect();
    let files: Vec<_> = files.iter().map(|source| &source.path).collect();
    assert_eq!(files.len(), 1, "methods of the broker in {files:?}: a part owns its rules");
}

/// Crates whose modules stand in one order.
const ORDERED: &[&str] = &[
    "bridges",
    "broker",
    "consumer-groups",
    "disk",
    "edge",
    "groups",
    "grpc",
    "grpc-messages",
    "http",
    "import",
    "session",
    "shadow",
    "values",
];

/// The failure: modules that can only be read and changed together.
#[test]
fn modules_of_a_crate_form_no_circle() {
    let circles = ORDERED.iter().map(|name| (*name, circular(edges(name))));
    let circles: Vec<_> = circles.filter(|(_, circular)| !circular.is_empty()).collect();
    assert!(circles.is_empty(), "each of these needs another of its crate: {circles:?}");
}

#[test]
fn edges_between_modules_are_found() {
    let broker = edges("broker");
    assert!(broker["facade"].contains("routing") && broker["routing"].contains("sessions"), "{broker:?}");
    let session = edges("session");
    assert!(session["inbound"].contains("outbound") && session["outbound"].contains("answer"), "{session:?}");
    let grpc = edges("grpc");
    assert!(grpc["lib"].contains("services") && grpc["services"].contains("context"), "{grpc:?}");
}

/// What each module of a crate names of its crate: modules, and the root for what the root itself defines.
fn edges(name: &str) -> BTreeMap<String, BTreeSet<String>> {
    let sources = sources_of(name);
    let folder = format!("crates/{name}/src/");
    let root = sources.iter().find(|source| source.path == format!("{folder}lib.rs")).expect("the root");
    let exports = exports(&root.code);
    let module = |source: &Source| identifier(&source.path[folder.len()..]);
    let modules: BTreeSet<String> = sources.iter().map(module).collect();
    let owner = |name: String| match exports.get(&name) {
        Some(module) => module.clone(),
        None if modules.contains(&name) => name,
        None => "lib".to_owned(),
    };
    let mut edges = BTreeMap::<String, BTreeSet<String>>::new();
    for source in &sources {
        let module = module(source);
        let named = names(source).into_iter().map(owner);
        edges.entry(module.clone()).or_default().extend(named.filter(|name| *name != module));
    }
    // What the root imports for itself.
    let mut imported = BTreeSet::new();
    for (at, _) in root.code.match_indices("\nuse self::") {
        heads(&root.code[at + "\nuse self::".len()..], &mut imported);
    }
    edges.entry("lib".to_owned()).or_default().extend(imported);
    edges
}

/// The modules from which the root of a crate exports names, by name.
fn exports(code: &str) -> BTreeMap<String, String> {
    let mut exports = BTreeMap::new();
    for (at, _) in code.match_indices("use ") {
        let module = identifier(&code[at + "use ".len()..]);
        if module == "self" {
            continue;
        }
        let rest = &code[at + "use ".len() + module.len()..];
        let mut found = BTreeSet::new();
        heads(rest.strip_prefix("::").unwrap_or_default(), &mut found);
        exports.extend(found.into_iter().map(|name| (name, module.clone())));
    }
    exports
}

/// The modules that are left when those are taken away, one after the other, that name none of the rest.
fn circular(mut edges: BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let left: BTreeSet<String> = edges.keys().cloned().collect();
        for named in edges.values_mut() {
            named.retain(|name| left.contains(name));
        }
        edges.retain(|_, named| !named.is_empty());
        if edges.len() == left.len() {
            return edges;
        }
    }
}

#[test]
fn circles_are_found_behind_exports() {
    let found = exports("mod a;\npub use a::{One, Two};\npub(crate) use b::Three;\n");
    let expected = [("One", "a"), ("Three", "b"), ("Two", "a")];
    assert_eq!(found, expected.map(|(name, module)| (name.to_owned(), module.to_owned())).into());
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let edges = [("a", set(&["b"])), ("b", set(&["c", "std"])), ("c", set(&["b"])), ("d", set(&["c"]))];
    let edges = edges.map(|(name, named)| (name.to_owned(), named)).into();
    assert_eq!(circular(edges).into_keys().collect::<BTreeSet<_>>(), set(&["a", "b", "c", "d"]));
    assert!(circular([("a".to_owned(), set(&["b"])), ("b".to_owned(), set(&[]))].into()).is_empty());
}
