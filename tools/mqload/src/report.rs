//! Latency histograms and the two outputs: a table on stderr for people, one
//! JSON object on stdout for programs.

use crate::procstat::{Mem, Usage};
use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Latencies in nanoseconds, three significant digits, up to one hour.
pub struct Latency(Histogram<u64>);

impl Latency {
    pub fn new() -> Latency {
        // The bounds are constants that hdrhistogram accepts.
        Latency(Histogram::new_with_bounds(64, 3_600_000_000_000, 3).expect("valid bounds"))
    }

    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns);
    }

    pub fn merge(&mut self, o: &Latency) {
        let _ = self.0.add(&o.0);
    }

    fn us(&self, q: f64) -> f64 {
        round(self.0.value_at_quantile(q) as f64 / 1e3, 1)
    }

    pub fn json(&self) -> Value {
        if self.0.is_empty() {
            return Value::Null;
        }
        json!({
            "count": self.0.len(),
            "mean": round(self.0.mean() / 1e3, 1),
            "min": round(self.0.min() as f64 / 1e3, 1),
            "p50": self.us(0.5),
            "p90": self.us(0.9),
            "p99": self.us(0.99),
            "p99.9": self.us(0.999),
            "max": round(self.0.max() as f64 / 1e3, 1),
        })
    }

    pub fn line(&self) -> String {
        if self.0.is_empty() {
            return "none".into();
        }
        format!(
            "p50 {}  p90 {}  p99 {}  p99.9 {}  max {} us",
            self.us(0.5),
            self.us(0.9),
            self.us(0.99),
            self.us(0.999),
            round(self.0.max() as f64 / 1e3, 1)
        )
    }
}

pub fn round(x: f64, digits: i32) -> f64 {
    let k = 10f64.powi(digits);
    (x * k).round() / k
}

/// `a / b`, or null when there was nothing to divide by.
pub fn per(a: f64, b: u64, digits: i32) -> Value {
    if b == 0 { Value::Null } else { json!(round(a / b as f64, digits)) }
}

pub fn tally(m: &mut BTreeMap<String, u64>, key: &str) {
    *m.entry(key.to_string()).or_insert(0) += 1;
}

pub fn merge_tally(into: &mut BTreeMap<String, u64>, from: &BTreeMap<String, u64>) {
    for (k, n) in from {
        *into.entry(k.clone()).or_insert(0) += n;
    }
}

/// Collects the JSON object and the human lines of one run.
pub struct Report {
    json: Map<String, Value>,
    lines: Vec<(String, String)>,
    title: String,
}

impl Report {
    pub fn new(title: String) -> Report {
        Report { json: Map::new(), lines: Vec::new(), title }
    }

    pub fn set(&mut self, key: &str, v: impl Into<Value>) {
        self.json.insert(key.into(), v.into());
    }

    pub fn line(&mut self, name: &str, text: impl Into<String>) {
        self.lines.push((name.into(), text.into()));
    }

    /// Broker and load generator CPU over the measured window.
    pub fn cpu(&mut self, u: &Usage) {
        let mut text = String::new();
        if u.broker {
            self.set("broker_cpu_percent", round(u.broker_percent(), 2));
            self.set("broker_cpu_seconds", round(u.broker_us / 1e6, 4));
            self.set("broker_cpu_user_share", round(u.broker_user_share, 3));
            text = format!("broker {:.1} %   ", u.broker_percent());
        }
        self.set("loadgen_cpu_percent", round(u.own_percent(), 2));
        self.set("machine_cpu_percent", round(u.machine_percent, 1));
        self.set("steal_percent", round(u.steal_percent, 1));
        text += &format!("mqload {:.1} %   ", u.own_percent());
        if u.broker {
            self.set("other_cpu_percent", round(u.other_percent(), 1));
            text += &format!("others {:.1} %   ", u.other_percent());
        }
        text += &format!("steal {:.1} %   (100 % = one CPU)", u.steal_percent);
        self.line("cpu", text);
    }

    pub fn memory(&mut self, before: &Mem, after: &Mem) {
        self.set("broker_rss_kb_before", before.rss_kb);
        self.set("broker_rss_kb_after", after.rss_kb);
        self.set("broker_rss_kb_peak", after.hwm_kb);
        self.set("broker_pss_kb_before", before.pss_kb);
        self.set("broker_pss_kb_after", after.pss_kb);
        self.set("broker_threads", after.threads);
        self.line(
            "broker memory",
            format!(
                "RSS {} -> {} kB (peak {}), PSS {} -> {} kB, {} threads",
                before.rss_kb, after.rss_kb, after.hwm_kb, before.pss_kb, after.pss_kb, after.threads
            ),
        );
    }

    pub fn problems(&mut self, key: &str, what: &str, m: &BTreeMap<String, u64>) {
        self.set(key, json!(m));
        for (reason, n) in m {
            self.line(what, format!("{n} x {reason}"));
        }
    }

    /// Prints both outputs; the human one only unless `quiet`.
    pub fn print(mut self, exit: i32, quiet: bool) -> i32 {
        self.set("exit", exit);
        if !quiet {
            eprintln!("{}", self.title);
            let w = self.lines.iter().map(|l| l.0.len()).max().unwrap_or(0);
            for (name, text) in &self.lines {
                eprintln!("  {name:w$}  {text}");
            }
        }
        println!("{}", Value::Object(self.json));
        exit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_quantiles() {
        let mut l = Latency::new();
        assert_eq!(l.json(), Value::Null);
        for i in 1..=1000u64 {
            l.record(i * 1000);
        }
        let j = l.json();
        assert_eq!(j["count"], 1000);
        assert!((j["p50"].as_f64().unwrap() - 500.0).abs() < 2.0);
        assert!((j["p99"].as_f64().unwrap() - 990.0).abs() < 2.0);
        assert!((j["max"].as_f64().unwrap() - 1000.0).abs() < 2.0);
    }

    #[test]
    fn per_nothing_is_null() {
        assert_eq!(per(1.0, 0, 3), Value::Null);
        assert_eq!(per(1.0, 3, 3), json!(0.333));
    }
}
