//! What a figure is called and what it says.

use std::borrow::Cow;

/// A gauge: name, help, labels as `name="value"` (empty for none), value.
pub type Gauge = (&'static str, &'static str, String, f64);

/// A label value with the characters escaped that the format gives a meaning.
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

/// One value with all that describes it; rows of one name need not stand together.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Metric name; counters end in `_total`.
    pub name: &'static str,
    /// Of a histogram's rows what follows the name: `_bucket`, `_sum` or `_count`.
    pub suffix: &'static str,
    /// What it counts, in words.
    pub help: &'static str,
    /// What it is.
    pub kind: MetricKind,
    /// `name="value",...`; empty for none.
    pub labels: Cow<'static, str>,
    /// The value now. Whole numbers are exact up to 2^53.
    pub value: f64,
}
