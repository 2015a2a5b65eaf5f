//! Why a request is not carried out.

use thiserror::Error;

/// Why a request is not carried out. Its text is for the device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Rejection {
    /// Not JSON.
    #[error("Invalid JSON")]
    InvalidJson,
    /// An update without `state`.
    #[error("Missing required node: state")]
    MissingState,
    /// `state` is no object.
    #[error("State node must be an object")]
    StateNotObject,
    /// `desired` is no object.
    #[error("Desired node must be an object")]
    DesiredNotObject,
    /// `reported` is no object.
    #[error("Reported node must be an object")]
    ReportedNotObject,
    /// `version` is no whole number from 0 on.
    #[error("Invalid version")]
    InvalidVersion,
    /// `clientToken` is no text, or too long.
    #[error("Invalid clientToken")]
    InvalidToken,
    /// More levels than allowed, which it names.
    #[error("JSON contains too many levels of nesting; maximum is {0}")]
    TooDeep(usize),
    /// `state` has something else than `desired` and `reported`.
    #[error("State contains an invalid node")]
    InvalidNode,
    /// There is no shadow of this name; the empty name is the classic one.
    #[error("No shadow exists with name: '{0}'")]
    NotFound(String),
    /// The shadow has another version than the request was made for.
    #[error("Version conflict")]
    Conflict {
        /// The version that it has.
        version: u64,
    },
    /// The request, or the document that it would make, is too large.
    #[error("The payload exceeds the maximum size allowed")]
    TooLarge,
    /// The payload is not UTF-8.
    #[error("Unsupported documented encoding; supported encoding is UTF-8")]
    NotUtf8,
    /// The device has so many requests under way.
    #[error("Too many requests are under way")]
    TooManyRequests,
    /// The device has as many shadows as it may.
    #[error("The device has the maximum number of shadows")]
    TooManyShadows,
    /// All shadows together take as much of the disk as they may, or this device holds more of it than its share.
    #[error("There is no room for more shadows")]
    NoRoom,
    /// The store is away. Whether an update was made is not known.
    #[error("The store is not available")]
    Unavailable,
    /// The stored document cannot be read.
    #[error("Internal service failure")]
    Internal,
}

impl Rejection {
    /// Its code, as HTTP has them.
    pub fn code(&self) -> u16 {
        match self {
            Self::InvalidJson
            | Self::MissingState
            | Self::StateNotObject
            | Self::DesiredNotObject
            | Self::ReportedNotObject
            | Self::InvalidVersion
            | Self::InvalidToken
            | Self::TooDeep(_)
            | Self::InvalidNode => 400,
            Self::TooManyShadows => 403,
            Self::NotFound(_) => 404,
            Self::Conflict { .. } => 409,
            Self::TooLarge => 413,
            Self::NotUtf8 => 415,
            Self::TooManyRequests => 429,
            Self::Internal => 500,
            Self::Unavailable => 503,
            Self::NoRoom => 507,
        }
    }
}
