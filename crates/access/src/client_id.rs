//! The client id that a user must connect with.

use thiserror::Error;

/// The place for the user name.
const USERNAME: &str = "{username}";

/// Text with `{username}` in it, such as `dev-{username}`: another one for each user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientIdTemplate {
    before: Box<str>,
    behind: Box<str>,
}

/// A template without `{username}`, with two of them, or with another brace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("does not have {{username}} once, and no other braces")]
pub struct BadClientIdTemplate;

impl ClientIdTemplate {
    /// Reads a template.
    ///
    /// # Errors
    /// [`BadClientIdTemplate`].
    pub fn parse(text: &str) -> Result<Self, BadClientIdTemplate> {
        let (before, behind) = text.split_once(USERNAME).ok_or(BadClientIdTemplate)?;
        if [before, behind].iter().any(|part| part.contains(['{', '}'])) {
            return Err(BadClientIdTemplate);
        }
        Ok(Self { before: before.into(), behind: behind.into() })
    }

    /// Tells whether `client_id` is the one of this user. No client id is that of two users, whatever characters their names have.
    pub fn fits(&self, username: &str, client_id: &str) -> bool {
        let rest = client_id.strip_prefix(&*self.before);
        rest.and_then(|rest| rest.strip_suffix(&*self.behind)).is_some_and(|name| name == username)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The failure: a name of a user is taken for a part of the template, or for a pattern.
    #[test]
    fn each_user_has_one_client_id_whatever_the_name_is() {
        let template = |text| ClientIdTemplate::parse(text).expect("a template");
        for name in ["anna", "a+b", "#", "a/b", "*", "{username}", "%u", "lab-anna-x", ""] {
            for (text, own) in
                [("{username}", name.to_owned()), ("lab-{username}-x", format!("lab-{name}-x"))]
            {
                assert!(template(text).fits(name, &own), "{text} {name}");
                assert!(!template(text).fits(name, &format!("{own}1")), "{text} {name}");
                assert!(!template(text).fits(name, &format!("1{own}")), "{text} {name}");
                assert!(!template(text).fits("other", &own), "{text} {name}");
            }
        }
        assert!(!template("ab{username}ba").fits("x", "aba"));
    }

    #[test]
    fn a_template_names_the_user_once_and_nothing_else() {
        for text in
            ["", "fixed", "{username", "{user}", "{username}{username}", "{cn}{username}", "}{username}"]
        {
            assert_eq!(ClientIdTemplate::parse(text), Err(BadClientIdTemplate), "{text}");
        }
    }
}
