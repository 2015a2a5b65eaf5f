//! Permissions of one connection.

use std::sync::Arc;

use access::{
    Author,
    rules::{Excess, Subscribing},
};
use broker::Account;
use gateway_core::{ClientId, Peer, QoS, Timestamp, info_of_peer, log_limits::LineKind};
use session::Gate;

use super::{
    Principal, Subject,
    remote::NoDecision,
    rules::{Authority, Receiving},
};

/// Subscriptions that are held against the rules before others have their turn.
const IN_A_ROW: usize = 64;

/// Permissions of one connection, by its principal.
#[derive(Debug, Clone)]
pub struct Permissions {
    principal: Arc<Principal>,
}

/// Refused by the rule in this line of the file; 0 if by none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PermissionRefused {
    pub(crate) line: u32,
    pub(crate) why: Excess,
}

impl PermissionRefused {
    /// Returns whether the request is refused only because no rule names its topic.
    pub(crate) fn is_unnamed(self) -> bool {
        self.line == 0 && self.why == Excess::Topic
    }
}

impl Permissions {
    pub fn new(principal: Arc<Principal>) -> Self {
        Self { principal }
    }

    /// The proved identity.
    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    /// Returns the expiry of the credentials; `None` if they have none.
    pub fn expires(&self) -> Option<Timestamp> {
        self.principal.expires
    }

    /// Returns whether `principal` is the same user, of the same tenant.
    pub fn is_of_user(&self, principal: &Principal) -> bool {
        self.principal.username == principal.username && self.principal.tenant == principal.tenant
    }

    /// The user name that was proved, if there is one.
    pub fn username(&self) -> Option<&str> {
        self.principal.username.as_deref()
    }

    /// Returns the author mark of this principal at a listener, kept with messages that the client leaves; `by_service`
    /// if the user's service has allowed the message, not a rule.
    pub fn author(&self, listener: &str, by_service: bool) -> String {
        Author::write(listener, &self.principal, by_service)
    }

    /// Returns the author mark of the present principal, for messages left under an earlier mark.
    pub fn author_again(&self, before: &str) -> String {
        // Of one that cannot be read nobody knew whose it is, and nobody will.
        let Some(Author { listener, by_service, .. }) = Author::read(before) else {
            return before.to_owned();
        };
        self.author(&listener, by_service)
    }

    /// The tenant that it belongs to, if who it is says so.
    pub fn tenant(&self) -> Option<&str> {
        self.principal.tenant.as_deref()
    }

    /// Returns the subject of questions at a listener.
    pub fn subject<'a>(&'a self, client_id: &'a str, listener: &'a str) -> Subject<'a> {
        Subject { client_id, listener, principal: &self.principal }
    }

    /// Returns the filters that no rule names and the service allows, of a session's subscriptions.
    ///
    /// # Errors
    /// The service does not say so about one of them.
    pub async fn ask_again(
        &self,
        authority: &Authority,
        client_id: &str,
        listener: &str,
        filters: Vec<(String, QoS)>,
    ) -> Result<Vec<Box<str>>, NoDecision> {
        let Some(authorizer) = authority.authorizer() else { return Ok(Vec::new()) };
        let subject = self.subject(client_id, listener);
        let mut unnamed = Vec::new();
        for (number, (filter, qos)) in filters.into_iter().enumerate() {
            if number % IN_A_ROW == IN_A_ROW - 1 {
                // A client chooses how many there are.
                tokio::task::yield_now().await;
            }
            let by_rules = subscribe_by_rules(authority, &subject, &filter);
            if by_rules.is_err_and(PermissionRefused::is_unnamed) {
                unnamed.push((filter.into(), qos));
            }
        }
        authorizer.may_subscribe_all(&subject, unnamed).await
    }

    /// Looks at each message before the session gets it.
    pub fn gate(
        &self,
        authority: &Arc<Authority>,
        client_id: &str,
        listener: &Arc<String>,
        account: &Arc<Account>,
    ) -> Receiving {
        Receiving::new(authority, client_id, listener, &self.principal, account)
    }
}

/// Decides about a subscription by the rules alone. Messages are looked at on delivery, so both ways to be granted are one.
pub(crate) fn subscribe_by_rules(
    authority: &Authority,
    subject: &Subject<'_>,
    filter: &str,
) -> Result<(), PermissionRefused> {
    match authority.subscribe(subject, filter) {
        Subscribing::Allowed | Subscribing::OnDelivery => Ok(()),
        Subscribing::Denied(line) => Err(PermissionRefused { line, why: Excess::Topic }),
    }
}

/// Grants a session the filters that the user's service allows, of its present subscriptions. Filters beyond its room
/// get nothing, and the excess is logged once.
pub fn grant_held(
    gate: &mut dyn Gate,
    filters: &[Box<str>],
    peer: Peer,
    client_id: &ClientId,
    listener: &str,
) {
    let left_out = filters.iter().filter(|filter| gate.grant(filter).is_err()).count();
    if left_out > 0 {
        broker::counters::count(|c| c.subscribe_refused.add(left_out as u64));
        info_of_peer!(
            LineKind::Limit, peer.ip(), %peer, %client_id, listener, left_out,
            "subscriptions get nothing, the service allows a session no more with wildcards"
        );
    }
}
