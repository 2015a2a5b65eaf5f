//! Messages with an `idempotency_key`: published once, however often a backend asks.

use access::backends::Role;
use mqtt_server::proto::gateway::v1::{self, publisher_client::PublisherClient};
use tonic::Code;

use crate::{access::Guarded, client::Got, harness::*};

fn keyed(key: &str, request: v1::PublishRequest) -> v1::PublishRequest {
    v1::PublishRequest { idempotency_key: key.to_owned(), ..request }
}

fn acked(request: v1::PublishRequest) -> v1::PublishRequest {
    v1::PublishRequest { wait: v1::Wait::Acked.into(), ..request }
}

async fn batch(setup: &Setup, requests: Vec<v1::PublishRequest>) -> Vec<v1::publish_result::Result> {
    let answer = setup.publisher().publish_batch(v1::PublishBatchRequest { requests }).await.unwrap();
    answer.into_inner().results.into_iter().filter_map(|result| result.result).collect()
}

fn response(result: &v1::publish_result::Result) -> v1::PublishResponse {
    match result {
        v1::publish_result::Result::Response(response) => response.clone(),
        error => panic!("{error:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_key_publishes_once_by_call_batch_and_stream() {
    let setup = Setup::new().await;
    let mut device = setup.device("dev").await;
    let request = keyed("order 7", acked(to_device("dev", "pay")));
    let first = setup.publish(request.clone()).await.unwrap();
    assert_eq!(first.outcome(), v1::Outcome::Acked);
    assert_eq!(setup.publish(request.clone()).await.unwrap(), first);
    let other = keyed("order 8", acked(to_device("dev", "ship")));
    let results = batch(&setup, vec![request.clone(), other.clone(), other.clone()]).await;
    assert_eq!(response(&results[0]), first);
    assert_eq!(response(&results[1]), response(&results[2]));
    let frame = v1::PublishStreamRequest { requests: vec![other, request.clone()], ..Default::default() };
    let stream = setup.publisher().publish_stream(tokio_stream::iter([frame])).await.unwrap();
    let mut stream = stream.into_inner();
    let mut results = Vec::new();
    while let Some(answer) = soon("a result", stream.message()).await.unwrap() {
        results.extend(answer.results.into_iter().filter_map(|result| result.result?.result));
    }
    assert_eq!(results.iter().map(response).collect::<Vec<_>>(), [first.clone(), first.clone()]);

    let error = setup.publish(keyed("order 7", acked(to_device("dev", "refund")))).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED".to_owned()));
    let error = setup.publish(keyed(&"k".repeat(129), to_device("dev", "x"))).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::InvalidArgument, "INVALID_FIELD".to_owned()));

    setup.publish(acked(to_device("dev", "end"))).await.unwrap();
    for payload in ["pay", "ship", "end"] {
        assert_eq!(device.next().await.1, payload);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_outlive_the_process_where_there_is_a_store() {
    for stored in [true, false] {
        let setup = Setup::with(|config| config.store.enabled = stored).await;
        let first = setup.publish(keyed("k", to("nobody", "x"))).await.unwrap();
        assert_eq!(first.outcome(), v1::Outcome::NoMatch);
        let setup = setup.restarted(|config| config.store.enabled = stored).await;
        assert_eq!(setup.publish(keyed("k", to("nobody", "x"))).await.unwrap(), first);
        let other = setup.publish(keyed("k", to("nobody", "y"))).await.err();
        assert_eq!(other.map(|error| error.code()), Some(Code::AlreadyExists));
        if !stored {
            let other = keyed("k", to("nobody", "y"));
            let setup = setup.restarted(|config| config.store.enabled = false).await;
            assert!(setup.publish(other).await.is_ok(), "forgotten with the process");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_call_joins_the_wait_of_the_first_even_if_that_is_gone() {
    // Of the gateway, not of the client, which would not wait for the answer.
    let setup = Setup::with(|config| config.grpc.default_deadline = "100ms".parse().unwrap()).await;
    let patient = |request: &v1::PublishRequest| {
        let mut patient = tonic::Request::new(request.clone());
        patient.set_timeout(LIMIT);
        patient
    };
    let mut client = tokio::task::block_in_place(|| setup.raw("dev", |_| {}));
    let request = keyed("k", acked(to_device("dev", "once")));
    let mut first = setup.publisher();
    let asked = patient(&request);
    let first = tokio::spawn(async move { first.publish(asked).await });
    let got = tokio::task::block_in_place(|| client.next());
    assert_eq!(got, Got::Publish("cmd".to_owned(), b"once".to_vec()));
    first.abort();
    let mut second = setup.publisher();
    let asked = patient(&request);
    let second = tokio::spawn(async move { second.publish(asked).await });
    let error = setup.publish(request.clone()).await.unwrap_err();
    assert_eq!(refusal(&error), (Code::DeadlineExceeded, "WAIT_INCOMPLETE".to_owned()));
    puback(&mut client, 1, 0);
    let answer = soon("an answer", second).await.unwrap().unwrap().into_inner();
    assert_eq!(answer.outcome(), v1::Outcome::Acked);
    assert_eq!(setup.publish(request).await.unwrap(), answer);
    setup.publish(to_device("dev", "end")).await.unwrap();
    let next = tokio::task::block_in_place(|| client.next());
    assert_eq!(next, Got::Publish("cmd".to_owned(), b"end".to_vec()), "it came once");
}

/// A caller that guesses a key of another backend would learn of that backend's messages, or keep it from publishing.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_one_caller_means_nothing_for_another() {
    let tokens = [("billing", Role::Publisher, None, None), ("shipping", Role::Publisher, None, None)];
    let guarded = Guarded::with(&tokens, |_| {}).await;
    let mut device = guarded.setup.device("dev").await;
    for (name, payload) in [("billing", "a"), ("shipping", "b"), ("billing", "a"), ("shipping", "b")] {
        let mut client = PublisherClient::new(guarded.channel(name));
        let answer = client.publish(keyed("k", acked(to_device("dev", payload)))).await.unwrap();
        assert_eq!(answer.into_inner().outcome(), v1::Outcome::Acked);
    }
    let mut client = PublisherClient::new(guarded.channel("billing"));
    client.publish(to_device("dev", "end")).await.unwrap();
    for payload in ["a", "b", "end"] {
        assert_eq!(device.next().await.1, payload);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_too_many_keys_the_oldest_is_published_again() {
    let setup = Setup::with(|config| config.grpc.idempotency_keys = 2).await;
    let mut device = setup.device("dev").await;
    for key in ["a", "a", "b", "a", "c", "a"] {
        setup.publish(keyed(key, to_device("dev", key))).await.unwrap();
    }
    for payload in ["a", "b", "c", "a"] {
        assert_eq!(device.next().await.1, payload);
    }
}
