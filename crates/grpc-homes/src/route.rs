//! Homes by a text in a request. Of the request only this field is read.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use http_body_util::BodyExt as _;
use hyper::body::{Frame, SizeHint};
use prost::encoding::{WireType, decode_key, decode_varint};
use tonic::{
    Status,
    body::Body,
    codegen::{Body as HttpBody, Bytes, http::Request},
};

use grpc::methods::TextField;

/// Bytes before a message: its flag and its length.
const HEAD: usize = 5;

/// Reads a field of an encoded message; empty if it is not there, or no text.
pub(super) fn text_of(field: TextField, message: &[u8]) -> &str {
    text(message, field.tags).unwrap_or_default()
}

/// The text at `tags`. Of several the last counts, as decoders have it.
pub(super) fn text<'a>(message: &'a [u8], tags: &[u32]) -> Option<&'a str> {
    let (tag, inner) = tags.split_first()?;
    let found = fields(message).filter(|field| field.tag == *tag).filter_map(|field| match inner {
        [] => str::from_utf8(field.content).ok(),
        inner => text(field.content, inner),
    });
    found.last()
}

/// A field of an encoded message.
pub(super) struct RawField<'a> {
    pub(super) tag: u32,
    /// With its key.
    pub(super) whole: &'a [u8],
    /// Of text, bytes and messages; empty of others.
    pub(super) content: &'a [u8],
    /// Of a number in few bytes; 0 of others.
    pub(super) number: u64,
}

/// The fields of an encoded message, up to where it is damaged.
pub(super) fn fields(mut bytes: &[u8]) -> impl Iterator<Item = RawField<'_>> {
    std::iter::from_fn(move || {
        let before = bytes;
        let (tag, wire) = decode_key(&mut bytes).ok()?;
        let number = match wire {
            WireType::Varint => decode_varint(&mut bytes).ok()?,
            _ => 0,
        };
        let length = match wire {
            WireType::Varint => 0,
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::LengthDelimited => usize::try_from(decode_varint(&mut bytes).ok()?).ok()?,
            WireType::StartGroup | WireType::EndGroup => 0,
        };
        let (content, rest) = bytes.split_at_checked(length)?;
        bytes = rest;
        Some(RawField { tag, whole: &before[..before.len() - rest.len()], content, number })
    })
}

/// Reads a field of the first message of a request, which is not changed.
///
/// # Errors
/// The request does not come.
pub(super) async fn read(
    request: Request<Body>,
    field: TextField,
) -> Result<(String, Request<Body>), Status> {
    let (parts, mut rest) = request.into_parts();
    let first = first(&mut rest).await?;
    let found = text_of(field, first.get(HEAD..).unwrap_or_default()).to_owned();
    let body = Body::new(ReadBody { first: Some(first).filter(|first| !first.is_empty()), rest });
    Ok((found, Request::from_parts(parts, body)))
}

/// Takes the first message of a request, with its head. Messages come whole, each in a frame of its own; an empty one is the end.
pub(super) async fn first(body: &mut Body) -> Result<Bytes, Status> {
    match body.frame().await {
        None => Ok(Bytes::new()),
        Some(frame) => Ok(frame?.into_data().unwrap_or_default()),
    }
}

/// A body whose first frame was read.
struct ReadBody {
    first: Option<Bytes>,
    rest: Body,
}

impl HttpBody for ReadBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(Ok(Frame::data(first)))),
            None => Pin::new(&mut self.rest).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use grpc::proto::gateway::v1;

    /// The failure: a call that reaches another home than the device's, which answers that there is no such device.
    #[test]
    fn a_field_is_found_as_a_decoder_finds_it() {
        let spec = v1::CommandSpec {
            device_id: "d".to_owned(),
            payload: vec![10, 1, b'x'].into(),
            ..Default::default()
        };
        let start =
            v1::StartCommandRequest { command_id: "c".to_owned(), spec: Some(spec), ..Default::default() };
        let field = TextField { name: "spec.device_id", tags: &[2, 1] };
        let mut bytes = start.encode_to_vec();
        assert_eq!(text_of(field, &bytes), "d");
        assert_eq!(text_of(TextField { name: "command_id", tags: &[1] }, &bytes), "c");
        let later = v1::StartCommandRequest {
            spec: Some(v1::CommandSpec { device_id: "e".to_owned(), ..Default::default() }),
            ..Default::default()
        };
        bytes.extend(later.encode_to_vec());
        let decoded = v1::StartCommandRequest::decode(&bytes[..]).unwrap();
        assert_eq!(text_of(field, &bytes), decoded.spec.unwrap().device_id);
        for bad in [&b""[..], b"\x12", b"\x12\xff", b"\x12\x02\x0a\xff", &[0x12, 0x03, 0x0a, 0x01, 0xff]] {
            assert_eq!(text_of(field, bad), "", "{bad:?}");
        }
    }
}
