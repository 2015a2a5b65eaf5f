//! A topic filter of a rule, whose levels may have placeholders for the client's names.

use std::{borrow::Cow, fmt};

use gateway_core::TopicFilter;

use crate::Subject;

/// Levels that a filter of a rule may have: looking at a topic goes as deep as the filters do.
const MOST_LEVELS: usize = 64;
/// Values of one claim that are looked at, so that a token cannot make a decision costly. With more of them, what a rule would
/// deny for one is denied, as if it were unfit: a token cannot hide a value behind others.
const MOST_VALUES: usize = 32;

/// A filter of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pattern {
    pub(super) levels: Box<[PatternLevel]>,
}

/// One level of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PatternLevel {
    Text(Box<str>),
    Template(LevelTemplate),
    /// `+`
    Plus,
    /// `#`, always the last.
    Hash,
}

/// A level with placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LevelTemplate(Box<[PatternPart]>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PatternPart {
    Text(Box<str>),
    ClientId,
    Username,
    CommonName,
    Claim(Box<str>),
}

/// Answer whether a template stands for a level of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fit {
    No,
    Yes,
    /// A value has `+`, `#`, `/` or a control character in it: it is no text of one level.
    Unfit,
}

impl Pattern {
    /// Reads a filter of a rule.
    ///
    /// # Errors
    /// The mistake in it.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text == "$share" || text.starts_with("$share/") {
            return Err(
                "a shared subscription is decided by the filter inside: leave out '$share/group/'".into()
            );
        }
        let levels: Vec<&str> = text.split('/').collect();
        if levels.len() > MOST_LEVELS {
            return Err(format!("a filter has at most {MOST_LEVELS} levels"));
        }
        let parsed: Result<Box<[PatternLevel]>, String> =
            levels.iter().map(|level| PatternLevel::parse(level)).collect();
        let parsed = parsed?;
        // The text is a valid filter if it is one with some text in the place of each placeholder.
        let plain: Vec<Cow<'_, str>> = parsed.iter().map(PatternLevel::sample).collect();
        TopicFilter::check(&plain.join("/")).map_err(|error| error.to_string())?;
        Ok(Self { levels: parsed })
    }

    /// Returns whether the pattern matches the topic; the slow way, level by level. `deny` says how an unfit value counts.
    pub(super) fn matches(&self, topic: &str, subject: &Subject<'_>, deny: bool) -> bool {
        let levels: Vec<&str> = topic.split('/').collect();
        let mut rest = levels.as_slice();
        let dollar = topic.starts_with('$');
        for (depth, level) in self.levels.iter().enumerate() {
            if *level == PatternLevel::Hash {
                return depth > 0 || !dollar;
            }
            let Some((first, after)) = rest.split_first() else { return false };
            let fits = match level {
                PatternLevel::Text(text) => **text == **first,
                PatternLevel::Plus => depth > 0 || !dollar,
                PatternLevel::Template(template) => match template.fit(first, depth == 0, subject) {
                    Fit::Yes => true,
                    Fit::No => false,
                    Fit::Unfit if deny => return true,
                    Fit::Unfit => false,
                },
                PatternLevel::Hash => false,
            };
            if !fits {
                return false;
            }
            rest = after;
        }
        rest.is_empty()
    }

    /// Returns whether some topic is matched by both this pattern and the levels of another filter; never false if
    /// there is one.
    pub(super) fn overlaps(&self, asked: &[&str], subject: &Subject<'_>) -> bool {
        let dollar = asked.first().is_some_and(|level| level.starts_with('$'));
        let mut depth = 0;
        loop {
            let ours = self.levels.get(depth);
            let theirs = asked.get(depth);
            match (ours, theirs) {
                (None, None) => return true,
                (Some(PatternLevel::Hash), _) => return depth > 0 || !dollar,
                (_, Some(&"#")) => {
                    let rest = self.levels.iter().enumerate().skip(depth);
                    let possible = |(at, level): (usize, &PatternLevel)| match level {
                        PatternLevel::Template(template) => !template.values(at == 0, subject).0.is_empty(),
                        _ => true,
                    };
                    return (depth > 0 || !self.starts_with_dollar()) && rest.into_iter().all(possible);
                }
                (None, _) | (_, None) => return false,
                (Some(PatternLevel::Plus), Some(_)) if depth == 0 && dollar => return false,
                (Some(PatternLevel::Plus), Some(_)) => {}
                (Some(PatternLevel::Text(text)), Some(&"+")) => {
                    if depth == 0 && text.starts_with('$') {
                        return false;
                    }
                }
                (Some(PatternLevel::Text(text)), Some(theirs)) => {
                    if **text != **theirs {
                        return false;
                    }
                }
                (Some(PatternLevel::Template(template)), Some(theirs)) => {
                    let fits = match *theirs {
                        "+" => !template.values(depth == 0, subject).0.is_empty(),
                        text => template.fit(text, depth == 0, subject) == Fit::Yes,
                    };
                    if !fits {
                        return false;
                    }
                }
            }
            depth += 1;
        }
    }

    /// Why placeholders of it stand for nothing, if some do: the first of them.
    pub(super) fn empty_placeholder(&self, subject: &Subject<'_>) -> Option<String> {
        let templates = self.levels.iter().filter_map(|level| match level {
            PatternLevel::Template(template) => Some(template),
            _ => None,
        });
        let parts = templates.flat_map(|template| &*template.0);
        parts.filter(|part| !matches!(part, PatternPart::Text(_))).find_map(|part| {
            let values: Vec<&str> = part.values(subject).collect();
            if values.is_empty() {
                return Some(format!("nothing stands for {part}"));
            }
            let unfit = values.into_iter().all(is_unfit);
            unfit.then(|| format!("{part} has '+', '#' or '/' in it"))
        })
    }

    fn starts_with_dollar(&self) -> bool {
        matches!(self.levels.first(), Some(PatternLevel::Text(text)) if text.starts_with('$'))
    }
}

/// As it is written in the file, give or take braces.
impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, level) in self.levels.iter().enumerate() {
            if number > 0 {
                f.write_str("/")?;
            }
            match level {
                PatternLevel::Text(text) => f.write_str(&text.replace('%', "%%"))?,
                PatternLevel::Template(LevelTemplate(parts)) => {
                    parts.iter().try_for_each(|part| part.fmt(f))?
                }
                PatternLevel::Plus => f.write_str("+")?,
                PatternLevel::Hash => f.write_str("#")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for PatternPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(&text.replace('%', "%%")),
            Self::ClientId => f.write_str("%{c}"),
            Self::Username => f.write_str("%{u}"),
            Self::CommonName => f.write_str("%{cn}"),
            Self::Claim(name) => write!(f, "%{{claim.{name}}}"),
        }
    }
}

impl PatternLevel {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "+" => return Ok(Self::Plus),
            "#" => return Ok(Self::Hash),
            _ => {}
        }
        let parts = PatternPart::parse_all(text)?;
        let claims = parts.iter().filter(|part| matches!(part, PatternPart::Claim(_))).count();
        if claims > 1 {
            return Err("a level has at most one claim".into());
        }
        match parts.as_slice() {
            [] => Ok(Self::Text("".into())),
            [PatternPart::Text(text)] => Ok(Self::Text(text.clone())),
            _ => Ok(Self::Template(LevelTemplate(parts.into()))),
        }
    }

    /// A text that it may stand for.
    fn sample(&self) -> Cow<'_, str> {
        match self {
            Self::Text(text) => Cow::Borrowed(text),
            Self::Plus => Cow::Borrowed("+"),
            Self::Hash => Cow::Borrowed("#"),
            Self::Template(LevelTemplate(parts)) => {
                let text = |part: &PatternPart| {
                    if let PatternPart::Text(text) = part { text.to_string() } else { "x".into() }
                };
                Cow::Owned(parts.iter().map(text).collect())
            }
        }
    }
}

impl PatternPart {
    /// Splits a level into text and placeholders: `%c`, `%u`, `%cn`, `%{claim.NAME}`; `%%` is a per cent sign.
    pub(super) fn parse_all(text: &str) -> Result<Vec<Self>, String> {
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(at) = rest.find('%') {
            plain.push_str(&rest[..at]);
            rest = &rest[at..];
            if let Some(after) = rest.strip_prefix("%%") {
                plain.push('%');
                rest = after;
                continue;
            }
            let (part, after) = Self::parse(rest)?;
            if !plain.is_empty() {
                parts.push(Self::Text(std::mem::take(&mut plain).into()));
            }
            parts.push(part);
            rest = after;
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            parts.push(Self::Text(plain.into()));
        }
        Ok(parts)
    }

    fn parse(text: &str) -> Result<(Self, &str), String> {
        for (name, part) in [
            ("%{c}", Self::ClientId),
            ("%{u}", Self::Username),
            ("%{cn}", Self::CommonName),
            ("%cn", Self::CommonName),
            ("%c", Self::ClientId),
            ("%u", Self::Username),
        ] {
            if let Some(rest) = text.strip_prefix(name) {
                return Ok((part, rest));
            }
        }
        let claim = text.strip_prefix("%{claim.").and_then(|rest| rest.split_once('}'));
        match claim {
            Some((name, rest)) if !name.is_empty() => Ok((Self::Claim(name.into()), rest)),
            _ => Err("a placeholder is %c, %u, %cn or %{claim.NAME}, and a per cent sign is %%".into()),
        }
    }

    /// Returns whether there are values that are not looked at.
    fn is_cut(&self, subject: &Subject<'_>) -> bool {
        match self {
            Self::Claim(name) => {
                subject.principal.claims.get(name).is_some_and(|all| all.len() > MOST_VALUES)
            }
            _ => false,
        }
    }

    /// Returns the values of the placeholder; several values of a claim are alternatives.
    pub(super) fn values<'a>(&self, subject: &Subject<'a>) -> PatternValues<'a> {
        let principal = subject.principal;
        match self {
            Self::Text(_) => PatternValues::One(None),
            Self::ClientId => PatternValues::One(Some(subject.client_id)),
            Self::Username => PatternValues::One(principal.username.as_deref()),
            Self::CommonName => PatternValues::One(principal.common_name.as_deref()),
            Self::Claim(name) => {
                let all = principal.claims.get(name).map_or(&[][..], |values| values);
                PatternValues::Several(all[..all.len().min(MOST_VALUES)].iter())
            }
        }
    }
}

pub(super) enum PatternValues<'a> {
    One(Option<&'a str>),
    Several(std::slice::Iter<'a, Box<str>>),
}

impl<'a> Iterator for PatternValues<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        match self {
            Self::One(value) => value.take(),
            Self::Several(values) => values.next().map(|value| &**value),
        }
        // An empty value is as good as none: it would stand for a level that nobody meant.
        .filter(|value| !value.is_empty())
    }
}

/// Returns whether a value is not the text of one level.
fn is_unfit(value: &str) -> bool {
    value.bytes().any(|byte| matches!(byte, b'+' | b'#' | b'/' | 0..=0x1F))
}

impl LevelTemplate {
    /// Returns whether this template stands for a level. A placeholder at the very beginning stands for nothing that
    /// begins with `$`, as no wildcard does.
    pub(super) fn fit(&self, level: &str, first: bool, subject: &Subject<'_>) -> Fit {
        if first && level.starts_with('$') && !matches!(self.0.first(), Some(PatternPart::Text(_))) {
            return Fit::No;
        }
        fit(&self.0, level, subject)
    }

    /// Every text that it stands for, and whether there is a value that is unfit.
    pub(super) fn values(&self, first: bool, subject: &Subject<'_>) -> (Vec<String>, bool) {
        let mut texts = vec![String::new()];
        let mut unfit = false;
        for part in &self.0 {
            if let PatternPart::Text(text) = part {
                texts.iter_mut().for_each(|so_far| so_far.push_str(text));
                continue;
            }
            let mut longer = Vec::new();
            unfit |= part.is_cut(subject);
            for value in part.values(subject) {
                if is_unfit(value) {
                    unfit = true;
                    continue;
                }
                longer.extend(texts.iter().map(|so_far| format!("{so_far}{value}")));
            }
            texts = longer;
        }
        if first && !matches!(self.0.first(), Some(PatternPart::Text(_))) {
            texts.retain(|text| !text.starts_with('$'));
        }
        (texts, unfit)
    }
}

fn fit(parts: &[PatternPart], rest: &str, subject: &Subject<'_>) -> Fit {
    let Some((part, parts)) = parts.split_first() else {
        return if rest.is_empty() { Fit::Yes } else { Fit::No };
    };
    if let PatternPart::Text(text) = part {
        return rest.strip_prefix(&**text).map_or(Fit::No, |rest| fit(parts, rest, subject));
    }
    let mut result = if part.is_cut(subject) { Fit::Unfit } else { Fit::No };
    for value in part.values(subject) {
        if is_unfit(value) {
            result = Fit::Unfit;
            continue;
        }
        match rest.strip_prefix(value).map_or(Fit::No, |rest| fit(parts, rest, subject)) {
            Fit::Yes => return Fit::Yes,
            Fit::Unfit => result = Fit::Unfit,
            Fit::No => {}
        }
    }
    result
}
