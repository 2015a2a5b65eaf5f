//! The socket below a connection: the raw descriptor and its errors.

use super::Reason;
use socket2::Socket;
use std::io;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};

pub(super) fn os_reason(what: &str, e: &io::Error) -> Reason {
    match e.kind() {
        io::ErrorKind::ConnectionReset => format!("{what}: connection reset by broker"),
        io::ErrorKind::ConnectionRefused => format!("{what}: connection refused"),
        io::ErrorKind::BrokenPipe => format!("{what}: closed by broker"),
        _ => format!("{what}: {e}"),
    }
}

/// Sets an integer option of the IP level.
pub(super) fn ip_option(s: &Socket, name: libc::c_int, value: u32) -> io::Result<()> {
    // SAFETY: a 32-bit option, valid for the call.
    let rc = unsafe {
        libc::setsockopt(
            s.as_raw_fd(),
            libc::IPPROTO_IP,
            name,
            (&raw const value).cast(),
            size_of::<u32>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// From linux/in.h (6.3 and later); not in the libc crate for every target.
pub(super) const IP_LOCAL_PORT_RANGE: libc::c_int = 51;
/// Lowest port that our side takes, so as not to sit on the ports of servers
/// where the system's ephemeral range begins low.
pub const LOWEST_PORT: u32 = 30_000;

pub(super) fn would_block(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// The raw socket as `Read`/`Write`, for rustls and for the hot path.
pub(super) struct Fd(pub(super) RawFd);

impl Read for Fd {
    #[inline]
    fn read(&mut self, b: &mut [u8]) -> io::Result<usize> {
        // SAFETY: `b` is writable for its whole length.
        let n = unsafe { libc::recv(self.0, b.as_mut_ptr().cast(), b.len(), 0) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }
}

impl Write for Fd {
    #[inline]
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        // SAFETY: `b` is readable for its whole length.
        let n = unsafe { libc::send(self.0, b.as_ptr().cast(), b.len(), libc::MSG_NOSIGNAL) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }

    fn write_vectored(&mut self, bufs: &[io::IoSlice<'_>]) -> io::Result<usize> {
        // SAFETY: IoSlice is guaranteed to have the layout of iovec.
        let n = unsafe { libc::writev(self.0, bufs.as_ptr().cast(), bufs.len().min(64) as i32) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
