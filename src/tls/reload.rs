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
use tracing::{error, info};

use crate::config::TlsFiles;

use super::{
    TlsError,
    config::{Built, ClientRules, build},
};

/// The current configuration of one use; load it for each handshake.
pub type TlsHandle = Arc<ArcSwap<ServerConfig>>;

/// Time and size of each file; a missing one has none.
type Fingerprint = BTreeMap<PathBuf, Option<(SystemTime, u64)>>;

/// All TLS uses of the process. Reload is all or nothing.
#[derive(Default)]
pub struct TlsStore {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    uses: Vec<Use>,
    seen: Fingerprint,
}

struct Use {
    name: String,
    files: TlsFiles,
    alpn: Vec<Vec<u8>>,
    rules: ClientRules,
    handle: TlsHandle,
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
        let Built { config, rules } = build(&files, alpn, None)?;
        let handle = Arc::new(ArcSwap::from_pointee(config));
        state.uses.push(Use {
            name: name.to_owned(),
            files,
            alpn: alpn.iter().map(|name| name.to_vec()).collect(),
            rules,
            handle: Arc::clone(&handle),
        });
        Ok(handle)
    }

    /// Reads all files again. Running connections keep what they have; new ones take the new configuration.
    ///
    /// # Errors
    /// The uses that could not be built, by name; then nothing changed.
    pub fn reload(&self) -> Result<usize, Vec<(String, TlsError)>> {
        let mut state = self.state.lock();
        state.seen = state.observed();
        let mut built = Vec::with_capacity(state.uses.len());
        let mut errors = Vec::new();
        for entry in &state.uses {
            let current = entry.handle.load();
            let alpn: Vec<&[u8]> = entry.alpn.iter().map(Vec::as_slice).collect();
            match build(&entry.files, &alpn, Some((&entry.rules, &current.ticketer))) {
                Ok(new) => built.push(new),
                Err(error) => errors.push((entry.name.clone(), error)),
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        for (entry, new) in state.uses.iter_mut().zip(built) {
            entry.rules = new.rules;
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
        match self.reload() {
            Ok(uses) => info!(uses, "certificates reloaded"),
            Err(errors) => {
                for (name, error) in errors {
                    error!(name, %error, "certificates not reloaded, the old ones stay");
                }
            }
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

impl State {
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
