//! CPU time of a process, from /proc.

use std::fs;
use std::time::Duration;

/// CPU used by a process up to one moment, user and system.
#[derive(Clone, Copy)]
pub struct Cpu(Duration);

impl Cpu {
    /// `None` without such a process. In steps of 10 ms.
    pub fn of(pid: i32) -> Option<Self> {
        parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    pub fn since(self, before: Self) -> Duration {
        self.0.saturating_sub(before.0)
    }
}

/// `utime` and `stime` of /proc/PID/stat; the command name before them may hold anything.
fn parse(stat: &str) -> Option<Cpu> {
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    // SAFETY: sysconf with a valid name.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.cast_unsigned();
    Some(Cpu(Duration::from_secs_f64(ticks as f64 / per_second as f64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_name_with_spaces_and_parentheses_does_not_shift_the_fields() {
        let stat = "42 (a ) b) S 1 2 3 4 5 6 7 8 9 10 300 200 0 0";
        assert_eq!(parse(stat).map(|c| c.0), Some(Duration::from_secs(5)));
    }
}
