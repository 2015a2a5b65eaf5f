//! Options one by one: carried over, told, or closed.

use std::path::{Path, PathBuf};

use config::{Config, Flags};

use super::{convert, limits::expiration, lines::OptionLine};

/// The options of mosquitto.conf(5) of 2.0 and 2.1, with a value that says something.
const OPTIONS: &str = "\
    accept_protocol_versions 5|acl_file acl|allow_anonymous false|allow_duplicate_messages true|\
    allow_zero_length_clientid false|auth_opt_x y|auth_plugin p|auth_plugin_deny_special_chars true|auto_id_prefix a|\
    autosave_interval 1|autosave_on_changes true|bind_interface eth0|capath c|certfile c|keyfile k|cafile c|\
    check_retain_source true|ciphers c|ciphers_tls1.3 c|clientid_prefixes c|connection_messages true|crlfile c|dhparamfile d|\
    disable_client_cert_date_checks true|enable_control_api true|enable_proxy_protocol 2|global_max_clients 5|\
    global_max_connections 5|global_plugin p|http_dir d|include_dir d|listener 1884|listener_allow_anonymous false|\
    listener_auto_id_prefix a|log_dest syslog|log_facility 1|log_timestamp true|log_timestamp_format f|log_type all|\
    max_connections 4|max_inflight_bytes 1|max_inflight_messages 1|max_keepalive 1|max_packet_size 2000|max_qos 1|\
    max_queued_bytes 2000000|max_queued_messages 1|max_topic_alias 1|max_topic_alias_broker 1|memory_limit 90000000|\
    message_size_limit 1|mount_point m|packet_buffer_size 1|packet_max_auth 1|packet_max_connect 1|packet_max_simple 1|\
    packet_max_sub 1|packet_max_un 1|password_file p|per_listener_settings true|persistence true|persistence_file f|\
    persistence_location l|persistent_client_expiration 1d|pid_file p|plugin p|plugin_load p p|plugin_opt_x y|plugin_use p|\
    protocol websockets|proxy_protocol_v2_require_tls true|psk_file p|psk_hint h|queue_qos0_messages true|\
    require_certificate true|retain_available false|retain_expiry_interval 1|retry_interval 1|set_tcp_nodelay true|\
    socket_domain ipv6|store_clean_interval 1|sys_interval 0|tls_engine e|tls_engine_kpass_sha1 e|tls_keyform engine|\
    tls_version tlsv1.3|upgrade_outgoing_qos true|use_identity_as_username true|use_subject_as_username true|\
    use_username_as_clientid true|user u|websockets_headers_size 1|websockets_log_level 1|websockets_origin https://a.example|\
    address b|addresses b|bridge_alpn a|bridge_attempt_unsubscribe true|bridge_bind_address a|bridge_cafile c|\
    bridge_capath c|bridge_certfile c|bridge_ciphers c|bridge_ciphers_tls1.3 c|bridge_identity i|bridge_insecure true|\
    bridge_keyfile k|bridge_max_packet_size 1|bridge_max_topic_alias 1|bridge_outgoing_retain false|\
    bridge_protocol_version mqttv50|bridge_psk p|bridge_receive_maximum 1|bridge_reload_type immediate|\
    bridge_require_ocsp true|bridge_session_expiry_interval 1|bridge_tcp_keepalive 1 1 1|bridge_tcp_user_timeout 1|\
    bridge_tls_use_os_certs true|bridge_tls_version tlsv1.2|cleansession true|clientid c|connection c|idle_timeout 1|\
    keepalive_interval 1|local_cleansession true|local_clientid c|local_password p|local_username u|notification_topic t|\
    notifications true|notifications_local_only true|password p|remote_clientid c|remote_password p|remote_username u|\
    restart_timeout 1|round_robin true|start_type lazy|threshold 1|topic t out|try_private true|username u";

fn imported(texts: &[&str]) -> (String, Vec<String>) {
    let lines = texts.iter().enumerate().map(|(at, text)| {
        let (key, value) = text.split_once(' ').unwrap_or((text, ""));
        OptionLine {
            file: PathBuf::from("m.conf"),
            number: at + 1,
            key: key.to_owned(),
            value: value.to_owned(),
            included: false,
        }
    });
    let imported = convert(&lines.collect::<Vec<_>>(), Path::new("rules.toml"));
    (imported.config(), imported.told.into_iter().map(|told| told.text).collect())
}

#[test]
fn an_option_that_is_neither_carried_over_nor_told_is_found() {
    let before = ["listener 1883", "allow_anonymous true", "connection other", "address a", "topic t out"];
    let without = imported(&before);
    for option in OPTIONS.split('|') {
        let with = imported(&[&before[..], &[option]].concat());
        assert!(with != without, "{option} is passed over in silence");
        assert!(!with.1.iter().any(|text| text.contains("not an option")), "{option}: {:?}", with.1);
    }
    assert!(imported(&["nonsense 1"]).1[0].contains("not an option"));
}

/// The failure: a listener that Mosquitto has on IPv6 alone takes connections over IPv4 too.
#[test]
fn a_listener_of_ipv6_takes_no_connections_over_ipv4() {
    let open = ["allow_anonymous true"];
    for lines in [&["listener 1883 ::"][..], &["listener 1883", "socket_domain ipv6"]] {
        let (config, _) = imported(&[lines, &open].concat());
        assert!(
            config.contains("address = \"[::]:1883\"") && config.contains("ipv6_only = true"),
            "{config}"
        );
    }
    for listener in ["listener 1883", "listener 1883 ::1", "listener 1883 127.0.0.1"] {
        assert!(!imported(&[&[listener], &open[..]].concat()).0.contains("ipv6_only"), "{listener}");
    }
    // Both at once, as Mosquitto has them.
    let (config, told) = imported(&["listener 1883 0.0.0.0", "listener 1883 ::", open[0]]);
    assert_eq!(config.matches("\n[[listeners]]").count(), 2, "{config} {told:?}");
}

#[test]
fn a_guard_that_is_lost_leaves_its_listener_closed() {
    let open = ["listener 1883", "allow_anonymous true"];
    assert!(imported(&open).0.contains("0.0.0.0:1883"));
    for guard in [
        "plugin dynsec.so",
        "mount_point a/",
        "psk_hint h",
        "use_username_as_clientid true",
        "require_certificate true",
        "use_subject_as_username true",
        "use_identity_as_username true",
        "allow_anonymous false",
        "certfile without-key",
    ] {
        let (config, told) = imported(&[&open[..], &[guard]].concat());
        assert!(!config.contains("[[listeners]]") && config.contains("# Not opened"), "{guard}: {config}");
        assert!(config.contains("addr = \"127.0.0.1:1883\""), "{guard}: {config}");
        assert!(told.iter().any(|text| text.contains("this machine only")), "{guard}: {told:?}");
    }
}

#[test]
fn a_connection_is_a_bridge_for_each_way_and_set_of_prefixes() {
    let connection = [
        "connection To the Cloud",
        "address broker.example.com:8883 other.example.com",
        "bridge_cafile ca.crt",
        "remote_username site",
        "remote_clientid site-1",
        "remote_password secret",
        "topic a/# out 1",
        "topic b/# out 1",
        "topic c/# out 0 here/ there/",
        "topic d/# in 1",
        "topic e/# in 1 home/ site/",
        "topic f/# in 1 home/ site/",
    ];
    let (config, told) = imported(&connection);
    assert!(!config.contains("secret") && !told.iter().any(|text| text.contains("secret")), "{told:?}");
    for row in [
        "[bridges.to-1]\ntopics = [\"a/#\", \"b/#\"]",
        "[bridges.to-2]\ntopics = [\"here/c/#\"]",
        "url = \"mqtts://broker.example.com:8883\"\nlevel = \"3.1.1\"\nclient_id = \"site-1-1\"\nusername = \"site\"",
        "password_file = \"bridge-to.password\"",
        "local_prefix = \"here/\"\nremote_prefix = \"there/\"\nqos = 0",
        "[bridges.to-3]\ndirection = \"in\"\ntopics = [\"d/#\"]",
        "[bridges.to-4]\ndirection = \"in\"\ntopics = [\"site/e/#\", \"site/f/#\"]",
        "local_prefix = \"home/\"\nremote_prefix = \"site/\"\nqos = 1",
    ] {
        assert!(config.contains(row), "{row}: {config}");
    }
    assert!(told.iter().any(|told| told.contains("a bridge has one address")), "{told:?}");
    // The option switches TLS on, too: without TLS the password would go out in clear.
    let capath =
        connection.map(|line| if line.starts_with("bridge_ca") { "bridge_capath certs" } else { line });
    let (config, told) = imported(&capath);
    assert!(config.contains("mqtts://broker") && !config.contains("mqtt://"), "{config}");
    assert!(config.contains("ca = \"/etc/ssl/certs/ca-certificates.crt\""), "{config}");
    assert!(told.iter().any(|told| told.contains("bridge_capath")), "{told:?}");
    let (config, told) = imported(&[&connection[..], &["bridge_insecure true"]].concat());
    assert!(!config.contains("[bridges."), "the other side is not checked: {config}");
    assert!(told.iter().any(|told| told.contains("bridge_insecure")), "{told:?}");
}

/// The failure: at level 3.1.1 nothing says that an incoming message went out before, so that devices would get it
/// twice.
#[test]
fn what_goes_out_and_comes_in_is_bridged_at_a_level_that_knows_it_again() {
    let connection = |topics: &[&str]| {
        imported(&[&["connection c", "address 127.0.0.1", "bridge_outgoing_retain false"], topics].concat())
    };
    for topics in [
        &["topic a/# both 1 here/ there/"][..],
        &["topic a/# out 1 here/ there/", "topic +/b in 1 \"\" there/"],
    ] {
        let (config, told) = connection(topics);
        assert!(!config.contains("level = "), "{config}");
        assert!(config.contains("direction = \"in\"\ntopics = [\"there/"), "{config}");
        assert_eq!(config.matches("retain = false").count(), 1, "that is of what goes out: {config}");
        assert!(told.iter().any(|text| text.contains("speak MQTT 5")), "{told:?}");
    }
    let (config, told) = connection(&["topic a/# out 1", "topic b/# in 1"]);
    assert_eq!(config.matches("level = \"3.1.1\"").count(), 2, "{config}");
    assert!(!told.iter().any(|text| text.contains("speak MQTT 5")), "{told:?}");
}

#[test]
fn a_configuration_without_listeners_is_for_this_machine_only() {
    let (config, _) = imported(&["persistence true"]);
    assert!(config.contains("address = \"127.0.0.1:1883\"") && config.contains("\"anonymous\""), "{config}");
    let (config, _) = imported(&["port 1884"]);
    assert!(!config.contains("[[listeners]]"), "nobody may connect: {config}");
}

#[test]
fn spans_are_read_as_mosquitto_does() {
    let cases = [
        ("1h", Some(3600)),
        ("2m", Some(5_184_000)),
        ("999999999y", Some(u64::from(u32::MAX))),
        ("d", None),
        ("", None),
        ("1ä", None),
    ];
    for (text, seconds) in cases {
        assert_eq!(expiration(text), seconds, "{text}");
    }
}

/// A listener with every guard that can be carried over.
const GUARDED: [&str; 7] = [
    "listener 8883",
    "certfile server.crt",
    "keyfile server.key",
    "cafile ca.crt",
    "require_certificate true",
    "allow_anonymous false",
    "password_file passwd",
];

/// Settings of a listener that guard its entrance.
const GUARDS: [&str; 3] = ["client_ca = \"ca.crt\"", "require_client_cert = true", "auth = [\"password\"]"];

fn starts(config: &str) -> Result<Config, String> {
    Config::load(&Flags::default(), Some(config), &std::collections::BTreeMap::new())
        .map_err(|problems| problems.to_string())
}

/// The failure: `require_certificate true   # mTLS` was "taken for false", so that the listener was open to everybody.
#[test]
fn a_comment_after_the_first_word_changes_nothing() {
    let commented = GUARDED.map(|line| match line.contains("file ") {
        true => line.to_owned(),
        false => format!("{line}   # as the guide says"),
    });
    let commented: Vec<&str> = commented.iter().map(String::as_str).collect();
    let (config, told) = imported(&commented);
    assert!(GUARDS.iter().all(|guard| config.contains(guard)), "{config} {told:?}");
    assert!(config.contains("address = \"0.0.0.0:8883\""), "{config}");
    let (config, _) = imported(
        &[
            &GUARDED[..],
            &[
                "max_queued_messages 5000 # five thousand",
                "max_packet_size 2000000 # 2 MB",
                "sys_interval 30 # s",
                "connection c # to the centre",
                "address centre.example.com:8884 # port of TLS",
                "bridge_tls_use_os_certs true # let's encrypt",
                "remote_username u",
                "remote_password s3cr#t # all of it",
                "topic a/# out 1 # all",
                "topic b/# BOTH 2 \"\" site/ # two",
                "keepalive_interval 60 # s",
                "bridge_protocol_version mqttv50 # as it can",
            ],
        ]
        .concat(),
    );
    for row in [
        "offline_messages = 5000",
        "max_packet_size = 2000000",
        "interval = \"30s\"",
        "[bridges.c-1]\ntopics = [\"a/#\"]",
        "url = \"mqtts://centre.example.com:8884\"",
        "topics = [\"site/b/#\"]",
        "remote_prefix = \"site/\"",
        "keep_alive = \"60s\"",
    ] {
        assert!(config.contains(row), "{row}: {config}");
    }
    assert!(!config.contains("local_prefix") && !config.contains("level = "), "{config}");
    let lines = [OptionLine {
        file: PathBuf::from("m.conf"),
        number: 1,
        key: "remote_password".to_owned(),
        value: " s3cr#t # all of it ".to_owned(),
        included: false,
    }];
    assert_eq!(lines[0].rest(), Some("s3cr#t # all of it"));
}

/// The failure: an unreadable option was taken for off, or left out, and the listener was opened without it.
#[test]
fn no_line_opens_what_was_shut() {
    let odd = [
        "",
        "# comment",
        "True",
        "TRUE",
        "yes",
        "on",
        "no",
        "2",
        "-1",
        "0x10",
        "010",
        "1e3",
        "true,",
        "\"true\"",
        "true\t",
        "\ttrue",
        "true# x",
        "/a path/with # in it",
        "/tab\tin/it",
        "9999999999999999999",
        "a b c",
        "\u{fffd}",
        "*",
    ];
    let names = OPTIONS.split('|').map(|option| option.split(' ').next().unwrap_or_default());
    let capital = [
        "Require_Certificate",
        "ALLOW_ANONYMOUS",
        "require_certificate\ttrue",
        "\trequire_certificate",
        "certfle",
    ];
    // A guarded listener may be replaced by another one of its kind, or by none.
    let asked = ["listener", "port", "bind_address", "connection"];
    for name in names.chain(capital).filter(|name| !asked.contains(name)) {
        for value in odd {
            let line = format!("{name} {value}");
            let (config, told) = imported(&[&GUARDED[..], &[&line]].concat());
            let loaded = starts(&config).unwrap_or_else(|problem| panic!("{line:?}: {problem}: {config}"));
            for listener in &loaded.listeners {
                let same = listener.require_client_cert
                    && listener.client_ca.is_some()
                    && loaded.auth_steps(listener.address.as_ref().unwrap(), listener).len() == 1
                    && !config.contains("\"anonymous\"");
                assert!(same, "{line:?}: {config} {told:?}");
            }
            assert!(!told.is_empty(), "{line:?}");
        }
    }
    for line in [
        "allow_anonymous True",
        "require_certificate yes",
        "Require_certificate true",
        "acl_file",
        "certfile",
    ] {
        let (config, told) = imported(&[&GUARDED[..], &[line]].concat());
        assert!(config.contains("# Not opened") && !config.contains("[[listeners]]"), "{line}: {config}");
        assert!(told.iter().any(|text| text.contains("not opened")), "{line}: {told:?}");
    }
}

/// The failure: where nothing was left, a listener on this machine let everybody in.
#[test]
fn what_is_left_when_nothing_is_lets_nobody_in() {
    let (config, _) = imported(&["listener 1883", "plugin auth.so"]);
    let loaded = starts(&config).expect("a configuration");
    let listeners = loaded.effective_listeners();
    let [(address, listener)] = &listeners[..] else { panic!("{config}") };
    assert_eq!(loaded.auth_steps(address, listener), [config::AuthStep::Certificate]);
    assert!(address.is_local() && !listener.kind.is_tls(), "{config}");
}

#[test]
fn every_number_gives_a_configuration_that_starts() {
    let keys = [
        "max_inflight_messages",
        "max_keepalive",
        "global_max_connections",
        "memory_limit",
        "max_queued_messages",
        "max_queued_bytes",
        "message_size_limit",
        "max_packet_size",
        "packet_max_connect",
        "max_qos",
        "max_topic_alias",
        "sys_interval",
        "max_connections",
    ];
    let numbers = [
        "-1",
        "0",
        "1",
        "2",
        "19",
        "1000",
        "65535",
        "65536",
        "1048575",
        "1048576",
        "300000000",
        "2147483647",
        "8000000000",
    ];
    let base = ["listener 1883", "allow_anonymous true"];
    for first in keys {
        for second in ["memory_limit", "max_queued_bytes", "max_packet_size"] {
            for number in numbers {
                for other in ["1", "300000000"] {
                    let lines = [
                        format!("{first} {number}"),
                        format!("{second} {other}"),
                        "persistence false".to_owned(),
                    ];
                    let lines: Vec<&str> = base.into_iter().chain(lines.iter().map(String::as_str)).collect();
                    let (config, _) = imported(&lines);
                    assert!(starts(&config).is_ok(), "{lines:?}: {:?}: {config}", starts(&config));
                }
            }
        }
    }
    let (config, told) = imported(&[&base[..], &["max_queued_bytes 500000"]].concat());
    assert!(
        config.contains("offline_bytes = 500000") && config.contains("mailbox_bytes = 1048576"),
        "{config}"
    );
    assert!(told.iter().any(|text| text.contains("room for one packet")), "{told:?}");
}

#[test]
fn origins_are_those_that_a_browser_sends() {
    let base = ["listener 9001", "protocol websockets # for browsers", "allow_anonymous true"];
    for (value, made) in [
        ("https://App.example.com", "[\"https://app.example.com\"]"),
        ("http://app.example.com:8080/", "[\"http://app.example.com:8080\"]"),
        ("app.example.com", "[\"https://app.example.com\"]"),
    ] {
        let (config, _) = imported(&[&base[..], &[&format!("websockets_origin {value}")]].concat());
        assert!(
            config.contains(&format!("allowed_origins = {made}")) && starts(&config).is_ok(),
            "{value}: {config}"
        );
    }
    for value in [
        "*",
        "https://*.example.com",
        "",
        "https://a.example/path",
        "ws://a.example",
        "https://a.example # x",
    ] {
        let (config, _) = imported(&[&base[..], &[&format!("websockets_origin {value}")]].concat());
        assert!(!config.contains("[[listeners]]"), "{value}: {config}");
    }
}

/// The failure: an option of a file was applied to the listener that came last in any file.
#[test]
fn an_included_file_has_listeners_of_its_own() {
    let line = |file: &str, text: &str| {
        let (key, value) = text.split_once(' ').unwrap_or((text, ""));
        OptionLine {
            file: PathBuf::from(file),
            number: 1,
            key: key.to_owned(),
            value: value.to_owned(),
            included: file != "m.conf",
        }
    };
    let lines = || {
        vec![
            line("m.conf", "per_listener_settings true"),
            line("m.conf", "listener 1883"),
            line("m.conf", "password_file passwd"),
            line("a.conf", "allow_anonymous true"),
            line("b.conf", "listener 1884"),
            line("b.conf", "allow_anonymous true"),
        ]
    };
    let config = convert(&lines(), Path::new("rules.toml")).config();
    let tables: Vec<&str> = config.split("[[listeners]]").skip(1).collect();
    assert!(tables[0].contains("1883") && tables[0].contains("auth = [\"password\"]"), "{config}");
    assert!(tables[1].contains("1884") && tables[1].contains("auth = [\"anonymous\"]"), "{config}");
    assert_eq!(tables.len(), 2, "what comes before a listener opens none: {config}");
    let mut back = lines();
    back.push(line("m.conf", "allow_anonymous true"));
    let config = convert(&back, Path::new("rules.toml")).config();
    assert!(config.contains("# Not opened: m.conf") && config.contains("write include_dir last"), "{config}");
    assert_eq!(config.matches("[[listeners]]").count(), 1, "{config}");
}

#[test]
fn the_strictest_of_several_listeners_is_for_all() {
    let tls = |port: &str, more: &[&str]| {
        let mut lines = vec![format!("listener {port}")];
        lines.extend(GUARDED[1..].iter().chain(more).map(|line| (*line).to_owned()));
        lines
    };
    let lines = [
        tls("8883", &["tls_version tlsv1.2", "crlfile a.crl"]),
        tls("8884", &["tls_version tlsv1.3", "crlfile b.crl"]),
        tls("8885", &["tls_version tlsv1.3"]),
    ]
    .concat();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let (config, told) = imported(&lines);
    assert!(config.contains("min_version = \"1.3\"") && config.contains("crl = \"a.crl\""), "{config}");
    assert!(config.contains("# Not opened: m.conf") && !config.contains("0.0.0.0:8884"), "{config}");
    assert!(told.iter().any(|text| text.contains("tls.min_version is for all")), "{told:?}");
}
