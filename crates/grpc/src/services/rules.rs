//! `Security.ListRules`: the rules in force, to whoever may read them.

use access::rules::ListedRule;

use crate::proto::gateway::v1::{self, UnnamedAccess};
use auth::Authority;
use grpc_messages::{
    convert,
    page::{PAGE_BYTES, RequestPages, fit},
    status::Error,
};

/// A page of the rules of this moment.
pub(super) fn list(
    authority: Option<&Authority>,
    mut request: v1::ListRulesRequest,
) -> Result<v1::ListRulesResponse, Error> {
    let (limit, token) = (convert::page_size(request.page_size)?, std::mem::take(&mut request.page_token));
    request.page_size = 0;
    let pages = RequestPages::of("ListRules", &request);
    // Number of rules on the pages before.
    let start = pages.start(&token)?.map(|start| start.parse().map_err(|_| Error::PageTokenInvalid));
    let start: usize = start.transpose()?.unwrap_or_default();
    let none =
        |unnamed: UnnamedAccess| v1::ListRulesResponse { unnamed: unnamed.into(), ..Default::default() };
    let Some(authority) = authority else { return Ok(none(UnnamedAccess::Allowed)) };
    let Some((rules, file)) = authority.rules() else { return Ok(none(UnnamedAccess::Program)) };
    let unnamed =
        if authority.authorizer().is_some() { UnnamedAccess::Service } else { UnnamedAccess::Denied };
    let (page, _) = fit(rules.list(start).take(limit).map(shown), PAGE_BYTES);
    let next = start.saturating_add(page.len());
    let next_page_token = pages.token((next < rules.len()).then(|| next.to_string()).as_deref());
    let file = file.map(|file| file.display().to_string()).unwrap_or_default();
    Ok(v1::ListRulesResponse { rules: page, next_page_token, file, unnamed: unnamed.into() })
}

fn shown(rule: ListedRule) -> v1::Rule {
    let ListedRule { line, deny, publish, subscribe, topics, topic_count, conditions, limits } = rule;
    let topic_count = u32::try_from(topic_count).unwrap_or(u32::MAX);
    v1::Rule { line, deny, publish, subscribe, topics, topic_count, conditions, limits }
}
