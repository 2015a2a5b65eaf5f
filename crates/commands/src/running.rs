//! Stored commands at work: what is due goes out, and what becomes of it is followed.

use std::{sync::Arc, time::Duration};

use broker::{DirectOutcome, Shortage};
use gateway_core::{DropReason, Outcome, Receipt, ReceiptState, clock};
use tokio::{sync::watch, time::timeout};

use super::{
    CommandService,
    registry::{CommandRegistry, DueCommand},
};

/// Commands looked at between two pauses.
const STEP: usize = 256;
/// Longest sleep.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// MQTT 5: Packet too large.
const PACKET_TOO_LARGE: u8 = 0x95;

impl CommandService {
    /// Sends what is due to the devices that are connected, until `stop`.
    pub async fn run(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        let registry = self.registry();
        loop {
            let now = clock::now();
            let next = registry.tick(now, STEP);
            // After STEP devices it is the turn of what is due again, however many devices come and go.
            let mut looked = 0;
            while looked < STEP
                && let Some(parcels) = registry.next_parcels()
            {
                looked += 1;
                for parcel in parcels {
                    if !self.post(registry, parcel) {
                        break;
                    }
                }
                tokio::task::yield_now().await;
            }
            let sleep = next.map_or(LONGEST_SLEEP, |at| {
                Duration::from_millis(at.0.saturating_sub(clock::now().0)).min(LONGEST_SLEEP)
            });
            let sleep = if looked == STEP { Duration::ZERO } else { sleep };
            tokio::select! {
                // Earlier changes were seen above, or are told now.
                _ = timeout(sleep, registry.changed.notified()) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    /// Sends one; false if its device has no connection.
    fn post(&self, registry: &Arc<CommandRegistry>, parcel: DueCommand) -> bool {
        let DueCommand { number, id, spec, correlation, expire } = parcel;
        let Some(attempt) = registry.begin(number) else { return true };
        let receipt = Arc::<Receipt>::default();
        let outcome = self.publish(&spec, &id, correlation, &receipt, (clock::now(), expire));
        if matches!(outcome, DirectOutcome::Done(Outcome::Sent | Outcome::Queued)) {
            let following = follow(Arc::clone(registry), number, attempt, receipt);
            registry.taken(number, tokio::spawn(following).abort_handle());
            return true;
        }
        registry.take_back(number, attempt);
        match outcome {
            DirectOutcome::Done(Outcome::Dropped(DropReason::TooLarge)) => {
                registry.refuse(number, PACKET_TOO_LARGE);
            }
            DirectOutcome::Done(Outcome::Dropped(DropReason::QueueFull | DropReason::Memory))
            | DirectOutcome::Refused(Shortage::Memory | Shortage::Store) => registry.put_off(number),
            _ => return false,
        }
        true
    }
}

/// Tells the registry how far an attempt comes, until nothing more is to be told.
async fn follow(registry: Arc<CommandRegistry>, number: u64, attempt: u32, receipt: Arc<Receipt>) {
    let (mut seen, mut ended) = (ReceiptState::default(), registry.ended.subscribe());
    loop {
        seen = tokio::select! {
            seen = receipt.wait(|state| *state != seen) => seen,
            _ = ended.wait_for(|ended| *ended) => return,
        };
        if registry.progress(number, attempt, &seen) {
            return;
        }
    }
}
