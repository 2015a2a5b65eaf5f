//! A process as others on its host can look for it: whether it has ended need not be guessed from its silence there.

use std::{fs, io::ErrorKind};

use serde::{Deserialize, Serialize};

/// Names a process among all that ever ran on its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    /// Drawn by the system at each start of the host.
    boot: String,
    /// Namespace in which the number counts.
    namespace: String,
    pid: u32,
    /// Time of its start, in ticks since that of the host.
    started: u64,
}

impl ProcessId {
    /// This process; `None` where the system does not tell.
    pub(crate) fn current() -> Option<Self> {
        let pid = std::process::id();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned();
        let namespace = namespace()?;
        let (_, started) = stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
        Some(Self { boot, namespace, pid, started })
    }

    /// Returns whether it is known to have ended. False about a process of another host or container.
    pub(crate) fn has_ended(&self) -> bool {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        if boot.trim() != self.boot || namespace().as_ref() != Some(&self.namespace) {
            return false;
        }
        match fs::read_to_string(format!("/proc/{}/stat", self.pid)) {
            // One that has ended and was not waited for runs no more; and numbers are used again.
            Ok(text) => stat(&text)
                .is_some_and(|(state, started)| started != self.started || matches!(state, 'Z' | 'X')),
            Err(error) => error.kind() == ErrorKind::NotFound,
        }
    }
}

fn namespace() -> Option<String> {
    Some(fs::read_link("/proc/self/ns/pid").ok()?.to_string_lossy().into_owned())
}

/// State and time of start. The name, in parentheses, may hold anything.
fn stat(text: &str) -> Option<(char, u64)> {
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // Field 22, where the state is field 3.
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_that_runs_has_not_ended_and_one_that_was_killed_has() {
        let current = ProcessId::current().unwrap();
        assert!(!current.has_ended());
        assert!(
            ProcessId { started: current.started + 1, ..current.clone() }.has_ended(),
            "its number was used again"
        );
        let elsewhere = ProcessId { boot: "another host".to_owned(), pid: u32::MAX, ..current.clone() };
        assert!(!elsewhere.has_ended(), "nothing is known of another host");
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let started = stat(&fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap()).unwrap().1;
        let other = ProcessId { pid: child.id(), started, ..current };
        assert!(!other.has_ended());
        child.kill().unwrap();
        while !other.has_ended() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(other.has_ended());
    }
}
