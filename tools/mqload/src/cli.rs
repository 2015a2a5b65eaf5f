//! Command-line options shared by the sub-commands.

use crate::client::{ClientCfg, LOWEST_PORT, Pace};
use crate::clock;
use crate::procstat::Target;
use crate::report::Report;
use crate::tls::{self, TlsOpts};
use crate::ws;
use clap::Args;
use rustls::pki_types::ServerName;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;

/// How to reach the broker.
#[derive(Args, Clone, Debug)]
pub struct BrokerArgs {
    /// Host name or address of the broker
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// TCP port of the broker
    #[arg(long, short, default_value_t = 1883)]
    pub port: u16,
    /// Speak MQTT 5 (default: 3.1.1)
    #[arg(long)]
    pub v5: bool,
    #[arg(long)]
    pub username: Option<String>,
    #[arg(long)]
    pub password: Option<String>,
    /// Keep alive in seconds, with PINGREQ every three quarters of it; 0: none
    #[arg(long, default_value_t = 0)]
    pub keepalive: u16,
    /// v5: receive maximum announced in CONNECT; 0: not sent (65535)
    #[arg(long, default_value_t = 0)]
    pub receive_max: u16,
    /// Beginning of client ids and topics; default: different in each run
    #[arg(long)]
    pub prefix: Option<String>,
    /// Connect with TLS (full handshakes unless --resume)
    #[arg(long)]
    pub tls: bool,
    /// Resume TLS sessions; conn: some connections fetch tickets first and are not counted
    #[arg(long, requires = "tls")]
    pub resume: bool,
    /// MQTT over WebSocket
    #[arg(long)]
    pub ws: bool,
    /// Path of the WebSocket request
    #[arg(long, value_name = "PATH", default_value = "/mqtt")]
    pub ws_path: String,
    /// Trusted CA certificates, PEM
    #[arg(long, value_name = "FILE")]
    pub cafile: Option<String>,
    /// Accept any server certificate
    #[arg(long)]
    pub insecure: bool,
    /// Name to verify and send as SNI (default: --host)
    #[arg(long, value_name = "NAME")]
    pub server_name: Option<String>,
    /// Client certificate chain, PEM
    #[arg(long, value_name = "FILE")]
    pub cert: Option<String>,
    /// Key of the client certificate, PEM
    #[arg(long, value_name = "FILE")]
    pub key: Option<String>,
    /// TLS 1.2 only
    #[arg(long)]
    pub tls12: bool,
    /// Use this many source addresses (127.0.0.2 and on); 0: as needed
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub source_ips: usize,
    /// TCP congestion control of mqload's own sockets (default: the system's)
    #[arg(long, value_name = "NAME")]
    pub congestion: Option<String>,
    /// Seconds that one handshake may take
    #[arg(long, value_name = "S", default_value_t = 10.0)]
    pub connect_timeout: f64,
}

impl BrokerArgs {
    pub fn prefix(&self) -> String {
        self.prefix.clone().unwrap_or_else(|| {
            let t = clock::now() ^ ((std::process::id() as u64) << 20);
            format!("mq{:06x}", t & 0xff_ffff)
        })
    }

    /// Checks the options and resolves the address. `conns`: how many
    /// connections there will be.
    pub fn client_cfg(&self, conns: usize, nofile: u64) -> Result<Arc<ClientCfg>, String> {
        if conns as u64 + 32 > nofile {
            return Err(format!(
                "{conns} connections do not fit in the limit of {nofile} open files; \
                 run several mqload processes"
            ));
        }
        let addr: SocketAddr = (self.host.as_str(), self.port)
            .to_socket_addrs()
            .map_err(|e| format!("--host {}: {e}", self.host))?
            .next()
            .ok_or_else(|| format!("--host {}: no address", self.host))?;
        let tls = if self.tls {
            let cfg = tls::config(&TlsOpts {
                cafile: self.cafile.as_deref(),
                insecure: self.insecure,
                cert: self.cert.as_deref(),
                key: self.key.as_deref(),
                tls12_only: self.tls12,
                resume: self.resume,
            })?;
            let name = self.server_name.as_ref().unwrap_or(&self.host).clone();
            let name = ServerName::try_from(name).map_err(|e| format!("--server-name: {e}"))?;
            Some((cfg, name))
        } else {
            None
        };
        if self.password.is_some() && self.username.is_none() && !self.v5 {
            return Err("--password needs --username in MQTT 3.1.1".into());
        }
        let needed = match self.source_ips {
            0 if conns < ephemeral_ports() * 9 / 10 => 0,
            0 => conns.div_ceil(20_000),
            n => n,
        };
        if needed > 0 && !addr.ip().is_loopback() {
            return Err("several source addresses are only for a broker on loopback".into());
        }
        if needed > 250 {
            return Err("--source-ips: 250 at most".into());
        }
        let sources = (0..needed).map(|i| IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2 + i as u8))).collect();
        Ok(Arc::new(ClientCfg {
            addr,
            v5: self.v5,
            keepalive: self.keepalive,
            username: self.username.clone(),
            password: self.password.clone(),
            session_expiry: 3600,
            receive_max: self.receive_max,
            tls,
            ws: self.ws.then(|| ws::request(&format!("{}:{}", self.host, self.port), &self.ws_path)),
            sources,
            congestion: self.congestion.clone(),
        }))
    }

    pub fn pace(&self, inflight: usize, rate: f64) -> Pace {
        Pace { inflight: inflight.max(1), rate, timeout: clock::secs(self.connect_timeout) }
    }

    /// Returns the transport of the connections, for titles.
    pub fn transport(&self) -> &'static str {
        match (self.tls, self.ws) {
            (false, false) => "",
            (true, false) => ", TLS",
            (false, true) => ", WebSocket",
            (true, true) => ", WebSocket over TLS",
        }
    }

    pub fn report(&self, r: &mut Report) {
        r.set("host", self.host.clone());
        r.set("port", self.port);
        r.set("protocol", if self.v5 { "5.0" } else { "3.1.1" });
        r.set("tls", self.tls);
        r.set("resume", self.resume);
        r.set("ws", self.ws);
        r.set("keepalive", self.keepalive);
        r.set("receive_max", self.receive_max);
        let system = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
        let system = system.unwrap_or_default().trim().to_string();
        r.set("congestion_system", system.clone());
        r.set("congestion_own", self.congestion.clone().unwrap_or(system));
    }
}

fn ephemeral_ports() -> usize {
    let s = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let v: Vec<usize> = s.split_whitespace().filter_map(|x| x.parse().ok()).collect();
    match v[..] {
        [lo, hi] if hi > lo => hi.saturating_sub(lo.max(LOWEST_PORT as usize)),
        _ => 28_000,
    }
}

/// What to watch and how to report.
#[derive(Args, Clone, Debug)]
pub struct MeasureArgs {
    /// Process of the broker, to measure its CPU and memory (may be repeated)
    #[arg(long)]
    pub pid: Vec<i32>,
    /// Count the descendants of --pid too
    #[arg(long)]
    pub pid_tree: bool,
    /// Reset the broker's peak RSS (VmHWM) before the run
    #[arg(long)]
    pub reset_peak: bool,
    /// Text put into the report, to tell runs apart
    #[arg(long)]
    pub label: Option<String>,
    /// No table on stderr
    #[arg(long, short)]
    pub quiet: bool,
}

impl MeasureArgs {
    pub fn target(&self) -> Result<Target, String> {
        let t = Target { pids: self.pid.clone(), tree: self.pid_tree };
        if let Some(p) = t.missing() {
            return Err(format!("--pid {p}: no such process"));
        }
        if self.reset_peak {
            t.reset_peak();
        }
        Ok(t)
    }
}

/// Pace of opening connections, where that is not what is measured.
#[derive(Args, Clone, Debug)]
pub struct ConnectArgs {
    /// Handshakes under way at once
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub connect_inflight: usize,
    /// Connections a second; 0: as fast as possible
    #[arg(long, value_name = "R", default_value_t = 0.0)]
    pub connect_rate: f64,
}
