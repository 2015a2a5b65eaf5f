//! `mqtt-server rules`: what a rules file says, before a gateway uses it.

use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    io::{Write as _, stderr, stdout},
    path::{Path, PathBuf},
    process::ExitCode,
};

use access::{
    Method, Principal, Subject,
    rules::{AccessQuestion, Rules, import_mosquitto},
};
use config::{Config, Flags};
use gateway_core::{QoS, TopicError, TopicFilter, TopicName};

use super::commands::{RulesAction, RulesCommand, RulesTest};

use super::{environment, fail};

/// Exit code for a file that cannot be used.
const BROKEN: u8 = 2;

/// Runs a command and shows what came of it.
pub(crate) fn run(command: &RulesCommand) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        RulesCommand::Test(asked) => test(asked),
        RulesCommand::Check { file } => check(file),
        RulesCommand::Import { file } => import(file),
    }
}

fn test(test: &RulesTest) -> Result<ExitCode, Box<dyn Error>> {
    let file = match &test.config {
        None => test.rules.clone(),
        Some(config) => match configured(config) {
            Ok(file) => file,
            Err(problem) => return Ok(fail(BROKEN, &problem)),
        },
    };
    let Some(file) = file else {
        writeln!(stdout(), "allowed: the configuration names no rules, so that everything is")?;
        return Ok(ExitCode::SUCCESS);
    };
    let rules = match read(&file) {
        Ok(rules) => rules,
        Err(problems) => return Ok(fail(BROKEN, &problems)),
    };
    let asked = match asked(test) {
        Ok(asked) => asked,
        Err(problem) => {
            return Ok(fail(BROKEN, &format!("'{}': {problem}", test.topic.as_deref().unwrap_or_default())));
        }
    };
    let principal = principal(test);
    let subject = Subject { client_id: &test.client, listener: &test.listener, principal: &principal };
    let explanation = rules.explain(&subject, &asked);
    write!(stdout(), "{explanation}")?;
    Ok(if explanation.allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn asked(test: &RulesTest) -> Result<AccessQuestion<'_>, TopicError> {
    let topic = test.topic.as_deref().unwrap_or_default();
    match test.action {
        RulesAction::Connect => Ok(AccessQuestion::Connect),
        RulesAction::Subscribe => {
            TopicFilter::check(topic)?;
            Ok(AccessQuestion::Subscribe { filter: topic })
        }
        RulesAction::Publish => {
            TopicName::check(topic)?;
            let qos = QoS::from_bits(test.qos).unwrap_or_default();
            Ok(AccessQuestion::Publish { topic, qos, retain: test.retain, bytes: test.size.0 })
        }
    }
}

/// Returns the principal that the arguments describe. The method of its proof matters to rules only as far as there was
/// any proof.
fn principal(test: &RulesTest) -> Principal {
    let method = if !test.claims.is_empty() {
        Method::Jwt
    } else if test.user.is_some() {
        Method::Password
    } else if test.cn.is_some() {
        Method::Certificate
    } else {
        Method::Anonymous
    };
    let mut claims: BTreeMap<Box<str>, Vec<Box<str>>> = BTreeMap::new();
    for (name, value) in &test.claims {
        claims.entry(name.as_str().into()).or_default().push(value.as_str().into());
    }
    Principal {
        method,
        username: test.user.as_deref().map(Box::from),
        common_name: test.cn.as_deref().map(Box::from),
        groups: test.groups.iter().map(|name| name.as_str().into()).collect(),
        claims: claims.into_iter().map(|(name, values)| (name, values.into())).collect(),
        ..Principal::default()
    }
}

fn check(file: &Path) -> Result<ExitCode, Box<dyn Error>> {
    match read(file) {
        Ok(rules) => {
            writeln!(stdout(), "{}: {} rules", file.display(), rules.len())?;
            Ok(ExitCode::SUCCESS)
        }
        Err(problems) => Ok(fail(BROKEN, &problems)),
    }
}

fn import(file: &Path) -> Result<ExitCode, Box<dyn Error>> {
    let text = fs::read_to_string(file).map_err(|error| unread(file, &error))?;
    let imported = import_mosquitto(&text);
    write!(stdout(), "{}", imported.rules)?;
    for line in &imported.left_out {
        writeln!(stderr(), "mqtt-server: warning: left out, {line}")?;
    }
    Ok(if imported.left_out.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The rules file that a configuration names.
fn configured(config: &Path) -> Result<Option<PathBuf>, String> {
    let text = fs::read_to_string(config).map_err(|error| unread(config, &error))?;
    let config = Config::load(&Flags::default(), Some(&text), &environment());
    Ok(config.map_err(|error| error.to_string())?.authorization.rules)
}

fn read(file: &Path) -> Result<Rules, String> {
    let text = fs::read_to_string(file).map_err(|error| unread(file, &error))?;
    Rules::parse(&text).map_err(|mistakes| {
        let lines: Vec<String> =
            mistakes.iter().map(|mistake| format!("{}: {mistake}", file.display())).collect();
        lines.join("\n")
    })
}

fn unread(file: &Path, error: &std::io::Error) -> String {
    format!("read {}: {error}", file.display())
}
