//! Members of consumer groups over a restart of the gateway: they keep their places, and what they work on is begun once.

use std::collections::BTreeMap;

use mqtt_server::proto::gateway::v1::{
    Ack, AckResult, AcknowledgeRequest, ConsumeRequest, ConsumeResponse, ConsumedMessage, CreateGroupRequest,
    DeliveryRange, FetchRequest, Filter, Group, Open, Opened, PublishRequest, consume_item::Item,
    consume_request::Action, consumed_message::Content, consumer_client::ConsumerClient,
    groups_client::GroupsClient, publisher_client::PublisherClient,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport::Channel};

use crate::support::Server;

const GROUP: &str = "work";

struct Member {
    say: mpsc::Sender<ConsumeRequest>,
    stream: Streaming<ConsumeResponse>,
    items: Vec<Item>,
}

impl Member {
    /// Joins, and says that it works on these.
    async fn join(channel: &Channel, name: &str, works_on: &[ConsumedMessage]) -> (Self, Opened) {
        let (say, said) = mpsc::channel(10);
        let open = Open {
            group: GROUP.to_owned(),
            member_id: name.to_owned(),
            lease: seconds(20),
            outstanding: works_on.iter().map(|message| message.message_id.clone()).collect(),
            ..Open::default()
        };
        say.send(ConsumeRequest { action: Some(Action::Open(open)) }).await.expect("says");
        let mut client = ConsumerClient::new(channel.clone());
        let stream = client.consume(ReceiverStream::new(said)).await.expect("a stream").into_inner();
        let mut member = Self { say, stream, items: Vec::new() };
        let Item::Opened(opened) = member.item().await else { panic!("not opened") };
        (member, opened)
    }

    async fn item(&mut self) -> Item {
        while self.items.is_empty() {
            let response = self.stream.message().await.expect("an item").expect("the stream goes on");
            self.items = response.items.into_iter().rev().filter_map(|item| item.item).collect();
        }
        self.items.pop().expect("not empty")
    }

    async fn message(&mut self) -> ConsumedMessage {
        loop {
            if let Item::Message(message) = self.item().await {
                return message;
            }
        }
    }

    /// Acknowledges the first deliveries, and waits until that is on disk. Nothing else comes meanwhile.
    async fn acknowledge(&mut self, last: u64) {
        let all = DeliveryRange { first: 1, last };
        let ack = Ack { ranges: vec![all], ..Ack::default() };
        self.say.send(ConsumeRequest { action: Some(Action::Ack(ack)) }).await.expect("says");
        let Item::AckResults(results) = self.item().await else { panic!("something was begun twice") };
        assert_eq!((results.ok, results.lost), (vec![all], vec![]));
    }
}

fn seconds(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

async fn make_group(channel: &Channel) {
    let filter = Filter { include_backends: true, ..Filter::default() };
    let group = Group { name: GROUP.to_owned(), filter: Some(filter), ..Group::default() };
    let create = CreateGroupRequest { group: Some(group), ..CreateGroupRequest::default() };
    GroupsClient::new(channel.clone()).create_group(create).await.expect("a group");
}

/// Publishes to a topic, whose messages are in order with each other.
async fn publish(channel: &Channel, topic: &str, payload: &str) {
    let request = PublishRequest {
        topic: topic.to_owned(),
        payload: payload.as_bytes().to_vec().into(),
        qos: 2,
        ..PublishRequest::default()
    };
    PublisherClient::new(channel.clone()).publish(request).await.expect("published");
}

fn topic(message: &ConsumedMessage) -> String {
    let Some(Content::Message(message)) = &message.content else { panic!("{message:?}") };
    message.topic.clone()
}

/// Ten messages with two members, of which none is settled.
async fn at_work(channel: &Channel) -> BTreeMap<&'static str, Vec<ConsumedMessage>> {
    make_group(channel).await;
    let (mut one, _) = Member::join(channel, "one", &[]).await;
    let (mut two, _) = Member::join(channel, "two", &[]).await;
    for n in 0..10 {
        publish(channel, &format!("work/{n}"), "first").await;
    }
    let mut has = BTreeMap::from([("one", Vec::new()), ("two", Vec::new())]);
    while has.values().map(Vec::len).sum::<usize>() < 10 {
        tokio::select! {
            message = one.message() => has.entry("one").or_default().push(message),
            message = two.message() => has.entry("two").or_default().push(message),
        }
    }
    assert!(has.values().all(|messages| !messages.is_empty()), "each has some");
    has
}

/// Both come back, the first before the other.
async fn go_on(channel: &Channel, has: &BTreeMap<&'static str, Vec<ConsumedMessage>>) {
    let mut members = Vec::new();
    for (name, messages) in has {
        let (mut member, opened) = Member::join(channel, name, messages).await;
        assert_eq!((opened.resumed, opened.outstanding as usize), (true, messages.len()), "{name}");
        assert!(opened.void.is_empty(), "{opened:?}");
        // Something new in order with what it works on: whatever it would get again comes before that.
        publish(channel, &topic(&messages[0]), "next").await;
        let next = member.message().await;
        assert_eq!((topic(&next), next.attempt), (topic(&messages[0]), 1));
        assert_eq!(next.delivery_id as usize, messages.len() + 1, "it is the first that comes");
        members.push((member, next.delivery_id));
    }
    for (member, last) in &mut members {
        member.acknowledge(*last).await;
    }
}

/// The failure: whoever was first back got all, and began what the other worked on: 6 of 10 messages.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_begun_twice_over_a_restart() {
    for restart in [Server::stop_and_restart, Server::kill_and_restart] {
        let server = Server::start();
        let has = at_work(&crate::non_broker::channel(&server).await).await;
        let server = restart(server, &[], "");
        go_on(&crate::non_broker::channel(&server).await, &has).await;
    }
}

/// The failure: acknowledgements of what was fetched before a crash are refused, and the messages come again.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_fetched_before_a_crash_is_acknowledged_after_it() {
    let server = Server::start();
    let channel = crate::non_broker::channel(&server).await;
    make_group(&channel).await;
    publish(&channel, "work/1", "first").await;
    let fetch = FetchRequest {
        group: GROUP.to_owned(),
        member_id: "one".to_owned(),
        wait: seconds(30),
        ..FetchRequest::default()
    };
    let fetched =
        ConsumerClient::new(channel.clone()).fetch(fetch.clone()).await.expect("a message").into_inner();
    assert_eq!(fetched.messages.len(), 1);
    // The member is on disk with the acknowledgement of another message, or a moment after it came.
    publish(&channel, "work/2", "second").await;
    let second =
        ConsumerClient::new(channel.clone()).fetch(fetch.clone()).await.expect("a message").into_inner();
    let acknowledge = |messages: &[ConsumedMessage]| AcknowledgeRequest {
        group: GROUP.to_owned(),
        ack_ids: messages.iter().map(|message| message.ack_id.clone()).collect(),
    };
    let settled =
        ConsumerClient::new(channel).acknowledge(acknowledge(&second.messages)).await.expect("an answer");
    assert_eq!(settled.into_inner().results, [AckResult::Ok as i32]);
    let server = server.kill_and_restart(&[], "");
    let mut consumer = ConsumerClient::new(crate::non_broker::channel(&server).await);
    let settled = consumer.acknowledge(acknowledge(&fetched.messages)).await.expect("an answer");
    assert_eq!(settled.into_inner().results, [AckResult::Ok as i32]);
    let nothing = consumer.fetch(FetchRequest { wait: None, ..fetch }).await.expect("an answer").into_inner();
    assert!(nothing.messages.is_empty(), "{nothing:?}");
}
