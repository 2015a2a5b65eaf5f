//! The state of a shadow: two sections, each value with its time.

use std::collections::{BTreeMap, btree_map::Entry};

use crate::{
    DocumentLimits, Patch, Rejection, Update,
    json::{Json, Object, write_all, write_object, write_text},
};

/// Values and their times, in seconds.
pub(crate) type StateSection = BTreeMap<Box<str>, JsonNode>;

/// A value with the time of each of its parts.
#[derive(Debug, Clone)]
pub(crate) enum JsonNode {
    /// Neither object nor array.
    Leaf(Json, u64),
    Array(Vec<Self>),
    Object(StateSection),
}

/// Values alone: times are not compared.
impl PartialEq for JsonNode {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Leaf(a, _), Self::Leaf(b, _)) => a == b,
            (Self::Array(a), Self::Array(b)) => a == b,
            (Self::Object(a), Self::Object(b)) => a == b,
            _ => false,
        }
    }
}

/// Desired and reported state of a device.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct State {
    pub(crate) desired: StateSection,
    pub(crate) reported: StateSection,
}

impl State {
    /// Returns the state after the update at `now`, in seconds. Its version is the caller's to compare; its depth was checked
    /// when it was read.
    pub fn updated(&self, update: &Update, now: u64, limits: &DocumentLimits) -> Result<Self, Rejection> {
        let mut next = self.clone();
        for (section, patch) in [(&mut next.desired, &update.desired), (&mut next.reported, &update.reported)]
        {
            match patch {
                None => {}
                Some(Patch::Clear) => section.clear(),
                Some(Patch::Merge(values)) => merge(section, values, now),
            }
        }
        let mut text = String::new();
        next.write_state(false, &mut text);
        if text.len() > limits.bytes { Err(Rejection::TooLarge) } else { Ok(next) }
    }

    /// Returns the desired state that is not reported.
    pub(crate) fn delta(&self) -> StateSection {
        difference(&self.desired, &self.reported)
    }

    /// As it is stored: `{"state":{…},"metadata":{…}}`.
    pub fn encode(&self) -> String {
        let mut out = String::from("{\"state\":");
        self.write_state(false, &mut out);
        out.push_str(",\"metadata\":");
        self.write_metadata(&mut out);
        out.push('}');
        out
    }

    /// Decodes text that [`Self::encode`] has written; `None` if it is something else.
    pub fn decode(text: &[u8]) -> Option<Self> {
        // Covers any limit that was configured when the state was written.
        const DEPTH: usize = 256;
        let text = std::str::from_utf8(text).ok()?;
        let Json::Object(mut document) = Json::parse(text, DEPTH).ok()? else { return None };
        let (Json::Object(mut state), Json::Object(mut metadata)) =
            (document.remove("state")?, document.remove("metadata")?)
        else {
            return None;
        };
        let mut section = |name: &str| match (state.remove(name), metadata.remove(name)) {
            (None, None) => Some(StateSection::new()),
            (Some(Json::Object(values)), Some(Json::Object(times))) => stamped(values, times),
            _ => None,
        };
        Some(Self { desired: section("desired")?, reported: section("reported")? })
    }

    /// The desired section as JSON; `{}` if it is empty.
    pub fn desired(&self) -> String {
        values_text(&self.desired)
    }

    /// The reported section as JSON; `{}` if it is empty.
    pub fn reported(&self) -> String {
        values_text(&self.reported)
    }

    /// Returns the desired state that is not reported, as JSON; `None` if there is none.
    pub fn delta_text(&self) -> Option<String> {
        let delta = self.delta();
        (!delta.is_empty()).then(|| values_text(&delta))
    }

    /// The time of each value, as JSON: `{"desired":{"a":{"timestamp":1}}}`, in seconds.
    pub fn metadata(&self) -> String {
        let mut out = String::new();
        self.write_metadata(&mut out);
        out
    }

    /// Appends the sections that are not empty, and the delta if it is wanted and not empty.
    pub(crate) fn write_state(&self, with_delta: bool, out: &mut String) {
        let delta = if with_delta { self.delta() } else { StateSection::new() };
        let sections = [("desired", &self.desired), ("reported", &self.reported), ("delta", &delta)];
        write_sections(&sections, write_values, out);
    }

    pub(crate) fn write_metadata(&self, out: &mut String) {
        write_sections(&[("desired", &self.desired), ("reported", &self.reported)], write_times, out);
    }
}

fn values_text(section: &StateSection) -> String {
    let mut out = String::new();
    write_values(section, &mut out);
    out
}

fn write_sections(
    sections: &[(&str, &StateSection)],
    write: fn(&StateSection, &mut String),
    out: &mut String,
) {
    let present = sections.iter().filter(|(_, section)| !section.is_empty());
    write_all(out, ['{', '}'], present, |(name, section), out| {
        write_text(name, out);
        out.push(':');
        write(section, out);
    });
}

fn merge(section: &mut StateSection, values: &Object, now: u64) {
    for (key, value) in values {
        match (value, section.entry(key.clone())) {
            (Json::Null, Entry::Occupied(there)) => drop(there.remove()),
            (Json::Null, Entry::Vacant(_)) => {}
            (value, Entry::Vacant(place)) => drop(place.insert(node(value, now))),
            (value, Entry::Occupied(mut there)) => match (value, there.get_mut()) {
                (Json::Object(values), JsonNode::Object(section)) => merge(section, values, now),
                (value, there) => *there = node(value, now),
            },
        }
    }
}

/// A new value: keys of objects that are `null` are not there.
fn node(value: &Json, now: u64) -> JsonNode {
    match value {
        Json::Object(values) => {
            let mut section = StateSection::new();
            merge(&mut section, values, now);
            JsonNode::Object(section)
        }
        other => whole(other, now),
    }
}

/// A value as it is: what lies in an array is not merged with anything.
fn whole(value: &Json, now: u64) -> JsonNode {
    match value {
        Json::Array(items) => JsonNode::Array(items.iter().map(|item| whole(item, now)).collect()),
        Json::Object(values) => {
            JsonNode::Object(values.iter().map(|(key, value)| (key.clone(), whole(value, now))).collect())
        }
        leaf => JsonNode::Leaf(leaf.clone(), now),
    }
}

fn difference(desired: &StateSection, reported: &StateSection) -> StateSection {
    let mut delta = StateSection::new();
    for (key, wanted) in desired {
        let missing = match (wanted, reported.get(key)) {
            (wanted, None) => Some(wanted.clone()),
            (JsonNode::Object(wanted), Some(JsonNode::Object(there))) => {
                let below = difference(wanted, there);
                (!below.is_empty()).then_some(JsonNode::Object(below))
            }
            (wanted, Some(there)) => (wanted != there).then(|| wanted.clone()),
        };
        if let Some(missing) = missing {
            delta.insert(key.clone(), missing);
        }
    }
    delta
}

pub(crate) fn write_values(section: &StateSection, out: &mut String) {
    write_all(out, ['{', '}'], section, |(key, node), out| {
        write_text(key, out);
        out.push(':');
        write_value(node, out);
    });
}

fn write_value(node: &JsonNode, out: &mut String) {
    match node {
        JsonNode::Leaf(value, _) => value.write(out),
        JsonNode::Array(items) => write_all(out, ['[', ']'], items, write_value),
        JsonNode::Object(section) => write_values(section, out),
    }
}

pub(crate) fn write_times(section: &StateSection, out: &mut String) {
    write_all(out, ['{', '}'], section, |(key, node), out| {
        write_text(key, out);
        out.push(':');
        write_time(node, out);
    });
}

fn write_time(node: &JsonNode, out: &mut String) {
    match node {
        JsonNode::Leaf(_, time) => {
            out.push_str("{\"timestamp\":");
            out.push_str(&time.to_string());
            out.push('}');
        }
        JsonNode::Array(items) => write_all(out, ['[', ']'], items, write_time),
        JsonNode::Object(section) => write_times(section, out),
    }
}

/// A section of values and times, which must have the same shape.
fn stamped(values: Object, mut times: Object) -> Option<StateSection> {
    values
        .into_iter()
        .map(|(key, value)| {
            let time = times.remove(&key)?;
            Some((key, stamp(value, time)?))
        })
        .collect()
}

fn stamp(value: Json, time: Json) -> Option<JsonNode> {
    match (value, time) {
        (Json::Array(values), Json::Array(times)) if values.len() == times.len() => {
            let items = values.into_iter().zip(times).map(|(value, time)| stamp(value, time));
            Some(JsonNode::Array(items.collect::<Option<_>>()?))
        }
        (Json::Object(values), Json::Object(times)) => Some(JsonNode::Object(stamped(values, times)?)),
        (Json::Array(_) | Json::Object(_), _) => None,
        (leaf, Json::Object(times)) => match times.get("timestamp") {
            Some(Json::Number(time)) => Some(JsonNode::Leaf(leaf, time.parse().ok()?)),
            _ => None,
        },
        _ => None,
    }
}

/// Writes the parts that an accepted update repeats: its sections as they were sent, and the times of their values.
pub(crate) fn write_echo(update: &Update, now: u64, out: &mut String) {
    let sections = || {
        let both = [("desired", &update.desired), ("reported", &update.reported)];
        both.into_iter().filter_map(|(name, patch)| patch.as_ref().map(|patch| (name, patch)))
    };
    out.push_str("\"state\":");
    write_all(out, ['{', '}'], sections(), |(name, patch), out| {
        write_text(name, out);
        out.push(':');
        match patch {
            Patch::Clear => out.push_str("null"),
            Patch::Merge(values) => write_object(values, out),
        }
    });
    out.push_str(",\"metadata\":");
    let merged = sections().filter_map(|(name, patch)| match patch {
        Patch::Clear => None,
        Patch::Merge(values) => Some((name, values)),
    });
    write_all(out, ['{', '}'], merged, |(name, values), out| {
        write_text(name, out);
        out.push(':');
        let mut section = StateSection::new();
        merge(&mut section, values, now);
        write_times(&section, out);
    });
}
