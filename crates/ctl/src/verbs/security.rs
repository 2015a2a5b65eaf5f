//! Rights: tokens, bans, rules, tenants.

use std::collections::BTreeMap;

use clap::{Subcommand, ValueEnum};
use mqtt_gateway_client::v1::{
    AccessClaim, AccessPublish, AccessSubject, AddBanRequest, Ban, BanTarget, CreateTokenRequest,
    ExplainAccessRequest, ListBansRequest, ListRulesRequest, ListTenantsRequest, ListTokensRequest,
    QuotaUsage, ReloadRequest, RemoveBanRequest, RevokeTokenRequest, Role, Rule, Scope, Tenant, Token,
    ban_target::Target, explain_access_request::Action,
};
use prost_types::Timestamp;

use super::{answer, pages, pair, qos};
use crate::{
    VerbContext,
    failure::Failure,
    output::{at, clean, or_dash, word},
    spans,
};

/// Access.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum SecurityVerb {
    /// Explains rule by rule what a device may do. Exit code 0 if it is allowed, 1 if it is denied
    Explain(Box<ExplainVerb>),
    /// The rules in force, in the order in which they are looked at
    Rules,
    /// Tokens of backends and operators
    #[command(subcommand)]
    Tokens(TokensVerb),
    /// Bans of devices, users, certificates and addresses
    #[command(subcommand)]
    Bans(BansVerb),
    /// The tenants that are configured, with what they have and may have
    Tenants,
    /// Reads certificates, tokens, rules and all else that comes from files again. Exit code 1 if something is broken
    Reload,
}

/// What is explained.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ExplainVerb {
    /// The device
    device: String,
    /// What it wants to do
    action: Want,
    /// Topic, or filter of a subscription
    topic: String,
    /// QoS of what is published
    #[arg(short, long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(..=2))]
    qos: u8,
    /// What is published is to be retained
    #[arg(short, long)]
    retain: bool,
    /// Bytes of payload
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    size: u64,
    /// User name that was proved. Without any of these the device is who it was on its last connection
    #[arg(long, value_name = "NAME")]
    username: Option<String>,
    /// Common name of its certificate
    #[arg(long, value_name = "NAME")]
    common_name: Option<String>,
    /// A group of it; may be repeated
    #[arg(long = "group", value_name = "NAME")]
    groups: Vec<String>,
    /// A claim of its token; may be repeated
    #[arg(long = "claim", value_name = "NAME=VALUE", value_parser = pair)]
    claims: Vec<(String, String)>,
    /// Name of the listener
    #[arg(long, value_name = "NAME")]
    listener: Option<String>,
    /// As a device that has proved nothing
    #[arg(long, conflicts_with_all = ["username", "common_name", "groups", "claims"])]
    anonymous: bool,
}

/// What a device wants to do.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Want {
    /// Publish a message to a topic
    Publish,
    /// Subscribe to a filter
    Subscribe,
}

/// Tokens.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum TokensVerb {
    /// Makes a token and shows it, once
    Create {
        /// What its holder may do
        #[arg(long, value_enum)]
        role: RoleName,
        /// Topic filters, separated by commas; without it all topics
        #[arg(long, value_name = "FILTERS", value_delimiter = ',')]
        topics: Vec<String>,
        /// Client ids, with * for any characters, separated by commas; without it all devices
        #[arg(long, value_name = "PATTERNS", value_delimiter = ',')]
        devices: Vec<String>,
        /// Until when it is valid: 2026-01-31T12:00:00Z, +90d, or never
        #[arg(long, value_name = "TIME", default_value = "+90d")]
        expires: String,
        /// Who has it, for the list
        #[arg(long, value_name = "TEXT", default_value = "")]
        note: String,
    },
    /// Lists the tokens, without what opens doors
    List,
    /// Takes a token's rights away at once
    Revoke {
        /// Its id, as in the list
        id: String,
    },
}

/// What a caller is there for.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RoleName {
    /// Reads
    Reader,
    /// Reads and publishes
    Publisher,
    /// Reads and consumes groups
    Consumer,
    /// Reads, and disconnects, deletes and traces devices
    Operator,
    /// Everything
    Admin,
}

/// Bans.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum BansVerb {
    /// Lists the bans in force
    List,
    /// Makes a ban, in place of one that was made so for the same
    Add {
        #[command(flatten)]
        whom: Whom,
        /// Why, for people
        #[arg(long, value_name = "TEXT", default_value = "")]
        reason: String,
        /// When it ends: 2026-01-31T12:00:00Z, or +2h; never without it
        #[arg(long, value_name = "TIME", value_parser = spans::moment)]
        until: Option<Timestamp>,
    },
    /// Removes a ban
    Remove {
        #[command(flatten)]
        whom: Whom,
    },
}

/// Whom a ban is for.
#[derive(Debug, Clone, clap::Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Whom {
    /// A device
    #[arg(short, long, value_name = "ID")]
    device: Option<String>,
    /// A user name
    #[arg(long, value_name = "NAME")]
    username: Option<String>,
    /// The common name of a certificate
    #[arg(long, value_name = "NAME")]
    common_name: Option<String>,
    /// A certificate, by the SHA-256 of its DER
    #[arg(long, value_name = "HEX")]
    fingerprint: Option<String>,
    /// An address or network, as in 192.0.2.1 or 2001:db8::/32
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
}

impl Whom {
    fn target(self) -> Option<BanTarget> {
        let target = self
            .device
            .map(Target::ClientId)
            .or_else(|| self.username.map(Target::Username))
            .or_else(|| self.common_name.map(Target::CommonName))
            .or_else(|| self.fingerprint.map(Target::Fingerprint))
            .or_else(|| self.address.map(Target::Address));
        target.map(|target| BanTarget { target: Some(target) })
    }
}

fn target(ban: &Ban) -> [String; 2] {
    let (kind, name) = match ban.target.as_ref().and_then(|target| target.target.as_ref()) {
        Some(Target::ClientId(name)) => ("device", name.as_str()),
        Some(Target::Username(name)) => ("username", name.as_str()),
        Some(Target::CommonName(name)) => ("common-name", name.as_str()),
        Some(Target::Fingerprint(name)) => ("fingerprint", name.as_str()),
        Some(Target::Address(name)) => ("address", name.as_str()),
        None => ("-", "-"),
    };
    [kind.to_owned(), clean(name)]
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "all".to_owned() } else { clean(&names.join(",")) }
}

fn usage(usage: Option<&QuotaUsage>) -> String {
    match usage.copied().unwrap_or_default() {
        QuotaUsage { used, quota: 0 } => used.to_string(),
        QuotaUsage { used, quota } => format!("{used}/{quota}"),
    }
}

fn rule(rule: &Rule) -> Vec<String> {
    let verb = if rule.deny { "deny" } else { "allow" };
    let action = match (rule.publish, rule.subscribe) {
        (true, true) => "all",
        (true, false) => "publish",
        (false, true) => "subscribe",
        (false, false) => "connect",
    };
    let more = (rule.topic_count as usize).saturating_sub(rule.topics.len());
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let everybody = rule.conditions.is_empty().then(|| "everybody".to_owned());
    vec![
        rule.line.to_string(),
        format!("{verb} {action}"),
        clean(&rule.topics.join(", ")) + &more,
        everybody.unwrap_or_else(|| clean(&rule.conditions.join("; "))),
        or_dash(&clean(&rule.limits.join(", "))),
    ]
}

impl SecurityVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut client = context.client.security();
        match self {
            Self::Explain(verb) => verb.run(context).await,
            Self::Tokens(verb) => verb.run(context).await,
            Self::Bans(verb) => verb.run(context).await,
            Self::Rules => {
                pages!(
                    context,
                    None::<usize>,
                    |page_token| client
                        .list_rules(context.ask(ListRulesRequest { page_size: 1000, page_token })),
                    |page| {
                        let columns = &["LINE", "RULE", "TOPICS", "FOR", "LIMITS"];
                        context.out.rows(columns, &page.rules, rule)?;
                        page.rules.len()
                    }
                );
                Ok(())
            }
            Self::Tenants => {
                pages!(
                    context,
                    None::<usize>,
                    |page_token| client
                        .list_tenants(context.ask(ListTenantsRequest { page_size: 1000, page_token })),
                    |page| {
                        let columns = &[
                            "TENANT",
                            "CONNECTIONS",
                            "SESSIONS",
                            "SUBSCRIPTIONS",
                            "RETAINED",
                            "RETAINED BYTES",
                        ];
                        context.out.rows(columns, &page.tenants, |tenant: &Tenant| {
                            vec![
                                clean(&tenant.name),
                                usage(tenant.connections.as_ref()),
                                usage(tenant.sessions.as_ref()),
                                usage(tenant.subscriptions.as_ref()),
                                usage(tenant.retained_messages.as_ref()),
                                usage(tenant.retained_bytes.as_ref()),
                            ]
                        })?;
                        page.tenants.len()
                    }
                );
                Ok(())
            }
            Self::Reload => {
                let response = answer!(client.reload(context.ask(ReloadRequest {})));
                let broken = response.parts.iter().any(|part| !part.problems.is_empty());
                context.out.rows(&["PART", "RESULT"], &response.parts, |part| {
                    let told = if part.problems.is_empty() {
                        part.summary.clone()
                    } else {
                        part.problems.join("; ")
                    };
                    vec![part.name.clone(), clean(&told)]
                })?;
                context.out.flush()?;
                match broken {
                    true => Err(Failure::Local("what is broken stays as it was".to_owned())),
                    false => Ok(()),
                }
            }
        }
    }
}

impl ExplainVerb {
    async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut claims: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, value) in self.claims {
            claims.entry(name).or_default().push(value);
        }
        let subject = AccessSubject {
            listener: self.listener.unwrap_or_default(),
            username: self.username,
            common_name: self.common_name,
            groups: self.groups,
            claims: claims.into_iter().map(|(name, values)| AccessClaim { name, values }).collect(),
        };
        let action = match self.action {
            Want::Publish => Action::Publish(AccessPublish {
                topic: self.topic,
                qos: qos(self.qos),
                retain: self.retain,
                payload_bytes: self.size,
            }),
            Want::Subscribe => Action::Subscribe(self.topic),
        };
        let described = self.anonymous || subject != AccessSubject::default();
        let request = ExplainAccessRequest {
            device_id: self.device,
            subject: described.then_some(subject),
            action: Some(action),
        };
        let response = answer!(context.client.security().explain_access(context.ask(request)));
        let text: Vec<String> = response.reasons.iter().map(|reason| clean(reason)).collect();
        context.out.line_of(&text.join("\n"), &response)?;
        context.out.flush()?;
        if response.allowed { Ok(()) } else { Err(Failure::No) }
    }
}

impl TokensVerb {
    async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut client = context.client.security();
        match self {
            Self::Create { role, topics, devices, expires, note } => {
                let role = match role {
                    RoleName::Reader => Role::Reader,
                    RoleName::Publisher => Role::Publisher,
                    RoleName::Consumer => Role::Consumer,
                    RoleName::Operator => Role::Operator,
                    RoleName::Admin => Role::Admin,
                };
                let expire_time = match expires.as_str() {
                    "never" => None,
                    time => Some(spans::moment(time).map_err(Failure::Usage)?),
                };
                let scope = Scope { topic_filters: topics, device_patterns: devices };
                let scope = (scope != Scope::default()).then_some(scope);
                let request = CreateTokenRequest { role: role.into(), scope, expire_time, note };
                let response = answer!(client.create_token(context.ask(request)));
                crate::remark("the token is shown this once");
                Ok(context.out.line_of(&response.secret, &response)?)
            }
            Self::List => {
                pages!(
                    context,
                    None::<usize>,
                    |page_token| client
                        .list_tokens(context.ask(ListTokensRequest { page_size: 1000, page_token })),
                    |page| {
                        let columns = &["ID", "ROLE", "TOPICS", "DEVICES", "CREATED", "EXPIRES", "NOTE"];
                        context.out.rows(columns, &page.tokens, |token: &Token| {
                            let scope = token.scope.clone().unwrap_or_default();
                            vec![
                                token.token_id.clone(),
                                word(token.role().as_str_name(), "ROLE_"),
                                list(&scope.topic_filters),
                                list(&scope.device_patterns),
                                at(token.create_time.as_ref()),
                                token
                                    .expire_time
                                    .as_ref()
                                    .map_or_else(|| "never".to_owned(), |time| at(Some(time))),
                                clean(&token.note),
                            ]
                        })?;
                        page.tokens.len()
                    }
                );
                Ok(())
            }
            Self::Revoke { id } => {
                let response = answer!(client.revoke_token(context.ask(RevokeTokenRequest { token_id: id })));
                Ok(context.out.line_of("revoked", &response)?)
            }
        }
    }
}

impl BansVerb {
    async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut client = context.client.security();
        match self {
            Self::List => {
                pages!(
                    context,
                    None::<usize>,
                    |page_token| client
                        .list_bans(context.ask(ListBansRequest { page_size: 1000, page_token })),
                    |page| {
                        let columns = &["KIND", "WHOM", "UNTIL", "FROM", "MADE", "BY", "REASON"];
                        context.out.rows(columns, &page.bans, |ban: &Ban| {
                            let [kind, name] = target(ban);
                            vec![
                                kind,
                                name,
                                ban.expire_time
                                    .as_ref()
                                    .map_or_else(|| "never".to_owned(), |time| at(Some(time))),
                                word(ban.source().as_str_name(), "BAN_SOURCE_"),
                                at(ban.made_time.as_ref()),
                                or_dash(&ban.made_by),
                                clean(&ban.reason),
                            ]
                        })?;
                        page.bans.len()
                    }
                );
                Ok(())
            }
            Self::Add { whom, reason, until } => {
                let request = AddBanRequest { target: whom.target(), reason, expire_time: until };
                let ban = answer!(client.add_ban(context.ask(request))).ban.unwrap_or_default();
                Ok(context.out.line_of("banned", &ban)?)
            }
            Self::Remove { whom } => {
                let request = RemoveBanRequest { target: whom.target() };
                let response = answer!(client.remove_ban(context.ask(request)));
                Ok(context.out.line_of("the ban is removed", &response)?)
            }
        }
    }
}
