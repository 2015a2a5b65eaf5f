//! Random schedules of everything that can happen to a group, against a plain list of what was appended.
//!
//! A schedule follows from its number, which a failure prints: `GROUPS_SCHEDULE=number cargo test -p groups` runs it alone, and
//! `GROUPS_SCHEDULES=1000000` as many as that.

mod steps;
mod world;

use self::world::World;

/// Number of schedules that a plain run tries.
const SCHEDULES: u64 = 10_000;

#[test]
fn schedules_lose_nothing_repeat_no_answered_ack_and_keep_order() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("GROUPS_SCHEDULE") {
        World::run(seed);
        return;
    }
    for seed in 0..number("GROUPS_SCHEDULES").unwrap_or(SCHEDULES) {
        let result = std::panic::catch_unwind(|| World::run(seed));
        if let Err(cause) = result {
            let text = cause.downcast_ref::<String>().cloned();
            let text = text.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            panic!("schedule {seed}: {}", text.unwrap_or_default());
        }
    }
}
