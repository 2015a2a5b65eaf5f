//! Functions that a fuzzer can call: what devices send and what files have when somebody logs in.

use aws_lc_rs::hmac;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};

use crate::{
    jwt::{self, Expected, SigningKeys},
    passwords::{self, PasswordDigest, Passwords},
    scram,
};

/// Lines of password files: what is read is written as it was, and changing one user leaves the others.
///
/// # Panics
/// If that does not hold.
pub fn fuzz_passwords(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    for line in text.lines() {
        let hash = line.split_once(':').map_or(line, |(_, hash)| hash);
        if let Ok(hash) = PasswordDigest::parse(hash) {
            let again = PasswordDigest::parse(&hash.to_string());
            assert_eq!(again.as_ref(), Ok(&hash));
        }
    }
    let Ok(users) = Passwords::parse(text) else { return };
    let keys = PasswordDigest::Scram(scram::ScramKeys::new(b"p", b"s", 1));
    let user = "somebody new";
    if users.get(user).is_some() {
        return;
    }
    let with = passwords::with_user(text, user, &keys);
    let changed = Passwords::parse(&with).expect("one good line more");
    assert_eq!((changed.len(), changed.get(user)), (users.len() + 1, Some(&keys)));
    let without = passwords::without_user(&with, user).expect("the user that was added");
    assert_eq!(Passwords::parse(&without).map(|users| users.len()), Ok(users.len()));
}

/// Key sets, tokens as they come, and claims of tokens that are well signed.
///
/// # Panics
/// If a token is taken that has expired or that nobody has signed.
pub fn fuzz_jwt(data: &[u8]) {
    const SECRET: &[u8] = &[7; jwt::MIN_SECRET];
    const NOW: u64 = 1_800_000_000;
    let expected = Expected {
        username: "sub".to_owned(),
        groups: "a.b".to_owned(),
        tenant: "t".to_owned(),
        ..Expected::default()
    };
    let keys = SigningKeys::from_secret(SECRET).expect("a secret that is long enough");
    let _ = SigningKeys::from_pem(data);
    if let Ok(text) = std::str::from_utf8(data) {
        if let Ok(read) = SigningKeys::from_jwks(text) {
            assert!((1..=jwt::MAX_KEYS).contains(&read.len()));
        }
        let unsigned = jwt::verify(text, &SigningKeys::default(), &expected, NOW);
        assert!(unsigned.is_err());
        let _ = jwt::verify(text, &keys, &expected, NOW);
    }
    let signed = format!("{}.{}", URL_SAFE_NO_PAD.encode(r#"{"alg":"HS256"}"#), URL_SAFE_NO_PAD.encode(data));
    let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, SECRET), signed.as_bytes());
    let token = format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature.as_ref()));
    if let Ok(verified) = jwt::verify(&token, &keys, &expected, NOW) {
        assert!(verified.expires.is_none_or(|at| at > NOW));
        assert!(verified.principal.claims.len() <= 64);
    }
}

/// Both messages of a client, the first up to the first line feed.
///
/// # Panics
/// If somebody gets in without the password.
pub fn fuzz_scram(data: &[u8]) {
    let at = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (first, last) = (&data[..at], data.get(at + 1..).unwrap_or_default());
    let keys = scram::ScramKeys::new(b"pencil", b"salt", 1);
    for known in [true, false] {
        let mock = scram::MockScram { secret: b"secret", shapes: &[] };
        let find = |_: &str| known.then(|| keys.clone());
        let Ok((exchange, answer)) = scram::Exchange::start(first, "fresh", &mock, find) else {
            continue;
        };
        assert!(answer.starts_with(b"r="));
        assert!(exchange.finish(last).is_err(), "nobody knows the password");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_do_no_harm(data in proptest::collection::vec(any::<u8>(), 0..400)) {
            fuzz_passwords(&data);
            fuzz_jwt(&data);
            fuzz_scram(&data);
        }

        #[test]
        fn what_is_nearly_right_does_no_harm(
            pick in 0_usize..8,
            at in 0_usize..200,
            with in any::<char>(),
            claim in -3_i64..3,
        ) {
            let texts = [
                "a:$7$101$c2FsdA==$AAAAAAAAAAAAAAAAAAAAAAAAAAA=\n#x\nb:y".to_owned(),
                "a:$argon2id$v=19$m=64,t=1,p=1$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA\n".to_owned(),
                format!("a:{}\n", scram::ScramKeys::new(b"p", b"salt", 9)),
                "n,,n=user,r=abc\nc=biws,r=abcfresh,p=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=".to_owned(),
                format!("{{\"exp\": {}, \"sub\": [1, \"a\"], \"a\": {{\"b\": [true]}}}}", 1_800_000_000 + claim),
                "{\"exp\": 1e300, \"nbf\": -0.5, \"aud\": {}}".to_owned(),
                "{\"keys\": [{\"kty\": \"OKP\", \"crv\": \"Ed25519\", \"x\": \"AAAA\"}, {\"kty\": \"EC\", \"crv\": \"P-256\", \"x\": \"\", \"y\": \"\"}]}".to_owned(),
                "eyJhbGciOiJub25lIn0.e30.".to_owned(),
            ];
            let mut text: Vec<char> = texts[pick].chars().collect();
            for changed in [false, true] {
                if changed {
                    let at = at % text.len();
                    text[at] = with;
                }
                let data = text.iter().collect::<String>();
                fuzz_passwords(data.as_bytes());
                fuzz_jwt(data.as_bytes());
                fuzz_scram(data.as_bytes());
            }
        }
    }
}
