//! The data representations of section 1.5: integers, strings, binary data.

use ascii::AsciiStr;

use super::DecodeError;

/// Largest value of a variable byte integer, so also the largest Remaining Length.
pub(super) const MAX_VARINT: usize = 268_435_455;

const SHORT: DecodeError = DecodeError::Malformed("packet ends inside a field");

/// Reads fields off the front of a packet's bytes. Never panics, never allocates.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    #[inline]
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the bytes that are left.
    #[inline]
    pub(super) fn rest(self) -> &'a [u8] {
        self.bytes
    }

    /// Fails unless everything has been read.
    #[inline]
    pub(super) fn finish(&self) -> Result<(), DecodeError> {
        if !self.bytes.is_empty() {
            return Err(DecodeError::Malformed("bytes after the end of the packet"));
        }
        Ok(())
    }

    #[inline]
    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        let (head, tail) = self.bytes.split_at_checked(len).ok_or(SHORT)?;
        self.bytes = tail;
        Ok(head)
    }

    #[inline]
    pub(super) fn u8(&mut self) -> Result<u8, DecodeError> {
        let (&byte, tail) = self.bytes.split_first().ok_or(SHORT)?;
        self.bytes = tail;
        Ok(byte)
    }

    #[inline]
    pub(super) fn u16(&mut self) -> Result<u16, DecodeError> {
        let (&head, tail) = self.bytes.split_first_chunk().ok_or(SHORT)?;
        self.bytes = tail;
        Ok(u16::from_be_bytes(head))
    }

    #[inline]
    pub(super) fn u32(&mut self) -> Result<u32, DecodeError> {
        let (&head, tail) = self.bytes.split_first_chunk().ok_or(SHORT)?;
        self.bytes = tail;
        Ok(u32::from_be_bytes(head))
    }

    /// A variable byte integer in its shortest form [MQTT-1.5.5-1].
    #[inline]
    pub(super) fn varint(&mut self) -> Result<u32, DecodeError> {
        let (value, width) = varint(self.bytes)?.ok_or(SHORT)?;
        if width != varint_len(value as usize) {
            return Err(DecodeError::Malformed("integer not in its shortest form [MQTT-1.5.5-1]"));
        }
        self.take(width)?;
        Ok(value)
    }

    /// Two bytes of length and as many bytes of data.
    #[inline]
    pub(super) fn binary(&mut self) -> Result<&'a [u8], DecodeError> {
        let len = self.u16()?;
        self.take(usize::from(len))
    }

    /// A UTF-8 encoded string without U+0000.
    #[inline]
    pub(super) fn str(&mut self) -> Result<&'a str, DecodeError> {
        let bytes = self.binary()?;
        if bytes.contains(&0) {
            return Err(NUL);
        }
        utf8(bytes)
    }

    pub(super) fn string(&mut self) -> Result<String, DecodeError> {
        self.str().map(str::to_owned)
    }

    /// A topic name: a string without wildcards, empty if `may_be_empty` [MQTT-3.3.2-1].
    #[inline]
    pub(super) fn topic(&mut self) -> Result<&'a str, DecodeError> {
        let bytes = self.binary()?;
        // The cause is sought only on failure.
        if has_special(bytes) {
            return Err(topic_error(bytes));
        }
        utf8(bytes)
    }
}

const NUL: DecodeError = DecodeError::Malformed("string with U+0000 [MQTT-1.5.4-2] [MQTT-1.5.3-2]");

/// `bytes` as text; std refuses encoded surrogates and overlong forms too [MQTT-1.5.4-1].
#[inline]
fn utf8(bytes: &[u8]) -> Result<&str, DecodeError> {
    // Nearly every topic is ASCII, which is seen at half the cost of std's check of a short string.
    if let Ok(ascii) = AsciiStr::from_ascii(bytes) {
        return Ok(ascii.as_str());
    }
    std::str::from_utf8(bytes)
        .map_err(|_| DecodeError::Malformed("ill-formed UTF-8 [MQTT-1.5.4-1] [MQTT-1.5.3-1]"))
}

/// Returns whether `bytes` has NUL, `+` or `#`. Looks at eight bytes at a time: half the cost of a plain loop over a
/// topic of 31 bytes.
#[inline]
fn has_special(bytes: &[u8]) -> bool {
    const EACH: u64 = 0x0101_0101_0101_0101;
    // The top bit of some byte is set exactly if some byte of `word` is 0.
    let zeros = |word: u64| word.wrapping_sub(EACH) & !word & (EACH << 7);
    let special = |chunk: [u8; 8]| {
        let word = u64::from_le_bytes(chunk);
        // `#` and `+` differ in bit 3 only.
        zeros(word) | zeros((word | (EACH * 0x08)) ^ (EACH * u64::from(b'+')))
    };
    let Some(&last) = bytes.last_chunk() else {
        return bytes.iter().any(|&b| matches!(b, 0 | b'+' | b'#'));
    };
    // The last chunk may overlap the one before.
    let (chunks, _) = bytes.as_chunks();
    let found = chunks.iter().fold(special(last), |found, &chunk| found | special(chunk));
    found != 0
}

#[cold]
fn topic_error(bytes: &[u8]) -> DecodeError {
    if bytes.contains(&0) {
        return NUL;
    }
    DecodeError::Malformed("wildcard in a topic name [MQTT-3.3.2-2] [MQTT-3.3.2-14]")
}

/// The variable byte integer at the front of `bytes` and its width; `Ok(None)` when it is incomplete.
/// The width need not be the shortest.
#[inline]
pub(super) fn varint(bytes: &[u8]) -> Result<Option<(u32, usize)>, DecodeError> {
    let mut value = 0;
    for (index, &byte) in bytes.iter().take(4).enumerate() {
        value |= u32::from(byte & 0x7f) << (7 * index);
        if byte < 0x80 {
            return Ok(Some((value, index + 1)));
        }
    }
    if bytes.len() >= 4 {
        return Err(DecodeError::Malformed("variable byte integer longer than 4 bytes"));
    }
    Ok(None)
}

/// Bytes that `value` takes as a variable byte integer.
#[inline]
pub(super) fn varint_len(value: usize) -> usize {
    match value {
        0..=0x7f => 1,
        0x80..=0x3fff => 2,
        0x4000..=0x1f_ffff => 3,
        _ => 4,
    }
}

/// Appends `value`, at most [`MAX_VARINT`], in its shortest form [MQTT-1.5.5-1].
#[inline]
pub(super) fn put_varint(value: usize, out: &mut Vec<u8>) {
    let mut left = value.min(MAX_VARINT);
    loop {
        #[expect(clippy::cast_possible_truncation, reason = "seven bits")]
        let low = (left & 0x7f) as u8;
        left >>= 7;
        if left == 0 {
            out.push(low);
            return;
        }
        out.push(low | 0x80);
    }
}

/// Appends length and data. Longer data than 65,535 bytes is cut: no peer could have sent it.
#[inline]
pub(super) fn put_binary(data: &[u8], out: &mut Vec<u8>) {
    let len = u16::try_from(data.len()).unwrap_or(u16::MAX);
    out.extend_from_slice(&len.to_be_bytes());
    out.extend_from_slice(data.get(..usize::from(len)).unwrap_or(data));
}

/// Appends a string, cut at a character boundary if it is longer than 65,535 bytes.
#[inline]
pub(super) fn put_str(text: &str, out: &mut Vec<u8>) {
    put_binary(cut(text).as_bytes(), out);
}

/// Bytes that [`put_str`] appends.
#[inline]
pub(super) fn str_len(text: &str) -> usize {
    2 + cut(text).len()
}

/// Bytes that [`put_binary`] appends.
#[inline]
pub(super) fn binary_len(data: &[u8]) -> usize {
    2 + data.len().min(usize::from(u16::MAX))
}

#[inline]
fn cut(text: &str) -> &str {
    if text.len() <= usize::from(u16::MAX) {
        return text;
    }
    let end = text.floor_char_boundary(usize::from(u16::MAX));
    text.get(..end).unwrap_or_default()
}

/// Appends what `write` appends, with its length before it as a variable byte integer.
pub(super) fn put_sized(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    write(out);
    let len = out.len() - start;
    put_varint(len, out);
    // The length was appended last; bring it to the front.
    let width = out.len() - start - len;
    out[start..].rotate_right(width);
}
