//! Every RPC, and every reason with which one can fail, as backends in Python and Go see them.
//!
//! tests/interop/rpcs/table.json has the rows. Here are the gateways and devices that it needs, and what holds the table against
//! the protos and the code. The programs that walk it are walk.py (grpcio) and walk.go (grpc-go); they know no service by name.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use access::backends::{Role, Scope, TokenGrant, Tokens, hash, mint};
use codec::{AckKind, encode_ack};
use gateway_core::Protocol;
use mqtt_server::proto::gateway::v1::{
    CreateGroupRequest, Filter, GetGroupRequest, Group, PublishRequest, UpdateShadowRequest, Wait,
    groups_client::GroupsClient, publisher_client::PublisherClient, shadows_client::ShadowsClient,
};
use prost::Message as _;
use prost_types::{FileDescriptorProto, FileDescriptorSet};
use rumqttc::v5::{
    AsyncClient, Event, MqttOptions,
    mqttbytes::{
        QoS,
        v5::{ConnectProperties, Packet, PublishProperties},
    },
};
use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::mpsc};

use crate::{
    client::{Client, Got, decoded, hello},
    support::{Server, need, on_path, python, root, run, skipped},
};

/// Rules for devices: everything is allowed but this.
const RULES: &str =
    "[[rules]]\ndeny = \"all\"\ntopics = [\"kept/#\"]\n\n[[rules]]\nallow = \"all\"\ntopics = [\"#\"]\n";

/// Only a failing test takes so long.
const LIMIT: Duration = Duration::from_secs(240);

fn folder() -> PathBuf {
    root().join("tests/interop/rpcs")
}

fn table() -> Value {
    read_table("table.json")
}

fn read_table(name: &str) -> Value {
    let text = fs::read_to_string(folder().join(name)).expect("read the table");
    serde_json::from_str(&text).expect("the table is JSON")
}

/// Returns the descriptors from which the programs make messages: our services, those of tools, and the details of
/// errors. Each file once, after those that it needs.
fn descriptors() -> FileDescriptorSet {
    let sets = [
        mqtt_server::proto::DESCRIPTORS,
        tonic_health::pb::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
        tonic_types::pb::FILE_DESCRIPTOR_SET,
    ];
    let mut file: Vec<FileDescriptorProto> = Vec::new();
    for set in sets {
        for found in FileDescriptorSet::decode(set).expect("descriptors").file {
            if !file.iter().any(|known| known.name == found.name) {
                file.push(found);
            }
        }
    }
    FileDescriptorSet { file }
}

/// As in the table: `gateway.v1.Publisher/Publish`.
fn methods() -> BTreeSet<String> {
    let mut methods = BTreeSet::new();
    for file in descriptors().file {
        for service in &file.service {
            for method in &service.method {
                methods.insert(format!("{}.{}/{}", file.package(), service.name(), method.name()));
            }
        }
    }
    methods
}

/// The rows, with those within steps.
fn rows(table: &Value) -> Vec<&Value> {
    fn add<'a>(row: &'a Value, rows: &mut Vec<&'a Value>) {
        rows.push(row);
        for step in row["steps"].as_array().into_iter().flatten() {
            if step["row"].is_object() {
                add(&step["row"], rows);
            }
        }
    }
    let mut all = Vec::new();
    for row in table["rows"].as_array().expect("rows") {
        add(row, &mut all);
    }
    all
}

fn keys(table: &Value, name: &str) -> BTreeSet<String> {
    table[name].as_object().expect("an object").keys().cloned().collect()
}

/// A service that nobody has tried from outside.
#[test]
fn each_rpc_has_a_row_in_which_it_succeeds() {
    let table = table();
    // Walked by tests/database/rpcs.rs.
    let with_database = read_table("database.json");
    let succeeds = |row: &&Value| row["code"].is_null() && row["types"].is_null();
    let tried: BTreeSet<String> = rows(&table)
        .into_iter()
        .chain(rows(&with_database))
        .filter(succeeds)
        .map(|row| row["call"].as_str().unwrap_or_default().to_owned())
        .collect();
    let explained = keys(&table, "never_ok");
    let untried: BTreeSet<String> = methods().difference(&tried).cloned().collect();
    assert_eq!(
        untried, explained,
        "RPCs without a row in which they succeed, and those that never_ok explains"
    );
}

/// Every reason of the code: the words to which `fn reason` maps.
pub(crate) fn reasons() -> BTreeSet<String> {
    let mut reasons = BTreeSet::new();
    for file in [
        "crates/grpc-messages/src/status.rs",
        "crates/auth/src/backends/mod.rs",
        "crates/grpc-messages/src/command_state.rs",
    ] {
        let text = fs::read_to_string(root().join(file)).expect("read the code");
        let (_, body) = text.split_once("fn reason(").expect("where reasons are");
        let (body, _) = body.split_once("    }\n").expect("its end");
        reasons
            .extend(body.split("=> \"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
    }
    reasons
}

/// A reason that callers may branch on and that no caller has seen.
#[test]
fn each_reason_has_a_row_or_it_is_said_why_not() {
    let table = table();
    let given: BTreeSet<String> =
        rows(&table).iter().filter_map(|row| Some(row["reason"].as_str()?.to_owned())).collect();
    let explained = keys(&table, "not_provoked");
    let known = reasons();
    assert!(known.len() > 45 && known.contains("CREDENTIALS_REVOKED"), "{known:?}");
    let missing: BTreeSet<String> = known.difference(&given).cloned().collect();
    assert_eq!(missing, explained, "reasons without a row, and those that not_provoked explains");
    assert!(given.is_subset(&known), "rows with reasons that nothing gives: {given:?}");
}

/// A field that is misspelt checks nothing.
#[test]
fn the_table_has_no_field_that_nobody_reads() {
    let table = table();
    let fields = keys(&table, "fields");
    let with_database = read_table("database.json");
    for row in rows(&table).into_iter().chain(rows(&with_database)) {
        let unknown: Vec<_> =
            row.as_object().expect("a row").keys().filter(|key| !fields.contains(*key)).collect();
        assert!(unknown.is_empty(), "{unknown:?} in {row}");
    }
}

/// The library that makes the disk of a gateway obey a file, built into `dir`.
fn recorder(dir: &Path) -> PathBuf {
    let library = dir.join("recorder.so");
    let source = root().join("tests/recorder/recorder.c");
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-O2", "-o"]).args([&library, &source]).args(["-ldl", "-lpthread"]);
    let (built, output) = run(&mut command, LIMIT);
    assert!(built, "{output}");
    library
}

/// A gateway whose disk stands still as long as the file `stall` is there.
fn start_to_be_stalled(toml: &str, library: PathBuf, stall: &Path) -> Server {
    let dir = tempfile::tempdir().expect("a directory");
    let environment = [
        ("LD_PRELOAD", library),
        ("RECORDER_DIR", dir.path().to_path_buf()),
        ("RECORDER_STALL", stall.to_path_buf()),
    ];
    Server::start_in_environment(dir, &[], toml, &environment)
}

/// A group `late` with one message, which are on disk.
async fn group_with_a_message(server: &Server) {
    let channel = crate::non_broker::channel(server).await;
    let filter = Filter { include_backends: true, ..Filter::default() };
    let group = Group { name: "late".to_owned(), filter: Some(filter), ..Group::default() };
    let request = CreateGroupRequest { group: Some(group), ..CreateGroupRequest::default() };
    let mut groups = GroupsClient::new(channel.clone());
    groups.create_group(request).await.expect("a group");
    let request = PublishRequest { topic: "late".to_owned(), ..PublishRequest::default() };
    PublisherClient::new(channel).publish(request).await.expect("published");
    loop {
        let request = GetGroupRequest { name: "late".to_owned() };
        let group = groups.get_group(request).await.expect("the group").into_inner().group;
        if group.and_then(|group| group.status).is_some_and(|status| status.lag_messages == 1) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Another process of the gateway, over a shadow of `lamp` that is not as it was written.
async fn damage_a_shadow(mut server: Server, toml: &str) -> Server {
    const TEXT: &[u8] = b"what the disk has lost";
    let desired = format!("{{\"note\":\"{}\"}}", String::from_utf8_lossy(TEXT));
    let request = UpdateShadowRequest {
        device_id: "lamp".to_owned(),
        desired: Some(desired),
        ..UpdateShadowRequest::default()
    };
    let channel = crate::non_broker::channel(&server).await;
    ShadowsClient::new(channel).update_shadow(request).await.expect("a shadow");
    assert!(server.stop(), "it ends as it should");
    let file = server.dir().join("data/records/data.mdb");
    let mut bytes = fs::read(&file).expect("the store of records");
    let places: Vec<usize> =
        bytes.windows(TEXT.len()).enumerate().filter(|(_, part)| *part == TEXT).map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "the document is in its store");
    for at in places {
        bytes[at] ^= 1;
    }
    fs::write(&file, bytes).expect("damage the store");
    server.kill_and_restart(&[], toml)
}

/// Another process of the gateway, after one that was killed while a call with the key `lost` waited for the device `mute`.
async fn crash_within_a_call(server: Server, toml: &str) -> Server {
    let mut mute = silent_device(&server, "mute");
    let publish = |topic: &str, key: &str| PublishRequest {
        topic: topic.to_owned(),
        payload: b"pay".as_slice().into(),
        idempotency_key: key.to_owned(),
        wait: Wait::Acked.into(),
        ..PublishRequest::default()
    };
    let mut client = PublisherClient::new(crate::non_broker::channel(&server).await);
    let mut other = client.clone();
    let waiting = publish("mute/pay", "lost");
    let waiting = tokio::spawn(async move { client.publish(waiting).await });
    let got = tokio::task::spawn_blocking(move || mute.next()).await.expect("a thread");
    assert_eq!(got, Got::Publish("mute/pay".to_owned(), b"pay".to_vec()));
    // Its answer comes when its key is on disk, and with it all keys before.
    other.publish(publish("nobody", "kept")).await.expect("published");
    let server = server.kill_and_restart(&[], toml);
    assert!(waiting.await.expect("a task").is_err(), "the call has ended with the gateway");
    server
}

/// The gateways of the table, their tokens and devices. All of it ends with this.
struct World {
    servers: BTreeMap<String, Server>,
    /// Directory of the file for the programs.
    dir: tempfile::TempDir,
    /// Serves the devices that answer.
    _runtime: Runtime,
    _silent: Vec<Client>,
}

impl World {
    fn start(table: &Value) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name).display().to_string();
        fs::write(at("bans"), "[[bans]]\nclient_id = \"banned\"\nreason = \"test\"\n").expect("write bans");
        fs::write(at("rules"), RULES).expect("write rules");
        let mut tokens = BTreeMap::new();
        for (name, token) in table["tokens"].as_object().expect("tokens") {
            tokens.insert(name.clone(), add_token(&dir.path().join("tokens"), name, token));
        }
        let runtime = Runtime::new().expect("a runtime");
        let (mut servers, mut silent) = (BTreeMap::new(), Vec::new());
        for (name, gateway) in table["gateways"].as_object().expect("gateways") {
            let toml = gateway["toml"].as_str().unwrap_or_default();
            let toml = toml
                .replace("{bans}", &at("bans"))
                .replace("{tokens}", &at("tokens"))
                .replace("{rules}", &at("rules"));
            let mut server = match name.as_str() {
                "stalled" => start_to_be_stalled(&toml, recorder(dir.path()), &dir.path().join("stall")),
                _ => Server::start_with(&[], &toml),
            };
            match name.as_str() {
                "stalled" => runtime.block_on(group_with_a_message(&server)),
                "damaged" => server = runtime.block_on(damage_a_shadow(server, &toml)),
                "crashed" => server = runtime.block_on(crash_within_a_call(server, &toml)),
                _ => {}
            }
            let devices: Vec<&str> =
                gateway["devices"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            if devices.contains(&"away") {
                // The device has not been seen since the start, but its session is there.
                drop(silent_device(&server, "away"));
                server = server.stop_and_restart(&[], &toml);
            }
            for device in devices {
                match device {
                    "away" => {}
                    "refusing" => refusing_device(&server, device),
                    "mute" | "small" => silent.push(silent_device(&server, device)),
                    answering => runtime.block_on(answering_device(&server, answering)),
                }
            }
            servers.insert(name.clone(), server);
        }
        fs::write(at("stall"), "").expect("stop a disk");
        fs::write(at("descriptors"), descriptors().encode_to_vec()).expect("write descriptors");
        let gateway =
            |server: &Server| json!({ "grpc": server.ports.grpc, "pid": server.pid(), "ca": server.ca() });
        let gateways: BTreeMap<&String, Value> =
            servers.iter().map(|(name, server)| (name, gateway(server))).collect();
        let world = json!({ "gateways": gateways, "tokens": tokens, "descriptors": at("descriptors") });
        fs::write(at("world"), world.to_string()).expect("write the world");
        Self { servers, dir, _runtime: runtime, _silent: silent }
    }

    /// Runs a program over the table, and stops the gateways.
    fn walk(mut self, mut command: Command) {
        command.arg(folder().join("table.json")).arg(self.dir.path().join("world"));
        let (success, output) = run(&mut command, LIMIT);
        eprintln!("{output}");
        assert!(success, "{command:?} failed; its output is above");
        fs::remove_file(self.dir.path().join("stall")).expect("let the disk go on");
        for (name, server) in &mut self.servers {
            assert!(server.stop(), "{name} did not stop cleanly");
            let log = server.log();
            let errors: Vec<&str> = log.lines().filter(|line| line.contains("panicked")).collect();
            assert!(errors.is_empty(), "{name} logged {errors:#?}");
        }
    }
}

/// Adds a token to the file and returns its secret.
pub(crate) fn add_token(file: &Path, name: &str, token: &Value) -> String {
    let list = |key: &str| -> Option<Vec<String>> {
        Some(token[key].as_array()?.iter().filter_map(|one| Some(one.as_str()?.to_owned())).collect())
    };
    let role =
        Role::ALL.into_iter().find(|role| Some(role.as_str()) == token["role"].as_str()).expect("a role");
    let scope = Scope::new(list("topics"), list("devices")).expect("a scope");
    let (secret, _) = mint().expect("a token");
    let grant = TokenGrant {
        id: name.to_owned(),
        role,
        scope,
        created: 0,
        expires: token["expires"].as_u64(),
        note: String::new(),
        hash: hash(&secret),
    };
    let text = fs::read_to_string(file).unwrap_or_default();
    fs::write(file, Tokens::with(&text, &grant).expect("a file of tokens")).expect("write the tokens");
    secret
}

/// Subscribed to `NAME/#`, and acknowledges nothing; `small` takes no packet of more than 100 bytes.
fn silent_device(server: &Server, name: &str) -> Client {
    let mut connect = hello(Protocol::V5, name);
    connect.clean_start = false;
    connect.session_expiry = Some(600);
    connect.maximum_packet_size = (name == "small").then_some(100);
    let mut client = Client::connect_with(server.ports.tcp, connect);
    client.subscribe_with(&format!("{name}/#"), gateway_core::QoS::AtLeastOnce, None);
    client
}

/// Refuses every message (PUBACK with 0x83), until the gateway ends.
fn refusing_device(server: &Server, name: &str) {
    let mut client = silent_device(server, name);
    std::thread::spawn(move || {
        while let Some(bytes) = client.next_bytes() {
            if let codec::Packet::Publish(publish) = decoded(&bytes, Protocol::V5) {
                let mut answer = Vec::new();
                encode_ack(AckKind::PubAck, publish.packet_id, 0x83, Protocol::V5, &mut answer);
                if client.stream.write_all(&answer).is_err() {
                    return;
                }
            }
        }
    });
}

/// Subscribed to `NAME/#`, has published `NAME/state` and `NAME/mode`, publishes what it gets on `NAME/ask` to
/// `NAME/told`, and answers commands with what they say.
async fn answering_device(server: &Server, name: &str) {
    let mut options = MqttOptions::new(name, "127.0.0.1", server.ports.tcp);
    options.set_clean_start(false);
    let properties = ConnectProperties { session_expiry_interval: Some(600), ..ConnectProperties::new() };
    options.set_connect_properties(properties);
    let (client, mut events) = AsyncClient::new(options, 100);
    client.subscribe(format!("{name}/#"), QoS::AtLeastOnce).await.expect("subscribe");
    for topic in ["state", "mode"] {
        client.publish(format!("{name}/{topic}"), QoS::AtLeastOnce, false, "on").await.expect("publish");
    }
    let (ready, mut is_ready) = mpsc::channel(1);
    let (asked, told) = (format!("{name}/ask"), format!("{name}/told"));
    tokio::spawn(async move {
        let mut acknowledged = 0;
        while let Ok(event) = events.poll().await {
            match event {
                Event::Incoming(Packet::PubAck(_)) => {
                    acknowledged += 1;
                    if acknowledged == 2 {
                        let _ = ready.send(()).await;
                    }
                }
                Event::Incoming(Packet::Publish(publish)) if publish.topic == asked.as_bytes() => {
                    let _ = client.publish(told.as_str(), QoS::AtLeastOnce, false, publish.payload).await;
                }
                Event::Incoming(Packet::Publish(publish)) => {
                    let Some(properties) = publish.properties else { continue };
                    let Some(topic) = properties.response_topic else { continue };
                    let answer = PublishProperties {
                        correlation_data: properties.correlation_data,
                        user_properties: vec![("status".to_owned(), "200".to_owned())],
                        ..PublishProperties::default()
                    };
                    let sent = client.publish_with_properties(
                        topic,
                        QoS::AtLeastOnce,
                        false,
                        publish.payload,
                        answer,
                    );
                    let _ = sent.await;
                }
                _ => {}
            }
        }
    });
    let ready = tokio::time::timeout(LIMIT, is_ready.recv());
    ready.await.expect("the device in time").expect("a connection");
}

#[test]
fn grpcio_sees_each_rpc_and_error_as_the_table_says() {
    let python = python();
    if !need("the Python environment .venv", python.is_some()) {
        return;
    }
    let mut command = Command::new(python.unwrap_or_default());
    command.arg(folder().join("walk.py")).env("PYTHONDONTWRITEBYTECODE", "1");
    World::start(&table()).walk(command);
}

/// Go is not among what the tests need: where it is missing, or its modules cannot be fetched, this checks nothing.
#[test]
fn grpc_go_sees_each_rpc_and_error_as_the_table_says() {
    if !on_path("go") {
        return skipped("Go");
    }
    let go = |arguments: &[&str]| {
        let mut command = Command::new("go");
        command.current_dir(folder()).args(arguments);
        run(&mut command, LIMIT)
    };
    let (fetched, output) = go(&["mod", "download"]);
    if !fetched {
        eprintln!("{output}");
        return skipped("the Go module proxy, which has grpc-go");
    }
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("walk-rpcs");
    let (built, output) = go(&["build", "-o", &program.display().to_string(), "."]);
    assert!(built, "{output}");
    World::start(&table()).walk(Command::new(program));
}
