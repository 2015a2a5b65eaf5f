//! One subscriber of one filter, in twelve bytes.

use gateway_core::QoS;

/// Set in [`Subscriber::slot`] when the subscriber is a shared group; the rest is its id.
pub(crate) const GROUP: u32 = 1 << 31;

/// Granted QoS and flags of a subscription in one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Options(u8);

const AS_PUBLISHED: u8 = 4;
const NO_LOCAL: u8 = 8;
const STREAM: u8 = 16;

impl Options {
    /// Of a session's subscription.
    pub(crate) fn new(qos: QoS, retain_as_published: bool, no_local: bool) -> Self {
        let as_published = if retain_as_published { AS_PUBLISHED } else { 0 };
        let no_local = if no_local { NO_LOCAL } else { 0 };
        Self(qos as u8 | as_published | no_local)
    }

    /// Of a gRPC stream: everything as published.
    pub(crate) fn stream() -> Self {
        Self(QoS::ExactlyOnce as u8 | AS_PUBLISHED | STREAM)
    }

    pub(crate) fn qos(self) -> QoS {
        QoS::from_bits(self.0 & 3).unwrap_or_default()
    }

    pub(crate) fn retain_as_published(self) -> bool {
        self.0 & AS_PUBLISHED != 0
    }

    pub(crate) fn no_local(self) -> bool {
        self.0 & NO_LOCAL != 0
    }

    pub(crate) fn is_stream(self) -> bool {
        self.0 & STREAM != 0
    }
}

/// One subscriber of a filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subscriber {
    /// Slot of the receiver, or [`GROUP`] and a group id.
    pub(crate) slot: u32,
    /// Subscription identifier, 0 for none.
    pub(crate) id: u32,
    pub(crate) options: Options,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_keep_every_flag() {
        let options = Options::new(QoS::ExactlyOnce, true, true);
        assert_eq!(options.qos(), QoS::ExactlyOnce);
        assert!(options.retain_as_published() && options.no_local() && !options.is_stream());
        assert!(Options::stream().is_stream() && !Options::stream().no_local());
    }
}
