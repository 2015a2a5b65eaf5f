//! Counters of links.

gateway_core::counters! {
    "gateway_links_accepted_total": "Connections of other gateways" {
        /// The gateway showed a certificate of the cluster's authority and is a member.
        accepted(result = "ok");
        /// TLS failed: no certificate of `cluster.links.ca`, as a rule.
        refused_tls(result = "tls");
        /// The name in the certificate is no member's.
        refused_stranger(result = "stranger");
        /// No place: too many connections, or too many from one address.
        refused_door(result = "door");
    }
    "gateway_relays_total": "Devices relayed between gateways" {
        /// From here to the gateway that has their home.
        relays_out(direction = "out");
        /// From another gateway to this one.
        relays_in(direction = "in");
    }
    "gateway_relays_refused_total": "Devices that could not be relayed" {
        /// No gateway serves, or the one that does cannot be reached.
        relays_unreachable(reason = "unreachable");
        /// The other gateway refused, since it does not serve.
        relays_refused(reason = "refused");
    }
    "gateway_calls_passed_total": "Calls of backends passed on between gateways" {
        /// From here to the gateway that serves.
        calls_out(direction = "out");
        /// From another gateway to this one.
        calls_in(direction = "in");
    }
}
