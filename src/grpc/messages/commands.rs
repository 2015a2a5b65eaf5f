//! Commands between proto messages and the gateway's types.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use gateway_core::clock;
use tonic::Code;

use super::{answers, convert};
use crate::{
    commands::{Failure, REPLY, Reply, Spec, Stage},
    config::Limits,
    grpc::{proto::gateway::v1, status::Error},
};

/// Validates what to send.
pub(in crate::grpc) fn spec(spec: Option<v1::CommandSpec>, limits: &Limits) -> Result<Spec, Error> {
    let spec = spec.ok_or_else(|| Error::invalid("spec", "is missing"))?;
    let v1::CommandSpec { device_id, name, payload, properties, qos } = spec;
    convert::check_client_id("spec.device_id", &device_id, limits)?;
    if !broker::is_one_level(&device_id) {
        let problem = "contains /, + or #, and so is not one level of a command's topic";
        return Err(Error::invalid("spec.device_id", problem));
    }
    if !broker::is_one_level(&name) {
        return Err(Error::invalid("spec.name", "is not one level of a topic: some text without /, + and #"));
    }
    if name == REPLY {
        return Err(Error::invalid("spec.name", "is the level of replies, use another"));
    }
    let qos = convert::qos("spec.qos", qos, limits)?;
    if let Some(properties) = &properties {
        let gateways = [
            ("response_topic", properties.response_topic.is_some()),
            ("correlation_data", properties.correlation_data.is_some()),
        ];
        if let Some((field, _)) = gateways.iter().find(|(_, is_set)| *is_set) {
            return Err(Error::invalid(format!("spec.properties.{field}"), "is the gateway's to set"));
        }
    }
    let properties = properties.map(|p| convert::properties("spec.properties", p)).transpose()?.flatten();
    convert::check_payload("spec.payload", &payload, properties.as_deref(), limits)?;
    Ok(Spec {
        device: Arc::from(device_id),
        name,
        // Copied: a slice would keep the whole request in memory.
        payload: Bytes::copy_from_slice(&payload),
        properties,
        qos,
    })
}

/// What a device answered.
pub(in crate::grpc) fn reply(reply: &Reply) -> v1::Reply {
    v1::Reply {
        payload: reply.payload.clone(),
        properties: reply.properties.as_deref().map(answers::properties_to_proto),
        device_status: reply.status,
        time: Some(answers::time(clock::to_wall(reply.at))),
    }
}

/// The gRPC code of a failure.
pub(in crate::grpc) fn code(why: Failure) -> Code {
    match why {
        Failure::Offline | Failure::Refused(_) | Failure::TooLarge => Code::FailedPrecondition,
        Failure::TimedOut => Code::DeadlineExceeded,
        Failure::QueueFull | Failure::TooMany(_) | Failure::Memory => Code::ResourceExhausted,
        Failure::Random => Code::Internal,
        Failure::ShuttingDown => Code::Unavailable,
    }
}

/// Its stable name.
pub(in crate::grpc) fn reason(why: Failure) -> &'static str {
    match why {
        Failure::Offline => "DEVICE_OFFLINE",
        Failure::TimedOut => "COMMAND_TIMED_OUT",
        Failure::Refused(_) => "COMMAND_REFUSED",
        Failure::TooLarge => "PACKET_TOO_LARGE",
        Failure::QueueFull => "QUEUE_FULL",
        Failure::TooMany(_) => "TOO_MANY_COMMANDS",
        Failure::Memory => "MEMORY_BUDGET",
        Failure::Random => "INTERNAL",
        Failure::ShuttingDown => "SHUTTING_DOWN",
    }
}

/// How far the command came, and what else is known.
pub(in crate::grpc) fn metadata(why: Failure, stage: Stage) -> HashMap<String, String> {
    let stage = match stage {
        Stage::Queued => "QUEUED",
        Stage::Sent => "SENT",
        Stage::Delivered => "DELIVERED",
    };
    let more = match why {
        Failure::Refused(code) => Some(("reason_code", code.to_string())),
        Failure::TooMany(key) => Some(("key", key.to_owned())),
        _ => None,
    };
    let all = [("stage", stage.to_owned())].into_iter().chain(more);
    all.map(|(name, value)| (name.to_owned(), value)).collect()
}
