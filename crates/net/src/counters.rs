//! Counters of sockets, handshakes and connections.

gateway_core::counters! {
    /// Before any check of who they are; those closed for others are among them.
    "mqtt_connections_accepted_total": "Sockets accepted" {
        connections_accepted;
    }
    "mqtt_connections_established_total": "CONNECT packets accepted" {
        connections_established;
    }
    "mqtt_connections_closed_total": "Connections that ended after CONNACK" {
        connections_closed;
    }
    /// `silent` and `waiting` grow when somebody opens connections and says nothing, or when a storm of devices is more than
    /// the machine can take.
    "mqtt_connections_refused_total": "Connections refused" {
        /// `limits.max_connections`
        refused_connections_limit(reason = "limit");
        /// `max_connections` of the listener
        refused_listener_limit(reason = "listener_limit");
        /// `limits.max_connections_per_address`
        refused_address_limit(reason = "address_limit");
        /// `limits.max_handshakes_per_address`, of an address that a proxy names
        refused_address_handshakes(reason = "address_handshakes");
        /// `limits.accept_rate_per_address`
        refused_address_rate(reason = "address_rate");
        /// a [ban](security/bans.md) of the address
        refused_address_banned(reason = "address_banned");
        /// the address has to wait after failed logins
        refused_failed_logins(reason = "failed_logins");
        /// too many wait for a handshake
        refused_waiting(reason = "waiting");
        /// a page that may not open a WebSocket, `allowed_origins`
        refused_origin(reason = "origin");
        /// a WebSocket on a loopback address, for another host than this machine
        refused_host(reason = "host");
        /// closed for a newcomer, see [doors](configuration.md#limits)
        refused_silent(reason = "silent");
        /// a CONNECT was refused
        refused_connect(reason = "connack");
        /// no CONNECT in time, `limits.connect_timeout`
        handshake_timeout(reason = "connect_timeout");
    }
    /// Their number now is that of `gateway_relays_total{direction="out"}` less this.
    "gateway_relays_ended_total": "Devices that are no longer relayed from here to another gateway" {
        relays_ended;
    }
    /// By [bans](security/bans.md) of clients, users and addresses.
    "mqtt_banned_total": "CONNECT packets refused for a ban" {
        banned_connects;
    }
    /// See [quotas](security/bans.md#caps-and-quotas).
    "mqtt_sending_pauses_total": "Times sending to a client was paused by a rate" {
        sending_paused;
    }
    /// While half of the listener's places for handshakes are taken, an address has to prove first that it is its sender's.
    "mqtt_quic_retries_total": "QUIC connections that were asked to prove their address (Retry)" {
        quic_retries;
    }
    /// An address is sent at most three times what came from there until it has proved that it is its sender's.
    "mqtt_quic_unproved_total": "Packets of QUIC that were not sent, as their address has not proved itself and had too much" {
        quic_unproved;
    }
    "mqtt_connections_evicted_total": "Connections ended because of a change of who may be connected" {
        /// the rules or passwords have changed
        evicted_not_authorized(reason = "not_authorized");
        /// a new ban
        evicted_banned(reason = "banned");
        /// the time of the client's login has ended
        evicted_expired(reason = "expired");
        /// anything else
        evicted_other(reason = "other");
    }
    "mqtt_protocol_errors_total": "Connections ended for malformed packets or protocol errors" {
        protocol_errors;
    }
    "mqtt_keep_alive_timeouts_total": "Connections ended because the client was silent" {
        keep_alive_timeouts;
    }
    /// `limits.packet_timeout` is how long it may take.
    "mqtt_packet_timeouts_total": "Connections ended because a packet that had begun did not go on" {
        packet_timeouts;
    }
    "mqtt_write_timeouts_total": "Connections ended because a write made no progress" {
        write_timeouts;
    }
    "mqtt_bytes_received_total": "Bytes read from devices" {
        bytes_in;
    }
    /// A connection has an account of about half a millisecond of work each time it runs; it keeps its place, also within a
    /// packet, lets the others of its shard go first and goes on. A few a second are ordinary under load; thousands a second
    /// that come from few clients are a flood or very large packets (`limits.max_filters_per_packet`,
    /// `limits.client_message_rate`).
    "mqtt_yields_total": "Times a connection had more to do than it may at once and let others go first" {
        yields;
    }
    /// See [quotas](security/bans.md#caps-and-quotas).
    "mqtt_rate_limit_pauses_total": "Times reading of a client was paused by its rate limit" {
        rate_limited;
    }
    /// Of one kind and from one address they are told in the log, `CONNECT refused`.
    "mqtt_auth_failures_total": "CONNECT packets refused by authentication" {
        /// unknown user or wrong password, token or certificate
        auth_failed(reason = "credentials");
        /// known, and may not connect
        auth_not_authorized(reason = "not_authorized");
        /// may not use this client id
        auth_client_id(reason = "client_id");
        /// too many logins wait, or memory is short
        auth_busy(reason = "busy");
        /// who knows could not be asked
        auth_unavailable(reason = "unavailable");
    }
    "mqtt_reauthentications_total": "Authentications of live connections that have ended" {
        /// goes on
        reauthentication_ok(result = "ok");
        /// ended by the gateway
        reauthentication_refused(result = "refused");
        /// the client did not go on
        reauthentication_timeout(result = "timeout");
    }
}
