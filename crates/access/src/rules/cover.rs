//! Check of a filter: whether every topic that it asks for is allowed.
//!
//! The tree of the rules is walked with all topics of the filter at once: where the filter has a wildcard, every text that
//! the rules name in that place is tried, and one that they do not name, which stands for all others. That is exact, since
//! rules see nothing else of a topic. It ends early where the first rule that still can decide is known.

use std::collections::BTreeSet;

use super::{
    pattern::Fit,
    tree::{NONE, ROOT, RuleMatcher, RuleTree, take_first},
};
use crate::Subject;

/// Nodes that are looked at for one filter. Rules that need more are not understood as covering it.
const MOST_STEPS: u32 = 20_000;
/// Placeholder for a text that no rule names, in explanations.
const OTHER: &str = "...";

/// Topics that are not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Uncovered {
    /// The rule that denies them; [`NONE`] if none names them.
    pub(super) rule: u32,
    /// One of them, with `...` for levels that may be anything.
    pub(super) example: String,
}

pub(super) struct Cover<'a, J> {
    pub(super) tree: &'a RuleTree,
    pub(super) subject: &'a Subject<'a>,
    pub(super) matcher: &'a J,
    steps: u32,
    path: Vec<String>,
}

enum Symbol<'a> {
    Text(&'a str),
    /// A text that no rule names.
    Other,
}

impl<'a, J: RuleMatcher> Cover<'a, J> {
    pub(super) fn new(tree: &'a RuleTree, subject: &'a Subject<'a>, matcher: &'a J) -> Self {
        Self { tree, subject, matcher, steps: 0, path: Vec::new() }
    }

    /// Checks whether all topics that the filter matches are allowed.
    ///
    /// # Errors
    /// Topics that are not allowed.
    pub(super) fn check(&mut self, filter: &str) -> Result<(), Uncovered> {
        let levels: Vec<&str> = filter.split('/').collect();
        let open = !filter.starts_with('$');
        self.walk(&[ROOT], NONE, &levels, open)
    }

    /// `nodes` are where the levels so far have led, `best` is the first rule that decides about all that begins with them.
    fn walk(&mut self, nodes: &[u32], mut best: u32, levels: &[&str], open: bool) -> Result<(), Uncovered> {
        let depth = self.path.len();
        if depth > 0 || open {
            for node in nodes {
                take_first(&self.tree.node(*node).hash, self.matcher, &mut best);
            }
        }
        let mut nodes = nodes.to_vec();
        nodes.retain(|node| self.tree.node(*node).first < best);
        self.steps += 1 + u32::try_from(nodes.len()).unwrap_or(NONE - 1);
        if self.steps > MOST_STEPS {
            return Err(self.uncovered(NONE, levels));
        }
        let denied = nodes.iter().any(|node| self.tree.node(*node).first_deny < best);
        if !denied && self.allows(best) {
            return Ok(());
        }
        if nodes.is_empty() {
            return Err(self.uncovered(best, levels));
        }
        match levels.split_first() {
            None => self.end(&nodes, best),
            Some((&"#", _)) => {
                if depth > 0 {
                    self.end(&nodes, best)?;
                }
                self.each(&nodes, best, levels, open)
            }
            Some((&"+", rest)) => self.each(&nodes, best, rest, open),
            Some((level, rest)) => self.step(&nodes, best, &Symbol::Text(level), rest, open),
        }
    }

    /// Topics that end here.
    fn end(&self, nodes: &[u32], mut best: u32) -> Result<(), Uncovered> {
        for node in nodes {
            take_first(&self.tree.node(*node).here, self.matcher, &mut best);
        }
        if self.allows(best) { Ok(()) } else { Err(self.uncovered(best, &[])) }
    }

    /// Every text in the place of a wildcard.
    fn each(&mut self, nodes: &[u32], best: u32, rest: &[&str], open: bool) -> Result<(), Uncovered> {
        let first = self.path.is_empty();
        let mut named = BTreeSet::new();
        for node in nodes {
            let node = self.tree.node(*node);
            named.extend(node.texts.iter().map(|(text, _)| text.to_string()));
            for (template, _) in &node.templates {
                named.extend(template.values(first, self.subject).0);
            }
        }
        self.step(nodes, best, &Symbol::Other, rest, open)?;
        for text in named.iter().filter(|text| !first || !text.starts_with('$')) {
            self.step(nodes, best, &Symbol::Text(text), rest, open)?;
        }
        Ok(())
    }

    fn step(
        &mut self,
        nodes: &[u32],
        mut best: u32,
        symbol: &Symbol<'_>,
        rest: &[&str],
        open: bool,
    ) -> Result<(), Uncovered> {
        let first = self.path.is_empty();
        let mut next = Vec::new();
        for node in nodes {
            let node = self.tree.node(*node);
            next.extend(node.plus.filter(|_| !first || open));
            if let Symbol::Text(text) = symbol {
                next.extend(node.text(text));
            }
            for (template, child) in &node.templates {
                match symbol {
                    Symbol::Text(text) => match template.fit(text, first, self.subject) {
                        Fit::Yes => next.push(*child),
                        Fit::No => {}
                        Fit::Unfit => self.tree.deny_below(*child, self.matcher, &mut best),
                    },
                    Symbol::Other if template.values(first, self.subject).1 => {
                        self.tree.deny_below(*child, self.matcher, &mut best);
                    }
                    Symbol::Other => {}
                }
            }
        }
        self.path.push(match symbol {
            Symbol::Text(text) => (*text).to_owned(),
            Symbol::Other => OTHER.to_owned(),
        });
        let covered = self.walk(&next, best, rest, open);
        self.path.pop();
        covered
    }

    fn allows(&self, rule: u32) -> bool {
        rule != NONE && !self.matcher.denies(rule)
    }

    fn uncovered(&self, rule: u32, levels: &[&str]) -> Uncovered {
        let rest = levels.iter().map(|level| if matches!(*level, "+" | "#") { OTHER } else { level });
        let example: Vec<&str> = self.path.iter().map(String::as_str).chain(rest).collect();
        Uncovered { rule, example: example.join("/") }
    }
}
