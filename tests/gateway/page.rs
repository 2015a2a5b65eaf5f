//! The web page in a real Chromium: tests/interop/test_page.py against a gateway with a token of each role, and one that asks
//! nobody. Chromium and its driver are Debian's packages; Selenium talks to them.

use std::{fs, path::Path, process::Command, time::Duration};

use access::backends::{Grant, Role, Scope, Tokens, hash, mint};

use crate::support::{Server, need, on_path, python, root, run};

const LIMIT: Duration = Duration::from_secs(420);

/// Adds a token to the file, and returns its secret.
fn token(file: &Path, role: Role) -> String {
    let (secret, _) = mint().expect("a token");
    let grant = Grant {
        id: role.as_str().to_owned(),
        role,
        scope: Scope::ALL,
        created: 0,
        expires: None,
        note: String::new(),
        hash: hash(&secret),
    };
    let text = fs::read_to_string(file).unwrap_or_default();
    fs::write(file, Tokens::with(&text, &grant).expect("a file of tokens")).expect("write the tokens");
    secret
}

/// Runs the tests of which the name contains `select`.
fn browse(select: &str) {
    let python = python();
    let installed = python.as_ref().is_some_and(|python| {
        Command::new(python).args(["-c", "import selenium"]).output().is_ok_and(|out| out.status.success())
    });
    if !need("Selenium in the Python environment .venv", installed)
        || !need("chromium and chromedriver", on_path("chromium") && on_path("chromedriver"))
    {
        return;
    }
    let dir = tempfile::tempdir().expect("make a directory");
    let file = dir.path().join("tokens");
    let tokens: serde_json::Map<_, _> =
        Role::ALL.into_iter().map(|role| (role.as_str().to_owned(), token(&file, role).into())).collect();
    let open = Server::start();
    // One bridge that is up, and one that leads to nobody.
    let toml = format!(
        "[backends]\ntokens = {:?}\n\n\
         [bridges.cloud]\ntopics = [\"room/#\"]\n[bridges.cloud.mqtt]\nurl = \"mqtt://127.0.0.1:{}\"\n\n\
         [bridges.hooks]\ntopics = [\"room/#\"]\n[bridges.hooks.webhook]\nurl = \"http://127.0.0.1:1/\"\n",
        file.display().to_string(),
        open.ports.tcp
    );
    let mut guarded = Server::start_with(&[], &toml);
    let mut command = Command::new(python.unwrap_or_default());
    command
        .args(["-m", "pytest", "test_page.py", "-k", select])
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(root().join("tests/interop"))
        .envs(guarded.script_env())
        .env("GW_TOKENS", serde_json::Value::Object(tokens).to_string())
        .env("GW_OPEN_TCP", open.ports.tcp.to_string())
        .env("GW_OPEN_HTTP", open.ports.http.to_string());
    let (success, output) = run(&mut command, LIMIT);
    eprintln!("{output}");
    assert!(success, "the tests in the browser failed; their output is above");
    assert!(guarded.stop(), "the server did not stop cleanly after SIGTERM");
    let log = guarded.log();
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn the_page_in_a_browser() {
    browse("");
}
