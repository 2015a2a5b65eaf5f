//! The phases of the test, one after the other, and their report.

use super::Test;
use crate::procstat::{Cpu, Usage};
use crate::report::{Report, merge_tally, per, round};
use crate::{EXIT_CONN, EXIT_LOSS, clock};
use serde_json::Value;
use std::collections::BTreeMap;

pub(super) fn test(mut t: Test) -> std::io::Result<i32> {
    let args = t.args;
    let mut r = Report::new(format!(
        "mqload offline {}->{}, {} messages each, QoS {}, {} B, MQTT {}{}",
        args.publishers,
        args.subscribers,
        args.count,
        args.qos,
        args.size,
        if args.broker.v5 { "5" } else { "3.1.1" },
        args.measure.label.as_ref().map_or(String::new(), |l| format!("  [{l}]")),
    ));
    r.set("command", "offline");
    r.set("label", args.measure.label.clone());
    args.broker.report(&mut r);
    r.set("publishers", args.publishers);
    r.set("subscribers", args.subscribers);
    r.set("pair", args.pair);
    r.set("count", args.count);
    r.set("qos", args.qos);
    r.set("size", args.size);
    r.set("window", args.window);
    r.set("pause_cmd", args.pause_cmd.clone());
    r.set("crash_at", args.crash_at);
    let (pubs, subs) = (t.pub_range(), t.sub_range());

    // 1. Subscribers make their sessions and go away.
    let mut failed = t.connect(subs.clone())?;
    t.eng.disconnect(subs.clone(), false, &mut t.b)?;
    // 2. Publishing.
    if failed == 0 {
        failed = t.connect(pubs.clone())?;
    }
    if failed > 0 {
        r.problems("connect_failures", "CONNECT FAILED", &t.eng.failures);
        return Ok(r.print(EXIT_CONN, args.measure.quiet));
    }
    let target = t.target();
    let before = target.mem();
    let cpu0 = target.cpu();
    let started = clock::now();
    t.publish()?;
    let publish_s = t.b.last_progress.saturating_sub(started) as f64 / 1e9;
    let publishing = Usage::between(&cpu0, &target.cpu());
    // Without a kill in between the broker's growth is the stored messages.
    let stored = target.mem();
    t.eng.disconnect(pubs.clone(), true, &mut t.b)?;
    let publish_drops = std::mem::take(&mut t.eng.drops);
    // 3. The break.
    if t.pause.is_none() {
        t.run_pause_cmd();
    }
    let up = t.pause.is_none() || t.wait_until_up();
    // 4. Subscribers come back.
    t.b.sessions_present = 0;
    for c in &mut t.eng.conns[subs.clone()] {
        c.spec.filter = None;
    }
    let target = t.target();
    let cpu1 = target.cpu();
    let reconnect = clock::now();
    let mut reconnect_failed = args.subscribers;
    let mut drain_cpu: Option<(Cpu, Cpu)> = None;
    if up {
        reconnect_failed = t.connect(subs.clone())?;
        t.receive()?;
        drain_cpu = Some((cpu1, target.cpu()));
    }
    let drained = target.mem();
    let drain_drops = std::mem::take(&mut t.eng.drops);
    let sessions_present = t.b.sessions_present;
    let failures = std::mem::take(&mut t.eng.failures);
    let drain_s = t.b.last_rx.saturating_sub(reconnect) as f64 / 1e9;
    let (due, missing, extra) = t.balance();

    // 5. Sessions are ended.
    t.eng.disconnect(subs.clone(), true, &mut t.b)?;
    if !args.broker.v5 && up {
        t.eng.conns[subs.clone()].iter_mut().for_each(|c| c.spec.clean = true);
        t.connect(subs.clone())?;
        t.eng.disconnect(subs, true, &mut t.b)?;
    }

    let b = &t.b;
    let sent: u64 = b.pubs.iter().map(|p| p.sent).sum();
    r.set("published", sent);
    r.set("acked", b.acked);
    r.set("rejected", b.rejected);
    r.set("unacked", sent - b.acked - b.rejected);
    r.set("publish_seconds", round(publish_s, 4));
    r.set("acked_per_sec", round(b.acked as f64 / publish_s.max(1e-9), 1));
    r.set("pause_cmd_exit", t.pause.and_then(|p| p.0));
    r.set("pause_cmd_seconds", t.pause.map(|p| round(p.1, 3)));
    r.set("sessions_present", sessions_present);
    r.set("expected", due);
    r.set("delivered", b.fresh);
    r.set("lost", missing);
    r.set("delivered_unacked", extra);
    r.set("duplicated", b.duplicates);
    r.set("out_of_order", b.out_of_order);
    r.set("foreign", b.foreign);
    r.set("drain_seconds", round(drain_s, 4));
    let first = b.first_rx.saturating_sub(reconnect) as f64 / 1e9;
    r.set("first_message_seconds", round(first, 4));
    r.set("drain_per_sec", round(b.fresh as f64 / drain_s.max(1e-9), 1));
    r.line(
        "publishing",
        format!(
            "{sent} sent, {} acknowledged in {publish_s:.3} s ({:.0}/s), {} not, {} rejected",
            b.acked,
            b.acked as f64 / publish_s.max(1e-9),
            sent - b.acked - b.rejected,
            b.rejected
        ),
    );
    if let Some((code, s)) = t.pause {
        let code = code.map_or("none".into(), |c| c.to_string());
        r.line("pause command", format!("exit {code} after {s:.2} s"));
    }
    r.line("sessions", format!("{sessions_present} of {} found again", args.subscribers));
    r.line(
        "receiving",
        format!(
            "{} in {drain_s:.3} s ({:.0}/s), the first after {first:.3} s",
            b.fresh,
            b.fresh as f64 / drain_s.max(1e-9)
        ),
    );
    r.line(
        "messages",
        format!(
            "expected {due}  lost {missing}  duplicated {}  out of order {}  arrived unacknowledged {extra}",
            b.duplicates, b.out_of_order
        ),
    );
    let mut fatal = failures.clone();
    if !up {
        fatal.insert("broker not up again within --up-timeout".into(), 1);
    }
    // With --crash-at publishers are meant to lose their connections.
    if args.crash_at.is_none() {
        merge_tally(&mut fatal, &publish_drops);
    }
    merge_tally(&mut fatal, &drain_drops);
    r.problems("connect_failures", "FAILED", &fatal);
    r.problems("publisher_drops", "publisher dropped", &publish_drops);
    if !target.is_empty() {
        r.memory(&before, &drained);
        r.set("broker_rss_kb_stored", stored.rss_kb);
        let grown = (stored.rss_kb as f64 - before.rss_kb as f64) * 1024.0;
        r.set("rss_bytes_per_stored_message", per(grown, b.acked, 1));
        let cpu = |u: Usage, n: u64| match u.broker {
            true => per(u.broker_us, n, 3),
            false => Value::Null,
        };
        let publish = cpu(publishing, b.acked);
        let drain = drain_cpu.map_or(Value::Null, |(a, z)| cpu(Usage::between(&a, &z), b.fresh));
        let text = format!("publishing {publish} per message, receiving {drain} per message");
        r.set("publish_cpu_us_per_message", publish);
        r.set("drain_cpu_us_per_message", drain);
        r.line("broker cpu us", text);
    }
    let code = if !fatal.is_empty() || reconnect_failed > 0 {
        EXIT_CONN
    } else if missing > 0 || b.rejected > 0 || (args.qos == 2 && b.duplicates > 0) {
        EXIT_LOSS
    } else {
        0
    };
    let mut drops: BTreeMap<String, u64> = publish_drops;
    merge_tally(&mut drops, &drain_drops);
    r.set("dropped_connections", serde_json::json!(drops));
    Ok(r.print(code, args.measure.quiet))
}
