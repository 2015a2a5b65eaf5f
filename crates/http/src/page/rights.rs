//! Rights: the rules in force, their decisions with the reasons, tokens, and bans.

use axum::{extract::Query, response::Response};
use gateway_api::gateway::v1::{self, UnnamedAccess, ban_target::Target, explain_access_request::Action};
use gateway_core::clock;
use maud::{Markup, html};
use prost_types::Timestamp;
use serde::Deserialize;
use tonic::Status;

use super::{
    layout::{self, button, csrf, done, problem, query, time},
    tail,
    visit::{FormFields, Post, Visitor},
};

const PAGE: i32 = 100;
/// Longest life of a token that expires, in days.
const MOST_DAYS: u64 = 36_500;
const TO: &str = "/page/access";

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct RightsQuery {
    rules: String,
    tokens: String,
    bans: String,
}

pub(super) async fn show(visitor: Visitor, Query(wanted): Query<RightsQuery>) -> Response {
    page(&visitor, &wanted, None, html! {}).await
}

/// Does what the form says, and shows all as it is then.
pub(super) async fn act(Post { visitor, fields }: Post) -> Response {
    let said = perform(&visitor, &fields).await.unwrap_or_else(|status| problem(&status));
    page(&visitor, &RightsQuery::default(), Some(&fields), said).await
}

async fn perform(visitor: &Visitor, fields: &FormFields) -> Result<Markup, Status> {
    let mut security = visitor.api.security();
    match fields.get("do") {
        "explain" => {
            let named = |name: &str| {
                let value = fields.get(name).trim();
                (!value.is_empty()).then(|| value.to_owned())
            };
            let (username, common_name) = (named("username"), named("common_name"));
            let subject = (username.is_some() || common_name.is_some() || fields.ticked("anonymous"))
                .then(|| v1::AccessSubject { username, common_name, ..Default::default() });
            let topic = fields.get("topic").to_owned();
            let action = match fields.get("action") {
                "subscribe" => Action::Subscribe(topic),
                _ => Action::Publish(v1::AccessPublish {
                    topic,
                    qos: tail::qos_of(fields.get("qos")).into(),
                    retain: fields.ticked("retain"),
                    payload_bytes: 0,
                }),
            };
            let device_id = fields.get("device").to_owned();
            let request = v1::ExplainAccessRequest { device_id, subject, action: Some(action) };
            let answer = security.explain_access(request).await?.into_inner();
            Ok(html! {
                div role="status" class=(if answer.allowed { "notice good" } else { "notice bad" }) {
                    b { @if answer.allowed { "Allowed" } @else { "Denied" } @if answer.line > 0 { ", by line " (answer.line) " of the rules" } }
                    ul { @for reason in &answer.reasons { li { (reason) } } }
                }
            })
        }
        "create" => {
            let role = match fields.get("role") {
                "publisher" => v1::Role::Publisher,
                "consumer" => v1::Role::Consumer,
                "operator" => v1::Role::Operator,
                "admin" => v1::Role::Admin,
                _ => v1::Role::Reader,
            };
            let list =
                |name: &str| fields.get(name).split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let (topic_filters, device_patterns) = (list("topics"), list("devices"));
            let limited = !topic_filters.is_empty() || !device_patterns.is_empty();
            let days = match fields.get("days").parse::<u64>() {
                Ok(days) if days <= MOST_DAYS => days,
                _ => {
                    return Err(Status::invalid_argument(
                        "days is not a number up to 36500; 0 is without end",
                    ));
                }
            };
            let request = v1::CreateTokenRequest {
                role: role.into(),
                scope: limited.then_some(v1::Scope { topic_filters, device_patterns }),
                expire_time: (days > 0).then(|| after(days * 24)),
                note: fields.get("note").to_owned(),
            };
            let made = security.create_token(request).await?.into_inner();
            Ok(html! {
                div.notice.good role="status" {
                    p { "The token. It cannot be shown again:" }
                    p { code #secret { (made.secret) } }
                }
            })
        }
        "revoke" => {
            security.revoke_token(v1::RevokeTokenRequest { token_id: fields.get("id").to_owned() }).await?;
            Ok(done("The token was revoked."))
        }
        "ban" => {
            let hours = fields.get("hours").parse().unwrap_or(24);
            let target = target(fields.get("kind"), fields.get("name").trim());
            let request = v1::AddBanRequest {
                target: Some(v1::BanTarget { target: Some(target) }),
                reason: fields.get("reason").to_owned(),
                expire_time: (hours > 0).then(|| after(hours)),
            };
            security.add_ban(request).await?;
            Ok(done("The ban is in force."))
        }
        "unban" => {
            let target = target(fields.get("kind"), fields.get("name"));
            security
                .remove_ban(v1::RemoveBanRequest { target: Some(v1::BanTarget { target: Some(target) }) })
                .await?;
            Ok(done("The ban was removed."))
        }
        "reload" => {
            let answer = security.reload(v1::ReloadRequest {}).await?.into_inner();
            Ok(html! {
                div.notice role="status" {
                    "Read again:"
                    ul {
                        @for part in &answer.parts {
                            li { (part.name) ": " (part.summary) @for problem in &part.problems { " " span.bad { (problem) } } }
                        }
                    }
                }
            })
        }
        _ => Err(Status::invalid_argument("this page has no such button")),
    }
}

/// So many hours from now.
fn after(hours: u64) -> Timestamp {
    let seconds = (clock::to_wall(clock::now()).0 / 1_000).saturating_add(hours.saturating_mul(3_600));
    Timestamp { seconds: seconds.try_into().unwrap_or(i64::MAX), nanos: 0 }
}

fn target(kind: &str, name: &str) -> Target {
    let name = name.to_owned();
    match kind {
        "user name" => Target::Username(name),
        "common name" => Target::CommonName(name),
        "fingerprint" => Target::Fingerprint(name),
        "address" => Target::Address(name),
        _ => Target::ClientId(name),
    }
}

fn of_target(target: &Target) -> (&'static str, &str) {
    match target {
        Target::ClientId(name) => ("client id", name),
        Target::Username(name) => ("user name", name),
        Target::CommonName(name) => ("common name", name),
        Target::Fingerprint(name) => ("fingerprint", name),
        Target::Address(name) => ("address", name),
    }
}

async fn page(
    visitor: &Visitor,
    wanted: &RightsQuery,
    fields: Option<&FormFields>,
    said: Markup,
) -> Response {
    let kept = |name: &str| {
        fields.filter(|fields| fields.get("do") == "explain").map_or("", |fields| fields.get(name))
    };
    let body = html! {
        (said)
        section {
            h2 { "What the rules decide, and why" }
            form.line method="post" action=(TO) {
                (csrf(visitor))
                label { "Device" input name="device" required value=(kept("device")); }
                label { "wants to" select name="action" {
                    option value="publish" { "publish to" }
                    option value="subscribe" selected[kept("action") == "subscribe"] { "subscribe to" }
                } }
                label { "Topic or filter" input name="topic" required value=(kept("topic")); }
                label { "QoS" select name="qos" { option { "0" } option { "1" } option { "2" } } }
                label.check { input type="checkbox" name="retain" value="1"; "retain" }
                label { "User name, if not its own" input name="username" value=(kept("username")); }
                label { "Common name, if not its own" input name="common_name" value=(kept("common_name")); }
                label.check { input type="checkbox" name="anonymous" value="1"; "as anybody" }
                (button(visitor, "Security/ExplainAccess", "", ("do", "explain"), "Explain"))
            }
        }
        section { h2 { "Rules in force" } (rules(visitor, wanted).await) }
        section { h2 { "Tokens" } (tokens(visitor, wanted).await) }
        section { h2 { "Bans" } (bans(visitor, wanted).await) }
        section {
            h2 { "Files" }
            form method="post" action=(TO) {
                (csrf(visitor))
                (button(visitor, "Security/Reload", "quiet", ("do", "reload"), "Read certificates, tokens, rules and bans again"))
            }
        }
    };
    layout::page(visitor, TO, "Rules and tokens", body)
}

fn not_for(visitor: &Visitor, method: &str) -> Option<Markup> {
    visitor.why_not(method).map(|why| html! { p.muted { "This is " (why) "." } })
}

async fn rules(visitor: &Visitor, wanted: &RightsQuery) -> Markup {
    if let Some(not) = not_for(visitor, "Security/ListRules") {
        return not;
    }
    let request = v1::ListRulesRequest { page_size: PAGE, page_token: wanted.rules.clone() };
    let found = match visitor.api.security().list_rules(request).await {
        Ok(found) => found.into_inner(),
        Err(status) => return problem(&status),
    };
    let rest = match found.unnamed() {
        UnnamedAccess::Allowed | UnnamedAccess::Unspecified => {
            "There are no rules: every device may do everything."
        }
        UnnamedAccess::Denied => {
            "The first rule that names the device, the action and the topic decides. What none names is denied."
        }
        UnnamedAccess::Service => {
            "The first rule that names the device, the action and the topic decides. About what none names the service of auth.grpc is asked."
        }
        UnnamedAccess::Program => "The program that embeds the gateway decides.",
    };
    html! {
        p { (rest) @if !found.file.is_empty() { " They are in " code { (found.file) } "." } }
        @if !found.rules.is_empty() {
            div.wide tabindex="0" role="region" aria-label="Rules" {
                table {
                    thead { tr { th.number { "Line" } th { "Rule" } th { "Topics" } th { "For" } th { "Limits" } } }
                    tbody { @for rule in &found.rules { (rule_row(rule)) } }
                }
            }
        }
        @if !found.next_page_token.is_empty() { p { a rel="next" href={ (TO) "?" (query(&[("rules", &found.next_page_token)])) } { "Next page" } } }
    }
}

fn rule_row(rule: &v1::Rule) -> Markup {
    let action = match (rule.publish, rule.subscribe) {
        (true, true) => "publish and subscribe",
        (true, false) => "publish",
        (false, true) => "subscribe",
        (false, false) => "connect as",
    };
    let more = (rule.topic_count as usize).saturating_sub(rule.topics.len());
    html! {
        tr {
            td.number { (rule.line) }
            td { @if rule.deny { span.bad { "deny" } } @else { span.good { "allow" } } " " (action) }
            td {
                @for topic in &rule.topics { div { code { (topic) } } }
                @if more > 0 { div { "and " (more) " more" } }
            }
            td {
                @if rule.conditions.is_empty() { "everybody" }
                @for condition in &rule.conditions { div { (condition) } }
            }
            td { @for limit in &rule.limits { div { (limit) } } }
        }
    }
}

async fn tokens(visitor: &Visitor, wanted: &RightsQuery) -> Markup {
    if let Some(not) = not_for(visitor, "Security/ListTokens") {
        return not;
    }
    let request = v1::ListTokensRequest { page_size: PAGE, page_token: wanted.tokens.clone() };
    let found = match visitor.api.security().list_tokens(request).await {
        Ok(found) => found.into_inner(),
        Err(status) => return problem(&status),
    };
    let list = |list: Option<&Vec<String>>| match list {
        Some(list) if !list.is_empty() => list.join(", "),
        _ => "all".to_owned(),
    };
    html! {
        div.wide tabindex="0" role="region" aria-label="Tokens" {
            table {
                thead { tr { th { "Token" } th { "Role" } th { "Topics" } th { "Devices" } th { "Made" } th { "Ends" } th { "Note" } th { "Do" } } }
                tbody {
                    @for token in &found.tokens {
                        tr {
                            td { code { (token.token_id) } }
                            td { (token.role().as_str_name().trim_start_matches("ROLE_").to_lowercase()) }
                            td { code { (list(token.scope.as_ref().map(|scope| &scope.topic_filters))) } }
                            td { code { (list(token.scope.as_ref().map(|scope| &scope.device_patterns))) } }
                            td { (time(token.create_time.as_ref())) }
                            td { @if token.expire_time.is_none() { "never" } @else { (time(token.expire_time.as_ref())) } }
                            td { (token.note) }
                            td {
                                form.plain method="post" action=(TO) {
                                    (csrf(visitor)) input type="hidden" name="id" value=(token.token_id);
                                    (button(visitor, "Security/RevokeToken", "danger", ("do", "revoke"), "Revoke"))
                                }
                            }
                        }
                    }
                }
            }
        }
        @if !found.next_page_token.is_empty() { p { a rel="next" href={ (TO) "?" (query(&[("tokens", &found.next_page_token)])) } { "Next page" } } }
        details {
            summary { "Make a token" }
            form.line method="post" action=(TO) {
                (csrf(visitor))
                label { "Role" select name="role" { @for role in ["reader", "publisher", "consumer", "operator", "admin"] { option { (role) } } } }
                label { "Topic filters, with spaces between them; none is all" input name="topics"; }
                label { "Client ids, with * for any characters; none is all. Their queues and packets show what others sent to them, too" input name="devices"; }
                label { "Days, 0 is without end" input type="number" name="days" min="0" max=(MOST_DAYS) value="0" required; }
                label { "Who has it" input name="note" maxlength="200"; }
                (button(visitor, "Security/CreateToken", "", ("do", "create"), "Make it"))
            }
        }
    }
}

async fn bans(visitor: &Visitor, wanted: &RightsQuery) -> Markup {
    if let Some(not) = not_for(visitor, "Security/ListBans") {
        return not;
    }
    let request = v1::ListBansRequest { page_size: PAGE, page_token: wanted.bans.clone() };
    let found = match visitor.api.security().list_bans(request).await {
        Ok(found) => found.into_inner(),
        Err(status) => return problem(&status),
    };
    html! {
        @if found.bans.is_empty() { p.muted { "Nobody is banned." } } @else {
            div.wide tabindex="0" role="region" aria-label="Bans" {
                table {
                    thead { tr { th { "Who" } th { "Reason" } th { "By" } th { "Ends" } th { "Do" } } }
                    tbody {
                        @for ban in &found.bans {
                            @if let Some(target) = ban.target.as_ref().and_then(|target| target.target.as_ref()) {
                                @let (kind, name) = of_target(target);
                                tr {
                                    td { (kind) " " code { (name) } }
                                    td { (ban.reason) }
                                    td { (ban.made_by) }
                                    td { @if ban.expire_time.is_none() { "never" } @else { (time(ban.expire_time.as_ref())) } }
                                    td {
                                        @if ban.source() == v1::BanSource::File { span.why { "in the operator's file" } } @else {
                                            form.plain method="post" action=(TO) {
                                                (csrf(visitor))
                                                input type="hidden" name="kind" value=(kind); input type="hidden" name="name" value=(name);
                                                (button(visitor, "Security/RemoveBan", "quiet", ("do", "unban"), "Remove"))
                                            }
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
        @if !found.next_page_token.is_empty() { p { a rel="next" href={ (TO) "?" (query(&[("bans", &found.next_page_token)])) } { "Next page" } } }
        details {
            summary { "Ban somebody" }
            form.line method="post" action=(TO) {
                (csrf(visitor))
                label { "Kind" select name="kind" { @for kind in ["client id", "user name", "common name", "fingerprint", "address"] { option { (kind) } } } }
                label { "Name" input name="name" required; }
                label { "Reason" input name="reason" maxlength="200"; }
                label { "Hours, 0 is for good" input type="number" name="hours" min="0" max="876000" value="24"; }
                (button(visitor, "Security/AddBan", "danger", ("do", "ban"), "Ban"))
            }
        }
    }
}
