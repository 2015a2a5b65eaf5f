//! HTTP/2 frames of a connection that has not shown credentials. Frames and blocks of headers pass whole, so that HTTP/2 keeps no
//! half of one uncharged; after new streams the gate waits until their calls were looked at; and more than [`MOST_STREAMS`] at
//! once end the connection. Knows nothing of sockets.

use std::io::IoSlice;

use tokio::io::ReadBuf;

use crate::bounds::FRAME;

/// Streams at once.
pub(super) const MOST_STREAMS: usize = 8;
/// Bytes that are read at once, and that a gate may have without a charge.
pub(super) const CHUNK: usize = 4 << 10;
/// Bytes of a frame, or of a block of headers, that is not complete.
const MOST_PENDING: usize = FRAME as usize + CHUNK;
/// Turns that others get after each chunk, in which answers can go out.
const PAUSES: usize = 2;
/// A client's first bytes.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ENHANCE_YOUR_CALM: u32 = 11;
/// Sent with GOAWAY, for whoever looks for the reason.
const DEBUG_DATA: &[u8] = b"too many calls at once without credentials";

/// Next step of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Hand bytes on to HTTP/2.
    Deliver,
    /// Nothing until the calls that were handed on have been looked at.
    Wait,
    /// Nothing for now, so that what was handed on gets its turn.
    Pause,
    /// Read from the socket.
    Read,
    /// End the connection.
    Excess,
}

/// The head of a frame.
#[derive(Debug, Clone, Copy)]
struct FrameHead {
    len: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl FrameHead {
    fn read(bytes: &[u8]) -> Option<Self> {
        let &[l0, l1, l2, kind, flags, s0, s1, s2, s3] = bytes.first_chunk::<HEAD>()?;
        let len = usize::from(l0) << 16 | usize::from(l1) << 8 | usize::from(l2);
        Some(Self { len, kind, flags, stream: u32::from_be_bytes([s0 & 0x7F, s1, s2, s3]) })
    }

    fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Both directions of a connection.
#[derive(Debug, Default)]
pub(super) struct FrameGate {
    /// Bytes that were read and not handed on.
    pending: Vec<u8>,
    /// Number of pending bytes that may pass.
    ready: usize,
    /// Number of bytes behind the ready ones that were looked at.
    seen: usize,
    /// A block of headers has begun in what was looked at, which opens this stream if it is a new one.
    block: Option<u32>,
    has_preface: bool,
    /// The first frame is there.
    has_begun: bool,
    /// True if the bytes are not HTTP/2: then they pass, and HTTP/2 reports the error.
    is_foreign: bool,
    is_excess: bool,
    /// Number of streams opened by the `ready` bytes.
    opened: usize,
    /// Streams handed on, and how many of them HTTP/2 must have refused by itself.
    delivered: usize,
    forgiven: usize,
    pauses: usize,
    last_stream: u32,
    open: Vec<u32>,
    outgoing: OutgoingFrames,
}

impl FrameGate {
    /// Returns the next step, given how many calls of the connection have been looked at.
    pub(super) fn step(&mut self, looked_at: usize) -> Step {
        if self.ready > 0 {
            Step::Deliver
        } else if self.delivered > looked_at.saturating_add(self.forgiven) {
            Step::Wait
        } else if self.pauses > 0 {
            self.pauses -= 1;
            Step::Pause
        } else if self.is_excess {
            Step::Excess
        } else {
            Step::Read
        }
    }

    /// Waits no longer for those that have not been looked at.
    pub(super) fn forgive(&mut self, looked_at: usize) {
        self.forgiven = self.delivered.saturating_sub(looked_at);
    }

    /// Takes what was read.
    pub(super) fn receive(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        self.look();
    }

    /// Tells whether the preface and a first frame have come.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Memory that is to be charged.
    pub(super) fn charge(&self) -> usize {
        self.pending.capacity().saturating_sub(CHUNK)
    }

    /// The connection has shown credentials: everything passes. Whether nothing is left.
    pub(super) fn release(&mut self) -> bool {
        self.ready = self.pending.len();
        self.opened = 0;
        self.ready == 0
    }

    /// Hands on what may pass.
    pub(super) fn deliver(&mut self, to: &mut ReadBuf<'_>) {
        let len = self.ready.min(to.remaining());
        to.put_slice(&self.pending[..len]);
        self.pending.drain(..len);
        self.ready -= len;
        if self.ready > 0 {
            return;
        }
        if self.pending.is_empty() {
            self.pending = Vec::new();
        }
        self.delivered += std::mem::take(&mut self.opened);
        self.pauses = PAUSES;
    }

    /// Finds out how much of what is pending may pass.
    fn look(&mut self) {
        while !self.is_excess && !self.is_foreign {
            let rest = &self.pending[self.ready + self.seen..];
            if !self.has_preface {
                let len = rest.len().min(PREFACE.len());
                if rest[..len] != PREFACE[..len] {
                    self.is_foreign = true;
                } else if len == PREFACE.len() {
                    self.has_preface = true;
                    self.ready += len;
                } else {
                    return;
                }
                continue;
            }
            let Some(head) = FrameHead::read(rest) else { break };
            // HTTP/2 takes none of these, and says so.
            self.is_foreign = head.len > FRAME as usize;
            if self.is_foreign || rest.len() < HEAD + head.len {
                break;
            }
            self.take(head);
        }
        if self.is_foreign {
            self.ready = self.pending.len();
            self.seen = 0;
        } else if self.pending.len() - self.ready > MOST_PENDING {
            self.is_excess = true;
        }
    }

    /// A whole frame.
    fn take(&mut self, head: FrameHead) {
        self.has_begun = true;
        let is_new = head.kind == HEADERS && head.stream > self.last_stream;
        if is_new && self.open.len() >= MOST_STREAMS {
            self.is_excess = true;
            return;
        }
        match head.kind {
            HEADERS => self.block = Some(head.stream),
            RST_STREAM => self.close(head.stream),
            _ => {}
        }
        let Some(stream) = self.block else { return self.pass(HEAD + head.len) };
        self.seen += HEAD + head.len;
        // Another frame within a block is for HTTP/2 to refuse.
        if head.has(END_HEADERS) || !matches!(head.kind, HEADERS | CONTINUATION) {
            self.block = None;
            if stream > self.last_stream {
                self.last_stream = stream;
                self.open.push(stream);
                self.opened += 1;
            }
            self.pass(0);
        }
    }

    /// Lets through what was looked at, and `more`.
    fn pass(&mut self, more: usize) {
        self.ready += std::mem::take(&mut self.seen) + more;
    }

    fn close(&mut self, stream: u32) {
        self.open.retain(|open| *open != stream);
    }

    /// Takes note of what was written.
    pub(super) fn wrote(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if let Some(ended) = self.outgoing.advance(&mut bytes) {
                self.close(ended);
            }
        }
    }

    /// The same for the first `len` bytes of several pieces.
    pub(super) fn wrote_vectored(&mut self, pieces: &[IoSlice<'_>], mut len: usize) {
        for piece in pieces {
            let of_this = len.min(piece.len());
            self.wrote(&piece[..of_this]);
            len -= of_this;
        }
    }

    /// The frame that ends the connection; `None` in the middle of another.
    pub(super) fn go_away(&self) -> Option<Vec<u8>> {
        if !self.outgoing.is_between_frames() {
            return None;
        }
        let len = u8::try_from(8 + DEBUG_DATA.len()).unwrap_or(u8::MAX);
        let mut frame = vec![0, 0, len, GOAWAY, 0, 0, 0, 0, 0];
        frame.extend_from_slice(&self.last_stream.to_be_bytes());
        frame.extend_from_slice(&ENHANCE_YOUR_CALM.to_be_bytes());
        frame.extend_from_slice(DEBUG_DATA);
        Some(frame)
    }
}

/// Frames on their way out.
#[derive(Debug, Default)]
struct OutgoingFrames {
    head: [u8; HEAD],
    head_len: usize,
    /// Bytes of the payload that are missing.
    missing: usize,
}

impl OutgoingFrames {
    fn is_between_frames(&self) -> bool {
        self.head_len == 0 && self.missing == 0
    }

    /// Takes a part of `bytes`; returns the stream that ends with it.
    fn advance(&mut self, bytes: &mut &[u8]) -> Option<u32> {
        if self.missing > 0 {
            let len = self.missing.min(bytes.len());
            *bytes = &bytes[len..];
            self.missing -= len;
            return None;
        }
        let len = (HEAD - self.head_len).min(bytes.len());
        let (part, rest) = bytes.split_at(len);
        self.head[self.head_len..][..len].copy_from_slice(part);
        *bytes = rest;
        self.head_len += len;
        let head = FrameHead::read(&self.head).filter(|_| self.head_len == HEAD)?;
        self.head_len = 0;
        self.missing = head.len;
        let ends = head.kind == RST_STREAM || matches!(head.kind, DATA | HEADERS) && head.has(END_STREAM);
        ends.then_some(head.stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: u8 = 4;

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let [_, len @ ..] = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&len[..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    }

    fn beginning() -> Vec<u8> {
        [&PREFACE[..], &frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 9])].concat()
    }

    fn streams(ids: impl Iterator<Item = u8>) -> Vec<u8> {
        ids.flat_map(|id| frame(HEADERS, END_HEADERS, id, b"block")).collect()
    }

    /// Hands on what may pass until it would read or end.
    fn pass(gate: &mut FrameGate) -> (Vec<u8>, Step) {
        let mut passed = Vec::new();
        loop {
            match gate.step(usize::MAX) {
                Step::Deliver => {
                    let mut room = [0; 64];
                    let mut to = ReadBuf::new(&mut room);
                    gate.deliver(&mut to);
                    passed.extend_from_slice(to.filled());
                }
                Step::Pause => {}
                step => return (passed, step),
            }
        }
    }

    fn after(bytes: &[u8]) -> (FrameGate, Vec<u8>, Step) {
        let mut gate = FrameGate::default();
        gate.receive(bytes);
        let (passed, step) = pass(&mut gate);
        (gate, passed, step)
    }

    #[test]
    fn bytes_pass_as_they_came_however_they_are_cut_and_frames_whole() {
        let mut bytes = beginning();
        bytes.extend(streams([1, 3].into_iter()));
        bytes.extend(frame(DATA, END_STREAM, 1, &[7; 300]));
        bytes.extend(frame(HEADERS, 0, 5, b"half of a block"));
        let (frames, block) = (bytes.len(), bytes.len() - HEAD - 15);
        bytes.extend(frame(CONTINUATION, END_HEADERS, 5, b"and the rest"));
        for step in [1, 7, 24, 33, 100, 1_000] {
            let (mut gate, mut passed) = (FrameGate::default(), Vec::new());
            for chunk in bytes.chunks(step) {
                gate.receive(chunk);
                let (more, next) = pass(&mut gate);
                assert_eq!(next, Step::Read);
                passed.extend(more);
                assert_eq!(passed, bytes[..passed.len()]);
                assert!(!(block + 1..bytes.len()).contains(&passed.len()), "the block passes whole");
            }
            assert_eq!(passed.len(), bytes.len(), "{step}");
            assert_eq!(gate.open, [1, 3, 5]);
        }
        assert!(!after(&bytes[..24]).0.has_begun() && !after(&bytes[..38]).0.has_begun());
        let (gate, passed, _) = after(&bytes[..frames]);
        assert!(gate.has_begun() && passed.len() == block);
    }

    #[test]
    fn a_ninth_stream_at_once_is_an_excess_and_ended_ones_do_not_count() {
        let eight = [beginning(), streams((0..8).map(|n| 2 * n + 1))].concat();
        let (mut gate, passed, step) = after(&eight);
        assert_eq!((passed.len(), step), (eight.len(), Step::Read));
        // One answered, one reset by each side.
        gate.wrote(&frame(HEADERS, END_HEADERS, 1, b"not its end"));
        gate.wrote(&frame(HEADERS, END_HEADERS | END_STREAM, 1, b"trailers"));
        let reset = frame(RST_STREAM, 0, 3, &[0; 4]);
        gate.wrote_vectored(&[IoSlice::new(&reset[..4]), IoSlice::new(&reset[4..])], 13);
        gate.receive(&frame(RST_STREAM, 0, 5, &[0; 4]));
        let three = streams([17, 19, 21].into_iter());
        gate.receive(&three);
        assert_eq!(pass(&mut gate).1, Step::Read);
        // Trailers open nothing.
        gate.receive(&streams([7].into_iter()));
        assert_eq!(pass(&mut gate).1, Step::Read);
        gate.receive(&streams([23].into_iter()));
        assert_eq!(pass(&mut gate), (Vec::new(), Step::Excess));
    }

    #[test]
    fn what_came_before_the_excess_is_looked_at_first_and_may_undo_it() {
        let bytes = [beginning(), streams((0..20).map(|n| 2 * n + 1))].concat();
        let mut gate = FrameGate::default();
        gate.receive(&bytes);
        let mut room = vec![0; 1_000];
        let mut to = ReadBuf::new(&mut room);
        assert_eq!(gate.step(0), Step::Deliver);
        gate.deliver(&mut to);
        assert_eq!(to.filled(), &bytes[..bytes.len() - 12 * 14]);
        assert_eq!((gate.step(0), gate.step(MOST_STREAMS - 1)), (Step::Wait, Step::Wait));
        assert_eq!(gate.step(MOST_STREAMS), Step::Pause);
        assert!(!gate.release());
        gate.deliver(&mut to);
        assert_eq!(to.filled(), bytes);
        assert!(gate.release());
    }

    /// Rules out that a stream which HTTP/2 refuses by itself stops a connection for good.
    #[test]
    fn streams_that_are_never_looked_at_are_forgiven_after_a_while() {
        let mut gate = FrameGate::default();
        gate.receive(&[beginning(), streams([1, 3].into_iter())].concat());
        let mut room = vec![0; 1_000];
        gate.deliver(&mut ReadBuf::new(&mut room));
        assert_eq!(gate.step(1), Step::Wait);
        gate.forgive(1);
        assert_eq!((gate.step(1), gate.step(1), gate.step(1)), (Step::Pause, Step::Pause, Step::Read));
        gate.receive(&streams([5].into_iter()));
        gate.deliver(&mut ReadBuf::new(&mut room));
        assert_eq!((gate.step(1), gate.step(2)), (Step::Wait, Step::Pause));
    }

    #[test]
    fn a_block_of_headers_without_end_is_an_excess() {
        let mut bytes = [beginning(), frame(HEADERS, 0, 1, &[0; 10_000])].concat();
        let (gate, passed, step) = after(&bytes);
        assert_eq!((passed.len(), step), (beginning().len(), Step::Read));
        assert!((10_000 - CHUNK..20_000).contains(&gate.charge()), "{}", gate.charge());
        bytes.extend(frame(CONTINUATION, 0, 1, &[0; 11_000]));
        assert_eq!(after(&bytes).2, Step::Excess);
    }

    #[test]
    fn what_is_not_http2_passes_to_be_refused_there() {
        for bytes in [&b"GET / HTTP/1.1\r\n"[..], b"X"] {
            assert_eq!(after(bytes).1, bytes);
        }
        let long = [beginning(), vec![0, 0x40, 1, 0, 0, 0, 0, 0, 1]].concat();
        assert_eq!(after(&long).1, long);
    }

    #[test]
    fn goaway_is_sent_between_frames_only_and_names_the_last_stream() {
        let (mut gate, ..) = after(&[beginning(), streams([1, 3].into_iter())].concat());
        let goaway = gate.go_away().unwrap();
        assert_eq!(goaway[..17], [0, 0, 50, 7, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 11]);
        assert_eq!(goaway.len(), HEAD + 50);
        let settings = frame(SETTINGS, 0, 0, &[0; 6]);
        for cut in [1, 8, 9, 14] {
            gate.wrote(&settings[..cut]);
            assert!(gate.go_away().is_none(), "{cut}");
            gate.wrote(&settings[cut..]);
            assert!(gate.go_away().is_some());
        }
    }
}
