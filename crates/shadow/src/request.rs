//! Requests and their contents.

use crate::{
    DocumentLimits, MAX_CLIENT_TOKEN, Rejection,
    json::{Json, JsonError, Object},
};

/// A change of a section.
#[derive(Debug, Clone, PartialEq)]
pub enum Patch {
    /// All of it goes.
    Clear,
    /// Keys that are given replace those that are there, objects are merged, `null` removes a key.
    Merge(Object),
}

/// An update, of which nothing is known yet but that it is well formed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Update {
    /// Change of the desired state.
    pub desired: Option<Patch>,
    /// Change of the reported state.
    pub reported: Option<Patch>,
    /// The version that the shadow must have.
    pub version: Option<u64>,
    /// Comes back with the answers.
    pub client_token: Option<String>,
}

impl Update {
    /// Reads a device's request. With a rejection comes its token, if it has one that can be read.
    pub fn parse(payload: &[u8], limits: &DocumentLimits) -> Result<Self, (Rejection, Option<String>)> {
        let mut request = object(payload, limits).map_err(|rejection| (rejection, None))?;
        let token = take_token(&mut request).map_err(|rejection| (rejection, None))?;
        let update = Self::of(request);
        match update {
            Ok(update) => Ok(Self { client_token: token, ..update }),
            Err(rejection) => Err((rejection, token)),
        }
    }

    /// A patch of one section from JSON text, as backends give them: an object, or `null`, which clears the section.
    /// `None` says that it is neither.
    pub fn patch(text: &str, limits: &DocumentLimits) -> Result<Option<Patch>, Rejection> {
        if text.len() > limits.request_bytes() {
            return Err(Rejection::TooLarge);
        }
        match Json::parse(text, limits.depth) {
            Ok(Json::Null) => Ok(Some(Patch::Clear)),
            Ok(Json::Object(object)) => Ok(Some(Patch::Merge(object))),
            Ok(_) => Ok(None),
            Err(error) => Err(rejection(error, limits)),
        }
    }

    fn of(mut request: Object) -> Result<Self, Rejection> {
        let version = match request.remove("version") {
            None | Some(Json::Null) => None,
            Some(Json::Number(number)) => Some(number.parse().map_err(|_| Rejection::InvalidVersion)?),
            Some(_) => return Err(Rejection::InvalidVersion),
        };
        let mut state = match request.remove("state") {
            None | Some(Json::Null) => return Err(Rejection::MissingState),
            Some(Json::Object(state)) => state,
            Some(_) => return Err(Rejection::StateNotObject),
        };
        let mut section = |name: &str, wrong: Rejection| match state.remove(name) {
            None => Ok(None),
            Some(Json::Null) => Ok(Some(Patch::Clear)),
            Some(Json::Object(object)) => Ok(Some(Patch::Merge(object))),
            Some(_) => Err(wrong),
        };
        let desired = section("desired", Rejection::DesiredNotObject)?;
        let reported = section("reported", Rejection::ReportedNotObject)?;
        if !state.is_empty() {
            return Err(Rejection::InvalidNode);
        }
        Ok(Self { desired, reported, version, client_token: None })
    }
}

/// The token of a request that needs no other content: it may be empty.
pub fn client_token(payload: &[u8], limits: &DocumentLimits) -> Result<Option<String>, Rejection> {
    if payload.is_empty() {
        return Ok(None);
    }
    take_token(&mut object(payload, limits)?)
}

fn object(payload: &[u8], limits: &DocumentLimits) -> Result<Object, Rejection> {
    if payload.len() > limits.request_bytes() {
        return Err(Rejection::TooLarge);
    }
    let text = std::str::from_utf8(payload).map_err(|_| Rejection::NotUtf8)?;
    match Json::parse(text, limits.request_depth()) {
        Ok(Json::Object(object)) => Ok(object),
        Ok(_) => Err(Rejection::InvalidJson),
        Err(error) => Err(rejection(error, limits)),
    }
}

fn rejection(error: JsonError, limits: &DocumentLimits) -> Rejection {
    match error {
        JsonError::Invalid => Rejection::InvalidJson,
        JsonError::TooDeep => Rejection::TooDeep(limits.depth),
    }
}

fn take_token(request: &mut Object) -> Result<Option<String>, Rejection> {
    match request.remove("clientToken") {
        None | Some(Json::Null) => Ok(None),
        Some(Json::Text(token)) if token.len() <= MAX_CLIENT_TOKEN => Ok(Some(token.into())),
        Some(_) => Err(Rejection::InvalidToken),
    }
}
