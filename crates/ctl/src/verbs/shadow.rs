//! Device shadows: what a device is to be, and what it says it is.

use clap::Subcommand;
use mqtt_gateway_client::{
    Update,
    v1::{
        DeleteShadowRequest, GetShadowRequest, ListShadowsRequest, Shadow, UpdateShadowRequest,
        WatchShadowRequest, watch_shadow_item::Item,
    },
};

use super::{
    answer,
    messages::{lost, missing},
    pages,
};
use crate::{
    VerbContext,
    failure::Failure,
    output::{at, clean},
    remark,
};

/// Shadows.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum ShadowsVerb {
    /// Shows a shadow: what is desired, what is reported, and the difference
    Get {
        /// The device
        device: String,
        /// Its name; the one without a name otherwise
        #[arg(short, long, default_value = "")]
        name: String,
    },
    /// Changes a shadow, or makes it: JSON is merged into it, and null removes a key
    Update {
        /// The device
        device: String,
        /// Its name; the one without a name otherwise
        #[arg(short, long, default_value = "")]
        name: String,
        /// What the device is to be
        #[arg(short, long, value_name = "JSON", required_unless_present = "reported")]
        desired: Option<String>,
        /// What the device says it is
        #[arg(short, long, value_name = "JSON")]
        reported: Option<String>,
        /// Only if this is its version; 0 is that there is none
        #[arg(long, value_name = "VERSION")]
        expected_version: Option<u64>,
    },
    /// Deletes a shadow
    Delete {
        /// The device
        device: String,
        /// Its name; the one without a name otherwise
        #[arg(short, long, default_value = "")]
        name: String,
        /// Only if this is its version
        #[arg(long, value_name = "VERSION")]
        expected_version: Option<u64>,
    },
    /// Lists the shadows of a device
    List {
        /// The device
        device: String,
    },
    /// Shows the shadows of devices, then every change, until interrupted
    Watch {
        /// Devices; none is all, without the shadows that are there
        devices: Vec<String>,
        /// Only shadows of this name; may be repeated
        #[arg(short, long)]
        name: Vec<String>,
        /// Leave out the shadows that are there
        #[arg(long)]
        changes_only: bool,
        /// End after so many
        #[arg(short, long, value_name = "N")]
        count: Option<u64>,
    },
}

/// Two lines: which, and what.
fn lines(shadow: &Shadow) -> String {
    let name = if shadow.name.is_empty() { String::new() } else { format!(" {}", clean(&shadow.name)) };
    let part = |text: &str, nothing: &str| if text.is_empty() { nothing.to_owned() } else { clean(text) };
    format!(
        "{}{name} version {}\ndesired {}, reported {}, to do: {}",
        clean(&shadow.device_id),
        shadow.version,
        part(&shadow.desired, "{}"),
        part(&shadow.reported, "{}"),
        part(&shadow.delta, "nothing")
    )
}

impl ShadowsVerb {
    pub(crate) fn streams(&self) -> bool {
        matches!(self, Self::Watch { .. })
    }

    pub(crate) async fn run(self, context: &mut VerbContext) -> Result<(), Failure> {
        let mut client = context.client.shadows();
        match self {
            Self::Get { device, name } => {
                let request = context.ask(GetShadowRequest { device_id: device, name });
                let shadow = answer!(client.get_shadow(request)).shadow.unwrap_or_default();
                Ok(context.out.line_of(&lines(&shadow), &shadow)?)
            }
            Self::Update { device, name, desired, reported, expected_version } => {
                let client_token = String::new();
                let request = UpdateShadowRequest {
                    device_id: device,
                    name,
                    desired,
                    reported,
                    expected_version,
                    client_token,
                };
                let shadow = answer!(client.update_shadow(context.ask(request))).shadow.unwrap_or_default();
                Ok(context.out.line_of(&lines(&shadow), &shadow)?)
            }
            Self::Delete { device, name, expected_version } => {
                let request = DeleteShadowRequest { device_id: device, name, expected_version };
                let response = answer!(client.delete_shadow(context.ask(request)));
                Ok(context.out.line_of(&format!("deleted with version {}", response.version), &response)?)
            }
            Self::List { device } => {
                pages!(
                    context,
                    None::<usize>,
                    |page_token| client.list_shadows(context.ask(ListShadowsRequest {
                        device_id: device.clone(),
                        page_size: 1000,
                        page_token,
                    })),
                    |page| {
                        let columns = &["NAME", "VERSION", "CHANGED", "DESIRED", "REPORTED", "TO DO"];
                        context.out.rows(columns, &page.shadows, |shadow: &Shadow| {
                            let name = if shadow.name.is_empty() { "-" } else { &shadow.name };
                            vec![
                                clean(name),
                                shadow.version.to_string(),
                                at(shadow.update_time.as_ref()),
                                clean(&shadow.desired),
                                clean(&shadow.reported),
                                clean(&shadow.delta),
                            ]
                        })?;
                        page.shadows.len()
                    }
                );
                Ok(())
            }
            Self::Watch { devices, name, changes_only, count } => {
                let request = WatchShadowRequest {
                    device_ids: devices,
                    names: name,
                    changes_only,
                    heartbeat_interval: None,
                };
                watch(context, request, count.unwrap_or(u64::MAX)).await
            }
        }
    }
}

async fn watch(context: &mut VerbContext, request: WatchShadowRequest, mut left: u64) -> Result<(), Failure> {
    let mut stream = context.client.watch_shadows(request);
    while left > 0 {
        match stream.next().await? {
            Update::Item(Item::Shadow(shadow)) => {
                context.out.line_of(&lines(&shadow), &shadow)?;
                left -= 1;
            }
            Update::Item(Item::Deleted(shadow)) => {
                let text = format!(
                    "{} {} deleted with version {}",
                    clean(&shadow.device_id),
                    clean(&shadow.name),
                    shadow.version
                );
                context.out.line_of(&text, &shadow)?;
                left -= 1;
            }
            Update::Item(Item::Gap(gap)) => remark(&missing(gap.count, gap.reason().as_str_name())),
            Update::Item(Item::Heartbeat(_) | Item::SnapshotEnd(_)) => {}
            Update::Lost(error) => lost(&error),
            Update::Reconnected { .. } => remark("connected again; the current shadows follow"),
        }
        if left == 0 || stream.read_ahead() == 0 {
            context.out.flush()?;
        }
    }
    Ok(())
}
