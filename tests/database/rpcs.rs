//! RPCs that need a database, as a backend in Python sees them: the rows of tests/interop/rpcs/database.json. All others are
//! walked by tests/gateway/rpcs.rs.

use std::{fs, process::Command, time::Duration};

use prost::Message as _;
use prost_types::FileDescriptorSet;
use serde_json::json;

use crate::{
    cassandra,
    gateway::Gateway,
    history::{self, RULE},
    support::{need, python, root, run},
    tables::Tables,
};

/// Only a failing test takes so long.
const LIMIT: Duration = Duration::from_secs(240);

#[test]
fn grpcio_reads_history_as_the_table_says() {
    let Some(cassandra) = cassandra::shared() else { return };
    let python = python();
    if !need("the Python environment .venv", python.is_some()) {
        return;
    }
    let tables = Tables::open(&cassandra.address, None);
    let gateway = Gateway::start(&cassandra.address, &tables, RULE);
    history::publish(&gateway, 0..3);
    history::is_written(&gateway);

    let dir = tempfile::tempdir().expect("a directory");
    let mut files = FileDescriptorSet::default();
    for set in [mqtt_server::proto::DESCRIPTORS, tonic_types::pb::FILE_DESCRIPTOR_SET] {
        for found in FileDescriptorSet::decode(set).expect("descriptors").file {
            if !files.file.iter().any(|known| known.name == found.name) {
                files.file.push(found);
            }
        }
    }
    let (descriptors, world) = (dir.path().join("descriptors"), dir.path().join("world"));
    fs::write(&descriptors, files.encode_to_vec()).expect("write descriptors");
    let server = &gateway.server;
    let history = json!({ "grpc": server.ports.grpc, "pid": server.pid(), "ca": server.ca() });
    let text = json!({ "gateways": { "history": history }, "tokens": {}, "descriptors": descriptors });
    fs::write(&world, text.to_string()).expect("write the world");

    let folder = root().join("tests/interop/rpcs");
    let mut command = Command::new(python.unwrap_or_default());
    command.arg(folder.join("walk.py")).arg(folder.join("database.json")).arg(world);
    let (success, output) = run(command.env("PYTHONDONTWRITEBYTECODE", "1"), LIMIT);
    assert!(success, "{output}");
}
