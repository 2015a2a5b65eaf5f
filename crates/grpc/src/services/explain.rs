//! `Security.ExplainAccess`: what the rules say, for those who may ask.

use std::sync::Arc;

use access::{
    Method, Principal, Subject,
    rules::{AccessQuestion, Explanation},
};
use broker::Broker;
use gateway_core::{QoS, TopicFilter, TopicName, parse_shared};

use crate::{
    proto::gateway::v1::{self, explain_access_request::Action},
    server::access::Call,
};
use auth::Authority;
use grpc_messages::{convert, status::Error};

/// Most rules that are told of, the last ones. The one that decides is the last of those that are looked at.
const MOST_REASONS: usize = 1_000;
/// The listener of a subject that names none.
const LISTENER: &str = "default";

/// Answers one call.
pub(super) async fn explain(
    broker: &Broker,
    authority: Option<&Arc<Authority>>,
    request: v1::ExplainAccessRequest,
    call: &Call,
) -> Result<v1::ExplainAccessResponse, Error> {
    let v1::ExplainAccessRequest { device_id, subject, action } = request;
    convert::check_client_id("device_id", &device_id, broker.limits())?;
    call.about(&device_id);
    call.check_device("device_id", &device_id)?;
    let action = action.ok_or_else(|| Error::invalid("action", "is missing"))?;
    check(&action, call)?;
    let (listener, principal) = match subject {
        Some(subject) => described(subject),
        None => {
            let info = broker.device(&device_id).ok_or(Error::DeviceNotFound)?;
            if info.restored {
                return Err(Error::DeviceUnknown);
            }
            (info.connection.listener.to_string(), auth::principal(&info.connection))
        }
    };
    let Some(authority) = authority.cloned() else {
        let reasons = vec!["allowed: there are no rules, so that everything is".to_owned()];
        return Ok(v1::ExplainAccessResponse { allowed: true, line: 0, reasons });
    };
    let limited = call.scope().topics().is_some();
    // A rules file may have tens of thousands of rules, and all of them are looked at.
    let explained = tokio::task::spawn_blocking(move || {
        let subject = Subject { client_id: &device_id, listener: &listener, principal: &principal };
        let explained = asked(&action).map(|asked| authority.explain(&subject, &asked));
        explained.map(|explained| (explained, authority, device_id, listener, principal, action))
    });
    let (explained, authority, device_id, listener, principal, action) =
        explained.await.map_err(|_| Error::Internal)??;
    let Explanation { mut allowed, line, mut lines } = explained;
    if !allowed && line == 0 {
        let subject = Subject { client_id: &device_id, listener: &listener, principal: &principal };
        if let Some((may, why)) = authority.ask_service(&subject, &asked(&action)?).await {
            allowed = may;
            lines.push(why.to_owned());
        }
    }
    let reasons = if limited { Vec::new() } else { last(lines) };
    Ok(v1::ExplainAccessResponse { allowed, line, reasons })
}

/// Checks that the action is well-formed and in scope.
fn check(action: &Action, call: &Call) -> Result<(), Error> {
    match action {
        Action::Publish(publish) => {
            TopicName::check(&publish.topic)
                .map_err(|error| Error::invalid("publish.topic", error.to_string()))?;
            call.check_topic("publish.topic", &publish.topic)
        }
        Action::Subscribe(filter) => {
            let invalid = |error: String| Error::invalid("subscribe", error);
            let shared = parse_shared(filter).map_err(|error| invalid(error.to_string()))?;
            let inner = shared.map_or(filter.as_str(), |(_, inner)| inner);
            TopicFilter::check(inner).map_err(|error| invalid(error.to_string()))?;
            call.check_filter("subscribe", inner)
        }
    }
}

fn asked(action: &Action) -> Result<AccessQuestion<'_>, Error> {
    Ok(match action {
        Action::Subscribe(filter) => AccessQuestion::Subscribe { filter },
        Action::Publish(publish) => AccessQuestion::Publish {
            topic: &publish.topic,
            qos: match convert::known(publish.qos, "publish.qos")? {
                v1::Qos::Unspecified | v1::Qos::AtMostOnce => QoS::AtMostOnce,
                v1::Qos::AtLeastOnce => QoS::AtLeastOnce,
                v1::Qos::ExactlyOnce => QoS::ExactlyOnce,
            },
            retain: publish.retain,
            bytes: usize::try_from(publish.payload_bytes).unwrap_or(usize::MAX),
        },
    })
}

/// Returns the name and principal of a described client. The way in which it has proved its identity matters to rules only
/// as far as it has proved anything.
fn described(subject: v1::AccessSubject) -> (String, Arc<Principal>) {
    let v1::AccessSubject { listener, username, common_name, groups, claims } = subject;
    let texts = |texts: Vec<String>| texts.into_iter().map(String::into_boxed_str).collect();
    let method = match (&claims[..], &username, &common_name) {
        ([_, ..], ..) => Method::Jwt,
        (_, Some(_), _) => Method::Password,
        (.., Some(_)) => Method::Certificate,
        _ => Method::Anonymous,
    };
    let principal = Principal {
        method,
        username: username.map(String::into_boxed_str),
        common_name: common_name.map(String::into_boxed_str),
        groups: texts(groups),
        claims: claims.into_iter().map(|claim| (claim.name.into_boxed_str(), texts(claim.values))).collect(),
        ..Principal::default()
    };
    let listener = if listener.is_empty() { LISTENER.to_owned() } else { listener };
    (listener, Arc::new(principal))
}

fn last(mut lines: Vec<String>) -> Vec<String> {
    let more = lines.len().saturating_sub(MOST_REASONS + 1);
    if more > 0 {
        lines.drain(..more);
        lines.insert(0, format!("{more} rules before these do not decide"));
    }
    lines
}
