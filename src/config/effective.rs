//! What the configuration amounts to: the listeners that open and the files each TLS use reads.

use std::{collections::BTreeMap, path::PathBuf};

use super::{Address, ByteSize, Config, Listener, ListenerKind, SharedStrategy, TlsVersion};

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

impl TlsFiles {
    /// Every file that is read.
    pub fn all(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.cert, &self.key].into_iter().chain(&self.client_ca).chain(&self.crl)
    }
}

impl Config {
    /// The most memory this configuration can use, as one line for people.
    pub fn memory_reach(&self) -> String {
        let budget = self.limits.budget();
        let waiting = if self.store.enabled { self.limits.waiting_for_disk() } else { ByteSize(0) };
        let latest = if self.latest.enabled { self.latest_bytes() } else { ByteSize(0) };
        let mib = |bytes: ByteSize| format!("{} MiB", bytes.0 >> 20);
        format!(
            "memory: peers can make it hold at most {} (limits.memory_budget), of which {} may wait for the disk and {} are \
             latest values to be written, and some KiB for each connection",
            mib(budget),
            mib(waiting),
            mib(latest),
        )
    }

    /// Bytes of latest values that may wait to be written.
    pub fn latest_bytes(&self) -> ByteSize {
        self.latest.max_bytes.min(self.limits.waiting_values())
    }

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

    /// The strategies that listeners set, by listener name.
    pub fn listener_strategies(&self) -> BTreeMap<String, SharedStrategy> {
        let listeners = self.listeners.iter();
        listeners.filter_map(|listener| Some((listener.name.clone(), listener.shared_strategy?))).collect()
    }

    /// `response_information` with `{namespace}` filled in and `{client_id}` still to be; empty is none.
    pub fn response_pattern(&self) -> String {
        let levels = self.namespace.split('/').take_while(|level| !matches!(*level, "+" | "#"));
        let namespace = levels.collect::<Vec<_>>().join("/");
        self.response_information.replace("{namespace}", &namespace)
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
