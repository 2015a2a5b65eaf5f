//! The real server as a child process, seen from outside: by clients of our own that do only what a test says, by
//! third-party ones (`interop`), and by whoever starts it, stops it and looks after its data.
#![expect(clippy::print_stderr, reason = "what was left out, and what scripts print, belongs to the output")]

mod bans;
mod bridges;
mod browser;
mod certificates;
#[path = "../support/client.rs"]
mod client;
mod clients;
mod ctl;
mod damage;
mod delivery;
mod doors;
mod durable;
mod earlier_build;
mod enhanced;
mod groups_restart;
mod guides;
mod hooks;
mod hostile_ends;
mod http_api;
mod https;
mod import;
mod import_compared;
mod interop;
mod jwks;
mod limits;
mod listeners;
mod login;
mod login_storm;
mod malformed;
mod matrix;
mod memory;
mod metrics;
mod non_broker;
mod observability;
mod provider;
mod quic;
mod quotas;
mod restart;
mod rpcs;
mod rules;
mod rules_tool;
mod rules_waiting;
#[path = "../support/tour.rs"]
mod script;
mod shadows;
mod start;
mod store_tool;
mod supervisor;
#[path = "../support/mod.rs"]
mod support;
mod tour;
mod websocket;
mod wire;
