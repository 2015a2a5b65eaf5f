//! History: every message of a topic with a rule is there, page by page, whatever happens in between.

use std::time::Duration;

use gateway_core::Protocol;
use mqtt_server::proto::gateway::v1::ListHistoryRequest;
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::{
    cassandra,
    client::Client,
    gateway::{Gateway, toml},
    proxy::Proxy,
    tables::{Tables, wait_for},
};

pub(crate) const RULE: &str = "[[database.history]]\nfilter = \"log/#\"\nttl = \"1h\"\n";

fn request(topic: &str, oldest_first: bool) -> ListHistoryRequest {
    ListHistoryRequest {
        device_id: "recorder".to_owned(),
        topic: topic.to_owned(),
        oldest_first,
        page_size: 40,
        ..ListHistoryRequest::default()
    }
}

/// Publishes the numbers, each acknowledged, to a topic with history and to one without.
pub(crate) fn publish(gateway: &Gateway, numbers: std::ops::Range<u32>) {
    let mut device = Client::connect(gateway.mqtt(), Protocol::V5, "recorder");
    for number in numbers {
        device.publish_acked("log/a", &number.to_be_bytes(), false);
        device.publish_acked("other/a", &number.to_be_bytes(), false);
    }
}

/// Waits until nothing of the history waits for the database.
pub(crate) fn is_written(gateway: &Gateway) {
    wait_for("the history is written", || match gateway.server.metric("gateway_history_pending") {
        0 => Ok(()),
        waiting => Err(format!("{waiting} messages wait")),
    });
}

/// All numbers in the history of `topic`; `between` is done after each page.
fn read(
    mut gateway: Gateway,
    topic: &str,
    oldest_first: bool,
    between: impl Fn(Gateway) -> Gateway,
) -> (Gateway, Vec<u32>) {
    let mut request = request(topic, oldest_first);
    let mut numbers = Vec::new();
    loop {
        let page = gateway.history(request.clone()).expect("a page");
        assert!(page.values.len() <= 40);
        for value in page.values {
            assert_eq!((&*value.device_id, &*value.topic), ("recorder", topic));
            numbers.push(u32::from_be_bytes(value.payload[..].try_into().expect("a number")));
        }
        if page.next_page_token.is_empty() {
            return (gateway, numbers);
        }
        request.page_token = page.next_page_token;
        gateway = between(gateway);
    }
}

#[test]
fn every_message_is_read_in_both_orders_over_restarts_and_an_outage() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let proxy = Proxy::start(&cassandra.address);
    let gateway = Gateway::start(&proxy.address, &tables, RULE);
    publish(&gateway, 0..60);
    is_written(&gateway);

    proxy.cut();
    publish(&gateway, 60..100);
    gateway.is_degraded();
    let away = gateway.history(request("log/a", false)).expect_err("a page without a database");
    assert_eq!(away.code(), Code::Unavailable, "{away}");
    assert!(away.get_details_retry_info().is_some(), "{away}");
    assert_eq!(gateway.server.metric("gateway_history_dropped_total"), 0);
    proxy.mend();
    gateway.is_well();
    is_written(&gateway);

    let forward: Vec<u32> = (0..100).collect();
    let (gateway, found) = read(gateway, "log/a", true, |gateway| gateway);
    assert_eq!(found, forward);
    // The token of a page is good for the next process.
    let (gateway, found) = read(gateway, "log/a", false, Gateway::restart);
    assert_eq!(found, forward.into_iter().rev().collect::<Vec<_>>());
    let (_, none) = read(gateway, "other/a", false, |gateway| gateway);
    assert_eq!(none, [0_u32; 0], "a topic without a rule");
}

#[test]
fn history_has_what_came_just_before_the_end_and_off_is_not_empty() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let gateway = Gateway::start(&cassandra.address, &tables, RULE);
    publish(&gateway, 0..1);
    is_written(&gateway);
    publish(&gateway, 1..30);
    let gateway = gateway.restart();
    let (gateway, found) = read(gateway, "log/a", true, |gateway| gateway);
    assert_eq!(found, (0..30).collect::<Vec<_>>());
    let page =
        gateway.history(ListHistoryRequest { end_time: Some(an_hour_ago()), ..request("log/a", false) });
    assert!(page.expect("an empty page").values.is_empty(), "before anything was sent");

    let gateway = gateway.restart_with(&toml(&tables, ""));
    let off = gateway.history(request("log/a", false)).expect_err("a page without a rule");
    assert_eq!(off.code(), Code::FailedPrecondition, "{off}");
    assert_eq!(off.get_details_error_info().expect("ErrorInfo").reason, "HISTORY_OFF");
}

/// Rules out that what a deleted device sent is read until it expires, or comes back with what waited for the database.
#[test]
fn a_deleted_device_has_no_history_and_a_new_one_begins() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let gateway = Gateway::start(&cassandra.address, &tables, RULE);
    publish(&gateway, 0..30);
    is_written(&gateway);
    publish(&gateway, 30..50);
    assert_eq!(gateway.delete("recorder").expect("deleted").latest_values, 2);
    is_written(&gateway);
    let (gateway, found) = read(gateway, "log/a", true, |gateway| gateway);
    assert_eq!(found, [0_u32; 0]);
    publish(&gateway, 50..60);
    is_written(&gateway);
    let (_, found) = read(gateway, "log/a", true, |gateway| gateway);
    assert_eq!(found, (50..60).collect::<Vec<_>>());
}

#[expect(clippy::disallowed_methods, reason = "the gateway's times are those of the wall clock")]
fn an_hour_ago() -> prost_types::Timestamp {
    (std::time::SystemTime::now() - Duration::from_secs(3_600)).into()
}
