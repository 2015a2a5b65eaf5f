//! Report of a run.

use super::{Args, Totals, Window};
use crate::report::{Report, per, round};
use crate::worker::{Load, Plan, Topology};
use serde_json::Value;

pub(super) fn title(args: &Args, plan: &Plan) -> String {
    let load = match plan.load {
        Load::Closed { window } => format!("closed loop, window {window}"),
        Load::Open { interval, .. } => format!("open loop, {:.0} msg/s", 1e9 / interval),
    };
    format!(
        "mqload pubsub {:?} {}->{}, QoS {}/{}, {} B, {}, MQTT {}{}{}",
        plan.topology,
        plan.publishers,
        plan.subscribers,
        plan.qos,
        plan.sub_qos,
        plan.size,
        load,
        if plan.v5 { "5" } else { "3.1.1" },
        args.broker.transport(),
        args.measure.label.as_ref().map_or(String::new(), |l| format!("  [{l}]")),
    )
}

pub(super) fn parameters(r: &mut Report, args: &Args, plan: &Plan) {
    r.set("command", "pubsub");
    r.set("label", args.measure.label.clone());
    args.broker.report(r);
    r.set("topology", format!("{:?}", plan.topology).to_lowercase());
    r.set("publishers", plan.publishers);
    r.set("subscribers", plan.subscribers);
    r.set("slow", plan.slow);
    r.set("topic_levels", plan.levels);
    r.set("cold_topics", args.cold_topics);
    r.set("qos", plan.qos);
    r.set("sub_qos", plan.sub_qos);
    r.set("size", plan.size);
    r.set("clean", args.clean);
    r.set("retain", plan.retain);
    let (window, rate, tick) = match plan.load {
        Load::Closed { window } => (Some(window), None, None),
        Load::Open { window, .. } => ((window != u64::MAX).then_some(window), args.rate, Some(args.tick_us)),
    };
    r.set("mode", if rate.is_some() { "open" } else { "closed" });
    r.set("window", window);
    r.set("rate", rate);
    r.set("tick_us", tick);
    r.set("count", plan.count);
    r.set("batch_bytes", plan.batch_bytes);
    r.set("refill", plan.refill);
    r.set("gather_us", args.gather_us);
    r.set("threads", plan.threads);
}

/// Fills in what was measured; false when messages were lost or duplicated
/// beyond what the QoS permits.
pub(super) fn results(r: &mut Report, args: &Args, plan: &Plan, t: &Totals, w: &Window) -> bool {
    let o = &t.o;
    let seconds = (w.end - w.start) as f64 / 1e9;
    let expected = (o.sent - o.rejected) * plan.copies();
    let lost = expected.saturating_sub(t.fresh());
    let per_sec = |n: u64| round(n as f64 / seconds, 1);
    let (inn, out) = (o.sent_window, o.received_window);

    r.set("aborted", w.aborted);
    r.set("window_seconds", round(seconds, 4));
    r.set("drain_seconds", round(w.drain_seconds, 3));
    r.set("published", o.sent);
    r.set("published_in_window", inn);
    r.set("acked", o.acked);
    r.set("unacked", o.unacked);
    r.set("rejected", o.rejected);
    r.set("delivered", t.fresh());
    r.set("delivered_in_window", out);
    r.set("expected", expected);
    r.set("lost", lost);
    r.set("duplicated", o.duplicates);
    r.set("out_of_order", o.out_of_order);
    r.set("misrouted", o.misrouted);
    r.set("foreign", o.foreign);
    r.set("retain_flagged", o.retain_flagged);
    r.set("written_off", o.written_off);
    r.set("dropped_publishers", o.dropped_pubs);
    r.set("dropped_subscribers", o.dropped_subs);
    r.set("msgs_per_sec_in", per_sec(inn));
    r.set("msgs_per_sec_out", per_sec(out));
    r.set("msgs_per_sec_total", per_sec(inn + out));
    r.set("latency_us", o.latency.json());
    r.set("msgs_per_write", per(o.sent as f64, o.pub_writes, 2));
    r.set("msgs_per_read", per(o.received as f64, o.sub_reads, 2));
    r.line(
        "rate",
        format!(
            "in {:.0}/s   out {:.0}/s   total {:.0}/s   over {seconds:.2} s",
            per_sec(inn),
            per_sec(out),
            per_sec(inn + out)
        ),
    );
    r.line(
        "messages",
        format!(
            "published {}  expected {expected}  delivered {}  lost {lost}  duplicated {}  out of order {}",
            o.sent,
            t.fresh(),
            o.duplicates,
            o.out_of_order
        ),
    );
    if plan.copies() > 0 {
        r.line("latency", o.latency.line());
    }
    if plan.topology == Topology::Fanout && plan.threads == 1 {
        r.set("last_delivery_us", o.last_delivery.json());
        r.line("last delivery", o.last_delivery.line());
    }
    if plan.qos > 0 {
        r.set("ack_latency_us", o.ack_latency.json());
        r.line("ack latency", o.ack_latency.line());
    }
    if let Load::Open { .. } = plan.load {
        let behind = o.scheduled - o.sent;
        r.set("scheduled", o.scheduled);
        r.set("behind_schedule", behind);
        r.set("send_lag_us", o.send_lag.json());
        r.line("send lag", o.send_lag.line());
        if behind > 0 {
            r.line("BEHIND", format!("{behind} scheduled messages were never sent"));
        }
    }
    for (n, what) in [
        (o.misrouted, "MISROUTED"),
        (o.foreign, "FOREIGN"),
        (o.unacked, "UNACKED"),
        (o.rejected, "REJECTED"),
        (o.written_off, "written off"),
    ] {
        if n > 0 {
            r.line(what, n.to_string());
        }
    }
    r.line(
        "batching",
        format!(
            "{} messages per publisher write, {} per subscriber read",
            per(o.sent as f64, o.pub_writes, 1),
            per(o.received as f64, o.sub_reads, 1)
        ),
    );
    let u = &w.usage;
    let broker = u.broker;
    r.cpu(u);
    let or_null = |v: Value| if broker { v } else { Value::Null };
    r.set("broker_cpu_us_per_published", or_null(per(u.broker_us, inn, 3)));
    r.set("broker_cpu_us_per_delivered", or_null(per(u.broker_us, out, 3)));
    r.set("broker_cpu_us_per_message", or_null(per(u.broker_us, inn + out, 3)));
    r.set("loadgen_cpu_us_per_message", per(u.own_us, inn + out, 3));
    let us = |v: Value| v.as_f64().map_or("-".into(), |x| format!("{x:.3}"));
    let mut text = format!("mqload {} per message", us(per(u.own_us, inn + out, 3)));
    if broker {
        text = format!(
            "broker {} per published, {} per delivered, {} per message in or out; {text}",
            us(per(u.broker_us, inn, 3)),
            us(per(u.broker_us, out, 3)),
            us(per(u.broker_us, inn + out, 3)),
        );
    }
    r.line("cpu us", text);

    let qos = plan.qos.min(plan.sub_qos);
    let mut ok = o.misrouted == 0 && o.rejected == 0;
    ok &= qos == 0 || lost == 0;
    ok &= qos == 1 || o.duplicates == 0;
    ok &= plan.qos == 0 || o.unacked == 0;
    ok &= !args.strict_order || o.out_of_order == 0;
    ok
}
