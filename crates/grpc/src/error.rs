//! Why the gRPC server cannot run.

use store::StoreError;
use thiserror::Error;

/// Why the gRPC server stopped.
#[derive(Debug, Error)]
pub enum GrpcError {
    /// The records of the Publisher cannot be read.
    #[error("read what the publisher remembers")]
    Store(#[from] StoreError),
    /// Serving failed.
    #[error("serve grpc")]
    Serve(#[from] tonic::transport::Error),
    /// The descriptors for reflection are not usable.
    #[error("set up grpc reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
}
