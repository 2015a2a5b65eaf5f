//! Text with places that a message fills in.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A piece of a [`Template`].
#[derive(Debug, Clone, PartialEq, Eq)]
enum TemplatePiece {
    Text(String),
    /// `{client_id}`: empty for what backends publish.
    ClientId,
    /// `{topic}`.
    Topic,
    /// `{1}`, `{2}`…: a level of the topic, counted from 1; empty where there are fewer.
    Level(usize),
}

/// Text like `devices-{client_id}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template(Vec<TemplatePiece>);

impl Template {
    /// With what a message has. `clean` makes of each value what may stand in the text.
    pub fn fill(&self, client_id: &str, topic: &str, clean: impl Fn(&str) -> String) -> String {
        let level = |number: usize| topic.split('/').nth(number - 1).unwrap_or_default();
        let pieces = self.0.iter().map(|piece| match piece {
            TemplatePiece::Text(text) => text.clone(),
            TemplatePiece::ClientId => clean(client_id),
            TemplatePiece::Topic => clean(topic),
            TemplatePiece::Level(number) => clean(level(*number)),
        });
        pieces.collect()
    }

    /// Returns whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let piece = |part| {
            Ok(match part {
                TemplatePart::Text(text) => TemplatePiece::Text(text.to_owned()),
                TemplatePart::Place("client_id") => TemplatePiece::ClientId,
                TemplatePart::Place("topic") => TemplatePiece::Topic,
                TemplatePart::Place(number) => match number.parse() {
                    Ok(number @ 1..=128) => TemplatePiece::Level(number),
                    _ => {
                        let known = "use {client_id}, {topic}, or {1} and so on for a level of the topic";
                        return Err(format!("has {{{number}}}, which nothing fills in; {known}"));
                    }
                },
            })
        };
        parts(text, "devices-{client_id}")?.into_iter().map(piece).collect::<Result<_, _>>().map(Self)
    }
}

/// Text, or the name of a place.
pub(super) enum TemplatePart<'a> {
    Text(&'a str),
    Place(&'a str),
}

/// The parts of a text with places in braces.
///
/// # Errors
/// A brace that is not closed, with `example` of how to write it.
pub(super) fn parts<'a>(text: &'a str, example: &str) -> Result<Vec<TemplatePart<'a>>, String> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        if !before.is_empty() {
            parts.push(TemplatePart::Text(before));
        }
        let closed = after.split_once('}');
        let (name, behind) = closed.ok_or_else(|| format!("lacks a }}; write it like {example}"))?;
        parts.push(TemplatePart::Place(name));
        rest = behind;
    }
    if !rest.is_empty() {
        parts.push(TemplatePart::Text(rest));
    }
    Ok(parts)
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|piece| match piece {
            TemplatePiece::Text(text) => f.write_str(text),
            TemplatePiece::ClientId => f.write_str("{client_id}"),
            TemplatePiece::Topic => f.write_str("{topic}"),
            TemplatePiece::Level(number) => write!(f, "{{{number}}}"),
        })
    }
}

impl Serialize for Template {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Template {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_filled_in_and_reads_back_as_it_was() {
        for (text, filled) in [
            ("devices", "devices"),
            ("{client_id}", "d1"),
            ("all-{topic}", "all-a/b"),
            ("{1}.{2}.{3}!", "a.b.!"),
            ("", ""),
        ] {
            let template: Template = text.parse().expect(text);
            assert_eq!(template.to_string(), text);
            assert_eq!(template.fill("d1", "a/b", str::to_owned), filled);
        }
        for text in ["{", "{user}", "{0}", "{-1}", "x{client_id"] {
            assert!(text.parse::<Template>().is_err(), "{text}");
        }
    }
}
