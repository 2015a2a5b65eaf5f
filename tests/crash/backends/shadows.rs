//! Shadows, each changed by one backend only: whoever reads one later finds what that was told last.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use mqtt_server::proto::gateway::v1::{self, shadows_client::ShadowsClient};
use tokio::time::sleep;
use tonic::Status;

use super::{Shared, Way};

/// A shadow, as its backend was told.
#[derive(Default)]
pub(super) struct Shadow {
    device: String,
    version: u64,
    desired: u64,
    reported: u64,
    pub(super) updates: u64,
}

/// Changes them in turn until the end.
pub(super) async fn run(shared: Arc<Shared>, addresses: [SocketAddr; 2], count: usize) -> Vec<Shadow> {
    let mut way = Way::new(addresses);
    let mut shadows: Vec<Shadow> = (0..count)
        .map(|number| Shadow { device: format!("shadowed-{number}"), ..Shadow::default() })
        .collect();
    while !shared.is_ending() {
        for shadow in &mut shadows {
            if !shared.is_ending() {
                shadow.update(&mut way, &shared).await;
                shadow.judge(&mut way, &shared).await;
            }
        }
        sleep(Duration::from_millis(30)).await;
    }
    shadows
}

fn content(name: &str, number: u64) -> String {
    format!("{{\"{name}\":{number}}}")
}

impl Shadow {
    /// The next change, until it is answered.
    async fn update(&mut self, way: &mut Way, shared: &Shared) {
        self.updates += 1;
        let is_desired = self.updates % 2 == 1;
        let (desired, reported) = match is_desired {
            true => (Some(content("d", self.updates)), None),
            false => (None, Some(content("r", self.updates))),
        };
        let request = v1::UpdateShadowRequest {
            device_id: self.device.clone(),
            desired,
            reported,
            ..Default::default()
        };
        let answer = way
            .until_answered(async |channel| ShadowsClient::new(channel).update_shadow(request.clone()).await)
            .await;
        match answer {
            Ok(answer) => {
                let shadow = answer.shadow.unwrap_or_default();
                if shadow.version < self.version {
                    shared.problem(format!(
                        "{} was at version {} and is at {}",
                        self.device, self.version, shadow.version
                    ));
                }
                self.version = shadow.version;
                *(if is_desired { &mut self.desired } else { &mut self.reported }) = self.updates;
            }
            Err(status) => shared.problem(format!("{}: {status:?}", self.device)),
        }
    }

    /// Reads it: what was answered is there.
    pub(super) async fn judge(&self, way: &mut Way, shared: &Shared) {
        let request = v1::GetShadowRequest { device_id: self.device.clone(), ..Default::default() };
        let answer: Result<v1::GetShadowResponse, Status> = way
            .until_answered(async |channel| ShadowsClient::new(channel).get_shadow(request.clone()).await)
            .await;
        let shadow = match answer {
            Ok(answer) => answer.shadow.unwrap_or_default(),
            Err(status) => {
                return shared.problem(format!("{} at version {}: {status:?}", self.device, self.version));
            }
        };
        let told = (self.version, self.desired, self.reported);
        if shadow.version < self.version
            || (self.desired > 0 && shadow.desired != content("d", self.desired))
            || (self.reported > 0 && shadow.reported != content("r", self.reported))
        {
            let v1::Shadow { version, desired, reported, .. } = shadow;
            shared.problem(format!("{}: told {told:?}, is {version} {desired} {reported}", self.device));
        }
    }
}
