//! A file system that is really full, under the data of a gateway with a consumer group: no layer in between says so.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use codec::Packet;
use gateway_core::{Protocol, QoS};
use mqtt_server::proto::gateway::v1::{
    self, AckResult, consumed_message::Content, consumer_client::ConsumerClient, groups_client::GroupsClient,
};
use tonic::transport::{Channel, Endpoint};

use super::{
    blocking::{Client, Got, decoded},
    broker::{Broker, MemoryKind},
    support::{skipped, until},
};

/// Latest values have a store of their own, which is not what is tested.
pub(super) const CONFIG: &str = "[latest]\nenabled = false\n";
const GROUP: &str = "g";

/// A file system of its own.
pub(super) struct Disk(PathBuf);

impl Disk {
    /// Mounts a small one; `None` where that is not allowed.
    pub(super) fn mount(path: &Path) -> Option<Self> {
        let mut mount = Command::new("mount");
        let done = mount.args(["-t", "tmpfs", "-o", "size=64m", "tmpfs"]).arg(path).output();
        done.is_ok_and(|output| output.status.success()).then(|| Self(path.to_owned()))
    }

    /// Takes all room that is left, and whatever becomes free until the answer is dropped.
    pub(super) fn fill(&self) -> Ballast {
        let path = self.0.join("ballast");
        let mut file = File::create(&path).expect("make the ballast");
        let (full, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (full, over) = (Arc::clone(&full), Arc::clone(&over));
            thread::spawn(move || {
                let page = [1; 4096];
                while !over.load(SeqCst) {
                    if file.write_all(&page).is_err() {
                        full.store(true, SeqCst);
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            })
        };
        until(|| full.load(SeqCst));
        Ballast { path, over, thread: Some(thread) }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // At once, also if somebody has a file open in it.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// File that fills a disk.
pub(super) struct Ballast {
    path: PathBuf,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Ballast {
    fn drop(&mut self) {
        self.over.store(true, SeqCst);
        let _ = self.thread.take().map(JoinHandle::join);
        let _ = fs::remove_file(&self.path);
    }
}

/// A backend that calls one thing after another.
struct Backend {
    runtime: tokio::runtime::Runtime,
    channel: Channel,
}

impl Backend {
    fn new(broker: &Broker) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let endpoint = Endpoint::from_shared(format!("http://{}", broker.grpc())).expect("an address");
        let endpoint = endpoint.timeout(Duration::from_secs(60));
        let channel = runtime.block_on(async { endpoint.connect_lazy() });
        Self { runtime, channel }
    }

    fn create(&self) {
        let filter = Some(v1::Filter { topic_filters: vec!["up/#".into()], ..Default::default() });
        // A message that is given back once is given up.
        let group = v1::Group {
            name: GROUP.into(),
            filter,
            max_attempts: 1,
            ack_deadline: Some(prost_types::Duration { seconds: 3_600, nanos: 0 }),
            ..Default::default()
        };
        let request = v1::CreateGroupRequest { group: Some(group), ..Default::default() };
        let mut client = GroupsClient::new(self.channel.clone());
        self.runtime.block_on(client.create_group(request)).expect("a group");
    }

    /// Payload and name of what there is, at least `least` messages.
    fn fetch(&self, least: usize) -> Vec<(String, String)> {
        let request = v1::FetchRequest {
            group: GROUP.into(),
            member_id: "m".into(),
            max_messages: 10_000,
            wait: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
            ..Default::default()
        };
        let mut all = Vec::new();
        until(|| {
            let client = ConsumerClient::new(self.channel.clone());
            let mut client = client.max_decoding_message_size(64 << 20);
            let fetched = self.runtime.block_on(client.fetch(request.clone())).expect("a fetch").into_inner();
            assert_eq!(fetched.gaps, [], "nothing is missing");
            all.extend(fetched.messages.into_iter().map(|message| {
                let Some(Content::Message(received)) = message.content else { panic!("no message") };
                (String::from_utf8_lossy(&received.payload).into_owned(), message.ack_id)
            }));
            all.len() >= least
        });
        all
    }

    /// True if it was answered that the message never comes again.
    fn acknowledge(&self, name: &str) -> bool {
        let request = v1::AcknowledgeRequest { group: GROUP.into(), ack_ids: vec![name.into()] };
        let mut client = ConsumerClient::new(self.channel.clone());
        match self.runtime.block_on(client.acknowledge(request)) {
            Ok(answer) => {
                assert_eq!(answer.into_inner().results, [AckResult::Ok as i32]);
                true
            }
            Err(status) => {
                assert_eq!(status.code(), tonic::Code::Unavailable, "{status:?}");
                false
            }
        }
    }

    fn give_back(&self, name: &str) {
        let deadline = Some(prost_types::Duration::default());
        let ack_ids = vec![name.into()];
        let request = v1::ModifyLeaseRequest { group: GROUP.into(), ack_ids, deadline, reason: "bad".into() };
        let mut client = ConsumerClient::new(self.channel.clone());
        self.runtime.block_on(client.modify_lease(request)).expect("given back");
    }

    fn status(&self) -> v1::GroupStatus {
        let request = v1::GetGroupRequest { name: GROUP.into() };
        let mut client = GroupsClient::new(self.channel.clone());
        let group = self.runtime.block_on(client.get_group(request)).expect("a group").into_inner().group;
        group.and_then(|group| group.status).expect("a status")
    }
}

fn counter(broker: &Broker, name: &str) -> u64 {
    let metrics = broker.http_get("/metrics").unwrap_or_default();
    let value = metrics.lines().find_map(|line| line.strip_prefix(name));
    value.map_or(0, |value| value.trim().parse().expect("a number"))
}

/// Publishes at QoS 1; true if it was acknowledged, false if it was refused.
fn publish(device: &mut Client, payload: &[u8]) -> bool {
    device.publish("up/1", payload, QoS::AtLeastOnce, false);
    match device.next() {
        Got::PubAck(0) => true,
        Got::PubAck(0x97) => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_full_disk_loses_nothing_a_group_was_promised_and_mends_by_itself() {
    let mut broker = Broker::new(MemoryKind::Own).with(Vec::new(), CONFIG);
    let Some(disk) = Disk::mount(&broker.data()) else { return skipped("the right to mount a file system") };
    broker.start();
    broker.ready();
    let backend = Backend::new(&broker);
    backend.create();
    let mut device = Client::connect(broker.port, Protocol::V5, "device");
    let mut expected: Vec<String> = (0..20).map(|n| format!("before {n}")).collect();
    // One at the end that takes much room when it is given up.
    expected.push("x".repeat(400_000));
    for payload in &expected {
        assert!(publish(&mut device, payload.as_bytes()));
    }
    let taken = backend.fetch(expected.len());
    assert!(taken.iter().map(|(payload, _)| payload).eq(&expected));
    let mut settled = Vec::new();
    for (payload, name) in &taken[..5] {
        assert!(backend.acknowledge(name));
        settled.push(payload.clone());
    }

    // Full where messages are appended.
    let ballast = disk.fill();
    let mut tries = 0;
    loop {
        let payload = format!("full {tries}");
        tries += 1;
        assert!(tries < 10_000, "the disk is not full");
        if !publish(&mut device, payload.as_bytes()) {
            break;
        }
        expected.push(payload);
    }
    device.publish("up/1", b"refused", QoS::ExactlyOnce, false);
    let bytes = device.next_bytes().expect("an answer");
    assert!(matches!(decoded(&bytes, Protocol::V5), Packet::PubRec(ack) if ack.code == 0x97), "{bytes:02x?}");
    let mut old = Client::connect(broker.port, Protocol::V4, "old");
    old.publish("up/1", b"refused", QoS::AtLeastOnce, false);
    assert_eq!(old.next(), Got::Closed);
    let refused = || {
        counter(&broker, "gateway_log_refused_total{reason=\"disk\"} ")
            + counter(&broker, "gateway_groups_dropped_total{reason=\"log\"} ")
    };
    for _ in 0..3 {
        let before = refused();
        device.publish("up/1", b"lost", QoS::AtMostOnce, false);
        until(|| refused() > before);
    }
    until(|| broker.readiness().contains("failing: log"));

    // Full where acknowledgements are. The first need no room; then something is to be written that finds none.
    let (last, rest) = taken[5..].split_last().expect("messages");
    let mut answers = BTreeMap::new();
    for (at, (payload, name)) in rest.iter().enumerate() {
        if at == 5 {
            backend.give_back(&last.1);
        }
        let ok = backend.acknowledge(name);
        *answers.entry(ok).or_insert(0) += 1;
        if ok {
            settled.push(payload.clone());
        }
    }
    println!("acknowledged with a full disk: {answers:?}");
    assert!(answers.contains_key(&false), "there was no room for what was given up");

    // A start with a full disk: what was promised is there.
    broker.kill();
    broker.start();
    broker.ready();
    let backend = Backend::new(&broker);
    // A message that was given back comes again, or its attempt was written before the end: then it is given up once
    // there is room.
    let given_back = &last.0;
    let is_left = |payload: &&String| !settled.contains(payload) && *payload != given_back;
    let left: Vec<String> = expected.iter().filter(is_left).cloned().collect();
    let again = backend.fetch(left.len());
    let comes_again = again.iter().any(|(payload, _)| payload == given_back);
    let all: Vec<&String> = again.iter().map(|(payload, _)| payload).collect();
    assert!(left.iter().all(|payload| all.contains(&payload)), "{left:?} is not all in {all:?}");
    let come_again: Vec<_> = all.iter().filter(|payload| settled.contains(payload)).collect();
    assert!(come_again.is_empty(), "settled: {come_again:?}");

    // Room again: everything works, without a start.
    drop(ballast);
    let mut device = Client::connect(broker.port, Protocol::V5, "device");
    until(|| publish(&mut device, b"after"));
    let mut after = 0;
    for (_, name) in &again {
        until(|| backend.acknowledge(name));
    }
    for (payload, name) in backend.fetch(1) {
        assert_eq!(payload, "after");
        until(|| backend.acknowledge(&name));
        after += 1;
    }
    assert_eq!(after, 1);
    until(|| !broker.readiness().contains("failing"));
    until(|| backend.status().lag_messages == 0);
    broker.kill();
    broker.start();
    broker.ready();
    let status = Backend::new(&broker).status();
    assert_eq!((status.lag_messages, status.lost), (0, 0), "{status:?}");
    assert_eq!(status.dead_letters, u64::from(!comes_again), "{status:?}");
    broker.kill();
}
