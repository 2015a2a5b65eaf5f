//! Faults in a certificate's fields for which clients' TLS libraries refuse it.

use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustls::pki_types::CertificateDer;
use x509_parser::{
    certificate::X509Certificate,
    extensions::GeneralName,
    prelude::{FromDer as _, X509Version},
};

use super::TlsError;

const DAY: i64 = 24 * 3600;

/// The certificate of one use: when its chain is valid, and whether it has names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// Seconds since 1970: the latest begin in the chain.
    from: i64,
    /// The earliest end in the chain.
    until: i64,
    /// True if the server's own certificate has a subjectAltName.
    pub(super) named: bool,
    /// The DNS names in it.
    pub(super) names: Vec<String>,
    /// Description of the misplaced certificate.
    pub(super) disorder: Option<String>,
}

/// Stage of the validity at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum InspectionStage {
    Fine,
    Month,
    Week,
    Day,
    /// Over, or not begun.
    Out,
}

/// Reads a chain, the server's own certificate first.
///
/// # Errors
/// One of them is not a certificate, or the first is of version 1.
pub(super) fn inspect(path: &Path, chain: &[CertificateDer<'_>]) -> Result<Facts, TlsError> {
    let mut facts =
        Facts { from: i64::MIN, until: i64::MAX, named: false, names: Vec::new(), disorder: None };
    let mut certificates = Vec::with_capacity(chain.len());
    for (number, der) in chain.iter().enumerate() {
        let (_, certificate) = X509Certificate::from_der(der)
            .map_err(|error| TlsError::BadCertificate { path: path.to_owned(), detail: error.to_string() })?;
        if number == 0 {
            if certificate.version() != X509Version::V3 {
                return Err(TlsError::OldVersion(path.to_owned()));
            }
            if let Ok(Some(extension)) = certificate.subject_alternative_name() {
                facts.named = true;
                let names = extension.value.general_names.iter().filter_map(|name| match name {
                    GeneralName::DNSName(name) => Some((*name).to_owned()),
                    _ => None,
                });
                facts.names.extend(names);
            }
        }
        let validity = certificate.validity();
        facts.from = facts.from.max(validity.not_before.timestamp());
        facts.until = facts.until.min(validity.not_after.timestamp());
        certificates.push(certificate);
    }
    facts.disorder = disorder(&certificates);
    Ok(facts)
}

/// Describes the misplaced certificate of a chain, if the signer of one certificate is not the next in the chain but
/// somewhere else. A missing signer is no matter: the root is often left out.
fn disorder(chain: &[X509Certificate<'_>]) -> Option<String> {
    let mut at = 0;
    let is_by = |at: usize, issuer: &X509Certificate<'_>| {
        chain.get(at).is_some_and(|one| one.issuer().as_raw() == issuer.subject().as_raw())
    };
    while chain.get(at + 1).is_some_and(|next| is_by(at, next)) {
        at += 1;
    }
    let place = chain.iter().skip(at + 1).position(|later| is_by(at, later))?;
    Some(format!("number {} signed number {}", at + 1 + place + 1, at + 1))
}

impl Facts {
    /// Seconds since 1970: the latest begin in the chain, and the earliest end.
    pub(super) fn validity(&self) -> (i64, i64) {
        (self.from, self.until)
    }

    /// Days until the end, below zero after it.
    pub(super) fn days_left(&self, now: SystemTime) -> f64 {
        (self.until - seconds(now)) as f64 / DAY as f64
    }

    pub(super) fn stage(&self, now: SystemTime) -> InspectionStage {
        let now = seconds(now);
        match self.until - now {
            _ if now < self.from => InspectionStage::Out,
            left if left < 0 => InspectionStage::Out,
            left if left <= DAY => InspectionStage::Day,
            left if left <= 7 * DAY => InspectionStage::Week,
            left if left <= 30 * DAY => InspectionStage::Month,
            _ => InspectionStage::Fine,
        }
    }

    /// Checks that clients accept the certificate at `now`.
    ///
    /// # Errors
    /// The certificate has expired, or is not valid yet.
    pub(super) fn check_dates(&self, path: &Path, now: SystemTime) -> Result<(), TlsError> {
        let path = path.to_owned();
        match seconds(now) {
            now if now < self.from => Err(TlsError::NotYetValid { path, from: date(self.from) }),
            now if now > self.until => Err(TlsError::Expired { path, until: date(self.until) }),
            _ => Ok(()),
        }
    }

    /// The day of the end.
    pub(super) fn until(&self) -> String {
        date(self.until)
    }
}

fn seconds(at: SystemTime) -> i64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// The day, as 2026-11-22.
fn date(seconds: i64) -> String {
    match x509_parser::time::ASN1Time::from_timestamp(seconds) {
        Ok(time) => time.to_datetime().date().to_string(),
        Err(_) => seconds.to_string(),
    }
}
