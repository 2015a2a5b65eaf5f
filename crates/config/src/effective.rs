//! Effect of the configuration: the listeners that open and the files each TLS use reads.

use std::collections::BTreeMap;

use super::{Address, Binding, ByteSize, Config, Listener, ListenerKind, SharedStrategy};

impl Config {
    /// The most memory this configuration can use, as one line for people.
    pub fn memory_summary(&self) -> String {
        let budget = self.limits.budget();
        let waiting = if self.store.enabled { self.limits.waiting_for_disk() } else { ByteSize(0) };
        let latest = if self.latest.enabled { self.latest_bytes() } else { ByteSize(0) };
        let mib = |bytes: ByteSize| format!("{} MiB", bytes.0 >> 20);
        let log = self.log_memory();
        let log = if self.has_groups() { ByteSize(log.0.0 + log.1.0) } else { ByteSize(0) };
        let history =
            if self.database.history.is_empty() { ByteSize(0) } else { self.limits.waiting_history() };
        let connections = self.limits.max_connections;
        format!(
            "memory: peers can make it hold at most {} (limits.memory_budget), of which {} may wait for the disk, {} are \
             latest values to be written, {} history to be written and {} the log of consumer groups once there is a group; \
             beside that each connection takes about 1 KiB, with TLS 5 KiB: up to {} for {connections} (limits.max_connections)",
            mib(budget),
            mib(waiting),
            mib(latest),
            mib(history),
            mib(log),
            mib(ByteSize(connections.saturating_mul(5 << 10))),
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
            let listener = Listener { ipv6_only: self.ipv6_only, ..named("default", kind) };
            listeners.push((address.clone(), listener));
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
                let own = Binding { address: address.clone(), ipv6_only: false };
                let mut taken = listeners.iter().map(|(address, listener)| Binding {
                    address: address.clone(),
                    ipv6_only: listener.ipv6_only,
                });
                if !taken.any(|taken| taken.collides(&own)) {
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

    /// Returns whether a TLS use takes the certificates that development mode makes.
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
}

fn named(name: &str, kind: ListenerKind) -> Listener {
    Listener { name: name.to_owned(), kind, ..Listener::default() }
}
