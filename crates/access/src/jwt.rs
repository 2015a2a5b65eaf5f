//! JSON Web Tokens: keys from files and key sets, and what a token says about its device.
//!
//! Signatures are HS, RS, PS, ES and EdDSA. A key is used for its own family of algorithms only, whatever the token's
//! header asks for, so that a public key is never taken for a shared secret.

use std::collections::BTreeMap;

use jsonwebtoken::{
    Algorithm, AlgorithmFamily, DecodingKey, Validation,
    jwk::{JwkSet, PublicKeyUse},
};
use serde_json::{Map, Value};
use thiserror::Error;

use crate::{Method, Principal};

/// Longest token that is looked at.
pub(crate) const MAX_TOKEN: usize = 16 << 10;
/// Shortest shared secret that is taken: what HS256 asks for.
pub(crate) const MIN_SECRET: usize = 32;
/// The most keys of a set.
pub(crate) const MAX_KEYS: usize = 256;
/// The most claims that a token may have, and the most values of one. A token with more is refused: a rule that denies must
/// see all of them.
const MAX_CLAIMS: usize = 256;
/// The most bytes of names, groups and claims. Only a token whose claims are inside others with long names has more: each claim
/// is kept under its whole path.
const MAX_BYTES: usize = 32 << 10;
/// The most levels at which claims are looked for inside others.
const MAX_DEPTH: usize = 4;

/// Why a token is not taken. Never says what is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum JwtError {
    /// Not a token, or one with parts that are not understood.
    #[error("not a token")]
    Malformed,
    /// None of the keys is for it: there may be newer ones.
    #[error("no key for the token")]
    UnknownKey,
    /// The signature is not by the key.
    #[error("wrong signature")]
    Signature,
    /// The token has expired.
    #[error("the token has expired")]
    Expired,
    /// The token is not valid yet.
    #[error("the token is not valid yet")]
    TooEarly,
    /// Its issuer or audience is not the one that is required, or a required claim is missing.
    #[error("the token is not meant for here")]
    NotForUs,
    /// The token has more claims than are taken, or more values in one.
    #[error("the token has more than {MAX_CLAIMS} claims, or values of one")]
    TooMany,
}

/// A key or set of keys that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadKeys {
    /// Not PEM of a public key of a kind that is known.
    #[error("not a public key: PEM of RSA, EC (P-256, P-384) or Ed25519 is")]
    Pem,
    /// A shared secret that could be guessed.
    #[error("a shared secret of fewer than {MIN_SECRET} bytes")]
    Short,
    /// Not a key set.
    #[error("not a JSON Web Key Set")]
    Jwks,
    /// No key in it can be used.
    #[error("the key set has no key that can be used")]
    Empty,
    /// More than `MAX_KEYS`.
    #[error("the key set has more than {MAX_KEYS} keys")]
    Many,
}

/// Keys that tokens may be signed with.
#[derive(Clone, Default)]
pub struct SigningKeys(Vec<SigningKey>);

#[derive(Clone)]
struct SigningKey {
    /// `kid` of a key set.
    id: Option<String>,
    algorithms: Vec<Algorithm>,
    key: DecodingKey,
}

impl std::fmt::Debug for SigningKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl SigningKeys {
    /// Reads the keys of a file of public keys: a key set if it is JSON, else one key as PEM.
    ///
    /// # Errors
    /// The errors of [`Self::from_jwks`] and [`Self::from_pem`].
    pub fn from_file(text: &[u8]) -> Result<Self, BadKeys> {
        match std::str::from_utf8(text) {
            Ok(json) if json.trim_start().starts_with('{') => Self::from_jwks(json),
            _ => Self::from_pem(text),
        }
    }

    /// One public key as PEM.
    ///
    /// # Errors
    /// [`BadKeys::Pem`].
    pub fn from_pem(pem: &[u8]) -> Result<Self, BadKeys> {
        let readers = [DecodingKey::from_rsa_pem, DecodingKey::from_ec_pem, DecodingKey::from_ed_pem];
        let key = readers.iter().find_map(|read| read(pem).ok()).ok_or(BadKeys::Pem)?;
        Ok(Self(vec![SigningKey::new(None, key)]))
    }

    /// A shared secret.
    ///
    /// # Errors
    /// [`BadKeys::Short`].
    pub fn from_secret(secret: &[u8]) -> Result<Self, BadKeys> {
        if secret.len() < MIN_SECRET {
            return Err(BadKeys::Short);
        }
        Ok(Self(vec![SigningKey::new(None, DecodingKey::from_secret(secret))]))
    }

    /// A key set (RFC 7517). Keys that are not for signatures, are shared secrets, or are of unknown kinds are left out.
    ///
    /// # Errors
    /// The text is no key set, or none of its keys can be used.
    pub fn from_jwks(json: &str) -> Result<Self, BadKeys> {
        // Key by key: one that is not understood must not take the others with it.
        let set: Value = serde_json::from_str(json).map_err(|_| BadKeys::Jwks)?;
        let all = set.get("keys").and_then(Value::as_array).ok_or(BadKeys::Jwks)?;
        if all.len() > MAX_KEYS {
            return Err(BadKeys::Many);
        }
        let mut keys = Vec::new();
        for value in all {
            let one = Value::from(vec![value.clone()]);
            let Ok(set) =
                serde_json::from_value::<JwkSet>(Value::Object(Map::from_iter([("keys".into(), one)])))
            else {
                continue;
            };
            let Some(jwk) = set.keys.into_iter().next() else { continue };
            let signs = matches!(jwk.common.public_key_use, None | Some(PublicKeyUse::Signature));
            let Some(key) = DecodingKey::from_jwk(&jwk).ok().filter(|key| {
                // A key that everybody can read is no secret.
                signs && key.family() != AlgorithmFamily::Hmac
            }) else {
                continue;
            };
            let mut key = SigningKey::new(jwk.common.key_id, key);
            if let Some(named) = jwk.common.key_algorithm {
                key.algorithms.retain(|algorithm| format!("{algorithm:?}") == named.to_string());
            }
            if !key.algorithms.is_empty() {
                keys.push(key);
            }
        }
        if keys.is_empty() { Err(BadKeys::Empty) } else { Ok(Self(keys)) }
    }

    /// The keys of both.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl SigningKey {
    fn new(id: Option<String>, key: DecodingKey) -> Self {
        Self { id, algorithms: key.family().algorithms().to_vec(), key }
    }
}

/// Requirements on a token, and the claims that name its holder.
#[derive(Debug, Clone, Default)]
pub struct Expected {
    /// `iss` must be this.
    pub issuer: Option<String>,
    /// `aud` must be, or have, one of these; none takes every one.
    pub audience: Vec<String>,
    /// Clocks may differ by so many seconds.
    pub leeway: u64,
    /// True if a token without `exp` is refused.
    pub expires: bool,
    /// Claim with the user name. As in all of these, `a.b` is `b` inside `a`.
    pub username: String,
    /// Claim with the client id that the device must use; empty lets it choose.
    pub client_id: String,
    /// Claim with the groups; empty is none.
    pub groups: String,
    /// Claim with the tenant; empty is none.
    pub tenant: String,
}

/// Content of a good token.
#[derive(Debug, Clone)]
pub struct Verified {
    /// The identity it proves; `expires` is for the caller to check, who knows the gateway's clock.
    pub principal: Principal,
    /// Time at which the token ends, seconds since 1970, with the leeway.
    pub expires: Option<u64>,
    /// The client id that the device must use.
    pub client_id: Option<Box<str>>,
}

/// Returns whether a password may be a token at all: three parts in the letters of base64url.
pub fn looks_like_token(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    text.len() <= MAX_TOKEN
        && text.split('.').count() == 3
        && text.starts_with("ey")
        && text.split('.').all(|part| part.chars().all(good))
}

/// Checks a token at `now`, in seconds since 1970.
///
/// # Errors
/// [`JwtError`].
pub fn verify(token: &str, keys: &SigningKeys, expected: &Expected, now: u64) -> Result<Verified, JwtError> {
    if !looks_like_token(token) {
        return Err(JwtError::Malformed);
    }
    let header = jsonwebtoken::decode_header(token).map_err(|_| JwtError::Malformed)?;
    // The header has parts that must be understood and are not.
    if header.crit.is_some() {
        return Err(JwtError::Malformed);
    }
    let mut error = JwtError::UnknownKey;
    for key in &keys.0 {
        let named = key.id.is_none() || header.kid.is_none() || key.id == header.kid;
        if !named || !key.algorithms.contains(&header.alg) {
            continue;
        }
        let mut validation = Validation::new(header.alg);
        // Times and names are looked at below: by the clock that is given.
        validation.validate_exp = false;
        validation.validate_aud = false;
        validation.required_spec_claims.clear();
        match jsonwebtoken::decode::<Map<String, Value>>(token, &key.key, &validation) {
            Ok(token) => return expected.check(&token.claims, now),
            Err(_) => error = JwtError::Signature,
        }
    }
    Err(error)
}

impl Expected {
    fn check(&self, claims: &Map<String, Value>, now: u64) -> Result<Verified, JwtError> {
        let seconds = |name: &str| match claims.get(name) {
            None => Ok(None),
            // A date may have a fraction.
            Some(Value::Number(at)) => {
                let at = at.as_u64().or_else(|| at.as_f64().filter(|at| *at >= 0.0).map(|at| at as u64));
                at.map(Some).ok_or(JwtError::Malformed)
            }
            Some(_) => Err(JwtError::Malformed),
        };
        let expires = seconds("exp")?.map(|at| at.saturating_add(self.leeway));
        if self.expires && expires.is_none() {
            return Err(JwtError::NotForUs);
        }
        if expires.is_some_and(|at| at <= now) {
            return Err(JwtError::Expired);
        }
        if seconds("nbf")?.is_some_and(|at| at > now.saturating_add(self.leeway)) {
            return Err(JwtError::TooEarly);
        }
        let text = |name: &str| claims.get(name).and_then(Value::as_str);
        if self.issuer.as_deref().is_some_and(|issuer| text("iss") != Some(issuer)) {
            return Err(JwtError::NotForUs);
        }
        if !self.audience.is_empty() {
            let named =
                |value: &Value| value.as_str().is_some_and(|text| self.audience.iter().any(|a| a == text));
            let ours = match claims.get("aud") {
                Some(Value::Array(all)) => all.iter().any(named),
                Some(one) => named(one),
                None => false,
            };
            if !ours {
                return Err(JwtError::NotForUs);
            }
        }
        let mut kept = BTreeMap::new();
        if !keep("", claims, 0, &mut kept) {
            return Err(JwtError::TooMany);
        }
        let first =
            |name: &str| -> Option<Box<str>> { kept.get(name).and_then(|values| values.first().cloned()) };
        let client_id = match self.client_id.as_str() {
            "" => None,
            name => Some(first(name).ok_or(JwtError::NotForUs)?),
        };
        let username = first(&self.username);
        let groups = kept.get(self.groups.as_str()).cloned().unwrap_or_default();
        let tenant = first(&self.tenant).map(|tenant| tenant.as_ref().into());
        let principal =
            Principal { method: Method::Jwt, username, groups, tenant, claims: kept, ..Principal::default() };
        if principal.bytes() > MAX_BYTES {
            return Err(JwtError::TooMany);
        }
        Ok(Verified { principal, expires, client_id })
    }
}

/// Claims as text; those inside others under a path with dots. False if there are more than are taken.
#[must_use]
fn keep(
    path: &str,
    claims: &Map<String, Value>,
    depth: usize,
    kept: &mut BTreeMap<Box<str>, Box<[Box<str>]>>,
) -> bool {
    let text = |value: &Value| -> Option<Box<str>> {
        match value {
            Value::String(text) => Some(text.as_str().into()),
            Value::Number(number) => Some(number.to_string().into()),
            Value::Bool(yes) => Some(yes.to_string().into()),
            _ => None,
        }
    };
    claims.iter().all(|(name, value)| {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let values: Box<[Box<str>]> = match value {
            Value::Object(inner) if depth + 1 < MAX_DEPTH => return keep(&path, inner, depth + 1, kept),
            Value::Object(_) | Value::Null => return true,
            Value::Array(all) => all.iter().filter_map(text).collect(),
            one => text(one).into_iter().collect(),
        };
        let few = values.len() <= MAX_CLAIMS && kept.len() < MAX_CLAIMS;
        few && {
            kept.insert(path.into(), values);
            true
        }
    })
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD as B64};
    use jsonwebtoken::{EncodingKey, Header};
    use serde_json::json;

    use super::*;

    const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";
    const NOW: u64 = 1_800_000_000;

    fn token(claims: Value) -> String {
        jsonwebtoken::encode(&Header::default(), &claims, &EncodingKey::from_secret(SECRET)).unwrap()
    }

    fn expected() -> Expected {
        Expected { expires: true, username: "sub".to_owned(), ..Expected::default() }
    }

    fn check(claims: Value, expected: &Expected) -> Result<Verified, JwtError> {
        verify(&token(claims), &SigningKeys::from_secret(SECRET).unwrap(), expected, NOW)
    }

    #[test]
    fn claims_say_who_it_is() {
        let expected = Expected {
            groups: "realm.roles".to_owned(),
            tenant: "org".to_owned(),
            client_id: "device".to_owned(),
            ..expected()
        };
        let claims = json!({
            "sub": "ann", "exp": NOW + 60, "org": "acme", "device": "d1", "level": 3, "on": true, "none": null,
            "realm": {"roles": ["a", "b", {"no": 1}]},
        });
        let verified = check(claims, &expected).unwrap();
        let principal = verified.principal;
        assert_eq!((principal.method, principal.username.as_deref()), (Method::Jwt, Some("ann")));
        assert_eq!(*principal.groups, [Box::from("a"), Box::from("b")]);
        assert_eq!(principal.tenant.as_deref(), Some("acme"));
        assert_eq!(*principal.claims["level"], [Box::from("3")]);
        assert_eq!(*principal.claims["on"], [Box::from("true")]);
        assert!(!principal.claims.contains_key("none"));
        assert_eq!((verified.expires, verified.client_id.as_deref()), (Some(NOW + 60), Some("d1")));
    }

    #[test]
    fn a_token_with_more_than_is_kept_is_refused_and_not_cut() {
        let values = |count: usize| (0..count).map(|n| n.to_string()).collect::<Vec<_>>();
        let one = |count: usize| check(json!({"sub": "a", "exp": NOW + 60, "g": values(count)}), &expected());
        assert_eq!(one(MAX_CLAIMS).unwrap().principal.claims["g"].len(), MAX_CLAIMS);
        assert_eq!(one(MAX_CLAIMS + 1).unwrap_err(), JwtError::TooMany);
        let many = |count: usize| {
            let mut claims = json!({"sub": "a", "exp": NOW + 60});
            for name in values(count) {
                claims["in"][name] = 1.into();
            }
            check(claims, &expected())
        };
        assert!(many(MAX_CLAIMS - 2).is_ok());
        assert_eq!(many(MAX_CLAIMS - 1).unwrap_err(), JwtError::TooMany);
    }

    /// The path of each claim is kept with it: a token of 12 KB would be held as two megabytes.
    #[test]
    fn a_token_whose_claims_grow_when_they_are_kept_is_refused() {
        let inner: Map<String, Value> = (0..200).map(|n| (n.to_string(), json!(1))).collect();
        let nested = json!({"exp": NOW + 1, "n".repeat(8_000): inner});
        assert_eq!(check(nested, &expected()).unwrap_err(), JwtError::TooMany);
        let flat: Map<String, Value> =
            (0..200).map(|n| (format!("claim-{n}"), json!("x".repeat(30)))).collect();
        let mut flat = Value::Object(flat);
        flat["exp"] = json!(NOW + 1);
        let principal = check(flat, &expected()).unwrap().principal;
        assert!((200 * 30..MAX_BYTES).contains(&principal.bytes()), "{}", principal.bytes());
    }

    #[test]
    fn a_token_is_taken_only_in_its_time_and_by_whom_it_is_for() {
        let ok = expected();
        let strict =
            Expected { issuer: Some("me".into()), audience: vec!["x".into(), "y".into()], ..expected() };
        let late = Expected { leeway: 10, ..expected() };
        let rows = [
            (json!({"exp": NOW}), &ok, Some(JwtError::Expired)),
            (json!({"exp": NOW + 1}), &ok, None),
            (json!({"exp": NOW as f64 + 1.5}), &ok, None),
            (json!({"exp": NOW - 5}), &late, None),
            (json!({"exp": NOW - 10}), &late, Some(JwtError::Expired)),
            (json!({"exp": "tomorrow"}), &ok, Some(JwtError::Malformed)),
            (json!({"exp": -1}), &ok, Some(JwtError::Malformed)),
            (json!({}), &ok, Some(JwtError::NotForUs)),
            (json!({}), &Expected::default(), None),
            (json!({"exp": NOW + 1, "nbf": NOW + 1}), &ok, Some(JwtError::TooEarly)),
            (json!({"exp": NOW + 1, "nbf": NOW}), &ok, None),
            (json!({"exp": NOW + 1, "iss": "me", "aud": "y"}), &strict, None),
            (json!({"exp": NOW + 1, "iss": "me", "aud": ["z", "x"]}), &strict, None),
            (json!({"exp": NOW + 1, "iss": "me", "aud": "z"}), &strict, Some(JwtError::NotForUs)),
            (json!({"exp": NOW + 1, "iss": "me"}), &strict, Some(JwtError::NotForUs)),
            (json!({"exp": NOW + 1, "aud": "x"}), &strict, Some(JwtError::NotForUs)),
        ];
        for (claims, expected, error) in rows {
            assert_eq!(check(claims.clone(), expected).err(), error, "{claims}");
        }
    }

    /// A public key that is taken for a shared secret lets in whoever knows it; `none` lets in everybody.
    #[test]
    fn the_header_of_a_token_does_not_choose_how_it_is_checked() {
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let pem = pair.public_key_pem();
        let keys = SigningKeys::from_pem(pem.as_bytes()).unwrap();
        let claims = json!({"exp": NOW + 1, "sub": "eve"});
        let forged =
            jsonwebtoken::encode(&Header::default(), &claims, &EncodingKey::from_secret(pem.as_bytes()))
                .unwrap();
        assert_eq!(verify(&forged, &keys, &expected(), NOW).unwrap_err(), JwtError::UnknownKey);
        let part = |value: Value| B64.encode(value.to_string());
        for header in [json!({"alg": "none"}), json!({"alg": "HS256", "crit": ["x"], "x": 1})] {
            let unsigned = format!("{}.{}.", part(header), part(claims.clone()));
            let error =
                verify(&unsigned, &SigningKeys::from_secret(SECRET).unwrap(), &expected(), NOW).unwrap_err();
            assert_eq!(error, JwtError::Malformed);
        }
        let key = EncodingKey::from_ec_pem(pair.serialize_pem().as_bytes()).unwrap();
        let good = jsonwebtoken::encode(&Header::new(Algorithm::ES256), &claims, &key).unwrap();
        assert!(verify(&good, &keys, &expected(), NOW).is_ok());
        let other = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap().public_key_pem();
        let other = SigningKeys::from_pem(other.as_bytes()).unwrap();
        assert_eq!(verify(&good, &other, &expected(), NOW).unwrap_err(), JwtError::Signature);
    }

    #[test]
    fn every_kind_of_key_is_read_and_verifies() {
        let claims = json!({"exp": NOW + 1});
        for (algorithm, kind) in [
            (Algorithm::ES256, &rcgen::PKCS_ECDSA_P256_SHA256),
            (Algorithm::ES384, &rcgen::PKCS_ECDSA_P384_SHA384),
            (Algorithm::EdDSA, &rcgen::PKCS_ED25519),
            (Algorithm::RS256, &rcgen::PKCS_RSA_SHA256),
            (Algorithm::RS512, &rcgen::PKCS_RSA_SHA256),
            (Algorithm::PS256, &rcgen::PKCS_RSA_SHA256),
        ] {
            let pair = rcgen::KeyPair::generate_for(kind).unwrap();
            let pem = pair.serialize_pem();
            let key = match algorithm.family() {
                AlgorithmFamily::Ec => EncodingKey::from_ec_pem(pem.as_bytes()),
                AlgorithmFamily::Ed => EncodingKey::from_ed_pem(pem.as_bytes()),
                _ => EncodingKey::from_rsa_pem(pem.as_bytes()),
            }
            .unwrap();
            let signed = jsonwebtoken::encode(&Header::new(algorithm), &claims, &key).unwrap();
            let keys = SigningKeys::from_pem(pair.public_key_pem().as_bytes()).unwrap();
            assert!(verify(&signed, &keys, &expected(), NOW).is_ok(), "{algorithm:?}");
        }
    }

    #[test]
    fn a_key_set_serves_the_keys_that_are_understood() {
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let x = B64.encode(pair.public_key_raw());
        let set = json!({"keys": [
            {"kty": "OKP", "crv": "Ed25519", "x": x, "kid": "a", "use": "sig", "alg": "EdDSA"},
            {"kty": "OKP", "crv": "Ed25519", "x": x, "kid": "e", "use": "enc"},
            {"kty": "oct", "k": B64.encode(SECRET), "kid": "s"},
            {"kty": "new kind", "kid": "n"},
            7,
        ]});
        let keys = SigningKeys::from_jwks(&set.to_string()).unwrap();
        assert_eq!(keys.len(), 1);
        let key = EncodingKey::from_ed_pem(pair.serialize_pem().as_bytes()).unwrap();
        let signed = |kid: Option<&str>| {
            let header = Header { kid: kid.map(str::to_owned), ..Header::new(Algorithm::EdDSA) };
            jsonwebtoken::encode(&header, &json!({"exp": NOW + 1}), &key).unwrap()
        };
        assert!(verify(&signed(Some("a")), &keys, &expected(), NOW).is_ok());
        assert!(verify(&signed(None), &keys, &expected(), NOW).is_ok());
        assert_eq!(verify(&signed(Some("b")), &keys, &expected(), NOW).unwrap_err(), JwtError::UnknownKey);
        assert_eq!(SigningKeys::from_jwks("{}").unwrap_err(), BadKeys::Jwks);
        assert_eq!(SigningKeys::from_jwks("{\"keys\": []}").unwrap_err(), BadKeys::Empty);
        assert_eq!(SigningKeys::from_secret(b"short").unwrap_err(), BadKeys::Short);
        assert_eq!(SigningKeys::from_pem(b"x").unwrap_err(), BadKeys::Pem);
    }
}
