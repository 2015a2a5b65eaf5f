//! Levels of a publish that a call can wait for.

/// Until when a publish waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    Accepted,
    Durable,
    Sent,
    Acked,
}
