//! The picture of the crates in docs/dev/architecture.md, made of the manifests. `MQTT_SERVER_TEST_WRITE=1 cargo test --test
//! repository crates` writes it anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use crate::support::root;

const PAGE: &str = "docs/dev/architecture.md";
const BEGIN: &str = "<!-- made of the manifests: crates -->\n";
const END: &str = "<!-- end of what is made -->\n";

/// The crates of the workspace by name, each with those that its manifest names.
type Crates = BTreeMap<String, BTreeSet<String>>;

fn crates() -> Crates {
    let mut manifests = vec![root().join("Cargo.toml"), root().join("clients/rust/Cargo.toml")];
    let folders = fs::read_dir(root().join("crates")).expect("list crates/");
    manifests.extend(folders.map(|folder| folder.expect("a folder").path().join("Cargo.toml")));
    let texts: Vec<String> =
        manifests.iter().map(|path| fs::read_to_string(path).expect("read a manifest")).collect();
    let name = |text: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix("name = \"")).expect("the name of a crate");
        line.trim_end_matches('"').to_owned()
    };
    let known: BTreeSet<String> = texts.iter().map(|text| name(text)).collect();
    texts.iter().map(|text| (name(text), &dependencies(text) & &known)).collect()
}

/// Names in the section of what a crate needs to run. The crate of the API has another in manifests than on the page of its
/// registry.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let section = manifest.lines().skip_while(|line| *line != "[dependencies]").skip(1);
    let names = section
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| line.split_once([' ', '.']))
        .map(|(name, _)| name.replace("gateway-api", "mqtt-gateway-api"));
    names.collect()
}

/// All that a crate can name, over others.
fn reached<'a>(crates: &'a Crates, from: &str, found: &mut BTreeSet<&'a str>) {
    for next in &crates[from] {
        if found.insert(next) {
            reached(crates, next, found);
        }
    }
}

/// A dependency is an arrow, unless another way leads there.
fn picture(crates: &Crates) -> String {
    let mut text = "```mermaid\nflowchart TD\n".to_owned();
    for (name, below) in crates {
        for to in below {
            let mut others = BTreeSet::new();
            for other in below.iter().filter(|other| *other != to) {
                reached(crates, other, &mut others);
            }
            if !others.contains(to.as_str()) {
                text += &format!("  {name} --> {to}\n");
            }
        }
    }
    text + "```\n"
}

#[test]
fn the_picture_of_the_crates_is_what_the_manifests_say() {
    let path = root().join(PAGE);
    let page = fs::read_to_string(&path).expect("read the page");
    let (before, rest) = page.split_once(BEGIN).expect("the begin of the picture");
    let (shown, after) = rest.split_once(END).expect("the end of the picture");
    let crates = crates();
    assert!(crates.len() > 20 && crates["codec"].contains("gateway-core"), "{crates:?}");
    let made = picture(&crates);
    if std::env::var_os("MQTT_SERVER_TEST_WRITE").is_some() {
        fs::write(&path, [before, BEGIN, &made, END, after].concat()).expect("write the page");
        return;
    }
    assert_eq!(shown, made, "{PAGE} is stale: MQTT_SERVER_TEST_WRITE=1 cargo test --test repository crates");
}

#[test]
fn a_picture_leaves_out_what_another_way_shows() {
    let crates: Crates = [("a", vec!["b", "c"]), ("b", vec!["c"]), ("c", vec![])]
        .map(|(name, below)| (name.to_owned(), below.into_iter().map(str::to_owned).collect()))
        .into();
    assert_eq!(picture(&crates), "```mermaid\nflowchart TD\n  a --> b\n  b --> c\n```\n");
}
