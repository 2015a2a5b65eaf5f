//! The claims of deploy/ and the release workflow about the program, held against it. The package itself is tried by
//! scripts/package-test.sh, which needs root.

use std::{collections::BTreeMap, fs, process::Command, time::Duration};

use crate::support::{root, run};
use mqtt_server::config::{Config, Flags};

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("read {path}: {error}"))
}

/// The value behind the first line that begins so.
fn value(path: &str, begins: &str) -> String {
    let text = read(path);
    let line = text.lines().map(str::trim).find_map(|line| line.strip_prefix(begins));
    line.unwrap_or_else(|| panic!("{path} has no {begins}")).trim().trim_matches('"').to_owned()
}

#[test]
fn a_tag_that_is_not_the_version_makes_no_release() {
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(value("deploy/helm/mqtt-server/Chart.yaml", "appVersion:"), version);
    assert!(value("deploy/homebrew/mqtt-server.rb", "url").contains(&format!("/v{version}.tar.gz")));
    for (tag, good) in
        [(format!("v{version}"), true), (version.to_owned(), false), ("v99.0.0".to_owned(), false)]
    {
        let mut command = Command::new("scripts/release.sh");
        command.args(["version", &tag]).current_dir(root());
        let (success, output) = run(&mut command, Duration::from_secs(60));
        assert_eq!(success, good, "{tag}: {output}");
    }
}

/// The failure: notes of a release are the whole history, or nothing.
#[test]
fn the_notes_of_a_release_are_its_part_of_the_changelog() {
    let version = env!("CARGO_PKG_VERSION");
    let copy = tempfile::tempdir().expect("make a directory");
    let at = |path: &str| copy.path().join(path);
    let files = [
        "scripts/release.sh",
        "scripts/lib.sh",
        "Cargo.toml",
        "clients/python/pyproject.toml",
        "clients/typescript/package.json",
        "deploy/helm/mqtt-server/Chart.yaml",
    ];
    for file in files {
        fs::create_dir_all(at(file).parent().expect("a folder")).expect("make a folder");
        fs::copy(root().join(file), at(file)).expect("copy a file");
    }
    let notes = |changelog: &str| {
        fs::write(at("CHANGELOG.md"), changelog).expect("write");
        let mut command = Command::new(at("scripts/release.sh"));
        command.args(["notes", &format!("v{version}")]).current_dir(copy.path());
        run(&mut command, Duration::from_secs(60))
    };
    let whole = format!(
        "# Changelog\n\n## 9.9.9\nlater\n\n## {version} (today)\nDevices\n- this\n\n## 0.0.1\nearlier\n"
    );
    let (made, text) = notes(&whole);
    assert!(made && text.trim() == "Devices\n- this", "{text}");
    let (made, text) = notes("# Changelog\n\n## Unreleased\nthis\n");
    assert!(!made && text.contains("has nothing below"), "{text}");
    // A version that was not raised with the others.
    fs::write(at("clients/python/pyproject.toml"), "version = \"9.9.9\"\n").expect("write");
    let (made, text) = notes(&whole);
    assert!(!made && text.contains("pyproject.toml is not of"), "{text}");
}

/// The failure: an image is public before the tests have passed.
#[test]
fn nothing_leaves_a_release_before_everything_else_has_passed() {
    let workflow = read(".github/workflows/release.yml");
    let (_, jobs) = workflow.split_once("\njobs:\n").expect("jobs");
    let mut names = Vec::new();
    let (before, publish) = jobs.split_once("\n  publish:\n").expect("a job that publishes");
    for line in before.lines() {
        if let Some(name) = line.strip_prefix("  ").and_then(|line| line.strip_suffix(':'))
            && !name.starts_with([' ', '#'])
        {
            names.push(name);
        }
    }
    assert_eq!(names, ["version", "test", "build", "reproduce", "sbom", "clients"]);
    assert!(publish.contains(&format!("needs: [{}]\n", names.join(", "))));
    for what in ["docker push", "docker login", ": write", "gh release", "secrets."] {
        assert!(publish.contains(what) && !before.contains(what), "{what}");
    }
}

#[test]
fn hosted_tests_are_those_of_every_other_machine() {
    let workflow = read(".github/workflows/ci.yml");
    let steps: Vec<&str> = workflow.lines().filter_map(|line| line.trim().strip_prefix("- run: ")).collect();
    assert_eq!(steps, ["rustup toolchain install", ".ci/run"]);
    assert!(read(".ci/run").trim_end().ends_with("exec scripts/test.sh"));
    assert!(read(".github/workflows/release.yml").contains("uses: ./.github/workflows/ci.yml"));
}

/// The failure: code that packages ship is compiled by no test, as bridges to Kafka were for a while.
#[test]
fn what_is_shipped_is_what_is_tested() {
    // The allocator and QUIC are on unless they are switched off.
    assert_eq!(value("Cargo.toml", "default ="), "[\"jemalloc\", \"quic\"]");
    assert_eq!(value("Cargo.toml", "shipped ="), "[\"jemalloc\", \"kafka\", \"quic\"]");
    // And OTLP export, which users build for themselves.
    assert_eq!(value("scripts/lib.sh", "with_kafka=1 features=(--"), "features \"kafka otel\")");
    for script in ["scripts/test.sh", "scripts/check.sh"] {
        let text = read(script);
        assert!(text.contains("\nchoose_features\n"), "{script}");
        for line in
            text.lines().filter(|line| line.contains("--all-targets") || line.contains("cargo test --locked"))
        {
            let others = ["--lib --bins \"$@\"", "-p mqload", "--no-default-features"];
            let whole = others.iter().all(|other| !line.contains(other));
            assert!(!whole || line.contains("\"${features[@]}\""), "{script}: {line}");
        }
    }
}

#[test]
fn the_configuration_of_the_package_starts_and_is_for_this_machine_alone() {
    let text = read("deploy/deb/mqtt-server.toml");
    let config =
        Config::load(&Flags::default(), Some(&text), &BTreeMap::new()).expect("a configuration that starts");
    for address in [config.grpc_addr, config.http_addr] {
        assert!(address.ip().is_loopback(), "{address}");
    }
    // The proposed settings are taken, too: certificates, users and tokens, for others.
    let proposed = text.lines().map(|line| line.strip_prefix("# ").unwrap_or(line));
    let start = text.lines().position(|line| line.starts_with("# addr")).expect("a proposal");
    let proposed: String = proposed.skip(start).map(|line| format!("{line}\n")).collect();
    let config =
        Config::load(&Flags::default(), Some(&proposed), &BTreeMap::new()).expect("a proposal that starts");
    assert!(!config.non_tls && config.auth.password_file.is_some(), "{proposed}");
    assert!(
        config.data_dir.starts_with("./")
            && text.contains(&value("deploy/deb/mqtt-server.service", "WorkingDirectory="))
    );
}

/// Killed before its deadline, the gateway could not write what waits.
#[test]
fn whoever_stops_the_gateway_gives_it_time() {
    let deadline = Config::default().shutdown.deadline.0.as_secs();
    let unit: u64 = value("deploy/deb/mqtt-server.service", "TimeoutStopSec=").parse().expect("seconds");
    assert!(unit > deadline, "{unit}");
    let chart = "deploy/helm/mqtt-server/templates/statefulset.yaml";
    let grace: u64 = value(chart, "terminationGracePeriodSeconds:").parse().expect("seconds");
    let set = value("deploy/helm/mqtt-server/values.yaml", "deadline =");
    let set: u64 = set.trim_matches(['"', 's']).parse().expect("seconds");
    assert!(grace > set && set >= deadline, "{grace}, {set}");
}

/// Variables of the chart are keys, and with all of them the gateway would start.
#[test]
fn the_gateway_takes_the_variables_of_the_chart() {
    let chart = read("deploy/helm/mqtt-server/templates/statefulset.yaml");
    let set = |line: &str| -> Option<(String, String)> {
        let (name, value) = line.trim().strip_prefix("- {name: MQTT_SERVER_")?.split_once(", value: ")?;
        Some((format!("MQTT_SERVER_{name}"), value.strip_suffix('}')?.trim_matches('"').to_owned()))
    };
    let mut env: BTreeMap<String, String> = chart.lines().filter_map(set).collect();
    assert!(env.len() > 12, "{env:?}");
    env.remove("MQTT_SERVER_CONFIG");
    // As somebody would set it.
    let ledger =
        env.insert("MQTT_SERVER_CLUSTER__LEDGER".to_owned(), "postgres://gateway@db/gateway".to_owned());
    assert_eq!(ledger.as_deref(), Some("{{ .Values.cluster.ledger | quote }}"));
    let cluster = env.insert("MQTT_SERVER_CLUSTER__NAME".to_owned(), "gateway".to_owned());
    assert_eq!(cluster.as_deref(), Some("{{ .Values.cluster.name | default .Release.Name | quote }}"));
    env.remove("MQTT_SERVER_AUTH__ALLOW_ANONYMOUS");
    let values = read("deploy/helm/mqtt-server/values.yaml");
    let config = values.split_once("config: |\n").expect("a configuration").1;
    let config: String = config
        .lines()
        .take_while(|line| line.is_empty() || line.starts_with("  "))
        .map(|line| format!("{}\n", line.trim()))
        .collect();
    let load =
        |text: &str| Config::load(&Flags::default(), Some(text), &env).expect("a configuration that starts");
    let loaded = load(&config);
    assert!(!loaded.grpc_addr.ip().is_loopback() && loaded.backends.takes_bearers());
    assert!(loaded.cluster.is_on() && loaded.cluster.password_file.is_some());
    // Its addresses do not hold before those of the configuration, as those of the unit of the package.
    let own = load(&format!(
        "addr = \"[::]:8883\"\ngrpc_addr = \"[::]:10000\"\nhttp_addr = \"[::]:9090\"\n{config}"
    ));
    let devices = own.addr.as_ref().map(ToString::to_string);
    assert_eq!(devices.as_deref(), Some("[::]:8883"));
    assert!(own.grpc_addr.is_ipv6() && own.http_addr.is_ipv6(), "{own:?}");
    let unit = read("deploy/deb/mqtt-server.service");
    assert!(!unit.contains("addr") && !unit.contains("Environment"), "{unit}");
}

/// The failure: a gateway that stands by is sent devices, or is restarted, or an update waits until it serves.
#[test]
fn the_chart_knows_ready_from_standing_by() {
    let chart = read("deploy/helm/mqtt-server/templates/statefulset.yaml");
    let asks = |probe: &str| -> String {
        let (_, rest) = chart.split_once(probe).expect("a probe");
        let (_, rest) = rest.split_once("'GET ").expect("a request");
        rest.split_once(' ').expect("its path").0.to_owned()
    };
    let asked = ["startupProbe:", "readinessProbe:", "livenessProbe:"].map(asks);
    assert_eq!(asked, ["/readyz?standby=ok", "/readyz", "/healthz"]);
    for line in ["podManagementPolicy: Parallel", "updateStrategy: {type: OnDelete}"] {
        assert!(chart.contains(line), "{line}");
    }
    assert!(
        read("deploy/helm/mqtt-server/templates/services.yaml").contains("publishNotReadyAddresses: true")
    );
}

/// The manifests of the guide are for this gateway: it takes their variables, and would start with them.
#[test]
fn the_gateway_takes_the_variables_of_the_guide_for_kubernetes() {
    let page = read("docs/guides/kubernetes.md");
    let (_, manifests) = page.split_once("```yaml\n").expect("manifests");
    let (manifests, _) = manifests.split_once("```").expect("their end");
    let set = |line: &str| -> Option<(String, String)> {
        let (name, value) = line.trim().strip_prefix("- { name: MQTT_SERVER_")?.split_once(", value: ")?;
        Some((format!("MQTT_SERVER_{name}"), value.trim_end_matches(" }").trim_matches('"').to_owned()))
    };
    let env: BTreeMap<String, String> = manifests.lines().filter_map(set).collect();
    assert!(env.len() > 5, "{env:?}");
    let config = Config::load(&Flags::default(), None, &env).expect("a configuration that starts");
    assert!(config.backends.takes_bearers() && !config.http_addr.ip().is_loopback());
    for (port, name) in [(config.grpc_addr.port(), "grpc"), (config.http_addr.port(), "http")] {
        assert!(manifests.contains(&format!("{{ name: {name}, containerPort: {port} }}")), "{name} {port}");
    }
    let grace =
        manifests.lines().find_map(|line| line.trim().strip_prefix("terminationGracePeriodSeconds: "));
    let grace = grace.and_then(|line| line.split(' ').next()?.parse().ok());
    assert!(grace > Some(config.shutdown.deadline.0.as_secs()), "{grace:?}");
}

/// The failure: the test command installed a package that starts a broker on port 1883, where a developer has one, or has none on
/// purpose.
#[test]
fn no_script_installs_a_broker_that_starts_itself() {
    let servers = ["mosquitto", "prometheus", "redis-server", "nats-server"];
    let mut scripts = 0;
    for file in fs::read_dir(root().join("scripts")).expect("list the scripts") {
        let path = file.expect("a file").path();
        if path.extension().is_none_or(|extension| extension != "sh") {
            continue;
        }
        scripts += 1;
        let text = fs::read_to_string(&path).expect("read a script");
        for line in text.lines().filter(|line| !line.trim_start().starts_with('#')) {
            let installs = ["missing+=(", "apt_install ", "apt-get install "];
            let Some(rest) = installs.iter().find_map(|begin| Some(line.split_once(begin)?.1)) else {
                continue;
            };
            let mut packages = rest.split([' ', ')', '\'', '"', ';', '&']);
            let server = packages.find(|package| servers.contains(package));
            assert_eq!(server, None, "{}: {line}", path.display());
        }
    }
    assert!(scripts > 10, "only {scripts} scripts");
}
