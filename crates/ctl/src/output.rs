//! Output of verbs: tables and lines for people, or JSON, a line for each thing.
//!
//! Texts of devices are shown with their control characters escaped, so that no payload steers the terminal.

use std::{
    fmt::Write as _,
    io::{self, BufWriter, IsTerminal as _, Stdout, Write as _},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use gateway_api::json::to_json;
use prost::{Message, Name};
use prost_types::Timestamp;
use serde_json::Value;

use crate::Format;

/// Standard output.
pub(crate) struct OutputWriter {
    format: Format,
    to: BufWriter<Stdout>,
    /// The columns of the table that is being written, with their widths.
    table: Option<(&'static [&'static str], Vec<usize>)>,
}

impl OutputWriter {
    pub(crate) fn new(format: Format) -> Self {
        Self { format, to: BufWriter::new(io::stdout()), table: None }
    }

    pub(crate) fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }

    /// Begins a new page of `--watch`: clears the terminal; elsewhere an empty line between two tables.
    pub(crate) fn fresh_page(&mut self) -> io::Result<()> {
        let again = self.table.take().is_some();
        if self.format == Format::Json {
            return Ok(());
        }
        if io::stdout().is_terminal() {
            self.to.write_all(b"\x1b[H\x1b[2J")
        } else if again {
            self.to.write_all(b"\n")
        } else {
            Ok(())
        }
    }

    /// A line for people; nothing in JSON.
    pub(crate) fn line(&mut self, text: &str) -> io::Result<()> {
        if self.format == Format::Table { writeln!(self.to, "{text}") } else { Ok(()) }
    }

    /// A line, in JSON whatever `M` is.
    pub(crate) fn line_of<M: Message + Name>(&mut self, text: &str, message: &M) -> io::Result<()> {
        match self.format {
            Format::Table => writeln!(self.to, "{text}"),
            Format::Json => self.json(&readable(to_json(message))),
        }
    }

    /// A value as a line of JSON, whatever the format.
    pub(crate) fn json(&mut self, value: &Value) -> io::Result<()> {
        serde_json::to_writer(&mut self.to, value)?;
        self.to.write_all(b"\n")
    }

    /// Bytes as they are.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes)?;
        self.to.write_all(b"\n")
    }

    /// Rows of a table; the header comes with the first ones. Columns are as wide as these need, and at least as before.
    pub(crate) fn rows<M: Message + Name>(
        &mut self,
        columns: &'static [&'static str],
        items: &[M],
        row: impl Fn(&M) -> Vec<String>,
    ) -> io::Result<()> {
        if self.format == Format::Json {
            return items.iter().try_for_each(|item| self.json(&readable(to_json(item))));
        }
        let rows: Vec<Vec<String>> = items.iter().map(row).collect();
        let begun = self.table.take().filter(|(of, _)| *of == columns).map(|(_, widths)| widths);
        let (head, mut widths) = match begun {
            Some(widths) => (false, widths),
            None => (true, columns.iter().map(|column| column.chars().count()).collect()),
        };
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        if head {
            let names: Vec<String> = columns.iter().map(|&name| name.to_owned()).collect();
            self.to.write_all(aligned(&names, &widths).as_bytes())?;
        }
        for row in &rows {
            self.to.write_all(aligned(row, &widths).as_bytes())?;
        }
        self.table = Some((columns, widths));
        Ok(())
    }

    /// Bytes as they are, without an end of line.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes)
    }

    /// Rows that are no messages; `keys` are their names in JSON.
    pub(crate) fn plain_rows(
        &mut self,
        columns: &[&str],
        keys: &[&str],
        rows: &[Vec<String>],
    ) -> io::Result<()> {
        if self.format == Format::Json {
            return rows.iter().try_for_each(|row| {
                let fields =
                    keys.iter().zip(row).map(|(key, cell)| ((*key).to_owned(), Value::String(cell.clone())));
                self.json(&Value::Object(fields.collect()))
            });
        }
        let head: Vec<String> = columns.iter().map(|&column| column.to_owned()).collect();
        let width =
            |index: usize| [&head].into_iter().chain(rows).map(|row| row[index].chars().count()).max();
        let widths: Vec<usize> = (0..columns.len()).map(|index| width(index).unwrap_or(0)).collect();
        for row in [&head].into_iter().chain(rows) {
            self.to.write_all(aligned(row, &widths).as_bytes())?;
        }
        Ok(())
    }

    /// One thing with all that is known of it, a line for each field.
    pub(crate) fn one<M: Message + Name>(&mut self, message: &M) -> io::Result<()> {
        let value = readable(to_json(message));
        if self.format == Format::Json {
            return self.json(&value);
        }
        let mut fields = Vec::new();
        flatten("", &value, &mut fields);
        let width = fields.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, value) in fields {
            writeln!(self.to, "{name:<width$}  {value}")?;
        }
        Ok(())
    }
}

fn aligned(cells: &[String], widths: &[usize]) -> String {
    let mut line = String::new();
    for (index, (cell, width)) in cells.iter().zip(widths).enumerate() {
        if index + 1 == cells.len() {
            line.push_str(cell);
        } else {
            let _ = write!(line, "{cell:<width$}  ");
        }
    }
    let mut line = line.trim_end().to_owned();
    line.push('\n');
    line
}

/// The fields that say something, with the names of the JSON.
fn flatten(name: &str, value: &Value, fields: &mut Vec<(String, String)>) {
    match value {
        Value::Null => {}
        Value::Object(map) => {
            for (key, value) in map {
                if key == "payload" && map.contains_key("payloadText") {
                    continue;
                }
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                flatten(&name, value, fields);
            }
        }
        Value::Array(items) => {
            let plain = items.iter().all(|item| !item.is_object() && !item.is_array());
            if plain && !items.is_empty() {
                let items: Vec<String> = items.iter().map(scalar).collect();
                fields.push((name.to_owned(), items.join(" ")));
            } else {
                for (index, item) in items.iter().enumerate() {
                    flatten(&format!("{name}[{index}]"), item, fields);
                }
            }
        }
        Value::String(text) if text.is_empty() || text.ends_with("_UNSPECIFIED") => {}
        value => fields.push((name.to_owned(), scalar(value))),
    }
}

fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) => clean(text),
        other => other.to_string(),
    }
}

/// Payloads that are text also as text, beside their bytes in base64: `payloadText`.
fn readable(mut value: Value) -> Value {
    match &mut value {
        Value::Object(map) => {
            let text = map
                .get("payload")
                .and_then(Value::as_str)
                .and_then(|payload| String::from_utf8(BASE64_STANDARD.decode(payload).ok()?).ok());
            for value in map.values_mut() {
                *value = readable(value.take());
            }
            if let Some(text) = text {
                map.insert("payloadText".to_owned(), Value::String(text));
            }
        }
        Value::Array(items) => {
            for item in items {
                *item = readable(item.take());
            }
        }
        _ => {}
    }
    value
}

/// Text with its control characters escaped.
pub(crate) fn clean(text: &str) -> String {
    if !text.contains(char::is_control) {
        return text.to_owned();
    }
    text.chars().fold(String::new(), |mut clean, c| {
        if c.is_control() {
            clean.extend(c.escape_default())
        } else {
            clean.push(c)
        };
        clean
    })
}

/// A payload for people.
pub(crate) fn payload(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => clean(text),
        Err(_) => format!("({} bytes) {}", bytes.len(), BASE64_STANDARD.encode(bytes)),
    }
}

/// The name of an enum's value without its prefix, in lower case.
pub(crate) fn word(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_lowercase().replace('_', " ")
}

/// A time to the second, or `-`.
pub(crate) fn at(time: Option<&Timestamp>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| Timestamp { nanos: 0, ..*time }.to_string())
}

/// `-` for nothing.
pub(crate) fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { clean(text) }
}

/// QoS as its number.
pub(crate) fn qos(value: i32) -> String {
    if value > 0 { (value - 1).to_string() } else { "-".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_cannot_steer_the_terminal() {
        assert_eq!(payload(b"\x1b[2Jx\ny"), "\\u{1b}[2Jx\\ny");
        assert_eq!(payload(b"\xff"), "(1 bytes) /w==");
    }

    #[test]
    fn a_payload_of_text_is_there_as_text_too() {
        let value = readable(serde_json::json!({"a": [{"payload": "aGk="}, {"payload": "/w=="}]}));
        assert_eq!(
            value,
            serde_json::json!({"a": [{"payload": "aGk=", "payloadText": "hi"}, {"payload": "/w=="}]})
        );
    }

    #[test]
    fn empty_fields_are_left_out_of_what_people_see() {
        let mut fields = Vec::new();
        let value =
            serde_json::json!({"a": "", "b": {"c": 1, "d": []}, "e": ["x", "y"], "f": "Q_UNSPECIFIED"});
        flatten("", &value, &mut fields);
        assert_eq!(fields, [("b.c".to_owned(), "1".to_owned()), ("e".to_owned(), "x y".to_owned())]);
    }
}
