//! `gateway.v1.Events`.

mod tokens;

use std::{collections::HashSet, convert::Infallible, sync::Arc, time::Duration};

use access::backends::TokenGrant;
use broker::{Event, EventKind, EventOrGap, EventReader, Selector};
use gateway_core::{
    clock::{self, now},
    parse_shared,
};
use tonic::{Request, Response, Status};

use self::tokens::TOKENS;
use crate::{
    context::Context,
    proto::{gateway::v1, server::events_server::Events},
    server::access::{Call, devices_of},
    stream::{ResponseQueue, ResponseSender, StreamEnd, responses, size_of_names},
};
use grpc_messages::{answers, convert, status::Error};

/// Most events in a batch.
const BATCH: usize = 256;
/// And most bytes, not counting the last event: filters may be long.
const BATCH_BYTES: usize = 64 << 10;

/// The service.
pub(crate) struct EventsService {
    pub(crate) context: Context,
}

/// Waits until a heartbeat is due; for ever without any.
async fn silence(interval: Option<Duration>) {
    match interval {
        Some(interval) => tokio::time::sleep(interval).await,
        None => std::future::pending().await,
    }
}

/// Count of missed events for a caller of limited scope, who may not know of all of them.
const UNKNOWN: u64 = 0;

/// Events that a watch selects.
struct EventSelection {
    kinds: HashSet<v1::EventKind>,
    devices: Selector,
    /// Grant that limits the watch to its topics.
    grant: Arc<TokenGrant>,
}

impl EventSelection {
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

/// Waits for at least one wanted event, then takes what else is there. Cancel safe.
async fn next_batch(events: &mut EventReader, wanted: &EventSelection) -> Vec<v1::WatchEventsItem> {
    let mut items = Vec::new();
    while items.is_empty() {
        events.ready().await;
        let mut bytes = 0;
        while items.len() < BATCH && bytes < BATCH_BYTES {
            let item = match events.read() {
                Some(EventOrGap::Event(event)) => wanted.item(event),
                Some(EventOrGap::Missed(count)) => Some(wanted.gap(count)),
                None => break,
            };
            bytes += item.as_ref().map_or(0, prost::Message::encoded_len);
            items.extend(item);
        }
    }
    items
}

/// Returns the number of events that its caller is told are missing.
fn missed(items: &[v1::WatchEventsItem]) -> u64 {
    let gaps = items.iter().filter_map(|item| match &item.item {
        Some(v1::watch_events_item::Item::Gap(gap)) => Some(gap.count),
        _ => None,
    });
    gaps.sum()
}

#[tonic::async_trait]
impl Events for EventsService {
    type WatchEventsStream = ResponseQueue;

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
        let selection = size_of_names(request.device_ids.iter().chain(&request.device_id_prefixes));
        let devices = Selector::new(false).devices(request.device_ids, request.device_id_prefixes);
        let grant = Arc::clone(&call.caller().grant);
        let devices = devices.within(devices_of(&grant));
        let wanted = EventSelection { kinds, devices, grant };

        let heartbeat = convert::heartbeat("heartbeat_interval", request.heartbeat_interval)?;
        let from = TOKENS.place(&request.resume_token)?;

        let mut slot = self.context.streams.open(&call)?;
        slot.select(selection)?;
        let events = self.context.broker.watch_events(from).ok_or(Error::OldToken)?;
        let mut shutdown = self.context.shutdown.clone();
        // Behind what waits here the broker's own bound holds.
        let (sender, queue) = responses(slot);
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = follow(&sender, events, &wanted, heartbeat) => ended,
                _ = shutdown.wait_for(|stop| *stop) => Err(StreamEnd::Error(Error::ShuttingDown)),
                () = sender.closed() => return,
            };
            let Err(end) = ended;
            sender.end(end).await;
        });
        Ok(Response::new(queue))
    }
}

/// Sends events as they come, until they cannot be sent.
async fn follow(
    sender: &ResponseSender,
    mut events: EventReader,
    wanted: &EventSelection,
    heartbeat: Option<Duration>,
) -> Result<Infallible, StreamEnd> {
    // The first says only from where on nothing is missed.
    let mut items = Vec::new();
    loop {
        let sent = items.len() as u64;
        let resume_token = TOKENS.token(events.place());
        sender.send(v1::WatchEventsResponse { items, resume_token }, sent).await?;
        items = tokio::select! {
            items = next_batch(&mut events, wanted) => {
                sender.slot().lost(missed(&items));
                items
            }
            () = silence(heartbeat) => {
                let beat = v1::Heartbeat { time: Some(answers::time(clock::to_wall(now()))) };
                vec![item(v1::watch_events_item::Item::Heartbeat(beat))]
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use access::backends::Scope;
    use broker::{Broker, BrokerConfig};
    use gateway_core::{ClientId, Timestamp};

    use super::*;

    fn broker() -> Broker {
        Broker::new(BrokerConfig::default())
    }

    /// More events than are kept, by one device or two.
    fn many(broker: &Broker, ids: [&str; 2]) {
        for n in 0..5_000u64 {
            let client_id = ClientId::new(ids[n as usize % 2]);
            let kind = if n < 4_999 { EventKind::TakenOver } else { EventKind::AuthFailed };
            broker.emit(Event { at: Timestamp(n), client_id, kind });
        }
    }

    #[tokio::test]
    async fn a_slow_watcher_is_told_what_it_missed_and_filters_hold() {
        let broker = broker();
        let mut events = broker.watch_events(None).unwrap();
        many(&broker, ["even", "odd"]);
        let wanted = EventSelection {
            kinds: HashSet::from([v1::EventKind::TakenOver]),
            devices: Selector::new(false).devices(vec![], vec!["od".into()]),
            grant: Arc::clone(&Call::unlimited().caller().grant),
        };
        let mut items = next_batch(&mut events, &wanted).await;
        let Some(v1::watch_events_item::Item::Gap(gap)) = &items[0].item else { panic!() };
        assert_eq!(gap.count, 5_000 - 4_096);
        while events.place().number < 4_998 {
            items.extend(next_batch(&mut events, &wanted).await);
        }
        let Some(v1::watch_events_item::Item::Event(event)) = &items.last().unwrap().item else { panic!() };
        assert_eq!(
            (items.len(), event.time, event.device_id.as_str()),
            (4_096 / 2, Some(answers::time(clock::to_wall(Timestamp(4_997)))), "odd")
        );
    }

    /// The failure: a caller that may not know of a device counts what it does.
    #[tokio::test]
    async fn a_watcher_of_limited_scope_is_not_told_how_many_events_it_missed() {
        let broker = broker();
        let mut events = broker.watch_events(None).unwrap();
        many(&broker, ["of somebody else"; 2]);
        let mut grant = TokenGrant::clone(&Call::unlimited().caller().grant);
        grant.scope = Scope::new(None, Some(vec!["own-*".to_owned()])).unwrap();
        let grant = Arc::new(grant);
        let devices = Selector::new(false).within(devices_of(&grant));
        let wanted = EventSelection { kinds: HashSet::new(), devices, grant };
        let items = next_batch(&mut events, &wanted).await;
        let [v1::WatchEventsItem { item: Some(v1::watch_events_item::Item::Gap(gap)) }] = &items[..] else {
            panic!("{items:?}")
        };
        assert_eq!(gap.count, UNKNOWN);
    }
}
