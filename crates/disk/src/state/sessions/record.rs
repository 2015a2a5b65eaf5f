//! Records of sessions, subscriptions and groups. What is looked for first stands first.

use std::sync::Arc;

use gateway_core::{ClientId, Protocol, QoS, QueueId, Timestamp};

use store::encoding::{
    fields::{Input, begin, open, put_short_text, put_varint, seal},
    message,
};
use store::{StoredSession, StoredSubscription, StoredWill};

const ENDED: u8 = 1;
const USERNAME: u8 = 2;
const WILL: u8 = 4;
const WILL_EXPIRES: u8 = 8;
const WILL_AUTHOR: u8 = 16;
/// These two came later; versions before them cannot read a record with a tenant and a will.
const PROVED: u8 = 32;
const TENANT: u8 = 64;

/// Two bits of QoS, then these.
const QOS: u8 = 3;
const NO_LOCAL: u8 = 4;
const RETAIN_AS_PUBLISHED: u8 = 8;
const ID: u8 = 16;

/// Writes the record of `session` into `out`, which is cleared first. The number is the key.
pub(super) fn encode_session(session: &StoredSession, out: &mut Vec<u8>) {
    begin(out);
    put_short_text(out, session.client_id.as_str());
    let will = session.will.as_ref();
    let flag = |on: bool, bit: u8| if on { bit } else { 0 };
    out.push(
        flag(session.since.is_some(), ENDED)
            | flag(session.username.is_some(), USERNAME)
            | flag(will.is_some(), WILL)
            | flag(will.is_some_and(|will| will.expiry.is_some()), WILL_EXPIRES)
            | flag(will.is_some_and(|will| will.author.is_some()), WILL_AUTHOR)
            | flag(session.proved, PROVED)
            | flag(session.tenant.is_some(), TENANT),
    );
    out.push(session.protocol as u8);
    put_varint(out, session.expiry);
    put_short_text(out, &session.listener);
    if let Some(since) = session.since {
        out.extend_from_slice(&since.0.to_le_bytes());
    }
    if let Some(username) = &session.username {
        put_short_text(out, username);
    }
    if let Some(tenant) = &session.tenant {
        put_short_text(out, tenant);
    }
    if let Some(will) = will {
        put_varint(out, will.delay);
        if let Some(expiry) = will.expiry {
            put_varint(out, expiry);
        }
        if let Some(author) = &will.author {
            put_short_text(out, author);
        }
        message::encode_fields(&will.message, out);
    }
    seal(out);
}

/// The client id of a session's record.
pub(super) fn client_id(record: &[u8]) -> Option<&str> {
    open(record)?.short_text()
}

/// Reads a session's record. `listener` is the one read last: most sessions have the same, and share it.
pub(super) fn decode_session(
    queue: QueueId,
    record: &[u8],
    listener: &mut Arc<String>,
) -> Option<StoredSession> {
    let mut input = open(record)?;
    let client_id = ClientId::new(input.short_text()?);
    let flags = input.u8()?;
    let protocol = match input.u8()? {
        3 => Protocol::V3,
        4 => Protocol::V4,
        5 => Protocol::V5,
        _ => return None,
    };
    let expiry = input.varint()?;
    let name = input.short_text()?;
    if **listener != *name {
        *listener = Arc::new(name.to_owned());
    }
    let has = |bit: u8| flags & bit != 0;
    let since = if has(ENDED) { Some(Timestamp(input.u64()?)) } else { None };
    let username = if has(USERNAME) { Some(Box::from(input.short_text()?)) } else { None };
    let (proved, tenant) =
        (has(PROVED), if has(TENANT) { Some(Box::from(input.short_text()?)) } else { None });
    let will = if has(WILL) {
        let delay = input.varint()?;
        let expiry = if has(WILL_EXPIRES) { Some(input.varint()?) } else { None };
        let author = if has(WILL_AUTHOR) { Some(Arc::new(input.short_text()?.to_owned())) } else { None };
        Some(StoredWill { message: Arc::new(message::decode_fields(&mut input)?), expiry, delay, author })
    } else {
        None
    };
    let listener = Arc::clone(listener);
    Some(StoredSession {
        queue,
        client_id,
        expiry,
        since,
        protocol,
        listener,
        username,
        proved,
        tenant,
        will,
    })
}

/// Writes the record of a subscription into `out`, which is cleared first.
pub(super) fn encode_subscription(subscription: &StoredSubscription, out: &mut Vec<u8>) {
    begin(out);
    put_short_text(out, &subscription.filter);
    let flag = |on: bool, bit: u8| if on { bit } else { 0 };
    out.push(
        subscription.qos as u8
            | flag(subscription.no_local, NO_LOCAL)
            | flag(subscription.retain_as_published, RETAIN_AS_PUBLISHED)
            | flag(subscription.id.is_some(), ID),
    );
    if let Some(id) = subscription.id {
        put_varint(out, id);
    }
    seal(out);
}

/// The filter of a subscription's record.
pub(super) fn filter(record: &[u8]) -> Option<&str> {
    open(record)?.short_text()
}

/// Reads a subscription's record.
pub(super) fn decode_subscription(record: &[u8]) -> Option<StoredSubscription> {
    let mut input = open(record)?;
    let filter = input.short_text()?.to_owned();
    let flags = input.u8()?;
    Some(StoredSubscription {
        filter,
        qos: QoS::from_bits(flags & QOS)?,
        no_local: flags & NO_LOCAL != 0,
        retain_as_published: flags & RETAIN_AS_PUBLISHED != 0,
        id: if flags & ID != 0 { Some(input.varint()?) } else { None },
    })
}

/// Writes the record of a group into `out`, which is cleared first.
pub(super) fn encode_group(full_name: &str, out: &mut Vec<u8>) {
    begin(out);
    put_short_text(out, full_name);
    seal(out);
}

/// The full name in a group's record.
pub(super) fn decode_group(record: &[u8]) -> Option<&str> {
    open(record)?.short_text()
}

/// Finds the likely client id in a damaged session's record, for the log.
pub(super) fn likely_client_id(record: &[u8]) -> Option<&str> {
    Input(record.get(5..)?).short_text()
}
