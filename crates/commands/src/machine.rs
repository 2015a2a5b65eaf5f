//! One stored command: what happens to it, and what to do next. Without a clock, a device or a disk.
//!
//! ```text
//! QUEUED -> SENT -> DELIVERED -> REPLIED | TIMED_OUT | CANCELLED | REFUSED
//! ```
//!
//! Each state may end it, and SENT becomes QUEUED again where the session that had it is gone. While a session has the command
//! ([`Machine::out`]) it is the session's to resend it; otherwise it is sent when it is due and the device has a connection.

use gateway_core::{DropReason, ReceiptState, Timestamp};

/// Stage that a command has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CommandState {
    Queued,
    Sent,
    Delivered,
    Replied,
    TimedOut,
    Cancelled,
    Refused,
}

impl CommandState {
    /// All, as they are numbered on disk.
    pub(super) const ALL: [Self; 7] = [
        Self::Queued,
        Self::Sent,
        Self::Delivered,
        Self::Replied,
        Self::TimedOut,
        Self::Cancelled,
        Self::Refused,
    ];

    /// Tells whether the stage is the last.
    pub fn is_final(self) -> bool {
        self >= Self::Replied
    }
}

/// Times between which a command may be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Not before.
    pub start: Timestamp,
    /// Not after; the command ends then.
    pub expire: Timestamp,
    /// Milliseconds after which a delivered command without a reply is sent again.
    pub retry: Option<u64>,
}

/// Step to be taken with a command now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandStep {
    /// The command has expired.
    Expire,
    /// The device does not take it, with this reason code.
    Refuse(u8),
    /// To be sent, if the device has a connection.
    Send,
    /// Nothing until then, whatever the device does.
    Wait(Timestamp),
}

/// Effect of an attempt's progress on its command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptProgress {
    /// Nothing that others see.
    Nothing,
    /// The command's state is another.
    Changed,
    /// The command ends: the device does not take it, with this reason code.
    Refused(u8),
}

/// Milliseconds until a command is tried again that there was no room for.
const AGAIN: u64 = 1_000;
/// MQTT 5: Packet too large.
const PACKET_TOO_LARGE: u8 = 0x95;

/// The state of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    pub(super) state: CommandState,
    pub(super) attempts: u32,
    pub(super) times: Times,
    /// Time at which the command is to be sent next; `None` if only the reply is waited for.
    pub(super) next: Option<Timestamp>,
    /// The attempt that a session has.
    out: Option<u32>,
    /// QoS 0: the gateway learns no more than that the command was sent.
    unacknowledged: bool,
    /// Reason code with which the device refused the command: the command ends with it, once that is on disk.
    refused: Option<u8>,
}

impl Machine {
    /// A new one.
    pub fn new(times: Times, unacknowledged: bool) -> Self {
        let next = Some(times.start);
        Self {
            state: CommandState::Queued,
            attempts: 0,
            times,
            next,
            out: None,
            unacknowledged,
            refused: None,
        }
    }

    /// A command that an earlier process left. If the process had sent the command and nobody acknowledged it, it is sent
    /// again.
    pub(super) fn restored(
        state: CommandState,
        attempts: u32,
        times: Times,
        next: Option<Timestamp>,
        unacknowledged: bool,
    ) -> Self {
        let is_lost = state == CommandState::Sent && !unacknowledged;
        let (state, next) = if is_lost { (CommandState::Queued, Some(times.start)) } else { (state, next) };
        Self { state, attempts, times, next, out: None, unacknowledged, refused: None }
    }

    /// Returns the stage that the command has reached.
    pub fn state(&self) -> CommandState {
        self.state
    }

    /// Returns how often the command was sent.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Returns the times between which the command may be sent.
    pub fn times(&self) -> Times {
        self.times
    }

    /// Returns the time at which the command ends at the latest.
    pub fn expires(&self) -> Timestamp {
        self.times.expire
    }

    /// Tells whether a session has the command.
    pub fn is_out(&self) -> bool {
        self.out.is_some()
    }

    /// Returns the step to be taken at this time.
    pub fn step(&self, now: Timestamp) -> CommandStep {
        if let Some(code) = self.refused {
            return CommandStep::Refuse(code);
        }
        if now >= self.times.expire {
            return CommandStep::Expire;
        }
        match self.next.filter(|_| self.out.is_none()) {
            Some(next) if next <= now => CommandStep::Send,
            Some(next) => CommandStep::Wait(next.min(self.times.expire)),
            None => CommandStep::Wait(self.times.expire),
        }
    }

    /// A session has taken it; the number of the attempt.
    pub(crate) fn sent_out(&mut self) -> u32 {
        self.attempts = self.attempts.saturating_add(1);
        self.out = Some(self.attempts);
        self.attempts
    }

    /// No session has taken it after all; false if that is no longer true.
    pub(super) fn take_back(&mut self, attempt: u32) -> bool {
        let is_out = self.out == Some(attempt);
        if is_out {
            self.out = None;
            self.attempts = attempt - 1;
        }
        is_out
    }

    /// There was no room for it.
    pub fn put_off(&mut self, now: Timestamp) {
        self.next = Some(now.plus_millis(AGAIN));
    }

    /// Takes the progress of an attempt. Progress of an earlier attempt no longer counts.
    pub fn progress(&mut self, attempt: u32, receipt: &ReceiptState, now: Timestamp) -> AttemptProgress {
        if self.out != Some(attempt) || self.state.is_final() {
            return AttemptProgress::Nothing;
        }
        if receipt.rejected > 0 {
            return self.refuse(receipt.code.unwrap_or_default());
        }
        let before = self.state;
        if receipt.dropped > 0 {
            self.out = None;
            match receipt.reason {
                Some(DropReason::TooLarge) => return self.refuse(PACKET_TOO_LARGE),
                Some(DropReason::QueueFull | DropReason::Memory) => self.put_off(now),
                _ => self.next = Some(now),
            }
            if self.state == CommandState::Sent {
                self.state = CommandState::Queued;
            }
        } else if receipt.acked > 0 {
            self.out = None;
            self.state = if self.unacknowledged { CommandState::Sent } else { CommandState::Delivered };
            self.next = self.times.retry.map(|retry| now.plus_millis(retry));
        } else if receipt.sent > 0 && self.state == CommandState::Queued {
            self.state = CommandState::Sent;
        }
        if self.state == before { AttemptProgress::Nothing } else { AttemptProgress::Changed }
    }

    fn refuse(&mut self, code: u8) -> AttemptProgress {
        self.out = None;
        self.refused = Some(code);
        AttemptProgress::Refused(code)
    }

    /// Ends the command; nothing changes any more.
    pub fn end(&mut self, state: CommandState) {
        self.state = state;
        self.out = None;
        self.next = None;
        self.refused = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Timestamp {
        Timestamp(millis)
    }

    fn machine(retry: Option<u64>) -> Machine {
        Machine::new(Times { start: at(10), expire: at(1_000), retry }, false)
    }

    const SENT: ReceiptState =
        ReceiptState { sent: 1, acked: 0, rejected: 0, dropped: 0, reason: None, code: None };

    fn lost(reason: DropReason) -> ReceiptState {
        ReceiptState { dropped: 1, reason: Some(reason), ..SENT }
    }

    #[test]
    fn a_command_is_sent_once_and_then_waits_for_its_reply() {
        let mut machine = machine(None);
        assert_eq!(machine.step(at(9)), CommandStep::Wait(at(10)));
        assert_eq!(machine.step(at(10)), CommandStep::Send);
        let attempt = machine.sent_out();
        assert_eq!(machine.step(at(11)), CommandStep::Wait(at(1_000)), "the session has it");
        assert_eq!(machine.progress(attempt, &SENT, at(12)), AttemptProgress::Changed);
        assert_eq!(machine.progress(attempt, &SENT, at(13)), AttemptProgress::Nothing);
        let acked = ReceiptState { acked: 1, ..SENT };
        assert_eq!(machine.progress(attempt, &acked, at(14)), AttemptProgress::Changed);
        assert_eq!(
            (machine.state, machine.step(at(15))),
            (CommandState::Delivered, CommandStep::Wait(at(1_000)))
        );
        assert_eq!(machine.step(at(1_000)), CommandStep::Expire);
    }

    #[test]
    fn what_a_session_loses_is_sent_again_and_an_old_attempt_says_nothing() {
        let mut machine = machine(Some(100));
        let first = machine.sent_out();
        machine.progress(first, &SENT, at(20));
        assert_eq!(
            machine.progress(first, &lost(DropReason::SessionEnded), at(30)),
            AttemptProgress::Changed
        );
        assert_eq!((machine.state, machine.step(at(30))), (CommandState::Queued, CommandStep::Send));
        let second = machine.sent_out();
        let acked = ReceiptState { acked: 1, ..SENT };
        assert_eq!(machine.progress(first, &acked, at(40)), AttemptProgress::Nothing);
        assert_eq!(machine.progress(second, &acked, at(50)), AttemptProgress::Changed);
        // Delivered and not answered: again after the interval.
        assert_eq!(machine.step(at(149)), CommandStep::Wait(at(150)));
        assert_eq!(machine.step(at(150)), CommandStep::Send);
        let third = machine.sent_out();
        assert_eq!(machine.progress(third, &lost(DropReason::QueueFull), at(200)), AttemptProgress::Nothing);
        assert_eq!((machine.state, machine.attempts), (CommandState::Delivered, 3), "it was delivered once");
        assert_eq!(machine.step(at(201)), CommandStep::Wait(at(1_000)));
    }

    #[test]
    fn an_attempt_that_no_session_took_does_not_count() {
        let mut machine = machine(None);
        let attempt = machine.sent_out();
        assert!(machine.take_back(attempt) && !machine.take_back(attempt));
        assert_eq!((machine.attempts, machine.step(at(20))), (0, CommandStep::Send));
        let first = machine.sent_out();
        machine.progress(first, &lost(DropReason::SessionEnded), at(20));
        assert!(!machine.take_back(first), "it came back by itself");
    }

    #[test]
    fn a_refusal_ends_and_nothing_moves_what_has_ended() {
        let mut machine = machine(None);
        let attempt = machine.sent_out();
        let rejected = ReceiptState { rejected: 1, code: Some(0x87), ..SENT };
        assert_eq!(machine.progress(attempt, &rejected, at(20)), AttemptProgress::Refused(0x87));
        assert_eq!(
            (machine.step(at(21)), machine.is_out()),
            (CommandStep::Refuse(0x87), false),
            "until that is on disk"
        );
        machine.end(CommandState::Refused);
        assert_eq!(machine.progress(attempt, &SENT, at(30)), AttemptProgress::Nothing);
        let mut large = self::machine(None);
        let attempt = large.sent_out();
        let dropped = lost(DropReason::TooLarge);
        assert_eq!(large.progress(attempt, &dropped, at(20)), AttemptProgress::Refused(PACKET_TOO_LARGE));
    }

    #[test]
    fn a_crash_repeats_what_was_on_its_way_but_nothing_delivered() {
        let times = Times { start: at(10), expire: at(1_000), retry: None };
        let sent = Machine::restored(CommandState::Sent, 2, times, Some(at(10)), false);
        assert_eq!((sent.state, sent.step(at(20))), (CommandState::Queued, CommandStep::Send));
        let delivered = Machine::restored(CommandState::Delivered, 1, times, None, false);
        assert_eq!(delivered.step(at(20)), CommandStep::Wait(at(1_000)));
        let gone = Machine::restored(CommandState::Sent, 1, times, None, true);
        assert_eq!(gone.step(at(20)), CommandStep::Wait(at(1_000)), "at QoS 0 it was all that there is");
    }
}
