//! Choice of the certificate that a client is shown: by the server name it asks for.

use std::{collections::HashMap, sync::Arc};

use rustls::{
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

/// Certificates by DNS name, and one for everybody else.
#[derive(Debug)]
pub(super) struct ByName {
    /// For clients that ask for no name, or for one that is nobody's.
    default: Arc<CertifiedKey>,
    /// By lower-case name; `*.` before a name stands for one label.
    named: HashMap<String, Arc<CertifiedKey>>,
}

impl ByName {
    /// Each certificate with its names, the default first; of several with one name the first has it.
    pub(super) fn new(default: Arc<CertifiedKey>) -> Self {
        Self { default, named: HashMap::new() }
    }

    pub(super) fn add(&mut self, names: &[String], certified: &Arc<CertifiedKey>) {
        for name in names {
            self.named.entry(name.to_ascii_lowercase()).or_insert_with(|| Arc::clone(certified));
        }
    }

    fn find(&self, name: Option<&str>) -> &Arc<CertifiedKey> {
        let found = name.and_then(|name| {
            let name = name.to_ascii_lowercase();
            let wildcard = || self.named.get(&format!("*.{}", name.split_once('.')?.1));
            self.named.get(&name).or_else(wildcard)
        });
        found.unwrap_or(&self.default)
    }
}

impl ResolvesServerCert for ByName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(self.find(hello.server_name())))
    }
}
