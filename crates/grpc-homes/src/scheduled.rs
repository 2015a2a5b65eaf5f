//! Messages for topics whose time has come: kept by one home, published by every one.

use std::sync::Arc;

use access::backends::{Role, TokenGrant};
use broker::Account;
use links::PassedCaller;
use tonic::codegen::http::{HeaderMap, uri::PathAndQuery};

use super::{
    HomeWays,
    channel::{CallHomes, PassedOn},
    publish::{batch, of_result, scheduled_at},
};
use grpc::{TopicSpread, proto::gateway::v1};

/// Publishes the scheduled messages of `home` at every home. The same one is published once at each, for as long as that home
/// remembers keys. `account` is charged while they are on their way.
pub fn topic_spread(homes: Arc<dyn HomeWays>, home: u16, account: Arc<Account>) -> TopicSpread {
    let gateway = TokenGrant {
        id: "scheduled-messages".to_owned(),
        role: Role::Publisher,
        scope: Default::default(),
        created: 0,
        expires: None,
        note: String::new(),
        hash: Default::default(),
    };
    let caller = PassedCaller::new("gateway", &gateway, None);
    Arc::new(move |mut requests| {
        let cluster = CallHomes::new(&homes, &account, caller.clone());
        for request in &mut requests {
            request.idempotency_key = scheduled_at(home, &request.idempotency_key);
        }
        let call =
            PassedOn::new(PathAndQuery::from_static("/gateway.v1.Publisher/PublishBatch"), HeaderMap::new());
        Box::pin(async move {
            let answer = batch(cluster, call, v1::PublishBatchRequest { requests }).await;
            let results = answer.map(|answer| answer.results).unwrap_or_default();
            results
                .into_iter()
                .map(|result| of_result(result).map(drop).map_err(|failure| failure.item))
                .collect()
        })
    })
}
