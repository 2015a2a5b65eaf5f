//! The topics of commands and of their replies, all of which begin with `{prefix}{client_id}/`.

use gateway_core::Levels;

use super::Spec;

/// Levels in which two places are the id, and the name of a command or the status of a reply.
const ID: usize = 0;
const STATUS: usize = 1;

/// Patterns by which topics are made and read.
#[derive(Debug, Clone)]
pub struct CommandTopics {
    prefix: String,
    request: Levels,
    reply: Levels,
    /// Levels of a reply's topic without the status, where the correlation data identify the command.
    response: Levels,
}

/// A reply's topic after the client id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReplyAddress<'a> {
    pub(super) id: &'a str,
    /// The last level, if it is there.
    pub(super) status: Option<u32>,
}

/// A number as devices write it: digits, nothing else.
pub(super) fn number(text: &str) -> Option<u32> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

impl CommandTopics {
    /// With what all topics begin with, the last `/` included, and levels after the client id: of commands with the places id and
    /// name, of replies with id and, as the last level, status.
    pub fn new(prefix: String, request: Levels, reply: Levels) -> Self {
        debug_assert!(reply.ends_with(STATUS), "devices of MQTT 5 leave it out");
        let response = reply.without_last();
        Self { prefix, request, reply, response }
    }

    /// Returns the beginning of all topics.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    fn of(&self, device: &str, levels: &Levels, values: &[&str]) -> String {
        let mut topic = format!("{}{device}/", self.prefix);
        levels.write(values, &mut topic);
        topic
    }

    /// The topic of the command of this id.
    pub(super) fn request(&self, spec: &Spec, id: &str) -> String {
        self.of(&spec.device, &self.request, &[id, &spec.name])
    }

    /// The response topic of the command of this id.
    pub(super) fn response(&self, device: &str, id: &str) -> String {
        self.of(device, &self.response, &[id])
    }

    /// Reads a reply's topic after the client id.
    pub(super) fn read<'a>(&self, rest: &'a str) -> Option<ReplyAddress<'a>> {
        if let Some(found) = self.response.read::<2>(rest) {
            return Some(ReplyAddress { id: found[ID], status: None });
        }
        let found = self.reply.read::<2>(rest)?;
        Some(ReplyAddress { id: found[ID], status: Some(number(found[STATUS])?) })
    }

    /// Tells whether a command of this name would have the topic of a reply, for a device and for any reader of its topics.
    pub(super) fn is_of_replies(&self, name: &str) -> bool {
        let mut topic = String::new();
        self.request.write(&["id", name], &mut topic);
        self.read(&topic).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topics(request: &str, reply: &str) -> CommandTopics {
        let request = Levels::parse(request, &["id", "name"]).expect(request);
        CommandTopics::new("cmd/".to_owned(), request, Levels::parse(reply, &["id", "status"]).expect(reply))
    }

    #[test]
    fn no_name_makes_a_command_look_like_a_reply() {
        for (request, reply, names) in [
            ("{id}/{name}", "{id}/reply/{status}", &["reply"][..]),
            ("{id}/{name}", "{id}/{status}", &["200", "7"]),
            ("{name}/{id}", "answers/{id}/{status}", &["answers"]),
            ("do/{name}/{id}", "done/{id}/{status}", &[]),
        ] {
            let topics = topics(request, reply);
            for name in ["reply", "200", "7", "answers", "do", "done", "id", "reboot"] {
                assert_eq!(topics.is_of_replies(name), names.contains(&name), "{request} {reply} {name}");
            }
        }
    }

    #[test]
    fn replies_are_read_with_and_without_a_status() {
        let topics = topics("do/{name}/{id}", "done/{id}/{status}");
        assert_eq!(topics.response("d", "7"), "cmd/d/done/7");
        assert_eq!(topics.read("done/7"), Some(ReplyAddress { id: "7", status: None }));
        assert_eq!(topics.read("done/7/404"), Some(ReplyAddress { id: "7", status: Some(404) }));
        for other in ["done/7/ok", "done/7/", "done", "done//200", "do/7/200", "7/reply/200"] {
            assert_eq!(topics.read(other), None, "{other}");
        }
    }
}
