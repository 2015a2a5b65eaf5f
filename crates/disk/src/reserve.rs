//! Room kept for removals: a file that is deleted when the disk is full, and made again when there is room.
//!
//! LMDB changes no page in place, so also a removal needs free pages. Without a reserve a full disk would stay full.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::PathBuf,
    time::{Duration, Instant},
};

/// Its size, and how much room a map with a largest size keeps.
pub(super) const RESERVE: usize = 1 << 20;

/// Between two tries to make it.
const PAUSE: Duration = Duration::from_secs(1);

/// The file.
pub(super) struct Reserve {
    path: PathBuf,
    there: bool,
    tried: Option<Instant>,
}

impl Reserve {
    /// Opens the reserve at `path`, and makes it if there is room.
    pub(super) fn open(path: PathBuf) -> Self {
        let there = fs::metadata(&path).is_ok_and(|found| found.len() == RESERVE as u64);
        let mut reserve = Self { path, there, tried: None };
        reserve.make();
        reserve
    }

    /// Makes the file unless it exists, and returns whether it exists now. After a failure it waits a second before it
    /// tries again. It asks for twice the room, so that what was just freed is not taken back at once.
    pub(super) fn make(&mut self) -> bool {
        let now = now();
        if self.there || self.tried.is_some_and(|tried| now < tried + PAUSE) {
            return self.there;
        }
        self.there = self.write().is_ok();
        self.tried = (!self.there).then_some(now);
        if !self.there {
            self.spend();
        }
        self.there
    }

    /// Deletes the file, which frees its room.
    pub(super) fn spend(&mut self) {
        self.there = false;
        // A file that is missing frees nothing.
        let _ = fs::remove_file(&self.path);
    }

    /// Not zeros, which some file systems do not store. Without a sync: the room is taken when it is written, and after a
    /// power cut the file is made anew.
    fn write(&self) -> io::Result<()> {
        let mut file = File::create(&self.path)?;
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut bytes = Vec::with_capacity(2 * RESERVE);
        while bytes.len() < 2 * RESERVE {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes.extend_from_slice(&state.to_le_bytes());
        }
        file.write_all(&bytes)?;
        file.set_len(RESERVE as u64)
    }
}

#[expect(clippy::disallowed_methods, reason = "spaces the tries while the disk is full")]
fn now() -> Instant {
    Instant::now()
}
