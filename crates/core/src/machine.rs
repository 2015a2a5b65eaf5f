//! Memory that this process may use.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

/// Assumed if the machine does not say.
const UNKNOWN: usize = 4 << 30;

/// Bytes that the process may use, read once: the machine's, or less if a control group says so.
pub(super) static MEMORY: LazyLock<usize> = LazyLock::new(|| memory(Path::new("/")).unwrap_or(UNKNOWN));

fn memory(root: &Path) -> Option<usize> {
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    let machine = read(root.join("proc/meminfo")).lines().find_map(|line| {
        let kib: usize = line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1 << 10)
    });
    let groups = read(root.join("proc/self/cgroup"));
    let limits = groups.lines().flat_map(|line| {
        // number:controllers:path; version 2 has number 0 and names no controllers.
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let (base, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            _ => ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        };
        let is_memory = controllers.is_empty() || controllers.split(',').any(|name| name == "memory");
        // The limits of all groups above hold too. In a container the path may be the host's, and only the root is
        // visible.
        let above = Path::new(path.trim_start_matches('/')).ancestors().filter(move |_| is_memory);
        above
            .filter_map(|group| read(root.join(base).join(group).join(file)).trim().parse().ok())
            .collect::<Vec<_>>()
    });
    // Without a limit version 2 says "max", and version 1 a number larger than any machine's memory.
    limits.chain(machine).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn the_smallest_of_machine_and_control_groups_counts() {
        const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal:       8388608 kB\nMemFree: 1 kB\n");
        let of = |files: &[(&str, &str)]| memory(root(files).path());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[MACHINE]), Some(8 << 30));
        let second = ("proc/self/cgroup", "0::/a/b\n");
        assert_eq!(of(&[MACHINE, second, ("sys/fs/cgroup/a/b/memory.max", "max\n")]), Some(8 << 30));
        let above = [
            MACHINE,
            second,
            ("sys/fs/cgroup/a/memory.max", "1000\n"),
            ("sys/fs/cgroup/a/b/memory.max", "2000\n"),
        ];
        assert_eq!(of(&above), Some(1000));
        let container = [MACHINE, second, ("sys/fs/cgroup/memory.max", "3000\n")];
        assert_eq!(of(&container), Some(3000));
        let first = ("proc/self/cgroup", "5:cpu,memory:/a\n4:pids:/x\n");
        let limit = ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4000\n");
        assert_eq!(of(&[MACHINE, first, limit]), Some(4000));
        let none = ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(of(&[MACHINE, first, none]), Some(8 << 30));
    }
}
