//! Explanations of handshake errors, for readers of the log.

use std::{borrow::Cow, io};

use rustls::{Error, InvalidMessage};

/// Reason of a failed handshake: a client that speaks without TLS is named as such, in place of a message that cannot
/// be read.
pub fn in_words(error: &Error) -> Cow<'static, str> {
    match error {
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => Cow::Borrowed(
            "the client does not speak TLS, which this port expects: have it use https://, mqtts:// or wss:// in place of \
             http://, mqtt:// or ws://, or a port without TLS",
        ),
        error => Cow::Owned(error.to_string()),
    }
}

/// The same of an error in which rustls' own may be.
pub fn io_in_words(error: &io::Error) -> Cow<'static, str> {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    inner.map_or_else(|| Cow::Owned(error.to_string()), in_words)
}
