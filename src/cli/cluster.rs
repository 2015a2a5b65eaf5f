//! `mqtt-server cluster`: a cluster and its ledger, also while no gateway answers.

use std::{
    error::Error,
    hash::{BuildHasher as _, RandomState},
    io::{self, Write, stdout},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use cluster_node::{ClusterStatus, StreamStatus, accept_loss, create, order_takeover, status};
use config::{Config, Flags};
use ledger::{Finding, Unknown};
use store::DataDir;
use tokio::time::timeout;

use super::commands::{ClusterCommand, ClusterConfig};
use crate::cluster::LedgerEngine;

/// Runs a command.
pub(crate) fn run(
    command: &ClusterCommand,
    load: impl Fn(&Flags) -> Result<Config, Box<dyn Error>>,
) -> Result<ExitCode, Box<dyn Error>> {
    let (ClusterCommand::Create(ClusterConfig { config })
    | ClusterCommand::Status(ClusterConfig { config })
    | ClusterCommand::Takeover { config: ClusterConfig { config }, .. }
    | ClusterCommand::AcceptLoss { config: ClusterConfig { config }, .. }) = command;
    let config = load(&Flags { config: config.as_ref().map(PathBuf::from), ..Flags::default() })?;
    if !config.cluster.is_on() {
        return Err(
            "cluster.name is empty: name the cluster in the configuration, with cluster.ledger".into()
        );
    }
    let engine = LedgerEngine::open(&config)?;
    match command {
        ClusterCommand::Create(_) => make(&config, &engine),
        ClusterCommand::Status(_) => show(&engine),
        ClusterCommand::Takeover { node, .. } => {
            let ledger = Arc::clone(&engine.ledger);
            let node = node.clone().unwrap_or_default();
            let ordered = engine.handle().block_on(async move { order_takeover(&ledger, 0, &node).await });
            writeln!(stdout(), "ordered: epoch {} of the home ends", ordered?)?;
            Ok(ExitCode::SUCCESS)
        }
        &ClusterCommand::AcceptLoss { home, stream, epoch, n, .. } => {
            let ledger = Arc::clone(&engine.ledger);
            let accepted = async move { accept_loss(&ledger, home, stream, epoch, n).await };
            engine.handle().block_on(accepted)?;
            writeln!(stdout(), "stream {stream} of home {home} ends before record {n} of epoch {epoch}")?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn make(config: &Config, engine: &LedgerEngine) -> Result<ExitCode, Box<dyn Error>> {
    let directory = match config.data_dir.join("state").exists() {
        true => Some(DataDir::open(&config.data_dir)?),
        false => None,
    };
    let drawn = || RandomState::new().hash_one(std::process::id());
    let cluster = u128::from(drawn()) << 64 | u128::from(drawn());
    let (ledger, name) = (Arc::clone(&engine.ledger), config.cluster.name.clone());
    let homes = config.cluster.homes;
    let is_import = directory.is_some();
    let keeps_latest = config.latest_in_ledger();
    let made = async move { create(ledger, (&name, homes), cluster, drawn(), directory, keeps_latest).await };
    let made = engine.handle().block_on(engine.handle().spawn(made))?;
    let bytes = made?;
    let mut out = stdout();
    writeln!(out, "cluster {} is made", config.cluster.name)?;
    if is_import {
        let from = config.data_dir.display();
        writeln!(out, "its home is that of {from}, {bytes} bytes in the ledger")?;
    }
    tell_lacks(engine, &mut stdout())?;
    Ok(ExitCode::SUCCESS)
}

/// Time to wait for an engine that is asked what it lacks.
const ANSWER: Duration = Duration::from_secs(5);

/// Properties that the engine of the ledger lacks, with the remedies, for `--check`; nothing outside a cluster.
///
/// # Errors
/// The engine lacks a property without which no promise can be kept, or cannot be opened.
pub(crate) fn lacks(config: &Config) -> Result<Vec<String>, Box<dyn Error>> {
    if !config.cluster.is_on() {
        return Ok(Vec::new());
    }
    let engine = LedgerEngine::open(config)?;
    let ledger = Arc::clone(&engine.ledger);
    let asked = async move { timeout(ANSWER, ledger.findings()).await };
    let findings = match engine.handle().block_on(asked) {
        Ok(Ok(findings)) => findings,
        Ok(Err(unknown)) => return Ok(vec![format!("cluster.ledger does not answer: {unknown}")]),
        Err(_) => return Ok(vec![format!("cluster.ledger has not answered in {ANSWER:?}")]),
    };
    if let Some(fatal) = findings.iter().find(|finding| finding.is_fatal) {
        return Err(format!("cluster.ledger: {}", fatal.text).into());
    }
    Ok(findings.into_iter().map(|finding| format!("cluster.ledger: {}", finding.text)).collect())
}

/// Writes what the engine lacks, a line each. What was done before is done, so that no answer is told, and is no failure.
fn tell_lacks(engine: &LedgerEngine, out: &mut impl Write) -> io::Result<()> {
    let ledger = Arc::clone(&engine.ledger);
    write_lacks(engine.handle().block_on(async move { ledger.findings().await }), out)
}

fn write_lacks(findings: Result<Vec<Finding>, Unknown>, out: &mut impl Write) -> io::Result<()> {
    let findings = match findings {
        Ok(findings) => findings,
        Err(unknown) => {
            return writeln!(out, "warning: the database was not looked at, see --check later: {unknown}");
        }
    };
    for finding in findings {
        let kind = if finding.is_fatal { "error" } else { "warning" };
        writeln!(out, "{kind}: {}", finding.text)?;
    }
    Ok(())
}

fn show(engine: &LedgerEngine) -> Result<ExitCode, Box<dyn Error>> {
    let ledger = Arc::clone(&engine.ledger);
    let ClusterStatus { owner, owners, epoch, chain, nodes, streams } =
        engine.handle().block_on(async move { status(&ledger, 0).await })?;
    let mut out = stdout();
    let serves = if owner.is_empty() { "nobody" } else { &owner };
    writeln!(out, "{serves} serves, in epoch {epoch}; {} earlier epochs are needed still", chain.len())?;
    if owners.len() > 1 {
        writeln!(out, "that is home 0 of {}", owners.len())?;
    }
    for node in nodes {
        let served: Vec<_> = (0..owners.len()).filter(|home| owners[*home] == node.name).collect();
        let copies = if node.is_warm { "warm" } else { "copying" };
        let does = match (owners.len(), node.name == owner) {
            (0 | 1, true) => "serves".to_owned(),
            (0 | 1, false) if node.is_warm => "stands by, warm".to_owned(),
            (0 | 1, false) => "stands by, its copy is being made".to_owned(),
            _ => format!("serves {served:?}, {copies}"),
        };
        let does = if node.beaten.is_some() { &does } else { "gives no sign of life" };
        let beaten =
            node.beaten.map_or_else(|| "-".to_owned(), |age| format!("{:.1} s ago", age.as_secs_f64()));
        writeln!(out, "{:<20} {does:<34} {beaten:<12} {}", node.name, node.address)?;
    }
    for stream in streams {
        let StreamStatus { store, start, segments } = &stream;
        let most = stream.most_bytes() >> 20;
        writeln!(
            out,
            "{:<20} segments: {segments}, at most about {most} MiB; from record {} of epoch {} on",
            store.name(),
            start.n,
            start.epoch
        )?;
    }
    tell_lacks(engine, &mut stdout())?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The failure: a cluster that was made is told as one that was not, because a node did not know its tables yet.
    #[test]
    fn a_database_that_cannot_be_looked_at_is_told_and_no_failure() {
        let mut out = Vec::new();
        write_lacks(Err(Unknown("incompatible schema".to_owned())), &mut out).unwrap();
        let fatal = Finding { is_fatal: true, text: "no standby".to_owned() };
        write_lacks(Ok(vec![fatal]), &mut out).unwrap();
        let told = String::from_utf8(out).unwrap();
        assert!(told.starts_with("warning: the database was not looked at"), "{told}");
        assert!(told.contains("incompatible schema\n") && told.ends_with("error: no standby\n"), "{told}");
    }
}
