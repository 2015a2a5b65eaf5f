//! `gateway.v1.Operations`: the caller's own rights, and how the gateway is.

use std::collections::HashMap;

use config::Direction;
use gateway_core::{
    clock,
    metrics::{MetricKind, MetricRow},
};
use serde_json::Value;
use tonic::{Request, Response, Status};

use super::security::{over_all, role_to, scope_to, time};
use crate::{
    context::Context,
    proto::{gateway::v1, server::operations_server::Operations},
    server::{access::Call, methods::methods_of},
};
use bridges::{Reachability, ShownBridge};
use grpc_messages::{answers, status::Error};

/// Most prefixes of names in a request.
const PREFIXES: usize = 100;

/// The service.
pub(crate) struct OperationsService {
    pub(crate) context: Context,
}

/// Admits only callers who may know of all devices, as `/metrics` does.
fn over_devices(call: &Call) -> Result<(), Error> {
    match call.scope().devices() {
        None => Ok(()),
        Some(_) => Err(call.out_of_scope("scope", "all devices")),
    }
}

#[tonic::async_trait]
impl Operations for OperationsService {
    async fn get_caller(
        &self,
        request: Request<v1::GetCallerRequest>,
    ) -> Result<Response<v1::GetCallerResponse>, Status> {
        let call = Call::of(request.extensions())?;
        let grant = &call.caller().grant;
        Ok(Response::new(v1::GetCallerResponse {
            name: grant.id.clone(),
            role: role_to(grant.role),
            scope: (!grant.scope.is_all()).then(|| scope_to(&grant.scope)),
            expire_time: grant.expires.map(time),
            asked: self.context.hooks.backends.is_on(),
            methods: methods_of(grant.role).map(str::to_owned).collect(),
        }))
    }

    async fn get_status(
        &self,
        request: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        over_devices(&*Call::of(request.extensions())?)?;
        let operated = &self.context.hooks.operated;
        Ok(Response::new(v1::GetStatusResponse {
            version: operated.version.to_owned(),
            start_time: Some(answers::time(operated.started)),
            problems: (operated.problems)().lines().map(str::to_owned).collect(),
        }))
    }

    async fn get_metrics(
        &self,
        request: Request<v1::GetMetricsRequest>,
    ) -> Result<Response<v1::GetMetricsResponse>, Status> {
        over_devices(&*Call::of(request.extensions())?)?;
        let prefixes = request.into_inner().name_prefixes;
        if prefixes.len() > PREFIXES {
            return Err(Error::invalid("name_prefixes", format!("has more than {PREFIXES} entries")).into());
        }
        let wanted =
            |name: &str| prefixes.is_empty() || prefixes.iter().any(|prefix| name.starts_with(prefix));
        let rows = (self.context.hooks.operated.metrics)();
        let metrics = rows.into_iter().filter(|row| wanted(row.name)).map(metric).collect();
        let time = Some(answers::time(clock::to_wall(clock::now())));
        Ok(Response::new(v1::GetMetricsResponse { metrics, time }))
    }

    async fn list_certificates(
        &self,
        request: Request<v1::ListCertificatesRequest>,
    ) -> Result<Response<v1::ListCertificatesResponse>, Status> {
        over_devices(&*Call::of(request.extensions())?)?;
        let at = |seconds: i64| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let certificates = self.context.hooks.operated.tls.certificates().into_iter();
        let certificates = certificates.map(|certificate| v1::Certificate {
            r#use: certificate.of,
            file: certificate.file.display().to_string(),
            dns_names: certificate.names,
            begin_time: at(certificate.from),
            expire_time: at(certificate.until),
        });
        Ok(Response::new(v1::ListCertificatesResponse { certificates: certificates.collect() }))
    }

    async fn get_configuration(
        &self,
        request: Request<v1::GetConfigurationRequest>,
    ) -> Result<Response<v1::GetConfigurationResponse>, Status> {
        over_all(&*Call::of(request.extensions())?)?;
        // Secrets are hidden as they are serialized.
        let value =
            serde_json::to_value(&*self.context.hooks.operated.config).map_err(|_| Error::Internal)?;
        let mut settings = Vec::new();
        flatten(String::new(), value, &mut settings);
        Ok(Response::new(v1::GetConfigurationResponse { settings }))
    }

    async fn list_bridges(
        &self,
        request: Request<v1::ListBridgesRequest>,
    ) -> Result<Response<v1::ListBridgesResponse>, Status> {
        over_devices(&*Call::of(request.extensions())?)?;
        let hooks = &self.context.hooks;
        let shown = hooks.operated.bridges.shown(hooks.groups.as_deref().ok());
        Ok(Response::new(v1::ListBridgesResponse { bridges: shown.into_iter().map(bridge).collect() }))
    }
}

fn bridge(shown: ShownBridge) -> v1::Bridge {
    let ShownBridge { seen, direction, group } = shown;
    let status = group.as_ref().map(|group| group.status).unwrap_or_default();
    let definition = group.map(|group| group.definition);
    let last_failure = seen.last.map(|last| v1::BridgeFailure {
        time: Some(answers::time(last.at)),
        reason: last.reason.to_owned(),
        detail: last.detail,
    });
    let last_refusal = seen.last_refusal.map(|last| v1::BridgeRefusal {
        time: Some(answers::time(last.at)),
        reason: last.reason.to_owned(),
        topic: last.topic,
        detail: last.detail,
    });
    let named = |(reason, count): (&str, u64)| (reason.to_owned(), count);
    v1::Bridge {
        name: seen.name,
        kind: seen.kind.to_owned(),
        direction: match direction {
            Direction::Out => v1::BridgeDirection::Out,
            Direction::In => v1::BridgeDirection::In,
        }
        .into(),
        state: match seen.state {
            Reachability::Starting => v1::BridgeState::Starting,
            Reachability::Up => v1::BridgeState::Up,
            Reachability::Down => v1::BridgeState::Down,
        }
        .into(),
        messages: seen.carried,
        bytes: seen.bytes,
        in_flight: seen.in_flight,
        refused: seen.refusals.values().sum(),
        refusals: seen.refusals.into_iter().map(named).collect(),
        last_refusal,
        expired: seen.expired,
        looped: seen.looped,
        failures: seen.failures.into_iter().map(named).collect(),
        failures_in_row: u32::try_from(seen.failed).unwrap_or(u32::MAX),
        last_failure,
        retry_time: seen.retry.map(answers::time),
        paused: definition.as_ref().is_some_and(|definition| definition.paused),
        max_lag_bytes: definition.as_ref().map_or(0, |definition| definition.retention_bytes),
        group: definition.map(|definition| definition.name).unwrap_or_default(),
        lag_messages: status.lag_messages,
        lag_bytes: status.lag_bytes,
        lost: status.lost,
        dead_letters: status.dead_letters as u64,
    }
}

fn metric(row: MetricRow) -> v1::Metric {
    v1::Metric {
        name: format!("{}{}", row.name, row.suffix),
        labels: labels(&row.labels),
        value: row.value,
        counter: row.kind != MetricKind::Gauge,
    }
}

/// The labels in `name="value",...`, of which values are escaped.
fn labels(text: &str) -> HashMap<String, String> {
    let mut found = HashMap::new();
    let mut rest = text;
    while let Some((name, quoted)) = rest.split_once("=\"") {
        let mut value = String::new();
        let mut characters = quoted.char_indices();
        let mut end = quoted.len();
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => {
                    end = at + 1;
                    break;
                }
                '\\' => match characters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, other)) => value.push(other),
                    None => {}
                },
                other => value.push(other),
            }
        }
        found.insert(name.trim_start_matches(',').to_owned(), value);
        rest = quoted.get(end..).unwrap_or_default();
    }
    found
}

/// Settings of a section under their whole keys; a list is one setting.
fn flatten(key: String, value: Value, settings: &mut Vec<v1::Setting>) {
    match value {
        Value::Object(map) if !map.is_empty() || key.is_empty() => {
            for (name, value) in map {
                let key = if key.is_empty() { name } else { format!("{key}.{name}") };
                flatten(key, value, settings);
            }
        }
        value => settings.push(v1::Setting { key, value: value.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use config::Config;

    use super::*;

    #[test]
    fn labels_are_read_as_they_were_escaped() {
        let odd = "a\"b\\c\nd,e=f";
        let found = labels(&format!(
            "use=\"{}\",file=\"x\"",
            odd.replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", "\\n")
        ));
        assert_eq!(found, HashMap::from([("use", odd), ("file", "x")].map(|(n, v)| (n.into(), v.into()))));
        assert!(labels("").is_empty() && labels("broken").is_empty());
    }

    #[test]
    fn the_configuration_is_shown_by_key_without_its_password() {
        let mut config = Config::default();
        config.database.password = String::from("hunter2").into();
        let mut settings = Vec::new();
        flatten(String::new(), serde_json::to_value(&config).unwrap(), &mut settings);
        let of = |key: &str| settings.iter().find(|setting| setting.key == key).map(|found| &*found.value);
        assert_eq!(of("http.enabled"), Some("true"));
        assert_eq!(of("database.password"), Some("\"(hidden)\""));
        assert!(settings.iter().all(|setting| !setting.value.contains("hunter2")));
    }
}
