//! CPU time and memory of the broker, of mqload, and of the whole machine.

use crate::clock;
use std::collections::{HashMap, HashSet};
use std::fs;

/// The broker's processes.
#[derive(Clone, Default)]
pub struct Target {
    pub pids: Vec<i32>,
    /// Count their descendants too.
    pub tree: bool,
}

/// CPU used up to one moment. Differences of two samples are what counts.
#[derive(Clone, Copy, Default, Debug)]
pub struct Cpu {
    /// Monotonic ns.
    pub at: u64,
    pub broker_ns: u64,
    pub broker_user_ticks: u64,
    pub broker_sys_ticks: u64,
    pub own_ns: u64,
    /// Every process of the broker was there.
    pub broker_there: bool,
    /// Whole machine, ticks over all CPUs.
    pub busy_ticks: u64,
    pub steal_ticks: u64,
}

#[derive(Clone, Copy, Default, Debug)]
pub struct Mem {
    pub rss_kb: u64,
    pub hwm_kb: u64,
    pub pss_kb: u64,
    pub threads: u64,
    pub fds: u64,
}

pub fn ticks_per_second() -> f64 {
    // SAFETY: sysconf with a valid name.
    unsafe { libc::sysconf(libc::_SC_CLK_TCK) as f64 }
}

/// Fields of /proc/PID/stat after the command name (which may hold anything);
/// `None` when there is no such process, or only its zombie.
fn stat_fields(pid: i32) -> Option<Vec<u64>> {
    let s = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let rest = &s[s.rfind(')')? + 2..];
    if rest.starts_with(['Z', 'X']) {
        return None;
    }
    Some(rest.split_ascii_whitespace().map(|f| f.parse().unwrap_or(0)).collect())
}

// Indexes into `stat_fields` (field number of proc(5) less 3).
const PPID: usize = 1;
const UTIME: usize = 11;
const STIME: usize = 12;
const CUTIME: usize = 13;
const CSTIME: usize = 14;

impl Target {
    pub fn is_empty(&self) -> bool {
        self.pids.is_empty()
    }

    pub fn missing(&self) -> Option<i32> {
        self.pids.iter().copied().find(|p| stat_fields(*p).is_none())
    }

    /// The pids to count now.
    fn members(&self) -> Vec<i32> {
        if !self.tree {
            return self.pids.clone();
        }
        let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
        for e in fs::read_dir("/proc").into_iter().flatten().flatten() {
            if let Some(pid) = e.file_name().to_str().and_then(|s| s.parse().ok())
                && let Some(f) = stat_fields(pid)
            {
                children.entry(f[PPID] as i32).or_default().push(pid);
            }
        }
        let mut seen = HashSet::new();
        let mut todo = self.pids.clone();
        while let Some(p) = todo.pop() {
            if seen.insert(p) {
                todo.extend(children.remove(&p).unwrap_or_default());
            }
        }
        seen.into_iter().collect()
    }

    /// CPU: from each process's CPU clock (ns; the same sum that utime+stime
    /// show in 10 ms steps), user/system split from /proc/PID/stat.
    pub fn cpu(&self) -> Cpu {
        let mut c = Cpu {
            own_ns: clock::own_cpu(),
            broker_there: !self.is_empty() && self.missing().is_none(),
            ..Default::default()
        };
        let tick_ns = 1e9 / ticks_per_second();
        for pid in self.members() {
            let Some(f) = stat_fields(pid).filter(|f| f.len() > CSTIME) else {
                continue;
            };
            let (mut u, mut s) = (f[UTIME], f[STIME]);
            c.broker_ns += clock::process_cpu(pid).unwrap_or(((u + s) as f64 * tick_ns) as u64);
            if self.tree {
                // children that have ended and were waited for
                u += f[CUTIME];
                s += f[CSTIME];
                c.broker_ns += ((f[CUTIME] + f[CSTIME]) as f64 * tick_ns) as u64;
            }
            c.broker_user_ticks += u;
            c.broker_sys_ticks += s;
        }
        if let Ok(s) = fs::read_to_string("/proc/stat")
            && let Some(line) = s.lines().next()
        {
            let f: Vec<u64> = line.split_ascii_whitespace().skip(1).map(|x| x.parse().unwrap_or(0)).collect();
            // user nice system idle iowait irq softirq steal
            let get = |i: usize| f.get(i).copied().unwrap_or(0);
            c.busy_ticks = get(0) + get(1) + get(2) + get(5) + get(6);
            c.steal_ticks = get(7);
        }
        c.at = clock::now();
        c
    }

    pub fn mem(&self) -> Mem {
        let mut m = Mem::default();
        for pid in self.members() {
            let st = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            m.rss_kb += kb(&st, "VmRSS:");
            m.hwm_kb += kb(&st, "VmHWM:");
            m.threads += kb(&st, "Threads:");
            let sm = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
            m.pss_kb += kb(&sm, "Pss:");
            m.fds += fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, |d| d.count() as u64);
        }
        m
    }

    /// Makes VmHWM count from now on (needs the right to write clear_refs).
    pub fn reset_peak(&self) {
        for pid in self.members() {
            let _ = fs::write(format!("/proc/{pid}/clear_refs"), "5");
        }
    }
}

/// The value of a line of /proc/PID/status.
pub fn kb(text: &str, key: &str) -> u64 {
    text.lines()
        .find_map(|l| l.strip_prefix(key))
        .and_then(|r| r.split_ascii_whitespace().next())
        .and_then(|v| v.parse().ok())
        .unwrap_or(0)
}

/// CPU use between two samples.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    pub seconds: f64,
    /// True if there was a broker process to measure, at both ends.
    pub broker: bool,
    pub broker_us: f64,
    pub broker_user_share: f64,
    pub own_us: f64,
    pub machine_percent: f64,
    pub steal_percent: f64,
}

impl Usage {
    pub fn between(a: &Cpu, b: &Cpu) -> Usage {
        let seconds = (b.at.saturating_sub(a.at) as f64 / 1e9).max(1e-9);
        let hz = ticks_per_second();
        let d = |x: u64, y: u64| y.saturating_sub(x) as f64;
        let user = d(a.broker_user_ticks, b.broker_user_ticks);
        let sys = d(a.broker_sys_ticks, b.broker_sys_ticks);
        Usage {
            seconds,
            broker: a.broker_there && b.broker_there,
            broker_us: d(a.broker_ns, b.broker_ns) / 1e3,
            broker_user_share: if user + sys > 0.0 { user / (user + sys) } else { 0.0 },
            own_us: d(a.own_ns, b.own_ns) / 1e3,
            machine_percent: d(a.busy_ticks, b.busy_ticks) / hz / seconds * 100.0,
            steal_percent: d(a.steal_ticks, b.steal_ticks) / hz / seconds * 100.0,
        }
    }

    pub fn broker_percent(&self) -> f64 {
        self.broker_us / self.seconds / 1e4
    }

    pub fn own_percent(&self) -> f64 {
        self.own_us / self.seconds / 1e4
    }

    /// CPU used by anything else: when this is not near zero, the run was
    /// disturbed.
    pub fn other_percent(&self) -> f64 {
        (self.machine_percent - self.broker_percent() - self.own_percent()).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_process_is_seen() {
        let t = Target { pids: vec![std::process::id() as i32], tree: true };
        assert_eq!(t.missing(), None);
        let a = t.cpu();
        let mut x = 0u64;
        while clock::now() < a.at + 50 * clock::MS {
            x = x.wrapping_add(1);
        }
        std::hint::black_box(x);
        let u = Usage::between(&a, &t.cpu());
        assert!(u.broker_us > 5_000.0 && u.own_us > 5_000.0, "{u:?}");
        let m = t.mem();
        assert!(m.rss_kb > 100 && m.hwm_kb >= m.rss_kb && m.threads >= 1);
        assert!(Target { pids: vec![i32::MAX], tree: false }.missing().is_some());
    }
}
