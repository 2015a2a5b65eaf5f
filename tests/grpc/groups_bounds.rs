//! Bounds of a group: retention, a group that refuses, credit, sizes; and their view for an operator.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use gateway_core::{Protocol, QoS, units::ByteSize};
use mqtt_server::proto::gateway::v1::{self, consume_item::Item, consume_request::Action};
use prost::Message as _;

use crate::{
    client::{Client, Got},
    groups::{group, open, payload},
    harness::*,
};

impl Setup {
    /// The rows of a page of metrics that name this group.
    fn metrics_of(&self, group: &str) -> Vec<String> {
        let mut stream = TcpStream::connect(self.gateway.address("http").unwrap()).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        let label = format!("group=\"{group}\"");
        page.lines().filter(|line| line.contains(&label)).map(str::to_owned).collect()
    }
}

/// Publishes at QoS 1 until the answer is this one; how many were taken meanwhile.
#[expect(clippy::disallowed_methods, reason = "waits for another thread with a bound")]
fn until_answered(device: &mut Client, topic: &str, refused: bool) -> usize {
    let mut taken = 0;
    let deadline = std::time::Instant::now() + LIMIT;
    loop {
        assert!(std::time::Instant::now() < deadline, "never answered so");
        device.publish(topic, b"x", QoS::AtLeastOnce, false);
        match device.next() {
            Got::PubAck(0x97) if refused => return taken,
            Got::PubAck(code) if code < 0x80 => {
                taken += 1;
                if !refused {
                    return taken;
                }
            }
            Got::PubAck(0x97) => {}
            other => panic!("{other:?}"),
        }
        // Groups look at what they keep once a second.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Before, QoS 0 took the room of those who wait for the disk, and half of a bystander's messages were refused.
#[tokio::test(flavor = "multi_thread")]
async fn floods_of_qos_0_get_no_qos_1_of_a_bystander_refused() {
    let setup = Setup::with(|config| config.groups.max_waiting_bytes = ByteSize(64 << 10)).await;
    let everything = v1::Filter { topic_filters: vec!["#".to_owned()], ..v1::Filter::default() };
    setup.create(v1::Group { filter: Some(everything), ..group("all") }).await;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for flooder in ["f1", "f2", "f3", "f4"] {
            let mut flooder = setup.raw(flooder, |_| {});
            let is_over = &is_over;
            scope.spawn(move || {
                while !is_over.load(Relaxed) {
                    flooder.publish("flood", &[b'f'; 1_000], QoS::AtMostOnce, false);
                }
            });
        }
        // Also when something fails: the scope waits for all.
        let over = Over(&is_over);
        let mut bystander = setup.raw("bystander", |_| {});
        let mut refused = 0;
        for _ in 0..200 {
            bystander.publish("up/1", &[b'b'; 500], QoS::AtLeastOnce, false);
            match bystander.next() {
                Got::PubAck(code) => refused += usize::from(code >= 0x80),
                other => panic!("{other:?}"),
            }
        }
        drop(over);
        assert_eq!(refused, 0);
    });
}

/// Says that it is over when it goes.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_group_that_refuses_says_so_until_there_is_room() {
    let setup = Setup::new().await;
    let full = v1::Group { retention_bytes: 1, when_full: v1::WhenFull::Refuse.into(), ..group("g") };
    setup.create(full).await;
    let mut device = setup.raw("d", |_| {});
    let taken = until_answered(&mut device, "up/1", true);
    assert!(taken >= 1);
    device.publish("other", b"x", QoS::AtLeastOnce, false);
    assert!(
        matches!(device.next(), Got::PubAck(code) if code < 0x80),
        "what the group does not want goes on"
    );
    let mut old = Client::connect(setup.mqtt, Protocol::V4, "old");
    old.publish("up/old", b"x", QoS::AtLeastOnce, false);
    assert_eq!(old.next(), Got::Closed, "3.1.1 has no other way to say it");

    let mut member = setup.join(open("g")).await;
    for number in 0..taken {
        let message = member.message().await;
        assert_eq!(payload(&message), "x", "{number}");
        member.acknowledge(&[message.delivery_id]).await;
    }
    assert_eq!(setup.group_status("g").await.lag_messages, 0, "nothing that was refused is in the group");
    until_answered(&mut device, "up/1", false);
    assert_eq!(member.payload().await, "x");
    assert_eq!(setup.group_status("g").await.lost, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_over_its_bytes_keeps_the_newest_and_tells_of_the_gap() {
    const SENT: u64 = 100;
    let setup = Setup::new().await;
    setup.create(v1::Group { retention_bytes: 30_000, ..group("g") }).await;
    let mut device = setup.raw("d", |_| {});
    for number in 0..SENT {
        let text = format!("{number:04}{}", "x".repeat(1_000));
        device.publish_acked("up/1", text.as_bytes(), false);
    }
    let kept = async {
        loop {
            let status = setup.group_status("g").await;
            // Groups hear of messages after their publishers do.
            if status.lag_bytes <= 30_000 && status.lost + status.lag_messages == SENT {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let status = soon("the oldest to go and all to be counted", kept).await;
    assert!(status.lag_messages > 20, "{status:?}: no more than there must");
    let mut member = setup.join(open("g")).await;
    let Item::Gap(gap) = member.item().await else { panic!("no gap") };
    assert_eq!((gap.reason(), gap.count), (v1::GapReason::Retention, status.lost));
    for number in status.lost..SENT {
        assert_eq!(member.payload().await[..4], format!("{number:04}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_and_a_stream_take_no_more_bytes_than_they_say() {
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    let mut device = setup.raw("d", |_| {});
    for _ in 0..6 {
        device.publish_acked("up/1", &[b'x'; 10_000], false);
    }
    let fetch = |max_bytes| v1::FetchRequest {
        group: "g".into(),
        member_id: "m".into(),
        max_bytes,
        wait: Some(prost_types::Duration { seconds: 30, nanos: 0 }),
        ..Default::default()
    };
    for (most, expected) in [(1, 1), (25_000, 2)] {
        let fetched = soon("a fetch", setup.consumer().fetch(fetch(most))).await.unwrap().into_inner();
        assert_eq!(fetched.messages.len(), expected, "within {most} bytes");
        let ack_ids = fetched.messages.into_iter().map(|message| message.ack_id).collect();
        let settle = v1::AcknowledgeRequest { group: "g".into(), ack_ids };
        let settled = soon("an answer", setup.consumer().acknowledge(settle)).await.unwrap().into_inner();
        assert!(settled.results().all(|result| result == v1::AckResult::Ok));
    }
    let request = v1::FetchRequest { max_bytes: (3 << 20) + 1, ..fetch(0) };
    let refused = setup.consumer().fetch(request).await.unwrap_err();
    assert_eq!(refusal(&refused), (tonic::Code::InvalidArgument, "INVALID_FIELD".to_owned()));

    // The member of the fetches keeps its partitions; the stream is the same one.
    let flow = Some(v1::Flow { max_outstanding_bytes: 25_000, ..Default::default() });
    let heartbeat_interval = Some(prost_types::Duration { seconds: 0, nanos: 100_000_000 });
    let mut member =
        setup.join(v1::Open { member_id: "m".into(), flow, heartbeat_interval, ..open("g") }).await;
    let mut ids = vec![member.message().await.delivery_id, member.message().await.delivery_id];
    for _ in 0..3 {
        let Item::Heartbeat(heartbeat) = member.item().await else { panic!("more than its credit") };
        assert_eq!(heartbeat.status.unwrap().outstanding, 2);
    }
    member.say(Action::Ack(v1::Ack { delivery_ids: std::mem::take(&mut ids), ranges: Vec::new() })).await;
    member.message().await;
}

/// The failure: a page of some large messages is more than the 4 MiB that a client accepts, and paging cannot pass it.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_pending_messages_has_at_most_3_mib() {
    const LARGE: usize = 900_000;
    let setup = Setup::new().await;
    setup.create(group("g")).await;
    let mut device = setup.raw("d", |_| {});
    (0..5).for_each(|_| device.publish_acked("up/1", &[b'x'; LARGE], false));
    let mut fetched = 0;
    while fetched < 5 {
        let fetch = v1::FetchRequest {
            group: "g".into(),
            member_id: "m".into(),
            wait: Some(prost_types::Duration { seconds: 30, nanos: 0 }),
            ..Default::default()
        };
        fetched += soon("a fetch", setup.consumer().fetch(fetch)).await.unwrap().into_inner().messages.len();
    }
    let mut request = v1::ListPendingRequest { name: "g".into(), ..Default::default() };
    let (mut pages, mut listed) = (Vec::new(), Vec::new());
    loop {
        let page = soon("a page", setup.groups().list_pending(request.clone())).await.unwrap().into_inner();
        assert!(page.encoded_len() <= 3 << 20, "{} bytes", page.encoded_len());
        pages.push(page.messages.len());
        listed.extend(page.messages.into_iter().map(|pending| pending.message_id));
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!(pages, [3, 2]);
    listed.sort();
    listed.dedup();
    assert_eq!(listed.len(), 5, "each of them once");
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_a_group_are_there_as_long_as_the_group() {
    let setup = Setup::new().await;
    setup.create(group("g.1")).await;
    setup.device("d").await.send("up/x", "one").await;
    let mut member = setup.join(open("g.1")).await;
    member.message().await;
    let mut rows = setup.metrics_of("g.1");
    rows.sort();
    let expected = [
        "gateway_group_dead_letters{group=\"g.1\"} 0",
        "gateway_group_lag_bytes{group=\"g.1\"}",
        "gateway_group_lag_messages{group=\"g.1\"} 1",
        "gateway_group_lost{group=\"g.1\"} 0",
        "gateway_group_members{group=\"g.1\"} 1",
        "gateway_group_oldest_seconds{group=\"g.1\"}",
        "gateway_group_outstanding{group=\"g.1\"} 1",
        "gateway_group_redelivered{group=\"g.1\"} 0",
    ];
    assert_eq!(rows.len(), expected.len(), "{rows:?}");
    for (row, expected) in rows.iter().zip(expected) {
        assert!(row.starts_with(expected), "{row}, not {expected}");
    }
    let delete = v1::DeleteGroupRequest { name: "g.1".into(), allow_missing: false };
    setup.groups().delete_group(delete).await.unwrap();
    assert_eq!(setup.metrics_of("g.1"), Vec::<String>::new());
}
