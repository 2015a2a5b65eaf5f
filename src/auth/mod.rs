//! Who may connect, publish and subscribe. A leaf; rules come with a later version.
//!
//! The seam: net asks [`Authenticator`] once per CONNECT and [`Identity`] travels with the connection.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, LazyLock},
};

use bytes::Bytes;

/// What a client presents.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// Client id.
    pub client_id: String,
    /// User name in CONNECT.
    pub username: Option<String>,
    /// Password in CONNECT. Never logged.
    pub password: Option<Secret>,
    /// DER of the client's certificate, if TLS verified one.
    pub certificate: Option<Vec<u8>>,
    /// Remote address.
    pub peer: String,
}

/// Bytes that do not show in logs.
#[derive(Clone)]
pub struct Secret(pub Bytes);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[redacted]")
    }
}

/// Why a client may not connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// Wrong user name or password (0x86).
    BadCredentials,
    /// Not authorized (0x87).
    NotAuthorized,
}

/// An authenticated party and what it may do.
pub trait Identity: Send + Sync {
    /// May it publish to `topic`?
    fn may_publish(&self, topic: &str) -> bool;
    /// May it subscribe to `filter`?
    fn may_subscribe(&self, filter: &str) -> bool;
}

/// A boxed answer.
pub type Decision = Pin<Box<dyn Future<Output = Result<Arc<dyn Identity>, Denied>> + Send>>;

/// Decides who may connect. Cancel safe: a dropped decision is no decision.
pub trait Authenticator: Send + Sync {
    /// Decides about one CONNECT. The decision is polled on a thread that serves devices, so it must not block; it may
    /// use Tokio's timers, sockets and tasks.
    fn authenticate(&self, credentials: Credentials) -> Decision;
}

/// Everybody may do everything.
#[derive(Debug, Default)]
pub struct AllowAll;

impl Identity for AllowAll {
    fn may_publish(&self, _topic: &str) -> bool {
        true
    }

    fn may_subscribe(&self, _filter: &str) -> bool {
        true
    }
}

impl Authenticator for AllowAll {
    fn authenticate(&self, _credentials: Credentials) -> Decision {
        static EVERYBODY: LazyLock<Arc<AllowAll>> = LazyLock::new(Arc::default);
        let identity: Arc<dyn Identity> = Arc::clone(&*EVERYBODY) as Arc<dyn Identity>;
        Box::pin(std::future::ready(Ok(identity)))
    }
}
