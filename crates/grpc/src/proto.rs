//! The messages of crate `mqtt-gateway-api`, and the traits of the services, generated here (see build.rs).

pub use gateway_api::{DESCRIPTORS, gateway, rpcserver};

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
    include!(concat!(env!("OUT_DIR"), "/gateway.v1.rs"));
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
    include!(concat!(env!("OUT_DIR"), "/rpcserver.rs"));
}
