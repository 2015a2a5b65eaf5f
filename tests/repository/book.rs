//! The documentation as a book: every page is in its index, and every link leads somewhere. Both are what mdBook would tell
//! late or not at all, and need no mdBook here.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Component, Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::support::{need, on_path, root, run};

/// Files with `.md` that are checked beside docs/.
const BESIDE: &[&str] = &["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"];
/// Folders with pages of their own.
const FOLDERS: &[&str] = &["docs", "samples"];

fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("list a folder of pages") {
        let path = entry.expect("read an entry").path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found.sort();
}

/// The text without fenced blocks and code spans, of which brackets are no links.
fn prose(text: &str) -> String {
    let mut out = String::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        if !fenced {
            for (number, part) in line.split('`').enumerate() {
                out.push_str(if number % 2 == 0 { part } else { "code" });
            }
            out.push('\n');
        }
    }
    out
}

/// Targets of `[text](target)` and `![text](target)`.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let targets = prose.match_indices("](").filter_map(|(at, _)| {
        let rest = &prose[at + 2..];
        let target = &rest[..rest.find(')')?];
        Some(target.split_whitespace().next().unwrap_or_default().to_owned())
    });
    targets.collect()
}

/// The anchors of a page's headings, as GitHub and mdBook name them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen: HashMap<String, u32> = HashMap::new();
    let mut found = BTreeSet::new();
    let mut fenced = false;
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        let level = line.len() - heading.len();
        if fenced || !(1..=6).contains(&level) || !heading.starts_with(' ') {
            continue;
        }
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let slug: String = heading.trim().chars().filter(kept).collect();
        let slug = slug.to_lowercase().replace(' ', "-");
        let count = seen.entry(slug.clone()).or_default();
        found.insert(if *count == 0 { slug } else { format!("{slug}-{count}") });
        *count += 1;
    }
    found
}

/// `a/b/../c` as `a/c`, without asking the disk.
fn plain(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

#[test]
fn every_link_of_the_documentation_leads_somewhere() {
    let mut all: Vec<PathBuf> = BESIDE.iter().map(|name| root().join(name)).collect();
    for folder in FOLDERS {
        pages(&root().join(folder), &mut all);
    }
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in &all {
        let text = fs::read_to_string(page).expect("read a page");
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            count += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => page.clone(),
                file => plain(&page.parent().expect("a folder").join(file)),
            };
            let there = target.exists();
            let is_page = target.extension().is_some_and(|extension| extension == "md");
            let named = anchor.is_empty()
                || !is_page
                || there && anchors(&fs::read_to_string(&target).expect("read a page")).contains(anchor);
            if !there || !named {
                wrong.push(format!("{}: {link}", page.strip_prefix(root()).unwrap_or(page).display()));
            }
        }
    }
    assert!(count > 100, "only {count} links were found");
    assert!(wrong.is_empty(), "links that lead nowhere:\n{}", wrong.join("\n"));
}

/// The failure: a link to a file beside docs/ leads nowhere in the book, where that file is not. scripts/book.sh builds the whole
/// book with mdBook, and checks it.
#[test]
fn links_out_of_the_book_lead_to_the_repository() {
    if !need("python3", on_path("python3")) {
        return;
    }
    let mut command = Command::new("python3");
    let copy = tempfile::tempdir().expect("make a directory");
    let (docs, url) = (copy.path().join("docs"), "https://forge.invalid/mqtt-server");
    let mut all = Vec::new();
    pages(&root().join("docs"), &mut all);
    for page in &all {
        let to = docs.join(page.strip_prefix(root().join("docs")).expect("a page of docs"));
        fs::create_dir_all(to.parent().expect("a folder")).expect("make a folder");
        fs::copy(page, to).expect("copy a page");
    }
    command.arg(root().join("scripts/book/links.py")).arg("prepare").args([root(), docs.clone()]).arg(url);
    let (made, output) = run(&mut command, Duration::from_secs(60));
    assert!(made, "{output}");
    let mut copied = Vec::new();
    pages(&docs, &mut copied);
    let (mut out, mut wrong) = (0, Vec::new());
    for page in &copied {
        for link in links(&fs::read_to_string(page).expect("read a page")) {
            let file = link.split('#').next().unwrap_or_default();
            if let Some(path) = file.strip_prefix(url) {
                out += 1;
                let path = path.strip_prefix("/blob/HEAD/").or_else(|| path.strip_prefix("/tree/HEAD/"));
                if !path.is_some_and(|path| root().join(path).exists()) {
                    wrong.push(link);
                }
            } else if !link.contains("://")
                && !file.is_empty()
                && !plain(&page.parent().expect("a folder").join(file)).starts_with(&docs)
            {
                wrong.push(link);
            }
        }
    }
    assert!(out > 20, "only {out} were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_page_is_in_the_index_of_the_book_once() {
    let docs = root().join("docs");
    let index = fs::read_to_string(docs.join("SUMMARY.md")).expect("read docs/SUMMARY.md");
    let listed = links(&index);
    let mut found = Vec::new();
    pages(&docs, &mut found);
    let mut found: Vec<String> = found
        .iter()
        .map(|path| path.strip_prefix(&docs).expect("a page of docs").to_string_lossy().into_owned())
        .filter(|name| name != "SUMMARY.md")
        .collect();
    let mut sorted = listed.clone();
    sorted.sort();
    found.sort();
    assert_eq!(sorted, found, "docs/SUMMARY.md (left) lists each page of docs/ (right) once");
}

/// `path.rs::name` in the pages: the file has a test of that name.
#[test]
fn tests_that_pages_name_exist() {
    let mut all = Vec::new();
    pages(&root().join("docs/guides"), &mut all);
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in &all {
        let text = fs::read_to_string(page).expect("read a page");
        for span in text.split('`').skip(1).step_by(2) {
            let Some((file, name)) = span.split_once("::").filter(|(file, _)| file.ends_with(".rs")) else {
                continue;
            };
            count += 1;
            let code = fs::read_to_string(root().join(file)).unwrap_or_default();
            if !code.contains(&format!("fn {name}(")) && !code.contains(&format!(" {name}:")) {
                wrong.push(format!("{}: {span}", page.display()));
            }
        }
    }
    assert!(count > 20, "only {count} were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_link_that_leads_nowhere_is_seen() {
    let text =
        "# A b: c?\n\n## A b: c?\n\n[x](y.md#z) `[no](link)` ![p](q.svg \"t\")\n```\n# no\n[no](no)\n```\n";
    assert_eq!(links(text), ["y.md#z", "q.svg"]);
    assert_eq!(anchors(text), BTreeSet::from(["a-b-c", "a-b-c-1"].map(str::to_owned)));
}
