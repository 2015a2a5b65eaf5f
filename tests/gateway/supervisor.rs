//! Notifications to a service manager, by systemd's protocol: a datagram socket in `NOTIFY_SOCKET`.

use std::{
    fs,
    net::TcpStream,
    os::unix::net::UnixDatagram,
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::support::{local, logged_port};

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The next thing that is told, other than that the process lives.
fn told(socket: &UnixDatagram) -> String {
    loop {
        let said = heard(socket);
        if said != "WATCHDOG=1\n" {
            return said;
        }
    }
}

fn heard(socket: &UnixDatagram) -> String {
    let mut bytes = [0; 1024];
    let length = socket.recv(&mut bytes).expect("a datagram within a minute");
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

#[test]
fn systemd_hears_ready_only_when_all_listen_and_all_that_follows() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = UnixDatagram::bind(dir.path().join("notify")).expect("bind");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a bound");
    let log = fs::File::create(dir.path().join("log")).expect("a log");
    let mut command = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server"));
    command.args(["--non-tls", "--allow-anonymous", "--data-dir", "data", "--addr", "127.0.0.1:0"]);
    command.args(["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"]);
    command.env("NOTIFY_SOCKET", dir.path().join("notify")).env("WATCHDOG_USEC", "600000");
    command.current_dir(dir.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut running = Running(command.spawn().expect("start"));

    assert!(heard(&socket).starts_with("READY=1\n"), "the first that is told");
    let log = fs::read_to_string(dir.path().join("log")).expect("read the log");
    for listener in ["default", "grpc", "http"] {
        let port = logged_port(&log, listener).unwrap_or_else(|| panic!("{listener} in {log}"));
        TcpStream::connect(local(port)).expect("a listener that accepts");
    }
    assert_eq!(heard(&socket), "WATCHDOG=1\n");

    let kill = |name: &str, id: u32| {
        assert!(Command::new("kill").args([name, &id.to_string()]).status().expect("run kill").success());
    };
    kill("-HUP", running.0.id());
    let reloading = told(&socket);
    let since = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect("when it began");
    assert!(since.trim().parse::<u64>().expect("microseconds") > 0, "{reloading}");
    assert!(told(&socket).starts_with("READY=1\n"));
    kill("-TERM", running.0.id());
    assert!(told(&socket).starts_with("STOPPING=1\n"));
    assert!(running.0.wait().expect("wait").success());
}
