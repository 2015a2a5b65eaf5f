//! Everything that can be read again while the gateway runs: certificates, rules, password files, keys of tokens, bans.
//!
//! Each part registers once, and its files are read again together: on SIGHUP, by the RPC, and when one of them has
//! changed and then held still for one look, so that files which belong together are replaced together. A part that
//! cannot take what it reads keeps all that it had. Parts don't wait for each other's files to be right.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use tracing::{error, info};

/// Something that was read from files and can be read again.
pub trait Reload: Send + Sync {
    /// Returns the name of the part, for the log and the RPC: a plural such as `certificates`.
    fn name(&self) -> &'static str;

    /// The files whose change asks for a reload. Need not be there.
    fn files(&self) -> Vec<PathBuf>;

    /// Reads all files and takes what they say, as a whole or not at all. Blocks, so it is never called on a shard.
    /// Must not call the [`Reloads`] that it is in.
    ///
    /// Returns how much there is, as in `3 rules`.
    ///
    /// # Errors
    /// The faults, a text each, with file and line and without secrets. Then nothing has changed.
    fn reload(&self) -> Result<String, Vec<String>>;
}

/// Outcome of reloading one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reloaded {
    /// [`Reload::name`].
    pub name: &'static str,
    /// Answer of [`Reload::reload`].
    pub outcome: Result<String, Vec<String>>,
}

/// All parts of one gateway that can be read again.
#[derive(Default)]
pub struct Reloads {
    parts: Mutex<Vec<WatchedPart>>,
}

struct WatchedPart {
    part: HeldPart,
    /// The files as they were when they were last read.
    read: Observed,
    /// The files as they were at the last look, if they had changed then.
    changing: Option<Observed>,
}

enum HeldPart {
    Kept(Arc<dyn Reload>),
    WhileThere(Weak<dyn Reload>),
}

impl HeldPart {
    fn get(&self) -> Option<Arc<dyn Reload>> {
        match self {
            Self::Kept(part) => Some(Arc::clone(part)),
            Self::WhileThere(part) => part.upgrade(),
        }
    }
}

/// Marks that tell whether a file is still the same: none for a file that is missing.
type Observed = BTreeMap<PathBuf, Option<FileMark>>;

/// Device and inode, size, and times of the content's and the inode's change in nanoseconds. With the last one a file
/// counts as changed whose permissions were mended, or that was replaced by one of equal size and date.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileMark([i128; 5]);

impl Reloads {
    /// None yet.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Adds a part that has just read its files, and watches them from now on.
    pub fn add(&self, part: Arc<dyn Reload>) {
        let read = observe(&part.files());
        self.parts.lock().push(WatchedPart { part: HeldPart::Kept(part), read, changing: None });
    }

    /// As [`Self::add`], for a part that others hold: it leaves once they have dropped it.
    pub fn add_while_there(&self, part: &Arc<dyn Reload>) {
        let read = observe(&part.files());
        let part = HeldPart::WhileThere(Arc::downgrade(part));
        let mut parts = self.parts.lock();
        parts.retain(|watched| watched.part.get().is_some());
        parts.push(WatchedPart { part, read, changing: None });
    }

    /// Reads everything again, and logs what became of each part. Blocks for as long as the files take.
    pub fn reload_all(&self) -> Vec<Reloaded> {
        self.parts.lock().iter_mut().filter_map(WatchedPart::reload).collect()
    }

    /// Looks at the files every `interval` and reads those parts again of which a file changed and then held still for
    /// one interval. Never ends; cancel it by dropping.
    pub async fn watch(self: Arc<Self>, interval: Duration) {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let parts = Arc::clone(&self);
            if tokio::task::spawn_blocking(move || parts.look()).await.is_err() {
                error!("a reload panicked, what it was to replace stays");
            }
        }
    }

    /// One look at all files; returns what was read again.
    fn look(&self) -> Vec<Reloaded> {
        self.parts.lock().iter_mut().filter_map(WatchedPart::look).collect()
    }
}

impl WatchedPart {
    fn look(&mut self) -> Option<Reloaded> {
        let now = observe(&self.part.get()?.files());
        if now == self.read {
            self.changing = None;
            return None;
        }
        if self.changing.as_ref() == Some(&now) {
            return self.reload();
        }
        self.changing = Some(now);
        None
    }

    fn reload(&mut self) -> Option<Reloaded> {
        let part = self.part.get()?;
        // Before reading: a change in between then shows as one.
        self.read = observe(&part.files());
        self.changing = None;
        let (name, outcome) = (part.name(), part.reload());
        match &outcome {
            Ok(now) => info!(what = name, now, "reloaded"),
            Err(problems) => {
                for problem in problems {
                    error!(what = name, problem, "not reloaded, all stays as it was");
                }
            }
        }
        Some(Reloaded { name, outcome })
    }
}

fn observe(files: &[PathBuf]) -> Observed {
    files.iter().map(|path| (path.clone(), mark(path))).collect()
}

fn mark(path: &Path) -> Option<FileMark> {
    let meta = fs::metadata(path).ok()?;
    let nanos = |seconds: i64, nanos: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
    Some(FileMark([
        meta.dev().into(),
        meta.ino().into(),
        meta.len().into(),
        nanos(meta.mtime(), meta.mtime_nsec()),
        nanos(meta.ctime(), meta.ctime_nsec()),
    ]))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// Numbers, one a line; a file that has something else is not taken.
    struct Numbers {
        name: &'static str,
        files: Vec<PathBuf>,
        now: Mutex<Vec<u32>>,
    }

    impl Numbers {
        fn new(name: &'static str, files: &[&Path]) -> Arc<Self> {
            let files = files.iter().map(|path| (*path).to_owned()).collect();
            Arc::new(Self { name, files, now: Mutex::default() })
        }
    }

    impl Reload for Numbers {
        fn name(&self) -> &'static str {
            self.name
        }

        fn files(&self) -> Vec<PathBuf> {
            self.files.clone()
        }

        fn reload(&self) -> Result<String, Vec<String>> {
            let (mut read, mut problems) = (Vec::new(), Vec::new());
            for file in &self.files {
                for (line, text) in fs::read_to_string(file).unwrap_or_default().lines().enumerate() {
                    match text.parse() {
                        Ok(number) => read.push(number),
                        Err(_) => problems.push(format!("line {}", line + 1)),
                    }
                }
            }
            if !problems.is_empty() {
                return Err(problems);
            }
            let said = format!("{} numbers", read.len());
            *self.now.lock() = read;
            Ok(said)
        }
    }

    #[test]
    fn a_broken_file_keeps_its_own_part_and_holds_up_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        fs::write(&one, "1\n").unwrap();
        fs::write(&two, "2\n").unwrap();
        let (first, second) = (Numbers::new("firsts", &[&one]), Numbers::new("seconds", &[&two]));
        let all = Reloads::new();
        all.add(Arc::clone(&first) as _);
        all.add(Arc::clone(&second) as _);
        assert_eq!(all.reload_all().len(), 2);
        fs::write(&one, "7\nx\n9\ny\n").unwrap();
        fs::write(&two, "8\n").unwrap();
        let broken = Err(vec!["line 2".to_owned(), "line 4".to_owned()]);
        let said = [
            Reloaded { name: "firsts", outcome: broken },
            Reloaded { name: "seconds", outcome: Ok("1 numbers".to_owned()) },
        ];
        assert_eq!(all.reload_all(), said);
        assert_eq!((&**first.now.lock(), &**second.now.lock()), (&[1][..], &[8][..]));
    }

    #[test]
    fn files_that_belong_together_are_read_when_all_hold_still() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        let part = Numbers::new("numbers", &[&one, &two]);
        let all = Reloads::new();
        all.add(Arc::clone(&part) as _);
        assert_eq!(all.look(), []);
        fs::write(&one, "1\n").unwrap();
        assert_eq!(all.look(), [], "a file that has only just changed");
        fs::write(&two, "2\n").unwrap();
        assert_eq!(all.look(), [], "another one that belongs to it");
        assert_eq!(all.look().len(), 1);
        assert_eq!(*part.now.lock(), [1, 2]);
        assert_eq!(all.look(), [], "once");
        fs::write(&two, "x\n").unwrap();
        assert_eq!(all.look(), []);
        assert_eq!(all.look()[0].outcome, Err(vec!["line 1".to_owned()]));
        assert_eq!(all.look(), [], "a broken file is not read again and again");
    }

    #[test]
    fn new_permissions_and_a_file_of_equal_size_count_as_changes() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        fs::write(&one, "1\n").unwrap();
        fs::write(&other, "2\n").unwrap();
        let date = fs::metadata(&one).unwrap().modified().unwrap();
        fs::File::options().write(true).open(&other).unwrap().set_modified(date).unwrap();
        let part = Numbers::new("numbers", &[&one]);
        let all = Reloads::new();
        all.add(Arc::clone(&part) as _);
        fs::rename(&other, &one).unwrap();
        assert_eq!((all.look().len(), all.look().len()), (0, 1));
        assert_eq!(*part.now.lock(), [2]);
        fs::set_permissions(&one, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!((all.look().len(), all.look().len()), (0, 1));
    }

    #[tokio::test]
    async fn the_watch_takes_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let one = dir.path().join("one");
        let part = Numbers::new("numbers", &[&one]);
        let all = Reloads::new();
        all.add(Arc::clone(&part) as _);
        let watch = tokio::spawn(all.watch(Duration::from_millis(5)));
        fs::write(&one, "5\n").unwrap();
        let taken = async {
            while *part.now.lock() != [5] {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), taken).await.unwrap();
        watch.abort();
    }
}
