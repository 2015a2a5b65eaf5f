//! What the configuration amounts to: the listeners that open and the files each TLS use reads.

use std::path::PathBuf;

use super::{Address, Config, Listener, ListenerKind, TlsVersion};

/// The files and rules of one TLS use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
    /// CA of client certificates; without it clients are not asked.
    pub client_ca: Option<PathBuf>,
    /// Whether a client must bring one.
    pub require_client_cert: bool,
    /// Revocation lists for client certificates.
    pub crl: Option<PathBuf>,
    /// Oldest version accepted.
    pub min_version: TlsVersion,
}

impl Config {
    /// Every listener for devices that opens, each with its address: the default one and the configured ones.
    /// In development mode without configured ones also plaintext and WebSocket on loopback, where their ports
    /// are not taken by the default one.
    pub fn effective_listeners(&self) -> Vec<(Address, Listener)> {
        let mut listeners = Vec::new();
        if let Some(address) = &self.addr {
            let kind = if self.non_tls { ListenerKind::Tcp } else { ListenerKind::Tls };
            listeners.push((address.clone(), named("default", kind)));
        }
        for listener in &self.listeners {
            if let Some(address) = &listener.address {
                listeners.push((address.clone(), listener.clone()));
            }
        }
        if self.dev && self.listeners.is_empty() {
            for (name, port, kind) in
                [("dev-tcp", 1883, ListenerKind::Tcp), ("dev-ws", 8083, ListenerKind::Ws)]
            {
                let address = Address::Ip(([127, 0, 0, 1], port).into());
                if !listeners.iter().any(|(taken, _)| taken.collides(&address)) {
                    listeners.push((address, named(name, kind)));
                }
            }
        }
        listeners
    }

    /// The TLS files of a listener, whatever its kind.
    pub fn listener_tls(&self, listener: &Listener) -> TlsFiles {
        let (cert, key) = self.pair(listener.cert.as_ref(), listener.key.as_ref());
        TlsFiles {
            cert,
            key,
            client_ca: listener.client_ca.clone().or_else(|| self.tls.client_ca.clone()),
            require_client_cert: listener.require_client_cert || self.tls.require_client_cert,
            crl: self.tls.crl.clone(),
            min_version: self.tls.min_version,
        }
    }

    /// The TLS files of gRPC; `None` if it is plaintext.
    pub fn grpc_tls(&self) -> Option<TlsFiles> {
        let (cert, key) = self.pair(self.grpc.cert.as_ref(), self.grpc.key.as_ref());
        self.grpc.tls.then(|| TlsFiles {
            cert,
            key,
            client_ca: self.grpc.client_ca.clone(),
            require_client_cert: self.grpc.require_client_cert,
            crl: self.tls.crl.clone(),
            min_version: self.tls.min_version,
        })
    }

    /// Every TLS use with the name of its section: for checks and for the certificate store.
    pub fn tls_uses(&self) -> Vec<(String, TlsFiles)> {
        let listeners = self.effective_listeners();
        let devices = listeners.iter().filter(|(_, listener)| listener.kind.is_tls());
        let mut uses: Vec<(String, TlsFiles)> = devices
            .map(|(_, listener)| (format!("listener {}", listener.name), self.listener_tls(listener)))
            .collect();
        uses.extend(self.grpc_tls().map(|files| ("grpc".to_owned(), files)));
        uses
    }

    /// Whether a TLS use takes the certificates that development mode makes.
    pub fn needs_dev_certs(&self) -> bool {
        self.dev && self.tls_uses().iter().any(|(_, files)| files.cert.starts_with(super::DEV_CERTS_DIR))
    }

    /// Threads that serve devices.
    pub fn effective_shards(&self) -> usize {
        match self.shards {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            shards => shards,
        }
    }

    fn pair(&self, cert: Option<&PathBuf>, key: Option<&PathBuf>) -> (PathBuf, PathBuf) {
        (cert.unwrap_or(&self.cert).clone(), key.unwrap_or(&self.key).clone())
    }
}

fn named(name: &str, kind: ListenerKind) -> Listener {
    Listener { name: name.to_owned(), kind, ..Listener::default() }
}
