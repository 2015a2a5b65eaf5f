//! Compiles the protos without protoc: the traits of the services, over the messages of crate `mqtt-gateway-api`. Most streams
//! answer with bytes that are encoded already (`RawMessage`) instead of generated structs.

use std::error::Error;

include!("../api/protos.rs");

/// Response messages that the gateway encodes itself: by hand, or before they wait for their reader.
const RAW: [&str; 8] = [
    ".gateway.v1.SubscribeResponse",
    ".gateway.v1.WatchLatestResponse",
    ".gateway.v1.WatchEventsResponse",
    ".gateway.v1.WatchShadowResponse",
    ".gateway.v1.WatchCommandResponse",
    ".gateway.v1.TracePacketsResponse",
    ".gateway.v1.ConsumeResponse",
    ".rpcserver.PublishedPacket",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let mut servers = tonic_prost_build::configure()
        .build_client(false)
        .emit_rerun_if_changed(false)
        .extern_path(".gateway.v1", "::gateway_api::gateway::v1")
        .extern_path(".rpcserver", "::gateway_api::rpcserver");
    for message in RAW {
        servers = servers.extern_path(message, "crate::stream::RawMessage");
    }
    servers.compile_fds(protox::compile(PROTOS, ["proto"])?)?;
    Ok(())
}
