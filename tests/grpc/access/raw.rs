//! Calls of any method, with requests and answers as bytes.

use bytes::{Buf, BufMut, Bytes};
use tonic::{
    Request, Status, Streaming,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    metadata::AsciiMetadataValue,
    transport::Channel,
};

/// Bytes as they are.
#[derive(Debug, Clone, Copy, Default)]
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

    fn encode(&mut self, item: Bytes, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(bytes.copy_to_bytes(bytes.remaining())))
    }
}

/// Calls `path` with one request of no bytes, which is a message of every type, and the values of `authorization`. The
/// answer is what comes first.
pub(crate) async fn call(
    channel: &Channel,
    path: &str,
    authorization: &[AsciiMetadataValue],
) -> Result<Streaming<Bytes>, Status> {
    let mut client = Grpc::new(channel.clone());
    client.ready().await.unwrap();
    // The request's stream stays open: a call that streams would end with it.
    let (sender, requests) = tokio::sync::mpsc::channel(1);
    sender.send(Bytes::new()).await.unwrap();
    if !path.ends_with("Stream") && !path.ends_with("Info") {
        drop(sender);
    } else {
        tokio::spawn(async move { sender.closed().await });
    }
    let mut request = Request::new(tokio_stream::wrappers::ReceiverStream::new(requests));
    for value in authorization {
        request.metadata_mut().append("authorization", value.clone());
    }
    client.streaming(request, path.parse().unwrap(), Raw).await.map(tonic::Response::into_inner)
}

/// The value of `authorization` for a token.
pub(crate) fn bearer(token: &str) -> AsciiMetadataValue {
    format!("Bearer {token}").parse().unwrap()
}
