//! Times as people read them in files: `2026-11-23T09:30:00Z`, seconds since 1970 here.

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

const DAY: i64 = 24 * 3600;

/// Seconds since 1970 as text, in UTC; the last second of the year 9999 for all beyond.
pub fn format_time(seconds: u64) -> String {
    let time =
        i64::try_from(seconds).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    let text = time.and_then(|time| time.format(&Rfc3339).ok());
    text.unwrap_or_else(|| "9999-12-31T23:59:59Z".to_owned())
}

/// Seconds since 1970 from a time as RFC 3339 writes it; `None` if it is not one, or before 1970.
pub(crate) fn parse_time(text: &str) -> Option<u64> {
    let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    u64::try_from(time.unix_timestamp()).ok()
}

/// Seconds of a span as `90d`, `12h`, `30m` or `45s`; at most 100 years.
///
/// # Errors
/// What to write.
pub fn parse_span(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is not a span from 1s to 36500d; write it like 90d, 12h, 30m or 45s");
    let unit = text.chars().last().ok_or_else(wrong)?;
    let each = match unit {
        'd' => DAY,
        'h' => 3600,
        'm' => 60,
        's' => 1,
        _ => return Err(wrong()),
    };
    let number = text.strip_suffix(unit).filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()));
    let number = number.and_then(|digits| digits.parse::<u32>().ok()).ok_or_else(wrong)?;
    let seconds = i64::from(number) * each;
    let seconds = u64::try_from(seconds).ok().filter(|_| (1..=36_500 * DAY).contains(&seconds));
    seconds.ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_are_written() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_795_426_200, "2026-11-23T09:30:00Z"),
            (253_402_300_799, "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(format_time(seconds), text);
            assert_eq!(parse_time(text), Some(seconds));
        }
        assert_eq!(parse_time("2026-11-23T10:30:00+01:00"), Some(1_795_426_200));
        assert_eq!(format_time(u64::MAX), "9999-12-31T23:59:59Z");
        for text in ["", "2026-02-30T00:00:00Z", "2026-11-23", "1969-12-31T23:59:59Z"] {
            assert_eq!(parse_time(text), None, "{text}");
        }
    }

    #[test]
    fn spans_have_a_unit_and_an_end() {
        assert_eq!(parse_span("90d"), Ok(7_776_000));
        assert_eq!(
            (parse_span("12h"), parse_span("30m"), parse_span("45s")),
            (Ok(43_200), Ok(1_800), Ok(45))
        );
        for text in ["", "d", "90", "0d", "-1d", "1y", "99999999999d", "36501d", "1é"] {
            assert!(parse_span(text).is_err(), "{text}");
        }
    }
}
