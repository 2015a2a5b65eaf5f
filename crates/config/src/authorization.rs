//! `[authorization]`: what devices may publish and subscribe to.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::address::optional;

/// Treatment of a PUBLISH that the rules deny, where no acknowledgement can say so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeniedPublish {
    /// The message is forgotten; in MQTT 3 its acknowledgement says that it was taken.
    #[default]
    Drop,
    /// The connection ends, in MQTT 5 with 0x87.
    Close,
}

/// `[authorization]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Authorization {
    /// The rules file; without one everything is allowed.
    #[serde(with = "optional")]
    pub rules: Option<PathBuf>,
    /// Treatment of a PUBLISH at QoS 0, and of any in MQTT 3, that the rules deny.
    pub denied_publish: DeniedPublish,
}
