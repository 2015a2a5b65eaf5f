//! A gateway that stands by, and takes devices and calls for the one that serves: both in this process, with a link over loopback.

use std::{
    fs,
    future::{Future, ready},
    io::Write as _,
    net::SocketAddr,
    path::Path,
    pin::Pin,
    process::{Command, Stdio},
    sync::Arc,
};

use access::backends::{Role, Scope};
use codec::{Connect, Packet};
use gateway_core::{Protocol, QoS};
use links::{GatewayLink, LinkTarget, Members};
use mqtt_server::{
    config::{Address, Config, LinkSettings, Listener, ListenerKind},
    gateway::{Standby, StandbyPages},
    proto::gateway::v1::{
        self, devices_client::DevicesClient, publisher_client::PublisherClient,
        subscriber_client::SubscriberClient,
    },
};
use tokio::sync::watch;
use tonic::{Code, service::interceptor::InterceptedService, transport::Channel};
use tonic_types::StatusExt as _;

use crate::{
    access::{Authorized, Bearer, add},
    client::{Client, Got, hello, message, will},
    harness::*,
    support::{gateway_certificates, ports::free_ports},
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
    serving: Setup,
    standby: Option<Standby>,
    told: watch::Sender<Option<LinkTarget>>,
    /// Port for devices, and calls, of the one that stands by.
    mqtt: u16,
    channel: Channel,
    reader: String,
    admin: String,
    _folder: tempfile::TempDir,
}

impl Through {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        gateway_certificates(folder.path(), &["a", "b"]);
        let tokens = folder.path().join("tokens");
        let scope = Scope::new(Some(vec!["a/#".to_owned()]), None).unwrap();
        let reader = add(&tokens, "meter", Role::Reader, scope, None);
        let admin = add(&tokens, "root", Role::Admin, Scope::ALL, None);
        let (users, rules) = (folder.path().join("users"), folder.path().join("rules"));
        fs::write(&rules, "[[rules]]\nallow = \"all\"\ntopics = [\"open/#\", \"a/%u/#\"]\n").unwrap();
        let mut passwd = Command::new(env!("CARGO_BIN_EXE_mqtt-server"))
            .args(["passwd", "add"])
            .args([users.as_os_str(), "ann".as_ref()])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        passwd.stdin.take().unwrap().write_all(b"secret\n").unwrap();
        assert!(passwd.wait().unwrap().success());
        let port = free_ports(4);
        let at = |offset| SocketAddr::from(([127, 0, 0, 1], port + offset));
        let change = |config: &mut Config| {
            config.backends.tokens = Some(tokens.clone());
            config.auth.password_file = Some(users.clone());
            config.auth.allow_anonymous = true;
            config.authorization.rules = Some(rules.clone());
            config.http.enabled = false;
        };
        let links = settings(folder.path(), "a", at(0));
        let serving = Setup::built(
            |config| {
                change(config);
                config.cluster.links = links;
            },
            |builder| builder.members(Arc::new(Everybody)),
        )
        .await;
        let target = LinkTarget { name: "a".to_owned(), address: at(0).to_string() };
        let (told, known) = watch::channel(Some(target));
        let mut config =
            Config { addr: None, grpc_addr: at(2), insecure_grpc: true, shards: 1, ..Config::default() };
        config.listeners = vec![Listener {
            name: "tcp".to_owned(),
            kind: ListenerKind::Tcp,
            address: Some(Address::Ip(at(1))),
            ..Listener::default()
        }];
        config.grpc.tls = false;
        change(&mut config);
        config.cluster.links = settings(folder.path(), "b", at(3));
        let files = config.cluster.links.client_files();
        let link = Arc::new(GatewayLink::new(known, files, true));
        let pages = StandbyPages { state: Arc::new(|| "standby".to_owned()), metrics: Arc::new(String::new) };
        let active = Arc::new(|| "elsewhere:1".to_owned());
        let standby = Standby::start(&Arc::new(config), active, pages, Some(link)).unwrap();
        let channel = Channel::from_shared(format!("http://{}", at(2))).unwrap().connect().await.unwrap();
        Self {
            serving,
            standby: Some(standby),
            told,
            mqtt: port + 1,
            channel,
            reader,
            admin,
            _folder: folder,
        }
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
    let mut other = Client::connect(through.serving.mqtt, Protocol::V5, "near");
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
    let mut taker = Client::open(through.serving.mqtt, Protocol::V5);
    taker.send(&Packet::Connect(Box::new(Connect { clean_start: false, ..hello(Protocol::V5, "far") })));
    assert_eq!(taker.next(), Got::ConnAck(0));
    assert_eq!((device.next(), device.next()), (Got::Disconnect(0x8E), Got::Closed));

    // A call ends with its caller.
    drop(stream);
    let gone = async {
        while through.serving.gateway.broker().gauges().streams > 0 {
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
    let mut watcher = Client::connect(through.serving.mqtt, Protocol::V5, "watcher");
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
    through.told.send_replace(None);
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
