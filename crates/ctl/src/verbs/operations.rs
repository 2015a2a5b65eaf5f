//! State of the gateway: metrics, certificates, configuration; and the caller.

use clap::Subcommand;
use mqtt_gateway_client::v1::{
    Certificate, GetCallerRequest, GetConfigurationRequest, GetMetricsRequest, GetStatusRequest,
    ListCertificatesRequest, Metric, Setting,
};

use super::answer;
use crate::{
    VerbContext,
    failure::Failure,
    output::{at, clean},
};

/// The gateway itself.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum GatewayVerb {
    /// Shows its version, since when it runs, and what is wrong with it. Exit code 1 if anything is
    Status,
    /// Lists its metrics as of now
    Metrics {
        /// Only those whose name begins so
        prefixes: Vec<String>,
    },
    /// Lists the certificates that it shows, and when they end
    Certificates,
    /// Lists the configuration in effect, defaults included; passwords are hidden
    Config {
        /// Only keys that begin so
        #[arg(default_value = "")]
        prefix: String,
    },
    /// Shows who you are taken for, and what you may do
    Whoami,
}

impl GatewayVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut client = context.client.operations();
        match self {
            Self::Status => {
                let status = answer!(client.get_status(context.ask(GetStatusRequest {})));
                context.out.one(&status)?;
                context.out.flush()?;
                if status.problems.is_empty() { Ok(()) } else { Err(Failure::No) }
            }
            Self::Metrics { prefixes } => {
                let request = GetMetricsRequest { name_prefixes: prefixes };
                let response = answer!(client.get_metrics(context.ask(request)));
                Ok(context.out.rows(&["NAME", "LABELS", "VALUE"], &response.metrics, |metric: &Metric| {
                    let mut labels: Vec<String> = metric
                        .labels
                        .iter()
                        .map(|(name, value)| format!("{name}={}", clean(value)))
                        .collect();
                    labels.sort();
                    let labels = if labels.is_empty() { "-".to_owned() } else { labels.join(",") };
                    vec![metric.name.clone(), labels, metric.value.to_string()]
                })?)
            }
            Self::Certificates => {
                let response = answer!(client.list_certificates(context.ask(ListCertificatesRequest {})));
                let columns = &["USE", "NAMES", "BEGINS", "ENDS", "FILE"];
                Ok(context.out.rows(columns, &response.certificates, |certificate: &Certificate| {
                    vec![
                        clean(&certificate.r#use),
                        clean(&certificate.dns_names.join(",")),
                        at(certificate.begin_time.as_ref()),
                        at(certificate.expire_time.as_ref()),
                        clean(&certificate.file),
                    ]
                })?)
            }
            Self::Config { prefix } => {
                let response = answer!(client.get_configuration(context.ask(GetConfigurationRequest {})));
                let mut settings = response.settings;
                settings.retain(|setting| setting.key.starts_with(&prefix));
                Ok(context.out.rows(&["KEY", "VALUE"], &settings, |setting: &Setting| {
                    vec![setting.key.clone(), clean(&setting.value)]
                })?)
            }
            Self::Whoami => {
                let caller = answer!(client.get_caller(context.ask(GetCallerRequest {})));
                Ok(context.out.one(&caller)?)
            }
        }
    }
}
