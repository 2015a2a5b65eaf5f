//! TLS client configuration (rustls). Without `--resume` sessions are never
//! resumed, so each connection is a full handshake.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{
    ClientSessionStore, Resumption, Tls12ClientSessionValue, Tls13ClientSessionValue, WebPkiServerVerifier,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, NamedGroup, RootCertStore, SignatureScheme};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub struct TlsOpts<'a> {
    pub cafile: Option<&'a str>,
    pub insecure: bool,
    pub cert: Option<&'a str>,
    pub key: Option<&'a str>,
    pub tls12_only: bool,
    pub resume: bool,
}

/// Most tickets kept; each handshake uses one and gets one or more.
const MAX_TICKETS: usize = 10_000;

/// Sessions of the one broker of a run. The cache of rustls keeps 8 tickets,
/// which many handshakes at once would use up.
#[derive(Debug, Default)]
struct Sessions(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    group: Option<NamedGroup>,
    tls12: Option<Tls12ClientSessionValue>,
    tickets: VecDeque<Tls13ClientSessionValue>,
}

impl Sessions {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientSessionStore for Sessions {
    fn set_kx_hint(&self, _: ServerName<'static>, group: NamedGroup) {
        self.kept().group = Some(group);
    }

    fn kx_hint(&self, _: &ServerName<'_>) -> Option<NamedGroup> {
        self.kept().group
    }

    fn set_tls12_session(&self, _: ServerName<'static>, value: Tls12ClientSessionValue) {
        self.kept().tls12 = Some(value);
    }

    fn tls12_session(&self, _: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        self.kept().tls12.clone()
    }

    fn remove_tls12_session(&self, _: &ServerName<'static>) {
        self.kept().tls12 = None;
    }

    fn insert_tls13_ticket(&self, _: ServerName<'static>, value: Tls13ClientSessionValue) {
        let mut kept = self.kept();
        if kept.tickets.len() == MAX_TICKETS {
            kept.tickets.pop_front();
        }
        kept.tickets.push_back(value);
    }

    fn take_tls13_ticket(&self, _: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        self.kept().tickets.pop_front()
    }
}

/// Accepts any certificate (`--insecure`); signatures are still checked, so
/// that the handshake costs the same.
#[derive(Debug)]
struct AcceptAny(Arc<rustls::crypto::CryptoProvider>);

impl ServerCertVerifier for AcceptAny {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        m: &[u8],
        c: &CertificateDer<'_>,
        d: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(m, c, d, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        m: &[u8],
        c: &CertificateDer<'_>,
        d: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(m, c, d, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

pub fn config(o: &TlsOpts) -> Result<Arc<ClientConfig>, String> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let versions: &[&rustls::SupportedProtocolVersion] =
        if o.tls12_only { &[&rustls::version::TLS12] } else { rustls::ALL_VERSIONS };
    let b = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(versions)
        .map_err(|e| e.to_string())?;
    let b = if o.insecure {
        b.dangerous().with_custom_certificate_verifier(Arc::new(AcceptAny(provider)))
    } else {
        let file = o.cafile.ok_or("--tls needs --cafile FILE or --insecure".to_string())?;
        let mut roots = RootCertStore::empty();
        let certs = CertificateDer::pem_file_iter(file).map_err(|e| format!("--cafile {file}: {e}"))?;
        for c in certs {
            let c = c.map_err(|e| format!("--cafile {file}: {e}"))?;
            roots.add(c).map_err(|e| format!("--cafile {file}: {e}"))?;
        }
        let v = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|e| format!("--cafile {file}: {e}"))?;
        b.with_webpki_verifier(v)
    };
    let mut cfg = match (o.cert, o.key) {
        (Some(cert), Some(key)) => {
            let chain = CertificateDer::pem_file_iter(cert)
                .and_then(|i| i.collect::<Result<Vec<_>, _>>())
                .map_err(|e| format!("--cert {cert}: {e}"))?;
            let key = PrivateKeyDer::from_pem_file(key).map_err(|e| format!("--key {key}: {e}"))?;
            b.with_client_auth_cert(chain, key).map_err(|e| e.to_string())?
        }
        (None, None) => b.with_no_client_auth(),
        _ => return Err("--cert and --key go together".into()),
    };
    cfg.resumption =
        if o.resume { Resumption::store(Arc::new(Sessions::default())) } else { Resumption::disabled() };
    Ok(Arc::new(cfg))
}
