//! Samples of metrics for charts. Nothing is sampled while nobody looks: those who look bring the samples, and share them.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use broker::Account;
use gateway_api::gateway::v1::Metric;
use parking_lot::Mutex;

use crate::{counters::count, held::HeldBytes};

/// Number of samples that charts reach back.
const SAMPLES: usize = 150;
/// Milliseconds between two samples at least.
pub(super) const STEP: u64 = 2_000;
/// Milliseconds after which charts begin anew: nobody has looked meanwhile.
const FORGOTTEN: u64 = 30_000;

/// Values read at one time.
#[derive(Clone)]
pub(super) struct Sample {
    /// Milliseconds of the wall clock.
    pub(super) at: u64,
    /// By name and labels, as `name{label=value}`.
    pub(super) values: BTreeMap<String, f64>,
}

impl Sample {
    pub(super) fn new(at: u64, metrics: &[Metric]) -> Self {
        let named = metrics.iter().map(|metric| {
            let mut labels: Vec<_> =
                metric.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
            labels.sort_unstable();
            let name = if labels.is_empty() {
                metric.name.clone()
            } else {
                format!("{}{{{}}}", metric.name, labels.join(","))
            };
            (name, metric.value)
        });
        Self { at, values: named.collect() }
    }

    fn bytes(&self) -> usize {
        self.values.len() * VALUE
    }

    pub(super) fn get(&self, name: &str) -> f64 {
        self.values.get(name).copied().unwrap_or_default()
    }

    /// The values of a name by their labels, as `label=value`.
    pub(super) fn by_label(&self, name: &str) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().filter_map(move |(known, value)| {
            let labels = known.strip_prefix(name)?.strip_prefix('{')?.strip_suffix('}')?;
            Some((labels, *value))
        })
    }
}

/// Approximate bytes of a value with name and node.
const VALUE: usize = 96;

/// The last samples, of five minutes, on the memory account.
pub(super) struct Ring(Mutex<(VecDeque<Sample>, HeldBytes)>);

impl Ring {
    pub(super) fn new(account: &Arc<Account>) -> Self {
        Self(Mutex::new((VecDeque::new(), HeldBytes::new(account))))
    }

    /// Takes a sample, unless another visitor has just brought one, and returns all.
    pub(super) fn with(&self, sample: Sample) -> Vec<Sample> {
        let mut ring = self.0.lock();
        let (samples, held) = &mut *ring;
        let last = samples.back().map(|last| last.at);
        // A clock that was set back begins anew, too.
        if last.is_some_and(|last| sample.at < last || sample.at > last + FORGOTTEN) {
            samples.clear();
        }
        // A little earlier than the step is no other visitor's.
        if samples.back().is_none_or(|last| sample.at >= last.at + STEP * 3 / 4) {
            if samples.len() >= SAMPLES {
                samples.pop_front();
            }
            count(|c| c.page_samples.add(1));
            samples.push_back(sample);
            let mut bytes = samples.iter().map(Sample::bytes).sum();
            // Charts are the shorter where memory is short.
            while held.at_least(bytes).is_err() && samples.len() > 2 {
                samples.pop_front();
                bytes = samples.iter().map(Sample::bytes).sum();
            }
            held.at_most(bytes);
        }
        samples.iter().cloned().collect()
    }
}

/// Returns the value of `of` for each sample: seconds before the last, and value.
pub(super) fn levels(samples: &[Sample], of: impl Fn(&Sample) -> f64) -> Vec<(f64, f64)> {
    let last = samples.last().map_or(0, |last| last.at);
    samples.iter().map(|sample| (-((last - sample.at) as f64) / 1e3, of(sample))).collect()
}

/// Returns the growth of an ever-growing value, per second.
pub(super) fn rates(samples: &[Sample], of: impl Fn(&Sample) -> f64) -> Vec<(f64, f64)> {
    ratios(samples, of, |sample| sample.at as f64 / 1e3)
}

/// Returns the growth of `of` for each unit that `by` has grown; no point where `by` has not.
pub(super) fn ratios(
    samples: &[Sample],
    of: impl Fn(&Sample) -> f64,
    by: impl Fn(&Sample) -> f64,
) -> Vec<(f64, f64)> {
    let last = samples.last().map_or(0, |last| last.at);
    let pairs = samples.windows(2);
    pairs
        .filter_map(|pair| {
            let (grown, step) = (of(&pair[1]) - of(&pair[0]), by(&pair[1]) - by(&pair[0]));
            (step > 0.0).then(|| (-((last - pair[1].at) as f64) / 1e3, grown.max(0.0) / step))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use broker::MemoryKind;

    use super::*;

    fn sample(at: u64, value: f64) -> Sample {
        Sample { at, values: BTreeMap::from([("x".to_owned(), value)]) }
    }

    #[test]
    fn two_viewers_bring_no_more_samples_than_one() {
        let account = Arc::new(Account::new(1 << 30));
        let ring = Ring::new(&account);
        assert_eq!(ring.with(sample(10_000, 1.0)).len(), 1);
        assert_eq!(ring.with(sample(10_500, 1.0)).len(), 1, "of another viewer");
        assert_eq!(ring.with(sample(12_000, 5.0)).len(), 2);
        assert_eq!(rates(&ring.with(sample(14_000, 5.0)), |s| s.get("x")), [(-2.0, 2.0), (0.0, 0.0)]);
        for n in 0..1_000 {
            ring.with(sample(16_000 + n * STEP, 1.0));
        }
        let last = 16_000 + 999 * STEP;
        assert_eq!(ring.with(sample(last + 1, 1.0)).len(), SAMPLES);
        assert_eq!(account.held(MemoryKind::Http), SAMPLES * VALUE);
        assert_eq!(ring.with(sample(last + FORGOTTEN + 1, 1.0)).len(), 1, "nobody has looked for long");
    }

    #[test]
    fn a_ratio_has_no_point_where_nothing_was_done() {
        let samples = [sample(0, 1.0), sample(2_000, 1.0), sample(4_000, 3.0)];
        assert_eq!(ratios(&samples, |_| 1.0, |s| s.get("x")), [(0.0, 0.0)]);
    }
}
