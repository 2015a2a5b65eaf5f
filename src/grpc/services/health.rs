//! What `grpc.health.v1.Health` says of each service.

use store::Condition;
use tokio::sync::watch;
use tonic_health::{ServingStatus, server::HealthReporter};

/// The service that reads latest values.
const STATE: &str = "gateway.v1.State";

pub(in crate::grpc) const SERVICES: [&str; 13] = [
    "",
    "gateway.v1.Publisher",
    "gateway.v1.Subscriber",
    STATE,
    "gateway.v1.Devices",
    "gateway.v1.Events",
    "gateway.v1.Groups",
    "gateway.v1.Shadows",
    "gateway.v1.Consumer",
    "gateway.v1.Commands",
    "gateway.v1.Security",
    "gateway.v1.Operations",
    "rpcserver.PublishedPacketService",
];

/// Health of all services.
pub(in crate::grpc) struct Health {
    pub(in crate::grpc) reporter: HealthReporter,
    /// The store of latest values, if they are on.
    pub(in crate::grpc) latest: Option<watch::Receiver<Condition>>,
}

impl Health {
    pub(in crate::grpc) async fn set_all(&self, status: ServingStatus) {
        for service in SERVICES {
            self.reporter.set_service_status(service, status).await;
        }
    }

    /// [`STATE`] is NOT_SERVING while the store of latest values is away. Never ends.
    pub(in crate::grpc) async fn follow_latest(&mut self) {
        if let Some(latest) = &mut self.latest {
            loop {
                let status = match *latest.borrow_and_update() {
                    Condition::Up => ServingStatus::Serving,
                    Condition::Unknown | Condition::Down { .. } => ServingStatus::NotServing,
                };
                self.reporter.set_service_status(STATE, status).await;
                if latest.changed().await.is_err() {
                    break;
                }
            }
        }
        std::future::pending().await
    }
}
