//! A real Mosquitto, killed, paused and started again on its port.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use crate::support::{local, need, on_path, ports::free_ports, until};

pub(super) struct Broker {
    child: Child,
    dir: tempfile::TempDir,
    pub(super) port: u16,
    /// For TLS, if it was asked for.
    pub(super) tls_port: u16,
}

fn program() -> Option<PathBuf> {
    let placed = PathBuf::from("/usr/sbin/mosquitto");
    if placed.is_file() {
        return Some(placed);
    }
    on_path("mosquitto").then(|| PathBuf::from("mosquitto"))
}

impl Broker {
    /// `None`, said loudly, where it is not installed and that is allowed.
    pub(super) fn start() -> Option<Self> {
        Self::start_with(None)
    }

    /// Starts one with these lines in its configuration, such as a `connection` of its own.
    pub(super) fn start_configured(lines: &str) -> Option<Self> {
        Self::start_in(None, lines)
    }

    /// Also with TLS for those who show a certificate, by the papers in this folder.
    pub(super) fn start_with(papers: Option<&Path>) -> Option<Self> {
        Self::start_in(papers, "")
    }

    fn start_in(papers: Option<&Path>, lines: &str) -> Option<Self> {
        let program = program();
        if !need("mosquitto", program.is_some()) {
            return None;
        }
        let program = program?;
        let dir = tempfile::tempdir().expect("make a directory");
        // Mosquitto cannot tell which port the system chose.
        let port = free_ports(2);
        let tls_port = port + 1;
        let mut config = format!(
            "listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\nuser root\n\
             persistence false\n"
        );
        if let Some(papers) = papers.map(Path::display) {
            config += &format!(
                "listener {tls_port} 127.0.0.1\ncafile {papers}/ca.pem\ncertfile {papers}/server.crt\n\
                 keyfile {papers}/server.key\nrequire_certificate true\n"
            );
        }
        config += lines;
        fs::write(dir.path().join("mosquitto.conf"), config).expect("write its configuration");
        let child = run(&program, &dir);
        let broker = Self { child, dir, port, tls_port };
        broker.wait();
        Some(broker)
    }

    fn wait(&self) {
        until(|| std::net::TcpStream::connect(local(self.port)).is_ok());
    }

    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// On the same port, with nothing of before.
    pub(super) fn start_again(&mut self) {
        self.child = run(&program().expect("it was there"), &self.dir);
        self.wait();
    }

    /// `STOP` or `CONT`.
    pub(super) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args([format!("-{name}"), pid]).status();
        assert!(status.expect("run kill").success());
    }
}

fn run(program: &PathBuf, dir: &tempfile::TempDir) -> Child {
    let mut command = Command::new(program);
    command.arg("-c").arg(dir.path().join("mosquitto.conf"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("start mosquitto")
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
    }
}
