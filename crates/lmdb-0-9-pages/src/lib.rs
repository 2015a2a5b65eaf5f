//! The file of LMDB 0.9 (data version 1, as `heed` 0.22 has it), with plain reads only: whether it is as LMDB left it, and
//! what can still be read of a damaged one.
//!
//! LMDB maps the file and trusts it: a page that is not what it should be ends the process, by a signal beyond the end
//! of the file, by an assertion or a wild pointer elsewhere. So what may be damaged is read first, here, where nothing
//! that a file holds can do harm: meta pages, every page of every tree, the list of free pages ([`verify`]). What passes is
//! safe to read and to write for LMDB; what records say is judged by their checksums.
//!
//! A sound file may be longer than its meta page says (a commit that never happened), and shorter, when its last pages
//! are free and were never written. Layouts are those of `MDB_meta` and `MDB_db` on 64-bit machines.
//!
//! ```text
//! page      numbers in a page, the record of a tree
//! walk      every page of a tree, and of the list of free pages
//! salvage   the tables of a damaged file that are whole
//! ```

mod page;
mod salvage;
mod walk;

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind},
    os::unix::fs::FileExt as _,
    path::Path,
    time::Instant,
};

use page::{Db, PAGE_HEADER, u16_at, u32_at, u64_at};
pub use salvage::{Salvage, SalvageTable};
use walk::{FileWalk, VerifyFault};

const MAGIC: u32 = 0xBEEF_C0DE;
const FORMAT: u32 = 1;
const META_PAGE: u16 = 8;
const INTEGER_KEY: u16 = 8;
const META: usize = 136;

/// A key and its value.
pub type Entry = (Vec<u8>, Vec<u8>);

/// Facts that a file is expected to have.
#[derive(Clone)]
pub struct Layout<'a> {
    /// Tables of the newest version besides the note; none where they are not known.
    pub tables: Vec<&'a str>,
    /// Table that says in which format the others are.
    pub note: &'a str,
    /// Returns whether the entries of the note are as they were written.
    pub is_sound: fn(&[Entry]) -> bool,
}

/// Terms on which a file is verified.
pub struct Terms<'a> {
    /// Expected tables.
    pub layout: Layout<'a>,
    /// The check ends then, if it has not before.
    pub until: Option<Instant>,
    /// Called now and then with how many pages were looked at and how many there are.
    pub progress: &'a mut dyn FnMut(u64, u64),
}

/// State of the file.
#[derive(Debug, PartialEq, Eq)]
pub enum Look {
    /// There is none.
    Absent,
    /// There is nothing in it: created by a process that ended before its first write, or cut off.
    Empty,
    /// Safe to map.
    Sound,
    /// Not to be mapped, with the reason.
    Damaged(String),
    /// The part looked at is sound, and time was up before the end.
    Unfinished,
}

/// Looks at the meta pages only. A file that is shorter than they say is verified all the same.
///
/// # Errors
/// Those of reading the file, but for what says that the disk has lost a part of it: that is damage.
pub fn look(path: &Path) -> io::Result<Look> {
    examine(path, None)
}

/// Looks at every page in use.
///
/// # Errors
/// As [`look`].
pub fn verify(path: &Path, terms: Terms<'_>) -> io::Result<Look> {
    examine(path, Some(terms))
}

fn examine(path: &Path, terms: Option<Terms<'_>>) -> io::Result<Look> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Look::Absent),
        Err(e) => return Err(e),
    };
    let size = file.metadata()?.len();
    if size == 0 {
        return Ok(Look::Empty);
    }
    match pages(&file, size, terms) {
        Ok(length) => {
            if size < length {
                OpenOptions::new().write(true).open(path)?.set_len(length)?;
            }
            Ok(Look::Sound)
        }
        Err(VerifyFault::Damage(reason)) => Ok(Look::Damaged(reason)),
        Err(VerifyFault::OutOfTime) => Ok(Look::Unfinished),
        Err(VerifyFault::Io(error)) => Err(error),
    }
}

/// The length that the newest meta page gives the file.
fn pages(file: &File, size: u64, terms: Option<Terms<'_>>) -> Result<u64, VerifyFault> {
    let [first, second] = metas(file);
    let (first, second) = (first?, second?);
    let page = first.page;
    // Commits write them in turn.
    let in_turn = |page: u64, meta: &Meta| meta.transaction % 2 == page || meta.transaction == 0;
    let apart = first.transaction.abs_diff(second.transaction);
    if apart > 1 || second.page != page || !in_turn(0, &first) || !in_turn(1, &second) {
        return Err(walk::damage("its meta pages do not fit each other"));
    }
    let newest = if second.transaction > first.transaction { second } else { first };
    let length = newest.length()?;
    if size >= length && terms.is_none() {
        return Ok(length);
    }
    let mut silent = |_, _| {};
    let terms = match terms {
        Some(Terms { layout, until, progress }) => Terms { layout, until, progress },
        None => Terms { layout: UNKNOWN, until: None, progress: &mut silent },
    };
    let mut walk = FileWalk::new(file, page as usize, size / page, length / page, terms);
    walk.free_pages(&newest.free, newest.transaction)?;
    walk.tables(&newest.main)?;
    Ok(length)
}

const UNKNOWN: Layout<'static> = Layout { tables: Vec::new(), note: "", is_sound: |_| true };

/// Both meta pages. The size of a page is the first one's; where that is damaged, the one that the other is found by.
fn metas(file: &File) -> [Result<Meta, VerifyFault>; 2] {
    const SIZES: [u64; 7] = [4096, 8192, 16_384, 32_768, 2048, 1024, 512];
    let first = read_meta(file, 0, "its first meta page is not LMDB's");
    let at = |page| read_meta(file, page, "its second meta page is not LMDB's");
    let second = match &first {
        Ok(first) => at(first.page),
        Err(_) => {
            let mut found =
                SIZES.into_iter().filter_map(|page| at(page).ok().filter(|meta| meta.page == page));
            found.next().ok_or_else(|| walk::damage("it has no meta page"))
        }
    };
    [first, second]
}

struct Meta {
    page: u64,
    free: Db,
    main: Db,
    last_page: u64,
    transaction: u64,
}

impl Meta {
    /// The length of the file, if that and the kinds of its trees are possible.
    fn length(&self) -> Result<u64, VerifyFault> {
        let length = self.last_page.checked_add(1).and_then(|pages| pages.checked_mul(self.page));
        let length = length.filter(|length| *length <= i64::MAX as u64 && self.last_page > 0);
        let length = length.ok_or_else(|| walk::damage("its last page is impossible"))?;
        if self.free.flags != INTEGER_KEY || self.main.flags != 0 {
            return Err(walk::damage("its meta page names other kinds of trees"));
        }
        Ok(length)
    }
}

fn read_meta(file: &File, at: u64, otherwise: &str) -> Result<Meta, VerifyFault> {
    let mut bytes = [0; PAGE_HEADER + META];
    if let Err(error) = file.read_exact_at(&mut bytes, at) {
        return Err(match error.kind() {
            ErrorKind::UnexpectedEof => walk::damage(otherwise),
            _ => walk::unreadable(error, "a meta page"),
        });
    }
    let meta = &bytes[PAGE_HEADER..];
    let read = || {
        let is_meta = u16_at(&bytes, 10)? & META_PAGE != 0;
        let sound = is_meta && u32_at(meta, 0)? == MAGIC && u32_at(meta, 4)? == FORMAT;
        sound.then_some(Meta {
            page: u32_at(meta, 24)?.into(),
            free: Db::read(meta.get(24..)?)?,
            main: Db::read(meta.get(72..)?)?,
            last_page: u64_at(meta, 120)?,
            transaction: u64_at(meta, 128)?,
        })
    };
    let meta = read().ok_or_else(|| walk::damage(otherwise))?;
    if !meta.page.is_power_of_two() || !(512..=32_768).contains(&meta.page) {
        return Err(walk::damage("its page size is impossible"));
    }
    Ok(meta)
}
