//! Deadlines of calls.

use std::{future::Future, time::Duration};

use tokio::time::{Instant, timeout_at};
use tonic::metadata::MetadataMap;

use grpc_messages::status::Error;

/// Kept back of a caller's deadline, so that our answer comes before its own.
const DEADLINE_MARGIN: Duration = Duration::from_millis(250);

/// Returns the deadline of a call: its grpc-timeout less a margin, or the default.
pub(crate) fn deadline(metadata: &MetadataMap, default: Duration) -> Instant {
    let timeout = metadata.get("grpc-timeout").and_then(|value| value.to_str().ok()).and_then(grpc_timeout);
    let span = timeout.map_or(default, |timeout| timeout - (timeout / 10).min(DEADLINE_MARGIN));
    // A peer may ask for more than the clock can count.
    Instant::now() + span.min(Duration::from_secs(24 * 3600))
}

/// The value of a grpc-timeout header: at most 8 digits and a unit.
fn grpc_timeout(text: &str) -> Option<Duration> {
    let unit = text.len().checked_sub(1).filter(|&at| text.is_char_boundary(at))?;
    let (digits, unit) = text.split_at(unit);
    if digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(value * 3600)),
        "M" => Some(Duration::from_secs(value * 60)),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}

/// Waits for `answer` until the call's deadline; later the call fails with [`Error::Late`].
pub(crate) async fn within<T>(
    metadata: &MetadataMap,
    default: Duration,
    answer: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    timeout_at(deadline(metadata, default), answer).await.unwrap_or(Err(Error::Late))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeouts_are_read_as_the_protocol_says() {
        let cases = [
            ("1H", Some(Duration::from_secs(3600))),
            ("99999999S", Some(Duration::from_secs(99_999_999))),
            ("250m", Some(Duration::from_millis(250))),
            ("7u", Some(Duration::from_micros(7))),
            ("", None),
            ("m", None),
            ("999999999S", None),
            ("-1S", None),
            ("1é", None),
        ];
        for (text, expected) in cases {
            assert_eq!(grpc_timeout(text), expected, "{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_with_a_deadline_is_answered_before_it_whatever_the_store_does() {
        let mut metadata = MetadataMap::new();
        metadata.insert("grpc-timeout", "200m".parse().unwrap());
        let began = Instant::now();
        let never = std::future::pending::<Result<(), Error>>();
        assert_eq!(within(&metadata, Duration::from_secs(30), never).await, Err(Error::Late));
        assert!(began.elapsed() < Duration::from_millis(200));
    }
}
