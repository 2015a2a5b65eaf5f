//! Counters: one set per crate and running thread, written without contention, added up when read. A crate declares what it
//! counts in its `counters.rs`, with [`counters!`](crate::counters!); the gateway lists the tables of all crates.

use std::{
    cell::RefCell,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use parking_lot::Mutex;

use super::row::{Family, MetricRow};

/// One counter of one thread. Only its own thread adds; any thread reads.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. A load and a store: no other thread writes it.
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Takes back what was added too early.
    pub fn take_back(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_sub(n), Relaxed);
    }

    /// The value now.
    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// The sets of one crate: as many as threads ever counted at the same time.
#[derive(Debug)]
pub struct CounterSets<S: 'static>(Mutex<SetList<S>>);

#[derive(Debug)]
struct SetList<S: 'static> {
    all: Vec<&'static S>,
    /// Sets of threads that have ended: the next thread counts on in one of them.
    free: Vec<&'static S>,
}

impl<S: Default + Sync + 'static> CounterSets<S> {
    /// None so far.
    #[expect(clippy::new_without_default, reason = "only a static needs one")]
    pub const fn new() -> Self {
        Self(Mutex::new(SetList { all: Vec::new(), free: Vec::new() }))
    }

    /// Gives this thread a set, until it ends.
    #[cold]
    pub fn join(&'static self) -> &'static S {
        let mut list = self.0.lock();
        let set = list.free.pop().unwrap_or_else(|| {
            let set: &'static S = Box::leak(Box::default());
            list.all.push(set);
            set
        });
        drop(list);
        // A thread that is ending already keeps its set.
        let _ = AT_END.try_with(|at_end| {
            at_end.0.borrow_mut().push(Box::new(|| self.0.lock().free.push(set)));
        });
        set
    }

    /// Reads one after the other.
    pub fn each(&self, mut read: impl FnMut(&S)) {
        for set in &self.0.lock().all {
            read(set);
        }
    }
}

thread_local! {
    /// Apart from the variable that a count reads: a variable with an end of its own costs each access a look at its state.
    static AT_END: AtEnd = const { AtEnd(RefCell::new(Vec::new())) };
}

/// Tasks for the end of a thread.
struct AtEnd(RefCell<Vec<Box<dyn FnOnce()>>>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        for task in self.0.take() {
            task();
        }
    }
}

/// All that one crate counts.
#[derive(Debug)]
pub struct CounterTable {
    /// The families that it declares.
    pub families: &'static [Family],
    /// Reads the rows of all of them, in their order.
    pub rows: fn() -> Vec<MetricRow>,
}

/// The rows of `families` with these values.
pub fn counter_rows(families: &'static [Family], values: &[u64]) -> Vec<MetricRow> {
    let declared =
        families.iter().flat_map(|family| family.rows.iter().map(move |(labels, _)| (family, *labels)));
    let rows = declared.zip(values);
    rows.map(|((family, labels), value)| MetricRow::new(family, "", labels.into(), *value as f64)).collect()
}

/// Declares the counters of a crate, for its `counters.rs`. The comment of a family, and of a row, is what operators read in
/// docs/metrics.md about it.
///
/// Makes `Counters`, one set for each thread, `count` to change this thread's, `Totals` and `totals` with the sums over all
/// threads, and `TABLE` for the gateway. A count is one access to a variable of the thread, and a load and a store: the set is made
/// by the first count of a thread, and has cache lines of its own.
#[macro_export]
macro_rules! counters {
    ($(
        $(#[doc = $about:literal])*
        $name:literal: $help:literal {
            $($(#[doc = $meaning:literal])* $field:ident
                $(($label:ident = $value:literal $(, $other:ident = $other_value:literal)*))?;)+
        }
    )*) => {
        /// The counters of this crate, of one thread.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct Counters { $($(
            #[doc = $help]
            #[doc = ""]
            $(#[doc = $meaning])*
            pub $field: $crate::metrics::Counter,
        )+)* }

        /// The sums over all threads.
        #[derive(Debug, Default, Clone, Copy)]
        pub struct Totals { $($(#[doc = $help] pub $field: u64,)+)* }

        static SETS: $crate::metrics::CounterSets<Counters> = $crate::metrics::CounterSets::new();

        // Not `const`: the compiler makes a call of each access to such a variable.
        ::std::thread_local! {
            static SET: &'static Counters = SETS.join();
        }

        /// Changes this thread's counters.
        pub fn count(change: impl ::std::ops::FnOnce(&Counters)) {
            SET.with(|set| change(set));
        }

        /// Sums of all threads that ever counted.
        pub fn totals() -> Totals {
            let mut totals = Totals::default();
            SETS.each(|set| {
                $($(totals.$field = totals.$field.wrapping_add(set.$field.value());)+)*
            });
            totals
        }

        impl Totals {
            /// The rows of all counters.
            pub fn rows(&self) -> ::std::vec::Vec<$crate::metrics::MetricRow> {
                $crate::metrics::counter_rows(TABLE.families, &[$($(self.$field),+),*])
            }
        }

        /// All counters of this crate.
        pub static TABLE: $crate::metrics::CounterTable = $crate::metrics::CounterTable {
            families: &[$($crate::metrics::Family::of_counters(
                $name,
                $help,
                concat!($($about, "\n"),*),
                &[$((
                    concat!($(stringify!($label), "=\"", $value, "\""
                        $(, ",", stringify!($other), "=\"", $other_value, "\"")*)?),
                    concat!($($meaning, "\n"),*),
                )),+],
            )),*],
            rows: || totals().rows(),
        };
    };
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Each thread of a pool whose threads come and go left a set behind for ever.
    #[test]
    fn threads_that_come_and_go_share_a_set_and_every_count_stays() {
        static SETS: CounterSets<Counter> = CounterSets::new();
        for _ in 0..50 {
            thread::spawn(|| SETS.join().add(2)).join().unwrap();
        }
        let mut values = Vec::new();
        SETS.each(|set| values.push(set.value()));
        assert_eq!(values, [100]);
    }
}
