//! Tests of the whole protocol.

mod simulator;
