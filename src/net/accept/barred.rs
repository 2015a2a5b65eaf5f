//! Those who are not let in, whatever they can prove: bans, and waits after failed logins.

use access::bans::{Fingerprint, Presented};
use broker::{Event, EventKind};
use codec::{Connect, reason};
use gateway_core::{Peer, clock, metrics::count};
use session::{Accepted, ConnectRefused};

use crate::{abuse::Barred, auth::Principal, door::DoorRefusal, net::Shared, tls::CertificateId};

/// Whether a socket of `peer` is closed before anything is read from it.
pub(super) fn at_door(peer: Peer, shared: &Shared) -> Option<DoorRefusal> {
    shared.guard.at_door(peer, clock::now()).map(|barred| match barred {
        Barred::Banned { .. } => DoorRefusal::Banned,
        Barred::Waits(_) => DoorRefusal::FailedLogins,
    })
}

/// Whether a CONNECT is refused before anybody is asked what it proves.
///
/// # Errors
/// A ban hits what it presents (0x8A), or its address waits after failed logins (0x9F).
pub(super) fn at_connect(
    connect: &Connect,
    accepted: &Accepted,
    certificate: Option<&CertificateId>,
    peer: Peer,
    shared: &Shared,
) -> Result<(), ConnectRefused> {
    let who = Presented {
        client_id: accepted.client_id.as_str(),
        username: connect.username.as_deref(),
        common_name: certificate.and_then(CertificateId::common_name),
        fingerprint: certificate.map(|certificate| Fingerprint(*certificate.fingerprint())),
        address: None,
    };
    pass(&who, accepted, peer, shared)
}

/// Somebody has proved who he is: it counts as a login of his address, and he may be banned under the name that he has
/// proved, or because he connects too often.
///
/// # Errors
/// He is banned (0x8A).
pub(super) fn admitted(
    connect: &Connect,
    accepted: &Accepted,
    principal: &Principal,
    peer: Peer,
    shared: &Shared,
) -> Result<(), ConnectRefused> {
    let client_id = accepted.client_id.as_str();
    if principal.username.is_some() && principal.username.as_deref() != connect.username.as_deref() {
        let username = principal.username.as_deref();
        pass(&Presented { client_id, username, ..Presented::default() }, accepted, peer, shared)?;
    }
    if shared.guard.admitted(client_id, principal.method.is_proof(), peer, clock::now()) {
        return Ok(());
    }
    Err(banned(accepted, shared))
}

fn pass(who: &Presented<'_>, accepted: &Accepted, peer: Peer, shared: &Shared) -> Result<(), ConnectRefused> {
    match shared.guard.at_connect(who, peer, clock::now()) {
        None => Ok(()),
        Some(Barred::Banned { .. }) => Err(banned(accepted, shared)),
        Some(Barred::Waits(_)) => {
            count(|c| c.refused_failed_logins.add(1));
            Err(ConnectRefused(Some(reason::CONNECTION_RATE_EXCEEDED)))
        }
    }
}

fn banned(accepted: &Accepted, shared: &Shared) -> ConnectRefused {
    count(|c| c.banned_connects.add(1));
    let client_id = accepted.client_id.clone();
    shared.broker.emit(Event { at: clock::now(), client_id, kind: EventKind::AuthFailed });
    ConnectRefused(Some(reason::BANNED))
}
