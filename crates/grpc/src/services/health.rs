//! Statuses of the services for `grpc.health.v1.Health`: NOT_SERVING where every call would be refused, be it for the
//! configuration or for a store that is away. A disk that refuses writes still allows reads, and so leaves the service
//! SERVING.

use std::{collections::HashMap, time::Duration};

use tokio::{sync::watch, time::sleep};
use tonic_health::{ServingStatus, server::HealthReporter};
use values::StoreCondition;

use crate::context::StoreProbe;

const STATE: &str = "gateway.v1.State";
const GROUPS: &str = "gateway.v1.Groups";
const CONSUMER: &str = "gateway.v1.Consumer";
const SHADOWS: &str = "gateway.v1.Shadows";
const COMMANDS: &str = "gateway.v1.Commands";

pub(crate) const SERVICES: [&str; 13] = [
    "",
    "gateway.v1.Publisher",
    "gateway.v1.Subscriber",
    STATE,
    "gateway.v1.Devices",
    "gateway.v1.Events",
    GROUPS,
    SHADOWS,
    CONSUMER,
    COMMANDS,
    "gateway.v1.Security",
    "gateway.v1.Operations",
    "rpcserver.PublishedPacketService",
];

/// Interval at which stores are asked that do not report by themselves.
const INTERVAL: Duration = Duration::from_millis(500);

/// Requirements of the services; `None` where the configuration switches the service off.
pub(crate) struct Needs {
    /// Latest values, with the condition of their store if that is known.
    pub latest: Option<Option<watch::Receiver<StoreCondition>>>,
    pub groups: Option<StoreProbe>,
    pub shadows: Option<StoreProbe>,
    pub commands: Option<()>,
}

impl Needs {
    /// Tells whether calls of a service are answered.
    fn are_met(&self, service: &str) -> bool {
        let answer = |store: &Option<StoreProbe>| store.as_ref().is_some_and(|answers| answers());
        match service {
            STATE => self.latest.as_ref().is_some_and(|condition| {
                condition.as_ref().is_none_or(|condition| *condition.borrow() == StoreCondition::Up)
            }),
            GROUPS | CONSUMER => answer(&self.groups),
            SHADOWS => answer(&self.shadows),
            COMMANDS => self.commands.is_some(),
            _ => true,
        }
    }

    /// Until it is to be asked again.
    async fn changed(&mut self) {
        if let Some(Some(latest)) = &mut self.latest {
            tokio::select! {
                // A store that is gone changes no more.
                Ok(()) = latest.changed() => {}
                () = sleep(INTERVAL) => {}
            }
        } else {
            sleep(INTERVAL).await;
        }
    }
}

/// Health of all services.
pub(crate) struct ServiceHealth {
    reporter: HealthReporter,
    needs: Needs,
    told: HashMap<&'static str, ServingStatus>,
}

impl ServiceHealth {
    pub(crate) fn new(reporter: HealthReporter, needs: Needs) -> Self {
        Self { reporter, needs, told: HashMap::new() }
    }

    /// Tells those who watch what has changed.
    pub(crate) async fn tell(&mut self) {
        for service in SERVICES {
            let status = match self.needs.are_met(service) {
                true => ServingStatus::Serving,
                false => ServingStatus::NotServing,
            };
            if self.told.insert(service, status) != Some(status) {
                self.reporter.set_service_status(service, status).await;
            }
        }
    }

    /// Goes on to tell. Never ends.
    pub(crate) async fn follow(&mut self) {
        loop {
            self.needs.changed().await;
            self.tell().await;
        }
    }

    /// Tells all that it is over.
    pub(crate) async fn end(&self) {
        for service in SERVICES {
            self.reporter.set_service_status(service, ServingStatus::NotServing).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    };

    use tokio_stream::StreamExt as _;
    use tonic::Request;
    use tonic_health::{
        pb::{HealthCheckRequest, health_check_response::ServingStatus as Told, health_server::Health as _},
        server::HealthService,
    };

    use super::*;

    fn request(service: &str) -> Request<HealthCheckRequest> {
        Request::new(HealthCheckRequest { service: service.to_owned() })
    }

    /// The failure: a service without its store, of which every call is refused, is SERVING to those who ask and who watch.
    #[tokio::test]
    async fn a_store_that_goes_away_and_comes_back_is_told() {
        let is_there = Arc::new(AtomicBool::new(true));
        let answers = Arc::clone(&is_there);
        let reporter = HealthReporter::new();
        let service = HealthService::from_health_reporter(reporter.clone());
        let needs = Needs {
            latest: Some(None),
            groups: None,
            shadows: Some(Arc::new(move || answers.load(SeqCst))),
            commands: Some(()),
        };
        let mut health = ServiceHealth::new(reporter, needs);
        health.tell().await;
        let mut watch = service.watch(request(SHADOWS)).await.unwrap().into_inner();
        let following = tokio::spawn(async move { health.follow().await });
        for (there, wanted) in [(true, Told::Serving), (false, Told::NotServing), (true, Told::Serving)] {
            is_there.store(there, SeqCst);
            assert_eq!(watch.next().await.unwrap().unwrap().status(), wanted);
        }
        following.abort();
        for (name, wanted) in
            [(STATE, Told::Serving), (GROUPS, Told::NotServing), (CONSUMER, Told::NotServing)]
        {
            let answer = service.check(request(name)).await.unwrap().into_inner();
            assert_eq!(answer.status(), wanted, "{name}");
        }
    }
}
