//! The part of a peer's certificate that is kept for as long as the peer is connected.

use std::fmt::{self, Write as _};

use rustls::crypto::{aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256, hash::Hash};
use x509_parser::{certificate::X509Certificate, prelude::FromDer as _};

/// Names one certificate, in well under a tenth of its bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct CertificateId {
    issuer: IssuerId,
    serial: Box<[u8]>,
    /// SHA-256 of its DER.
    fingerprint: [u8; 32],
    /// Of its subject.
    common_name: Option<Box<str>>,
}

/// Half a SHA-256 of an issuer's name. The names are those of authorities that the gateway trusts, which do not look for
/// two with one half.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct IssuerId([u8; 16]);

impl CertificateId {
    /// Of a certificate that TLS has verified; `None` if it does not parse, which is not to be expected then.
    pub fn of(der: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        Some(Self {
            issuer: IssuerId::of(certificate.issuer().as_raw()),
            serial: serial(certificate.raw_serial()),
            fingerprint: sha256(der),
            common_name: (certificate.subject().iter_common_name().next())
                .and_then(|name| name.as_str().ok())
                .map(Box::from),
        })
    }

    /// SHA-256 of its DER.
    pub fn fingerprint(&self) -> &[u8; 32] {
        &self.fingerprint
    }

    /// The common name of its subject.
    pub fn common_name(&self) -> Option<&str> {
        self.common_name.as_deref()
    }

    pub(super) fn issuer(&self) -> IssuerId {
        self.issuer
    }

    pub(super) fn serial(&self) -> &[u8] {
        &self.serial
    }
}

impl fmt::Debug for CertificateId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.fingerprint))
    }
}

impl IssuerId {
    /// Of a name in DER.
    pub(super) fn of(name: &[u8]) -> Self {
        let mut half = [0; 16];
        half.copy_from_slice(&sha256(name)[..16]);
        Self(half)
    }
}

/// A serial number without the zeros before it, which DER adds and removes.
pub(super) fn serial(raw: &[u8]) -> Box<[u8]> {
    let zeros = raw.iter().take_while(|byte| **byte == 0).count();
    raw[zeros..].into()
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut digest = [0; 32];
    if let Some(suite) = TLS13_AES_128_GCM_SHA256.tls13() {
        let hash: &dyn Hash = suite.common.hash_provider;
        digest.copy_from_slice(hash.hash(bytes).as_ref());
    }
    digest
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_sha_256() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(hex(&sha256(b"")), empty);
    }

    #[test]
    fn serial_numbers_are_equal_whatever_zeros_stand_before_them() {
        assert_eq!(serial(&[0, 0x80, 1]), serial(&[0x80, 1]));
        assert!(serial(&[0]).is_empty());
        assert_eq!(*serial(&[0x7F, 0]), [0x7F, 0]);
    }
}
