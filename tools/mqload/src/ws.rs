//! The client's side of WebSocket (RFC 6455): handshake, masked binary frames
//! out, frames in. No extensions; the data of frames is one stream of bytes.

/// The example of RFC 6455, with the answer that belongs to it.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
/// A real client draws a mask for each frame, against proxies that a script
/// might fool. Here it need only cost the broker what any mask costs.
const MASK: [u8; 4] = [0x5a, 0xc3, 0x17, 0xe9];
/// A longer answer to the handshake is not one of MQTT over WebSocket.
const MAX_RESPONSE: usize = 8192;

const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// The request that opens a connection.
pub fn request(host: &str, path: &str) -> Vec<u8> {
    format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
    )
    .into_bytes()
}

/// Length of the whole response once it is there; `None` while it is not.
///
/// # Errors
/// The answer is not the acceptance of [`request`].
pub fn response(b: &[u8]) -> Result<Option<usize>, String> {
    let Some(end) = b.windows(4).position(|w| w == b"\r\n\r\n") else {
        return if b.len() > MAX_RESPONSE { Err("WebSocket: endless response".into()) } else { Ok(None) };
    };
    let text = String::from_utf8_lossy(&b[..end]);
    let mut lines = text.split("\r\n");
    let status = lines.next().unwrap_or_default();
    if !status.starts_with("HTTP/1.1 101") {
        return Err(format!("WebSocket: {status}"));
    }
    let field = |name: &str| {
        let mut all = text.split("\r\n").filter_map(|l| l.split_once(':'));
        all.find(|(k, _)| k.eq_ignore_ascii_case(name)).map(|(_, v)| v.trim().to_string())
    };
    if field("Sec-WebSocket-Accept").as_deref() != Some(ACCEPT) {
        return Err("WebSocket: wrong Sec-WebSocket-Accept".into());
    }
    if field("Sec-WebSocket-Protocol").as_deref() != Some("mqtt") {
        return Err("WebSocket: subprotocol mqtt not accepted".into());
    }
    Ok(Some(end + 4))
}

/// Appends `data` as one masked frame.
fn frame(out: &mut Vec<u8>, opcode: u8, data: &[u8]) {
    out.push(0x80 | opcode);
    match data.len() {
        n @ 0..=125 => out.push(0x80 | n as u8),
        n @ 126..=0xffff => {
            out.push(0x80 | 126);
            out.extend_from_slice(&(n as u16).to_be_bytes());
        }
        n => {
            out.push(0x80 | 127);
            out.extend_from_slice(&(n as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(&MASK);
    let at = out.len();
    out.extend_from_slice(data);
    let mut chunks = out[at..].chunks_exact_mut(8);
    let wide = u64::from_ne_bytes([MASK[0], MASK[1], MASK[2], MASK[3], MASK[0], MASK[1], MASK[2], MASK[3]]);
    for c in &mut chunks {
        let x = u64::from_ne_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]) ^ wide;
        c.copy_from_slice(&x.to_ne_bytes());
    }
    for (i, b) in chunks.into_remainder().iter_mut().enumerate() {
        *b ^= MASK[i % 4];
    }
}

/// Appends `data` as one binary frame.
pub fn binary(out: &mut Vec<u8>, data: &[u8]) {
    frame(out, BINARY, data);
}

/// Takes the frames of one connection apart.
#[derive(Default)]
pub struct Frames {
    /// Beginning of a frame header that has not arrived whole.
    head: Vec<u8>,
    /// Bytes of the current frame still to come, and its opcode.
    left: u64,
    opcode: u8,
    /// Data of a control frame.
    control: Vec<u8>,
}

impl Frames {
    /// Moves the frames' data to the beginning of `buf` and returns how much it
    /// is. Answers to pings are appended to `answers`.
    ///
    /// # Errors
    /// The broker closed the connection or broke the protocol.
    pub fn unwrap(&mut self, buf: &mut [u8], answers: &mut Vec<u8>) -> Result<usize, String> {
        let (mut from, mut to) = (0, 0);
        loop {
            if self.left == 0 {
                self.finish(answers)?;
                while !self.header()? {
                    let Some(&b) = buf.get(from) else { return Ok(to) };
                    self.head.push(b);
                    from += 1;
                }
                continue;
            }
            if from == buf.len() {
                return Ok(to);
            }
            let n = (buf.len() - from).min(usize::try_from(self.left).unwrap_or(usize::MAX));
            if self.opcode < CLOSE {
                buf.copy_within(from..from + n, to);
                to += n;
            } else {
                self.control.extend_from_slice(&buf[from..from + n]);
            }
            from += n;
            self.left -= n as u64;
        }
    }

    /// Reads the header in `head`; false while it is not whole. An empty data
    /// frame is over with its header.
    fn header(&mut self) -> Result<bool, String> {
        let h = &self.head;
        let [first, second, rest @ ..] = &h[..] else { return Ok(false) };
        let left = match (second, rest) {
            (0x80.., _) => return Err("WebSocket: masked frame from broker".into()),
            (126, [a, b]) => u64::from(u16::from_be_bytes([*a, *b])),
            (127, [a, b, c, d, e, f, g, h]) => u64::from_be_bytes([*a, *b, *c, *d, *e, *f, *g, *h]),
            (126 | 127, _) => return Ok(false),
            (n, _) => u64::from(*n),
        };
        let opcode = first & 15;
        if first & 0x70 != 0 || !matches!(opcode, 0 | BINARY | CLOSE | PING | PONG) {
            return Err(format!("WebSocket: unexpected frame 0x{first:02x}"));
        }
        if opcode >= CLOSE && left > 125 {
            return Err("WebSocket: long control frame".into());
        }
        self.opcode = opcode;
        self.left = left;
        self.head.clear();
        Ok(left > 0 || opcode >= CLOSE)
    }

    /// A frame is there completely: control frames are answered.
    fn finish(&mut self, answers: &mut Vec<u8>) -> Result<(), String> {
        match std::mem::take(&mut self.opcode) {
            CLOSE => return Err("closed by broker (WebSocket)".into()),
            PING => frame(answers, PONG, &self.control),
            _ => {}
        }
        self.control.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server_frame(first: u8, data: &[u8]) -> Vec<u8> {
        let mut b = vec![first];
        match data.len() {
            n @ 0..=125 => b.push(n as u8),
            n @ 126..=0xffff => {
                b.push(126);
                b.extend_from_slice(&(n as u16).to_be_bytes());
            }
            n => {
                b.push(127);
                b.extend_from_slice(&(n as u64).to_be_bytes());
            }
        }
        b.extend_from_slice(data);
        b
    }

    /// Feeds `bytes` in pieces of `piece`, gives the data and the answers.
    fn unwrap(bytes: &[u8], piece: usize) -> Result<(Vec<u8>, Vec<u8>), String> {
        let (mut f, mut data, mut answers) = (Frames::default(), Vec::new(), Vec::new());
        for chunk in bytes.chunks(piece) {
            let mut buf = chunk.to_vec();
            let n = f.unwrap(&mut buf, &mut answers)?;
            data.extend_from_slice(&buf[..n]);
        }
        Ok((data, answers))
    }

    #[test]
    fn frames_are_unwrapped_at_any_split() {
        let long: Vec<u8> = (0..70_000u32).map(|i| i as u8).collect();
        let mut bytes = Vec::new();
        let mut expected = Vec::new();
        for data in [&b"ab"[..], b"", &long[..125], &long[..126], &long[..65_535], &long] {
            bytes.extend(server_frame(0x82, data));
            expected.extend_from_slice(data);
        }
        // In two fragments, with a ping between them.
        bytes.extend(server_frame(0x02, b"first"));
        bytes.extend(server_frame(0x89, b"?"));
        bytes.extend(server_frame(0x80, b"second"));
        bytes.extend(server_frame(0x89, b""));
        bytes.extend(server_frame(0x82, b"end"));
        expected.extend_from_slice(b"firstsecondend");
        for piece in [1, 2, 3, 7, 1000, bytes.len()] {
            let (data, answers) = unwrap(&bytes, piece).unwrap();
            assert!(data == expected, "piece {piece}");
            let pong = [0x8a, 0x81, MASK[0], MASK[1], MASK[2], MASK[3], b'?' ^ MASK[0]];
            assert_eq!(answers, [&pong[..], &[0x8a, 0x80, MASK[0], MASK[1], MASK[2], MASK[3]]].concat());
        }
    }

    #[test]
    fn what_a_broker_must_not_send_is_refused() {
        for bytes in [
            server_frame(0x88, b"\x03\xe8"), // close
            server_frame(0x88, b""),
            server_frame(0x81, b"text"),
            server_frame(0xc2, b"compressed"),
            server_frame(0x89, &[0; 126]),
            vec![0x82, 0x81, 0, 0, 0, 0, 1], // masked
        ] {
            let more = [&bytes[..], &server_frame(0x82, b"x")].concat();
            assert!(unwrap(&more, 1).is_err(), "{bytes:02x?}");
        }
    }

    #[test]
    fn masking_is_undone_by_the_mask() {
        for n in [0, 1, 7, 8, 9, 125, 126, 1000, 70_000] {
            let data: Vec<u8> = (0..n).map(|i| i as u8).collect();
            let mut b = Vec::new();
            binary(&mut b, &data);
            let head = match n {
                0..=125 => 2,
                126..=0xffff => 4,
                _ => 10,
            };
            assert_eq!(b[0], 0x82);
            assert_eq!(b.len(), head + 4 + n);
            let plain: Vec<u8> = b[head + 4..].iter().enumerate().map(|(i, x)| x ^ MASK[i % 4]).collect();
            assert_eq!(plain, data);
        }
    }

    #[test]
    fn handshake_is_checked() {
        let good = format!(
            "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nsec-websocket-accept: {ACCEPT}\r\n\
             Sec-WebSocket-Protocol: mqtt\r\n\r\n"
        );
        let mut b = good.clone().into_bytes();
        for n in 0..b.len() {
            assert_eq!(response(&b[..n]), Ok(None));
        }
        b.extend_from_slice(b"\x82");
        assert_eq!(response(&b), Ok(Some(good.len())));
        assert!(response(good.replace("101", "400").as_bytes()).is_err());
        assert!(response(good.replace("s3pP", "xxxx").as_bytes()).is_err());
        assert!(response(good.replace("mqtt", "chat").as_bytes()).is_err());
    }
}
