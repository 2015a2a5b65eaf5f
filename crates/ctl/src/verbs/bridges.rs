//! Bridges to other systems.

use mqtt_gateway_client::v1::{Bridge, BridgeDirection, BridgeRefusal, BridgeState, ListBridgesRequest};

use super::answer;
use crate::{
    VerbContext,
    failure::Failure,
    output::{at, clean},
};

/// Lists the bridges to other systems: whether each is up, what waits, and what failed last.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct BridgesVerb {}

impl BridgesVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let response = answer!(context.client.operations().list_bridges(context.ask(ListBridgesRequest {})));
        let columns = &[
            "BRIDGE",
            "KIND",
            "WAY",
            "STATE",
            "WAITING",
            "BYTES",
            "CARRIED",
            "REFUSED",
            "LOST",
            "FAILED",
            "LAST FAILURE",
            "LAST REFUSED",
        ];
        Ok(context.out.rows(columns, &response.bridges, |bridge: &Bridge| {
            let last = bridge.last_failure.as_ref();
            vec![
                clean(&bridge.name),
                bridge.kind.clone(),
                way(bridge).to_owned(),
                state(bridge),
                bridge.lag_messages.to_string(),
                bridge.lag_bytes.to_string(),
                bridge.messages.to_string(),
                bridge.refused.to_string(),
                bridge.lost.to_string(),
                bridge.failures.values().sum::<u64>().to_string(),
                last.map_or_else(
                    || "-".to_owned(),
                    |last| format!("{} {}: {}", at(last.time.as_ref()), last.reason, clean(&last.detail)),
                ),
                bridge.last_refusal.as_ref().map_or_else(|| "-".to_owned(), refusal),
            ]
        })?)
    }
}

fn refusal(last: &BridgeRefusal) -> String {
    let (topic, detail) = (clean(&last.topic), clean(&last.detail));
    format!("{} {} {}: {detail}", at(last.time.as_ref()), last.reason, topic)
}

fn way(bridge: &Bridge) -> &'static str {
    match bridge.direction() {
        BridgeDirection::Out => "out",
        BridgeDirection::In => "in",
        BridgeDirection::Unspecified => "-",
    }
}

fn state(bridge: &Bridge) -> String {
    let state = match bridge.state() {
        BridgeState::Up => "up",
        BridgeState::Down => "down",
        BridgeState::Starting => "starting",
        BridgeState::Unspecified => "-",
    };
    if bridge.paused { format!("{state}, paused") } else { state.to_owned() }
}
