//! Identity of a connection, kept as long as the connection lasts, so that the connection can be ended for it.

use std::{any::Any, sync::Arc};

use broker::{Account, Charge, CloseReason, ConnectionInfo, MemoryKind};
use edge::tls::CertificateId;

use super::{Method, Principal};

/// Part of an authentication that is kept beside the connection's own [`Permissions`](super::Permissions), where other
/// threads can look at it.
#[derive(Debug)]
pub struct ProvedIdentity {
    /// The proved identity.
    pub principal: Arc<Principal>,
    /// The client certificate that TLS verified, whether or not it decided who this is.
    pub certificate: Option<CertificateId>,
    /// Groups and claims on the memory account; none of a principal that is small.
    _charge: Option<Box<Charge>>,
}

/// Bytes of groups, claims and names that a connection may have uncharged, beside all else that it takes.
const FREE: usize = 256;

/// Memory is too short for groups and claims.
#[derive(Debug)]
pub struct NoIdentityRoom;

impl ProvedIdentity {
    /// Returns the identity as [`ConnectionInfo::identity`] takes it: `None` for an anonymous client without a
    /// certificate, since there is nothing to revoke.
    ///
    /// # Errors
    /// Sessions have used up their share of memory.
    pub fn kept(
        principal: &Arc<Principal>,
        certificate: Option<CertificateId>,
        account: &Arc<Account>,
    ) -> Result<Option<Arc<dyn Any + Send + Sync>>, NoIdentityRoom> {
        if certificate.is_none() && principal.method == Method::Anonymous {
            return Ok(None);
        }
        let bytes = principal.bytes();
        let charge = (bytes > FREE).then(|| {
            let mut charge = Box::new(Charge::new(account, MemoryKind::Sessions));
            charge.set(bytes).then_some(charge).ok_or(NoIdentityRoom)
        });
        let charge = charge
            .transpose()
            .inspect_err(|NoIdentityRoom| broker::counters::count(|c| c.memory_sessions.add(1)))?;
        Ok(Some(Arc::new(Self { principal: Arc::clone(principal), certificate, _charge: charge }) as _))
    }
}

/// Returns the principal of the connection; an anonymous one if the client proved no identity. Not to be asked about a
/// connection of an earlier process, of which nothing is known.
pub fn principal(info: &ConnectionInfo) -> Arc<Principal> {
    let identity = info.identity.as_ref().and_then(|identity| identity.downcast_ref::<ProvedIdentity>());
    identity.map_or_else(Arc::default, |identity| Arc::clone(&identity.principal))
}

/// A device with a connection.
#[derive(Debug, Clone, Copy)]
pub struct Connected<'a> {
    /// Client id.
    pub client_id: &'a str,
    /// Address, listener, user name.
    pub info: &'a ConnectionInfo,
}

impl Connected<'_> {
    /// Returns the proved identity; `None` for an anonymous client without a certificate.
    pub fn identity(&self) -> Option<&ProvedIdentity> {
        self.info.identity.as_ref()?.downcast_ref()
    }
}

/// Decides whether a device may stay connected: by a revocation list, by bans.
///
/// Asked about each new connection, and about all of them after the check has changed (`net::NetShared::evict`). No connection
/// slips through between the two if the check changes first and asks about all then.
pub trait ConnectionCheck: Send + Sync {
    /// Returns the reason to end this connection; `None` if the connection may stay. Neither blocks nor calls the
    /// broker.
    fn verdict(&self, connected: &Connected<'_>) -> Option<CloseReason>;
}
