//! `gateway.v1.Commands`: requests to devices and their answers, and what becomes of replies that nobody waits for.

use std::{io::Write as _, time::Duration};

use bytes::Bytes;
use codec::{AckKind, Packet, Publish, encode_ack};
use commands::counters::totals;
use gateway_core::{Properties, Protocol, QoS};
use mqtt_server::proto::gateway::v1::{
    self, commands_client::CommandsClient, operations_client::OperationsClient,
};
use tokio::task::{JoinHandle, block_in_place};
use tonic::{Code, Request, Status};
use tonic_types::StatusExt as _;

use crate::{
    client::{Client, Got, decoded, hello},
    harness::*,
};

/// A command as its device got it.
#[derive(Debug)]
pub(crate) struct Heard {
    pub(crate) topic: String,
    pub(crate) payload: Vec<u8>,
    packet_id: u16,
    properties: Option<Properties>,
}

/// A device that answers commands as its version of MQTT does.
pub(crate) struct Responder {
    pub(crate) client: Client,
    protocol: Protocol,
}

impl Responder {
    pub(crate) fn new(setup: &Setup, protocol: Protocol, id: &str) -> Self {
        Self { client: Client::connect_with(setup.mqtt, hello(protocol, id)), protocol }
    }

    /// The next command; acknowledgements of replies are passed over.
    pub(crate) fn hear(&mut self) -> Heard {
        block_in_place(|| {
            loop {
                let bytes = self.client.next_bytes().expect("the connection goes on");
                if let Packet::Publish(publish) = decoded(&bytes, self.protocol) {
                    return Heard {
                        topic: publish.topic.to_owned(),
                        payload: publish.payload.to_vec(),
                        packet_id: publish.packet_id,
                        properties: publish.properties.map(|properties| (*properties).clone()),
                    };
                }
            }
        })
    }

    pub(crate) fn ack(&mut self, heard: &Heard, code: u8) {
        let mut bytes = Vec::new();
        encode_ack(AckKind::PubAck, heard.packet_id, code, self.protocol, &mut bytes);
        self.client.stream.write_all(&bytes).unwrap();
    }

    /// Sends the answer, at QoS 1.
    pub(crate) fn answer(&mut self, heard: &Heard, status: u32, payload: &str) {
        let given = heard.properties.clone().unwrap_or_default();
        let topic = match self.protocol.is_v5() {
            true => given.response_topic.clone().expect("a response topic"),
            false => format!("{}/reply/{status}", heard.topic.rsplit_once('/').unwrap().0),
        };
        let properties = Properties {
            correlation_data: given.correlation_data,
            user: vec![("status".to_owned(), status.to_string())],
            ..Properties::default()
        };
        self.say(&topic, payload, self.protocol.is_v5().then_some(properties));
    }

    fn say(&mut self, topic: &str, payload: &str, properties: Option<Properties>) {
        self.client.send(&Packet::Publish(Publish {
            dup: false,
            qos: QoS::AtLeastOnce,
            retain: true,
            topic,
            packet_id: 7,
            payload: payload.as_bytes(),
            alias: None,
            expiry: None,
            ids: Vec::new(),
            properties: properties.map(Into::into),
        }));
    }

    /// The code of the next PUBACK.
    pub(crate) fn acked(&mut self) -> u8 {
        block_in_place(|| {
            loop {
                match self.client.next() {
                    Got::PubAck(code) => return code,
                    Got::Closed => panic!("closed before PUBACK"),
                    _ => {}
                }
            }
        })
    }
}

pub(crate) fn spec(device: &str) -> v1::CommandSpec {
    v1::CommandSpec {
        device_id: device.to_owned(),
        name: "reboot".to_owned(),
        payload: Bytes::from_static(b"now"),
        ..v1::CommandSpec::default()
    }
}

fn request(device: &str) -> v1::SendRequest {
    v1::SendRequest { spec: Some(spec(device)), wait_for_device: None }
}

type Sending = JoinHandle<Result<v1::Reply, Status>>;

fn send_for(setup: &Setup, request: v1::SendRequest, limit: Duration) -> Sending {
    let mut client = CommandsClient::new(setup.channel.clone());
    let mut request = Request::new(request);
    request.set_timeout(limit);
    tokio::spawn(async move { Ok(client.send(request).await?.into_inner().reply.unwrap()) })
}

fn send(setup: &Setup, request: v1::SendRequest) -> Sending {
    send_for(setup, request, LIMIT)
}

async fn replied(sending: Sending) -> v1::Reply {
    soon("a reply", sending).await.unwrap().unwrap()
}

/// Code, reason and stage of a call that fails.
async fn failed(sending: Sending) -> (Code, String, String) {
    let status = soon("a failure", sending).await.unwrap().unwrap_err();
    let info = status.get_details_error_info().unwrap_or_else(|| panic!("no details: {status:?}"));
    (status.code(), info.reason, info.metadata.get("stage").cloned().unwrap_or_default())
}

fn failure(code: Code, reason: &str, stage: &str) -> (Code, String, String) {
    (code, reason.to_owned(), stage.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_of_each_version_answers_and_nobody_else_hears() {
    for non_broker in [false, true] {
        let setup = Setup::with(|config| config.non_broker = non_broker).await;
        let mut stream = setup
            .subscribe(v1::SubscribeRequest { topic_filters: vec!["#".to_owned()], ..Default::default() })
            .await;
        for protocol in [Protocol::V4, Protocol::V5] {
            let mut device = Responder::new(&setup, protocol, "d");
            if non_broker {
                assert_eq!(block_in_place(|| device.client.subscribe("cmd/d/#")), 0);
                assert_ne!(block_in_place(|| device.client.subscribe("cmd/e/#")), 0);
            }
            let mut listener = Client::connect(setup.mqtt, Protocol::V5, "e");
            if !non_broker {
                block_in_place(|| listener.subscribe("cmd/#"));
            }
            let sending = send(&setup, request("d"));
            let heard = device.hear();
            assert_eq!(heard.payload, b"now");
            assert!(heard.topic.starts_with("cmd/d/") && heard.topic.ends_with("/reboot"), "{}", heard.topic);
            device.ack(&heard, 0);
            device.answer(&heard, 404, "not here");
            let reply = replied(sending).await;
            assert_eq!((&reply.payload[..], reply.device_status), (&b"not here"[..], 404));
            assert_eq!(device.acked(), 0);
            // The same again is acknowledged and dropped.
            let before = totals();
            device.answer(&heard, 200, "again");
            assert_eq!(device.acked(), 0);
            assert!(totals().commands_replies_duplicate > before.commands_replies_duplicate);
            assert_eq!(block_in_place(|| listener.ping()), []);
        }
        setup.publish(to("marker", "end")).await.unwrap();
        assert_eq!(stream.next().await.topic, "marker", "no reply on the stream");
        let mut state = setup.state();
        let of_device = v1::ListLatestRequest { device_ids: vec!["d".to_owned()], ..Default::default() };
        let latest = state.list_latest(of_device);
        assert!(latest.await.unwrap().into_inner().values.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_failure_tells_how_far_the_command_came() {
    let setup = Setup::with(|config| config.commands.max_outstanding_per_device = 2).await;
    let offline = failure(Code::FailedPrecondition, "DEVICE_OFFLINE", "QUEUED");
    assert_eq!(failed(send(&setup, request("away"))).await, offline);
    let short = v1::SendRequest {
        wait_for_device: Some(prost_types::Duration { seconds: 0, nanos: 10_000_000 }),
        ..request("away")
    };
    assert_eq!(failed(send(&setup, short)).await, offline);

    let mut device = Responder::new(&setup, Protocol::V5, "d");
    let sending = send(&setup, request("d"));
    let heard = device.hear();
    device.ack(&heard, 0x83);
    let refused = failure(Code::FailedPrecondition, "COMMAND_REFUSED", "SENT");
    assert_eq!(failed(sending).await, refused);

    let limit = Duration::from_secs(3);
    let (unacked, acked) = (send_for(&setup, request("d"), limit), device.hear());
    drop(acked);
    assert_eq!(failed(unacked).await, failure(Code::DeadlineExceeded, "COMMAND_TIMED_OUT", "SENT"));
    let sending = send_for(&setup, request("d"), limit);
    let late = device.hear();
    device.ack(&late, 0);
    assert_eq!(failed(sending).await, failure(Code::DeadlineExceeded, "COMMAND_TIMED_OUT", "DELIVERED"));
    let before = totals();
    device.answer(&late, 200, "late");
    assert_eq!(device.acked(), 0);
    assert!(totals().commands_replies_late > before.commands_replies_late);
    device.say("cmd/d/unheard-of/reply/200", "x", None);
    assert_eq!(device.acked(), 0);
    assert!(totals().commands_replies_unknown > before.commands_replies_unknown);

    let held = [send(&setup, request("d")), send(&setup, request("d"))];
    let (first, second) = (device.hear(), device.hear());
    let full = failure(Code::ResourceExhausted, "TOO_MANY_COMMANDS", "QUEUED");
    assert_eq!(failed(send(&setup, request("d"))).await, full);
    // A call that is cancelled makes room.
    let [cancelled, kept] = held;
    cancelled.abort();
    let again = async {
        loop {
            let next = send_for(&setup, request("d"), limit);
            if failed(next).await.0 != Code::ResourceExhausted {
                break;
            }
        }
    };
    soon("room", again).await;
    let of_kept = [&first, &second];
    for heard in of_kept {
        device.answer(heard, 200, "done");
    }
    assert_eq!(replied(kept).await.payload, "done");

    for (change, field) in [
        ((|spec| spec.device_id = "a/b".to_owned()) as fn(&mut v1::CommandSpec), "spec.device_id"),
        (|spec| spec.device_id = "+".to_owned(), "spec.device_id"),
        (|spec| spec.device_id.clear(), "spec.device_id"),
        (|spec| spec.name = "a/b".to_owned(), "spec.name"),
        (|spec| spec.name.clear(), "spec.name"),
        (|spec| spec.name = "reply".to_owned(), "spec.name"),
        (
            |spec| {
                spec.properties =
                    Some(v1::Properties { response_topic: Some("x".to_owned()), ..Default::default() });
            },
            "spec.properties.response_topic",
        ),
    ] {
        let mut spec = spec("d");
        change(&mut spec);
        let wrong = send(&setup, v1::SendRequest { spec: Some(spec), wait_for_device: None });
        let status = soon("a refusal", wrong).await.unwrap().unwrap_err();
        assert_eq!(refusal(&status), (Code::InvalidArgument, "INVALID_FIELD".to_owned()));
        assert!(status.message().starts_with(field), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_waits_for_its_device_and_follows_it() {
    let setup = Setup::new().await;
    let patient = v1::SendRequest {
        wait_for_device: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..request("d")
    };
    let sending = send(&setup, patient);
    let mut first = Responder::new(&setup, Protocol::V4, "d");
    let heard = first.hear();
    // Another connection takes the session over before the first has acknowledged anything.
    let mut second = Responder::new(&setup, Protocol::V5, "d");
    let again = second.hear();
    assert_eq!(heard.topic, again.topic);
    second.ack(&again, 0);
    second.answer(&again, 200, "from the second");
    assert_eq!(replied(sending).await.payload, "from the second");
}

/// The session resends the PUBLISH although nobody waits any more: the device answers what has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_reply_to_what_a_session_resent_too_late_is_dropped() {
    let setup = Setup::new().await;
    let keep = |connect: &mut codec::Connect| connect.session_expiry = Some(600);
    let device = setup.raw("d", keep);
    let mut device = Responder { client: device, protocol: Protocol::V5 };
    let sending = send_for(&setup, request("d"), Duration::from_secs(2));
    let heard = device.hear();
    drop(device);
    assert_eq!(failed(sending).await.2, "SENT");
    let mut device = Responder { client: setup.raw("d", keep), protocol: Protocol::V5 };
    let resent = device.hear();
    assert_eq!(resent.topic, heard.topic);
    device.ack(&resent, 0);
    let before = totals();
    device.answer(&resent, 200, "too late");
    assert_eq!(device.acked(), 0);
    assert!(totals().commands_replies_late > before.commands_replies_late);
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_need_not_name_replies_and_nobody_replies_for_others() {
    let directory = tempfile::tempdir().unwrap();
    let rules = directory.path().join("rules.toml");
    std::fs::write(&rules, "[[rules]]\nallow = \"all\"\ntopics = [\"other\", \"cmd/d/#\", \"cmd/e/#\"]\nclients = [\"forger\"]\n")
        .unwrap();
    let setup = Setup::with(|config| config.authorization.rules = Some(rules)).await;
    let mut device = Responder::new(&setup, Protocol::V5, "d");
    assert_eq!(block_in_place(|| device.client.subscribe("cmd/d/#")), 0);
    assert_eq!(block_in_place(|| device.client.subscribe("cmd/#")), 0x87);
    let sending = send(&setup, request("d"));
    let heard = device.hear();
    let mut forger = Responder::new(&setup, Protocol::V5, "forger");
    let refused = || gateway_core::counters::totals().reserved_foreign;
    let before = refused();
    forger.answer(&heard, 200, "forged");
    assert_eq!(forger.acked(), 0x87, "whatever its rules say");
    assert!(refused() > before);
    device.say("elsewhere", "x", None);
    assert_eq!(device.acked(), 0x87);
    device.answer(&heard, 200, "done");
    assert_eq!(replied(sending).await.payload, "done");
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_can_be_switched_off_and_have_another_topic() {
    let setup = Setup::with(|config| config.commands.enabled = false).await;
    let status = soon("an answer", send(&setup, request("d"))).await.unwrap().unwrap_err();
    assert_eq!(refusal(&status), (Code::FailedPrecondition, "COMMANDS_DISABLED".to_owned()));
    let mut any = Client::connect(setup.mqtt, Protocol::V5, "a");
    block_in_place(|| {
        any.publish_acked("cmd/b/1/reply", b"x", false);
    });

    let setup = Setup::with(|config| {
        config.commands.topic = "to/devices".to_owned();
        config.commands.request = "do/{name}/{id}".to_owned();
        config.commands.reply = "done/{id}/{status}".to_owned();
    })
    .await;
    let mut device = Responder::new(&setup, Protocol::V5, "d");
    let sending = send(&setup, request("d"));
    let heard = device.hear();
    let id = heard.topic.strip_prefix("to/devices/d/do/reboot/").expect("the topic of a command").to_owned();
    let response = heard.properties.as_ref().and_then(|properties| properties.response_topic.as_deref());
    assert_eq!(response, Some(&*format!("to/devices/d/done/{id}")));
    device.answer(&heard, 200, "done");
    assert_eq!(replied(sending).await.device_status, 200);

    let mut old = Responder::new(&setup, Protocol::V4, "old");
    let sending = send(&setup, request("old"));
    let heard = old.hear();
    let id = heard.topic.strip_prefix("to/devices/old/do/reboot/").expect("the topic of a command");
    old.say(&format!("to/devices/old/done/{id}/202"), "soon", None);
    assert_eq!(replied(sending).await.device_status, 202);
}

fn start(id: &str, device: &str) -> v1::StartCommandRequest {
    v1::StartCommandRequest {
        command_id: id.to_owned(),
        spec: Some(spec(device)),
        ..v1::StartCommandRequest::default()
    }
}

/// In so many milliseconds, as the wall clock shows it.
#[expect(clippy::disallowed_methods, reason = "a request names a time of the wall clock")]
fn in_millis(millis: u64) -> Option<prost_types::Timestamp> {
    let at = std::time::SystemTime::now() + Duration::from_millis(millis);
    Some(prost_types::Timestamp::from(at))
}

struct Stored(CommandsClient<tonic::transport::Channel>);

impl Stored {
    fn of(setup: &Setup) -> Self {
        Self(CommandsClient::new(setup.channel.clone()))
    }

    async fn start(&mut self, request: v1::StartCommandRequest) -> Result<v1::Command, Status> {
        let answer = soon("a start", self.0.start_command(request)).await?;
        Ok(answer.into_inner().command.unwrap())
    }

    async fn get(&mut self, id: &str) -> Result<v1::Command, Status> {
        let request = v1::GetCommandRequest { command_id: id.to_owned() };
        Ok(soon("a command", self.0.get_command(request)).await?.into_inner().command.unwrap())
    }

    async fn cancel(&mut self, id: &str) -> Result<v1::Command, Status> {
        let request = v1::CancelCommandRequest { command_id: id.to_owned() };
        Ok(soon("a cancel", self.0.cancel_command(request)).await?.into_inner().command.unwrap())
    }

    async fn list(&mut self, device: &str, active_only: bool) -> Vec<String> {
        let mut request = v1::ListCommandsRequest {
            device_id: device.to_owned(),
            active_only,
            page_size: 1,
            ..v1::ListCommandsRequest::default()
        };
        let mut ids = Vec::new();
        loop {
            let page = self.0.list_commands(request.clone()).await.unwrap().into_inner();
            ids.extend(page.commands.into_iter().map(|command| command.command_id));
            if page.next_page_token.is_empty() {
                return ids;
            }
            request.page_token = page.next_page_token;
        }
    }

    /// Watches a command until it is in this state, or ended; all that was seen.
    async fn until(&mut self, id: &str, wanted: v1::CommandState) -> Vec<v1::Command> {
        let request = v1::WatchCommandRequest { command_id: id.to_owned() };
        let mut changes = soon("a watch", self.0.watch_command(request)).await.unwrap().into_inner();
        let mut seen = Vec::new();
        while let Some(change) = soon("a change", changes.message()).await.unwrap() {
            seen.push(change.command.unwrap());
            if seen.last().unwrap().state() == wanted {
                break;
            }
        }
        assert_eq!(seen.last().unwrap().state(), wanted, "{seen:?}");
        seen
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_started_command_goes_out_at_each_connection_until_it_is_answered() {
    let setup = Setup::new().await;
    let mut stored = Stored::of(&setup);
    let first = stored.start(start("first", "d")).await.unwrap();
    assert_eq!((first.state(), first.attempts), (v1::CommandState::Queued, 0));
    assert_eq!(stored.start(start("first", "d")).await.unwrap(), first, "the same again is the same");
    let status = stored.start(start("first", "e")).await.unwrap_err();
    assert_eq!(refusal(&status), (Code::AlreadyExists, "COMMAND_EXISTS".to_owned()));
    let made = stored.start(start("", "other")).await.unwrap();
    assert!(!made.command_id.is_empty());
    stored.start(start("second", "d")).await.unwrap();
    assert_eq!(stored.list("d", true).await, ["second", "first"], "newest first");

    let mut device = Responder::new(&setup, Protocol::V4, "d");
    let heard = [device.hear(), device.hear()];
    assert_eq!(heard[0].topic, "cmd/d/first/reboot", "in the order in which they were started");
    // The session ends before it is acknowledged.
    drop(device);
    stored.until("first", v1::CommandState::Queued).await;
    let mut device = Responder::new(&setup, Protocol::V5, "d");
    // Commands that are sent again may come in another order.
    let mut heard = [device.hear(), device.hear()];
    heard.sort_by(|one, other| one.topic.cmp(&other.topic));
    device.ack(&heard[0], 0);
    device.ack(&heard[1], 0x83);
    stored.until("first", v1::CommandState::Delivered).await;
    device.answer(&heard[0], 200, "done");
    assert_eq!(device.acked(), 0);
    let ended = stored.get("first").await.unwrap();
    assert_eq!((ended.state(), ended.attempts), (v1::CommandState::Replied, 2), "before the acknowledgement");
    let reply = ended.reply.unwrap();
    assert_eq!((&reply.payload[..], reply.device_status), (&b"done"[..], 200));
    let refused = stored.until("second", v1::CommandState::Refused).await.pop().unwrap();
    assert_eq!(refused.reason_code, Some(0x83));
    let before = totals();
    device.answer(&heard[0], 500, "again");
    assert_eq!(device.acked(), 0);
    assert!(totals().commands_replies_duplicate > before.commands_replies_duplicate);
    assert_eq!(stored.get("first").await.unwrap().reply.unwrap().device_status, 200);
    assert!(stored.list("d", true).await.is_empty());
    assert_eq!(stored.list("", false).await.len(), 3);
    let status = stored.cancel("first").await.unwrap_err();
    assert_eq!(refusal(&status), (Code::FailedPrecondition, "COMMAND_ENDED".to_owned()));
    let status = stored.cancel("unheard-of").await.unwrap_err();
    assert_eq!(refusal(&status), (Code::NotFound, "COMMAND_NOT_FOUND".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_cancelled_or_over_does_not_go_out_any_more() {
    let setup = Setup::new().await;
    let mut stored = Stored::of(&setup);
    stored.start(start("cancelled", "d")).await.unwrap();
    stored
        .start(v1::StartCommandRequest { expire_time: in_millis(300), ..start("over", "d") })
        .await
        .unwrap();
    let later = v1::StartCommandRequest { start_time: in_millis(3_600_000), ..start("later", "d") };
    stored.start(later).await.unwrap();
    assert_eq!(stored.cancel("cancelled").await.unwrap().state(), v1::CommandState::Cancelled);
    stored.until("over", v1::CommandState::TimedOut).await;
    let mut device = Responder::new(&setup, Protocol::V5, "d");
    stored.start(start("now", "d")).await.unwrap();
    let heard = device.hear();
    assert_eq!(heard.topic, "cmd/d/now/reboot");
    device.ack(&heard, 0);
    stored.until("now", v1::CommandState::Delivered).await;
    assert_eq!(stored.cancel("now").await.unwrap().state(), v1::CommandState::Cancelled);
    let before = totals();
    device.answer(&heard, 200, "too late");
    assert_eq!(device.acked(), 0);
    assert!(totals().commands_replies_late > before.commands_replies_late);
    assert_eq!(stored.get("now").await.unwrap().state(), v1::CommandState::Cancelled);
    assert_eq!(stored.list("d", true).await, ["later"]);

    for (request, field) in [
        (v1::StartCommandRequest { expire_time: in_millis(0), ..start("x", "d") }, "expire_time"),
        (v1::StartCommandRequest { start_time: in_millis(90_000_000), ..start("x", "d") }, "start_time"),
        (start("a/b", "d"), "command_id"),
        (
            v1::StartCommandRequest {
                retry_interval: Some(prost_types::Duration::default()),
                ..start("x", "d")
            },
            "retry_interval",
        ),
    ] {
        let status = stored.start(request).await.unwrap_err();
        assert!(status.message().starts_with(field), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_goes_on_with_what_was_active_and_knows_what_has_ended() {
    let change = |config: &mut config::Config| config.commands.max_kept = 1;
    let setup = Setup::with(change).await;
    let mut stored = Stored::of(&setup);
    stored.start(start("waiting", "away")).await.unwrap();
    let mut device = Responder::new(&setup, Protocol::V5, "d");
    for id in ["gone", "kept"] {
        stored.start(start(id, "d")).await.unwrap();
        let heard = device.hear();
        device.ack(&heard, 0);
        device.answer(&heard, 200, id);
        assert_eq!(device.acked(), 0);
    }
    let retried = v1::StartCommandRequest {
        retry_interval: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
        ..start("delivered", "d")
    };
    stored.start(retried).await.unwrap();
    let heard = device.hear();
    device.ack(&heard, 0);
    stored.until("delivered", v1::CommandState::Delivered).await;
    assert_eq!(device.hear().topic, heard.topic, "again after the interval");
    drop(device);
    let setup = setup.restarted(change).await;
    let mut stored = Stored::of(&setup);
    assert_eq!(stored.get("kept").await.unwrap().reply.unwrap().payload, "kept");
    let status = stored.get("gone").await.unwrap_err();
    assert_eq!(refusal(&status), (Code::NotFound, "COMMAND_NOT_FOUND".to_owned()));
    assert_eq!(stored.start(start("waiting", "away")).await.unwrap().state(), v1::CommandState::Queued);
    let mut away = Responder::new(&setup, Protocol::V4, "away");
    let heard = away.hear();
    away.answer(&heard, 201, "back");
    assert_eq!(stored.until("waiting", v1::CommandState::Replied).await.pop().unwrap().attempts, 1);
    let mut device = Responder::new(&setup, Protocol::V5, "d");
    let again = device.hear();
    device.answer(&again, 200, "at last");
    stored.until("delivered", v1::CommandState::Replied).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_commands_have_bounds() {
    let setup = Setup::with(|config| {
        config.commands.max_active = 3;
        config.commands.max_active_per_device = 2;
    })
    .await;
    let mut stored = Stored::of(&setup);
    let active = async || {
        let name_prefixes = vec!["gateway_commands_active".to_owned()];
        let mut operations = OperationsClient::new(setup.channel.clone());
        let metrics = operations.get_metrics(v1::GetMetricsRequest { name_prefixes }).await.unwrap();
        metrics.into_inner().metrics.iter().map(|metric| metric.value).sum::<f64>()
    };
    assert_eq!(active().await, 0.0);
    for (id, device) in [("1", "d"), ("2", "d"), ("3", "e")] {
        stored.start(start(id, device)).await.unwrap();
    }
    assert_eq!(active().await, 3.0);
    for device in ["d", "f"] {
        let status = stored.start(start("4", device)).await.unwrap_err();
        assert_eq!(refusal(&status), (Code::ResourceExhausted, "TOO_MANY_COMMANDS".to_owned()));
    }
    stored.cancel("1").await.unwrap();
    assert_eq!(active().await, 2.0);
    stored.start(start("4", "d")).await.unwrap();
    assert_eq!(active().await, 3.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn started_commands_without_a_store_end_with_the_process() {
    let change = |config: &mut config::Config| config.store.enabled = false;
    let setup = Setup::with(change).await;
    let mut stored = Stored::of(&setup);
    stored.start(start("answered", "d")).await.unwrap();
    stored.start(start("cancelled", "away")).await.unwrap();
    stored.start(start("waiting", "away")).await.unwrap();
    let mut device = Responder::new(&setup, Protocol::V4, "d");
    let heard = device.hear();
    device.answer(&heard, 200, "here");
    assert_eq!(device.acked(), 0);
    let answered = stored.until("answered", v1::CommandState::Replied).await.pop().unwrap();
    assert_eq!(answered.reply.unwrap().payload, "here");
    assert_eq!(stored.cancel("cancelled").await.unwrap().state(), v1::CommandState::Cancelled);
    assert_eq!(stored.list("away", true).await, ["waiting"]);
    drop(device);
    let setup = setup.restarted(change).await;
    let status = Stored::of(&setup).get("waiting").await.unwrap_err();
    assert_eq!(refusal(&status), (Code::NotFound, "COMMAND_NOT_FOUND".to_owned()));
}
