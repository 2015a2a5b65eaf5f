//! Consumer groups and callers of limited scope.

mod earlier;

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
    for token in ["admin-of-a", "root"] {
        let status = guarded.groups(token).update_group(update.clone()).await.unwrap_err();
        let expected = (Code::FailedPrecondition, "FILTER_IMMUTABLE".to_owned());
        assert_eq!(refusal(&status), expected, "{token}");
    }
    // Another's is none of theirs, whatever they would make of it.
    guarded.groups("root").create_group(create(group("all", &[], &[]))).await.unwrap();
    let narrower = v1::UpdateGroupRequest { group: Some(group("all", &["t/a/#"], &["a-"])), ..update };
    out_of_scope(admin.update_group(narrower).await, "group.name");
    out_of_scope(admin.create_group(create(group("all", &[], &[]))).await, "group.filter");
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
