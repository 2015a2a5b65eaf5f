//! From PEM files to a rustls server configuration, with errors that name the file and the fix.

use std::{
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use config::{CertificatePair, CipherSuite, Config, ConfigError, Problem, TlsFiles, TlsVersion, ocsp_of};
use rustls::{
    RootCertStore, ServerConfig, SupportedProtocolVersion,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer},
    server::{NoServerSessionStorage, ProducesTickets, WebPkiClientVerifier, danger::ClientCertVerifier},
    sign::CertifiedKey,
    version::{TLS12, TLS13},
};
use thiserror::Error;
use zeroize::Zeroizing;

use super::{
    by_name::ByName,
    client_config,
    inspect::{Facts, inspect},
    revocations::Revoked,
};
use crate::secret_files::open_mode;

/// Advice on a chain that is in the wrong order.
pub(super) const CHAIN_ORDER: &str = "put the server's own first, then the one that signed it, and so on up to the root, which may be left out";

/// Error that left a use without a TLS configuration.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file could not be read.
    #[error("read {}: {source}; check the path and its permissions", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file is not PEM.
    #[error("{} is not valid PEM ({source}); export it again as PEM text", .path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file of authorities without a certificate.
    #[error("no certificate in {}; it must have a 'BEGIN CERTIFICATE' block for each authority that is trusted", .0.display())]
    NoAuthority(PathBuf),
    /// A chain whose certificates are not in their order.
    #[error("the certificates in {} are in the wrong order: {problem}; {CHAIN_ORDER}", .path.display())]
    ChainOrder {
        /// The file.
        path: PathBuf,
        /// Names the misplaced certificate.
        problem: String,
    },
    /// A certificate file without a certificate.
    #[error("no certificate in {}; it must have a 'BEGIN CERTIFICATE' block, the server's own first", .0.display())]
    NoCertificate(PathBuf),
    /// A key file without a key.
    #[error("no private key in {}; it must have a PKCS#8, PKCS#1 (RSA) or SEC1 (EC) 'PRIVATE KEY' block", .0.display())]
    NoKey(PathBuf),
    /// A key file with a passphrase.
    #[error("the private key in {} is encrypted, which is not supported; decrypt it with 'openssl pkey -in FILE -out NEW'", .0.display())]
    EncryptedKey(PathBuf),
    /// A key file that others may read.
    #[error("the private key in {} can be read by others than its owner (mode {mode:04o}); run 'chmod 600 {}', or set \
             tls.open_key_files where a container's mount decides the mode", .path.display(), .path.display())]
    OpenKey {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A certificate that no client can ask for.
    #[error("the certificate in {} has no DNS name in a subjectAltName, so that no client can ask for it; name it as cert of \
             a listener, or sign it again with subjectAltName=DNS:your.host.name", .0.display())]
    Nameless(PathBuf),
    /// A stapled response that is none.
    #[error("{} is not a successful OCSP response in DER; fetch it again with 'openssl ocsp ... -respout', or remove it", .0.display())]
    BadOcsp(PathBuf),
    /// A key of a kind or size that the crypto provider does not take.
    #[error("the private key in {} cannot be used ({source}); use RSA from 2048 bits, ECDSA P-256 or P-384, or Ed25519", .path.display())]
    UnusableKey {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
    /// Certificate and key are of different pairs.
    #[error("the private key in {} does not belong to the certificate in {}; take the pair that was made together", .key.display(), .cert.display())]
    Mismatch {
        /// The certificate.
        cert: PathBuf,
        /// The key.
        key: PathBuf,
    },
    /// A certificate of X.509 version 1, which has no names.
    #[error("the certificate in {} is of X.509 version 1, without names, and TLS clients refuse it; sign it again with \
             'openssl x509 -req ... -extfile names.ext', where names.ext has the line subjectAltName=DNS:your.host.name", .0.display())]
    OldVersion(PathBuf),
    /// A certificate whose time is over.
    #[error("the certificate in {} expired on {until}; renew it and send SIGHUP ('openssl x509 -in {} -noout -dates' shows \
             its dates)", .path.display(), .path.display())]
    Expired {
        /// The file.
        path: PathBuf,
        /// The day.
        until: String,
    },
    /// A certificate whose time has not come.
    #[error("the certificate in {} is valid from {from} only; set the clock of this machine, or take another certificate \
             ('openssl x509 -in {} -noout -dates' shows its dates)", .path.display(), .path.display())]
    NotYetValid {
        /// The file.
        path: PathBuf,
        /// The day.
        from: String,
    },
    /// A certificate that does not parse.
    #[error("a certificate in {} cannot be used: {detail}; export it again", .path.display())]
    BadCertificate {
        /// The file.
        path: PathBuf,
        /// The cause.
        detail: String,
    },
    /// A revocation list that does not parse.
    #[error("the revocation lists in {} cannot be used: {detail}; export them again as PEM 'X509 CRL'", .path.display())]
    BadCrl {
        /// The file.
        path: PathBuf,
        /// The cause.
        detail: String,
    },
    /// The provider refused its own settings.
    #[error("set up TLS: {0}")]
    Setup(#[from] rustls::Error),
}

/// Files and rules from which one use was built, to tell a change of the rules for clients from a renewed certificate.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct ClientRules {
    ca: Option<Vec<u8>>,
    crl: Option<Vec<u8>>,
    required: bool,
}

pub(super) struct Built {
    pub(super) config: ServerConfig,
    pub(super) rules: ClientRules,
    /// Of each pair, the default one first.
    pub(super) facts: Vec<Facts>,
    /// Content of the revocation lists; `None` without any.
    pub(super) revoked: Option<Revoked>,
}

/// Builds a server configuration: TLS 1.2 and 1.3, session tickets, and `alpn` in order of preference.
///
/// The ticket keys are those of `previous` if the rules for clients are the same. Otherwise they are new: a ticket of one
/// use never opens a session of another, whose rules for client certificates may differ (a resumed session does not show
/// its certificate again).
///
/// # Errors
/// Names the file at fault and what to do.
pub(super) fn build(
    files: &TlsFiles,
    alpn: &[&[u8]],
    previous: Option<(&ClientRules, &Arc<dyn ProducesTickets>)>,
) -> Result<Built, TlsError> {
    let provider = Arc::new(provider(&files.ciphersuites));
    let (resolver, facts) = certified_keys(files, &provider)?;
    let rules = ClientRules {
        ca: files.client_ca.as_deref().map(read).transpose()?,
        crl: files.crl.as_deref().map(read).transpose()?,
        required: files.require_client_cert,
    };
    let versions: &[&SupportedProtocolVersion] = match files.min_version {
        TlsVersion::V12 => &[&TLS13, &TLS12],
        TlsVersion::V13 => &[&TLS13],
    };
    let builder =
        ServerConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(versions)?;
    let lists = match (&files.crl, &rules.crl) {
        (Some(path), Some(content)) => Some((path, revocation_lists(path, content)?)),
        _ => None,
    };
    let revoked = lists.as_ref().map(|(path, lists)| Revoked::of(path, lists)).transpose()?;
    let lists = lists.map(|(_, lists)| lists);
    let builder = match client_verifier(files, &rules, lists, &provider)? {
        Some(verifier) => builder.with_client_cert_verifier(verifier),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config.ticketer = match previous {
        Some((old, ticketer)) if *old == rules => Arc::clone(ticketer),
        _ => aws_lc_rs::Ticketer::new()?,
    };
    // Tickets hold the state; a cache in memory would only serve clients without tickets.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 1;
    Ok(Built { config, rules, facts, revoked })
}

/// Reads every file that a TLS use of `config` names. Call it after development certificates are made.
///
/// # Errors
/// One problem for each use that cannot be built.
pub fn check_files(config: &Config) -> Result<(), ConfigError> {
    check(config, |_, _| Ok(()))
}

/// As [`check_files`], and that every certificate is valid at `now`: for `--check`. A start does not check dates, since
/// devices without a clock ignore them and the gateway's own clock may not be set yet.
///
/// # Errors
/// As [`check_files`].
pub fn check_files_at(config: &Config, now: SystemTime) -> Result<(), ConfigError> {
    check(config, |files, facts| {
        let mut pairs = files.pairs().zip(facts);
        pairs.try_for_each(|(pair, facts)| facts.check_dates(&pair.cert, now))
    })
}

fn check(
    config: &Config,
    further: impl Fn(&TlsFiles, &[Facts]) -> Result<(), TlsError>,
) -> Result<(), ConfigError> {
    let mut problems: Vec<Problem> = Vec::new();
    for (name, files) in config.tls_uses() {
        let built = build(&files, &[], None).and_then(|built| further(&files, &built.facts));
        let Err(error) = built else { continue };
        let text = error.to_string();
        let (problem, mut fix) = match text.split_once("; ") {
            Some((problem, fix)) => (problem.to_owned(), fix.to_owned()),
            None => (text, String::new()),
        };
        if matches!(&error, TlsError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound) {
            fix = "name yours with --cert and --key, or run 'mqtt-server --dev' once, which makes some for \
                   development: --cert certs/server.crt --key certs/server.key"
                .to_owned();
        }
        let (key, value) = blame(&error, &files);
        if let Some(same) = problems.iter_mut().find(|p| p.value == value && p.problem == problem) {
            same.key = format!("{}, {name}: {key}", same.key);
            continue;
        }
        problems.push(Problem::new(format!("{name}: {key}"), value, problem, fix));
    }
    if let Err(error) = client_config(&config.database.tls, config.tls.open_key_files) {
        let text = error.to_string();
        let (problem, fix) = text.split_once("; ").unwrap_or((&text, ""));
        problems.push(Problem::new("database.tls", "", problem, fix));
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigError(problems)) }
}

/// The key and value that an error is about.
fn blame(error: &TlsError, files: &TlsFiles) -> (&'static str, String) {
    let path = match error {
        TlsError::Read { path, .. }
        | TlsError::Pem { path, .. }
        | TlsError::UnusableKey { path, .. }
        | TlsError::BadCertificate { path, .. }
        | TlsError::OldVersion(path)
        | TlsError::Expired { path, .. }
        | TlsError::NotYetValid { path, .. }
        | TlsError::BadCrl { path, .. }
        | TlsError::OpenKey { path, .. }
        | TlsError::Nameless(path)
        | TlsError::BadOcsp(path)
        | TlsError::NoCertificate(path)
        | TlsError::NoAuthority(path)
        | TlsError::ChainOrder { path, .. }
        | TlsError::NoKey(path)
        | TlsError::EncryptedKey(path)
        | TlsError::Mismatch { key: path, .. } => path,
        TlsError::Setup(_) => return ("tls", String::new()),
    };
    let key = if *path == files.key {
        "key"
    } else if *path == files.cert {
        "cert"
    } else if files.crl.as_ref() == Some(path) {
        "crl"
    } else if files.client_ca.as_ref() == Some(path) {
        "client_ca"
    } else if *path == ocsp_of(&files.cert) {
        "cert"
    } else {
        "certificates"
    };
    (key, path.display().to_string())
}

/// All suites, or these in the provider's order of preference.
fn provider(wanted: &[CipherSuite]) -> CryptoProvider {
    let mut provider = aws_lc_rs::default_provider();
    if !wanted.is_empty() {
        let wanted: Vec<rustls::CipherSuite> = wanted.iter().map(|suite| known(*suite)).collect();
        provider.cipher_suites.retain(|suite| wanted.contains(&suite.suite()));
    }
    provider
}

fn known(suite: CipherSuite) -> rustls::CipherSuite {
    use rustls::CipherSuite as Known;
    match suite {
        CipherSuite::TLS_AES_128_GCM_SHA256 => Known::TLS13_AES_128_GCM_SHA256,
        CipherSuite::TLS_AES_256_GCM_SHA384 => Known::TLS13_AES_256_GCM_SHA384,
        CipherSuite::TLS_CHACHA20_POLY1305_SHA256 => Known::TLS13_CHACHA20_POLY1305_SHA256,
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256 => {
            Known::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
        }
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384 => {
            Known::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384
        }
        CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256 => {
            Known::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256
        }
        CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 => Known::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
        CipherSuite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384 => Known::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
        CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256 => {
            Known::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256
        }
    }
}

/// Every pair of a use, with the facts of its certificates.
fn certified_keys(files: &TlsFiles, provider: &CryptoProvider) -> Result<(ByName, Vec<Facts>), TlsError> {
    let mut resolver: Option<ByName> = None;
    let mut all = Vec::new();
    for pair in files.pairs() {
        let (certified, facts) = certified_key(&pair, provider, files.open_key_files)?;
        let certified = Arc::new(certified);
        match &mut resolver {
            None => resolver.insert(ByName::new(Arc::clone(&certified))).add(&facts.names, &certified),
            Some(_) if facts.names.is_empty() => return Err(TlsError::Nameless(pair.cert)),
            Some(resolver) => resolver.add(&facts.names, &certified),
        }
        all.push(facts);
    }
    // The first pair is always there.
    let resolver = resolver.ok_or_else(|| TlsError::NoCertificate(files.cert.clone()))?;
    Ok((resolver, all))
}

fn certified_key(
    pair: &CertificatePair,
    provider: &CryptoProvider,
    open_key: bool,
) -> Result<(CertifiedKey, Facts), TlsError> {
    let chain = certificates(&pair.cert, &read(&pair.cert)?)?;
    let facts = inspect(&pair.cert, &chain)?;
    let key = private_key(&pair.key, open_key)?;
    let key = provider
        .key_provider
        .load_private_key(key)
        .map_err(|source| TlsError::UnusableKey { path: pair.key.clone(), source })?;
    let mut certified = CertifiedKey::new(chain, key);
    if let Some(at) = place_of_own(&certified) {
        let problem = format!("the private key belongs to number {at} in it");
        return Err(TlsError::ChainOrder { path: pair.cert.clone(), problem });
    }
    match certified.keys_match() {
        Ok(()) | Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => {}
        Err(rustls::Error::InconsistentKeys(_)) => {
            return Err(TlsError::Mismatch { cert: pair.cert.clone(), key: pair.key.clone() });
        }
        Err(error) => {
            return Err(TlsError::BadCertificate { path: pair.cert.clone(), detail: error.to_string() });
        }
    }
    certified.ocsp = ocsp_response(pair.ocsp())?;
    Ok((certified, facts))
}

/// Returns the place in the file of the certificate that belongs to the key, counted from 1, unless it is the first.
fn place_of_own(certified: &CertifiedKey) -> Option<usize> {
    let belongs = |der: &CertificateDer<'static>| {
        let own = CertifiedKey::new(vec![der.clone()], Arc::clone(&certified.key));
        own.keys_match().is_ok()
    };
    let first = certified.cert.first()?;
    if belongs(first) {
        return None;
    }
    certified.cert.iter().position(belongs).map(|at| at + 1)
}

/// Returns the response to staple; `None` without a file.
fn ocsp_response(path: PathBuf) -> Result<Option<Vec<u8>>, TlsError> {
    let response = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(TlsError::Read { path, source }),
        Ok(response) => response,
    };
    // SEQUENCE { ENUMERATED successful (0), ... } with any length.
    let body = match response.as_slice() {
        [0x30, len @ 0..=0x7F, body @ ..] if body.len() == usize::from(*len) => body,
        [0x30, 0x81, _, body @ ..] | [0x30, 0x82, _, _, body @ ..] => body,
        _ => &[],
    };
    if body.starts_with(&[0x0A, 0x01, 0x00]) { Ok(Some(response)) } else { Err(TlsError::BadOcsp(path)) }
}

fn client_verifier(
    files: &TlsFiles,
    rules: &ClientRules,
    lists: Option<Vec<CertificateRevocationListDer<'static>>>,
    provider: &Arc<CryptoProvider>,
) -> Result<Option<Arc<dyn ClientCertVerifier>>, TlsError> {
    let (Some(path), Some(content)) = (&files.client_ca, &rules.ca) else { return Ok(None) };
    let mut roots = RootCertStore::empty();
    for certificate in authorities(path, content)? {
        roots
            .add(certificate)
            .map_err(|error| TlsError::BadCertificate { path: path.clone(), detail: error.to_string() })?;
    }
    let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
    if let Some(lists) = lists {
        // A list covers its own issuer; a client whose issuer has no list is let in by the CA alone.
        builder =
            builder.with_crls(lists).only_check_end_entity_revocation().allow_unknown_revocation_status();
    }
    if !files.require_client_cert {
        builder = builder.allow_unauthenticated();
    }
    let verifier = builder.build().map_err(|error| TlsError::BadCrl {
        path: files.crl.as_ref().unwrap_or(path).clone(),
        detail: error.to_string(),
    })?;
    Ok(Some(verifier))
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

/// The certificates of authorities: at least one.
pub(super) fn authorities(path: &Path, content: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    certificates(path, content).map_err(|error| match error {
        TlsError::NoCertificate(path) => TlsError::NoAuthority(path),
        error => error,
    })
}

pub(super) fn certificates(
    path: &Path,
    mut content: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain = rustls_pemfile::certs(&mut content)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| TlsError::Pem { path: path.to_owned(), source })?;
    if chain.is_empty() { Err(TlsError::NoCertificate(path.to_owned())) } else { Ok(chain) }
}

fn revocation_lists(
    path: &Path,
    mut content: &[u8],
) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    let lists = rustls_pemfile::crls(&mut content)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| TlsError::Pem { path: path.to_owned(), source })?;
    if lists.is_empty() {
        let detail = "no 'BEGIN X509 CRL' block".to_owned();
        return Err(TlsError::BadCrl { path: path.to_owned(), detail });
    }
    Ok(lists)
}

/// Reads a key. Others than its owner must not be able to, unless `open` says that they may: but for the group of a file of
/// root's, which is how a service without root's rights is given a key.
pub(super) fn private_key(path: &Path, open: bool) -> Result<PrivateKeyDer<'static>, TlsError> {
    let failed = |source| TlsError::Read { path: path.to_owned(), source };
    let mut file = fs::File::open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if let Some(mode) = open_mode(&meta).filter(|_| !open) {
        return Err(TlsError::OpenKey { path: path.to_owned(), mode });
    }
    let mut content = Zeroizing::new(Vec::with_capacity(usize::try_from(meta.len()).unwrap_or(0) + 1));
    file.read_to_end(&mut content).map_err(failed)?;
    let has = |mark: &[u8]| content.windows(mark.len()).any(|part| part == mark);
    if has(b"BEGIN ENCRYPTED PRIVATE KEY") || has(b"Proc-Type: 4,ENCRYPTED") {
        return Err(TlsError::EncryptedKey(path.to_owned()));
    }
    match rustls_pemfile::private_key(&mut content.as_slice()) {
        Ok(Some(key)) => Ok(key),
        Ok(None) => Err(TlsError::NoKey(path.to_owned())),
        Err(source) => Err(TlsError::Pem { path: path.to_owned(), source }),
    }
}
