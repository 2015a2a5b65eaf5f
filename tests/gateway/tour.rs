//! Runs the README's tour: every block fenced as `sh tour`, in order, against a started server.

use std::fs;

use crate::{
    script,
    support::{Server, need, on_path, python, root},
};

#[test]
fn readme_tour_works_as_written() {
    let blocks = script::blocks("README.md", "sh tour");
    assert!(blocks.len() >= 4, "the README has only {} tour blocks", blocks.len());
    if !need("mosquitto_pub and mosquitto_sub", on_path("mosquitto_pub") && on_path("mosquitto_sub")) {
        return;
    }
    let server = Server::start();
    for block in blocks {
        block.run(&server, &[], "");
    }
}

/// What docs/api.md says for Python, with the tools that are there.
#[test]
fn the_python_recipe_of_the_api_page_works_as_written() {
    let [block] = &script::blocks("docs/api.md", "sh recipe")[..] else { panic!("one recipe") };
    let python = python();
    if !need("the Python environment .venv", python.is_some()) {
        return;
    }
    let server = Server::start();
    std::os::unix::fs::symlink(root().join("proto"), server.dir().join("proto")).expect("link the protos");
    block.run(&server, &[], &root().join(".venv/bin").display().to_string());
}

/// The README's start and test commands are the ones that exist.
#[test]
fn readme_names_the_commands() {
    let readme = fs::read_to_string(root().join("README.md")).expect("read README.md");
    assert!(readme.contains("cargo run --release -- --dev"));
    assert!(readme.contains("scripts/test.sh"));
    assert!(root().join("scripts/test.sh").exists());
}
