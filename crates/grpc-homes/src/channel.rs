//! Calls to the homes: to one, as they came or with a request of our own, and to several at once.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use broker::Account;
use grpc_messages::status::Error;
use http_body_util::BodyExt as _;
use hyper::body::{Frame, SizeHint};
use links::{LinkBody, PassedCaller};
use prost::Message;
use tokio_stream::Stream;
use tonic::{
    IntoStreamingRequest as _, Status, Streaming,
    body::Body,
    client::Grpc,
    codegen::{
        Body as HttpBody, BoxFuture, Bytes, Service,
        http::{
            HeaderMap, Request, Response,
            header::{AUTHORIZATION, CONTENT_LENGTH},
            uri::PathAndQuery,
        },
    },
    metadata::MetadataMap,
};
use tonic_prost::ProstCodec;

use super::{FIRST, HomeWays, NotServed};
use grpc::{CallerMemory, MemoryReservation, RawMessage};

/// The homes, for one call.
#[derive(Clone)]
pub(super) struct CallHomes {
    homes: Arc<dyn HomeWays>,
    /// At least 1.
    count: u16,
    caller: Arc<PassedCaller>,
    memory: Arc<CallerMemory>,
}

impl CallHomes {
    pub(super) fn new(homes: &Arc<dyn HomeWays>, account: &Arc<Account>, caller: PassedCaller) -> Self {
        let memory = CallerMemory::new(Arc::clone(account));
        Self { homes: Arc::clone(homes), count: homes.count().max(1), caller: Arc::new(caller), memory }
    }

    pub(super) fn count(&self) -> u16 {
        self.count
    }

    /// All homes.
    pub(super) fn all(&self) -> impl Iterator<Item = u16> + use<> {
        0..self.count
    }

    /// The home of a text.
    pub(super) fn of(&self, text: &str) -> u16 {
        self.homes.of(text).min(self.count - 1)
    }

    /// The home that answers for this node.
    pub(super) fn own(&self) -> u16 {
        self.homes.own().filter(|home| *home < self.count).unwrap_or(FIRST)
    }

    pub(super) fn caller(&self) -> &PassedCaller {
        &self.caller
    }

    pub(super) fn home(&self, home: u16) -> HomeChannel {
        HomeChannel { homes: Arc::clone(&self.homes), caller: Arc::clone(&self.caller), home }
    }

    /// Charges what the call holds here while it is under way.
    ///
    /// # Errors
    /// [`Error::MemoryBudget`].
    pub(super) fn hold(&self, bytes: usize) -> Result<MemoryReservation, Error> {
        let mut held = self.memory.open();
        held.set(bytes).then_some(held).ok_or(Error::MemoryBudget)
    }

    /// Distributes devices over their homes, in the order of homes, and leaves out homes without any.
    pub(super) fn split(&self, devices: Vec<String>) -> Vec<(u16, Vec<String>)> {
        let mut homes: Vec<_> = self.all().map(|home| (home, Vec::new())).collect();
        for device in devices {
            homes[usize::from(self.of(&device))].1.push(device);
        }
        homes.retain(|(_, devices)| !devices.is_empty());
        homes
    }

    /// Asks one home.
    pub(super) async fn ask<Q, A>(&self, home: u16, call: &PassedOn, request: Q) -> Result<A, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let request = call.with(request);
        let mut client = client(self.home(home));
        Ok(client.unary(request, call.path.clone(), ProstCodec::<Q, A>::default()).await?.into_inner())
    }

    /// Asks several homes at once; the answers are in the order of the requests.
    pub(super) async fn ask_each<Q, A>(
        &self,
        call: &PassedOn,
        requests: impl IntoIterator<Item = (u16, Q)>,
    ) -> Vec<(u16, Result<A, Status>)>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let asked =
            requests.into_iter().map(async |(home, request)| (home, self.ask(home, call, request).await));
        together(asked).await
    }

    /// Asks every home the same; the answers are in the order of homes.
    ///
    /// # Errors
    /// The error of the first home that has one.
    pub(super) async fn ask_all<Q, A>(&self, call: &PassedOn, request: &Q) -> Result<Vec<A>, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let requests = self.all().map(|home| (home, request.clone()));
        let answers = self.ask_each(call, requests).await;
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    /// Opens a stream at each of several homes. Returns once all have opened theirs.
    ///
    /// # Errors
    /// The error of the first home that has one.
    pub(super) async fn open_each<Q>(
        &self,
        call: &PassedOn,
        requests: impl IntoIterator<Item = (u16, Q)>,
    ) -> Result<Vec<(u16, Streaming<RawMessage>)>, Status>
    where
        Q: Message + 'static,
    {
        let opened = requests.into_iter().map(async |(home, request)| {
            let codec = ProstCodec::<Q, RawMessage>::default();
            let request = call.with(request);
            let opened = client(self.home(home)).server_streaming(request, call.path.clone(), codec).await;
            Ok((home, opened?.into_inner()))
        });
        together(opened).await.into_iter().collect()
    }

    /// Opens a stream with many requests at one home.
    pub(super) async fn stream<Q, A>(
        &self,
        home: u16,
        call: &PassedOn,
        requests: impl Stream<Item = Q> + Send + 'static,
    ) -> Result<Streaming<A>, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut request = requests.into_streaming_request();
        *request.metadata_mut() = call.metadata.clone();
        let codec = ProstCodec::<Q, A>::default();
        Ok(client(self.home(home)).streaming(request, call.path.clone(), codec).await?.into_inner())
    }
}

/// A client of a home. Its answers are bounded where they are made.
fn client(home: HomeChannel) -> Grpc<HomeChannel> {
    Grpc::new(home).max_decoding_message_size(usize::MAX)
}

/// Parts of a call that homes are told besides its message.
#[derive(Debug, Clone)]
pub(super) struct PassedOn {
    path: PathAndQuery,
    metadata: MetadataMap,
}

impl PassedOn {
    /// Of a call with this path and these headers. Messages are passed on as they are, not packed.
    pub(super) fn new(path: PathAndQuery, mut headers: HeaderMap) -> Self {
        for name in ["grpc-encoding", "grpc-accept-encoding", AUTHORIZATION.as_str(), CONTENT_LENGTH.as_str()]
        {
            headers.remove(name);
        }
        Self { path, metadata: MetadataMap::from_headers(headers) }
    }

    fn with<Q>(&self, request: Q) -> tonic::Request<Q> {
        tonic::Request::from_parts(self.metadata.clone(), Default::default(), request)
    }
}

/// Runs futures in the task of the caller, all at once, and returns what they return in their order. Cancel safe as they are.
pub(super) async fn together<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.into_iter().map(|future| Some(Box::pin(future))).collect();
    let mut done: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    std::future::poll_fn(move |cx| {
        for (future, done) in running.iter_mut().zip(&mut done) {
            if let Some(running) = future
                && let Poll::Ready(output) = running.as_mut().poll(cx)
            {
                *done = Some(output);
                *future = None;
            }
        }
        match running.iter().all(Option::is_none) {
            true => Poll::Ready(done.iter_mut().filter_map(Option::take).collect()),
            false => Poll::Pending,
        }
    })
    .await
}

/// The services of a home.
#[derive(Clone)]
pub(super) struct HomeChannel {
    homes: Arc<dyn HomeWays>,
    caller: Arc<PassedCaller>,
    home: u16,
}

impl HomeChannel {
    /// Answers a call, with an error if nobody serves the home.
    pub(super) async fn answer(&self, request: Request<Body>) -> Response<Body> {
        self.try_answer(request).await.unwrap_or_else(|away| away)
    }

    /// Answers a call.
    ///
    /// # Errors
    /// An answer that says so, if nobody serves the home.
    pub(super) async fn try_answer(&self, request: Request<Body>) -> Result<Response<Body>, Response<Body>> {
        let (homes, home) = (Arc::clone(&self.homes), self.home);
        match self.homes.call(self.home, &self.caller, to_link(request)).await {
            Ok(answer) => Ok(answer.map(|body| Body::new(HomeAnswer { body: Some(body), homes, home }))),
            Err(NotServed) => Err(Status::from(homes.away(home)).into_http()),
        }
    }
}

impl Service<Request<Body>> for HomeChannel {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let home = self.clone();
        Box::pin(async move { Ok(home.answer(request).await) })
    }
}

/// A request as a home takes it: without what belongs to the connection that it came by.
pub(super) fn to_link(request: Request<Body>) -> Request<LinkBody> {
    let mut request = request.map(|body| LinkBody::new(body.map_err(Into::into)));
    request.extensions_mut().clear();
    request
}

/// The body of an answer from a home, which ends with a status even if that home is gone.
struct HomeAnswer {
    /// None at the end.
    body: Option<LinkBody>,
    homes: Arc<dyn HomeWays>,
    home: u16,
}

impl HttpBody for HomeAnswer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        match std::task::ready!(Pin::new(body).poll_frame(cx)) {
            Some(Ok(frame)) => Poll::Ready(Some(Ok(frame))),
            None => {
                self.body = None;
                Poll::Ready(None)
            }
            Some(Err(_)) => {
                self.body = None;
                let mut trailers = HeaderMap::new();
                Status::from(self.homes.away(self.home)).add_header(&mut trailers)?;
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
