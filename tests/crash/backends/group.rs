//! A member of a consumer group that gets what the devices of the world publish, and messages with idempotency keys.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use mqtt_server::proto::gateway::v1::{
    self, consume_item::Item, consume_request::Action, consumed_message::Content,
    consumer_client::ConsumerClient, groups_client::GroupsClient, publisher_client::PublisherClient,
};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};
use tonic_types::StatusExt as _;

use super::{Shared, Way, way::is_unanswered};
use crate::{
    clock,
    history::{Msg, MsgId},
    rng::Rng,
};

const GROUP: &str = "world";
const MEMBER: &str = "member";
/// Topics of devices' messages with one QoS each, in which order is kept.
const ORDERED: [&str; 2] = ["0", "1"];
/// A stream that is silent for longer is given up; it has a heartbeat each second.
const SILENCE: Duration = Duration::from_secs(5);

/// Facts about the group.
#[derive(Default)]
pub(super) struct Group {
    pub(super) delivered: usize,
    pub(super) redelivered: usize,
    /// Ids of messages of which the acknowledgement was answered.
    pub(super) settled: HashSet<String>,
    got: HashSet<MsgId>,
    /// Ids of the messages that came for an idempotency key.
    keyed: HashMap<u32, HashSet<String>>,
    /// Last first arrival of a publisher's topic.
    last: HashMap<(usize, String), u32>,
    keys: Keys,
}

fn seconds(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

pub(super) async fn create(way: &mut Way) {
    let filter = v1::Filter {
        topic_filters: vec!["t/#".to_owned(), "k/#".to_owned()],
        include_backends: true,
        ..Default::default()
    };
    let group = v1::Group {
        name: GROUP.to_owned(),
        filter: Some(filter),
        ack_deadline: seconds(5),
        min_backoff: Some(prost_types::Duration { seconds: 0, nanos: 50_000_000 }),
        ..Default::default()
    };
    let request = v1::CreateGroupRequest { group: Some(group), ..Default::default() };
    let made = way
        .until_answered(async |channel| GroupsClient::new(channel).create_group(request.clone()).await)
        .await;
    // A try before may have made it.
    assert!(made.as_ref().err().is_none_or(|status| status.code() == Code::AlreadyExists), "{made:?}");
}

/// Waits until nothing waits in the group; what does at the end.
pub(super) async fn until_settled(way: &mut Way, deadline: u64) -> u64 {
    loop {
        let request = v1::GetGroupRequest { name: GROUP.to_owned() };
        let got = way
            .until_answered(async |channel| GroupsClient::new(channel).get_group(request.clone()).await)
            .await;
        let status = got.expect("the group").group.and_then(|group| group.status).expect("a status");
        let left = status.lag_messages + status.outstanding;
        if left == 0 || clock::now() > deadline {
            return left;
        }
        sleep(Duration::from_millis(200)).await;
    }
}

/// Consumes until the end, and publishes with keys meanwhile.
pub(super) async fn run(shared: Arc<Shared>, addresses: [SocketAddr; 2]) -> Group {
    let mut group = Group::default();
    let mut way = Way::new(addresses);
    let keys = async {
        let keys = publish_keyed(&shared, addresses).await;
        shared.published.store(true, SeqCst);
        keys
    };
    let member = async {
        while !shared.is_stopping() {
            let ended = group.consume(&way, &shared).await;
            if ended.is_err() {
                way.turn().await;
            }
        }
    };
    let (keys, ()) = tokio::join!(keys, member);
    group.keys = keys;
    group
}

/// Keys of messages, as their backend was told.
#[derive(Default)]
pub(super) struct Keys {
    /// All below this were answered.
    answered: u32,
    /// Keys whose first call was answered. A call that ends with the gateway may have published, and so may the next one.
    exact: HashSet<u32>,
    /// Keys of which nobody knows what became of them, as the gateway says.
    lost: HashSet<u32>,
}

/// Publishes under each key until it is answered, and now and then once more under one that was.
async fn publish_keyed(shared: &Shared, addresses: [SocketAddr; 2]) -> Keys {
    let (mut way, mut keys, mut rng) = (Way::new(addresses), Keys::default(), Rng::new(1));
    let mut is_first = true;
    while !shared.is_ending() {
        if rng.one_in(4) && keys.answered > 0 {
            let earlier = rng.between(0, keys.answered.into()) as u32;
            let _ = publish(&mut way, earlier).await;
        }
        match publish(&mut way, keys.answered).await {
            Ok(_) => {
                if is_first {
                    keys.exact.insert(keys.answered);
                }
                (keys.answered, is_first) = (keys.answered + 1, true);
            }
            Err(status) if is_lost(&status) => {
                keys.lost.insert(keys.answered);
                (keys.answered, is_first) = (keys.answered + 1, true);
            }
            Err(status) if is_unanswered(&status) => is_first = false,
            Err(status) => shared.problem(format!("key {}: {status:?}", keys.answered)),
        }
        sleep(Duration::from_millis(20)).await;
    }
    keys
}

fn is_lost(status: &Status) -> bool {
    status.get_details_error_info().is_some_and(|info| info.reason == "OUTCOME_LOST")
}

async fn publish(way: &mut Way, key: u32) -> Result<v1::PublishResponse, Status> {
    let request = v1::PublishRequest {
        topic: "k/0".to_owned(),
        payload: key.to_string().into(),
        qos: v1::Qos::AtLeastOnce.into(),
        idempotency_key: format!("key {key}"),
        wait: v1::Wait::Durable.into(),
        ..Default::default()
    };
    way.ask(async |channel| PublisherClient::new(channel).publish(request).await).await
}

impl Group {
    pub(super) fn keyed_count(&self) -> usize {
        self.keyed.len()
    }

    /// One stream, until it ends or is silent.
    async fn consume(&mut self, way: &Way, shared: &Shared) -> Result<(), Status> {
        let (requests, outgoing) = mpsc::channel(1_024);
        let send = async |action| {
            let request = v1::ConsumeRequest { action: Some(action) };
            requests.send(request).await.map_err(|_| Status::cancelled("the stream has ended"))
        };
        let open = v1::Open {
            group: GROUP.to_owned(),
            member_id: MEMBER.to_owned(),
            heartbeat_interval: seconds(1),
            ..Default::default()
        };
        send(Action::Open(open)).await?;
        let mut client = ConsumerClient::new(way.channel()).max_decoding_message_size(64 << 20);
        let silent = |_| Status::deadline_exceeded("silent");
        let opened = timeout(SILENCE, client.consume(ReceiverStream::new(outgoing))).await;
        let mut stream: Streaming<v1::ConsumeResponse> = opened.map_err(silent)??.into_inner();
        let mut ids: HashMap<u64, String> = HashMap::new();
        while !shared.is_stopping() {
            let next = timeout(SILENCE, stream.message()).await.map_err(silent)??;
            let Some(response) = next else { return Err(Status::cancelled("the stream has ended")) };
            let mut acknowledged = Vec::new();
            for item in response.items.into_iter().filter_map(|item| item.item) {
                match item {
                    Item::Message(message) => {
                        self.note(&message, shared);
                        acknowledged.push(message.delivery_id);
                        ids.insert(message.delivery_id, message.message_id);
                    }
                    Item::AckResults(results) => {
                        let told = results.ok.iter().flat_map(|range| range.first..=range.last);
                        self.settled.extend(told.filter_map(|id| ids.remove(&id)));
                    }
                    Item::Gap(gap) => shared.problem(format!("the group has a gap: {gap:?}")),
                    _ => {}
                }
            }
            if !acknowledged.is_empty() {
                send(Action::Ack(v1::Ack { delivery_ids: acknowledged, ranges: Vec::new() })).await?;
            }
        }
        Ok(())
    }

    fn note(&mut self, message: &v1::ConsumedMessage, shared: &Shared) {
        let id = &message.message_id;
        self.delivered += 1;
        self.redelivered += usize::from(message.attempt > 1);
        if self.settled.contains(id) {
            shared.problem(format!("{id} comes again after its acknowledgement was answered"));
        }
        let Some(Content::Message(received)) = &message.content else { return };
        if received.topic == "k/0" {
            let key = std::str::from_utf8(&received.payload).ok().and_then(|text| text.parse().ok());
            self.keyed.entry(key.expect("a key")).or_default().insert(id.clone());
            return;
        }
        let Some((msg, topic)) = Msg::parse(&received.payload) else {
            return shared.problem(format!("nobody published {id} to {}", received.topic));
        };
        if topic != received.topic {
            shared.problem(format!("{msg:?} came with another topic, {}", received.topic));
        }
        let is_ordered = topic.rsplit('/').next().is_some_and(|last| ORDERED.contains(&last));
        if self.got.insert(msg) && is_ordered {
            let last = self.last.insert((msg.publisher, topic.to_owned()), msg.seq);
            if last.is_some_and(|last| last > msg.seq) {
                shared.problem(format!("{msg:?} of {topic} comes first after {last:?}"));
            }
        }
    }

    /// Compares with what was acknowledged to publishers.
    pub(super) fn judge(&self, published: &[Msg], shared: &Shared) {
        let wanted = published.iter().filter(|msg| msg.topic.starts_with("t/"));
        for msg in wanted.filter(|msg| !self.got.contains(&msg.id)) {
            shared.problem(format!(
                "{:?} of {} was acknowledged and did not come to the group",
                msg.id, msg.topic
            ));
        }
        for key in 0..self.keys.answered {
            let came = self.keyed.get(&key).map_or(0, HashSet::len);
            if came == 0 && !self.keys.lost.contains(&key) {
                shared.problem(format!("key {key} was answered and did not come to the group"));
            } else if came > 1 && self.keys.exact.contains(&key) {
                shared.problem(format!("key {key} was answered at once and was published {came} times"));
            }
        }
    }
}
