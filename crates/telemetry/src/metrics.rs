//! Everything countable as Prometheus text (exposition format 0.0.4).

use std::fmt::Write;

use gateway_core::metrics::{MetricRow, figures};

use super::ProcessStats;

/// Returns everything countable: the rows of counters, those in `read`, figures of the process and the version. `/metrics`
/// and OTLP show exactly these.
pub fn rows(counters: Vec<MetricRow>, read: Vec<MetricRow>, process: &ProcessStats) -> Vec<MetricRow> {
    let mut rows = counters;
    rows.extend(read);
    rows.extend(process_rows(process));
    rows.push(figures::BUILD_INFO.of([super::version()], 1.0));
    rows
}

/// Renders rows as a page. HELP and TYPE appear once per name, and all rows of a name stand together, in any order of
/// the input.
pub fn render(rows: &[MetricRow]) -> String {
    let mut page = Exposition::default();
    for row in rows {
        page.row(row);
    }
    page.finish()
}

fn process_rows(process: &ProcessStats) -> [MetricRow; 8] {
    [
        figures::PROCESS_RESIDENT.is(process.rss_bytes as f64),
        figures::PROCESS_RESIDENT_PEAK.is(process.rss_peak_bytes as f64),
        figures::PROCESS_VIRTUAL.is(process.virtual_bytes as f64),
        figures::PROCESS_CPU.is(process.cpu_seconds),
        figures::PROCESS_FDS.is(process.open_fds as f64),
        figures::PROCESS_FDS_LIMIT.is(process.max_fds as f64),
        figures::PROCESS_THREADS.is(process.threads as f64),
        figures::PROCESS_START.is(process.start_seconds),
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
struct Exposition(Vec<(&'static str, String)>);

impl Exposition {
    fn row(&mut self, row: &MetricRow) {
        let name = row.name;
        let position = self.0.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
            let kind = row.kind.name();
            let help = row.help.replace('\\', "\\\\").replace('\n', "\\n");
            self.0.push((name, format!("# HELP {name} {help}\n# TYPE {name} {kind}\n")));
            self.0.len() - 1
        });
        let text = &mut self.0[position].1;
        let value = number(row.value);
        let written = match &*row.labels {
            "" => writeln!(text, "{name}{} {value}", row.suffix),
            labels => writeln!(text, "{name}{}{{{labels}}} {value}", row.suffix),
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

    use gateway_core::counters::Totals;

    use super::*;

    #[test]
    fn every_name_is_described_once_and_its_rows_stand_together() {
        let totals = Totals { dropped_memory: 3, refused_store: 4, ..Totals::default() };
        let read = vec![
            figures::GROUP_LOST.of(["a"], 2.0),
            figures::SESSIONS.is(0.5),
            figures::GROUP_LOST.of(["b\"\\"], 1.0),
        ];
        let process = ProcessStats { cpu_seconds: 1.25, ..ProcessStats::default() };
        let text = render(&rows(totals.rows(), read, &process));
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
            "mqtt_messages_dropped_total{reason=\"memory\"} 3",
            "mqtt_messages_refused_total{reason=\"store\"} 4",
            "gateway_group_lost{group=\"b\\\"\\\\\"} 1",
            "mqtt_sessions 0.5",
            "process_cpu_seconds_total 1.25",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in {text}");
        }
    }
}
