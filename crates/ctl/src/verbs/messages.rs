//! Messages: subscribing, publishing, and what waits for its time.

use std::{
    io::{BufRead as _, BufReader, IsTerminal as _, Read as _},
    path::PathBuf,
};

use clap::{Subcommand, ValueEnum};
use mqtt_gateway_client::{
    Error, Update,
    v1::{
        CancelScheduledRequest, DropReason, ListScheduledRequest, Offline, Outcome, PayloadFormat,
        Properties, PublishBatchRequest, PublishRequest, PublishResponse, PublishResult,
        PublishStreamRequest, PublishToDevicesRequest, ReceivedMessage, SubscribeRequest, Wait,
        publish_result, subscribe_item::Item,
    },
};
use prost_types::Timestamp;

use super::{answer, pages, pair, qos, user_properties};
use crate::{
    VerbContext,
    failure::Failure,
    output::{self, at, or_dash, word},
    progress, remark, spans,
};

/// Prints messages.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SubVerb {
    /// Topic filters; none is '#'
    filters: Vec<String>,
    /// Only messages of this device; may be repeated
    #[arg(short, long, value_name = "ID")]
    device: Vec<String>,
    /// Only messages of devices whose id begins so; may be repeated
    #[arg(long, value_name = "PREFIX")]
    device_prefix: Vec<String>,
    /// Not these topics; may be repeated
    #[arg(short, long, value_name = "FILTER")]
    exclude: Vec<String>,
    /// Leave out what backends and the gateway itself publish
    #[arg(long)]
    devices_only: bool,
    /// End after so many messages
    #[arg(short, long, value_name = "N")]
    count: Option<u64>,
    /// Print payloads alone, as they are
    #[arg(long, conflicts_with = "output")]
    raw: bool,
}

impl SubVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let request = SubscribeRequest {
            topic_filters: self.filters,
            device_ids: self.device,
            device_id_prefixes: self.device_prefix,
            exclude_topic_filters: self.exclude,
            devices_only: self.devices_only,
            ..SubscribeRequest::default()
        };
        let mut stream = context.client.subscribe(request);
        let mut left = self.count.unwrap_or(u64::MAX);
        while left > 0 {
            match stream.next().await? {
                Update::Item(Item::Message(message)) => {
                    if self.raw {
                        context.out.raw(&message.payload)?;
                    } else {
                        context.out.line_of(&line(&message), &message)?;
                    }
                    left -= 1;
                    if left == 0 || stream.read_ahead() == 0 {
                        context.out.flush()?;
                    }
                }
                Update::Item(Item::Gap(gap)) => remark(&missing(gap.count, gap.reason().as_str_name())),
                Update::Item(Item::Heartbeat(_)) => {}
                Update::Lost(error) => lost(&error),
                Update::Reconnected { .. } => remark("connected again; messages may be missing"),
            }
        }
        Ok(())
    }
}

/// A message on a line: who, where, what.
pub(crate) fn line(message: &ReceivedMessage) -> String {
    let (device, topic) = (or_dash(&message.device_id), output::clean(&message.topic));
    format!("{device} {topic} {}", output::payload(&message.payload))
}

/// Describes a gap.
pub(crate) fn missing(count: u64, reason: &str) -> String {
    let count = if count == 0 { "some".to_owned() } else { count.to_string() };
    format!("{count} missing here: {}", word(reason, "GAP_REASON_"))
}

/// Tells that a stream is lost.
pub(crate) fn lost(error: &Error) {
    remark(&format!("{error}; trying again"));
}

/// Publishes.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct PubVerb {
    /// Topic
    topic: String,
    /// Payload, or several, each a message of its own; without it, --file and --lines it is read from standard input
    #[arg(conflicts_with_all = ["file", "lines"])]
    payload: Vec<String>,
    /// Payload from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "lines")]
    file: Option<PathBuf>,
    /// Each line of standard input is a message; told at the end how many became what
    #[arg(long)]
    lines: bool,
    /// Send to this device, subscribed or not, rather than by topic; may be repeated
    #[arg(short, long, value_name = "ID")]
    device: Vec<String>,
    /// Send to every device with a session whose id begins so
    #[arg(long, value_name = "PREFIX", conflicts_with_all = ["device", "lines"])]
    device_prefix: Option<String>,
    /// Quality of service: 0, 1 or 2
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(..=2))]
    qos: u8,
    /// Keep as the topic's retained message
    #[arg(short, long)]
    retain: bool,
    /// Until when to wait; --wait alone is until every receiver that is online has acknowledged
    #[arg(long, value_enum, value_name = "LEVEL", num_args = 0..=1, default_missing_value = "acked", require_equals = true)]
    wait: Option<WaitFor>,
    /// Fail if the device is offline, rather than let the message wait
    #[arg(long, conflicts_with = "drop_offline")]
    fail_offline: bool,
    /// Drop the message if the device is offline
    #[arg(long)]
    drop_offline: bool,
    /// Seconds until the message expires
    #[arg(long, value_name = "SECONDS")]
    expiry: Option<u32>,
    /// When the gateway is to publish it: 2026-01-31T12:00:00Z, or +90s from now
    #[arg(long, value_name = "TIME", value_parser = spans::moment)]
    deliver_at: Option<Timestamp>,
    /// Published once, however often the same message is sent with this key
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// MIME type of the payload
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// Topic for a reply
    #[arg(long, value_name = "TOPIC")]
    response_topic: Option<String>,
    /// Opaque data that comes back with the reply
    #[arg(long, value_name = "TEXT")]
    correlation_data: Option<String>,
    /// User property; may be repeated
    #[arg(short, long = "property", value_name = "NAME=VALUE", value_parser = pair)]
    properties: Vec<(String, String)>,
    /// Mark the payload as UTF-8 text
    #[arg(long)]
    text: bool,
}

/// Until when a publish waits.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum WaitFor {
    /// Routing is done
    Accepted,
    /// Every persistent session that it matched has it on disk, or its client has acknowledged it
    Durable,
    /// Handed to the operating system for every receiver that was online
    Sent,
    /// Acknowledged by every receiver that was online
    Acked,
}

impl PubVerb {
    fn request(&self, payload: Vec<u8>) -> PublishRequest {
        let properties = Properties {
            payload_format: if self.text { PayloadFormat::Text } else { PayloadFormat::Unspecified }.into(),
            content_type: self.content_type.clone(),
            response_topic: self.response_topic.clone(),
            correlation_data: self.correlation_data.clone().map(Into::into),
            user_properties: user_properties(&self.properties),
        };
        let wait = match self.wait {
            None => Wait::Unspecified,
            Some(WaitFor::Accepted) => Wait::Accepted,
            Some(WaitFor::Durable) => Wait::Durable,
            Some(WaitFor::Sent) => Wait::Sent,
            Some(WaitFor::Acked) => Wait::Acked,
        };
        let offline = match (self.fail_offline, self.drop_offline) {
            (true, _) => Offline::Fail,
            (_, true) => Offline::Drop,
            _ => Offline::Unspecified,
        };
        PublishRequest {
            device_id: None,
            topic: self.topic.clone(),
            payload: payload.into(),
            qos: qos(self.qos),
            retain: self.retain,
            properties: (properties != Properties::default()).then_some(properties),
            expiry_seconds: self.expiry,
            idempotency_key: self.idempotency_key.clone().unwrap_or_default(),
            wait: wait.into(),
            offline: offline.into(),
            deliver_at: self.deliver_at,
        }
    }

    pub(crate) async fn run(mut self, context: &mut VerbContext) -> Result<(), Failure> {
        if self.device_prefix.is_none() && self.device.is_empty() && (self.fail_offline || self.drop_offline)
        {
            return Err(Failure::Usage(
                "--fail-offline and --drop-offline need --device or --device-prefix".to_owned(),
            ));
        }
        if self.lines {
            return self.publish_lines(context).await;
        }
        if self.payload.len() > 1 {
            return self.publish_batch(context).await;
        }
        let payload = match (self.payload.pop(), &self.file) {
            (Some(text), _) => text.into_bytes(),
            (None, Some(file)) => std::fs::read(file)
                .map_err(|error| Failure::Usage(format!("read {}: {error}", file.display())))?,
            (None, None) => {
                let mut payload = Vec::new();
                if std::io::stdin().is_terminal() {
                    remark("reading the payload from standard input, up to Ctrl-D");
                }
                std::io::stdin()
                    .read_to_end(&mut payload)
                    .map_err(|error| Failure::Local(error.to_string()))?;
                payload
            }
        };
        let mut request = self.request(payload);
        if self.device_prefix.is_some() || self.device.len() > 1 {
            return self.publish_to_many(context, request).await;
        }
        request.device_id = self.device.pop();
        let response = answer!(context.client.publisher().publish(context.ask(request)));
        context.out.line_of(&told(&response), &response)?;
        context.out.flush()?;
        unless_lost(&response)
    }

    /// Several payloads in one call.
    async fn publish_batch(mut self, context: &mut VerbContext) -> Result<(), Failure> {
        if self.device_prefix.is_some() || self.device.len() > 1 || self.idempotency_key.is_some() {
            return Err(Failure::Usage(
                "several payloads go by topic or to one device, without a key".to_owned(),
            ));
        }
        let (device, payloads) = (self.device.pop(), std::mem::take(&mut self.payload));
        let request =
            |text: String| PublishRequest { device_id: device.clone(), ..self.request(text.into_bytes()) };
        let requests = payloads.into_iter().map(request).collect();
        let response =
            answer!(context.client.publisher().publish_batch(context.ask(PublishBatchRequest { requests })));
        context.out.rows(&["OUTCOME", "WHY"], &response.results, |result| {
            let (outcome, why) = outcome(result);
            vec![outcome, why]
        })?;
        context.out.flush()?;
        match response.results.iter().filter(|result| is_lost(result)).count() {
            0 => Ok(()),
            failed => {
                Err(Failure::Local(format!("{failed} of {} did not get through", response.results.len())))
            }
        }
    }

    async fn publish_to_many(
        self,
        context: &mut VerbContext,
        message: PublishRequest,
    ) -> Result<(), Failure> {
        let request = PublishToDevicesRequest {
            message: Some(message),
            device_ids: self.device,
            device_id_prefix: self.device_prefix.unwrap_or_default(),
            ..PublishToDevicesRequest::default()
        };
        let mut stream = answer!(context.client.publisher().publish_to_devices(context.ask(request)));
        let (mut results, mut failed) = (0_usize, 0_usize);
        while let Some(response) = stream.message().await.map_err(Error::from)? {
            results += response.results.len();
            let told = response.results.iter().filter_map(|result| result.result.as_ref());
            failed += told.filter(|result| is_lost(result)).count();
            progress("");
            context.out.rows(&["DEVICE", "OUTCOME", "WHY"], &response.results, |result| {
                let (outcome, why) = result.result.as_ref().map_or_else(Default::default, outcome);
                vec![output::clean(&result.device_id), outcome, why]
            })?;
            context.out.flush()?;
            progress(&format!("{results} of {} devices", response.issued));
        }
        progress("");
        match failed {
            0 => Ok(()),
            failed => Err(Failure::Local(format!("{failed} of {results} devices did not get it"))),
        }
    }

    /// Each line of standard input over one stream, many on the way.
    async fn publish_lines(mut self, context: &mut VerbContext) -> Result<(), Failure> {
        let device = self.device.pop();
        if !self.device.is_empty() {
            return Err(Failure::Usage("--lines goes by topic or to one device".to_owned()));
        }
        let (send, receive) = tokio::sync::mpsc::channel(4);
        let reader = std::thread::Builder::new().name("lines".to_owned());
        let broken = std::sync::Arc::new(std::sync::OnceLock::new());
        let breaks = std::sync::Arc::clone(&broken);
        let reading = move || {
            let mut input = BufReader::new(std::io::stdin().lock());
            let mut line = Vec::new();
            loop {
                line.clear();
                // Lines that have arrived already go together: nobody waits for a line that has not.
                let mut requests = Vec::new();
                loop {
                    match input.read_until(b'\n', &mut line) {
                        Ok(0) => break,
                        Ok(_) => {}
                        Err(error) => {
                            let _ = breaks.set(error);
                            break;
                        }
                    }
                    let payload = line.strip_suffix(b"\n").unwrap_or(&line).to_vec();
                    requests.push(PublishRequest { device_id: device.clone(), ..self.request(payload) });
                    line.clear();
                    if requests.len() == 100 || input.buffer().is_empty() {
                        break;
                    }
                }
                let request = PublishStreamRequest { requests, options: None };
                if request.requests.is_empty() || send.blocking_send(request).is_err() {
                    return;
                }
            }
        };
        reader.spawn(reading).map_err(|error| Failure::Local(error.to_string()))?;
        let mut stream = answer!(
            context.client.publisher().publish_stream(tokio_stream::wrappers::ReceiverStream::new(receive))
        );
        let (mut done, mut failed) = (0_u64, 0_u64);
        while let Some(response) = stream.message().await.map_err(Error::from)? {
            done += u64::from(response.count);
            for result in &response.results {
                let Some(told) = &result.result else { continue };
                if is_lost(told) {
                    failed += 1;
                    let (outcome, why) = outcome(told);
                    progress("");
                    remark(&format!("line {}: {outcome} {why}", result.sequence));
                }
                if context.out.is_json() {
                    context.out.line_of("", result)?;
                }
            }
            context.out.flush()?;
            progress(&format!("{done} published"));
        }
        progress("");
        context.out.line(&format!("{} published, {failed} not", done - failed))?;
        context.out.flush()?;
        if let Some(error) = broken.get() {
            return Err(Failure::Local(format!("standard input: {error}")));
        }
        match failed {
            0 => Ok(()),
            failed => Err(Failure::Local(format!("{failed} of {done} messages did not get through"))),
        }
    }
}

fn told(response: &PublishResponse) -> String {
    let outcome = word(response.outcome().as_str_name(), "OUTCOME_");
    if response.outcome() == Outcome::Scheduled {
        return format!("{outcome}: {}", response.schedule_id);
    }
    let counts = [
        (response.matched, "matched"),
        (response.sent, "sent"),
        (response.queued, "queued"),
        (response.dropped, "dropped"),
        (response.rejected, "rejected"),
    ];
    let counts = counts.into_iter().filter(|(count, name)| *count > 0 || *name == "matched");
    let counts: Vec<String> = counts.map(|(count, name)| format!("{count} {name}")).collect();
    format!("{outcome}: {}", counts.join(", "))
}

fn unless_lost(response: &PublishResponse) -> Result<(), Failure> {
    match response.outcome() {
        Outcome::Dropped => Err(Failure::Local(format!(
            "the message was dropped: {}",
            word(response.drop_reason().as_str_name(), "DROP_REASON_")
        ))),
        Outcome::Rejected => {
            let code = response.reason_code.unwrap_or_default();
            Err(Failure::Local(format!("the message was rejected with reason code {code}")))
        }
        _ => Ok(()),
    }
}

/// Outcome and reason.
fn outcome(result: &PublishResult) -> (String, String) {
    match &result.result {
        Some(publish_result::Result::Response(response)) => {
            let why = match response.drop_reason() {
                DropReason::Unspecified => {
                    response.reason_code.filter(|code| *code >= 128).map(|code| format!("reason code {code}"))
                }
                reason => Some(word(reason.as_str_name(), "DROP_REASON_")),
            };
            (word(response.outcome().as_str_name(), "OUTCOME_"), why.unwrap_or_default())
        }
        Some(publish_result::Result::Error(error)) => {
            ("failed".to_owned(), format!("{} ({})", error.message, error.reason))
        }
        None => ("-".to_owned(), String::new()),
    }
}

fn is_lost(result: &PublishResult) -> bool {
    match &result.result {
        Some(publish_result::Result::Response(response)) => {
            matches!(response.outcome(), Outcome::Dropped | Outcome::Rejected)
        }
        Some(publish_result::Result::Error(_)) => true,
        None => false,
    }
}

/// What waits for its time.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum ScheduledVerb {
    /// Lists the messages, the next one first
    List {
        /// Only those for this device
        #[arg(short, long, value_name = "ID")]
        device: Option<String>,
    },
    /// Takes a message back before its time
    Cancel {
        /// Its id, as pub --deliver-at and the list show it
        id: String,
    },
}

impl ScheduledVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        match self {
            Self::List { device } => {
                let device_id = device.unwrap_or_default();
                pages!(
                    context,
                    None::<usize>,
                    |page_token| context.client.publisher().list_scheduled(context.ask(
                        ListScheduledRequest { page_size: 1000, page_token, device_id: device_id.clone() }
                    )),
                    |page| {
                        context.out.rows(
                            &["ID", "TIME", "DEVICE", "TOPIC", "QOS", "BYTES"],
                            &page.messages,
                            |message| {
                                vec![
                                    message.schedule_id.clone(),
                                    at(message.deliver_time.as_ref()),
                                    or_dash(message.device_id.as_deref().unwrap_or_default()),
                                    output::clean(&message.topic),
                                    output::qos(message.qos),
                                    message.payload_bytes.to_string(),
                                ]
                            },
                        )?;
                        page.messages.len()
                    }
                );
                Ok(())
            }
            Self::Cancel { id } => {
                let response = answer!(
                    context
                        .client
                        .publisher()
                        .cancel_scheduled(context.ask(CancelScheduledRequest { schedule_id: id }))
                );
                Ok(context.out.line_of("cancelled", &response)?)
            }
        }
    }
}
