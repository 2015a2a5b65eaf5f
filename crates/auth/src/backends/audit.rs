//! The audit log: a line for every call that was denied and for every administrative one, on a target of its own.
//!
//! A line names the caller, the call, its subject, and its end; never a token, a password or a payload. Peers can cause
//! denied calls at will, so of those a few lines from one address pass in ten seconds, and the others are counted.

use std::{fmt::Display, net::IpAddr};

use gateway_core::log_limits::{LineKind, peer_limits};
use telemetry::AUDIT;

use super::Caller;
use crate::counters::count;

/// A call.
#[derive(Debug, Clone, Copy)]
pub struct AuditLine<'a> {
    /// The caller; `None` for an unknown one.
    pub caller: Option<&'a Caller>,
    /// Of gRPC its path, of HTTP method and path.
    pub method: &'a str,
    /// With what: a device, a topic, a token's id.
    pub target: Option<&'a str>,
    /// From where.
    pub peer: Option<IpAddr>,
}

/// A call that was denied, or a part of one.
pub fn denied(line: AuditLine<'_>, result: &dyn Display) {
    let suppressed = match line.peer {
        Some(peer) => peer_limits().pass(LineKind::Denied, peer),
        None => Some(0),
    };
    match suppressed {
        Some(suppressed) => write(line, result, Some(suppressed).filter(|count| *count > 0)),
        None => count(|c| c.audit_suppressed.add(1)),
    }
}

/// An administrative call that was let through, with its outcome.
pub fn done(line: AuditLine<'_>, result: &dyn Display) {
    write(line, result, None);
}

fn write(
    AuditLine { caller, method, target, peer }: AuditLine<'_>,
    result: &dyn Display,
    suppressed: Option<u64>,
) {
    tracing::info!(
        target: AUDIT,
        caller = caller.map_or("unknown", |caller| caller.grant.id.as_str()),
        by = caller.map(|caller| caller.credential.as_str()),
        role = caller.map(|caller| caller.grant.role.as_str()),
        method,
        object = target,
        result = %result,
        peer = peer.map(tracing::field::display),
        suppressed,
    );
}
