//! Certificates that are revoked now: for connections that were there before the list named them.
//!
//! New handshakes are rustls's business, which has the lists in its own form and verifies their signatures.

use std::{collections::HashSet, path::Path, sync::Arc};

use arc_swap::ArcSwap;
use rustls::pki_types::CertificateRevocationListDer;
use tokio::sync::watch;
use x509_parser::{prelude::FromDer as _, revocation_list::CertificateRevocationList};

use super::{
    CertificateId, TlsError,
    certificate_id::{IssuerId, serial},
};

/// Issuers and serial numbers of revoked certificates.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Revoked(HashSet<(IssuerId, Box<[u8]>)>);

impl Revoked {
    /// All that `lists`, which are from `path`, have.
    ///
    /// # Errors
    /// One of them is not a list.
    pub(super) fn of(path: &Path, lists: &[CertificateRevocationListDer<'_>]) -> Result<Self, TlsError> {
        let mut revoked = HashSet::new();
        for der in lists {
            let (_, list) = CertificateRevocationList::from_der(der)
                .map_err(|error| TlsError::BadCrl { path: path.to_owned(), detail: error.to_string() })?;
            let issuer = IssuerId::of(list.issuer().as_raw());
            revoked
                .extend(list.iter_revoked_certificates().map(|entry| (issuer, serial(entry.raw_serial()))));
        }
        Ok(Self(revoked))
    }
}

/// Content of the revocation lists of one TLS use, as of their last reload.
#[derive(Debug)]
pub struct Revocations {
    revoked: ArcSwap<Revoked>,
    /// All uses of one store share it.
    changed: watch::Sender<()>,
}

impl Revocations {
    pub(super) fn new(revoked: Revoked, changed: watch::Sender<()>) -> Self {
        Self { revoked: ArcSwap::from_pointee(revoked), changed }
    }

    /// Takes another list, and tells those who wait if it says something else.
    pub(super) fn replace(&self, revoked: Revoked) {
        if **self.revoked.load() != revoked {
            self.revoked.store(Arc::new(revoked));
            self.changed.send_replace(());
        }
    }

    /// Returns whether this certificate is revoked.
    pub fn has(&self, certificate: &CertificateId) -> bool {
        self.revoked.load().0.contains(&(certificate.issuer(), certificate.serial().into()))
    }

    /// Waits until this certificate is revoked. Cancel safe.
    pub async fn until_revoked(&self, certificate: &CertificateId) {
        let mut changed = self.changed.subscribe();
        while !self.has(certificate) {
            // The sender is ours: it is not gone before.
            let _ = changed.changed().await;
        }
    }
}
