//! Figures of this process from the kernel.

use std::fs;

/// Ticks per second in `/proc`, the same on every Linux architecture in use.
const TICKS: f64 = 100.0;

/// Figures of the kernel about this process; zeros for missing ones.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ProcessStats {
    /// Resident memory.
    pub rss_bytes: u64,
    /// Highest resident memory so far.
    pub rss_peak_bytes: u64,
    /// Virtual memory.
    pub virtual_bytes: u64,
    /// User and system CPU time.
    pub cpu_seconds: f64,
    /// Open file descriptors.
    pub open_fds: u64,
    /// Most file descriptors allowed.
    pub max_fds: u64,
    /// Threads.
    pub threads: u64,
    /// Start of the process, in seconds since 1970.
    pub start_seconds: f64,
}

impl ProcessStats {
    /// Reads them.
    pub fn read() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let mut stats = parse(
            &read("/proc/self/status"),
            &read("/proc/self/stat"),
            &read("/proc/stat"),
            &read("/proc/self/limits"),
        );
        // The directory that is being read is open as well.
        let open = fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count().saturating_sub(1));
        stats.open_fds = open as u64;
        stats
    }
}

fn parse(status: &str, stat: &str, system: &str, limits: &str) -> ProcessStats {
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        number(line.and_then(|line| line.split_whitespace().next()))
    };
    // The command name, in brackets, may hold anything; after it come fields 3 and on.
    let fields: Vec<&str> = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split_whitespace().collect();
    let ticks = |position: usize| number(fields.get(position - 3).copied()) as f64 / TICKS;
    let boot = system.lines().find_map(|line| line.strip_prefix("btime "));
    let max_fds = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    ProcessStats {
        rss_bytes: field("VmRSS:") * 1024,
        rss_peak_bytes: field("VmHWM:") * 1024,
        virtual_bytes: field("VmSize:") * 1024,
        cpu_seconds: ticks(14) + ticks(15),
        open_fds: 0,
        max_fds: number(max_fds.and_then(|line| line.split_whitespace().next())),
        threads: field("Threads:"),
        start_seconds: number(boot.map(str::trim)) as f64 + ticks(22),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_taken_from_the_right_fields() {
        let stat = "7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 4 0 1000 9 9";
        let status = "Name:\tx\nVmHWM:\t  30 kB\nVmRSS:\t  20 kB\nThreads:\t4\n";
        let limits = "Max open files            1024                 4096                 files\n";
        let stats = parse(status, stat, "cpu 1\nbtime 5000\n", limits);
        assert_eq!((stats.rss_bytes, stats.rss_peak_bytes, stats.threads), (20_480, 30_720, 4));
        assert_eq!((stats.cpu_seconds, stats.start_seconds, stats.max_fds), (3.0, 5010.0, 1024));
        assert_eq!(parse("", "", "", ""), ProcessStats::default());
    }

    #[test]
    fn this_process_has_figures() {
        let stats = ProcessStats::read();
        assert!(stats.rss_bytes > 0 && stats.threads > 0 && stats.open_fds > 2 && stats.start_seconds > 1e9);
    }
}
