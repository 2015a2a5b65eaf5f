//! The operator's file of bans, TOML.

use std::fmt;

use serde::Deserialize;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use toml::{Spanned, value::Datetime};

use super::{Ban, BanList, BanTarget};

/// Why a file of bans is not usable: everything that is wrong, each with its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BanFileError(pub Vec<String>);

impl fmt::Display for BanFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl std::error::Error for BanFileError {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BanFile {
    #[serde(default)]
    bans: Vec<Spanned<BanEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BanEntry {
    client_id: Option<String>,
    username: Option<String>,
    common_name: Option<String>,
    fingerprint: Option<String>,
    address: Option<String>,
    #[serde(default)]
    reason: String,
    expires: Option<Datetime>,
}

/// The bans of `text`, which has a table `[[bans]]` for each, at most `most`. `by` is who made them.
///
/// # Errors
/// Everything that is wrong with it, or that there are too many.
pub fn parse_bans(text: &str, by: &str, most: usize) -> Result<BanList, BanFileError> {
    let line = |at: usize| text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count() + 1;
    let file: BanFile = toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(1, |span| line(span.start));
        BanFileError(vec![format!("line {at}: {}", error.message())])
    })?;
    let mut problems = Vec::new();
    let mut list = BanList::new(most);
    for entry in file.bans {
        let at = line(entry.span().start);
        let read = entry.into_inner().read(by);
        if let Err(problem) = read.and_then(|ban| list.add(ban).map_err(|error| error.to_string())) {
            problems.push(format!("line {at}: {problem}"));
            if list.len() == most {
                break;
            }
        }
    }
    if problems.is_empty() { Ok(list) } else { Err(BanFileError(problems)) }
}

impl BanEntry {
    fn read(self, by: &str) -> Result<Ban, String> {
        let Self { client_id, username, common_name, fingerprint, address, reason, expires } = self;
        let mut named = [
            ("client_id", client_id),
            ("username", username),
            ("common_name", common_name),
            ("fingerprint", fingerprint),
            ("address", address),
        ]
        .into_iter()
        .filter_map(|(kind, value)| Some((kind, value?)));
        let (Some((kind, value)), None) = (named.next(), named.next()) else {
            return Err(
                "a ban has one of client_id, username, common_name, fingerprint and address".to_owned()
            );
        };
        let target = BanTarget::parse(kind, &value)?;
        let expires = expires.map(seconds).transpose()?;
        Ok(Ban { target, reason: reason.into(), by: by.into(), made: 0, expires })
    }
}

fn seconds(date: Datetime) -> Result<u64, String> {
    let date = date.to_string();
    let read = OffsetDateTime::parse(&date, &Rfc3339).map_err(|_| {
        format!("{date} is not a time with its zone; write it like 2030-12-31T00:00:00Z, without quotes")
    })?;
    Ok(u64::try_from(read.unix_timestamp()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_a_table_for_each_ban() {
        let text = "
[[bans]]
client_id = \"sensor-7\"
reason = \"stolen\"
expires = 2030-01-01T01:00:00+01:00

[[bans]]
address = \"2001:db8::/32\"
";
        let list = parse_bans(text, "bans.toml", 10).unwrap();
        assert_eq!(list.len(), 2);
        let ban = list.get(&BanTarget::ClientId("sensor-7".into())).unwrap();
        assert_eq!((&*ban.reason, &*ban.by, ban.expires), ("stolen", "bans.toml", Some(1_893_456_000)));
        assert!(list.of_address("2001:db8::1".parse().unwrap(), 0).is_some());
        assert!(parse_bans("", "", 10).unwrap().is_empty());
    }

    #[test]
    fn all_that_is_wrong_is_told_with_its_line() {
        let text = "
[[bans]]
client_id = \"a\"
username = \"b\"
[[bans]]
address = \"10.0.0.1/8\"
[[bans]]
client_id = \"c\"
expires = 2030-01-01
[[bans]]
client_id = \"fine\"
";
        let BanFileError(problems) = parse_bans(text, "", 10).unwrap_err();
        let lines: Vec<&str> = problems.iter().filter_map(|problem| problem.split(':').next()).collect();
        assert_eq!(lines, ["line 2", "line 5", "line 7"], "{problems:?}");
        for (text, line) in [("[[bans]]\nuser = \"x\"", "line 2"), ("\n\nx", "line 3"), ("[bans]", "line 1")]
        {
            let BanFileError(problems) = parse_bans(text, "", 10).unwrap_err();
            assert!(problems[0].starts_with(line), "{problems:?}");
        }
    }

    #[test]
    fn a_file_with_too_many_bans_is_refused() {
        let text: String = (0..5).map(|n| format!("[[bans]]\nclient_id = \"{n}\"\n")).collect();
        let BanFileError(problems) = parse_bans(&text, "", 3).unwrap_err();
        assert_eq!(problems, ["line 7: there are 3 bans already, which is the limit"]);
        assert_eq!(parse_bans(&text, "", 5).unwrap().len(), 5);
    }
}
