//! Compiles the protos without protoc: messages and clients once, then the servers, whose two hot streams
//! answer with pre-encoded bytes (`RawMessage`) instead of generated structs.

use std::{env, error::Error, fs, path::PathBuf, process::Command};

use protox::prost::Message as _;

const PROTOS: [&str; 7] = [
    "gateway/v1/common.proto",
    "gateway/v1/publisher.proto",
    "gateway/v1/subscriber.proto",
    "gateway/v1/state.proto",
    "gateway/v1/devices.proto",
    "gateway/v1/events.proto",
    "rpcserver/rpcserver.proto",
];

/// Response messages that the gateway encodes by hand.
const RAW: [&str; 3] =
    [".gateway.v1.SubscribeResponse", ".gateway.v1.WatchLatestResponse", ".rpcserver.PublishedPacket"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;

    tonic_prost_build::configure()
        .build_server(false)
        .bytes(".")
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors.clone())?;

    let server = out.join("server");
    fs::create_dir_all(&server)?;
    let mut builder = tonic_prost_build::configure()
        .build_client(false)
        .emit_rerun_if_changed(false)
        .out_dir(&server)
        .extern_path(".gateway.v1", "crate::grpc::proto::gateway::v1")
        .extern_path(".rpcserver", "crate::grpc::proto::rpcserver");
    for message in RAW {
        builder = builder.extern_path(message, "crate::grpc::stream::RawMessage");
    }
    builder.compile_fds(descriptors)?;
    emit_commit();
    Ok(())
}

/// `--version` shows the commit where the build is made from a git checkout.
fn emit_commit() {
    println!("cargo:rerun-if-changed=.git/HEAD");
    let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    let Some(commit) = output.ok().filter(|output| output.status.success()) else { return };
    println!("cargo:rustc-env=GIT_COMMIT={}", String::from_utf8_lossy(&commit.stdout).trim());
}
