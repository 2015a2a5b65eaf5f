//! Runs mqload against a real broker (mosquitto) and against its own relay.
//! Without mosquitto on the machine the broker tests pass without doing anything.

use serde_json::Value;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

fn mosquitto() -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut dirs: Vec<&str> = path.split(':').collect();
    dirs.extend(["/usr/sbin", "/usr/local/sbin", "/usr/local/bin"]);
    dirs.iter().map(|d| Path::new(d).join("mosquitto")).find(|p| p.is_file())
}

/// A port below the range that mqload's own connections use.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let p = 20_000 + (std::process::id() as u16 % 800) * 10 + n;
        if TcpListener::bind(("127.0.0.1", p)).is_ok() {
            return p;
        }
    }
}

/// A server process that ends with the test.
struct Server {
    child: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(cmd: &mut Command, port: u16) -> Server {
        let child = cmd.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("server starts");
        let s = Server { child, port };
        for _ in 0..200 {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return s;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("server does not listen on {port}");
    }

    /// mosquitto with these further configuration lines; `None` without mosquitto.
    fn broker(more: &str) -> Option<Server> {
        let Some(exe) = mosquitto() else {
            eprintln!("mosquitto not found: test skipped");
            return None;
        };
        let port = port();
        let conf = std::env::temp_dir().join(format!("mqload-test-{port}.conf"));
        let text = format!("listener {port} 127.0.0.1\nallow_anonymous true\n{more}\n");
        std::fs::write(&conf, text).unwrap();
        Some(Server::start(Command::new(exe).arg("-c").arg(&conf), port))
    }

    fn run(&self, args: &[&str]) -> (i32, Value) {
        let port = self.port.to_string();
        let pid = self.child.id().to_string();
        let mut all = args.to_vec();
        all.extend(["--port", &port, "--pid", &pid]);
        mqload(&all)
    }
}

fn mqload(args: &[&str]) -> (i32, Value) {
    let o = Command::new(env!("CARGO_BIN_EXE_mqload")).args(args).output().unwrap();
    eprintln!("{args:?}\n{}", String::from_utf8_lossy(&o.stderr));
    let json = serde_json::from_slice(&o.stdout).unwrap_or(Value::Null);
    (o.status.code().unwrap_or(-1), json)
}

const NO_LIMITS: &str = "max_queued_messages 0\nmax_inflight_messages 0";

/// Every message arrives once, and the JSON says so.
fn exact(s: &Server, args: &[&str], published: u64, delivered: u64) -> Value {
    let (code, j) = s.run(args);
    assert_eq!(code, 0, "{j}");
    assert_eq!(j["published"], published);
    assert_eq!(j["expected"], delivered);
    assert_eq!(j["delivered"], delivered);
    for k in ["lost", "duplicated", "out_of_order", "misrouted", "unacked", "foreign"] {
        assert_eq!(j[k], 0, "{k}");
    }
    j
}

#[test]
fn pair_each_qos_and_version() {
    let Some(s) = Server::broker(NO_LIMITS) else {
        return;
    };
    for v5 in [false, true] {
        for qos in ["0", "1", "2"] {
            for size in ["20", "256", "200000"] {
                let n = if size == "200000" { "20" } else { "500" };
                let mut a = vec!["pubsub", "-P", "3", "-n", n, "--qos", qos, "--size", size];
                if v5 {
                    a.push("--v5");
                }
                let total = 3 * n.parse::<u64>().unwrap();
                let j = exact(&s, &a, total, total);
                assert_eq!(j["latency_us"]["count"], total);
                assert!(j["broker_cpu_us_per_delivered"].as_f64().unwrap() > 0.0);
                assert!(j["broker_rss_kb_after"].as_u64().unwrap() > 0);
            }
        }
    }
}

#[test]
fn topologies_and_threads() {
    let Some(s) = Server::broker(NO_LIMITS) else {
        return;
    };
    for threads in ["1", "2"] {
        for qos in ["0", "1", "2"] {
            let with = |a: &[&'static str]| {
                let mut v = vec!["pubsub", "--qos", qos, "--threads", threads, "-n", "200"];
                v.extend(a);
                v
            };
            exact(&s, &with(&["-t", "fanout", "-P", "2", "-S", "7"]), 400, 2800);
            exact(&s, &with(&["-t", "fanin", "-P", "5", "-S", "2"]), 1000, 2000);
            exact(&s, &with(&["-t", "share", "-P", "5", "-S", "3", "--v5"]), 1000, 1000);
            exact(&s, &with(&["-t", "none", "-P", "4"]), 800, 0);
            exact(&s, &with(&["-P", "4", "--refill", "50", "--gather-us", "100"]), 800, 800);
        }
    }
}

#[test]
fn open_loop_keeps_its_rate() {
    let Some(s) = Server::broker(NO_LIMITS) else {
        return;
    };
    let a = ["pubsub", "-P", "4", "--rate", "2000", "-d", "1", "--warmup", "0.5"];
    let (code, j) = s.run(&a);
    assert_eq!(code, 0);
    assert_eq!(j["scheduled"], 3000);
    assert_eq!(j["published"], 3000);
    assert_eq!(j["behind_schedule"], 0);
    assert_eq!(j["lost"], 0);
    let a = ["pubsub", "-P", "4", "--rate", "2000", "-n", "250", "--qos", "1"];
    exact(&s, &a, 1000, 1000);
}

/// Persistent sessions and retained messages work and are cleaned up.
#[test]
fn persistent_and_retained() {
    let Some(s) = Server::broker(NO_LIMITS) else {
        return;
    };
    for v5 in [false, true] {
        let mut a = vec!["pubsub", "-P", "3", "-n", "100", "--qos", "1", "--clean", "false"];
        a.extend(["--retain", "--prefix", "keep"]);
        if v5 {
            a.push("--v5");
        }
        exact(&s, &a, 300, 300);
        // Leftovers would show as foreign or as sessions.
        exact(&s, &a, 300, 300);
    }
}

#[test]
fn connections() {
    let Some(s) = Server::broker("") else {
        return;
    };
    let (code, j) = s.run(&["conn", "-N", "300", "--subscribe", "--hold", "0.5"]);
    assert_eq!((code, &j["established"]), (0, &Value::from(300)));
    assert_eq!(j["alive_after_hold"], 300);
    let a = ["conn", "-N", "50", "--rate", "100", "--v5", "--keepalive", "1", "--hold", "2.5"];
    let (code, j) = s.run(&a);
    assert_eq!((code, &j["alive_after_hold"]), (0, &Value::from(50)));
    let rate = j["connect_per_sec"].as_f64().unwrap();
    assert!((80.0..130.0).contains(&rate), "{rate}");
}

#[test]
fn refused_and_dropped_connections() {
    let port = port().to_string();
    let (code, j) = mqload(&["pubsub", "--port", &port]);
    assert_eq!(code, 4);
    assert!(!j["connect_failures"].as_object().unwrap().is_empty());
    let Some(s) = Server::broker("max_connections 5") else {
        return;
    };
    let (code, j) = s.run(&["conn", "-N", "10", "--hold", "0.1"]);
    let (up, failed) = (j["established"].as_u64(), j["failed"].as_u64());
    assert_eq!((code, up.unwrap() + failed.unwrap()), (4, 10));
    assert!(failed.unwrap() >= 4);
    let mut s = Server::broker("").unwrap();
    let (port, pid) = (s.port.to_string(), s.child.id());
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(1500));
        s.child.kill().unwrap();
        s.child.wait().unwrap();
        s
    });
    let pid = pid.to_string();
    let (code, j) = mqload(&["pubsub", "--port", &port, "--pid", &pid, "-d", "20", "--qos", "1"]);
    assert_eq!((code, &j["aborted"]), (4, &Value::from(true)));
    assert_eq!(j["dropped_publishers"], 1);
    assert_eq!(j["dropped_subscribers"], 1);
    assert_eq!(j["broker_cpu_us_per_published"], Value::Null);
    drop(killer.join());
}

#[test]
fn offline_queue() {
    let Some(s) = Server::broker(NO_LIMITS) else {
        return;
    };
    for v5 in [&[][..], &["--v5"]] {
        for qos in ["1", "2"] {
            for kind in [&["-P", "2", "-S", "3"][..], &["-P", "2", "-S", "2", "--pair"]] {
                let mut a = vec!["offline", "-n", "300", "--qos", qos];
                a.extend(kind);
                a.extend(v5);
                let (code, j) = s.run(&a);
                assert_eq!(code, 0, "{j}");
                assert_eq!(j["acked"], 600);
                let subs = j["subscribers"].as_u64().unwrap();
                let due = if kind.len() > 4 { 600 } else { 600 * subs };
                assert_eq!(j["delivered"], due);
                assert_eq!(j["sessions_present"], subs);
                assert_eq!(j["out_of_order"], 0);
            }
        }
    }
}

/// A broker that throws away acknowledged messages must not pass.
#[test]
fn loss_is_reported() {
    let Some(s) = Server::broker("max_queued_messages 10\nmax_inflight_messages 5") else {
        return;
    };
    let (code, j) = s.run(&["offline", "-n", "300", "--drain-timeout", "1"]);
    assert_eq!(code, 3, "{j}");
    assert_eq!(j["acked"], 300);
    assert_eq!(j["lost"].as_u64().unwrap() + j["delivered"].as_u64().unwrap(), 300);
    assert!(j["lost"].as_u64().unwrap() > 200);
}

#[test]
fn relay_forwards_everything() {
    let port = port();
    let addr = format!("127.0.0.1:{port}");
    let mut cmd = Command::new(env!("CARGO_BIN_EXE_mqload"));
    let s = Server::start(cmd.args(["relay", "--listen", &addr]), port);
    for qos in ["0", "1"] {
        for more in [&[][..], &["--v5"], &["--size", "100000", "-w", "3"]] {
            let mut a = vec!["pubsub", "-P", "5", "-n", "1000", "--qos", qos];
            a.extend(more);
            exact(&s, &a, 5000, 5000);
        }
    }
}

#[test]
fn bad_arguments() {
    for a in [
        &["pubsub", "--size", "19"][..],
        &["pubsub", "-P", "2", "-S", "3"],
        &["pubsub", "--qos", "3"],
        &["pubsub", "-t", "none", "-S", "1"],
        &["pubsub", "--rate", "0"],
        &["pubsub", "--pid", "2147483647"],
        &["pubsub", "--tls"],
        &["conn", "-N", "10000000"],
        &["offline", "--qos", "0"],
        &["nothing"],
    ] {
        assert_eq!(mqload(a).0, 2, "{a:?}");
    }
}

/// A broker with a second listener of these further lines, whose port the runs use.
fn second_listener(lines: &str) -> Option<Server> {
    let port = port();
    let mut s = Server::broker(&format!("{NO_LIMITS}\nlistener {port} 127.0.0.1\n{lines}"))?;
    for _ in 0..200 {
        if TcpStream::connect(("127.0.0.1", port)).is_ok() {
            s.port = port;
            return Some(s);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("second listener does not listen on {port}");
}

/// Configuration lines with a certificate made for this test.
fn tls_lines() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let cert = rcgen::CertificateParams::new(vec!["localhost".into()]).unwrap().self_signed(&key).unwrap();
    let base = std::env::temp_dir().join(format!("mqload-test-{}", port()));
    let (crt, pem) = (base.with_extension("crt"), base.with_extension("key"));
    std::fs::write(&crt, cert.pem()).unwrap();
    std::fs::write(&pem, key.serialize_pem()).unwrap();
    format!("certfile {}\nkeyfile {}", crt.display(), pem.display())
}

fn every_message_through(s: &Server, sizes: &[&str], options: &[&str]) {
    for qos in ["0", "1", "2"] {
        for size in sizes {
            let mut a = vec!["pubsub", "-P", "3", "-n", "100", "--qos", qos, "--size", size, "-w", "20"];
            a.extend(options);
            exact(s, &a, 300, 300);
        }
    }
}

#[test]
fn websocket_loses_nothing() {
    let Some(s) = second_listener("protocol websockets") else {
        return;
    };
    // Mosquitto is very slow with large messages here: its WebSocket library reads piecemeal.
    every_message_through(&s, &["20", "110", "256"], &["--ws"]);
    let (code, j) = s.run(&["conn", "-N", "50", "--ws", "--subscribe", "--hold", "0.1"]);
    assert_eq!((code, &j["established"]), (0, &50.into()));
    // Speaking plain MQTT to it must not pass for a WebSocket, nor the reverse.
    assert_eq!(s.run(&["conn", "-N", "1", "--hold", "0", "--connect-timeout", "1"]).0, 4);
}

#[test]
fn websocket_over_tls_loses_nothing() {
    let Some(s) = second_listener(&format!("protocol websockets\n{}", tls_lines())) else {
        return;
    };
    every_message_through(&s, &["20", "110", "256"], &["--ws", "--tls", "--insecure"]);
}

#[test]
fn tls_sessions_are_resumed_when_asked_for_and_only_then() {
    let Some(s) = second_listener(&tls_lines()) else {
        return;
    };
    every_message_through(&s, &["20", "256", "200000"], &["--tls", "--insecure"]);
    for version in [&["--tls12"][..], &[]] {
        for (resume, expected) in [(&["--resume"][..], 200), (&[], 0)] {
            let base = ["conn", "-N", "200", "--tls", "--insecure", "--hold", "0.1", "--inflight", "20"];
            let (code, j) = s.run(&[&base[..], version, resume].concat());
            assert_eq!(code, 0, "{j}");
            assert_eq!(j["tls_resumed"], expected, "{version:?} {resume:?}");
        }
    }
}

#[test]
fn cold_subscriptions_get_no_message() {
    let Some(s) = Server::broker(NO_LIMITS) else {
        return;
    };
    for kind in ["exact", "wildcard", "shapes"] {
        let a = ["pubsub", "-P", "3", "-n", "100", "--cold", "10000", "--cold-kind", kind];
        let j = exact(&s, &[&a[..], &["--topic-levels", "5"]].concat(), 300, 300);
        assert_eq!((&j["cold"], &j["cold_kind"]), (&10_000.into(), &kind.into()));
        assert!(j["broker_cpu_us_per_cold_subscription"].as_f64().unwrap() > 0.0);
    }
    // A broker that has worked before has free memory in hand.
    let fresh = Server::broker(NO_LIMITS).unwrap();
    let (code, j) = fresh.run(&["conn", "-N", "3", "--cold", "10000", "--hold", "0.1"]);
    assert_eq!(code, 0, "{j}");
    assert!(j["rss_bytes_per_cold_subscription"].as_f64().unwrap() > 100.0);
}

#[test]
fn many_topics_are_all_delivered() {
    let Some(s) = Server::broker(NO_LIMITS) else {
        return;
    };
    for topology in ["pair", "fanin", "share"] {
        let a = ["pubsub", "-t", topology, "-P", "4", "-S", "4", "-n", "300", "--cold-topics", "1000"];
        exact(&s, &a, 1200, if topology == "fanin" { 4800 } else { 1200 });
    }
}

#[test]
fn slow_subscribers_are_not_counted() {
    let Some(s) = Server::broker(NO_LIMITS) else {
        return;
    };
    for threads in ["1", "2"] {
        let a = ["pubsub", "-t", "fanout", "-S", "4", "--slow", "3", "-n", "500", "--threads", threads];
        let j = exact(&s, &a, 500, 2000);
        assert_eq!(j["dropped_connections"].as_object().unwrap().len(), 0);
        if threads == "1" {
            assert_eq!(j["last_delivery_us"]["count"], 500);
        }
    }
}
