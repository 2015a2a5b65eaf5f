//! Kinds of requests, and the seats that each has of its own.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use hyper::http::Extensions;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::server::HttpLimits;

/// What a request is, as far as it may keep others waiting. Told by its path, before anything of it is worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// Of supervisors, who are never kept waiting by others.
    Health,
    /// What operators read, such as metrics.
    Page,
    /// A call of the API, which is answered and over.
    Api,
    /// An answer that stays open.
    Stream,
    /// The web page.
    Screen,
    /// A live part of the web page, which stays open.
    Live,
}

impl RequestKind {
    /// The kind of what is asked for by `path`.
    pub(super) fn of(path: &str) -> Self {
        match path {
            "/healthz" | "/readyz" => Self::Health,
            "/openapi.json" => Self::Api,
            _ if path.starts_with("/v1/stream/") => Self::Stream,
            _ if path.starts_with("/v1/") => Self::Api,
            "/" | "/page" => Self::Screen,
            _ if path.starts_with("/page/live/") => Self::Live,
            _ if path.starts_with("/page/") => Self::Screen,
            _ => Self::Page,
        }
    }

    /// Whether the connection ends with the answer, so that nobody keeps a seat by asking now and then: supervisors come with a
    /// new one each time, and who is not known needs none, whatever the answer is: a login form, a description, an error.
    pub(super) fn leaves(self, known: &Known) -> bool {
        match self {
            Self::Health => true,
            // Nobody else gets this far.
            Self::Page => false,
            Self::Api | Self::Stream | Self::Screen | Self::Live => !known.0.load(Relaxed),
        }
    }
}

/// Goes with a request, for whoever answers it to say that its caller may call: is known, or nobody is asked who he is.
#[derive(Debug, Clone, Default)]
pub(super) struct Known(Arc<AtomicBool>);

impl Known {
    /// Notes that the caller of the request with these extensions may call.
    pub(super) fn note(extensions: &Extensions) {
        if let Some(known) = extensions.get::<Self>() {
            known.0.store(true, Relaxed);
        }
    }
}

/// Seats of each kind. A connection has one for its last request, until it asks again or ends.
pub(super) struct Seats {
    health: Arc<Semaphore>,
    pages: Arc<Semaphore>,
    api: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    screens: Arc<Semaphore>,
    live: Arc<Semaphore>,
    places: usize,
}

impl Seats {
    pub(super) fn new(limits: &HttpLimits) -> Self {
        let most = Semaphore::MAX_PERMITS / 8;
        let [few, requests, streams] = [limits.max_connections, limits.max_requests, limits.max_streams]
            .map(|number| number.clamp(1, most));
        let live = few.div_ceil(2);
        let seats = |number| Arc::new(Semaphore::new(number));
        Self {
            health: seats(few),
            pages: seats(few),
            api: seats(requests),
            streams: seats(streams),
            screens: seats(few),
            live: seats(live),
            places: 3 * few + live + requests + streams,
        }
    }

    /// How many there are of all kinds.
    pub(super) fn places(&self) -> usize {
        self.places
    }

    /// One of `kind`, if there is one left.
    pub(super) fn take(&self, kind: RequestKind) -> Option<OwnedSemaphorePermit> {
        let seats = match kind {
            RequestKind::Health => &self.health,
            RequestKind::Page => &self.pages,
            RequestKind::Api => &self.api,
            RequestKind::Stream => &self.streams,
            RequestKind::Screen => &self.screens,
            RequestKind::Live => &self.live,
        };
        Arc::clone(seats).try_acquire_owned().ok()
    }
}
