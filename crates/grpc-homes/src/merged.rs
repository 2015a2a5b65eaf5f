//! Methods that several homes answer together: how each is read and its answer sent, as the services do it.

use std::pin::Pin;

use grpc_messages::status::Error;
use prost::Message;
use tokio_stream::Stream;
use tonic::{
    Status, Streaming,
    body::Body,
    codec::CompressionEncoding::Gzip,
    codegen::{
        BoxFuture,
        http::{Request, Response, uri::PathAndQuery},
    },
    server::{Grpc, ServerStreamingService, StreamingService, UnaryService},
};
use tonic_prost::ProstCodec;

use super::{
    answers,
    channel::{CallHomes, PassedOn},
    lists, publish, publish_stream, ranks, streams,
};
use grpc::answer_in_kind;

/// A stream of responses.
pub(super) type Responses<A> = Pin<Box<dyn Stream<Item = Result<A, Status>> + Send>>;

/// Answers a call of such a method.
type Merge = fn(CallHomes, PassedOn, Request<Body>) -> Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Answers a call at every home that it concerns.
pub(super) async fn merged(cluster: CallHomes, mut request: Request<Body>) -> Response<Body> {
    let Some(merge) = merge_of(request.uri().path()) else {
        return Status::from(Error::Unimplemented).into_http();
    };
    let path = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    answer_in_kind(request.headers_mut());
    let call = PassedOn::new(path, request.headers().clone());
    merge(cluster, call, request).await
}

/// The table of these methods; a test holds it against that of all methods.
pub(super) fn merge_of(path: &str) -> Option<Merge> {
    Some(match path {
        "/gateway.v1.Publisher/Publish" => |to, call, request| unary(to, call, request, publish::one),
        "/gateway.v1.Publisher/PublishBatch" => |to, call, request| unary(to, call, request, publish::batch),
        "/gateway.v1.Publisher/PublishStream" => {
            |to, call, request| streaming(to, call, request, publish_stream::open)
        }
        "/gateway.v1.Publisher/PublishToDevices" => {
            |to, call, request| responses(to, call, request, streams::publish_to_devices)
        }
        "/gateway.v1.Publisher/ListScheduled" => {
            |to, call, request| unary(to, call, request, lists::scheduled)
        }
        "/gateway.v1.Publisher/CancelScheduled" => {
            |to, call, request| unary(to, call, request, publish::cancel_scheduled)
        }
        "/gateway.v1.Subscriber/Subscribe" => {
            |to, call, request| responses(to, call, request, streams::subscribe)
        }
        "/gateway.v1.Subscriber/ListStreams" => |to, call, request| unary(to, call, request, ranks::streams),
        "/gateway.v1.State/GetLatest" => |to, call, request| unary(to, call, request, answers::latest),
        "/gateway.v1.State/BatchGetLatest" => {
            |to, call, request| unary(to, call, request, answers::batch_latest)
        }
        "/gateway.v1.State/ListLatest" => |to, call, request| unary(to, call, request, lists::latest),
        "/gateway.v1.State/WatchLatest" => {
            |to, call, request| responses(to, call, request, streams::watch_latest)
        }
        "/gateway.v1.State/SetRetained" => {
            |to, call, request| unary(to, call, request, answers::set_retained)
        }
        "/gateway.v1.State/DeleteRetained" => {
            |to, call, request| unary(to, call, request, answers::delete_retained)
        }
        "/gateway.v1.Devices/ListDevices" => |to, call, request| unary(to, call, request, lists::devices),
        "/gateway.v1.Devices/ListTopDevices" => |to, call, request| unary(to, call, request, ranks::devices),
        "/gateway.v1.Devices/DeleteDevice" => {
            |to, call, request| unary(to, call, request, answers::delete_device)
        }
        "/gateway.v1.Events/WatchEvents" => {
            |to, call, request| responses(to, call, request, streams::watch_events)
        }
        "/gateway.v1.Commands/ListCommands" => |to, call, request| unary(to, call, request, lists::commands),
        "/gateway.v1.Shadows/WatchShadow" => {
            |to, call, request| responses(to, call, request, streams::watch_shadow)
        }
        "/gateway.v1.Security/ListBans" => |to, call, request| unary(to, call, request, lists::bans),
        "/gateway.v1.Security/AddBan" => |to, call, request| unary(to, call, request, answers::add_ban),
        "/gateway.v1.Security/RemoveBan" => |to, call, request| unary(to, call, request, answers::remove_ban),
        "/gateway.v1.Security/ListTenants" => |to, call, request| unary(to, call, request, lists::tenants),
        "/gateway.v1.Operations/GetStatus" => |to, call, request| unary(to, call, request, answers::status),
        "/rpcserver.PublishedPacketService/StreamPublishedPayload" => {
            |to, call, request| responses(to, call, request, streams::published_payload)
        }
        _ => return None,
    })
}

/// A method, as the server calls it with a request.
struct Handler<H> {
    cluster: CallHomes,
    call: PassedOn,
    handle: H,
}

fn server<A, Q>() -> Grpc<ProstCodec<A, Q>>
where
    A: Message + 'static,
    Q: Message + Default + 'static,
{
    // The request is bounded and unpacked before it comes here.
    Grpc::new(ProstCodec::default())
        .max_decoding_message_size(usize::MAX)
        .accept_compressed(Gzip)
        .send_compressed(Gzip)
}

/// A method with one request and one answer.
fn unary<Q, A, H, F>(
    cluster: CallHomes,
    call: PassedOn,
    request: Request<Body>,
    handle: H,
) -> Pin<Box<dyn Future<Output = Response<Body>> + Send>>
where
    Q: Message + Default + 'static,
    A: Message + 'static,
    H: Fn(CallHomes, PassedOn, Q) -> F + Send + Sync + 'static,
    F: Future<Output = Result<A, Status>> + Send + 'static,
{
    Box::pin(async move { server::<A, Q>().unary(Handler { cluster, call, handle }, request).await })
}

/// A method with one request and a stream of answers.
fn responses<Q, A, H, F>(
    cluster: CallHomes,
    call: PassedOn,
    request: Request<Body>,
    handle: H,
) -> Pin<Box<dyn Future<Output = Response<Body>> + Send>>
where
    Q: Message + Default + 'static,
    A: Message + 'static,
    H: Fn(CallHomes, PassedOn, Q) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Responses<A>, Status>> + Send + 'static,
{
    Box::pin(
        async move { server::<A, Q>().server_streaming(Handler { cluster, call, handle }, request).await },
    )
}

/// A method with a stream of requests and one of answers.
fn streaming<Q, A, H, F>(
    cluster: CallHomes,
    call: PassedOn,
    request: Request<Body>,
    handle: H,
) -> Pin<Box<dyn Future<Output = Response<Body>> + Send>>
where
    Q: Message + Default + 'static,
    A: Message + 'static,
    H: Fn(CallHomes, PassedOn, Streaming<Q>) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Responses<A>, Status>> + Send + 'static,
{
    Box::pin(async move { server::<A, Q>().streaming(Handler { cluster, call, handle }, request).await })
}

impl<H> Handler<H> {
    fn handle<R, F, A>(&mut self, request: tonic::Request<R>) -> BoxFuture<tonic::Response<A>, Status>
    where
        H: Fn(CallHomes, PassedOn, R) -> F,
        F: Future<Output = Result<A, Status>> + Send + 'static,
    {
        let answer = (self.handle)(self.cluster.clone(), self.call.clone(), request.into_inner());
        Box::pin(async move { answer.await.map(tonic::Response::new) })
    }
}

impl<H, Q, A, F> UnaryService<Q> for Handler<H>
where
    H: Fn(CallHomes, PassedOn, Q) -> F,
    F: Future<Output = Result<A, Status>> + Send + 'static,
{
    type Response = A;
    type Future = BoxFuture<tonic::Response<A>, Status>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        self.handle(request)
    }
}

impl<H, Q, A, F> ServerStreamingService<Q> for Handler<H>
where
    H: Fn(CallHomes, PassedOn, Q) -> F,
    F: Future<Output = Result<Responses<A>, Status>> + Send + 'static,
{
    type Response = A;
    type ResponseStream = Responses<A>;
    type Future = BoxFuture<tonic::Response<Responses<A>>, Status>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        self.handle(request)
    }
}

impl<H, Q, A, F> StreamingService<Q> for Handler<H>
where
    H: Fn(CallHomes, PassedOn, Streaming<Q>) -> F,
    F: Future<Output = Result<Responses<A>, Status>> + Send + 'static,
{
    type Response = A;
    type ResponseStream = Responses<A>;
    type Future = BoxFuture<tonic::Response<Responses<A>>, Status>;

    fn call(&mut self, request: tonic::Request<Streaming<Q>>) -> Self::Future {
        self.handle(request)
    }
}
