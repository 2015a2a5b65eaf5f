//! A SUBSCRIBE or UNSUBSCRIBE of the client: its filters one by one, and their answers.

use codec::{SubAck, Subscribe, SubscribeFilter, Unsubscribe, reason};
use gateway_core::{QoS, has_wildcard, limits::Limits};

use super::Inbound;
use crate::Violation;

/// The filters of a packet that are left, and the answers to the others. The packet is answered when all have theirs
/// [MQTT-3.8.4-6] [MQTT-3.10.4-6].
#[derive(Debug)]
pub struct Filters<F> {
    packet_id: u16,
    /// v5: Subscription Identifier.
    pub id: Option<u32>,
    left: std::vec::IntoIter<F>,
    codes: Vec<u8>,
}

impl<F> Filters<F> {
    fn new(packet_id: u16, id: Option<u32>, filters: Vec<F>) -> Self {
        let codes = Vec::with_capacity(filters.len());
        Self { packet_id, id, left: filters.into_iter(), codes }
    }

    /// The next filter, to be answered with [`Self::answer`].
    pub fn next_filter(&mut self) -> Option<F> {
        self.left.next()
    }

    /// The filter that [`Self::next_filter`] hands out next.
    pub fn peek(&self) -> Option<&F> {
        self.left.as_slice().first()
    }

    /// Answers the filter that came last.
    pub fn answer(&mut self, code: u8) {
        self.codes.push(code);
    }

    /// Returns whether all filters were handed out.
    pub fn is_done(&self) -> bool {
        self.left.len() == 0
    }

    /// SUBACK or UNSUBACK.
    pub fn into_answer(self) -> SubAck {
        let Self { packet_id, codes, .. } = self;
        SubAck { packet_id, reason_string: None, user: Vec::new(), codes }
    }
}

impl Inbound {
    /// # Errors
    /// It asks for what CONNACK said is not there.
    pub(super) fn subscribe(
        &mut self,
        mut subscribe: Subscribe,
        limits: &Limits,
    ) -> Result<Filters<SubscribeFilter>, Violation> {
        self.check_subscribe(&subscribe, limits).map_err(Violation)?;
        // Less than was asked for may be granted [MQTT-3.8.4-7].
        let most = QoS::from_bits(limits.max_qos).unwrap_or(QoS::ExactlyOnce);
        for wanted in &mut subscribe.filters {
            wanted.qos = wanted.qos.min(most);
            if !self.protocol.is_v5()
                && let Some(bridge) = self.bridge()
            {
                bridge.adapt(wanted);
            }
        }
        Ok(Filters::new(subscribe.packet_id, subscribe.id, subscribe.filters))
    }

    pub(super) fn unsubscribe(unsubscribe: Unsubscribe) -> Filters<String> {
        Filters::new(unsubscribe.packet_id, None, unsubscribe.filters)
    }

    /// The code in the SUBACK for a filter that is refused with `code` of version 5 [MQTT-3.9.3-2].
    pub fn suback_code(&self, code: u8) -> u8 {
        if self.protocol.is_v5() { code } else { 0x80 }
    }

    /// The code in the UNSUBACK; on the wire in version 5 only.
    pub fn unsuback_code(existed: bool) -> u8 {
        if existed { reason::SUCCESS } else { reason::NO_SUBSCRIPTION_EXISTED }
    }

    /// Checks a SUBSCRIBE, before any of its filters is looked at, for what CONNACK said is not there; the reason code if
    /// it asks for that nevertheless (sections 3.2.2.3.11 to 3.2.2.3.13). MQTT 3 has no such announcement: there such
    /// a filter is refused in the SUBACK [MQTT-3.8.3-2].
    pub(crate) fn check_subscribe(&self, subscribe: &Subscribe, limits: &Limits) -> Result<(), u8> {
        if !self.protocol.is_v5() {
            return Ok(());
        }
        if !limits.subscription_id_available && subscribe.id.is_some() {
            return Err(reason::SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED);
        }
        let any = |is_so: fn(&str) -> bool| subscribe.filters.iter().any(|wanted| is_so(&wanted.filter));
        if !limits.shared_available && any(|filter| filter.starts_with("$share/")) {
            return Err(reason::SHARED_SUBSCRIPTIONS_NOT_SUPPORTED);
        }
        if !limits.wildcard_available && any(has_wildcard) {
            return Err(reason::WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED);
        }
        Ok(())
    }
}
