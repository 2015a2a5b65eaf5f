//! The repository itself: walls between modules, the list of statements, the Compose file.
#![expect(clippy::print_stderr, reason = "the conformance check explains itself")]

mod compose;
mod layers;
#[path = "../support/mod.rs"]
mod support;
