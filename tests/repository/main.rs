//! The repository itself: walls between modules, sizes of crates, the list of statements, the Compose file, the book of
//! the documentation, and the files that are made of others.
#![expect(clippy::print_stderr, reason = "the conformance check explains itself")]

mod book;
mod compose;
mod configuration;
mod crates;
mod house;
mod layers;
mod logs;
mod metrics;
mod observability;
mod packages;
#[path = "../support/mod.rs"]
mod support;

/// A YAML file of the repository as JSON, read by a YAML parser; none if that is missing and may be.
fn yaml(path: &str) -> Option<serde_json::Value> {
    let python = support::python();
    if !support::need("the Python environment .venv", python.is_some()) {
        return None;
    }
    let mut command = std::process::Command::new(python?);
    command.args(["-c", "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1])), sys.stdout)"]);
    command.arg(support::root().join(path));
    let (success, output) = support::run(&mut command, std::time::Duration::from_secs(60));
    assert!(success, "{path} cannot be read: {output}");
    Some(serde_json::from_str(&output).expect("JSON of Python"))
}
