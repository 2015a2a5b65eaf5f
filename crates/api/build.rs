//! Compiles the protos without protoc: messages, clients, and the descriptors of both packages.

use std::{env, error::Error, fs, path::PathBuf};

use protox::prost::Message as _;

const PROTOS: [&str; 12] = [
    "gateway/v1/common.proto",
    "gateway/v1/publisher.proto",
    "gateway/v1/subscriber.proto",
    "gateway/v1/state.proto",
    "gateway/v1/devices.proto",
    "gateway/v1/events.proto",
    "gateway/v1/groups.proto",
    "gateway/v1/commands.proto",
    "gateway/v1/security.proto",
    "gateway/v1/shadows.proto",
    "gateway/v1/operations.proto",
    "rpcserver/rpcserver.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    let mut names = prost_build::Config::new();
    names.enable_type_names();
    tonic_prost_build::configure()
        .build_server(false)
        .bytes(".")
        .emit_rerun_if_changed(false)
        .compile_fds_with_config(descriptors, names)?;
    Ok(())
}
