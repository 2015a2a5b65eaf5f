//! Surroundings of every call: connections, limits, deadlines, and the memory of requests and answers.

pub(super) mod accept;
pub(super) mod access;
pub(super) mod answer_body;
pub(super) mod caller_memory;
pub(super) mod calls;
pub(super) mod connection;
pub(super) mod connection_calls;
pub(super) mod deadline;
pub(super) mod elsewhere;
pub(super) mod frame_gate;
pub(super) mod local;
pub mod methods;
pub(super) mod passed;
pub(super) mod request_body;
pub(super) mod request_size;
pub(super) mod unauthenticated;
