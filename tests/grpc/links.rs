//! A gateway that stands by, and takes devices and calls for the one that serves: both in this process, with a link over loopback.

use std::{
    collections::BTreeSet,
    fs,
    future::{Future, ready},
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    pin::Pin,
    process::{Command, Stdio},
    sync::Arc,
};

use access::{
    backends::{Role, Scope},
    scram,
};
use broker::Broker;
use codec::{AuthPacket, Connect, Packet};
use gateway_core::{Protocol, QoS};
use links::Members;
use mqtt_server::{
    config::{Address, Config, LinkSettings, Listener, ListenerKind},
    gateway::{ClusterGateway, ClusterPages, ClusterParts, HomeAddress},
    proto::gateway::v1::{
        self, devices_client::DevicesClient, events_client::EventsClient, publisher_client::PublisherClient,
        security_client::SecurityClient, subscriber_client::SubscriberClient,
    },
};
use tokio::sync::watch;
use tonic::{
    Code,
    body::Body,
    codegen::{Service as _, http::Request},
    service::interceptor::InterceptedService,
    transport::Channel,
};
use tonic_types::StatusExt as _;

use crate::{
    access::{Authorized, Bearer, add},
    client::{Client, Got, decoded, from_host, hello, message, will},
    harness::*,
    support::{certificates, gateway_certificates, local, ports::free_ports},
    ways::{Devices, Stream, Way},
};

struct Everybody;

impl Members for Everybody {
    fn has<'a>(&'a self, _: &'a str) -> Pin<Box<dyn Future<Output = bool> + Send + 'a>> {
        Box::pin(ready(true))
    }
}

fn settings(folder: &Path, name: &str, listen: SocketAddr) -> LinkSettings {
    LinkSettings {
        listen: Some(listen),
        address: String::new(),
        ca: Some(folder.join("ca.pem")),
        cert: Some(folder.join(format!("{name}.pem"))),
        key: Some(folder.join(format!("{name}.key"))),
    }
}

/// A gateway that serves, one that stands by, and the tokens of both.
struct Through {
    serving: ClusterGateway,
    standby: Option<ClusterGateway>,
    /// Place of the home, as the one that stands by knows it.
    places: watch::Sender<Vec<HomeAddress>>,
    /// First port for devices of the one that serves.
    near: u16,
    /// Ports of the one that stands by: of HTTP, and the first for devices, one for each way in the order of [`Way::ALL`].
    http: u16,
    mqtt: u16,
    /// Calls to that one.
    channel: Channel,
    reader: String,
    admin: String,
    folder: tempfile::TempDir,
}

impl Through {
    async fn new() -> Self {
        Self::of_homes(&["a"], |_| {}).await
    }

    /// Gateways `a` and `b`, and the one of them that serves each home.
    async fn of_homes(nodes: &[&str], change: impl Fn(&mut Config)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        gateway_certificates(folder.path(), &["a", "b"]);
        let tokens = folder.path().join("tokens");
        let scope = Scope::new(Some(vec!["a/#".to_owned()]), None).unwrap();
        let reader = add(&tokens, "meter", Role::Reader, scope, None);
        let admin = add(&tokens, "root", Role::Admin, Scope::ALL, None);
        let (users, rules) = (folder.path().join("users"), folder.path().join("rules"));
        fs::write(&rules, "[[rules]]\nallow = \"all\"\ntopics = [\"open/#\", \"a/%u/#\"]\n").unwrap();
        let mut passwd = Command::new(env!("CARGO_BIN_EXE_mqtt-server"))
            .args(["passwd", "add", "--scram"])
            .args([users.as_os_str(), "ann".as_ref()])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        passwd.stdin.take().unwrap().write_all(b"secret\n").unwrap();
        assert!(passwd.wait().unwrap().success());
        certificates(folder.path());
        let port = free_ports(14);
        let at = |offset| SocketAddr::from(([127, 0, 0, 1], port + offset));
        // The same names at both.
        let listener = |way: Way, address| Listener {
            name: way.kind().to_owned(),
            kind: match way {
                Way::Tcp => ListenerKind::Tcp,
                Way::Ws => ListenerKind::Ws,
                Way::Tls => ListenerKind::Tls,
                Way::Wss => ListenerKind::Wss,
            },
            address: Some(Address::Ip(address)),
            ..Listener::default()
        };
        // From an offset on: gRPC, HTTP, links, and devices.
        let config = |name: &str, first: u16| {
            let mut config = Config {
                addr: None,
                grpc_addr: at(first),
                http_addr: at(first + 1),
                insecure_grpc: true,
                shards: 1,
                data_dir: folder.path().join(name),
                cert: folder.path().join("server.crt"),
                key: folder.path().join("server.key"),
                ..Config::default()
            };
            config.grpc.tls = false;
            config.listeners = Way::ALL
                .into_iter()
                .zip(first + 3..)
                .map(|(way, offset)| listener(way, at(offset)))
                .collect();
            config.backends.tokens = Some(tokens.clone());
            config.auth.password_file = Some(users.clone());
            config.auth.allow_anonymous = true;
            config.authorization.rules = Some(rules.clone());
            config.tls.open_key_files = true;
            config.cluster.links = settings(folder.path(), name, at(first + 2));
            change(&mut config);
            config
        };
        let place = |node: &&str| HomeAddress {
            node: (*node).to_owned(),
            address: "elsewhere:1".to_owned(),
            link: at(if *node == "a" { 2 } else { 9 }).to_string(),
        };
        let gateway = |name: &str, first: u16| {
            let (places, known) = watch::channel(nodes.iter().map(place).collect());
            let parts = ClusterParts {
                node: name.to_owned(),
                places: known,
                members: Arc::new(Everybody),
                pages: ClusterPages { state: Arc::new(|| "standby".to_owned()), rows: Arc::new(Vec::new) },
            };
            (ClusterGateway::start(config(name, first), parts).unwrap(), places)
        };
        let (mut serving, _) = gateway("a", 0);
        let (mut standby, places) = gateway("b", 7);
        for (home, node) in (0..).zip(nodes) {
            let gateway = if *node == "a" { &mut serving } else { &mut standby };
            gateway.open_home(home, None).await.unwrap();
        }
        let channel = Channel::from_shared(format!("http://{}", at(7))).unwrap().connect().await.unwrap();
        Self {
            serving,
            standby: Some(standby),
            places,
            near: port + 3,
            http: port + 8,
            mqtt: port + 10,
            channel,
            reader,
            admin,
            folder,
        }
    }

    fn broker(&self) -> &Broker {
        self.serving.broker(0).unwrap()
    }

    /// Nobody serves any more, as far as the gateway that stands by knows.
    fn forget_the_place(&self) {
        self.places.send_modify(|places| places[0].node.clear());
    }

    fn as_caller(&self, channel: &Channel, token: &str) -> Authorized {
        InterceptedService::new(channel.clone(), Bearer(token.to_owned()))
    }

    /// Calls at the gateway that stands by.
    fn admin(&self) -> Authorized {
        self.as_caller(&self.channel, &self.admin)
    }

    fn connect(&self, connect: Connect) -> Client {
        Client::connect_with(self.mqtt, connect)
    }
}

/// The failures: a device at the wrong gateway is another than at the right one, or a backend there sees less.
#[tokio::test(flavor = "multi_thread")]
async fn devices_and_backends_at_either_gateway_see_each_other() {
    let through = Through::new().await;
    let subscribe = v1::SubscribeRequest { topic_filters: vec!["#".to_owned()], ..Default::default() };
    let mut stream = SubscriberClient::new(through.admin()).subscribe(subscribe).await.unwrap().into_inner();
    let mut device = through.connect(Connect { session_expiry: Some(600), ..hello(Protocol::V5, "far") });
    let mut other = Client::connect(through.near, Protocol::V5, "near");
    assert_eq!(device.subscribe_with("open/far/#", QoS::ExactlyOnce, None), 2);
    assert_eq!(other.subscribe_with("open/near/#", QoS::ExactlyOnce, None), 2);
    // Larger than any window.
    let large = vec![b'x'; 900_000];
    device.publish_acked("open/near/1", &large, false);
    assert_eq!(other.next(), Got::Publish("open/near/1".to_owned(), large.clone()));
    other.publish_acked("open/far/1", &large, true);
    assert_eq!(device.next(), Got::Publish("open/far/1".to_owned(), large));
    puback(&mut device, 1, 0);
    let mut seen = Vec::new();
    while seen.len() < 2 {
        for item in soon("a message", stream.message()).await.unwrap().unwrap().items {
            if let Some(v1::subscribe_item::Item::Message(message)) = item.item {
                seen.push((message.topic, message.device_id));
            }
        }
    }
    assert_eq!(seen[0], ("open/near/1".to_owned(), "far".to_owned()));
    assert_eq!(seen[1], ("open/far/1".to_owned(), "near".to_owned()));

    let request = v1::PublishRequest {
        wait: v1::Wait::Acked.into(),
        qos: v1::Qos::AtLeastOnce.into(),
        device_id: Some("far".to_owned()),
        ..to("open/cmd", "do")
    };
    let mut publisher = PublisherClient::new(through.admin());
    let published = tokio::spawn(async move { publisher.publish(request).await });
    let got = device.next();
    assert_eq!(got, Got::Publish("open/cmd".to_owned(), b"do".to_vec()));
    puback(&mut device, 2, 0);
    soon("its receipt", published).await.unwrap().unwrap();

    let request = v1::GetDeviceRequest { device_id: "far".to_owned(), view: v1::DeviceView::Basic.into() };
    let found = DevicesClient::new(through.admin()).get_device(request).await.unwrap().into_inner();
    let connection = found.device.unwrap().connection.unwrap();
    let local = device.stream.local_addr().unwrap().to_string();
    assert_eq!((connection.peer, connection.listener), (local, "tcp".to_owned()));

    // One session, whichever gateway its client comes to.
    let mut taker = Client::open(through.near, Protocol::V5);
    taker.send(&Packet::Connect(Box::new(Connect { clean_start: false, ..hello(Protocol::V5, "far") })));
    assert_eq!(taker.next(), Got::ConnAck(0));
    assert_eq!((device.next(), device.next()), (Got::Disconnect(0x8E), Got::Closed));

    // A call ends with its caller.
    drop(stream);
    let gone = async {
        while through.broker().gauges().streams > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    soon("the end of the stream", gone).await;
}

/// The failure: what a user or caller may do is more, or less, at the other gateway.
#[tokio::test(flavor = "multi_thread")]
async fn rights_are_the_same_at_either_gateway() {
    let through = Through::new().await;
    let login = |password: &'static str| Connect {
        username: Some("ann".to_owned()),
        password: Some(password.as_bytes().into()),
        ..hello(Protocol::V5, "d")
    };
    let mut refused = Client::open(through.mqtt, Protocol::V5);
    refused.send(&Packet::Connect(Box::new(login("wrong"))));
    assert_eq!((refused.next(), refused.next()), (Got::ConnAck(0x86), Got::Closed));
    let mut ann = through.connect(login("secret"));
    assert_eq!(ann.subscribe_with("a/ann/#", QoS::AtLeastOnce, None), 1);
    assert_eq!(ann.subscribe_with("a/bob/#", QoS::AtLeastOnce, None), 0x87);
    let mut nobody = through.connect(Connect { client_id: String::new(), ..hello(Protocol::V5, "") });
    assert_eq!(nobody.subscribe_with("a/ann/#", QoS::AtLeastOnce, None), 0x87);

    // A caller's rights, and the details of an error.
    let reader = through.as_caller(&through.channel, &through.reader);
    let refused = PublisherClient::new(reader.clone()).publish(to("a/b", "x")).await.unwrap_err();
    assert_eq!(refusal(&refused), (Code::PermissionDenied, "ROLE_DENIED".to_owned()));
    let subscribe =
        |filter: &str| v1::SubscribeRequest { topic_filters: vec![filter.to_owned()], ..Default::default() };
    let refused = SubscriberClient::new(reader.clone()).subscribe(subscribe("b/#")).await.unwrap_err();
    assert_eq!(refusal(&refused), (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned()));
    assert_eq!(refused.get_details_error_info().unwrap().metadata["field"], "topic_filters");
    assert!(SubscriberClient::new(reader).subscribe(subscribe("a/#")).await.is_ok());
    let stranger = PublisherClient::new(through.channel.clone()).publish(to("a/b", "x")).await.unwrap_err();
    assert_eq!(refusal(&stranger), (Code::Unauthenticated, "CREDENTIALS_MISSING".to_owned()));
}

/// The failures: a device that is cut off leaves no will or stays online; one that comes while nobody serves waits for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_ends_with_either_side() {
    let mut through = Through::new().await;
    let mut watcher = Client::connect(through.near, Protocol::V5, "watcher");
    watcher.subscribe_with("open/#", QoS::AtLeastOnce, None);
    let mut cut =
        through.connect(Connect { will: Some(will("open/will", b"gone")), ..hello(Protocol::V5, "cut") });
    cut.ping();
    drop(cut);
    assert_eq!(watcher.next(), Got::Publish("open/will".to_owned(), b"gone".to_vec()));
    let mut left =
        through.connect(Connect { will: Some(will("open/will", b"left")), ..hello(Protocol::V5, "left") });
    left.send(&Packet::Disconnect(Box::default()));
    assert_eq!(left.next(), Got::Closed);
    // Ended by the gateway that serves, which tells why.
    let mut kicked = through.connect(hello(Protocol::V5, "kicked"));
    kicked.send(&message("open/x/#", b"", QoS::AtMostOnce, false));
    assert!(matches!(kicked.next(), Got::Disconnect(_)));
    assert_eq!(kicked.next(), Got::Closed);

    let subscribe = v1::SubscribeRequest::default();
    let mut stream = SubscriberClient::new(through.admin()).subscribe(subscribe).await.unwrap().into_inner();
    let mut stays =
        through.connect(Connect { will: Some(will("open/will", b"stays")), ..hello(Protocol::V5, "stays") });
    through.forget_the_place();
    let mut late = Client::open(through.mqtt, Protocol::V5);
    late.send(&Packet::Connect(Box::new(hello(Protocol::V5, "late"))));
    assert_eq!((late.next(), late.next()), (Got::ConnAck(0x88), Got::Closed));
    let refused = PublisherClient::new(through.admin()).publish(to("open/b", "x")).await.unwrap_err();
    assert_eq!(refusal(&refused), (Code::Unavailable, "NOT_ACTIVE".to_owned()));
    assert_eq!(refused.get_details_error_info().unwrap().metadata["address"], "elsewhere:1");
    assert_eq!(stays.ping(), [], "who is relayed stays");
    // The gateway that stands by takes over, or ends.
    soon("the end", through.standby.take().unwrap().end()).await;
    assert_eq!(stays.next(), Got::Closed);
    assert_eq!(watcher.next(), Got::Publish("open/will".to_owned(), b"stays".to_vec()));
    let ended = async { while let Ok(Some(_)) = stream.message().await {} };
    soon("the end of the stream", ended).await;
}

/// The failures: a device's home is not the same at every gateway; a backend sees the devices of some homes only, or reaches only those.
#[tokio::test(flavor = "multi_thread")]
async fn homes_at_two_gateways_are_one_gateway() {
    const DEVICES: usize = 12;
    let nodes = ["a", "b", "a", "b"];
    let through = Through::of_homes(&nodes, |config| {
        config.non_broker = true;
        config.groups.enabled = false;
        config.authorization.rules = None;
    })
    .await;
    let near = Channel::from_shared(format!("http://127.0.0.1:{}", through.near - 3)).unwrap();
    let near = through.as_caller(&near.connect().await.unwrap(), &through.admin);
    let callers = [near, through.admin()];
    let subscribe =
        v1::SubscribeRequest { topic_filters: vec!["devices/#".to_owned()], ..Default::default() };
    let mut streams = Vec::new();
    for caller in &callers {
        let opened = SubscriberClient::new(caller.clone()).subscribe(subscribe.clone()).await;
        streams.push(opened.unwrap().into_inner());
    }
    let id = |number: usize| format!("d{number}");
    let mut devices: Vec<_> = (0..DEVICES)
        .map(|number| {
            let port = [through.near, through.mqtt][number % 2];
            let mut device = Client::connect(port, Protocol::V5, &id(number));
            let filter = format!("devices/{}/#", id(number));
            assert_eq!(device.subscribe_with(&filter, QoS::AtLeastOnce, None), 1);
            device.publish_acked(&format!("devices/{}/up", id(number)), b"up", false);
            device
        })
        .collect();
    let served = [&through.serving, through.standby.as_ref().unwrap()].map(|gateway| {
        gateway.serves().into_iter().map(|home| gateway.broker(home).unwrap().gauges().online)
    });
    let online: Vec<usize> = served.into_iter().flatten().collect();
    assert_eq!(online.len(), nodes.len());
    assert_eq!(online.iter().sum::<usize>(), DEVICES);
    assert!(online.iter().all(|online| *online > 0), "some homes have none: {online:?}");
    for stream in &mut streams {
        let mut seen = BTreeSet::new();
        while seen.len() < DEVICES {
            for item in soon("a message", stream.message()).await.unwrap().unwrap().items {
                if let Some(v1::subscribe_item::Item::Message(message)) = item.item {
                    assert!(seen.insert(message.device_id.clone()), "{} comes twice", message.device_id);
                }
            }
        }
    }
    for caller in callers {
        let mut publisher = PublisherClient::new(caller.clone());
        for (number, device) in devices.iter_mut().enumerate() {
            let topic = format!("devices/{}/do", id(number));
            let request = v1::PublishRequest { device_id: Some(id(number)), ..to(&topic, "do") };
            publisher.publish(request).await.unwrap();
            assert_eq!(device.next(), Got::Publish(topic, b"do".to_vec()));
        }
        let list = v1::ListDevicesRequest { page_size: 5, ..Default::default() };
        let (mut listed, mut token) = (BTreeSet::new(), String::new());
        loop {
            let request = v1::ListDevicesRequest { page_token: token, ..list.clone() };
            let page = DevicesClient::new(caller.clone()).list_devices(request).await.unwrap().into_inner();
            listed.extend(page.devices.into_iter().map(|device| device.device_id));
            token = page.next_page_token;
            if token.is_empty() {
                break;
            }
        }
        assert_eq!(listed, (0..DEVICES).map(id).collect());
    }
    // One session for each client id, wherever its client comes.
    let mut taker = Client::open(through.near, Protocol::V5);
    taker.send(&Packet::Connect(Box::new(hello(Protocol::V5, "d1"))));
    assert_eq!(taker.next(), Got::ConnAck(0));
    assert_eq!((devices[1].next(), devices[1].next()), (Got::Disconnect(0x8E), Got::Closed));
}

/// The failures: something of a home outlives it, so that this process cannot have it again; a will is published, or a session ended,
/// although another gateway has the home; a call hangs.
#[tokio::test(flavor = "multi_thread")]
async fn a_home_goes_and_comes_back_in_one_process() {
    let mut through = Through::new().await;
    for round in 0..3 {
        let watch = |id: &str| Connect {
            clean_start: false,
            session_expiry: Some(600),
            will: Some(will("open/will", b"gone")),
            ..hello(Protocol::V5, id)
        };
        let mut far = through.connect(watch("far"));
        let mut near = Client::connect_with(through.near, watch("near"));
        let command = Got::Publish("open/far/1".to_owned(), b"do".to_vec());
        if round > 0 {
            // Of the round before.
            assert_eq!(far.next(), command);
            puback(&mut far, 1, 0);
        }
        for (device, topic) in [(&mut far, "open/far/#"), (&mut near, "open/near/#")] {
            assert_eq!(device.subscribe_with(topic, QoS::ExactlyOnce, None), 2);
        }
        let filters = vec!["open/#".to_owned()];
        let subscribe = v1::SubscribeRequest { topic_filters: filters, ..Default::default() };
        let mut stream =
            SubscriberClient::new(through.admin()).subscribe(subscribe).await.unwrap().into_inner();
        // Waits for an acknowledgement that never comes.
        let request = v1::PublishRequest {
            wait: v1::Wait::Acked.into(),
            qos: v1::Qos::AtLeastOnce.into(),
            device_id: Some("far".to_owned()),
            ..to("open/far/1", "do")
        };
        let mut publisher = PublisherClient::new(through.admin());
        let waiting = tokio::spawn(async move { publisher.publish(request).await });
        assert_eq!(far.next(), command, "round {round}");
        let mut happened = through.broker().events();

        soon("the end of the home", through.serving.give_up_home(0)).await;
        assert_eq!((far.next(), near.next()), (Got::Closed, Got::Closed), "nobody is told anything");
        let refused = soon("the end of a call", waiting).await.unwrap().unwrap_err();
        assert_eq!(refusal(&refused), (Code::Unavailable, "NOT_ACTIVE".to_owned()));
        let mut seen = Vec::new();
        let ended = loop {
            match soon("the end of a stream", stream.message()).await {
                Ok(Some(answer)) => {
                    let messages = answer.items.into_iter().filter_map(|item| item.item);
                    seen.extend(messages.filter_map(|item| match item {
                        v1::subscribe_item::Item::Message(message) => Some(message.topic),
                        _ => None,
                    }));
                }
                ended => break ended.unwrap_err(),
            }
        };
        assert_eq!(refusal(&ended), (Code::Unavailable, "NOT_ACTIVE".to_owned()));
        assert!(seen.iter().all(|topic| topic != "open/will"), "{seen:?}");
        while let Ok(event) = happened.try_recv() {
            assert!(!format!("{:?}", event.kind).contains("Disconnected"), "{event:?}");
        }
        drop(happened);

        soon("the home", through.serving.open_home(0, None)).await.expect("its directory is free");
        let broker = through.broker();
        assert!(broker.device("far").is_some() && broker.device("near").is_some());
    }
}

/// The failures: the layers of a listener are lost on the way, or a device behind them is answered without them.
#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_a_listener_is_relayed() {
    let through = Through::new().await;
    let tls = Devices::new().config(&through.folder.path().join("ca.crt"), None);
    for (way, port) in Way::ALL.into_iter().zip(through.mqtt..) {
        let (stream, _) = way.open([127, 0, 0, 1].into(), port, &tls).unwrap();
        let mut client = Client::<Stream>::on(stream, Protocol::V5);
        client.send(&Packet::Connect(Box::new(hello(Protocol::V5, way.kind()))));
        assert_eq!(client.next(), Got::ConnAck(0), "{way:?}");
        let topic = format!("open/{}", way.kind());
        assert_eq!(client.subscribe_with(&topic, QoS::AtLeastOnce, None), 1);
        let mut publisher = Client::connect(through.near, Protocol::V5, "publisher");
        let payload = vec![b'x'; 200_000];
        publisher.publish_acked(&topic, &payload, false);
        assert_eq!(client.next(), Got::Publish(topic, payload), "{way:?}");
        let found = through.broker().device(way.kind()).unwrap();
        assert_eq!(*found.connection.listener, way.kind());
    }
}

/// The failures: who has proved a password by SCRAM is nobody at the gateway that serves, or cannot authenticate again.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_scram_is_relayed_and_may_prove_itself_again() {
    const METHOD: &str = "SCRAM-SHA-256";
    let through = Through::new().await;
    let mut client = Client::open(through.mqtt, Protocol::V5);
    let mut prove = |begin: &dyn Fn(&str) -> Packet<'static>| {
        let first = scram::client::first("ann", "nonce");
        client.send(&begin(&first));
        let bytes = client.next_bytes().unwrap();
        let Packet::Auth(challenge) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:02x?}") };
        let challenge = challenge.data.unwrap();
        let (last, proof) = scram::client::last(&first, &challenge, b"secret").unwrap();
        client.send(&auth(0x18, METHOD, &last));
        let bytes = client.next_bytes().unwrap();
        let data = match decoded(&bytes, Protocol::V5) {
            Packet::ConnAck(ack) if ack.code == 0 => ack.auth_data,
            Packet::Auth(auth) if auth.code == 0 => auth.data,
            _ => panic!("{bytes:02x?}"),
        };
        assert_eq!(data.as_deref(), Some(proof.as_bytes()), "the gateway proves itself, too");
    };
    prove(&|first| {
        Packet::Connect(Box::new(Connect {
            auth_method: Some(METHOD.to_owned()),
            auth_data: Some(first.to_owned().into()),
            ..hello(Protocol::V5, "scram")
        }))
    });
    prove(&|first| auth(0x19, METHOD, first));
    assert_eq!(client.subscribe_with("a/ann/#", QoS::AtLeastOnce, None), 1);
}

fn auth(code: u8, method: &str, data: &str) -> Packet<'static> {
    let (method, data) = (Some(method.to_owned()), Some(data.to_owned().into()));
    Packet::Auth(Box::new(AuthPacket { code, method, data, ..AuthPacket::default() }))
}

/// The failures: a ban made by a call holds at one gateway only; a caller opens a relay, and is any device.
#[tokio::test(flavor = "multi_thread")]
async fn bans_hold_and_links_are_for_gateways_alone() {
    let through = Through::new().await;
    let connect = |host| {
        let mut client = Client::over(from_host(host, through.mqtt), Protocol::V5);
        client.send(&Packet::Connect(Box::new(hello(Protocol::V5, "from-host"))));
        client.next()
    };
    assert_eq!(connect(9), Got::ConnAck(0));
    let target = v1::BanTarget { target: Some(v1::ban_target::Target::Address("127.0.0.9".to_owned())) };
    let ban = v1::AddBanRequest { target: Some(target), ..v1::AddBanRequest::default() };
    SecurityClient::new(through.admin()).add_ban(ban).await.unwrap();
    assert_eq!(connect(9), Got::ConnAck(0x8A));
    assert_eq!(connect(8), Got::ConnAck(0));
    // Where the home is, the socket is closed before a byte is read.
    let mut at_home = Client::over(from_host(9, through.near), Protocol::V5);
    assert_eq!(at_home.next(), Got::Closed);

    // A ban comes before the password is looked at, and is told; so is a login that fails.
    let mut events = EventsClient::new(through.admin())
        .watch_events(v1::WatchEventsRequest::default())
        .await
        .unwrap()
        .into_inner();
    let login = |id: &str| {
        let mut client = Client::open(through.near, Protocol::V5);
        let (username, password) = (Some("ann".to_owned()), Some(b"wrong".as_slice().into()));
        client.send(&Packet::Connect(Box::new(Connect { username, password, ..hello(Protocol::V5, id) })));
        client.next()
    };
    assert_eq!(login("guesses"), Got::ConnAck(0x86));
    let target = v1::BanTarget { target: Some(v1::ban_target::Target::ClientId("barred".to_owned())) };
    let ban = v1::AddBanRequest { target: Some(target), ..v1::AddBanRequest::default() };
    SecurityClient::new(through.admin()).add_ban(ban).await.unwrap();
    assert_eq!(login("barred"), Got::ConnAck(0x8A));
    let mut failed = BTreeSet::new();
    while failed.len() < 2 {
        for item in soon("an event", events.message()).await.unwrap().unwrap().items {
            if let Some(v1::watch_events_item::Item::Event(event)) = item.item
                && let Some(v1::event::Detail::AuthFailed(_)) = event.detail
            {
                failed.insert(event.device_id);
            }
        }
    }
    assert_eq!(failed, ["barred", "guesses"].map(str::to_owned).into());

    let request = Request::post("http://localhost/gateway.links.v1/relay")
        .header("gateway-device", "CgFhEgN0Y3A")
        .header("authorization", format!("Bearer {}", through.admin))
        .header("content-type", "application/grpc")
        .body(Body::empty())
        .unwrap();
    let mut channel = through.channel.clone();
    std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    let answer = channel.call(request).await.unwrap();
    assert_eq!(answer.headers()["grpc-status"], "12");
}

/// The failure: over HTTP a gateway that stands by has nothing to say.
#[tokio::test(flavor = "multi_thread")]
async fn http_and_the_page_are_those_of_the_gateway_that_serves() {
    let through = Through::new().await;
    let _near = Client::connect(through.near, Protocol::V5, "near");
    let ask = |line: &str, headers: &str, body: &str| {
        let mut stream = TcpStream::connect(local(through.http)).unwrap();
        let length = body.len();
        write!(
            stream,
            "{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let get =
        |path: &str| ask(&format!("GET {path}"), &format!("authorization: Bearer {}\r\n", through.admin), "");
    let devices = get("/v1/devices");
    assert!(devices.starts_with("HTTP/1.1 200") && devices.contains("\"near\""), "{devices}");
    let form = "origin: http://localhost\r\ncontent-type: application/x-www-form-urlencoded\r\n";
    let logged_in = ask("POST /page/login", form, &format!("token={}&next=/page/", through.admin));
    let (_, cookie) = logged_in.split_once("set-cookie: ").expect(&logged_in);
    let cookie = format!("cookie: {}\r\n", cookie.split(';').next().unwrap());
    let page = ask("GET /page/devices", &cookie, "");
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("near"), "{page}");
    let ready = get("/readyz");
    assert!(ready.starts_with("HTTP/1.1 200") && ready.contains("standby"), "{ready}");
}

/// The failure: answers to the pings of a WebSocket that reads nothing pile up at the gateway that relays.
#[tokio::test(flavor = "multi_thread")]
async fn a_relayed_client_that_reads_nothing_is_not_read_from() {
    let through = Through::new().await;
    let mut socket = TcpStream::connect(local(through.mqtt + 1)).unwrap();
    write!(
        socket,
        "GET /mqtt HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-protocol: mqtt\r\n\r\n"
    )
    .unwrap();
    let mut head = [0; 4096];
    assert!(socket.read(&mut head).unwrap() > 0);
    let mut connect = Vec::new();
    codec::encode(&Packet::Connect(Box::new(hello(Protocol::V5, "deaf"))), Protocol::V5, &mut connect);
    let frame =
        |first: u8, payload: &[u8]| [&[first, 0x80 | payload.len() as u8, 0, 0, 0, 0], payload].concat();
    socket.write_all(&frame(0x82, &connect)).unwrap();
    assert!(socket.read(&mut head).unwrap() > 0, "CONNACK");
    socket.set_write_timeout(Some(std::time::Duration::from_secs(2))).unwrap();
    let pings = frame(0x89, &[b'x'; 125]).repeat(1_000);
    let mut sent = 0;
    let error = loop {
        match socket.write(&pings) {
            Ok(written) => sent += written,
            Err(error) => break error,
        }
        assert!(sent < 64 << 20, "all of it is read");
    };
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "the connection stays: {error}");
}
