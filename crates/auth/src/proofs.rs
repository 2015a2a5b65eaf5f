//! Passwords that were proved lately: a device that comes back with the same one costs no hash, so that all devices of a site can
//! come back at once.
//!
//! A proof is a digest of user, password and the user's line in the file, under a key that this process has made up. So it ends
//! with the line: a hit says that the password has been checked against the hash that the file has now. Passwords are not
//! kept. Bans are looked at before, as for every login.

use std::{fmt::Write as _, sync::Arc, time::Duration};

use access::{
    passwords::{PasswordDigest, Passwords},
    remote::{Cache, CachedAnswer},
};
use aws_lc_rs::{error::Unspecified, hmac, rand};
use broker::{Account, Charge, MemoryKind};
use gateway_core::{Timestamp, clock};
use parking_lot::Mutex;

/// Bytes that a proof takes, with its place in the order in which they came.
const ENTRY: usize = 192;
/// Longest user name and password of which a proof is kept: shards make digests of them.
const LONGEST: usize = 1_024;

/// See the module.
pub(super) struct Proofs {
    secret: hmac::Key,
    most: usize,
    lifetime: Duration,
    kept: Mutex<Kept>,
}

struct Kept {
    proofs: Cache<()>,
    /// None before there is an account, and then nothing is kept.
    charge: Option<Charge>,
}

/// The digest of a user, a password and the user's line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Proof([u8; 32]);

impl Proofs {
    /// Keeps at most so many, each for `lifetime` or up to a quarter less; none if one of them is zero.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub(super) fn new(most: usize, lifetime: Duration) -> Result<Self, Unspecified> {
        let secret = hmac::Key::generate(hmac::HMAC_SHA256, &rand::SystemRandom::new())?;
        let kept = Mutex::new(Kept { proofs: Cache::new(most), charge: None });
        Ok(Self { secret, most, lifetime, kept })
    }

    /// Charges what is kept to this account from now on.
    pub(super) fn charge_to(&self, account: &Arc<Account>) {
        self.kept.lock().charge = Some(Charge::new(account, MemoryKind::Logins));
    }

    /// The digest of a login; `None` if no proof of it is ever kept. Costs the same whether or not there is such a user.
    pub(super) fn of(&self, users: &Passwords, user: &str, password: &[u8]) -> Option<Proof> {
        if self.most == 0 || self.lifetime.is_zero() || user.len().max(password.len()) > LONGEST {
            return None;
        }
        let mut line = String::new();
        let hash: &PasswordDigest = users.get_or_decoy(user);
        let _ = write!(line, "{hash}");
        let mut digest = hmac::Context::with_key(&self.secret);
        for part in [user.as_bytes(), password, line.as_bytes()] {
            digest.update(&(part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        let mut proof = [0; 32];
        proof.copy_from_slice(digest.sign().as_ref());
        Some(Proof(proof))
    }

    /// Returns whether this login was proved lately.
    pub(super) fn has(&self, proof: Proof) -> bool {
        matches!(self.kept.lock().proofs.get(&proof.0, clock::now()), CachedAnswer::Fresh(()))
    }

    /// The password is right: it was checked just now.
    pub(super) fn keep(&self, proof: Proof) {
        let mut jitter = [0];
        let _ = rand::fill(&mut jitter);
        self.keep_at(proof, clock::now(), jitter[0]);
    }

    fn keep_at(&self, proof: Proof, now: Timestamp, jitter: u8) {
        let mut kept = self.kept.lock();
        let bytes = (kept.proofs.len() + 1).min(self.most) * ENTRY;
        // While memory is short, hashes are made.
        if kept.charge.as_mut().is_some_and(|charge| charge.set(bytes)) {
            kept.proofs.put(proof.0, (), now, self.lifetime, Duration::ZERO, jitter);
        }
    }

    /// Forgets all of them.
    pub(super) fn clear(&self) {
        let mut kept = self.kept.lock();
        kept.proofs = Cache::new(self.most);
        if let Some(charge) = &mut kept.charge {
            charge.set(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use access::passwords::Scratch;

    use super::*;

    const HOUR: Duration = Duration::from_hours(1);

    fn users(password: &[u8]) -> Passwords {
        let hash = PasswordDigest::argon2id(password, b"0123456789abcdef", &mut Scratch::default());
        Passwords::parse(&format!("ann:{hash}\nbob:{hash}\n")).unwrap()
    }

    fn proofs(most: usize, account: &Arc<Account>) -> Proofs {
        let proofs = Proofs::new(most, HOUR).unwrap();
        proofs.charge_to(account);
        proofs
    }

    #[test]
    fn a_proof_ends_with_the_password_in_the_file_and_is_of_one_user() {
        let account = Arc::new(Account::new(16 << 20));
        let (proofs, before) = (proofs(10, &account), users(b"right"));
        let proof = proofs.of(&before, "ann", b"right").unwrap();
        assert!(!proofs.has(proof));
        proofs.keep(proof);
        assert!(proofs.has(proof));
        let of = |users: &Passwords, user: &str, password: &[u8]| {
            proofs.has(proofs.of(users, user, password).unwrap())
        };
        assert!(of(&users(b"right"), "ann", b"right"), "the same line after a reload");
        for (users, user, password) in [
            (&before, "ann", &b"wrong"[..]),
            (&before, "bob", b"right"),
            (&before, "annr", b"ight"),
            (&users(b"new"), "ann", b"right"),
            (&Passwords::default(), "ann", b"right"),
        ] {
            assert!(!of(users, user, password), "{user}");
        }
        proofs.clear();
        assert!(!proofs.has(proof));
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn proofs_are_bounded_in_number_memory_and_time() {
        let account = Arc::new(Account::new(16 << 20));
        let (all, users) = (proofs(100, &account), users(b"right"));
        let proof = |n: u32| all.of(&users, "ann", &n.to_be_bytes()).unwrap();
        for n in 0..1_000 {
            all.keep_at(proof(n), Timestamp(0), 0);
        }
        assert_eq!(account.held(MemoryKind::Logins), 100 * ENTRY);
        let fresh = |n: u32, at: u64| {
            matches!(all.kept.lock().proofs.get(&proof(n).0, Timestamp(at)), CachedAnswer::Fresh(()))
        };
        assert!(fresh(999, 3_599_999) && !fresh(999, 3_600_000) && !fresh(0, 0));
        assert!(all.of(&users, "ann", &[b'x'; LONGEST + 1]).is_none());
        // A sixteenth of the budget is for remembered logins.
        let small = Arc::new(Account::new(64 * ENTRY));
        let few = proofs(100, &small);
        for n in 0..100_u32 {
            few.keep(few.of(&users, "ann", &n.to_be_bytes()).unwrap());
        }
        assert_eq!(small.used(), 4 * ENTRY);
        let none = Proofs::new(0, HOUR).unwrap();
        assert!(none.of(&users, "ann", b"x").is_none());
    }
}
