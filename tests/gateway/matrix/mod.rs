//! Every way in for devices, and everything that rules decide: allowed and denied, over each kind of listener and in each
//! version of MQTT. The rows of [`logins`] and [`deeds`] are to be read. Each denial must have its code, its counter and a line
//! in the log without a secret. Backends have theirs in tests/grpc/access/roles.rs.

mod deeds;
mod logins;
mod ways;

use std::net::SocketAddr;

use serde_json::Value;

use crate::support::Server;

/// Lines of the log with this message about a connection from `peer`.
fn lines(server: &Server, message: &str, peer: SocketAddr) -> Vec<Value> {
    let (peer, message) = (format!("\"{peer}\""), format!("\"{message}\""));
    let log = server.log();
    // The last line may be half written.
    let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let lines = whole.lines().filter(|line| line.contains(&peer) && line.contains(&message));
    lines.map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}
