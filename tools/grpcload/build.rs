//! Compiles the gateway's protos, clients only, without protoc.

use std::error::Error;

const PROTOS: [&str; 5] = [
    "gateway/v1/commands.proto",
    "gateway/v1/groups.proto",
    "gateway/v1/publisher.proto",
    "gateway/v1/shadows.proto",
    "gateway/v1/subscriber.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=../../proto");
    let descriptors = protox::compile(PROTOS, ["../../proto"])?;
    tonic_prost_build::configure()
        .build_server(false)
        .bytes(".")
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)?;
    Ok(())
}
