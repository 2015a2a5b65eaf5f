//! The password file of a running gateway.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use access::passwords::Passwords;
use arc_swap::ArcSwap;

use crate::{
    config::{ConfigError, Problem},
    reload::Reload,
};

/// The users of a file as it was last read without fault.
pub(super) struct PasswordFile {
    path: PathBuf,
    users: ArcSwap<Passwords>,
}

impl PasswordFile {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, or has a line that cannot be used.
    pub(super) fn open(path: &Path) -> Result<Self, ConfigError> {
        let users = read(path).map_err(|problems| {
            let fix = "mend it with mqtt-server passwd";
            let problem = |text| Problem::new("auth.password_file", path.display(), text, fix);
            ConfigError(problems.into_iter().map(problem).collect())
        })?;
        Ok(Self { path: path.to_owned(), users: ArcSwap::from_pointee(users) })
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
        self.users.store(Arc::new(users));
        Ok(said)
    }
}

fn read(path: &Path) -> Result<Passwords, Vec<String>> {
    let text = fs::read_to_string(path).map_err(|error| vec![error.to_string()])?;
    Passwords::parse(&text).map_err(|errors| errors.iter().map(ToString::to_string).collect())
}
