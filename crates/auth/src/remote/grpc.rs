//! The gRPC hook: asks a service of the user about each login (`HookProvider.Authenticate`).

use std::{net::SocketAddr, sync::Arc};

use access::certificate::CertificateFields;
use broker::Account;
use config::{AuthGrpc, ConfigError, OnError};
use edge::reload::Reload;
use prost::Message as _;

use super::{
    LoginOutcome, MAX_CLAIMS, ServiceAnswer, conclude, ends, fitting, guard::ServiceGuard, keys::Digester,
    provider::Provider, status::AskedAbout,
};
use crate::{Credentials, Method, Principal, hooks::v1};

/// See the module.
pub(crate) struct GrpcHook {
    provider: Provider,
    guard: Arc<ServiceGuard<Principal>>,
    on_error: OnError,
    digester: Digester,
}

impl GrpcHook {
    /// For the service that is configured. To be called within the runtime where it is to be asked.
    ///
    /// # Errors
    /// The URL or a file cannot be used.
    pub(crate) fn new(config: &AuthGrpc) -> Result<Self, ConfigError> {
        let guard = ServiceGuard::new("auth.grpc", config.limits.clone());
        let provider = Provider::new(config, "credentials for questions about logins")?;
        Ok(Self { provider, guard, on_error: config.on_error, digester: Digester::new("auth.grpc.url")? })
    }

    /// Checks that the URL and the files can be used.
    ///
    /// # Errors
    /// The fault, in words.
    pub(crate) fn check(config: &AuthGrpc) -> Result<(), ConfigError> {
        Provider::check(config)
    }

    /// Returns the files that can be read again.
    pub(crate) fn reloads(&self) -> Arc<dyn Reload> {
        Arc::new(self.provider.clone())
    }

    /// Charges what is remembered of clients to this account from now on; before that nothing is.
    pub(crate) fn charge_to(&self, account: &Arc<Account>) {
        self.guard.charge_to(account);
    }

    /// Asks about a login. Cancel safe.
    pub(crate) async fn ask(
        &self,
        credentials: &Credentials,
        fields: Option<&CertificateFields>,
    ) -> LoginOutcome {
        let question = question(credentials, fields);
        let keys = self.digester.login(&question.encode_to_vec(), credentials);
        let login_client = self.guard.login_client(credentials.address(), credentials.username.as_deref());
        let (provider, about) = (self.provider.clone(), AskedAbout::login(credentials));
        let asked = self.guard.answer(login_client, keys, async move {
            let asked = provider.client().authenticate(provider.request(question)).await;
            let answer = asked.map_err(|status| about.note("auth.grpc", status.into()))?;
            Ok(understand(answer.into_inner())?)
        });
        conclude(asked.await, self.on_error, credentials)
    }
}

fn question(credentials: &Credentials, fields: Option<&CertificateFields>) -> v1::AuthenticateRequest {
    let address = credentials.peer.parse::<SocketAddr>();
    let method = match (&credentials.password, &credentials.certificate) {
        (Some(_), _) => v1::Method::Password,
        (None, Some(_)) => v1::Method::Certificate,
        (None, None) => v1::Method::None,
    };
    let certificate = credentials.certificate.as_ref().map(|der| {
        let text = |field: fn(&CertificateFields) -> &Option<Box<str>>| {
            fields.and_then(|fields| field(fields).as_deref()).unwrap_or_default().to_owned()
        };
        v1::Certificate {
            der: der.clone().into(),
            common_name: text(|fields| &fields.cn),
            fingerprint: text(|fields| &fields.fingerprint),
        }
    });
    v1::AuthenticateRequest {
        client_id: credentials.client_id.clone(),
        username: credentials.username.clone(),
        password: credentials.password.as_ref().map(|password| password.0.clone()),
        certificate,
        peer: address.map_or_else(|_| String::new(), |address| address.ip().to_string()),
        listener: credentials.listener.as_str().to_owned(),
        method: method.into(),
    }
}

/// Translates the service's answer.
fn understand(answer: v1::AuthenticateResponse) -> Result<ServiceAnswer<Principal>, String> {
    match answer.decision() {
        v1::Decision::Deny => return Ok(ServiceAnswer::Deny),
        v1::Decision::Ignore => return Ok(ServiceAnswer::Ignore),
        v1::Decision::Allow => {}
        v1::Decision::Unspecified => return Err("the answer has no decision".to_owned()),
    }
    let told = answer.principal.unwrap_or_default();
    let expires = match told.expire_time {
        None => None,
        Some(at) => {
            let seconds = u64::try_from(at.seconds).map_err(|_| "expire_time is before 1970".to_owned())?;
            let millis = u64::try_from(at.nanos / 1_000_000).unwrap_or_default();
            Some(ends(seconds.saturating_mul(1000).saturating_add(millis)))
        }
    };
    let some = |text: String| Some(text).filter(|text| !text.is_empty());
    let claims = told.claims.into_iter().take(MAX_CLAIMS);
    fitting(Principal {
        method: Method::Hook,
        username: some(told.username).map(Into::into),
        groups: told.groups.into_iter().take(MAX_CLAIMS).map(Into::into).collect(),
        tenant: some(told.tenant).map(Into::into),
        expires,
        claims: claims
            .map(|(name, claim)| {
                (name.into(), claim.values.into_iter().take(MAX_CLAIMS).map(Into::into).collect())
            })
            .collect(),
        ..Principal::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_answer_of_the_provider_is_one() {
        let say = |decision: i32, expires: i64| {
            let expire_time = Some(prost_types::Timestamp { seconds: expires, nanos: 0 });
            let principal = Some(v1::Principal { expire_time, ..v1::Principal::default() });
            understand(v1::AuthenticateResponse { decision, principal })
        };
        assert!(matches!(say(1, i64::MAX), Ok(ServiceAnswer::Allow(_))));
        assert!(matches!(say(2, 0), Ok(ServiceAnswer::Deny)));
        assert!(matches!(say(3, 0), Ok(ServiceAnswer::Ignore)));
        for decision in [0, 4, -1] {
            assert!(say(decision, 0).is_err(), "{decision}");
        }
        assert!(say(1, -1).is_err(), "a date before 1970");
    }

    #[test]
    fn who_the_provider_says_it_is_is_kept_within_bounds() {
        let many = |n: usize| (0..n).map(|i| i.to_string()).collect::<Vec<_>>();
        let claims_of = |values: usize| -> std::collections::BTreeMap<_, _> {
            many(100).into_iter().map(|name| (name, v1::ClaimValues { values: many(values) })).collect()
        };
        let told = |values: usize| v1::AuthenticateResponse {
            decision: 1,
            principal: Some(v1::Principal {
                username: "u".to_owned(),
                groups: many(100),
                tenant: "t".to_owned(),
                claims: claims_of(values),
                expire_time: None,
            }),
        };
        let Ok(ServiceAnswer::Allow(principal)) = understand(told(2)) else { panic!() };
        assert_eq!((principal.method, principal.username.as_deref()), (Method::Hook, Some("u")));
        assert_eq!((principal.tenant.as_deref(), principal.expires), (Some("t"), None));
        assert_eq!((principal.groups.len(), principal.claims.len()), (64, 64));
        assert!(understand(told(64)).is_err(), "more than a connection may hold");
    }
}
