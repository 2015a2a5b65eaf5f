//! Authentication and permissions: decides who may connect, publish and subscribe.
//!
//! The seam: net asks [`Authenticator`] once per CONNECT, and later asks the connection's permissions about its rights.
//! The `[auth]` section configures a chain of steps. A program that embeds the gateway may give an [`Authenticator`]
//! and an [`Authorizer`] of its own.
//!
//! Circles by intent: `remote` has the answer and the guard that its kinds of services share, and the turns of the login queue are
//! ranked by its last logins.

pub mod abuse;
mod asked;
mod authorizer;
pub mod backends;
mod certificate;
mod chain;
pub mod counters;
mod enhanced;
mod hashing;
mod identity;
mod login_queue;
mod passwords;
mod permissions;
mod permits;
mod proofs;
mod remembered;
mod remote;
mod rules;
mod tokens;

/// Generated code: the service that users implement and the gateway calls.
pub mod hooks {
    /// Package `gateway.hooks.v1`: messages, client, and the trait to implement.
    #[allow(
        clippy::all,
        clippy::allow_attributes_without_reason,
        clippy::use_self,
        missing_docs,
        unused_qualifications,
        unreachable_pub,
        reason = "generated"
    )]
    pub mod v1 {
        tonic::include_proto!("gateway.hooks.v1");
    }
}

use std::{
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, LazyLock},
};

use bytes::Bytes;
use edge::door::SourceAddress;

pub use access::{Method, Principal, Subject};
pub(crate) use asked::Asked;
pub use authorizer::{Authorizer, RuleGrant, Subscribing};
pub use chain::{Chain, ChainError, check_files};
pub use identity::{Connected, ConnectionCheck, ProvedIdentity, principal};
pub use permissions::{Permissions, grant_held};
pub use permits::{ClientRights, ConnectionPermits, SubscribePermit};
pub(crate) use remembered::Remembered;
pub use remote::{AuthorizationRequest, EventSender, NoDecision, RemoteAuthorizer};
pub use rules::{Authority, open_rules};

/// Credentials that a client presents.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// Client id.
    pub client_id: String,
    /// User name in CONNECT.
    pub username: Option<String>,
    /// Password in CONNECT. Never logged.
    pub password: Option<SecretBytes>,
    /// DER of the client's certificate, if TLS verified one.
    pub certificate: Option<Vec<u8>>,
    /// Remote address.
    pub peer: String,
    /// Name of the listener.
    pub listener: Arc<String>,
}

impl Credentials {
    /// Bytes that a client has chosen.
    pub fn bytes(&self) -> usize {
        self.client_id.len()
            + self.username.as_ref().map_or(0, String::len)
            + self.password.as_ref().map_or(0, |password| password.0.len())
            + self.certificate.as_ref().map_or(0, Vec::len)
    }

    /// The remote address, unless it is that of a Unix socket.
    fn address(&self) -> Option<SourceAddress> {
        self.peer.parse::<SocketAddr>().ok().map(SourceAddress::from)
    }
}

/// Bytes that do not show in logs.
#[derive(Clone)]
pub struct SecretBytes(pub Bytes);

impl std::fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[redacted]")
    }
}

/// Reason for which a client may not connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// Wrong user name or password (0x86).
    BadCredentials,
    /// Not authorized (0x87).
    NotAuthorized,
    /// The client id is not one that this device may have (0x85).
    ClientId,
    /// The deciding service has too much to do (0x89).
    Busy,
    /// The deciding service is away (0x88).
    Unavailable,
}

/// A boxed answer.
pub type Decision = Pin<Box<dyn Future<Output = Result<Arc<Principal>, Denied>> + Send>>;

/// Decides who may connect. Cancel safe: a dropped decision is no decision.
pub trait Authenticator: Send + Sync {
    /// Decides about one CONNECT. The decision is polled on a thread that serves devices, so it must not block; it may
    /// use Tokio's timers, sockets and tasks.
    fn authenticate(&self, credentials: Credentials) -> Decision;

    /// Bytes that a decision about these credentials may hold until it is made, with the credentials themselves. They are on the
    /// memory account, and a client for whom there is no room is not let in.
    fn footprint(&self, credentials: &Credentials) -> usize {
        2 * credentials.bytes()
    }

    /// Begins the enhanced authentication of MQTT 5 by `method`, for a CONNECT or on a live connection, which has no user name
    /// and password then. `None` for a method that is not offered, as all are not if this is not written: the client is told
    /// so (0x8C). Is called as [`Self::authenticate`] is, and must not block either.
    fn begin(&self, method: &str, credentials: Credentials) -> Option<Box<dyn Dialogue>> {
        let _ = (method, credentials);
        None
    }
}

/// Reply of an enhanced authentication to the client's data.
#[derive(Debug)]
pub enum AuthProgress {
    /// The client has to answer this.
    Challenge(Bytes),
    /// This is who it is; the data that tells the client so, if the method has any.
    Proved(Arc<Principal>, Option<Bytes>),
}

impl AuthProgress {
    /// So many times the Authentication Data that has come may be held in an authentication: as it came, as it was
    /// understood, and in what is signed.
    pub const FOOTPRINT: usize = 6;
}

/// A boxed answer in an enhanced authentication.
pub type Answering = Pin<Box<dyn Future<Output = Result<AuthProgress, Denied>> + Send>>;

/// One enhanced authentication. Its packets are counted and its time is limited by the gateway.
pub trait Dialogue: Send {
    /// Looks at the Authentication Data that has come; none is empty. Is not called again before it has answered, nor after
    /// anything but a challenge. Polled as a [`Decision`] is. Cancel safe: a dialogue that ends early has proved nothing.
    fn answer(&mut self, data: Bytes) -> Answering;
}

/// Everybody may connect, as an anonymous client.
#[derive(Debug, Default)]
pub struct AllowAll;

impl Authenticator for AllowAll {
    fn authenticate(&self, _credentials: Credentials) -> Decision {
        static ANYBODY: LazyLock<Arc<Principal>> = LazyLock::new(Arc::default);
        Box::pin(std::future::ready(Ok(Arc::clone(&*ANYBODY))))
    }
}
