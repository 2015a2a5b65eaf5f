//! Apache Kafka, by librdkafka.

mod inward;
mod outward;
mod witness;

use std::time::Duration;

use config::{KafkaBridge, SaslMechanism};
use edge::tls;
use rdkafka::{
    ClientConfig,
    error::{KafkaError, RDKafkaErrorCode as Code},
};

use super::{
    secret::read_secret,
    status::{BridgeFailure, Reason},
};

pub(super) use {inward::KafkaIn, outward::KafkaOut};

/// Longest wait for the cluster's answer to a question about itself or its topics.
const ASKING: Duration = Duration::from_secs(10);

/// Headers of a record that say what the message was in MQTT.
mod header {
    pub(super) const TOPIC: &str = "mqtt-topic";
    pub(super) const CLIENT: &str = "mqtt-client-id";
    pub(super) const QOS: &str = "mqtt-qos";
    pub(super) const RETAIN: &str = "mqtt-retain";
    pub(super) const ID: &str = "gateway-message-id";
    pub(super) const CONTENT_TYPE: &str = "content-type";
    pub(super) const RESPONSE_TOPIC: &str = "mqtt-response-topic";
    pub(super) const CORRELATION_DATA: &str = "mqtt-correlation-data";
}

/// Returns the client settings that name the cluster, and the bridge to the cluster. Reads the files that are named.
///
/// # Errors
/// The key below the bridge's table, and what is wrong with it.
pub(super) fn settings(name: &str, config: &KafkaBridge) -> Result<ClientConfig, (&'static str, String)> {
    let mut all = ClientConfig::new();
    let mut set = |key: &str, value: &str| {
        all.set(key, value);
    };
    set("bootstrap.servers", &config.brokers.join(","));
    set("client.id", &format!("mqtt-server-{name}"));
    set("socket.keepalive.enable", "true");
    set("reconnect.backoff.max.ms", "5000");
    set(
        "security.protocol",
        match (config.tls, config.username.is_some()) {
            (false, false) => "plaintext",
            (false, true) => "sasl_plaintext",
            (true, false) => "ssl",
            (true, true) => "sasl_ssl",
        },
    );
    if config.tls {
        // Errors of files are told in the words of the gateway.
        tls::client_config(&config.files(), false).map_err(|error| ("ca", error.to_string()))?;
        for (key, file) in [
            ("ssl.ca.location", &config.ca),
            ("ssl.certificate.location", &config.cert),
            ("ssl.key.location", &config.cert_key),
        ] {
            if let Some(file) = file {
                set(key, &file.display().to_string());
            }
        }
    }
    if let (Some(user), Some(file)) = (&config.username, &config.password_file) {
        let password = read_secret(file, "password_file")?;
        let password = String::from_utf8(password);
        let password = password.map_err(|_| ("password_file", "is not UTF-8 text".to_owned()))?;
        set("sasl.username", user);
        set("sasl.password", &password);
        set(
            "sasl.mechanism",
            match config.mechanism {
                SaslMechanism::Plain => "PLAIN",
                SaslMechanism::Sha256 => "SCRAM-SHA-256",
                SaslMechanism::Sha512 => "SCRAM-SHA-512",
            },
        );
    }
    Ok(all)
}

/// Turns an error of the client into a failure of the bridge.
fn why(error: &KafkaError) -> BridgeFailure {
    let reason = match error.rdkafka_error_code() {
        Some(
            Code::TopicAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::UnknownTopic
            | Code::UnknownTopicOrPartition
            | Code::UnknownPartition
            | Code::Authentication
            | Code::SaslAuthenticationFailed,
        ) => Reason::Denied,
        Some(
            Code::MessageTimedOut
            | Code::RequestTimedOut
            | Code::OperationTimedOut
            | Code::WaitingForCoordinator,
        ) => Reason::Deadline,
        Some(Code::BrokerTransportFailure | Code::AllBrokersDown | Code::Resolve | Code::SSL) => {
            Reason::Connect
        }
        _ => Reason::Failed,
    };
    BridgeFailure::new(reason, error.to_string())
}
