//! Rules between values, section by section. Reads no file and opens no port.

use std::{fmt::Display, net::SocketAddr, time::Duration};

use super::{Address, Binding, ByteSize, Config, ConfigError, Limits, ListenerKind, Problem, log_level};

/// Least of `latest.ledger_interval`, and of `latest.ledger_bytes`.
const SHORTEST_LEDGER_INTERVAL: Duration = Duration::from_millis(100);
const LEAST_LEDGER_BYTES: usize = 16 << 10;

impl Config {
    /// Checks every section.
    ///
    /// # Errors
    /// All rules broken, each with key, value and fix.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut check = Check::default();
        self.check_top(&mut check);
        self.check_log(&mut check);
        self.check_listeners(&mut check);
        self.check_quic(&mut check);
        self.check_auth(&mut check);
        self.check_backends(&mut check);
        self.check_backends_section(&mut check);
        self.check_dev(&mut check);
        self.check_small_sections(&mut check);
        self.check_database(&mut check);
        self.check_cluster(&mut check);
        self.check_groups(&mut check);
        self.check_commands(&mut check);
        self.check_shadow(&mut check);
        self.check_bans(&mut check);
        self.check_tenants(&mut check);
        self.check_bridges(&mut check);
        check_limits(&self.limits, self.store.enabled, &mut check);
        check.finish()
    }

    /// Returns warnings about settings that are allowed but doubtful.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for (address, listener) in self.effective_listeners() {
            if !listener.kind.is_tls() && !address.is_local() {
                warnings.push(format!(
                    "listener {} on {address} is plaintext and reachable from other machines",
                    listener.name
                ));
            }
            if !listener.kind.is_tls() && listener.require_client_cert {
                warnings.push(format!(
                    "listener {} is plaintext: require_client_cert has no effect",
                    listener.name
                ));
            }
        }
        if self.non_tls && !self.grpc.tls {
            warnings.push(format!(
                "gRPC on {} is plaintext, as is MQTT with non_tls; name a certificate with --cert and --key for TLS",
                self.grpc_addr
            ));
        }
        let jwt = &self.backends.jwt;
        if jwt.key_file.is_some() && jwt.audience.is_empty() && jwt.key_file == self.auth.jwt.key_file {
            warnings.push(
                "backends and devices have the same keys for tokens; tell theirs apart with backends.jwt.audience"
                    .to_owned(),
            );
        }
        let backends = [("gRPC", self.grpc_addr), ("HTTP", self.http_addr)];
        for (name, addr) in backends {
            let serves = self.http.enabled || name != "HTTP";
            let asks = if name == "HTTP" { self.backends.takes_bearers() } else { self.backends.is_on() };
            if serves && self.insecure_grpc && !asks && !loopback(addr) {
                warnings.push(format!(
                    "{name} on {addr} is reachable from other machines, and nothing asks who calls (insecure_grpc)"
                ));
            }
            let secret = if name == "gRPC" { self.grpc.tls } else { self.http.tls };
            if serves && asks && !secret && !loopback(addr) {
                warnings.push(format!(
                    "{name} on {addr} has no TLS: whoever listens on the way reads the tokens of those who call"
                ));
            }
        }
        warnings
    }

    fn check_top(&self, check: &mut Check) {
        if self.shards > 1024 {
            check.fail("shards", self.shards, "more threads than make sense", "use 0 for one per core");
        }
        let once = self.namespace.matches("{client_id}").count() == 1;
        let level = self.namespace.split('/').any(|level| level == "{client_id}");
        if !once || !level {
            check.fail(
                "namespace",
                &self.namespace,
                "does not have {client_id} once, as a whole level",
                "write it like devices/{client_id}/#",
            );
        } else if !filter_is_valid(&self.namespace) || self.namespace.starts_with('$') {
            check.fail(
                "namespace",
                &self.namespace,
                "not a topic filter",
                "write it like devices/{client_id}/#",
            );
        }
        let response = self.response_pattern().replace("{client_id}", "");
        if response.contains(['+', '#', '{', '}', '\0']) {
            check.fail(
                "response_information",
                &self.response_information,
                "not a topic with {namespace} and {client_id} in it",
                "write it like {namespace} or replies/{client_id}, or empty for none",
            );
        }
        for (key, path) in [("cert", &self.cert), ("key", &self.key), ("data_dir", &self.data_dir)] {
            if path.as_os_str().is_empty() {
                check.fail(key, "\"\"", "empty path", "name a file or directory, or remove the key");
            }
        }
    }

    fn check_log(&self, check: &mut Check) {
        if let Err(problem) = log_level::parse(&self.log.level) {
            check.fail(
                "log.level",
                format!("\"{}\"", self.log.level),
                problem,
                "use error, warn, info, debug or trace, also per module: info,mqtt_server::net=debug",
            );
        }
    }

    fn check_listeners(&self, check: &mut Check) {
        if self.addr.is_none() && self.listeners.is_empty() {
            check.fail("addr", "\"\"", "no listener at all", "set addr or add a [[listeners]] table");
        }
        let mut names = vec!["default", "dev-tcp", "dev-ws"];
        for (number, listener) in self.listeners.iter().enumerate() {
            let key = |name: &str| format!("listeners[{number}].{name}");
            if listener.name.is_empty() {
                check.fail(key("name"), "\"\"", "no name", "give every listener its own name");
            } else if names.contains(&listener.name.as_str()) {
                check.fail(key("name"), &listener.name, "name is taken", "give every listener its own name");
            }
            names.push(&listener.name);
            if listener.address.is_none() {
                check.fail(
                    key("address"),
                    "\"\"",
                    "no address",
                    "write ip:port, [v6]:port or unix:/path, such as 127.0.0.1:8884",
                );
            }
            if listener.kind.is_websocket() && !listener.path.starts_with('/') {
                check.fail(key("path"), &listener.path, "does not start with /", "write it like /mqtt");
            }
            if let Some(origin) = listener.allowed_origins.iter().find(|origin| !is_origin(origin)) {
                check.fail(
                    key("allowed_origins"),
                    origin,
                    "not an origin",
                    "write it like https://app.example.com, with the port if there is one, or * for all",
                );
            }
            if listener.cert.is_some() != listener.key.is_some() {
                let (set, unset) = if listener.cert.is_some() { ("cert", "key") } else { ("key", "cert") };
                check.fail(key(unset), "\"\"", format!("{set} is set without {unset}"), "set both or none");
            }
            let require = listener.require_client_cert || self.tls.require_client_cert;
            let ca = listener.client_ca.is_some() || self.tls.client_ca.is_some();
            if listener.kind.is_tls() && require && !ca {
                check.fail(
                    key("require_client_cert"),
                    true,
                    "no CA to check client certificates with",
                    "set client_ca here or in [tls]",
                );
            }
        }
        if self.tls.require_client_cert
            && self.tls.client_ca.is_none()
            && self.addr.is_some()
            && !self.non_tls
        {
            check.fail(
                "tls.require_client_cert",
                true,
                "no CA to check client certificates with",
                "set tls.client_ca",
            );
        }
        if self.tls.crl.is_some() && self.tls_uses().iter().all(|(_, files)| files.client_ca.is_none()) {
            let crl = self.tls.crl.as_ref().map(|p| p.display().to_string()).unwrap_or_default();
            check.fail(
                "tls.crl",
                crl,
                "nothing checks client certificates",
                "set tls.client_ca, or remove it",
            );
        }
        if let Some([key, problem, fix]) = self.tls_problem() {
            check.fail(key, format!("{:?}", self.tls.ciphersuites), problem, fix);
        }
        self.check_addresses(check);
    }

    fn check_addresses(&self, check: &mut Check) {
        let mut taken: Vec<(String, Binding, bool)> = Vec::new();
        let bound = |address, ipv6_only| Binding { address, ipv6_only };
        let top = self.addr.iter().map(|address| bound(address.clone(), self.ipv6_only));
        let top = top.map(|binding| ("addr".to_owned(), binding, false));
        let listed = self.listeners.iter().enumerate().filter_map(|(number, listener)| {
            // Ports of UDP are others than those of TCP.
            let udp = listener.kind == ListenerKind::Quic;
            let binding = bound(listener.address.clone()?, listener.ipv6_only);
            Some((format!("listeners[{number}].address"), binding, udp))
        });
        let http = bound(Address::Ip(self.http_addr), self.http.ipv6_only);
        let http = self.http.enabled.then(|| ("http_addr".to_owned(), http, false));
        let grpc = bound(Address::Ip(self.grpc_addr), self.grpc.ipv6_only);
        let grpc = ("grpc_addr".to_owned(), grpc, false);
        for (key, binding, udp) in top.chain(listed).chain([grpc]).chain(http) {
            let address = &binding.address;
            let other =
                taken.iter().find(|(_, other, other_udp)| *other_udp == udp && other.collides(&binding));
            if let Some((other, ..)) = other {
                check.fail(&key, address, format!("same address as {other}"), "give each its own port");
            }
            if binding.ipv6_only && !address.is_ipv6() {
                let problem = "no address of IPv6, and its ipv6_only is true";
                check.fail(&key, address, problem, "write [::] and the port, or leave ipv6_only out");
            }
            taken.push((key, binding, udp));
        }
    }

    fn check_backends(&self, check: &mut Check) {
        let grpc = &self.grpc;
        if grpc.cert.is_some() != grpc.key.is_some() {
            let (set, unset) = if grpc.cert.is_some() { ("cert", "key") } else { ("key", "cert") };
            check.fail(
                format!("grpc.{unset}"),
                "\"\"",
                format!("{set} is set without {unset}"),
                "set both or none",
            );
        }
        if grpc.require_client_cert && grpc.client_ca.is_none() {
            check.fail(
                "grpc.require_client_cert",
                true,
                "no CA to check client certificates with",
                "set grpc.client_ca",
            );
        }
        let mtls = grpc.tls && grpc.require_client_cert && grpc.client_ca.is_some();
        if !loopback(self.grpc_addr) && !mtls && !self.backends.is_on() && !self.insecure_grpc {
            check.fail(
                "grpc_addr",
                self.grpc_addr,
                "reachable from other machines, and nothing asks who calls",
                "make a token with 'mqtt-server token create' and set backends.tokens, set grpc.client_ca and \
                 grpc.require_client_cert, use a loopback address, or accept it with --insecure-grpc",
            );
        }
        let local = self.non_tls && loopback(self.grpc_addr);
        if !grpc.tls && !self.dev && !self.insecure_grpc && !local {
            check.fail(
                "grpc.tls",
                false,
                "plaintext gRPC is for development",
                "set it to true, or accept it with --dev or --insecure-grpc, or with --non-tls on a loopback address",
            );
        }
        let http = &self.http;
        if http.cert.is_some() != http.key.is_some() {
            let (set, unset) = if http.cert.is_some() { ("cert", "key") } else { ("key", "cert") };
            let problem = format!("{set} is set without {unset}");
            check.fail(format!("http.{unset}"), "\"\"", problem, "set both or none");
        }
        if http.cert.is_some() && !http.tls {
            check.fail("http.cert", "", "HTTP has no TLS to show it", "set http.tls = true, or remove it");
        }
        let reached = self.http.enabled && !loopback(self.http_addr) && !self.insecure_grpc;
        if reached && self.backends.takes_bearers() && !http.tls && !http.plaintext_tokens {
            check.fail(
                "http_addr",
                self.http_addr,
                "whoever listens on the way reads the tokens of those who call, since HTTP has no TLS",
                "set http.tls = true, use a loopback address and put a proxy with TLS before it, or accept it with http.plaintext_tokens = true \
                 and give /metrics a token that can do nothing else (--role reader --topics none)",
            );
        }
        if reached && !self.backends.takes_bearers() {
            check.fail(
                "http_addr",
                self.http_addr,
                "reachable from other machines, and nothing asks who calls or reads the metrics",
                "make a token with 'mqtt-server token create' and set backends.tokens, use a loopback address, switch \
                 it off with http.enabled = false, or accept it with --insecure-grpc",
            );
        }
    }

    fn check_dev(&self, check: &mut Check) {
        if !self.dev {
            return;
        }
        let listed = self.listeners.iter().enumerate().filter_map(|(number, listener)| {
            Some((format!("listeners[{number}].address"), listener.address.clone()?))
        });
        let top = self.addr.iter().map(|address| ("addr".to_owned(), address.clone()));
        let backends = [("grpc_addr", self.grpc_addr), ("http_addr", self.http_addr)];
        let backends = backends.into_iter().map(|(key, addr)| (key.to_owned(), Address::Ip(addr)));
        for (key, address) in top.chain(listed).chain(backends) {
            if !address.is_local() {
                check.fail(
                    key,
                    address,
                    "--dev is for this machine only",
                    "use a loopback address, or run without --dev and with your own certificates",
                );
            }
        }
    }

    fn check_small_sections(&self, check: &mut Check) {
        check.positive(
            "grpc.default_deadline",
            self.grpc.default_deadline,
            self.grpc.default_deadline.0.is_zero(),
        );
        check.positive("grpc.max_streams", self.grpc.max_streams, self.grpc.max_streams == 0);
        let grpc = &self.grpc;
        for (name, number) in [
            ("max_connections", grpc.max_connections),
            ("max_handshakes", grpc.max_handshakes),
            ("max_calls_per_connection", grpc.max_calls_per_connection),
            ("max_calls", grpc.max_calls),
            ("idempotency_keys", grpc.idempotency_keys),
            ("scheduled_messages", grpc.scheduled_messages),
        ] {
            check.positive(&format!("grpc.{name}"), number, number == 0);
        }
        for (name, time) in [
            ("grpc.handshake_timeout", grpc.handshake_timeout),
            ("grpc.idempotency_time", grpc.idempotency_time),
            ("grpc.keepalive_interval", grpc.keepalive_interval),
            ("grpc.keepalive_timeout", grpc.keepalive_timeout),
            ("http.write_timeout", self.http.write_timeout),
        ] {
            check.positive(name, time, time.0.is_zero());
        }
        check.positive("grpc.scheduled_bytes", grpc.scheduled_bytes, grpc.scheduled_bytes.0 == 0);
        check.positive("http.max_connections", self.http.max_connections, self.http.max_connections == 0);
        check.positive("http.max_requests", self.http.max_requests, self.http.max_requests == 0);
        check.positive("http.max_streams", self.http.max_streams, self.http.max_streams == 0);
        check.positive("http.max_body", self.http.max_body, self.http.max_body.0 == 0);
        check.positive("http.body_timeout", self.http.body_timeout, self.http.body_timeout.0.is_zero());
        if let Some(origin) = self.http.cors_origins.iter().find(|origin| !is_origin(origin)) {
            check.fail(
                "http.cors_origins",
                origin,
                "not an origin",
                "write it like https://app.example.com, with the port if there is one, or * for all",
            );
        }
        check.positive("http.header_timeout", self.http.header_timeout, self.http.header_timeout.0.is_zero());
        check.positive(
            "latest.flush_interval",
            self.latest.flush_interval,
            self.latest.flush_interval.0.is_zero(),
        );
        check.positive("latest.max_bytes", self.latest.max_bytes, self.latest.max_bytes.0 == 0);
        check.positive(
            "latest.topics_per_device",
            self.latest.topics_per_device,
            self.latest.topics_per_device == 0,
        );
        let interval = self.latest.ledger_interval;
        if interval.0 < SHORTEST_LEDGER_INTERVAL {
            check.fail("latest.ledger_interval", interval, "shorter than 100 ms", "use 100ms or more");
        }
        let bytes = self.latest.ledger_bytes;
        if bytes.0 < LEAST_LEDGER_BYTES {
            check.fail("latest.ledger_bytes", bytes, "less than 16 KiB a second", "use 16 KiB or more");
        }
        check.positive("store.interval", self.store.interval, self.store.interval.0.is_zero());
        check.positive(
            "store.max_waiting_bytes",
            self.store.max_waiting_bytes,
            self.store.max_waiting_bytes.0 == 0,
        );
        check.positive("shutdown.deadline", self.shutdown.deadline, self.shutdown.deadline.0.is_zero());
        let excluded = self.latest.excluded.iter().map(|filter| ("latest.excluded", filter));
        let rules = self.store.rules.iter().map(|rule| ("store.rules", &rule.filter));
        for (key, filter) in excluded.chain(rules) {
            if !filter_is_valid(filter) {
                check.fail(
                    key,
                    filter,
                    "not a topic filter",
                    "use + as a whole level and # as the last level",
                );
            }
        }
        if self.sys.interval.0.as_secs() == 0 {
            check.fail("sys.interval", self.sys.interval, "shorter than a second", "use 1s or more");
        }
        if self.shutdown.disconnect_window > self.shutdown.deadline {
            check.fail(
                "shutdown.disconnect_window",
                self.shutdown.disconnect_window,
                format!("longer than shutdown.deadline ({})", self.shutdown.deadline),
                "make it shorter, or the deadline longer",
            );
        }
        if let Some(endpoint) = &self.otel.endpoint {
            check_endpoint(endpoint, check);
        }
    }
}

fn check_endpoint(endpoint: &str, check: &mut Check) {
    if !cfg!(feature = "otel") {
        check.fail(
            "otel.endpoint",
            endpoint,
            "this build has no OTLP export",
            "build with --features otel, or remove otel.endpoint",
        );
        return;
    }
    let authority = endpoint.strip_prefix("http://").map(|rest| rest.strip_suffix('/').unwrap_or(rest));
    let port = authority.and_then(|authority| authority.rsplit_once(':'));
    let good = port.is_some_and(|(host, port)| {
        let named = !host.is_empty() && !host.contains(['/', '?', '#', '@', ' ']);
        named && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    if !good {
        check.fail(
            "otel.endpoint",
            endpoint,
            "not http://host:port",
            "name a collector nearby, like http://127.0.0.1:4317; it can send on over TLS",
        );
    }
}

/// With `stored`, what waits for offline sessions is on disk and not in the budget.
fn check_limits(limits: &Limits, stored: bool, check: &mut Check) {
    let zero = |key: &str, value: &dyn Display, is_zero: bool, check: &mut Check| {
        check.positive(&format!("limits.{key}"), value, is_zero);
    };
    zero("max_packet_size", &limits.max_packet_size, limits.max_packet_size.0 == 0, check);
    zero("max_connect_size", &limits.max_connect_size, limits.max_connect_size.0 == 0, check);
    zero("subscription_bytes", &limits.subscription_bytes, limits.subscription_bytes.0 == 0, check);
    zero("packet_timeout", &limits.packet_timeout, limits.packet_timeout.0.is_zero(), check);
    zero("max_topic_bytes", &limits.max_topic_bytes, limits.max_topic_bytes == 0, check);
    zero("max_topic_levels", &limits.max_topic_levels, limits.max_topic_levels == 0, check);
    zero("max_client_id_bytes", &limits.max_client_id_bytes, limits.max_client_id_bytes == 0, check);
    zero("max_subscriptions", &limits.max_subscriptions, limits.max_subscriptions == 0, check);
    zero("max_filters_per_packet", &limits.max_filters_per_packet, limits.max_filters_per_packet == 0, check);
    zero("max_filter_shapes", &limits.max_filter_shapes, limits.max_filter_shapes == 0, check);
    zero("max_inflight", &limits.max_inflight, limits.max_inflight == 0, check);
    zero("receive_maximum", &limits.receive_maximum, limits.receive_maximum == 0, check);
    zero("mailbox_messages", &limits.mailbox_messages, limits.mailbox_messages == 0, check);
    zero("mailbox_bytes", &limits.mailbox_bytes, limits.mailbox_bytes.0 == 0, check);
    zero("max_connections", &limits.max_connections, limits.max_connections == 0, check);
    zero("max_handshakes", &limits.max_handshakes, limits.max_handshakes == 0, check);
    zero("connect_timeout", &limits.connect_timeout, limits.connect_timeout.0.is_zero(), check);
    zero("write_timeout", &limits.write_timeout, limits.write_timeout.0.is_zero(), check);
    zero("stream_buffer", &limits.stream_buffer, limits.stream_buffer.0 == 0, check);

    // 0 turns it off.
    let idle = limits.tcp_keepalive.0;
    if !idle.is_zero() && !(Duration::from_secs(1)..=Duration::from_secs(32_767)).contains(&idle) {
        check.fail(
            "limits.tcp_keepalive",
            limits.tcp_keepalive,
            "not between 1s and 32767s",
            "use 1h, or 0s for none",
        );
    }
    let most = 268_435_460; // The largest packet there is: 5 bytes of header and the largest remaining length.
    if limits.max_packet_size.0 > most {
        check.fail(
            "limits.max_packet_size",
            limits.max_packet_size,
            format!("larger than an MQTT packet can be ({most} bytes)"),
            "use 256 MiB or less",
        );
    }
    if limits.max_topic_bytes > 65_535 {
        check.fail(
            "limits.max_topic_bytes",
            limits.max_topic_bytes,
            "MQTT allows 65535",
            "use at most 65535",
        );
    }
    if limits.max_client_id_bytes > 65_535 {
        check.fail(
            "limits.max_client_id_bytes",
            limits.max_client_id_bytes,
            "MQTT allows 65535",
            "use at most 65535",
        );
    }
    if limits.max_qos > 2 {
        check.fail("limits.max_qos", limits.max_qos, "no such QoS", "use 0, 1 or 2");
    }
    if limits.keep_alive_max != 0 && limits.keep_alive_min > limits.keep_alive_max {
        check.fail(
            "limits.keep_alive_min",
            limits.keep_alive_min,
            format!("more than limits.keep_alive_max ({})", limits.keep_alive_max),
            "make it smaller, or keep_alive_max larger or 0",
        );
    }
    let in_memory = if stored { ByteSize(0) } else { limits.offline_bytes };
    let bounds = [
        ("max_packet_size", limits.max_packet_size, "mailbox_bytes", limits.mailbox_bytes),
        ("max_packet_size", limits.max_packet_size, "stream_buffer", limits.stream_buffer),
        ("mailbox_bytes", limits.mailbox_bytes, "memory_budget", limits.budget()),
        ("offline_bytes", in_memory, "memory_budget", limits.budget()),
    ];
    for (key, value, other, bound) in bounds {
        if value > bound && bound.0 != 0 {
            check.fail(
                format!("limits.{key}"),
                value,
                format!("more than limits.{other} ({bound}), so that nothing of that size could pass"),
                format!("make it smaller, or {other} larger"),
            );
        }
    }
    if limits.budget().0 < 1 << 20 {
        check.fail(
            "limits.memory_budget",
            limits.memory_budget,
            "too small for any traffic",
            "use 1 MiB or more",
        );
    }
    for group in limits.shared_groups.keys() {
        if group.is_empty() || group.contains(['/', '+', '#']) {
            check.fail(
                "limits.shared_groups",
                group,
                "not a group name",
                "use names without /, + and # [MQTT-4.8.2-1]",
            );
        }
    }
}

/// Gathers what is wrong.
#[derive(Default)]
pub(super) struct Check(Vec<Problem>);

impl Check {
    pub(super) fn finish(self) -> Result<(), ConfigError> {
        if self.0.is_empty() { Ok(()) } else { Err(ConfigError(self.0)) }
    }

    pub(super) fn fail(
        &mut self,
        key: impl Into<String>,
        value: impl Display,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.0.push(Problem::new(key, value, problem, fix));
    }

    pub(super) fn positive(&mut self, key: &str, value: impl Display, is_zero: bool) {
        if is_zero {
            self.fail(key, value, "zero", "use more than 0");
        }
    }
}

/// Returns whether a browser may send `text` as Origin, or the text is `*`.
fn is_origin(text: &str) -> bool {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    text == "*" || host.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*', ' ', '?', '#']))
}

fn loopback(addr: SocketAddr) -> bool {
    addr.ip().to_canonical().is_loopback()
}

/// Returns whether `filter` follows [MQTT-4.7.1-1] to [MQTT-4.7.1-3]; a leaf cannot ask `types`.
pub(super) fn filter_is_valid(filter: &str) -> bool {
    let levels: Vec<&str> = filter.split('/').collect();
    !filter.is_empty()
        && !filter.contains('\0')
        && levels.iter().enumerate().all(|(index, level)| match *level {
            "+" => true,
            "#" => index + 1 == levels.len(),
            level => !level.contains(['+', '#']),
        })
}
