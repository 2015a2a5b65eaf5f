//! The tours of the documentation: fenced blocks that tests run as they stand.
//!
//! A `text` block after one lists lines that its output must contain; `toml file NAME` is a file that is there before.
//! The blocks run as written, but for two things: port numbers of the defaults become those of the test's server, and
//! `cargo run … --example NAME --` becomes the example that `cargo test` has built already.
#![allow(unreachable_pub, dead_code, reason = "shared by several test binaries")]

use std::{fs, path::Path, process::Command, time::Duration};

use super::support::{Server, root, run};

pub struct Block {
    script: String,
    expected: Vec<String>,
}

/// The fenced blocks of a Markdown text: (info string, content).
fn fences(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open: Option<(String, String)> = None;
    for line in text.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(info)) => open = Some((info.trim().to_owned(), String::new())),
            (Some(_), Some(_)) => found.extend(open.take()),
            (Some((_, content)), None) => {
                content.push_str(line);
                content.push('\n');
            }
            (None, None) => {}
        }
    }
    found
}

/// The blocks of a page with this info string.
pub fn blocks(page: &str, wanted: &str) -> Vec<Block> {
    let text = fs::read_to_string(root().join(page)).expect("read the page");
    let mut blocks: Vec<Block> = Vec::new();
    let mut after_block = false;
    for (info, content) in fences(&text) {
        match info.as_str() {
            info if info == wanted => {
                blocks.push(Block { script: content, expected: Vec::new() });
                after_block = true;
            }
            "text" if after_block => {
                if let Some(block) = blocks.last_mut() {
                    block.expected = content.lines().map(str::to_owned).collect();
                }
                after_block = false;
            }
            _ => after_block = false,
        }
    }
    blocks
}

/// The files that a page shows with their names, `toml file NAME`: (name, text).
pub fn files(page: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(root().join(page)).expect("read the page");
    let named = fences(&text).into_iter().filter_map(|(info, content)| {
        let (_, name) = info.split_once(" file ")?;
        Some((name.to_owned(), content))
    });
    named.collect()
}

/// Returns the info string of each block of a text, as in `sh tour`.
pub fn infos(text: &str) -> Vec<String> {
    fences(text).into_iter().map(|(info, _)| info).collect()
}

/// Returns whether a page has blocks with this info string.
pub fn has(text: &str, wanted: &str) -> bool {
    fences(text).iter().any(|(info, _)| info == wanted)
}

/// The text with other ports, each number by itself and once: what was put in is not looked at again.
pub fn with_ports(text: &str, ports: &[(&str, &str)]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(|letter: char| letter.is_ascii_digit()) {
        let (before, number) = rest.split_at(at);
        let end = number.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(number.len());
        let (number, after) = number.split_at(end);
        let actual =
            ports.iter().find(|(written, _)| *written == number).map_or(number, |(_, actual)| actual);
        out.push_str(before);
        out.push_str(actual);
        rest = after;
    }
    out + rest
}

/// A directory with a `cargo` that starts built examples.
fn shim(dir: &Path) {
    let examples = Path::new(env!("CARGO_BIN_EXE_mqtt-server")).with_file_name("examples");
    assert!(
        examples.join("hook_provider").exists(),
        "the examples are not built: run scripts/test.sh, `cargo test` without naming targets, or \
         `cargo build --examples` first"
    );
    let script = format!(
        "#!/bin/sh\n# cargo run [options] --example NAME -- ARGUMENTS\n\
         while [ \"$1\" != --example ]; do shift || exit 64; done\n\
         name=$2; shift 2; [ \"$1\" = -- ] && shift\n\
         exec '{}'/\"$name\" \"$@\"\n",
        examples.display()
    );
    fs::create_dir_all(dir).expect("make the directory of the shim");
    let path = dir.join("cargo");
    fs::write(&path, script).expect("write the shim");
    let status = Command::new("chmod").arg("+x").arg(&path).status().expect("run chmod");
    assert!(status.success());
}

impl Block {
    /// Returns whether the script is this command and no more.
    pub fn is(&self, command: &str) -> bool {
        self.script.trim() == command
    }

    /// Runs it in the server's directory; `ports` are further ones to replace, `path` further programs.
    ///
    /// # Panics
    /// If the block fails or does not print the expected output.
    pub fn run(&self, server: &Server, ports: &[(&str, &str)], path: &str) {
        let [tls, grpc, http] =
            [server.ports.tls, server.ports.grpc, server.ports.http].map(|port| port.to_string());
        let usual = [("8883", tls.as_str()), ("10000", &grpc), ("9090", &http)];
        self.run_in(server.dir(), &[&usual, ports].concat(), path);
    }

    /// Runs it in a directory, before there is a server.
    ///
    /// # Panics
    /// As [`Self::run`].
    pub fn run_in(&self, dir: &Path, ports: &[(&str, &str)], path: &str) {
        let bin = dir.join("bin");
        if self.script.contains("--example ") {
            shim(&bin);
        }
        let (bin, usual) = (bin.display().to_string(), std::env::var("PATH").unwrap_or_default());
        let program =
            Path::new(env!("CARGO_BIN_EXE_mqtt-server")).parent().expect("a directory").display().to_string();
        let path = [&bin, path, &program, &usual]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(":");
        let script = with_ports(&self.script, ports);
        let mut command = Command::new("bash");
        command.args(["-euo", "pipefail", "-c", &script]).current_dir(dir).env("PATH", &path);
        // The place where `mqtt-server ctl` looks by default, without a profile of the person who runs the tests.
        if let Some((_, port)) = ports.iter().find(|(written, _)| *written == "10000") {
            command.env("MQTTCTL_ADDR", format!("https://localhost:{port}"));
        }
        command.env("XDG_CONFIG_HOME", dir.join("no-profiles"));
        let (success, output) = run(&mut command, Duration::from_secs(300));
        assert!(success, "this block failed:\n{script}\nand said:\n{output}");
        for line in &self.expected {
            assert!(
                output.lines().any(|got| got.trim_end() == line),
                "this block did not print '{line}':\n{script}\nbut:\n{output}"
            );
        }
    }
}
