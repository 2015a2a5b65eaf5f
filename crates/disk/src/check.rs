//! Verification that an LMDB file is as LMDB left it, with plain reads only.
//!
//! LMDB maps the file and trusts it: a page that is not what it should be ends the process, by a signal beyond the end
//! of the file, by an assertion or a wild pointer elsewhere. So what may be damaged is read first, here, where nothing
//! that a file holds can do harm: meta pages, every page of every tree, the list of free pages (`verify`). What passes is
//! safe to read and to write for LMDB; what records say is judged by their checksums.
//!
//! A sound file may be longer than its meta page says (a commit that never happened), and shorter, when its last pages
//! are free and were never written. Layouts are those of `MDB_meta` and `MDB_db` on 64-bit machines.

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind},
    os::unix::fs::FileExt as _,
    path::Path,
};

use super::{
    page::{Db, PAGE_HEADER, u16_at, u32_at, u64_at},
    verify::{self, FileWalk, Terms, VerifyFault},
};

const MAGIC: u32 = 0xBEEF_C0DE;
const FORMAT: u32 = 1;
const META_PAGE: u16 = 8;
const INTEGER_KEY: u16 = 8;
const META: usize = 136;

/// State of the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
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
pub(super) fn look(path: &Path) -> io::Result<Look> {
    examine(path, None)
}

/// Looks at every page in use.
pub(super) fn verify(path: &Path, terms: Terms<'_>) -> io::Result<Look> {
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
    let first = read_meta(file, 0, "its first meta page is not LMDB's")?;
    let page = first.page;
    if !page.is_power_of_two() || !(512..=32_768).contains(&page) {
        return Err(verify::damage("its page size is impossible"));
    }
    let second = read_meta(file, page, "its second meta page is not LMDB's")?;
    // Commits write them in turn.
    let in_turn = |page: u64, meta: &Meta| meta.transaction % 2 == page || meta.transaction == 0;
    let apart = first.transaction.abs_diff(second.transaction);
    if apart > 1 || second.page != page || !in_turn(0, &first) || !in_turn(1, &second) {
        return Err(verify::damage("its meta pages do not fit each other"));
    }
    let newest = if second.transaction > first.transaction { second } else { first };
    let length = newest.last_page.checked_add(1).and_then(|pages| pages.checked_mul(page));
    let length = length.filter(|length| *length <= i64::MAX as u64 && newest.last_page > 0);
    let length = length.ok_or_else(|| verify::damage("its last page is impossible"))?;
    if newest.free.flags != INTEGER_KEY || newest.main.flags != 0 {
        return Err(verify::damage("its meta page names other kinds of trees"));
    }
    if size >= length && terms.is_none() {
        return Ok(length);
    }
    let mut silent = |_, _| {};
    let (tables, until, progress) = match terms {
        Some(terms) => (terms.tables, terms.until, terms.progress),
        None => (&[][..], None, &mut silent as &mut dyn FnMut(u64, u64)),
    };
    let terms = Terms { tables, until, progress };
    let mut walk = FileWalk::new(file, page as usize, size / page, length / page, terms);
    walk.free_pages(&newest.free, newest.transaction)?;
    walk.tables(&newest.main)?;
    Ok(length)
}

struct Meta {
    page: u64,
    free: Db,
    main: Db,
    last_page: u64,
    transaction: u64,
}

fn read_meta(file: &File, at: u64, otherwise: &str) -> Result<Meta, VerifyFault> {
    let mut bytes = [0; PAGE_HEADER + META];
    if let Err(error) = file.read_exact_at(&mut bytes, at) {
        return Err(match error.kind() {
            ErrorKind::UnexpectedEof => verify::damage(otherwise),
            _ => verify::unreadable(error, "a meta page"),
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
    read().ok_or_else(|| verify::damage(otherwise))
}
