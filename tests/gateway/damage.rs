//! Bytes flipped in the files of stopped and killed gateways, and disks that are full: whatever they are, the gateway
//! starts, or says why not, sets aside what cannot be used and serves.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use crate::client::{Client, Got, hello};
use crate::support::Server;
use codec::{Connect, Packet};
use gateway_core::{Protocol, QoS};

const ROLES: [&str; 2] = ["latest", "state"];

/// Files that are damaged in turn.
const SEEDS: u64 = 12;

fn persistent(name: &str) -> Connect {
    let mut connect = hello(Protocol::V5, name);
    connect.clean_start = false;
    connect.session_expiry = Some(3600);
    connect
}

/// Sessions with subscriptions and queues, retained messages and latest values, of several pages each.
fn fill(server: &Server) {
    for n in 0..40 {
        let mut client = Client::connect_with(server.ports.tcp, persistent(&format!("session-{n}")));
        client.subscribe_with(&format!("to/{}/#", n % 8), QoS::AtLeastOnce, None);
        client.send(&Packet::Disconnect(Box::default()));
    }
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    for n in 0..300_u32 {
        let payload = vec![b'x'; (n as usize * 37) % 5000];
        publisher.publish_acked(&format!("to/{}/{n}", n % 8), &payload, n % 3 == 0);
    }
}

fn random(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 16) as usize
}

/// Flips some bytes of a file, more often where pages begin.
fn flip(file: &Path, state: &mut u64) {
    let mut bytes = fs::read(file).expect("read a store");
    for _ in 0..1 + random(state) % 6 {
        let page = random(state) % (bytes.len() / 4096) * 4096;
        let within = if random(state).is_multiple_of(2) { 160 } else { 4096 };
        bytes[page + random(state) % within] ^= 1 + (random(state) % 255) as u8;
    }
    fs::write(file, bytes).expect("damage a store");
}

#[test]
fn no_flipped_byte_keeps_a_gateway_from_starting_and_serving() {
    let mut server = Server::start();
    fill(&server);
    assert!(server.stop());
    let data = server.dir().join("data");
    let sound: Vec<_> = ROLES.map(|role| fs::read(data.join(role).join("data.mdb")).expect("read")).into();
    let mut state = 0x9E37_79B9_7F4A_7C15;
    let mut set_aside = 0;
    for seed in 0..SEEDS {
        for role in ROLES {
            flip(&data.join(role).join("data.mdb"), &mut state);
        }
        // Starts, or this fails with the log.
        server = server.kill_and_restart(&[], "");
        set_aside += server.metric("gateway_store_set_aside");
        let _returns = Client::connect_with(server.ports.tcp, persistent("session-1"));
        let mut client = Client::connect_with(server.ports.tcp, persistent("new"));
        client.subscribe_with("new/#", QoS::AtLeastOnce, None);
        let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
        publisher.publish_acked("to/1/again", b"x", true);
        assert!(server.stop(), "seed {seed}: it served, and ended as it should");
        for (role, bytes) in ROLES.iter().zip(&sound) {
            fs::write(data.join(role).join("data.mdb"), bytes).expect("mend a store");
        }
    }
    // A third of them as a rule; most flipped bytes lie in values, or in free pages.
    assert!(set_aside > 0, "no file of {} was set aside", 2 * SEEDS);
}

#[test]
fn an_empty_file_is_damage_and_a_clean_end_is_noted() {
    let mut server = Server::start();
    fill(&server);
    assert!(server.stop());
    for role in ROLES {
        let state =
            fs::read_to_string(server.dir().join("data").join(role).join("state")).expect("its state");
        assert!(state.starts_with("closed "), "{role}: {state}");
        fs::write(server.dir().join("data").join(role).join("data.mdb"), "").expect("empty a store");
    }
    let server = server.kill_and_restart(&["--verify-store"], "");
    assert_eq!(server.metric("gateway_store_set_aside"), 2);
    let state = fs::read_to_string(server.dir().join("data/state/state")).expect("its state");
    assert_eq!(state.trim(), "open");
}

/// A disk of its own: a tmpfs in the mount namespace of a child, which goes with it.
struct Disk {
    child: Child,
    /// Command that enters its namespaces.
    enter: &'static [&'static str],
    /// Its place in there.
    mount: tempfile::TempDir,
}

impl Disk {
    /// One of so many KiB; none where it cannot be mounted.
    fn new(kib: u32) -> Option<Self> {
        let mount = tempfile::tempdir().expect("make a directory");
        let script = "mount -t tmpfs -o size=$1k tmpfs \"$2\" && echo mounted && exec cat";
        for (own, enter) in [("-m", &["-m"][..]), ("-rm", &["-U", "-m", "--preserve-credentials"])] {
            let spawned = Command::new("unshare")
                .args([own, "sh", "-c", script, "sh", &kib.to_string()])
                .arg(mount.path())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn();
            let Ok(mut child) = spawned else { break };
            let mut said = String::new();
            let _ = BufReader::new(child.stdout.take()?).read_line(&mut said);
            if said == "mounted\n" {
                return Some(Self { child, enter, mount });
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        // Nobody can install a permission: not for SKIP_MISSING.
        crate::support::skipped("the permission to mount a tmpfs in a namespace (unshare -m, or -rm)");
        None
    }

    /// As this process sees it.
    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{}", self.child.id(), self.mount.path().display()))
    }

    /// Takes all but so many KiB.
    fn fill(&self, left: u64) {
        let mut file = fs::File::create(self.path().join("filler")).expect("make the filler");
        let mut size = 0_u64;
        while file.write_all(&[0; 4096]).is_ok() {
            size += 4096;
        }
        file.set_len(size.saturating_sub(left << 10)).expect("give some back");
    }

    fn free(&self) {
        fs::remove_file(self.path().join("filler")).expect("make room");
    }

    /// A gateway with plain TCP and its data on this disk.
    fn gateway(&self) -> Command {
        let mut command = crate::support::command("nsenter");
        command.args(["-t", &self.child.id().to_string()]).args(self.enter);
        command.arg(env!("CARGO_BIN_EXE_mqtt-server")).args(["--non-tls", "--addr", "127.0.0.1:0"]);
        command.args(["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--data-dir"]);
        command.arg(self.mount.path().join("data")).stdin(Stdio::null());
        command
    }

    /// One that runs, and its port.
    fn started(&self) -> (Gateway, u16) {
        let log = tempfile::NamedTempFile::new().expect("make a log");
        let stderr = log.reopen().expect("open the log");
        let child = self.gateway().stderr(stderr).stdout(Stdio::null()).spawn().expect("start mqtt-server");
        let mut gateway = Gateway(child);
        let mut port = None;
        crate::support::until(|| {
            let said = fs::read_to_string(log.path()).expect("read the log");
            assert_eq!(gateway.0.try_wait().expect("ask for its status"), None, "it ended: {said}");
            port = crate::support::logged_port(&said, "default");
            port.is_some()
        });
        (gateway, port.expect("its port"))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Killed on drop.
struct Gateway(Child);

impl Gateway {
    /// Its exit code after SIGTERM.
    fn stop(mut self) -> Option<i32> {
        let status = Command::new("kill").arg("-TERM").arg(self.0.id().to_string()).status();
        assert!(status.expect("run kill").success());
        self.0.wait().expect("wait for its end").code()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// LMDB maps a file that had no room: the first start ended by SIGBUS, without a word.
#[test]
fn a_first_start_on_a_full_disk_says_so_and_what_to_do() {
    let Some(disk) = Disk::new(256) else { return };
    for left in [0, 4, 8, 16, 20, 36, 40, 56, 72] {
        disk.fill(left);
        let output = disk.gateway().output().expect("run mqtt-server");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{left} KiB: {said}");
        let last = said.lines().last().unwrap_or_default();
        assert!(last.starts_with("mqtt-server: "), "{left} KiB: {said}");
        let is_full = last.contains("No space left") || last.contains("the disk may be full");
        assert!(is_full && last.contains("make room") && last.contains("--data-dir"), "{left} KiB: {said}");
        disk.free();
        let _ = fs::remove_dir_all(disk.path().join("data"));
    }
}

/// A page that was mapped and not yet written would end the process if the disk had no room for it.
#[test]
fn a_disk_that_fills_up_ends_nothing_and_messages_go_on_when_it_has_room() {
    let Some(disk) = Disk::new(16 << 10) else { return };
    let (gateway, port) = disk.started();
    let mut away = Client::connect_with(port, persistent("away"));
    away.subscribe_with("to/#", QoS::AtLeastOnce, None);
    away.send(&Packet::Disconnect(Box::default()));
    assert_eq!(away.next(), Got::Closed);
    let mut publisher = Client::connect(port, Protocol::V5, "publisher");
    let mut publish = |n: u32| {
        publisher.publish(&format!("to/{n}"), &[b'x'; 20_000], QoS::AtLeastOnce, true);
        publisher.next()
    };
    assert_eq!(publish(0), Got::PubAck(0));
    disk.fill(0);
    let refused = (1..2_000).find(|n| publish(*n) == Got::PubAck(0x97)).expect("refused when it is full");
    disk.free();
    crate::support::until(|| publish(refused) == Got::PubAck(0));

    // On a full disk it also ends as it should, and starts again.
    disk.fill(0);
    assert_eq!(gateway.stop(), Some(0));
    let (_gateway, port) = disk.started();
    let mut back = Client::open(port, Protocol::V5);
    back.send(&Packet::Connect(Box::new(persistent("away"))));
    assert_eq!(back.next(), Got::ConnAck(0));
    assert!(matches!(back.next(), Got::Publish(topic, _) if topic == "to/0"));
}
