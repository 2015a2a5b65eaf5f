//! docs/mqtt-server.toml, made of the tables of docs/configuration.md. `MQTT_SERVER_TEST_WRITE=1 cargo test --test repository
//! configuration` writes it anew. The tests of the crate `config` hold both against the code.

use std::{fmt::Write, fs};

use crate::support::root;

const HEAD: &str = "\
# mqtt-server: every key with its default, made of docs/configuration.md. Copy what you change and start with
# --config FILE.
#
# Order, later wins: this file, environment, flags. Environment: MQTT_SERVER_ and the key in capitals, two
# underscores between section and key: MQTT_SERVER_LIMITS__MAX_INFLIGHT=100, MQTT_SERVER_ADDR=0.0.0.0:8883;
# lists are separated by commas. Unknown keys and variables are refused. `--check` validates and exits.
# Lines with #: are one listener; there may be as many as needed.
";
/// The heading of the keys that are in no section.
const TOP: &str = "Top level";
/// Section of which there may be several, so that the file shows one as a comment.
const REPEATED: &str = "[[listeners]]";
/// Columns of a line of the file.
const WIDTH: usize = 120;

/// A section of the page: its name in brackets (empty for the top level), the text above its table, and the table's rows.
#[derive(Debug, Default, PartialEq, Eq)]
struct Section {
    name: String,
    text: String,
    keys: Vec<[String; 3]>,
}

fn sections(page: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    let (mut inside, mut heads) = (false, false);
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix('#') {
            let heading = heading.trim_matches(['#', ' ', '`']);
            inside = heading == TOP || heading.starts_with('[');
            heads = inside;
            if inside {
                let name = if heading == TOP { "" } else { heading };
                sections.push(Section { name: name.to_owned(), ..Section::default() });
            }
            continue;
        }
        let Some(section) = sections.last_mut().filter(|_| inside) else { continue };
        if let Some(row) = line.strip_prefix("| `").and_then(|row| row.strip_suffix(" |")) {
            let cells: Vec<&str> = row.splitn(3, " | ").collect();
            let [key, default, meaning] = cells[..] else { panic!("no row of a key: {line}") };
            section.keys.push([key.trim_matches('`'), default.trim_matches('`'), meaning].map(str::to_owned));
            heads = false;
        } else if heads && !line.starts_with('|') {
            section.text += line;
            section.text.push(if line.is_empty() { '\n' } else { ' ' });
        }
    }
    sections
}

/// Text without the marks of Markdown: links are followed by the file they lead to.
fn plain(markdown: &str) -> String {
    let mut out = String::new();
    let mut rest = markdown;
    while let Some((before, link)) = rest.split_once('[') {
        out += before;
        let target = link.split_once("](").and_then(|(text, after)| Some((text, after.split_once(')')?)));
        match target {
            Some((text, (target, after))) if !text.contains(['[', ']']) => {
                let file = target.split('#').next().unwrap_or_default();
                let _ = write!(out, "{text} (docs/{file})");
                rest = after;
            }
            _ => {
                out.push('[');
                rest = link;
            }
        }
    }
    out += rest;
    out.replace('`', "")
}

/// Comment lines of the text.
fn comment(markdown: &str) -> String {
    let mut out = String::new();
    for paragraph in plain(markdown).lines().map(str::trim).filter(|paragraph| !paragraph.is_empty()) {
        let mut line = "#".to_owned();
        for word in paragraph.split_whitespace() {
            if line.chars().count() + 1 + word.chars().count() > WIDTH {
                out += &line;
                out.push('\n');
                line = "#".to_owned();
            }
            line.push(' ');
            line += word;
        }
        out += &line;
        out.push('\n');
    }
    out
}

fn file(sections: &[Section]) -> String {
    let mut out = HEAD.to_owned();
    for section in sections {
        let _ = write!(out, "\n{}", comment(&section.text));
        let mut lines = String::new();
        if !section.name.is_empty() {
            lines += &section.name;
            lines.push('\n');
        }
        for [key, default, meaning] in &section.keys {
            // Keys of no section stand apart: nothing above them says what they have in common.
            if section.name.is_empty() && !lines.is_empty() {
                lines.push('\n');
            }
            lines += &comment(meaning);
            let _ = writeln!(lines, "{key} = {default}");
        }
        if section.name == REPEATED {
            lines.lines().for_each(|line| out += &format!("#: {line}\n"));
        } else {
            out += &lines;
        }
    }
    out
}

#[test]
fn the_sample_file_is_what_the_page_says() {
    let page = fs::read_to_string(root().join("docs/configuration.md")).expect("read the page");
    let sections = sections(&page);
    let keys: usize = sections.iter().map(|section| section.keys.len()).sum();
    assert!(keys > 250, "only {keys} keys");
    let now = file(&sections);
    let place = root().join("docs/mqtt-server.toml");
    if std::env::var_os("MQTT_SERVER_TEST_WRITE").is_some() {
        fs::write(&place, now).expect("write docs/mqtt-server.toml");
        return;
    }
    let have = fs::read_to_string(&place).expect("read docs/mqtt-server.toml");
    let differs = now.lines().zip(have.lines()).find(|(now, have)| now != have);
    assert!(
        now == have,
        "docs/mqtt-server.toml is stale: MQTT_SERVER_TEST_WRITE=1 cargo test --test repository configuration; {differs:?}"
    );
}

#[test]
fn a_section_becomes_its_comment_and_its_keys() {
    let page = "# Page\n\nText.\n\n## Top level\n\n| key | default | meaning |\n| --- | --- | --- |\n\
        | `a` | `1` | One of `[b]`. |\n| `c` | `\"\"` | Two: [there](other.md#part). |\n\n\
        ## `[b]`\n\nAll of\n[them](b.md).\n\n| key | default | meaning |\n| --- | --- | --- |\n\
        | `d` | `[{ e = 1 }]` | `*` is all. |\n\nMore.\n\n## Else\n\n| `x` | `1` | No key. |\n";
    let expected = "\n# One of [b].\na = 1\n\n# Two: there (docs/other.md).\nc = \"\"\n\n\
        # All of them (docs/b.md).\n[b]\n# * is all.\nd = [{ e = 1 }]\n";
    assert_eq!(file(&sections(page)).strip_prefix(HEAD), Some(expected));
}
