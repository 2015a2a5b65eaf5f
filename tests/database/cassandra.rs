//! The Cassandra that the tests share, and those that a test has for itself: stopped, killed and started again on their
//! data, or with a disk that can be filled.

use std::{
    io::Write as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};

use crate::support::{root, run};

/// Longer than a start may take on a loaded machine.
const START: Duration = Duration::from_secs(300);

static SHARED: LazyLock<Option<Cassandra>> = LazyLock::new(|| {
    let given = std::env::var("MQTT_SERVER_TEST_CASSANDRA").ok().filter(|address| !address.is_empty());
    match given {
        // Said by who has looked for it already.
        Some(none) if none == "none" => None,
        Some(address) => Some(Cassandra::at(address)),
        None => Cassandra::start(own_port(), &[]),
    }
});

static VICTIM: LazyLock<Option<Mutex<Cassandra>>> =
    LazyLock::new(|| Cassandra::start(own_port() + 15, &[]).map(Mutex::new));

/// Returns the first port of a Cassandra that tests start themselves: this port and the 41 after it.
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
    let test = thread.name().unwrap_or("a test");
    say(&format!("!!! SKIPPED: {test}: {reason}; it has checked nothing ({count} skipped so far)"));
}

/// The Cassandra that all tests share, each with a keyspace of its own; nothing happens to it. None, and that is said,
/// where there can be none.
pub(crate) fn shared() -> Option<&'static Cassandra> {
    if SHARED.is_none() {
        skip("there is no Cassandra");
    }
    SHARED.as_ref()
}

/// One that may be stopped and killed, for one test at a time. None, and that is said, where there can be none.
pub(crate) fn victim() -> Option<MutexGuard<'static, Cassandra>> {
    shared()?;
    let Some(victim) = &*VICTIM else {
        skip("there is no Cassandra that may be stopped");
        return None;
    };
    let cassandra = victim.lock();
    // A test that failed half way may have left it stopped or dead.
    cassandra.resume();
    cassandra.start_again();
    Some(cassandra)
}

/// One node, or several that scripts/cassandra.sh started.
pub(crate) struct Cassandra {
    /// `host:port` of its nodes, separated by commas.
    pub(crate) address: String,
    port: String,
    /// Stops it when this process ends, however that ends; none if it was there before.
    _keeper: Option<Child>,
}

impl Cassandra {
    /// One that runs.
    fn at(address: String) -> Self {
        let port = address.rsplit(':').next().unwrap_or_default().to_owned();
        Self { address, port, _keeper: None }
    }

    /// Starts one on `port`, or finds it running; `env` says what it is. None, and that is said, where there can be
    /// none.
    ///
    /// # Panics
    /// If it should start and does not.
    pub(crate) fn start(port: u16, env: &[(&str, &str)]) -> Option<Self> {
        let port = port.to_string();
        let (was_there, _) = run(script(&port, "status").envs(env.iter().copied()), START);
        let mut start = script(&port, "start");
        let output = start.envs(env.iter().copied()).stdin(Stdio::null()).output();
        let output = output.expect("run scripts/cassandra.sh");
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(3) {
            say(said.trim_end());
            return None;
        }
        assert!(output.status.success(), "scripts/cassandra.sh start failed: {said}");
        let address = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let keeper = (!was_there).then(|| {
            let mut keeper = Command::new("sh");
            // Its input ends with this process; what ends the whole group must not end what stops Cassandra.
            let stop = "trap '' INT TERM; cat >/dev/null; exec scripts/cassandra.sh stop";
            keeper.args(["-c", stop]).current_dir(root());
            keeper.env("CASSANDRA_PORT", &port);
            keeper.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
            keeper.spawn().expect("run sh")
        });
        Some(Self { address, port, _keeper: keeper })
    }

    /// One that checks logins and wants TLS, and the file of the authority to trust. For one test: nothing else keeps
    /// two from using it at once.
    pub(crate) fn guarded() -> Option<(Self, PathBuf)> {
        shared()?;
        let given = |name: &str| std::env::var(format!("MQTT_SERVER_TEST_CASSANDRA_{name}")).ok();
        if let (Some(address), Some(ca)) = (given("SECURE"), given("CA")) {
            return Some((Self::at(address), ca.into()));
        }
        let found = Self::start(own_port() + 10, &[("CASSANDRA_AUTH", "1"), ("CASSANDRA_TLS", "1")])?;
        let ca = found.home().join("ca.pem");
        Some((found, ca))
    }

    /// One whose disk can be filled. With a guard it checks logins, and refuses the writes of all but superusers when
    /// the disk is full to 80 %. For one test each, as [`Self::guarded`].
    pub(crate) fn on_a_small_disk(guarded: bool) -> Option<Self> {
        shared()?;
        let disk = ("CASSANDRA_DISK_MIB", "160");
        let found = if guarded {
            let guard = [("CASSANDRA_DISK_GUARD", "80"), ("CASSANDRA_AUTH", "1")];
            Self::start(own_port() + 40, &[disk, guard[0], guard[1]])
        } else {
            Self::start(own_port() + 30, &[disk])
        };
        if found.is_none() {
            skip("there is no Cassandra on a disk of its own");
        }
        found
    }

    /// Returns the directory that scripts/cassandra.sh keeps for it.
    fn home(&self) -> PathBuf {
        root().join("target").join(format!("cassandra-{}", self.port))
    }

    /// Runs scripts/cassandra.sh.
    pub(crate) fn script(&self, arguments: &str) {
        let mut command = script(&self.port, arguments);
        let (success, output) = run(&mut command, START);
        assert!(success, "scripts/cassandra.sh {arguments}: {output}");
    }

    /// Stops it as it stands (SIGSTOP).
    pub(crate) fn pause(&self) {
        self.script("pause");
    }

    /// Lets it go on.
    pub(crate) fn resume(&self) {
        self.script("resume");
    }

    /// SIGKILL.
    pub(crate) fn kill(&self) {
        self.script("kill");
    }

    /// Leaves so many MiB of its disk.
    pub(crate) fn fill(&self, left: u32) {
        let mut command = script(&self.port, "fill");
        let (success, output) = run(command.env("CASSANDRA_LEFT_MIB", left.to_string()), START);
        assert!(success, "scripts/cassandra.sh fill: {output}");
    }

    /// Starts it on the data that it left, and waits until it answers.
    pub(crate) fn start_again(&self) {
        self.script("start");
    }
}

fn script(port: &str, arguments: &str) -> Command {
    let mut command = Command::new(root().join("scripts/cassandra.sh"));
    command.args(arguments.split(' ')).env("CASSANDRA_PORT", port);
    command
}
