//! Lists over several homes: complete, in order, and in pages of any size.

use tonic::Code;

use super::{bench, command, in_seconds, reason};
use grpc::proto::gateway::v1::{
    self, commands_client::CommandsClient, devices_client::DevicesClient,
    operations_client::OperationsClient, publisher_client::PublisherClient, security_client::SecurityClient,
    state_client::StateClient, subscriber_client::SubscriberClient,
};

/// Reads all pages of a list: `$page` asks for one by its size and token, and `$items` are its entries as text.
macro_rules! all_pages {
    ($size:expr, |$page_size:ident, $page_token:ident| $page:expr, $items:expr) => {{
        let (mut found, mut $page_token) = (Vec::new(), String::new());
        loop {
            let $page_size = $size;
            let page = $page.await.unwrap().into_inner();
            $page_token = page.next_page_token.clone();
            let items: Vec<String> = $items(page);
            assert!($size == 0 || items.len() <= $size as usize);
            found.extend(items);
            if $page_token.is_empty() {
                break found;
            }
        }
    }};
}

/// The failure: values that are skipped or repeated where a page of ours ends within one of a home.
#[tokio::test]
async fn latest_values_of_all_homes_are_in_order_in_pages_of_any_size() {
    let bench = bench(3).await;
    let mut expected = Vec::new();
    for device in ["a0", "a1", "a2", "b1", "b2", "b5", "c0", "c3", "c6", "d1"] {
        for topic in ["t/1", "t/2", "t/3"] {
            bench.homes.say(device, topic, "x");
            expected.push(format!("{device} {topic}"));
        }
    }
    let mut state = StateClient::new(bench.front.clone());
    let names = |page: v1::ListLatestResponse| {
        page.values.into_iter().map(|value| format!("{} {}", value.device_id, value.topic)).collect()
    };
    for size in [1, 2, 3, 7, 0] {
        let found = all_pages!(
            size,
            |page_size, page_token| state.list_latest(v1::ListLatestRequest {
                page_size,
                page_token,
                ..Default::default()
            }),
            names
        );
        assert_eq!(found, expected, "{size}");
        // The homes of these devices only.
        let device_ids = ["d1", "b2", "b1"].map(str::to_owned).to_vec();
        let before = bench.homes.calls[0].load(std::sync::atomic::Ordering::SeqCst);
        let found = all_pages!(
            size,
            |page_size, page_token| state.list_latest(v1::ListLatestRequest {
                device_ids: device_ids.clone(),
                page_size,
                page_token,
                ..Default::default()
            }),
            names
        );
        let wanted = |name: &&String| device_ids.iter().any(|device| name.starts_with(device.as_str()));
        assert_eq!(found, expected.iter().filter(wanted).cloned().collect::<Vec<_>>(), "{size}");
        assert_eq!(bench.homes.calls[0].load(std::sync::atomic::Ordering::SeqCst), before);
    }
}

/// The failure: a page repeats values, or skips some, when others come or go between two pages.
#[tokio::test]
async fn values_that_stay_are_listed_once_while_others_come_and_go() {
    let bench = bench(2).await;
    let devices = ["a0", "a1", "b0", "b1", "c0", "c1"];
    for device in devices {
        bench.homes.say(device, "t", "x");
    }
    let mut state = StateClient::new(bench.front.clone());
    let request = v1::ListLatestRequest { page_size: 3, ..Default::default() };
    let first = state.list_latest(request.clone()).await.unwrap().into_inner();
    let names = |page: &v1::ListLatestResponse| {
        page.values.iter().map(|value| value.device_id.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&first), ["a0", "a1", "b0"]);
    let delete = |device: &str| v1::DeleteLatestRequest {
        device_id: device.to_owned(),
        topic: "t".to_owned(),
        ..Default::default()
    };
    // One behind, one that was given, and one that is to come.
    bench.homes.say("aa1", "t", "x");
    state.delete_latest(delete("a0")).await.unwrap();
    state.delete_latest(delete("c1")).await.unwrap();
    let next = v1::ListLatestRequest { page_token: first.next_page_token.clone(), ..request };
    let second = state.list_latest(next).await.unwrap().into_inner();
    assert_eq!(names(&second), ["b1", "c0"]);
    assert_eq!(second.next_page_token, "");
    let other = v1::ListLatestRequest {
        topic_filter: "t".to_owned(),
        page_token: first.next_page_token.clone(),
        ..Default::default()
    };
    assert_eq!(reason(&state.list_latest(other).await.unwrap_err()), "PAGE_TOKEN_MISMATCH");
    let bad = v1::ListLatestRequest { page_token: "AAAA".to_owned(), ..Default::default() };
    assert_eq!(reason(&state.list_latest(bad).await.unwrap_err()), "PAGE_TOKEN_INVALID");
    let bad = v1::ListLatestRequest { page_size: -1, ..Default::default() };
    assert_eq!(state.list_latest(bad).await.unwrap_err().code(), Code::InvalidArgument);
    bench.homes.set_away(1, true);
    let away = state.list_latest(v1::ListLatestRequest::default()).await.unwrap_err();
    assert_eq!(reason(&away), "NOT_ACTIVE", "rather than a part as if it were all");
}

/// The failure: commands of the same moment that are skipped or repeated between pages.
#[tokio::test]
async fn commands_of_all_homes_are_listed_once_and_the_newest_first() {
    let bench = bench(3).await;
    let mut commands = CommandsClient::new(bench.front.clone());
    let mut expected = Vec::new();
    for number in 0..30 {
        let id = format!("c-{number:02}");
        commands.start_command(command(&format!("d{}", number % 4), &id)).await.unwrap();
        expected.push(id);
    }
    expected.sort();
    for size in [1, 4, 7, 0] {
        let mut times = Vec::new();
        let mut found = all_pages!(
            size,
            |page_size, page_token| commands.list_commands(v1::ListCommandsRequest {
                page_size,
                page_token,
                ..Default::default()
            }),
            |page: v1::ListCommandsResponse| {
                times.extend(page.commands.iter().map(|command| {
                    let time = command.create_time.unwrap();
                    (time.seconds, time.nanos)
                }));
                page.commands.into_iter().map(|command| command.command_id).collect()
            }
        );
        assert!(times.is_sorted_by(|one, two| one >= two), "{size}");
        found.sort();
        assert_eq!(found, expected, "{size}");
        let found = all_pages!(
            size,
            |page_size, page_token| commands.list_commands(v1::ListCommandsRequest {
                device_id: "d1".to_owned(),
                page_size,
                page_token,
                ..Default::default()
            }),
            |page: v1::ListCommandsResponse| {
                page.commands.into_iter().map(|command| command.command_id).collect()
            }
        );
        assert_eq!(found, ["c-29", "c-25", "c-21", "c-17", "c-13", "c-09", "c-05", "c-01"]);
    }
}

/// The failure: messages for later out of the order of their times.
#[tokio::test]
async fn scheduled_messages_of_all_homes_are_in_the_order_of_their_times() {
    let bench = bench(3).await;
    let mut publisher = PublisherClient::new(bench.front.clone());
    for (place, after) in [50, 10, 40, 10, 30, 20].into_iter().enumerate() {
        let request = v1::PublishRequest {
            device_id: Some(format!("d{place}")),
            topic: after.to_string(),
            deliver_at: in_seconds(after),
            ..Default::default()
        };
        publisher.publish(request).await.unwrap();
    }
    for size in [1, 2, 0] {
        let found = all_pages!(
            size,
            |page_size, page_token| publisher.list_scheduled(v1::ListScheduledRequest {
                page_size,
                page_token,
                ..Default::default()
            }),
            |page: v1::ListScheduledResponse| {
                page.messages.into_iter().map(|message| message.topic).collect()
            }
        );
        assert_eq!(found, ["10", "10", "20", "30", "40", "50"], "{size}");
    }
}

/// The failure: a device that is in no page, or in two.
#[tokio::test]
async fn devices_of_all_homes_are_listed_once() {
    let bench = bench(3).await;
    let mut expected = Vec::new();
    // None at the second home.
    for device in ["a0", "b0", "c0", "a2", "b2"] {
        bench.homes.connect(device, &["t"]).await;
        expected.push(device.to_owned());
    }
    expected.sort();
    let mut devices = DevicesClient::new(bench.front.clone());
    for size in [1, 2, 0] {
        let mut found = all_pages!(
            size,
            |page_size, page_token| devices.list_devices(v1::ListDevicesRequest {
                page_size,
                page_token,
                ..Default::default()
            }),
            |page: v1::ListDevicesResponse| page.devices.into_iter().map(|d| d.device_id).collect()
        );
        found.sort();
        assert_eq!(found, expected, "{size}");
    }
    // Ranked by what waits.
    for (topic, messages) in [("a2", 3), ("c0", 2), ("a0", 1), ("b2", 1)] {
        for _ in 0..messages {
            let request = v1::PublishRequest {
                device_id: Some(topic.to_owned()),
                topic: "t".to_owned(),
                ..Default::default()
            };
            PublisherClient::new(bench.front.clone()).publish(request).await.unwrap();
        }
    }
    let top = devices.list_top_devices(v1::ListTopDevicesRequest { limit: 3, ..Default::default() });
    let top = top.await.unwrap().into_inner();
    let names: Vec<_> = top.devices.into_iter().map(|device| device.device_id).collect();
    assert_eq!((names, top.ranked), (["a2", "c0", "b2"].map(str::to_owned).to_vec(), 5));
}

/// The failure: a ban that holds at one home, or is listed for each.
#[tokio::test]
async fn a_ban_is_made_at_every_home_and_listed_once() {
    let bench = bench(3).await;
    let mut security = SecurityClient::new(bench.front.clone());
    let target = |target| Some(v1::BanTarget { target: Some(target) });
    let client = |id: &str| target(v1::ban_target::Target::ClientId(id.to_owned()));
    let address = target(v1::ban_target::Target::Address("192.0.2.1".to_owned()));
    for target in [address.clone(), client("b"), client("a")] {
        security.add_ban(v1::AddBanRequest { target, ..Default::default() }).await.unwrap();
    }
    // One that a home has alone, as it makes some itself.
    let mut alone = SecurityClient::new(bench.homes.homes[2].service.clone());
    alone.add_ban(v1::AddBanRequest { target: client("aa"), ..Default::default() }).await.unwrap();
    let text = |page: v1::ListBansResponse| -> Vec<String> {
        page.bans.into_iter().map(|ban| format!("{:?}", ban.target.unwrap().target.unwrap())).collect()
    };
    let expected = [
        "ClientId(\"a\")".to_owned(),
        "ClientId(\"aa\")".to_owned(),
        "ClientId(\"b\")".to_owned(),
        "Address(\"192.0.2.1\")".to_owned(),
    ];
    for size in [1, 2, 0] {
        let found = all_pages!(
            size,
            |page_size, page_token| security.list_bans(v1::ListBansRequest { page_size, page_token }),
            text
        );
        assert_eq!(found, expected, "{size}");
    }
    security.remove_ban(v1::RemoveBanRequest { target: client("aa") }).await.unwrap();
    security.remove_ban(v1::RemoveBanRequest { target: address }).await.unwrap();
    let missing = security.remove_ban(v1::RemoveBanRequest { target: client("aa") }).await.unwrap_err();
    assert_eq!(reason(&missing), "BAN_NOT_FOUND");
    for home in &bench.homes.homes {
        let mut security = SecurityClient::new(home.service.clone());
        let page = security.list_bans(v1::ListBansRequest::default()).await.unwrap().into_inner();
        assert_eq!(text(page), ["ClientId(\"a\")", "ClientId(\"b\")"]);
    }
}

/// The failure: streams of one home only, or two of the same number.
#[tokio::test]
async fn streams_are_listed_at_each_home_that_has_them() {
    let bench = bench(3).await;
    let mut subscriber = SubscriberClient::new(bench.front.clone());
    let _open = subscriber.subscribe(v1::SubscribeRequest::default()).await.unwrap();
    let streams = subscriber.list_streams(v1::ListStreamsRequest::default()).await.unwrap().into_inner();
    let mut ids: Vec<_> = streams.streams.into_iter().map(|stream| stream.stream_id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), streams.ranked), (3, 3));
    let metrics =
        OperationsClient::new(bench.front.clone()).get_metrics(v1::GetMetricsRequest::default()).await;
    assert!(metrics.is_ok());
}

/// The failure: a tenant for each home.
#[tokio::test]
async fn tenants_of_all_homes_are_listed_once() {
    let bench = bench(3).await;
    let mut security = SecurityClient::new(bench.front.clone());
    for size in [1, 2, 0] {
        let found = all_pages!(
            size,
            |page_size, page_token| security.list_tenants(v1::ListTenantsRequest { page_size, page_token }),
            |page: v1::ListTenantsResponse| page.tenants.into_iter().map(|tenant| tenant.name).collect()
        );
        assert_eq!(found, ["a", "b", "c"], "{size}");
    }
}
