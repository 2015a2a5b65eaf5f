//! The client of the model: takes what it is sent, checks QoS 2 and answers when it likes.

use super::*;

impl World {
    pub(super) fn read(&mut self, frames: usize) {
        if !self.outbound.is_online() {
            return;
        }
        let bytes = self.outbound.take_out();
        self.outbound.note_written(0);
        let mut rest = &bytes[..];
        let mut left = frames;
        while left > 0
            && let Ok(Some(frame)) = codec::frame(rest, usize::MAX)
        {
            rest = &rest[frame.len..];
            left -= 1;
            match codec::decode(&frame, self.protocol).expect("what we encode can be decoded") {
                Packet::Publish(publish) => self.receive(&publish),
                Packet::PubRel(ack) => {
                    self.held.remove(&ack.packet_id);
                    // A message released on an earlier connection is released again without a PUBREC.
                    if self.unreleased.contains(&ack.packet_id) {
                        assert_eq!(
                            self.unreleased.pop_front(),
                            Some(ack.packet_id),
                            "PUBREL overtook another"
                        );
                    }
                    self.answers.push_back((7, ack.packet_id));
                }
                other => panic!("unexpected {other:?}"),
            }
        }
        self.with(|outbound, env| outbound.pump(env));
    }

    fn receive(&mut self, publish: &codec::Publish<'_>) {
        let number = number(publish.payload);
        let attempt = u32::from_be_bytes(publish.payload[4..8].try_into().expect("four bytes"));
        let id = publish.packet_id;
        let sent = &mut self.messages[number];
        if publish.qos == QoS::AtMostOnce {
            sent.received += 1;
            assert!(sent.received == 1 || sent.crashed, "QoS 0 message {number} came twice");
            return;
        }
        let busy = self.open.insert(id, attempt);
        assert_eq!(busy, None, "id {id} is open on this connection");
        assert!(self.open.len() <= self.window, "receive maximum {} exceeded", self.window);
        let known = publish.qos == QoS::ExactlyOnce
            && match self.held.insert(id, attempt) {
                Some(before) => {
                    assert_eq!(before, attempt, "id {id} given to another message while the client holds it");
                    assert!(publish.dup);
                    true
                }
                None => false,
            };
        if publish.qos == QoS::AtLeastOnce && !self.had.insert(attempt) {
            assert!(publish.dup, "message {number} comes again without DUP");
        }
        if !known {
            sent.received += 1;
            assert!(publish.qos != QoS::ExactlyOnce || sent.received == 1, "QoS 2 message {number} twice");
            if sent.received == 1 {
                self.order[publish.qos as usize].push(attempt);
            }
        }
        self.answers.push_back((if publish.qos == QoS::AtLeastOnce { 4 } else { 5 }, id));
    }

    /// Answers one of the open handshakes, not always the oldest.
    pub(super) fn answer(&mut self, choice: usize) {
        if !self.outbound.is_online() || self.answers.is_empty() {
            return;
        }
        let Some((kind, id)) = self.answers.remove(choice % self.answers.len()) else { return };
        match kind {
            4 => {
                self.open.remove(&id);
                assert_eq!(self.with(|outbound, env| outbound.handle_puback(id, 0, env)), Ok(true));
            }
            5 => {
                let reply = self.with(|outbound, env| outbound.handle_pubrec(id, 0, env));
                self.steps.extend(reply.expect("the next step"));
                self.unreleased.push_back(id);
            }
            _ => {
                self.open.remove(&id);
                assert_eq!(self.with(|outbound, env| outbound.handle_pubcomp(id, env)), Ok(true));
            }
        }
    }
}
