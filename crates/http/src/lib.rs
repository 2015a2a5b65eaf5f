//! The HTTP listener: what operators read, the API for those without gRPC, and the web page.
//!
//! ```text
//! server          connections, their bounds, who may ask
//! client          strangers, and what credentials change
//! slots           kinds of requests, none of which keeps another waiting
//! limits          bounds
//! local           the gRPC API, inside the process
//! held            what requests, answers and logins hold of the memory account
//! pages           /metrics, /healthz, /readyz
//! json            /v1: the gRPC API as JSON
//! page            /page: the web page
//! ```
//!
//! Knows the door of connections, and the gRPC API as a client does; what pages show is given to it by the wiring.

mod client;
pub mod counters;
mod held;
mod json;
mod limits;
mod local;
pub mod page;
mod pages;
mod server;
mod slots;

use axum::Router;

pub use json::{JsonApi, JsonOptions};
pub use limits::HttpLimits;
pub use local::LocalChannel;
pub use pages::{MonitoringPages, PageDenied};
pub use server::serve;

/// All that the listener answers.
pub struct Site {
    /// Pages that are always there.
    pub pages: MonitoringPages,
    /// The parts that are switched on, each with paths of its own.
    pub more: Vec<Router>,
}

impl Site {
    fn router(self) -> Router {
        self.more.into_iter().fold(self.pages.router(), Router::merge)
    }
}
