//! Both gateways are started at once, again and again.

use std::time::{Duration, Instant};

use super::deposit::Deposit;
use crate::{engine::Engine, number, pair::Pair};

/// Starts of one cluster; more take a new one.
const BATCH: u64 = 10;
/// Both are watched for so long once one serves.
const WATCH: Duration = Duration::from_secs(1);

/// The failures: both serve, or none does; one that starts on a fresh directory lacks what was acknowledged before.
#[test]
#[ignore = "takes minutes: scripts/crash.sh N cluster starts"]
fn of_two_gateways_that_start_at_once_exactly_one_serves() {
    let Some(engine) = Engine::postgres() else { return };
    let starts = number("CRASH_ROUNDS", 100);
    let mut served = [0_u64; 2];
    let mut longest = Duration::ZERO;
    let mut left = starts;
    while left > 0 {
        let batch = left.min(BATCH);
        let mut pair = Pair::new(&engine);
        let mut deposit = Deposit::keeping(3_600);
        for _ in 0..batch {
            (0..2).for_each(|number| pair.forget_disk(number));
            let begun = Instant::now();
            pair.start(0);
            pair.start(1);
            let active = pair.active();
            longest = longest.max(begun.elapsed());
            let watched = Instant::now();
            while watched.elapsed() < WATCH {
                assert!(!pair.serves(1 - active), "both serve");
                assert!(pair.serves(active), "the one that served does not any more");
            }
            pair.until("the other stands by", |pair| pair.is_warm(1 - active));
            served[active] += 1;
            let port = pair.port_of(active);
            deposit.is_whole(port);
            deposit.add(port, 5, 100);
            (0..2).for_each(|number| pair.kill(number, false));
        }
        left -= batch;
    }
    println!(
        "{starts} double starts: a served {}, b served {}; the longest took {longest:?}",
        served[0], served[1]
    );
    assert_eq!(served.iter().sum::<u64>(), starts);
}
