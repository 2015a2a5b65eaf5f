//! Edge-triggered epoll with nanosecond timeouts, and an eventfd waker.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

pub const WAKE: u64 = u64::MAX;

pub struct Poll {
    ep: OwnedFd,
    events: Vec<libc::epoll_event>,
}

fn cvt(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

impl Poll {
    pub fn new() -> io::Result<Poll> {
        // SAFETY: plain system call; the new descriptor is owned here only.
        let ep = unsafe { OwnedFd::from_raw_fd(cvt(libc::epoll_create1(libc::EPOLL_CLOEXEC))?) };
        Ok(Poll { ep, events: vec![libc::epoll_event { events: 0, u64: 0 }; 1024] })
    }

    fn ctl(&self, fd: RawFd, token: u64, flags: libc::c_int) -> io::Result<()> {
        let mut ev = libc::epoll_event { events: flags as u32, u64: token };
        // SAFETY: `ev` is valid for the call.
        unsafe {
            cvt(libc::epoll_ctl(self.ep.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut ev))?;
        }
        Ok(())
    }

    /// Registers a socket once, edge-triggered, for both directions.
    /// Closing the descriptor removes it.
    pub fn add(&self, fd: RawFd, token: u64) -> io::Result<()> {
        self.ctl(fd, token, libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET)
    }

    /// No more events of this socket.
    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        // SAFETY: plain system call; the event argument is not used.
        unsafe {
            cvt(libc::epoll_ctl(self.ep.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()))?;
        }
        Ok(())
    }

    /// Registers a level-triggered reader (listening socket, eventfd).
    pub fn add_level(&self, fd: RawFd, token: u64) -> io::Result<()> {
        self.ctl(fd, token, libc::EPOLLIN)
    }

    /// Waits up to `timeout` ns (`None`: for ever); returns how many events.
    pub fn wait(&mut self, timeout: Option<u64>) -> io::Result<usize> {
        let ts = timeout.map(|t| libc::timespec {
            tv_sec: (t / 1_000_000_000) as libc::time_t,
            tv_nsec: (t % 1_000_000_000) as libc::c_long,
        });
        let tp = ts.as_ref().map_or(std::ptr::null(), |t| t as *const _);
        // SAFETY: the event array and the timespec live through the call.
        let n = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.ep.as_raw_fd(),
                self.events.as_mut_ptr(),
                self.events.len() as libc::c_int,
                tp,
                std::ptr::null::<libc::c_void>(),
                0usize,
            )
        };
        if n < 0 {
            let e = io::Error::last_os_error();
            return if e.kind() == io::ErrorKind::Interrupted { Ok(0) } else { Err(e) };
        }
        Ok(n as usize)
    }

    #[inline]
    pub fn event(&self, i: usize) -> (u64, u32) {
        let e = self.events[i];
        (e.u64, e.events)
    }
}

/// Wakes a `Poll` of another thread.
pub struct Waker(OwnedFd);

impl Waker {
    pub fn new() -> io::Result<Waker> {
        // SAFETY: plain system call; the new descriptor is owned here only.
        let fd = unsafe { cvt(libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC))? };
        Ok(Waker(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub fn register(&self, p: &Poll) -> io::Result<()> {
        p.add_level(self.0.as_raw_fd(), WAKE)
    }

    pub fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight valid bytes; a full counter (EAGAIN) already wakes.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), 8) };
    }

    pub fn clear(&self) {
        let mut b = [0u8; 8];
        // SAFETY: eight writable bytes.
        unsafe { libc::read(self.0.as_raw_fd(), b.as_mut_ptr().cast(), 8) };
    }
}

/// Raises the soft limit on open files to the hard limit; returns it.
pub fn raise_nofile() -> u64 {
    let mut l = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `l` is valid for both calls.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut l) == 0 && l.rlim_cur < l.rlim_max {
            l.rlim_cur = l.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &l);
            libc::getrlimit(libc::RLIMIT_NOFILE, &mut l);
        }
    }
    l.rlim_cur
}

/// Asks for exact timers (default slack: 50 us).
pub fn tight_timers() {
    // SAFETY: prctl with integer arguments only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
}
