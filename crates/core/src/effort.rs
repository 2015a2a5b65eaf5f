//! The work that a task may do before it lets others run.
//!
//! Work is counted instead of timed: counting is cheaper than reading a clock, and the same input always costs the
//! same. Prices are about the nanoseconds that the work takes on a slow machine; only their ratios to each other and to
//! [`Effort::TURN`] matter.

/// Work that a task may still do before it yields. All work is spent from it, even beyond what is left; code that can
/// stop and continue later asks [`Self::is_spent`] between two steps.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    left: i64,
}

impl Effort {
    /// Work that a task may do in one turn: the other tasks of its thread wait for well below a millisecond.
    pub const TURN: u32 = 500_000;

    /// A system call for a socket.
    pub const CALL: u32 = 4_000;
    /// A kibibyte of input read.
    pub const KIB: u32 = 100;
    /// A packet, whatever it is.
    pub const PACKET: u32 = 100;
    /// A frame of WebSocket.
    pub const FRAME: u32 = 60;
    /// A record of TLS.
    pub const RECORD: u32 = 1_000;
    /// A step of a handshake of QoS 1 or 2.
    pub const STEP: u32 = 150;
    /// A message of an RPC, checked.
    pub const REQUEST: u32 = 1_000;
    /// A retained message set or cleared.
    pub const RETAINED: u32 = 1_500;
    /// A latest value of a topic that is not in memory, or a message of the history: entries, the writer's batch and pages of
    /// the store are made for it.
    pub const VALUE: u32 = 2_000;
    /// A filter subscribed or unsubscribed.
    pub const FILTER: u32 = 3_000;
    /// A node, table or subscriber of the subscription index visited.
    pub const NODE: u32 = 60;
    /// A member of a shared group visited.
    pub const MEMBER: u32 = 40;
    /// A message handed to a receiver.
    pub const DELIVERY: u32 = 100;
    /// One of very many receivers whose buffer is to be written at the end of the turn: spent in advance, so that a
    /// turn does not collect too many. For others it is spent when they are written to.
    pub const FLUSH: u32 = Self::CALL;
    /// A topic of the retained messages visited.
    pub const TOPIC: u32 = 150;

    /// Starts a new turn; overspending is forgotten.
    #[inline]
    pub fn renew(&mut self) {
        *self = Self::default();
    }

    /// Spends.
    #[inline]
    pub fn spend(&mut self, cost: u32) {
        self.left -= i64::from(cost);
    }

    /// Spends the price of each of `count` things.
    #[inline]
    pub fn spend_each(&mut self, price: u32, count: usize) {
        // The things counted are in memory, so that the product is far below the largest number.
        self.left -= i64::from(price) * count as i64;
    }

    /// Spends what is left: the task has to wait for something.
    pub fn exhaust(&mut self) {
        self.left = self.left.min(0);
    }

    /// Returns how many things of this price the effort still pays for, at least one.
    #[inline]
    pub fn affords(&self, price: u32) -> usize {
        usize::try_from(self.left / i64::from(price.max(1))).unwrap_or(0).max(1)
    }

    /// Returns whether it is time to yield.
    #[inline]
    pub fn is_spent(&self) -> bool {
        self.left <= 0
    }

    /// Returns the work spent since the turn began.
    #[inline]
    pub fn spent(&self) -> u64 {
        u64::try_from(i64::from(Self::TURN) - self.left).unwrap_or(0)
    }
}

impl Default for Effort {
    fn default() -> Self {
        Self { left: i64::from(Self::TURN) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_overdrawn_by_one_step_and_begins_anew() {
        let mut effort = Effort::default();
        assert_eq!(effort.affords(Effort::TURN / 2), 2);
        effort.spend(Effort::TURN - 1);
        assert!(!effort.is_spent());
        effort.spend_each(Effort::FILTER, 1 << 40);
        assert!(effort.is_spent());
        assert_eq!(effort.affords(1), 1, "who asks has a step to do");
        effort.renew();
        assert_eq!(effort.spent(), 0);
    }
}
