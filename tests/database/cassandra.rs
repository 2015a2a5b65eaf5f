//! The Cassandra that the tests share, one test at a time; stopped, killed and started again on its data.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};

use crate::{
    support::{on_path, root, run},
    tables::Tables,
};

/// Longer than a start may take on a loaded machine.
pub(crate) const START: Duration = Duration::from_secs(300);

static SHARED: LazyLock<Option<Mutex<Cassandra>>> = LazyLock::new(|| {
    let given = std::env::var("MQTT_SERVER_TEST_CASSANDRA").ok().filter(|address| !address.is_empty());
    let found = match given {
        // Said by who has looked for it already.
        Some(none) if none == "none" => None,
        Some(address) => Some(Cassandra::at(address)),
        None => Cassandra::start(own_port(), &[]),
    };
    found.map(Mutex::new)
});

/// Where tests start their own: so many ports from here on.
pub(crate) fn own_port() -> u16 {
    std::env::var("CASSANDRA_PORT").ok().and_then(|port| port.parse().ok()).unwrap_or(9442)
}

/// Past the test runner, which hides what passing tests print.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn skip(reason: &str) {
    static SKIPPED: AtomicU32 = AtomicU32::new(0);
    let count = SKIPPED.fetch_add(1, Relaxed) + 1;
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test").to_owned();
    say(&format!("!!! SKIPPED: {test}: {reason}; it has checked nothing ({count} skipped so far)"));
}

/// The Cassandra that all tests share, not used by another test at the same time. None, and that is said, where there
/// can be none.
pub(crate) fn shared() -> Option<MutexGuard<'static, Cassandra>> {
    let Some(shared) = &*SHARED else {
        skip("there is no Cassandra");
        return None;
    };
    let cassandra = shared.lock();
    // A test that failed half way may have left it stopped or dead.
    if cassandra.is_ours() {
        match cassandra.pid() {
            Some(_) => cassandra.thaw(),
            None => cassandra.start_again(),
        }
    }
    Some(cassandra)
}

/// As [`shared`], and it may be stopped and killed.
pub(crate) fn victim() -> Option<MutexGuard<'static, Cassandra>> {
    let cassandra = shared()?;
    if cassandra.is_ours() {
        return Some(cassandra);
    }
    skip("it would stop or kill a Cassandra that scripts/cassandra.sh has not started");
    None
}

pub(crate) struct Cassandra {
    /// `host:port`.
    pub(crate) address: String,
    /// What scripts/cassandra.sh keeps of it; absent if it did not start it.
    home: PathBuf,
    /// Stops it when this process ends, however that ends; none if it was there before.
    _keeper: Option<Child>,
}

impl Cassandra {
    /// One that runs.
    fn at(address: String) -> Self {
        let port = address.rsplit(':').next().unwrap_or_default();
        let home = root().join("target").join(format!("cassandra-{port}"));
        Self { address, home, _keeper: None }
    }

    /// Starts one on `port`, or finds it running. None, and that is said, where there can be none.
    ///
    /// # Panics
    /// When it should start and does not.
    pub(crate) fn start(port: u16, env: &[(&str, &str)]) -> Option<Self> {
        let command = |argument: &str| {
            let mut command = Command::new(root().join("scripts/cassandra.sh"));
            command.arg(argument).env("CASSANDRA_PORT", port.to_string()).envs(env.iter().copied());
            command
        };
        let (was_there, _) = run(&mut command("status"), START);
        let output = command("start").stdin(Stdio::null()).output().expect("run scripts/cassandra.sh");
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(3) {
            say(said.trim_end());
            return None;
        }
        assert!(output.status.success(), "scripts/cassandra.sh start failed: {said}");
        let address = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let keeper = (!was_there).then(|| {
            let mut keeper = Command::new("sh");
            // Its input ends with this process.
            keeper.args(["-c", "cat >/dev/null; exec scripts/cassandra.sh stop"]).current_dir(root());
            keeper.env("CASSANDRA_PORT", port.to_string()).envs(env.iter().copied());
            keeper.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
            keeper.spawn().expect("run sh")
        });
        Some(Self { _keeper: keeper, ..Self::at(address) })
    }

    fn is_ours(&self) -> bool {
        self.home.join("pid").exists()
    }

    /// Its process, if that lives.
    fn pid(&self) -> Option<u32> {
        let pid = fs::read_to_string(self.home.join("pid")).ok()?.trim().parse().ok()?;
        let arguments = arguments(pid);
        arguments.iter().any(|argument| argument.contains(&*self.home.to_string_lossy())).then_some(pid)
    }

    fn signal(&self, name: &str) {
        let pid = self.pid().expect("Cassandra lives");
        let status = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).status();
        assert!(status.expect("run kill").success());
    }

    /// Stops the process as it stands (SIGSTOP).
    pub(crate) fn freeze(&self) {
        self.signal("STOP");
    }

    /// Lets it go on.
    pub(crate) fn thaw(&self) {
        self.signal("CONT");
    }

    /// SIGKILL.
    pub(crate) fn kill(&self) {
        let pid = self.pid().expect("Cassandra lives");
        // Noted for whoever starts it again.
        fs::write(self.home.join("arguments"), arguments(pid).join("\0")).expect("note its arguments");
        self.signal("KILL");
        while self.pid().is_some() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts it on the data that it left, and waits until it answers.
    pub(crate) fn start_again(&self) {
        let arguments = fs::read_to_string(self.home.join("arguments")).expect("its arguments");
        let mut line: Vec<&str> = Vec::new();
        // As root it would lock its whole heap in memory; see scripts/cassandra.sh.
        let root = fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
        if root && on_path("setpriv") {
            line.extend(["setpriv", "--bounding-set=-ipc_lock"]);
        }
        line.extend(arguments.split('\0'));
        let log = fs::OpenOptions::new().append(true).open(self.home.join("log")).expect("open its log");
        let mut command = Command::new("setsid");
        command.args(line).stdin(Stdio::null()).stdout(log.try_clone().expect("clone a handle")).stderr(log);
        // setsid does not fork, since it leads no process group: the number is that of Cassandra.
        #[expect(clippy::zombie_processes, reason = "ended by whoever keeps Cassandra")]
        let child = command.spawn().expect("run setsid");
        fs::write(self.home.join("pid"), child.id().to_string()).expect("note its process");
        Tables::open(&self.address, None);
    }
}

/// Of a process; empty if there is none.
fn arguments(pid: u32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line);
    line.trim_end_matches('\0').split('\0').map(str::to_owned).collect()
}
