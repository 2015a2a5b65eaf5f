//! What the service of the user said about the topics that one connection asked for last, and what it is being asked now.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use access::Subject;
use gateway_core::Timestamp;

use super::remote::{Authorizer, Unanswered, Wish};

/// Answers that a connection remembers, and the longest topic of them in bytes. One that is longer is remembered until the next.
const REMEMBERED: usize = 8;
const LONGEST: usize = 256;

type Asking = Pin<Box<dyn Future<Output = Result<bool, Unanswered>> + Send>>;

/// See the module.
#[derive(Default)]
pub(crate) struct Asked {
    asking: Option<(Wish, Arc<Authorizer>, Asking)>,
    told: Vec<(Wish, bool, Timestamp)>,
    next: usize,
}

impl Wish {
    fn topic(&self) -> &str {
        match self {
            Self::Publish { topic, .. } => topic,
            Self::Subscribe { filter, .. } => filter,
        }
    }
}

impl Asked {
    /// What was said about this wish, if it is remembered at `now`.
    pub(crate) fn find(&self, now: Timestamp, is_it: impl Fn(&Wish) -> bool) -> Option<bool> {
        self.told.iter().find(|(wish, _, until)| now < *until && is_it(wish)).map(|(_, may, _)| *may)
    }

    /// Begins to ask; [`Self::poll`] says when there is an answer.
    pub(crate) fn begin(&mut self, authorizer: &Arc<Authorizer>, subject: &Subject<'_>, wish: Wish) {
        let asking = Box::pin(authorizer.may(subject, &wish));
        self.asking = Some((wish, Arc::clone(authorizer), asking));
    }

    /// Whether an answer is waited for.
    pub(crate) fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// Ready when nothing is asked any more, and the answer can be found.
    pub(crate) fn poll(&mut self, now: Timestamp, cx: &mut Context<'_>) -> Poll<()> {
        let Some((_, _, asking)) = &mut self.asking else { return Poll::Ready(()) };
        let Poll::Ready(told) = asking.as_mut().poll(cx) else { return Poll::Pending };
        let Some((wish, authorizer, _)) = self.asking.take() else { return Poll::Ready(()) };
        let may = told.unwrap_or(false);
        let until = authorizer.remember_until(may, now);
        self.told.retain(|(known, ..)| known.topic().len() <= LONGEST && *known != wish);
        if self.told.len() < REMEMBERED {
            self.told.push((wish, may, until));
        } else {
            self.told[self.next % REMEMBERED] = (wish, may, until);
            self.next = (self.next + 1) % REMEMBERED;
        }
        Poll::Ready(())
    }
}
