//! Services of the user that decide who may connect, with which rights, and the guards between them and the devices.

mod authorizer;
mod events;
mod grpc;
mod guard;
mod http;
mod key_set;
mod keys;
mod places;
mod provider;
mod status;

use config::OnError;
use gateway_core::{Timestamp, clock};

use self::guard::Unanswered;
use super::{Credentials, Principal};

pub use self::{
    authorizer::{AuthorizationRequest, NoDecision, RemoteAuthorizer},
    events::EventSender,
};
pub(super) use self::{grpc::GrpcHook, http::HttpHook, key_set::RemoteKeySet};

/// The most claims of an answer that are kept for rules, and the most values of each.
const MAX_CLAIMS: usize = 64;
/// The most bytes of an identity: each connection holds them, and each answer that is remembered.
const MAX_PRINCIPAL: usize = 16 << 10;

/// Answer of a service.
#[derive(Debug, Clone)]
enum ServiceAnswer<P> {
    /// Yes; about a login, with who it is.
    Allow(P),
    /// No.
    Deny,
    /// The service has nothing to say about the question.
    Ignore,
}

/// Outcome of a question about a login.
pub(super) enum LoginOutcome {
    Allow(Principal),
    Deny,
    /// Nothing: the next step is asked.
    Ignore,
    Busy,
    Unavailable,
}

/// Returns the answer with the identity that the service names, if it fits.
///
/// # Errors
/// The identity is larger than may be held. Nothing is left out: a rule may deny by the part left out.
fn fitting(principal: Principal) -> Result<ServiceAnswer<Principal>, String> {
    let size = |text: &str| size_of::<Box<str>>() + text.len();
    let Principal { username, groups, claims, tenant, .. } = &principal;
    let claims = claims.iter().map(|(name, values)| {
        size_of::<Box<[Box<str>]>>() + size(name) + values.iter().map(|value| size(value)).sum::<usize>()
    });
    let names = [username.as_deref(), tenant.as_deref()].into_iter().flatten();
    let bytes = claims.sum::<usize>()
        + groups.iter().map(|group| size(group)).sum::<usize>()
        + names.map(str::len).sum::<usize>();
    if bytes > MAX_PRINCIPAL {
        return Err(format!("groups and claims of {bytes} bytes, and {MAX_PRINCIPAL} may be held"));
    }
    Ok(ServiceAnswer::Allow(principal))
}

/// Turns an answer, or the lack of one, into the outcome of a login.
fn conclude(
    answer: Result<ServiceAnswer<Principal>, Unanswered>,
    on_error: OnError,
    credentials: &Credentials,
) -> LoginOutcome {
    match (answer, on_error) {
        (Ok(ServiceAnswer::Allow(mut principal)), _) => {
            if principal.username.is_none() {
                principal.username = credentials.username.as_deref().map(Into::into);
            }
            if principal.expires.is_some_and(|at| at <= clock::now()) {
                return LoginOutcome::Deny;
            }
            LoginOutcome::Allow(principal)
        }
        (Ok(ServiceAnswer::Deny), _) => LoginOutcome::Deny,
        (Ok(ServiceAnswer::Ignore), _) | (Err(_), OnError::Next) => LoginOutcome::Ignore,
        // Nobody has said who it is.
        (Err(_), OnError::Allow) => LoginOutcome::Allow(Principal::default()),
        (Err(Unanswered::Busy), OnError::Refuse) => LoginOutcome::Busy,
        (Err(Unanswered::Silent), OnError::Refuse) => LoginOutcome::Unavailable,
    }
}

/// The gateway's time at this wall time, milliseconds since 1970; what is past is now.
fn ends(wall: u64) -> Timestamp {
    let now = clock::now();
    now.plus_millis(wall.saturating_sub(clock::to_wall(now).0))
}
