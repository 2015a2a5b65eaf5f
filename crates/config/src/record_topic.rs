//! The MQTT topic of what comes from Kafka, as text with places that a record fills in.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::template::{TemplatePart, parts};

/// A piece of a [`RecordTopic`].
#[derive(Debug, Clone, PartialEq, Eq)]
enum RecordTopicPiece {
    Text(String),
    /// `{topic}`: the topic in Kafka.
    Topic,
    /// `{1}`, `{2}`…: what is between the dots of that topic, counted from 1.
    Level(usize),
    /// `{key}`.
    Key,
    /// `{partition}`.
    Partition,
    /// `{header:NAME}`.
    Header(String),
}

/// Text like `plant/{key}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordTopic(Vec<RecordTopicPiece>);

/// Fields of a record, for the places of the text.
pub trait RecordFields {
    /// Its topic in Kafka.
    fn topic(&self) -> &str;
    /// The number of its partition.
    fn partition(&self) -> i32;
    /// Its key; `None` if it has none that is text.
    fn key(&self) -> Option<&str>;
    /// The first header of this name; `None` if there is none that is text.
    fn header(&self, name: &str) -> Option<&str>;
}

impl RecordTopic {
    /// The topic of a record; `None` if the record lacks a value that the topic needs.
    pub fn fill(&self, record: &impl RecordFields) -> Option<String> {
        let mut topic = String::new();
        for piece in &self.0 {
            match piece {
                RecordTopicPiece::Text(text) => topic.push_str(text),
                RecordTopicPiece::Topic => topic.push_str(record.topic()),
                RecordTopicPiece::Level(number) => topic.push_str(record.topic().split('.').nth(number - 1)?),
                RecordTopicPiece::Key => topic.push_str(record.key()?),
                RecordTopicPiece::Partition => topic.push_str(&record.partition().to_string()),
                RecordTopicPiece::Header(name) => topic.push_str(record.header(name)?),
            }
        }
        Some(topic)
    }

    /// Returns whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for RecordTopic {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let piece = |part| {
            Ok(match part {
                TemplatePart::Text(text) => RecordTopicPiece::Text(text.to_owned()),
                TemplatePart::Place("topic") => RecordTopicPiece::Topic,
                TemplatePart::Place("key") => RecordTopicPiece::Key,
                TemplatePart::Place("partition") => RecordTopicPiece::Partition,
                TemplatePart::Place(name) => match (name.strip_prefix("header:"), name.parse()) {
                    (Some(header), _) if !header.is_empty() => RecordTopicPiece::Header(header.to_owned()),
                    (None, Ok(number @ 1..=128)) => RecordTopicPiece::Level(number),
                    _ => {
                        let known = "use {topic}, {key}, {partition}, {header:NAME}, or {1} and so on for what is \
                                     between the dots of the topic";
                        return Err(format!("has {{{name}}}, which nothing fills in; {known}"));
                    }
                },
            })
        };
        parts(text, "plant/{key}")?.into_iter().map(piece).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for RecordTopic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|piece| match piece {
            RecordTopicPiece::Text(text) => f.write_str(text),
            RecordTopicPiece::Topic => f.write_str("{topic}"),
            RecordTopicPiece::Level(number) => write!(f, "{{{number}}}"),
            RecordTopicPiece::Key => f.write_str("{key}"),
            RecordTopicPiece::Partition => f.write_str("{partition}"),
            RecordTopicPiece::Header(name) => write!(f, "{{header:{name}}}"),
        })
    }
}

impl Serialize for RecordTopic {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RecordTopic {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Plain(Option<&'static str>);

    impl RecordFields for Plain {
        fn topic(&self) -> &str {
            "plant.north"
        }

        fn partition(&self) -> i32 {
            2
        }

        fn key(&self) -> Option<&str> {
            self.0
        }

        fn header(&self, name: &str) -> Option<&str> {
            (name == "site").then_some("x")
        }
    }

    #[test]
    fn a_topic_is_of_what_the_record_has_and_of_nothing_less() {
        for (text, filled) in [
            ("fixed", Some("fixed")),
            ("k/{topic}", Some("k/plant.north")),
            ("{1}/{2}/{partition}", Some("plant/north/2")),
            ("{header:site}/{key}", Some("x/d1")),
            ("{3}", None),
            ("{header:other}", None),
        ] {
            let topic: RecordTopic = text.parse().expect(text);
            assert_eq!(topic.to_string(), text);
            assert_eq!(topic.fill(&Plain(Some("d1"))).as_deref(), filled, "{text}");
        }
        let topic: RecordTopic = "{key}".parse().expect("a topic");
        assert_eq!(topic.fill(&Plain(None)), None);
        for text in ["{", "{client_id}", "{0}", "{header:}", "x{key"] {
            assert!(text.parse::<RecordTopic>().is_err(), "{text}");
        }
    }
}
