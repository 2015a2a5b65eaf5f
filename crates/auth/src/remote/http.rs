//! The HTTP hook: asks a service of the user about each login, in the form that services for EMQX know.

use std::{collections::BTreeMap, sync::Arc};

use access::certificate::CertificateFields;
use broker::Account;
use config::{AuthHttp, ConfigError, OnError, Problem};
use edge::{
    reload::Reload,
    remote::{Client, Service},
    tls,
};
use hyper::StatusCode;
use serde_json::{Value, json};

use super::{
    LoginOutcome, MAX_CLAIMS, ServiceAnswer, conclude, ends, fitting,
    guard::ServiceGuard,
    keys::Digester,
    status::{AskedAbout, NoAnswer},
};
use crate::{Credentials, Method, Principal};

/// See the module.
pub(crate) struct HttpHook {
    service: Arc<Service>,
    guard: Arc<ServiceGuard<Principal>>,
    on_error: OnError,
    digester: Digester,
}

impl HttpHook {
    /// For the service that is configured. To be called within the runtime where it is to be asked.
    ///
    /// # Errors
    /// The URL or the CA cannot be used.
    pub(crate) fn new(config: &AuthHttp) -> Result<Self, ConfigError> {
        let again = config.clone();
        let service = Service::new("authorities of auth.http", config.ca.clone(), move || client(&again))?;
        let digester = Digester::new("auth.http.url")?;
        let guard = ServiceGuard::new("auth.http", config.limits.clone());
        Ok(Self { service, guard, on_error: config.on_error, digester })
    }

    /// Checks that the URL and the CA can be used.
    ///
    /// # Errors
    /// The fault, in words.
    pub(crate) fn check(config: &AuthHttp) -> Result<(), ConfigError> {
        client(config).map(drop)
    }

    /// Returns the files that can be read again.
    pub(crate) fn reloads(&self) -> Arc<dyn Reload> {
        Arc::clone(&self.service) as _
    }

    /// Bytes that a question about these credentials takes: JSON writes some characters as six.
    pub(crate) fn footprint(credentials: &Credentials) -> usize {
        let escaped = |bytes: &[u8]| -> usize {
            bytes.iter().map(|byte| if *byte < b' ' || matches!(byte, b'"' | b'\\') { 6 } else { 1 }).sum()
        };
        let username = credentials.username.as_deref().unwrap_or_default();
        let password = credentials.password.as_ref().map(|password| &*password.0).unwrap_or_default();
        [credentials.client_id.as_bytes(), username.as_bytes(), password].into_iter().map(escaped).sum()
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
        let Some(question) = question(credentials, fields) else { return LoginOutcome::Deny };
        let keys = self.digester.login(&question, credentials);
        let login_client = self.guard.login_client(credentials.address(), credentials.username.as_deref());
        let (client, about) = (self.service.client(), AskedAbout::login(credentials));
        let asked = self.guard.answer(login_client, keys, async move {
            let (status, body) = client.post(question).await?;
            understand(status, &body).map_err(|answer| about.note("auth.http", answer))
        });
        conclude(asked.await, self.on_error, credentials)
    }
}

fn client(config: &AuthHttp) -> Result<Client, ConfigError> {
    let problem = |key: &str, text: String, fix: &str| ConfigError(vec![Problem::new(key, "", text, fix)]);
    let tls = config.ca.as_deref().map(tls::client_of_ca).transpose();
    let tls = tls.map_err(|error| problem("auth.http.ca", error.to_string(), ""))?;
    Client::new(config.url.as_deref().unwrap_or_default(), tls).map_err(|text| {
        problem("auth.http.url", text, "write it like https://auth.example.com/mqtt, with auth.http.ca")
    })
}

/// Returns the body to post; `None` for a password that is no text, which JSON cannot carry.
fn question(credentials: &Credentials, fields: Option<&CertificateFields>) -> Option<Vec<u8>> {
    let password = match &credentials.password {
        Some(password) => Some(std::str::from_utf8(&password.0).ok()?),
        None => None,
    };
    let address = credentials.peer.parse::<std::net::SocketAddr>();
    let host = address.map_or_else(|_| credentials.peer.clone(), |address| address.ip().to_string());
    let body = json!({
        "clientid": credentials.client_id,
        "username": credentials.username,
        "password": password,
        "peerhost": host,
        "listener": *credentials.listener,
        "cert_common_name": fields.and_then(|fields| fields.cn.as_deref()),
        "cert_fingerprint": fields.and_then(|fields| fields.fingerprint.as_deref()),
    });
    Some(body.to_string().into_bytes())
}

/// Translates the service's response.
fn understand(status: StatusCode, body: &[u8]) -> Result<ServiceAnswer<Principal>, NoAnswer> {
    match status {
        StatusCode::NO_CONTENT => Ok(ServiceAnswer::Allow(allowed())),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Ok(ServiceAnswer::Deny),
        StatusCode::OK => Ok(understand_body(body)?),
        status => Err(status.into()),
    }
}

fn allowed() -> Principal {
    Principal { method: Method::Hook, ..Principal::default() }
}

fn understand_body(body: &[u8]) -> Result<ServiceAnswer<Principal>, String> {
    let body: Value = serde_json::from_slice(body).map_err(|_| "the answer is not JSON".to_owned())?;
    match body.get("result").and_then(Value::as_str) {
        Some("deny") => return Ok(ServiceAnswer::Deny),
        Some("ignore") => return Ok(ServiceAnswer::Ignore),
        Some("allow") => {}
        _ => return Err("the answer has no result of allow, deny or ignore".to_owned()),
    }
    let mut principal = allowed();
    let text = |value: &Value| -> Option<Box<str>> {
        match value {
            Value::String(text) => Some(text.as_str().into()),
            Value::Number(number) => Some(number.to_string().into()),
            Value::Bool(yes) => Some(yes.to_string().into()),
            _ => None,
        }
    };
    let mut claims = BTreeMap::new();
    if let Some(attributes) = body.get("client_attrs").and_then(Value::as_object) {
        for (name, value) in attributes.iter().take(MAX_CLAIMS) {
            claims.insert(name.as_str().into(), text(value).into_iter().collect());
        }
    }
    if let Some(yes) = body.get("is_superuser").and_then(text) {
        claims.insert("is_superuser".into(), [yes].into());
    }
    principal.claims = claims;
    principal.username = body.get("username").and_then(Value::as_str).map(Into::into);
    principal.tenant = body.get("tenant").and_then(Value::as_str).map(Into::into);
    if let Some(groups) = body.get("groups").and_then(Value::as_array) {
        principal.groups = groups.iter().filter_map(text).take(MAX_CLAIMS).collect();
    }
    match body.get("expire_at") {
        None | Some(Value::Null) => {}
        Some(at) => {
            let at = at.as_u64().ok_or("expire_at is no date in seconds")?;
            principal.expires = Some(ends(at.saturating_mul(1000)));
        }
    }
    fitting(principal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_answer_is_one() {
        let say =
            |status: u16, body: &str| understand(StatusCode::from_u16(status).unwrap(), body.as_bytes());
        assert!(matches!(say(204, ""), Ok(ServiceAnswer::Allow(_))));
        assert!(matches!(say(200, r#"{"result": "deny"}"#), Ok(ServiceAnswer::Deny)));
        assert!(matches!(say(200, r#"{"result": "ignore"}"#), Ok(ServiceAnswer::Ignore)));
        assert!(matches!(say(401, ""), Ok(ServiceAnswer::Deny)));
        for (status, body) in [
            (200, ""),
            (200, "allow"),
            (200, "{}"),
            (200, r#"{"result": "ALLOW"}"#),
            (200, r#"{"result": true}"#),
            (200, r#"{"result": "allow", "expire_at": "soon"}"#),
            (500, r#"{"result": "allow"}"#),
            (302, ""),
        ] {
            assert!(matches!(say(status, body), Err(NoAnswer::Failed(..))), "{status} {body}");
        }
        assert!(matches!(say(400, r#"{"result": "allow"}"#), Err(NoAnswer::Denied(_))));
        let body = r#"{"result": "allow", "is_superuser": false, "client_attrs": {"site": "n", "level": 2},
                       "groups": ["a"], "tenant": "t", "username": "u"}"#;
        let Ok(ServiceAnswer::Allow(principal)) = say(200, body) else { panic!("{body}") };
        assert_eq!((principal.method, principal.username.as_deref()), (Method::Hook, Some("u")));
        assert_eq!((principal.tenant.as_deref(), principal.groups.len()), (Some("t"), 1));
        let claims: Vec<_> = principal.claims.iter().map(|(name, values)| (&**name, &*values[0])).collect();
        assert_eq!(claims, [("is_superuser", "false"), ("level", "2"), ("site", "n")]);
    }
}
