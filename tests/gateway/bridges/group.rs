//! The group that is the queue of a bridge: nobody else takes messages from it, or changes it, while the bridge is configured.

use mqtt_server::proto::gateway::v1::{
    AcknowledgeRequest, ConsumeRequest, CreateGroupRequest, DeleteGroupRequest, FetchRequest,
    GetGroupRequest, Group, ModifyLeaseRequest, Open, UpdateGroupRequest, consume_request::Action,
    consumer_client::ConsumerClient, groups_client::GroupsClient,
};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::support::Server;

const GROUP: &str = "bridge.away";
const BRIDGE: &str =
    "[bridges.away]\ntopics = [\"d/#\"]\n[bridges.away.webhook]\nurl = \"http://127.0.0.1:1/\"\n";

fn refused<T>(answer: Result<T, Status>, what: &str) {
    let Err(status) = answer else { panic!("{what} is answered") };
    let reason = status.get_details_error_info().map(|info| info.reason);
    assert_eq!(
        (status.code(), reason.as_deref()),
        (Code::FailedPrecondition, Some("GROUP_OF_BRIDGE")),
        "{what}"
    );
}

fn fetch() -> FetchRequest {
    FetchRequest { group: GROUP.to_owned(), member_id: "m".to_owned(), ..FetchRequest::default() }
}

fn update(fields: &[&str], group: Group) -> UpdateGroupRequest {
    let paths = fields.iter().map(|field| (*field).to_owned()).collect();
    let group = Group { name: GROUP.to_owned(), ..group };
    UpdateGroupRequest { group: Some(group), update_mask: Some(prost_types::FieldMask { paths }) }
}

/// The failure: a backend acknowledges what the bridge has not delivered, or deletes or narrows the group under it.
#[tokio::test(flavor = "multi_thread")]
async fn the_group_of_a_bridge_is_its_own_while_the_bridge_is_configured() {
    let server = Server::start_with(&[], BRIDGE);
    let channel = crate::non_broker::channel(&server).await;
    let (mut groups, mut consumer) = (GroupsClient::new(channel.clone()), ConsumerClient::new(channel));
    let named = Group { name: GROUP.to_owned(), ..Group::default() };
    for validate_only in [false, true] {
        let create = CreateGroupRequest { group: Some(named.clone()), validate_only, ..Default::default() };
        refused(groups.create_group(create).await, "CreateGroup");
    }
    let delete = |allow_missing| DeleteGroupRequest { name: GROUP.to_owned(), allow_missing };
    refused(groups.delete_group(delete(false)).await, "DeleteGroup");
    refused(groups.delete_group(delete(true)).await, "DeleteGroup");
    for fields in [&["labels"][..], &["paused", "labels"], &["filter"], &["max_attempts"]] {
        refused(
            groups.update_group(update(fields, named.clone())).await,
            &format!("UpdateGroup of {fields:?}"),
        );
    }
    refused(consumer.fetch(fetch()).await, "Fetch");
    let acknowledge = AcknowledgeRequest { group: GROUP.to_owned(), ack_ids: vec!["x".to_owned()] };
    refused(consumer.acknowledge(acknowledge).await, "Acknowledge");
    let deadline = Some(prost_types::Duration { seconds: 60, nanos: 0 });
    let lease = ModifyLeaseRequest {
        group: GROUP.to_owned(),
        ack_ids: vec!["x".to_owned()],
        deadline,
        ..Default::default()
    };
    refused(consumer.modify_lease(lease).await, "ModifyLease");
    let open =
        ConsumeRequest { action: Some(Action::Open(Open { group: GROUP.to_owned(), ..Open::default() })) };
    let mut stream = consumer.consume(tokio_stream::once(open)).await.expect("a stream").into_inner();
    refused(stream.message().await, "Consume");
    // An operator can look at the group and pause it, and other groups are like before.
    let paused = groups.update_group(update(&["paused"], Group { paused: true, ..Group::default() })).await;
    assert!(paused.expect("paused").into_inner().group.is_some_and(|group| group.paused));
    groups.get_group(GetGroupRequest { name: GROUP.to_owned() }).await.expect("the group");
    let other = Group { name: "bridge.none".to_owned(), ..Group::default() };
    let create = CreateGroupRequest { group: Some(other), ..CreateGroupRequest::default() };
    groups.create_group(create).await.expect("a group that is no bridge's");
    // Without the bridge it is a group like others.
    let server = server.stop_and_restart(&[], "");
    let channel = crate::non_broker::channel(&server).await;
    let (mut groups, mut consumer) = (GroupsClient::new(channel.clone()), ConsumerClient::new(channel));
    consumer.fetch(fetch()).await.expect("what is left");
    groups.update_group(update(&["labels"], named)).await.expect("a change");
    groups.delete_group(delete(false)).await.expect("deleted");
}
