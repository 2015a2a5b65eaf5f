//! Permissions of one connection.

use std::sync::Arc;

use access::{
    Author,
    rules::{Excess, Subscribing},
};
use broker::Account;
use gateway_core::{QoS, Timestamp};

use super::{
    Asked, AuthorizationRequest, Principal, Remembered, RemoteAuthorizer, Subject,
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

/// Names under which a connected device is asked about.
pub trait DeviceNames {
    /// Its client id.
    fn client_id(&self) -> &str;
    /// The name of its listener; `None` once its session is another connection's.
    fn listener(&self) -> Option<Arc<String>>;
}

/// A message that a device wants to publish.
#[derive(Debug, Clone, Copy)]
pub struct PublishRequest<'a> {
    /// Topic name.
    pub topic: &'a str,
    /// QoS of the PUBLISH.
    pub qos: QoS,
    /// Its RETAIN flag.
    pub retain: bool,
    /// Bytes of the payload.
    pub bytes: usize,
}

/// Decision about a request of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Authorized {
    /// Allowed.
    Granted,
    /// Not allowed.
    Refused(PermissionRefused),
    /// The user's service is being asked.
    Later,
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

    /// Decides about a message: by the rules, whose decisions are `recent`, and by the user's service if no rule names the topic.
    /// `listener` is called only for a topic that is new. Of the service's answers those in `asked` count; without one the
    /// question is begun, and the message is to be decided about again when [`Asked::poll`] is ready.
    #[inline]
    pub fn authorize_publish(
        &self,
        authority: &Authority,
        device: &impl DeviceNames,
        request: &PublishRequest<'_>,
        recent: &mut Remembered,
        asked: &mut Option<Box<Asked>>,
        now: Timestamp,
    ) -> Authorized {
        let decide = || {
            let listener = device.listener();
            let listener = listener.as_ref().map_or("", |listener| listener.as_str());
            authority.publish(&self.subject(device.client_id(), listener), request.topic)
        };
        let grant = recent.find(authority, request.topic, decide);
        let Err(why) = grant.permits(request.qos, request.retain, request.bytes) else {
            return Authorized::Granted;
        };
        let refused = PermissionRefused { line: grant.line, why };
        match authority.authorizer() {
            Some(authorizer) if refused.is_unnamed() => {
                match self.ask_service(authorizer, device, request, asked.get_or_insert_default(), now) {
                    Some(true) => Authorized::Granted,
                    Some(false) => Authorized::Refused(refused),
                    None => Authorized::Later,
                }
            }
            _ => Authorized::Refused(refused),
        }
    }

    /// The service's answer about a message; `None` while it is on its way.
    fn ask_service(
        &self,
        authorizer: &Arc<RemoteAuthorizer>,
        device: &impl DeviceNames,
        &PublishRequest { topic, qos, retain, .. }: &PublishRequest<'_>,
        asked: &mut Asked,
        now: Timestamp,
    ) -> Option<bool> {
        let told = asked.about_publish(topic, qos, retain, now);
        if told.is_none() {
            let listener = device.listener();
            let listener = listener.as_ref().map_or("", |listener| listener.as_str());
            let subject = self.subject(device.client_id(), listener);
            let request = AuthorizationRequest::Publish { topic: topic.into(), qos, retain };
            asked.begin(authorizer, &subject, request);
        }
        told
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
