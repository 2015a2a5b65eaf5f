//! JSON Web Tokens of devices: the keys of a running gateway, and when a token ends on its clock.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use access::jwt::{self, Expected, JwtError, SigningKeys, Verified};
use arc_swap::ArcSwap;
use config::{AuthJwt, ConfigError, Problem};
use edge::reload::Reload;
use gateway_core::{Timestamp, clock};

use super::remote::RemoteKeySet;

/// Keys as they were last read without fault, and the claims that tokens must have.
pub(super) struct JwtTokens {
    key_file: Option<PathBuf>,
    secret_file: Option<PathBuf>,
    keys: ArcSwap<SigningKeys>,
    /// Keys that are fetched.
    pub(super) key_set: Option<RemoteKeySet>,
    expected: Expected,
    /// The token is the user name, not the password.
    pub(super) in_username: bool,
}

impl JwtTokens {
    /// Reads the keys, and begins to fetch those that are not in files. To be called within the runtime where they are fetched.
    ///
    /// # Errors
    /// A file cannot be read, or has no key that can be used; or the URL cannot be used.
    pub(super) fn start(config: &AuthJwt) -> Result<Self, ConfigError> {
        Ok(Self { key_set: RemoteKeySet::start(config)?, ..Self::open(config)? })
    }

    /// Checks that the files and the URL can be used.
    ///
    /// # Errors
    /// The fault, in words.
    pub(super) fn check(config: &AuthJwt) -> Result<(), ConfigError> {
        Self::open(config)?;
        RemoteKeySet::check(config)
    }

    fn open(config: &AuthJwt) -> Result<Self, ConfigError> {
        let keys = read(config.key_file.as_deref(), config.secret_file.as_deref()).map_err(|(path, problem)| {
            let key = if Some(&path) == config.secret_file.as_ref() { "secret_file" } else { "key_file" };
            let fix = "name a file with a public key (PEM), a key set (JWKS) or, as secret_file, a shared secret";
            ConfigError(vec![Problem::new(format!("auth.jwt.{key}"), path.display(), problem, fix)])
        })?;
        Ok(Self {
            key_file: config.key_file.clone(),
            secret_file: config.secret_file.clone(),
            keys: ArcSwap::from_pointee(keys),
            key_set: None,
            expected: Expected {
                issuer: Some(config.issuer.clone()).filter(|issuer| !issuer.is_empty()),
                audience: config.audience.clone(),
                leeway: config.leeway.0.as_secs(),
                expires: config.require_expiry,
                username: config.username.clone(),
                client_id: config.client_id.clone(),
                groups: config.groups.clone(),
                tenant: config.tenant.clone(),
            },
            in_username: config.in_username,
        })
    }

    /// Checks a token now; its principal says when it ends on the gateway's clock. Takes up to some 100 microseconds.
    ///
    /// # Errors
    /// [`JwtError`].
    pub(super) fn verify(&self, token: &str) -> Result<Verified, JwtError> {
        let now = clock::now();
        let wall = clock::to_wall(now).0;
        let verify = |keys: &SigningKeys| jwt::verify(token, keys, &self.expected, wall / 1000);
        let mut verified = verify(&self.keys.load());
        if let (Some(key_set), Err(error @ (JwtError::UnknownKey | JwtError::Signature))) =
            (&self.key_set, &verified)
        {
            let known = *error;
            verified = verify(&key_set.keys());
            if matches!(verified, Err(JwtError::UnknownKey)) {
                verified = Err(known);
            }
        }
        let mut verified = verified?;
        verified.principal.expires = verified.expires.map(|at| ends(at, now, wall));
        Ok(verified)
    }
}

/// Returns the instant at which the second `at` since 1970 comes, if the wall shows `wall` now.
fn ends(at: u64, now: Timestamp, wall: u64) -> Timestamp {
    now.plus_millis(at.saturating_mul(1000).saturating_sub(wall))
}

impl Reload for JwtTokens {
    fn name(&self) -> &'static str {
        "keys of tokens"
    }

    fn files(&self) -> Vec<PathBuf> {
        self.key_file.iter().chain(&self.secret_file).cloned().collect()
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        let keys = read(self.key_file.as_deref(), self.secret_file.as_deref())
            .map_err(|(path, problem)| vec![format!("{}: {problem}", path.display())])?;
        let said = format!("{} keys", keys.len());
        self.keys.store(Arc::new(keys));
        Ok(said)
    }
}

fn read(key: Option<&Path>, secret: Option<&Path>) -> Result<SigningKeys, (PathBuf, String)> {
    let open = |path: &Path| fs::read(path).map_err(|error| (path.to_owned(), error.to_string()));
    let mut keys = SigningKeys::default();
    if let Some(path) = key {
        let text = open(path)?;
        keys = keys.and(SigningKeys::from_file(&text).map_err(|error| (path.to_owned(), error.to_string()))?);
    }
    if let Some(path) = secret {
        let mut text = open(path)?;
        while text.last().is_some_and(|byte| matches!(byte, b'\r' | b'\n')) {
            text.pop();
        }
        keys =
            keys.and(SigningKeys::from_secret(&text).map_err(|error| (path.to_owned(), error.to_string()))?);
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokens_end_is_on_the_gateways_clock() {
        let (now, wall) = (Timestamp(5_000_000), 1_800_000_000_250);
        assert_eq!(ends(1_800_000_010, now, wall), Timestamp(5_009_750));
        assert_eq!(ends(1_700_000_000, now, wall), now, "what is over ends at once");
        assert_eq!(ends(u64::MAX, now, wall).0, u64::MAX - wall + 5_000_000);
    }
}
