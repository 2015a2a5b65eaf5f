#!/usr/bin/env python3
"""Prints the Grafana board of the gateway: python3 deploy/grafana/board.py > deploy/grafana/mqtt-server.json

A test compares its output with that file and holds every query against the metrics that the gateway declares."""

import json

SELECT = 'instance=~"$instance"'
WIDTH = 24


def rate(metric, labels="", by=()):
    inner = f"rate({metric}{{{SELECT}{', ' + labels if labels else ''}}}[$__rate_interval])"
    return f"sum by ({', '.join(('instance', *by))}) ({inner})"


def total(metric, by=()):
    return f"sum by ({', '.join(('instance', *by))}) ({metric}{{{SELECT}}})"


def plain(metric):
    return f"{metric}{{{SELECT}}}"


# Title, unit, note, queries with the names of their lines; stat panels show the last value.
ROWS = [
    ("At a glance", [
        ("stat", "Up", "bool_on_off", "", [('up{job="mqtt-server", ' + SELECT + "}", "{{instance}}")]),
        ("stat", "Connections", "short", "", [(plain("mqtt_connections"), "{{instance}}")]),
        ("stat", "Messages received", "cps", "", [(rate("mqtt_messages_received_total"), "{{instance}}")]),
        ("stat", "Messages dropped", "cps", "Anything but 0: somebody did not get something.",
         [(rate("mqtt_messages_dropped_total"), "{{instance}}")]),
        ("stat", "Memory budget", "percentunit", "What peers make the gateway hold, of limits.memory_budget.",
         [(f"{total('gateway_memory_bytes')} / {total('gateway_memory_budget_bytes')}", "{{instance}}")]),
        ("stat", "Stores that fail", "short", "A disk does not take what has to be written.",
         [(f"count by (instance) ({plain('gateway_store_healthy')} == 0) or 0 * {total('gateway_store_healthy')}", "{{instance}}")]),
    ]),
    ("Devices", [
        ("graph", "Connections", "short", "", [(plain("mqtt_connections"), "{{instance}}")]),
        ("graph", "Connections begun and ended", "cps", "", [
            (rate("mqtt_connections_established_total"), "begun {{instance}}"),
            (rate("mqtt_connections_closed_total"), "ended {{instance}}")]),
        ("graph", "Connections refused", "cps", "By reason; docs/metrics.md has the limit behind each.",
         [(rate("mqtt_connections_refused_total", by=("reason",)) + " > 0", "{{reason}} {{instance}}")]),
        ("graph", "Logins refused", "cps", "", [(rate("mqtt_auth_failures_total", by=("reason",)) + " > 0", "{{reason}} {{instance}}")]),
        ("graph", "Ended by the gateway", "cps", "", [
            (rate("mqtt_keep_alive_timeouts_total"), "silent {{instance}}"),
            (rate("mqtt_protocol_errors_total"), "protocol error {{instance}}"),
            (rate("mqtt_write_timeouts_total"), "does not read {{instance}}"),
            (rate("mqtt_takeovers_total"), "taken over {{instance}}")]),
        ("graph", "TLS handshakes", "cps", "", [(rate("mqtt_tls_handshakes_total", by=("result",)), "{{result}} {{instance}}")]),
        ("graph", "Sessions and subscriptions", "short", "", [
            (plain("mqtt_sessions"), "sessions {{instance}}"),
            (plain("mqtt_subscriptions"), "subscriptions {{instance}}"),
            (plain("mqtt_retained_messages"), "retained {{instance}}")]),
        ("graph", "Certificates, days left", "d", "", [(plain("gateway_certificate_days_left"), "{{use}} {{file}} {{instance}}")]),
    ]),
    ("Messages", [
        ("graph", "Received by QoS", "cps", "", [(rate("mqtt_messages_received_total", by=("qos",)), "QoS {{qos}} {{instance}}")]),
        ("graph", "Sent by QoS", "cps", "", [(rate("mqtt_messages_sent_total", by=("qos",)), "QoS {{qos}} {{instance}}")]),
        ("graph", "Bytes", "Bps", "", [
            (rate("mqtt_bytes_received_total"), "in {{instance}}"),
            (rate("mqtt_bytes_sent_total"), "out {{instance}}")]),
        ("graph", "Dropped", "cps", "Deliveries that did not happen, by reason.",
         [(rate("mqtt_messages_dropped_total", by=("reason",)) + " > 0", "{{reason}} {{instance}}")]),
        ("graph", "Refused", "cps", "Messages that nobody got and whose publisher was told, by reason.",
         [(rate("mqtt_messages_refused_total", by=("reason",)) + " > 0", "{{reason}} {{instance}}")]),
        ("graph", "Waiting", "short", "", [
            (plain("mqtt_queued_messages"), "in queues {{instance}}"),
            (plain("mqtt_inflight_messages"), "not acknowledged {{instance}}"),
            (plain("gateway_store_queued"), "on disk {{instance}}")]),
    ]),
    ("Memory and disk", [
        ("graph", "Held for peers", "bytes", "By kind, of limits.memory_budget.",
         [(plain("gateway_memory_bytes") + " > 0", "{{kind}} {{instance}}"), (plain("gateway_memory_budget_bytes"), "budget {{instance}}")]),
        ("graph", "Refused for want of memory", "cps", "",
         [(rate("mqtt_memory_refused_total", by=("kind",)) + " > 0", "{{kind}} {{instance}}")]),
        ("graph", "Time of a commit", "s", "Acknowledgements of QoS 1 and 2 wait for it.", [
            (f"{rate('gateway_store_commit_microseconds_total')} / ({rate('gateway_store_commits_total')} > 0) / 1e6", "sessions and queues {{instance}}"),
            (f"{rate('gateway_log_commit_microseconds_total')} / ({rate('gateway_log_commits_total')} > 0) / 1e6", "log {{instance}}")]),
        ("graph", "Waiting for the disk", "bytes", "", [
            (plain("gateway_store_waiting_bytes"), "queues {{instance}}"),
            (plain("gateway_log_waiting_bytes"), "log {{instance}}"),
            (plain("gateway_latest_pending_bytes"), "latest values {{instance}}")]),
        ("graph", "Latest values", "cps", "", [
            (rate("gateway_latest_updates_total"), "recorded {{instance}}"),
            (rate("gateway_latest_written_total"), "written {{instance}}"),
            (rate("gateway_latest_dropped_total"), "dropped {{instance}}")]),
        ("graph", "Time to write latest values", "s", "Of nine batches in ten, and of the median one.", [
            ("histogram_quantile(0.9, " + rate("gateway_latest_write_seconds_bucket", by=("le",)) + ")", "p90 {{instance}}"),
            ("histogram_quantile(0.5, " + rate("gateway_latest_write_seconds_bucket", by=("le",)) + ")", "p50 {{instance}}")]),
        ("graph", "Database errors", "cps", "", [(rate("gateway_database_errors_total", by=("kind",)) + " > 0", "{{kind}} {{instance}}")]),
        ("graph", "Stores", "bool_on_off", "1 while a store takes writes.", [
            (plain("gateway_store_healthy"), "{{store}} {{instance}}"),
            (plain("gateway_latest_healthy"), "latest {{instance}}")]),
    ]),
    ("Backends", [
        ("graph", "Calls", "cps", "", [
            (rate("gateway_grpc_calls_total"), "calls {{instance}}"),
            (rate("gateway_grpc_errors_total"), "errors {{instance}}"),
            (rate("gateway_backend_denied_total"), "denied {{instance}}")]),
        ("graph", "Published and delivered", "cps", "", [
            (rate("gateway_grpc_published_total"), "published {{instance}}"),
            (rate("gateway_grpc_delivered_total"), "to streams {{instance}}"),
            (rate("gateway_groups_appended_total"), "for groups {{instance}}")]),
        ("graph", "Lost by streams", "cps", "", [(rate("gateway_grpc_stream_dropped_total", by=("reason",)) + " > 0", "{{reason}} {{instance}}")]),
        ("graph", "Groups: age of the oldest message", "s", "", [(plain("gateway_group_oldest_seconds"), "{{group}} {{instance}}")]),
        ("graph", "Groups: messages not acknowledged", "short", "", [(plain("gateway_group_lag_messages"), "{{group}} {{instance}}")]),
        ("graph", "Groups: with members", "short", "", [
            (plain("gateway_group_outstanding"), "outstanding {{group}} {{instance}}"),
            (plain("gateway_group_members"), "members {{group}} {{instance}}")]),
        ("graph", "Groups: dead letters and lost", "short", "", [
            (plain("gateway_group_dead_letters"), "dead letters {{group}} {{instance}}"),
            (plain("gateway_group_lost"), "lost {{group}} {{instance}}")]),
        ("graph", "Commands", "cps", "", [
            (rate("gateway_commands_sent_total"), "sent {{instance}}"),
            (rate("gateway_commands_replied_total"), "replied {{instance}}"),
            (rate("gateway_commands_failed_total", by=("reason",)) + " > 0", "{{reason}} {{instance}}")]),
    ]),
    ("Bridges", [
        ("graph", "Up", "bool_on_off", "", [(plain("gateway_bridge_up"), "{{bridge}} {{direction}} {{instance}}")]),
        ("graph", "Carried", "cps", "", [(rate("gateway_bridge_messages_total", by=("bridge",)), "{{bridge}} {{instance}}")]),
        ("graph", "Waiting on the disk", "short", "", [
            (plain("gateway_bridge_lag_messages") + " > 0", "{{bridge}} {{instance}}"),
            (plain("gateway_bridge_in_flight") + " > 0", "under way {{bridge}} {{instance}}")]),
        ("graph", "Failures, and messages left out", "cps", "", [
            (rate("gateway_bridge_failures_total", by=("bridge", "reason")) + " > 0", "failed {{bridge}}: {{reason}} {{instance}}"),
            (rate("gateway_bridge_refused_total", by=("bridge", "reason")) + " > 0", "refused {{bridge}}: {{reason}} {{instance}}"),
            (rate("gateway_bridge_expired_total", by=("bridge",)) + " > 0", "expired {{bridge}} {{instance}}")]),
    ]),
    ("Process", [
        ("graph", "CPU, in cores", "short", "", [(rate("process_cpu_seconds_total", 'job="mqtt-server"'), "{{instance}}")]),
        ("graph", "Resident memory", "bytes", "", [('process_resident_memory_bytes{job="mqtt-server", ' + SELECT + "}", "{{instance}}")]),
        ("graph", "File descriptors", "short", "", [
            ('process_open_fds{job="mqtt-server", ' + SELECT + "}", "open {{instance}}"),
            ('process_max_fds{job="mqtt-server", ' + SELECT + "}", "limit {{instance}}")]),
        ("graph", "Turns used up", "cps", "Thousands a second that come from few clients are a flood.",
         [(rate("mqtt_yields_total"), "{{instance}}")]),
    ]),
]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel(number, kind, title, unit, note, queries, place):
    made = {
        "id": number,
        "title": title,
        "type": "stat" if kind == "stat" else "timeseries",
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0} if unit != "d" else {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(queries)
        ],
    }
    if note:
        made["description"] = note
    if kind == "graph":
        made["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    return made


def panels():
    made, number, top = [], 1, 0
    for heading, here in ROWS:
        made.append({"id": number, "type": "row", "title": heading, "collapsed": False, "panels": [],
                     "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}})
        number, top, left = number + 1, top + 1, 0
        width, height = (4, 4) if here[0][0] == "stat" else (12, 8)
        for kind, title, unit, note, queries in here:
            made.append(panel(number, kind, title, unit, note, queries, {"x": left, "y": top, "w": width, "h": height}))
            number, left = number + 1, left + width
            if left == WIDTH:
                left, top = 0, top + height
        top += height if left else 0
    return made


BOARD = {
    "uid": "mqtt-server",
    "title": "mqtt-server",
    "tags": ["mqtt"],
    "schemaVersion": 39,
    "editable": True,
    "refresh": "30s",
    "time": {"from": "now-1h", "to": "now"},
    "templating": {"list": [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {"name": "instance", "type": "query", "datasource": SOURCE, "label": "Gateway", "multi": True, "includeAll": True,
         "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "refresh": 2,
         "query": {"query": "label_values(mqtt_connections, instance)", "refId": "instance"}},
    ]},
    "panels": panels(),
}

if __name__ == "__main__":
    print(json.dumps(BOARD, indent=1))
