//! Backends and operators: who calls over gRPC and HTTP, and what each may do.
//!
//! A caller has a [`Role`], which says what kind of thing it may do, and a [`Scope`], which says with which topics and
//! devices. [`Tokens`] are how most of them prove who they are.

mod date;
mod role;
mod scope;
mod tokens;

pub use date::{format_time, parse_span};
pub use role::{Role, Roles};
pub use scope::{Scope, ScopeError, covers, intersection, pattern_matches};
pub use tokens::{TokenGrant, TokenHash, TokenLineError, Tokens, hash, mint};

#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz_backends;
