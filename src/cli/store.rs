//! `mqtt-server store`: the tools for a data directory, on a terminal.

use std::{
    error::Error,
    io::{IsTerminal as _, Write as _, stderr, stdout},
    path::Path,
    process::ExitCode,
};

use disk::tool::{self, ConversionRoom, StoreReport, ToolProgress};

use super::commands::StoreCommand;

/// Runs a command and shows what came of it.
pub(crate) fn run(command: &StoreCommand) -> Result<ExitCode, Box<dyn Error>> {
    let reports = match command {
        StoreCommand::Check { dir } => tool::check(dir, &mut show),
        StoreCommand::Compact { dir } => tool::compact(dir, &mut show),
        StoreCommand::Backup { dir, target } => tool::backup(dir, target, &mut show),
        StoreCommand::Convert { dir } => return convert(dir),
        StoreCommand::Export { dir, file } => tool::export(dir, file, &mut show),
        StoreCommand::Import { file, dir } => tool::import(file, dir, &mut show),
    };
    clear();
    let reports = reports?;
    let mut out = stdout();
    for report in &reports {
        writeln!(out, "{}", line(report, command))?;
    }
    let sound = reports.iter().all(|report| report.damaged == 0 && report.problem.is_none());
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Converts a directory, if there is room for it.
fn convert(dir: &Path) -> Result<ExitCode, Box<dyn Error>> {
    const MIB: u64 = 1 << 20;
    let mut out = stdout();
    let Some(ConversionRoom { needed, free }) = tool::conversion_room(dir)? else {
        writeln!(out, "{} is of this version: nothing to convert", dir.display())?;
        return Ok(ExitCode::SUCCESS);
    };
    writeln!(out, "needs about {} MiB of disk, {} MiB are free", needed.div_ceil(MIB), free / MIB)?;
    if free < needed {
        return Err(
            format!("too little room on the disk of {}: make room and call it again", dir.display()).into()
        );
    }
    let reports = tool::convert(dir, &mut show);
    clear();
    for StoreReport { store, bytes, .. } in reports? {
        writeln!(out, "{store:<10} {bytes} bytes")?;
    }
    let before = dir.join("before-conversion");
    writeln!(
        out,
        "converted; the stores as they were are in {}: remove it once all is well",
        before.display()
    )?;
    Ok(ExitCode::SUCCESS)
}

fn line(report: &StoreReport, command: &StoreCommand) -> String {
    let StoreReport { store, records, damaged, bytes, problem } = report;
    match problem {
        Some(problem) => format!("{store:<10} damaged: {problem}"),
        None if matches!(command, StoreCommand::Check { .. }) => {
            format!("{store:<10} {records} records, {damaged} damaged, {bytes} bytes")
        }
        None if matches!(command, StoreCommand::Export { .. } | StoreCommand::Import { .. }) => {
            format!("{store:<10} {records} records, {damaged} damaged and left out")
        }
        None => format!("{store:<10} {bytes} bytes"),
    }
}

/// A bar that is drawn over itself; nothing where that cannot be.
fn show(progress: ToolProgress) {
    const WIDTH: u64 = 40;
    if stderr().is_terminal() {
        let ToolProgress { store, done, total } = progress;
        let filled = (done * WIDTH / total.max(1)).min(WIDTH) as usize;
        let bar = "#".repeat(filled) + &".".repeat(WIDTH as usize - filled);
        let _ = write!(stderr(), "\r{store:<10} [{bar}] {done}/{total}\x1b[K");
    }
}

fn clear() {
    if stderr().is_terminal() {
        let _ = write!(stderr(), "\r\x1b[K");
    }
}
