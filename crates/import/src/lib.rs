//! `mqtt-server import mosquitto.conf`: a configuration of Mosquitto as one of ours.
//!
//! Every line is either carried over, which the output says beside what became of it, or told on standard error: as a note
//! where nothing is lost, as a warning where the gateway will not do what Mosquitto did. Where in doubt the output lets in
//! fewer than Mosquitto: a listener whose guard cannot be carried over is a comment, and so is one that Mosquitto would not have
//! opened, because it does not start with the file.

mod bridges;
mod draft;
mod finish;
mod guards;
mod imported;
mod limits;
mod lines;
mod listeners;
mod options;
mod passwords;
mod rules;
mod targets;
#[cfg(test)]
mod tests;

use std::{
    error::Error,
    io::{Write as _, stderr, stdout},
    path::{Path, PathBuf},
    process::ExitCode,
};

use self::{
    draft::quoted,
    imported::{ImportedFiles, Remark},
    options::OptionReader,
    targets::ImportTarget,
};
use clap::Args;

/// Name of the rules file if the user gives none.
const RULES: &str = "rules.toml";
/// Name of the file of accepted users, where the gateway does not take all of them.
const USERS: &str = "users.passwd";

/// The file to read and the files to write.
#[derive(Debug, Clone, Args)]
pub struct ImportCommand {
    /// The configuration file of Mosquitto
    file: PathBuf,
    /// File to write; standard output by default. An existing file is never overwritten
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// File for the rules of acl_file; by default rules.toml beside the output. An existing file is never overwritten
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
}

/// Reads what the lines say.
fn convert(lines: &[lines::OptionLine], rules_file: &Path) -> ImportedFiles {
    let mut reader = OptionReader::new();
    for line in lines {
        reader.line(line);
    }
    let source = lines.first().map_or_else(String::new, |line| line.file.display().to_string());
    reader.finish(&source, rules_file)
}

/// Runs the command. Exit code 1 if anything was left out.
///
/// # Errors
/// If a file cannot be read or written.
pub fn run(command: &ImportCommand) -> Result<ExitCode, Box<dyn Error>> {
    let ImportCommand { file, output, rules } = command;
    let beside =
        |name: &str| output.as_deref().map_or_else(|| PathBuf::from(name), |path| path.with_file_name(name));
    let rules_file = rules.clone().unwrap_or_else(|| beside(RULES));
    let mut imported = convert(&lines::read(file)?, &rules_file);
    let users_file = beside(USERS);
    let users = imported.password_file.clone().and_then(|path| passwords::usable(&path, &mut imported.told));
    if users.is_some() {
        let why = "the users of password_file whose lines can be used";
        imported.draft.set("auth", "password_file", quoted(&users_file.display().to_string()), why);
    }
    imported.check();
    let targets = targets(command, &mut imported, &rules_file, users.map(|text| (users_file, text)));
    let written = targets::write_all(&targets);
    tell(&imported.told)?;
    written?;
    if output.is_none() {
        write!(stdout(), "{}", imported.config())?;
    }
    let lost = imported.told.iter().any(|told| told.lost);
    Ok(if lost { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The files to be made. With the configuration on standard output only the rules are, if a file was named for them; of
/// the others it is told that they are missing.
fn targets(
    command: &ImportCommand,
    imported: &mut ImportedFiles,
    rules_file: &Path,
    users: Option<(PathBuf, String)>,
) -> Vec<ImportTarget> {
    let mut targets = Vec::new();
    let whole = command.output.is_some();
    if let Some(path) = &command.output {
        targets.push(ImportTarget { path: path.clone(), text: imported.config(), secret: false });
    }
    match imported.rules.clone() {
        Some(text) if whole || command.rules.is_some() => {
            targets.push(ImportTarget { path: rules_file.to_owned(), text, secret: false });
        }
        Some(_) => imported.lost(format!(
            "the rules of acl_file were not written; name a file with --rules, or write all with --output ({} is named in the \
             output)",
            rules_file.display()
        )),
        None => {}
    }
    let secrets = imported.secrets.clone().into_iter().map(|secret| (secret, "a bridge's password was"));
    let users = users.into_iter().map(|users| (users, "the users that can be taken were"));
    for ((path, text), what) in secrets.chain(users).collect::<Vec<_>>() {
        match whole {
            true => targets.push(ImportTarget { path, text, secret: true }),
            false => imported
                .lost(format!("{what} not written; write all with --output, or make {}", path.display())),
        }
    }
    targets
}

fn tell(told: &[Remark]) -> std::io::Result<()> {
    let mut stderr = stderr().lock();
    for told in told {
        let kind = if told.lost { "warning" } else { "note" };
        let place = if told.place.is_empty() { String::new() } else { format!("{}: ", told.place) };
        writeln!(stderr, "mqtt-server: {kind}: {place}{}", told.text)?;
    }
    Ok(())
}
