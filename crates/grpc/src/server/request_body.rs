//! Request bodies as they arrive: bounded, charged to the memory account, unpacked, and in time.
//!
//! Messages reach tonic whole, so that it never keeps half of one or unpacks one unseen. They are charged as they
//! arrive and stay charged until their call is answered or, in a stream, until the stream ends, since tonic keeps a
//! buffer of the largest.

use std::{
    io::Read as _,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use flate2::read::GzDecoder;
use hyper::body::Frame;
use parking_lot::Mutex;
use prost::encoding::{WireType, decode_key, decode_varint};
use tokio::time::{Sleep, sleep};
use tonic::{
    Status,
    body::Body,
    codegen::{Body as HttpBody, Bytes, http::Request},
};

use super::caller_memory::MemoryReservation;
use crate::{counters::count, proto::gateway::v1::PublishRequest};
use grpc_messages::status::Error;

/// The flag and the length of a message.
const HEAD: usize = 5;
/// Bytes of a message that its call is charged for anyway.
const FREE: usize = 8 << 10;
/// Bytes of a message that renew its time, and that are unpacked at once.
const STEP: usize = 64 << 10;
/// Memory for a decoded item of a batch, and for any other field, besides its bytes. Lists grow by doubling.
const ITEM: usize = 2 * size_of::<PublishRequest>();
const FIELD: usize = 96;
/// Largest size of a decoded message, as a multiple of the allowed bytes.
const MOST: usize = 4;
/// The calls with many requests.
const STREAMING: [&str; 3] = ["/PublishStream", "/Consume", "/ServerReflectionInfo"];

/// Bounds of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestBounds {
    /// Bytes of a message, unpacked.
    pub message: usize,
    /// Bytes of all messages together, as they come.
    pub(crate) body: usize,
    /// Time for a message, or [`STEP`] of it.
    pub timeout: Duration,
}

/// A request's body on its way to tonic.
struct RequestBody {
    body: Body,
    bounds: RequestBounds,
    holding: Arc<Mutex<MemoryReservation>>,
    /// A stream: any time may pass between messages.
    is_stream: bool,
    is_gzip: bool,
    /// Bytes that have come.
    received: usize,
    /// The message that is arriving, with its head.
    partial: Vec<u8>,
    /// Bytes behind the arriving message.
    rest: Bytes,
    /// Size of the largest message that was handed on, and decoded size of the last one.
    largest: usize,
    decoded: usize,
    timer: Option<Pin<Box<Sleep>>>,
    ended: bool,
}

/// Charges what `request` sends to `holding`, which its call keeps until it is answered.
pub(crate) fn charged(
    request: Request<Body>,
    bounds: RequestBounds,
    holding: Arc<Mutex<MemoryReservation>>,
) -> Request<Body> {
    let path = request.uri().path();
    let is_stream = STREAMING.iter().any(|method| path.ends_with(method));
    let is_gzip = request.headers().get("grpc-encoding").is_some_and(|encoding| encoding == "gzip");
    request.map(|body| {
        if body.is_end_stream() {
            return body;
        }
        Body::new(RequestBody {
            body,
            bounds,
            holding,
            is_stream,
            is_gzip,
            received: 0,
            partial: Vec::new(),
            rest: Bytes::new(),
            largest: 0,
            decoded: 0,
            timer: None,
            ended: false,
        })
    })
}

impl RequestBody {
    /// The next message, if it is there.
    fn next(&mut self) -> Result<Option<Bytes>, Error> {
        if self.partial.is_empty()
            && let Some(whole) = self.whole(&self.rest)?
            && self.rest.len() >= whole
        {
            let message = self.rest.split_to(whole);
            return self.hand_on(message).map(Some);
        }
        while !self.rest.is_empty() {
            let whole = self.whole(&self.partial)?.unwrap_or(HEAD);
            let missing = (whole - self.partial.len()).min(self.rest.len());
            let steps = self.partial.len() / STEP;
            append(&mut self.partial, &self.rest.split_to(missing), whole);
            if self.partial.len() / STEP != steps {
                self.timer = None;
            }
            self.settle(0)?;
            if self.whole(&self.partial)? == Some(self.partial.len()) {
                let message = std::mem::take(&mut self.partial).into();
                return self.hand_on(message).map(Some);
            }
        }
        Ok(None)
    }

    /// Bytes of the message that begins with `bytes`, head included, once that is known.
    fn whole(&self, bytes: &[u8]) -> Result<Option<usize>, Error> {
        let Some(&[_, a, b, c, d]) = bytes.first_chunk::<HEAD>() else { return Ok(None) };
        let len = u32::from_be_bytes([a, b, c, d]) as usize;
        if len > self.bounds.message.min(self.bounds.body) {
            return Err(Error::RequestTooLarge);
        }
        Ok(Some(HEAD + len))
    }

    /// Unpacks a message and charges what it will be.
    fn hand_on(&mut self, mut message: Bytes) -> Result<Bytes, Error> {
        self.timer = None;
        self.decoded = 0;
        if self.is_gzip && message.first() == Some(&1) {
            match self.unpack(&message[HEAD..]) {
                Ok(unpacked) => message = unpacked.into(),
                Err(Some(error)) => return Err(error),
                // Tonic finds the same fault, and has words for it.
                Err(None) => return Ok(message),
            }
        }
        self.decoded = footprint(&message[HEAD..], 0);
        if self.decoded > MOST * self.bounds.message.max(4 << 20) {
            return Err(Error::RequestTooLarge);
        }
        self.largest = self.largest.max(message.len());
        self.settle(0)?;
        Ok(message)
    }

    /// An unpacked message from a packed one; `None` is an error of the packer.
    fn unpack(&mut self, packed: &[u8]) -> Result<Vec<u8>, Option<Error>> {
        let mut packed = GzDecoder::new(packed);
        let mut message = vec![0; HEAD];
        loop {
            let before = message.len();
            let step = STEP.min(self.bounds.message + HEAD + 1 - before);
            let taken = (&mut packed).take(step as u64).read_to_end(&mut message).map_err(|_| None)?;
            let len = message.len() - HEAD;
            if len > self.bounds.message {
                return Err(Some(Error::RequestTooLarge));
            }
            self.settle(message.capacity()).map_err(Some)?;
            if taken == 0 {
                let len = u32::try_from(len).map_err(|_| Some(Error::RequestTooLarge))?;
                message[1..HEAD].copy_from_slice(&len.to_be_bytes());
                return Ok(message);
            }
        }
    }

    /// Brings the charge up to date, with `unpacking` bytes of a message that is being unpacked.
    fn settle(&self, unpacking: usize) -> Result<(), Error> {
        let all = self.largest + self.partial.capacity() + unpacking + self.decoded;
        let fits = self.holding.lock().set(all.saturating_sub(FREE));
        fits.then_some(()).ok_or(Error::MemoryBudget)
    }

    fn fail(&mut self, error: Error) -> Status {
        self.ended = true;
        self.partial = Vec::new();
        self.rest = Bytes::new();
        self.body = Body::empty();
        error.into()
    }

    /// Ready once a message that must make progress has made none for the time allowed.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_stream && self.partial.is_empty() {
            self.timer = None;
            return Poll::Pending;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.bounds.timeout)));
        timer.as_mut().poll(cx)
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        while !this.ended {
            match this.next() {
                Ok(None) => {}
                Ok(Some(message)) => return Poll::Ready(Some(Ok(Frame::data(message)))),
                Err(error) => return Poll::Ready(Some(Err(this.fail(error)))),
            }
            match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => {
                        this.received = this.received.saturating_add(data.len());
                        if this.received > this.bounds.body {
                            return Poll::Ready(Some(Err(this.fail(Error::RequestTooLarge))));
                        }
                        this.rest = data;
                    }
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Poll::Ready(Some(Err(status))) => {
                    this.ended = true;
                    return Poll::Ready(Some(Err(status)));
                }
                Poll::Ready(None) => {
                    this.ended = true;
                    // Tonic says what is wrong with half a message.
                    let partial = Bytes::from(std::mem::take(&mut this.partial));
                    return Poll::Ready((!partial.is_empty()).then(|| Ok(Frame::data(partial))));
                }
                Poll::Pending => {
                    std::task::ready!(this.poll_late(cx));
                    count(|c| c.grpc_requests_late.add(1));
                    return Poll::Ready(Some(Err(this.fail(Error::RequestIncomplete))));
                }
            }
        }
        Poll::Ready(None)
    }
}

/// Appends to the beginning of a message of `whole` bytes, with room for a quarter more at most.
fn append(partial: &mut Vec<u8>, more: &[u8], whole: usize) {
    if partial.capacity() - partial.len() < more.len() {
        let room = more.len().max(partial.len() / 4).min(whole - partial.len());
        partial.reserve_exact(room);
    }
    partial.extend_from_slice(more);
}

/// Returns the memory that the fields of a decoded message take besides their bytes. Counts the fields of the message, of
/// the items of a batch (its field 1) and of their properties (field 6): nothing else nests. A factor of the bytes received would not
/// do: to bound a batch of empty items, it would refuse ordinary batches of a hundredth of the size.
fn footprint(mut bytes: &[u8], depth: usize) -> usize {
    let mut sum = 0;
    while !bytes.is_empty() {
        let Ok((tag, wire)) = decode_key(&mut bytes) else { break };
        let skipped = match wire {
            WireType::Varint => decode_varint(&mut bytes).ok().map(|_| 0),
            WireType::SixtyFourBit => Some(8),
            WireType::ThirtyTwoBit => Some(4),
            WireType::LengthDelimited => {
                decode_varint(&mut bytes).ok().and_then(|len| usize::try_from(len).ok())
            }
            // Fields inside a group count like those outside.
            WireType::StartGroup | WireType::EndGroup => Some(0),
        };
        // Decoding ends here, too.
        let Some((field, rest)) = skipped.and_then(|len| bytes.split_at_checked(len)) else { break };
        bytes = rest;
        sum += match (depth, tag) {
            (0, 1) => ITEM + footprint(field, 1),
            (0 | 1, 6) => FIELD + footprint(field, 2),
            _ => FIELD,
        };
    }
    sum
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, future::poll_fn, io::Write as _};

    use broker::{Account, MemoryKind};
    use flate2::{Compression, write::GzEncoder};
    use tonic::Code;
    use tonic_types::StatusExt as _;

    use prost::Message as _;

    use super::super::caller_memory::CallerMemory;
    use super::*;
    use crate::proto::DESCRIPTORS;

    const MIB: usize = 1 << 20;
    const BATCH: &str = "/gateway.v1.Publisher/PublishBatch";

    /// Pieces, then nothing more, and no end.
    struct Pieces(VecDeque<Bytes>);

    impl HttpBody for Pieces {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            self.0.pop_front().map_or(Poll::Pending, |piece| Poll::Ready(Some(Ok(Frame::data(piece)))))
        }
    }

    struct Setup {
        account: Arc<Account>,
        _call: Arc<Mutex<MemoryReservation>>,
        body: Body,
    }

    /// A call that sends `bytes`, with a memory budget for all calls. Messages may have 16 MiB.
    fn setup(budget: usize, path: &str, encoding: &'static str, bytes: &[u8]) -> Setup {
        let account = Arc::new(Account::new(budget));
        let call = Arc::new(Mutex::new(CallerMemory::new(Arc::clone(&account)).open()));
        let pieces = bytes.chunks(16 << 10).map(Bytes::copy_from_slice).collect();
        let mut request = Request::post(path).body(Body::new(Pieces(pieces))).unwrap();
        request.headers_mut().insert("grpc-encoding", encoding.parse().unwrap());
        let bounds = RequestBounds { message: 16 * MIB, body: usize::MAX, timeout: Duration::from_secs(30) };
        let body = charged(request, bounds, Arc::clone(&call)).into_body();
        Setup { account, _call: call, body }
    }

    impl Setup {
        async fn next(&mut self) -> Result<Bytes, (Code, String)> {
            let frame = poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await.unwrap();
            let frame = frame.map_err(|status| {
                (status.code(), status.get_details_error_info().map(|info| info.reason).unwrap_or_default())
            })?;
            Ok(frame.into_data().unwrap())
        }

        fn held(&self) -> usize {
            self.account.held(MemoryKind::GrpcMessages)
        }
    }

    fn message(flag: u8, bytes: &[u8]) -> Vec<u8> {
        let mut message = vec![flag];
        message.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_be_bytes());
        message.extend_from_slice(bytes);
        message
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn exhausted(reason: &str) -> Result<Bytes, (Code, String)> {
        Err((Code::ResourceExhausted, reason.to_owned()))
    }

    /// Rules out that requests under way take memory that is on no account: 100 of 4 MB on each of ten connections did.
    #[test]
    fn calls_with_many_requests_may_be_silent_between_them_and_no_others() {
        let descriptors = prost_types::FileDescriptorSet::decode(DESCRIPTORS).unwrap();
        let methods =
            descriptors.file.iter().flat_map(|file| &file.service).flat_map(|service| &service.method);
        for method in methods {
            let listed = STREAMING.iter().any(|path| path[1..] == *method.name());
            assert_eq!(listed, method.client_streaming(), "{}", method.name());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn half_a_request_is_charged_by_what_has_come_until_it_is_late() {
        let half = &message(0, &[0; 2 * MIB])[..MIB];
        let mut call = setup(8 * MIB, BATCH, "identity", half);
        let polled = poll_fn(|cx| Poll::Ready(Pin::new(&mut call.body).poll_frame(cx))).await;
        assert!(polled.is_pending());
        assert!((MIB - FREE..=MIB * 5 / 4).contains(&call.held()), "{}", call.held());
        assert_eq!(call.next().await, Err((Code::DeadlineExceeded, "REQUEST_INCOMPLETE".to_owned())));

        let mut call = setup(MIB, BATCH, "identity", half);
        assert_eq!(call.next().await, exhausted("MEMORY_BUDGET"));
        assert!(call.held() < MIB);
        drop(call._call);
        drop(call.body);
        assert_eq!(call.account.used(), 0);
    }

    /// Rules out that a stream is ended for saying nothing.
    #[tokio::test(start_paused = true)]
    async fn between_the_messages_of_a_stream_any_time_may_pass() {
        let mut bytes = message(0, b"ab");
        bytes.extend(message(0, &[7; 40_000]));
        let mut call = setup(MIB, "/gateway.v1.Publisher/PublishStream", "identity", &bytes);
        assert_eq!(call.next().await.unwrap(), message(0, b"ab"));
        assert_eq!(call.next().await.unwrap(), message(0, &[7; 40_000]));
        let silence = tokio::time::timeout(Duration::from_secs(3600), call.next()).await;
        assert!(silence.is_err(), "{silence:?}");
    }

    /// Rules out that 16 KiB become 16 MiB unseen, or 16 MiB of wire gigabytes of items.
    #[tokio::test]
    async fn what_a_request_becomes_is_charged_before_it_does() {
        let zeros = vec![0; 16 * MIB];
        let packed = message(1, &gzip(&zeros));
        assert!(packed.len() < 100_000);
        assert_eq!(setup(4 * MIB, BATCH, "gzip", &packed).next().await, exhausted("MEMORY_BUDGET"));
        let mut call = setup(256 * MIB, BATCH, "gzip", &packed);
        assert_eq!(call.next().await.unwrap(), message(0, &zeros));
        assert!(call.held() > 16 * MIB - FREE);
        let more = message(1, &gzip(&vec![0; 16 * MIB + 1]));
        assert_eq!(setup(256 * MIB, BATCH, "gzip", &more).next().await, exhausted("REQUEST_TOO_LARGE"));

        let items = |count: usize| message(0, &[10, 0].repeat(count));
        let mut call = setup(256 * MIB, BATCH, "identity", &items(10_000));
        assert!(call.next().await.is_ok() && call.held() >= 10_000 * size_of::<PublishRequest>());
        let mut call = setup(1024 * MIB, BATCH, "identity", &items(MIB));
        assert_eq!(call.next().await, exhausted("REQUEST_TOO_LARGE"));
        // User properties of one request.
        let mut nested = [0x2a, 0].repeat(100_000);
        for tag in [0x32, 0x0a] {
            let mut outer = vec![tag];
            prost::encoding::encode_varint(nested.len() as u64, &mut outer);
            outer.append(&mut nested);
            nested = outer;
        }
        assert!(footprint(&nested, 0) > 100_000 * FIELD);
    }

    /// Holds a factor of the bytes received against the two ends of a batch: empty items, and items of 1 KiB.
    #[test]
    fn no_factor_of_the_bytes_bounds_empty_items_and_lets_others_in() {
        let ordinary = |n: usize| {
            let payload = vec![7; 1 << 10].into();
            PublishRequest { topic: format!("a/{n}"), payload, ..PublishRequest::default() }
        };
        let batch = |requests: Vec<PublishRequest>| {
            let mut bytes = Vec::new();
            for request in &requests {
                prost::encoding::message::encode(1, request, &mut bytes);
            }
            footprint(&bytes, 0) as f64 / bytes.len() as f64
        };
        let (empty, others) =
            (batch(vec![PublishRequest::default(); 1_000]), batch((0..1_000).map(ordinary).collect()));
        assert!(empty > 100.0 && others < 1.0, "{empty} and {others} bytes decoded for each received");
    }

    #[tokio::test]
    async fn a_message_that_is_announced_too_large_is_refused_by_its_head() {
        let head = [0, 1, 0, 0, 1];
        assert_eq!(setup(MIB, BATCH, "identity", &head).next().await, exhausted("REQUEST_TOO_LARGE"));
    }
}
