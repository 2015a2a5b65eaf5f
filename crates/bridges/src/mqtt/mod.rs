//! Another broker on the other side, as its client: with the codec of the gateway and a session of a few lines, so that there is
//! one implementation of the protocol and one of TLS, and every acknowledgement is known by its message.

mod inward;
mod link;
mod outward;

use std::{sync::Arc, time::Duration};

use config::{MqttBridge, MqttLevel};
use edge::tls::{self, ServerName};
use tokio_rustls::TlsConnector;

use super::secret::read_secret;

pub(super) use {inward::MqttIn, outward::MqttOut};

/// Address of the other broker, and the identity of the bridge there.
pub(super) struct Dial {
    config: MqttBridge,
    host: String,
    port: u16,
    secure: bool,
    client_id: String,
    deadline: Duration,
    /// The mark of this gateway.
    mark: String,
}

impl Dial {
    /// For the bridge of this name. Reads the files that are named, as each connection does again.
    ///
    /// # Errors
    /// The key below the bridge's table, and what is wrong with it.
    pub(super) fn new(
        name: &str,
        config: &MqttBridge,
        deadline: Duration,
    ) -> Result<Self, (&'static str, String)> {
        let (host, port, secure) = config.target().map_err(|problem| ("url", problem.to_owned()))?;
        let client_id = config.client_id.clone().unwrap_or_else(|| format!("mqtt-server-{name}"));
        let dial =
            Self { config: config.clone(), host, port, secure, client_id, deadline, mark: String::new() };
        dial.tls()?;
        dial.password()?;
        Ok(dial)
    }

    /// Shows this mark to the other side.
    pub(super) fn marked(self, mark: &str) -> Self {
        Self { mark: mark.to_owned(), ..self }
    }

    fn tls(&self) -> Result<Option<(TlsConnector, ServerName)>, (&'static str, String)> {
        if !self.secure {
            return Ok(None);
        }
        let config = tls::client_config(&self.config.files(), false);
        let config = config.map_err(|error| ("ca", error.to_string()))?;
        let config = config.ok_or_else(|| ("ca", "is missing".to_owned()))?;
        let name = ServerName::try_from(self.host.clone())
            .map_err(|_| ("url", "the host is no name that a certificate can have".to_owned()))?;
        Ok(Some((TlsConnector::from(Arc::new(config)), name)))
    }

    fn password(&self) -> Result<Option<Vec<u8>>, (&'static str, String)> {
        self.config.password_file.as_deref().map(|path| read_secret(path, "password_file")).transpose()
    }

    fn protocol(&self) -> gateway_core::Protocol {
        match self.config.level {
            MqttLevel::V5 => gateway_core::Protocol::V5,
            MqttLevel::V3 => gateway_core::Protocol::V4,
        }
    }
}
