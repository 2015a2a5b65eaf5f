//! TLS towards servers that the gateway connects to: a database, and services that decide who may connect.

use std::{path::Path, sync::Arc};

use config::DatabaseTls;
use rustls::{ClientConfig, RootCertStore, crypto::aws_lc_rs};

use super::config::{TlsError, authorities, certificates, private_key, read};

/// The configuration for a cluster whose certificates are of the CA in `files`, with a certificate of the gateway's
/// own if one is named, whose key others may read if `open_key`. `None` if no CA is named: then there is no TLS.
///
/// # Errors
/// Names the file at fault and what to do.
pub fn client_config(files: &DatabaseTls, open_key: bool) -> Result<Option<ClientConfig>, TlsError> {
    let Some(ca) = &files.ca else { return Ok(None) };
    let roots = roots(ca)?;
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let config = match (&files.cert, &files.key) {
        (Some(cert), Some(key)) => {
            let chain = certificates(cert, &read(cert)?)?;
            builder
                .with_client_auth_cert(chain, private_key(key, open_key)?)
                .map_err(|source| TlsError::UnusableKey { path: key.clone(), source })?
        }
        _ => builder.with_no_client_auth(),
    };
    Ok(Some(config))
}

/// Settings of a TLS client; made by [`client_of_ca`].
pub(crate) type ClientTls = ClientConfig;

/// The name that a server's certificate must have.
pub type ServerName = rustls::pki_types::ServerName<'static>;

/// The configuration for servers whose certificates are of the CA in this file.
///
/// # Errors
/// Names the file at fault and what to do.
pub fn client_of_ca(ca: &Path) -> Result<ClientTls, TlsError> {
    Ok(ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots(ca)?)
        .with_no_client_auth())
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in authorities(path, &read(path)?)? {
        roots
            .add(certificate)
            .map_err(|error| TlsError::BadCertificate { path: path.to_owned(), detail: error.to_string() })?;
    }
    Ok(roots)
}
