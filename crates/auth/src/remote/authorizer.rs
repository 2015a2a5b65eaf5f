//! Asks the service of the user what devices may do where the rules say nothing (`HookProvider.Authorize`).

use std::{collections::BTreeMap, future::Future, sync::Arc, time::Duration};

use access::Subject;
use config::{AuthGrpc, ConfigError, OnError};
use edge::reload::Reload;
use gateway_api::gateway;
use gateway_core::{QoS, Timestamp, parse_shared};
use prost::Message as _;
use tokio::task::JoinSet;

use super::{
    ServiceAnswer,
    guard::ServiceGuard,
    keys::Digester,
    provider::Provider,
    status::{AskedAbout, NoAnswer},
};
use crate::{Principal, hooks::v1};

/// A connection remembers an answer for this long at least, so that the request that was asked about finds it.
const LEAST_MEMORY: Duration = Duration::from_secs(1);
/// Questions at once about the subscriptions of one session.
const AT_ONCE: usize = 16;

/// Request of a device to be authorised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuthorizationRequest {
    /// Publish messages of this QoS and RETAIN flag to a topic.
    Publish { topic: Box<str>, qos: QoS, retain: bool },
    /// Subscribe to a filter, which may be shared.
    Subscribe { filter: Box<str>, qos: QoS },
}

/// Nobody has said whether it may, and the configuration does not say that it may then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoDecision;

/// See the module.
pub struct RemoteAuthorizer {
    provider: Provider,
    guard: Arc<ServiceGuard<()>>,
    on_error: OnError,
    digester: Digester,
    /// Times for which a connection remembers a yes, and a no.
    memory: [Duration; 2],
}

impl RemoteAuthorizer {
    /// For the service that is configured; `None` if it is not asked about topics. To be called within the runtime where it is
    /// to be asked.
    ///
    /// # Errors
    /// The URL or a file cannot be used.
    pub fn new(config: &AuthGrpc) -> Result<Option<Arc<Self>>, ConfigError> {
        if !config.authorizes() {
            return Ok(None);
        }
        let limits = &config.limits;
        Ok(Some(Arc::new(Self {
            provider: Provider::new(config, "credentials for questions about topics")?,
            guard: ServiceGuard::new("auth.grpc.authorize", limits.clone()),
            on_error: config.authorize_on_error,
            digester: Digester::new("auth.grpc.url")?,
            memory: [limits.cache_ttl.0, limits.cache_negative_ttl.0].map(|time| time.max(LEAST_MEMORY)),
        })))
    }

    /// Returns the files that can be read again.
    pub fn reloads(&self) -> Arc<dyn Reload> {
        Arc::new(self.provider.clone())
    }

    /// Asks whether the party may. A question that the service leaves to others is denied, since no rule says
    /// otherwise. Cancel safe.
    pub fn may(
        self: &Arc<Self>,
        subject: &Subject<'_>,
        authorization_request: &AuthorizationRequest,
    ) -> impl Future<Output = Result<bool, NoDecision>> + Send + use<> {
        let question = question(subject, authorization_request);
        let keys = self.digester.topic(&question.encode_to_vec(), subject);
        // Only what is named by the client counts: its address is not known here.
        let login_client = self.guard.login_client(None, Some(subject.client_id));
        let this = Arc::clone(self);
        async move {
            let provider = this.provider.clone();
            let about = AskedAbout::topic(&question);
            let asked = this.guard.answer(login_client, keys, async move {
                let asked = provider.client().authorize(provider.request(question)).await;
                let answer = asked.map_err(|status| about.note("auth.grpc.authorize", status.into()))?;
                match answer.into_inner().decision() {
                    v1::Decision::Allow => Ok(ServiceAnswer::Allow(())),
                    v1::Decision::Deny => Ok(ServiceAnswer::Deny),
                    v1::Decision::Ignore => Ok(ServiceAnswer::Ignore),
                    v1::Decision::Unspecified => Err(NoAnswer::from("the answer has no decision".to_owned())),
                }
            });
            match asked.await {
                Ok(ServiceAnswer::Allow(())) => Ok(true),
                Ok(ServiceAnswer::Deny | ServiceAnswer::Ignore) => Ok(false),
                Err(_) if this.on_error == OnError::Allow => Ok(true),
                Err(_) => Err(NoDecision),
            }
        }
    }

    /// Returns the filters that the party may subscribe to, sorted. Cancel safe.
    ///
    /// # Errors
    /// Nobody has said so about one of them.
    pub(crate) async fn may_subscribe_all(
        self: &Arc<Self>,
        subject: &Subject<'_>,
        filters: Vec<(Box<str>, QoS)>,
    ) -> Result<Vec<Box<str>>, NoDecision> {
        let (mut asked, mut allowed) = (JoinSet::new(), Vec::new());
        for (filter, qos) in filters {
            if asked.len() >= AT_ONCE {
                allowed.extend(told(&mut asked).await?);
            }
            let may = self.may(subject, &AuthorizationRequest::Subscribe { filter: filter.clone(), qos });
            // Only waits: what is asked runs where it does.
            asked.spawn(async move { may.await.map(|may| may.then_some(filter)) });
        }
        while !asked.is_empty() {
            allowed.extend(told(&mut asked).await?);
        }
        // Of too many the same are left out each time.
        allowed.sort_unstable();
        Ok(allowed)
    }

    /// Until when a connection remembers what it was told at `now`.
    pub(crate) fn remember_until(&self, may: bool, now: Timestamp) -> Timestamp {
        let memory = self.memory[usize::from(!may)];
        now.plus_millis(u64::try_from(memory.as_millis()).unwrap_or(u64::MAX))
    }
}

type AuthorizerAnswer = Result<Option<Box<str>>, NoDecision>;

async fn told(asked: &mut JoinSet<AuthorizerAnswer>) -> AuthorizerAnswer {
    asked.join_next().await.and_then(Result::ok).unwrap_or(Err(NoDecision))
}

fn question(subject: &Subject<'_>, authorization_request: &AuthorizationRequest) -> v1::AuthorizeRequest {
    let (action, topic, qos, retain) = match authorization_request {
        AuthorizationRequest::Publish { topic, qos, retain } => (v1::Action::Publish, topic, *qos, *retain),
        AuthorizationRequest::Subscribe { filter, qos } => (v1::Action::Subscribe, filter, *qos, false),
    };
    let shared = match authorization_request {
        AuthorizationRequest::Publish { .. } => None,
        AuthorizationRequest::Subscribe { filter, .. } => parse_shared(filter).ok().flatten(),
    };
    let (share_name, topic) = shared.unwrap_or(("", topic));
    let qos = match qos {
        QoS::AtMostOnce => gateway::v1::Qos::AtMostOnce,
        QoS::AtLeastOnce => gateway::v1::Qos::AtLeastOnce,
        QoS::ExactlyOnce => gateway::v1::Qos::ExactlyOnce,
    };
    v1::AuthorizeRequest {
        subject: Some(v1::Subject {
            client_id: subject.client_id.to_owned(),
            listener: subject.listener.to_owned(),
            common_name: subject.principal.common_name.as_deref().unwrap_or_default().to_owned(),
            principal: Some(principal(subject.principal)),
        }),
        action: action.into(),
        topic: topic.to_owned(),
        share_name: share_name.to_owned(),
        qos: qos.into(),
        retain,
    }
}

fn principal(principal: &Principal) -> v1::Principal {
    let texts = |texts: &[Box<str>]| texts.iter().map(|text| text.to_string()).collect();
    let claims: BTreeMap<_, _> = principal
        .claims
        .iter()
        .map(|(name, values)| (name.to_string(), v1::ClaimValues { values: texts(values) }))
        .collect();
    v1::Principal {
        username: principal.username.as_deref().unwrap_or_default().to_owned(),
        groups: texts(&principal.groups),
        tenant: principal.tenant.as_deref().unwrap_or_default().to_owned(),
        // The same question would be another after each step of the clock.
        expire_time: None,
        claims,
    }
}
