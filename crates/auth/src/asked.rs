//! Answers of the user's service about the topics that one connection asked for last, and the question under way.

use std::{
    borrow::Cow,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use access::Subject;
use aws_lc_rs::digest;
use gateway_core::{QoS, Timestamp};

use super::remote::{AuthorizationRequest, NoDecision, RemoteAuthorizer};

/// Answers that a connection remembers, and the longest topic of them in bytes; of one that is longer, the digest.
const REMEMBERED: usize = 8;
const LONGEST: usize = 256;

type AskingService = Pin<Box<dyn Future<Output = Result<bool, NoDecision>> + Send>>;

/// See the module.
#[derive(Default)]
pub(crate) struct Asked {
    asking: Option<(AuthorizationRequest, Arc<RemoteAuthorizer>, AskingService)>,
    told: Vec<RememberedAnswer>,
    next: usize,
}

struct RememberedAnswer {
    /// [`key`] of the topic or filter.
    key: Box<str>,
    qos: QoS,
    /// RETAIN flag of a published message; none of a subscription.
    retain: Option<bool>,
    may: bool,
    until: Timestamp,
}

impl Asked {
    /// Returns the answer about publishing to a topic, if one is remembered at `now`.
    pub(crate) fn about_publish(&self, topic: &str, qos: QoS, retain: bool, now: Timestamp) -> Option<bool> {
        self.find(topic, qos, Some(retain), now)
    }

    /// Returns the answer about subscribing to a filter, if one is remembered at `now`.
    pub(crate) fn about_subscribe(&self, filter: &str, qos: QoS, now: Timestamp) -> Option<bool> {
        self.find(filter, qos, None, now)
    }

    fn find(&self, topic: &str, qos: QoS, retain: Option<bool>, now: Timestamp) -> Option<bool> {
        let key = key(topic);
        let is_it = |told: &&RememberedAnswer| {
            *told.key == *key && (told.qos, told.retain) == (qos, retain) && now < told.until
        };
        self.told.iter().find(is_it).map(|told| told.may)
    }

    /// Begins to ask; [`Self::poll`] says when there is an answer.
    pub(crate) fn begin(
        &mut self,
        authorizer: &Arc<RemoteAuthorizer>,
        subject: &Subject<'_>,
        authorization_request: AuthorizationRequest,
    ) {
        let asking = Box::pin(authorizer.may(subject, &authorization_request));
        self.asking = Some((authorization_request, Arc::clone(authorizer), asking));
    }

    /// Returns whether a question is under way.
    pub(crate) fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// Ready when no question is open, and the answer can be found.
    pub(crate) fn poll(&mut self, now: Timestamp, cx: &mut Context<'_>) -> Poll<()> {
        let Some((_, _, asking)) = &mut self.asking else { return Poll::Ready(()) };
        let Poll::Ready(told) = asking.as_mut().poll(cx) else { return Poll::Pending };
        let Some((authorization_request, authorizer, _)) = self.asking.take() else { return Poll::Ready(()) };
        let may = told.unwrap_or(false);
        self.remember(&authorization_request, may, authorizer.remember_until(may, now));
        Poll::Ready(())
    }

    fn remember(&mut self, authorization_request: &AuthorizationRequest, may: bool, until: Timestamp) {
        let (topic, qos, retain) = match authorization_request {
            AuthorizationRequest::Publish { topic, qos, retain } => (topic, *qos, Some(*retain)),
            AuthorizationRequest::Subscribe { filter, qos } => (filter, *qos, None),
        };
        let told = RememberedAnswer { key: key(topic).into(), qos, retain, may, until };
        self.told.retain(|known| known.key != told.key || (known.qos, known.retain) != (qos, retain));
        if self.told.len() < REMEMBERED {
            self.told.push(told);
        } else {
            self.told[self.next] = told;
            self.next = (self.next + 1) % REMEMBERED;
        }
    }
}

/// Returns the key under which a topic is remembered. No topic begins as a digest does, with a zero.
fn key(topic: &str) -> Cow<'_, str> {
    if topic.len() <= LONGEST {
        return Cow::Borrowed(topic);
    }
    let digest = digest::digest(&digest::SHA256, topic.as_bytes());
    let digits: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    Cow::Owned(format!("\0{digits}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_remembers_the_last_answers_in_little_memory() {
        let mut asked = Asked::default();
        let (now, later) = (Timestamp(1_000), Timestamp(2_000));
        let topic = |number: usize| {
            "t".repeat(if number.is_multiple_of(2) { 1 } else { 60_000 }) + &number.to_string()
        };
        for number in 0..20 {
            let (topic, qos) = (topic(number).into(), QoS::AtLeastOnce);
            asked.remember(
                &AuthorizationRequest::Publish { topic, qos, retain: false },
                number % 3 == 0,
                later,
            );
        }
        for number in 0..20 {
            let told = asked.about_publish(&topic(number), QoS::AtLeastOnce, false, now);
            assert_eq!(told, (number >= 12).then_some(number % 3 == 0), "{number}");
        }
        assert!(asked.told.iter().map(|told| told.key.len()).sum::<usize>() < REMEMBERED * LONGEST);
        let last = topic(19);
        assert_eq!(asked.about_publish(&last, QoS::AtLeastOnce, true, now), None, "another question");
        assert_eq!(asked.about_publish(&last, QoS::ExactlyOnce, false, now), None);
        assert_eq!(asked.about_subscribe(&last, QoS::AtLeastOnce, now), None);
        assert_eq!(asked.about_publish(&last, QoS::AtLeastOnce, false, later), None, "too long ago");
    }
}
