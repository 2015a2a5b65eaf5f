//! Rights of devices, as operators see them, and the calls in which backends are not bound by them.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
};

use access::backends::Role;
use gateway_core::QoS;
use mqtt_server::{
    auth::{Authorizer, RuleGrant, Subject, Subscribing},
    proto::{
        gateway::v1::{
            self, devices_client::DevicesClient, explain_access_request::Action,
            publisher_client::PublisherClient, security_client::SecurityClient,
        },
        rpcserver::{self, published_packet_service_client::PublishedPacketServiceClient},
    },
};
use tonic::Code;

use super::{Authorized, Guarded};
use crate::{client::Got, harness::*};

const RULES: &str = r##"[[rules]]
deny = "all"
topics = ["t/secret"]
[[rules]]
allow = "publish"
topics = ["d/%c/#", "u/%u"]
max_qos = 1
[[rules]]
allow = "subscribe"
topics = ["t/a/+", "open/#"]
"##;

async fn ruled(file: &Path) -> Guarded {
    fs::write(file, RULES).unwrap();
    Guarded::with(
        &[
            ("root", Role::Admin, None, None),
            ("operator", Role::Operator, None, Some(&["a-*"])),
            ("topics", Role::Operator, Some(&["d/#", "t/a/#"]), None),
        ],
        |config| config.authorization.rules = Some(file.to_owned()),
    )
    .await
}

fn publish(topic: &str, qos: v1::Qos) -> Action {
    Action::Publish(v1::AccessPublish {
        topic: topic.to_owned(),
        qos: qos.into(),
        ..v1::AccessPublish::default()
    })
}

fn about(device: &str, subject: Option<v1::AccessSubject>, action: Action) -> v1::ExplainAccessRequest {
    v1::ExplainAccessRequest { device_id: device.to_owned(), subject, action: Some(action) }
}

async fn explained(
    client: &mut SecurityClient<Authorized>,
    request: v1::ExplainAccessRequest,
) -> v1::ExplainAccessResponse {
    client.explain_access(request).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread")]
async fn access_is_explained_for_who_is_connected_and_for_who_is_described() {
    let dir = tempfile::tempdir().unwrap();
    let guarded = ruled(&dir.path().join("rules.toml")).await;
    let _device = guarded.setup.device("a-1").await;
    let _other = guarded.setup.device("b-1").await;
    let mut operator = guarded.security("operator");
    let answer = explained(&mut operator, about("a-1", None, publish("d/a-1/x", v1::Qos::AtLeastOnce))).await;
    assert_eq!((answer.allowed, answer.line), (true, 5), "{answer:?}");
    assert_eq!(answer.reasons.last().unwrap(), "allowed by line 5");
    let answer = explained(&mut operator, about("a-1", None, publish("d/a-1/x", v1::Qos::ExactlyOnce))).await;
    assert_eq!((answer.allowed, answer.line), (false, 5), "{answer:?}");
    assert!(answer.reasons[1].contains("QoS 1 at most"), "{answer:?}");
    for (filter, allowed) in [("t/a/+", true), ("$share/g/t/a/+", true), ("t/+", false), ("t/secret", false)]
    {
        let action = Action::Subscribe(filter.to_owned());
        assert_eq!(explained(&mut operator, about("a-1", None, action)).await.allowed, allowed, "{filter}");
    }
    // Nobody of the name has a session.
    let subject = v1::AccessSubject { username: Some("anna".to_owned()), ..v1::AccessSubject::default() };
    let described = about("a-7", Some(subject), publish("u/anna", v1::Qos::AtMostOnce));
    assert!(explained(&mut operator, described).await.allowed);
    let nobody = operator.explain_access(about("a-7", None, publish("u/anna", v1::Qos::AtMostOnce))).await;
    assert_eq!(refusal(&nobody.unwrap_err()), (Code::NotFound, "DEVICE_NOT_FOUND".to_owned()));
    // In scope, and no more than that.
    let mut topics = guarded.security("topics");
    let out = (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned());
    let other = operator.explain_access(about("b-1", None, publish("d/b-1", v1::Qos::AtMostOnce))).await;
    assert_eq!(refusal(&other.unwrap_err()), out);
    let other = topics.explain_access(about("b-1", None, publish("x", v1::Qos::AtMostOnce))).await;
    assert_eq!(refusal(&other.unwrap_err()), out);
    let other = topics.explain_access(about("b-1", None, Action::Subscribe("open/#".to_owned()))).await;
    assert_eq!(refusal(&other.unwrap_err()), out);
    let answer = explained(&mut topics, about("b-1", None, publish("d/b-1", v1::Qos::AtMostOnce))).await;
    assert_eq!((answer.allowed, answer.line, answer.reasons.len()), (true, 5, 0), "rules name other topics");
    for (action, field) in [
        (publish("d/+", v1::Qos::AtMostOnce), "publish.topic"),
        (Action::Subscribe("$share/d".to_owned()), "subscribe"),
    ] {
        let wrong = operator.explain_access(about("a-1", None, action)).await.unwrap_err();
        assert!(wrong.code() == Code::InvalidArgument && wrong.message().starts_with(field), "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rules_in_force_are_listed_to_those_who_may_know_all_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rules.toml");
    let guarded = ruled(&file).await;
    let (mut root, mut topics) = (guarded.security("root"), guarded.security("topics"));
    let page = |page_token: String| v1::ListRulesRequest { page_size: 2, page_token };
    let first = root.list_rules(page(String::new())).await.unwrap().into_inner();
    assert_eq!((first.unnamed(), first.file.as_str()), (v1::UnnamedAccess::Denied, file.to_str().unwrap()));
    let second = root.list_rules(page(first.next_page_token)).await.unwrap().into_inner();
    assert_eq!(second.next_page_token, "");
    let told = |rule: v1::Rule| {
        let action = (rule.deny, rule.publish, rule.subscribe);
        (rule.line, action, rule.topics.join(" "), rule.topic_count, rule.limits.join(" "))
    };
    let all: Vec<_> = [first.rules, second.rules].concat().into_iter().map(told).collect();
    let expected = [
        (2, (true, true, true), "t/secret", 1, ""),
        (5, (false, true, false), "d/%{c}/# u/%{u}", 2, "QoS 1 at most"),
        (9, (false, false, true), "t/a/+ open/#", 2, ""),
    ];
    assert_eq!(
        all,
        expected.map(|(line, action, topics, count, limits)| {
            (line, action, topics.to_owned(), count, limits.to_owned())
        })
    );
    let out = (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned());
    assert_eq!(refusal(&topics.list_rules(page(String::new())).await.unwrap_err()), out);
    fs::write(&file, RULES.replace("t/secret", "t/other")).unwrap();
    root.reload(v1::ReloadRequest {}).await.unwrap();
    let now = root.list_rules(page(String::new())).await.unwrap().into_inner();
    assert_eq!(now.rules[0].topics, ["t/other"], "those of the file that was read last");
}

/// The failure: a device gets nothing of what it has subscribed to, and nothing shows why.
#[tokio::test(flavor = "multi_thread")]
async fn subscriptions_that_the_rules_no_longer_grant_are_shown_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rules.toml");
    let guarded = ruled(&file).await;
    let mut device = guarded.setup.raw("a-1", |_| {});
    for filter in ["t/a/+", "open/#"] {
        assert_eq!(device.subscribe(filter), 0);
    }
    let mut devices = DevicesClient::new(guarded.channel("operator"));
    let mut shown = async || {
        let request =
            v1::ListSubscriptionsRequest { device_id: "a-1".to_owned(), page_size: 10, ..Default::default() };
        let listed = devices.list_subscriptions(request).await.unwrap().into_inner().subscriptions;
        let request = v1::GetDeviceRequest { device_id: "a-1".to_owned(), ..Default::default() };
        let mut got = devices.get_device(request).await.unwrap().into_inner().device.unwrap().subscriptions;
        got.sort_by(|one, other| one.topic_filter.cmp(&other.topic_filter));
        assert_eq!(listed, got);
        listed.into_iter().map(|one| (one.topic_filter, one.restricted)).collect::<Vec<_>>()
    };
    let both = |open, t| [("open/#".to_owned(), open), ("t/a/+".to_owned(), t)];
    assert_eq!(shown().await, both(false, false));
    fs::write(&file, RULES.replace("t/a/+", "t/a/b")).unwrap();
    guarded.setup.gateway.reloads().reload_all();
    assert_eq!(shown().await, both(false, true));
    for topic in ["t/a/c", "t/a/b"] {
        let mut root = PublisherClient::new(guarded.channel("root"));
        root.publish(to(topic, "x")).await.unwrap();
    }
    assert_eq!(device.next(), Got::Publish("t/a/b".to_owned(), b"x".to_vec()), "and what they still allow");
    fs::write(&file, RULES).unwrap();
    guarded.setup.gateway.reloads().reload_all();
    assert_eq!(shown().await, both(false, false));
}

/// A backend's role and scope decide what it sends to a device directly, connected or not, and by either API. To a topic it
/// publishes to those that may have it.
#[tokio::test(flavor = "multi_thread")]
async fn direct_messages_need_no_rule_of_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let guarded = ruled(&dir.path().join("rules.toml")).await;
    let mut device = guarded.setup.raw("a-1", |_| {});
    assert_eq!(device.subscribe_with("open/#", QoS::AtLeastOnce, None), 1);
    let mut root = PublisherClient::new(guarded.channel("root"));
    let mut precedent = PublishedPacketServiceClient::new(guarded.channel("root"));
    let send = async |root: &mut PublisherClient<Authorized>, payload: &str| {
        let direct = v1::PublishRequest { device_id: Some("a-1".to_owned()), ..to("t/secret", payload) };
        root.publish(direct).await.unwrap().into_inner().outcome()
    };
    assert_eq!(send(&mut root, "1").await, v1::Outcome::Sent);
    let old = rpcserver::PublishRequest {
        device_id: "a-1".to_owned(),
        topic: "t/secret".to_owned(),
        payload: "2".into(),
    };
    assert_eq!(precedent.publish_payload_to_device(old).await.unwrap().into_inner().code, "Success");
    for payload in ["1", "2"] {
        assert_eq!(device.next(), Got::Publish("t/secret".to_owned(), payload.into()));
    }
    let mut events = guarded.setup.gateway.broker().events();
    drop(device);
    while !matches!(events.recv().await.unwrap().kind, broker::EventKind::Disconnected { .. }) {}
    assert_eq!(send(&mut root, "3").await, v1::Outcome::Queued);
    root.publish(to("open/x", "4")).await.unwrap();
    let mut device = guarded.setup.raw("a-1", |_| {});
    let mut got = Vec::new();
    while got.last() != Some(&Got::Publish("open/x".to_owned(), b"4".to_vec())) {
        got.push(device.next());
    }
    assert!(got.contains(&Got::Publish("t/secret".to_owned(), b"3".to_vec())), "{got:?}");
}

/// Lets devices publish to topics that begin with `p` and hear those with `h`, while it is open.
#[derive(Default)]
struct Program {
    closed: AtomicBool,
    version: AtomicU32,
    asked: AtomicU32,
}

impl Program {
    fn allow(&self, begins: bool) -> RuleGrant {
        self.asked.fetch_add(1, SeqCst);
        if begins && !self.closed.load(SeqCst) {
            RuleGrant::ALLOWED.with_limits(2, true, 3)
        } else {
            RuleGrant::DENIED
        }
    }
}

impl Authorizer for Program {
    fn publish(&self, _subject: &Subject<'_>, topic: &str) -> RuleGrant {
        self.allow(topic.starts_with(['p', 'h']))
    }
    fn receive(&self, subject: &Subject<'_>, topic: &str) -> RuleGrant {
        self.allow(topic.starts_with('h') && subject.client_id == "hears")
    }
    fn subscribe(&self, subject: &Subject<'_>, filter: &str) -> Subscribing {
        let granted = subject.client_id == "hears" && subject.listener == "tcp" && filter.starts_with('h');
        if granted { Subscribing::Allowed } else { Subscribing::DENIED }
    }
    fn version(&self) -> u32 {
        self.version.load(SeqCst)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_embedding_program_decides_in_the_place_of_rules() {
    let program = Arc::new(Program::default());
    let given = Arc::clone(&program);
    let setup = Setup::built(|_| {}, |builder| builder.authorizer(given)).await;
    let (mut hears, mut says) = (setup.raw("hears", |_| {}), setup.raw("says", |_| {}));
    assert_eq!((hears.subscribe("h/#"), hears.subscribe("p/#"), says.subscribe("h/#")), (0, 0x87, 0x87));
    let publish = |client: &mut crate::client::Client, topic: &str, payload: &[u8]| {
        client.publish(topic, payload, QoS::AtLeastOnce, false);
        match client.next() {
            Got::PubAck(code) => code,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((publish(&mut says, "x", b""), publish(&mut says, "p", b"1234")), (0x87, 0x87), "too large");
    assert_eq!(publish(&mut says, "h/1", b"one"), 0);
    assert_eq!(hears.next(), Got::Publish("h/1".to_owned(), b"one".to_vec()));
    let before = program.asked.load(SeqCst);
    for _ in 0..50 {
        assert_eq!(publish(&mut says, "h/1", b"two"), 0);
        assert_eq!(hears.next(), Got::Publish("h/1".to_owned(), b"two".to_vec()));
    }
    assert_eq!(program.asked.load(SeqCst), before, "what was said is remembered");
    program.closed.store(true, SeqCst);
    program.version.fetch_add(1, SeqCst);
    assert_eq!(publish(&mut says, "h/1", b"x"), 0x87);
    let mut security = setup.security();
    let request = about("hears", None, Action::Subscribe("p/#".to_owned()));
    let answer = security.explain_access(request).await.unwrap().into_inner();
    assert!(!answer.allowed && answer.reasons[0].contains("by the program"), "{answer:?}");
}
