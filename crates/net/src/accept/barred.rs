//! Refusals that no credentials can avert: bans, and waits after failed logins.

use std::borrow::Cow;

use access::{
    bans::{BanSubject, Fingerprint},
    scram,
};
use broker::{Event, EventKind};
use codec::{Connect, reason};
use edge::{door::DoorRefusal, tls::CertificateId};
use gateway_core::{Peer, clock};
use session::{Accepted, ConnectRefused};

use crate::{NetShared, counters::count};
use auth::{
    Principal,
    abuse::{Barred, LoginName},
};

/// Returns the refusal if a socket of `peer` is to be closed before anything is read from it.
pub(super) fn at_door(peer: Peer, shared: &NetShared) -> Option<DoorRefusal> {
    shared.guard.at_door(peer, clock::now()).map(|barred| match barred {
        Barred::Banned { .. } => DoorRefusal::Banned,
        Barred::Waits(_) => DoorRefusal::FailedLogins,
    })
}

/// Refuses a CONNECT of a barred client before its credentials are checked.
///
/// # Errors
/// A ban hits what it presents (0x8A), or its address waits after failed logins (0x9F).
pub(super) fn at_connect(
    connect: &Connect,
    accepted: &Accepted,
    certificate: Option<&CertificateId>,
    peer: Peer,
    shared: &NetShared,
) -> Result<(), ConnectRefused> {
    let who = BanSubject {
        client_id: accepted.client_id.as_str(),
        username: connect.username.as_deref(),
        common_name: certificate.and_then(CertificateId::common_name),
        fingerprint: certificate.map(|certificate| Fingerprint(*certificate.fingerprint())),
        address: None,
    };
    let name = given_name(connect);
    let login = LoginName { username: name.as_deref(), client_id: who.client_id };
    match shared.guard.at_connect(&who, &login, peer, clock::now()) {
        None => Ok(()),
        Some(Barred::Banned { .. }) => Err(banned(accepted, shared)),
        Some(Barred::Waits(_)) => {
            count(|c| c.refused_failed_logins.add(1));
            Err(ConnectRefused(Some(reason::CONNECTION_RATE_EXCEEDED)))
        }
    }
}

/// A client that the doors have admitted comes to its home, which knows its own bans and logins.
///
/// # Errors
/// As of [`at_connect`] and [`admitted`].
pub(super) fn at_home(
    connect: &Connect,
    accepted: &Accepted,
    certificate: Option<&CertificateId>,
    principal: &Principal,
    peer: Peer,
    home: &NetShared,
) -> Result<(), ConnectRefused> {
    at_connect(connect, accepted, certificate, peer, home)?;
    admitted(connect, accepted, principal, peer, home)
}

/// A login has failed: it counts for its address, and for the account that it was for.
pub(super) fn failed(connect: &Connect, accepted: &Accepted, peer: Peer, shared: &NetShared) {
    let name = given_name(connect);
    let login = LoginName { username: name.as_deref(), client_id: accepted.client_id.as_str() };
    shared.guard.failed(&login, peer, clock::now());
}

/// The user name that a CONNECT gives, wherever its method of authentication has it.
fn given_name(connect: &Connect) -> Option<Cow<'_, str>> {
    match connect.auth_method.as_deref() {
        Some(scram::METHOD) => {
            let data = connect.auth_data.as_deref().unwrap_or_default();
            scram::user_of(data).map(Cow::Owned)
        }
        Some(_) => None,
        None => connect.username.as_deref().map(Cow::Borrowed),
    }
}

/// Somebody has proved who he is: it counts as a login of his account, and he may be banned under the name that he has
/// proved, or because he connects too often.
///
/// # Errors
/// He is banned (0x8A).
pub(super) fn admitted(
    connect: &Connect,
    accepted: &Accepted,
    principal: &Principal,
    peer: Peer,
    shared: &NetShared,
) -> Result<(), ConnectRefused> {
    let client_id = accepted.client_id.as_str();
    if principal.username.is_some() && principal.username.as_deref() != connect.username.as_deref() {
        let username = principal.username.as_deref();
        if shared.guard.ban(&BanSubject { client_id, username, ..BanSubject::default() }, peer).is_some() {
            return Err(banned(accepted, shared));
        }
    }
    let name = given_name(connect);
    if shared.guard.admitted(
        &LoginName { username: name.as_deref(), client_id },
        principal,
        peer,
        clock::now(),
    ) {
        return Ok(());
    }
    Err(banned(accepted, shared))
}

fn banned(accepted: &Accepted, shared: &NetShared) -> ConnectRefused {
    count(|c| c.banned_connects.add(1));
    let client_id = accepted.client_id.clone();
    shared.emit(Event { at: clock::now(), client_id, kind: EventKind::AuthFailed });
    ConnectRefused(Some(reason::BANNED))
}
