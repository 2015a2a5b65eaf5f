//! Compiles the service of users that the gateway calls, without protoc. It is not among the descriptors of the API, since reflection
//! tells what the gateway serves.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto/gateway/hooks");
    tonic_prost_build::configure()
        .bytes(".")
        // The same question is the same bytes.
        .btree_map(".")
        .emit_rerun_if_changed(false)
        .extern_path(".gateway.v1", "::gateway_api::gateway::v1")
        .compile_fds(protox::compile(["gateway/hooks/v1/hooks.proto"], ["proto"])?)?;
    Ok(())
}
