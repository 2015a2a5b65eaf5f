//! The circuit breaker of a remote service: while nobody is answered, few are asked. Time is an argument.
//!
//! A failure can be the fault of one question: a client chooses its names, and a service may answer an odd one with a status, or
//! not at all. So failures open the breaker only if nobody else was answered meanwhile, one answer closes it, and while it is
//! open some questions go on: first those that the service has allowed before.

use std::time::Duration;

use gateway_core::Timestamp;

/// Why a question has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuestionFailure {
    /// No connection, or no answer in time.
    Unreachable,
    /// A status, or an answer that cannot be understood, or the end of the connection: perhaps because of this question.
    Unusable,
}

/// Earlier answers of the service about a question. Later variants go first while the breaker is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum QuestionHistory {
    /// Nothing.
    Unknown,
    /// Somebody of the same name was allowed lately.
    Named,
    /// The same was allowed lately, with the same proof.
    Proved,
}

/// Rule for the opening of a breaker and for its tries.
#[derive(Debug, Clone, Copy)]
pub struct BreakerRule {
    /// Failures in a row that open it.
    pub threshold: u32,
    /// Time of nothing but failures after which those that may be the fault of their questions open it.
    pub silence: Duration,
    /// Time until the first try.
    pub pause: Duration,
    /// Longest time between tries: the pause doubles with each failed one.
    pub longest: Duration,
}

/// A question that may be asked. Its outcome is to be told: [`Breaker::succeeded`], [`Breaker::failed`] or
/// [`Breaker::undecided`].
#[derive(Debug, Clone, Copy)]
#[must_use = "the breaker waits for the outcome"]
pub struct QuestionPermit {
    asked: Timestamp,
    is_try: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Breaker {
    rule: BreakerRule,
    state: BreakerState,
    answered: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy)]
enum BreakerState {
    Closed(Run),
    Open {
        /// Time of the next try.
        until: Timestamp,
        pause: Duration,
        /// A try is under way.
        is_trying: bool,
        /// Tenths of a question that may go on.
        credit: u32,
    },
}

/// Failures since the last answer.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    since: Option<Timestamp>,
    failures: u32,
    /// The last ones without any sign of life, counted if they were asked after the last answer.
    unreachable: u32,
}

/// Price of a question while the breaker is open, in tenths: each that comes brings one.
const PRICE: u32 = 10;
/// Credit at the moment of opening: less than an unknown question needs.
const FIRST_CREDIT: u32 = 2 * PRICE;

impl QuestionHistory {
    /// Credit that must be there: whatever others leave alone is for those who are known.
    const fn needs(self) -> u32 {
        match self {
            Self::Unknown => 3 * PRICE,
            Self::Named => 2 * PRICE,
            Self::Proved => PRICE,
        }
    }
}

impl Breaker {
    /// A closed one.
    pub fn new(rule: BreakerRule) -> Self {
        Self { rule, state: BreakerState::Closed(Run::default()), answered: None }
    }

    /// Tells whether to ask now: always while it is closed; while it is open one question in ten, and one after each pause.
    pub fn may_ask(&mut self, history: QuestionHistory, now: Timestamp) -> Option<QuestionPermit> {
        let BreakerState::Open { until, is_trying, credit, .. } = &mut self.state else {
            return Some(QuestionPermit { asked: now, is_try: false });
        };
        *credit += 1;
        if !*is_trying && now >= *until {
            *is_trying = true;
            return Some(QuestionPermit { asked: now, is_try: true });
        }
        if *credit < history.needs() {
            return None;
        }
        *credit -= PRICE;
        Some(QuestionPermit { asked: now, is_try: false })
    }

    /// Notes an answer. Returns whether it was open until now.
    pub fn succeeded(&mut self, now: Timestamp) -> bool {
        let was_open = self.is_open();
        self.state = BreakerState::Closed(Run::default());
        self.answered = Some(now);
        was_open
    }

    /// Notes an answer that says nothing about the service: to a try, the next question is another.
    pub fn undecided(&mut self, permit: QuestionPermit) {
        if let BreakerState::Open { is_trying, .. } = &mut self.state {
            *is_trying &= !permit.is_try;
        }
    }

    /// Notes that there was none. Returns whether it has opened by this, or stays open after a try.
    pub fn failed(&mut self, permit: QuestionPermit, failure: QuestionFailure, now: Timestamp) -> bool {
        let rule = self.rule;
        let pause = match &mut self.state {
            BreakerState::Closed(run) => {
                if !run.adds(permit, failure, self.answered, rule, now) {
                    return false;
                }
                rule.pause
            }
            BreakerState::Open { pause, .. } if permit.is_try => (*pause * 2).min(rule.longest),
            BreakerState::Open { .. } => return false,
        };
        let credit = match self.state {
            BreakerState::Open { credit, .. } => credit,
            BreakerState::Closed(_) => FIRST_CREDIT,
        };
        let until = now.plus_millis(millis(pause));
        self.state = BreakerState::Open { until, pause, is_trying: false, credit };
        true
    }

    /// Tells whether it lets only some questions pass.
    pub fn is_open(&self) -> bool {
        matches!(self.state, BreakerState::Open { .. })
    }
}

impl Run {
    /// One failure more. Returns whether the service counts as away now.
    fn adds(
        &mut self,
        permit: QuestionPermit,
        failure: QuestionFailure,
        answered: Option<Timestamp>,
        rule: BreakerRule,
        now: Timestamp,
    ) -> bool {
        let since = *self.since.get_or_insert(permit.asked);
        self.failures = self.failures.saturating_add(1);
        match failure {
            QuestionFailure::Unreachable => {
                // An answer to another question, given after this one was asked, shows that the service was there.
                let counts = answered.is_none_or(|answered| answered < permit.asked);
                self.unreachable = self.unreachable.saturating_add(u32::from(counts));
                counts && self.unreachable >= rule.threshold
            }
            QuestionFailure::Unusable => {
                self.unreachable = 0;
                let begin = answered.map_or(since, |answered| answered.max(since));
                self.failures >= rule.threshold && now >= begin.plus_millis(millis(rule.silence))
            }
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::{
        QuestionFailure::{Unreachable, Unusable},
        QuestionHistory::{Named, Proved, Unknown},
        *,
    };

    const SECOND: Duration = Duration::from_secs(1);

    fn breaker() -> Breaker {
        Breaker::new(BreakerRule { threshold: 3, silence: 10 * SECOND, pause: SECOND, longest: 3 * SECOND })
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp(1_000 * seconds)
    }

    fn asked(breaker: &mut Breaker, now: Timestamp) -> QuestionPermit {
        breaker.may_ask(Unknown, now).expect("a permit")
    }

    /// Opened at `now`.
    fn opened(now: Timestamp) -> Breaker {
        let mut breaker = breaker();
        for opens in [false, false, true] {
            let permit = asked(&mut breaker, now);
            assert_eq!(breaker.failed(permit, Unreachable, now), opens);
        }
        breaker
    }

    #[test]
    fn a_service_that_nobody_reaches_is_tried_with_one_question() {
        let mut breaker = breaker();
        for _ in 0..2 {
            let permit = asked(&mut breaker, at(0));
            assert!(!breaker.failed(permit, Unreachable, at(0)));
        }
        assert!(!breaker.succeeded(at(0)));
        let mut breaker = opened(at(0));
        assert!(breaker.may_ask(Unknown, at(0)).is_none());
        let first = asked(&mut breaker, at(1));
        assert!(breaker.may_ask(Unknown, at(1)).is_none(), "one try");
        assert!(breaker.failed(first, Unreachable, at(1)));
        assert!(breaker.may_ask(Unknown, at(2)).is_none(), "the pause doubles");
        let second = asked(&mut breaker, at(3));
        assert!(breaker.failed(second, Unreachable, at(3)));
        let third = asked(&mut breaker, at(6));
        assert!(breaker.succeeded(at(6)), "up to the longest pause");
        assert!(!breaker.is_open());
        assert!(!breaker.failed(third, Unreachable, at(6)), "one failure does not open it again");
    }

    /// The failure: a stranger whose names the service answers with a status locks out all others.
    #[test]
    fn odd_answers_open_nothing_while_somebody_is_answered() {
        let mut breaker = breaker();
        for second in 0..100 {
            for _ in 0..50 {
                let permit = asked(&mut breaker, at(second));
                assert!(!breaker.failed(permit, Unusable, at(second)), "second {second}");
            }
            if second % 9 == 0 {
                breaker.succeeded(at(second));
            }
        }
        for (second, opens) in [(100, false), (109, false), (110, true)] {
            let permit = asked(&mut breaker, at(second));
            assert_eq!(breaker.failed(permit, Unusable, at(second)), opens, "ten seconds of nothing else");
        }
    }

    /// The same with names that the service never answers.
    #[test]
    fn time_outs_open_nothing_if_somebody_was_answered_in_that_time() {
        let mut breaker = breaker();
        let permits: Vec<_> = (0..20).map(|_| asked(&mut breaker, at(0))).collect();
        breaker.succeeded(at(1));
        for permit in permits {
            assert!(!breaker.failed(permit, Unreachable, at(2)));
        }
        for opens in [false, false, true] {
            let permit = asked(&mut breaker, at(2));
            assert_eq!(breaker.failed(permit, Unreachable, at(4)), opens, "since the answer");
        }
    }

    #[test]
    fn a_sign_of_life_between_time_outs_counts() {
        let mut breaker = breaker();
        for failure in [Unreachable, Unreachable, Unusable, Unreachable, Unreachable] {
            let permit = asked(&mut breaker, at(0));
            assert!(!breaker.failed(permit, failure, at(0)));
        }
    }

    #[test]
    fn one_question_in_ten_goes_on_and_those_that_are_known_go_first() {
        let mut breaker = opened(at(0));
        let allowed = |breaker: &mut Breaker, history, count: usize| {
            (0..count).filter(|_| breaker.may_ask(history, at(0)).is_some()).count()
        };
        assert_eq!(allowed(&mut breaker, Unknown, 1_000), 100);
        // However many strangers come, there is one question for who is known, and another for the same with proof.
        for _ in 0..20 {
            allowed(&mut breaker, Unknown, 50);
            assert_eq!([allowed(&mut breaker, Named, 1), allowed(&mut breaker, Proved, 1)], [1, 1]);
        }
        assert!((99..=101).contains(&allowed(&mut breaker, Proved, 1_000)));
    }

    #[test]
    fn a_try_that_says_nothing_is_followed_by_another() {
        let mut breaker = opened(at(0));
        for _ in 0..4 {
            let permit = asked(&mut breaker, at(1));
            assert!(breaker.may_ask(Unknown, at(1)).is_none(), "one at a time");
            breaker.undecided(permit);
            assert!(breaker.is_open());
        }
    }

    #[test]
    fn what_was_asked_before_it_opened_changes_nothing() {
        let mut breaker = breaker();
        let early = asked(&mut breaker, at(0));
        for _ in 0..3 {
            let permit = asked(&mut breaker, at(0));
            breaker.failed(permit, Unreachable, at(0));
        }
        assert!(breaker.is_open() && !breaker.failed(early, Unreachable, at(0)));
        assert!(breaker.may_ask(Unknown, at(1)).is_some(), "the pause is the first one");
    }
}
