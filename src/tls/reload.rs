//! TLS configurations that change under running listeners.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::sync::watch;
use tracing::{error, warn};

use super::{
    TlsError,
    config::{Built, ClientRules, build},
    inspect::{Facts, Stage},
    revocations::Revocations,
};
use crate::{config::TlsFiles, reload::Reload};

/// The current configuration of one use; load it for each handshake.
pub(crate) type TlsHandle = Arc<ArcSwap<ServerConfig>>;

/// All TLS uses of the process. Reload is all or nothing.
#[derive(Default)]
pub(crate) struct TlsStore {
    uses: Mutex<Vec<Use>>,
    /// A revocation list says something else.
    revoked: watch::Sender<()>,
}

struct Use {
    name: String,
    files: TlsFiles,
    alpn: Vec<Vec<u8>>,
    rules: ClientRules,
    handle: TlsHandle,
    facts: Facts,
    revocations: Option<Arc<Revocations>>,
    /// The stage of its validity that was last reported.
    told: Stage,
    /// Whether its lack of names was reported.
    told_nameless: bool,
}

/// A problem of a certificate in use because of which clients will refuse it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notice {
    /// The uses that have it.
    pub(crate) uses: Vec<String>,
    /// What is wrong and what to do.
    pub(crate) text: String,
    /// Whether no client that looks at dates accepts it now.
    pub(crate) out: bool,
}

impl TlsStore {
    /// An empty store.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Builds the configuration of a use and keeps it fresh from now on.
    ///
    /// # Errors
    /// As [`super::server_config`].
    pub(crate) fn add(&self, name: &str, files: TlsFiles, alpn: &[&[u8]]) -> Result<TlsHandle, TlsError> {
        let Built { config, rules, facts, revoked } = build(&files, alpn, None)?;
        let handle = Arc::new(ArcSwap::from_pointee(config));
        self.uses.lock().push(Use {
            name: name.to_owned(),
            files,
            alpn: alpn.iter().map(|name| name.to_vec()).collect(),
            rules,
            handle: Arc::clone(&handle),
            facts,
            revocations: revoked.map(|revoked| Arc::new(Revocations::new(revoked, self.revoked.clone()))),
            told: Stage::Fine,
            told_nameless: false,
        });
        Ok(handle)
    }

    /// Reads all files again. Running connections keep what they have; new ones take the new configuration.
    ///
    /// # Errors
    /// The uses that could not be built, or whose certificate is not valid at `now`, by name; then nothing changed.
    pub(crate) fn reload_at(&self, now: SystemTime) -> Result<usize, Vec<(String, TlsError)>> {
        let mut uses = self.uses.lock();
        let mut built = Vec::with_capacity(uses.len());
        let mut errors = Vec::new();
        for entry in uses.iter() {
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
        for (entry, new) in uses.iter_mut().zip(built) {
            entry.rules = new.rules;
            if entry.facts != new.facts {
                (entry.facts, entry.told, entry.told_nameless) = (new.facts, Stage::Fine, false);
            }
            // Whoever is let in by the old configuration looks at the list afterwards.
            entry.handle.store(Arc::new(new.config));
            if let (Some(revocations), Some(revoked)) = (&entry.revocations, new.revoked) {
                revocations.replace(revoked);
            }
        }
        Ok(uses.len())
    }

    /// What the revocation lists of this use say, now and later; `None` if it has none.
    pub(crate) fn revocations(&self, name: &str) -> Option<Arc<Revocations>> {
        self.uses.lock().iter().find(|entry| entry.name == name)?.revocations.clone()
    }

    /// Tells whenever a revocation list says something else than before.
    pub(crate) fn revocations_changed(&self) -> watch::Receiver<()> {
        self.revoked.subscribe()
    }

    /// The name of every use and the days until its certificate ends, below zero after that.
    pub(crate) fn days_left(&self, now: SystemTime) -> Vec<(String, f64)> {
        let uses = self.uses.lock();
        uses.iter().map(|entry| (entry.name.clone(), entry.facts.days_left(now))).collect()
    }

    /// What should be reported at `now` and was not yet since the certificate was read: that it has no names, that it
    /// ends within 30 days, 7 days or one, or that it is not valid. Uses that share a file are reported together.
    pub(crate) fn notices(&self, now: SystemTime) -> Vec<Notice> {
        let mut notices: Vec<Notice> = Vec::new();
        for entry in self.uses.lock().iter_mut() {
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
    pub(crate) fn log_notices(&self, now: SystemTime) {
        for Notice { uses, text, out } in self.notices(now) {
            let uses = uses.join(", ");
            if out { error!(uses, "{text}") } else { warn!(uses, "{text}") }
        }
    }

    /// Logs what becomes due as certificates age, every `interval`. Never ends; cancel it by dropping.
    pub(crate) async fn watch_dates(self: Arc<Self>, interval: Duration) {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.log_notices(wall_clock());
        }
    }
}

impl Reload for TlsStore {
    fn name(&self) -> &'static str {
        "certificates"
    }

    fn files(&self) -> Vec<PathBuf> {
        let uses = self.uses.lock();
        let mut files: Vec<PathBuf> = uses.iter().flat_map(|entry| entry.files.all()).cloned().collect();
        files.sort();
        files.dedup();
        files
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        let now = wall_clock();
        let outcome = self.reload_at(now);
        self.log_notices(now);
        let told = |(name, error)| format!("{name}: {error}");
        outcome.map(|uses| format!("{uses} uses")).map_err(|errors| errors.into_iter().map(told).collect())
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
