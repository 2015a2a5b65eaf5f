//! Commands between proto messages and the gateway's types.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use commands::{CommandRecord, DeviceReply, Spec, Times};
use config::Limits;
use gateway_core::{Timestamp, clock};

use super::{answers, command_state::state, convert};
use crate::status::Error;
use gateway_api::gateway::v1;

/// Longest id that a caller may choose, in bytes.
const MOST_ID: usize = 128;
/// Lifetime of a command whose caller names none, and the longest lifetime that a caller may name.
const DEFAULT_LIFE: Duration = Duration::from_hours(24);
const LONGEST_LIFE: Duration = Duration::from_hours(30 * 24);
/// The shortest interval of retries.
const LEAST_RETRY: Duration = Duration::from_secs(1);

/// Validates the id that a caller chose; `None` if it chose none.
pub fn id(id: String) -> Result<Option<String>, Error> {
    if id.is_empty() {
        return Ok(None);
    }
    if id.len() > MOST_ID || !gateway_core::is_one_level(&id) {
        let problem = format!("is not one level of a topic of at most {MOST_ID} bytes");
        return Err(Error::invalid("command_id", problem));
    }
    Ok(Some(id))
}

/// Validates when a command is to be sent.
pub fn times(
    start: Option<prost_types::Timestamp>,
    expire: Option<prost_types::Timestamp>,
    retry: Option<prost_types::Duration>,
    now: Timestamp,
) -> Result<Times, Error> {
    let at = |span: Duration| now.plus_millis(u64::try_from(span.as_millis()).unwrap_or(u64::MAX));
    let start = convert::time("start_time", start)?.map_or(now, clock::from_wall);
    let expire = convert::time("expire_time", expire)?.map_or_else(|| at(DEFAULT_LIFE), clock::from_wall);
    if expire <= now || expire > at(LONGEST_LIFE) {
        return Err(Error::invalid("expire_time", "is not in the next 30 days"));
    }
    if start >= expire {
        return Err(Error::invalid("start_time", "is not before expire_time"));
    }
    let retry = convert::span("retry_interval", retry)?;
    if retry.is_some_and(|retry| retry < LEAST_RETRY) {
        return Err(Error::invalid("retry_interval", "is less than 1 s"));
    }
    let retry = retry.map(|retry| u64::try_from(retry.as_millis()).unwrap_or(u64::MAX));
    Ok(Times { start, expire, retry })
}

/// A stored command.
pub fn command(record: &CommandRecord) -> v1::Command {
    let CommandRecord { id, spec, machine, .. } = record;
    let time = |at| Some(answers::time(clock::to_wall(at)));
    v1::Command {
        command_id: id.clone(),
        spec: Some(v1::CommandSpec {
            device_id: spec.device.to_string(),
            name: spec.name.clone(),
            payload: spec.payload.clone(),
            properties: spec.properties.as_deref().map(answers::properties_to_proto),
            qos: answers::qos_to_proto(spec.qos),
        }),
        state: state(machine.state()).into(),
        reply: record.reply.as_ref().map(reply),
        reason_code: record.code.map(u32::from),
        attempts: machine.attempts(),
        expire_time: time(machine.expires()),
        create_time: time(record.created),
        update_time: time(record.updated),
    }
}

/// Validates what to send.
pub fn spec(spec: Option<v1::CommandSpec>, limits: &Limits) -> Result<Spec, Error> {
    let spec = spec.ok_or_else(|| Error::invalid("spec", "is missing"))?;
    let v1::CommandSpec { device_id, name, payload, properties, qos } = spec;
    convert::check_client_id("spec.device_id", &device_id, limits)?;
    if !gateway_core::is_one_level(&device_id) {
        let problem = "contains /, + or #, and so is not one level of a command's topic";
        return Err(Error::invalid("spec.device_id", problem));
    }
    if !gateway_core::is_one_level(&name) {
        return Err(Error::invalid("spec.name", "is not one level of a topic: some text without /, + and #"));
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

/// Converts a device's reply.
pub fn reply(reply: &DeviceReply) -> v1::Reply {
    v1::Reply {
        payload: reply.payload.clone(),
        properties: reply.properties.as_deref().map(answers::properties_to_proto),
        device_status: reply.status,
        time: Some(answers::time(clock::to_wall(reply.at))),
    }
}
