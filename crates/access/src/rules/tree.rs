//! All filters of the rules for one action as a tree of levels: looking at a topic costs as much as it has levels, and not
//! as many as there are rules.

use super::pattern::{Fit, LevelTemplate, Pattern, PatternLevel};
use crate::Subject;

/// No rule.
pub(super) const NONE: u32 = u32::MAX;
/// The node of topics without a level, where every look begins.
pub(super) const ROOT: u32 = 0;

#[derive(Debug)]
pub(super) struct RuleNode {
    /// In order, for a binary search.
    pub(super) texts: Vec<(Box<str>, u32)>,
    pub(super) templates: Vec<(LevelTemplate, u32)>,
    pub(super) plus: Option<u32>,
    /// Rules with a filter that ends here, in order.
    pub(super) here: Vec<u32>,
    /// Rules with a filter that ends with `#` below here, in order.
    pub(super) hash: Vec<u32>,
    /// The first rule here and below.
    pub(super) first: u32,
    /// The first rule here and below that denies.
    pub(super) first_deny: u32,
}

impl RuleNode {
    fn new() -> Self {
        let (texts, templates, here, hash) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { texts, templates, plus: None, here, hash, first: NONE, first_deny: NONE }
    }

    pub(super) fn text(&self, level: &str) -> Option<u32> {
        let at = self.texts.binary_search_by(|(text, _)| (**text).cmp(level)).ok()?;
        Some(self.texts[at].1)
    }
}

/// Questions of the tree about a rule.
pub(super) trait RuleMatcher {
    /// Returns whether the rule concerns the subject.
    fn concerns(&self, rule: u32) -> bool;
    /// Returns whether the rule denies.
    fn denies(&self, rule: u32) -> bool;
}

#[derive(Debug)]
pub(super) struct RuleTree {
    nodes: Vec<RuleNode>,
}

impl Default for RuleTree {
    fn default() -> Self {
        Self { nodes: vec![RuleNode::new()] }
    }
}

impl RuleTree {
    pub(super) fn node(&self, number: u32) -> &RuleNode {
        &self.nodes[number as usize]
    }

    /// Adds a filter of a rule; rules come in order.
    pub(super) fn add(&mut self, pattern: &Pattern, rule: u32, deny: bool) {
        let mut at = ROOT;
        self.note(at, rule, deny);
        for level in &pattern.levels {
            if *level == PatternLevel::Hash {
                push(&mut self.nodes[at as usize].hash, rule);
                return;
            }
            at = self.child(at, level);
            self.note(at, rule, deny);
        }
        push(&mut self.nodes[at as usize].here, rule);
    }

    fn note(&mut self, at: u32, rule: u32, deny: bool) {
        let node = &mut self.nodes[at as usize];
        node.first = node.first.min(rule);
        if deny {
            node.first_deny = node.first_deny.min(rule);
        }
    }

    fn child(&mut self, at: u32, level: &PatternLevel) -> u32 {
        // A file has fewer levels than that.
        let next = u32::try_from(self.nodes.len()).unwrap_or(NONE);
        let node = &mut self.nodes[at as usize];
        let known = match level {
            PatternLevel::Text(text) => match node.texts.binary_search_by(|(known, _)| known.cmp(text)) {
                Ok(found) => Some(node.texts[found].1),
                Err(place) => {
                    node.texts.insert(place, (text.clone(), next));
                    None
                }
            },
            PatternLevel::Template(template) => {
                match node.templates.iter().find(|(known, _)| known == template) {
                    Some((_, child)) => Some(*child),
                    None => {
                        node.templates.push((template.clone(), next));
                        None
                    }
                }
            }
            PatternLevel::Plus | PatternLevel::Hash => {
                let known = node.plus;
                node.plus = known.or(Some(next));
                known
            }
        };
        known.unwrap_or_else(|| {
            self.nodes.push(RuleNode::new());
            next
        })
    }

    /// The first rule that concerns the subject and has a filter that matches the topic.
    pub(super) fn first(&self, topic: &str, subject: &Subject<'_>, matcher: &impl RuleMatcher) -> u32 {
        let mut best = NONE;
        self.look(ROOT, Some(topic), 0, subject, matcher, &mut best);
        best
    }

    fn look(
        &self,
        at: u32,
        rest: Option<&str>,
        depth: usize,
        subject: &Subject<'_>,
        matcher: &impl RuleMatcher,
        best: &mut u32,
    ) {
        let node = self.node(at);
        if node.first >= *best {
            return;
        }
        // No wildcard at the beginning covers topics with `$` there [MQTT-4.7.2-1].
        let open = depth > 0 || !rest.is_some_and(|topic| topic.starts_with('$'));
        if open {
            take_first(&node.hash, matcher, best);
        }
        let Some(rest) = rest else {
            take_first(&node.here, matcher, best);
            return;
        };
        let (level, rest) = match memchr(rest) {
            Some(at) => (&rest[..at], Some(&rest[at + 1..])),
            None => (rest, None),
        };
        if let Some(child) = node.text(level) {
            self.look(child, rest, depth + 1, subject, matcher, best);
        }
        for (template, child) in &node.templates {
            match template.fit(level, depth == 0, subject) {
                Fit::Yes => self.look(*child, rest, depth + 1, subject, matcher, best),
                Fit::No => {}
                Fit::Unfit => self.deny_below(*child, matcher, best),
            }
        }
        if let Some(child) = node.plus.filter(|_| open) {
            self.look(child, rest, depth + 1, subject, matcher, best);
        }
    }

    /// A value in the place of a placeholder is no text of a level: what the rules there would allow is not, and what they
    /// would deny is denied, whatever comes after it.
    pub(super) fn deny_below(&self, at: u32, matcher: &impl RuleMatcher, best: &mut u32) {
        let node = self.node(at);
        if node.first_deny >= *best {
            return;
        }
        for rule in node.here.iter().chain(&node.hash) {
            if *rule < *best && matcher.denies(*rule) && matcher.concerns(*rule) {
                *best = *rule;
            }
        }
        let texts = node.texts.iter().map(|(_, child)| *child);
        let templates = node.templates.iter().map(|(_, child)| *child);
        for child in texts.chain(templates).chain(node.plus) {
            self.deny_below(child, matcher, best);
        }
    }
}

/// Takes the first rule of a list that concerns the subject, if it is before the best so far.
pub(super) fn take_first(rules: &[u32], matcher: &impl RuleMatcher, best: &mut u32) {
    for rule in rules {
        if *rule >= *best {
            return;
        }
        if matcher.concerns(*rule) {
            *best = *rule;
            return;
        }
    }
}

fn push(rules: &mut Vec<u32>, rule: u32) {
    if rules.last() != Some(&rule) {
        rules.push(rule);
    }
}

/// Levels are short: comparing bytes finds their ends faster than searching does.
fn memchr(text: &str) -> Option<usize> {
    text.as_bytes().iter().position(|byte| *byte == b'/')
}
