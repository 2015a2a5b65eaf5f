//! The rules of all `acl_file`s: one file here, with conditions where listeners have their own.

use std::{collections::BTreeMap, fmt::Write as _, fs};

use access::rules::import_mosquitto;

use super::{draft::quoted, imported::Remark, listeners::MosquittoListener};

/// Rules for the listeners that open; `None` where none of them has an `acl_file`, so that everything is allowed.
pub(super) fn of_listeners(listeners: &[&MosquittoListener], told: &mut Vec<Remark>) -> Option<String> {
    let mut files: BTreeMap<Option<&str>, Vec<String>> = BTreeMap::new();
    for listener in listeners {
        files.entry(listener.guard.acl_file.as_deref()).or_default().push(listener.name());
    }
    files.keys().next_back().copied().flatten()?;
    let alone = files.len() == 1;
    let mut text = String::new();
    for (file, names) in files {
        let condition = match alone {
            true => String::new(),
            false => format!(
                "listeners = [{}]\n",
                names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", ")
            ),
        };
        match file {
            None => {
                let _ = writeln!(
                    text,
                    "\n# For the listeners without an acl_file.\n[[rules]]\nallow = \"all\"\ntopics = [\"#\", \"$SYS/#\"]\n{}",
                    condition.trim_end()
                );
            }
            Some(file) => text.push_str(&of_file(file, &condition, told)),
        }
    }
    Some(text)
}

fn of_file(file: &str, condition: &str, told: &mut Vec<Remark>) -> String {
    let read = match fs::read(file) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => {
            told.push(Remark {
                place: String::new(),
                text: format!(
                    "acl_file {file}: {error}; the rules deny everything until you write them, or import it with \
                     'mqtt-server rules import'"
                ),
                lost: true,
            });
            return format!("# {file} could not be read: nothing is allowed.\n");
        }
    };
    let imported = import_mosquitto(&read);
    for line in &imported.left_out {
        told.push(Remark { place: file.to_owned(), text: format!("left out, {line}"), lost: true });
    }
    // Each rule is a table of its own, so that a condition fits after its head.
    imported.rules.replace("[[rules]]\n", &format!("[[rules]]\n{condition}"))
}
