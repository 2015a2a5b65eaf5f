//! Events of connections about messages.

use crate::codec::Stamp;

/// One message that arrived.
#[derive(Clone, Copy, Default)]
pub struct Delivery {
    pub stamp: Option<Stamp>,
    pub retain: bool,
}

/// One own message that the broker acknowledged completely.
pub struct Acked {
    /// 0x80 and above (v5): the broker refused it.
    pub reason: u8,
    pub ts: u64,
    pub seq: u64,
    pub now: u64,
}

pub trait Handler {
    fn publish(&mut self, idx: usize, d: &Delivery, now: u64);
    fn acked(&mut self, idx: usize, a: &Acked);
    /// Everything queued on a connection has been written.
    fn writable(&mut self, _idx: usize) {}
    fn up(&mut self, _idx: usize, _session_present: bool, _now: u64) {}
    /// An established connection ended unexpectedly.
    fn dropped(&mut self, _idx: usize) {}
    fn pong(&mut self, _idx: usize, _now: u64) {}
    /// Answer to a further SUBSCRIBE on an established connection.
    fn subacked(&mut self, _idx: usize, _codes: &[u8]) {}
    fn woken(&mut self) {}
}
