//! The lines of a configuration and of the files that it includes, read as Mosquitto 2.0 and 2.1 read them.
//!
//! A line is split at blanks, and at nothing else: a tab belongs to the word that it is in. Truth values and numbers
//! are the first word after the name, so that a comment may follow; texts are the rest of the line, `#` included.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// One option.
pub(super) struct OptionLine {
    pub(super) file: PathBuf,
    pub(super) number: usize,
    pub(super) key: String,
    /// The rest of the line after the name and the blanks that follow it; empty if there is nothing.
    pub(super) value: String,
    /// The file is not the main one.
    pub(super) included: bool,
}

impl OptionLine {
    /// File and line, for people.
    pub(super) fn place(&self) -> String {
        format!("{}:{}", self.file.display(), self.number)
    }

    /// The line as it was written, on one line and without control characters.
    pub(super) fn text(&self) -> String {
        shown(&format!("{} {}", self.key, self.value))
    }

    /// The words after the name.
    pub(super) fn words(&self) -> impl Iterator<Item = &str> {
        self.value.split(' ').filter(|word| !word.is_empty())
    }

    /// The first word after the name; empty if there is none.
    pub(super) fn word(&self) -> &str {
        self.words().next().unwrap_or_default()
    }

    /// The first word as a truth value: `true`, `1`, `false` or `0`, and no other spelling.
    pub(super) fn flag(&self) -> Option<bool> {
        flag(self.word())
    }

    /// The first word as a decimal number. One with a zero in front is none: for Mosquitto 2.1 it is octal, for 2.0 decimal.
    pub(super) fn number(&self) -> Option<i64> {
        number(self.word())
    }

    /// The whole rest as a text without blanks around; `None` if it is empty, or has a control character or a byte that is not
    /// UTF-8 in it.
    pub(super) fn rest(&self) -> Option<&str> {
        text(&self.value)
    }
}

/// A text without blanks around; `None` if nothing is left, or a character that no value of ours can have.
pub(super) fn text(value: &str) -> Option<&str> {
    let text = value.trim_matches(|letter: char| letter.is_ascii_whitespace());
    let good = |letter: char| !letter.is_control() && letter != char::REPLACEMENT_CHARACTER;
    (!text.is_empty() && text.chars().all(good)).then_some(text)
}

/// A truth value as Mosquitto spells it.
pub(super) fn flag(word: &str) -> Option<bool> {
    match word {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}

/// A decimal number as every version of Mosquitto reads it.
pub(super) fn number(word: &str) -> Option<i64> {
    let digits = word.strip_prefix('-').unwrap_or(word);
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    word.parse().ok().filter(|_| plain && (digits.len() == 1 || !digits.starts_with('0')))
}

/// For people: control characters as `?`.
pub(super) fn shown(text: &str) -> String {
    text.trim().chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

/// Reads a file, and in the place of each `include_dir` the files of that directory whose names end with `.conf`, in the
/// order of Mosquitto: by letter, capitals before the small ones of the same letter.
///
/// # Errors
/// A file or directory that cannot be read.
pub(super) fn read(file: &Path) -> Result<Vec<OptionLine>, String> {
    let mut lines = Vec::new();
    for line in of_file(file, false)? {
        match line.rest() {
            Some(path) if line.key == "include_dir" => {
                for included in directory(Path::new(path))? {
                    lines.extend(of_file(&included, true)?);
                }
            }
            _ => lines.push(line),
        }
    }
    Ok(lines)
}

fn of_file(file: &Path, included: bool) -> Result<Vec<OptionLine>, String> {
    let bytes = fs::read(file).map_err(|error| format!("read {}: {error}", file.display()))?;
    let text = String::from_utf8_lossy(&bytes);
    let numbered = text.split('\n').enumerate();
    let options = numbered.filter(|(_, line)| !line.trim().is_empty() && !line.trim().starts_with('#'));
    let options = options.map(|(number, line)| {
        let line = line.trim_end_matches('\r').trim_start_matches(' ');
        let (key, value) = line.split_once(' ').unwrap_or((line, ""));
        OptionLine {
            file: file.to_owned(),
            number: number + 1,
            key: key.to_owned(),
            value: value.trim_start_matches(' ').to_owned(),
            included,
        }
    });
    Ok(options.collect())
}

fn directory(path: &Path) -> Result<Vec<PathBuf>, String> {
    let unread = |error| format!("read {}: {error}", path.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(unread)? {
        let name = entry.map_err(unread)?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".conf") {
            names.push(name);
        }
    }
    names.sort_by_cached_key(|name| (name.to_lowercase(), name.clone()));
    Ok(names.into_iter().map(|name| path.join(name)).collect())
}
