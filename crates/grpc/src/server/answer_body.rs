//! Answers until they are sent, on the memory account: what a client does not read waits here or in HTTP/2's buffers,
//! and is charged wherever it is. So is the call itself, by the status that ends each answer.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use hyper::body::{Frame, SizeHint};
use tonic::{
    Status,
    body::Body,
    codegen::{
        Body as HttpBody, Bytes,
        http::{HeaderMap, HeaderValue, Response},
    },
};

use super::{
    caller_memory::{CallerMemory, MemoryReservation},
    connection_calls::RunningCall,
};
use grpc_messages::status::Error;

/// Frames taken before the client has room for them: a message and the end of its answer.
const AHEAD: usize = 2;

/// Says how a call ended, in the last headers or trailers of its answer.
const STATUS: &str = "grpc-status";

/// The body of an answer, with the place of its call.
struct AnswerBody<B> {
    /// Gone at the end.
    body: Option<Pin<Box<B>>>,
    ahead: VecDeque<Result<Frame<Bytes>, Status>>,
    caller_memory: Arc<CallerMemory>,
    /// Gone with the last frame, which has it then.
    call: Option<RunningCall>,
}

/// Bytes that are charged until nobody has them.
struct Charged {
    bytes: Bytes,
    _holding: MemoryReservation,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A value of a header, with what lasts as long.
struct Lasting<T> {
    value: HeaderValue,
    _kept: T,
}

impl<T> AsRef<[u8]> for Lasting<T> {
    fn as_ref(&self) -> &[u8] {
        self.value.as_bytes()
    }
}

/// Drops `kept` once HTTP/2 has written these headers or trailers, or has given them up. At once, if they have no status.
pub(super) fn keep_until_sent<T: Send + 'static>(headers: &mut HeaderMap, kept: T) {
    let Some(status) = headers.get_mut(STATUS) else { return };
    let bytes = Bytes::from_owner(Lasting { value: status.clone(), _kept: kept });
    if let Ok(mut lasting) = HeaderValue::from_maybe_shared(bytes) {
        // HPACK's table would keep it for as long as the connection lasts.
        lasting.set_sensitive(true);
        *status = lasting;
    }
}

/// Takes what is ready of an answer and charges it, and the rest as it comes. An answer that does not fit in the
/// account becomes an error.
pub(crate) async fn charged<B>(
    response: Response<B>,
    call: RunningCall,
    caller_memory: Arc<CallerMemory>,
) -> Response<Body>
where
    B: HttpBody<Data = Bytes, Error = Status> + Send + 'static,
{
    let (mut parts, body) = response.into_parts();
    if body.is_end_stream() {
        keep_until_sent(&mut parts.headers, call);
        return Response::from_parts(parts, Body::empty());
    }
    let mut answer =
        AnswerBody { body: Some(Box::pin(body)), ahead: VecDeque::new(), caller_memory, call: Some(call) };
    // A client that gives no room would leave the answer uncharged where it is.
    let refused = poll_fn(|cx| Poll::Ready(answer.take_ahead(cx))).await.err();
    let Some(error) = refused else { return Response::from_parts(parts, Body::new(answer)) };
    let mut refused = Status::from(error).into_http();
    if let Some(call) = answer.call.take() {
        keep_until_sent(refused.headers_mut(), call);
    }
    refused
}

impl<B: HttpBody<Data = Bytes, Error = Status>> AnswerBody<B> {
    fn take_ahead(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        while self.ahead.len() < AHEAD {
            match self.poll_inner(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    let frame = self.charge(frame)?;
                    self.ahead.push_back(Ok(frame));
                }
                Poll::Ready(Some(Err(status))) => self.ahead.push_back(Err(status)),
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        Ok(())
    }

    fn poll_inner(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = std::task::ready!(body.as_mut().poll_frame(cx));
        // Nothing follows trailers: what the encoder still has goes.
        if frame.as_ref().is_none_or(|frame| !frame.as_ref().is_ok_and(Frame::is_data)) {
            self.body = None;
        }
        Poll::Ready(frame)
    }

    /// The frame, with the call if it is the last one.
    fn end_with(&mut self, frame: Result<Frame<Bytes>, Status>) -> Result<Frame<Bytes>, Status> {
        let mut frame = frame?;
        if let Some(trailers) = frame.trailers_mut()
            && let Some(call) = self.call.take()
        {
            keep_until_sent(trailers, call);
        }
        Ok(frame)
    }

    fn charge(&mut self, frame: Frame<Bytes>) -> Result<Frame<Bytes>, Error> {
        let bytes = match frame.into_data() {
            Ok(bytes) => bytes,
            Err(trailers) => return Ok(trailers),
        };
        if self.call.as_ref().is_some_and(RunningCall::is_reserved) {
            return Ok(Frame::data(bytes));
        }
        let mut holding = self.caller_memory.open();
        if !holding.set(bytes.len()) {
            self.body = None;
            return Err(Error::MemoryBudget);
        }
        Ok(Frame::data(Bytes::from_owner(Charged { bytes, _holding: holding })))
    }
}

impl<B: HttpBody<Data = Bytes, Error = Status>> HttpBody for AnswerBody<B> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(frame) = self.ahead.pop_front() {
            return Poll::Ready(Some(self.end_with(frame)));
        }
        let Some(frame) = std::task::ready!(self.poll_inner(cx)) else { return Poll::Ready(None) };
        let frame = frame.and_then(|frame| {
            self.charge(frame).or_else(|error| {
                // An answer that has begun ends like this.
                let mut trailers = HeaderMap::new();
                Status::from(error).add_header(&mut trailers)?;
                Ok(Frame::trailers(trailers))
            })
        });
        Poll::Ready(Some(self.end_with(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_empty() && self.body.as_ref().is_none_or(|body| body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use broker::{Account, MemoryKind};
    use tonic::Code;

    use super::*;

    const MIB: usize = 1 << 20;

    /// An answer of one frame.
    struct One(Option<Bytes>);

    impl HttpBody for One {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
        }
    }

    /// Rules out that a client which makes calls that are denied, and reads no answer, has HTTP/2 keep them all on no account.
    #[tokio::test]
    async fn a_call_is_charged_until_its_status_is_written_also_if_it_is_denied() {
        let account = Arc::new(Account::new(8 * MIB));
        let caller_memory = CallerMemory::new(Arc::clone(&account));
        let call = RunningCall::holding(&caller_memory, 1_000);
        let denied = Status::unauthenticated("nobody").into_http::<Body>();
        let denied = charged(denied, call, Arc::clone(&caller_memory)).await;
        let (parts, body) = denied.into_parts();
        drop(body);
        assert_eq!(account.used(), 1_000, "HTTP/2 has the headers");
        assert!(parts.headers[STATUS].is_sensitive(), "or its table of headers would keep them");
        assert_eq!(parts.headers[STATUS], "16");
        drop(parts);
        assert_eq!(account.used(), 0);

        let mut trailers = HeaderMap::new();
        trailers.insert(STATUS, HeaderValue::from_static("0"));
        let call = RunningCall::holding(&caller_memory, 1_000);
        let end = Ended(Some(Frame::trailers(trailers)));
        let mut body = charged(Response::new(end), call, caller_memory).await.into_body();
        let last = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await.unwrap().unwrap();
        drop(body);
        assert_eq!(account.used(), 1_000, "HTTP/2 has the trailers");
        drop(last);
        assert_eq!(account.used(), 0);
    }

    /// The end of an answer.
    struct Ended(Option<Frame<Bytes>>);

    impl HttpBody for Ended {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.take().map(Ok))
        }
    }

    async fn answer(account: &Arc<Account>, bytes: usize) -> Response<Body> {
        let body = One(Some(vec![0; bytes].into()));
        charged(Response::new(body), RunningCall::default(), CallerMemory::new(Arc::clone(account))).await
    }

    /// Rules out that a client which reads no answer has them all kept for it, on no account.
    #[tokio::test]
    async fn an_answer_is_charged_until_it_is_sent_and_refused_without_room() {
        let account = Arc::new(Account::new(8 * MIB));
        let mut body = answer(&account, 3 * MIB).await.into_body();
        assert_eq!(account.held(MemoryKind::GrpcMessages), 3 * MIB, "also before the client has room for it");
        let frame = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await.unwrap().unwrap();
        drop(body);
        assert_eq!(account.held(MemoryKind::GrpcMessages), 3 * MIB, "HTTP/2 has it");

        let second = answer(&account, 3 * MIB).await;
        let third = answer(&account, 3 * MIB).await;
        let status = Status::from_header_map(third.headers()).unwrap();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(
            Status::from_header_map(answer(&account, 1_000).await.headers()).is_none(),
            "small ones go on"
        );
        drop((frame, second, third));
        assert_eq!(account.used(), 0);
    }
}
