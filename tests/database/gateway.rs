//! The real gateway with a database, and what it says of it.

use std::{fs, time::Duration};

use mqtt_server::proto::gateway::v1::{
    DeleteDeviceRequest, DeleteDeviceResponse, GetLatestRequest, GetShadowRequest, LatestValue,
    ListHistoryRequest, ListHistoryResponse, ListLatestRequest, Shadow, UpdateShadowRequest,
    devices_client::DevicesClient, shadows_client::ShadowsClient, state_client::StateClient,
};
use tonic::{
    Status,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    stream::Stream,
    support::Server,
    tables::{RUNTIME, Tables, wait_for},
};

/// Bytes of values that may wait for the database, far less than what devices send during a fault.
pub(crate) const MAX_PENDING: u64 = 1 << 20;

/// The name under which gRPC health tells of the database.
pub(crate) const STATE: &str = "gateway.v1.State";

pub(crate) struct Gateway {
    pub(crate) server: Server,
    channel: Channel,
    args: Vec<String>,
    toml: String,
}

impl Gateway {
    /// With the keyspace of `tables` at `address`; `database` are further lines of that section.
    pub(crate) fn start(address: &str, tables: &Tables, database: &str) -> Self {
        Self::start_with(address, &toml(tables, database))
    }

    /// With this configuration.
    pub(crate) fn start_with(address: &str, toml: &str) -> Self {
        let args = vec!["--db-addr".to_owned(), address.to_owned()];
        let server = Server::start_with(&refs(&args), toml);
        let channel = channel(&server);
        Self { server, channel, args, toml: toml.to_owned() }
    }

    pub(crate) fn mqtt(&self) -> u16 {
        self.server.ports.tcp
    }

    /// SIGTERM, and a new process on the same data directory.
    ///
    /// # Panics
    /// If the gateway does not end in time and with code 0.
    pub(crate) fn restart(self) -> Self {
        let toml = self.toml.clone();
        self.restart_with(&toml)
    }

    pub(crate) fn restart_with(self, toml: &str) -> Self {
        let server = self.server.stop_and_restart(&refs(&self.args), toml);
        let channel = channel(&server);
        Self { server, channel, args: self.args, toml: toml.to_owned() }
    }

    pub(crate) fn get(&self, topic: &str, device: Option<&str>) -> Result<LatestValue, Status> {
        let request = GetLatestRequest { topic: topic.to_owned(), device_id: device.map(str::to_owned) };
        let mut state = StateClient::new(self.channel.clone());
        let answer = RUNTIME.block_on(state.get_latest(within(request)))?.into_inner();
        Ok(answer.value.expect("a value"))
    }

    /// A backend that reads what devices publish from now on.
    pub(crate) fn stream(&self) -> Stream {
        Stream::open(self.channel.clone())
    }

    /// All values of a device, page by page.
    pub(crate) fn list(&self, device: &str) -> Result<Vec<LatestValue>, Status> {
        let mut state = StateClient::new(self.channel.clone());
        let mut request =
            ListLatestRequest { device_ids: vec![device.to_owned()], page_size: 3, ..Default::default() };
        let mut values = Vec::new();
        loop {
            let page = RUNTIME.block_on(state.list_latest(within(request.clone())))?.into_inner();
            values.extend(page.values);
            if page.next_page_token.is_empty() {
                return Ok(values);
            }
            request.page_token = page.next_page_token;
        }
    }

    /// A page of history.
    pub(crate) fn history(&self, request: ListHistoryRequest) -> Result<ListHistoryResponse, Status> {
        let mut state = StateClient::new(self.channel.clone());
        Ok(RUNTIME.block_on(state.list_history(within(request)))?.into_inner())
    }

    /// A shadow.
    pub(crate) fn shadow(&self, request: GetShadowRequest) -> Result<Shadow, Status> {
        let mut shadows = ShadowsClient::new(self.channel.clone());
        let answer = RUNTIME.block_on(shadows.get_shadow(within(request)))?.into_inner();
        Ok(answer.shadow.expect("a shadow"))
    }

    /// Changes a shadow.
    pub(crate) fn update_shadow(&self, request: UpdateShadowRequest) -> Result<Shadow, Status> {
        let mut shadows = ShadowsClient::new(self.channel.clone());
        let answer = RUNTIME.block_on(shadows.update_shadow(within(request)))?.into_inner();
        Ok(answer.shadow.expect("a shadow"))
    }

    /// Deletes all that is kept of a device.
    pub(crate) fn delete(&self, device: &str) -> Result<DeleteDeviceResponse, Status> {
        let mut devices = DevicesClient::new(self.channel.clone());
        let request = DeleteDeviceRequest { device_id: device.to_owned() };
        Ok(RUNTIME.block_on(devices.delete_device(within(request)))?.into_inner())
    }

    /// Returns the gRPC health of a service.
    pub(crate) fn health(&self, service: &str) -> ServingStatus {
        let mut health = HealthClient::new(self.channel.clone());
        let request = HealthCheckRequest { service: service.to_owned() };
        RUNTIME.block_on(health.check(within(request))).expect("ask for health").into_inner().status()
    }

    /// Waits until health says that the database is away. The rest of the gateway must be well all the same.
    pub(crate) fn is_degraded(&self) {
        self.turns(ServingStatus::NotServing);
        let ready = self.ready();
        assert!(ready.contains("database: degraded"), "{ready}");
    }

    /// Waits until health says that the database is there.
    pub(crate) fn is_well(&self) {
        self.turns(ServingStatus::Serving);
        let ready = self.ready();
        assert!(!ready.contains("degraded"), "{ready}");
    }

    fn turns(&self, wanted: ServingStatus) {
        wait_for("health of the database", || {
            assert_eq!(self.health(""), ServingStatus::Serving, "the gateway itself");
            let ready = self.ready();
            let status = self.health(STATE);
            if status == wanted { Ok(()) } else { Err(format!("{status:?}, not {wanted:?}; {ready}")) }
        });
    }

    /// Returns the answer of /readyz, which is 200 whatever the database does.
    fn ready(&self) -> String {
        let ready = self.server.http_get("/readyz").expect("ask for readiness");
        assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
        ready
    }

    /// Waits until nothing waits for the database.
    pub(crate) fn has_written_all(&self) {
        wait_for("nothing waits", || {
            let waiting =
                ["gateway_latest_pending", "gateway_latest_spilled"].map(|name| self.server.metric(name));
            if waiting == [0, 0] {
                Ok(())
            } else {
                Err(format!("{waiting:?} values wait in memory and on disk"))
            }
        });
    }

    /// Values are written while `and` goes on.
    pub(crate) fn has_written_much_since(&self, and: impl FnOnce()) {
        let written = self.server.metric("gateway_latest_written_total");
        and();
        wait_for("more values written", || match self.server.metric("gateway_latest_written_total") {
            more if more > written + 500 => Ok(()),
            few => Err(format!("{written}, now {few}")),
        });
    }

    /// Checks that some values wait for the database, and that their number is within its bound.
    pub(crate) fn keeps_within_its_bound(&self) {
        let pending = self.server.metric("gateway_latest_pending_bytes");
        assert!((1..=MAX_PENDING).contains(&pending), "{pending} bytes wait, {MAX_PENDING} may");
        assert_eq!(self.server.metric("gateway_latest_dropped_total"), 0, "values that would have fitted");
    }
}

/// The configuration of a gateway with the keyspace of `tables`.
pub(crate) fn toml(tables: &Tables, database: &str) -> String {
    format!(
        "[latest]\nmax_bytes = {MAX_PENDING}\n[database]\nkeyspace = \"{}\"\nrequest_timeout = \"2s\"\n\
         {database}\n",
        tables.keyspace()
    )
}

fn refs(texts: &[String]) -> Vec<&str> {
    texts.iter().map(String::as_str).collect()
}

/// With a deadline; only a failing test waits so long.
fn within<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(Duration::from_secs(60));
    request
}

fn channel(server: &Server) -> Channel {
    let ca = Certificate::from_pem(fs::read(server.ca()).expect("read the authority"));
    let endpoint = Endpoint::try_from(format!("https://localhost:{}", server.ports.grpc))
        .expect("address of gRPC")
        .tls_config(ClientTlsConfig::new().ca_certificate(ca))
        .expect("TLS of gRPC");
    RUNTIME.block_on(endpoint.connect()).expect("connect to gRPC")
}
