//! Names, kinds and values of metrics.

use std::borrow::Cow;

/// A gauge: name, help, labels as `name="value"` (empty for none), value.
pub type Gauge = (&'static str, &'static str, String, f64);

/// A label value with the characters escaped that have a meaning in the format.
pub fn escape_label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// What the values of a name are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Buckets, sum and count; see [`super::Histogram`].
    Histogram,
}

impl MetricKind {
    /// As Prometheus writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// One value with everything that describes it; rows of one name need not be adjacent.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Metric name; counters end in `_total`.
    pub name: &'static str,
    /// For rows of a histogram, what follows the name: `_bucket`, `_sum` or `_count`.
    pub suffix: &'static str,
    /// What it measures, in words.
    pub help: &'static str,
    /// Its kind.
    pub kind: MetricKind,
    /// `name="value",...`; empty for none.
    pub labels: Cow<'static, str>,
    /// The value now. Whole numbers are exact up to 2^53.
    pub value: f64,
}
