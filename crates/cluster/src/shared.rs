//! A call of the ledger that many wait for, and one makes.

use tokio::sync::watch;

/// Questions and answers. An answer is good for the questions that were asked before its call began: one that joins a call under way
/// could be told of a time before it asked.
pub(crate) struct SharedCall<T> {
    asked: watch::Sender<u64>,
    /// The last question that is answered, and the answer.
    answered: watch::Sender<(u64, Option<T>)>,
}

impl<T: Clone> SharedCall<T> {
    pub(crate) fn new() -> Self {
        Self { asked: watch::Sender::new(0), answered: watch::Sender::new((0, None)) }
    }

    /// Asks, and waits for an answer of a call that began after this one. Cancel safe. Waits for whoever makes the calls.
    pub(crate) async fn ask(&self) -> T {
        let mut ticket = 0;
        self.asked.send_modify(|asked| {
            *asked += 1;
            ticket = *asked;
        });
        let mut answered = self.answered.subscribe();
        // The sender is this.
        if let Ok(answer) = answered.wait_for(|(last, _)| *last >= ticket).await
            && let Some(answer) = &answer.1
        {
            return answer.clone();
        }
        std::future::pending().await
    }

    /// Waits until a question is open, and returns the last: a call that begins now answers all up to it.
    pub(crate) async fn question(&self) -> u64 {
        let last = self.answered.borrow().0;
        // The sender is this.
        let _ = self.asked.subscribe().wait_for(|asked| *asked > last).await;
        self.last_question()
    }

    /// The last question so far.
    pub(crate) fn last_question(&self) -> u64 {
        *self.asked.borrow()
    }

    /// Answers all questions up to one.
    pub(crate) fn answer(&self, question: u64, answer: T) {
        self.answered.send_replace((question, Some(answer)));
    }
}
