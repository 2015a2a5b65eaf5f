//! A bridge whose filters change in the configuration: what waited under the filters before goes out first, in order, then what
//! the new ones select from then on. Restarts in between end the process in every way.

use std::{
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use gateway_core::Protocol;
use mqtt_server::proto::gateway::v1::{
    ListGroupsRequest, Position, SeekGroupRequest, groups_client::GroupsClient, position::At,
};
use tonic::Code;
use tonic_types::StatusExt as _;

use super::{
    carried, lag,
    scripted::{Answer, ScriptedBroker},
};
use crate::{
    client::Client,
    support::{Server, command, until},
};

/// A broker that takes nothing until it is told to.
fn away() -> (ScriptedBroker, Arc<AtomicBool>) {
    let well = Arc::new(AtomicBool::new(false));
    let is_well = Arc::clone(&well);
    let script = move |_: &str, _: &[u8]| if is_well.load(Relaxed) { Answer::Take } else { Answer::Close };
    (ScriptedBroker::start(Protocol::V5, script), well)
}

fn config(broker: &ScriptedBroker, topic: &str) -> String {
    format!(
        "[bridges.plant]\ntopics = [\"{topic}\"]\nretry_max = \"200ms\"\nwhen_full = \"refuse\"\n\
         max_bytes = \"2KiB\"\nbatch_bytes = \"1KiB\"\n[bridges.plant.mqtt]\nurl = \"mqtt://127.0.0.1:{}\"\n",
        broker.port
    )
}

/// One device publishes on both topics in turn. Returns what it sent on `topic`.
fn publish(server: &Server, label: &str, count: usize, topic: &str) -> Vec<String> {
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "d1");
    let mut sent = Vec::new();
    for number in 0..count {
        for name in ["d/a", "d/b"] {
            let text = format!("{label} {name} {number}");
            device.publish_acked(name, text.as_bytes(), false);
            if name == topic {
                sent.push(text);
            }
        }
    }
    sent
}

/// The failure: messages of the time before the change are lost, or come after those of the time after it, or the queue of then
/// refuses what comes now.
#[test]
fn what_waited_under_the_filters_before_goes_out_first() {
    for is_killed in [false, true] {
        let (broker, well) = away();
        let restart = |server: Server, topic: &str| match is_killed {
            true => server.kill_and_restart(&[], &config(&broker, topic)),
            false => server.stop_and_restart(&[], &config(&broker, topic)),
        };
        let mut server = Server::start_with(&[], &config(&broker, "d/a"));
        let mut wanted = publish(&server, "first", 8, "d/a");
        server = restart(server, "d/b");
        wanted.extend(publish(&server, "second", 8, "d/b"));
        // Back, before anything went out.
        server = restart(server, "d/a");
        wanted.extend(publish(&server, "third", 8, "d/a"));
        server = restart(server, "d/a");
        assert_eq!(lag(&server), 24, "of all three");
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let mut groups = runtime.block_on(async {
            let channel = crate::non_broker::channel(&server).await;
            GroupsClient::new(channel)
        });
        let mut seek = || {
            let to = Some(Position { at: Some(At::Latest(true)) });
            let request = SeekGroupRequest { name: "bridge.plant".to_owned(), to };
            runtime.block_on(groups.seek_group(request))
        };
        let refused = seek().expect_err("it has predecessors");
        let reason = refused.get_details_error_info().map(|info| info.reason);
        assert_eq!((refused.code(), reason.as_deref()), (Code::FailedPrecondition, Some("GROUP_DRAINING")));
        well.store(true, Relaxed);
        until(|| carried(&server) >= 24 && lag(&server) == 0);
        assert_eq!(broker.taken(), wanted, "killed: {is_killed}");
        until(|| seek().is_ok());
        let listed = runtime.block_on(groups.list_groups(ListGroupsRequest::default())).expect("a list");
        let topics: Vec<_> = listed
            .into_inner()
            .groups
            .into_iter()
            .filter_map(|group| Some(group.filter?.topic_filters))
            .collect();
        assert_eq!(topics, [["d/a"]]);
        let later = publish(&server, "later", 8, "d/a");
        until(|| lag(&server) == 0);
        assert_eq!(broker.taken()[24..], later);
    }
}

/// Starts the gateway in the directory of one that has ended, with another configuration, and kills it after so long. True if the
/// change of the filters was over by then.
fn kill_in_start(server: &Server, toml: &str, after: Duration) -> bool {
    let file = server.dir().join("test.toml");
    let before = std::fs::read_to_string(&file).expect("the configuration");
    let listeners = before.find("[[listeners]]").expect("listeners");
    std::fs::write(&file, format!("{toml}\n{}", &before[listeners..])).expect("another configuration");
    let path = server.dir().join("killed.log");
    let log = std::fs::File::create(&path).expect("a log");
    let mut child = command(env!("CARGO_BIN_EXE_mqtt-server"))
        .current_dir(server.dir())
        .args(["--addr", "127.0.0.1:0", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"])
        .args(["--config", "test.toml", "--data-dir", "data"])
        .args(["--cert", "certs/server.crt", "--key", "certs/server.key"])
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("the same log"))
        .stderr(log)
        .spawn()
        .expect("start mqtt-server");
    thread::sleep(after);
    let _ = child.kill();
    let _ = child.wait();
    std::fs::read_to_string(path).expect("the log").contains("group has another filter")
}

/// The failure: a kill somewhere in a change, or while what waited goes out, loses messages or their order.
#[test]
fn a_kill_in_a_change_loses_nothing() {
    let (broker, well) = away();
    let mut server = Server::start_with(&[], &config(&broker, "d/a"));
    let mut wanted = publish(&server, "first", 8, "d/a");
    let (mut after, mut changes) = (Duration::from_millis(5), [0, 0]);
    for round in 0..4 {
        server.signal("KILL");
        assert!(!server.wait());
        // To and fro, each a change; about as many kills before it as after it, and most of them near it.
        for step in 0..14 {
            let topic = if step % 2 == 0 { "d/b" } else { "d/a" };
            let is_over = kill_in_start(&server, &config(&broker, topic), after);
            changes[usize::from(is_over)] += 1;
            after = if is_over { after * 9 / 10 } else { after * 5 / 4 };
        }
        let topic = if round % 2 == 0 { "d/b" } else { "d/a" };
        server = server.kill_and_restart(&[], &config(&broker, topic));
        wanted.extend(publish(&server, &format!("round {round}"), 8, topic));
    }
    assert!(changes[0] > 5 && changes[1] > 5, "killed before and after: {changes:?}");
    assert_eq!(lag(&server), wanted.len() as u64);
    well.store(true, Relaxed);
    // In the middle of what waited, and again.
    for part in 1..=3 {
        until(|| broker.taken().len() >= part * wanted.len() / 4);
        server = server.kill_and_restart(&[], &config(&broker, "d/b"));
    }
    until(|| lag(&server) == 0);
    assert_eq!(broker.taken(), wanted);
    wanted.extend(publish(&server, "later", 8, "d/b"));
    until(|| lag(&server) == 0);
    assert_eq!(broker.taken(), wanted);
}
