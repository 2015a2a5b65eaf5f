//! `[quic]`: listeners of kind `quic`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Address, ByteSize, Config, Listener, ListenerKind, Span, validate::Check};

/// `[quic]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Quic {
    /// Bytes that a connection may have on the way in each direction; both are on the memory account while it lasts.
    pub window: ByteSize,
    /// A connection of which nothing at all comes for this long is lost; zero leaves that to MQTT's keep alive.
    pub idle_timeout: Span,
    /// Let a connection go on when its device's address changes. Packets with a forged address then draw many times their size.
    pub migration: bool,
}

impl Default for Quic {
    fn default() -> Self {
        Self { window: ByteSize(16 << 10), idle_timeout: Span(Duration::from_mins(5)), migration: false }
    }
}

/// Below it a full packet would not fit.
const LEAST_WINDOW: usize = 2 << 10;
/// Each connection could make the gateway hold twice as much.
const MOST_WINDOW: usize = 16 << 20;
/// Longest idle timeout: QUIC can say milliseconds in 62 bits, but nobody waits for years.
const LONGEST_IDLE: Duration = Duration::from_hours(24 * 365);

impl Config {
    pub(super) fn check_quic(&self, check: &mut Check) {
        for (number, listener) in self.listeners.iter().enumerate() {
            if listener.kind == ListenerKind::Quic {
                self.check_quic_listener(listener, &|name| format!("listeners[{number}].{name}"), check);
            }
        }
        let window = self.quic.window;
        if !(LEAST_WINDOW..=MOST_WINDOW).contains(&window.0) {
            check.fail("quic.window", window, "not between 2 KiB and 16 MiB", "write it like \"16 KiB\"");
        }
        let idle = self.quic.idle_timeout;
        if idle.0 > LONGEST_IDLE {
            let fix = "write it like \"5m\", or 0 for no limit";
            check.fail("quic.idle_timeout", idle, "longer than a year", fix);
        }
    }

    fn check_quic_listener(&self, listener: &Listener, key: &dyn Fn(&str) -> String, check: &mut Check) {
        if !cfg!(feature = "quic") {
            check.fail(
                key("kind"),
                "quic",
                "this build has no QUIC",
                "build with --features quic, or take tls",
            );
        }
        if let Some(address @ Address::Unix(_)) = &listener.address {
            check.fail(key("address"), address, "QUIC runs over UDP", "write ip:port or [v6]:port");
        }
        if listener.proxy_protocol {
            let problem = "there is no PROXY protocol for QUIC";
            check.fail(
                key("proxy_protocol"),
                true,
                problem,
                "set it to false: the device's address is known",
            );
        }
        let suites = &self.tls.ciphersuites;
        if !suites.is_empty() && !suites.iter().any(|suite| suite.is_tls13()) {
            check.fail(
                "tls.ciphersuites",
                format!("{suites:?}"),
                "none of them is of TLS 1.3, and QUIC has no other",
                "add TLS_AES_128_GCM_SHA256",
            );
        }
    }
}
