//! One LMDB environment: its memory map, and the gate that guards growing it.

mod shipped;

use std::{
    fs::File,
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed},
        },
    },
    time::{Duration, Instant},
};

use heed::{Env, MdbError, RoTxn, WithoutTls};
use ledger::Shipping;
use parking_lot::{Mutex, RwLock};

use super::{
    format, marker,
    open::{self, FoundDamage},
    reserve::{RESERVE, Reserve},
    table::{Redo, Table, UNNUMBERED, WriteTxn},
};
pub(crate) use shipped::RepeatCursor;
use store::{DataDir, StoreError};

/// Called in the writing thread before every commit, with its changes; an error fails that commit. For tests of failing and slow
/// disks.
pub type CommitHook = Arc<dyn Fn(&Redo) -> io::Result<()> + Send + Sync>;

/// Between two looks for readers that were killed: their snapshots would keep pages from being used again.
const STALE_READERS: Duration = Duration::from_secs(60);

/// Fewer pages, of a small file or of little that was read, are not worth being unmapped.
const WORTH_UNMAPPING: usize = 64 << 20;
/// Bytes counted for each look-up: at worst it touches a page of its own.
pub(crate) const PAGE: usize = 4 << 10;

/// Options for opening an environment.
pub(crate) struct EnvironmentOptions {
    /// Folder in the data directory, also the name in messages.
    pub(crate) name: &'static str,
    /// First size of the memory map.
    pub(crate) map_size: usize,
    /// Largest size of the memory map; beyond it commits fail.
    pub(crate) max_map_size: usize,
    /// Number of named tables; that of the format comes on top.
    pub(crate) tables: u32,
    pub(crate) hook: Option<CommitHook>,
    /// A ledger that has each transaction before it is committed.
    pub(crate) shipping: Option<Arc<dyn Shipping>>,
}

/// An open environment.
pub(crate) struct Environment {
    pub(crate) env: Env<WithoutTls>,
    name: &'static str,
    max_map_size: usize,
    /// Every read transaction holds the read side; growing the map holds the write side.
    gate: RwLock<()>,
    /// Held by the one write transaction, from before it begins until the map was grown for it.
    writing: Mutex<Upkeep>,
    /// Only removals are written, from what was kept for them.
    low: AtomicBool,
    damaged: AtomicBool,
    /// Mapped file, and the most bytes that it had: LMDB never makes it shorter.
    file: File,
    length: AtomicU64,
    /// Bytes read since the file was mapped: their pages count as the process's memory.
    touched: AtomicUsize,
    damage: Option<FoundDamage>,
    hook: Option<CommitHook>,
    shipping: Option<Arc<dyn Shipping>>,
    /// The home belongs to another process.
    lost: AtomicBool,
    directory: Arc<DataDir>,
}

/// Things that a writer looks after.
struct Upkeep {
    reserve: Reserve,
    readers_checked: Option<Instant>,
    /// Keys that were repeated for the ledger.
    cursor: RepeatCursor,
}

impl Environment {
    /// Opens or creates it; sets a damaged file aside. Blocks on the disk.
    pub(crate) fn open(directory: &Arc<DataDir>, options: EnvironmentOptions) -> Result<Self, StoreError> {
        let opened = open::open(directory, options.name, options.map_size, options.tables + 1)?;
        let file = directory.path().join(options.name).join("data.mdb");
        let file = File::open(&file)
            .map_err(|e| StoreError::Unavailable(format!("cannot open {}: {e}", file.display())))?;
        Ok(Self {
            env: opened.env,
            name: options.name,
            max_map_size: options.max_map_size,
            gate: RwLock::new(()),
            writing: Mutex::new(Upkeep {
                reserve: Reserve::open(directory.path().join(options.name).join("reserve")),
                readers_checked: None,
                cursor: RepeatCursor::default(),
            }),
            low: AtomicBool::new(false),
            damaged: AtomicBool::new(false),
            file,
            length: AtomicU64::new(0),
            touched: AtomicUsize::new(0),
            damage: opened.damage,
            hook: options.hook,
            shipping: options.shipping,
            lost: AtomicBool::new(false),
            directory: Arc::clone(directory),
        })
    }

    /// Returns the path to which a damaged file was moved at open, if there was one.
    pub(crate) fn set_aside(&self) -> Option<&PathBuf> {
        self.damage.as_ref().map(|damage| &damage.set_aside)
    }

    /// Returns whether a table was lost to damage that was found at open.
    pub(crate) fn has_lost(&self, table: &str) -> bool {
        let is_lost =
            |damage: &FoundDamage| damage.lost_tables.as_ref().is_none_or(|lost| lost.contains(&table));
        self.damage.as_ref().is_some_and(is_lost)
    }

    /// Its folder, also its name in messages.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Opens a table, and makes it if it is not there.
    pub(crate) fn table(&self, txn: &mut WriteTxn<'_>, name: &str) -> Result<Table, heed::Error> {
        let place = format::tables(self.name).position(|table| table == name);
        let number = place.and_then(|place| u8::try_from(place).ok()).unwrap_or(UNNUMBERED);
        Table::create(&self.env, txn, name, number)
    }

    /// Runs `read` in a read transaction, with no growth of the map meanwhile. Keep it under 100 ms.
    pub(crate) fn reading<T>(
        &self,
        read: impl FnOnce(&RoTxn<'_, WithoutTls>) -> Result<T, heed::Error>,
    ) -> Result<T, StoreError> {
        self.usable().map_err(|e| self.failed(&e))?;
        let _gate = self.gate.read();
        let txn = self.env.read_txn().map_err(|e| self.failed(&e))?;
        read(&txn).map_err(|e| self.failed(&e))
    }

    /// Runs `write` in a write transaction and commits it. `write` runs again, from the state before, when the map had
    /// to grow. It may use what is kept for removals.
    pub(crate) fn writing<T>(
        &self,
        write: impl FnMut(&mut WriteTxn<'_>) -> Result<T, heed::Error>,
    ) -> Result<T, heed::Error> {
        self.commit(&mut self.writing.lock(), self.max_map_size, write)
    }

    /// As [`Self::writing`], for what adds: fails when only the room for removals is left.
    pub(crate) fn adding<T>(
        &self,
        write: impl FnMut(&mut WriteTxn<'_>) -> Result<T, heed::Error>,
    ) -> Result<T, heed::Error> {
        self.usable()?;
        let mut upkeep = self.writing.lock();
        if self.is_low() && !self.recover_now(&mut upkeep)? {
            return Err(heed::Error::Io(io::ErrorKind::StorageFull.into()));
        }
        let size = self.room().max(self.used());
        if self.env.info().map_size > size {
            let _gate = self.gate.write();
            open::resize(&self.env, size)?;
        }
        self.commit(&mut upkeep, self.room(), write)
    }

    /// Returns whether LMDB met damage. Nothing more is read or written, as LMDB trusts its file and would end the process at the
    /// next such page; the next start sets the file aside.
    pub(crate) fn is_damaged(&self) -> bool {
        self.damaged.load(Relaxed)
    }

    /// Notes that nothing is written from now on; what is written all the same makes the note untrue.
    pub(crate) fn note_closed(&self) {
        marker::was_closed(&self.folder());
    }

    pub(crate) fn folder(&self) -> PathBuf {
        self.directory.path().join(self.name)
    }

    /// Takes note of what an error of LMDB says about the file.
    pub(crate) fn met(&self, error: &heed::Error) {
        if open::is_damage(error) {
            self.met_damage(error);
        } else if matches!(error, heed::Error::Mdb(MdbError::Panic)) {
            marker::suspected(&self.folder());
        }
    }

    fn met_damage(&self, error: &dyn std::fmt::Display) {
        if !self.damaged.swap(true, Relaxed) {
            marker::suspected(&self.folder());
            tracing::error!(
                store = self.name,
                %error,
                "store is damaged and is no longer used; restart the gateway, which sets it aside"
            );
        }
    }

    /// Returns whether the disk or the map is so full that only removals are written.
    pub(crate) fn is_low(&self) -> bool {
        self.low.load(Relaxed)
    }

    /// Returns whether there is room again after there was too little.
    pub(crate) fn recover(&self) -> bool {
        self.is_low() && self.recover_now(&mut self.writing.lock()).unwrap_or(false)
    }

    fn recover_now(&self, upkeep: &mut Upkeep) -> Result<bool, heed::Error> {
        self.usable()?;
        let used = self.used();
        let inside = {
            let _gate = self.gate.read();
            (used as u64).saturating_sub(self.env.non_free_pages_size()?)
        };
        let room = inside >= RESERVE as u64 || (used < self.room() && upkeep.reserve.make());
        self.low.store(!room, Relaxed);
        Ok(room)
    }

    /// Unmaps and maps again a large file that is mostly free, as it is once a burst is gone: each page that was ever
    /// read counts as the process's memory until the system is short of it. Pages in use are mapped again when they are
    /// read; the system still has them. True if it was done.
    pub(crate) fn unmap_free(&self) -> Result<bool, heed::Error> {
        self.usable()?;
        let _upkeep = self.writing.lock();
        let (used, map_size) = (self.used(), self.env.info().map_size);
        let filled = || {
            let _gate = self.gate.read();
            self.env.non_free_pages_size()
        };
        if used < WORTH_UNMAPPING || filled()? > used as u64 / 2 {
            return Ok(false);
        }
        let _gate = self.gate.write();
        open::resize(&self.env, map_size)?;
        Ok(true)
    }

    /// Notes bytes read by a transaction that is over. Now and then the file is unmapped and mapped again, so that
    /// reading it bit by bit does not bring all of it into memory. No writer waits for that.
    pub(crate) fn note_read(&self, bytes: usize) {
        if self.touched.fetch_add(bytes, Relaxed) + bytes < WORTH_UNMAPPING || self.usable().is_err() {
            return;
        }
        // The next read tries it again.
        let Some(_upkeep) = self.writing.try_lock() else { return };
        let map_size = self.env.info().map_size;
        let _gate = self.gate.write();
        match open::resize(&self.env, map_size) {
            Ok(()) => self.touched.store(0, Relaxed),
            Err(error) => tracing::warn!(store = self.name, %error, "cannot unmap pages that were read"),
        }
    }

    /// Bytes of pages in use.
    pub(crate) fn filled(&self) -> Result<u64, heed::Error> {
        self.usable()?;
        let _gate = self.gate.read();
        self.env.non_free_pages_size()
    }

    /// Bytes of the file that were ever used.
    fn used(&self) -> usize {
        (self.env.info().last_page_number + 1).saturating_mul(self.env.stat().page_size as usize)
    }

    /// The largest map for what adds.
    fn room(&self) -> usize {
        match self.max_map_size {
            usize::MAX => usize::MAX,
            // Whole pages on every machine.
            max => (max - RESERVE.min(max / 8)) & !0xFFFF,
        }
    }

    fn commit<T>(
        &self,
        upkeep: &mut Upkeep,
        max: usize,
        mut write: impl FnMut(&mut WriteTxn<'_>) -> Result<T, heed::Error>,
    ) -> Result<T, heed::Error> {
        self.usable()?;
        self.tend(upkeep);
        loop {
            match self.attempt(upkeep, &mut write) {
                Err(heed::Error::Mdb(MdbError::MapFull)) => {
                    if let Err(error) = self.grow(max) {
                        self.low.store(true, Relaxed);
                        return Err(error);
                    }
                }
                Err(error) => {
                    self.met(&error);
                    if is_full(&error) {
                        upkeep.reserve.spend();
                        self.low.store(true, Relaxed);
                    }
                    return Err(error);
                }
                result => return result,
            }
        }
    }

    /// Returns whether the home belongs to another process: nothing is written, and nobody is told anything.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    /// Checks the file's length before each transaction: touching a page beyond its end would end the process by a
    /// signal.
    fn usable(&self) -> Result<(), heed::Error> {
        // In this order: the file may grow meanwhile, and others may note it.
        let known = self.length.load(Acquire);
        let length = self.file.metadata()?.len();
        self.length.fetch_max(length, AcqRel);
        if length < known {
            self.met_damage(&"its file was cut short while it was in use");
        }
        if self.is_lost() {
            return Err(shipped::lost());
        }
        if self.is_damaged() { Err(heed::Error::Mdb(MdbError::Corrupted)) } else { Ok(()) }
    }

    fn tend(&self, upkeep: &mut Upkeep) {
        let now = now();
        if upkeep.readers_checked.is_none_or(|checked| now >= checked + STALE_READERS) {
            upkeep.readers_checked = Some(now);
            match self.env.clear_stale_readers() {
                Ok(0) => {}
                Ok(readers) => {
                    tracing::warn!(store = self.name, readers, "readers that were killed are gone")
                }
                Err(error) => {
                    gateway_core::warn_limited!(store = self.name, %error, "cannot look for killed readers")
                }
            }
        }
        if !self.is_low() {
            upkeep.reserve.make();
        }
    }

    fn attempt<T>(
        &self,
        upkeep: &mut Upkeep,
        write: &mut impl FnMut(&mut WriteTxn<'_>) -> Result<T, heed::Error>,
    ) -> Result<T, heed::Error> {
        let mut txn = WriteTxn::new(&self.env, self.hook.is_some() || self.shipping.is_some())?;
        let repeated = match &self.shipping {
            Some(shipping) => Some((shipping, self.repeat_oldest(shipping, &mut txn, &upkeep.cursor)?)),
            None => None,
        };
        let value = write(&mut txn)?;
        if let (Some(hook), Some(redo)) = (&self.hook, txn.redo()) {
            hook(redo).map_err(heed::Error::Io)?;
        }
        match repeated {
            Some((shipping, round)) => self.ship_and_commit(shipping, txn, round, upkeep)?,
            None => txn.commit()?,
        }
        Ok(value)
    }

    fn grow(&self, max: usize) -> Result<(), heed::Error> {
        let size = self.env.info().map_size;
        let larger = size.saturating_mul(2).min(max);
        if larger <= size {
            return Err(heed::Error::Mdb(MdbError::MapFull));
        }
        let _gate = self.gate.write();
        open::resize(&self.env, larger)?;
        tracing::info!(store = self.name, bytes = self.env.info().map_size, "memory map grown");
        Ok(())
    }

    /// The error as callers of the store see it.
    pub(crate) fn failed(&self, error: &heed::Error) -> StoreError {
        self.met(error);
        if open::is_damage(error) {
            StoreError::Damaged(format!("{}: {error}", self.name))
        } else {
            StoreError::Unavailable(format!("{}: {error}", self.name))
        }
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        self.note_closed();
    }
}

/// Returns whether an error may mean that the disk is full: LMDB reports a write that was cut short as EIO.
fn is_full(error: &heed::Error) -> bool {
    const EIO: i32 = 5;
    let heed::Error::Io(error) = error else { return false };
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        || error.raw_os_error() == Some(EIO)
}

#[expect(clippy::disallowed_methods, reason = "readers that were killed are looked for once a minute")]
fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Read as _, Write as _},
        path::Path,
        process::{Command, Stdio},
    };

    use super::*;
    #[cfg(target_os = "linux")]
    use crate::latest::tests::mapped;
    use crate::open::{Existing, in_use};

    fn environment(dir: &Path) -> Environment {
        let options = EnvironmentOptions {
            name: "test",
            map_size: 1 << 20,
            max_map_size: usize::MAX,
            tables: 1,
            hook: None,
            shipping: None,
        };
        Environment::open(&DataDir::open(dir).unwrap(), options).unwrap()
    }

    /// Tells the child of the test below where to read.
    const CHILD: &str = "MQTT_SERVER_TEST_READER_CHILD";

    /// Not a test by itself: a reader that is killed.
    #[test]
    fn child_that_reads_until_killed() {
        let Ok(path) = std::env::var(CHILD) else { return };
        let Existing::Sound(env) = in_use(Path::new(&path), 2).unwrap() else { panic!("nothing in {path}") };
        let _txn = env.read_txn().unwrap();
        io::stdout().write_all(b"\nreading\n").unwrap();
        let _ = io::stdin().read(&mut [0]);
    }

    #[test]
    fn a_killed_reader_does_not_keep_pages_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let environment = environment(dir.path());
        environment.writing(|txn| environment.set_format(txn, 1)).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "environment::tests::child_that_reads_until_killed"])
            .arg("--nocapture")
            .env(CHILD, dir.path().join("test"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "reading"));
        child.kill().unwrap();
        child.wait().unwrap();
        // Not again within the minute; then it goes.
        environment.writing(|txn| environment.set_format(txn, 2)).unwrap();
        environment.writing.lock().readers_checked = None;
        environment.writing(|txn| environment.set_format(txn, 3)).unwrap();
        assert_eq!(environment.env.clear_stale_readers().unwrap(), 0, "the reader was still there");
    }

    /// The next transaction met a page beyond the end of the file: the process ended by SIGBUS, and with it all stores.
    #[test]
    fn a_file_cut_short_while_in_use_ends_the_store_not_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let cut = || {
            let file =
                std::fs::OpenOptions::new().write(true).open(dir.path().join("test/data.mdb")).unwrap();
            file.set_len(8192).unwrap();
        };
        let environment = environment(dir.path());
        let table: Table = environment.writing(|txn| environment.table(txn, "table")).unwrap();
        environment.writing(|txn| (0..100).try_for_each(|n| table.put(txn, &[n], &[1; 2000]))).unwrap();
        cut();
        let read = environment.reading(|txn| Ok(table.iter(txn)?.count()));
        assert!(matches!(read, Err(StoreError::Damaged(_))), "{read:?}");
        assert!(environment.adding(|txn| table.put(txn, b"x", b"x")).is_err());
        assert!(environment.writing(|txn| table.delete(txn, &[1])).is_err());
        assert!(environment.is_damaged() && environment.filled().is_err());
        drop(environment);
        let environment = self::environment(dir.path());
        assert!(environment.set_aside().is_some(), "the next start");
    }

    /// Regression test: pages read from a large file counted as memory for as long as most of the file was in use.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_read_bit_by_bit_does_not_stay_in_memory() {
        let dir = tempfile::tempdir().unwrap();
        let environment = environment(dir.path());
        let table: Table = environment.writing(|txn| environment.table(txn, "table")).unwrap();
        let value = vec![1; 1 << 20];
        environment.writing(|txn| (0..100_u8).try_for_each(|key| table.put(txn, &[key], &value))).unwrap();
        let path = dir.path().join("test/data.mdb");
        let mut most = 0;
        for key in 0..100_u8 {
            let ones = environment
                .reading(|txn| {
                    Ok(table.get(txn, &[key])?.map(|value| value.iter().filter(|b| **b == 1).count()))
                })
                .unwrap();
            assert_eq!(ones, Some(1 << 20));
            most = most.max(mapped(&path));
            environment.note_read(1 << 20);
        }
        assert!((32 << 20..=72 << 20).contains(&most), "{most} bytes");
        assert!(mapped(&path) < 48 << 20, "{}", mapped(&path));
    }

    /// Once a burst was drained its file counted as memory until the end of the process.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_that_is_mostly_free_does_not_stay_in_memory() {
        let dir = tempfile::tempdir().unwrap();
        let environment = environment(dir.path());
        let table: Table = environment.writing(|txn| environment.table(txn, "table")).unwrap();
        let value = vec![1; 1 << 20];
        let keys = || (0..80_u8).map(|n| [n]);
        let fill = |keys: Vec<[u8; 1]>| {
            environment.writing(|txn| keys.iter().try_for_each(|key| table.put(txn, key, &value))).unwrap();
        };
        let sum = || -> u64 {
            let bytes = |value: &[u8]| value.iter().map(|b| u64::from(*b)).sum::<u64>();
            environment
                .reading(|txn| table.iter(txn)?.map(|found| found.map(|(_, value)| bytes(value))).sum())
                .unwrap()
        };
        let path = dir.path().join("test/data.mdb");
        fill(keys().collect());
        assert_eq!(sum(), 80 << 20);
        assert!(!environment.unmap_free().unwrap(), "all of it is in use");
        assert!(mapped(&path) > 64 << 20, "{}", mapped(&path));
        environment
            .writing(|txn| keys().skip(1).try_for_each(|key| table.delete(txn, &key).map(drop)))
            .unwrap();
        assert!(environment.unmap_free().unwrap());
        assert!(mapped(&path) < 4 << 20, "{}", mapped(&path));
        assert_eq!(sum(), 1 << 20);
        fill(keys().collect());
        assert_eq!(sum(), 80 << 20);
    }
}
