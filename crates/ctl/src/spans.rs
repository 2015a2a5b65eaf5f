//! Spans and points in time as people write them.

use std::time::{Duration, SystemTime};

use prost_types::Timestamp;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// `500ms`, `30s`, `10m`, `12h`, `90d`; a bare number is seconds.
pub(crate) fn span(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is not a span; write it like 500ms, 30s, 10m, 12h or 90d");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let seconds = match unit {
        "ms" => return Ok(Duration::from_millis(number)),
        "" | "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return Err(wrong()),
    };
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(wrong)
}

/// A point in time: RFC 3339, or `+SPAN` from now, or `-SPAN` before it.
pub(crate) fn moment(text: &str) -> Result<Timestamp, String> {
    #[expect(clippy::disallowed_methods, reason = "'in an hour' is by the wall clock")]
    let now = SystemTime::now();
    let at = match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(later), _) => now.checked_add(span(later)?),
        (None, Some(earlier)) => now.checked_sub(span(earlier)?),
        (None, None) => {
            let wrong =
                |_| format!("'{text}' is not a time; write it like 2026-01-31T12:00:00Z, or +90s from now");
            OffsetDateTime::parse(text, &Rfc3339).map(|at| Some(at.into())).map_err(wrong)?
        }
    };
    at.map(Timestamp::from).ok_or_else(|| format!("{text} is too far away"))
}

/// As the API takes it; spans of the command line are below its bounds.
pub(crate) fn proto(span: Duration) -> Option<prost_types::Duration> {
    span.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_units_and_nothing_else() {
        assert_eq!(span("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(span("90d"), Ok(Duration::from_secs(90 * 86_400)));
        assert_eq!(span("7"), Ok(Duration::from_secs(7)));
        for wrong in ["", "s", "1w", "-1s", "1.5s", "99999999999999999999s", "999999999999999999d"] {
            assert!(span(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_moment_is_a_date_or_a_distance_from_now() {
        assert_eq!(moment("1970-01-01T00:01:00Z"), Ok(Timestamp { seconds: 60, nanos: 0 }));
        assert!(moment("+1h").unwrap().seconds > moment("-1h").unwrap().seconds + 7_000);
        assert!(moment("tomorrow").is_err());
    }
}
