//! The password file of a running gateway.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use access::passwords::Passwords;
use arc_swap::ArcSwap;
use config::{Auth, ConfigError, Problem};
use edge::reload::Reload;
use tracing::warn;

use super::proofs::Proofs;

/// The users of a file as it was last read without fault.
pub(super) struct PasswordFile {
    path: PathBuf,
    users: ArcSwap<Passwords>,
    /// Of this file, and forgotten when it is read again.
    pub(super) proofs: Proofs,
}

impl PasswordFile {
    /// Reads the file that is configured; `None` if none is.
    ///
    /// # Errors
    /// The file cannot be read, or has a line that cannot be used; or the system gives no random numbers.
    pub(super) fn open(config: &Auth) -> Result<Option<Self>, ConfigError> {
        let Some(path) = config.password_file.as_deref() else { return Ok(None) };
        let users = read(path).map_err(|problems| {
            let fix = "mend it with mqtt-server passwd";
            let problem = |text| Problem::new("auth.password_file", path.display(), text, fix);
            ConfigError(problems.into_iter().map(problem).collect())
        })?;
        let proofs = Proofs::new(config.password_cache_size, config.password_cache_ttl.0).map_err(|_| {
            let fix = "start it where /dev/urandom can be read";
            let text = "the system gives no random numbers";
            ConfigError(vec![Problem::new("auth.password_file", path.display(), text, fix)])
        })?;
        warn_of_kinds(path, &users);
        Ok(Some(Self { path: path.to_owned(), users: ArcSwap::from_pointee(users), proofs }))
    }

    /// The users now.
    pub(super) fn users(&self) -> Arc<Passwords> {
        self.users.load_full()
    }
}

impl Reload for PasswordFile {
    fn name(&self) -> &'static str {
        "passwords"
    }

    fn files(&self) -> Vec<PathBuf> {
        vec![self.path.clone()]
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        let path = self.path.display();
        let users = read(&self.path).map_err(|problems| {
            problems.into_iter().map(|problem| format!("{path}: {problem}")).collect::<Vec<_>>()
        })?;
        let said = format!("{} users", users.len());
        warn_of_kinds(&self.path, &users);
        self.users.store(Arc::new(users));
        self.proofs.clear();
        Ok(said)
    }
}

/// Says so if a wrong password cannot cost the same for all users.
fn warn_of_kinds(path: &Path, users: &Passwords) {
    let kinds = users.kinds_beyond();
    if kinds > 0 {
        warn!(
            file = %path.display(), kinds,
            "too many kinds of hashes: users with the rarest can be told from others by time; set their passwords anew"
        );
    }
}

fn read(path: &Path) -> Result<Passwords, Vec<String>> {
    let text = fs::read_to_string(path).map_err(|error| vec![error.to_string()])?;
    Passwords::parse(&text).map_err(|errors| errors.iter().map(ToString::to_string).collect())
}
