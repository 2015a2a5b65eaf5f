//! Verbs that need no gateway: profiles, completion, man pages.

use std::{io, path::PathBuf};

use clap::Subcommand;
use clap_complete::Shell;

use super::Verb;
use crate::{
    GatewayAddress,
    failure::Failure,
    output::{OutputWriter, or_dash},
    profile,
};

/// Gateways by name.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum ProfileVerb {
    /// Keeps --addr, --ca, --token, --cert, --key and --server-name under a name, in place of what was there
    Add {
        /// Its name
        name: String,
    },
    /// Makes a profile the one that is used when none is named
    Use {
        /// Its name
        name: String,
    },
    /// Lists the profiles; the current one has a star
    List,
    /// Removes a profile
    Remove {
        /// Its name
        name: String,
    },
}

/// Completion.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CompletionVerb {
    /// The shell
    shell: Shell,
}

/// Man pages.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ManVerb {
    /// The directory
    directory: PathBuf,
}

/// Verbs that run without a gateway.
pub(crate) enum LocalVerb {
    Profile(ProfileVerb),
    Completion(CompletionVerb),
    Man(ManVerb),
}

/// A verb that needs no gateway.
pub(crate) fn local(verb: &Verb) -> Option<LocalVerb> {
    match verb {
        Verb::Profile(verb) => Some(LocalVerb::Profile(verb.clone())),
        Verb::Completion(verb) => Some(LocalVerb::Completion(verb.clone())),
        Verb::Man(verb) => Some(LocalVerb::Man(verb.clone())),
        _ => None,
    }
}

/// Does it. `whole` is the definition of the program.
pub(crate) fn locally(
    verb: LocalVerb,
    connection: &GatewayAddress,
    out: &mut OutputWriter,
    mut whole: clap::Command,
) -> Result<(), Failure> {
    match verb {
        LocalVerb::Profile(verb) => profiles(verb, connection, out),
        LocalVerb::Completion(CompletionVerb { shell }) => {
            let name = whole.get_name().to_owned();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut whole, name.clone(), &mut script);
            out.bytes(repaired(shell, &name, &String::from_utf8_lossy(&script)).as_bytes())?;
            Ok(out.flush()?)
        }
        LocalVerb::Man(ManVerb { directory }) => {
            let wrong = |error: io::Error| Failure::Local(format!("{}: {error}", directory.display()));
            std::fs::create_dir_all(&directory).map_err(wrong)?;
            whole.build();
            clap_mangen::generate_to(whole, &directory).map_err(wrong)
        }
    }
}

/// The script with one spelling of the program's name. For bash `clap_complete` 4.6 walks through the words under one spelling of
/// a name with a hyphen and looks up what fits under another, so that nothing fits below the first word.
fn repaired(shell: Shell, program: &str, script: &str) -> String {
    match (shell, program.split_once('-')) {
        (Shell::Bash, Some(_)) => {
            script.replace(&program.replace('-', "__subcmd__"), &program.replace('-', "__"))
        }
        _ => script.to_owned(),
    }
}

fn profiles(verb: ProfileVerb, connection: &GatewayAddress, out: &mut OutputWriter) -> Result<(), Failure> {
    let path = profile::path()?;
    let mut all = profile::read(&path)?;
    let unknown = |name: &str| {
        Failure::Usage(format!(
            "no profile {name} in {}; 'mqtt-server ctl profile list' shows them",
            path.display()
        ))
    };
    match verb {
        ProfileVerb::Add { name } => {
            all.profiles.insert(name.clone(), profile::Profile::of(connection)?);
            all.current.get_or_insert(name);
            profile::write(&path, &all)?;
        }
        ProfileVerb::Use { name } => {
            if !all.profiles.contains_key(&name) {
                return Err(unknown(&name));
            }
            all.current = Some(name);
            profile::write(&path, &all)?;
        }
        ProfileVerb::Remove { name } => {
            all.profiles.remove(&name).ok_or_else(|| unknown(&name))?;
            all.current = all.current.filter(|current| *current != name);
            profile::write(&path, &all)?;
        }
        ProfileVerb::List => {
            let rows: Vec<Vec<String>> = all
                .profiles
                .iter()
                .map(|(name, profile)| {
                    let current = all.current.as_ref() == Some(name);
                    let path = |path: &Option<PathBuf>| {
                        or_dash(&path.as_ref().map_or_else(String::new, |path| path.display().to_string()))
                    };
                    let token = profile.token.as_deref().map_or("-", |token| match token.starts_with('@') {
                        true => token,
                        false => "yes",
                    });
                    let mark = if current { "*" } else { "" };
                    vec![
                        mark.to_owned(),
                        name.clone(),
                        or_dash(profile.addr.as_deref().unwrap_or_default()),
                        path(&profile.ca),
                        token.to_owned(),
                        path(&profile.cert),
                    ]
                })
                .collect();
            let columns = &["", "NAME", "ADDR", "CA", "TOKEN", "CERT"];
            out.plain_rows(columns, &["current", "name", "addr", "ca", "token", "cert"], &rows)?;
            out.flush()?;
        }
    }
    Ok(())
}
