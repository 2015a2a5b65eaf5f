//! Environment variables that look like the gateway's own but belong to somebody else.

use std::collections::BTreeMap;

/// Prefix of the variables that configure the gateway.
pub(super) const PREFIX: &str = "MQTT_SERVER_";
/// Second prefix of variables that a package or an image sets: they hold where neither the file nor another variable
/// sets the key.
pub(super) const DEFAULT_PREFIX: &str = "DEFAULT__";

/// The variables that Kubernetes gives every container for each Service in its namespace, where a Service's name begins
/// with `mqtt-server`: `MQTT_SERVER_SERVICE_HOST`, `MQTT_SERVER_PORT=tcp://...`, `MQTT_SERVER_PORT_8883_TCP_ADDR` and
/// the like. They mean nothing to the gateway.
pub fn kubernetes_variables(env: &BTreeMap<String, String>) -> Vec<&str> {
    env.iter().filter(|(name, value)| of_kubernetes(name, value)).map(|(name, _)| name.as_str()).collect()
}

pub(super) fn of_kubernetes(variable: &str, value: &str) -> bool {
    let Some(name) = variable.strip_prefix(PREFIX) else { return false };
    // Of the Service itself, or of one with a longer name.
    let tail = |word: &str| name == word || name.ends_with(&format!("_{word}"));
    let inside = |word: &str| name.starts_with(word) || name.contains(&format!("_{word}"));
    let url = ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    tail("SERVICE_HOST") || tail("SERVICE_PORT") || inside("SERVICE_PORT_") || tail("PORT") && url || {
        // PORT_8883_TCP, also with _PROTO, _PORT or _ADDR.
        let links = ["", "_PROTO", "_PORT", "_ADDR"];
        let stem = links.iter().rev().find_map(|link| name.strip_suffix(link).filter(|_| !link.is_empty()));
        let mut words = stem.unwrap_or(name).rsplit('_');
        let (protocol, port) = (words.next(), words.next());
        matches!(protocol, Some("TCP" | "UDP" | "SCTP"))
            && port.is_some_and(|port| port.parse::<u16>().is_ok())
            && words.next() == Some("PORT")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_a_kubernetes_service_are_told_from_a_persons() {
        for (name, value) in [
            ("MQTT_SERVER_SERVICE_HOST", "10.96.0.7"),
            ("MQTT_SERVER_SERVICE_PORT", "8883"),
            ("MQTT_SERVER_SERVICE_PORT_MQTTS", "8883"),
            ("MQTT_SERVER_PORT", "tcp://10.96.0.7:8883"),
            ("MQTT_SERVER_PORT_8883_TCP", "tcp://10.96.0.7:8883"),
            ("MQTT_SERVER_PORT_8883_TCP_PROTO", "tcp"),
            ("MQTT_SERVER_PORT_8883_TCP_PORT", "8883"),
            ("MQTT_SERVER_PORT_8883_TCP_ADDR", "10.96.0.7"),
            ("MQTT_SERVER_PORT_9000_UDP_ADDR", "10.96.0.7"),
            ("MQTT_SERVER_METRICS_SERVICE_HOST", "10.96.0.8"),
            ("MQTT_SERVER_METRICS_PORT", "tcp://10.96.0.8:9090"),
            ("MQTT_SERVER_METRICS_PORT_9090_TCP_ADDR", "10.96.0.8"),
        ] {
            assert!(of_kubernetes(name, value), "{name}");
        }
        for (name, value) in [
            ("MQTT_SERVER_PORT", "8883"),
            ("MQTT_SERVER_ADDR", "tcp://10.96.0.7:8883"),
            ("MQTT_SERVER_TCP", "1"),
            ("MQTT_SERVER_PORT_TCP", "1"),
            ("MQTT_SERVER_SERVICE", "1"),
            ("OTHER_SERVICE_HOST", "10.96.0.7"),
        ] {
            assert!(!of_kubernetes(name, value), "{name}");
        }
    }
}
