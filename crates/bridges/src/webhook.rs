//! A service that batches are posted to, as JSON, signed.

use std::time::Duration;

use aws_lc_rs::hmac;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use config::WebhookBridge;
use edge::{
    remote::{Client, HttpAnswer, RequestError},
    tls,
};
use gateway_core::{SharedMessage, clock};
use hyper::{
    StatusCode,
    header::{AUTHORIZATION, HeaderName, HeaderValue, RETRY_AFTER},
};
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::{
    outward::{BridgeSink, OutboundProgress},
    search::PoisonSearch,
    secret::read_secret,
    status::{BridgeFailure, BridgeRefusal, Reason},
    work::{BridgeBatch, BridgeItem, Fate},
};

/// Time and signature of a batch.
const SIGNATURE: HeaderName = HeaderName::from_static("gateway-signature");
/// The name of the bridge.
const BRIDGE: HeaderName = HeaderName::from_static("gateway-bridge");

/// See the module. Messages count as delivered with an answer of 2xx.
pub(super) struct Webhook {
    name: String,
    config: WebhookBridge,
    log: u64,
    /// Made anew, with the files read again, after a failure.
    client: Option<ReadyWebhook>,
    /// Time that the service has for a request.
    deadline: Duration,
    /// Chooses the messages that are posted together: fewer while one of them may be what the service does not take.
    search: PoisonSearch,
}

struct ReadyWebhook {
    client: Client,
    secret: Option<hmac::Key>,
    authorization: Option<HeaderValue>,
}

/// Result of one request.
enum RequestOutcome {
    Taken,
    /// The service will never take this.
    Never(BridgeRefusal, String),
}

impl Webhook {
    /// For the bridge of this name. Reads the files that are named.
    ///
    /// # Errors
    /// The key below the bridge's table, and what is wrong with it.
    pub(super) fn new(
        name: &str,
        config: &WebhookBridge,
        deadline: Duration,
    ) -> Result<Self, (&'static str, String)> {
        ready(config)?;
        Ok(Self {
            name: name.to_owned(),
            config: config.clone(),
            log: 0,
            client: None,
            deadline,
            search: PoisonSearch::default(),
        })
    }

    /// Names the gateway in the ids of messages.
    pub(super) fn of_log(self, log: u64) -> Self {
        Self { log, ..self }
    }

    fn body(&self, items: &[&BridgeItem]) -> Bytes {
        let messages: Vec<Value> = items.iter().map(|item| self.message(item)).collect();
        Bytes::from(json!({ "bridge": self.name, "messages": messages }).to_string())
    }

    fn message(&self, item: &BridgeItem) -> Value {
        let message: &SharedMessage = item.message();
        let mut fields = Map::new();
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        set("id", item.id(self.log).into());
        set("attempt", item.attempt().into());
        set("topic", (*message.topic).into());
        if let Some(id) = &message.client_id {
            set("client_id", id.as_str().into());
        }
        set("qos", (message.qos as u8).into());
        set("retain", message.retain.into());
        set("received_ms", clock::to_wall(message.received).0.into());
        match std::str::from_utf8(&message.payload) {
            Ok(text) => set("payload", text.into()),
            Err(_) => set("payload_base64", STANDARD.encode(&message.payload).into()),
        };
        if let Some(properties) = &message.properties {
            if let Some(kind) = &properties.content_type {
                set("content_type", kind.as_str().into());
            }
            if let Some(topic) = &properties.response_topic {
                set("response_topic", topic.as_str().into());
            }
            if let Some(data) = &properties.correlation_data {
                set("correlation_data_base64", STANDARD.encode(data).into());
            }
            if !properties.user.is_empty() {
                let pairs = properties.user.iter().map(|(name, value)| json!([name, value]));
                set("user_properties", pairs.collect());
            }
        }
        fields.into()
    }

    async fn post(&mut self, body: Bytes) -> Result<RequestOutcome, BridgeFailure> {
        let failed =
            |(key, text): (&str, String)| BridgeFailure::new(Reason::Denied, format!("{key}: {text}"));
        let ready = match self.client.take() {
            Some(ready) => ready,
            None => ready(&self.config).map_err(failed)?,
        };
        let mut headers = Vec::new();
        if let Ok(name) = HeaderValue::from_str(&self.name) {
            headers.push((BRIDGE, name));
        }
        if let Some(secret) = &ready.secret {
            let signature = sign(secret, clock::to_wall(clock::now()).0 / 1000, &body);
            headers.extend(HeaderValue::from_str(&signature).ok().map(|value| (SIGNATURE, value)));
        }
        headers.extend(ready.authorization.clone().map(|value| (AUTHORIZATION, value)));
        let told = ready.client.send(body, &headers).await;
        let told = told.map_err(|error| {
            let reason = match error {
                RequestError::Answer(_) => Reason::Closed,
                RequestError::Connect(_) => Reason::Connect,
            };
            BridgeFailure::new(reason, error.to_string())
        })?;
        let answer = understand(&told)?;
        self.client = Some(ready);
        Ok(answer)
    }
}

impl BridgeSink for Webhook {
    async fn deliver(&mut self, work: &mut BridgeBatch) -> Result<OutboundProgress, BridgeFailure> {
        let part = self.search.next(work);
        if part.is_empty() {
            return Ok(OutboundProgress::All);
        }
        let items: Vec<&BridgeItem> = part.iter().map(|&at| work.item(at)).collect();
        let body = self.body(&items);
        let posted = timeout(self.deadline, self.post(body)).await;
        match posted.unwrap_or_else(|_| Err(BridgeFailure::late())) {
            Ok(RequestOutcome::Taken) => {
                part.iter().for_each(|&at| work.set(at, Fate::Done));
                self.search.succeeded(&part, work);
            }
            Ok(RequestOutcome::Never(refusal, why)) => self.search.refused(&part, work, refusal, why),
            Err(failure) if failure.may_be_caused_by_a_message() => {
                self.reset();
                let failure = match part[..] {
                    [at] => failure.alone(&work.item(at).message().topic),
                    _ => failure,
                };
                if !self.search.failed(&part, work, &failure) {
                    return Err(failure);
                }
            }
            Err(failure) => return Err(failure),
        }
        Ok(OutboundProgress::of(work))
    }

    /// There is no connection to be looked after.
    async fn idle(&mut self) -> Result<(), BridgeFailure> {
        std::future::pending().await
    }

    fn reset(&mut self) {
        self.client = None;
    }
}

fn ready(config: &WebhookBridge) -> Result<ReadyWebhook, (&'static str, String)> {
    let tls = tls::client_config(&config.files(), false).map_err(|error| ("ca", error.to_string()))?;
    let client = Client::new(&config.url, tls).map_err(|text| ("url", text))?;
    let secret = config.secret_file.as_deref().map(|path| read_secret(path, "secret_file")).transpose()?;
    let token = config.token_file.as_deref().map(|path| read_secret(path, "token_file")).transpose()?;
    let authorization = token.map(|token| {
        let value = HeaderValue::from_bytes(&[b"Bearer ", &token[..]].concat());
        let mut value = value.map_err(|_| ("token_file", "is no token".to_owned()))?;
        value.set_sensitive(true);
        Ok(value)
    });
    Ok(ReadyWebhook {
        client,
        secret: secret.map(|secret| hmac::Key::new(hmac::HMAC_SHA256, &secret)),
        authorization: authorization.transpose()?,
    })
}

/// `t=SECONDS,v1=HEX`: the time in seconds since 1970, and HMAC-SHA256 of it, a full stop and the body.
fn sign(secret: &hmac::Key, time: u64, body: &[u8]) -> String {
    let mut context = hmac::Context::with_key(secret);
    context.update(format!("{time}.").as_bytes());
    context.update(body);
    let digest = context.sign();
    let hex: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("t={time},v1={hex}")
}

/// Reads the answer to a request. An error that does not depend on the messages (a token, a path, a service that is
/// overloaded) heals some day, so it is tried again; messages that the service has read and does not want are refused for
/// good.
fn understand(told: &HttpAnswer) -> Result<RequestOutcome, BridgeFailure> {
    let status = told.status;
    if status.is_success() {
        return Ok(RequestOutcome::Taken);
    }
    let text = format!("status {}", status.as_u16());
    match status {
        StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN
        | StatusCode::NOT_FOUND
        | StatusCode::METHOD_NOT_ALLOWED
        | StatusCode::PROXY_AUTHENTICATION_REQUIRED => Err(BridgeFailure::new(Reason::Denied, text)),
        StatusCode::REQUEST_TIMEOUT
        | StatusCode::TOO_EARLY
        | StatusCode::TOO_MANY_REQUESTS
        | StatusCode::SERVICE_UNAVAILABLE => {
            let after = told.headers.get(RETRY_AFTER).and_then(|after| after.to_str().ok()?.parse().ok());
            Err(BridgeFailure {
                after: after.map(Duration::from_secs),
                ..BridgeFailure::new(Reason::Busy, text)
            })
        }
        StatusCode::PAYLOAD_TOO_LARGE => Ok(RequestOutcome::Never(BridgeRefusal::Size, text)),
        status if status.is_client_error() => Ok(RequestOutcome::Never(BridgeRefusal::Other, text)),
        _ => Err(BridgeFailure::new(Reason::Failed, text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the guide says how to check it; the value is of another implementation.
    #[test]
    fn a_signature_is_of_the_time_and_the_body() {
        let key = hmac::Key::new(hmac::HMAC_SHA256, b"s3cret");
        assert_eq!(
            sign(&key, 1_700_000_000, br#"{"a":1}"#),
            "t=1700000000,v1=1698a50bc74d1ff1db85c4e0a5297c2ad9fdba245d5737cdb789e4cc6e098940"
        );
    }

    #[test]
    fn only_what_depends_on_the_message_is_given_up() {
        for (status, never) in
            [(400, true), (413, true), (422, true), (401, false), (404, false), (429, false), (500, false)]
        {
            let status = StatusCode::from_u16(status).expect("a status");
            let told = HttpAnswer { status, headers: hyper::HeaderMap::new(), body: Bytes::new() };
            let answer = understand(&told);
            assert_eq!(matches!(answer, Ok(RequestOutcome::Never(..))), never, "{status}");
            assert_eq!(answer.is_err(), !never, "{status}");
        }
    }
}
