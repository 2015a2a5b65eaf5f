//! Calls in a cluster of several homes: each is answered by the home that it is about, by every home with the answers merged, or
//! by the node that was called. With one home, everything is answered there, and nothing is read of a call.
//!
//! ```text
//! route     homes by a text in a request
//! channel   calls to one home, and to several at once
//! merged    methods that several homes answer together
//! choice    methods that any home answers, or the one that knows
//! publish   messages, each to the homes of its receivers; publish_stream for streams of them
//! scheduled messages for topics whose time has come
//! lists     pages of lists that lie in several homes
//! ranks     the first of a ranking
//! streams   streams of several homes as one
//! answers   other merged answers
//! ```
//!
//! Knows the API and what `grpc` has around every call; must not know services, and of the broker only the account of memory: a home is
//! known by its answers alone. Nothing is kept of a call here but its parts that are under
//! way, so a call that is dropped is cancelled at every home.

mod answers;
mod channel;
mod choice;
mod lists;
mod merged;
mod publish;
mod publish_stream;
mod ranks;
mod route;
mod scheduled;
mod streams;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use broker::Account;
use grpc_messages::status::Error;
use links::{LinkBody, PassedCaller};
use tonic::{
    Status,
    body::Body,
    codegen::{
        BoxFuture,
        http::{Request, Response},
    },
};

pub use scheduled::topic_spread;

use self::{channel::CallHomes, merged::merged};
use grpc::{
    AnswerElsewhere, CheckedCall, LocalService,
    methods::{AnsweredAt, method},
};

/// Home of consumer groups, of the bridges that read them, and of messages that backends publish to topics as far as streams
/// get them.
const FIRST: u16 = 0;

/// Nobody serves a home now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotServed;

/// Ways to the homes of a cluster.
pub trait HomeWays: Send + Sync {
    /// Number of homes; 0 is not known yet, and like 1. Once it is known it never changes.
    fn count(&self) -> u16;

    /// Returns the home of a client identifier, or of another text; below [`Self::count`].
    fn of(&self, text: &str) -> u16;

    /// Answers a call at a home, here or over a link. Dropping the answer or its body cancels the call. A body that breaks off
    /// ends with an error.
    fn call(
        &self,
        home: u16,
        caller: &PassedCaller,
        request: Request<LinkBody>,
    ) -> BoxFuture<Response<LinkBody>, NotServed>;

    /// A home that this node serves, if there is one: it answers for the node.
    fn own(&self) -> Option<u16> {
        None
    }

    /// Error of a call to a home that nobody serves, or whose answer broke off.
    fn away(&self, home: u16) -> Error {
        Error::HomeNotServed { home }
    }
}

/// Answers calls at the homes of a cluster. `here` answers for this node, where its own files and its process are asked about;
/// without it a home of this node does, or else the first. `account` is charged for answers that are being merged.
pub fn over_homes(
    homes: Arc<dyn HomeWays>,
    here: Option<LocalService>,
    account: Arc<Account>,
) -> AnswerElsewhere {
    Arc::new(move |CheckedCall { caller, peer, request }| {
        let caller = PassedCaller::new(caller.credential.as_str(), &caller.grant, peer);
        let cluster = CallHomes::new(&homes, &account, caller);
        let here = here.clone();
        Box::pin(async move { Ok(answer(cluster, here, request).await) })
    })
}

async fn answer(cluster: CallHomes, here: Option<LocalService>, request: Request<Body>) -> Response<Body> {
    if cluster.count() == 1 {
        return cluster.home(FIRST).answer(request).await;
    }
    let Some(method) = method(request.uri().path()) else {
        return Status::from(Error::Unimplemented).into_http();
    };
    match method.at {
        AnsweredAt::Here => match here {
            Some(here) => answer_here(here, cluster.caller(), request).await,
            None => cluster.home(cluster.own()).answer(request).await,
        },
        AnsweredAt::HomeOfGroup => cluster.home(FIRST).answer(request).await,
        AnsweredAt::HomeOfDevice(field) | AnsweredAt::HomeOfKey(field) => {
            match route::read(request, field).await {
                Ok((text, request)) => cluster.home(cluster.of(&text)).answer(request).await,
                Err(status) => status.into_http(),
            }
        }
        AnsweredAt::HomeOfDeviceOrEvery(field) => match route::read(request, field).await {
            Ok((text, request)) if text.is_empty() => merged(cluster, request).await,
            Ok((text, request)) => cluster.home(cluster.of(&text)).answer(request).await,
            Err(status) => status.into_http(),
        },
        AnsweredAt::AnyHome => choice::any(&cluster, request).await,
        AnsweredAt::HomeThatHas => choice::that_has(&cluster, request).await,
        AnsweredAt::EveryHome => merged(cluster, request).await,
    }
}

/// Answers a call by the services of this node.
async fn answer_here(here: LocalService, caller: &PassedCaller, request: Request<Body>) -> Response<Body> {
    match here.passed(caller, channel::to_link(request)) {
        Some(answer) => match answer.await {
            Ok(answer) => answer.map(Body::new),
            Err(never) => match never {},
        },
        None => Status::from(Error::Internal).into_http(),
    }
}
