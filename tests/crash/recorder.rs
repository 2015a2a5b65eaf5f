//! The log of tests/recorder/recorder.c, and what a power cut at a moment of it would have left on the disk.
//!
//! Of each file everything is kept that a sync, begun after it and ended before the cut, covers; of all else a random
//! part in random order, each write whole, torn at sectors of 512 bytes or missing. Names (creation, renaming,
//! unlinking) are taken to reach the disk at once and in order, as a journalling file system does before it says that
//! a file of that name is synced.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use super::{rng::Rng, support};

const SECTOR: usize = 512;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// A file was opened for writing under this name, perhaps made, perhaps emptied.
    Open {
        path: PathBuf,
        emptied: bool,
    },
    Write {
        offset: u64,
        data: Vec<u8>,
        synchronous: bool,
    },
    Truncate {
        len: u64,
    },
    Sync,
    Rename {
        from: PathBuf,
        to: PathBuf,
    },
    Unlink {
        path: PathBuf,
    },
    MakeDir {
        path: PathBuf,
    },
}

#[derive(Debug, Clone)]
pub(crate) struct Operation {
    pub(crate) begin: u64,
    pub(crate) end: u64,
    pub(crate) inode: u64,
    pub(crate) change: Change,
}

/// Compiles the recorder once; none, loudly, without a C compiler.
pub(crate) fn library() -> Option<&'static Path> {
    static LIBRARY: OnceLock<Option<(tempfile::TempDir, PathBuf)>> = OnceLock::new();
    let built = LIBRARY.get_or_init(|| {
        if !support::need("cc", support::on_path("cc")) {
            return None;
        }
        let dir = tempfile::tempdir().expect("make a directory for the recorder");
        let library = dir.path().join("recorder.so");
        let source = support::root().join("tests/recorder/recorder.c");
        let output = Command::new("cc")
            .args(["-shared", "-fPIC", "-O2", "-o"])
            .args([&library, &source])
            .args(["-ldl", "-lpthread"])
            .output()
            .expect("run cc");
        assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
        Some((dir, library))
    });
    built.as_ref().map(|(_, library)| library.as_path())
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn number(&mut self, len: usize) -> Option<u64> {
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(self.take(len)?);
        Some(u64::from_le_bytes(bytes))
    }

    fn operation(&mut self) -> Option<Operation> {
        let (begin, end, inode, offset) =
            (self.number(8)?, self.number(8)?, self.number(8)?, self.number(8)?);
        let (data_len, path_len) = (self.number(8)? as usize, self.number(4)? as usize);
        let (kind, flags) = (self.number(2)?, self.number(2)?);
        let path = |bytes: &[u8]| PathBuf::from(String::from_utf8_lossy(bytes).into_owned());
        let name = path(self.take(path_len)?);
        let data = self.take(data_len)?;
        let change = match kind {
            1 => Change::Open { path: name, emptied: flags & 2 != 0 },
            2 => Change::Write { offset, data: data.to_vec(), synchronous: flags & 1 != 0 },
            3 => Change::Truncate { len: offset },
            4 => Change::Sync,
            5 => Change::Rename { from: name, to: path(data) },
            6 => Change::Unlink { path: name },
            7 => Change::MakeDir { path: name },
            other => panic!("the recorder's log has a record of kind {other}"),
        };
        Some(Operation { begin, end, inode, change })
    }
}

/// Reads a log; a record that the end of the process has cut short is left out.
pub(crate) fn read(log: &Path) -> Vec<Operation> {
    let bytes = fs::read(log).expect("read the recorder's log");
    let mut reader = Reader(&bytes);
    std::iter::from_fn(|| reader.operation()).collect()
}

/// A file while an image is built.
#[derive(Debug, Default)]
struct File {
    content: Vec<u8>,
    /// Writes and truncations no sync covers yet, with the time of their end.
    loose: Vec<(u64, Change)>,
}

impl File {
    fn put(&mut self, offset: u64, data: &[u8]) {
        let start = offset as usize;
        if self.content.len() < start + data.len() {
            self.content.resize(start + data.len(), 0);
        }
        self.content[start..start + data.len()].copy_from_slice(data);
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Write { offset, data, .. } => self.put(*offset, data),
            Change::Truncate { len } => self.content.resize(*len as usize, 0),
            _ => {}
        }
    }

    /// Moves the changes made before `begin` to the disk.
    fn sync(&mut self, begin: u64) {
        let loose = std::mem::take(&mut self.loose);
        for (end, change) in loose {
            if end <= begin {
                self.apply(&change);
            } else {
                self.loose.push((end, change));
            }
        }
    }

    /// Some of what is not synced gets to the disk.
    fn cut(&mut self, rng: &mut Rng) {
        let mut loose: Vec<Change> =
            std::mem::take(&mut self.loose).into_iter().map(|(_, change)| change).collect();
        match rng.between(0, 4) {
            // Nothing, all, a head of it in order, or any of it in any order.
            0 => return,
            1 => {}
            2 => loose.truncate(rng.between(0, loose.len() as u64 + 1) as usize),
            _ => {
                for last in (1..loose.len()).rev() {
                    loose.swap(last, rng.between(0, last as u64 + 1) as usize);
                }
                loose.retain(|_| rng.one_in(2));
            }
        }
        let tear = rng.one_in(2);
        for change in &loose {
            match change {
                Change::Write { offset, data, .. } if tear && rng.one_in(4) => {
                    for (index, sector) in data.chunks(SECTOR).enumerate() {
                        if rng.one_in(2) {
                            self.put(offset + (index * SECTOR) as u64, sector);
                        }
                    }
                }
                _ => self.apply(change),
            }
        }
    }
}

/// Makes `target` what a power cut at `cut` would have left of `source`, which was empty when the log began.
/// Without random numbers all writes are in it, synced or not.
pub(crate) fn image(
    operations: &[Operation],
    cut: u64,
    source: &Path,
    target: &Path,
    mut rng: Option<&mut Rng>,
) {
    let mut files: Vec<File> = Vec::new();
    let mut inodes: HashMap<u64, usize> = HashMap::new();
    // Names of files and (without a file) directories.
    let mut names: BTreeMap<PathBuf, Option<usize>> = BTreeMap::new();
    for operation in operations.iter().filter(|operation| operation.begin <= cut) {
        let done = operation.end <= cut;
        let known = inodes.get(&operation.inode).copied();
        match (&operation.change, known) {
            (Change::Open { path, emptied }, _) if done => {
                let file = match names.get(path) {
                    Some(Some(file)) => *file,
                    _ => {
                        files.push(File::default());
                        files.len() - 1
                    }
                };
                names.insert(path.clone(), Some(file));
                inodes.insert(operation.inode, file);
                if *emptied {
                    files[file].loose.push((operation.end, Change::Truncate { len: 0 }));
                }
            }
            (change @ Change::Write { synchronous, .. }, Some(file)) => {
                if *synchronous && done {
                    files[file].apply(change);
                } else {
                    files[file].loose.push((operation.end, change.clone()));
                }
            }
            (change @ Change::Truncate { .. }, Some(file)) => {
                files[file].loose.push((operation.end, change.clone()));
            }
            (Change::Sync, Some(file)) if done => files[file].sync(operation.begin),
            (Change::Rename { from, to }, _) if done => rename(&mut names, from, to),
            (Change::Unlink { path }, _) if done => {
                names.remove(path);
            }
            (Change::MakeDir { path }, _) if done => {
                names.insert(path.clone(), None);
            }
            _ => {}
        }
    }
    fs::create_dir_all(target).expect("make the image's directory");
    for (path, file) in names {
        let Ok(path) = path.strip_prefix(source) else { continue };
        let path = target.join(path);
        match file {
            None => fs::create_dir_all(&path).expect("make a directory of the image"),
            Some(file) => {
                fs::create_dir_all(path.parent().expect("a parent")).expect("make a directory of the image");
                match &mut rng {
                    Some(rng) => files[file].cut(rng),
                    None => files[file].sync(u64::MAX),
                }
                fs::write(&path, &files[file].content).expect("write a file of the image");
            }
        }
    }
}

/// A file or a directory with all that is below it.
fn rename(names: &mut BTreeMap<PathBuf, Option<usize>>, from: &Path, to: &Path) {
    let moved: Vec<PathBuf> = names.keys().filter(|path| path.starts_with(from)).cloned().collect();
    for path in moved {
        let file = names.remove(&path).expect("a name that was just found");
        let rest = path.strip_prefix(from).expect("a name below the old one");
        let name = if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) };
        names.insert(name, file);
    }
}

/// Environment of a process whose directory is recorded, with the files that stop or fill its disk.
pub(crate) fn environment(library: &Path, data: &Path, control: &Path) -> Vec<(String, String)> {
    let file = |name: &str| control.join(name).display().to_string();
    vec![
        ("LD_PRELOAD".to_owned(), library.display().to_string()),
        ("RECORDER_DIR".to_owned(), data.display().to_string()),
        ("RECORDER_LOG".to_owned(), file("recorder.log")),
        ("RECORDER_STALL".to_owned(), file("stall")),
        ("RECORDER_FULL".to_owned(), file("full")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(at: u64, inode: u64, change: Change) -> Operation {
        Operation { begin: at, end: at + 1, inode, change }
    }

    fn write(at: u64, inode: u64, offset: u64, byte: u8, synchronous: bool) -> Operation {
        operation(at, inode, Change::Write { offset, data: vec![byte; 4], synchronous })
    }

    /// All images that many seeds make of one file at this moment.
    fn images(operations: &[Operation], cut: u64) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        for seed in 0..128 {
            let dir = tempfile::tempdir().unwrap();
            image(operations, cut, Path::new("/data"), dir.path(), Some(&mut Rng::new(seed)));
            all.push(fs::read(dir.path().join("b")).unwrap_or_default());
        }
        all.sort();
        all.dedup();
        all
    }

    #[test]
    fn what_a_sync_covers_is_in_every_image_and_the_rest_in_some() {
        let path = PathBuf::from("/data/a");
        let operations = [
            operation(1, 7, Change::Open { path: path.clone(), emptied: false }),
            write(10, 7, 0, b'a', false),
            operation(20, 7, Change::Sync),
            write(30, 7, 4, b'b', false),
            operation(40, 0, Change::Rename { from: path, to: PathBuf::from("/data/b") }),
            write(50, 7, 0, b'c', true),
            operation(60, 7, Change::Sync),
        ];
        assert_eq!(images(&operations, 45), [b"aaaa".to_vec(), b"aaaabbbb".to_vec()]);
        assert_eq!(images(&operations, 55), [b"cccc".to_vec(), b"ccccbbbb".to_vec()]);
        assert_eq!(images(&operations, 61), [b"ccccbbbb".to_vec()]);
        // Before the new name there is none.
        assert_eq!(images(&operations, 35), [b"".to_vec()]);
    }

    #[test]
    fn a_write_that_the_cut_interrupts_may_be_torn() {
        let data: Vec<u8> = (0..8).flat_map(|sector| [b'a' + sector; SECTOR]).collect();
        let operations = [
            operation(1, 7, Change::Open { path: PathBuf::from("/data/b"), emptied: false }),
            Operation {
                begin: 10,
                end: 20,
                inode: 7,
                change: Change::Write { offset: 0, data, synchronous: true },
            },
        ];
        let found = images(&operations, 15);
        assert!(found.len() > 4, "{} images", found.len());
        assert_eq!(images(&operations, 25).len(), 1);
    }
}
