//! Durations and sizes as people write them: `30s`, `2 MB`.
//!
//! Written here, and not taken from humantime and bytesize, because configurations mean what they say: humantime 2.4
//! also reads `1w`, `1M` (a month), `1.5s` and a bare `0` and prints `1m 30s` for 90 seconds; bytesize 2.7 reads `2 mb`,
//! turns a number that is too large into the largest there is, and prints `64.0 KiB`. To refuse that and to print what
//! can be read again would take the table of units all the same, which is most of the forty lines they would save.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number of bytes; text such as `64 KiB`, `2 MB` or `1000`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub usize);

/// A duration; text such as `500ms`, `30s`, `5m`, `1h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

impl Span {
    /// Seconds, rounded up.
    pub fn secs(self) -> u32 {
        u32::try_from(self.millis().div_ceil(1000)).unwrap_or(u32::MAX)
    }

    /// Whole milliseconds, saturating.
    pub fn millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.iter().find(|(factor, _)| self.0 >= *factor && self.0.is_multiple_of(*factor)) {
            Some((factor, unit)) => write!(f, "{} {unit}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")];
        match units.iter().find(|(factor, _)| millis >= *factor && millis.is_multiple_of(*factor)) {
            Some((factor, unit)) => write!(f, "{}{unit}", millis / factor),
            None => write!(f, "{millis}ms"),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = split(text);
        let factor: usize = match unit {
            "" | "B" => 1,
            "KB" => 1_000,
            "KiB" => 1 << 10,
            "MB" => 1_000_000,
            "MiB" => 1 << 20,
            "GB" => 1_000_000_000,
            "GiB" => 1 << 30,
            _ => {
                return Err(format!("size '{text}' has an unknown unit; use B, KB, KiB, MB, MiB, GB or GiB"));
            }
        };
        let number: usize = number
            .parse()
            .map_err(|_| format!("size '{text}' is not a whole number and a unit, such as '2 MiB'"))?;
        number.checked_mul(factor).map(Self).ok_or_else(|| format!("size '{text}' is too large"))
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = split(text);
        let millis: u64 = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(format!("duration '{text}' needs a unit: ms, s, m, h or d")),
        };
        let number: u64 = number
            .parse()
            .map_err(|_| format!("duration '{text}' is not a whole number and a unit, such as '30s'"))?;
        number
            .checked_mul(millis)
            .map(|ms| Self(Duration::from_millis(ms)))
            .ok_or_else(|| format!("duration '{text}' is too large"))
    }
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (&text[..end], text[end..].trim())
}

struct TextOrNumber<T>(std::marker::PhantomData<T>);

impl<T: FromStr<Err = String>> de::Visitor<'_> for TextOrNumber<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text with a unit, such as \"2 MiB\" or \"30s\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        number.to_string().parse().map_err(E::custom)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrNumber(std::marker::PhantomData))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrNumber(std::marker::PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations_are_read_as_written() {
        assert_eq!("2 MiB".parse(), Ok(ByteSize(2 << 20)));
        assert_eq!("1000".parse(), Ok(ByteSize(1000)));
        assert_eq!("30s".parse(), Ok(Span(Duration::from_secs(30))));
        assert_eq!("500ms".parse(), Ok(Span(Duration::from_millis(500))));
        assert_eq!(ByteSize(3 << 20).to_string(), "3 MiB");
        assert_eq!(ByteSize(1001).to_string(), "1001");
        assert_eq!(Span(Duration::from_secs(90)).to_string(), "90s");
        assert!("30".parse::<Span>().is_err());
        assert!("2 XB".parse::<ByteSize>().is_err());
        assert!("99999999999 GiB".parse::<ByteSize>().is_err());
    }
}
