//! Three nodes, of which one is lost.
//!
//! Long form: three JVMs need 3 GB and minutes. `cargo test --test database -- --ignored`
