//! Parts of the process that do not belong to one home: the configuration, the files that are read again, and admission.

use std::{path::Path, sync::Arc, time::SystemTime};

use auth::{Authenticator, Authorizer};
use config::{Config, DEV_CERTS_DIR};
use edge::{
    reload::Reloads,
    secret_files,
    tls::{self, TlsStore},
};
use tracing::warn;

use super::{StartError, admission::Admission, listeners::PreparedListeners};

/// See the module.
pub(super) struct Common {
    pub(super) config: Arc<Config>,
    pub(super) reloads: Arc<Reloads>,
    pub(super) tls: Arc<TlsStore>,
    pub(super) admission: Admission,
}

impl Common {
    /// Reads all that the configuration names. Faults show before a port opens.
    pub(super) fn open(
        config: Config,
        authenticator: Option<Arc<dyn Authenticator>>,
        authorizer: Option<Arc<dyn Authorizer>>,
    ) -> Result<(Self, PreparedListeners), StartError> {
        check(&config, authenticator.as_ref())?;
        let config = Arc::new(config);
        let reloads = Reloads::new();
        let prepared = PreparedListeners::open(&config, &reloads)?;
        let admission = Admission::open(&config, authenticator, authorizer, &reloads)?;
        let tls = Arc::clone(&prepared.tls);
        Ok((Self { config, reloads, tls, admission }, prepared))
    }
}

/// Refuses a configuration that cannot work, and warns of one that is open.
fn check(config: &Config, authenticator: Option<&Arc<dyn Authenticator>>) -> Result<(), StartError> {
    config.validate()?;
    if authenticator.is_none() {
        config.check_devices()?;
    }
    if config.needs_dev_certs() {
        #[expect(clippy::disallowed_methods, reason = "certificates are dated by the wall clock")]
        tls::ensure_dev_certs(Path::new(DEV_CERTS_DIR), SystemTime::now())?;
    }
    tls::check_files(config)?;
    let open = secret_files::check(config)?;
    let anonymous = config.anonymous_warning().filter(|_| authenticator.is_none());
    for warning in anonymous.into_iter().chain(config.warnings()).chain(open) {
        warn!("{warning}");
    }
    Ok(())
}
