//! Durations counted in fixed buckets.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use super::row::{Figure, MetricRow};

/// Durations in buckets. Any thread may observe; meant for what happens now and then, not for each message.
#[derive(Debug)]
pub struct Histogram {
    /// Upper bounds in seconds, ascending.
    bounds: &'static [f64],
    /// One for each bound, and one for what is above the last.
    buckets: Box<[AtomicU64]>,
    micros: AtomicU64,
}

impl Histogram {
    /// An empty one with these upper bounds of buckets, in seconds, ascending.
    pub fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            buckets: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            micros: AtomicU64::new(0),
        }
    }

    /// Counts one duration.
    pub fn observe(&self, took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = self.bounds.partition_point(|bound| *bound < seconds);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.micros.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Rows of this figure: cumulated buckets, sum in seconds, count.
    pub fn rows(&self, figure: &'static Figure<0>) -> Vec<MetricRow> {
        let mut total = 0;
        let row =
            |suffix, labels: String, value| MetricRow::new(&figure.family, suffix, labels.into(), value);
        let bounds = self.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        let mut rows: Vec<MetricRow> = bounds
            .zip(&self.buckets)
            .map(|(bound, bucket)| {
                total += bucket.load(Relaxed);
                row("_bucket", format!("le=\"{bound}\""), total as f64)
            })
            .collect();
        rows.push(row("_sum", String::new(), self.micros.load(Relaxed) as f64 / 1e6));
        rows.push(row("_count", String::new(), total as f64));
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures;
    use super::*;

    #[test]
    fn buckets_are_cumulated_and_include_their_bound() {
        let histogram = Histogram::new(&[0.1, 1.0]);
        for millis in [1, 100, 101, 2000] {
            histogram.observe(Duration::from_millis(millis));
        }
        let rows = histogram.rows(&figures::LATEST_WRITE);
        let text: Vec<_> = rows.iter().map(|r| format!("{}{{{}}} {}", r.suffix, r.labels, r.value)).collect();
        assert_eq!(
            text,
            [
                "_bucket{le=\"0.1\"} 2",
                "_bucket{le=\"1\"} 3",
                "_bucket{le=\"+Inf\"} 4",
                "_sum{} 2.202",
                "_count{} 4"
            ]
        );
    }
}
