//! Monotonic nanosecond clock. `clock_gettime` is answered by the vDSO, so a
//! reading costs some tens of nanoseconds and no system call.

#[inline]
fn read(id: libc::clockid_t) -> Option<u64> {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is a valid, writable timespec.
    let rc = unsafe { libc::clock_gettime(id, &mut ts) };
    (rc == 0).then(|| ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64)
}

/// Nanoseconds of CLOCK_MONOTONIC.
#[inline]
pub fn now() -> u64 {
    read(libc::CLOCK_MONOTONIC).unwrap_or(0)
}

/// CPU time used by this process (all threads), in nanoseconds.
pub fn own_cpu() -> u64 {
    read(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap_or(0)
}

/// CPU time used by another process (all its threads, ended ones included).
pub fn process_cpu(pid: i32) -> Option<u64> {
    let mut id: libc::clockid_t = 0;
    // SAFETY: `id` is a valid, writable clockid_t.
    if unsafe { libc::clock_getcpuclockid(pid, &mut id) } != 0 {
        return None;
    }
    read(id)
}

pub const SEC: u64 = 1_000_000_000;
pub const MS: u64 = 1_000_000;

/// Seconds (as given on the command line) to nanoseconds.
pub fn secs(s: f64) -> u64 {
    (s * SEC as f64) as u64
}
