//! The gateway's gRPC API as Rust sees it: messages and clients, generated from the protos at the root of the repository.
//!
//! The gateway answers with these messages, its command line and the Rust client call with these clients. What implements
//! the services is the gateway's own and generated there.

#[cfg(feature = "json")]
pub mod json;

/// The encoded file descriptors of all services, as reflection shows them.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Package `gateway`.
pub mod gateway {
    /// Package `gateway.v1`: messages and clients.
    #[allow(
        clippy::all,
        clippy::allow_attributes_without_reason,
        clippy::use_self,
        unused_qualifications,
        unreachable_pub,
        reason = "generated"
    )]
    pub mod v1 {
        tonic::include_proto!("gateway.v1");
    }
}

/// Package `rpcserver`: messages and clients of the precedent.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::use_self,
    unused_qualifications,
    unreachable_pub,
    reason = "generated"
)]
pub mod rpcserver {
    tonic::include_proto!("rpcserver");
}
