//! The `$SYS` topics, as pure functions from counters and gauges to topics and payloads. The names are those of
//! Mosquitto, which monitoring tools know, and the four that MQTTX reads.
//!
//! Knows no clock, broker handle or socket: its caller publishes what [`SysStats::tick`] returns, retained.

use std::time::Duration;

use broker::Gauges;

/// Values that [`SysStats::tick`] needs besides the counters.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SysInput {
    /// Time since 1970; only differences and the formatted time matter.
    pub(super) now: Duration,
    /// Resident memory of the process.
    pub(super) heap: u64,
    /// Highest resident memory of the process.
    pub(super) heap_maximum: u64,
}

/// Sums of the crates whose counters `$SYS` shows.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SysTotals {
    net: net::counters::Totals,
    device: device::counters::Totals,
    session: session::counters::Totals,
    broker: broker::counters::Totals,
    core: gateway_core::counters::Totals,
}

impl SysTotals {
    /// Reads them.
    pub(super) fn read() -> Self {
        Self {
            net: net::counters::totals(),
            device: device::counters::totals(),
            session: session::counters::totals(),
            broker: broker::counters::totals(),
            core: gateway_core::counters::totals(),
        }
    }
}

/// Rates and maxima between ticks.
#[derive(Debug)]
pub(super) struct SysStats {
    start: Duration,
    last: Duration,
    previous: SysTotals,
    loads: Vec<[f64; 3]>,
}

/// Periods of the averages: topic and minutes.
const PERIODS: [(&str, f64); 3] = [("1min", 1.0), ("5min", 5.0), ("15min", 15.0)];

impl SysStats {
    /// Starts at `start` (since 1970), with counters at zero.
    pub(super) fn new(start: Duration) -> Self {
        Self { start, last: start, previous: SysTotals::default(), loads: Vec::new() }
    }

    /// All topics with their values now. Averages are per minute and decay as Mosquitto's.
    pub(super) fn tick(
        &mut self,
        input: SysInput,
        totals: &SysTotals,
        gauges: &Gauges,
    ) -> Vec<(String, String)> {
        let mut out = SysTopics(Vec::with_capacity(80));
        self.state(&mut out, input, gauges);
        counts(&mut out, input, totals, gauges);
        self.averages(&mut out, input.now, totals);
        self.previous = *totals;
        self.last = input.now;
        out.0
    }

    fn state(&self, out: &mut SysTopics, input: SysInput, gauges: &Gauges) {
        let version = telemetry::version();
        let uptime = input.now.saturating_sub(self.start).as_secs();
        let offline = gauges.sessions.saturating_sub(gauges.online);
        out.put("version", format_args!("mqtt-server version {version}"));
        out.put("uptime", format_args!("{uptime} seconds"));
        out.put("time", rfc3339(input.now.as_secs()));
        out.put("activeConnectCount", gauges.online);
        out.put(
            "status",
            format_args!(
                "{{\"status\":\"running\",\"version\":\"{version}\",\"uptime\":{uptime},\"connected\":{},\
                 \"sessions\":{},\"subscriptions\":{}}}",
                gauges.online, gauges.sessions, gauges.subscriptions
            ),
        );
        out.put("clients/connected", gauges.online);
        out.put("clients/active", gauges.online);
        out.put("clients/disconnected", offline);
        out.put("clients/inactive", offline);
        out.put("clients/total", gauges.sessions);
        out.put("clients/maximum", gauges.online_peak);
    }

    fn averages(&mut self, out: &mut SysTopics, now: Duration, totals: &SysTotals) {
        let elapsed = now.saturating_sub(self.last).as_secs_f64();
        let (current, previous) = (rates(totals), rates(&self.previous));
        self.loads.resize(current.len(), [0.0; 3]);
        for ((load, (topic, now)), (_, before)) in self.loads.iter_mut().zip(current).zip(previous) {
            for (average, (period, minutes)) in load.iter_mut().zip(PERIODS) {
                if elapsed > 0.0 {
                    let per_minute = now.wrapping_sub(before) as f64 * 60.0 / elapsed;
                    let decay = (-elapsed / (60.0 * minutes)).exp();
                    *average = per_minute + decay * (*average - per_minute);
                }
                out.put(&format!("load/{topic}/{period}"), format_args!("{average:.2}"));
            }
        }
    }
}

fn counts(out: &mut SysTopics, input: SysInput, totals: &SysTotals, gauges: &Gauges) {
    out.put("clients/expired", totals.broker.sessions_expired);
    out.put("messages/received", totals.session.packets_in);
    out.put("messages/sent", totals.session.packets_out);
    out.put("messages/stored", gauges.retained);
    out.put("store/messages/count", gauges.retained);
    out.put("store/messages/bytes", gauges.retained_bytes + gauges.queued_bytes);
    out.put("publish/messages/received", published_in(totals));
    out.put("publish/messages/sent", published_out(totals));
    out.put("publish/messages/dropped", dropped(totals));
    out.put(
        "publish/bytes/received",
        totals.session.payload_bytes_in_0
            + totals.session.payload_bytes_in_1
            + totals.session.payload_bytes_in_2,
    );
    out.put(
        "publish/bytes/sent",
        totals.session.payload_bytes_out_0
            + totals.session.payload_bytes_out_1
            + totals.session.payload_bytes_out_2,
    );
    out.put("bytes/received", totals.net.bytes_in);
    out.put("bytes/sent", totals.device.bytes_out);
    out.put("subscriptions/count", gauges.subscriptions);
    out.put("shared_subscriptions/count", gauges.shared_groups);
    out.put("retained messages/count", gauges.retained);
    out.put("heap/current", input.heap);
    out.put("heap/maximum", input.heap_maximum);
}

fn published_in(totals: &SysTotals) -> u64 {
    totals.session.messages_in_0 + totals.session.messages_in_1 + totals.session.messages_in_2
}

fn published_out(totals: &SysTotals) -> u64 {
    totals.session.messages_out_0 + totals.session.messages_out_1 + totals.session.messages_out_2
}

fn dropped(totals: &SysTotals) -> u64 {
    let rows = totals.core.rows();
    rows.iter().filter(|row| row.name == "mqtt_messages_dropped_total").map(|row| row.value as u64).sum()
}

/// The counters that have averages.
fn rates(totals: &SysTotals) -> [(&'static str, u64); 10] {
    [
        ("messages/received", totals.session.packets_in),
        ("messages/sent", totals.session.packets_out),
        ("publish/received", published_in(totals)),
        ("publish/sent", published_out(totals)),
        ("publish/dropped", dropped(totals)),
        ("bytes/received", totals.net.bytes_in),
        ("bytes/sent", totals.device.bytes_out),
        ("connections", totals.net.connections_established),
        ("sockets", totals.net.connections_accepted),
        ("clients/expired", totals.broker.sessions_expired),
    ]
}

/// Returns whether a subscriber gets the topic once, on subscribing, and not at every interval.
pub(super) fn is_answered_once(topic: &str) -> bool {
    matches!(topic, "$SYS/broker/version" | "$SYS/broker/time")
}

struct SysTopics(Vec<(String, String)>);

impl SysTopics {
    fn put(&mut self, topic: &str, value: impl std::fmt::Display) {
        self.0.push((format!("$SYS/broker/{topic}"), value.to_string()));
    }
}

/// Seconds since 1970 as UTC text.
fn rfc3339(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days to a date in the calendar that starts on 1 March of year 0: leap days come last.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn at(seconds: u64) -> SysInput {
        SysInput { now: Duration::from_secs(1_700_000_000 + seconds), heap: 5, heap_maximum: 9 }
    }

    fn map(rows: Vec<(String, String)>) -> BTreeMap<String, String> {
        let (count, map) = (rows.len(), BTreeMap::from_iter(rows));
        assert_eq!(map.len(), count, "a topic came twice");
        map
    }

    #[test]
    fn the_topics_that_tools_read_are_there() {
        let mut totals = SysTotals::default();
        totals.session.messages_in_0 = 1;
        totals.session.messages_in_1 = 2;
        totals.session.messages_in_2 = 3;
        totals.session.packets_in = 40;
        totals.session.packets_out = 41;
        totals.core.dropped_offline = 5;
        totals.core.dropped_memory = 6;
        totals.session.payload_bytes_in_0 = 40;
        totals.session.payload_bytes_in_2 = 30;
        totals.device.bytes_out = 80;
        totals.broker.sessions_expired = 9;
        let gauges = Gauges {
            online: 3,
            sessions: 5,
            online_peak: 4,
            subscriptions: 6,
            shared_groups: 1,
            retained: 7,
            ..Gauges::default()
        };
        let topics = map(SysStats::new(at(0).now).tick(at(10), &totals, &gauges));
        for (topic, value) in [
            ("uptime", "10 seconds"),
            ("clients/connected", "3"),
            ("clients/active", "3"),
            ("clients/disconnected", "2"),
            ("clients/inactive", "2"),
            ("clients/total", "5"),
            ("clients/maximum", "4"),
            ("clients/expired", "9"),
            ("messages/received", "40"),
            ("messages/sent", "41"),
            ("messages/stored", "7"),
            ("publish/messages/received", "6"),
            ("publish/messages/sent", "0"),
            ("publish/messages/dropped", "11"),
            ("publish/bytes/received", "70"),
            ("publish/bytes/sent", "0"),
            ("bytes/received", "0"),
            ("bytes/sent", "80"),
            ("subscriptions/count", "6"),
            ("shared_subscriptions/count", "1"),
            ("retained messages/count", "7"),
            ("heap/current", "5"),
            ("heap/maximum", "9"),
            ("activeConnectCount", "3"),
            ("time", "2023-11-14T22:13:30Z"),
        ] {
            assert_eq!(
                topics.get(&format!("$SYS/broker/{topic}")).map(String::as_str),
                Some(value),
                "{topic}"
            );
        }
        assert!(topics["$SYS/broker/version"].starts_with("mqtt-server version "));
        let status: toml::Table =
            format!("x = {}", topics["$SYS/broker/status"].replace("\":", "\"=")).parse().unwrap();
        assert_eq!(status["x"]["connected"].as_integer(), Some(3));
        for load in ["messages/sent", "publish/received", "bytes/sent", "connections", "sockets"] {
            for period in ["1min", "5min", "15min"] {
                assert!(topics.contains_key(&format!("$SYS/broker/load/{load}/{period}")), "{load}");
            }
        }
    }

    #[test]
    fn averages_approach_the_rate_and_decay() {
        let mut stats = SysStats::new(at(0).now);
        let mut totals = SysTotals::default();
        let read = |rows: Vec<(String, String)>| -> Vec<f64> {
            let topics = map(rows);
            let value =
                |period| topics[&format!("$SYS/broker/load/bytes/received/{period}")].parse().unwrap();
            ["1min", "5min", "15min"].map(value).to_vec()
        };
        totals.net.bytes_in = 100;
        let first = read(stats.tick(at(10), &totals, &Gauges::default()));
        // 600 a minute, for 10 s of 60.
        assert!((first[0] - 600.0 * (1.0 - (-1.0_f64 / 6.0).exp())).abs() < 0.01, "{first:?}");
        assert!(first[0] > first[1] && first[1] > first[2]);
        let mut last = first;
        for step in 2..400 {
            totals.net.bytes_in += 100;
            last = read(stats.tick(at(step * 10), &totals, &Gauges::default()));
        }
        assert!(last.iter().all(|average| (average - 600.0).abs() < 10.0), "{last:?}");
        let quiet = read(stats.tick(at(4060), &totals, &Gauges::default()));
        assert!(quiet[0] < 300.0 && quiet[2] > 500.0, "{quiet:?}");
    }

    #[test]
    fn a_tick_without_time_keeps_the_averages() {
        let mut stats = SysStats::new(at(0).now);
        let mut totals = SysTotals::default();
        totals.net.bytes_in = 5;
        let topics = map(stats.tick(at(0), &totals, &Gauges::default()));
        assert_eq!(topics["$SYS/broker/load/bytes/received/1min"], "0.00");
    }

    #[test]
    fn dates_are_right_around_leap_days() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), text);
        }
    }
}
