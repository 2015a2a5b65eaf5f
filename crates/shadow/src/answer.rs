//! Answers about a shadow: documents as text.

use crate::{
    Rejection, State, Update,
    json::write_text,
    state::{write_echo, write_times, write_values},
};

/// Parts that every answer has besides its content.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnswerContext<'a> {
    /// Time of the answer, in seconds.
    pub now: u64,
    /// The token of the request.
    pub client_token: Option<&'a str>,
}

/// A state and the version that it has.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// The state.
    pub state: &'a State,
    /// Its version.
    pub version: u64,
}

impl AnswerContext<'_> {
    /// An update was made: what it asked for, and the new version.
    pub fn update_accepted(&self, update: &Update, version: u64) -> String {
        let mut out = String::from("{");
        write_echo(update, self.now, &mut out);
        self.end(version, &mut out)
    }

    /// Returns the delta: the desired state that is not reported; `None` if there is none.
    pub fn delta(&self, shadow: Snapshot<'_>) -> Option<String> {
        let delta = shadow.state.delta();
        if delta.is_empty() {
            return None;
        }
        let mut out = String::from("{\"state\":");
        write_values(&delta, &mut out);
        out.push_str(",\"metadata\":");
        write_times(&delta, &mut out);
        Some(self.end(shadow.version, &mut out))
    }

    /// The whole before and after an update.
    pub fn documents(&self, previous: Option<Snapshot<'_>>, current: Snapshot<'_>) -> String {
        let mut out = String::from("{");
        if let Some(previous) = previous {
            out.push_str("\"previous\":");
            write_snapshot(previous, &mut out);
            out.push(',');
        }
        out.push_str("\"current\":");
        write_snapshot(current, &mut out);
        self.close(&mut out)
    }

    /// The whole, with the delta.
    pub fn get_accepted(&self, shadow: Snapshot<'_>) -> String {
        let mut out = String::from("{\"state\":");
        shadow.state.write_state(true, &mut out);
        out.push_str(",\"metadata\":");
        shadow.state.write_metadata(&mut out);
        self.end(shadow.version, &mut out)
    }

    /// The shadow was deleted; `version` is the last that it had.
    pub fn delete_accepted(&self, version: u64) -> String {
        let mut out = format!("{{\"version\":{version}");
        self.close(&mut out)
    }

    /// A request was not carried out.
    pub fn rejected(&self, rejection: &Rejection) -> String {
        let mut out = format!("{{\"code\":{},\"message\":", rejection.code());
        write_text(&rejection.to_string(), &mut out);
        self.close(&mut out)
    }

    fn end(&self, version: u64, out: &mut String) -> String {
        out.push_str(&format!(",\"version\":{version}"));
        self.close(out)
    }

    fn close(&self, out: &mut String) -> String {
        out.push_str(&format!(",\"timestamp\":{}", self.now));
        if let Some(token) = self.client_token {
            out.push_str(",\"clientToken\":");
            write_text(token, out);
        }
        out.push('}');
        std::mem::take(out)
    }
}

fn write_snapshot(Snapshot { state, version }: Snapshot<'_>, out: &mut String) {
    out.push_str("{\"state\":");
    state.write_state(false, out);
    out.push_str(",\"metadata\":");
    state.write_metadata(out);
    out.push_str(&format!(",\"version\":{version}}}"));
}
