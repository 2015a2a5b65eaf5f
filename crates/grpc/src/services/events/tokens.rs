//! Resume tokens: the place of an event, enciphered, since whoever may not know of a device could count what it does by two of
//! them. The key is this process's, as places are: those of another are strange here.

use std::sync::LazyLock;

use aws_lc_rs::{
    cipher::{AES_128, AES_128_KEY_LEN, DecryptingKey, DecryptionContext, EncryptingKey, UnboundCipherKey},
    rand,
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use broker::EventPlace;

use grpc_messages::status::Error;

/// Tokens of this process.
pub(super) static TOKENS: LazyLock<PlaceTokens> = LazyLock::new(PlaceTokens::new);

/// Makes tokens and reads them. One place is one block, and no two places are the same.
pub(super) struct PlaceTokens {
    keys: Option<(EncryptingKey, DecryptingKey)>,
}

impl PlaceTokens {
    fn new() -> Self {
        let mut key = [0; AES_128_KEY_LEN];
        Self { keys: rand::fill(&mut key).and_then(|()| keys(&key)).ok() }
    }

    /// The token of a place. Empty where the system gives no random numbers.
    pub(super) fn token(&self, place: EventPlace) -> String {
        let mut block = (u128::from(place.run) << 64 | u128::from(place.number)).to_be_bytes();
        let Some((encrypting, _)) = &self.keys else { return String::new() };
        match encrypting.encrypt(&mut block) {
            Ok(_) => URL_SAFE_NO_PAD.encode(block),
            Err(_) => String::new(),
        }
    }

    /// The place of a token; none if it is empty. One of another process gives a place that nobody knows.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn place(&self, token: &str) -> Result<Option<EventPlace>, Error> {
        if token.is_empty() {
            return Ok(None);
        }
        let invalid = || Error::invalid("resume_token", "is not a token of this RPC");
        let block = URL_SAFE_NO_PAD.decode(token).map_err(|_| invalid())?;
        let mut block: [u8; 16] = block.try_into().map_err(|_| invalid())?;
        let (_, decrypting) = self.keys.as_ref().ok_or(Error::OldToken)?;
        decrypting.decrypt(&mut block, DecryptionContext::None).map_err(|_| invalid())?;
        let place = u128::from_be_bytes(block);
        Ok(Some(EventPlace { run: (place >> 64) as u64, number: place as u64 }))
    }
}

fn keys(key: &[u8]) -> Result<(EncryptingKey, DecryptingKey), aws_lc_rs::error::Unspecified> {
    let bound = || UnboundCipherKey::new(&AES_128, key);
    Ok((EncryptingKey::ecb(bound()?)?, DecryptingKey::ecb(bound()?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_tells_its_place_to_its_own_process_only() {
        let tokens = PlaceTokens::new();
        let place = EventPlace { run: 7, number: 123_456 };
        let token = tokens.token(place);
        assert_eq!(tokens.place(&token), Ok(Some(place)));
        assert_eq!(tokens.place(""), Ok(None));
        let next = tokens.token(EventPlace { number: 123_457, ..place });
        assert_ne!(next[..8], token[..8], "nothing to be counted");
        assert_ne!(PlaceTokens::new().place(&token).unwrap().unwrap().run, 7);
        for bad in ["?", "AAAA", &token[1..]] {
            assert!(tokens.place(bad).is_err(), "{bad}");
        }
    }
}
