//! `[tls]`, and what each TLS use makes of it.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{Config, Listener, address::optional};

/// Oldest TLS version accepted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
pub enum TlsVersion {
    /// TLS 1.2.
    #[default]
    #[serde(rename = "1.2")]
    V12,
    /// TLS 1.3.
    #[serde(rename = "1.3")]
    V13,
}

/// A cipher suite by its IANA name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[expect(missing_docs, non_camel_case_types, reason = "the names are IANA's")]
pub enum CipherSuite {
    TLS_AES_128_GCM_SHA256,
    TLS_AES_256_GCM_SHA384,
    TLS_CHACHA20_POLY1305_SHA256,
    TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
    TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
    TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
}

impl CipherSuite {
    pub(super) fn is_tls13(self) -> bool {
        matches!(
            self,
            Self::TLS_AES_128_GCM_SHA256 | Self::TLS_AES_256_GCM_SHA384 | Self::TLS_CHACHA20_POLY1305_SHA256
        )
    }
}

/// A certificate chain and its key.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CertificatePair {
    /// Certificate chain, PEM, the server's own first.
    pub cert: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
}

impl CertificatePair {
    /// Returns the place of the OCSP response for the server's own certificate: the certificate's file with `.ocsp`
    /// behind its name.
    pub fn ocsp(&self) -> PathBuf {
        ocsp_of(&self.cert)
    }
}

/// Returns the place of the OCSP response for a certificate.
pub fn ocsp_of(cert: &Path) -> PathBuf {
    let mut name = OsString::from(cert);
    name.push(".ocsp");
    name.into()
}

/// `[tls]`: what all TLS listeners for devices share; `client_ca` and `require_client_cert` do not apply to gRPC.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tls {
    /// CA of client certificates, PEM.
    #[serde(with = "optional")]
    pub client_ca: Option<PathBuf>,
    /// Refuse clients without a certificate.
    pub require_client_cert: bool,
    /// Certificate revocation lists for client certificates, PEM.
    #[serde(with = "optional")]
    pub crl: Option<PathBuf>,
    /// Oldest version accepted.
    pub min_version: TlsVersion,
    /// Suites offered; none is all that are known.
    pub ciphersuites: Vec<CipherSuite>,
    /// Further pairs, shown to clients that ask for a DNS name in them.
    pub certificates: Vec<CertificatePair>,
    /// Take private keys that others than their owner may read.
    pub open_key_files: bool,
}

/// The files and rules of one TLS use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
    /// Further pairs, by the name that a client asks for.
    pub certificates: Vec<CertificatePair>,
    /// CA of client certificates; without it clients are not asked.
    pub client_ca: Option<PathBuf>,
    /// True if a client must bring one.
    pub require_client_cert: bool,
    /// Revocation lists for client certificates.
    pub crl: Option<PathBuf>,
    /// Oldest version accepted.
    pub min_version: TlsVersion,
    /// Suites offered; none is all.
    pub ciphersuites: Vec<CipherSuite>,
    /// True if private keys may be readable by others than their owner.
    pub open_key_files: bool,
}

impl TlsFiles {
    /// Every pair, that for clients without a name or with an unknown one first.
    pub fn pairs(&self) -> impl Iterator<Item = CertificatePair> + '_ {
        let first = CertificatePair { cert: self.cert.clone(), key: self.key.clone() };
        std::iter::once(first).chain(self.certificates.iter().cloned())
    }

    /// Every file that is read if it is there.
    pub fn all(&self) -> Vec<PathBuf> {
        let pairs = self.pairs().flat_map(|pair| [pair.ocsp(), pair.cert, pair.key]);
        pairs.chain(self.client_ca.clone()).chain(self.crl.clone()).collect()
    }
}

impl Config {
    /// The TLS files of a listener, whatever its kind.
    pub fn listener_tls(&self, listener: &Listener) -> TlsFiles {
        let (cert, key) = self.pair(listener.cert.as_ref(), listener.key.as_ref());
        TlsFiles {
            certificates: match &listener.certificates {
                none if none.is_empty() => self.tls.certificates.clone(),
                own => own.clone(),
            },
            client_ca: listener.client_ca.clone().or_else(|| self.tls.client_ca.clone()),
            require_client_cert: listener.require_client_cert || self.tls.require_client_cert,
            ..self.tls_files(cert, key)
        }
    }

    /// The TLS files of gRPC; `None` if it is plaintext.
    pub fn grpc_tls(&self) -> Option<TlsFiles> {
        let (cert, key) = self.pair(self.grpc.cert.as_ref(), self.grpc.key.as_ref());
        self.grpc.tls.then(|| TlsFiles {
            certificates: self.tls.certificates.clone(),
            client_ca: self.grpc.client_ca.clone(),
            require_client_cert: self.grpc.require_client_cert,
            ..self.tls_files(cert, key)
        })
    }

    /// The TLS files of HTTP; `None` if it is plaintext or off.
    pub fn http_tls(&self) -> Option<TlsFiles> {
        let (cert, key) = self.pair(self.http.cert.as_ref(), self.http.key.as_ref());
        (self.http.enabled && self.http.tls).then(|| TlsFiles {
            certificates: self.tls.certificates.clone(),
            // Nobody is asked for a certificate that could be on it.
            crl: None,
            ..self.tls_files(cert, key)
        })
    }

    /// Returns the files and options that every use takes from `[tls]`.
    fn tls_files(&self, cert: PathBuf, key: PathBuf) -> TlsFiles {
        TlsFiles {
            cert,
            key,
            certificates: Vec::new(),
            client_ca: None,
            require_client_cert: false,
            crl: self.tls.crl.clone(),
            min_version: self.tls.min_version,
            ciphersuites: self.tls.ciphersuites.clone(),
            open_key_files: self.tls.open_key_files,
        }
    }

    /// Every TLS use with the name of its section: for checks and for the certificate store.
    pub fn tls_uses(&self) -> Vec<(String, TlsFiles)> {
        let listeners = self.effective_listeners();
        let devices = listeners.iter().filter(|(_, listener)| listener.kind.is_tls());
        let mut uses: Vec<(String, TlsFiles)> = devices
            .map(|(_, listener)| (format!("listener {}", listener.name), self.listener_tls(listener)))
            .collect();
        uses.extend(self.grpc_tls().map(|files| ("grpc".to_owned(), files)));
        uses.extend(self.http_tls().map(|files| ("http".to_owned(), files)));
        uses.extend(self.links_tls().map(|files| ("cluster.links".to_owned(), files)));
        uses
    }

    fn pair(&self, cert: Option<&PathBuf>, key: Option<&PathBuf>) -> (PathBuf, PathBuf) {
        (cert.unwrap_or(&self.cert).clone(), key.unwrap_or(&self.key).clone())
    }

    /// Returns a demand of `[tls]` that cannot be met, if there is one.
    pub(super) fn tls_problem(&self) -> Option<[&'static str; 3]> {
        let suites = &self.tls.ciphersuites;
        let lacks_13 = !suites.is_empty() && !suites.iter().any(|suite| suite.is_tls13());
        (lacks_13 && self.tls.min_version == TlsVersion::V13).then_some([
            "tls.ciphersuites",
            "none of them is of TLS 1.3, which is the oldest version accepted",
            "add TLS_AES_128_GCM_SHA256, or set tls.min_version to 1.2",
        ])
    }
}
