//! `mqtt-server import mosquitto.conf`: a configuration of Mosquitto as one of ours.
//!
//! Every line is either carried over, which the output says beside what became of it, or told on standard error: as a note
//! where nothing is lost, as a warning where the gateway will not do what Mosquitto did. Where in doubt the output lets in
//! fewer than Mosquitto: a listener whose guard cannot be carried over is a comment.

mod bridges;
mod draft;
mod lines;
mod listeners;
mod options;
mod rules;

use std::{
    error::Error,
    fs,
    io::{self, Write as _, stderr, stdout},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use access::passwords::Passwords;

use crate::config::ImportCommand;

/// What the rules are called where the user does not say.
const RULES: &str = "rules.toml";

/// What became of a line that is not simply carried over.
struct Remark {
    /// File and line, empty for what is about the whole.
    place: String,
    text: String,
    /// The gateway will not do what Mosquitto did.
    lost: bool,
}

/// What the files say.
struct Imported {
    config: String,
    /// A rules file, if there is an `acl_file`.
    rules: Option<String>,
    /// Passwords of bridges, each with the file that the configuration names for it.
    secrets: Vec<(PathBuf, String)>,
    told: Vec<Remark>,
}

/// Runs the command. Exit code 1 if anything was left out.
pub(crate) fn run(command: &ImportCommand) -> Result<ExitCode, Box<dyn Error>> {
    let ImportCommand { file, output, rules } = command;
    let beside =
        |name: &str| output.as_deref().map_or_else(|| PathBuf::from(name), |path| path.with_file_name(name));
    let rules_file = rules.clone().unwrap_or_else(|| beside(RULES));
    let lines = lines::read(file)?;
    let mut imported = options::convert(&lines, &rules_file);
    for password_file in password_files(&lines) {
        look_at_passwords(&password_file, &mut imported.told);
    }
    match output {
        None => {
            write!(stdout(), "{}", imported.config)?;
            if rules.is_none() && imported.rules.is_some() {
                imported.told.push(Remark {
                    place: String::new(),
                    text: format!(
                        "the rules of acl_file were not written; name a file with --rules, or write all with --output \
                         ({} is named in the output)",
                        rules_file.display()
                    ),
                    lost: true,
                });
            }
        }
        Some(path) => write_new(path, &imported.config)?,
    }
    for (file, secret) in &imported.secrets {
        match output {
            Some(_) => write_secret(file, secret)?,
            None => imported.told.push(Remark {
                place: String::new(),
                text: format!("a bridge's password was not written; put it into {}", file.display()),
                lost: true,
            }),
        }
    }
    if let (Some(text), true) = (&imported.rules, output.is_some() || rules.is_some()) {
        write_new(&rules_file, text)?;
    }
    for told in &imported.told {
        let kind = if told.lost { "warning" } else { "note" };
        let place = if told.place.is_empty() { String::new() } else { format!("{}: ", told.place) };
        writeln!(stderr(), "mqtt-server: {kind}: {place}{}", told.text)?;
    }
    let lost = imported.told.iter().filter(|told| told.lost).count();
    Ok(if lost == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn write_secret(path: &Path, secret: &str) -> Result<(), Box<dyn Error>> {
    write_with(path, secret, 0o600)
}

fn write_new(path: &Path, text: &str) -> Result<(), Box<dyn Error>> {
    write_with(path, text, 0o666)
}

/// Never over a file that is there.
fn write_with(path: &Path, text: &str, mode: u32) -> Result<(), Box<dyn Error>> {
    let file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = file.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            format!("{} is there already; nothing was written over it", path.display())
        }
        _ => format!("write {}: {error}", path.display()),
    })?;
    Ok(file.write_all(text.as_bytes())?)
}

fn password_files(lines: &[lines::OptionLine]) -> Vec<PathBuf> {
    let named =
        lines.iter().filter(|line| line.key == "password_file").map(|line| PathBuf::from(&line.value));
    let mut files: Vec<PathBuf> = named.collect();
    files.dedup();
    files
}

/// Hashes that the gateway does not take keep the whole file from being used: better told here.
fn look_at_passwords(path: &Path, told: &mut Vec<Remark>) {
    let mut tell = |text: String| told.push(Remark { place: String::new(), text, lost: true });
    match fs::read_to_string(path) {
        Err(error) => tell(format!("password_file {}: {error}; it could not be looked at", path.display())),
        Ok(text) => {
            for error in Passwords::parse(&text).err().unwrap_or_default() {
                tell(format!("{}: {error}", path.display()));
            }
        }
    }
}
