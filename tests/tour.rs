//! Runs the README's tour: every block fenced as `sh tour`, in order, against a started server.

mod support;
#[path = "support/tour.rs"]
mod tour;

use std::fs;

use support::{Server, need, on_path, root};

#[test]
fn readme_tour_works_as_written() {
    let blocks = tour::blocks("sh tour");
    assert!(blocks.len() >= 4, "the README has only {} tour blocks", blocks.len());
    if !need("mosquitto_pub and mosquitto_sub", on_path("mosquitto_pub") && on_path("mosquitto_sub")) {
        return;
    }
    let server = Server::start();
    for block in blocks {
        block.run(&server, &[], "");
    }
}

/// The README's start and test commands are the ones that exist.
#[test]
fn readme_names_the_commands() {
    let readme = fs::read_to_string(root().join("README.md")).expect("read README.md");
    assert!(readme.contains("cargo run --release -- --dev"));
    assert!(readme.contains("scripts/test.sh"));
    assert!(root().join("scripts/test.sh").exists());
}
