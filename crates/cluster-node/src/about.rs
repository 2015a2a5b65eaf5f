//! Facts that a node tells of itself with each beat.

use bytes::Bytes;
use cluster::NodeHomes;
use ledger::Beat;
use serde::{Deserialize, Serialize};

use crate::process::ProcessId;

/// See the module. Fields that a newer version adds are passed over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct About {
    /// Address under which backends reach it.
    pub(crate) address: String,
    /// Address under which other gateways reach it; empty without links.
    pub(crate) link: String,
    /// Its process.
    pub(crate) process: Option<ProcessId>,
    /// Its copies of all homes are near the end of the ledger.
    pub(crate) warm: bool,
    /// Streams that it knows; 0 of a version that did not tell.
    pub(crate) streams: u8,
    /// Facts about homes.
    #[serde(flatten)]
    pub(crate) homes: NodeHomes,
}

impl About {
    pub(crate) fn of(beat: &Beat) -> Self {
        serde_json::from_slice(&beat.about).unwrap_or_default()
    }

    pub(crate) fn encode(&self) -> Bytes {
        serde_json::to_vec(self).unwrap_or_default().into()
    }
}
