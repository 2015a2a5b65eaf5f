//! The frame around every page, and words for answers of the API.

use std::fmt::Write as _;

use axum::{
    http::StatusCode,
    response::{Html, IntoResponse, Response},
};
use maud::{DOCTYPE, Markup, html};
use prost_types::Timestamp;
use tonic::{Code, Status};

use super::{
    assets::{ICON, SCRIPT, STYLE},
    visit::Visitor,
};

/// Most bytes of a payload that a page shows.
const SHOWN: usize = 2 << 10;

/// The pages: path, name, and the method without which there is nothing to see.
const PAGES: &[(&str, &str, &str)] = &[
    ("/page/", "Overview", "Operations/GetCaller"),
    ("/page/devices", "Devices", "Devices/ListDevices"),
    ("/page/topics", "Topics", "State/ListLatest"),
    ("/page/groups", "Groups", "Groups/ListGroups"),
    ("/page/bridges", "Bridges", "Operations/ListBridges"),
    ("/page/slow", "Slow consumers", "Devices/ListTopDevices"),
    ("/page/access", "Rules and tokens", "Security/ExplainAccess"),
    ("/page/certificates", "Certificates", "Operations/ListCertificates"),
    ("/page/configuration", "Configuration", "Operations/GetConfiguration"),
    ("/page/try", "Try it out", "Subscriber/Subscribe"),
];

/// A whole page for a visitor; `path` is that of its entry among the links.
pub(super) fn page(visitor: &Visitor, path: &str, title: &str, body: Markup) -> Response {
    let content = html! {
        header {
            a.brand href="/page/" { "mqtt-server" }
            nav aria-label="Pages" {
                ul {
                    @for (to, name, method) in PAGES {
                        @if visitor.may(method) {
                            li { a href=(to) aria-current=[(*to == path).then_some("page")] { (name) } }
                        }
                    }
                }
            }
            div.who {
                @if visitor.caller.asked {
                    span { (visitor.caller.name) ", " (visitor.role()) @if visitor.caller.scope.is_some() { ", limited scope" } }
                    form.plain method="post" action="/page/logout" {
                        (csrf(visitor))
                        button.quiet type="submit" { "Log out" }
                    }
                } @else {
                    span { "No login: this gateway asks nobody who they are" }
                }
            }
        }
        main #main tabindex="-1" {
            h1 { (title) }
            (body)
        }
    };
    Html(document(title, content).into_string()).into_response()
}

/// A page without links, for those who are not known.
pub(super) fn bare(title: &str, body: Markup) -> Html<String> {
    Html(document(title, html! { main #main tabindex="-1" { (body) } }).into_string())
}

fn document(title: &str, content: Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                title { (title) " – mqtt-server" }
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="robots" content="noindex";
                link rel="icon" type="image/svg+xml" href=(ICON.path());
                link rel="stylesheet" href=(STYLE.path());
                script src=(SCRIPT.path()) defer {}
            }
            body {
                a.skip href="#main" { "Skip to content" }
                (content)
            }
        }
    }
}

/// Renders the token that a form must bring back.
pub(super) fn csrf(visitor: &Visitor) -> Markup {
    html! { input type="hidden" name="csrf" value=(visitor.csrf); }
}

/// A button of a form that does what `method` does: if the role may not, it is disabled and says why.
pub(super) fn button(
    visitor: &Visitor,
    method: &str,
    class: &str,
    (name, value): (&str, &str),
    text: &str,
) -> Markup {
    let why = visitor.why_not(method);
    html! {
        div {
            button class=(class) type="submit" name=(name) value=(value) disabled[why.is_some()] title=[why.as_deref()] { (text) }
            @if let Some(why) = &why { " " span.why { (why) } }
        }
    }
}

/// Renders a refusal of the API, in its words.
pub(super) fn problem(status: &Status) -> Markup {
    html! {
        p.notice.bad role="alert" { (sentence(status.message())) }
    }
}

/// Renders the notice of a deed that is done.
pub(super) fn done(text: &str) -> Markup {
    html! { p.notice.good role="status" { (text) } }
}

/// Renders a page for a subject of which nothing can be shown.
pub(super) fn failure(status: &Status) -> Response {
    let code = match status.code() {
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::PermissionDenied | Code::Unauthenticated => StatusCode::FORBIDDEN,
        Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    let body = html! { div.narrow { (problem(status)) p { a href="/page/" { "Overview" } } } };
    (code, bare("Not to be shown", body)).into_response()
}

/// With a capital at the front and a full stop.
fn sentence(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    let end = if text.ends_with(['.', '?', '!']) { "" } else { "." };
    format!("{first}{}{end}", characters.as_str())
}

/// A number in few characters, as `1.2k`.
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    let (scaled, unit) = match size {
        s if s >= 1e9 => (value / 1e9, "G"),
        s if s >= 1e6 => (value / 1e6, "M"),
        s if s >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        s if s >= 100.0 || s == s.round() => 0,
        s if s >= 10.0 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$}{unit}")
}

/// Bytes for people, as `12.5 MiB`.
pub(super) fn bytes(value: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut scaled = value;
    let mut unit = 0;
    while scaled.abs() >= 1_024.0 && unit + 1 < units.len() {
        scaled /= 1_024.0;
        unit += 1;
    }
    let digits = if unit == 0 || scaled >= 100.0 { 0 } else { 1 };
    format!("{scaled:.digits$} {}", units[unit])
}

/// A point in time, to the second.
pub(super) fn time(at: Option<&Timestamp>) -> Markup {
    let Some(at) = at else { return html! { "–" } };
    let whole = Timestamp { seconds: at.seconds, nanos: 0 }.to_string();
    html! { time datetime=(whole) { (whole.replace('T', " ").replace('Z', " UTC")) } }
}

/// Returns the time of day alone, for recent events.
pub(super) fn of_day(at: Option<&Timestamp>) -> Markup {
    let whole = at.map(|at| Timestamp { seconds: at.seconds, nanos: 0 }.to_string()).unwrap_or_default();
    let time = whole.split_once('T').map_or("", |(_, time)| time).trim_end_matches('Z');
    html! { time datetime=(whole) title=(whole) { (time) } }
}

/// `name=value&...` with all that is not plain encoded.
pub(super) fn query(pairs: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (name, value) in pairs {
        let _ = write!(text, "{}{name}=", if text.is_empty() { "" } else { "&" });
        for byte in value.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => text.push(byte.into()),
                _ => {
                    let _ = write!(text, "%{byte:02X}");
                }
            }
        }
    }
    text
}

/// The beginning of a payload: as text if it is, otherwise in hexadecimal.
pub(super) fn payload(bytes: &[u8]) -> String {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => Some(text),
        // Only its end was cut off.
        Err(error) if error.error_len().is_none() => std::str::from_utf8(&bytes[..error.valid_up_to()]).ok(),
        Err(_) => None,
    };
    let plain = |c: char| !c.is_control() || matches!(c, '\n' | '\r' | '\t');
    let mut shown = match text.filter(|text| text.chars().all(plain)) {
        Some(text) => text[..text.floor_char_boundary(SHOWN)].to_owned(),
        None => bytes.iter().take(SHOWN / 8).fold(String::from("0x"), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        }),
    };
    if bytes.len() > SHOWN {
        let _ = write!(shown, " … ({} bytes)", bytes.len());
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_payloads_are_short_and_right() {
        for (value, text) in [
            (0.0, "0"),
            (7.0, "7"),
            (0.25, "0.25"),
            (12.34, "12.3"),
            (1_234.0, "1.23k"),
            (2e6, "2M"),
            (-1_500.0, "-1.50k"),
        ] {
            assert_eq!(short(value), text);
        }
        assert_eq!((bytes(10.0), bytes(1_536.0)), ("10 B".to_owned(), "1.5 KiB".to_owned()));
        assert_eq!(payload(b"21.5"), "21.5");
        assert_eq!(payload(&[0, 255]), "0x00ff");
        assert_eq!(payload("\u{1b}[0m".as_bytes()), "0x1b5b306d");
        assert!(payload(&[b'a'; 5_000]).ends_with("… (5000 bytes)"));
    }

    #[test]
    fn a_query_takes_whatever_devices_are_called() {
        assert_eq!(query(&[("id", "a/b&c=d é"), ("x", "1")]), "id=a%2Fb%26c%3Dd%20%C3%A9&x=1");
    }
}
