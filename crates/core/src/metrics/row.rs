//! Names, kinds and values of metrics.

use std::borrow::Cow;

/// A label value with the characters escaped that have a meaning in the format.
fn escape_label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Type of a metric.
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

/// All rows of one name, and what operators read about them.
#[derive(Debug)]
#[non_exhaustive]
pub struct Family {
    /// Metric name; counters end in `_total`.
    pub name: &'static str,
    /// Description of the measured quantity.
    pub help: &'static str,
    /// Its kind.
    pub kind: MetricKind,
    /// Names of the labels whose values are known only while the gateway runs.
    pub labels: &'static [&'static str],
    /// More about it, in Markdown: a line for each line of its comment, with a space before it.
    pub about: &'static str,
    /// The rows that are always there: labels as `name="value",...` (empty for none), and what the row means, as in `about`.
    pub rows: &'static [(&'static str, &'static str)],
}

impl Family {
    /// One of counters whose rows are known.
    pub const fn of_counters(
        name: &'static str,
        help: &'static str,
        about: &'static str,
        rows: &'static [(&'static str, &'static str)],
    ) -> Self {
        Self { name, help, kind: MetricKind::Counter, labels: &[], about, rows }
    }

    /// Returns the unit of the values, which the name tells by the conventions of Prometheus; none for numbers of things.
    pub fn unit(&self) -> Option<&'static str> {
        let units = ["bytes", "microseconds", "seconds", "days"];
        units.into_iter().find(|unit| self.name.split('_').any(|word| word == *unit))
    }
}

/// A family that is read when somebody asks for it, with this many labels. [`super::figures`] has them all.
#[derive(Debug)]
pub struct Figure<const LABELS: usize> {
    pub(super) family: Family,
}

impl<const LABELS: usize> Figure<LABELS> {
    /// A row with these values of its labels, in their order.
    pub fn of(&'static self, values: [&str; LABELS], value: f64) -> MetricRow {
        let pairs = self.family.labels.iter().zip(values);
        let labels: Vec<String> =
            pairs.map(|(label, value)| format!("{label}=\"{}\"", escape_label(value))).collect();
        MetricRow::new(&self.family, "", labels.join(",").into(), value)
    }
}

impl Figure<0> {
    /// Its only row.
    pub fn is(&'static self, value: f64) -> MetricRow {
        self.of([], value)
    }
}

/// One value with everything that describes it; rows of one name need not be adjacent. Only what is declared, as a counter of a
/// crate or in [`super::figures`], can be a row.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MetricRow {
    /// Metric name; counters end in `_total`.
    pub name: &'static str,
    /// For rows of a histogram, what follows the name: `_bucket`, `_sum` or `_count`.
    pub suffix: &'static str,
    /// Description of the measured quantity.
    pub help: &'static str,
    /// Its kind.
    pub kind: MetricKind,
    /// `name="value",...`; empty for none.
    pub labels: Cow<'static, str>,
    /// The value now. Whole numbers are exact up to 2^53.
    pub value: f64,
}

impl MetricRow {
    pub(super) fn new(
        family: &'static Family,
        suffix: &'static str,
        labels: Cow<'static, str>,
        value: f64,
    ) -> Self {
        Self { name: family.name, suffix, help: family.help, kind: family.kind, labels, value }
    }
}
