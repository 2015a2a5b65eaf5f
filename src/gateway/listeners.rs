//! Listeners: their TLS first, which finds faults before any port opens, and their sockets.

use std::{
    collections::BTreeMap,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::{Duration, SystemTime},
};

use config::{Address, Config, ListenerKind};
use edge::{
    reload::Reloads,
    tls::{TlsHandle, TlsStore},
};
use net::{BoundListener, probe_silent_peers};
use tracing::warn;

use super::{StartError, links::BoundLinks};

/// Interval at which the age of certificates is looked at.
pub(super) const CERTIFICATE_AGE_LOOK: Duration = Duration::from_secs(60);

/// Connections to gRPC or HTTP that the system may have ready, as for devices.
const BACKLOG: i32 = 4096;

/// All listeners before they are bound.
pub(super) struct PreparedListeners {
    /// Certificates and keys of all of them.
    pub(super) tls: Arc<TlsStore>,
    devices: Vec<PreparedListener>,
    grpc_tls: Option<grpc::GrpcTls>,
    http_tls: Option<TlsHandle>,
    links_tls: Option<TlsHandle>,
}

/// The sockets of all listeners. Nothing is accepted yet.
pub(super) struct BoundListeners {
    pub(super) devices: Vec<BoundListener>,
    pub(super) grpc: TcpListener,
    pub(super) grpc_tls: Option<grpc::GrpcTls>,
    pub(super) http: Option<TcpListener>,
    pub(super) http_tls: Option<TlsHandle>,
    /// For other gateways of the cluster.
    pub(super) links: Option<BoundLinks>,
}

impl PreparedListeners {
    /// Reads certificates and keys, and has them read again when their files change.
    pub(super) fn open(config: &Config, reloads: &Reloads) -> Result<Self, StartError> {
        let tls = Arc::new(TlsStore::new());
        let devices = prepare_devices(config, &tls)?;
        let grpc_tls = match config.grpc_tls() {
            Some(files) => {
                let settings = add_tls(&tls, "grpc", files, &[b"h2"])?;
                Some(grpc::GrpcTls { settings, revocations: tls.revocations("grpc") })
            }
            None => None,
        };
        let http_tls =
            config.http_tls().map(|files| add_tls(&tls, "http", files, &[b"http/1.1"])).transpose()?;
        let links_tls = config.links_tls().map(|files| add_tls(&tls, "cluster.links", files, &[b"h2"]));
        let links_tls = links_tls.transpose()?;
        #[expect(clippy::disallowed_methods, reason = "certificates are dated by the wall clock")]
        tls.log_notices(SystemTime::now());
        reloads.add(Arc::clone(&tls) as _);
        Ok(Self { tls, devices, grpc_tls, http_tls, links_tls })
    }

    /// Binds all that `sockets` has not, by the name of the listener.
    pub(super) fn bind(
        &self,
        config: &Config,
        mut sockets: BTreeMap<String, TcpListener>,
    ) -> Result<BoundListeners, StartError> {
        let devices = self.bind_devices(config, &mut sockets)?;
        Ok(BoundListeners { devices, ..self.bind_without_devices(config, sockets)? })
    }

    /// Binds the listeners of devices.
    pub(super) fn bind_devices(
        &self,
        config: &Config,
        sockets: &mut BTreeMap<String, TcpListener>,
    ) -> Result<Vec<BoundListener>, StartError> {
        let mut devices = Vec::new();
        for prepared in &self.devices {
            devices.extend(prepared.bind(sockets.remove(&prepared.listener.name), config)?);
        }
        Ok(devices)
    }

    /// Binds all but the listeners of devices.
    pub(super) fn bind_without_devices(
        &self,
        config: &Config,
        mut sockets: BTreeMap<String, TcpListener>,
    ) -> Result<BoundListeners, StartError> {
        let (grpc, http) = bind_for_backends(config, &mut sockets)?;
        let links = match (&self.links_tls, config.cluster.links.listen) {
            (Some(tls), Some(address)) => {
                let socket = take_or_bind(None, "cluster.links.listen", address, false, config)?;
                Some(BoundLinks { socket, tls: Arc::clone(tls) })
            }
            _ => None,
        };
        let (grpc_tls, http_tls) = (self.grpc_tls.clone(), self.http_tls.clone());
        Ok(BoundListeners { devices: Vec::new(), grpc, grpc_tls, http, http_tls, links })
    }
}

impl BoundListeners {
    /// Name and address of each.
    pub(super) fn addresses(&self) -> Result<Vec<(String, Address)>, StartError> {
        let devices = self.devices.iter();
        let mut all: Vec<_> =
            devices.map(|listener| (listener.name().to_owned(), listener.address().clone())).collect();
        all.push(("grpc".to_owned(), Address::Ip(self.grpc.local_addr()?)));
        if let Some(http) = &self.http {
            all.push(("http".to_owned(), Address::Ip(http.local_addr()?)));
        }
        Ok(all)
    }
}

/// A listener of devices before it is bound.
struct PreparedListener {
    /// Configuration key of the address.
    key: String,
    address: Address,
    listener: config::Listener,
    tls: Option<TlsHandle>,
    optional: bool,
}

impl PreparedListener {
    fn bind(
        &self,
        socket: Option<TcpListener>,
        config: &Config,
    ) -> Result<Option<BoundListener>, StartError> {
        let name = &self.listener.name;
        let failed =
            |error| StartError::Bind { key: self.key.clone(), address: self.address.to_string(), error };
        let ipv6_only = self.listener.ipv6_only;
        let bound = match (socket, &self.address) {
            #[cfg(feature = "quic")]
            (_, Address::Ip(address)) if self.listener.kind == ListenerKind::Quic => {
                BoundListener::bind_quic(name, *address, ipv6_only, config.quic)
            }
            (Some(socket), _) => BoundListener::from_std(name, socket),
            (None, Address::Ip(address)) => BoundListener::bind(name, *address, ipv6_only),
            (None, Address::Unix(path)) => BoundListener::bind_unix(name, path, self.listener.mode),
        };
        let mut bound = match bound {
            Ok(bound) => bound,
            Err(error) if self.optional => {
                warn!(listener = name, address = %self.address, %error, "development listener left out");
                return Ok(None);
            }
            Err(error) => return Err(failed(error)),
        };
        bound = bound.with_tcp_keepalive(config.limits.tcp_keepalive.0).map_err(failed)?;
        if let Some(tls) = &self.tls {
            bound = bound.with_tls(Arc::clone(tls));
        }
        if self.listener.kind.is_websocket() {
            bound = bound.with_websocket(&self.listener.path, self.listener.allowed_origins.clone());
        }
        if self.listener.proxy_protocol {
            bound = bound.with_proxy_protocol();
        }
        if let Some(durability) = self.listener.durability {
            bound = bound.with_durability(durability.into());
        }
        if self.listener.max_connections > 0 {
            bound = bound.with_max_connections(self.listener.max_connections);
        }
        Ok(Some(bound))
    }
}

fn prepare_devices(config: &Config, tls: &TlsStore) -> Result<Vec<PreparedListener>, StartError> {
    let mut prepared = Vec::new();
    for (address, listener) in config.effective_listeners() {
        let tls = match listener.kind {
            ListenerKind::Tls | ListenerKind::Wss => {
                Some(add_tls(tls, &tls_use(&listener.name), config.listener_tls(&listener), &[])?)
            }
            #[cfg(feature = "quic")]
            ListenerKind::Quic => {
                let files = config.listener_tls(&listener);
                Some(add_tls(tls, &tls_use(&listener.name), files, &[net::ALPN])?)
            }
            // Without the feature the configuration is refused.
            #[cfg(not(feature = "quic"))]
            ListenerKind::Quic => None,
            ListenerKind::Tcp | ListenerKind::Ws => None,
        };
        let optional = config.dev && listener.name.starts_with("dev-");
        let listed = config.listeners.iter().position(|known| known.name == listener.name);
        let key = listed.map_or_else(|| "addr".to_owned(), |number| format!("listeners[{number}].address"));
        prepared.push(PreparedListener { key, address, listener, tls, optional });
    }
    Ok(prepared)
}

/// Returns the name of the TLS use of a device listener.
pub(super) fn tls_use(listener: &str) -> String {
    format!("listener {listener}")
}

fn add_tls(
    store: &TlsStore,
    name: &str,
    files: config::TlsFiles,
    alpn: &[&[u8]],
) -> Result<TlsHandle, StartError> {
    store.add(name, files, alpn).map_err(|error| StartError::Tls { name: name.to_owned(), error })
}

/// The sockets of gRPC and HTTP.
fn bind_for_backends(
    config: &Config,
    sockets: &mut BTreeMap<String, TcpListener>,
) -> Result<(TcpListener, Option<TcpListener>), StartError> {
    let (grpc, http) = (&config.grpc, &config.http);
    let grpc = take_or_bind(sockets.remove("grpc"), "grpc_addr", config.grpc_addr, grpc.ipv6_only, config)?;
    let http = match http.enabled {
        true => {
            let socket = sockets.remove("http");
            Some(take_or_bind(socket, "http_addr", config.http_addr, http.ipv6_only, config)?)
        }
        false => None,
    };
    Ok((grpc, http))
}

fn take_or_bind(
    socket: Option<TcpListener>,
    key: &str,
    address: SocketAddr,
    ipv6_only: bool,
    config: &Config,
) -> Result<TcpListener, StartError> {
    let failed = |error| StartError::Bind { key: key.to_owned(), address: address.to_string(), error };
    let socket = match socket {
        Some(socket) => socket,
        None => net::listen(address, ipv6_only).map_err(failed)?,
    };
    // The standard library's backlog is 128: in a flood of connections the system would have others try again a second
    // later.
    socket2::SockRef::from(&socket).listen(BACKLOG)?;
    probe_silent_peers(&socket, config.limits.tcp_keepalive.0)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}
