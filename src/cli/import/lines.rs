//! The lines of a configuration and of the files that it includes.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// One option.
pub(super) struct OptionLine {
    pub(super) file: PathBuf,
    pub(super) number: usize,
    pub(super) key: String,
    /// What follows it, without blanks around; empty if nothing does.
    pub(super) value: String,
}

impl OptionLine {
    /// File and line, for people.
    pub(super) fn place(&self) -> String {
        format!("{}:{}", self.file.display(), self.number)
    }

    /// As it was written.
    pub(super) fn text(&self) -> String {
        format!("{} {}", self.key, self.value).trim_end().to_owned()
    }
}

/// Reads a file, and in the place of each `include_dir` the files of that directory whose names end with `.conf`, in the
/// order of Mosquitto: by letter, capitals before the small ones of the same letter.
///
/// # Errors
/// A file or directory that cannot be read.
pub(super) fn read(file: &Path) -> Result<Vec<OptionLine>, String> {
    let mut lines = Vec::new();
    for line in of_file(file)? {
        if line.key != "include_dir" {
            lines.push(line);
            continue;
        }
        for included in directory(Path::new(&line.value))? {
            lines.extend(of_file(&included)?);
        }
    }
    Ok(lines)
}

fn of_file(file: &Path) -> Result<Vec<OptionLine>, String> {
    let bytes = fs::read(file).map_err(|error| format!("read {}: {error}", file.display()))?;
    let text = String::from_utf8_lossy(&bytes);
    let numbered = text.lines().map(str::trim).enumerate();
    let options = numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let options = options.map(|(number, line)| {
        let (key, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let value = value.trim().chars().map(|letter| if letter.is_control() { '?' } else { letter });
        OptionLine { file: file.to_owned(), number: number + 1, key: key.to_owned(), value: value.collect() }
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
