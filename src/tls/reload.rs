//! TLS configurations that change under running listeners: on request, or when a file changes.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tracing::{error, info, warn};

use super::{
    TlsError,
    config::{Built, ClientRules, build},
    inspect::{Facts, Stage},
};
use crate::config::TlsFiles;

/// The current configuration of one use; load it for each handshake.
pub(crate) type TlsHandle = Arc<ArcSwap<ServerConfig>>;

/// Time and size of each file; a missing one has none.
type Fingerprint = BTreeMap<PathBuf, Option<(SystemTime, u64)>>;

/// All TLS uses of the process. Reload is all or nothing.
#[derive(Default)]
pub struct TlsStore {
    state: Mutex<Certificates>,
}

#[derive(Default)]
struct Certificates {
    uses: Vec<Use>,
    seen: Fingerprint,
}

struct Use {
    name: String,
    files: TlsFiles,
    alpn: Vec<Vec<u8>>,
    rules: ClientRules,
    handle: TlsHandle,
    facts: Facts,
    /// The stage of its validity that was last reported.
    told: Stage,
    /// Whether its lack of names was reported.
    told_nameless: bool,
}

/// A problem of a certificate in use because of which clients will refuse it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The uses that have it.
    pub uses: Vec<String>,
    /// What is wrong and what to do.
    pub text: String,
    /// Whether no client that looks at dates accepts it now.
    pub out: bool,
}

impl TlsStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Builds the configuration of a use and keeps it fresh from now on.
    ///
    /// # Errors
    /// As [`super::server_config`].
    pub fn add(&self, name: &str, files: TlsFiles, alpn: &[&[u8]]) -> Result<TlsHandle, TlsError> {
        let mut state = self.state.lock();
        // Before reading: a change in between then shows as one.
        observe(&files, &mut state.seen);
        let Built { config, rules, facts } = build(&files, alpn, None)?;
        let handle = Arc::new(ArcSwap::from_pointee(config));
        state.uses.push(Use {
            name: name.to_owned(),
            files,
            alpn: alpn.iter().map(|name| name.to_vec()).collect(),
            rules,
            handle: Arc::clone(&handle),
            facts,
            told: Stage::Fine,
            told_nameless: false,
        });
        Ok(handle)
    }

    /// Reads all files again. Running connections keep what they have; new ones take the new configuration.
    ///
    /// # Errors
    /// The uses that could not be built, or whose certificate is not valid at `now`, by name; then nothing changed.
    pub fn reload(&self, now: SystemTime) -> Result<usize, Vec<(String, TlsError)>> {
        let mut state = self.state.lock();
        state.seen = state.observed();
        let mut built = Vec::with_capacity(state.uses.len());
        let mut errors = Vec::new();
        for entry in &state.uses {
            let current = entry.handle.load();
            let alpn: Vec<&[u8]> = entry.alpn.iter().map(Vec::as_slice).collect();
            let new = build(&entry.files, &alpn, Some((&entry.rules, &current.ticketer)));
            let new = new.and_then(|new| {
                // What is served already may stay as it is.
                let same = new.facts == entry.facts;
                if same { Ok(()) } else { new.facts.check_dates(&entry.files.cert, now) }.map(|()| new)
            });
            match new {
                Ok(new) => built.push(new),
                Err(error) => errors.push((entry.name.clone(), error)),
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        for (entry, new) in state.uses.iter_mut().zip(built) {
            entry.rules = new.rules;
            if entry.facts != new.facts {
                (entry.facts, entry.told, entry.told_nameless) = (new.facts, Stage::Fine, false);
            }
            entry.handle.store(Arc::new(new.config));
        }
        Ok(state.uses.len())
    }

    /// Whether a file changed since it was last read.
    pub fn changed(&self) -> bool {
        let state = self.state.lock();
        state.observed() != state.seen
    }

    /// [`Self::reload`] with the outcome in the log: for SIGHUP.
    pub fn reload_and_log(&self) {
        let now = wall_clock();
        match self.reload(now) {
            Ok(uses) => {
                info!(uses, "certificates reloaded");
                self.log_notices(now);
            }
            Err(errors) => {
                for (name, error) in errors {
                    error!(name, %error, "certificates not reloaded, the old ones stay");
                }
            }
        }
    }

    /// The name of every use and the days until its certificate ends, below zero after that.
    pub fn days_left(&self, now: SystemTime) -> Vec<(String, f64)> {
        let state = self.state.lock();
        state.uses.iter().map(|entry| (entry.name.clone(), entry.facts.days_left(now))).collect()
    }

    /// What should be reported at `now` and was not yet since the certificate was read: that it has no names, that it
    /// ends within 30 days, 7 days or one, or that it is not valid. Uses that share a file are reported together.
    pub fn notices(&self, now: SystemTime) -> Vec<Notice> {
        let mut notices: Vec<Notice> = Vec::new();
        for entry in &mut self.state.lock().uses {
            let stage = entry.facts.stage(now);
            let mut texts = Vec::new();
            if stage > entry.told {
                texts.push((stage == Stage::Out, entry.dates(now)));
            }
            entry.told = stage;
            if !entry.facts.named && !std::mem::replace(&mut entry.told_nameless, true) {
                texts.push((false, entry.nameless()));
            }
            for (out, text) in texts {
                match notices.iter_mut().find(|notice| notice.text == text) {
                    Some(notice) => notice.uses.push(entry.name.clone()),
                    None => notices.push(Notice { uses: vec![entry.name.clone()], text, out }),
                }
            }
        }
        notices
    }

    /// [`Self::notices`] into the log.
    pub fn log_notices(&self, now: SystemTime) {
        for Notice { uses, text, out } in self.notices(now) {
            let uses = uses.join(", ");
            if out { error!(uses, "{text}") } else { warn!(uses, "{text}") }
        }
    }

    /// Looks at the files every `interval` and reloads when one changed and then held still for one interval, so
    /// that a certificate and its key are replaced together. Never ends; cancel it by dropping.
    pub async fn watch(self: Arc<Self>, interval: Duration) {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut pending: Option<Fingerprint> = None;
        loop {
            ticks.tick().await;
            let store = Arc::clone(&self);
            let previous = pending.take();
            let step = tokio::task::spawn_blocking(move || store.watch_step(previous)).await;
            pending = step.unwrap_or_default();
        }
    }

    /// One look; returns what it waits to hold still.
    fn watch_step(&self, previous: Option<Fingerprint>) -> Option<Fingerprint> {
        self.log_notices(wall_clock());
        let (now, seen) = {
            let state = self.state.lock();
            (state.observed(), state.seen.clone())
        };
        if now == seen {
            return None;
        }
        if previous.as_ref() == Some(&now) {
            self.reload_and_log();
            return None;
        }
        Some(now)
    }
}

impl Use {
    fn dates(&self, now: SystemTime) -> String {
        let file = self.files.cert.display();
        match self.facts.check_dates(&self.files.cert, now) {
            Err(error) => error.to_string(),
            Ok(()) => format!(
                "the certificate in {file} ends on {}, in {:.0} days; renew it and send SIGHUP",
                self.facts.until(),
                self.facts.days_left(now).floor()
            ),
        }
    }

    fn nameless(&self) -> String {
        format!(
            "the certificate in {} has no subjectAltName, and clients that look at names refuse it whatever its CN is; \
             sign it again with 'openssl x509 -req ... -extfile names.ext', where names.ext has the line \
             subjectAltName=DNS:your.host.name",
            self.files.cert.display()
        )
    }
}

#[expect(clippy::disallowed_methods, reason = "certificates are dated by the wall clock")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

impl Certificates {
    fn observed(&self) -> Fingerprint {
        let mut seen = Fingerprint::new();
        for entry in &self.uses {
            observe(&entry.files, &mut seen);
        }
        seen
    }
}

fn observe(files: &TlsFiles, into: &mut Fingerprint) {
    let optional = [files.client_ca.as_deref(), files.crl.as_deref()];
    let paths: [&Path; 2] = [&files.cert, &files.key];
    for path in paths.into_iter().chain(optional.into_iter().flatten()) {
        let meta = fs::metadata(path).and_then(|meta| Ok((meta.modified()?, meta.len())));
        into.insert(path.to_owned(), meta.ok());
    }
}
