//! docker-compose.yml, read and held against the program: what it starts is there, takes these flags, listens on these
//! ports and answers this health check. So is deploy/compose/two-gateways.yml. Compose itself is not run.

use std::{collections::BTreeMap, fs, process::Command, time::Duration};

use crate::support::{Server, root, run};
use clap::Parser as _;
use mqtt_server::config::{Address, Config, Flags};
use serde_json::Value;

fn compose() -> Option<Value> {
    crate::yaml("docker-compose.yml")
}

/// A file or folder of the repository.
fn is_there(path: &str) -> bool {
    path.starts_with("./deploy/") && root().join(path).exists()
}

/// A list of texts.
fn texts(value: &Value) -> Vec<&str> {
    value.as_array().expect("a list").iter().map(|item| item.as_str().expect("a text")).collect()
}

/// The variables that the image sets.
fn of_image() -> BTreeMap<String, String> {
    let dockerfile = fs::read_to_string(root().join("Dockerfile")).expect("read the Dockerfile");
    let set = |line: &str| -> Option<(String, String)> {
        let line = line.trim_start_matches("ENV").trim().trim_end_matches('\\').trim();
        let (name, value) = line.strip_prefix("MQTT_SERVER_")?.split_once('=')?;
        Some((format!("MQTT_SERVER_{name}"), value.to_owned()))
    };
    dockerfile.lines().filter_map(set).collect()
}

/// Returns the variables of the container of Compose, and one that says which devices may connect.
fn of_container(compose: &Value) -> BTreeMap<String, String> {
    let env = compose["services"]["gateway"]["environment"].as_object().expect("an environment");
    let env = env.iter().map(|(name, value)| (name.clone(), value.as_str().expect("a text").to_owned()));
    let anonymous = ("MQTT_SERVER_AUTH__ALLOW_ANONYMOUS".to_owned(), "true".to_owned());
    of_image().into_iter().chain(env).chain([anonymous]).collect()
}

/// `${NAME:-default}` as Compose fills it in: by `database` for DATABASE, else the default.
fn filled(text: &str, database: Option<&str>) -> String {
    let Some((before, rest)) = text.split_once("${") else { return text.to_owned() };
    let (name, after) = rest.split_once('}').expect("the end of a variable");
    let (name, default) = name.split_once(":-").expect("a default");
    assert_eq!(name, "DATABASE", "in the flags");
    filled(&format!("{before}{}{after}", database.unwrap_or(default)), database)
}

/// The host of `--db-addr` is a service, and the program takes the flags as they stand.
#[test]
fn the_program_takes_the_flags_and_the_database_it_is_given_is_a_service() {
    let Some(compose) = compose() else { return };
    let server = Server::start();
    let certs = server.dir().join("certs");
    let data = server.dir().join("other");
    for database in [None, Some("cassandra")] {
        let flags = texts(&compose["services"]["gateway"]["command"]).into_iter();
        let flags: Vec<String> = flags.map(|flag| filled(flag, database)).collect();
        let place = |flag: &String| {
            let flag = flag.replace("=/certs", &format!("={}", certs.display()));
            flag.replace("=/var/lib/mqtt-server/data", &format!("={}", data.display()))
        };
        let env = compose["services"]["gateway"]["environment"].as_object().expect("an environment");
        let env: BTreeMap<String, String> = env
            .iter()
            .map(|(name, value)| (name.clone(), value.as_str().expect("a text")))
            .map(|(name, value)| (name, value.replace("/certs", &certs.display().to_string())))
            .collect();
        let placed: Vec<String> = flags.iter().map(place).collect();
        let mut command = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server"));
        command.arg("--check").args(&placed).envs(&env).current_dir(server.dir());
        let (success, output) = run(&mut command, Duration::from_secs(60));
        assert!(success, "{flags:?}: {output}");
        let args = ["mqtt-server"].into_iter().chain(placed.iter().map(String::as_str));
        let parsed = Flags::try_parse_from(args).expect("flags that were taken");
        let config = Config::load(&parsed, None, &env).expect("a configuration that was good");
        assert!(config.grpc_tls().is_some(), "gRPC over TLS");
        let asks = config.backends.takes_bearers() && !config.insecure_grpc;
        assert!(asks, "gRPC and HTTP are open to other containers");

        let address = flags.iter().find_map(|flag| flag.strip_prefix("--db-addr=")).expect("a database");
        let (host, port) = address.split_once(':').expect("host and port");
        let service = &compose["services"][host];
        assert!(texts(&service["ports"]).contains(&format!("127.0.0.1:{port}:{port}").as_str()), "{host}");
        let image = service["image"].as_str().expect("an image");
        let (name, tag) = image.split_once(':').expect("a version, so that it is the same tomorrow");
        assert!(name.ends_with(host) && tag != "latest", "{image}");
        assert!(
            service["healthcheck"]["test"]
                .as_array()
                .is_some_and(|test| test[1].as_str().is_some_and(|line| line.starts_with("cqlsh"))),
            "{host}"
        );
        // Alone what is asked for starts: Scylla by default, Cassandra by its profile.
        let profiles = service.get("profiles").map(texts).unwrap_or_default();
        assert_eq!(profiles, database.into_iter().collect::<Vec<_>>(), "{host}");
    }
}

/// Nothing is published beyond the host's loopback, and every port is one that the gateway opens.
#[test]
fn published_ports_are_on_loopback_and_the_gateway_listens_on_them() {
    let Some(compose) = compose() else { return };
    let gateway = &compose["services"]["gateway"];
    let config = Config::load(&Flags::default(), None, &of_container(&compose)).expect("a configuration");
    let Some(Address::Ip(devices)) = config.addr else { panic!("an address for devices") };
    let all = [devices, config.grpc_addr, config.http_addr];
    let all = all.iter().filter(|address| address.ip().is_unspecified());
    let mut listening: Vec<String> = all.map(|address| address.port().to_string()).collect();
    let mut published: Vec<&str> = texts(&gateway["ports"])
        .into_iter()
        .map(|port| {
            let (outside, inside) = port.rsplit_once(':').expect("two ports");
            assert_eq!(outside, format!("127.0.0.1:{inside}"));
            inside
        })
        .collect();
    listening.sort_unstable();
    published.sort_unstable();
    assert_eq!(listening, published);
    assert_eq!(listening, ["10000", "8883", "9090"]);
    for service in compose["services"].as_object().expect("services").values() {
        for port in texts(&service["ports"]) {
            assert!(port.starts_with("127.0.0.1:"), "{port}");
        }
        for volume in texts(&service["volumes"]) {
            let (name, _) = volume.split_once(':').expect("a volume");
            assert!(
                name == "./certs" || compose["volumes"].get(name).is_some() || is_there(name),
                "volume {name}"
            );
        }
    }
}

/// The check of the gateway's health is run as it stands, but for the port, against a gateway that is ready.
#[test]
fn the_health_check_of_the_gateway_tells_ready_from_absent() {
    let Some(compose) = compose() else { return };
    let test = texts(&compose["services"]["gateway"]["healthcheck"]["test"]);
    assert_eq!(test[0], "CMD");
    let mut server = Server::start();
    let port = server.ports.http.to_string();
    let line: Vec<String> = test[1..].iter().map(|word| word.replace("9090", &port)).collect();
    let healthy = || Command::new(&line[0]).args(&line[1..]).status().expect("run the check").success();
    assert!(healthy(), "{line:?}");
    assert!(server.stop());
    assert!(!healthy(), "{line:?}");
}

/// The same line by line, and the image has it for those who don't use Compose.
#[test]
fn the_image_has_the_health_check_of_compose() {
    let Some(compose) = compose() else { return };
    let test = texts(&compose["services"]["gateway"]["healthcheck"]["test"]);
    let dockerfile = fs::read_to_string(root().join("Dockerfile")).expect("read the Dockerfile");
    let check = dockerfile.lines().find_map(|line| line.trim().strip_prefix("CMD ")).expect("a health check");
    let check: Vec<String> = serde_json::from_str(check).expect("a list, so that no shell is in between");
    assert_eq!(check, test[1..]);
}

/// Prometheus finds the gateway and its token where Compose puts them.
#[test]
fn prometheus_scrapes_the_gateway_of_compose() {
    let Some(file) = crate::yaml("deploy/prometheus/compose.yml") else { return };
    let Some(mut plain) = crate::yaml("deploy/prometheus/prometheus.yml") else { return };
    let job = &mut plain["scrape_configs"][0];
    job["static_configs"][0]["targets"] = serde_json::json!(["gateway:9090"]);
    job["authorization"]["credentials_file"] = "/certs/metrics.token".into();
    assert_eq!(file, plain, "the two configurations differ in more than where things are");
    let Some(compose) = compose() else { return };
    let command = compose["services"]["prometheus"]["command"].as_str().expect("a command");
    assert!(command.contains("/etc/prometheus/compose.yml"), "{command}");
}

/// The stop signal of the image and the time that Compose gives are those of the program.
#[test]
fn the_gateway_has_time_to_stop() {
    let Some(compose) = compose() else { return };
    let grace = compose["services"]["gateway"]["stop_grace_period"].as_str().expect("a time");
    let grace: u64 = grace.trim_end_matches('s').parse().expect("seconds");
    let deadline = Config::default().shutdown.deadline.0;
    assert!(Duration::from_secs(grace) > deadline, "{grace} s, and the gateway takes {deadline:?}");
    let dockerfile = fs::read_to_string(root().join("Dockerfile")).expect("read the Dockerfile");
    assert!(dockerfile.contains("STOPSIGNAL SIGTERM"));
}

/// The settings of the image suit the program, without a file that the image lacks: it starts with certificates at
/// /certs and the user's decision on who may connect, and others reach it.
#[test]
fn the_image_starts_as_it_stands_and_listens_beyond_the_container() {
    let dockerfile = fs::read_to_string(root().join("Dockerfile")).expect("read the Dockerfile");
    assert!(
        !dockerfile.lines().any(|line| line.starts_with("CMD")) && !dockerfile.contains("\"--config\""),
        "{dockerfile}"
    );
    let env = of_image();
    let unsaid =
        Config::load(&Flags::default(), None, &env).expect_err("nobody said which devices may connect");
    assert!(unsaid.to_string().contains("--allow-anonymous"), "{unsaid}");
    let mut env = env;
    env.insert("MQTT_SERVER_AUTH__ALLOW_ANONYMOUS".to_owned(), "true".to_owned());
    let config = Config::load(&Flags::default(), None, &env).expect("a configuration that is good");
    let Some(Address::Ip(devices)) = config.addr else { panic!("an address for devices") };
    assert!(devices.ip().is_unspecified() && config.grpc_addr.ip().is_loopback(), "{env:?}");
    let server = Server::start();
    let certs = server.dir().join("certs").display().to_string();
    let mut command = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server"));
    command.arg("--check").current_dir(server.dir());
    command.envs(env.iter().map(|(name, value)| (name, value.replace("/certs", &certs))));
    let (success, output) = run(&mut command, Duration::from_secs(60));
    assert!(success, "{env:?}: {output}");
}

/// The failure: addresses in a configuration file do nothing, since the image and Compose set others over them.
#[test]
fn an_address_of_the_configuration_holds_in_the_container() {
    let Some(compose) = compose() else { return };
    let flags = texts(&compose["services"]["gateway"]["command"]);
    assert!(!flags.iter().any(|flag| flag.contains("addr=") && !flag.starts_with("--db-addr=")), "{flags:?}");
    let file = "addr = \"[::]:18883\"\ngrpc_addr = \"[::]:11000\"\nhttp_addr = \"127.0.0.1:9099\"\n";
    let config =
        Config::load(&Flags::default(), Some(file), &of_container(&compose)).expect("a configuration");
    let devices = config.addr.expect("an address for devices").to_string();
    let [grpc, http] = [config.grpc_addr, config.http_addr].map(|address| address.to_string());
    assert_eq!([&*devices, &*grpc, &*http], ["[::]:18883", "[::]:11000", "127.0.0.1:9099"]);
}

/// The gateways of deploy/compose/two-gateways.yml, which differ in their names, and their configurations.
fn two_gateways(compose: &Value) -> [Config; 2] {
    let [a, b] = ["a", "b"].map(|node| {
        let service = &compose["services"][format!("gateway-{node}")];
        let env = service["environment"].as_object().expect("an environment").iter();
        let env = env.map(|(name, value)| (name.clone(), value.as_str().expect("a text").to_owned()));
        let env: BTreeMap<String, String> = of_image().into_iter().chain(env).collect();
        let args = ["mqtt-server"].into_iter().chain(texts(&service["command"]));
        let flags = Flags::try_parse_from(args).expect("flags that are taken");
        let config = Config::load(&flags, None, &env).expect("a configuration that is good");
        assert_eq!(config.cluster.node, node);
        assert_eq!(config.cluster.address, format!("gateway-{node}:{}", config.grpc_addr.port()));
        assert!(config.backends.takes_bearers() && !config.insecure_grpc, "open to other containers");
        let grace = service["stop_grace_period"].as_str().expect("a time").trim_end_matches('s');
        let grace = Duration::from_secs(grace.parse().expect("seconds"));
        assert!(grace > config.shutdown.deadline.0, "{grace:?}");
        config
    });
    [a, b]
}

/// Both are of one cluster, whose database is a service that lets them in.
#[test]
fn two_gateways_of_compose_are_a_cluster_with_its_database() {
    let Some(compose) = crate::yaml("deploy/compose/two-gateways.yml") else { return };
    let [a, b] = two_gateways(&compose);
    assert!(a.cluster.is_on() && a.cluster.name == b.cluster.name && a.cluster.ledger == b.cluster.ledger);
    let ledger = a.cluster.ledger_address().expect("an address");
    let [(host, 5432)] = &ledger.hosts[..] else { panic!("{:?}", ledger.hosts) };
    let database = &compose["services"][host];
    let set = |name: &str| database["environment"][name].as_str().expect("a variable").to_owned();
    assert_eq!([set("POSTGRES_USER"), set("POSTGRES_DB")], [ledger.user, ledger.database]);
    assert_eq!(set("POSTGRES_PASSWORD"), a.ledger_password().expect("a password").expose());
    let made = texts(&compose["services"]["cluster"]["entrypoint"]);
    assert_eq!(made[2], "mqtt-server cluster status || mqtt-server cluster create");
    for service in compose["services"].as_object().expect("services").values() {
        if let Some(image) = service["image"].as_str().filter(|_| service.get("build").is_none()) {
            assert!(image.split_once(':').is_some_and(|(_, tag)| tag != "latest"), "{image}");
        }
        for volume in service.get("volumes").map(texts).unwrap_or_default() {
            let (name, _) = volume.split_once(':').expect("a volume");
            let file = root().join("deploy/compose").join(name);
            assert!(compose["volumes"].get(name).is_some() || file.exists(), "volume {name}");
        }
    }
}

/// Clients come by HAProxy alone, on loopback, and it is set up as the guide says.
#[test]
fn haproxy_of_compose_is_that_of_the_guide_and_finds_the_gateways() {
    let Some(compose) = crate::yaml("deploy/compose/two-gateways.yml") else { return };
    let guide = fs::read_to_string(root().join("docs/guides/two-gateways.md")).expect("read the guide");
    let (_, text) = guide.split_once("```text\n").expect("a configuration of HAProxy");
    let (text, _) = text.split_once("```").expect("its end");
    let text = text.replace("10.0.0.1", "gateway-a").replace("10.0.0.2", "gateway-b");
    let file = fs::read_to_string(root().join("deploy/compose/haproxy.cfg")).expect("read haproxy.cfg");
    let (_, file) = file.split_once('\n').expect("a comment and the configuration");
    assert_eq!(file, text);
    let mut listening = Vec::new();
    for config in two_gateways(&compose) {
        let Some(Address::Ip(devices)) = config.addr else { panic!("an address for devices") };
        listening =
            [devices.port(), config.grpc_addr.port()].map(|port| format!("127.0.0.1:{port}:{port}")).into();
        for (port, what) in
            [(devices.port(), ":"), (config.grpc_addr.port(), ":"), (config.http_addr.port(), "port ")]
        {
            assert!(file.contains(&format!("{what}{port}")), "{what}{port}");
        }
    }
    for (name, service) in compose["services"].as_object().expect("services") {
        let ports = service.get("ports").map(texts).unwrap_or_default();
        assert_eq!(ports, if name == "haproxy" { &*listening } else { &[] }, "{name}");
    }
}
