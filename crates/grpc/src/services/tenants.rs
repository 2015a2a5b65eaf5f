//! Tenants by RPC.

use std::sync::Arc;

use broker::{Broker, Counted, QuotaHolder};

use crate::proto::gateway::v1;
use grpc_messages::{
    convert,
    page::{PAGE_BYTES, RequestPages, fit},
    status::Error,
};

/// A page of those that are configured by name, in order of name.
pub(super) fn list(
    broker: &Broker,
    mut request: v1::ListTenantsRequest,
) -> Result<v1::ListTenantsResponse, Error> {
    let (limit, token) = (convert::page_size(request.page_size)?, std::mem::take(&mut request.page_token));
    request.page_size = 0;
    let pages = RequestPages::of("ListTenants", &request);
    // The name of the last of the page before.
    let after = pages.start(&token)?;
    let rest =
        || broker.tenants().filter(|holder| after.as_deref().is_none_or(|after| holder.name() > after));
    let (page, _) = fit(rest().take(limit).map(shown), PAGE_BYTES);
    let next = page.last().filter(|_| page.len() < rest().count());
    let next_page_token = pages.token(next.map(|tenant| tenant.name.as_str()));
    Ok(v1::ListTenantsResponse { tenants: page, next_page_token })
}

fn shown(holder: &Arc<QuotaHolder>) -> v1::Tenant {
    let usage =
        |what| Some(v1::QuotaUsage { used: holder.used(what) as u64, quota: holder.quota(what) as u64 });
    let quotas = holder.quotas();
    v1::Tenant {
        name: holder.name().to_owned(),
        connections: usage(Counted::Connections),
        sessions: usage(Counted::Sessions),
        subscriptions: usage(Counted::Subscriptions),
        retained_messages: usage(Counted::RetainedMessages),
        retained_bytes: usage(Counted::RetainedBytes),
        message_rate: quotas.message_rate,
        byte_rate: quotas.byte_rate.0 as u64,
        message_rate_out: quotas.message_rate_out,
        byte_rate_out: quotas.byte_rate_out.0 as u64,
    }
}
