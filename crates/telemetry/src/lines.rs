//! One event of the log, one line, in either form: for any client id, topic or path that a peer chose.
//!
//! All fields pass here and nowhere else, so that no log statement has to think of it. Characters that end a line,
//! steer a terminal or reorder the text that a reader sees are written as escapes, once, so that a reader of the form
//! gets the text as the peer sent it, and text over a thousand bytes is cut.

use std::{
    fmt::{self, Write as _},
    sync::Arc,
};

use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};

use super::libraries::LibraryLimits;

/// Bytes of one value that are shown: a topic may have 65,535.
const LONGEST: usize = 1_024;

/// Format in which events become lines.
#[derive(Debug, Clone)]
pub(super) struct Lines {
    /// One JSON object a line; otherwise words for people.
    pub(super) json: bool,
    /// Tells how many lines of a library were left out before one.
    pub(super) libraries: Option<Arc<LibraryLimits>>,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = LineFields::default();
        event.record(&mut fields);
        let level = event.metadata().level().as_str();
        let target = fields.target.clone();
        let target = target.as_deref().unwrap_or_else(|| event.metadata().target());
        let suppressed = self.libraries.as_ref();
        let suppressed =
            suppressed.and_then(|limits| limits.take_suppressed(target, *event.metadata().level()));
        fields.others.extend(suppressed.map(|count| ("suppressed", FieldValue::Bare(count.to_string()))));
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        if self.json {
            write!(writer, "{{\"timestamp\":{},\"level\":{}", quoted(&time), quoted(level))?;
            if let Some(message) = &fields.message {
                write!(writer, ",\"message\":{}", quoted(message))?;
            }
            for (name, value) in &fields.others {
                write!(writer, ",{}:", quoted(name))?;
                match value {
                    FieldValue::Bare(text) => writer.write_str(text)?,
                    FieldValue::Text(text) => writer.write_str(&quoted(text))?,
                }
            }
            return writeln!(writer, ",\"target\":{}}}", quoted(target));
        }
        let (dim, color, plain) = match writer.has_ansi_escapes() {
            true => ("\x1b[2m", color(level), "\x1b[0m"),
            false => ("", "", ""),
        };
        write!(writer, "{dim}{time}{plain} {color}{level:>5}{plain} {dim}{target}:{plain}")?;
        if let Some(message) = &fields.message {
            write!(writer, " {}", visible(message))?;
        }
        for (name, value) in &fields.others {
            let shown = match value {
                FieldValue::Bare(text) => text.clone(),
                FieldValue::Text(text) if stands_alone(text) => text.clone(),
                FieldValue::Text(text) => delimited(text),
            };
            write!(writer, " {dim}{name}={plain}{shown}")?;
        }
        writeln!(writer)
    }
}

fn color(level: &str) -> &'static str {
    match level {
        "ERROR" => "\x1b[31m",
        "WARN" => "\x1b[33m",
        "INFO" => "\x1b[32m",
        "DEBUG" => "\x1b[34m",
        _ => "\x1b[35m",
    }
}

/// Returns whether a reader sees without quotation marks where the value ends.
fn stands_alone(text: &str) -> bool {
    !text.is_empty()
        && !text.contains(|c: char| c.is_whitespace() || deceives(c) || matches!(c, '"' | '\\' | '='))
}

/// Returns the text for people: as it is, but for deceptive characters.
fn visible(text: &str) -> String {
    escaped(text, |_| false, |c, shown| shown.extend(c.escape_default()))
}

/// For people, in quotation marks.
fn delimited(text: &str) -> String {
    format!("\"{}\"", escaped(text, |c| matches!(c, '"' | '\\'), |c, shown| shown.extend(c.escape_default())))
}

/// As text of JSON.
fn quoted(text: &str) -> String {
    let escape = |c: char, shown: &mut String| match c {
        '"' | '\\' | '\n' | '\r' | '\t' => shown.extend(c.escape_default()),
        c => {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        }
    };
    format!("\"{}\"", escaped(text, |c| matches!(c, '"' | '\\'), escape))
}

/// The text with an escape in place of each character that deceives, or of which `is_syntax` says that it would end the text.
fn escaped(text: &str, is_syntax: impl Fn(char) -> bool, escape: impl Fn(char, &mut String)) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if deceives(c) || is_syntax(c) {
            escape(c, &mut shown);
        } else {
            shown.push(c);
        }
    }
    shown
}

enum FieldValue {
    /// A number or a truth value.
    Bare(String),
    Text(String),
}

#[derive(Default)]
struct LineFields {
    message: Option<String>,
    others: Vec<(&'static str, FieldValue)>,
    /// Only for events that came through the `log` crate.
    target: Option<String>,
}

impl LineFields {
    fn add(&mut self, field: &Field, value: FieldValue) {
        match (field.name(), value) {
            ("message", FieldValue::Text(text) | FieldValue::Bare(text)) => self.message = Some(text),
            ("log.target", FieldValue::Text(text)) => self.target = Some(text),
            (name, _) if name.starts_with("log.") => {}
            (name, value) => self.others.push((name.trim_start_matches("r#"), value)),
        }
    }
}

impl Visit for LineFields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, FieldValue::Text(cut(value)));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, FieldValue::Bare(value.to_string()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, FieldValue::Bare(value.to_string()));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, FieldValue::Bare(value.to_string()));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        let value = if value.is_finite() {
            FieldValue::Bare(value.to_string())
        } else {
            FieldValue::Text(value.to_string())
        };
        self.add(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = TruncatedText::default();
        // Only the value's own `Debug` can fail; then what it wrote so far is shown.
        let _ = write!(text, "{value:?}");
        self.add(field, FieldValue::Text(text.end()));
    }
}

/// A text cut at [`LONGEST`].
fn cut(text: &str) -> String {
    let mut cut = TruncatedText::default();
    let _ = cut.write_str(text);
    cut.end()
}

/// Takes a text of any length and keeps its beginning.
#[derive(Default)]
struct TruncatedText {
    text: String,
    /// Bytes that it takes with escapes.
    shown: usize,
    left_out: usize,
}

impl TruncatedText {
    fn end(mut self) -> String {
        if self.left_out > 0 {
            let _ = write!(self.text, "...({} bytes more)", self.left_out);
        }
        self.text
    }
}

impl fmt::Write for TruncatedText {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        for c in part.chars() {
            if self.left_out > 0 || self.shown >= LONGEST {
                self.left_out += c.len_utf8();
                continue;
            }
            self.text.push(c);
            self.shown += if deceives(c) { c.escape_default().len() } else { c.len_utf8() };
        }
        Ok(())
    }
}

/// Control characters, separators of lines, marks and overrides of the direction of text, invisible characters, and
/// code points that stand for none.
fn deceives(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff0}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
        || u32::from(c) & 0xfffe == 0xfffe
}

#[cfg(test)]
mod tests {
    use std::io;

    use parking_lot::Mutex;
    use tracing_subscriber::{fmt, layer::SubscriberExt as _};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the text that `log` writes.
    fn written(json: bool, ansi: bool, log: impl FnOnce()) -> String {
        let sink = Sink::default();
        let writer = sink.clone();
        let layer = fmt::layer()
            .with_ansi(ansi)
            .event_format(Lines { json, libraries: None })
            .with_writer(move || writer.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), log);
        let bytes = sink.0.lock().clone();
        String::from_utf8(bytes).unwrap()
    }

    const EVIL: [&str; 8] = [
        "a\nb",
        "a\r\n2026-01-01T00:00:00Z  INFO mqtt_server: forged",
        "\x1b[2J\x1b[31mred",
        "\u{9b}2J",
        "abc\u{202e}txt.exe",
        "\u{2028}\u{2029}\u{85}\u{7f}\u{0}",
        "\u{feff}\u{200b}\u{2066}\u{e0041}\u{ffff}",
        "x\" reason=\"fine\", \\",
    ];

    #[test]
    fn nothing_a_peer_chooses_breaks_a_line_or_steers_a_terminal() {
        for evil in EVIL {
            for json in [false, true] {
                let log = || {
                    tracing::info!(client_id = %evil, topic = evil, filter = ?evil, error = Some(evil), "said {evil}");
                };
                let line = written(json, false, log);
                assert_eq!(line.matches('\n').count(), 1, "{line:?}");
                assert!(line.ends_with('\n'), "{line:?}");
                assert!(!line.trim_end_matches('\n').chars().any(deceives), "{line:?}");
                if json {
                    let parsed: serde_json::Value = serde_json::from_str(&line).unwrap();
                    for field in ["client_id", "topic", "error"] {
                        assert_eq!(parsed[field], evil, "escaped more than once: {line}");
                    }
                    assert_eq!(parsed["message"], format!("said {evil}"), "{line}");
                    assert_eq!(parsed.as_object().unwrap().len(), 8, "no field of the peer's making: {line}");
                } else if evil.contains('=') {
                    assert!(line.contains(r#"client_id="x\" reason=\"fine\", \\""#), "{line}");
                }
            }
        }
    }

    /// The failure: a line break of a client id is `\\n` in the line, which reads back as a backslash and an n.
    #[test]
    fn an_escape_is_escaped_once_for_people_too() {
        for (said, shown) in [
            ("a\nb", r#"client_id="a\nb" "#),
            ("a\\nb", r#"client_id="a\\nb" "#),
            ("a\u{202e}b", r#"client_id="a\u{202e}b" "#),
            ("a\"b", r#"client_id="a\"b" "#),
            ("plain", "client_id=plain "),
        ] {
            let line = written(false, false, || tracing::info!(client_id = %said, n = 1, "connected {said}"));
            assert!(line.contains(shown), "{line}");
        }
    }

    #[test]
    fn a_huge_text_is_cut_and_the_rest_counted() {
        let huge = "\u{e9}\n".repeat(30_000);
        for json in [false, true] {
            let line = written(json, false, || tracing::warn!(client_id = %huge, topic = &*huge, "refused"));
            assert!(line.len() < 3 * LONGEST, "{} bytes", line.len());
            assert_eq!(line.matches(" bytes more)").count(), 2, "{line}");
        }
    }

    #[test]
    fn fields_keep_their_order_names_and_kinds() {
        let log =
            || tracing::info!(listener = "grpc", port = 7_u16, ok = true, share = 0.5, n = -1, "listening");
        let line = written(true, false, log);
        let fields = r#""level":"INFO","message":"listening","listener":"grpc","port":7,"ok":true,"share":0.5,"n":-1,"#;
        assert!(line.contains(fields), "{line}");
        assert!(line.trim_end().ends_with(r#""target":"telemetry::lines::tests"}"#), "{line}");
        let line = written(false, false, log);
        assert!(line.contains("  INFO telemetry::lines::tests: listening listener=grpc port=7 "), "{line}");
        assert!(written(false, true, log).contains("\x1b[32m INFO\x1b[0m"), "colours where they are wanted");
    }
}
