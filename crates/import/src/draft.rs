//! The configuration that is being made, as text with the reason for each line.

use std::{collections::BTreeMap, fmt::Write as _};

/// A line of the output: key, value as TOML, and where it comes from.
struct DraftItem {
    key: &'static str,
    value: String,
    from: String,
}

/// Sections in the order in which they were first named; keys in the order in which they were set.
#[derive(Default)]
pub(super) struct Draft {
    order: Vec<&'static str>,
    sections: BTreeMap<&'static str, Vec<DraftItem>>,
    /// `[[listeners]]` tables and comments, whole.
    listeners: Vec<String>,
    /// Other tables, whole.
    tables: Vec<String>,
}

impl Draft {
    /// Sets a key of a section, `""` for the top level. A key that is set twice has the last value, as with Mosquitto.
    pub(super) fn set(&mut self, section: &'static str, key: &'static str, value: String, from: &str) {
        if !self.sections.contains_key(section) {
            self.order.push(section);
        }
        let items = self.sections.entry(section).or_default();
        items.retain(|item| item.key != key);
        items.push(DraftItem { key, value, from: from.to_owned() });
    }

    pub(super) fn has(&self, section: &'static str, key: &'static str) -> bool {
        self.sections.get(section).is_some_and(|items| items.iter().any(|item| item.key == key))
    }

    /// The value of a key that was set to a number.
    pub(super) fn number(&self, section: &'static str, key: &'static str) -> Option<u64> {
        let item = self.sections.get(section)?.iter().find(|item| item.key == key)?;
        item.value.parse().ok()
    }

    pub(super) fn listener(&mut self, text: String) {
        self.listeners.push(text);
    }

    pub(super) fn table(&mut self, text: String) {
        self.tables.push(text);
    }

    pub(super) fn has_tables(&self) -> bool {
        !self.tables.is_empty()
    }

    pub(super) fn written(&self, source: &str) -> String {
        let mut text = format!("# Made of {source} by 'mqtt-server import'. Try it with --check.\n");
        for section in std::iter::once("").chain(self.order.iter().copied().filter(|name| !name.is_empty())) {
            if section.is_empty() {
                self.write_items(section, &mut text);
                for listener in &self.listeners {
                    text.push('\n');
                    text.push_str(listener);
                }
                continue;
            }
            let _ = writeln!(text, "\n[{section}]");
            self.write_items(section, &mut text);
        }
        for table in &self.tables {
            text.push('\n');
            text.push_str(table);
        }
        text
    }

    fn write_items(&self, section: &str, text: &mut String) {
        for DraftItem { key, value, from } in self.sections.get(section).into_iter().flatten() {
            let comment = if from.is_empty() { String::new() } else { format!("  # {from}") };
            let _ = writeln!(text, "{key} = {value}{comment}");
        }
    }
}

/// A text as TOML. Control characters have been taken out before.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
