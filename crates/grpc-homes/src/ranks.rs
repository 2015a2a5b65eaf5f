//! The first of a ranking over several homes, from the first of each home.

use std::cmp::Reverse;

use grpc_messages::convert;
use tonic::Status;

use super::channel::{CallHomes, PassedOn};
use grpc::proto::gateway::v1;

/// Devices, and streams, that are shown if nothing is said.
const DEVICES: usize = 10;
const STREAMS: usize = 100;

/// `Devices/ListTopDevices`.
pub(super) async fn devices(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::ListTopDevicesRequest,
) -> Result<v1::ListTopDevicesResponse, Status> {
    let answers: Vec<v1::ListTopDevicesResponse> = cluster.ask_all(&call, &request).await?;
    let by: v1::DeviceRank = convert::known(request.rank_by, "rank_by")?;
    let value = |device: &v1::Device| {
        let queue = device.queue.unwrap_or_default();
        match by {
            v1::DeviceRank::Unspecified | v1::DeviceRank::PendingMessages => queue.pending,
            v1::DeviceRank::PendingBytes => queue.pending_bytes,
            v1::DeviceRank::Inflight => queue.inflight,
            v1::DeviceRank::Dropped => queue.dropped,
        }
    };
    let ranked = answers.iter().map(|answer| answer.ranked).sum();
    let mut devices: Vec<_> = answers.into_iter().flat_map(|answer| answer.devices).collect();
    devices.sort_by_cached_key(|device| Reverse((value(device), device.device_id.clone())));
    devices.truncate(limit(request.limit, DEVICES));
    Ok(v1::ListTopDevicesResponse { devices, ranked })
}

/// `Subscriber/ListStreams`. A stream over several homes is listed at each of them.
pub(super) async fn streams(
    cluster: CallHomes,
    call: PassedOn,
    request: v1::ListStreamsRequest,
) -> Result<v1::ListStreamsResponse, Status> {
    let answers: Vec<v1::ListStreamsResponse> = cluster.ask_all(&call, &request).await?;
    let by: v1::StreamRank = convert::known(request.rank_by, "rank_by")?;
    let waited = |stream: &v1::OpenStream| {
        // One that waits for no time yet comes before one for which nothing waits.
        stream.waiting_time.map_or((-1, 0), |time| (time.seconds, time.nanos))
    };
    let value = |stream: &v1::OpenStream| match by {
        v1::StreamRank::Unspecified | v1::StreamRank::WaitingTime => waited(stream),
        v1::StreamRank::WaitingBytes => (i64::try_from(stream.waiting_bytes).unwrap_or(i64::MAX), 0),
        v1::StreamRank::Dropped => (i64::try_from(stream.dropped).unwrap_or(i64::MAX), 0),
    };
    let ranked = answers.iter().map(|answer| answer.ranked).sum();
    let homes = u64::from(cluster.count());
    let mut streams = Vec::new();
    for (home, answer) in (0..).zip(answers) {
        streams.extend(answer.streams.into_iter().map(|stream| v1::OpenStream {
            // No two homes have the same.
            stream_id: stream.stream_id.saturating_mul(homes).saturating_add(home),
            ..stream
        }));
    }
    streams.sort_by_key(|stream| (Reverse(value(stream)), stream.stream_id));
    streams.truncate(limit(request.limit, STREAMS));
    Ok(v1::ListStreamsResponse { streams, ranked })
}

/// The number of entries; each home has checked it.
fn limit(limit: i32, default: usize) -> usize {
    match usize::try_from(limit) {
        Ok(0) | Err(_) => default,
        Ok(limit) => limit,
    }
}
