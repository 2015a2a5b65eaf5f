//! Callers whose tokens somebody else has signed.

use std::{fs, time::SystemTime};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use mqtt_server::proto::gateway::v1::{
    self, events_client::EventsClient, publisher_client::PublisherClient, state_client::StateClient,
};
use rcgen::{KeyPair, PKCS_ED25519, SigningKey as _};
use serde_json::{Value, json};
use tokio_stream::StreamExt as _;
use tonic::Code;

use super::Guarded;
use crate::harness::*;

fn key() -> KeyPair {
    KeyPair::generate_for(&PKCS_ED25519).unwrap()
}

/// A token with these claims.
fn sign(key: &KeyPair, claims: &Value) -> String {
    let encode = |part: &Value| URL_SAFE_NO_PAD.encode(part.to_string());
    let text = format!("{}.{}", encode(&json!({"alg": "EdDSA", "typ": "JWT"})), encode(claims));
    let signature = key.sign(text.as_bytes()).unwrap();
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
}

fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_token_is_who_its_claims_say_while_its_key_and_time_last() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("key.pem");
    let own = key();
    fs::write(&keys, own.public_key_pem()).unwrap();
    let guarded = Guarded::with(&[("root", access::backends::Role::Admin, None, None)], |config| {
        let jwt = &mut config.backends.jwt;
        jwt.key_file = Some(keys.clone());
        jwt.audience = vec!["gateway".to_owned()];
        jwt.role = "gateway.role".to_owned();
        jwt.topics = "gateway.topics".to_owned();
    })
    .await;
    let claims = |role: Value, topics: Value| {
        let gateway = json!({"role": role, "topics": topics});
        json!({"sub": "service", "aud": "gateway", "exp": now() + 3_600, "gateway": gateway})
    };
    let good = sign(&own, &claims(json!("publisher"), json!(["a/#", "b"])));
    let mut publisher = PublisherClient::new(guarded.channel_of(&good));
    publisher.publish(to("a/1", "x")).await.unwrap();
    publisher.publish(to("b", "x")).await.unwrap();
    assert_eq!(refusal(&publisher.publish(to("c", "x")).await.unwrap_err()).1, "OUT_OF_SCOPE");
    let several = sign(&own, &claims(json!(["other", "reader"]), json!("a/#")));
    let mut reader = StateClient::new(guarded.channel_of(&several));
    let get = |topic: &str| v1::GetRetainedRequest { topic: topic.to_owned() };
    assert_eq!(reader.get_retained(get("a/1")).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(refusal(&reader.get_retained(get("b")).await.unwrap_err()).1, "OUT_OF_SCOPE");
    let denied =
        PublisherClient::new(guarded.channel_of(&several)).publish(to("a/1", "x")).await.unwrap_err();
    assert_eq!(refusal(&denied).1, "ROLE_DENIED");
    // The claim is configured, so what lacks it has nothing.
    let narrow = json!({"aud": "gateway", "exp": now() + 60, "gateway": {"role": "admin"}});
    let narrow = sign(&own, &narrow);
    let denied = PublisherClient::new(guarded.channel_of(&narrow)).publish(to("a/1", "x")).await.unwrap_err();
    assert_eq!(refusal(&denied).1, "OUT_OF_SCOPE");

    let mut expired = claims(json!("admin"), json!(["#"]));
    expired["exp"] = json!(now() - 3_600);
    let mut elsewhere = claims(json!("admin"), json!(["#"]));
    elsewhere["aud"] = json!("another");
    let mut endless = claims(json!("admin"), json!(["#"]));
    endless.as_object_mut().unwrap().remove("exp");
    let all = claims(json!("admin"), json!(["#"]));
    let unsigned = sign(&own, &all);
    let (unsigned, _) = unsigned.rsplit_once('.').unwrap();
    let none = URL_SAFE_NO_PAD.encode(r#"{"alg":"none"}"#);
    let (_, unsigned_claims) = unsigned.split_once('.').unwrap();
    for (token, reason) in [
        (sign(&own, &expired), "EXPIRED"),
        (sign(&own, &elsewhere), "UNKNOWN"),
        (sign(&own, &endless), "UNKNOWN"),
        (sign(&own, &claims(json!("root"), json!(["#"]))), "UNKNOWN"),
        (sign(&own, &claims(json!(null), json!(["#"]))), "UNKNOWN"),
        (sign(&own, &claims(json!("admin"), json!(["a/#/b"]))), "UNKNOWN"),
        (sign(&key(), &all), "UNKNOWN"),
        (format!("{unsigned}."), "UNKNOWN"),
        (format!("{none}.{unsigned_claims}."), "UNKNOWN"),
        (format!("{good}x"), "UNKNOWN"),
    ] {
        let refused = StateClient::new(guarded.channel_of(&token)).get_retained(get("a")).await.unwrap_err();
        assert_eq!(refusal(&refused), (Code::Unauthenticated, format!("CREDENTIALS_{reason}")), "{token}");
    }

    // A token of the file goes on when the keys are others; what they have signed does not.
    let watch = async |token: &str| {
        let mut client = EventsClient::new(guarded.channel_of(token));
        let watch = v1::WatchEventsRequest::default();
        let mut events = client.watch_events(watch).await.unwrap().into_inner();
        soon("its beginning", events.next()).await.unwrap().unwrap();
        events
    };
    let mut signed = watch(&good).await;
    let mut of_file = watch(guarded.token("root")).await;
    let mut security = guarded.security("root");
    fs::write(&keys, "nonsense").unwrap();
    let parts = security.reload(v1::ReloadRequest {}).await.unwrap().into_inner().parts;
    let part = parts.iter().find(|part| part.name == "keys of backends").unwrap();
    assert!(part.problems.len() == 1 && part.summary.is_empty(), "{part:?}");
    publisher.publish(to("a/1", "still good")).await.unwrap();
    let next = key();
    fs::write(&keys, next.public_key_pem()).unwrap();
    let end = soon("the end of the stream", signed.next()).await.unwrap().unwrap_err();
    assert_eq!(refusal(&end), (Code::Unauthenticated, "CREDENTIALS_REVOKED".to_owned()));
    let refused = publisher.publish(to("a/1", "x")).await.unwrap_err();
    assert_eq!(refusal(&refused).1, "CREDENTIALS_UNKNOWN");
    let renewed = sign(&next, &claims(json!("publisher"), json!(["a/#"])));
    PublisherClient::new(guarded.channel_of(&renewed)).publish(to("a/1", "x")).await.unwrap();
    drop(guarded.setup.device("dev").await);
    assert!(soon("an event", of_file.next()).await.unwrap().is_ok());

    // The end of the token's time, with the leeway.
    let mut short = claims(json!("reader"), json!(["#"]));
    short["exp"] = json!(now() - 5 + 3);
    let mut short = watch(&sign(&next, &short)).await;
    let ended = async {
        loop {
            if let Err(status) = short.next().await.unwrap() {
                return status;
            }
        }
    };
    assert_eq!(refusal(&soon("the end of the stream", ended).await).1, "CREDENTIALS_EXPIRED");
}
