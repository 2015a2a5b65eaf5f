//! Bans by RPC.

use std::sync::Arc;

use access::bans::{Ban, BanTarget};
use gateway_core::{
    Timestamp,
    clock::{self, now},
};

use crate::{proto::gateway::v1, server::access::Call};
use auth::abuse::{BanError, BanOrigin, BanRegistry, ListedBan};
use grpc_messages::{
    answers, convert,
    page::{PAGE_BYTES, RequestPages, fit},
    status::Error,
};

const MAX_REASON: usize = 256;
/// Longer than any name that MQTT can carry.
const MAX_NAME: usize = 65_535;

/// A page of those in force.
pub(super) fn list(
    bans: &BanRegistry,
    mut request: v1::ListBansRequest,
) -> Result<v1::ListBansResponse, Error> {
    let (limit, token) = (convert::page_size(request.page_size)?, std::mem::take(&mut request.page_token));
    request.page_size = 0;
    let pages = RequestPages::of("ListBans", &request);
    // The last of the page before: its source, kind and value.
    let after = pages.start(&token)?;
    let after = after.as_deref().map(|after| position(after).ok_or(Error::PageTokenInvalid)).transpose()?;
    let listed = bans.list();
    let from = after.map_or(0, |(target, source)| {
        listed.partition_point(|ban| (&ban.ban.target, ban.source) <= (&target, source))
    });
    let page = listed[from..].iter().take(limit);
    let (page, cut) = fit(page.map(proto), PAGE_BYTES);
    let shown = from + page.len();
    let next = (cut || shown < listed.len()).then(|| listed[..shown].last()).flatten();
    let next = next.map(|ban| {
        let target = &ban.ban.target;
        format!("{} {} {}", ban.source.as_str(), target.kind(), target.value())
    });
    Ok(v1::ListBansResponse { bans: page, next_page_token: pages.token(next.as_deref()) })
}

fn position(text: &str) -> Option<(BanTarget, BanOrigin)> {
    let mut parts = text.splitn(3, ' ');
    let source = BanOrigin::parse(parts.next()?)?;
    Some((BanTarget::parse(parts.next()?, parts.next()?).ok()?, source))
}

/// Makes one, by the caller of `call`.
pub(super) async fn add(
    bans: &Arc<BanRegistry>,
    request: v1::AddBanRequest,
    call: &Call,
) -> Result<v1::AddBanResponse, Error> {
    let v1::AddBanRequest { target: wanted, reason, expire_time } = request;
    let target = target(wanted)?;
    if reason.len() > MAX_REASON {
        return Err(Error::invalid("reason", format!("is longer than {MAX_REASON} bytes")));
    }
    let wall = clock::to_wall(now());
    let expires = convert::time("expire_time", expire_time)?;
    if expires.is_some_and(|expires| expires <= wall) {
        return Err(Error::invalid("expire_time", "is in the past"));
    }
    let expires = expires.map(|expires| expires.0.div_ceil(1_000));
    call.about(&target.to_string());
    let by = &call.caller().grant.id;
    let ban = Ban { target, reason: reason.into(), by: by.as_str().into(), made: wall.0 / 1_000, expires };
    let (made, all) = (ban.clone(), Arc::clone(bans));
    blocking(move || all.add(made)).await?;
    tracing::info!(target = %ban.target, reason = &*ban.reason, expires, by, "banned by a backend");
    Ok(v1::AddBanResponse { ban: Some(proto(&ListedBan { ban, source: BanOrigin::Rpc })) })
}

/// Removes one.
pub(super) async fn remove(
    bans: &Arc<BanRegistry>,
    request: v1::RemoveBanRequest,
    call: &Call,
) -> Result<v1::RemoveBanResponse, Error> {
    let target = target(request.target)?;
    call.about(&target.to_string());
    let (gone, all) = (target.clone(), Arc::clone(bans));
    blocking(move || all.remove(&gone)).await?;
    tracing::info!(%target, "ban removed by a backend");
    Ok(v1::RemoveBanResponse {})
}

/// Runs `work`, which waits for the disk, on a thread for blocking calls.
async fn blocking(work: impl FnOnce() -> Result<(), BanError> + Send + 'static) -> Result<(), Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(Error::Internal),
    }
}

fn target(proto: Option<v1::BanTarget>) -> Result<BanTarget, Error> {
    use v1::ban_target::Target;
    let Some(target) = proto.and_then(|proto| proto.target) else {
        return Err(Error::invalid("target", "is missing"));
    };
    let (kind, value) = match &target {
        Target::ClientId(value) => ("client_id", value),
        Target::Username(value) => ("username", value),
        Target::CommonName(value) => ("common_name", value),
        Target::Fingerprint(value) => ("fingerprint", value),
        Target::Address(value) => ("address", value),
    };
    if value.len() > MAX_NAME {
        return Err(Error::invalid(format!("target.{kind}"), format!("is longer than {MAX_NAME} bytes")));
    }
    BanTarget::parse(kind, value).map_err(|problem| Error::invalid(format!("target.{kind}"), problem))
}

fn proto(listed: &ListedBan) -> v1::Ban {
    use v1::ban_target::Target;
    let ListedBan { ban, source } = listed;
    let value = ban.target.value();
    let target = match &ban.target {
        BanTarget::ClientId(_) => Target::ClientId(value),
        BanTarget::Username(_) => Target::Username(value),
        BanTarget::CommonName(_) => Target::CommonName(value),
        BanTarget::Fingerprint(_) => Target::Fingerprint(value),
        BanTarget::Network(_) => Target::Address(value),
    };
    let source = match source {
        BanOrigin::File => v1::BanSource::File,
        BanOrigin::Rpc => v1::BanSource::Rpc,
        BanOrigin::Flapping => v1::BanSource::Flapping,
    };
    let time = |seconds: u64| answers::time(Timestamp(seconds.saturating_mul(1_000)));
    v1::Ban {
        target: Some(v1::BanTarget { target: Some(target) }),
        reason: ban.reason.to_string(),
        made_by: ban.by.to_string(),
        made_time: (ban.made > 0).then(|| time(ban.made)),
        expire_time: ban.expires.map(time),
        source: source.into(),
    }
}
