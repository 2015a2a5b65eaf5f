//! Writing all stores of a data directory into one file, readable by any version that knows its format.

use std::{fs, io, path::Path};

use heed::{Env, RoTxn, WithoutTls, types::Bytes};

use super::{
    STORES, StoreReport, TABLES, ToolProgress, close, failed,
    file::{ExportLine, ExportWriter, LatestLine, MessageLine, SessionLine, ShadowLine, SubscriptionLine},
    own,
};
use crate::{
    format,
    open::{Existing, existing},
    record, records,
    state::{
        queues::{
            audit,
            transfer::{self, ExportError},
        },
        sessions,
    },
};
use store::StoreError;
use store::encoding::message;

/// Writes sessions, subscriptions, shared groups, queues, retained messages and latest values of the data directory into
/// `file`, which must not be there yet. Changes nothing in the directory. Damaged records are left out and counted.
///
/// # Errors
/// If the directory is not there or is in use by a gateway, a store cannot be read or has another format than the
/// newest, or the file cannot be written; then no file is left.
pub fn export(
    path: &Path,
    file: &Path,
    progress: &mut dyn FnMut(ToolProgress),
) -> Result<Vec<StoreReport>, StoreError> {
    let directory = own(path)?;
    let unwritable = |e: io::Error| StoreError::Unavailable(format!("cannot write {}: {e}", file.display()));
    let mut out = ExportWriter::create(file).map_err(unwritable)?;
    let result = (|| {
        let mut reports = Vec::new();
        for &(store, _) in STORES {
            let folder = directory.path().join(store);
            let mut verifying = |done, total| progress(ToolProgress { store, done, total });
            let found = existing(&folder, store, TABLES, &mut verifying);
            let env = match found.map_err(|e| failed(store, &e))? {
                Existing::Absent => continue,
                Existing::Damaged(reason) => return Err(StoreError::Damaged(format!("{store}: {reason}"))),
                Existing::Sound(env) => env,
            };
            if let Some(problem) = problem(store, &env).map_err(|e| failed(store, &e))? {
                close(env);
                return Err(StoreError::Format(problem));
            }
            let mut report = StoreReport { store, records: 0, damaged: 0, bytes: 0, problem: None };
            let written =
                Export { env: &env, out: &mut out, report: &mut report, progress, total: 0 }.store();
            close(env);
            written.map_err(|error| match error {
                ExportError::Store(e) => failed(store, &e),
                ExportError::Sink(e) => unwritable(e),
            })?;
            reports.push(report);
        }
        let mark = fs::read_to_string(directory.path().join("versions")).ok();
        if let Some(ceiling) = mark.and_then(|text| text.trim().parse().ok()) {
            out.write(&ExportLine::Versions { ceiling }).map_err(unwritable)?;
        }
        out.finish().map_err(unwritable)?;
        Ok(reports)
    })();
    if result.is_err() {
        let _ = fs::remove_file(file);
    }
    result
}

fn problem(store: &str, env: &Env<WithoutTls>) -> Result<Option<String>, heed::Error> {
    format::problem(store, env, &env.read_txn()?)
}

type ExportResult = Result<(), ExportError<io::Error>>;

struct Export<'a> {
    env: &'a Env<WithoutTls>,
    out: &'a mut ExportWriter,
    report: &'a mut StoreReport,
    progress: &'a mut dyn FnMut(ToolProgress),
    total: u64,
}

impl Export<'_> {
    fn store(mut self) -> ExportResult {
        let txn = self.env.read_txn()?;
        match self.report.store {
            "state" => {
                self.table(&txn, "sessions", |key, value| {
                    Some(ExportLine::Session(SessionLine::of(&sessions::session(key, value)?)))
                })?;
                self.table(&txn, "subscriptions", |key, value| {
                    let (session, subscription) = sessions::subscription(key, value)?;
                    Some(ExportLine::Subscription(SubscriptionLine::of(session, subscription)))
                })?;
                self.table(&txn, "shared_groups", |key, value| {
                    let (queue, name) = sessions::group(key, value)?;
                    Some(ExportLine::Group { number: queue.0, filter: name.to_owned() })
                })?;
                self.queues(&txn)?;
                self.table(&txn, "retained", |_, value| {
                    Some(ExportLine::Retained(MessageLine::of(&message::decode(value)?)))
                })
            }
            // Of the records only shadows: answers are remembered for minutes, messages that wait for their time belong to this
            // gateway's clock, and groups to its log.
            "records" => self.table(&txn, "shadows", |key, value| {
                Some(ExportLine::Shadow(ShadowLine::of(&records::shadow(key, value)?)))
            }),
            // The device with the newest value of a topic follows from the values.
            _ => self.table(&txn, "latest", |_, value| {
                Some(ExportLine::Latest(LatestLine::of(&record::decode_value(value)?)))
            }),
        }
    }

    fn table(
        &mut self,
        txn: &RoTxn<'_, WithoutTls>,
        name: &str,
        line: impl Fn(&[u8], &[u8]) -> Option<ExportLine>,
    ) -> ExportResult {
        let Some(table) = self.env.open_database::<Bytes, Bytes>(txn, Some(name))? else { return Ok(()) };
        self.total += table.len(txn)?;
        for entry in table.iter(txn)? {
            let (key, value) = entry?;
            match line(key, value) {
                Some(line) => self.give(&line).map_err(ExportError::Sink)?,
                None => self.report.damaged += 1,
            }
        }
        Ok(())
    }

    fn queues(&mut self, txn: &RoTxn<'_, WithoutTls>) -> ExportResult {
        let Some(tables) = audit::tables(self.env, txn)? else { return Ok(()) };
        self.total += audit::records(&tables, txn)?;
        self.report.damaged +=
            transfer::export(&tables, txn, &mut |record| self.give(&ExportLine::of_queue(record)))?;
        Ok(())
    }

    fn give(&mut self, line: &ExportLine) -> io::Result<()> {
        /// Records between two reports of progress.
        const STEP: u64 = 10_000;

        self.report.records += 1;
        if self.report.records.is_multiple_of(STEP) {
            let Self { report, total, .. } = self;
            (self.progress)(ToolProgress { store: report.store, done: report.records, total: *total });
        }
        self.out.write(line)
    }
}
