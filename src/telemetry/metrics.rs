//! Everything countable as Prometheus text (exposition format 0.0.4).

use std::fmt::Write;

use super::{ProcessStats, Totals};

/// A gauge: name, help, labels as `name="value"` (empty for none), value.
pub type Gauge = (&'static str, &'static str, String, f64);

/// A label value with the characters escaped that the format gives a meaning.
pub fn escape_label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Renders counters, gauges and the figures of the process. HELP and TYPE appear once per name, and all rows of
/// a name stand together, whatever the order they come in.
pub fn render(totals: &Totals, gauges: &[Gauge], process: &ProcessStats) -> String {
    let mut page = Page::default();
    for (name, help, labels, value) in totals.rows() {
        page.row(name, help, "counter", labels, &value.to_string());
    }
    for (name, help, labels, value) in gauges {
        page.row(name, help, "gauge", labels, &number(*value));
    }
    for (name, help, kind, value) in process_rows(process) {
        page.row(name, help, kind, "", &number(value));
    }
    let version = format!("version=\"{}\"", escape_label(crate::config::version()));
    page.row("mqtt_server_build_info", "Version of the server", "gauge", &version, "1");
    page.finish()
}

fn process_rows(process: &ProcessStats) -> [(&'static str, &'static str, &'static str, f64); 8] {
    [
        ("process_resident_memory_bytes", "Resident memory", "gauge", process.rss_bytes as f64),
        (
            "process_resident_memory_peak_bytes",
            "Highest resident memory",
            "gauge",
            process.rss_peak_bytes as f64,
        ),
        ("process_virtual_memory_bytes", "Virtual memory", "gauge", process.virtual_bytes as f64),
        ("process_cpu_seconds_total", "User and system CPU time", "counter", process.cpu_seconds),
        ("process_open_fds", "Open file descriptors", "gauge", process.open_fds as f64),
        ("process_max_fds", "Most file descriptors allowed", "gauge", process.max_fds as f64),
        ("process_threads", "Threads", "gauge", process.threads as f64),
        ("process_start_time_seconds", "Start, seconds since 1970", "gauge", process.start_seconds),
    ]
}

fn number(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned()
    } else {
        value.to_string()
    }
}

/// Families in order of first appearance.
#[derive(Default)]
struct Page<'a>(Vec<(&'a str, String)>);

impl<'a> Page<'a> {
    fn row(&mut self, name: &'a str, help: &str, kind: &str, labels: &str, value: &str) {
        let position = self.0.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
            let help = help.replace('\\', "\\\\").replace('\n', "\\n");
            self.0.push((name, format!("# HELP {name} {help}\n# TYPE {name} {kind}\n")));
            self.0.len() - 1
        });
        let text = &mut self.0[position].1;
        let written = match labels {
            "" => writeln!(text, "{name} {value}"),
            labels => writeln!(text, "{name}{{{labels}}} {value}"),
        };
        debug_assert!(written.is_ok(), "writing to a String does not fail");
    }

    fn finish(self) -> String {
        self.0.into_iter().map(|(_, text)| text).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_name_is_described_once_and_its_rows_stand_together() {
        let totals = Totals { refused_connect: 3, handshake_timeout: 4, ..Totals::default() };
        let gauges: [Gauge; 3] = [
            ("mqtt_connections", "Connections", "listener=\"a\"".to_owned(), 2.0),
            ("mqtt_sessions", "Sessions", String::new(), 0.5),
            ("mqtt_connections", "Connections", format!("listener=\"{}\"", escape_label("b\"\\")), 1.0),
        ];
        let process = ProcessStats { cpu_seconds: 1.25, ..ProcessStats::default() };
        let text = render(&totals, &gauges, &process);
        let mut described = HashSet::new();
        let mut current = "";
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                current = rest.split(' ').next().unwrap();
                assert!(described.insert(current), "{current} is described twice");
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(name, current);
                assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
            } else {
                assert_eq!(line.split(['{', ' ']).next().unwrap(), current);
                assert!(line.rsplit(' ').next().unwrap().parse::<f64>().is_ok(), "{line}");
            }
        }
        for line in [
            "mqtt_connections_refused_total{reason=\"connack\"} 3",
            "mqtt_connections_refused_total{reason=\"connect_timeout\"} 4",
            "mqtt_connections{listener=\"b\\\"\\\\\"} 1",
            "mqtt_sessions 0.5",
            "process_cpu_seconds_total 1.25",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in {text}");
        }
    }
}
