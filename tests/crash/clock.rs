//! The clock that the recorder in the server's process reads too. `Instant` is the same clock, but keeps its figure
//! to itself.
#![allow(unsafe_code, reason = "one call of the C library that the standard library has no name for")]

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

unsafe extern "C" {
    fn clock_gettime(clock: i32, time: *mut Timespec) -> i32;
}

const CLOCK_MONOTONIC: i32 = 1;

/// Nanoseconds of `CLOCK_MONOTONIC`.
pub(crate) fn now() -> u64 {
    let mut time = Timespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: `time` is a valid `struct timespec` of 64-bit Linux and outlives the call.
    let result = unsafe { clock_gettime(CLOCK_MONOTONIC, &raw mut time) };
    assert_eq!(result, 0, "CLOCK_MONOTONIC");
    time.seconds as u64 * 1_000_000_000 + time.nanoseconds as u64
}
