//! Runs the commands of the pages of docs/ as they stand: blocks fenced as `sh prepare` before the gateway starts, `sh
//! tour` while it runs. With a `gateway.toml`, shown (`toml file gateway.toml`) or made by the commands, the gateway is
//! started with that; else as the README starts it. The ports of the text are replaced by free ones. `sh start` is how
//! the page starts it; a block that nobody runs is `sh untested: REASON`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use toml::Table;

use crate::{
    script,
    support::{Server, need, on_path, root},
};

/// A test for each page, and the list of them.
macro_rules! pages {
    ($($test:ident: $page:literal, $tools:expr;)*) => {
        $(#[test]
        fn $test() {
            walk($page, &$tools);
        })*

        const PAGES: &[&str] = &[$($page),*];
    };
}

pages! {
    the_first_five_minutes_work_as_written: "docs/guides/first-minutes.md", ["stdbuf", "curl"];
    what_the_page_for_users_of_mosquitto_says_works: "docs/guides/from-mosquitto.md", ["mosquitto_passwd"];
    what_the_page_for_home_assistant_says_works: "docs/guides/home-assistant.md", ["stdbuf"];
    the_configuration_to_install_with_works_as_written: "docs/guides/install.md", ["openssl"];
    the_rules_in_place_of_those_of_emqx_do_what_they_did: "docs/guides/from-emqx.md", [];
    what_the_kernel_has_is_shown_as_the_page_says: "docs/guides/a-million-connections.md", ["curl"];
    what_the_page_about_non_broker_mode_says_works: "docs/guides/non-broker.md", ["curl"];
    what_the_page_about_tls_says_works: "docs/guides/tls.md", ["openssl"];
    a_backup_is_made_and_restored_as_the_page_says: "docs/guides/upgrade-and-backup.md", [];
    what_the_page_of_the_http_api_says_works: "docs/http.md", ["stdbuf", "curl"];
}

/// `[[listeners]]` of a configuration: name, and port as it is written.
fn listeners(config: &str) -> Vec<(String, String)> {
    let table: Table = config.parse().expect("TOML");
    let listed = table.get("listeners").and_then(toml::Value::as_array).cloned().unwrap_or_default();
    let ports = listed.iter().filter_map(|listener| {
        let name = listener.get("name")?.as_str()?.to_owned();
        let (_, port) = listener.get("address")?.as_str()?.rsplit_once(':')?;
        port.parse::<u16>().ok()?;
        Some((name, port.to_owned()))
    });
    ports.collect()
}

/// The same configuration on ports that the system chooses, on loopback.
fn on_free_ports(config: &str, listeners: &[(String, String)]) -> String {
    let mut text = config.to_owned();
    for (_, port) in listeners {
        for ip in ["0.0.0.0", "127.0.0.1"] {
            text = text.replace(&format!("\"{ip}:{port}\""), "\"127.0.0.1:0\"");
        }
    }
    text
}

fn walk(page: &str, tools: &[&str]) {
    for tool in ["mosquitto_pub", "mosquitto_sub"].iter().chain(tools) {
        if !need(tool, on_path(tool)) {
            return;
        }
    }
    let program = Path::new(env!("CARGO_BIN_EXE_mqtt-server"));
    let path = program.parent().expect("a directory").display().to_string();
    let dir = tempfile::tempdir().expect("make a directory");
    let files = script::files(page);
    let prepare = script::blocks(page, "sh prepare");
    let tour = script::blocks(page, "sh tour");
    assert!(!tour.is_empty(), "{page} has no tour");
    let starts = script::blocks(page, "sh start");
    if prepare.is_empty() && !files.iter().any(|(name, _)| name == "gateway.toml") {
        assert!(starts.iter().all(|start| start.is("mqtt-server --dev")), "{page} is started otherwise");
        let server = Server::start();
        for (name, text) in files {
            fs::write(server.dir().join(name), text).expect("write a file of the page");
        }
        let ports = [("1883", server.ports.tcp.to_string()), ("8083", server.ports.ws.to_string())];
        for block in tour {
            block.run(&server, &ports.each_ref().map(|(written, port)| (*written, port.as_str())), &path);
        }
        return;
    }
    let started = |start: &script::Block| start.is("mqtt-server --config gateway.toml");
    assert!(starts.iter().all(started), "{page} is started otherwise");
    for (name, text) in files {
        fs::write(dir.path().join(name), text).expect("write a file of the page");
    }
    for block in prepare {
        block.run_in(dir.path(), &[], &path);
    }
    let config = dir.path().join("gateway.toml");
    let text = fs::read_to_string(&config).expect("the page has no gateway.toml");
    let listeners = listeners(&text);
    fs::write(&config, on_free_ports(&text, &listeners)).expect("write the configuration");
    let server = Server::start_as_configured(dir, "gateway.toml");
    let ports: Vec<(String, String)> =
        listeners.into_iter().map(|(name, port)| (port, server.port(&name).to_string())).collect();
    let ports: Vec<(&str, &str)> =
        ports.iter().map(|(written, port)| (written.as_str(), port.as_str())).collect();
    for block in tour {
        block.run(&server, &ports, &path);
    }
}

/// The program that the page about embedding shows is the example, which is built.
#[test]
fn the_program_of_the_page_about_embedding_is_the_example() {
    let page = fs::read_to_string(root().join("docs/guides/embedding.md")).expect("read the page");
    let (_, shown) = page.split_once("```rust\n").expect("a program");
    let (shown, _) = shown.split_once("```").expect("its end");
    let example = fs::read_to_string(root().join("examples/embed.rs")).expect("read the example");
    let (_, example) = example.split_once("\nuse std::").expect("its beginning");
    assert_eq!(shown, format!("use std::{example}"));
}

fn pages_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("list a folder of pages") {
        let path = entry.expect("read an entry").path();
        match path.is_dir() {
            true => pages_below(&path, found),
            false if path.extension().is_some_and(|extension| extension == "md") => found.push(path),
            false => {}
        }
    }
}

#[test]
fn a_page_whose_commands_nobody_runs_is_found() {
    let mut all = Vec::new();
    pages_below(&root().join("docs"), &mut all);
    let with_tour = all
        .into_iter()
        .filter(|path| script::has(&fs::read_to_string(path).expect("read a page"), "sh tour"));
    let mut names: Vec<String> = with_tour
        .map(|path| {
            path.strip_prefix(root()).expect("a page of the repository").to_string_lossy().into_owned()
        })
        .collect();
    let mut run: Vec<&str> = PAGES.to_vec();
    names.sort();
    run.sort_unstable();
    assert_eq!(names, run, "pages with `sh tour` (left) and those that tests run (right)");
}

/// The failure: the index names pages whose commands nobody runs any more, or leaves one out.
#[test]
fn the_index_names_the_pages_whose_commands_are_run() {
    let index = fs::read_to_string(root().join("docs/README.md")).expect("read the index");
    let (_, list) =
        index.split_once("Tests run the commands of these pages as they stand:").expect("the list");
    let (list, _) = list.split_once("](http.md).").expect("its end");
    let links =
        list.split("](").skip(1).map(|link| format!("docs/{}", link.split(')').next().unwrap_or_default()));
    let mut named: Vec<String> = links.chain(["docs/http.md".to_owned()]).collect();
    let mut run = PAGES.to_vec();
    named.sort();
    run.sort_unstable();
    assert_eq!(named, run, "pages that docs/README.md names (left) and those that tests run (right)");
}

/// Commands of a guide are run, or the page's source says why not.
#[test]
fn a_command_of_a_guide_that_nobody_runs_has_its_reason() {
    let mut guides = Vec::new();
    pages_below(&root().join("docs/guides"), &mut guides);
    for path in guides {
        let text = fs::read_to_string(&path).expect("read a page");
        for info in script::infos(&text).into_iter().filter(|info| info.starts_with("sh")) {
            let run = ["sh prepare", "sh start", "sh tour"].contains(&info.as_str());
            let reason = info.strip_prefix("sh untested: ").is_some_and(|reason| reason.len() > 10);
            assert!(run || reason, "{}: ```{info}", path.display());
        }
    }
}

#[test]
fn ports_are_replaced_whole_and_once() {
    let ports = [("1883", "8883"), ("8883", "40000")];
    assert_eq!(script::with_ports("-p 1883 -p 8883 118830 x8883", &ports), "-p 8883 -p 40000 118830 x40000");
}
