//! `gateway.v1.Devices`.
//!
//! ```text
//! packets      its packets as they come and go
//! queue        what waits for a device
//! subscribing  subscriptions that backends make for devices
//! top          the devices of which most waits
//! ```

mod packets;
mod queue;
mod subscribing;
mod top;

use std::sync::Arc;

use broker::{DeviceFilter, DeviceInfo};
use gateway_core::{Timestamp, clock, parse_shared};
use tonic::{Request, Response, Status};

use super::delete;
use crate::{
    context::Context,
    proto::{gateway::v1, server::devices_server::Devices},
    server::{access::Call, deadline::within},
};
use auth::{self, Subject};
use grpc_messages::{
    answers, convert,
    page::{PAGE_BYTES, RequestPages, fit},
    status::Error,
};

/// Most subscriptions shown with a device, and their bytes.
const SHOWN: usize = 100;
const SHOWN_BYTES: usize = 64 << 10;

/// The service.
pub(crate) struct DevicesService {
    pub(crate) context: Context,
}

impl DevicesService {
    fn check_id(&self, call: &Call, id: &str) -> Result<(), Error> {
        convert::check_client_id("device_id", id, self.context.broker.limits())?;
        call.about(id);
        call.check_device("device_id", id)
    }

    /// A device, with its first subscriptions if they are wanted: those that have to do with topics in scope.
    fn shown(
        &self,
        call: &Call,
        info: DeviceInfo,
        full: bool,
        is_restricted: impl Fn(&str) -> bool,
    ) -> v1::Device {
        let most = if call.scope().topics().is_some() { usize::MAX } else { SHOWN };
        let first = full.then(|| self.context.broker.subscriptions(info.client_id.as_str(), most)).flatten();
        let first = first.unwrap_or_default().into_iter();
        let first = first.filter(|(filter, _)| is_visible(call, filter)).take(SHOWN);
        let shown = first.map(|(filter, qos)| {
            let restricted = is_restricted(&filter);
            answers::subscription(filter, qos, restricted)
        });
        let (subscriptions, _) = fit(shown, SHOWN_BYTES);
        v1::Device { subscriptions, ..answers::device(info) }
    }

    /// Tells of filters whether the rules in force would not grant them to the device. It takes up to a millisecond for each
    /// filter with wildcards, with rules made for that: it is not for lists of devices.
    fn restricted(&self, info: &DeviceInfo) -> impl Fn(&str) -> bool + use<> {
        let authority = self.context.hooks.authority.clone().filter(|_| !info.restored);
        let (client_id, listener) = (info.client_id.clone(), Arc::clone(&info.connection.listener));
        let principal = auth::principal(&info.connection);
        move |filter| {
            let subject =
                Subject { client_id: client_id.as_str(), listener: &listener, principal: &principal };
            authority.as_ref().is_some_and(|authority| !authority.may_subscribe(&subject, filter))
        }
    }
}

/// Conditions of a listing on devices, besides their names and that they are online.
struct DeviceSelection {
    protocol: v1::ProtocolVersion,
    listener: String,
    common_name: String,
    /// Of the wall, as requests say it.
    connected_after: Option<Timestamp>,
    connected_before: Option<Timestamp>,
}

impl DeviceSelection {
    /// Takes it out of a request.
    ///
    /// # Errors
    /// A version or a time that is none.
    fn take(request: &mut v1::ListDevicesRequest) -> Result<Self, Error> {
        Ok(Self {
            protocol: convert::known(request.protocol_version, "protocol_version")?,
            listener: std::mem::take(&mut request.listener),
            common_name: std::mem::take(&mut request.common_name),
            connected_after: convert::time("connected_after", request.connected_after)?,
            connected_before: convert::time("connected_before", request.connected_before)?,
        })
    }

    /// Tells whether the listing names a time, and so selects devices that are online.
    fn is_dated(&self) -> bool {
        self.connected_after.is_some() || self.connected_before.is_some()
    }

    /// Tells whether there is any condition.
    fn is_some(&self) -> bool {
        self.protocol != v1::ProtocolVersion::Unspecified
            || !self.listener.is_empty()
            || !self.common_name.is_empty()
            || self.is_dated()
    }

    fn is(&self, info: &DeviceInfo) -> bool {
        let connection = &info.connection;
        let since = clock::to_wall(info.since);
        (self.protocol == v1::ProtocolVersion::Unspecified
            || self.protocol == answers::protocol_version(connection.protocol))
            && (self.listener.is_empty() || self.listener == *connection.listener)
            && (self.common_name.is_empty()
                || auth::principal(connection).common_name.as_deref() == Some(&self.common_name))
            && (!self.is_dated() || info.online)
            && self.connected_after.is_none_or(|after| since >= after)
            && self.connected_before.is_none_or(|before| since < before)
    }
}

/// Tells whether a subscription overlaps the topics in scope.
fn is_visible(call: &Call, filter: &str) -> bool {
    let filter = match parse_shared(filter) {
        Ok(Some((_, filter))) => filter,
        _ => filter,
    };
    call.scope().meets(filter)
}

#[tonic::async_trait]
impl Devices for DevicesService {
    async fn list_devices(
        &self,
        request: Request<v1::ListDevicesRequest>,
    ) -> Result<Response<v1::ListDevicesResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let mut request = request.into_inner();
        let (limit, token) =
            (convert::page_size(request.page_size)?, std::mem::take(&mut request.page_token));
        request.page_size = 0;
        let pages = RequestPages::of("ListDevices", &request);
        let start = pages.start(&token)?.map(|start| start.parse().map_err(|_| Error::PageTokenInvalid));
        let start = start.transpose()?.unwrap_or_default();
        let full = convert::view(request.view, v1::DeviceView::Basic)? == v1::DeviceView::Full;
        let wanted = DeviceSelection::take(&mut request)?;
        let page = {
            let prefix = request.device_id_prefix.as_str();
            let name = |id: &str| id.starts_with(prefix) && call.scope().has_device(id);
            let info = |info: &DeviceInfo| wanted.is(info);
            let which = DeviceFilter {
                online_only: request.online_only || wanted.is_dated(),
                name: &name,
                info: wanted.is_some().then_some(&info),
            };
            self.context.broker.devices(start, limit, &which)
        };
        let (starts, found): (Vec<u32>, Vec<_>) = page.devices.into_iter().unzip();
        let (devices, cut) =
            fit(found.into_iter().map(|info| self.shown(&call, info, full, |_| false)), PAGE_BYTES);
        let next = if cut { devices.len().checked_sub(1).map(|last| starts[last]) } else { page.next };
        let next_page_token = pages.token(next.map(|start| start.to_string()).as_deref());
        Ok(Response::new(v1::ListDevicesResponse { devices, next_page_token }))
    }

    async fn list_top_devices(
        &self,
        request: Request<v1::ListTopDevicesRequest>,
    ) -> Result<Response<v1::ListTopDevicesResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let ranking = top::rank(&self.context.broker, &self.context.walk, &call, &request);
        Ok(Response::new(within(&metadata, self.context.config.wait_timeout, ranking).await?))
    }

    async fn get_device(
        &self,
        request: Request<v1::GetDeviceRequest>,
    ) -> Result<Response<v1::GetDeviceResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let request = request.into_inner();
        self.check_id(&call, &request.device_id)?;
        let full = convert::view(request.view, v1::DeviceView::Full)? == v1::DeviceView::Full;
        let info = self.context.broker.device(&request.device_id).ok_or(Error::DeviceNotFound)?;
        let restricted = self.restricted(&info);
        Ok(Response::new(v1::GetDeviceResponse { device: Some(self.shown(&call, info, full, restricted)) }))
    }

    async fn list_subscriptions(
        &self,
        request: Request<v1::ListSubscriptionsRequest>,
    ) -> Result<Response<v1::ListSubscriptionsResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let mut request = request.into_inner();
        self.check_id(&call, &request.device_id)?;
        let (limit, token) =
            (convert::page_size(request.page_size)?, std::mem::take(&mut request.page_token));
        request.page_size = 0;
        let pages = RequestPages::of("ListSubscriptions", &request);
        // The last filter of the page before.
        let after = pages.start(&token)?;
        let info = self.context.broker.device(&request.device_id).ok_or(Error::DeviceNotFound)?;
        let restricted = self.restricted(&info);
        let found = self.context.broker.subscriptions(&request.device_id, usize::MAX);
        let mut found = found.ok_or(Error::DeviceNotFound)?;
        found.retain(|(filter, _)| is_visible(&call, filter));
        found.sort_unstable();
        let from = after.map_or(0, |after| found.partition_point(|(filter, _)| *filter <= after));
        let more = found.len() > from + limit;
        let mut wanted = Vec::new();
        for (filter, qos) in found.drain(from..).take(limit) {
            let restricted = restricted(&filter);
            wanted.push(answers::subscription(filter, qos, restricted));
            // Others have their turn between two that take long.
            tokio::task::yield_now().await;
        }
        let (subscriptions, cut) = fit(wanted.into_iter(), PAGE_BYTES);
        let last = subscriptions.last().filter(|_| more || cut).map(|last| last.topic_filter.as_str());
        let next_page_token = pages.token(last);
        Ok(Response::new(v1::ListSubscriptionsResponse { subscriptions, next_page_token }))
    }

    async fn list_queue(
        &self,
        request: Request<v1::ListQueueRequest>,
    ) -> Result<Response<v1::ListQueueResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        self.check_id(&call, &request.device_id)?;
        let listing = queue::list(&self.context, &call, request);
        Ok(Response::new(within(&metadata, self.context.config.wait_timeout, listing).await?))
    }

    async fn purge_queue(
        &self,
        request: Request<v1::PurgeQueueRequest>,
    ) -> Result<Response<v1::PurgeQueueResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let device = request.device_id.as_str();
        self.check_id(&call, device)?;
        if call.scope().topics().is_some() {
            // The dropped messages may be on any topic.
            return Err(call.out_of_scope("device_id", device).into());
        }
        let purging = queue::purge(&self.context, device);
        let count = within(&metadata, self.context.config.wait_timeout, purging).await?;
        tracing::info!(client_id = device, count, "queue purged by a backend");
        Ok(Response::new(v1::PurgeQueueResponse { count }))
    }

    async fn subscribe_device(
        &self,
        request: Request<v1::SubscribeDeviceRequest>,
    ) -> Result<Response<v1::SubscribeDeviceResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        self.check_id(&call, &request.device_id)?;
        let subscribing = subscribing::subscribe(&self.context, &call, &request);
        let response = within(&metadata, self.context.config.wait_timeout, subscribing).await?;
        tracing::info!(
            client_id = request.device_id,
            filter = request.topic_filter,
            "subscription made by a backend"
        );
        Ok(Response::new(response))
    }

    async fn unsubscribe_device(
        &self,
        request: Request<v1::UnsubscribeDeviceRequest>,
    ) -> Result<Response<v1::UnsubscribeDeviceResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        self.check_id(&call, &request.device_id)?;
        let unsubscribing = subscribing::unsubscribe(&self.context, &call, &request);
        let existed = within(&metadata, self.context.config.wait_timeout, unsubscribing).await?;
        tracing::info!(
            client_id = request.device_id,
            filter = request.topic_filter,
            existed,
            "subscription removed by a backend"
        );
        Ok(Response::new(v1::UnsubscribeDeviceResponse { existed }))
    }

    async fn disconnect_device(
        &self,
        request: Request<v1::DisconnectDeviceRequest>,
    ) -> Result<Response<v1::DisconnectDeviceResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let request = request.into_inner();
        self.check_id(&call, &request.device_id)?;
        let code = request
            .reason_code
            .map_or(Some(delete::ADMINISTRATIVE), |code| u8::try_from(code).ok())
            .filter(|code| *code >= 0x80)
            .ok_or_else(|| Error::invalid("reason_code", "is not between 128 and 255"))?;
        let found =
            delete::disconnect(&self.context, &request.device_id, code, request.discard_session).await;
        tracing::info!(client_id = request.device_id, code, found, "disconnect asked for by a backend");
        if !found {
            return Err(Error::DeviceNotFound.into());
        }
        Ok(Response::new(v1::DisconnectDeviceResponse {}))
    }

    async fn delete_device(
        &self,
        request: Request<v1::DeleteDeviceRequest>,
    ) -> Result<Response<v1::DeleteDeviceResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let (metadata, _, request) = request.into_parts();
        let (context, device) = (&self.context, request.device_id.as_str());
        self.check_id(&call, device)?;
        if call.scope().topics().is_some() {
            // The deleted messages may be on any topic.
            return Err(call.out_of_scope("device_id", device).into());
        }
        // First the session, whose will may set a value that is deleted afterwards.
        let session_ended = delete::disconnect(context, device, delete::ADMINISTRATIVE, true).await;
        let deleting = async {
            let latest_values = delete::latest_and_history(context, device).await?;
            Ok((latest_values, delete::retained(context, device).await?))
        };
        let (latest_values, retained_messages) =
            within(&metadata, context.config.wait_timeout, deleting).await?;
        tracing::info!(
            client_id = device,
            session_ended,
            latest_values,
            retained_messages,
            "device deleted by a backend"
        );
        Ok(Response::new(v1::DeleteDeviceResponse { session_ended, latest_values, retained_messages }))
    }

    async fn set_device_trace(
        &self,
        request: Request<v1::SetDeviceTraceRequest>,
    ) -> Result<Response<v1::SetDeviceTraceResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let request = request.into_inner();
        self.check_id(&call, &request.device_id)?;
        let traces = self.context.hooks.traces;
        if !request.enabled {
            traces.remove(&request.device_id);
        } else if !traces.add(&request.device_id) {
            return Err(Error::TooManyTraces.into());
        }
        tracing::info!(client_id = request.device_id, enabled = request.enabled, "client trace switched");
        Ok(Response::new(v1::SetDeviceTraceResponse {}))
    }

    type TracePacketsStream = packets::Packets;

    async fn trace_packets(
        &self,
        request: Request<v1::TracePacketsRequest>,
    ) -> Result<Response<Self::TracePacketsStream>, Status> {
        let call = Call::of(request.extensions())?;
        let request = request.into_inner();
        self.check_id(&call, &request.device_id)?;
        Ok(Response::new(packets::trace(&self.context, &call, request)?))
    }
}

#[cfg(test)]
mod tests {
    use access::Principal;
    use broker::{Account, ConnectionInfo, QueueInfo};
    use gateway_core::{ClientId, Protocol};

    use super::*;
    use auth::{Method, ProvedIdentity};

    /// The failure: a device is listed by a name that its certificate does not have, or only begins with.
    #[test]
    fn a_certificate_is_wanted_by_its_whole_name() {
        let device = |common_name: Option<&str>| {
            let common_name = common_name.map(Into::into);
            let principal = Principal { method: Method::Certificate, common_name, ..Principal::default() };
            DeviceInfo {
                client_id: ClientId::new("d"),
                online: true,
                connection: ConnectionInfo {
                    peer: std::net::SocketAddr::from(([127, 0, 0, 1], 1)).into(),
                    listener: Arc::default(),
                    protocol: Protocol::V5,
                    keep_alive: 0,
                    username: None,
                    identity: ProvedIdentity::kept(
                        &Arc::new(principal),
                        None,
                        &Arc::new(Account::new(usize::MAX)),
                    )
                    .expect("there is room"),
                },
                restored: false,
                since: Timestamp(0),
                expiry: 0,
                subscription_count: 0,
                queue: QueueInfo::default(),
            }
        };
        let mut request = v1::ListDevicesRequest { common_name: "meter-1".to_owned(), ..Default::default() };
        let wanted = DeviceSelection::take(&mut request).expect("a good request");
        assert!(wanted.is_some() && wanted.is(&device(Some("meter-1"))));
        for other in [None, Some("meter"), Some("meter-12"), Some("")] {
            assert!(!wanted.is(&device(other)), "{other:?}");
        }
        let shown = answers::device(device(Some("meter-1"))).connection.expect("a connection");
        assert_eq!(shown.common_name.as_deref(), Some("meter-1"));
        let any = DeviceSelection::take(&mut v1::ListDevicesRequest::default()).expect("a good request");
        assert!(!any.is_some() && any.is(&device(None)));
    }
}
