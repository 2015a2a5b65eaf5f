//! Merged answers that are neither lists nor streams.

use grpc_messages::{page::PAGE_BYTES, status::Error};
use prost::Message as _;
use tonic::{Code, Status};

use super::channel::{CallHomes, PassedOn};
use grpc::proto::gateway::v1;

/// Most requests in BatchGetLatest.
const MAX_GETS: usize = 1_000;

/// `State/GetLatest` over all devices: the newest of the homes' newest.
pub(super) async fn latest(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::GetLatestRequest,
) -> Result<v1::GetLatestResponse, Status> {
    let requests = cluster.all().map(|home| (home, request.clone()));
    let mut newest: Option<v1::LatestValue> = None;
    for (_, answer) in cluster.ask_each::<_, v1::GetLatestResponse>(&call, requests).await {
        let value = match answer {
            Ok(answer) => answer.value,
            Err(status) if status.code() == Code::NotFound => None,
            Err(status) => return Err(status),
        };
        newest = newer(newest, value);
    }
    let value = newest.ok_or(Error::ValueNotFound)?;
    Ok(v1::GetLatestResponse { value: Some(value) })
}

/// The value that was received later.
fn newer(one: Option<v1::LatestValue>, two: Option<v1::LatestValue>) -> Option<v1::LatestValue> {
    let received = |value: &Option<v1::LatestValue>| {
        value.as_ref().map(|value| value.receive_time.map(|time| (time.seconds, time.nanos)))
    };
    if received(&two) > received(&one) { two } else { one }
}

/// `State/BatchGetLatest`: each request at the home of its device, or at every home.
pub(super) async fn batch_latest(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::BatchGetLatestRequest,
) -> Result<v1::BatchGetLatestResponse, Status> {
    let asked = request.requests.len();
    if asked > MAX_GETS {
        return Err(Error::invalid("requests", format!("has more than {MAX_GETS} items")).into());
    }
    let mut parts: Vec<(Vec<usize>, Vec<v1::GetLatestRequest>)> =
        cluster.all().map(|_| Default::default()).collect();
    for (place, request) in request.requests.into_iter().enumerate() {
        let homes = match &request.device_id {
            Some(device) => vec![cluster.of(device)],
            None => cluster.all().collect(),
        };
        for home in homes {
            let (places, requests) = &mut parts[usize::from(home)];
            places.push(place);
            requests.push(request.clone());
        }
    }
    let (places, requests): (Vec<_>, Vec<_>) = cluster
        .all()
        .zip(parts)
        .filter(|(_, (places, _))| !places.is_empty())
        .map(|(home, (places, requests))| (places, (home, v1::BatchGetLatestRequest { requests })))
        .unzip();
    let answers = cluster.ask_each::<_, v1::BatchGetLatestResponse>(&call, requests).await;
    let bytes =
        answers.iter().filter_map(|(_, answer)| answer.as_ref().ok()).map(|answer| answer.encoded_len());
    let _held = cluster.hold(bytes.sum())?;
    let mut values: Vec<Option<v1::LatestValue>> = vec![None; asked];
    // The first request without an answer of each of its homes.
    let mut end = asked;
    for (places, (_, answer)) in places.into_iter().zip(answers) {
        let entries = answer?.entries;
        end = places.get(entries.len()).map_or(end, |place| end.min(*place));
        for (place, entry) in places.into_iter().zip(entries) {
            values[place] = newer(values[place].take(), entry.value);
        }
    }
    let mut bytes = 0;
    let entries = values.into_iter().take(end).map(|value| v1::BatchGetLatestEntry { value });
    let fits = |entry: &v1::BatchGetLatestEntry| {
        let is_first = bytes == 0;
        bytes += entry.encoded_len() + 8;
        is_first || bytes <= PAGE_BYTES
    };
    let entries: Vec<_> = entries.take_while(fits).collect();
    let next = if entries.len() < asked { entries.len() } else { 0 };
    Ok(v1::BatchGetLatestResponse { entries, next_index: u32::try_from(next).unwrap_or(u32::MAX) })
}

/// `State/SetRetained`: at every home, since each has a copy of all.
pub(super) async fn set_retained(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::SetRetainedRequest,
) -> Result<v1::SetRetainedResponse, Status> {
    let answers: Vec<v1::SetRetainedResponse> = cluster.ask_all(&call, &request).await?;
    Ok(v1::SetRetainedResponse { replaced: answers.iter().any(|answer| answer.replaced) })
}

/// `State/DeleteRetained`: the copies of all homes.
pub(super) async fn delete_retained(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::DeleteRetainedRequest,
) -> Result<v1::DeleteRetainedResponse, Status> {
    let answers: Vec<v1::DeleteRetainedResponse> = cluster.ask_all(&call, &request).await?;
    Ok(v1::DeleteRetainedResponse { count: most(answers.iter().map(|answer| answer.count)) })
}

/// Copies of the same things, counted at each home.
fn most(counts: impl Iterator<Item = u64>) -> u64 {
    counts.max().unwrap_or_default()
}

/// `Devices/DeleteDevice`: at its home, then the copies of its retained messages at the others.
pub(super) async fn delete_device(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::DeleteDeviceRequest,
) -> Result<v1::DeleteDeviceResponse, Status> {
    let home = cluster.of(&request.device_id);
    let mut deleted: v1::DeleteDeviceResponse = cluster.ask(home, &call, request.clone()).await?;
    let others = cluster.all().filter(|other| *other != home).map(|home| (home, request.clone()));
    for (_, answer) in cluster.ask_each::<_, v1::DeleteDeviceResponse>(&call, others).await {
        let answer = answer?;
        deleted.session_ended |= answer.session_ended;
        deleted.latest_values += answer.latest_values;
        deleted.retained_messages = deleted.retained_messages.max(answer.retained_messages);
    }
    Ok(deleted)
}

/// `Security/AddBan`: at every home.
pub(super) async fn add_ban(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::AddBanRequest,
) -> Result<v1::AddBanResponse, Status> {
    let answers: Vec<v1::AddBanResponse> = cluster.ask_all(&call, &request).await?;
    answers.into_iter().next().ok_or_else(|| Error::Internal.into())
}

/// `Security/RemoveBan`: at every home that has it.
pub(super) async fn remove_ban(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::RemoveBanRequest,
) -> Result<v1::RemoveBanResponse, Status> {
    let requests = cluster.all().map(|home| (home, request.clone()));
    let mut removed = None;
    for (_, answer) in cluster.ask_each(&call, requests).await {
        match answer {
            Ok(answer) => removed = Some(answer),
            Err(status) if status.code() == Code::NotFound => {}
            Err(status) => return Err(status),
        }
    }
    removed.ok_or_else(|| Error::BanNotFound.into())
}

/// `Operations/GetStatus`: the problems of all homes; the version, and the start, of the first that is served. A home that nobody
/// serves is a problem.
pub(super) async fn status(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::GetStatusRequest,
) -> Result<v1::GetStatusResponse, Status> {
    let requests = cluster.all().map(|home| (home, request));
    let mut status: Option<v1::GetStatusResponse> = None;
    let mut problems = Vec::new();
    for (home, answer) in cluster.ask_each::<_, v1::GetStatusResponse>(&call, requests).await {
        match answer {
            Ok(answer) => {
                problems.extend(answer.problems.iter().map(|problem| format!("home {home}: {problem}")));
                status.get_or_insert(answer);
            }
            Err(away) if away.code() == Code::Unavailable => {
                problems.push(format!("home {home}: {}", away.message()));
            }
            Err(status) => return Err(status),
        }
    }
    let status = status.ok_or(Error::HomeNotServed { home: 0 })?;
    Ok(v1::GetStatusResponse { problems, ..status })
}
