//! `gateway.v1.Devices`.

use tonic::{Request, Response, Status};

use super::{
    Context, PAGE_BYTES, answers, convert, fit, now,
    proto::{gateway::v1, server::devices_server::Devices},
    status::Error,
};
use crate::broker::Turn;

/// MQTT 5 reason code "administrative action".
const ADMINISTRATIVE: u32 = 0x98;

/// The service.
pub(super) struct DevicesService {
    pub(super) context: Context,
}

impl DevicesService {
    fn check_id(&self, id: &str) -> Result<(), Error> {
        convert::check_client_id("client_id", id, self.context.broker.limits())
    }
}

#[tonic::async_trait]
impl Devices for DevicesService {
    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListResponse>, Status> {
        let request = request.into_inner();
        let limit = convert::page_size(request.page_size)?;
        // The token is where the page starts.
        let start = match request.page_token.as_str() {
            "" => 0,
            token => token
                .parse()
                .map_err(|_| Error::invalid("page_token", "is not one of this gateway's tokens"))?,
        };
        let page = self.context.broker.devices(start, limit, request.online_only);
        let (starts, found): (Vec<u32>, Vec<_>) = page.devices.into_iter().unzip();
        let (devices, cut) = fit(found.into_iter().map(answers::device), PAGE_BYTES);
        let next = if cut { devices.len().checked_sub(1).map(|last| starts[last]) } else { page.next };
        let next_page_token = next.map_or_else(String::new, |start| start.to_string());
        Ok(Response::new(v1::ListResponse { devices, next_page_token }))
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::GetResponse>, Status> {
        let id = request.into_inner().client_id;
        self.check_id(&id)?;
        let device = self.context.broker.device(&id).ok_or(Error::DeviceNotFound)?;
        Ok(Response::new(v1::GetResponse { device: Some(answers::device(device)) }))
    }

    async fn disconnect(
        &self,
        request: Request<v1::DisconnectRequest>,
    ) -> Result<Response<v1::DisconnectResponse>, Status> {
        let request = request.into_inner();
        self.check_id(&request.client_id)?;
        let code = u8::try_from(request.reason_code.unwrap_or(ADMINISTRATIVE))
            .ok()
            .filter(|code| *code >= 0x80)
            .ok_or_else(|| Error::invalid("reason_code", "is not between 128 and 255"))?;
        let found = {
            let mut turn = Turn::default();
            let found = self.context.broker.disconnect(
                &request.client_id,
                code,
                request.discard_session,
                now(),
                &mut turn,
            );
            turn.flush();
            found
        };
        tracing::info!(client_id = request.client_id, code, found, "disconnect asked for by a backend");
        if !found {
            return Err(Error::DeviceNotFound.into());
        }
        Ok(Response::new(v1::DisconnectResponse {}))
    }

    async fn set_trace(
        &self,
        request: Request<v1::SetTraceRequest>,
    ) -> Result<Response<v1::SetTraceResponse>, Status> {
        let request = request.into_inner();
        self.check_id(&request.client_id)?;
        tracing::info!(client_id = request.client_id, enabled = request.enabled, "client trace switched");
        (self.context.hooks.set_trace)(&request.client_id, request.enabled);
        Ok(Response::new(v1::SetTraceResponse {}))
    }
}
