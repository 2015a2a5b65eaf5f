//! `gateway.v1.Events`.

use std::{collections::HashSet, sync::Arc};

use access::backends::Grant;
use broker::{Event, EventKind, Selector};
use gateway_core::parse_shared;
use tokio::sync::{
    broadcast::{self, error::RecvError, error::TryRecvError},
    mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::grpc::{
    Context,
    messages::{answers, convert},
    proto::{gateway::v1, server::events_server::Events},
    server::access::{Call, devices_of},
    status::Error,
};

/// Most events in a batch.
const BATCH: usize = 256;
/// And most bytes, not counting the last event: filters may be long.
const BATCH_BYTES: usize = 64 << 10;
/// Batches that wait for the caller to read them; behind them the broker's own bound holds.
const FRAMES: usize = 4;

/// The service.
pub(in crate::grpc) struct EventsService {
    pub(in crate::grpc) context: Context,
}

/// What a caller of limited scope is told of events that it missed: not how many, since it may not know of all of them.
const UNKNOWN: u64 = 0;

/// Which events a watch wants.
struct Wanted {
    kinds: HashSet<v1::EventKind>,
    devices: Selector,
    /// Whose topics alone.
    grant: Arc<Grant>,
}

impl Wanted {
    fn item(&self, event: Event) -> Option<v1::WatchEventsItem> {
        let kind = self.kinds.is_empty() || self.kinds.contains(&answers::event_kind(&event.kind));
        let in_scope = match &event.kind {
            EventKind::Subscribed { filter, .. } | EventKind::Unsubscribed { filter } => {
                let filter =
                    parse_shared(filter).ok().flatten().map_or(filter.as_str(), |(_, filter)| filter);
                self.grant.scope.meets(filter)
            }
            _ => true,
        };
        let wanted = kind && in_scope && self.devices.wants_device(Some(event.client_id.as_str()));
        wanted.then(|| item(v1::watch_events_item::Item::Event(answers::event(event))))
    }

    fn gap(&self, missed: u64) -> v1::WatchEventsItem {
        let count = if self.grant.scope.is_all() { missed } else { UNKNOWN };
        item(v1::watch_events_item::Item::Gap(v1::Gap { count, reason: v1::GapReason::BufferFull.into() }))
    }
}

fn item(item: v1::watch_events_item::Item) -> v1::WatchEventsItem {
    v1::WatchEventsItem { item: Some(item) }
}

/// Waits for at least one wanted event, then takes what else is there. `None` at the end.
async fn next_batch(
    events: &mut broadcast::Receiver<Event>,
    wanted: &Wanted,
) -> Option<Vec<v1::WatchEventsItem>> {
    let mut items = Vec::new();
    while items.is_empty() {
        match events.recv().await {
            Ok(event) => items.extend(wanted.item(event)),
            Err(RecvError::Lagged(count)) => items.push(wanted.gap(count)),
            Err(RecvError::Closed) => return None,
        }
    }
    while items.len() < BATCH && items.iter().map(prost::Message::encoded_len).sum::<usize>() < BATCH_BYTES {
        match events.try_recv() {
            Ok(event) => items.extend(wanted.item(event)),
            Err(TryRecvError::Lagged(count)) => items.push(wanted.gap(count)),
            Err(TryRecvError::Empty | TryRecvError::Closed) => break,
        }
    }
    Some(items)
}

#[tonic::async_trait]
impl Events for EventsService {
    type WatchEventsStream = ReceiverStream<Result<v1::WatchEventsResponse, Status>>;

    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let call = Call::of(request.extensions())?;
        let request = request.into_inner();
        let entries = request.kinds.len() + request.device_ids.len() + request.device_id_prefixes.len();
        convert::check_entries(entries)?;
        let limits = self.context.broker.limits();
        convert::check_client_ids("device_ids", &request.device_ids, limits)?;
        convert::check_client_ids("device_id_prefixes", &request.device_id_prefixes, limits)?;
        call.check_devices("device_ids", &request.device_ids)?;
        let kinds: Result<HashSet<_>, _> =
            request.kinds.iter().map(|&kind| convert::known(kind, "kinds")).collect();
        let mut kinds = kinds?;
        kinds.remove(&v1::EventKind::Unspecified);
        let devices = Selector::new(false).devices(request.device_ids, request.device_id_prefixes);
        let grant = Arc::clone(&call.caller().grant);
        let devices = devices.within(devices_of(&grant));
        let wanted = Wanted { kinds, devices, grant };

        let slot = self.context.streams.open(None)?;
        let mut events = self.context.broker.events();
        let mut shutdown = self.context.shutdown.clone();
        let (sender, receiver) = mpsc::channel(FRAMES);
        tokio::spawn(async move {
            let _slot = slot;
            loop {
                let response = tokio::select! {
                    items = next_batch(&mut events, &wanted) => match items {
                        Some(items) => Ok(v1::WatchEventsResponse { items }),
                        None => Err(Error::ShuttingDown.into()),
                    },
                    _ = shutdown.wait_for(|stop| *stop) => Err(Error::ShuttingDown.into()),
                    () = sender.closed() => return,
                };
                let last = response.is_err();
                if sender.send(response).await.is_err() || last {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

#[cfg(test)]
mod tests {
    use access::backends::Scope;
    use gateway_core::{ClientId, Timestamp};

    use super::*;

    #[tokio::test]
    async fn a_slow_watcher_is_told_what_it_missed_and_filters_hold() {
        let (sender, mut receiver) = broadcast::channel(4);
        for n in 0..10u64 {
            let id = ClientId::new(if n % 2 == 0 { "even" } else { "odd" });
            let kind = if n < 9 { EventKind::TakenOver } else { EventKind::AuthFailed };
            sender.send(Event { at: Timestamp(n), client_id: id, kind }).unwrap();
        }
        let wanted = Wanted {
            kinds: HashSet::from([v1::EventKind::TakenOver]),
            devices: Selector::new(false).devices(vec![], vec!["od".into()]),
            grant: Arc::clone(&Call::unlimited().caller().grant),
        };
        let items = next_batch(&mut receiver, &wanted).await.unwrap();
        let Some(v1::watch_events_item::Item::Gap(gap)) = &items[0].item else { panic!() };
        assert_eq!(gap.count, 6);
        let Some(v1::watch_events_item::Item::Event(event)) = &items.last().unwrap().item else { panic!() };
        assert_eq!(
            (items.len(), event.time, event.device_id.as_str()),
            (2, Some(answers::time(Timestamp(7))), "odd")
        );
    }

    /// Whoever may not know of a device could count what it does.
    #[tokio::test]
    async fn a_watcher_of_limited_scope_is_not_told_how_many_events_it_missed() {
        let (sender, mut receiver) = broadcast::channel(4);
        for n in 0..10u64 {
            let client_id = ClientId::new("of somebody else");
            sender.send(Event { at: Timestamp(n), client_id, kind: EventKind::TakenOver }).unwrap();
        }
        let mut grant = Grant::clone(&Call::unlimited().caller().grant);
        grant.scope = Scope::new(None, Some(vec!["own-*".to_owned()])).unwrap();
        let grant = Arc::new(grant);
        let devices = Selector::new(false).within(devices_of(&grant));
        let wanted = Wanted { kinds: HashSet::new(), devices, grant };
        let items = next_batch(&mut receiver, &wanted).await.unwrap();
        let [v1::WatchEventsItem { item: Some(v1::watch_events_item::Item::Gap(gap)) }] = &items[..] else {
            panic!("{items:?}")
        };
        assert_eq!(gap.count, UNKNOWN);
    }
}
