//! One call of Send: the command goes out, and its reply comes, or the call ends and with it the command.
//!
//! A command follows its device: where the session that had it ends before the device has acknowledged it, it is sent again to
//! the next connection, under the same id. A session that goes on resends it itself. Once the device has it, only the reply
//! counts.

use std::{sync::Arc, time::Duration};

use broker::{DirectOutcome, Shortage};
use gateway_core::{DropReason, Outcome, QoS, Receipt, ReceiptState, clock};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{CommandService, Failed, NoReply, SendReply, SendStage, Spec, after, dispatcher::PendingReply};
use crate::counters::count;

/// Most attempts of a command whose sessions end.
const MOST_ATTEMPTS: usize = 16;

/// Result of one attempt.
enum Attempt {
    /// The device has it, or may have it: only the reply counts.
    Reached,
    /// The session is gone, and the device has acknowledged nothing.
    Lost,
    Failed(NoReply),
}

impl CommandService {
    /// Sends a command and waits for its reply. A device without a connection is waited for as long as `wait_for_device` says,
    /// if it does. Cancel safe: a call that is dropped has ended.
    ///
    /// # Errors
    /// Why there is no reply, and how far the command came.
    pub async fn send(
        &self,
        spec: &Spec,
        wait_for_device: Option<Duration>,
        deadline: Instant,
        shutdown: &watch::Receiver<bool>,
    ) -> Result<SendReply, Failed> {
        let mut stage = SendStage::Queued;
        let opened = self.dispatcher.open(spec, self.broker.account());
        let mut ticket = opened.map_err(|why| self.failed(why, stage))?;
        count(|c| c.commands_sent.add(1));
        let mut shutdown = shutdown.clone();
        let sending = self.deliver(spec, &mut ticket, wait_for_device, deadline, &mut stage);
        let ended = tokio::select! {
            biased;
            ended = sending => ended,
            // A sender that is gone counts as asking.
            _ = shutdown.wait_for(|stop| *stop) => Err(NoReply::ShuttingDown),
        };
        ended.map_err(|why| self.failed(why, stage))
    }

    fn failed(&self, why: NoReply, stage: SendStage) -> Failed {
        count(|c| match why {
            NoReply::Offline => c.commands_failed_offline.add(1),
            NoReply::TimedOut => c.commands_failed_timeout.add(1),
            NoReply::Refused(_) | NoReply::TooLarge => c.commands_failed_refused.add(1),
            NoReply::QueueFull | NoReply::TooMany(_) | NoReply::Memory => c.commands_failed_limit.add(1),
            NoReply::Random | NoReply::ShuttingDown => c.commands_failed_other.add(1),
        });
        Failed { why, stage }
    }

    async fn deliver(
        &self,
        spec: &Spec,
        ticket: &mut PendingReply,
        wait_for_device: Option<Duration>,
        deadline: Instant,
        stage: &mut SendStage,
    ) -> Result<SendReply, NoReply> {
        let now = clock::now();
        let expires = after(now, deadline.saturating_duration_since(Instant::now()));
        let first_by = wait_for_device.map(|span| (Instant::now() + span).min(deadline));
        let mut attempts = 0;
        loop {
            // Before the attempt: a connection that it does not meet is told.
            let waiter = self.dispatcher.wait_for(&spec.device);
            let connected = waiter.connected.notified();
            tokio::pin!(connected);
            connected.as_mut().enable();
            let receipt = Arc::<Receipt>::default();
            let times = (clock::now(), expires);
            let outcome = self.publish(spec, &ticket.id, ticket.correlation, &receipt, times);
            let offline = match outcome {
                DirectOutcome::Done(Outcome::Sent | Outcome::Queued) => {
                    attempts += 1;
                    let attempt = tokio::select! {
                        biased;
                        reply = &mut ticket.reply => return reply.map_err(|_| NoReply::TimedOut),
                        attempt = follow(&receipt, spec.qos, stage) => attempt,
                        () = sleep_until(deadline) => return Err(NoReply::TimedOut),
                    };
                    match attempt {
                        Attempt::Failed(why) => return Err(why),
                        Attempt::Lost if attempts < MOST_ATTEMPTS => false,
                        Attempt::Reached | Attempt::Lost => {
                            tokio::select! {
                                biased;
                                reply = &mut ticket.reply => return reply.map_err(|_| NoReply::TimedOut),
                                () = sleep_until(deadline) => return Err(NoReply::TimedOut),
                            }
                        }
                    }
                }
                DirectOutcome::Refused(Shortage::Memory) => return Err(NoReply::Memory),
                DirectOutcome::Done(Outcome::Dropped(reason)) => match failure(reason) {
                    Some(why) => return Err(why),
                    None => true,
                },
                // The session keeps nothing of a command on disk.
                DirectOutcome::Refused(Shortage::Store)
                | DirectOutcome::Done(Outcome::Ignored)
                | DirectOutcome::UnknownDevice
                | DirectOutcome::DeviceOffline => true,
            };
            if !offline {
                continue;
            }
            // Once it was sent the device is waited for as long as the call lasts.
            let by = if attempts > 0 { deadline } else { first_by.ok_or(NoReply::Offline)? };
            tokio::select! {
                biased;
                reply = &mut ticket.reply => return reply.map_err(|_| NoReply::TimedOut),
                () = connected => {}
                () = sleep_until(by) => {
                    return Err(if attempts > 0 { NoReply::TimedOut } else { NoReply::Offline });
                }
            }
        }
    }
}

/// Waits until it is clear what becomes of an attempt, and notes how far it came. Cancel safe.
async fn follow(receipt: &Receipt, qos: QoS, stage: &mut SendStage) -> Attempt {
    let mut seen = ReceiptState::default();
    loop {
        seen = receipt.wait(|state| *state != seen).await;
        if seen.sent > 0 {
            *stage = (*stage).max(SendStage::Sent);
        }
        if seen.acked > 0 && qos > QoS::AtMostOnce {
            *stage = SendStage::Delivered;
        }
        if seen.rejected > 0 {
            return Attempt::Failed(NoReply::Refused(seen.code.unwrap_or_default()));
        }
        if seen.acked > 0 {
            return Attempt::Reached;
        }
        if seen.dropped > 0 {
            return match seen.reason.and_then(failure) {
                Some(why) => Attempt::Failed(why),
                None => Attempt::Lost,
            };
        }
    }
}

/// The failure that a drop is; `None` where another connection may get it.
fn failure(reason: DropReason) -> Option<NoReply> {
    match reason {
        DropReason::QueueFull => Some(NoReply::QueueFull),
        DropReason::Memory => Some(NoReply::Memory),
        DropReason::TooLarge => Some(NoReply::TooLarge),
        DropReason::Expired => Some(NoReply::TimedOut),
        DropReason::Offline
        | DropReason::ConnectionLost
        | DropReason::SessionEnded
        | DropReason::NotAuthorized
        | DropReason::Purged => None,
    }
}
