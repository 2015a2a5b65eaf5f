//! The figures that a measurement prints.
#![expect(clippy::print_stdout, reason = "a measurement")]

use std::{fs, time::Instant};

/// A run of the clock, and the processor time before it.
pub(crate) struct Watch {
    began: Instant,
    used: u64,
}

impl Watch {
    #[expect(clippy::disallowed_methods, reason = "a measurement")]
    pub(crate) fn start() -> Self {
        Self { began: Instant::now(), used: cpu() }
    }

    /// Prints the rate of so many messages and the processor time of each.
    pub(crate) fn report(&self, what: &str, messages: u64) {
        let (wall, cpu) = (self.began.elapsed().as_secs_f64(), cpu() - self.used);
        println!(
            "{what}: {:.0}/s, {:.2} us of CPU each",
            messages as f64 / wall,
            cpu as f64 / messages as f64
        );
    }
}

/// User and system time of this process in microseconds.
fn cpu() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").expect("read /proc/self/stat");
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let ticks = |field: usize| fields[field].parse::<u64>().expect("a number of ticks");
    (ticks(11) + ticks(12)) * 10_000
}
