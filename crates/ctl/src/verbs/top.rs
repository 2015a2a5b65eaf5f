//! A live view: what the gateway carries, the devices that lag, the groups that lag.
//!
//! The counters are the gateway's `$SYS` topics, retained messages that cost it nothing to read; rates are their differences
//! over the time between two writes of a counter, which the gateway says. Plain lines that are written over: it needs no library
//! for terminals, and without a terminal each page is printed below the other.

use std::{collections::BTreeMap, io::IsTerminal as _, time::Duration};

use mqtt_gateway_client::{
    Error, Reason,
    v1::{Device, Group, ListGroupsRequest, ListRetainedRequest, ListTopDevicesRequest, RetainedMessage},
};
use serde_json::json;

use super::answer;
use crate::{VerbContext, failure::Failure, output::clean};

/// Shows it.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TopVerb {
    /// A page every so many seconds
    #[arg(short, long, value_name = "SECONDS", default_value_t = 2.0)]
    interval: f64,
    /// End after so many pages
    #[arg(short, long, value_name = "N")]
    count: Option<u64>,
    /// So many devices and groups
    #[arg(short, long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=100))]
    limit: u8,
}

/// A counter of `$SYS`, and the second when the gateway wrote it.
#[derive(Clone, Copy, PartialEq)]
struct SysCounter {
    value: f64,
    written: f64,
}

/// Counters of `$SYS`, by name below `$SYS/broker/`.
#[derive(PartialEq)]
struct SysCounters(BTreeMap<String, SysCounter>);

impl SysCounters {
    fn of(messages: &[RetainedMessage]) -> Self {
        let value = |payload: &[u8]| std::str::from_utf8(payload).ok()?.split(' ').next()?.parse().ok();
        let counters = messages.iter().filter_map(|message| {
            let name = message.topic.strip_prefix("$SYS/broker/")?;
            let time = message.receive_time?;
            let written = time.seconds as f64 + f64::from(time.nanos) / 1e9;
            Some((name.to_owned(), SysCounter { value: value(&message.payload)?, written }))
        });
        Self(counters.collect())
    }

    fn get(&self, name: &str) -> f64 {
        self.0.get(name).map_or(0.0, |counter| counter.value)
    }

    /// Per second since `before`; none if the counter was not written anew.
    fn rate(&self, before: Option<&Self>, name: &str) -> Option<f64> {
        let (now, before) = (self.0.get(name)?, before?.0.get(name)?);
        let seconds = now.written - before.written;
        (seconds > 0.0).then(|| ((now.value - before.value) / seconds).max(0.0))
    }

    fn values(&self) -> BTreeMap<&str, f64> {
        self.0.iter().map(|(name, counter)| (name.as_str(), counter.value)).collect()
    }
}

/// Counters whose rate is shown, with their names for people.
const RATES: [(&str, &str); 4] = [
    ("publish/messages/received", "messages in"),
    ("publish/messages/sent", "messages out"),
    ("bytes/received", "bytes in"),
    ("bytes/sent", "bytes out"),
];

impl TopVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let terminal = std::io::stdout().is_terminal() && !context.out.is_json();
        let mut left = self.count.unwrap_or(u64::MAX);
        // $SYS is written anew every few seconds: a rate is over the time between two values of it.
        let (mut before, mut last): (Option<SysCounters>, Option<SysCounters>) = (None, None);
        loop {
            let now = counters(context).await?;
            if last.as_ref() != Some(&now) {
                before = last.replace(now);
            }
            let devices = devices(context, self.limit).await?;
            let groups = groups(context, self.limit).await?;
            let Some(now) = &last else { return Ok(()) };
            if context.out.is_json() {
                context.out.json(&as_json(now, before.as_ref(), &devices, &groups))?;
            } else {
                let page = page(now, before.as_ref(), &devices, &groups);
                // Home, each line to its end, and what is below: no flicker.
                let (head, end, tail) =
                    if terminal { ("\x1b[H", "\x1b[K\n", "\x1b[J") } else { ("", "\n", "\n") };
                context.out.bytes(head.as_bytes())?;
                for line in page {
                    context.out.bytes(line.as_bytes())?;
                    context.out.bytes(end.as_bytes())?;
                }
                context.out.bytes(tail.as_bytes())?;
            }
            context.out.flush()?;
            left -= 1;
            if left == 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_secs_f64(self.interval.clamp(0.1, 3600.0))).await;
        }
    }
}

async fn counters(context: &VerbContext) -> Result<SysCounters, Failure> {
    let request = ListRetainedRequest {
        topic_filter: "$SYS/broker/#".to_owned(),
        page_size: 1000,
        page_token: String::new(),
    };
    let page = answer!(context.client.state().list_retained(context.ask(request)));
    Ok(SysCounters::of(&page.messages))
}

async fn devices(context: &VerbContext, limit: u8) -> Result<Vec<Device>, Failure> {
    let request = ListTopDevicesRequest { limit: limit.into(), ..ListTopDevicesRequest::default() };
    Ok(answer!(context.client.devices().list_top_devices(context.ask(request))).devices)
}

/// The groups with the largest lag; none where groups are switched off or not the caller's.
async fn groups(context: &VerbContext, limit: u8) -> Result<Vec<Group>, Failure> {
    let request = ListGroupsRequest { page_size: 1000, page_token: String::new() };
    let mut groups =
        match context.client.groups().list_groups(context.ask(request)).await.map_err(Error::from) {
            Ok(page) => page.into_inner().groups,
            Err(error) if matches!(error.reason(), Reason::GroupsDisabled | Reason::RoleDenied) => Vec::new(),
            Err(error) => return Err(error.into()),
        };
    groups.sort_by_key(|group| std::cmp::Reverse(group.status.unwrap_or_default().lag_messages));
    groups.truncate(limit.into());
    Ok(groups)
}

fn page(
    now: &SysCounters,
    before: Option<&SysCounters>,
    devices: &[Device],
    groups: &[Group],
) -> Vec<String> {
    let mut lines = Vec::new();
    if now.0.is_empty() {
        lines.push(
            "no counters: sys.enabled is false in the gateway's configuration, or $SYS is not in your scope"
                .to_owned(),
        );
    } else {
        lines.push(format!(
            "up {}   {} online of {} sessions   {} subscriptions   {} retained   {} of memory",
            uptime(now.get("uptime")),
            now.get("clients/connected"),
            now.get("clients/total"),
            now.get("subscriptions/count"),
            now.get("retained messages/count"),
            bytes(now.get("heap/current")),
        ));
        let rates = RATES.map(|(name, told)| match now.rate(before, name) {
            None => format!("{told} -/s"),
            Some(rate) if name.starts_with("bytes") => format!("{told} {}/s", bytes(rate)),
            Some(rate) => format!("{told} {rate:.1}/s"),
        });
        lines.push(rates.join("   "));
    }
    lines.push(String::new());
    lines.push(format!(
        "{:<32} {:>7} {:>10} {:>10} {:>9} {:>9}",
        "SLOW DEVICES", "STATE", "PENDING", "BYTES", "INFLIGHT", "DROPPED"
    ));
    for device in devices {
        let queue = device.queue.unwrap_or_default();
        let state = if device.online { "online" } else { "offline" };
        lines.push(format!(
            "{:<32} {state:>7} {:>10} {:>10} {:>9} {:>9}",
            cut(&device.device_id),
            queue.pending,
            bytes(queue.pending_bytes as f64),
            queue.inflight,
            queue.dropped
        ));
    }
    if devices.is_empty() {
        lines.push("none: nothing waits".to_owned());
    }
    if !groups.is_empty() {
        lines.push(String::new());
        lines.push(format!(
            "{:<32} {:>7} {:>10} {:>10} {:>9} {:>9}",
            "GROUPS", "MEMBERS", "LAG", "BYTES", "UNACKED", "DEAD"
        ));
    }
    for group in groups {
        let status = group.status.unwrap_or_default();
        lines.push(format!(
            "{:<32} {:>7} {:>10} {:>10} {:>9} {:>9}",
            cut(&group.name),
            status.members,
            status.lag_messages,
            bytes(status.lag_bytes as f64),
            status.outstanding,
            status.dead_letters
        ));
    }
    lines
}

fn as_json(
    now: &SysCounters,
    before: Option<&SysCounters>,
    devices: &[Device],
    groups: &[Group],
) -> serde_json::Value {
    let rates: serde_json::Map<String, serde_json::Value> =
        RATES.iter().map(|(name, _)| ((*name).to_owned(), json!(now.rate(before, name)))).collect();
    json!({
        "counters": now.values(),
        "perSecond": rates,
        "devices": devices.iter().map(gateway_api::json::to_json).collect::<Vec<_>>(),
        "groups": groups.iter().map(gateway_api::json::to_json).collect::<Vec<_>>(),
    })
}

fn cut(name: &str) -> String {
    let name = clean(name);
    if name.chars().count() <= 32 { name } else { name.chars().take(31).chain(['…']).collect() }
}

fn bytes(count: f64) -> String {
    let mut count = count;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if count < 1024.0 {
            return if unit == "B" { format!("{count:.0} B") } else { format!("{count:.1} {unit}") };
        }
        count /= 1024.0;
    }
    format!("{count:.1} TiB")
}

fn uptime(seconds: f64) -> String {
    let seconds = seconds as u64;
    match (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60) {
        (0, 0, minutes) => format!("{minutes}m {}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h {minutes}m"),
        (days, hours, _) => format!("{days}d {hours}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(written: i64, nanos: i32, received: &str) -> SysCounters {
        SysCounters::of(&[RetainedMessage {
            topic: "$SYS/broker/bytes/received".to_owned(),
            payload: received.as_bytes().to_vec().into(),
            receive_time: Some(prost_types::Timestamp { seconds: written, nanos }),
            ..RetainedMessage::default()
        }])
    }

    /// The failure: the time of a rate began when the first page was read, so that it was shorter than the one in which what was
    /// counted came, and a steady 100 a second were 165 on the first page.
    #[test]
    fn a_rate_is_over_the_time_between_two_writes_of_a_counter() {
        let (first, second) = (counters(0, 500_000_000, "100"), counters(10, 500_000_000, "300"));
        assert_eq!(second.rate(None, "bytes/received"), None);
        assert_eq!(second.rate(Some(&first), "bytes/received"), Some(20.0));
        assert_eq!(second.rate(Some(&second), "bytes/received"), None);
        assert_eq!(counters(20, 0, "0").rate(Some(&second), "bytes/received"), Some(0.0), "after a restart");
    }

    #[test]
    fn a_long_name_does_not_push_the_columns() {
        assert_eq!(cut(&"x".repeat(40)).chars().count(), 32);
        assert_eq!(bytes(1536.0), "1.5 KiB");
        assert_eq!(uptime(90_061.0), "1d 1h");
    }
}
