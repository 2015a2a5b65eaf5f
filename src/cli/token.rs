//! `mqtt-server token`: the tokens of backends and operators, on a terminal.

use std::{error::Error, io::Write as _, path::Path, process::ExitCode};

use access::backends::{Scope, TokenGrant, TokenLineError, Tokens, format_time, hash, mint, parse_span};

use super::commands::TokenCommand;
use auth::backends::{
    file::{self, FileError},
    now,
};

/// Runs a command and shows what came of it.
pub(crate) fn run(command: &TokenCommand) -> Result<ExitCode, Box<dyn Error>> {
    let mut out = std::io::stdout();
    match command {
        TokenCommand::Create { role, topics, devices, expires, note, file } => {
            let created = now();
            let expires = match expires.as_str() {
                "never" => None,
                span => Some(created.saturating_add(parse_span(span)?)),
            };
            let (token, id) = mint()?;
            let scope = Scope::new(topics.clone(), devices.clone())?;
            let (note, hash) = (note.clone(), hash(&token));
            let grant = TokenGrant { id, role: *role, scope, created, expires, note, hash };
            file::edit(file, |text| {
                Tokens::with(text, &grant).map_err(|errors| FileError::Lines(lines(file, errors)))
            })?;
            writeln!(
                std::io::stderr(),
                "{}\nThe token is shown this once; the file has its hash:",
                about(&grant)
            )?;
            writeln!(out, "{token}")?;
        }
        TokenCommand::List { file } => {
            let tokens = file::read(file).map_err(|problems| problems.join("\n"))?;
            for grant in tokens.list() {
                let over = if grant.is_expired(now()) { " (expired)" } else { "" };
                writeln!(out, "{}{over}", about(grant))?;
            }
        }
        TokenCommand::Revoke { id, file } => {
            file::edit(file, |text| {
                Tokens::without(text, id).ok_or_else(|| {
                    FileError::Lines(vec![format!(
                        "no token {id} in {}; 'token list' shows them",
                        file.display()
                    )])
                })
            })?;
            writeln!(out, "{id} is revoked")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn lines(file: &Path, errors: Vec<TokenLineError>) -> Vec<String> {
    errors.into_iter().map(|error| format!("{}: {error}", file.display())).collect()
}

fn about(grant: &TokenGrant) -> String {
    let list = |name: &str, list: Option<&[Box<str>]>| match list {
        Some(list) => format!("{name} {}", list.join(",")),
        None => format!("all {name}"),
    };
    let expires =
        grant.expires.map_or_else(|| "never expires".to_owned(), |at| format!("expires {}", format_time(at)));
    let note = if grant.note.is_empty() { String::new() } else { format!("  {}", grant.note) };
    format!(
        "{}  {:<9}  {}, {}  created {}, {expires}{note}",
        grant.id,
        grant.role,
        list("topics", grant.scope.topics()),
        list("devices", grant.scope.devices()),
        format_time(grant.created),
    )
}
