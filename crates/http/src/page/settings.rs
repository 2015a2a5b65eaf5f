//! Settings of the running gateway: its certificates, and the configuration in effect.

use axum::{extract::Query, response::Response};
use gateway_api::gateway::v1;
use gateway_core::clock;
use maud::{Markup, html};
use serde::Deserialize;

use super::{
    layout::{self, problem, time},
    visit::Visitor,
};

/// Certificates in use, with when they end.
pub(super) async fn certificates(visitor: Visitor) -> Response {
    let body = match visitor.api.operations().list_certificates(v1::ListCertificatesRequest {}).await {
        Err(status) => problem(&status),
        Ok(found) => {
            let found = found.into_inner().certificates;
            html! {
                section {
                    @if found.is_empty() { p.muted { "No listener speaks TLS." } } @else {
                        div.wide tabindex="0" role="region" aria-label="Certificates" {
                            table {
                                thead { tr { th { "For" } th { "Names" } th { "File" } th { "From" } th { "Until" } th.number { "Days left" } } }
                                tbody {
                                    @for certificate in &found {
                                        tr {
                                            td { (certificate.r#use) }
                                            td { (certificate.dns_names.join(", ")) }
                                            td { code { (certificate.file) } }
                                            td { (time(certificate.begin_time.as_ref())) }
                                            td { (time(certificate.expire_time.as_ref())) }
                                            td.number { (left(certificate)) }
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    };
    layout::page(&visitor, "/page/certificates", "Certificates", body)
}

fn left(certificate: &v1::Certificate) -> Markup {
    let now = (clock::to_wall(clock::now()).0 / 1_000) as i64;
    let days = certificate.expire_time.as_ref().map_or(0, |at| (at.seconds - now).div_euclid(86_400));
    let class = match days {
        ..7 => "bad",
        7..30 => "warn",
        _ => "good",
    };
    html! { span class=(class) { (days) } }
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct SettingsQuery {
    key: String,
}

/// The configuration in effect.
pub(super) async fn configuration(
    visitor: Visitor,
    Query(SettingsQuery { key }): Query<SettingsQuery>,
) -> Response {
    let body = match visitor.api.operations().get_configuration(v1::GetConfigurationRequest {}).await {
        Err(status) => problem(&status),
        Ok(found) => {
            let settings = found.into_inner().settings;
            let wanted = settings.iter().filter(|setting| setting.key.contains(key.trim()));
            html! {
                section {
                    form.line method="get" action="/page/configuration" role="search" {
                        label { "Key contains" input type="search" name="key" value=(key); }
                        button type="submit" { "Show" }
                    }
                }
                section {
                    p.why { "Defaults included; passwords are hidden." }
                    div.wide tabindex="0" role="region" aria-label="Settings" {
                        table {
                            thead { tr { th { "Key" } th { "Value" } } }
                            tbody { @for setting in wanted { tr { td { code { (setting.key) } } td.payload { (setting.value) } } } }
                        }
                    }
                }
            }
        }
    };
    layout::page(&visitor, "/page/configuration", "Configuration in effect", body)
}
