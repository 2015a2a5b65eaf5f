//! Claims of a member in `Open` about its work: the ones that are believed, and the answers to it.

use mqtt_server::proto::gateway::v1::{self, consume_item::Item, consume_request::Action};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use crate::{
    groups::{group, open, payload},
    harness::*,
};

fn named(member_id: &str, outstanding: &[&v1::ConsumedMessage]) -> v1::Open {
    let outstanding = outstanding.iter().map(|message| message.message_id.clone()).collect();
    v1::Open { member_id: member_id.into(), outstanding, ..open("g") }
}

fn range(first: u64, last: u64) -> v1::DeliveryRange {
    v1::DeliveryRange { first, last }
}

/// The failure: what a member works on comes again with each connection that is cut, and is a dead letter after a few.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_worked_on_over_cut_connections_does_not_come_again() {
    let setup = Setup::new().await;
    setup.create(v1::Group { max_attempts: 3, ..group("g") }).await;
    let device = setup.device("d").await;
    for text in ["work", "waits"] {
        device.send("up/x", text).await;
    }
    let mut member = setup.join(named("m", &[])).await;
    let (work, waits) = (member.message().await, member.message().await);
    assert_eq!((payload(&work), payload(&waits)), ("work".into(), "waits".into()));
    for _ in 0..4 {
        // The one before is fenced, as after a connection that was cut without a word.
        let (next, opened) = setup.joined(named("m", &[&work])).await;
        member = next;
        assert_eq!((opened.resumed, opened.outstanding, opened.void), (true, 1, vec![]));
        let again = member.message().await;
        assert_eq!((payload(&again), again.delivery_id, again.attempt), ("waits".into(), 2, 1));
    }
    member.acknowledge(&[1, 2]).await;
    let status = setup.group_status("g").await;
    assert_eq!((status.lag_messages, status.dead_letters), (0, 0));
    // Settled deliveries may be claimed again, returned ones are not with the member.
    device.send("up/x", "next").await;
    let next = member.message().await;
    let which = Some(v1::Ack { delivery_ids: vec![next.delivery_id], ranges: Vec::new() });
    let delay = Some(prost_types::Duration { seconds: 3600, nanos: 0 });
    member.say(Action::Nack(v1::Nack { which, delay, ..v1::Nack::default() })).await;
    member.say(Action::Ack(v1::Ack { delivery_ids: vec![99], ranges: Vec::new() })).await;
    assert!(matches!(member.item().await, Item::AckResults(_)), "both were heard");
    let (mut member, opened) = setup.joined(named("m", &[&work, &next, &waits])).await;
    assert_eq!(opened.void, [range(2, 2)]);
    member.acknowledge(&[1, 3]).await;
}

/// The failure: a member has what it never was given.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_a_members_is_told_to_it() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    setup.create(group("other")).await;
    setup.device("d").await.send("up/x", "one").await;
    let mut member = setup.join(named("m", &[])).await;
    let one = member.message().await;
    let (log, place) = one.message_id.split_once('-').unwrap();
    let id =
        |log: &str, place: &str| v1::ConsumedMessage { message_id: format!("{log}-{place}"), ..one.clone() };
    let of_another_log = id(&"f".repeat(16), place);
    let nowhere = id(log, &format!("00-{}", "e".repeat(16)));
    let (_stream, opened) = setup.joined(named("m", &[&of_another_log, &one, &one, &nowhere])).await;
    assert_eq!((opened.outstanding, opened.void), (4, vec![range(1, 1), range(3, 4)]));
    let (mut stranger, opened) = setup.joined(named("n", &[&one])).await;
    assert_eq!((opened.resumed, opened.void), (false, vec![range(1, 1)]));
    stranger.say(Action::Ack(v1::Ack { delivery_ids: vec![1], ranges: Vec::new() })).await;
    let Item::AckResults(results) = stranger.item().await else { panic!("no answer") };
    assert_eq!((results.ok, results.lost), (vec![], vec![range(1, 1)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_named_has_a_bound_and_a_form() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    let id = "00000000000000ab-3f-0000000000001234".to_owned();
    for outstanding in [vec![id.clone(); 10_001], vec![id, "x".into()]] {
        let (sender, requests) = tokio::sync::mpsc::channel(1);
        let open = v1::Open { outstanding, ..open("g") };
        sender.send(v1::ConsumeRequest { action: Some(Action::Open(open)) }).await.unwrap();
        let mut stream = setup.consumer().consume(ReceiverStream::new(requests)).await.unwrap().into_inner();
        let refused = soon("the end", stream.message()).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    }
}
