//! The walk over the pages of trees. Layouts are those of `MDB_page` and `MDB_node`.
//!
//! The invariants of every file that LMDB wrote are demanded of each page: its number and kind, the bounds of its free space,
//! nodes inside the page and apart from each other, keys in order and between the keys of the page above, children that no other
//! page has, large values whole; of each tree its depth and its counts; of the free pages that they are in the file, in order,
//! listed once and in no tree.

use std::{
    cmp::Ordering,
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::FileExt as _,
    time::Instant,
};

use super::{
    Entry, Terms,
    page::{Db, PAGE_HEADER, u16_at, u32_at, u64_at},
};

const NODE_HEADER: usize = 8;
const BRANCH: u16 = 1;
const LEAF: u16 = 2;
const OVERFLOW: u16 = 4;
const BIG_DATA: u16 = 1;
const SUB_DATABASE: u16 = 2;
const NO_PAGE: u64 = u64::MAX;
/// Both meta pages come before all others.
const FIRST: u64 = 2;
/// LMDB's own bound on the length of a path.
const MAX_DEPTH: u16 = 32;
const MAX_KEY: usize = 511;

/// Pages between two looks at the clock.
const STEP: u64 = 1024;

/// Bytes of a large value that are read at once.
const CHUNK: usize = 1 << 20;

/// Why a walk ends early.
#[derive(Debug)]
pub(super) enum VerifyFault {
    Damage(String),
    OutOfTime,
    Io(io::Error),
}

impl From<io::Error> for VerifyFault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

pub(super) fn damage(reason: &str) -> VerifyFault {
    VerifyFault::Damage(reason.to_owned())
}

/// A file that the disk does not give back is damaged; other errors say nothing about it.
pub(super) fn unreadable(error: io::Error, what: &str) -> VerifyFault {
    // EIO, and what file systems with checksums say: EBADMSG, EILSEQ, EUCLEAN.
    match error.raw_os_error() {
        Some(5 | 74 | 84 | 117) => VerifyFault::Damage(format!("{what} cannot be read: {error}")),
        _ => VerifyFault::Io(error),
    }
}

fn bad(page: u64, what: &str) -> VerifyFault {
    VerifyFault::Damage(format!("page {page}: {what}"))
}

/// A walk over one file.
pub(super) struct FileWalk<'a> {
    file: &'a File,
    page: usize,
    /// Whole pages in the file, and pages that there should be.
    present: u64,
    length: u64,
    /// A bit for each page that is in a tree or free.
    seen: Vec<u64>,
    /// Free pages that were never written.
    beyond: Vec<u64>,
    visited: u64,
    /// Buffers for pages.
    spare: Vec<Vec<u8>>,
    /// Receiver of a table's entries, when they are not only to be verified.
    taker: Option<&'a mut Taker<'a>>,
    terms: Terms<'a>,
}

/// Takes entries, in order of key.
pub(super) type Taker<'a> = dyn FnMut(&[u8], &[u8]) -> io::Result<()> + 'a;

/// Kind of tree that is walked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TreeKind {
    /// Free pages by transaction; up to this one.
    Free(u64),
    /// Tables by name.
    Main,
    /// The table of the note about all others.
    Note,
    Table,
}

/// Findings in a tree.
#[derive(Default)]
struct TreeFindings {
    branches: u64,
    leaves: u64,
    overflow: u64,
    entries: u64,
    tables: Vec<(Vec<u8>, Db)>,
    /// Entries of the note.
    note: Vec<Entry>,
}

/// A tree and where in it the walk is.
struct TreePosition<'k> {
    kind: TreeKind,
    depth: u16,
    level: u16,
    /// All keys are at or above this, and below that.
    low: Option<&'k [u8]>,
    high: Option<&'k [u8]>,
}

/// A node in a page: its key, and bytes or number of a page.
struct PageNode<'p> {
    key: &'p [u8],
    flags: u16,
    /// Size of the data, or number of the child in a branch.
    number: u64,
    /// Data of the node that lies in the page.
    data: &'p [u8],
}

impl<'a> FileWalk<'a> {
    /// A walk over a file of `present` whole pages of `page` bytes that should have `length` of them.
    pub(super) fn new(file: &'a File, page: usize, present: u64, length: u64, terms: Terms<'a>) -> Self {
        let words = usize::try_from(present / 64 + 1).unwrap_or(usize::MAX);
        let (beyond, spare) = (Vec::new(), Vec::new());
        Self {
            file,
            page,
            present,
            length,
            seen: vec![0; words],
            beyond,
            visited: 0,
            spare,
            taker: None,
            terms,
        }
    }

    /// The list of free pages, as of `transaction`.
    pub(super) fn free_pages(&mut self, db: &Db, transaction: u64) -> Result<(), VerifyFault> {
        self.tree(db, TreeKind::Free(transaction))?;
        self.beyond.sort_unstable();
        let missing = self.length.saturating_sub(self.present);
        let in_order = self.beyond.iter().zip(self.present..).all(|(page, expected)| *page == expected);
        if self.beyond.len() as u64 != missing || !in_order {
            return Err(damage("it was cut short"));
        }
        Ok(())
    }

    /// The table of tables, and all of them.
    pub(super) fn tables(&mut self, db: &Db) -> Result<(), VerifyFault> {
        let tables = self.names(db)?;
        let (known, note) = (&self.terms.layout.tables, self.terms.layout.note);
        let all = || known.iter().copied().chain([note]);
        let is_known = |name: &[u8]| all().any(|known| known.as_bytes() == name);
        let missing = all().any(|name| !tables.iter().any(|(found, _)| found == name.as_bytes()));
        // An older version may have made fewer, a newer one more.
        if !known.is_empty() && missing && tables.iter().any(|(name, _)| !is_known(name)) {
            return Err(damage("the name of a table is not what it was"));
        }
        for (name, db) in &tables {
            self.table(name, db)?;
        }
        (self.terms.progress)(self.visited, self.present);
        Ok(())
    }

    /// The tables by name, without a look at them.
    pub(super) fn names(&mut self, db: &Db) -> Result<Vec<(Vec<u8>, Db)>, VerifyFault> {
        Ok(self.tree(db, TreeKind::Main)?.tables)
    }

    /// One table.
    pub(super) fn table(&mut self, name: &[u8], db: &Db) -> Result<(), VerifyFault> {
        let of = |fault| match fault {
            VerifyFault::Damage(reason) => {
                VerifyFault::Damage(format!("table {:?}: {reason}", String::from_utf8_lossy(name)))
            }
            other => other,
        };
        if db.flags != 0 {
            return Err(of(damage("it is of another kind")));
        }
        let is_note = name == self.terms.layout.note.as_bytes();
        let tree = self.tree(db, if is_note { TreeKind::Note } else { TreeKind::Table }).map_err(of)?;
        if is_note && !(self.terms.layout.is_sound)(&tree.note) {
            return Err(of(damage("the note of the format is not what it was")));
        }
        Ok(())
    }

    /// As [`Self::table`], and gives each entry to `taker`.
    pub(super) fn take(mut self, name: &[u8], db: &Db, taker: &'a mut Taker<'a>) -> Result<(), VerifyFault> {
        self.taker = Some(taker);
        self.table(name, db)
    }

    fn tree(&mut self, db: &Db, kind: TreeKind) -> Result<TreeFindings, VerifyFault> {
        let mut tree = TreeFindings::default();
        if db.root != NO_PAGE {
            if !(1..=MAX_DEPTH).contains(&db.depth) {
                return Err(damage("the depth of a tree is impossible"));
            }
            self.visit(
                db.root,
                &TreePosition { kind, depth: db.depth, level: 1, low: None, high: None },
                &mut tree,
            )?;
        }
        let found = (tree.branches, tree.leaves, tree.overflow, tree.entries);
        // LMDB uses none of these counts for the free pages.
        if !matches!(kind, TreeKind::Free(_)) && found != (db.branches, db.leaves, db.overflow, db.entries) {
            return Err(damage("a tree has more or less than is noted of it"));
        }
        Ok(tree)
    }

    fn visit(
        &mut self,
        number: u64,
        place: &TreePosition<'_>,
        tree: &mut TreeFindings,
    ) -> Result<(), VerifyFault> {
        let mut page = self.spare.pop().unwrap_or_else(|| vec![0; self.page]);
        self.claim(number)?;
        self.read(number, 0, &mut page)?;
        let branch = place.level < place.depth;
        let nodes = nodes(&page, branch).filter(|_| {
            let kind = if branch { BRANCH } else { LEAF };
            u64_at(&page, 0) == Some(number) && u16_at(&page, 10) == Some(kind)
        });
        let nodes = nodes.ok_or_else(|| bad(number, "it is not a page of its tree"))?;
        // A branch with one child ends the process, but for the tree of free pages.
        let least = if branch && !matches!(place.kind, TreeKind::Free(_)) { 2 } else { 1 };
        if nodes.len() < least || !in_order(&nodes, branch, place) {
            return Err(bad(number, "its keys are not in order"));
        }
        if branch {
            tree.branches += 1;
            for (at, node) in nodes.iter().enumerate() {
                let low = if at == 0 { place.low } else { Some(node.key) };
                let high = nodes.get(at + 1).map(|next| next.key).or(place.high);
                self.visit(node.number, &TreePosition { level: place.level + 1, low, high, ..*place }, tree)?;
            }
        } else {
            tree.leaves += 1;
            tree.entries += nodes.len() as u64;
            for node in &nodes {
                self.entry(number, node, place.kind, tree)?;
            }
        }
        self.spare.push(page);
        Ok(())
    }

    /// A key and its value, on page `number`.
    fn entry(
        &mut self,
        number: u64,
        node: &PageNode<'_>,
        kind: TreeKind,
        tree: &mut TreeFindings,
    ) -> Result<(), VerifyFault> {
        let wrong = || bad(number, "a value is not of its tree");
        let expected = if kind == TreeKind::Main { SUB_DATABASE } else { 0 };
        if node.flags & !BIG_DATA != expected {
            return Err(wrong());
        }
        let mut large = Vec::new();
        if node.flags & BIG_DATA != 0 {
            if kind == TreeKind::Main {
                return Err(wrong());
            }
            let first = u64_at(node.data, 0).ok_or_else(wrong)?;
            let wanted = matches!(kind, TreeKind::Free(_)) || self.taker.is_some();
            tree.overflow += self.large(first, node.number, wanted.then_some(&mut large))?;
        }
        let data = if node.flags & BIG_DATA != 0 { &large[..] } else { node.data };
        if let Some(taker) = self.taker.as_mut().filter(|_| matches!(kind, TreeKind::Note | TreeKind::Table))
        {
            taker(node.key, data)?;
        }
        match kind {
            TreeKind::Free(transaction) => {
                let by = u64_at(node.key, 0).filter(|by| (1..=transaction).contains(by));
                by.and_then(|_| self.list(data))
                    .ok_or_else(|| bad(number, "it lists free pages that are not"))
            }
            TreeKind::Main => {
                let db = Db::read(data).filter(|_| data.len() == Db::SIZE).ok_or_else(wrong)?;
                tree.tables.push((node.key.to_vec(), db));
                Ok(())
            }
            TreeKind::Note if node.flags & BIG_DATA == 0 => {
                tree.note.push((node.key.to_vec(), data.to_vec()));
                Ok(())
            }
            TreeKind::Note | TreeKind::Table => Ok(()),
        }
    }

    /// Free pages: how many, then their numbers from the highest down.
    fn list(&mut self, data: &[u8]) -> Option<()> {
        let count = usize::try_from(u64_at(data, 0)?).ok()?;
        let mut above = self.length;
        let pages = data.get(8..count.checked_mul(8)?.checked_add(8)?)?;
        for page in pages.chunks_exact(8) {
            let page = u64_at(page, 0)?;
            if page >= above || page < FIRST {
                return None;
            }
            above = page;
            if page < self.present {
                self.claim(page).ok()?;
            } else {
                self.beyond.push(page);
            }
        }
        Some(())
    }

    /// A value of `size` bytes on pages of its own from `first` on; how many. Reads it, into `out` if that is wanted.
    fn large(&mut self, first: u64, size: u64, mut out: Option<&mut Vec<u8>>) -> Result<u64, VerifyFault> {
        let mut header = [0; PAGE_HEADER];
        if first < FIRST || first >= self.present {
            return Err(bad(first, "it is not in the file"));
        }
        self.read(first, 0, &mut header)?;
        let pages = u32_at(&header, 12).map_or(0, u64::from);
        let needed = (PAGE_HEADER as u64 - 1 + size) / self.page as u64 + 1;
        let named = u64_at(&header, 0) == Some(first) && u16_at(&header, 10) == Some(OVERFLOW);
        if !named || pages < needed {
            return Err(bad(first, "it is not the begin of a large value"));
        }
        for page in first..first + pages {
            self.claim(page)?;
        }
        let mut at = PAGE_HEADER as u64;
        let end = at + size;
        let mut buffer = Vec::new();
        while at < end {
            buffer.resize(usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK), 0);
            self.read(first, at, &mut buffer)?;
            at += buffer.len() as u64;
            if let Some(out) = &mut out {
                out.extend_from_slice(&buffer);
            }
        }
        Ok(pages)
    }

    /// Notes that a page is in use, or free. It must be in the file and be noted once.
    fn claim(&mut self, page: u64) -> Result<(), VerifyFault> {
        if page < FIRST || page >= self.present.min(self.length) {
            return Err(bad(page, "it is not in the file"));
        }
        let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
        match self.seen.get_mut(word) {
            Some(word) if *word & bit == 0 => *word |= bit,
            _ => return Err(bad(page, "it is used twice")),
        }
        self.visited += 1;
        if self.visited.is_multiple_of(STEP) {
            (self.terms.progress)(self.visited, self.present);
            if self.terms.until.is_some_and(|until| now() >= until) {
                return Err(VerifyFault::OutOfTime);
            }
        }
        Ok(())
    }

    /// Bytes of a page, and of those after it.
    fn read(&self, page: u64, at: u64, bytes: &mut [u8]) -> Result<(), VerifyFault> {
        self.file.read_exact_at(bytes, page * self.page as u64 + at).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => bad(page, "it is not in the file"),
            _ => unreadable(error, &format!("page {page}")),
        })
    }
}

/// The nodes of a page, if they are inside it and apart from each other.
fn nodes(page: &[u8], branch: bool) -> Option<Vec<PageNode<'_>>> {
    let (lower, upper) = (usize::from(u16_at(page, 12)?), usize::from(u16_at(page, 14)?));
    let pointers = lower.checked_sub(PAGE_HEADER)?;
    if upper < lower || upper > page.len() || !pointers.is_multiple_of(2) {
        return None;
    }
    let mut nodes = Vec::with_capacity(pointers / 2);
    let mut places = Vec::with_capacity(pointers / 2);
    for pointer in (PAGE_HEADER..lower).step_by(2) {
        let at = usize::from(u16_at(page, pointer)?);
        let low = u64::from(u32_at(page, at)?);
        let flags = u16_at(page, at + 4)?;
        let key_at = at + NODE_HEADER;
        let data_at = key_at + usize::from(u16_at(page, at + 6)?);
        let size = match (branch, flags & BIG_DATA != 0) {
            (true, _) => 0,
            (false, true) => 8,
            (false, false) => usize::try_from(low).ok()?,
        };
        let end = data_at.checked_add(size)?;
        if at < upper || !at.is_multiple_of(2) {
            return None;
        }
        places.push((at, end));
        nodes.push(PageNode {
            key: page.get(key_at..data_at)?,
            flags,
            number: if branch { low | u64::from(flags) << 32 } else { low },
            data: page.get(data_at..end)?,
        });
    }
    places.sort_unstable();
    let apart = places.windows(2).all(|pair| pair[0].1 <= pair[1].0);
    apart.then_some(nodes)
}

/// Returns whether keys are no longer than allowed, in order, and between the keys of the page above.
fn in_order(nodes: &[PageNode<'_>], branch: bool, place: &TreePosition<'_>) -> bool {
    let by_number = matches!(place.kind, TreeKind::Free(_));
    let compare = |one: &[u8], other: &[u8]| match by_number {
        true => u64_at(one, 0).cmp(&u64_at(other, 0)),
        false => one.cmp(other),
    };
    // The first key of a branch stands for all that are lower, whatever it says.
    let keys = || nodes.iter().skip(usize::from(branch)).map(|node| node.key);
    let sound = |key: &[u8]| if by_number { key.len() == 8 } else { (1..=MAX_KEY).contains(&key.len()) };
    let after = place.low.is_none_or(|low| keys().next().is_none_or(|first| compare(low, first).is_le()));
    let before =
        place.high.is_none_or(|high| keys().next_back().is_none_or(|last| compare(last, high).is_lt()));
    let rising = keys().zip(keys().skip(1)).all(|(one, next)| compare(one, next) == Ordering::Less);
    keys().all(sound) && after && before && rising
}

#[expect(clippy::disallowed_methods, reason = "bounds how long a start may take")]
fn now() -> Instant {
    Instant::now()
}
