//! Random input for both halves of a session, against models, in virtual time. Plain functions: stable tests run them on
//! seeded inputs, and the fuzz targets only call them.

mod budgets;
mod inbound;
mod outbound;

#[cfg(test)]
pub(crate) use budgets::{TestBudget, Unlimited};
pub use inbound::fuzz_inbound;
pub use outbound::fuzz_session;

use crate::{Outbound, Reply};

/// Sends an answer, as its connection does when its turn has come.
pub(crate) fn append_reply(outbound: &mut Outbound, reply: &Reply) {
    let mut bytes = Vec::new();
    codec::encode_ack(reply.kind, reply.packet_id, reply.code, outbound.protocol(), &mut bytes);
    outbound.append(&bytes);
}
