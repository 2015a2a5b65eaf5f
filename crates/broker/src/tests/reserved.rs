//! Topics that a part of the gateway owns: who hears what is published to them.

use super::*;

/// A part that writes down what it is given.
struct RecordingPart {
    heard: Mutex<Vec<(String, String, String)>>,
    connected: Mutex<Vec<String>>,
    /// True to refuse every message.
    full: AtomicBool,
    /// Takes a part of what the acknowledgement waits for.
    parts: Mutex<Vec<Arc<Commit>>>,
    /// Answers the device at once.
    answers: AtomicBool,
}

impl Reserved for RecordingPart {
    fn prefix(&self) -> &str {
        "own/"
    }
    fn take(&self, message: &Message<'_>, rest: &str, broker: &Broker, turn: &mut Turn) -> ReservedOutcome {
        if self.full.load(SeqCst) {
            return ReservedOutcome::Refused(Shortage::Store);
        }
        let device = message.origin.client_id.map(ToString::to_string).unwrap_or_default();
        let payload = String::from_utf8_lossy(message.payload).into_owned();
        self.parts.lock().extend(message.plain_part());
        if self.answers.load(SeqCst) {
            let answer = Message::new("own/answer", b"heard", message.received, Origin::SERVER);
            broker.publish_to_device(&device, &answer, Offline::Fail, turn);
        }
        self.heard.lock().push((device, rest.to_owned(), payload));
        ReservedOutcome::Taken
    }
    fn connected(&self, device: &ClientId) {
        self.connected.lock().push(device.to_string());
    }
}

fn bench(non_broker: bool) -> (Bench, Arc<RecordingPart>) {
    let part = Arc::new(RecordingPart {
        heard: Mutex::default(),
        connected: Mutex::default(),
        full: AtomicBool::new(false),
        parts: Mutex::default(),
        answers: AtomicBool::new(false),
    });
    let parts = vec![Arc::clone(&part) as Arc<dyn Reserved>];
    (Bench::with_parts(Limits::default(), non_broker, None, None, parts), part)
}

fn heard(part: &RecordingPart) -> Vec<(String, String, String)> {
    std::mem::take(&mut *part.heard.lock())
}

fn said(device: &str, rest: &str, payload: &str) -> (String, String, String) {
    (device.to_owned(), rest.to_owned(), payload.to_owned())
}

#[test]
fn what_a_part_takes_is_neither_retained_nor_delivered() {
    for non_broker in [false, true] {
        let (mut bench, part) = bench(non_broker);
        let device = bench.device("d");
        let other = bench.device("e");
        if !non_broker {
            bench.subscribe(&other, "#");
            bench.subscribe(&other, "own/d/#");
        }
        let stream = Arc::new(TestStream::default());
        let handle = bench.broker.attach_stream(Arc::clone(&stream) as Arc<dyn Target>, &["#".to_owned()]);
        let published = bench.publish_from(&device, "own/d/a/b", "1", true);
        assert_eq!((published.matched, published.refused), (1, None));
        assert_eq!(heard(&part), [said("d", "a/b", "1")], "non-broker mode: {non_broker}");
        assert!(other.got().is_empty() && stream.payloads().is_empty());
        assert!(ready(bench.broker.retained("own/d/a/b", bench.now)).unwrap().is_none());
        drop(handle);
    }
}

#[test]
fn a_message_below_anothers_name_reaches_nobody() {
    let (mut bench, part) = bench(false);
    let device = bench.device("d");
    let other = bench.device("e");
    bench.subscribe(&other, "#");
    for topic in ["own/e/a", "own/x", "own/", "own/d"] {
        assert!(bench.broker.is_foreign("d", topic), "{topic}");
        assert_eq!(bench.publish_from(&device, topic, "1", true).matched, 0, "{topic}");
    }
    assert!(heard(&part).is_empty() && other.got().is_empty());
    assert!(!bench.broker.is_foreign("d", "other/e/a"));
    assert_eq!(bench.publish_from(&device, "owned/e/a", "1", false).matched, 1);
}

#[test]
fn what_a_backend_publishes_is_nobodys_reply() {
    let (mut bench, part) = bench(false);
    let device = bench.device("d");
    bench.subscribe(&device, "own/d/#");
    assert_eq!(bench.publish("own/d/a", "1", QoS::AtLeastOnce).matched, 1);
    assert!(heard(&part).is_empty());
    assert_eq!(device.payloads(), ["1"]);
}

#[test]
fn a_will_is_taken_like_any_message_of_its_device() {
    let (mut bench, part) = bench(false);
    let own = Connect { will: Some(will("own/d/a", "gone", 0)), ..Connect::default() };
    let foreign = Connect { will: Some(will("own/d/a", "forged", 0)), ..Connect::default() };
    let device = bench.connect("d", own);
    let forger = bench.connect("e", foreign);
    bench.close(&device);
    bench.close(&forger);
    assert_eq!(heard(&part), [said("d", "a", "gone")]);
}

#[test]
fn the_acknowledgement_waits_for_what_the_part_writes() {
    let (mut bench, part) = bench(false);
    let device = bench.device("d");
    let client_id = device.session.core().client_id().clone();
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot: 0 };
    for (qos, unit) in [(QoS::AtMostOnce, false), (QoS::AtLeastOnce, false), (QoS::ExactlyOnce, true)] {
        let mut message = Message::new("own/d/a", b"1", bench.now, origin);
        message.qos = qos;
        message.unit = unit;
        bench.broker.publish(&message, &mut bench.turn);
        let parts = std::mem::take(&mut *part.parts.lock());
        let Some(commit) = message.issued() else {
            assert!(qos == QoS::AtMostOnce && parts.is_empty());
            continue;
        };
        let before = if unit { commit.before().expect("a commit before the unit") } else { commit };
        before.done();
        assert_eq!(before.result(), None, "{qos:?}");
        for part in parts {
            part.refuse();
        }
        assert_eq!(before.result(), Some(Err(gateway_core::CommitRefused)), "{qos:?}");
    }
}

#[test]
fn a_part_may_refuse_and_may_answer_in_the_same_turn() {
    let (mut bench, part) = bench(true);
    let device = bench.device("d");
    part.full.store(true, SeqCst);
    assert_eq!(bench.publish_from(&device, "own/d/a", "1", false).refused, Some(Shortage::Store));
    part.full.store(false, SeqCst);
    part.answers.store(true, SeqCst);
    assert_eq!(bench.publish_from(&device, "own/d/a", "1", false).refused, None);
    assert_eq!(device.payloads(), ["heard"]);
}

#[test]
fn own_reserved_topics_may_be_subscribed_to_outside_the_namespace() {
    let (mut bench, _) = bench(true);
    let device = bench.device("d");
    assert!(bench.try_subscribe(&device, &request("own/d/#")).is_ok());
    assert!(bench.try_subscribe(&device, &request("own/+/a")).is_err());
    assert!(bench.try_subscribe(&device, &request("own/e/a")).is_err());
}

#[test]
fn a_part_is_told_of_each_connection() {
    let (mut bench, part) = bench(false);
    let device = bench.device("d");
    bench.close(&device);
    bench.device("d");
    bench.device("e");
    assert_eq!(*part.connected.lock(), ["d", "d", "e"]);
}
