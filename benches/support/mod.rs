//! Subscribers without sockets, for benches: real sessions of the broker that encode into a buffer, or keep nothing.
#![allow(unreachable_pub, dead_code, reason = "each bench uses its own part of this module")]

use std::{
    any::Any,
    net::SocketAddr,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use broker::{
    Broker, BrokerConfig, CloseReason, ConnectionInfo, Delivered, OpenRequest, QueueInfo, QueueSummary,
    Session, SessionCore, SubscribeRequest, Target, Turn,
};
use codec::PublishFrame;
use gateway_core::{
    Budget, ClientId, Message, Offer, Outcome, Protocol, QoS, Timestamp, Yielded, limits::Limits,
};
use parking_lot::Mutex;
use session::{Env, LinkParams, Outbound, recycle};

/// What a subscriber does with a message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Keeps {
    /// Nothing: only routing costs.
    Nothing,
    /// The bytes that its connection would write, until the flush.
    Bytes,
}

/// A broker with defaults.
pub fn broker() -> Broker {
    Broker::new(BrokerConfig::default())
}

/// Opens a session that is online.
pub fn open(broker: &Broker, client_id: &str, keeps: Keeps) -> Arc<dyn Session> {
    let info = ConnectionInfo {
        peer: SocketAddr::from(([127, 0, 0, 1], 1)).into(),
        listener: Arc::new("bench".to_owned()),
        protocol: Protocol::V4,
        keep_alive: 60,
        username: None,
        identity: None,
    };
    let request = OpenRequest {
        client_id: ClientId::new(client_id),
        clean_start: true,
        expiry: 0,
        will: None,
        info,
        quota_holders: Default::default(),
        now: Timestamp(0),
    };
    let limits = Arc::clone(broker.limits());
    let make = |core| -> Arc<dyn Session> {
        let mut out = Outbound::new();
        let link = LinkParams {
            protocol: Protocol::V4,
            receive_maximum: u16::MAX,
            maximum_packet_size: u32::MAX,
            topic_alias_maximum: 0,
        };
        out.attach(link, &[], &Env { limits: &limits, now: Timestamp(0), budget: &Unbounded, disk: None });
        Arc::new(Subscriber { core, limits, keeps, out: Mutex::new(out) })
    };
    let mut turn = Turn::default();
    let mut opening = pin!(broker.open(request, make, &mut turn));
    match opening.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(opened) => opened.expect("no quotas").session,
        Poll::Pending => unreachable!("a new client id waits for nobody"),
    }
}

/// Subscribes at QoS 0.
pub fn subscribe(broker: &Broker, session: &Arc<dyn Session>, filter: &str) {
    let request = SubscribeRequest {
        filter,
        qos: QoS::AtMostOnce,
        no_local: false,
        retain_as_published: false,
        retain_handling: 0,
        id: None,
        commit: None,
    };
    assert!(broker.subscribe(session, &request, Timestamp(0)).is_ok(), "{filter} is refused");
}

/// A PUBLISH of 256 B without properties.
pub fn publish_frame(protocol: Protocol, qos: QoS) -> PublishFrame<'static> {
    PublishFrame {
        protocol,
        topic: "devices/sensor-000123/telemetry",
        payload: &[0x5a; 256],
        qos,
        dup: false,
        retain: false,
        packet_id: 7,
        alias: None,
        expiry: None,
        ids: &[],
        properties: None,
    }
}

struct Unbounded;

impl Budget for Unbounded {
    fn force(&self, _bytes: usize) {}
    fn charge(&self, _: usize, _: usize) -> bool {
        true
    }
    fn release(&self, _: usize) {}
}

struct Subscriber {
    core: SessionCore,
    limits: Arc<Limits>,
    keeps: Keeps,
    out: Mutex<Outbound>,
}

impl Target for Subscriber {
    fn deliver(&self, message: &Message<'_>, offer: Offer<'_>) -> Delivered {
        if self.keeps == Keeps::Nothing {
            return Delivered { outcome: Outcome::Sent, flush: false };
        }
        let env = Env { limits: &self.limits, now: message.received, budget: &Unbounded, disk: None };
        let took = self.out.lock().offer(message, offer, &env);
        assert!(took == Outcome::Sent, "{took:?}");
        Delivered { outcome: Outcome::Sent, flush: true }
    }

    fn flush(self: Arc<Self>) {
        let mut out = self.out.lock();
        let bytes = out.take_out();
        out.note_written(bytes.len());
        recycle(bytes);
    }

    fn is_online(&self) -> bool {
        true
    }

    fn load(&self) -> usize {
        0
    }
}

impl Session for Subscriber {
    fn restore(&self, _stored: &QueueSummary) {}
    fn may_have_sent(&self, _place: u64, _qos: QoS) -> bool {
        false
    }
    fn note_expired(&self, _messages: usize, _bytes: u64) {}
    fn core(&self) -> &SessionCore {
        &self.core
    }
    fn close(&self, _: u32, _: CloseReason) -> bool {
        true
    }
    fn end(&self) -> Vec<Yielded> {
        Vec::new()
    }
    fn yield_shared(&self) -> Vec<Yielded> {
        Vec::new()
    }
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
    fn queue(&self) -> QueueInfo {
        QueueInfo::default()
    }
}
