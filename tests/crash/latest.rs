//! Latest values are there after a takeover, on PostgreSQL.

use gateway_core::Protocol;

use super::{blocking::Client, broker::Server as _, engine::Engine, pair::Pair};

fn latest(pair: &Pair, number: usize, topic: &str) -> Option<String> {
    let answer = pair.answer(number, &format!("/v1/latest/{topic}?payload=raw"))?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.starts_with("HTTP/1.1 200").then(|| body.to_owned())
}

/// All that was published is in the store, and after that in the ledger.
fn is_shipped(pair: &Pair, number: usize) -> bool {
    let is_zero = |name| pair.metric(number, name) == Some(0.0);
    is_zero("gateway_latest_pending") && is_zero("gateway_ledger_latest_waiting")
}

/// The failures: the gateway that takes over has no latest values, or those of the time when it served last; a stop in order loses
/// the last ones.
#[test]
fn a_gateway_that_takes_over_has_the_latest_values() {
    let Some(engine) = Engine::postgres() else { return };
    let mut pair = Pair::with_latest(&engine, "flush_interval = \"50ms\"\nledger_interval = \"200ms\"");
    pair.start(0);
    let mut active = pair.active();
    pair.start(1);
    for round in 0..3 {
        let mut client = Client::connect(pair.port(), Protocol::V5, "kitchen");
        for n in 0..50 {
            client.publish_acked(&format!("sensors/{n}"), format!("{round} {n}").as_bytes(), false);
        }
        pair.until("the ledger has them", |pair| is_shipped(pair, active));
        pair.until("the copy is warm", |pair| pair.is_warm(1 - active));
        if round < 2 {
            pair.kill(active, true);
        } else {
            client.publish_acked("sensors/last", b"before the stop", false);
            pair.stop(active);
        }
        pair.start(active);
        active = pair.active();
        for n in [0, 7, 49] {
            let topic = format!("sensors/{n}");
            assert_eq!(latest(&pair, active, &topic), Some(format!("{round} {n}")), "round {round}");
        }
    }
    assert_eq!(latest(&pair, active, "sensors/last").as_deref(), Some("before the stop"));
}
