//! A call of the API inside the process, with messages as they are on the wire.

use std::{net::SocketAddr, time::Duration};

use axum::http::HeaderValue;
use bytes::{Buf as _, BufMut as _, Bytes};
use prost_reflect::MethodDescriptor;
use tonic::{
    Request, Status, Streaming,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    metadata::MetadataValue,
};

use super::problem::HttpProblem;
use auth::backends::callers::CallerKey;

use crate::local::LocalChannel;

/// Method that is called, and its caller.
pub(super) struct HttpCall<'a> {
    pub(super) api: &'a LocalChannel,
    pub(super) peer: Option<SocketAddr>,
    /// All values of `authorization`: the API refuses two.
    pub(super) credentials: Vec<HeaderValue>,
    pub(super) timeout: Option<Duration>,
    pub(super) method: &'a MethodDescriptor,
}

impl HttpCall<'_> {
    /// The answer to one message.
    pub(super) async fn unary(&self, message: Bytes) -> Result<Bytes, HttpProblem> {
        let (mut api, path) = self.ready().await?;
        Ok(api.unary(self.request(message)?, path, Raw).await?.into_inner())
    }

    /// The answers to one message, as they come.
    pub(super) async fn stream(&self, message: Bytes) -> Result<Streaming<Bytes>, HttpProblem> {
        let (mut api, path) = self.ready().await?;
        Ok(api.server_streaming(self.request(message)?, path, Raw).await?.into_inner())
    }

    /// Returns the caller that the credentials would let through, before the message of the call is taken.
    pub(super) fn check(&self) -> Result<CallerKey, HttpProblem> {
        Ok(self.local().check(&self.path()?, &self.credentials)?)
    }

    fn local(&self) -> LocalChannel {
        match self.peer {
            Some(peer) => self.api.forwarded_for(peer),
            None => self.api.clone(),
        }
    }

    fn path(&self) -> Result<PathAndQuery, HttpProblem> {
        let path = format!("/{}/{}", self.method.parent_service().full_name(), self.method.name());
        path.parse().map_err(|_| HttpProblem::internal())
    }

    async fn ready(&self) -> Result<(Grpc<LocalChannel>, PathAndQuery), HttpProblem> {
        // Answers have bounds of their own.
        let mut api = Grpc::new(self.local()).max_decoding_message_size(usize::MAX);
        api.ready().await.map_err(|_| HttpProblem::internal())?;
        Ok((api, self.path()?))
    }

    fn request(&self, message: Bytes) -> Result<Request<Bytes>, HttpProblem> {
        let mut request = Request::new(message);
        for value in &self.credentials {
            // A value that is no text is no credentials of ours.
            let value = value.to_str().ok().and_then(|text| MetadataValue::try_from(text).ok());
            request
                .metadata_mut()
                .append("authorization", value.unwrap_or_else(|| MetadataValue::from_static("?")));
        }
        if let Some(timeout) = self.timeout {
            request.set_timeout(timeout);
        }
        Ok(request)
    }
}

/// Messages as they are.
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}
