//! Frames of a file, read through a buffer.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use super::format::{self, FRAME, LogFrame, MARK};

/// Bytes read at once where one record is wanted, and where all are.
const NEAR: usize = 2 << 10;
const FAR: usize = 256 << 10;

/// A stretch of a file up to an end, of which a part is in memory.
pub(super) struct FileWindow<'a> {
    file: &'a File,
    end: u64,
    start: u64,
    buffer: Vec<u8>,
}

impl<'a> FileWindow<'a> {
    /// Shows the file up to `end`.
    pub(super) fn new(file: &'a File, end: u64) -> Self {
        Self { file, end, start: 0, buffer: Vec::new() }
    }

    /// Bytes from `place` on: at least `wanted` of them, unless the end comes before.
    fn bytes(&mut self, place: u64, wanted: usize, ahead: usize) -> io::Result<&[u8]> {
        let wanted = (self.end.saturating_sub(place)).min(wanted as u64) as usize;
        let known = place.checked_sub(self.start).and_then(|skip| usize::try_from(skip).ok());
        let known = known.and_then(|skip| self.buffer.get(skip..)).map_or(0, <[u8]>::len);
        if known < wanted || wanted == 0 {
            let length = (self.end.saturating_sub(place)).min(wanted.max(ahead) as u64) as usize;
            self.start = place;
            self.buffer.clear();
            self.buffer.resize(length, 0);
            let mut read = 0;
            while read < length {
                match self.file.read_at(&mut self.buffer[read..], place + read as u64) {
                    // The file is shorter than it was.
                    Ok(0) => break,
                    Ok(more) => read += more,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => {
                        self.buffer.clear();
                        return Err(error);
                    }
                }
            }
            self.buffer.truncate(read);
            return Ok(&self.buffer);
        }
        Ok(&self.buffer[(place - self.start) as usize..])
    }

    /// The frame at `place`, which is `offset` in the log; `None` if it is not sound. `dense`: what comes after it is
    /// wanted, too.
    pub(super) fn frame(
        &mut self,
        place: u64,
        offset: u64,
        dense: bool,
    ) -> io::Result<Option<(LogFrame<'_>, usize)>> {
        let ahead = if dense { FAR } else { NEAR };
        let head = self.bytes(place, FRAME, ahead)?;
        let Some(length) = format::frame_length(head) else { return Ok(None) };
        if length as u64 > self.end.saturating_sub(place) {
            return Ok(None);
        }
        Ok(format::frame(self.bytes(place, length, ahead)?, offset))
    }

    /// Returns the end of the frame at `place` by its own length, if that is before the end of the file.
    pub(super) fn claimed_end(&mut self, place: u64) -> io::Result<Option<u64>> {
        let length = format::frame_length(self.bytes(place, FRAME, FAR)?);
        Ok(length.map(|length| place + length as u64).filter(|end| *end < self.end))
    }

    /// The first place from `place` on at which a sound batch begins; offsets are places and `shift` more.
    pub(super) fn find_batch(&mut self, mut place: u64, shift: u64) -> io::Result<Option<u64>> {
        while place < self.end {
            let bytes = self.bytes(place, format::BATCH, FAR)?;
            if bytes.len() < format::BATCH {
                return Ok(None);
            }
            let starts = bytes.len() - format::BATCH + 1;
            let found = (0..starts).find(|&start| {
                bytes[start + FRAME + 1..].starts_with(&MARK) && {
                    let frame = format::frame(&bytes[start..], (place + start as u64).wrapping_add(shift));
                    matches!(frame, Some((LogFrame::Batch, _)))
                }
            });
            if let Some(start) = found {
                return Ok(Some(place + start as u64));
            }
            place += starts as u64;
        }
        Ok(None)
    }

    /// Returns whether the mark of a batch is nowhere in the file.
    pub(super) fn has_no_batch(&mut self) -> io::Result<bool> {
        let length = usize::try_from(self.end).unwrap_or(usize::MAX);
        let bytes = self.bytes(0, length, 0)?;
        Ok(!bytes.windows(MARK.len()).any(|window| window == MARK))
    }
}
