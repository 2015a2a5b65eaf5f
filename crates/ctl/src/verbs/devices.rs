//! Devices and their sessions.

use clap::{Subcommand, ValueEnum};
use mqtt_gateway_client::v1::{
    AddBanRequest, BanTarget, DeleteDeviceRequest, Device, DeviceRank, DeviceSubscription, DeviceView,
    DisconnectDeviceRequest, GetDeviceRequest, ListDevicesRequest, ListQueueRequest,
    ListSubscriptionsRequest, ListTopDevicesRequest, PacketDirection, ProtocolVersion, PurgeQueueRequest,
    QueuedMessage, RetainHandling, SetDeviceTraceRequest, SubscribeDeviceRequest, TracePacketsRequest,
    TracedPacket, UnsubscribeDeviceRequest, ban_target::Target, trace_packets_item::Item,
};
use prost_types::Timestamp;

use super::{answer, messages::missing, pages, qos};
use crate::{
    VerbContext,
    failure::Failure,
    output::{self, at, or_dash, word},
    progress, remark, spans,
};

/// Devices.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum DevicesVerb {
    /// Lists devices that have a session
    List {
        /// Only those whose id begins so
        prefix: Option<String>,
        /// Only connected ones
        #[arg(long)]
        online: bool,
        /// Only those of this MQTT version
        #[arg(long, value_enum, value_name = "VERSION")]
        version: Option<Version>,
        /// Only those that came through this listener
        #[arg(long, value_name = "NAME")]
        listener: Option<String>,
        /// Only those with this common name in their certificate
        #[arg(long, value_name = "NAME")]
        common_name: Option<String>,
        /// Only those that have been connected since this time or a later one: 2026-01-31T12:00:00Z, or -1h
        #[arg(long, value_name = "TIME", value_parser = spans::moment, allow_hyphen_values = true)]
        connected_after: Option<Timestamp>,
        /// Only those that have been connected since before this time
        #[arg(long, value_name = "TIME", value_parser = spans::moment, allow_hyphen_values = true)]
        connected_before: Option<Timestamp>,
        /// At most so many
        #[arg(short, long, value_name = "N")]
        limit: Option<usize>,
    },
    /// Shows all that is known of a device
    Get {
        /// The device
        device: String,
    },
    /// The devices of which most waits, or most was dropped: slow consumers
    Top {
        /// By what
        #[arg(long, value_enum, default_value_t)]
        by: DeviceRankArgument,
        /// So many
        #[arg(short, long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(i32).range(1..=100))]
        limit: i32,
        /// Only those whose id begins so
        #[arg(long, value_name = "PREFIX")]
        prefix: Option<String>,
        /// Only connected ones
        #[arg(long)]
        online: bool,
    },
    /// Lists the subscriptions of a device
    Subscriptions {
        /// The device
        device: String,
    },
    /// Subscribes a device to a filter, as if it had asked for it
    Subscribe {
        /// The device
        device: String,
        /// Topic filter
        filter: String,
        /// Highest quality of service
        #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(..=2))]
        qos: u8,
        /// Which retained messages it gets
        #[arg(long, value_enum, default_value_t)]
        retained: RetainedArgument,
        /// Not what the device itself publishes
        #[arg(long)]
        no_local: bool,
        /// Keep the RETAIN flag as it was published
        #[arg(long)]
        retain_as_published: bool,
        /// Subscription identifier, for devices of MQTT 5
        #[arg(long, value_name = "NUMBER")]
        identifier: Option<u32>,
    },
    /// Removes a subscription of a device
    Unsubscribe {
        /// The device
        device: String,
        /// The filter as it was subscribed to
        filter: String,
    },
    /// Lists what waits for a device and what it has not acknowledged
    Queue {
        /// The device
        device: String,
        /// Show so many bytes of each payload
        #[arg(long, value_name = "BYTES", default_value_t = 64)]
        payload: u32,
        /// At most so many
        #[arg(short, long, value_name = "N")]
        limit: Option<usize>,
    },
    /// Drops what waits for a device and was not sent to it
    Purge {
        /// The device
        device: String,
    },
    /// Ends the connections of devices
    Disconnect {
        /// The devices
        #[arg(required = true)]
        devices: Vec<String>,
        /// MQTT 5 reason code, 128 to 255
        #[arg(long, value_name = "CODE", value_parser = clap::value_parser!(u32).range(128..=255))]
        reason_code: Option<u32>,
        /// End the sessions too
        #[arg(long)]
        discard_session: bool,
    },
    /// Ends a device's session and deletes its latest values, history and retained messages
    Delete {
        /// The device
        device: String,
    },
    /// Bans a device; 'security bans' has all kinds of bans
    Ban {
        /// The device
        device: String,
        /// Why, for people
        #[arg(long, value_name = "TEXT", default_value = "")]
        reason: String,
        /// When it ends: 2026-01-31T12:00:00Z, or +2h; never without it
        #[arg(long, value_name = "TIME", value_parser = spans::moment)]
        until: Option<Timestamp>,
    },
    /// Prints the packets of a device as they come and go, until interrupted
    Trace {
        /// The device; need not be connected
        device: String,
        /// Show so many bytes of each payload
        #[arg(short, long, value_name = "BYTES", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=4096))]
        payload: u32,
        /// End after so many packets
        #[arg(short, long, value_name = "N")]
        count: Option<u64>,
        /// Instead, have the gateway's log tell of them, from now on
        #[arg(long)]
        log: bool,
        /// Instead, no longer have it
        #[arg(long, conflicts_with = "log")]
        off: bool,
    },
}

/// MQTT version.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Version {
    /// MQTT 3.1
    #[value(name = "3.1")]
    V31,
    /// MQTT 3.1.1
    #[value(name = "3.1.1")]
    V311,
    /// MQTT 5.0
    #[value(name = "5.0", alias = "5")]
    V5,
}

/// By what devices are ranked.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub(crate) enum DeviceRankArgument {
    /// Messages waiting
    #[default]
    Pending,
    /// Bytes waiting
    Bytes,
    /// Messages sent and not acknowledged
    Inflight,
    /// Messages dropped
    Dropped,
}

/// Which retained messages a new subscription gets.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub(crate) enum RetainedArgument {
    /// Those that match
    #[default]
    Send,
    /// Those that match, unless there was a subscription of this filter
    IfNew,
    /// None
    None,
}

const DEVICE: &[&str] =
    &["DEVICE", "STATE", "SINCE", "MQTT", "PEER", "SUBSCRIPTIONS", "INFLIGHT", "PENDING", "DROPPED"];

fn row(device: &Device) -> Vec<String> {
    let (connection, queue) =
        (device.connection.clone().unwrap_or_default(), device.queue.unwrap_or_default());
    vec![
        output::clean(&device.device_id),
        if device.online { "online" } else { "offline" }.to_owned(),
        at(device.state_time.as_ref()),
        version(connection.protocol_version()).to_owned(),
        or_dash(&connection.peer),
        device.subscription_count.to_string(),
        queue.inflight.to_string(),
        queue.pending.to_string(),
        queue.dropped.to_string(),
    ]
}

fn version(version: ProtocolVersion) -> &'static str {
    match version {
        ProtocolVersion::Unspecified => "-",
        ProtocolVersion::V31 => "3.1",
        ProtocolVersion::V311 => "3.1.1",
        ProtocolVersion::V50 => "5.0",
    }
}

impl DevicesVerb {
    /// Returns whether the verb goes on until it is interrupted.
    pub(crate) fn streams(&self) -> bool {
        matches!(self, Self::Trace { log: false, off: false, .. })
    }

    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut client = context.client.devices();
        match self {
            Self::List {
                prefix,
                online,
                version,
                listener,
                common_name,
                connected_after,
                connected_before,
                limit,
            } => {
                let protocol_version =
                    version.map_or(ProtocolVersion::Unspecified, |version| match version {
                        Version::V31 => ProtocolVersion::V31,
                        Version::V311 => ProtocolVersion::V311,
                        Version::V5 => ProtocolVersion::V50,
                    });
                let request = ListDevicesRequest {
                    online_only: online,
                    page_size: limit
                        .map_or(1000, |limit| i32::try_from(limit.clamp(1, 1000)).unwrap_or(1000)),
                    page_token: String::new(),
                    view: DeviceView::Basic.into(),
                    device_id_prefix: prefix.unwrap_or_default(),
                    protocol_version: protocol_version.into(),
                    listener: listener.unwrap_or_default(),
                    common_name: common_name.unwrap_or_default(),
                    connected_after,
                    connected_before,
                };
                pages!(
                    context,
                    limit,
                    |page_token| client
                        .list_devices(context.ask(ListDevicesRequest { page_token, ..request.clone() })),
                    |page| {
                        context.out.rows(DEVICE, &page.devices, row)?;
                        page.devices.len()
                    }
                );
                Ok(())
            }
            Self::Get { device } => {
                let request = GetDeviceRequest { device_id: device, view: DeviceView::Full.into() };
                let device = answer!(client.get_device(context.ask(request))).device.unwrap_or_default();
                Ok(context.out.one(&device)?)
            }
            Self::Top { by, limit, prefix, online } => {
                let rank_by = match by {
                    DeviceRankArgument::Pending => DeviceRank::PendingMessages,
                    DeviceRankArgument::Bytes => DeviceRank::PendingBytes,
                    DeviceRankArgument::Inflight => DeviceRank::Inflight,
                    DeviceRankArgument::Dropped => DeviceRank::Dropped,
                };
                let request = ListTopDevicesRequest {
                    rank_by: rank_by.into(),
                    limit,
                    device_id_prefix: prefix.unwrap_or_default(),
                    online_only: online,
                };
                progress("looking at every session");
                let response = client.list_top_devices(context.ask(request)).await;
                progress("");
                let response = response.map_err(mqtt_gateway_client::Error::from)?.into_inner();
                let columns = &["DEVICE", "STATE", "PENDING", "BYTES", "INFLIGHT", "DROPPED"];
                Ok(context.out.rows(columns, &response.devices, |device: &Device| {
                    let queue = device.queue.unwrap_or_default();
                    vec![
                        output::clean(&device.device_id),
                        if device.online { "online" } else { "offline" }.to_owned(),
                        queue.pending.to_string(),
                        queue.pending_bytes.to_string(),
                        queue.inflight.to_string(),
                        queue.dropped.to_string(),
                    ]
                })?)
            }
            Self::Subscriptions { device } => {
                pages!(
                    context,
                    None::<usize>,
                    |page_token| client.list_subscriptions(context.ask(ListSubscriptionsRequest {
                        device_id: device.clone(),
                        page_size: 1000,
                        page_token,
                    })),
                    |page| {
                        context.out.rows(
                            &["FILTER", "QOS", "RULES"],
                            &page.subscriptions,
                            |of: &DeviceSubscription| {
                                let rules = if of.restricted { "restricted" } else { "allowed" };
                                vec![output::clean(&of.topic_filter), output::qos(of.qos), rules.to_owned()]
                            },
                        )?;
                        page.subscriptions.len()
                    }
                );
                Ok(())
            }
            Self::Subscribe {
                device,
                filter,
                qos: level,
                retained,
                no_local,
                retain_as_published,
                identifier,
            } => {
                let retain_handling = match retained {
                    RetainedArgument::Send => RetainHandling::Send,
                    RetainedArgument::IfNew => RetainHandling::SendIfNew,
                    RetainedArgument::None => RetainHandling::DoNotSend,
                };
                let request = SubscribeDeviceRequest {
                    device_id: device,
                    topic_filter: filter,
                    qos: qos(level),
                    retain_handling: retain_handling.into(),
                    no_local,
                    retain_as_published,
                    subscription_identifier: identifier,
                };
                let response = answer!(client.subscribe_device(context.ask(request)));
                let replaced = if response.replaced { ", in place of another" } else { "" };
                let text = format!("subscribed with QoS {}{replaced}", output::qos(response.granted_qos));
                Ok(context.out.line_of(&text, &response)?)
            }
            Self::Unsubscribe { device, filter } => {
                let request = UnsubscribeDeviceRequest { device_id: device, topic_filter: filter };
                let response = answer!(client.unsubscribe_device(context.ask(request)));
                let text = if response.existed { "unsubscribed" } else { "there was no such subscription" };
                Ok(context.out.line_of(text, &response)?)
            }
            Self::Queue { device, payload, limit } => {
                pages!(
                    context,
                    limit,
                    |page_token| client.list_queue(context.ask(ListQueueRequest {
                        device_id: device.clone(),
                        page_size:
                            limit.map_or(1000, |limit| i32::try_from(limit.clamp(1, 1000)).unwrap_or(1000)),
                        page_token,
                        payload_bytes: payload,
                    })),
                    |page| {
                        let columns =
                            &["STATE", "TOPIC", "FROM", "QOS", "TIME", "EXPIRES", "BYTES", "PAYLOAD"];
                        context.out.rows(columns, &page.messages, |message: &QueuedMessage| {
                            vec![
                                word(message.state().as_str_name(), "QUEUE_STATE_"),
                                output::clean(&message.topic),
                                or_dash(&message.device_id),
                                output::qos(message.qos),
                                at(message.receive_time.as_ref()),
                                at(message.expire_time.as_ref()),
                                message.payload_size.to_string(),
                                output::payload(&message.payload),
                            ]
                        })?;
                        page.messages.len()
                    }
                );
                Ok(())
            }
            Self::Purge { device } => {
                let response =
                    answer!(client.purge_queue(context.ask(PurgeQueueRequest { device_id: device })));
                Ok(context.out.line_of(&format!("{} dropped", response.count), &response)?)
            }
            Self::Disconnect { devices, reason_code, discard_session } => {
                for device_id in devices {
                    let request = DisconnectDeviceRequest {
                        device_id: device_id.clone(),
                        reason_code,
                        discard_session,
                    };
                    let response = answer!(client.disconnect_device(context.ask(request)));
                    context.out.line_of(&format!("{} disconnected", output::clean(&device_id)), &response)?;
                    context.out.flush()?;
                }
                Ok(())
            }
            Self::Delete { device } => {
                let response =
                    answer!(client.delete_device(context.ask(DeleteDeviceRequest { device_id: device })));
                let text = format!(
                    "{}, {} latest values and {} retained messages deleted",
                    if response.session_ended { "session ended" } else { "no session" },
                    response.latest_values,
                    response.retained_messages
                );
                Ok(context.out.line_of(&text, &response)?)
            }
            Self::Ban { device, reason, until } => {
                let target = Some(BanTarget { target: Some(Target::ClientId(device)) });
                let request = AddBanRequest { target, reason, expire_time: until };
                let ban =
                    answer!(context.client.security().add_ban(context.ask(request))).ban.unwrap_or_default();
                Ok(context.out.line_of("banned", &ban)?)
            }
            Self::Trace { device, payload, count, log: false, off: false } => {
                packets(context, device, payload, count.unwrap_or(u64::MAX)).await
            }
            Self::Trace { device, off, .. } => {
                let request = SetDeviceTraceRequest { device_id: device, enabled: !off };
                let response = answer!(client.set_device_trace(context.ask(request)));
                let text = if off { "not traced any more" } else { "traced in the gateway's log" };
                Ok(context.out.line_of(text, &response)?)
            }
        }
    }
}

/// Prints packets as they come and go.
async fn packets(
    context: &mut VerbContext,
    device_id: String,
    payload_bytes: u32,
    mut left: u64,
) -> Result<(), Failure> {
    // A stream has no deadline.
    let request = TracePacketsRequest { device_id, payload_bytes };
    let mut stream = answer!(context.client.devices().trace_packets(request));
    while left > 0 {
        let next = stream.message().await.map_err(mqtt_gateway_client::Error::from)?;
        let Some(response) = next else { return Ok(()) };
        for item in response.items {
            match item.item {
                Some(Item::Packet(packet)) if left > 0 => {
                    context.out.line_of(&line(&packet), &packet)?;
                    left -= 1;
                }
                Some(Item::Gap(gap)) => remark(&missing(gap.count, gap.reason().as_str_name())),
                _ => {}
            }
        }
        context.out.flush()?;
    }
    Ok(())
}

/// A packet in a line.
fn line(packet: &TracedPacket) -> String {
    let way = match packet.direction() {
        PacketDirection::ToDevice => "->",
        _ => "<-",
    };
    let kind = word(packet.r#type().as_str_name(), "PACKET_TYPE_").to_uppercase();
    let mut line = format!("{} {way} {kind} {} bytes", at(packet.time.as_ref()), packet.size);
    if let Some(id) = packet.packet_id {
        line.push_str(&format!(" id {id}"));
    }
    if let Some(publish) = &packet.publish {
        let topic = match publish.topic_alias {
            Some(alias) if publish.topic.is_empty() => format!("alias {alias}"),
            Some(alias) => format!("{} (alias {alias})", output::clean(&publish.topic)),
            None => or_dash(&publish.topic),
        };
        line.push_str(&format!(" {topic} QoS {}", output::qos(publish.qos)));
        line.push_str(if publish.dup { " dup" } else { "" });
        line.push_str(if publish.retain { " retain" } else { "" });
        line.push_str(&format!(" payload {}", publish.payload_size));
        if !publish.payload.is_empty() {
            line.push_str(&format!(" {}", output::payload(&publish.payload)));
        }
    }
    for filter in &packet.topic_filters {
        line.push_str(&format!(" {}", output::clean(filter)));
    }
    let unseen = (packet.topic_filter_count as usize).saturating_sub(packet.topic_filters.len());
    if unseen > 0 {
        line.push_str(&format!(" and {unseen} more"));
    }
    for code in &packet.reason_codes {
        line.push_str(&format!(" {code:#04x}"));
    }
    line.push_str(if packet.withheld { " (not all of it is in your scope)" } else { "" });
    line.push_str(if packet.malformed { " (malformed)" } else { "" });
    line
}
