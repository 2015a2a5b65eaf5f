//! A backend that starts commands, cancels some and looks at others. An end that it was told of stays so, and each command that was
//! started is there.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use mqtt_server::proto::gateway::v1::{self, CommandState, commands_client::CommandsClient};
use parking_lot::Mutex;
use tokio::time::sleep;
use tonic::Code;

use super::{DEVICES, Shared, Way, device};
use crate::{clock, rng::Rng};

/// Answers that a device has sent, by command.
pub(super) type Given = Arc<Mutex<HashMap<String, HashSet<Vec<u8>>>>>;

/// State and answer at the end of a command.
type End = (i32, Vec<u8>);

/// Facts about the commands.
pub(super) struct Commands {
    shared: Arc<Shared>,
    given: Vec<Given>,
    /// Commands whose start was answered, with the number of their device, and the end that was told.
    started: BTreeMap<String, (usize, Option<End>)>,
    pub(super) replied: usize,
}

fn is_final(state: CommandState) -> bool {
    use CommandState::{Cancelled, Refused, Replied, TimedOut};
    matches!(state, Replied | TimedOut | Cancelled | Refused)
}

/// Starts one after another until the end.
pub(super) async fn run(shared: Arc<Shared>, addresses: [SocketAddr; 2], given: Vec<Given>) -> Commands {
    let mut way = Way::new(addresses);
    let mut rng = Rng::new(addresses[0].port().into());
    let mut commands = Commands { shared, given, started: BTreeMap::new(), replied: 0 };
    let mut count = 0_u32;
    while !commands.shared.is_ending() {
        count += 1;
        // The last of them never comes.
        let device = rng.between(0, DEVICES as u64 + 1) as usize;
        let id = format!("command-{count}");
        commands.start(&mut way, &id, device, rng.between(0, 200) as usize).await;
        let some = rng.between(1, u64::from(count) + 1);
        let id = format!("command-{some}");
        if rng.one_in(4) {
            commands.cancel(&mut way, &id).await;
        } else {
            commands.look(&mut way, &id).await;
        }
        sleep(Duration::from_millis(20)).await;
    }
    commands
}

impl Commands {
    pub(super) fn started(&self) -> usize {
        self.started.len()
    }

    /// Under one id, until it is answered.
    async fn start(&mut self, way: &mut Way, id: &str, device: usize, bytes: usize) {
        let spec = v1::CommandSpec {
            device_id: device::name(device),
            name: "do".to_owned(),
            payload: vec![b'x'; bytes].into(),
            ..Default::default()
        };
        let request =
            v1::StartCommandRequest { command_id: id.to_owned(), spec: Some(spec), ..Default::default() };
        let answer = way
            .until_answered(async |channel| CommandsClient::new(channel).start_command(request.clone()).await)
            .await;
        match answer {
            Ok(answer) => {
                self.started.insert(id.to_owned(), (device, None));
                self.note(id, answer.command);
            }
            // More are under way than the gateway takes.
            Err(status) if status.code() == Code::ResourceExhausted => {}
            Err(status) => self.shared.problem(format!("start of {id}: {status:?}")),
        }
    }

    async fn cancel(&mut self, way: &mut Way, id: &str) {
        let request = v1::CancelCommandRequest { command_id: id.to_owned() };
        let answer = way
            .until_answered(async |channel| {
                CommandsClient::new(channel).cancel_command(request.clone()).await
            })
            .await;
        match answer {
            Ok(answer) => self.note(id, answer.command),
            Err(status) if status.code() == Code::FailedPrecondition => {}
            Err(status) => self.missing(id, &status),
        }
    }

    async fn look(&mut self, way: &mut Way, id: &str) {
        let request = v1::GetCommandRequest { command_id: id.to_owned() };
        let answer = way
            .until_answered(async |channel| CommandsClient::new(channel).get_command(request.clone()).await)
            .await;
        match answer {
            Ok(answer) => self.note(id, answer.command),
            Err(status) => self.missing(id, &status),
        }
    }

    /// A call about a command failed: only one that was not started may be unknown.
    fn missing(&self, id: &str, status: &tonic::Status) {
        if self.started.contains_key(id) || status.code() != Code::NotFound {
            self.shared.problem(format!("{id}: {status:?}"));
        }
    }

    fn note(&mut self, id: &str, command: Option<v1::Command>) {
        let Some(command) = command else { return };
        let Some((_, told)) = self.started.get_mut(id) else { return };
        let state = command.state();
        let end = (command.state, command.reply.map(|reply| reply.payload.to_vec()).unwrap_or_default());
        if told.as_ref().is_some_and(|told| *told != end) {
            self.shared.problem(format!("{id} was {told:?} and is {state:?} {end:?}"));
        }
        if is_final(state) {
            told.get_or_insert(end);
        }
    }

    /// Asks for all of them; what has not ended is cancelled, and stays so.
    pub(super) async fn judge(&mut self, way: &mut Way, deadline: u64) {
        let ids: Vec<String> = self.started.keys().cloned().collect();
        for id in &ids {
            self.look(way, id).await;
            while self.end(id).is_none() && clock::now() < deadline {
                self.cancel(way, id).await;
                self.look(way, id).await;
            }
        }
        for id in &ids {
            let device = self.started[id].0;
            match self.end(id) {
                None => self.shared.problem(format!("{id} does not end")),
                Some((state, payload)) if *state == CommandState::Replied as i32 => {
                    let given = self.given.get(device);
                    let is_given = given.is_some_and(|given| {
                        given.lock().get(id).is_some_and(|given| given.contains(payload))
                    });
                    if !is_given {
                        self.shared.problem(format!("{id} has an answer that its device never gave"));
                    }
                    self.replied += 1;
                }
                Some(_) => {}
            }
        }
    }

    fn end(&self, id: &str) -> Option<&End> {
        self.started.get(id).and_then(|(_, end)| end.as_ref())
    }
}
