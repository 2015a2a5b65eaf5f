//! Groups and Consumer: what members get, keep and give back, across streams and restarts. Bounds are in
//! groups_bounds.rs, groups that are moved and changed in groups_changes.rs, what members say in groups_deliveries.rs.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::Path,
    time::Duration,
};

use mqtt_server::proto::gateway::v1::{
    self, consume_item::Item, consume_request::Action, consumed_message::Content,
    consumer_client::ConsumerClient, groups_client::GroupsClient,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming, transport::Channel};

use crate::harness::*;

/// A gateway with this data directory.
async fn gateway(directory: &Path) -> Setup {
    Setup::with(|config| config.data_dir = directory.join("data")).await
}

/// Stops a gateway, and waits until another may have its data directory.
async fn stop(setup: Setup, directory: &Path) {
    setup.gateway.shutdown().await;
    let released = async {
        // Tasks that serve streams still open end a moment later.
        while store::DataDir::open(&directory.join("data")).is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("the release of the data directory", released).await;
}

impl Setup {
    pub(crate) fn groups(&self) -> GroupsClient<Channel> {
        GroupsClient::new(self.channel.clone())
    }

    pub(crate) fn consumer(&self) -> ConsumerClient<Channel> {
        ConsumerClient::new(self.channel.clone())
    }

    pub(crate) async fn create(&self, group: v1::Group) -> v1::Group {
        let request = v1::CreateGroupRequest { group: Some(group), ..Default::default() };
        let created = soon("a group", self.groups().create_group(request)).await.unwrap();
        created.into_inner().group.unwrap()
    }

    pub(crate) async fn join(&self, open: v1::Open) -> Member {
        let (member, opened) = self.joined(open).await;
        assert_eq!((opened.partitions, opened.outstanding), (256, 0));
        member
    }

    pub(crate) async fn joined(&self, open: v1::Open) -> (Member, v1::Opened) {
        let (sender, requests) = mpsc::channel(100);
        sender.send(request(Action::Open(open))).await.unwrap();
        let stream = soon("a stream", self.consumer().consume(ReceiverStream::new(requests))).await;
        let mut member = Member {
            sender,
            stream: stream.unwrap().into_inner(),
            items: Vec::new(),
            early: VecDeque::new(),
        };
        let Item::Opened(opened) = member.item().await else { panic!("not opened") };
        (member, opened)
    }

    pub(crate) async fn group_status(&self, name: &str) -> v1::GroupStatus {
        let request = v1::GetGroupRequest { name: name.into() };
        self.groups().get_group(request).await.unwrap().into_inner().group.unwrap().status.unwrap()
    }
}

fn request(action: Action) -> v1::ConsumeRequest {
    v1::ConsumeRequest { action: Some(action) }
}

pub(crate) fn group(name: &str) -> v1::Group {
    let filter = v1::Filter { topic_filters: vec!["up/#".into()], ..Default::default() };
    v1::Group { name: name.into(), filter: Some(filter), ..Default::default() }
}

pub(crate) fn open(name: &str) -> v1::Open {
    v1::Open { group: name.into(), ..Default::default() }
}

pub(crate) struct Member {
    sender: mpsc::Sender<v1::ConsumeRequest>,
    stream: Streaming<v1::ConsumeResponse>,
    items: Vec<Item>,
    /// Messages that came while something else was waited for.
    early: VecDeque<v1::ConsumedMessage>,
}

impl Member {
    pub(crate) async fn item(&mut self) -> Item {
        while self.items.is_empty() {
            let response = soon("an item", self.stream.message()).await.unwrap().expect("the stream goes on");
            self.items = response.items.into_iter().rev().filter_map(|item| item.item).collect();
        }
        self.items.pop().unwrap()
    }

    /// The next message, whatever else comes before.
    pub(crate) async fn message(&mut self) -> v1::ConsumedMessage {
        if let Some(message) = self.early.pop_front() {
            return message;
        }
        loop {
            if let Item::Message(message) = self.item().await {
                return message;
            }
        }
    }

    pub(crate) async fn payload(&mut self) -> String {
        payload(&self.message().await)
    }

    pub(crate) async fn say(&self, action: Action) {
        self.sender.send(request(action)).await.unwrap();
    }

    /// Waits for the end of the stream, with OK.
    pub(crate) async fn ends(&mut self) {
        while let Some(response) = soon("the end", self.stream.message()).await.unwrap() {
            let message = response.items.iter().find(|item| matches!(item.item, Some(Item::Message(_))));
            assert!(message.is_none(), "{message:?}");
        }
    }

    /// Acknowledges these, and waits until that is on disk.
    pub(crate) async fn acknowledge(&mut self, ids: &[u64]) {
        self.say(Action::Ack(v1::Ack { delivery_ids: ids.to_vec(), ranges: Vec::new() })).await;
        let mut left: BTreeSet<u64> = ids.iter().copied().collect();
        while !left.is_empty() {
            match self.item().await {
                Item::AckResults(results) => {
                    assert!(results.lost.is_empty(), "{results:?}");
                    for range in results.ok {
                        left.retain(|id| !(range.first..=range.last).contains(id));
                    }
                }
                Item::Message(message) => self.early.push_back(message),
                Item::Revoked(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

pub(crate) fn payload(message: &v1::ConsumedMessage) -> String {
    let Some(Content::Message(received)) = &message.content else { panic!("{message:?}") };
    String::from_utf8(received.payload.to_vec()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_does_not_come_again_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let setup = gateway(directory.path()).await;
    setup.create(group("g")).await;
    // Without a session that outlives it: that would outlive the gateway in this process, too.
    let mut device = setup.raw("d", |connect| connect.session_expiry = None);
    for text in ["first", "second"] {
        device.publish_acked("up/1", text.as_bytes(), false);
    }
    let mut member = setup.join(open("g")).await;
    let first = member.message().await;
    assert_eq!((payload(&first), first.attempt, first.delivery_id), ("first".into(), 1, 1));
    assert_eq!(member.payload().await, "second");
    member.acknowledge(&[1]).await;
    stop(setup, directory.path()).await;

    let setup = gateway(directory.path()).await;
    let mut member = setup.join(open("g")).await;
    let again = member.message().await;
    assert_eq!(payload(&again), "second", "and not the first");
    assert_ne!(again.message_id, first.message_id);
    member.acknowledge(&[again.delivery_id]).await;
    assert_eq!(setup.group_status("g").await.lag_messages, 0);
    setup.gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_one_of_two_members_goes_the_other_gets_all() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    let mut one = setup.join(open("g")).await;
    let mut two = setup.join(open("g")).await;
    for device in 0..20 {
        let device = setup.device(&format!("device-{device}")).await;
        for n in 0..5 {
            device.send("up/x", &format!("{n}")).await;
        }
    }
    let mut seen = BTreeSet::new();
    let first = one.message().await;
    drop(one);
    while seen.len() < 100 {
        let message = two.message().await;
        seen.insert(message.message_id.clone());
        two.acknowledge(&[message.delivery_id]).await;
    }
    assert!(seen.contains(&first.message_id), "what the other had and did not acknowledge");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_given_back_comes_again_before_what_came_after_it() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    let device = setup.device("d").await;
    for text in ["a", "b", "c"] {
        device.send("up/x", text).await;
    }
    let mut member = setup.join(open("g")).await;
    for expected in ["a", "b", "c"] {
        assert_eq!(member.payload().await, expected);
    }
    let which = Some(v1::Ack { delivery_ids: vec![1], ranges: Vec::new() });
    let delay = Some(prost_types::Duration::default());
    member.say(Action::Nack(v1::Nack { which, delay, reason: "busy".into(), dead_letter: false })).await;
    let Item::Revoked(revoked) = member.item().await else { panic!("nothing is void") };
    assert_eq!(revoked.void, [v1::DeliveryRange { first: 2, last: 3 }]);
    let mut again = Vec::new();
    while again.len() < 3 {
        let message = member.message().await;
        again.push((payload(&message), message.attempt));
        member.acknowledge(&[message.delivery_id]).await;
    }
    assert_eq!(again.iter().map(|(text, _)| text.as_str()).collect::<String>(), "abc");
    assert_eq!(again[0].1, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn fetch_takes_and_acknowledge_settles_without_a_stream() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    let device = setup.device("d").await;
    device.send("up/x", "one").await;
    let fetch = v1::FetchRequest {
        group: "g".into(),
        member_id: "m".into(),
        wait: Some(prost_types::Duration { seconds: 30, nanos: 0 }),
        ..Default::default()
    };
    let fetched = soon("a fetch", setup.consumer().fetch(fetch.clone())).await.unwrap().into_inner();
    let [message] = &fetched.messages[..] else { panic!("{fetched:?}") };
    assert_eq!((payload(message), message.delivery_id), ("one".into(), 0));
    let settle = |ids: Vec<String>| v1::AcknowledgeRequest { group: "g".into(), ack_ids: ids };
    let ids = vec![message.ack_id.clone(), "00".into(), message.ack_id.clone()];
    let results = soon("an answer", setup.consumer().acknowledge(settle(ids))).await.unwrap().into_inner();
    let results: Vec<v1::AckResult> = results.results().collect();
    assert_eq!(results, [v1::AckResult::Ok, v1::AckResult::Invalid, v1::AckResult::Ok]);
    let nothing = setup.consumer().fetch(v1::FetchRequest { wait: None, ..fetch }).await.unwrap();
    assert!(nothing.into_inner().messages.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_stream_of_a_member_fences_the_first_and_resumes() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    setup.device("d").await.send("up/x", "one").await;
    let named = v1::Open { member_id: "m".into(), ..open("g") };
    let mut first = setup.join(named.clone()).await;
    assert_eq!(first.payload().await, "one");
    let mut second = setup.join(named).await;
    let fenced = soon("the end", async {
        loop {
            if let Err(status) = first.stream.message().await {
                return status;
            }
        }
    });
    assert_eq!(refusal(&fenced.await), (Code::Aborted, "FENCED".into()));
    let again = second.message().await;
    assert_eq!((payload(&again), again.attempt), ("one".into(), 1), "a reconnect is no attempt");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_group_ends_its_streams_and_its_name_is_free() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    let mut member = setup.join(open("g")).await;
    let delete = v1::DeleteGroupRequest { name: "g".into(), allow_missing: false };
    setup.groups().delete_group(delete.clone()).await.unwrap();
    let ended = soon("the end", member.stream.message()).await.unwrap_err();
    assert_eq!(refusal(&ended), (Code::FailedPrecondition, "GROUP_DELETED".into()));
    let again = setup.groups().delete_group(delete.clone()).await.unwrap_err();
    assert_eq!(refusal(&again), (Code::NotFound, "GROUP_NOT_FOUND".into()));
    setup.groups().delete_group(v1::DeleteGroupRequest { allow_missing: true, ..delete }).await.unwrap();
    setup.create(group("g")).await;
    let mut member = setup.join(open("g")).await;
    setup.device("d").await.send("up/x", "new").await;
    assert_eq!(member.payload().await, "new");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_moved_back_and_what_was_outstanding_is_fenced() {
    let setup = Setup::new().await;
    setup
        .create(v1::Group {
            replay_age: Some(prost_types::Duration { seconds: 3600, nanos: 0 }),
            ..group("g")
        })
        .await;
    let device = setup.device("d").await;
    for text in ["a", "b"] {
        device.send("up/x", text).await;
    }
    let mut member = setup.join(open("g")).await;
    assert_eq!((member.payload().await, member.payload().await), ("a".into(), "b".into()));
    member.acknowledge(&[1]).await;
    let earliest = v1::Position { at: Some(v1::position::At::Earliest(true)) };
    let seek = |to| v1::SeekGroupRequest { name: "g".into(), to: Some(to) };
    let previous = setup.groups().seek_group(seek(earliest)).await.unwrap().into_inner().previous_token;
    assert_eq!((member.payload().await, member.payload().await), ("a".into(), "b".into()));
    let back = v1::Position { at: Some(v1::position::At::Token(previous)) };
    setup.groups().seek_group(seek(back)).await.unwrap();
    assert_eq!(member.payload().await, "b");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_a_device_come_in_order_with_its_messages() {
    let setup = Setup::new().await;
    let mut wanted = group("g");
    let kinds = vec![v1::EventKind::Connected.into(), v1::EventKind::Disconnected.into()];
    wanted.filter.as_mut().unwrap().event_kinds = kinds;
    setup.create(wanted).await;
    let mut events = setup.events("d").await;
    let mut member = setup.join(open("g")).await;
    let device = setup.device("d").await;
    let Some(Content::Event(event)) = member.message().await.content else { panic!("no event") };
    assert_eq!(event.device_id, "d");
    assert!(matches!(event.detail, Some(v1::event::Detail::Connected(_))));
    device.send("up/x", "hello").await;
    assert_eq!(member.payload().await, "hello");
    device.vanish(&mut events).await;
    let Some(Content::Event(event)) = member.message().await.content else { panic!("no event") };
    assert!(matches!(event.detail, Some(v1::event::Detail::Disconnected(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_disk_there_are_no_groups_and_it_is_said_why() {
    for (key, store, groups) in [("store.enabled", false, true), ("groups.enabled", true, false)] {
        let change = |config: &mut config::Config| {
            (config.store.enabled, config.groups.enabled) = (store, groups);
        };
        let setup = Setup::with(change).await;
        let refused = setup.groups().list_groups(v1::ListGroupsRequest::default()).await.unwrap_err();
        assert_eq!(refusal(&refused), (Code::FailedPrecondition, "GROUPS_DISABLED".into()));
        assert!(refused.message().contains(key), "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_device_holds_up_nobody_and_its_letters_come_back() {
    let setup = Setup::new().await;
    setup.create(v1::Group { max_attempts: 3, ..group("g") }).await;
    // One in the partition of the poisoned device, and others elsewhere.
    let partition = |device: &str| gateway_core::Partition::of(Some(device), "up/x");
    let beside = (0..).map(|n| format!("beside-{n}")).find(|name| partition(name) == partition("poisoned"));
    let names = [beside.unwrap(), "one".into(), "two".into()];
    let poisoned = setup.device("poisoned").await;
    for text in ["bad 1", "bad 2"] {
        poisoned.send("up/x", text).await;
    }
    for name in &names {
        let device = setup.device(name).await;
        for n in 0..10 {
            device.send("up/x", &format!("{name} {n}")).await;
        }
    }
    let mut member = setup.join(open("g")).await;
    let (mut attempts, mut others) = (Vec::new(), BTreeMap::<String, Vec<String>>::new());
    while attempts.iter().filter(|(_, attempt)| *attempt == 3).count() < 2
        || others.values().map(Vec::len).sum::<usize>() < 30
    {
        let message = member.message().await;
        let text = payload(&message);
        if text.starts_with("bad") {
            attempts.push((text, message.attempt));
            let which = Some(v1::Ack { delivery_ids: vec![message.delivery_id], ranges: Vec::new() });
            let delay = Some(prost_types::Duration::default());
            let nack = v1::Nack { which, delay, reason: "poison".into(), dead_letter: false };
            member.say(Action::Nack(nack)).await;
        } else {
            member.acknowledge(&[message.delivery_id]).await;
            let (name, _) = text.rsplit_once(' ').unwrap();
            others.entry(name.to_owned()).or_default().push(text);
        }
    }
    for name in &names {
        let all: Vec<String> = (0..10).map(|n| format!("{name} {n}")).collect();
        assert_eq!(others[name], all, "each once and in order");
    }
    attempts.retain(|(_, attempt)| *attempt == 3);
    assert_eq!(attempts, [("bad 1".to_owned(), 3), ("bad 2".to_owned(), 3)], "one after the other");

    let list = v1::ListDeadLettersRequest { name: "g".into(), ..Default::default() };
    let letters = soon("both letters", async {
        loop {
            let letters = setup.groups().list_dead_letters(list.clone()).await.unwrap().into_inner();
            if letters.dead_letters.len() == 2 {
                assert_eq!(letters.next_page_token, "", "there is no more");
                return letters.dead_letters;
            }
        }
    });
    let letters = letters.await;
    let content = |letter: &v1::DeadLetter| match &letter.content {
        Some(v1::dead_letter::Content::Message(message)) => {
            String::from_utf8_lossy(&message.payload).into_owned()
        }
        other => panic!("{other:?}"),
    };
    let told: Vec<_> =
        letters.iter().map(|each| (content(each), each.attempts, each.reason.as_str())).collect();
    assert_eq!(told, [("bad 1".into(), 3, "poison"), ("bad 2".into(), 3, "poison")]);

    let first = v1::ListDeadLettersRequest { page_size: 1, ..list };
    let first = setup.groups().list_dead_letters(first).await.unwrap().into_inner();
    assert!(first.dead_letters.len() == 1 && !first.next_page_token.is_empty(), "there is a second one");

    let ids: Vec<String> = letters.iter().map(|letter| letter.id.clone()).collect();
    let requeue = v1::RequeueDeadLettersRequest { name: "g".into(), ids };
    let count = setup.groups().requeue_dead_letters(requeue.clone()).await.unwrap().into_inner().count;
    assert_eq!(count, 2);
    for text in ["bad 1", "bad 2"] {
        let message = member.message().await;
        assert_eq!((payload(&message), message.attempt), (text.into(), 1), "as a new one, and to this group");
        member.acknowledge(&[message.delivery_id]).await;
    }
    let count = setup.groups().requeue_dead_letters(requeue).await.unwrap().into_inner().count;
    assert_eq!(count, 0, "not there any more");
    let status = setup.group_status("g").await;
    assert_eq!((status.lag_messages, status.dead_letters), (0, 0));
}
