//! A look at an LMDB file before it is mapped, with plain reads only.
//!
//! LMDB maps the file and ends the process when a page is not what it should be: by a signal beyond the
//! end of the file, by an assertion elsewhere. A file cut short or overwritten from outside must be found
//! before that. A sound file may be longer than its meta page says (a commit that never happened), and also
//! shorter, when its last pages are free and were never written. So of a shorter file all pages in use are
//! visited. Layouts are those of `MDB_meta`, `MDB_page`, `MDB_node` and `MDB_db` on 64-bit machines.

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind, Read, Seek, SeekFrom},
    path::Path,
};

const MAGIC: u32 = 0xBEEF_C0DE;
const FORMAT: u32 = 1;
const PAGE_HEADER: usize = 16;
const META: usize = 136;
const NODE_HEADER: usize = 8;
const BRANCH: u16 = 1;
const LEAF: u16 = 2;
const OVERFLOW: u16 = 4;
const BIG_DATA: u16 = 1;
const SUB_DATABASE: u16 = 2;
const NO_PAGE: u64 = u64::MAX;

/// What the file is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// There is none, or nothing in it.
    Absent,
    /// Safe to map.
    Sound,
    /// Not to be mapped, with the reason.
    Damaged(&'static str),
}

/// Looks at the data file; fills a sound one up to the length its meta page says.
pub(super) fn look(path: &Path) -> io::Result<Look> {
    look_as(path, false)
}

/// Whether every page in use of a sound file is one of its tree, found with plain reads. Contents are not judged.
pub(super) fn look_at_pages(path: &Path) -> io::Result<bool> {
    Ok(!matches!(look_as(path, true)?, Look::Damaged(_)))
}

fn look_as(path: &Path, always_walk: bool) -> io::Result<Look> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Look::Absent),
        Err(e) => return Err(e),
    };
    let size = file.metadata()?.len();
    if size == 0 {
        // Created by a process that ended before its first write; LMDB starts it anew.
        return Ok(Look::Absent);
    }
    let Some(first) = read_meta(&mut file, 0)? else {
        return Ok(Look::Damaged("its first meta page is not LMDB's"));
    };
    let page = first.page;
    if !page.is_power_of_two() || !(512..=32_768).contains(&page) {
        return Ok(Look::Damaged("its page size is impossible"));
    }
    let Some(second) = read_meta(&mut file, page)? else {
        return Ok(Look::Damaged("its second meta page is not LMDB's"));
    };
    let newest = if second.transaction > first.transaction { second } else { first };
    let Some(length) = newest.last_page.checked_add(1).and_then(|pages| pages.checked_mul(page)) else {
        return Ok(Look::Damaged("its last page is impossible"));
    };
    if size < length || always_walk {
        let mut walk = Walk { file: &mut file, page, pages: size / page, visited: 0 };
        if !walk.tree(newest.roots[0])? || !walk.tree(newest.roots[1])? {
            return Ok(Look::Damaged("it was cut short or overwritten"));
        }
        if size < length {
            OpenOptions::new().write(true).open(path)?.set_len(length)?;
        }
    }
    Ok(Look::Sound)
}

struct Meta {
    page: u64,
    /// Of the free list and of the table of databases.
    roots: [u64; 2],
    last_page: u64,
    transaction: u64,
}

fn read_meta(file: &mut File, at: u64) -> io::Result<Option<Meta>> {
    let mut bytes = [0; PAGE_HEADER + META];
    if !read_at(file, at, &mut bytes)? {
        return Ok(None);
    }
    let meta = &bytes[PAGE_HEADER..];
    let read = || {
        let sound = u32_at(meta, 0)? == MAGIC && u32_at(meta, 4)? == FORMAT;
        sound.then_some(Meta {
            page: u32_at(meta, 24)?.into(),
            roots: [u64_at(meta, 64)?, u64_at(meta, 112)?],
            last_page: u64_at(meta, 120)?,
            transaction: u64_at(meta, 128)?,
        })
    };
    Ok(read())
}

struct Walk<'a> {
    file: &'a mut File,
    page: u64,
    /// Whole pages in the file.
    pages: u64,
    visited: u64,
}

impl Walk<'_> {
    /// Whether all pages below `root` are in the file.
    fn tree(&mut self, root: u64) -> io::Result<bool> {
        let mut open = vec![root];
        let mut page = vec![0; self.page as usize];
        while let Some(number) = open.pop() {
            if number == NO_PAGE {
                continue;
            }
            self.visited += 1;
            let present = self.visited <= self.pages
                && number < self.pages
                && read_at(self.file, number * self.page, &mut page)?;
            if !present || !self.below(number, &page, &mut open).unwrap_or(false) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds to `open` what a page points to. False or `None` if it is not a page of a tree.
    fn below(&self, number: u64, page: &[u8], open: &mut Vec<u64>) -> Option<bool> {
        let flags = u16_at(page, 10)?;
        if u64_at(page, 0)? != number {
            return Some(false);
        }
        if flags & OVERFLOW != 0 {
            return Some(number.checked_add(u32_at(page, 12)?.into())? <= self.pages);
        }
        if flags & (BRANCH | LEAF) == 0 {
            return Some(false);
        }
        let nodes = usize::from(u16_at(page, 12)?).checked_sub(PAGE_HEADER)? / 2;
        for node in 0..nodes {
            let at = usize::from(u16_at(page, PAGE_HEADER + 2 * node)?);
            let node_flags = u16_at(page, at + 4)?;
            let low = u64::from(u32_at(page, at)?);
            let data = at + NODE_HEADER + usize::from(u16_at(page, at + 6)?);
            if flags & BRANCH != 0 {
                open.push(low | u64::from(node_flags) << 32);
            } else if node_flags & BIG_DATA != 0 {
                open.push(u64_at(page, data)?);
            } else if node_flags & SUB_DATABASE != 0 {
                open.push(u64_at(page, data + 40)?);
            }
        }
        Some(true)
    }
}

/// False if the file ends before `bytes` is full.
fn read_at(file: &mut File, at: u64, bytes: &mut [u8]) -> io::Result<bool> {
    file.seek(SeekFrom::Start(at))?;
    match file.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(e),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes)
}
