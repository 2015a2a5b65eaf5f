//! TLS of links, and the names in a certificate.

use std::sync::Arc;

use config::DatabaseTls;
use edge::tls::{TlsError, client_config};
use rustls::ClientConfig;
use x509_parser::{certificate::X509Certificate, extensions::GeneralName, prelude::FromDer as _};

/// Protocol of links, by ALPN.
pub(crate) const ALPN: &[u8] = b"h2";

/// The settings for a connection to another gateway, as the files are now. Blocks on the disk.
///
/// # Errors
/// Names the file at fault and what to do.
pub(crate) fn client(files: &DatabaseTls, open_key: bool) -> Result<Option<Arc<ClientConfig>>, TlsError> {
    Ok(client_config(files, open_key)?.map(|mut config| {
        config.alpn_protocols = vec![ALPN.to_vec()];
        // A resumed session shows no certificate.
        config.resumption = rustls::client::Resumption::disabled();
        Arc::new(config)
    }))
}

/// DNS names in a certificate that TLS has verified.
pub(crate) fn names(der: &[u8]) -> Vec<String> {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else { return Vec::new() };
    let Ok(Some(names)) = certificate.subject_alternative_name() else { return Vec::new() };
    let dns = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    });
    dns.collect()
}
