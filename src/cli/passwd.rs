//! `mqtt-server passwd`: a file of users and password hashes, on a terminal.

use std::{
    error::Error,
    fs,
    io::{self, BufRead as _, IsTerminal as _, Write as _, stdin, stdout},
    path::Path,
    process::ExitCode,
};

use access::{
    passwords::{self, PasswordDigest, Passwords, SALT_LEN, Scratch},
    scram,
};
use edge::replace::replace;

use super::commands::PasswdCommand;

/// Runs a command and shows what came of it.
pub(crate) fn run(command: &PasswdCommand) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        PasswdCommand::Add { file, user, scram } => add(file, user, *scram),
        PasswdCommand::Remove { file, user } => remove(file, user),
        PasswdCommand::Check { file, user } => check(file, user),
    }
}

fn add(file: &Path, user: &str, for_scram: bool) -> Result<ExitCode, Box<dyn Error>> {
    if !passwords::is_user(user) {
        return Err("not a user name; use no colon, no control characters, and no # in front".into());
    }
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(unread(file, &error).into()),
    };
    let password = password(true)?;
    let mut salt = [0; SALT_LEN];
    aws_lc_rs::rand::fill(&mut salt).map_err(|_| "the system gives no random numbers")?;
    let hash = if for_scram {
        PasswordDigest::Scram(scram::ScramKeys::new(password.as_bytes(), &salt, scram::ITERATIONS))
    } else {
        PasswordDigest::argon2id(password.as_bytes(), &salt, &mut Scratch::default())
    };
    replace(file, &passwords::with_user(&text, user, &hash))?;
    writeln!(stdout(), "{user} is in {}", file.display())?;
    Ok(ExitCode::SUCCESS)
}

fn remove(file: &Path, user: &str) -> Result<ExitCode, Box<dyn Error>> {
    let text = fs::read_to_string(file).map_err(|error| unread(file, &error))?;
    let Some(text) = passwords::without_user(&text, user) else {
        return Err(format!("{user} is not in {}", file.display()).into());
    };
    replace(file, &text)?;
    writeln!(stdout(), "{user} is no longer in {}", file.display())?;
    Ok(ExitCode::SUCCESS)
}

fn check(file: &Path, user: &str) -> Result<ExitCode, Box<dyn Error>> {
    let text = fs::read_to_string(file).map_err(|error| unread(file, &error))?;
    let users = Passwords::parse(&text).map_err(|errors| {
        let lines: Vec<String> = errors.iter().map(|error| format!("{}: {error}", file.display())).collect();
        lines.join("\n")
    })?;
    let Some(hash) = users.get(user) else {
        return Err(format!("{user} is not in {}", file.display()).into());
    };
    let right = hash.verify(password(false)?.as_bytes(), &mut Scratch::default());
    writeln!(stdout(), "the password is {}", if right { "right" } else { "wrong" })?;
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn unread(file: &Path, error: &io::Error) -> String {
    format!("read {}: {error}", file.display())
}

/// From the terminal without showing it, twice if it is `new`; or the first line of standard input.
fn password(new: bool) -> Result<String, Box<dyn Error>> {
    let password = if stdin().is_terminal() {
        let password = rpassword::prompt_password("Password: ")?;
        if new && rpassword::prompt_password("Again: ")? != password {
            return Err("the two are not the same; nothing was changed".into());
        }
        password
    } else {
        let mut line = String::new();
        stdin().lock().read_line(&mut line)?;
        line.trim_end_matches(['\r', '\n']).to_owned()
    };
    if password.is_empty() {
        return Err("no password; type one, or write it to standard input".into());
    }
    Ok(password)
}
