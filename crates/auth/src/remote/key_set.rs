//! The key set (JWKS) of an issuer of tokens, fetched over HTTP: at start, every so often, and when a token names a key
//! that is not in it. While the issuer is away the keys stay as they were.

use std::{sync::Arc, time::Duration};

use access::jwt::SigningKeys;
use arc_swap::ArcSwap;
use config::{AuthJwt, ConfigError, Problem};
use edge::{
    reload::Reload,
    remote::{Client, Service},
    tls,
};
use gateway_core::{Timestamp, clock};
use hyper::StatusCode;
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    task::AbortHandle,
    time::{sleep, timeout},
};
use tracing::{info, warn};

use crate::counters::count;

/// Time for one answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// Tokens with unknown keys have it fetched no more often.
const REFETCH: Duration = Duration::from_secs(5);
/// Until it is tried again after a failure: at first, and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// See the module. It is no longer fetched once this is dropped.
pub(crate) struct RemoteKeySet {
    inner: Arc<RemoteKeySetInner>,
    task: AbortHandle,
}

struct RemoteKeySetInner {
    service: Arc<Service>,
    interval: Duration,
    keys: ArcSwap<SigningKeys>,
    fetches: Mutex<Fetches>,
    /// Somebody asks for a fetch.
    wanted: Notify,
    /// Changes with each fetch that is over.
    done: watch::Sender<()>,
}

struct Fetches {
    under_way: bool,
    last: Timestamp,
    failures: u32,
}

impl RemoteKeySet {
    /// Begins to fetch the set that is configured; `None` if none is. To be called within the runtime where that is to be done.
    ///
    /// # Errors
    /// The URL or the CA cannot be used.
    pub(crate) fn start(config: &AuthJwt) -> Result<Option<Self>, ConfigError> {
        if config.jwks_url.is_none() {
            return Ok(None);
        }
        let again = config.clone();
        let ca = config.jwks_ca.clone();
        let inner = Arc::new(RemoteKeySetInner {
            service: Service::new("authorities of auth.jwt.jwks_url", ca, move || client(&again))?,
            interval: config.jwks_interval.0,
            keys: ArcSwap::default(),
            // The first one: who comes before it is over waits for it.
            fetches: Mutex::new(Fetches { under_way: true, last: clock::now(), failures: 0 }),
            wanted: Notify::new(),
            done: watch::Sender::new(()),
        });
        let task = tokio::spawn(Arc::clone(&inner).run()).abort_handle();
        Ok(Some(Self { inner, task }))
    }

    /// Checks that the URL and the CA can be used.
    ///
    /// # Errors
    /// The fault, in words.
    pub(crate) fn check(config: &AuthJwt) -> Result<(), ConfigError> {
        if config.jwks_url.is_some() { client(config).map(drop) } else { Ok(()) }
    }

    /// Returns the files that can be read again.
    pub(crate) fn reloads(&self) -> Arc<dyn Reload> {
        Arc::clone(&self.inner.service) as _
    }

    /// The keys that were fetched last; none before that.
    pub(crate) fn keys(&self) -> Arc<SigningKeys> {
        self.inner.keys.load_full()
    }

    /// Fetches it again, and waits for that; false at once if that was done too short a time ago. Cancel safe.
    pub(crate) async fn refetch(&self) -> bool {
        let mut done = self.inner.done.subscribe();
        {
            let mut fetches = self.inner.fetches.lock();
            if !fetches.under_way {
                let millis = u64::try_from(REFETCH.as_millis()).unwrap_or(u64::MAX);
                if clock::now() < fetches.last.plus_millis(millis) {
                    return false;
                }
                // Before the task has seen it, so that all who come meanwhile wait for the same.
                fetches.under_way = true;
                self.inner.wanted.notify_one();
            }
        }
        done.changed().await.is_ok()
    }
}

impl Drop for RemoteKeySet {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl RemoteKeySetInner {
    async fn run(self: Arc<Self>) {
        loop {
            self.fetches.lock().under_way = true;
            let fetched = timeout(DEADLINE, self.fetch()).await;
            let fetched = fetched.unwrap_or_else(|_| Err("no answer in time".to_owned()));
            let pause = self.take(fetched);
            self.done.send_replace(());
            tokio::select! {
                () = sleep(pause) => {}
                () = self.wanted.notified() => {}
            }
        }
    }

    async fn fetch(&self) -> Result<SigningKeys, String> {
        let (status, body) = self.service.client().get().await.map_err(|error| error.to_string())?;
        if status != StatusCode::OK {
            return Err(format!("status {}", status.as_u16()));
        }
        let text = std::str::from_utf8(&body).map_err(|_| "the answer is not text".to_owned())?;
        SigningKeys::from_jwks(text).map_err(|error| error.to_string())
    }

    /// Returns in how long to fetch again.
    fn take(&self, fetched: Result<SigningKeys, String>) -> Duration {
        let mut fetches = self.fetches.lock();
        (fetches.under_way, fetches.last) = (false, clock::now());
        match fetched {
            Ok(keys) => {
                count(|c| c.jwks_fetched.add(1));
                if std::mem::take(&mut fetches.failures) > 0 || self.keys.load().is_empty() {
                    info!(keys = keys.len(), "key set of tokens fetched");
                }
                self.keys.store(Arc::new(keys));
                self.interval
            }
            Err(problem) => {
                count(|c| c.jwks_failed.add(1));
                if fetches.failures == 0 {
                    warn!(problem, "key set of tokens cannot be fetched, the keys stay as they were");
                }
                fetches.failures = fetches.failures.saturating_add(1);
                let factor = 1 << (fetches.failures - 1).min(8);
                (RETRY.0 * factor).min(RETRY.1).min(self.interval)
            }
        }
    }
}

fn client(config: &AuthJwt) -> Result<Client, ConfigError> {
    let problem = |key: &str, text: String, fix: &str| ConfigError(vec![Problem::new(key, "", text, fix)]);
    let ca = config.jwks_ca.as_deref().map(tls::client_of_ca).transpose();
    let ca = ca.map_err(|error| problem("auth.jwt.jwks_ca", error.to_string(), ""))?;
    let url = config.jwks_url.as_deref().unwrap_or_default();
    let fix = "write it like https://id.example.com/jwks.json, with auth.jwt.jwks_ca";
    let client = Client::new(url, ca).map_err(|text| problem("auth.jwt.jwks_url", text, fix))?;
    if !client.is_secret() {
        let text = "whoever is on the way to it could put in keys: http is for this machine only".to_owned();
        return Err(problem("auth.jwt.jwks_url", text, fix));
    }
    Ok(client)
}
