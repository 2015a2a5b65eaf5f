//! [Reserved topics](crate::ReservedTopics) as operators write them: what comes after the client id.

use crate::is_one_level;

/// Levels of a topic, each of them text or a place that is filled in, as in `{id}/reply/{status}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Levels(Vec<Level>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Level {
    Text(Box<str>),
    /// The number of the place.
    Place(usize),
}

impl Levels {
    /// Reads levels in which each of `places` is once.
    ///
    /// # Errors
    /// What is wrong with `text`, as the end of a sentence about it.
    pub fn parse(text: &str, places: &[&str]) -> Result<Self, String> {
        let levels = text.split('/').map(|level| {
            let name = level.strip_prefix('{').and_then(|level| level.strip_suffix('}'));
            match name.map(|name| places.iter().position(|place| *place == name)) {
                Some(Some(place)) => Ok(Level::Place(place)),
                Some(None) => Err(format!("has {level}, which nothing fills in")),
                None if level.contains(['{', '}']) => Err(format!("has {level}: a place is a whole level")),
                None if is_one_level(level) => Ok(Level::Text(level.into())),
                None => Err("has a level that is empty or a wildcard".to_owned()),
            }
        });
        let levels = Self(levels.collect::<Result<_, _>>()?);
        for (number, place) in places.iter().enumerate() {
            let times = levels.0.iter().filter(|level| **level == Level::Place(number)).count();
            if times != 1 {
                return Err(format!("has {{{place}}} {times} times, not once"));
            }
        }
        Ok(levels)
    }

    /// Returns whether this place is the last level.
    pub fn ends_with(&self, place: usize) -> bool {
        self.0.last() == Some(&Level::Place(place))
    }

    /// All but the last level.
    pub fn without_last(&self) -> Self {
        Self(self.0.split_last().map_or_else(Vec::new, |(_, before)| before.to_vec()))
    }

    /// Appends them to a topic, with a value for each place.
    pub fn write(&self, values: &[&str], topic: &mut String) {
        for (number, level) in self.0.iter().enumerate() {
            if number > 0 {
                topic.push('/');
            }
            topic.push_str(match level {
                Level::Text(text) => text,
                Level::Place(place) => values.get(*place).copied().unwrap_or_default(),
            });
        }
    }

    /// Reads the texts in the places of a topic; `None` if the topic has other levels. A place that these levels do not
    /// have is empty.
    pub fn read<'a, const PLACES: usize>(&self, topic: &'a str) -> Option<[&'a str; PLACES]> {
        let mut found = [""; PLACES];
        let mut rest = topic.split('/');
        for level in &self.0 {
            let there = rest.next()?;
            match level {
                Level::Text(text) if **text == *there => {}
                Level::Place(place) if !there.is_empty() => *found.get_mut(*place)? = there,
                _ => return None,
            }
        }
        rest.next().is_none().then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: [&str; 2] = ["id", "status"];

    #[test]
    fn levels_are_written_and_read_back() {
        for (text, topic) in [
            ("{id}/reply/{status}", "7/reply/200"),
            ("{status}/{id}", "200/7"),
            ("answers/of/{id}/{status}", "answers/of/7/200"),
        ] {
            let levels = Levels::parse(text, &PLACES).expect(text);
            let mut written = "cmd/d/".to_owned();
            levels.write(&["7", "200"], &mut written);
            assert_eq!(written, format!("cmd/d/{topic}"));
            assert_eq!(levels.read(topic), Some(["7", "200"]), "{text}");
            for other in ["", "7", &format!("{topic}/"), &format!("{topic}/x"), &format!("/{topic}")] {
                assert_eq!(levels.read::<2>(other), None, "{text}: {other}");
            }
        }
        let levels = Levels::parse("{id}/reply/{status}", &PLACES).unwrap();
        assert_eq!((levels.read::<2>("7/answer/200"), levels.read::<2>("7/reply/")), (None, None));
        assert_eq!((levels.ends_with(1), levels.ends_with(0)), (true, false));
        assert_eq!(levels.without_last().read("7/reply"), Some(["7", ""]));
    }

    #[test]
    fn what_is_no_topic_is_refused_with_what_is_wrong() {
        for (text, wrong) in [
            ("{id}", "{status} 0 times"),
            ("{id}/{status}/{id}", "{id} 2 times"),
            ("{id}/{status}/{name}", "{name}, which nothing fills in"),
            ("{id}/s{status}", "a place is a whole level"),
            ("{id}/{status", "a place is a whole level"),
            ("/{id}/{status}", "empty or a wildcard"),
            ("{id}//{status}", "empty or a wildcard"),
            ("{id}/+/{status}", "empty or a wildcard"),
            ("#/{id}/{status}", "empty or a wildcard"),
            ("", "empty or a wildcard"),
        ] {
            let problem = Levels::parse(text, &PLACES).unwrap_err();
            assert!(problem.contains(wrong), "{text}: {problem}");
        }
    }
}
