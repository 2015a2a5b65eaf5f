//! Limits from outside: what a peer that is slow, silent, large, fast or one too many meets, and that others go on.

use std::{
    fs,
    io::Write as _,
    process::{Command, Stdio},
    time::Duration,
};

use crate::client::{Client, Got, hello, message};
use crate::support::{Server, until};
use codec::{Connect, Packet};
use gateway_core::{Protocol, QoS};

/// Resident bytes of a process.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("read the process status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

#[test]
fn a_subscriber_that_does_not_read_costs_little_and_delays_nobody() {
    const BATCH: usize = 16;
    const PAYLOAD: usize = 64 << 10;
    // No timeout frees the others from the slow one.
    const LIMITS: &str =
        "[limits]\nmailbox_messages = 1000\nmailbox_bytes = 4194304\nwrite_timeout = \"10m\"\n";
    let server = Server::start_with(&[], LIMITS);
    let mut slow = Client::connect(server.ports.tcp, Protocol::V5, "slow");
    assert_eq!(slow.subscribe("bulk/#"), 0);
    let mut reader = Client::connect(server.ports.tcp, Protocol::V5, "reader");
    assert_eq!(reader.subscribe("bulk/#"), 0);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let before = resident(server.pid());
    let mut payload = vec![b'x'; PAYLOAD];
    // The reader takes each batch before the next is sent: its own mailbox never fills, so it misses nothing.
    for batch in 0..200 * 1_000_000 / (BATCH * PAYLOAD) {
        for n in 0..BATCH {
            payload[..8].copy_from_slice(&((batch * BATCH + n) as u64).to_be_bytes());
            publisher.publish("bulk/data", &payload, QoS::AtMostOnce, false);
        }
        for n in 0..BATCH {
            payload[..8].copy_from_slice(&((batch * BATCH + n) as u64).to_be_bytes());
            assert!(
                reader.next() == Got::Publish("bulk/data".to_owned(), payload.clone()),
                "message {n} of batch {batch} is missing"
            );
        }
    }
    assert_eq!(publisher.ping(), []);
    let grown = resident(server.pid()).saturating_sub(before);
    assert!(grown < 64 << 20, "resident memory grew by {grown} bytes");
    assert!(server.metric("mqtt_messages_dropped_total") > 0, "the slow subscriber lost messages, counted");
    // Its socket is full: waiting for it must not be polling for it. The second is what is measured; nothing is awaited.
    let spent = cpu_ticks(server.pid());
    std::thread::sleep(Duration::from_secs(1));
    let ticks = cpu_ticks(server.pid()) - spent;
    assert!(ticks < 80, "a full socket alone keeps the server busy: {ticks} of 100 ticks");
}

/// Its buffers would be held for as long as its TCP connection stands.
#[test]
fn a_subscriber_that_takes_nothing_for_the_write_timeout_is_closed() {
    let server = Server::start_with(&[], "[limits]\nmailbox_bytes = 1048576\nwrite_timeout = \"1s\"\n");
    let mut stuck = Client::connect(server.ports.tcp, Protocol::V5, "stuck");
    assert_eq!(stuck.subscribe("bulk"), 0);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let payload = vec![b'x'; 64 << 10];
    until(|| {
        // Sooner or later more than the sockets of both ends hold.
        (0..64).for_each(|_| publisher.publish("bulk", &payload, QoS::AtMostOnce, false));
        assert_eq!(publisher.ping(), []);
        server.metric("mqtt_write_timeouts_total") == 1
    });
    assert_eq!(publisher.ping(), [], "the other goes on");
}

/// CPU time that a process has used, in ticks of 10 ms.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the server's figures");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    fields[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
}

#[test]
fn ten_thousand_idle_connections_are_all_served() {
    const WANTED: usize = 10_000;
    // The server inherits the limit.
    let _ = Command::new("sh")
        .args(["-c", "prlimit --pid \"$PPID\" --nofile=\"$(ulimit -Hn):$(ulimit -Hn)\""])
        .stderr(Stdio::null())
        .status();
    let limits = fs::read_to_string("/proc/self/limits").expect("read the limits");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("limit of open files");
    let allowed = line.split_whitespace().nth(3).and_then(|n| n.parse().ok()).unwrap_or(usize::MAX);
    let count = WANTED.min(allowed.saturating_sub(300));
    if count < WANTED {
        eprintln!("\n!!! only {count} of {WANTED} connections: the limit of open files is {allowed} !!!\n");
    }
    let server = Server::start();
    let mut clients: Vec<Client> = Vec::with_capacity(count);
    // As many at a time as there are places for handshakes on a busy machine.
    while clients.len() < count {
        let known = clients.len();
        for number in known..count.min(known + 500) {
            let mut client = Client::open(server.ports.tcp, Protocol::V4);
            client.send(&Packet::Connect(Box::new(hello(Protocol::V4, &format!("idle-{number}")))));
            clients.push(client);
        }
        for client in &mut clients[known..] {
            assert_eq!(client.next(), Got::ConnAck(0));
        }
    }
    assert_eq!(server.metric("mqtt_connections"), count as u64);
    for client in clients.iter_mut().step_by(97) {
        assert_eq!(client.ping(), []);
    }
}

#[test]
fn connections_beyond_the_limit_are_closed_and_places_come_back() {
    let server = Server::start_with(&[], "[limits]\nmax_connections = 2\n");
    let mut first = Client::connect(server.ports.tcp, Protocol::V5, "one");
    let second = Client::connect(server.ports.tcp, Protocol::V5, "two");
    assert_eq!(Client::open(server.ports.tcp, Protocol::V5).next(), Got::Closed);
    assert_eq!(first.ping(), []);
    drop(second);
    until(|| server.metric("mqtt_connections") == 1);
    // The place is free when the socket is, a little after the session has ended.
    until(|| {
        let mut third = Client::open(server.ports.tcp, Protocol::V5);
        let mut bytes = Vec::new();
        let connect = Packet::Connect(Box::new(hello(Protocol::V5, "three")));
        codec::encode(&connect, Protocol::V5, &mut bytes);
        third.stream.write_all(&bytes).is_ok() && third.next() == Got::ConnAck(0)
    });
}

#[test]
fn the_message_rate_slows_but_loses_nothing_and_is_no_silence() {
    // A burst of 120 at 20 a second pauses reading for 5 seconds, more than three times the keep alive.
    let server = Server::start_with(&[], "[limits]\nclient_message_rate = 20\n");
    let mut reader = Client::connect(server.ports.tcp, Protocol::V5, "reader");
    assert_eq!(reader.subscribe("fast"), 0);
    // All in one write, and the rest while the server pauses: no pause of this client can be taken for its silence.
    let payloads: Vec<[u8; 1]> = (0..120).map(|n| [n]).collect();
    let mut burst = vec![Packet::Connect(Connect { keep_alive: 1, ..hello(Protocol::V5, "fast") }.into())];
    burst.extend(payloads.iter().map(|payload| message("fast", payload, QoS::AtMostOnce, false)));
    let mut fast = Client::open(server.ports.tcp, Protocol::V5);
    fast.send_all(&burst);
    assert_eq!(fast.next(), Got::ConnAck(0));
    fast.send_all(&[Packet::PingReq, Packet::Disconnect(Box::default())]);
    assert_eq!(fast.next(), Got::PingResp);
    assert_eq!(fast.next(), Got::Closed);
    for n in 0..120_u8 {
        assert_eq!(reader.next(), Got::Publish("fast".to_owned(), vec![n]));
    }
    assert!(server.metric("mqtt_rate_limit_pauses_total") > 0);
    assert_eq!(server.metric("mqtt_keep_alive_timeouts_total"), 0);
}

#[test]
fn packets_beyond_the_size_are_refused() {
    let server = Server::start_with(&[], "[limits]\nmax_packet_size = 1024\n");
    for (protocol, farewell) in [(Protocol::V4, None), (Protocol::V5, Some(Got::Disconnect(0x95)))] {
        let mut client = Client::connect(server.ports.tcp, protocol, "large");
        client.publish_acked("t", &[0; 900], false);
        client.publish("t", &[0; 2000], QoS::AtLeastOnce, false);
        if let Some(farewell) = farewell {
            assert_eq!(client.next(), farewell);
        }
        assert_eq!(client.next(), Got::Closed);
    }
}

#[test]
fn silent_peers_are_closed() {
    let hasty = Server::start_with(&[], "[limits]\nconnect_timeout = \"1s\"\n");
    assert_eq!(Client::open(hasty.ports.tcp, Protocol::V5).next(), Got::Closed, "no CONNECT");
    // One with time for the CONNECT, however slow this machine is.
    let server = Server::start();
    let mut connect = hello(Protocol::V5, "silent");
    connect.keep_alive = 1;
    let mut client = Client::connect_with(server.ports.tcp, connect);
    assert_eq!(client.next(), Got::Disconnect(0x8D), "no PINGREQ");
    assert_eq!(client.next(), Got::Closed);
    assert_eq!(server.metric("mqtt_keep_alive_timeouts_total"), 1);
}

#[test]
fn proxy_protocol_headers_are_required_where_configured() {
    let toml = "[[listeners]]\nname = \"proxied\"\nkind = \"tcp\"\naddress = \"127.0.0.1:0\"\nproxy_protocol = true\n";
    let server = Server::start_with(&[], toml);
    let port = server.port("proxied");
    let v1 = b"PROXY TCP4 192.0.2.1 192.0.2.2 5000 1883\r\n".as_slice();
    let v2 =
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c\xc0\x00\x02\x01\xc0\x00\x02\x02\x13\x88\x07\x5b".as_slice();
    for header in [v1, v2] {
        let mut client = Client::open(port, Protocol::V5);
        client.stream.write_all(header).expect("send the header");
        client.send(&Packet::Connect(Box::new(hello(Protocol::V5, "proxied"))));
        assert_eq!(client.next(), Got::ConnAck(0));
        assert_eq!(client.ping(), []);
    }
    for header in [b"".as_slice(), b"PROXY TCP4 nonsense\r\n", b"\r\n\r\n\0\r\nQUIT\n\x11\x11\0\0"] {
        let mut client = Client::open(port, Protocol::V5);
        client.stream.write_all(header).expect("send the header");
        let mut bytes = Vec::new();
        let connect = Packet::Connect(Box::new(hello(Protocol::V5, "bad")));
        codec::encode(&connect, Protocol::V5, &mut bytes);
        let _ = client.stream.write_all(&bytes);
        assert_eq!(client.next(), Got::Closed, "{header:?}");
    }
    assert_eq!(Client::connect(server.ports.tcp, Protocol::V5, "direct").ping(), []);
}

/// The failure: nobody is told that a retained message was not stored, and a device that subscribes later gets an older one.
#[test]
fn a_retained_message_over_the_limit_is_told_to_operators() {
    let server = Server::start_with(&[], "[limits]\nretained_messages = 1\n[sys]\nenabled = false\n");
    let status = || {
        let mut ctl = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server"));
        ctl.args(["ctl", "gateway", "status", "--addr", &format!("https://localhost:{}", server.ports.grpc)]);
        ctl.current_dir(server.dir()).env("XDG_CONFIG_HOME", server.dir());
        // The command ends with 1 where there is a problem.
        crate::support::run(&mut ctl, crate::client::WAIT).1
    };
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    publisher.publish("kept/1", b"x", QoS::AtMostOnce, true);
    for n in 2..100 {
        publisher.publish(&format!("kept/{n}"), b"x", QoS::AtMostOnce, true);
    }
    assert_eq!(publisher.ping(), []);
    let log = server.log();
    let told: Vec<_> = log.lines().filter(|line| line.contains("retained message is not stored")).collect();
    assert_eq!(told.len(), 1, "limited: {told:?}");
    for part in ["\"level\":\"WARN\"", "\"client_id\":\"publisher\"", "limits.retained_messages", "kept/"] {
        assert!(told[0].contains(part), "{told:?}");
    }
    assert!(status().contains("limits.retained_messages"), "{}", status());
}

/// 100,000 messages are ten mailboxes: an unpaced replay would lose most of them, or hold them all.
#[test]
fn a_replay_of_100_000_retained_messages_is_complete_and_paced() {
    const COUNT: usize = 100_000;
    let server = Server::start();
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let payload = [b'x'; 200];
    for n in 0..COUNT {
        publisher.publish(&format!("kept/{n}"), &payload, QoS::AtMostOnce, true);
    }
    assert_eq!(publisher.ping(), []);
    let before = resident(server.pid());
    let mut reader = Client::connect(server.ports.tcp, Protocol::V5, "reader");
    let mut most = 0;
    let mut seen = vec![false; COUNT];
    assert_eq!(reader.subscribe("kept/+"), 0);
    for n in 0..COUNT {
        let Got::Publish(topic, _) = reader.next() else { panic!("the replay ended after {n}") };
        let number: usize = topic["kept/".len()..].parse().expect("a number");
        assert!(!std::mem::replace(&mut seen[number], true), "{topic} came twice");
        if n % 10_000 == 0 {
            most = most.max(resident(server.pid()));
        }
    }
    assert_eq!(reader.ping(), [], "nothing else, and nothing twice");
    assert_eq!(server.metric("mqtt_messages_dropped_total"), 0);
    // The messages are some 30 MB on the wire.
    let grown = most.saturating_sub(before);
    assert!(grown < 12 << 20, "resident memory grew by {grown} bytes during the replay");
}
