//! Finds the message for which the other side fails, among those that were being sent when it did.
//!
//! A failure alone says little: the other side may be down, restarted or short of time. So the messages that were under way are
//! sent again in smaller parts, down to one. A message that fails alone several times is a suspect. Then another message is sent,
//! at once after the suspect has failed: if that one is accepted, and the suspect fails once more, the other side works and the
//! suspect is refused. As long as the other side accepts nothing, nothing is refused, however long that takes.
//!
//! The message that is sent instead is the first of another device. Only where there is none, it is a later one of the same device:
//! it overtakes no message but the suspect, which is refused, or accepted on the next attempt.

use gateway_core::Partition;

use super::{
    status::{BridgeFailure, BridgeRefusal, Reason},
    work::{BridgeBatch, Fate},
};

/// Failures of a message alone after which another is tried.
const STRIKES: u32 = 5;

/// See the module. Belongs to a bridge, and goes from batch to batch.
#[derive(Debug)]
pub(super) struct PoisonSearch {
    /// Messages to be sent together.
    most: usize,
    /// Above it `most` grows slowly: more were too many for the deadline.
    threshold: usize,
    suspect: Option<Suspect>,
}

/// A message that failed alone.
#[derive(Debug)]
struct Suspect {
    /// Names the message.
    place: (Partition, u64),
    /// Failures in a row.
    strikes: u32,
    /// Messages that were tried instead and failed as well.
    probes: usize,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The suspect is sent next.
    Alone,
    /// Another message is sent next.
    Probe,
    /// Another message was accepted: if the suspect fails now, it is refused.
    Last,
}

impl Default for PoisonSearch {
    fn default() -> Self {
        Self { most: usize::MAX, threshold: usize::MAX, suspect: None }
    }
}

impl PoisonSearch {
    /// Returns the places in `work` of the messages to send together next, in order; none if nothing is open.
    pub(super) fn next(&mut self, work: &BridgeBatch) -> Vec<usize> {
        let mut open = work.open();
        let Some(&first) = open.first() else { return open };
        if self.suspect.as_ref().is_some_and(|suspect| suspect.place != place(work, first)) {
            self.suspect = None;
        }
        match &mut self.suspect {
            None => open.truncate(self.most),
            Some(suspect) => {
                let other =
                    (suspect.stage == Stage::Probe).then(|| other(work, &open, suspect.probes)).flatten();
                if other.is_none() && suspect.stage == Stage::Probe {
                    suspect.stage = Stage::Alone;
                }
                open = vec![other.unwrap_or(first)];
            }
        }
        open
    }

    /// Returns whether messages go one by one, so that a failure shows which of them it is about.
    pub(super) fn is_careful(&self) -> bool {
        self.most == 1 || self.suspect.is_some()
    }

    /// The other side has accepted or refused these, each for itself.
    pub(super) fn succeeded(&mut self, sent: &[usize], work: &BridgeBatch) {
        match &mut self.suspect {
            Some(suspect) if !is_suspect(suspect, sent, work) => suspect.stage = Stage::Last,
            _ => {
                self.suspect = None;
                self.grow(sent.len());
            }
        }
    }

    /// The other side refuses these for good, without saying which of them: halves tell.
    pub(super) fn refused(
        &mut self,
        sent: &[usize],
        work: &mut BridgeBatch,
        refusal: BridgeRefusal,
        why: String,
    ) {
        match sent {
            [at] => {
                work.set(*at, Fate::Refused(refusal, why));
                self.succeeded(sent, work);
            }
            _ => self.most = (sent.len() / 2).max(1),
        }
    }

    /// The other side failed while these were under way. Returns whether to go on at once, with another part of `work`: the search
    /// has come to an end, or another message is tried.
    pub(super) fn failed(&mut self, sent: &[usize], work: &mut BridgeBatch, failure: &BridgeFailure) -> bool {
        work.attempt_failed(sent);
        let was_careful = self.is_careful();
        let &[at] = sent else {
            self.most = 1;
            if failure.reason == Reason::Deadline {
                self.most = (sent.len() / 2).max(1);
                self.threshold = self.most;
            }
            return false;
        };
        // The deadline is too short for one message: fewer together would not help.
        self.threshold = usize::MAX;
        self.most = 1;
        if let Some(suspect) = &mut self.suspect
            && !is_suspect(suspect, sent, work)
        {
            suspect.probes += 1;
            suspect.stage = Stage::Alone;
            return false;
        }
        let place = place(work, at);
        let suspect =
            self.suspect.get_or_insert(Suspect { place, strikes: 0, probes: 0, stage: Stage::Alone });
        suspect.strikes += 1;
        // Unless the connection was asked before, the reason may be about a message that nobody acknowledges, sent before this one.
        if suspect.stage == Stage::Last || (failure.names_message && was_careful) {
            work.set(at, Fate::Refused(refusal_of(failure.reason), failure.detail.clone()));
            self.suspect = None;
            return true;
        }
        let has_other = work.open().len() > 1;
        if suspect.strikes >= STRIKES && has_other {
            suspect.stage = Stage::Probe;
        }
        suspect.stage == Stage::Probe
    }

    fn grow(&mut self, sent: usize) {
        if sent < self.most {
            return;
        }
        self.most = if self.most < self.threshold {
            self.most.saturating_mul(2).min(self.threshold)
        } else {
            self.most.saturating_add((self.most / 16).max(1))
        };
    }
}

/// Names a message for ever.
fn place(work: &BridgeBatch, at: usize) -> (Partition, u64) {
    let delivery = &work.item(at).delivery;
    (delivery.partition, delivery.record.offset)
}

fn is_suspect(suspect: &Suspect, sent: &[usize], work: &BridgeBatch) -> bool {
    sent.iter().any(|&at| place(work, at) == suspect.place)
}

/// The message to try instead of the first of `open`, another one each time: the first of another device, else a later one.
fn other(work: &BridgeBatch, open: &[usize], round: usize) -> Option<usize> {
    let is_first_of_its_order = |&&at: &&usize| {
        let mut before = open.iter().take_while(|&&other| other != at);
        !before.any(|&other| work.item(other).is_in_order_with(work.item(at)))
    };
    let later = open.get(1..).unwrap_or_default();
    let mut choice: Vec<usize> = later.iter().filter(is_first_of_its_order).copied().collect();
    if choice.is_empty() {
        choice = later.to_vec();
    }
    (!choice.is_empty()).then(|| choice[round % choice.len()])
}

fn refusal_of(reason: Reason) -> BridgeRefusal {
    match reason {
        Reason::Closed => BridgeRefusal::Closed,
        Reason::Deadline => BridgeRefusal::Deadline,
        _ => BridgeRefusal::Failed,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use gateway_core::{ClientId, LogRecord, OriginKind, QoS, SharedMessage, Timestamp};
    use groups::Delivery;

    use super::*;

    /// One message each of so many devices.
    fn work(count: u64) -> BridgeBatch {
        let delivery = |id: u64| {
            let message = SharedMessage {
                topic: Arc::from("t"),
                payload: Bytes::new(),
                qos: QoS::AtMostOnce,
                retain: false,
                properties: None,
                expires: None,
                received: Timestamp(0),
                kind: OriginKind::Device,
                client_id: Some(ClientId::new(&format!("d{id}"))),
                slot: 0,
                receipt: None,
                direct: false,
            };
            let record = LogRecord { offset: id, groups: Arc::default(), message: Arc::new(message) };
            let ack_id = "0".repeat(28).parse().unwrap();
            Delivery { id, attempt: 1, deadline: Timestamp(0), partition: Partition(0), record, ack_id }
        };
        let mut work = BridgeBatch::default();
        work.add((0..count).map(delivery).collect());
        work
    }

    fn about_a_message() -> BridgeFailure {
        BridgeFailure { names_message: true, ..BridgeFailure::new(Reason::Closed, "code 0x95") }
    }

    /// The failure: at QoS 0 the reason is about the message before, which counts as delivered since it was written.
    #[test]
    fn a_reason_is_about_a_message_that_was_alone_on_a_tried_connection() {
        let (mut search, mut work) = (PoisonSearch::default(), work(1));
        let sent = search.next(&work);
        assert!(!search.is_careful());
        assert!(!search.failed(&sent, &mut work, &about_a_message()));
        assert_eq!(work.open(), [0], "it is tried again");
        let sent = search.next(&work);
        assert!(search.is_careful());
        assert!(search.failed(&sent, &mut work, &about_a_message()));
        assert!(work.open().is_empty());
    }

    /// The failure: a message that had bad luck is refused, since the other side took another one once.
    #[test]
    fn a_message_is_refused_only_if_it_fails_right_after_another_was_taken() {
        let (mut search, mut work) = (PoisonSearch::default(), work(3));
        let late = || BridgeFailure::late();
        let sent = search.next(&work);
        search.failed(&sent, &mut work, &late());
        for _ in 0..STRIKES {
            assert_eq!(search.next(&work), [0]);
            search.failed(&[0], &mut work, &late());
        }
        assert_eq!(search.next(&work), [1], "another one");
        search.failed(&[1], &mut work, &late());
        assert_eq!(search.next(&work), [0], "nothing is taken: no verdict");
        search.failed(&[0], &mut work, &late());
        let other = search.next(&work);
        assert_ne!(other, [0]);
        work.set(other[0], Fate::Done);
        search.succeeded(&other, &work);
        assert_eq!(search.next(&work), [0]);
        work.set(0, Fate::Done);
        search.succeeded(&[0], &work);
        assert_eq!(work.open().len(), 1, "it was innocent");
    }
}
