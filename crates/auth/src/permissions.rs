//! Permissions of one connection.

use std::sync::Arc;

use access::{
    Author,
    rules::{Excess, RuleGrant, Subscribing},
};
use broker::Account;
use gateway_core::{QoS, Timestamp};

use super::{
    Principal, Remembered, Subject,
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
pub struct PermissionRefused {
    pub line: u32,
    pub why: Excess,
}

impl PermissionRefused {
    /// Returns whether the request is refused only because no rule names its topic.
    pub fn is_unnamed(self) -> bool {
        self.line == 0 && self.why == Excess::Topic
    }
}

impl Permissions {
    pub fn new(principal: Arc<Principal>) -> Self {
        Self { principal }
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

    /// May it publish this? Remembers what the rules say about the topic.
    pub fn may_publish(
        authority: &Authority,
        recent: &mut Remembered,
        decide: impl FnOnce() -> RuleGrant,
        topic: &str,
        (qos, retain, bytes): (QoS, bool, usize),
    ) -> Result<(), PermissionRefused> {
        let grant = recent.find(authority, topic, decide);
        grant.permits(qos, retain, bytes).map_err(|why| PermissionRefused { line: grant.line, why })
    }

    /// May it subscribe to `filter`? Messages are looked at on delivery, so both ways to be granted are one.
    pub fn may_subscribe(
        &self,
        authority: &Authority,
        client_id: &str,
        listener: &str,
        filter: &str,
    ) -> Result<(), PermissionRefused> {
        match authority.subscribe(&self.subject(client_id, listener), filter) {
            Subscribing::Allowed | Subscribing::OnDelivery => Ok(()),
            Subscribing::Denied(line) => Err(PermissionRefused { line, why: Excess::Topic }),
        }
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
            let asked = self.may_subscribe(authority, client_id, listener, &filter);
            if asked.is_err_and(PermissionRefused::is_unnamed) {
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
