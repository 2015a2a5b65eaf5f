//! Generated code: messages and clients from one pass, server traits from another (see build.rs).

/// The encoded file descriptors of all our services, for reflection.
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

/// Server traits of `gateway.v1`.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::use_self,
    unused_qualifications,
    unreachable_pub,
    reason = "generated"
)]
pub(super) mod server {
    include!(concat!(env!("OUT_DIR"), "/server/gateway.v1.rs"));
}

/// Server traits of `rpcserver`.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::use_self,
    unused_qualifications,
    unreachable_pub,
    reason = "generated"
)]
pub(super) mod precedent_server {
    include!(concat!(env!("OUT_DIR"), "/server/rpcserver.rs"));
}
