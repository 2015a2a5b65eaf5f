//! Errors that librdkafka tells of its connections. The library tries again by itself and for long, and a record that could not be
//! sent fails with no more than a timeout: the reason is in the errors of the client.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use rdkafka::{
    ClientContext,
    error::{KafkaError, RDKafkaErrorCode as Code},
    producer::{FutureProducer, Producer as _},
};
use tokio::task::spawn_blocking;
use tracing::debug;

use super::{ASKING, why};
use crate::status::{BridgeFailure, Reason};

/// The last error of a client. Clones are of the same client.
#[derive(Clone, Default)]
pub(super) struct ClientErrors(Arc<Mutex<Option<(Code, String)>>>);

impl ClientErrors {
    /// The trouble with the cluster, if there is any.
    pub(super) fn failure(&self) -> Option<BridgeFailure> {
        let (code, detail) = self.0.lock().clone()?;
        let reason = why(&KafkaError::Global(code)).reason;
        Some(BridgeFailure::new(reason, detail))
    }

    /// The cluster has answered.
    pub(super) fn forget(&self) {
        *self.0.lock() = None;
    }
}

impl ClientContext for ClientErrors {
    fn error(&self, error: KafkaError, detail: &str) {
        debug!(%error, detail, "error of the client of Kafka");
        let Some(code) = error.rdkafka_error_code() else { return };
        let mut last = self.0.lock();
        // Keeps the error that says why: these two only follow from others.
        let is_empty_word = matches!(code, Code::AllBrokersDown | Code::Fatal);
        if last.is_none() || !is_empty_word {
            *last = Some((code, detail.to_owned()));
        }
    }
}

/// Interval at which the errors are looked at while the cluster is asked.
const STEP: Duration = Duration::from_millis(500);

/// Returns when the cluster has answered the producer.
///
/// # Errors
/// The cluster does not answer: why, as far as the client knows.
pub(super) async fn answers(
    producer: FutureProducer<ClientErrors>,
    errors: ClientErrors,
    brokers: String,
) -> Result<(), BridgeFailure> {
    let asked = spawn_blocking(move || {
        let rounds = ASKING.as_millis() / STEP.as_millis();
        for _ in 0..rounds {
            if producer.client().fetch_cluster_id(STEP).is_some() {
                errors.forget();
                return Ok(());
            }
            if let Some(failure) = errors.failure() {
                return Err(failure);
            }
        }
        Err(BridgeFailure::new(Reason::Connect, format!("no answer from {brokers}")))
    });
    let gone = |_| Err(BridgeFailure::new(Reason::Failed, "the client of Kafka has ended"));
    asked.await.unwrap_or_else(gone)
}
