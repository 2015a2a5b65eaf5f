//! Making a data directory from the file of an export.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use gateway_core::{Commit, QueueId, SharedMessage};

use super::{
    StoreReport, ToolProgress,
    file::{ExportLine, ExportReader},
};
use crate::{
    EmbeddedLatest, EmbeddedOptions, EmbeddedRecords, EmbeddedState, RecordOptions, StateOptions,
    state::queues::transfer::QueueRecord,
};
use store::{
    DataDir, LatestStore as _, LatestValue, RecordOutcome, RecordStore as _, RecordWrite, SessionOp,
    ShadowRecord, StateStore as _, StoreError, shadow_change, sync_directory,
};

/// Lines, and bytes of lines, that are written at once at most.
const LINES: usize = 10_000;
const BYTES: usize = 16 << 20;

/// Makes the data directory `target`, which must not be there or be empty, from the file of an export. Everything is
/// written beside it, in `target.importing`, and gets its name once it is complete and durable.
///
/// # Errors
/// If the target is not empty, or the file is not an export, of a newer format, cut short or changed, or cannot be
/// written out; `target` is as it was then.
pub fn import(
    file: &Path,
    target: &Path,
    progress: &mut dyn FnMut(ToolProgress),
) -> Result<Vec<StoreReport>, StoreError> {
    let unusable = |e: &dyn std::fmt::Display| {
        StoreError::Unavailable(format!("cannot make the data directory {}: {e}", target.display()))
    };
    if fs::read_dir(target).is_ok_and(|mut found| found.next().is_some()) {
        return Err(unusable(&"it is not empty"));
    }
    let reader = ExportReader::open(file).map_err(|e| bad(file, &e))?;
    let mut name = target.file_name().ok_or_else(|| unusable(&"it has no name"))?.to_owned();
    name.push(".importing");
    let beside = target.with_file_name(name);
    fs::create_dir(&beside).map_err(|e| unusable(&format!("{}: {e}", beside.display())))?;
    let result = fill(file, reader, &beside, progress).and_then(|reports| {
        sync_directory(&beside).map_err(|e| unusable(&e))?;
        fs::rename(&beside, target).map_err(|e| unusable(&e))?;
        let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty());
        sync_directory(parent.unwrap_or_else(|| Path::new("."))).map_err(|e| unusable(&e))?;
        Ok(reports)
    });
    if result.is_err() {
        let _ = fs::remove_dir_all(&beside);
    }
    result
}

fn bad(file: &Path, problem: &dyn std::fmt::Display) -> StoreError {
    StoreError::Format(format!("{}: {problem}", file.display()))
}

fn fill(
    file: &Path,
    mut reader: ExportReader,
    target: &Path,
    progress: &mut dyn FnMut(ToolProgress),
) -> Result<Vec<StoreReport>, StoreError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .map_err(|e| StoreError::Unavailable(format!("cannot wait for the stores: {e}")))?;
    let mut stores = ImportedStores::open(target)?;
    let mut bytes = 0;
    loop {
        let line = reader.next().map_err(|e| bad(file, &e))?;
        let end = line.is_none();
        if let Some((line, length)) = line {
            stores.take(line).map_err(|e| bad(file, &format!("line {}: {e}", reader.lines)))?;
            bytes += length;
        }
        if end || stores.waiting >= LINES || bytes >= BYTES {
            runtime.block_on(stores.write())?;
            bytes = 0;
            progress(ToolProgress { store: "import", done: reader.done, total: reader.total });
        }
        if end {
            break;
        }
    }
    if !stores.state.is_whole()? {
        return Err(bad(file, &"its queues do not fit together"));
    }
    Ok(stores.reports)
}

struct ImportedStores {
    path: PathBuf,
    state: EmbeddedState,
    latest: EmbeddedLatest,
    records: EmbeddedRecords,
    /// Operations taken and not yet written.
    session_ops: Vec<SessionOp>,
    queue_records: Vec<QueueRecord>,
    messages: Vec<Arc<SharedMessage>>,
    values: Vec<LatestValue>,
    documents: Vec<ShadowRecord>,
    waiting: usize,
    commit: Arc<Commit>,
    reports: Vec<StoreReport>,
}

impl ImportedStores {
    fn open(path: &Path) -> Result<Self, StoreError> {
        let directory = DataDir::open(path)?;
        let latest = EmbeddedOptions { topics_per_device: usize::MAX, ..EmbeddedOptions::default() };
        let report = |store| StoreReport { store, records: 0, damaged: 0, bytes: 0, problem: None };
        Ok(Self {
            path: path.to_owned(),
            state: EmbeddedState::open(&directory, &StateOptions::default())?,
            latest: EmbeddedLatest::open(&directory, &latest)?,
            records: EmbeddedRecords::open(&directory, &RecordOptions::default())?,
            session_ops: Vec::new(),
            queue_records: Vec::new(),
            messages: Vec::new(),
            values: Vec::new(),
            documents: Vec::new(),
            waiting: 0,
            commit: Commit::new(),
            reports: ["latest", "state", "records"].map(report).into(),
        })
    }

    fn take(&mut self, line: ExportLine) -> Result<(), String> {
        self.waiting += 1;
        let report = match &line {
            ExportLine::Latest(_) => 0,
            ExportLine::Session(_)
            | ExportLine::Subscription(_)
            | ExportLine::Group { .. }
            | ExportLine::Message { .. }
            | ExportLine::Entry(_)
            | ExportLine::Received { .. }
            | ExportLine::Retained(_) => 1,
            ExportLine::Shadow(_) => 2,
            ExportLine::Versions { ceiling } => {
                return fs::write(self.path.join("versions"), format!("{ceiling}\n"))
                    .map_err(|e| e.to_string());
            }
            ExportLine::MqttServerExport { .. } | ExportLine::End { .. } => {
                return Err("not expected here".to_owned());
            }
        };
        self.reports[report].records += 1;
        let part = || self.commit.part();
        match line {
            ExportLine::Session(session) => {
                let session = Box::new(session.read()?);
                self.session_ops.push(SessionOp::Put(session, Some(part())));
            }
            ExportLine::Subscription(subscription) => {
                let (queue, subscription) = subscription.read()?;
                self.session_ops.push(SessionOp::Subscribe(queue, subscription, part()));
            }
            ExportLine::Group { number, filter } => {
                self.session_ops.push(SessionOp::Group(QueueId(number), filter));
            }
            ExportLine::Message { number, message } => {
                self.queue_records.push(QueueRecord::Message(number, message.read()?));
            }
            ExportLine::Entry(entry) => self.queue_records.push(entry.read()?),
            ExportLine::Received { queue, packet_id } => {
                self.queue_records.push(QueueRecord::Received(QueueId(queue), packet_id));
            }
            ExportLine::Retained(message) => self.messages.push(Arc::new(message.read()?)),
            ExportLine::Latest(value) => self.values.push(value.read()?),
            ExportLine::Shadow(shadow) => self.documents.push(shadow.read()?),
            ExportLine::Versions { .. } | ExportLine::MqttServerExport { .. } | ExportLine::End { .. } => {}
        }
        Ok(())
    }

    /// Writes what was taken; durable after it.
    async fn write(&mut self) -> Result<(), StoreError> {
        let commit = std::mem::replace(&mut self.commit, Commit::new());
        for op in self.session_ops.drain(..) {
            self.state.submit_session(op);
        }
        for message in self.messages.drain(..) {
            self.state.set_retained(message, Some(commit.part()));
        }
        // Operations that nobody waits for are written with this one at the latest.
        self.state.submit_session(SessionOp::Remove(QueueId::NONE, Some(commit.part())));
        commit.done();
        if !self.queue_records.is_empty() {
            self.state.import(&self.queue_records)?;
            self.queue_records.clear();
        }
        if !self.values.is_empty() {
            self.latest.upsert(std::mem::take(&mut self.values).into()).await?;
        }
        if !self.documents.is_empty() {
            let documents = std::mem::take(&mut self.documents);
            let changes = documents.iter().map(|record| shadow_change(record, 0));
            let written = changes.map(|change| {
                Ok::<_, StoreError>(self.records.write(RecordWrite { changes: vec![change?], fence: None }))
            });
            for written in written.collect::<Result<Vec<_>, _>>()? {
                if written.await? != RecordOutcome::Done {
                    return Err(StoreError::Damaged("a shadow comes twice".to_owned()));
                }
            }
        }
        self.waiting = 0;
        let refused = |_| StoreError::Unavailable("a store did not take what was imported".to_owned());
        commit.wait().await.map_err(refused)
    }
}
