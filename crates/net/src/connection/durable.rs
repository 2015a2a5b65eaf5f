//! Waits of a connection with a persistent session: acknowledgements until their promise is on disk, and messages that
//! are on disk only.

use std::{
    collections::VecDeque,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use broker::{Session, Target};
use codec::{AckKind, reason};
use gateway_core::{Commit, CommitRefused, JournalPage, QoS, clock};
use session::{BacklogLoad, Reply};

use super::{Connection, ending::End};
use crate::{local::PacketWork, timers};

/// Answers that may wait before reading pauses.
const MOST_HELD: usize = 1024;
/// Until a queue that could not be read is read again.
const RETRY: Duration = Duration::from_secs(1);
/// Pause until a device asks again whether the memory budget has room for its read.
const NO_ROOM: Duration = Duration::from_millis(500);

/// Read of a page that is under way; yields `None` if the read failed.
pub(crate) type PageRead = Pin<Box<dyn Future<Output = Option<JournalPage>> + Send>>;

/// An answer that must not go yet, and none after it: acknowledgements keep the order of the packets they acknowledge
/// [MQTT-4.6.0-2] [MQTT-4.6.0-3].
pub(crate) struct HeldAnswer {
    commit: Option<Arc<Commit>>,
    answer: HeldPacket,
}

enum HeldPacket {
    /// PUBACK, PUBREC, PUBREL or PUBCOMP.
    Reply { kind: AckKind, packet_id: u16, code: u8 },
    /// SUBACK or UNSUBACK.
    Whole(Vec<u8>),
}

impl HeldAnswer {
    /// Returns whether the packet answers a SUBSCRIBE or UNSUBSCRIBE.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.answer, HeldPacket::Whole(_))
    }
}

impl Connection {
    /// Sends an acknowledgement once its commit is done, if it has one.
    pub(crate) fn reply(&mut self, reply: Reply, answers: &mut Vec<u8>) -> Result<(), End> {
        let Reply { kind, packet_id, code, after } = reply;
        self.answer_when(
            HeldAnswer { commit: after, answer: HeldPacket::Reply { kind, packet_id, code } },
            answers,
        )
    }

    /// Sends a whole packet once the commit is done.
    pub(crate) fn send_when_safe(
        &mut self,
        packet: Vec<u8>,
        commit: Arc<Commit>,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        self.answer_when(HeldAnswer { commit: Some(commit), answer: HeldPacket::Whole(packet) }, answers)
    }

    fn answer_when(&mut self, mut held: HeldAnswer, answers: &mut Vec<u8>) -> Result<(), End> {
        if !self.shared.broker.lease().is_open() {
            held.commit = Some(self.shared.broker.lease().wait_for(held.commit));
        }
        let waits = self.rare.as_ref().is_some_and(|rare| !rare.held.is_empty());
        let result = held.commit.as_ref().map_or(Some(Ok(())), |commit| commit.result());
        match result {
            Some(result) if !waits => self.answer_now(held.answer, result, answers),
            _ => {
                self.rare().held.push_back(held);
                Ok(())
            }
        }
    }

    fn answer_now(
        &mut self,
        answer: HeldPacket,
        result: Result<(), CommitRefused>,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let protocol = self.inbound.protocol();
        match answer {
            HeldPacket::Reply { kind, packet_id, code } => {
                let answers_publish = matches!(kind, AckKind::PubAck | AckKind::PubRec);
                let code = match result {
                    Err(CommitRefused) if answers_publish => self.refuse_kept(kind, packet_id)?,
                    // The store refuses no other step: it tries until it can.
                    _ => code,
                };
                codec::encode_ack(kind, packet_id, code, protocol, answers);
            }
            HeldPacket::Whole(packet) => {
                result.map_err(|CommitRefused| End::Protocol(reason::QUOTA_EXCEEDED))?;
                answers.extend_from_slice(&packet);
            }
        }
        Ok(())
    }

    /// The code for a PUBLISH of which the disk has refused a part.
    fn refuse_kept(&mut self, kind: AckKind, packet_id: u16) -> Result<u8, End> {
        let qos = if kind == AckKind::PubRec { QoS::ExactlyOnce } else { QoS::AtLeastOnce };
        if qos == QoS::ExactlyOnce
            && let Some(mut slot) = self.device.lock_owned(self.epoch)
        {
            slot.out.abort_received(packet_id);
        }
        self.log_refusal("PUBLISH", reason::QUOTA_EXCEEDED);
        match self.inbound.refused(qos, packet_id, reason::QUOTA_EXCEEDED)? {
            Some(reply) => Ok(reply.code),
            None => Err(End::Protocol(reason::QUOTA_EXCEEDED)),
        }
    }

    /// Sends the answers that may go now. The task is woken when the next one may. True if so many wait that reading must
    /// pause.
    pub(crate) fn poll_held(&mut self, work: &mut PacketWork, cx: &mut Context<'_>) -> Result<bool, End> {
        let Some(rare) = &mut self.rare else { return Ok(false) };
        if rare.held.is_empty() {
            return Ok(false);
        }
        work.answers.clear();
        while let Some(rare) = &mut self.rare {
            let Some(front) = rare.held.front() else { break };
            let result = match &front.commit {
                None => Ok(()),
                Some(commit) => match commit.poll(cx.waker()) {
                    Some(result) => result,
                    None => break,
                },
            };
            let Some(HeldAnswer { answer, .. }) = rare.held.pop_front() else { break };
            if let Err(end) = self.answer_now(answer, result, &mut work.answers) {
                // The earlier answers go out before the end.
                self.append_answers(work);
                return Err(end);
            }
        }
        self.append_answers(work);
        let Some(rare) = &mut self.rare else { return Ok(false) };
        if rare.held.is_empty() && rare.held.capacity() > 0 {
            rare.held = VecDeque::new();
            self.rare.take_if(|rare| rare.is_unused());
        }
        Ok(self.rare.as_ref().is_some_and(|rare| rare.held.len() >= MOST_HELD))
    }

    /// Reads what is on disk only as long as there is room for it.
    pub(crate) fn poll_load(&mut self, work: &mut PacketWork, cx: &mut Context<'_>) {
        if !self.device.is_durable() {
            return;
        }
        loop {
            if self.rare.as_ref().is_none_or(|rare| rare.reading.is_none()) {
                let Some(mut slot) = self.device.lock_owned(self.epoch) else { return };
                // Nearly always so: no time is taken for it.
                if !slot.out.wants_load() {
                    return;
                }
                let load = slot.out.begin_load(&self.device.env(clock::now()));
                drop(slot);
                self.rare().reading = Some(match load {
                    BacklogLoad::Nothing => return,
                    BacklogLoad::From(from, bytes) => self.read_from(from, bytes),
                    BacklogLoad::NoRoom => Box::pin(async {
                        timers::sleep(NO_ROOM).await;
                        None
                    }),
                });
            }
            let Some(reading) = self.rare.as_mut().and_then(|rare| rare.reading.as_mut()) else { return };
            let Poll::Ready(page) = reading.as_mut().poll(cx) else { return };
            self.rare().reading = None;
            self.rare.take_if(|rare| rare.is_unused());
            let Some(mut slot) = self.device.lock_owned(self.epoch) else { return };
            match page {
                Some(page) => slot.out.loaded(page, &self.device.env(clock::now())),
                None => slot.out.load_failed(&self.device.env(clock::now())),
            }
            if slot.mark_dirty() {
                drop(slot);
                work.turn.dirty.push(Arc::clone(&self.device) as Arc<dyn Target>);
            }
        }
    }

    fn read_from(&self, from: u64, bytes: usize) -> PageRead {
        let device = Arc::clone(&self.device);
        Box::pin(async move {
            let core = device.core();
            match device.broker().read_queue(core.client_id(), core.queue(), from, bytes).await {
                Ok(page) => Some(page),
                Err(error) => {
                    gateway_core::warn_limited!(client_id = %core.client_id(), %error, "queue cannot be read, trying again");
                    timers::sleep(RETRY).await;
                    None
                }
            }
        })
    }
}
