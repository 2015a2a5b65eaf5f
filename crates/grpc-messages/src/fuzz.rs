//! Arbitrary bytes as requests.

use config::Limits;
use gateway_api::gateway::v1;
use gateway_core::{Message, Origin, Timestamp};
use prost::Message as _;

use crate::{
    convert::{MAX_STREAM_BATCH, properties, publication, retained, subscribe},
    encode,
};

/// Takes arbitrary bytes through decoding, validation and back. Must not panic; what was accepted and encoded
/// for a stream must decode to the same message.
pub fn fuzz_convert(data: &[u8]) {
    let limits = Limits::default();
    if let Ok(request) = v1::PublishRequest::decode(data)
        && let Ok(publication) = publication(request.clone(), &limits)
    {
        let message = publication.message(Timestamp(1_000));
        let mut out = Vec::new();
        encode::message(&mut out, encode::StreamForm::Item, &message);
        assert!(out.len() <= encode::size_bound(&message), "bound holds");
        let decoded = v1::SubscribeResponse::decode(&out[..]);
        let item = decoded.ok().and_then(|response| response.items.into_iter().next()?.item);
        let Some(v1::subscribe_item::Item::Message(back)) = item else {
            unreachable!("our own encoding decodes");
        };
        assert_eq!((&back.topic, &back.payload), (&request.topic, &request.payload));
        let again = back.properties.and_then(|p| properties("properties", p).ok().flatten());
        assert_eq!(again, publication.properties);
    }
    if let Ok(request) = v1::SubscribeRequest::decode(data)
        && let Ok(subscribe) = subscribe(request, &limits)
    {
        let message = Message::new("a/b", data, Timestamp(1), Origin::SERVER);
        let _ = subscribe.selector.wants(&message);
        assert!(subscribe.buffer <= limits.stream_buffer.0 && subscribe.batch <= MAX_STREAM_BATCH);
    }
    if let Ok(request) = v1::SetRetainedRequest::decode(data) {
        let _ = retained(request, &limits);
    }
}
