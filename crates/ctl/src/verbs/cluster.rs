//! The cluster that the gateway is in, from its metrics: no more is to be said, and every role may read them.

use mqtt_gateway_client::v1::{GetMetricsRequest, Metric};

use super::answer;
use crate::{VerbContext, failure::Failure, output::clean};

/// Shows the cluster as the gateway that serves sees it: who stands by, what the ledger has, and what is on its way there
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ClusterVerb {}

impl ClusterVerb {
    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let name_prefixes = ["gateway_cluster_", "gateway_ledger_"].map(str::to_owned).to_vec();
        let request = context.ask(GetMetricsRequest { name_prefixes });
        let metrics = answer!(context.client.operations().get_metrics(request)).metrics;
        // Of other families there are rows without a cluster, too.
        if !metrics.iter().any(|metric| metric.name == "gateway_cluster_epoch") {
            return Err(Failure::Absent("the gateway is in no cluster".to_owned()));
        }
        Ok(context.out.rows(&["WHAT", "OF", "VALUE"], &metrics, |metric: &Metric| {
            let label =
                |name: &str| metric.labels.get(name).map_or_else(|| "-".to_owned(), |value| clean(value));
            let number = metric.value.to_string();
            match what(&metric.name) {
                "gateway" => vec!["gateway".to_owned(), label("node"), label("part")],
                what => vec![what.to_owned(), label("store"), number],
            }
        })?)
    }
}

/// A metric in words.
fn what(name: &str) -> &str {
    match name {
        "gateway_cluster_active" => "serves",
        "gateway_cluster_epoch" => "epoch",
        "gateway_cluster_nodes" => "gateway",
        "gateway_ledger_appends" => "records on their way",
        "gateway_ledger_appended_bytes_total" => "bytes appended",
        "gateway_ledger_bytes" => "bytes in the ledger, about",
        "gateway_ledger_oldest_append_seconds" => "age of the oldest record on its way, s",
        "gateway_ledger_records_total" => "records appended",
        "gateway_ledger_redo_bytes" => "bytes in memory of records on their way",
        "gateway_ledger_repeats_total" => "calls made again",
        "gateway_ledger_waiting_answers" => "answers that wait for the lease",
        other => other,
    }
}
