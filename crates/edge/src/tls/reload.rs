//! TLS configurations that change under running listeners.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use config::{CertificatePair, TlsFiles};
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::sync::watch;
use tracing::{error, warn};

use super::{
    TlsError,
    config::{Built, ClientRules, build},
    inspect::{Facts, InspectionStage},
    revocations::Revocations,
};
use crate::reload::Reload;

/// The current configuration of one use; load it for each handshake.
pub type TlsHandle = Arc<ArcSwap<ServerConfig>>;

/// All TLS uses of the process. Reload is all or nothing.
#[derive(Default)]
pub struct TlsStore {
    uses: Mutex<Vec<CertificateUse>>,
    /// A revocation list says something else.
    revoked: watch::Sender<()>,
}

struct CertificateUse {
    name: String,
    files: TlsFiles,
    alpn: Vec<Vec<u8>>,
    rules: ClientRules,
    handle: TlsHandle,
    /// Of each pair, the default one first.
    pairs: Vec<Pair>,
    revocations: Option<Arc<Revocations>>,
}

/// A pair of certificate and key.
struct Pair {
    cert: PathBuf,
    facts: Facts,
    /// The stage of its validity that was last reported.
    told: InspectionStage,
    /// True if its lack of names, and the order of its chain, were reported.
    told_faults: bool,
}

/// A certificate in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// The use.
    pub of: String,
    /// Its file.
    pub file: PathBuf,
    /// The DNS names in it.
    pub names: Vec<String>,
    /// Seconds since 1970: the latest begin in its chain.
    pub from: i64,
    /// The earliest end in its chain.
    pub until: i64,
}

/// A problem of a certificate in use because of which clients will refuse it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The uses that have it.
    pub uses: Vec<String>,
    /// The fault and its fix.
    pub text: String,
    /// True if no client that checks dates accepts the certificate now.
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
    /// The errors of reading and checking the files.
    pub fn add(&self, name: &str, files: TlsFiles, alpn: &[&[u8]]) -> Result<TlsHandle, TlsError> {
        let Built { config, rules, facts, revoked } = build(&files, alpn, None)?;
        let handle = Arc::new(ArcSwap::from_pointee(config));
        let fresh = |(pair, facts): (CertificatePair, Facts)| Pair {
            cert: pair.cert,
            facts,
            told: InspectionStage::Fine,
            told_faults: false,
        };
        self.uses.lock().push(CertificateUse {
            name: name.to_owned(),
            pairs: files.pairs().zip(facts).map(fresh).collect(),
            files,
            alpn: alpn.iter().map(|name| name.to_vec()).collect(),
            rules,
            handle: Arc::clone(&handle),
            revocations: revoked.map(|revoked| Arc::new(Revocations::new(revoked, self.revoked.clone()))),
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
                // Pairs that are served already may stay as they are.
                let mut changed =
                    entry.pairs.iter().zip(&new.facts).filter(|(pair, facts)| pair.facts != **facts);
                changed.try_for_each(|(pair, facts)| facts.check_dates(&pair.cert, now)).map(|()| new)
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
            for (pair, facts) in entry.pairs.iter_mut().zip(new.facts) {
                if pair.facts != facts {
                    (pair.facts, pair.told, pair.told_faults) = (facts, InspectionStage::Fine, false);
                }
            }
            // A connection that the old configuration lets in is held against the list afterwards.
            entry.handle.store(Arc::new(new.config));
            if let (Some(revocations), Some(revoked)) = (&entry.revocations, new.revoked) {
                revocations.replace(revoked);
            }
        }
        Ok(uses.len())
    }

    /// Returns the revocation lists of this use, now and after each reload; `None` if it has none.
    pub fn revocations(&self, name: &str) -> Option<Arc<Revocations>> {
        self.uses.lock().iter().find(|entry| entry.name == name)?.revocations.clone()
    }

    /// Tells whenever a revocation list says something else than before.
    pub fn revocations_changed(&self) -> watch::Receiver<()> {
        self.revoked.subscribe()
    }

    /// The name of every use, the file of each of its certificates, and the days until that ends, below zero after it.
    pub fn days_left(&self, now: SystemTime) -> Vec<(String, PathBuf, f64)> {
        let uses = self.uses.lock();
        let pairs = uses.iter().flat_map(|entry| entry.pairs.iter().map(|pair| (&entry.name, pair)));
        pairs.map(|(name, pair)| (name.clone(), pair.cert.clone(), pair.facts.days_left(now))).collect()
    }

    /// Every certificate of every use.
    pub fn certificates(&self) -> Vec<Certificate> {
        let uses = self.uses.lock();
        let pairs = uses.iter().flat_map(|entry| entry.pairs.iter().map(|pair| (&entry.name, pair)));
        pairs
            .map(|(name, pair)| {
                let (from, until) = pair.facts.validity();
                let names = pair.facts.names.clone();
                Certificate { of: name.clone(), file: pair.cert.clone(), names, from, until }
            })
            .collect()
    }

    /// Returns the notices that are due at `now` and were not given since the certificate was read: that the
    /// certificate has no names, that it ends within 30 days, 7 days or one, or that it is not valid. Uses that share a
    /// file are reported together.
    pub fn notices(&self, now: SystemTime) -> Vec<Notice> {
        let mut notices: Vec<Notice> = Vec::new();
        for CertificateUse { name, pairs, .. } in self.uses.lock().iter_mut() {
            for (out, text) in pairs.iter_mut().flat_map(|pair| pair.due(now)) {
                match notices.iter_mut().find(|notice| notice.text == text) {
                    Some(notice) if notice.uses.contains(name) => {}
                    Some(notice) => notice.uses.push(name.clone()),
                    None => notices.push(Notice { uses: vec![name.clone()], text, out }),
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

    /// Logs what becomes due as certificates age, every `interval`. Never ends; cancel it by dropping.
    pub async fn watch_dates(self: Arc<Self>, interval: Duration) {
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
        let mut files: Vec<PathBuf> = uses.iter().flat_map(|entry| entry.files.all()).collect();
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

impl Pair {
    /// Returns the faults not reported yet, each with a flag that the certificate is out.
    fn due(&mut self, now: SystemTime) -> Vec<(bool, String)> {
        let stage = self.facts.stage(now);
        let mut texts = Vec::new();
        if stage > self.told {
            texts.push((stage == InspectionStage::Out, self.dates(now)));
        }
        self.told = stage;
        if !std::mem::replace(&mut self.told_faults, true) {
            texts.extend((!self.facts.named).then(|| (false, self.nameless())));
            texts.extend(self.disorder().map(|text| (false, text)));
        }
        texts
    }

    fn dates(&self, now: SystemTime) -> String {
        let file = self.cert.display();
        match self.facts.check_dates(&self.cert, now) {
            Err(error) => error.to_string(),
            Ok(()) => format!(
                "the certificate in {file} ends on {}, in {:.0} days; renew it and send SIGHUP",
                self.facts.until(),
                self.facts.days_left(now).floor()
            ),
        }
    }

    fn disorder(&self) -> Option<String> {
        let (path, problem) = (self.cert.clone(), self.facts.disorder.clone()?);
        Some(TlsError::ChainOrder { path, problem }.to_string() + "; clients may refuse the chain as it is")
    }

    fn nameless(&self) -> String {
        format!(
            "the certificate in {} has no subjectAltName, and clients that look at names refuse it whatever its CN is; \
             sign it again with 'openssl x509 -req ... -extfile names.ext', where names.ext has the line \
             subjectAltName=DNS:your.host.name",
            self.cert.display()
        )
    }
}

#[expect(clippy::disallowed_methods, reason = "certificates are dated by the wall clock")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}
