//! A file system that is really full, under the stored commands of a gateway.

use std::{collections::BTreeMap, time::Duration};

use gateway_core::{Protocol, QoS};
use mqtt_server::proto::gateway::v1::{self, CommandState, commands_client::CommandsClient};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

use super::{
    blocking::{Client, Got},
    broker::{Broker, MemoryKind},
    full::{CONFIG, Disk},
    support::{skipped, until},
};

struct Backend {
    runtime: tokio::runtime::Runtime,
    client: CommandsClient<Channel>,
}

impl Backend {
    fn new(broker: &Broker) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let endpoint = Endpoint::from_shared(format!("http://{}", broker.grpc())).expect("an address");
        let endpoint = endpoint.timeout(Duration::from_secs(60));
        let client = CommandsClient::new(runtime.block_on(async { endpoint.connect_lazy() }));
        Self { runtime, client }
    }

    fn start(&mut self, id: &str, device: &str) -> Result<v1::Command, Status> {
        let spec = v1::CommandSpec {
            device_id: device.into(),
            name: "work".into(),
            payload: vec![7; 20_000].into(),
            qos: v1::Qos::AtMostOnce.into(),
            ..Default::default()
        };
        let request =
            v1::StartCommandRequest { command_id: id.into(), spec: Some(spec), ..Default::default() };
        let answer = self.runtime.block_on(self.client.start_command(request))?;
        Ok(answer.into_inner().command.expect("a command"))
    }

    /// True if it was answered that the command has ended so.
    fn cancel(&mut self, id: &str) -> bool {
        let request = v1::CancelCommandRequest { command_id: id.into() };
        match self.runtime.block_on(self.client.cancel_command(request)) {
            Ok(answer) => {
                let state = answer.into_inner().command.expect("a command").state();
                assert_eq!(state, CommandState::Cancelled);
                true
            }
            Err(status) => {
                assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
                false
            }
        }
    }

    /// Returns the state of the command; `None` if there is no such command.
    fn state(&mut self, id: &str) -> Option<CommandState> {
        let request = v1::GetCommandRequest { command_id: id.into() };
        match self.runtime.block_on(self.client.get_command(request)) {
            Ok(answer) => Some(answer.into_inner().command.expect("a command").state()),
            Err(status) => {
                assert_eq!(status.code(), Code::NotFound, "{status:?}");
                None
            }
        }
    }
}

/// The failure: a command that was answered is gone, one that was refused goes out, or one that has ended begins again.
#[test]
fn a_full_disk_neither_loses_a_command_nor_begins_one_that_has_ended() {
    let mut broker = Broker::new(MemoryKind::Own).with(Vec::new(), CONFIG);
    let Some(disk) = Disk::mount(&broker.data()) else { return skipped("the right to mount a file system") };
    broker.start();
    broker.ready();
    let mut backend = Backend::new(&broker);
    let mut states = BTreeMap::new();
    for number in 0..20 {
        let id = format!("before-{number}");
        backend.start(&id, "away").expect("there is room");
        states.insert(id, CommandState::Queued);
    }

    let ballast = disk.fill();
    let mut refused = Vec::new();
    for number in 0..5_000 {
        let id = format!("full-{number}");
        match backend.start(&id, "away-too") {
            Ok(_) => drop(states.insert(id, CommandState::Queued)),
            Err(status) => {
                assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
                refused.push(id);
            }
        }
        if refused.len() == 3 {
            break;
        }
    }
    assert_eq!(refused.len(), 3, "the disk is not full");
    let mut cancelled = BTreeMap::new();
    for number in 0..10 {
        let id = format!("before-{number}");
        let done = backend.cancel(&id);
        *cancelled.entry(done).or_insert(0) += 1;
        if done {
            states.insert(id, CommandState::Cancelled);
        }
    }
    println!("cancelled with a full disk: {cancelled:?}");

    // A start with a full disk: what was answered is so.
    broker.kill();
    broker.start();
    broker.ready();
    let mut backend = Backend::new(&broker);
    for (id, state) in &states {
        assert_eq!(backend.state(id), Some(*state), "{id}");
    }
    for id in &refused {
        assert_eq!(backend.state(id), None, "{id} was refused");
    }

    // Room again: everything works, without a start.
    drop(ballast);
    until(|| backend.start("after", "d").is_ok());
    let mut device = Client::connect(broker.port, Protocol::V4, "d");
    assert!(matches!(device.next(), Got::Publish(topic, _) if topic == "cmd/d/after/work"));
    device.publish("cmd/d/after/reply/200", b"done", QoS::AtLeastOnce, false);
    assert_eq!(device.next(), Got::PubAck(0));
    assert_eq!(backend.state("after"), Some(CommandState::Replied));
    for (id, state) in &mut states {
        if *state == CommandState::Queued {
            until(|| backend.cancel(id));
            *state = CommandState::Cancelled;
        }
    }
    broker.kill();
    broker.start();
    broker.ready();
    let mut backend = Backend::new(&broker);
    states.insert("after".into(), CommandState::Replied);
    for (id, state) in &states {
        assert_eq!(backend.state(id), Some(*state), "{id}");
    }
    broker.kill();
}
