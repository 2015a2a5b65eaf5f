//! Consumer groups and callers of limited scope.

mod narrowed;

use access::backends::Role;
use mqtt_server::proto::gateway::v1::{
    self, consume_item::Item, consume_request::Action, consumer_client::ConsumerClient,
    groups_client::GroupsClient,
};
use tonic::{Code, Status};

use super::{Authorized, Guarded};
use crate::harness::*;

const TOPICS: &[&str] = &["t/a/#"];
const DEVICES: &[&str] = &["a-*"];

/// Everybody's, and a tenant's whose devices are `a-...` and whose topics are below `t/a`.
async fn guarded() -> Guarded {
    let wanted = [
        ("root", Role::Admin, None, None),
        ("admin-of-a", Role::Admin, Some(TOPICS), Some(DEVICES)),
        ("consumer-of-a", Role::Consumer, Some(TOPICS), Some(DEVICES)),
    ];
    Guarded::with(&wanted, |_| {}).await
}

impl Guarded {
    fn groups(&self, token: &str) -> GroupsClient<Authorized> {
        GroupsClient::new(self.channel(token))
    }

    fn consumer(&self, token: &str) -> ConsumerClient<Authorized> {
        ConsumerClient::new(self.channel(token))
    }

    /// The names of the groups that a caller sees.
    async fn listed(&self, token: &str) -> Vec<String> {
        let page = self.groups(token).list_groups(v1::ListGroupsRequest::default()).await.unwrap();
        page.into_inner().groups.into_iter().map(|group| group.name).collect()
    }
}

fn group(name: &str, topics: &[&str], prefixes: &[&str]) -> v1::Group {
    let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
    let filter = v1::Filter {
        topic_filters: owned(topics),
        device_id_prefixes: owned(prefixes),
        ..v1::Filter::default()
    };
    v1::Group { name: name.to_owned(), filter: Some(filter), ..v1::Group::default() }
}

fn create(group: v1::Group) -> v1::CreateGroupRequest {
    v1::CreateGroupRequest { group: Some(group), ..Default::default() }
}

/// Refused for this field.
fn out_of_scope<T>(answer: Result<tonic::Response<T>, Status>, field: &str) {
    let Err(status) = answer else { panic!("not refused for {field}") };
    assert_eq!(refusal(&status), (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned()), "{field}");
    assert!(status.message().starts_with(field), "{status}");
}

fn fetch(name: &str) -> v1::FetchRequest {
    v1::FetchRequest {
        group: name.to_owned(),
        member_id: "m".to_owned(),
        wait: Some(prost_types::Duration { seconds: 30, nanos: 0 }),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_of_limited_scope_makes_only_groups_within_it() {
    let guarded = guarded().await;
    let mut admin = guarded.groups("admin-of-a");
    for wider in [
        group("g", &[], &["a-"]),
        group("g", &["t/#"], &["a-"]),
        group("g", &["t/a/#", "t/b"], &["a-"]),
        group("g", &["t/a/#"], &[]),
        group("g", &["t/a/#"], &["b-"]),
    ] {
        out_of_scope(admin.create_group(create(wider)).await, "group.filter");
    }
    admin.create_group(create(group("g", &["t/a/#"], &["a-"]))).await.unwrap();
    let update = v1::UpdateGroupRequest {
        group: Some(group("g", &["#"], &["a-"])),
        update_mask: Some(prost_types::FieldMask { paths: vec!["filter".to_owned()] }),
    };
    out_of_scope(admin.update_group(update.clone()).await, "group.filter");
    // Once somebody else has made it wider it is no longer theirs.
    guarded.groups("root").update_group(update).await.unwrap();
    let get = v1::GetGroupRequest { name: "g".to_owned() };
    out_of_scope(admin.get_group(get).await, "name");
    out_of_scope(guarded.consumer("consumer-of-a").fetch(fetch("g")).await, "group");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_of_limited_scope_reads_and_moves_its_groups_alone() {
    let guarded = guarded().await;
    let mut root = guarded.groups("root");
    root.create_group(create(group("all", &[], &[]))).await.unwrap();
    root.create_group(create(group("own", &["t/a/#"], &["a-"]))).await.unwrap();
    assert_eq!(guarded.listed("root").await, ["all", "own"]);
    assert_eq!(guarded.listed("consumer-of-a").await, ["own"]);

    for device in ["a-1", "b-1"] {
        guarded.setup.raw(device, |_| {}).publish_acked("t/a/x", device.as_bytes(), false);
    }
    let mut consumer = guarded.consumer("consumer-of-a");
    let fetched = soon("a fetch", consumer.fetch(fetch("own"))).await.unwrap().into_inner();
    assert_eq!(fetched.messages.len(), 1, "that of its device");
    let ack_ids = vec![fetched.messages[0].ack_id.clone()];
    let settle = |group: &str| v1::AcknowledgeRequest { group: group.to_owned(), ack_ids: ack_ids.clone() };
    let lease = v1::ModifyLeaseRequest {
        group: "all".to_owned(),
        ack_ids: ack_ids.clone(),
        deadline: Some(prost_types::Duration::default()),
        reason: String::new(),
    };
    // Existing and missing groups are refused alike.
    for name in ["all", "none"] {
        out_of_scope(consumer.fetch(fetch(name)).await, "group");
        out_of_scope(consumer.acknowledge(settle(name)).await, "group");
        let lease = v1::ModifyLeaseRequest { group: name.to_owned(), ..lease.clone() };
        out_of_scope(consumer.modify_lease(lease).await, "group");
        let open = v1::Open { group: name.to_owned(), ..Default::default() };
        let open = v1::ConsumeRequest { action: Some(Action::Open(open)) };
        let opening = consumer.consume(tokio_stream::iter([open])).await.unwrap();
        let status = soon("the end", opening.into_inner().message()).await.unwrap_err();
        assert_eq!(refusal(&status), (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned()));

        let mut admin = guarded.groups("admin-of-a");
        let name = name.to_owned();
        let delete = v1::DeleteGroupRequest { name: name.clone(), allow_missing: true };
        out_of_scope(admin.delete_group(delete).await, "name");
        let to = Some(v1::Position { at: Some(v1::position::At::Earliest(true)) });
        out_of_scope(admin.seek_group(v1::SeekGroupRequest { name: name.clone(), to }).await, "name");
        out_of_scope(admin.list_members(v1::ListMembersRequest { name: name.clone() }).await, "name");
        let pending = v1::ListPendingRequest { name: name.clone(), ..Default::default() };
        out_of_scope(admin.list_pending(pending).await, "name");
        let letters = v1::ListDeadLettersRequest { name: name.clone(), ..Default::default() };
        out_of_scope(admin.list_dead_letters(letters).await, "name");
        let requeue = v1::RequeueDeadLettersRequest { name: name.clone(), ids: Vec::new() };
        out_of_scope(admin.requeue_dead_letters(requeue).await, "name");
        let purge = v1::PurgeDeadLettersRequest { name, ids: Vec::new() };
        out_of_scope(admin.purge_dead_letters(purge).await, "name");
    }
    let settled = soon("an answer", consumer.acknowledge(settle("own"))).await.unwrap().into_inner();
    assert_eq!(settled.results().collect::<Vec<_>>(), [v1::AckResult::Ok]);

    // A stream of its own group gets what comes, and of its own devices alone.
    let (sender, requests) = tokio::sync::mpsc::channel(1);
    let open = v1::Open { group: "own".to_owned(), member_id: "m".to_owned(), ..Default::default() };
    sender.send(v1::ConsumeRequest { action: Some(Action::Open(open)) }).await.unwrap();
    let requests = tokio_stream::wrappers::ReceiverStream::new(requests);
    let mut stream = consumer.consume(requests).await.unwrap().into_inner();
    for device in ["b-1", "a-1"] {
        guarded.setup.raw(device, |_| {}).publish_acked("t/a/x", b"again", false);
    }
    let mut from = Vec::new();
    while from.is_empty() {
        let response = soon("a message", stream.message()).await.unwrap().unwrap();
        for item in response.items {
            if let Some(Item::Message(v1::ConsumedMessage {
                content: Some(v1::consumed_message::Content::Message(message)),
                ..
            })) = item.item
            {
                from.push(message.device_id);
            }
        }
    }
    assert_eq!(from, ["a-1"]);
}

/// A filter that was widened let in what the caller of a stream, opened before, must not have.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_when_its_group_is_widened_beyond_its_scope() {
    let guarded = guarded().await;
    guarded.groups("root").create_group(create(group("own", TOPICS, &["a-"]))).await.unwrap();
    let (sender, requests) = tokio::sync::mpsc::channel(1);
    let open = v1::Open { group: "own".to_owned(), ..Default::default() };
    sender.send(v1::ConsumeRequest { action: Some(Action::Open(open)) }).await.unwrap();
    let requests = tokio_stream::wrappers::ReceiverStream::new(requests);
    let mut consumer = guarded.consumer("consumer-of-a");
    let mut stream = consumer.consume(requests).await.unwrap().into_inner();
    let first = soon("the opening", stream.message()).await.unwrap().unwrap();
    assert!(matches!(first.items[0].item, Some(Item::Opened(_))));

    let mut fetcher = guarded.consumer("consumer-of-a");
    let waiting = v1::FetchRequest {
        group: "own".to_owned(),
        member_id: "fetcher".to_owned(),
        wait: Some(prost_types::Duration { seconds: 20, nanos: 0 }),
        ..Default::default()
    };
    let fetched = tokio::spawn(async move { fetcher.fetch(waiting).await });
    soon("both members", async {
        let list = async || {
            let request = v1::ListMembersRequest { name: "own".to_owned() };
            guarded.groups("root").list_members(request).await.unwrap().into_inner().members.len()
        };
        while list().await < 2 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    })
    .await;
    let update = v1::UpdateGroupRequest {
        group: Some(group("own", &["t/#"], &["a-", "b-"])),
        update_mask: Some(prost_types::FieldMask { paths: vec!["filter".to_owned()] }),
    };
    guarded.groups("root").update_group(update).await.unwrap();
    // Of these both members have some: their partitions are half of all.
    for n in 0..32 {
        guarded.setup.raw(&format!("b-{n}"), |_| {}).publish_acked("t/b/x", b"secret", false);
    }
    let ended = soon("the end", async {
        loop {
            match stream.message().await {
                Ok(Some(response)) => {
                    let told = response.items.iter().any(|item| matches!(item.item, Some(Item::Message(_))));
                    assert!(!told, "{response:?}");
                }
                Ok(None) => panic!("it ends without a reason"),
                Err(status) => break status,
            }
        }
    })
    .await;
    assert_eq!(refusal(&ended), (Code::PermissionDenied, "OUT_OF_SCOPE".to_owned()));
    out_of_scope(soon("the fetch", fetched).await.unwrap(), "group");
}
