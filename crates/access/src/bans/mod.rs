//! Bans: clients that may not connect, whatever they can prove, by client id, user name, certificate or address.

mod file;
mod network;

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    hash::Hash,
    net::IpAddr,
    str::FromStr,
};

use thiserror::Error;

pub use self::{
    file::{BanFileError, parse_bans},
    network::{Network, NetworkError},
};

/// SHA-256 of a certificate's DER.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

/// Peers that a ban is for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BanTarget {
    /// A client id.
    ClientId(Box<str>),
    /// A user name.
    Username(Box<str>),
    /// The common name of a client certificate.
    CommonName(Box<str>),
    /// A client certificate.
    Fingerprint(Fingerprint),
    /// An address or a network of them.
    Network(Network),
}

/// One ban.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ban {
    /// Party that it is for.
    pub target: BanTarget,
    /// Reason, for people.
    pub reason: Box<str>,
    /// Maker of the ban, for people.
    pub by: Box<str>,
    /// Time at which the ban was made; seconds since 1970, on the wall clock.
    pub made: u64,
    /// Time at which the ban ends; `None` is never.
    pub expires: Option<u64>,
}

impl Ban {
    /// Returns whether the ban counts at `now`, in seconds since 1970.
    pub fn is_in_force(&self, now: u64) -> bool {
        self.expires.is_none_or(|expires| now < expires)
    }
}

/// Attributes that a client shows.
#[derive(Debug, Clone, Copy, Default)]
pub struct BanSubject<'a> {
    /// Client id.
    pub client_id: &'a str,
    /// User name that the client gave, or that it has proved.
    pub username: Option<&'a str>,
    /// Common name of the certificate that TLS verified.
    pub common_name: Option<&'a str>,
    /// Fingerprint of that certificate.
    pub fingerprint: Option<Fingerprint>,
    /// Address; none for a Unix socket.
    pub address: Option<IpAddr>,
}

/// There are as many bans as are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("there are {0} bans already, which is the limit")]
pub struct TooManyBans(pub usize);

/// Bans of one source: a bounded number, and at most one for each target. A lookup costs a hash for each thing presented, and
/// for an address one for each length of network that occurs.
#[derive(Debug)]
pub struct BanList {
    most: usize,
    count: usize,
    client_ids: HashMap<Box<str>, Ban>,
    usernames: HashMap<Box<str>, Ban>,
    common_names: HashMap<Box<str>, Ban>,
    fingerprints: HashMap<Fingerprint, Ban>,
    /// By family and length.
    networks: BTreeMap<(bool, u8), HashMap<Network, Ban>>,
}

impl BanList {
    /// An empty one for `most` bans.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            count: 0,
            client_ids: HashMap::new(),
            usernames: HashMap::new(),
            common_names: HashMap::new(),
            fingerprints: HashMap::new(),
            networks: BTreeMap::new(),
        }
    }

    /// Adds a ban in the place of that for the same target.
    ///
    /// # Errors
    /// There is no room; nothing has changed.
    pub fn add(&mut self, ban: Ban) -> Result<(), TooManyBans> {
        if self.count >= self.most && self.get(&ban.target).is_none() {
            return Err(TooManyBans(self.most));
        }
        let before = match ban.target.clone() {
            BanTarget::ClientId(id) => self.client_ids.insert(id, ban),
            BanTarget::Username(name) => self.usernames.insert(name, ban),
            BanTarget::CommonName(name) => self.common_names.insert(name, ban),
            BanTarget::Fingerprint(print) => self.fingerprints.insert(print, ban),
            BanTarget::Network(network) => {
                self.networks.entry(network.kind()).or_default().insert(network, ban)
            }
        };
        self.count += usize::from(before.is_none());
        Ok(())
    }

    /// Removes the ban for exactly this target.
    pub fn remove(&mut self, target: &BanTarget) -> Option<Ban> {
        let removed = match target {
            BanTarget::ClientId(id) => self.client_ids.remove(id),
            BanTarget::Username(name) => self.usernames.remove(name),
            BanTarget::CommonName(name) => self.common_names.remove(name),
            BanTarget::Fingerprint(print) => self.fingerprints.remove(print),
            BanTarget::Network(network) => {
                let kind = network.kind();
                let removed = self.networks.get_mut(&kind).and_then(|bans| bans.remove(network));
                if self.networks.get(&kind).is_some_and(HashMap::is_empty) {
                    self.networks.remove(&kind);
                }
                removed
            }
        };
        self.count -= usize::from(removed.is_some());
        removed
    }

    /// The ban for exactly this target, also if it has expired.
    pub fn get(&self, target: &BanTarget) -> Option<&Ban> {
        match target {
            BanTarget::ClientId(id) => self.client_ids.get(id),
            BanTarget::Username(name) => self.usernames.get(name),
            BanTarget::CommonName(name) => self.common_names.get(name),
            BanTarget::Fingerprint(print) => self.fingerprints.get(print),
            BanTarget::Network(network) => self.networks.get(&network.kind())?.get(network),
        }
    }

    /// The ban that hits this address at `now`, that of the widest network first.
    pub fn of_address(&self, ip: IpAddr, now: u64) -> Option<&Ban> {
        if self.networks.is_empty() {
            return None;
        }
        let is_v4 = ip.to_canonical().is_ipv4();
        let mut kinds = self.networks.range((is_v4, 0)..=(is_v4, 128));
        kinds.find_map(|((_, length), bans)| in_force(bans.get(&Network::around(ip, *length)), now))
    }

    /// The ban that hits somebody at `now`.
    pub fn of(&self, who: &BanSubject<'_>, now: u64) -> Option<&Ban> {
        if self.count == 0 {
            return None;
        }
        in_force(self.client_ids.get(who.client_id), now)
            .or_else(|| in_force(self.usernames.get(who.username?), now))
            .or_else(|| in_force(self.common_names.get(who.common_name?), now))
            .or_else(|| in_force(self.fingerprints.get(&who.fingerprint?), now))
            .or_else(|| self.of_address(who.address?, now))
    }

    /// Removes what has expired; returns how many those were.
    pub fn sweep(&mut self, now: u64) -> usize {
        fn keep<K: Eq + Hash>(bans: &mut HashMap<K, Ban>, now: u64) -> usize {
            bans.retain(|_, ban| ban.is_in_force(now));
            bans.len()
        }
        let before = self.count;
        let networks: usize = self.networks.values_mut().map(|bans| keep(bans, now)).sum();
        self.networks.retain(|_, bans| !bans.is_empty());
        self.count = networks
            + keep(&mut self.client_ids, now)
            + keep(&mut self.usernames, now)
            + keep(&mut self.common_names, now)
            + keep(&mut self.fingerprints, now);
        before - self.count
    }

    /// All, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Ban> {
        let Self { client_ids, usernames, common_names, fingerprints, networks, .. } = self;
        let names = client_ids.values().chain(usernames.values()).chain(common_names.values());
        names.chain(fingerprints.values()).chain(networks.values().flat_map(HashMap::values))
    }

    /// Returns the number of bans.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there is no ban.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

fn in_force(ban: Option<&Ban>, now: u64) -> Option<&Ban> {
    ban.filter(|ban| ban.is_in_force(now))
}

impl BanTarget {
    /// Returns the kind of target, as in a file of bans.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::ClientId(_) => "client_id",
            Self::Username(_) => "username",
            Self::CommonName(_) => "common_name",
            Self::Fingerprint(_) => "fingerprint",
            Self::Network(_) => "address",
        }
    }

    /// The target of `kind`, as [`Self::kind`] calls it, that `value` names.
    ///
    /// # Errors
    /// What is wrong with the value, and the fix.
    pub fn parse(kind: &str, value: &str) -> Result<Self, String> {
        if value.is_empty() {
            return Err(format!("{kind} is empty"));
        }
        match kind {
            "client_id" => Ok(Self::ClientId(value.into())),
            "username" => Ok(Self::Username(value.into())),
            "common_name" => Ok(Self::CommonName(value.into())),
            "fingerprint" => Ok(Self::Fingerprint(value.parse()?)),
            "address" => value.parse().map(Self::Network).map_err(|error: NetworkError| error.to_string()),
            _ => Err(format!(
                "{kind:?} is not what a ban is for: client_id, username, common_name, fingerprint or address"
            )),
        }
    }

    /// The value, as [`Self::parse`] takes it.
    pub fn value(&self) -> String {
        match self {
            Self::ClientId(text) | Self::Username(text) | Self::CommonName(text) => text.to_string(),
            Self::Fingerprint(print) => print.to_string(),
            Self::Network(network) => network.to_string(),
        }
    }
}

impl fmt::Display for BanTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.kind(), self.value())
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    /// 64 hexadecimal digits; colons between them, as OpenSSL prints them, are left out.
    fn from_str(text: &str) -> Result<Self, String> {
        let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b':').collect();
        let mut print = [0; 32];
        let fits = digits.len() == 64
            && digits.chunks_exact(2).zip(&mut print).all(|(pair, byte)| {
                let digit = |at: usize| char::from(pair[at]).to_digit(16);
                let value = digit(0).zip(digit(1)).and_then(|(high, low)| u8::try_from(high << 4 | low).ok());
                *byte = value.unwrap_or_default();
                value.is_some()
            });
        fits.then_some(Self(print)).ok_or_else(|| {
            "a fingerprint is a SHA-256: 64 hexadecimal digits, with or without colons".to_owned()
        })
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ban(kind: &str, value: &str, expires: Option<u64>) -> Ban {
        let target = BanTarget::parse(kind, value).unwrap();
        Ban { target, reason: "noise".into(), by: "ops".into(), made: 0, expires }
    }

    fn list(bans: &[(&str, &str)]) -> BanList {
        let mut list = BanList::new(100);
        for (kind, value) in bans {
            list.add(ban(kind, value, None)).unwrap();
        }
        list
    }

    const PRINT: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    #[test]
    fn each_kind_of_ban_hits_its_own_and_nobody_else() {
        let list = list(&[
            ("client_id", "c"),
            ("username", "u"),
            ("common_name", "n"),
            ("fingerprint", PRINT),
            ("address", "192.0.2.0/24"),
        ]);
        let kind = |who: BanSubject<'_>| list.of(&who, 1).map(|ban| ban.target.kind());
        let nobody = BanSubject {
            client_id: "u",
            username: Some("n"),
            common_name: Some("c"),
            ..BanSubject::default()
        };
        assert_eq!(kind(nobody), None);
        assert_eq!(kind(BanSubject { client_id: "c", ..nobody }), Some("client_id"));
        assert_eq!(kind(BanSubject { username: Some("u"), ..nobody }), Some("username"));
        assert_eq!(kind(BanSubject { common_name: Some("n"), ..nobody }), Some("common_name"));
        let fingerprint = Some(PRINT.to_uppercase().parse().unwrap());
        assert_eq!(kind(BanSubject { fingerprint, ..nobody }), Some("fingerprint"));
        let address = Some("::ffff:192.0.2.9".parse().unwrap());
        assert_eq!(kind(BanSubject { address, ..nobody }), Some("address"));
        let address = Some("2001:db8::1".parse().unwrap());
        assert_eq!(kind(BanSubject { address, ..nobody }), None);
        assert_eq!(list.len(), list.iter().count());
    }

    #[test]
    fn a_ban_counts_until_it_expires_and_is_swept_after_that() {
        let mut list = BanList::new(100);
        for (kind, value) in [("client_id", "c"), ("address", "10.0.0.0/8")] {
            list.add(ban(kind, value, Some(100))).unwrap();
        }
        list.add(ban("address", "10.1.0.0/16", None)).unwrap();
        let ip = |text: &str| text.parse().unwrap();
        assert!(list.of(&BanSubject { client_id: "c", ..BanSubject::default() }, 99).is_some());
        assert!(list.of(&BanSubject { client_id: "c", ..BanSubject::default() }, 100).is_none());
        assert!(
            list.of_address(ip("10.2.0.1"), 99).is_some() && list.of_address(ip("10.2.0.1"), 100).is_none()
        );
        assert!(list.of_address(ip("10.1.0.1"), 100).is_some(), "another network hits it still");
        assert_eq!((list.sweep(100), list.len(), list.iter().count()), (2, 1, 1));
    }

    #[test]
    fn a_full_list_takes_no_more_but_a_ban_can_be_replaced_and_removed() {
        let mut list = BanList::new(2);
        list.add(ban("client_id", "a", None)).unwrap();
        list.add(ban("address", "10.0.0.1", None)).unwrap();
        assert_eq!(list.add(ban("client_id", "b", None)), Err(TooManyBans(2)));
        list.add(ban("client_id", "a", Some(5))).unwrap();
        assert_eq!(list.len(), 2);
        let target = BanTarget::parse("address", "10.0.0.1/32").unwrap();
        assert!(list.remove(&target).is_some() && list.remove(&target).is_none());
        list.add(ban("client_id", "b", None)).unwrap();
        assert_eq!((list.len(), list.networks.len()), (2, 0));
    }

    #[test]
    fn a_target_is_read_as_it_is_written() {
        for (kind, value) in [("client_id", "a/b"), ("fingerprint", PRINT), ("address", "10.0.0.0/8")] {
            assert_eq!(BanTarget::parse(kind, value).unwrap().value(), value);
        }
        let colons: Vec<String> =
            PRINT.as_bytes().chunks(2).map(|b| String::from_utf8_lossy(b).into_owned()).collect();
        assert_eq!(BanTarget::parse("fingerprint", &colons.join(":")).unwrap().value(), PRINT);
        for (kind, value) in [("client_id", ""), ("fingerprint", "12"), ("address", "x"), ("group", "x")] {
            assert!(BanTarget::parse(kind, value).is_err(), "{kind} {value}");
        }
        assert!(BanTarget::parse("fingerprint", &"g".repeat(64)).is_err());
        assert!(BanTarget::parse("fingerprint", &"é".repeat(32)).is_err());
    }
}
