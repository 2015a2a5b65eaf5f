//! PublishToDevices: one message for many devices, each with a result of its own.

use std::collections::BTreeMap;

use access::backends::Role;
use mqtt_server::proto::gateway::v1::{self, publisher_client::PublisherClient};
use tokio::task::block_in_place;
use tonic::{Code, Streaming};

use crate::{
    access::Guarded,
    client::{Client, Got},
    harness::*,
};

fn listed(message: v1::PublishRequest, devices: &[&str]) -> v1::PublishToDevicesRequest {
    let device_ids = devices.iter().map(|id| (*id).to_owned()).collect();
    v1::PublishToDevicesRequest { message: Some(message), device_ids, ..Default::default() }
}

fn prefixed(message: v1::PublishRequest, prefix: &str) -> v1::PublishToDevicesRequest {
    let device_id_prefix = prefix.to_owned();
    v1::PublishToDevicesRequest { message: Some(message), device_id_prefix, ..Default::default() }
}

type Told = BTreeMap<String, Result<v1::Outcome, String>>;

/// All results, and how many were issued.
async fn all(mut stream: Streaming<v1::PublishToDevicesResponse>) -> (Told, u64) {
    let (mut told, mut issued) = (Told::new(), 0);
    while let Some(response) = soon("results", stream.message()).await.unwrap() {
        issued = response.issued;
        for found in response.results {
            let result = match found.result.unwrap().result.unwrap() {
                v1::publish_result::Result::Response(response) => Ok(response.outcome()),
                v1::publish_result::Result::Error(error) => Err(error.reason),
            };
            assert!(told.insert(found.device_id, result).is_none(), "each once");
        }
    }
    (told, issued)
}

fn told(expected: &[(&str, Result<v1::Outcome, &str>)]) -> Told {
    let own = |result: Result<v1::Outcome, &str>| result.map_err(str::to_owned);
    expected.iter().map(|(id, result)| ((*id).to_owned(), own(*result))).collect()
}

async fn away(setup: &Setup, id: &str) {
    let mut events = setup.events(id).await;
    drop(block_in_place(|| setup.raw(id, |_| {})));
    until(&mut events, |detail| matches!(detail, v1::event::Detail::Disconnected(_))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_a_list_has_its_own_result_as_it_becomes_known() {
    let setup = Setup::new().await;
    let mut one = block_in_place(|| setup.raw("one", |_| {}));
    let mut two = block_in_place(|| setup.raw("two", |_| {}));
    away(&setup, "away").await;
    let message = v1::PublishRequest { wait: v1::Wait::Acked.into(), ..to("cmd", "go") };
    let request = listed(message.clone(), &["one", "stranger", "two", "away"]);
    let mut stream = setup.publisher().publish_to_devices(request).await.unwrap().into_inner();
    let first = soon("what is known at once", stream.message()).await.unwrap().unwrap();
    assert_eq!((first.results.len(), first.issued), (2, 4), "{first:?}");
    for (client, code) in [(&mut two, 0x97), (&mut one, 0)] {
        assert_eq!(block_in_place(|| client.next()), Got::Publish("cmd".to_owned(), b"go".to_vec()));
        puback(client, 1, code);
    }
    let (rest, issued) = all(stream).await;
    assert_eq!(issued, 4);
    assert_eq!(rest, told(&[("one", Ok(v1::Outcome::Acked)), ("two", Ok(v1::Outcome::Rejected))]));

    let failures = v1::PublishToDevicesRequest {
        detail: v1::ResultDetail::Failures.into(),
        ..listed(to("cmd", "x"), &["one", "stranger", "away"])
    };
    let stream = setup.publisher().publish_to_devices(failures).await.unwrap().into_inner();
    assert_eq!(all(stream).await, (told(&[("stranger", Err("DEVICE_NOT_FOUND"))]), 3));

    let invalid = [
        listed(message.clone(), &[]),
        listed(message.clone(), &["one", "one"]),
        v1::PublishToDevicesRequest { device_id_prefix: "o".to_owned(), ..listed(message.clone(), &["one"]) },
        v1::PublishToDevicesRequest { message: None, ..listed(message.clone(), &["one"]) },
        listed(v1::PublishRequest { device_id: Some("one".to_owned()), ..message.clone() }, &["one"]),
        listed(v1::PublishRequest { idempotency_key: "k".to_owned(), ..message.clone() }, &["one"]),
        listed(v1::PublishRequest { retain: true, ..message.clone() }, &["one"]),
        listed(v1::PublishRequest { topic: "a/#".to_owned(), ..message.clone() }, &["one"]),
        listed(message, &["one"; 10_001]),
    ];
    for request in invalid {
        let error = setup.publisher().publish_to_devices(request.clone()).await.unwrap_err();
        assert_eq!(refusal(&error), (Code::InvalidArgument, "INVALID_FIELD".to_owned()), "{request:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_reaches_every_session_that_has_it_and_no_other() {
    let setup = Setup::new().await;
    let names: Vec<String> = (0..600).map(|n| format!("lamp-{n}")).collect();
    for name in &names {
        drop(block_in_place(|| setup.raw(name, |_| {})));
    }
    let mut other: Client = block_in_place(|| setup.raw("other", |_| {}));
    let broker = setup.gateway.broker();
    while broker.gauges().online > 1 {
        tokio::task::yield_now().await;
    }
    let request = prefixed(to("cmd", "go"), "lamp-");
    let stream = setup.publisher().publish_to_devices(request).await.unwrap().into_inner();
    let (found, issued) = all(stream).await;
    assert_eq!(issued, 600);
    assert_eq!(found, names.iter().map(|name| (name.clone(), Ok(v1::Outcome::Queued))).collect());
    assert_eq!(block_in_place(|| other.ping()), []);
    let request = prefixed(to("cmd", "go"), "nobody");
    let stream = setup.publisher().publish_to_devices(request).await.unwrap().into_inner();
    assert_eq!(all(stream).await, (Told::new(), 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_callers_scope_holds_for_each_of_many_devices() {
    let lamps: &[&str] = &["lamp-*"];
    let guarded = Guarded::with(&[("lamps", Role::Publisher, None, Some(lamps))], |_| {}).await;
    for id in ["lamp-1", "lamp-2", "lock-1"] {
        drop(block_in_place(|| guarded.setup.raw(id, |_| {})));
    }
    let broker = guarded.setup.gateway.broker();
    while broker.gauges().online > 0 {
        tokio::task::yield_now().await;
    }
    let mut client = PublisherClient::new(guarded.channel("lamps"));
    let stream = client.publish_to_devices(listed(to("cmd", "x"), &["lamp-1", "lock-1"])).await.unwrap();
    let expected = [("lamp-1", Ok(v1::Outcome::Queued)), ("lock-1", Err("OUT_OF_SCOPE"))];
    assert_eq!(all(stream.into_inner()).await, (told(&expected), 2));
    let stream = client.publish_to_devices(prefixed(to("cmd", "x"), "l")).await.unwrap();
    let expected = [("lamp-1", Ok(v1::Outcome::Queued)), ("lamp-2", Ok(v1::Outcome::Queued))];
    assert_eq!(all(stream.into_inner()).await, (told(&expected), 2));
}

/// The rest would get what the caller no longer wants; and who does not read would fill the memory.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_cancelled_or_not_read_stops_before_its_end() {
    let setup = Setup::with(|config| config.limits.max_client_id_bytes = 2_000).await;
    away(&setup, "first").await;
    away(&setup, "last").await;
    // Each a result that has to be read.
    let strangers: Vec<String> = (0..9_998).map(|n| format!("stranger-{n}-{}", "x".repeat(1_000))).collect();
    let mut ids = vec!["first"];
    ids.extend(strangers.iter().map(String::as_str));
    ids.push("last");
    let request = listed(to("cmd", "all"), &ids);
    let mut stream = setup.publisher().publish_to_devices(request).await.unwrap().into_inner();
    let response = soon("the first results", stream.message()).await.unwrap().unwrap();
    assert_eq!(response.results[0].device_id, "first");
    drop(stream);
    let mut first = block_in_place(|| setup.raw("first", |_| {}));
    assert_eq!(block_in_place(|| first.next()), Got::Publish("cmd".to_owned(), b"all".to_vec()));
    setup.publish(to_device("last", "alone")).await.unwrap();
    let mut last = block_in_place(|| setup.raw("last", |_| {}));
    assert_eq!(block_in_place(|| last.next()), Got::Publish("cmd".to_owned(), b"alone".to_vec()));
    assert_eq!(block_in_place(|| last.ping()), []);
}
