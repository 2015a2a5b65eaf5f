//! Number of copies of a keyspace: `3`, or by datacenter `east:3,west:2`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Copies of every row, in all or by datacenter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Replication {
    /// So many in each datacenter.
    Each(u8),
    /// So many in each of these.
    Named(Vec<(String, u8)>),
}

impl Replication {
    /// As CQL has it, in single quotes and braces.
    pub fn to_cql(&self) -> String {
        let entry = |name: &str, copies: u8| format!(", '{name}': {copies}");
        let entries = match self {
            Self::Each(copies) => entry("replication_factor", *copies),
            Self::Named(list) => list.iter().map(|(name, copies)| entry(name, *copies)).collect(),
        };
        format!("{{'class': 'NetworkTopologyStrategy'{entries}}}")
    }
}

impl Default for Replication {
    fn default() -> Self {
        Self::Each(1)
    }
}

impl FromStr for Replication {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let copies = |text: &str| text.trim().parse().ok().filter(|copies| *copies > 0);
        if let Some(copies) = copies(text) {
            return Ok(Self::Each(copies));
        }
        let named = text.split(',').map(|part| {
            let (name, number) = part.split_once(':')?;
            let name = name.trim();
            let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            let named = !name.is_empty() && name.chars().all(good) && name != "class";
            named.then(|| Some((name.to_owned(), copies(number)?)))?
        });
        named.collect::<Option<_>>().map(Self::Named).ok_or_else(|| {
            "not a number of copies; write 3, or by datacenter east:3,west:2 (at most 255 each)".to_owned()
        })
    }
}

impl fmt::Display for Replication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Each(copies) => write!(f, "{copies}"),
            Self::Named(list) => {
                let list: Vec<_> = list.iter().map(|(name, copies)| format!("{name}:{copies}")).collect();
                f.write_str(&list.join(","))
            }
        }
    }
}

impl Serialize for Replication {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Replication {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum ReplicationForm {
            Number(u8),
            Text(String),
        }
        let text = match ReplicationForm::deserialize(deserializer) {
            Ok(ReplicationForm::Text(text)) => text,
            Ok(ReplicationForm::Number(number)) => number.to_string(),
            Err(_) => String::new(),
        };
        text.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_become_a_map_that_can_only_name_datacenters() {
        for (text, cql) in [
            ("3", "{'class': 'NetworkTopologyStrategy', 'replication_factor': 3}"),
            ("east:3, west-2:1", "{'class': 'NetworkTopologyStrategy', 'east': 3, 'west-2': 1}"),
        ] {
            assert_eq!(text.parse::<Replication>().unwrap().to_cql(), cql);
        }
        assert_eq!("a:1,b:2".parse::<Replication>().unwrap().to_string(), "a:1,b:2");
        for text in ["", "0", "256", "-1", "a", "a:", ":1", "a:0", "a:1,", "a':1", "class:1", "{'a': 1}"] {
            assert!(text.parse::<Replication>().is_err(), "{text}");
        }
    }
}
