use std::collections::BTreeMap;

use clap::Parser;
use toml::{Table, Value};

use super::*;

const SAMPLE: &str = include_str!("../../../docs/mqtt-server.toml");
const PAGE: &str = include_str!("../../../docs/configuration.md");

fn flags(line: &str) -> Flags {
    Flags::try_parse_from(std::iter::once("mqtt-server").chain(line.split_whitespace())).unwrap()
}

fn load(line: &str, file: &str, env: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let env: BTreeMap<String, String> = env.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    Config::load(&flags(line), Some(file), &env)
}

/// The only problem of a file.
fn problem(file: &str) -> Problem {
    let ConfigError(problems) = load("", file, &[]).unwrap_err();
    assert_eq!(problems.len(), 1, "{problems:?}");
    problems[0].clone()
}

fn keys(table: &Table, path: &str, into: &mut Vec<String>) {
    for (name, value) in table {
        let full = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match value {
            Value::Table(inner) if !inner.is_empty() => keys(inner, &full, into),
            _ => into.push(full),
        }
    }
}

#[test]
fn nothing_given_is_the_defaults() {
    assert_eq!(load("", "", &[]).unwrap(), Config::default());
}

#[test]
fn the_sample_file_has_every_key_with_its_default() {
    let defaults = load::schema();
    let sample: Table = SAMPLE.parse().unwrap();
    let (mut wanted, mut found) = (Vec::new(), Vec::new());
    keys(&defaults, "", &mut wanted);
    keys(&sample, "", &mut found);
    wanted.retain(|key| key != "listeners");
    wanted.sort();
    found.sort();
    assert_eq!(found, wanted);
    assert_eq!(load("", SAMPLE, &[]).unwrap(), Config::default());
}

#[test]
fn the_sample_file_has_every_key_of_a_listener() {
    let lines: Vec<&str> = SAMPLE.lines().filter_map(|line| line.strip_prefix("#: ")).collect();
    let config = load("", &lines.join("\n"), &[]).unwrap();
    let given = &config.listeners[0];
    let plain = Listener { name: given.name.clone(), address: given.address.clone(), ..Listener::default() };
    assert_eq!(*given, plain);
    let table: Table = lines.join("\n").parse().unwrap();
    let found: Vec<&String> = table["listeners"][0].as_table().unwrap().keys().collect();
    let defaults = Table::try_from(Listener::default()).unwrap();
    assert_eq!(found, defaults.keys().collect::<Vec<_>>());
}

/// Its tables, read as a file.
#[test]
fn the_page_has_every_key_with_its_default() {
    let (mut file, mut listener, mut section) = (String::new(), String::new(), "");
    for line in PAGE.lines() {
        if let Some(title) = line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with("##"))
        {
            section = title.trim_matches('`');
            if section.starts_with('[') && section != "[[listeners]]" {
                file += &format!("{section}\n");
            }
        }
        let mut cells = line.split('|').skip(1).map(|cell| cell.trim().strip_prefix('`')?.strip_suffix('`'));
        if let (Some(Some(key)), Some(Some(default))) = (cells.next(), cells.next()) {
            let into = if section == "[[listeners]]" { &mut listener } else { &mut file };
            *into += &format!("{key} = {default}\n");
        }
    }
    let (mut wanted, mut found) = (Vec::new(), Vec::new());
    keys(&load::schema(), "", &mut wanted);
    wanted.retain(|key| key != "listeners");
    keys(&file.parse().unwrap(), "", &mut found);
    wanted.sort();
    found.sort();
    assert_eq!(found, wanted);
    assert_eq!(load("", &file, &[]).unwrap(), Config::default());
    assert_eq!(listener.parse::<Table>().unwrap().len(), Table::try_from(Listener::default()).unwrap().len());
    let given = load("", &format!("[[listeners]]\n{listener}"), &[]).unwrap().listeners.remove(0);
    let plain = Listener { name: given.name.clone(), address: given.address.clone(), ..Listener::default() };
    assert_eq!(given, plain);
}

/// Its tables, by kind of bridge.
#[test]
fn the_page_on_bridges_has_every_key_with_its_default() {
    let page = include_str!("../../../docs/bridges.md");
    let known = load::bridge_schema();
    let mut sections = page.split("| key | default |").skip(1);
    let mut check = |known: &Table| {
        // The first line is the rest of the heading.
        let rows = sections.next().unwrap().lines().skip(1).take_while(|line| line.starts_with('|'));
        let found: String = rows
            .filter_map(|line| {
                let mut cells =
                    line.split('|').skip(1).map(|cell| cell.trim().strip_prefix('`')?.strip_suffix('`'));
                Some(format!("{} = {}\n", cells.next()??, cells.next()??))
            })
            .collect();
        let wanted: Table = known
            .iter()
            .filter(|(_, value)| !value.is_table())
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        assert_eq!(found.parse::<Table>().unwrap(), wanted);
    };
    check(&known);
    check(known["mqtt"].as_table().unwrap());
    check(known["webhook"].as_table().unwrap());
    check(known["kafka"].as_table().unwrap());
}

/// A password went out in clear where somebody had named the authority to check the other side by, and what lingered for longer than
/// its lease came again and again.
#[test]
fn a_bridge_that_would_not_do_what_is_meant_is_refused() {
    let mqtt = |key: &str| {
        format!("[bridges.b.mqtt]\nurl = \"mqtt://127.0.0.1:1\"\ncert = \"c\"\nkey = \"k\"\n{key}")
    };
    for (file, key, fix) in [
        (mqtt("ca = \"a\""), "bridges.b.mqtt.ca", "mqtts://"),
        (mqtt(""), "bridges.b.mqtt.cert", "mqtts://"),
        (mqtt(""), "bridges.b.mqtt.key", "mqtts://"),
        (format!("[bridges.b]\nlinger = \"31s\"\n{}", mqtt("")), "bridges.b.linger", "shorter"),
    ] {
        let ConfigError(problems) = load("", &file, &[]).unwrap_err();
        let found = problems.iter().find(|problem| problem.key == key);
        assert!(found.is_some_and(|problem| problem.fix.contains(fix)), "{key}: {problems:?}");
    }
}

#[test]
fn wrong_keys_are_refused_with_the_nearest_right_one() {
    for (file, key, fix) in [
        ("adr = \"127.0.0.1:1\"", "adr", "'addr'"),
        ("[limits]\nmax_inflght = 3", "limits.max_inflght", "'limits.max_inflight'"),
        ("max_inflight = 3", "max_inflight", "'limits.max_inflight'"),
        ("[tls]\nca = \"x\"", "tls.ca", "'"),
        ("[grpc]\nrequire_client_certs = true", "grpc.require_client_certs", "'grpc.require_client_cert'"),
        ("[nonsense]\nx = 1", "nonsense", "docs/mqtt-server.toml"),
        (
            "[[listeners]]\nname = \"a\"\naddress = \"127.0.0.1:5\"\nkinds = \"tcp\"",
            "listeners[0].kinds",
            "'kind'",
        ),
    ] {
        let problem = problem(file);
        assert_eq!((problem.key.as_str(), problem.problem.as_str()), (key, "unknown key"));
        assert!(problem.fix.contains(fix), "{problem}");
    }
}

#[test]
fn values_of_the_wrong_form_are_named_all_at_once() {
    let file = "addr = \"nowhere\"\nshards = \"two\"\n[limits]\nmax_qos = 300\nmax_packet_size = \"2 XB\"\n\
                overflow = \"explode\"\n[log]\nformat = 7\n[[listeners]]\nname = \"a\"\naddress = \"x\"\nkind = \"udp\"";
    let error = load("", file, &[("MQTT_SERVER_SYS__INTERVAL", "often")]).unwrap_err();
    let text = error.to_string();
    for part in [
        "addr = \"nowhere\"",
        "shards = \"two\"",
        "limits.max_qos = 300",
        "limits.max_packet_size = \"2 XB\"",
        "limits.overflow = \"explode\"",
        "log.format = 7",
        "listeners[0].address = \"x\"",
        "listeners[0].kind = \"udp\"",
        "sys.interval = \"often\" (from MQTT_SERVER_SYS__INTERVAL)",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(error.0.iter().all(|problem| !problem.fix.is_empty()), "{text}");
}

#[test]
fn a_file_that_is_not_toml_names_the_line() {
    let problem = problem("addr = \"127.0.0.1:1\"\nkey = = 3\n");
    assert_eq!(problem.key, "line 2");
    assert!(problem.fix.contains("key = = 3"), "{problem}");
}

#[test]
fn environment_goes_over_the_file() {
    let file = "addr = \"127.0.0.1:1\"\n[limits]\nmax_inflight = 5\nreceive_maximum = 7";
    let env = [
        ("MQTT_SERVER_ADDR", "127.0.0.1:2"),
        ("MQTT_SERVER_LIMITS__MAX_INFLIGHT", "100"),
        ("MQTT_SERVER_LIMITS__MAILBOX_BYTES", "2 MiB"),
        ("MQTT_SERVER_LATEST__EXCLUDED", "a/#, b/+"),
        ("MQTT_SERVER_SYS__ENABLED", "false"),
        ("MQTT_SERVER_CONFIG", "elsewhere.toml"),
        ("OTHER", "ignored"),
    ];
    let config = load("", file, &env).unwrap();
    assert_eq!(config.addr.as_ref().unwrap().to_string(), "127.0.0.1:2");
    assert_eq!((config.limits.max_inflight, config.limits.receive_maximum), (100, 7));
    assert_eq!(config.limits.mailbox_bytes, ByteSize(2 << 20));
    assert_eq!(config.latest.excluded, ["a/#", "b/+"]);
    assert!(!config.sys.enabled);
}

#[test]
fn wrong_environment_is_refused() {
    for (variable, value, parts) in [
        ("MQTT_SERVER_LIMITS__MAX_INFLGHT", "1", ["limits.max_inflght", "MQTT_SERVER_LIMITS__MAX_INFLIGHT?"]),
        ("MQTT_SERVER_LIMITS_MAX_INFLIGHT", "1", ["unknown key", "MQTT_SERVER_LIMITS__MAX_INFLIGHT?"]),
        ("MQTT_SERVER_ADRR", "x", ["unknown key", "did you mean MQTT_SERVER_ADDR?"]),
        ("MQTT_SERVER_ADRESS", "x", ["unknown key", "did you mean MQTT_SERVER_ADDR?"]),
        ("MQTT_SERVER_PORT", "8883", ["unknown key", "docs/mqtt-server.toml"]),
        ("MQTT_SERVER_LIMITS__MAX_INFLIGHT", "many", ["many", "whole number"]),
        ("MQTT_SERVER_NON_TLS", "maybe", ["maybe", "true or false"]),
        ("MQTT_SERVER_LIMITS", "x", ["limits", "section"]),
    ] {
        let error = load("", "", &[(variable, value)]).unwrap_err().to_string();
        for part in parts.into_iter().chain([variable, value]) {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}

#[test]
fn what_kubernetes_injects_for_a_service_of_this_name_configures_nothing() {
    let env = [
        ("MQTT_SERVER_PORT", "tcp://10.96.0.7:8883"),
        ("MQTT_SERVER_SERVICE_HOST", "10.96.0.7"),
        ("MQTT_SERVER_SERVICE_PORT_MQTTS", "8883"),
        ("MQTT_SERVER_PORT_8883_TCP_ADDR", "10.96.0.7"),
        ("MQTT_SERVER_SHARDS", "3"),
    ];
    let config = load("", "", &env).unwrap();
    assert_eq!(config, Config { shards: 3, ..Config::default() });
}

#[test]
fn flags_go_over_environment_and_file() {
    let env = [("MQTT_SERVER_ADDR", "127.0.0.1:2"), ("MQTT_SERVER_LOG__LEVEL", "warn")];
    let config = load("-a 127.0.0.1:3 --debug --log-format json", "addr = \"127.0.0.1:1\"", &env).unwrap();
    assert_eq!(config.addr.unwrap().to_string(), "127.0.0.1:3");
    assert_eq!((config.log.level.as_str(), config.log.format), ("debug", LogFormat::Json));
    let error = load("--addr nowhere", "", &[]).unwrap_err().to_string();
    assert!(error.contains("addr = \"nowhere\" (from --addr)"), "{error}");
}

#[test]
fn without_certificates_grpc_is_plaintext_on_loopback_only() {
    for line in ["--non-tls", "--non-tls --insecure-grpc"] {
        let config = load(line, "", &[]).unwrap();
        assert!(config.tls_uses().is_empty(), "{line}");
        let told = config.warnings().into_iter().filter(|line| line.contains("plaintext")).count();
        assert_eq!(told, 1, "{line}");
    }
    for line in [
        "",
        "--non-tls --dev",
        "--non-tls --cert a --key b",
        "--non-tls --insecure-grpc --grpc-addr 0.0.0.0:1",
        "--insecure-grpc",
    ] {
        assert!(load(line, "", &[]).unwrap().grpc_tls().is_some(), "{line}");
    }
    let asked = load("--non-tls", "[grpc]\ntls = true", &[]).unwrap();
    assert!(asked.grpc_tls().is_some(), "what is asked for stays");
    let own = load("--non-tls", "[grpc]\ncert = \"a\"\nkey = \"b\"", &[]).unwrap();
    assert!(own.grpc_tls().is_some(), "a certificate of its own is used");
    let listener = "[[listeners]]\nname = \"a\"\naddress = \"127.0.0.1:5\"\n";
    let needed = load("--non-tls", listener, &[]).unwrap();
    assert!(needed.grpc_tls().is_some(), "another listener needs the certificate anyway");
    assert!(load("", "[grpc]\ntls = false", &[]).is_err(), "with TLS for devices it is a decision");
}

#[test]
fn flags_of_the_precedent_are_understood() {
    let flags = flags("-a 127.0.0.1:1 -c c.pem -k k.pem --db_addr h:9042 -n --non-tls --trace");
    assert_eq!(flags.db_addr.as_deref(), Some("h:9042"));
    let config = Config::load(&flags, None, &BTreeMap::new()).unwrap();
    assert_eq!(config.contact_points(), ["h:9042"]);
    assert!(config.non_tls && config.non_broker);
    assert_eq!((config.cert.to_str(), config.key.to_str()), (Some("c.pem"), Some("k.pem")));
    assert_eq!(config.log.level, "trace");
    assert_eq!(config.effective_listeners()[0].1.kind, ListenerKind::Tcp);
}

#[test]
fn every_rule_names_key_value_and_fix() {
    let listener = "[[listeners]]\nname = \"a\"\naddress = \"127.0.0.1:5\"\n";
    for (file, key, value, fix) in [
        ("db_addr = \"a,b:x\"", "db_addr", "a,b:x", "HOST[:PORT]"),
        ("[commands]\nrequest = \"{id}\"", "commands.request", "{id}", "{id}/{name}"),
        ("[commands]\nrequest = \"{id}/+/{name}\"", "commands.request", "{id}/+/{name}", "{id}/{name}"),
        ("[commands]\nreply = \"{status}/{id}\"", "commands.reply", "{status}/{id}", "{id}/reply/{status}"),
        ("[commands]\nreply = \"{id}/{name}\"", "commands.reply", "{id}/{name}", "{id}/reply/{status}"),
        ("db_addr = \"a,\"", "db_addr", "a,", "HOST[:PORT]"),
        ("db_addr = \"http://a:9042\"", "db_addr", "http://a:9042", "without http://"),
        ("addr = \"127.0.0.1:70000\"", "addr", "\"127.0.0.1:70000\"", "0 to 65535"),
        ("addr = \"localhost:8883\"", "addr", "\"localhost:8883\"", "127.0.0.1:8883"),
        ("grpc_addr = \"127.0.0.1:70000\"", "grpc_addr", "\"127.0.0.1:70000\"", "0 to 65535"),
        (
            "http_addr = \"http://127.0.0.1:9090\"",
            "http_addr",
            "\"http://127.0.0.1:9090\"",
            "without http://",
        ),
        ("db_addr = \"a\"\n[latest]\nenabled = false", "db_addr", "a", "latest.enabled"),
        ("[database]\nkeyspace = \"My-Keys\"", "database.keyspace", "\"My-Keys\"", "a-z"),
        ("[database]\nreplication = \"many\"", "database.replication", "\"many\"", "write 3"),
        ("[database]\nreplication = 0", "database.replication", "0", "write 3"),
        ("[database]\nserver_id = \"a b\"", "database.server_id", "a b", "64 letters"),
        ("[database]\nread_consistency = \"any\"", "database.read_consistency", "any", "local_quorum"),
        (
            "[database]\nwrite_consistency = \"most\"",
            "database.write_consistency",
            "\"most\"",
            "local_quorum",
        ),
        ("[database]\nrequest_timeout = \"0s\"", "database.request_timeout", "0ms", "more than 0"),
        ("[database]\nconnect_timeout = \"0s\"", "database.connect_timeout", "0ms", "more than 0"),
        ("[database]\nconcurrency = 0", "database.concurrency", "0", "more than 0"),
        ("[database]\nspill = false\nspill_running = true", "database.spill_running", "true", "both"),
        ("[database]\nusername = \"a\"", "database.username", "a", "password_file"),
        ("[database]\npassword = \"a\"", "database.username", "\"\"", "both"),
        (
            "[database]\nusername = \"a\"\npassword = \"b\"\npassword_file = \"c\"",
            "database.password",
            "(hidden)",
            "one of them",
        ),
        ("[[database.ttl]]\nfilter = \"a/#/b\"\nttl = \"1d\"", "database.ttl", "a/#/b", "#"),
        ("[[database.ttl]]\nfilter = \"a\"\nttl = \"1ms\"", "database.ttl", "1ms", "1s"),
        ("[[database.ttl]]\nfilter = \"a\"\nttl = \"7301d\"", "database.ttl", "7301d", "7300d"),
        ("[[database.history]]\nfilter = \"a/b\"\nttl = \"1d\"", "database.history", "a/b", "db_addr"),
        (
            "db_addr = \"a\"\n[[database.history]]\nfilter = \"a\"\nttl = \"0s\"",
            "database.history",
            "0ms",
            "0",
        ),
        (
            "db_addr = \"a\"\n[[database.history]]\nfilter = \"#/a\"\nttl = \"1s\"",
            "database.history",
            "#/a",
            "#",
        ),
        (
            "db_addr = \"a\"\n[[database.history]]\nfilter = \"a\"\nttl = \"1ms\"",
            "database.history",
            "1ms",
            "1s",
        ),
        ("[database.tls]\nca = \"a\"\ncert = \"b\"", "database.tls.key", "\"\"", "both"),
        ("[database.tls]\ncert = \"b\"\nkey = \"c\"", "database.tls.ca", "\"\"", "set ca"),
        ("shards = 5000", "shards", "5000", "0"),
        ("namespace = \"devices/#\"", "namespace", "devices/#", "{client_id}"),
        ("namespace = \"x{client_id}/#\"", "namespace", "x{client_id}/#", "{client_id}"),
        ("namespace = \"#/{client_id}\"", "namespace", "#/{client_id}", "{client_id}"),
        ("[log]\nlevel = \"a=b=c\"", "log.level", "\"a=b=c\"", "info"),
        ("[log]\nlevel = \"loud\"", "log.level", "\"loud\"", "warn"),
        ("response_information = \"a/+\"", "response_information", "a/+", "{namespace}"),
        ("response_information = \"{client}\"", "response_information", "{client}", "{client_id}"),
        ("addr = \"\"", "addr", "\"\"", "[[listeners]]"),
        ("grpc_addr = \"0.0.0.0:10000\"", "grpc_addr", "0.0.0.0:10000", "--insecure-grpc"),
        ("http_addr = \"[::]:9090\"", "http_addr", "[::]:9090", "--insecure-grpc"),
        ("[grpc]\ntls = false", "grpc.tls", "false", "--dev"),
        ("[grpc]\nrequire_client_cert = true", "grpc.require_client_cert", "true", "grpc.client_ca"),
        ("[grpc]\ncert = \"x\"", "grpc.key", "\"\"", "set both"),
        ("[backends.jwt]\nkey_file = \"x\"\nrole = \"\"", "backends.jwt.role", "\"\"", "name the claim"),
        ("[tls]\nrequire_client_cert = true", "tls.require_client_cert", "true", "tls.client_ca"),
        ("[tls]\ncrl = \"x.crl\"", "tls.crl", "x.crl", "tls.client_ca"),
        ("dev = true\naddr = \"0.0.0.0:8883\"", "addr", "0.0.0.0:8883", "loopback"),
        ("addr = \"0.0.0.0:8883\"", "addr", "0.0.0.0:8883", "--allow-anonymous"),
        ("[auth]\norder = [\"password\"]", "auth.order", "password", "leave the step out"),
        ("[auth]\norder = [\"jwt\"]", "auth.order", "jwt", "leave the step out"),
        ("[auth]\norder = [\"anonymous\", \"anonymous\"]", "auth.order", "anonymous", "once"),
        ("[auth]\nmax_waiting_hashes = 0", "auth.max_waiting_hashes", "0", "more than 0"),
        (
            "[auth.password]\nclient_id = \"{username}\"",
            "auth.password.client_id",
            "{username}",
            "auth.password_file",
        ),
        (
            "[auth]\npassword_file = \"p\"\n[auth.password]\nclient_id = \"lab\"",
            "auth.password.client_id",
            "lab",
            "{username}",
        ),
        ("[auth.certificate]\ntenant = \"{x}\"", "auth.certificate.tenant", "{x}", "{cn}"),
        ("http_addr = \"127.0.0.1:10000\"", "http_addr", "127.0.0.1:10000", "own port"),
        ("[latest]\nexcluded = [\"a/#/b\"]", "latest.excluded", "a/#/b", "#"),
        ("[latest]\nflush_interval = \"0s\"", "latest.flush_interval", "0ms", "more than 0"),
        ("[latest]\nledger_interval = \"99ms\"", "latest.ledger_interval", "99ms", "100ms or more"),
        ("[latest]\nledger_bytes = 16383", "latest.ledger_bytes", "16383", "16 KiB or more"),
        ("[sys]\ninterval = \"1ms\"", "sys.interval", "1ms", "1s"),
        ("[shutdown]\ndeadline = \"1s\"", "shutdown.disconnect_window", "2s", "shorter"),
        ("[limits]\nmax_qos = 3", "limits.max_qos", "3", "0, 1 or 2"),
        ("[limits]\nmax_inflight = 0", "limits.max_inflight", "0", "more than 0"),
        ("[limits]\nreceive_maximum = 0", "limits.receive_maximum", "0", "more than 0"),
        ("[limits]\nkeep_alive_min = 9\nkeep_alive_max = 5", "limits.keep_alive_min", "9", "keep_alive_max"),
        ("[limits]\nmailbox_bytes = \"1000\"", "limits.max_packet_size", "1 MiB", "mailbox_bytes"),
        ("[limits]\nstream_buffer = \"1000\"", "limits.max_packet_size", "1 MiB", "stream_buffer"),
        (
            "[store]\nenabled = false\n[limits]\nmemory_budget = \"1 GiB\"\noffline_bytes = \"2 GiB\"",
            "limits.offline_bytes",
            "2 GiB",
            "memory_budget",
        ),
        ("[limits]\nmax_topic_bytes = 70000", "limits.max_topic_bytes", "70000", "65535"),
        ("[limits.shared_groups]\n\"a/b\" = \"sticky\"", "limits.shared_groups", "a/b", "names without"),
        ("[limits.identity]\nconnections = \"many\"", "limits.identity.connections", "\"many\"", "0"),
        ("[tenants.acme]\nconnectons = 1", "tenants", "{acme = {connectons = 1}}", "write"),
        ("[tenants.\"\"]\nconnections = 1", "tenants", "", "name"),
        (&format!("{listener}path = \"mqtt\"\nkind = \"ws\""), "listeners[0].path", "mqtt", "/mqtt"),
        (&format!("{listener}cert = \"x\""), "listeners[0].key", "\"\"", "set both"),
        (
            &format!("{listener}require_client_cert = true"),
            "listeners[0].require_client_cert",
            "true",
            "client_ca",
        ),
        (
            &listener.replace("127.0.0.1:5", "127.0.0.1:8883"),
            "listeners[0].address",
            "127.0.0.1:8883",
            "port",
        ),
        (
            &format!("addr = \"unix:/run/m.sock\"\n{}", listener.replace("127.0.0.1:5", "unix:/run/m.sock")),
            "listeners[0].address",
            "unix:/run/m.sock",
            "own port",
        ),
        (&listener.replace("\"a\"", "\"default\""), "listeners[0].name", "default", "own name"),
        ("[[listeners]]\nname = \"a\"", "listeners[0].address", "\"\"", "ip:port"),
    ] {
        let problem = problem(file);
        assert_eq!((problem.key.as_str(), problem.value.as_str()), (key, value), "{problem}");
        assert!(problem.fix.contains(fix), "{problem}");
        let text = problem.to_string();
        assert!(text.contains(key) && text.contains(value) && text.contains(fix), "{text}");
    }
}

#[test]
fn mtls_or_an_explicit_yes_opens_grpc() {
    let mtls = "grpc_addr = \"0.0.0.0:10000\"\n[grpc]\nclient_ca = \"ca\"\nrequire_client_cert = true";
    assert!(load("", mtls, &[]).is_ok());
    let open = load("--grpc-addr 0.0.0.0:1 --http-addr 0.0.0.0:2 --insecure-grpc", "", &[]).unwrap();
    assert_eq!(open.warnings().len(), 2);
}

#[test]
fn tokens_open_grpc_and_http_and_certificates_grpc_alone() {
    let off = "grpc_addr = \"0.0.0.0:10000\"\nhttp_addr = \"0.0.0.0:9090\"\n";
    let tokens = format!("{off}[backends]\ntokens = \"tokens\"\n");
    let seen = problem(&tokens);
    assert!(seen.key == "http_addr" && seen.fix.contains("http.plaintext_tokens"), "{seen:?}");
    let tokens = load("", &format!("{tokens}[http]\nplaintext_tokens = true"), &[]).unwrap();
    assert!(tokens.backends.is_on() && tokens.warnings()[0].contains("HTTP"), "{:?}", tokens.warnings());
    let same = "[auth.jwt]\nkey_file = \"k\"\n[backends.jwt]\nkey_file = \"k\"\n";
    let told = |more| load("", &format!("{same}{more}"), &[]).unwrap().warnings();
    assert!(told("").iter().any(|line| line.contains("backends.jwt.audience")), "{:?}", told(""));
    assert!(told("audience = [\"gateway\"]").is_empty());
    let entry = "[grpc]\nclient_ca = \"ca\"\n[[backends.certificates]]\nname = \"a\"\nrole = \"reader\"\n";
    let problems = load("", &format!("{off}{entry}"), &[]).unwrap_err().0;
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].key == "http_addr" && problems[0].fix.contains("token create"), "{problems:?}");
    let env = [("MQTT_SERVER_BACKENDS__CERTIFICATE_ROLE", "admin")];
    let role = load("", "[grpc]\nclient_ca = \"ca\"", &env).unwrap().backends;
    assert_eq!(role.certificate_role, Some(access::backends::Role::Admin));
    for (file, key) in [
        ("[backends]\ncertificate_role = \"root\"", "backends.certificate_role"),
        ("[backends]\ncertificate_role = \"admin\"", "backends.certificates"),
        (&entry.replace("reader", "root"), "backends.certificates"),
        (&entry.replace("\"a\"", "\"\""), "backends.certificates[0].name"),
        (&format!("{entry}topics = [\"a/#/b\"]"), "backends.certificates[0]"),
        (&format!("{entry}topic = [\"a\"]"), "backends.certificates"),
    ] {
        assert_eq!(problem(file).key, key, "{file}");
    }
}

#[test]
fn plaintext_off_loopback_is_allowed_and_warned() {
    let config = load("-a 0.0.0.0:1883 --non-tls --allow-anonymous", "", &[]).unwrap();
    assert!(config.warnings()[0].contains("plaintext"), "{:?}", config.warnings());
}

#[test]
fn dev_opens_plaintext_and_websocket_and_makes_certificates() {
    let config = load("--dev", "", &[]).unwrap();
    let kinds: Vec<_> = config.effective_listeners().iter().map(|(_, l)| l.kind).collect();
    assert_eq!(kinds, [ListenerKind::Tls, ListenerKind::Tcp, ListenerKind::Ws]);
    assert!(config.needs_dev_certs() && config.cert.starts_with("certs"));
    let own = load("--dev -c my.crt -k my.key", "", &[]).unwrap();
    assert!(!own.needs_dev_certs());
    let listed = load("--dev", "[[listeners]]\nname = \"a\"\naddress = \"127.0.0.1:5\"", &[]).unwrap();
    let names: Vec<_> = listed.effective_listeners().into_iter().map(|(_, l)| l.name).collect();
    assert_eq!(names, ["default", "a"], "--dev adds none to configured listeners");
    let plain = load("--dev --non-tls -a 127.0.0.1:1883", "", &[]).unwrap();
    assert_eq!(plain.effective_listeners().len(), 2);
}

#[test]
#[cfg(not(feature = "otel"))]
fn an_endpoint_is_refused_where_nothing_would_be_exported() {
    let problem = problem("[otel]\nendpoint = \"http://127.0.0.1:4317\"");
    assert_eq!(problem.key, "otel.endpoint");
    assert!(problem.fix.contains("--features otel"), "{problem}");
}

#[test]
fn http_off_loopback_takes_tokens_with_tls_and_its_pair_is_whole() {
    let text = "http_addr = \"0.0.0.0:9090\"\n[backends]\ntokens = \"t\"\n[http]\n";
    assert_eq!(problem(text).key, "http_addr");
    let config = load("", &format!("{text}tls = true"), &[]).unwrap();
    assert!(!config.warnings().iter().any(|warning| warning.contains("HTTP")), "{:?}", config.warnings());
    assert_eq!(problem("[http]\ntls = true\ncert = \"c\"").key, "http.key");
    assert_eq!(problem("[http]\ncert = \"c\"\nkey = \"k\"").key, "http.cert");
    let nobody = problem("http_addr = \"0.0.0.0:9090\"\n[http]\ntls = true");
    assert!(nobody.problem.contains("nothing asks who calls"), "{nobody}");
}

#[test]
#[cfg(feature = "quic")]
fn what_a_listener_of_quic_cannot_be_is_refused() {
    let listener = |address: &str, more: &str| {
        format!("[[listeners]]\nname = \"q\"\nkind = \"quic\"\naddress = \"{address}\"\n{more}")
    };
    for (text, key) in [
        (listener("unix:/run/q.sock", ""), "listeners[0].address"),
        (listener("127.0.0.1:8884", "proxy_protocol = true"), "listeners[0].proxy_protocol"),
        (listener("127.0.0.1:8884", "[quic]\nwindow = \"1 KiB\""), "quic.window"),
        (listener("127.0.0.1:8884", "[quic]\nidle_timeout = \"600d\""), "quic.idle_timeout"),
        (
            listener("127.0.0.1:8884", "[tls]\nciphersuites = [\"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256\"]"),
            "tls.ciphersuites",
        ),
    ] {
        assert_eq!(problem(&text).key, key, "{text}");
    }
    // A port of UDP is not one of TCP, but two of UDP are the same.
    let beside_tcp = listener("127.0.0.1:8883", "");
    assert!(load("", &beside_tcp, &[]).is_ok());
    let second = beside_tcp.replace("\"q\"", "\"r\"");
    assert_eq!(problem(&format!("{beside_tcp}{second}")).key, "listeners[1].address");
}

#[test]
#[cfg(not(feature = "quic"))]
fn a_listener_of_quic_is_refused_where_there_is_none() {
    let problem = problem("[[listeners]]\nname = \"q\"\nkind = \"quic\"\naddress = \"127.0.0.1:8884\"");
    assert_eq!(problem.key, "listeners[0].kind");
    assert!(problem.fix.contains("--features quic"), "{problem}");
}

#[test]
fn response_information_follows_the_namespace() {
    let pattern = |text: &str| load("", text, &[]).unwrap().response_pattern();
    assert_eq!(pattern(""), "devices/{client_id}");
    assert_eq!(pattern("namespace = \"d/{client_id}/+/cmd\""), "d/{client_id}");
    assert_eq!(pattern("response_information = \"{namespace}/replies\""), "devices/{client_id}/replies");
    assert_eq!(pattern("response_information = \"\""), "");
}

#[test]
fn offline_queues_on_disk_may_exceed_the_memory_budget() {
    let limits =
        load("", "[limits]\nmemory_budget = \"1 GiB\"\noffline_bytes = \"2 GiB\"", &[]).unwrap().limits;
    assert!(limits.offline_bytes > limits.memory_budget);
}

#[test]
fn the_budget_follows_the_machine_unless_set_and_is_shown() {
    let unset = load("", "", &[]).unwrap();
    assert!(unset.limits.budget().0 >= 64 << 20);
    assert!(!unset.memory_summary().contains("limits.memory_budget 0"), "{}", unset.memory_summary());
    let file = "[limits]\nmemory_budget = \"192 MiB\"\n[latest]\nenabled = false";
    let set = load("", file, &[]).unwrap();
    assert_eq!(set.limits.budget().0, 192 << 20);
    assert!(set.memory_summary().contains("at most 192 MiB"), "{}", set.memory_summary());
    assert!(set.memory_summary().contains(" 0 MiB history"), "{}", set.memory_summary());
    let file = "db_addr = \"a\"\n[limits]\nmemory_budget = \"192 MiB\"\nmax_connections = 1024\n\
                [[database.history]]\nfilter = \"a/#\"\nttl = \"1d\"";
    let kept = load("", file, &[]).unwrap().memory_summary();
    assert!(kept.contains("12 MiB history") && kept.contains("up to 5 MiB for 1024"), "{kept}");
}

#[test]
fn a_password_is_never_shown_whatever_is_wrong_with_it() {
    let secret = "hunter2";
    for file in [
        format!("[database]\npassword = {secret}"),
        format!("[database]\npassword = [\"{secret}\"]"),
        format!("[database]\npassword = \"{secret}\"\npassword_file = \"x\""),
        format!("[database]\npasword = \"{secret}\""),
        format!("[databse]\npassword = \"{secret}\""),
        format!("[database]\npassword = \"{secret}.x"),
    ] {
        let error = load("", &file, &[]).unwrap_err();
        assert!(!error.to_string().contains(secret), "{error}");
        assert!(!format!("{error:?}").contains(secret), "{error:?}");
    }
    let misspelt = load("", "", &[("MQTT_SERVER_DATABASE__PASWORD", secret)]).unwrap_err().to_string();
    let words = ["(from MQTT_SERVER_DATABASE__PASWORD)", "did you mean MQTT_SERVER_DATABASE__PASSWORD?"];
    assert!(words.iter().all(|word| misspelt.contains(word)) && !misspelt.contains(secret), "{misspelt}");
    let env = [("MQTT_SERVER_DATABASE__PASSWORD", secret)];
    let config = load("", "[database]\nusername = \"a\"", &env).unwrap();
    assert_eq!(config.database_password().unwrap().expose(), secret);
    assert!(!format!("{config:?}").contains(secret));
    assert!(!format!("{:?}", Table::try_from(&config).unwrap()).contains(secret));
}

#[test]
fn a_password_comes_from_a_file_without_its_line_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("password");
    let file = format!("[database]\nusername = \"a\"\npassword_file = {path:?}");
    let config = load("", &file, &[]).unwrap();
    for (content, wanted) in
        [("", None), ("\n", None), ("s3cret\n", Some("s3cret")), ("two words", Some("two words"))]
    {
        std::fs::write(&path, content).unwrap();
        let password = config.database_password();
        match (password, wanted) {
            (Ok(password), Some(wanted)) => assert_eq!(password.expose(), wanted),
            (Err(error), None) => assert_eq!(error.0[0].key, "database.password_file"),
            (password, _) => panic!("{password:?} of {content:?}"),
        }
    }
    std::fs::remove_file(&path).unwrap();
    assert!(config.database_password().is_err());
}

#[test]
fn flags_and_environment_reach_the_database() {
    let env =
        [("MQTT_SERVER_DATABASE__REPLICATION", "east:3,west:2"), ("MQTT_SERVER_DATABASE__TLS__CA", "ca.crt")];
    let config = load("-d a:1,b --db-migrate false", "[database]\nreplication = 3", &env).unwrap();
    assert_eq!(config.contact_points(), ["a:1", "b:9042"]);
    assert!(!config.database.migrate);
    assert_eq!(config.database.replication.to_string(), "east:3,west:2");
    assert_eq!(config.database.tls.ca.unwrap().to_str(), Some("ca.crt"));
    assert!(load("--db-migrate true", "[database]\nreplication = 3", &[]).unwrap().database.migrate);
}

/// The failure: a configuration file cannot say where the gateway listens, since its image says so in a variable, which is over it.
#[test]
fn a_default_of_the_image_is_below_the_file_and_above_ours() {
    let env = &[
        ("MQTT_SERVER_DEFAULT__HTTP_ADDR", "127.0.0.2:1"),
        ("MQTT_SERVER_DEFAULT__LIMITS__MAX_INFLIGHT", "7"),
    ];
    let shown = |flags: &str, file: &str, more: &[(&str, &str)]| {
        let config = load(flags, file, &[&env[..], more].concat()).unwrap();
        (config.http_addr.to_string(), config.limits.max_inflight)
    };
    assert_eq!(shown("", "", &[]), ("127.0.0.2:1".to_owned(), 7));
    assert_eq!(
        shown("", "http_addr = \"127.0.0.3:1\"\n[limits]\nmax_inflight = 8", &[]),
        ("127.0.0.3:1".to_owned(), 8)
    );
    assert_eq!(shown("", "", &[("MQTT_SERVER_HTTP_ADDR", "127.0.0.4:1")]).0, "127.0.0.4:1");
    assert_eq!(shown("--http-addr 127.0.0.5:1", "", &[]).0, "127.0.0.5:1");
    let wrong = load("", "", &[("MQTT_SERVER_DEFAULT__NOTHING", "1")]).unwrap_err().to_string();
    assert!(wrong.contains("MQTT_SERVER_DEFAULT__NOTHING"), "{wrong}");
}

#[test]
fn ipv6_only_is_for_addresses_of_ipv6() {
    let problem = |text: &str| load("", text, &[]).unwrap_err().to_string();
    assert!(problem("ipv6_only = true").contains("ipv6_only"));
    assert!(problem("[grpc]\nipv6_only = true").contains("grpc_addr"));
    load("--insecure-grpc", "http_addr = \"[::]:9090\"\n[http]\nipv6_only = true", &[]).unwrap();
    // Of IPv6 alone, it leaves the port to a listener of IPv4.
    let both = |only: bool| format!("http_addr = \"[::]:10000\"\n[http]\nipv6_only = {only}");
    load("--insecure-grpc", &both(true), &[]).unwrap();
    assert!(load("--insecure-grpc", &both(false), &[]).is_err());
}
