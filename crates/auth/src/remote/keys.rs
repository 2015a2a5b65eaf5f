//! Digests that stand for questions and for the parties they are about, so that no password stays in memory.

use access::{RecentDigests, ShortDigest, Subject, breaker::QuestionHistory};
use aws_lc_rs::{hmac, rand};
use config::{ConfigError, Problem};

use crate::Credentials;

/// Makes digests under a key of its own.
pub(super) struct Digester(hmac::Key);

/// Digests that stand for one question.
#[derive(Debug, Clone, Copy)]
pub(super) struct QuestionKeys {
    /// The whole question.
    pub(super) question: [u8; 32],
    /// The party with its proof, from any address; of a topic, the whole question.
    pub(super) proof: ShortDigest,
    /// The name under which the party presents itself.
    pub(super) name: ShortDigest,
}

/// Parties that were allowed something recently. Only an answer that allows adds to them.
pub(super) struct AllowedRecently {
    proofs: RecentDigests,
    names: RecentDigests,
}

/// Digests of each kind that are remembered at least.
const REMEMBERED: usize = 10_000;

impl Digester {
    /// With a new key.
    ///
    /// # Errors
    /// The system gives no random numbers; `setting` is what needs them.
    pub(super) fn new(setting: &str) -> Result<Self, ConfigError> {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &rand::SystemRandom::new());
        key.map(Self).map_err(|_| {
            let fix = "start it where /dev/urandom can be read";
            ConfigError(vec![Problem::new(setting, "", "the system gives no random numbers", fix)])
        })
    }

    /// Of a question about a login.
    pub(super) fn login(&self, question: &[u8], credentials: &Credentials) -> QuestionKeys {
        let client_id = Some(credentials.client_id.as_bytes());
        let user = credentials.username.as_deref().map(str::as_bytes);
        let password = credentials.password.as_ref().map(|password| &password.0[..]);
        let proof = [client_id, user, password, credentials.certificate.as_deref()];
        QuestionKeys {
            question: self.digest([Some(question)]),
            proof: short(self.digest(proof)),
            name: short(self.digest([client_id, user])),
        }
    }

    /// Of a question about a topic.
    pub(super) fn topic(&self, question: &[u8], subject: &Subject<'_>) -> QuestionKeys {
        let question = self.digest([Some(question)]);
        let user = subject.principal.username.as_deref().map(str::as_bytes);
        let name = short(self.digest([Some(subject.client_id.as_bytes()), user]));
        QuestionKeys { question, proof: short(question), name }
    }

    /// Of parts, each with its length, so that none can pass into the next.
    fn digest<const N: usize>(&self, parts: [Option<&[u8]>; N]) -> [u8; 32] {
        let mut context = hmac::Context::with_key(&self.0);
        for part in parts {
            let length = part.map_or(u64::MAX, |part| part.len() as u64);
            context.update(&length.to_be_bytes());
            context.update(part.unwrap_or_default());
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(context.sign().as_ref());
        digest
    }
}

fn short(digest: [u8; 32]) -> ShortDigest {
    let mut short = [0; 16];
    short.copy_from_slice(&digest[..16]);
    short
}

impl AllowedRecently {
    /// Nobody.
    pub(super) fn new() -> Self {
        Self { proofs: RecentDigests::new(REMEMBERED), names: RecentDigests::new(REMEMBERED) }
    }

    /// Remembers the party of an allowed question.
    pub(super) fn insert(&mut self, keys: &QuestionKeys) {
        self.proofs.insert(keys.proof);
        self.names.insert(keys.name);
    }

    /// Returns the standing of the party that a question is about.
    pub(super) fn history(&self, keys: &QuestionKeys) -> QuestionHistory {
        if self.proofs.contains(&keys.proof) {
            QuestionHistory::Proved
        } else if self.names.contains(&keys.name) {
            QuestionHistory::Named
        } else {
            QuestionHistory::Unknown
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;

    use super::*;
    use crate::SecretBytes;

    #[test]
    fn the_same_password_from_elsewhere_is_known_and_a_guess_is_not() {
        let digester = Digester::new("test").expect("a key");
        let keys = |client_id: &str, user: &str, password: &str, peer: &str| {
            let credentials = Credentials {
                client_id: client_id.to_owned(),
                username: Some(user.to_owned()),
                password: Some(SecretBytes(Bytes::copy_from_slice(password.as_bytes()))),
                certificate: None,
                peer: peer.to_owned(),
                listener: Arc::new("l".to_owned()),
            };
            digester.login(format!("{credentials:?}{password}").as_bytes(), &credentials)
        };
        let mut recently = AllowedRecently::new();
        let ann = keys("c", "ann", "right", "127.0.0.1:1");
        recently.insert(&ann);
        let moved = keys("c", "ann", "right", "127.0.0.2:2");
        assert_ne!(moved.question, ann.question);
        assert_eq!(recently.history(&moved), QuestionHistory::Proved);
        assert_eq!(recently.history(&keys("c", "ann", "guess", "127.0.0.1:1")), QuestionHistory::Named);
        assert_eq!(recently.history(&keys("c", "annr", "ight", "127.0.0.1:1")), QuestionHistory::Unknown);
        assert_eq!(recently.history(&keys("ca", "nn", "right", "127.0.0.1:1")), QuestionHistory::Unknown);
    }
}
