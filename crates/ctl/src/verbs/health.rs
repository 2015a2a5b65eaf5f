//! Health of the gateway: whether it takes calls.

use mqtt_gateway_client::{HealthCheckRequest, ServingStatus};
use serde_json::json;

use super::answer;
use crate::{VerbContext, failure::Failure};

/// Says whether the gateway, or one service of it, takes calls. Exit code 1 if it does not.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct HealthVerb {
    /// A service as gateway.v1.Publisher; without it the gateway
    #[arg(default_value = "")]
    service: String,
}

impl HealthVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let request = HealthCheckRequest { service: self.service.clone() };
        let response = answer!(context.client.health().check(context.ask(request)));
        let serving = response.status() == ServingStatus::Serving;
        let text = if serving { "serving" } else { "not serving" };
        if context.out.is_json() {
            context.out.json(&json!({"service": self.service, "status": response.status().as_str_name()}))?;
        } else {
            context.out.line(text)?;
        }
        context.out.flush()?;
        if serving { Ok(()) } else { Err(Failure::No) }
    }
}
