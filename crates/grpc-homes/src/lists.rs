//! Pages of lists that lie in several homes, in the order that each home has: a page of every home is read and merged, one of each
//! at a time. A page token has the token of every home, so it is good wherever a home is served; what of a home's page was
//! given before is known by the key of the last item.

use std::{cmp::Reverse, collections::VecDeque};

use access::bans::BanTarget;
use auth::abuse::BanOrigin;
use grpc_messages::{
    convert,
    page::{PAGE_BYTES, RequestPages},
    status::Error,
};
use prost::Message;
use serde_json::{Value, json};
use tonic::Status;

use super::{
    channel::{CallHomes, PassedOn},
    publish::scheduled_at,
};
use grpc::proto::gateway::v1;

/// Pages of homes that are read for a page of ours before there is an item in it: each may have none.
const MOST_READS: usize = 16;

/// A list in pages. The type is that of the request.
trait Listing: Message + Default + Clone + 'static {
    type Answer: Message + Default + 'static;
    type Item: Message;
    /// Place of an item in the order of the list.
    type Key: Ord + Clone;

    /// As in the path.
    const METHOD: &'static str;
    /// True if items of the same key at two homes are one.
    const IS_SHARED: bool = false;

    fn page(&mut self) -> (&mut i32, &mut String);

    /// The request for a home; `None` if it has none of the items.
    fn at(&self, _: &CallHomes, _: u16) -> Option<Self> {
        Some(self.clone())
    }

    /// The items of a page of a home, and its next token.
    fn items(answer: Self::Answer, home: u16) -> (Vec<Self::Item>, String);

    fn answer(items: Vec<Self::Item>, next_page_token: String) -> Self::Answer;

    fn key(item: &Self::Item) -> Self::Key;

    fn to_text(key: &Self::Key) -> String;

    fn from_text(text: &str) -> Option<Self::Key>;

    /// Adds the same item of another home.
    fn add(_: &mut Self::Item, _: Self::Item) {}
}

/// Place of a page in the list of a home.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct HomeCursor {
    /// Token with which the home is asked.
    token: String,
    /// Items behind it with the key of the last item that was given, which were given as well.
    given: u64,
    /// Nothing is behind it.
    ended: bool,
}

/// A page of a home that is being merged.
struct HomePage<L: Listing> {
    home: u16,
    place: HomeCursor,
    items: VecDeque<(L::Key, L::Item)>,
    /// Token of the page behind the items.
    next: String,
}

impl<L: Listing> HomePage<L> {
    /// Takes what a home has answered, without what was given before.
    fn fill(&mut self, answer: L::Answer, last: Option<&L::Key>) {
        let (items, next) = L::items(answer, self.home);
        let mut given = self.place.given;
        let mut is_new = |key: &L::Key| {
            let Some(last) = last else { return true };
            if key == last && given > 0 {
                given -= 1;
                return false;
            }
            key >= last
        };
        let items = items.into_iter().map(|item| (L::key(&item), item));
        self.items = items.filter(|(key, _)| is_new(key)).collect();
        self.next = next;
        self.pass();
    }

    /// Goes on behind the page once all of it was given.
    fn pass(&mut self) {
        if self.items.is_empty() {
            let token = std::mem::take(&mut self.next);
            self.place = HomeCursor { ended: token.is_empty(), token, given: 0 };
        }
    }
}

/// One page of all homes.
async fn list<L: Listing>(cluster: &CallHomes, call: &PassedOn, mut request: L) -> Result<L::Answer, Status> {
    let (size, token) = request.page();
    let (size, token) = (std::mem::take(size), std::mem::take(token));
    let limit = convert::page_size(size)?;
    let pages = RequestPages::of(L::METHOD, &request);
    let (mut last, places) = match pages.start(&token)? {
        Some(start) => from_text::<L>(&start, cluster.count()).ok_or(Error::PageTokenInvalid)?,
        None => (None, vec![HomeCursor::default(); usize::from(cluster.count())]),
    };
    let mut homes: Vec<HomePage<L>> = cluster
        .all()
        .zip(places)
        .map(|(home, place)| HomePage { home, place, items: VecDeque::new(), next: String::new() })
        .collect();
    for page in &mut homes {
        page.place.ended |= request.at(cluster, page.home).is_none();
    }
    let mut held = cluster.hold(0)?;
    let (mut items, mut bytes) = (Vec::new(), 0);
    let mut reads = 0;
    while items.len() < limit {
        let empty = homes.iter().filter(|page| page.items.is_empty() && !page.place.ended);
        let empty: Vec<_> = empty.map(|page| (page.home, page.place.token.clone())).collect();
        if !empty.is_empty() {
            if !items.is_empty() || reads == MOST_READS {
                break;
            }
            reads += 1;
            let requests = empty.into_iter().filter_map(|(home, token)| {
                let mut request = request.at(cluster, home)?;
                let (page_size, page_token) = request.page();
                (*page_size, *page_token) = (size, token);
                Some((home, request))
            });
            for (home, answer) in cluster.ask_each::<_, L::Answer>(call, requests).await {
                homes[usize::from(home)].fill(answer?, last.as_ref());
            }
            let waiting = homes
                .iter()
                .flat_map(|page| &page.items)
                .map(|(_, item)| item.encoded_len() + size_of::<L::Item>());
            if !held.set(waiting.sum()) {
                return Err(Error::MemoryBudget.into());
            }
            continue;
        }
        let keys = homes.iter().filter_map(|page| page.items.front().map(|(key, _)| key));
        let Some(key) = keys.min().cloned() else { break };
        let same = homes.iter().filter_map(|page| page.items.front()).filter(|(of, _)| *of == key);
        bytes += same.map(|(_, item)| item.encoded_len() + 8).max().unwrap_or_default();
        if bytes > PAGE_BYTES && !items.is_empty() {
            break;
        }
        if last.as_ref() != Some(&key) {
            homes.iter_mut().for_each(|page| page.place.given = 0);
        }
        let mut found: Option<L::Item> = None;
        for page in &mut homes {
            let Some((_, item)) = page.items.pop_front_if(|(of, _)| *of == key) else { continue };
            page.place.given += 1;
            page.pass();
            match &mut found {
                Some(found) => L::add(found, item),
                none => *none = Some(item),
            }
            if !L::IS_SHARED {
                break;
            }
        }
        items.extend(found);
        last = Some(key);
    }
    let has_ended = homes.iter().all(|page| page.place.ended);
    let start = (!has_ended).then(|| to_text::<L>(last.as_ref(), homes.iter().map(|page| &page.place)));
    Ok(L::answer(items, pages.token(start.as_deref())))
}

/// The place at which a page starts, as text.
fn to_text<'a, L: Listing>(last: Option<&L::Key>, places: impl Iterator<Item = &'a HomeCursor>) -> String {
    let places = places.map(|place| match place.ended {
        true => json!([]),
        false => json!([place.token, place.given]),
    });
    json!([last.map(L::to_text), places.collect::<Vec<_>>()]).to_string()
}

/// Reads what [`to_text`] has written, for as many homes.
fn from_text<L: Listing>(text: &str, homes: u16) -> Option<(Option<L::Key>, Vec<HomeCursor>)> {
    let (last, places): (Option<String>, Vec<Vec<Value>>) = serde_json::from_str(text).ok()?;
    let last = match last {
        Some(last) => Some(L::from_text(&last)?),
        None => None,
    };
    let place = |place: &Vec<Value>| match &place[..] {
        [] => Some(HomeCursor { ended: true, ..HomeCursor::default() }),
        [token, given] => {
            Some(HomeCursor { token: token.as_str()?.to_owned(), given: given.as_u64()?, ended: false })
        }
        _ => None,
    };
    let places: Vec<_> = places.iter().map(place).collect::<Option<_>>()?;
    (places.len() == usize::from(homes)).then_some((last, places))
}

/// A time as a key.
fn millis(time: Option<&prost_types::Timestamp>) -> i64 {
    time.map_or(0, |time| {
        time.seconds.saturating_mul(1_000).saturating_add(i64::from(time.nanos) / 1_000_000)
    })
}

/// `State/ListLatest`: by device, then topic.
pub(super) async fn latest(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::ListLatestRequest,
) -> Result<v1::ListLatestResponse, Status> {
    list(&cluster, &call, request).await
}

impl Listing for v1::ListLatestRequest {
    type Answer = v1::ListLatestResponse;
    type Item = v1::LatestValue;
    type Key = (String, String);

    const METHOD: &'static str = "ListLatest";
    // In a database that all homes use.
    const IS_SHARED: bool = true;

    fn page(&mut self) -> (&mut i32, &mut String) {
        (&mut self.page_size, &mut self.page_token)
    }

    fn at(&self, cluster: &CallHomes, home: u16) -> Option<Self> {
        let mut request = self.clone();
        request.device_ids.retain(|device| cluster.of(device) == home);
        (self.device_ids.is_empty() || !request.device_ids.is_empty()).then_some(request)
    }

    fn items(answer: Self::Answer, _: u16) -> (Vec<Self::Item>, String) {
        (answer.values, answer.next_page_token)
    }

    fn answer(values: Vec<Self::Item>, next_page_token: String) -> Self::Answer {
        v1::ListLatestResponse { values, next_page_token }
    }

    fn key(item: &Self::Item) -> Self::Key {
        (item.device_id.clone(), item.topic.clone())
    }

    fn to_text((device, topic): &Self::Key) -> String {
        format!("{device}\0{topic}")
    }

    fn from_text(text: &str) -> Option<Self::Key> {
        text.split_once('\0').map(|(device, topic)| (device.to_owned(), topic.to_owned()))
    }

    fn add(item: &mut Self::Item, other: Self::Item) {
        if millis(other.receive_time.as_ref()) > millis(item.receive_time.as_ref()) {
            *item = other;
        }
    }
}

/// `Publisher/ListScheduled`: by time.
pub(super) async fn scheduled(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::ListScheduledRequest,
) -> Result<v1::ListScheduledResponse, Status> {
    list(&cluster, &call, request).await
}

impl Listing for v1::ListScheduledRequest {
    type Answer = v1::ListScheduledResponse;
    type Item = v1::ScheduledMessage;
    type Key = i64;

    const METHOD: &'static str = "ListScheduled";

    fn page(&mut self) -> (&mut i32, &mut String) {
        (&mut self.page_size, &mut self.page_token)
    }

    fn at(&self, cluster: &CallHomes, home: u16) -> Option<Self> {
        (self.device_id.is_empty() || cluster.of(&self.device_id) == home).then(|| self.clone())
    }

    fn items(mut answer: Self::Answer, home: u16) -> (Vec<Self::Item>, String) {
        for message in &mut answer.messages {
            message.schedule_id = scheduled_at(home, &message.schedule_id);
        }
        (answer.messages, answer.next_page_token)
    }

    fn answer(messages: Vec<Self::Item>, next_page_token: String) -> Self::Answer {
        v1::ListScheduledResponse { messages, next_page_token }
    }

    fn key(item: &Self::Item) -> i64 {
        millis(item.deliver_time.as_ref())
    }

    fn to_text(key: &i64) -> String {
        key.to_string()
    }

    fn from_text(text: &str) -> Option<i64> {
        text.parse().ok()
    }
}

/// `Commands/ListCommands` of all devices: the newest first.
pub(super) async fn commands(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::ListCommandsRequest,
) -> Result<v1::ListCommandsResponse, Status> {
    list(&cluster, &call, request).await
}

impl Listing for v1::ListCommandsRequest {
    type Answer = v1::ListCommandsResponse;
    type Item = v1::Command;
    type Key = Reverse<i64>;

    const METHOD: &'static str = "ListCommands";

    fn page(&mut self) -> (&mut i32, &mut String) {
        (&mut self.page_size, &mut self.page_token)
    }

    fn items(answer: Self::Answer, _: u16) -> (Vec<Self::Item>, String) {
        (answer.commands, answer.next_page_token)
    }

    fn answer(commands: Vec<Self::Item>, next_page_token: String) -> Self::Answer {
        v1::ListCommandsResponse { commands, next_page_token }
    }

    fn key(item: &Self::Item) -> Self::Key {
        Reverse(millis(item.create_time.as_ref()))
    }

    fn to_text(Reverse(key): &Self::Key) -> String {
        key.to_string()
    }

    fn from_text(text: &str) -> Option<Self::Key> {
        text.parse().ok().map(Reverse)
    }
}

/// `Security/ListTenants`: by name, with what each has at all homes. Its quotas are those of one home.
pub(super) async fn tenants(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::ListTenantsRequest,
) -> Result<v1::ListTenantsResponse, Status> {
    list(&cluster, &call, request).await
}

impl Listing for v1::ListTenantsRequest {
    type Answer = v1::ListTenantsResponse;
    type Item = v1::Tenant;
    type Key = String;

    const METHOD: &'static str = "ListTenants";
    const IS_SHARED: bool = true;

    fn page(&mut self) -> (&mut i32, &mut String) {
        (&mut self.page_size, &mut self.page_token)
    }

    fn items(answer: Self::Answer, _: u16) -> (Vec<Self::Item>, String) {
        (answer.tenants, answer.next_page_token)
    }

    fn answer(tenants: Vec<Self::Item>, next_page_token: String) -> Self::Answer {
        v1::ListTenantsResponse { tenants, next_page_token }
    }

    fn key(item: &Self::Item) -> String {
        item.name.clone()
    }

    fn to_text(key: &String) -> String {
        key.clone()
    }

    fn from_text(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn add(item: &mut Self::Item, other: Self::Item) {
        let add = |usage: &mut Option<v1::QuotaUsage>, other: Option<v1::QuotaUsage>| {
            if let (Some(usage), Some(other)) = (usage, other) {
                usage.used = usage.used.saturating_add(other.used);
            }
        };
        add(&mut item.connections, other.connections);
        add(&mut item.sessions, other.sessions);
        add(&mut item.subscriptions, other.subscriptions);
        add(&mut item.retained_messages, other.retained_messages);
        add(&mut item.retained_bytes, other.retained_bytes);
    }
}

/// `Security/ListBans`: by target. A ban that several homes have is listed once.
pub(super) async fn bans(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::ListBansRequest,
) -> Result<v1::ListBansResponse, Status> {
    list(&cluster, &call, request).await
}

impl Listing for v1::ListBansRequest {
    type Answer = v1::ListBansResponse;
    type Item = v1::Ban;
    /// None of a target that this version does not know.
    type Key = Option<(BanTarget, BanOrigin)>;

    const METHOD: &'static str = "ListBans";
    const IS_SHARED: bool = true;

    fn page(&mut self) -> (&mut i32, &mut String) {
        (&mut self.page_size, &mut self.page_token)
    }

    fn items(answer: Self::Answer, _: u16) -> (Vec<Self::Item>, String) {
        (answer.bans, answer.next_page_token)
    }

    fn answer(bans: Vec<Self::Item>, next_page_token: String) -> Self::Answer {
        v1::ListBansResponse { bans, next_page_token }
    }

    fn key(item: &Self::Item) -> Self::Key {
        use v1::ban_target::Target;

        let (kind, value) = match item.target.as_ref()?.target.as_ref()? {
            Target::ClientId(value) => ("client_id", value),
            Target::Username(value) => ("username", value),
            Target::CommonName(value) => ("common_name", value),
            Target::Fingerprint(value) => ("fingerprint", value),
            Target::Address(value) => ("address", value),
        };
        let origin = match item.source() {
            v1::BanSource::File => BanOrigin::File,
            v1::BanSource::Rpc => BanOrigin::Rpc,
            v1::BanSource::Flapping => BanOrigin::Flapping,
            v1::BanSource::Unspecified => return None,
        };
        Some((BanTarget::parse(kind, value).ok()?, origin))
    }

    fn to_text(key: &Self::Key) -> String {
        let text = |(target, origin): &(BanTarget, BanOrigin)| {
            format!("{} {} {}", origin.as_str(), target.kind(), target.value())
        };
        key.as_ref().map(text).unwrap_or_default()
    }

    fn from_text(text: &str) -> Option<Self::Key> {
        if text.is_empty() {
            return Some(None);
        }
        let mut parts = text.splitn(3, ' ');
        let origin = BanOrigin::parse(parts.next()?)?;
        Some(Some((BanTarget::parse(parts.next()?, parts.next()?).ok()?, origin)))
    }
}

/// `Devices/ListDevices`: one home after the other, since the order of a home means nothing.
pub(super) async fn devices(
    cluster: CallHomes,
    call: PassedOn,
    mut request: v1::ListDevicesRequest,
) -> Result<v1::ListDevicesResponse, Status> {
    let (size, token) = (request.page_size, std::mem::take(&mut request.page_token));
    request.page_size = 0;
    let pages = RequestPages::of("ListDevices", &request);
    let place = |start: String| {
        let (home, token) = start.split_once(' ')?;
        Some((home.parse::<u16>().ok()?, token.to_owned()))
    };
    let (home, page_token) = match pages.start(&token)? {
        None => (0, String::new()),
        Some(start) => {
            place(start).filter(|(home, _)| *home < cluster.count()).ok_or(Error::PageTokenInvalid)?
        }
    };
    let request = v1::ListDevicesRequest { page_size: size, page_token, ..request };
    let v1::ListDevicesResponse { devices, next_page_token } = cluster.ask(home, &call, request).await?;
    let next = match next_page_token.is_empty() {
        false => Some(format!("{home} {next_page_token}")),
        true if home + 1 < cluster.count() => Some(format!("{} ", home + 1)),
        true => None,
    };
    Ok(v1::ListDevicesResponse { devices, next_page_token: pages.token(next.as_deref()) })
}
