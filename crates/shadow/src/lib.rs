//! Rules of device shadows, without a store, topics' routing and a clock: documents and requests in, documents and answers out.
//!
//! Words:
//!
//! - A *shadow* is a document about a device: the state that backends want (*desired*) and the state that the device reports
//!   (*reported*). The unnamed one is the *classic* shadow; a device may have some with names besides.
//! - The *delta* is the desired state that is not reported. It is computed, never stored.
//! - *Metadata* has the time of each value. It does not count for the size of the document.
//! - The *version* grows by one with every accepted update, also one that changes nothing, and with the deletion.
//!
//! Topics, documents and answers have the shape that AWS IoT documents for its shadows, so that firmware written for it
//! works unchanged.
//!
//! Invariants:
//!
//! - A value that was not named by an update keeps its value and its time.
//! - Reporting the delta leaves none.
//! - Numbers keep every digit they came with.
//! - Work and memory are bounded by [`DocumentLimits`], whatever the bytes are.
//!
//! Must not know: tokio, stores, MQTT's packets, gRPC.

mod answer;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod json;
mod rejection;
mod request;
mod state;
#[cfg(test)]
mod tests;
mod topics;

pub use answer::{AnswerContext, Snapshot};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz_shadow;
pub use json::{Json, JsonError, Object};
pub use rejection::Rejection;
pub use request::{Patch, Update, client_token};
pub use state::State;
pub use topics::{PrefixError, ShadowOperation, ShadowTopics, is_name, operation};

/// The longest token of a request, in bytes.
pub const MAX_CLIENT_TOKEN: usize = 64;

/// The longest name of a shadow, in bytes.
pub const MAX_NAME: usize = 64;

/// Bounds on a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DocumentLimits {
    /// Bytes of its desired and reported sections together, as compact JSON.
    pub bytes: usize,
    /// Levels below a section: `{"a":1}` has one.
    pub depth: usize,
}

impl DocumentLimits {
    /// Bytes of a request that is looked at: one that fills a document, with room for white space and what is around it.
    pub fn request_bytes(&self) -> usize {
        self.bytes.saturating_mul(2).saturating_add(1024)
    }

    /// Levels of a request: those of a section, and `state`, `desired` and the request around it.
    fn request_depth(&self) -> usize {
        self.depth.saturating_add(2)
    }
}
