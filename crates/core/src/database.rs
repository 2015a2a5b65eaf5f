//! Words for the settings of a connection to Cassandra or Scylla, which the configuration reads and the store obeys.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Number of replicas that must answer. A cluster takes other levels for reads than for writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Consistency {
    /// Writes only: a note for an absent replica is enough.
    Any,
    /// One.
    One,
    /// One in the datacenter that is asked.
    LocalOne,
    /// Two.
    Two,
    /// Three.
    Three,
    /// Most.
    Quorum,
    /// Most in the datacenter that is asked.
    LocalQuorum,
    /// Writes only: most in every datacenter.
    EachQuorum,
    /// All.
    All,
}

impl Consistency {
    /// Returns whether a database takes this level for reads.
    pub fn reads(self) -> bool {
        !matches!(self, Self::Any | Self::EachQuorum)
    }
}

impl fmt::Display for Consistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Compression of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// Not at all.
    None,
    /// LZ4: little work for some gain.
    Lz4,
    /// Snappy.
    Snappy,
}
