//! Facts about a relayed device, from the gateway that authenticated it to the one that has its home.

use std::{collections::BTreeMap, net::SocketAddr};

use access::{Method, Principal};
use base64::{Engine as _, prelude::BASE64_STANDARD_NO_PAD};
use gateway_core::{Peer, Timestamp, clock};
use prost::Message;

use crate::MOST_HEADER;

/// A device that was admitted. Fields that a newer version adds are passed over.
#[derive(Clone, PartialEq, Message)]
pub struct RelayedDevice {
    /// Client id, with which the session is opened: that of CONNECT, or the one that was assigned.
    #[prost(string, tag = "1")]
    pub client_id: String,
    /// Name of the listener.
    #[prost(string, tag = "2")]
    pub listener: String,
    /// Remote address; empty for a Unix socket.
    #[prost(string, tag = "3")]
    pub peer: String,
    /// DER of the client certificate that TLS verified; empty if there was none.
    #[prost(bytes = "bytes", tag = "4")]
    pub certificate: bytes::Bytes,
    /// Authentication Data for CONNACK, after an enhanced authentication.
    #[prost(bytes = "bytes", optional, tag = "5")]
    pub auth_data: Option<bytes::Bytes>,
    #[prost(message, required, tag = "6")]
    identity: Identity,
    /// Home of its session.
    #[prost(uint32, tag = "7")]
    pub home: u32,
}

/// A [`Principal`].
#[derive(Clone, PartialEq, Message)]
struct Identity {
    #[prost(string, tag = "1")]
    method: String,
    #[prost(string, optional, tag = "2")]
    username: Option<String>,
    #[prost(string, optional, tag = "3")]
    common_name: Option<String>,
    #[prost(string, repeated, tag = "4")]
    groups: Vec<String>,
    #[prost(message, repeated, tag = "5")]
    claims: Vec<IdentityClaim>,
    #[prost(string, optional, tag = "6")]
    tenant: Option<String>,
    /// Milliseconds since 1970 on the wall clock, since the gateways' own clocks differ.
    #[prost(uint64, optional, tag = "7")]
    expires: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct IdentityClaim {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, repeated, tag = "2")]
    values: Vec<String>,
}

/// Methods by their names on a link.
const METHODS: [(Method, &str); 6] = [
    (Method::Anonymous, "anonymous"),
    (Method::Certificate, "certificate"),
    (Method::Password, "password"),
    (Method::Jwt, "jwt"),
    (Method::Scram, "scram"),
    (Method::Hook, "hook"),
];

impl RelayedDevice {
    /// A device with this proved identity, which came from `peer`.
    pub fn new(client_id: &str, listener: &str, peer: Peer, principal: &Principal) -> Self {
        let peer = if peer == Peer::UNIX { String::new() } else { SocketAddr::from(peer).to_string() };
        Self {
            client_id: client_id.to_owned(),
            listener: listener.to_owned(),
            peer,
            certificate: bytes::Bytes::new(),
            auth_data: None,
            identity: Identity::of(principal),
            home: 0,
        }
    }

    /// Its remote address; `None` if it is not one.
    pub fn peer(&self) -> Option<Peer> {
        match self.peer.as_str() {
            "" => Some(Peer::UNIX),
            text => Some(text.parse::<SocketAddr>().ok()?.into()),
        }
    }

    /// The identity that it has proved; `None` if it was proved in a way that this version does not know.
    pub fn principal(&self) -> Option<Principal> {
        self.identity.principal()
    }

    /// As the value of a header; `None` if that would be too long.
    pub(crate) fn to_header(&self) -> Option<String> {
        let header = BASE64_STANDARD_NO_PAD.encode(self.encode_to_vec());
        (header.len() <= MOST_HEADER).then_some(header)
    }

    /// Reads the value of a header; `None` if it is not one.
    pub(crate) fn from_header(value: &[u8]) -> Option<Self> {
        let device = Self::decode(&*BASE64_STANDARD_NO_PAD.decode(value).ok()?).ok()?;
        (device.peer().is_some() && device.principal().is_some()).then_some(device)
    }
}

impl Identity {
    fn of(principal: &Principal) -> Self {
        let Principal { method, username, common_name, groups, claims, tenant, expires } = principal;
        let texts = |texts: &[Box<str>]| texts.iter().map(|text| text.to_string()).collect();
        let text = |text: &Option<Box<str>>| text.as_deref().map(str::to_owned);
        let named = METHODS.iter().find(|(known, _)| known == method);
        Self {
            method: named.map_or("", |(_, name)| name).to_owned(),
            username: text(username),
            common_name: text(common_name),
            groups: texts(groups),
            claims: claims
                .iter()
                .map(|(name, values)| IdentityClaim { name: name.to_string(), values: texts(values) })
                .collect(),
            tenant: tenant.as_deref().map(str::to_owned),
            expires: expires.map(|at| clock::to_wall(at).0),
        }
    }

    fn principal(&self) -> Option<Principal> {
        let (method, _) = METHODS.iter().find(|(_, name)| *name == self.method)?;
        let texts = |texts: &[String]| texts.iter().map(|text| text.as_str().into()).collect::<Box<[_]>>();
        let claims: BTreeMap<_, _> =
            self.claims.iter().map(|claim| (claim.name.as_str().into(), texts(&claim.values))).collect();
        Some(Principal {
            method: *method,
            username: self.username.as_deref().map(Into::into),
            common_name: self.common_name.as_deref().map(Into::into),
            groups: texts(&self.groups),
            claims,
            tenant: self.tenant.as_deref().map(Into::into),
            expires: self.expires.map(|at| clock::from_wall(Timestamp(at))),
        })
    }
}
