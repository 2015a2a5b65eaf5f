//! A small client of the gateway's gRPC API.
//!
//! ```text
//! grpc_client subscribe --filter 'sensors/#' --device dev-1
//! grpc_client publish --device dev-1 commands/led on
//! grpc_client command valve open --wait 10
//! grpc_client group readings --filter 'sensors/#'
//! grpc_client consume readings --count 10
//! grpc_client shadow dev-1 --desire '{"on": true}'
//! grpc_client --ca certs/ca.crt --addr https://localhost:10000 --token @reader.token latest sensors/temperature
//! ```

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "it is a command-line tool")]

use std::{error::Error, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use mqtt_server::proto::gateway::v1::{
    Ack, CommandSpec, ConsumeRequest, ConsumedMessage, CreateGroupRequest, Drain, Filter, GetLatestRequest,
    GetShadowRequest, Group, Offline, Open, PublishRequest, Qos, SendRequest, SubscribeRequest,
    UpdateShadowRequest, Wait, commands_client::CommandsClient, consume_item, consume_request::Action,
    consumed_message::Content, consumer_client::ConsumerClient, groups_client::GroupsClient,
    publisher_client::PublisherClient, shadows_client::ShadowsClient, state_client::StateClient,
    subscribe_item::Item, subscriber_client::SubscriberClient,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Request, Status,
    metadata::AsciiMetadataValue,
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

/// A client of the gateway's gRPC API.
#[derive(Parser)]
struct Args {
    /// The gateway, `http://` for plaintext.
    #[arg(short, long, default_value = "http://127.0.0.1:10000")]
    addr: String,
    /// CA certificate (PEM) for `https://` addresses.
    #[arg(long)]
    ca: Option<PathBuf>,
    /// Name in the server's certificate, if it is not the host of the address.
    #[arg(long, requires = "ca")]
    server_name: Option<String>,
    /// Certificate of this client (PEM), where the gateway asks for one.
    #[arg(long, requires = "key")]
    cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, requires = "cert")]
    key: Option<PathBuf>,
    /// Token that `mqtt-server token create` has shown, or `@FILE` with it in a file, which others do not see in the list of
    /// processes.
    #[arg(long)]
    token: Option<String>,
    #[command(subcommand)]
    task: Task,
}

/// Says with each call who calls, if there is a token.
#[derive(Clone)]
struct Bearer(Option<AsciiMetadataValue>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

type Caller = InterceptedService<Channel, Bearer>;

#[derive(Subcommand)]
enum Task {
    /// Prints messages until interrupted.
    Subscribe {
        /// Topic filter; may be repeated.
        #[arg(short, long)]
        filter: Vec<String>,
        /// Only this device; may be repeated.
        #[arg(short, long)]
        device: Vec<String>,
        /// End after so many messages.
        #[arg(short, long)]
        count: Option<u64>,
    },
    /// Publishes one message and tells what became of it.
    Publish {
        /// Send to this device only, subscribed or not.
        #[arg(short, long)]
        device: Option<String>,
        /// Quality of service: 0, 1 or 2.
        #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(0..=2))]
        qos: i32,
        /// Keep as the retained message of the topic.
        #[arg(short, long)]
        retain: bool,
        /// Wait for the acknowledgement of every online receiver.
        #[arg(short, long)]
        wait: bool,
        /// Fail if the device is offline, rather than queue the message.
        #[arg(long, requires = "device")]
        fail_offline: bool,
        /// Topic.
        topic: String,
        /// Payload.
        payload: String,
    },
    /// Makes a consumer group: from now on the gateway keeps for it what matches. The same again does no harm.
    Group {
        /// Its name.
        name: String,
        /// Topic filter; may be repeated.
        #[arg(short, long)]
        filter: Vec<String>,
    },
    /// Prints messages of a group as one of its members, and acknowledges each once it is printed.
    Consume {
        /// The group.
        group: String,
        /// Name of this member; without it the gateway gives it one, for this stream only.
        #[arg(short, long, default_value_t)]
        member: String,
        /// End after so many messages.
        #[arg(short, long)]
        count: Option<u64>,
        /// Acknowledge nothing, as a member does that fails in the middle of its work.
        #[arg(long)]
        no_ack: bool,
    },
    /// Prints the shadow of a device: what it is to be, what it says it is, and the difference.
    Shadow {
        /// The device.
        device: String,
        /// Its name; the one without a name otherwise.
        #[arg(short, long, default_value_t)]
        name: String,
        /// Change first what the device is to be: JSON that is merged into it, where null removes a key.
        #[arg(short, long)]
        desire: Option<String>,
    },
    /// Sends a command to a device and prints its status and answer.
    Command {
        /// Device.
        device: String,
        /// What it is to do.
        name: String,
        /// With what.
        #[arg(default_value = "")]
        payload: String,
        /// Seconds to wait for a device that is offline.
        #[arg(short, long)]
        wait: Option<u32>,
    },
    /// Prints the latest value of a topic.
    Latest {
        /// Of this device; without it, the newest of all devices.
        #[arg(short, long)]
        device: Option<String>,
        /// Topic.
        topic: String,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("grpc_client: {}", in_words(&*error));
            ExitCode::FAILURE
        }
    }
}

/// What an answer or a failed connection says, with its causes.
fn in_words(error: &(dyn Error + 'static)) -> String {
    if let Some(status) = error.downcast_ref::<Status>() {
        return format!("{} ({:?})", status.message(), status.code());
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

async fn run(args: Args) -> Result<(), Box<dyn Error>> {
    let channel = connect(&args).await?;
    match args.task {
        Task::Subscribe { filter, device, count } => {
            subscribe(channel, filter, device, count.unwrap_or(u64::MAX)).await
        }
        Task::Publish { device, qos, retain, wait, fail_offline, topic, payload } => {
            let request = PublishRequest {
                device_id: device,
                topic,
                payload: payload.into(),
                qos: Qos::try_from(qos + 1)?.into(),
                retain,
                wait: if wait { Wait::Acked } else { Wait::Accepted }.into(),
                offline: if fail_offline { Offline::Fail } else { Offline::Queue }.into(),
                ..PublishRequest::default()
            };
            let response = PublisherClient::new(channel).publish(request).await?.into_inner();
            println!(
                "{}: {} matched, {} sent, {} queued, {} dropped",
                response.outcome().as_str_name(),
                response.matched,
                response.sent,
                response.queued,
                response.dropped
            );
            Ok(())
        }
        Task::Group { name, filter } => {
            let filter = Some(Filter { topic_filters: filter, ..Filter::default() });
            let group = Some(Group { name, filter, ..Group::default() });
            let request = CreateGroupRequest { group, ..CreateGroupRequest::default() };
            GroupsClient::new(channel).create_group(request).await?;
            Ok(())
        }
        Task::Consume { group, member, count, no_ack } => {
            consume(channel, group, member, count.unwrap_or(u64::MAX), no_ack).await
        }
        Task::Shadow { device, name, desire } => shadow(channel, device, name, desire).await,
        Task::Command { device, name, payload, wait } => {
            let spec =
                CommandSpec { device_id: device, name, payload: payload.into(), ..CommandSpec::default() };
            let wait_for_device =
                wait.map(|seconds| prost_types::Duration { seconds: i64::from(seconds), nanos: 0 });
            let request = SendRequest { spec: Some(spec), wait_for_device };
            let reply =
                CommandsClient::new(channel).send(request).await?.into_inner().reply.unwrap_or_default();
            println!("{} {}", reply.device_status, String::from_utf8_lossy(&reply.payload));
            Ok(())
        }
        Task::Latest { device, topic } => {
            let request = GetLatestRequest { topic, device_id: device };
            let response = StateClient::new(channel).get_latest(request).await?.into_inner();
            if let Some(value) = response.value {
                print_message(&value.device_id, &value.topic, &value.payload);
            }
            Ok(())
        }
    }
}

async fn connect(args: &Args) -> Result<Caller, Box<dyn Error>> {
    let mut endpoint = Endpoint::try_from(args.addr.clone())?;
    let read =
        |path: &PathBuf| std::fs::read(path).map_err(|error| format!("read {}: {error}", path.display()));
    if args.addr.starts_with("https://") && args.ca.is_none() {
        return Err("an https:// address needs --ca, the authority to trust, such as certs/ca.crt".into());
    }
    if let Some(path) = &args.ca {
        let ca = Certificate::from_pem(read(path)?);
        let mut tls = ClientTlsConfig::new().ca_certificate(ca);
        if let Some(name) = &args.server_name {
            tls = tls.domain_name(name);
        }
        if let (Some(cert), Some(key)) = (&args.cert, &args.key) {
            tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
        }
        endpoint = endpoint.tls_config(tls)?;
    }
    let channel = endpoint.connect().await.map_err(|error| {
        let hint = match args.ca {
            Some(_) => "is the gateway running there?",
            None => "is the gateway running there, with plaintext gRPC? It speaks TLS otherwise: --addr https://... --ca FILE",
        };
        format!("cannot connect to {}: {}; {hint}", args.addr, in_words(&error))
    })?;
    let token = match args.token.as_deref().map(|token| (token.strip_prefix('@'), token)) {
        Some((Some(file), _)) => Some(String::from_utf8(read(&file.into())?)?),
        Some((None, token)) => Some(token.to_owned()),
        None => None,
    };
    let value = token.map(|token| {
        let value = AsciiMetadataValue::try_from(format!("Bearer {}", token.trim()));
        // The error would quote it.
        value.map_err(|_| "the token has characters that no token has")
    });
    Ok(InterceptedService::new(channel, Bearer(value.transpose()?)))
}

async fn subscribe(
    channel: Caller,
    topic_filters: Vec<String>,
    device_ids: Vec<String>,
    count: u64,
) -> Result<(), Box<dyn Error>> {
    let request = SubscribeRequest { topic_filters, device_ids, ..SubscribeRequest::default() };
    let mut stream = SubscriberClient::new(channel).subscribe(request).await?.into_inner();
    let mut left = count;
    while let Some(response) = stream.message().await? {
        for item in response.items {
            match item.item {
                Some(Item::Message(message)) if left > 0 => {
                    print_message(&message.device_id, &message.topic, &message.payload);
                    left -= 1;
                }
                Some(Item::Gap(gap)) => println!("-- {} messages missing", gap.count),
                Some(Item::Message(_) | Item::Heartbeat(_)) | None => {}
            }
        }
        if left == 0 {
            return Ok(());
        }
    }
    Ok(())
}

/// One member of a group. Its requests go out while answers come in.
async fn consume(
    channel: Caller,
    group: String,
    member_id: String,
    count: u64,
    no_ack: bool,
) -> Result<(), Box<dyn Error>> {
    let (say, said) = mpsc::channel(16);
    let request = |action| ConsumeRequest { action: Some(action) };
    say.send(request(Action::Open(Open { group, member_id, ..Open::default() }))).await?;
    let mut stream = ConsumerClient::new(channel).consume(ReceiverStream::new(said)).await?.into_inner();
    let mut left = count;
    while let Some(response) = stream.message().await? {
        let mut printed = Vec::new();
        for item in response.items {
            match item.item {
                Some(consume_item::Item::Message(message)) if left > 0 => {
                    print_consumed(&message);
                    printed.push(message.delivery_id);
                    left -= 1;
                }
                Some(consume_item::Item::Gap(gap)) => println!("-- {} messages missing", gap.count),
                _ => {}
            }
        }
        if no_ack && left == 0 {
            return Ok(());
        }
        if !no_ack && !printed.is_empty() {
            say.send(request(Action::Ack(Ack { delivery_ids: printed, ..Ack::default() }))).await?;
            if left == 0 {
                // The stream ends once that is on disk; what was delivered beyond the count goes to others.
                say.send(request(Action::Drain(Drain {}))).await?;
            }
        }
    }
    Ok(())
}

async fn shadow(
    channel: Caller,
    device_id: String,
    name: String,
    desired: Option<String>,
) -> Result<(), Box<dyn Error>> {
    let mut client = ShadowsClient::new(channel);
    let shadow = match desired {
        None => client.get_shadow(GetShadowRequest { device_id, name }).await?.into_inner().shadow,
        desired => {
            let request = UpdateShadowRequest { device_id, name, desired, ..UpdateShadowRequest::default() };
            client.update_shadow(request).await?.into_inner().shadow
        }
    };
    let Some(shadow) = shadow else { return Ok(()) };
    let delta = if shadow.delta.is_empty() { "nothing" } else { &shadow.delta };
    println!("{} version {}", shadow.device_id, shadow.version);
    println!("desired {}, reported {}, to do: {delta}", shadow.desired, shadow.reported);
    Ok(())
}

fn print_consumed(delivery: &ConsumedMessage) {
    let again = if delivery.attempt > 1 { format!(" (attempt {})", delivery.attempt) } else { String::new() };
    match &delivery.content {
        Some(Content::Message(message)) => {
            let payload = String::from_utf8_lossy(&message.payload);
            println!("{} {} {payload}{again}", message.device_id, message.topic);
        }
        Some(Content::Event(event)) => println!("{} {:?}{again}", event.device_id, event.detail),
        None => {}
    }
}

fn print_message(device: &str, topic: &str, payload: &[u8]) {
    println!("{device} {topic} {}", String::from_utf8_lossy(payload));
}
