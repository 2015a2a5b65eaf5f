//! A certificate authority and a server certificate for development, made on first start and renewed in time.

use std::{
    fs, io,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, date_time_ymd,
};
use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier},
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
    sign::CertifiedKey,
};
use thiserror::Error;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// A certificate with less left is renewed.
const MARGIN: Duration = DAY.saturating_mul(14);
const SERVER_LIFE: Duration = DAY.saturating_mul(365);
const CA_LIFE: Duration = DAY.saturating_mul(3650);
const NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Paths of the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevCerts {
    /// For clients to trust.
    pub ca_cert: PathBuf,
    /// Signs; mode 0600.
    pub ca_key: PathBuf,
    /// For `cert`.
    pub cert: PathBuf,
    /// For `key`; mode 0600.
    pub key: PathBuf,
    /// True if this call made or renewed something.
    pub made: bool,
}

/// Error that left the gateway without development certificates.
#[derive(Debug, Error)]
pub enum DevCertsError {
    /// A file could not be written.
    #[error("write {}: {source}; make the directory writable", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The certificate could not be made.
    #[error("make a development certificate: {0}")]
    Make(#[from] rcgen::Error),
}

/// Makes `ca.crt`, `ca.key`, `server.crt` and `server.key` in `dir` where they are missing, do not fit together
/// or have less than two weeks left at `now`. The CA stays as long as it can, so that clients go on trusting it.
///
/// # Errors
/// A file cannot be written.
pub fn ensure_dev_certs(dir: &Path, now: SystemTime) -> Result<DevCerts, DevCertsError> {
    let mut certs = DevCerts {
        ca_cert: dir.join("ca.crt"),
        ca_key: dir.join("ca.key"),
        cert: dir.join("server.crt"),
        key: dir.join("server.key"),
        made: false,
    };
    take_former_key(&certs.key, &dir.join(FORMER_KEY))?;
    if verify(&certs, now + MARGIN).is_some() {
        return Ok(certs);
    }
    fs::create_dir_all(dir).map_err(|source| DevCertsError::Write { path: dir.to_owned(), source })?;
    if let Some(ca_key) = usable_ca(&certs, now) {
        certs.make_server(ca_key, now)?;
    }
    if verify(&certs, now + MARGIN).is_none() {
        let ca_key = KeyPair::generate()?;
        let ca = ca_params(now).self_signed(&ca_key)?;
        write(&certs.ca_key, ca_key.serialize_pem().as_bytes(), 0o600)?;
        write(&certs.ca_cert, ca.pem().as_bytes(), 0o644)?;
        certs.make_server(ca_key, now)?;
    }
    certs.made = true;
    Ok(certs)
}

/// The key's former name, kept as a link in directories that were made with it.
const FORMER_KEY: &str = "private.key";

fn take_former_key(key: &Path, former: &Path) -> Result<(), DevCertsError> {
    let is_file = fs::symlink_metadata(former).is_ok_and(|meta| meta.is_file());
    if !is_file || fs::symlink_metadata(key).is_ok() {
        return Ok(());
    }
    let moved = fs::rename(former, key).and_then(|()| std::os::unix::fs::symlink("server.key", former));
    moved.map_err(|source| DevCertsError::Write { path: key.to_owned(), source })
}

impl DevCerts {
    fn make_server(&self, ca_key: KeyPair, now: SystemTime) -> Result<(), DevCertsError> {
        let key = KeyPair::generate()?;
        let cert = server_cert(&key, ca_key, now)?;
        write(&self.key, key.serialize_pem().as_bytes(), 0o600)?;
        write(&self.cert, cert.pem().as_bytes(), 0o644)
    }
}

fn ca_params(now: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = name("mqtt-server development CA");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    set_life(&mut params, now, CA_LIFE);
    params
}

fn server_cert(key: &KeyPair, ca_key: KeyPair, now: SystemTime) -> Result<Certificate, rcgen::Error> {
    let mut params = CertificateParams::new(NAMES.map(str::to_owned).to_vec())?;
    params.distinguished_name = name("localhost");
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    set_life(&mut params, now, SERVER_LIFE);
    params.signed_by(key, &Issuer::new(ca_params(now), ca_key))
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

/// From an hour before `now`, against clocks that are a little behind.
fn set_life(params: &mut CertificateParams, now: SystemTime, life: Duration) {
    let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + since_epoch.saturating_sub(Duration::from_secs(3600));
    params.not_after = epoch + since_epoch + life;
}

/// Verifies that the files are there and fit together, and that a client would accept the server at `at`.
fn verify(certs: &DevCerts, at: SystemTime) -> Option<()> {
    let provider = aws_lc_rs::default_provider();
    let key = PrivateKeyDer::from_pem_file(&certs.key).ok()?;
    let server = CertificateDer::from_pem_file(&certs.cert).ok()?;
    let key = provider.key_provider.load_private_key(key).ok()?;
    CertifiedKey::new(vec![server.clone()], key).keys_match().ok()?;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&certs.ca_cert).ok()?).ok()?;
    let verifier =
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::new(provider)).build().ok()?;
    let at = UnixTime::since_unix_epoch(at.duration_since(SystemTime::UNIX_EPOCH).ok()?);
    for name in NAMES {
        verifier.verify_server_cert(&server, &[], &ServerName::try_from(name).ok()?, &[], at).ok()?;
    }
    Some(())
}

/// The CA's key, unless the CA is about as old as it may become.
fn usable_ca(certs: &DevCerts, now: SystemTime) -> Option<KeyPair> {
    let made = fs::metadata(&certs.ca_cert).and_then(|meta| meta.modified()).ok()?;
    let age = now.duration_since(made).unwrap_or_default();
    if age + SERVER_LIFE > CA_LIFE {
        return None;
    }
    KeyPair::from_pem(&fs::read_to_string(&certs.ca_key).ok()?).ok()
}

/// Replaces a file at once; the mode holds from the first byte.
fn write(path: &Path, content: &[u8], mode: u32) -> Result<(), DevCertsError> {
    let temporary = path.with_extension("new");
    let written = (|| {
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    written.map_err(|source| DevCertsError::Write { path: path.to_owned(), source })
}
