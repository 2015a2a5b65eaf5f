//! Result of reading the files, and remarks on it.

use std::{collections::BTreeMap, path::PathBuf};

use config::{Config, Flags};

use super::draft;

/// Fate of a line that is not simply carried over.
pub(super) struct Remark {
    /// File and line, empty for a remark about the whole.
    pub(super) place: String,
    pub(super) text: String,
    /// The gateway will not do what Mosquitto did.
    pub(super) lost: bool,
}

/// Result of reading the files.
pub(super) struct ImportedFiles {
    pub(super) draft: draft::Draft,
    /// The main file.
    pub(super) source: String,
    /// A rules file, if there is an `acl_file`.
    pub(super) rules: Option<String>,
    /// The password file of the listeners that open.
    pub(super) password_file: Option<PathBuf>,
    /// Passwords of bridges, each with the file that the configuration names for it.
    pub(super) secrets: Vec<(PathBuf, String)>,
    pub(super) told: Vec<Remark>,
}

impl ImportedFiles {
    pub(super) fn config(&self) -> String {
        self.draft.written(&self.source)
    }

    pub(super) fn lost(&mut self, text: String) {
        self.told.push(Remark { place: String::new(), text, lost: true });
    }

    /// Looks at what the start of the gateway would look at.
    pub(super) fn check(&mut self) {
        if let Err(problems) = Config::load(&Flags::default(), Some(&self.config()), &BTreeMap::new()) {
            self.lost(format!("the gateway does not start with what was made: {problems}"));
        }
    }
}
