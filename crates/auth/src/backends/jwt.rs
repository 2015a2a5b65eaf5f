//! JSON Web Tokens of backends: signed by another party, whose public keys are in a file.

use std::{collections::HashMap, fs, path::Path, sync::Arc};

use access::{
    Principal,
    backends::{Role, Scope, TokenGrant, TokenHash, hash},
    jwt::{Expected, JwtError, SigningKeys, verify},
};
use arc_swap::ArcSwap;
use config::BackendJwt;
use parking_lot::Mutex;

use super::{UnknownCaller, now};

/// Tokens that were found good, so that not each call checks a signature; beyond it all are forgotten.
const REMEMBERED: usize = 1_024;

/// Checks tokens that others sign.
pub(super) struct Jwt {
    expected: Expected,
    role: String,
    topics: String,
    devices: String,
    keys: ArcSwap<FileKeySet>,
    /// Good tokens by their hash.
    good: Mutex<HashMap<TokenHash, Arc<TokenGrant>>>,
}

/// The keys of one reading of the file.
struct FileKeySet {
    text: Vec<u8>,
    keys: SigningKeys,
    /// Counts those with other keys than before.
    reading: u64,
}

impl Jwt {
    /// # Errors
    /// The faults of the file of keys.
    pub(super) fn open(path: &Path, config: &BackendJwt) -> Result<Self, String> {
        let expected = Expected {
            issuer: Some(config.issuer.clone()).filter(|issuer| !issuer.is_empty()),
            audience: config.audience.clone(),
            leeway: config.leeway.0.as_secs(),
            // A token that never expires could not be taken back.
            expires: true,
            username: config.name.clone(),
            ..Expected::default()
        };
        Ok(Self {
            expected,
            role: config.role.clone(),
            topics: config.topics.clone(),
            devices: config.devices.clone(),
            keys: ArcSwap::from_pointee(FileKeySet::read(path)?),
            good: Mutex::default(),
        })
    }

    /// Reads the keys again. Returns whether they are others now.
    ///
    /// # Errors
    /// The faults of the file; then the old keys stay.
    pub(super) fn reload(&self, path: &Path) -> Result<bool, String> {
        let mut new = FileKeySet::read(path)?;
        let old = self.keys.load_full();
        if old.text == new.text {
            return Ok(false);
        }
        new.reading = old.reading + 1;
        // Before what the old ones made is forgotten: then nothing of theirs is remembered anew.
        let mut good = self.good.lock();
        self.keys.store(Arc::new(new));
        good.clear();
        Ok(true)
    }

    /// Returns the number of keys.
    pub(super) fn keys(&self) -> usize {
        self.keys.load().keys.len()
    }

    /// Returns the number of the reading whose keys are in force; a reading of the same keys is not counted.
    pub(super) fn reading(&self) -> u64 {
        self.keys.load().reading
    }

    /// Returns the grant of a token, and the reading of the keys by which the token was checked.
    pub(super) fn find(&self, token: &str) -> Result<(Arc<TokenGrant>, u64), UnknownCaller> {
        let of = hash(token);
        let keys = self.keys.load_full();
        if let Some(grant) = self.good.lock().get(&of) {
            // If the keys change in between, it was good by those before.
            let good = (Arc::clone(grant), keys.reading);
            return if grant.is_expired(now()) { Err(UnknownCaller::Expired) } else { Ok(good) };
        }
        let verified = verify(token, &keys.keys, &self.expected, now()).map_err(|error| match error {
            JwtError::Expired => UnknownCaller::Expired,
            _ => UnknownCaller::Wrong,
        })?;
        let grant = self.grant(&verified.principal, verified.expires, of).ok_or(UnknownCaller::Wrong)?;
        let grant = Arc::new(grant);
        let mut good = self.good.lock();
        if !Arc::ptr_eq(&keys, &self.keys.load()) {
            // The keys have changed meanwhile.
            return Err(UnknownCaller::Wrong);
        }
        if good.len() >= REMEMBERED {
            good.clear();
        }
        good.insert(of, Arc::clone(&grant));
        Ok((grant, keys.reading))
    }

    /// Returns the grant that the claims of a good token name; `None` if they name no role, or are malformed.
    fn grant(&self, principal: &Principal, expires: Option<u64>, hash: TokenHash) -> Option<TokenGrant> {
        let claim = |name: &str| principal.claims.get(name).map(|values| &**values);
        // Of several roles the one of the gateway's that comes first.
        let role = claim(&self.role)?.iter().find_map(|role| role.parse::<Role>().ok())?;
        let list = |name: &str| -> Option<Vec<String>> {
            let values = || claim(name).unwrap_or_default().iter().map(|value| value.to_string()).collect();
            // A claim that should be there and is not grants nothing.
            (!name.is_empty()).then(values)
        };
        let scope = Scope::new(list(&self.topics), list(&self.devices)).ok()?;
        let id = principal.username.as_deref().unwrap_or("jwt without a name").to_owned();
        Some(TokenGrant { id, role, scope, created: 0, expires, note: String::new(), hash })
    }
}

impl FileKeySet {
    fn read(path: &Path) -> Result<Self, String> {
        let said = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = fs::read(path).map_err(|error| said(&error))?;
        let keys = SigningKeys::from_file(&text).map_err(|error| said(&error))?;
        Ok(Self { keys, text, reading: 0 })
    }
}
