//! Runs the README's tour: every block fenced as `sh tour`, in order, against a started server.

use std::{fs, path::Path, process::Command};

use crate::{
    script,
    support::{Server, need, on_path, python, root, until},
};

#[test]
fn readme_tour_works_as_written() {
    let blocks = script::blocks("README.md", "sh tour");
    assert!(blocks.len() >= 4, "the README has only {} tour blocks", blocks.len());
    if !need("mosquitto_pub and mosquitto_sub", on_path("mosquitto_pub") && on_path("mosquitto_sub")) {
        return;
    }
    let server = Server::start();
    for block in blocks {
        block.run(&server, &[], "");
    }
}

/// The page of a sample configuration: what is prepared, the start, and the tour.
fn sample(name: &str) {
    let tools = ["mosquitto_pub", "mosquitto_sub", "openssl"];
    if !need("mosquitto_pub, mosquitto_sub or openssl", tools.into_iter().all(on_path)) {
        return;
    }
    let folder = format!("samples/{name}");
    let page = format!("{folder}/README.md");
    let dir = tempfile::tempdir().expect("make a directory");
    for file in ["gateway.toml", "rules.toml"] {
        fs::copy(root().join(&folder).join(file), dir.path().join(file)).expect("copy a file of the sample");
    }
    let program = Path::new(env!("CARGO_BIN_EXE_mqtt-server"));
    let path = program.parent().expect("a directory").display().to_string();
    for block in script::blocks(&page, "sh prepare") {
        block.run_in(dir.path(), &[], &path);
    }
    let _service = Service::start(&page, dir.path());
    let start = script::blocks(&page, "sh start");
    assert!(start.len() == 1 && start[0].is("mqtt-server --config gateway.toml"), "the start is another");
    let server = Server::start_as_configured(dir, "gateway.toml");
    let tour = script::blocks(&page, "sh tour");
    assert!(tour.len() >= 3, "the tour has only {} blocks", tour.len());
    for block in tour {
        block.run(&server, &[], &path);
    }
}

/// Service that the page starts beside the gateway, until this is dropped.
struct Service(String);

impl Service {
    /// The block `sh service`, if there is one: it leaves its process id in `service.pid`, and says in `service.log` where it
    /// listens, which is not where the page says.
    fn start(page: &str, dir: &Path) -> Option<Self> {
        let blocks = script::blocks(page, "sh service");
        let block = blocks.first()?;
        block.run_in(dir, &[("127.0.0.1:7070", "127.0.0.1:0")], "");
        let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
        let service = Self(read("service.pid").trim().to_owned());
        let address = || {
            read("service.log").lines().find_map(|line| Some(line.strip_prefix("listening on ")?.to_owned()))
        };
        until(|| address().is_some());
        let config = read("gateway.toml").replace("127.0.0.1:7070", &address().expect("an address"));
        fs::write(dir.join("gateway.toml"), config).expect("write the configuration");
        Some(service)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(&self.0).status();
    }
}

#[test]
fn the_tour_of_the_lab_with_passwords_works_as_written() {
    sample("lab");
}

#[test]
fn the_tour_with_a_certificate_for_each_device_works_as_written() {
    sample("certificates");
}

#[test]
fn the_tour_with_tokens_and_a_service_that_decides_works_as_written() {
    sample("hooks");
}

/// Runs the recipe of docs/api.md for Python, with the tools that are there.
#[test]
fn the_python_recipe_of_the_api_page_works_as_written() {
    let [block] = &script::blocks("docs/api.md", "sh recipe")[..] else { panic!("one recipe") };
    let python = python();
    if !need("the Python environment .venv", python.is_some()) {
        return;
    }
    let server = Server::start();
    std::os::unix::fs::symlink(root().join("proto"), server.dir().join("proto")).expect("link the protos");
    block.run(&server, &[], &root().join(".venv/bin").display().to_string());
}

/// The README's start and test commands are the ones that exist.
#[test]
fn readme_names_the_commands() {
    let readme = fs::read_to_string(root().join("README.md")).expect("read README.md");
    assert!(readme.contains("cargo run --no-default-features -- --dev"));
    assert!(readme.contains("scripts/test.sh"));
    assert!(root().join("scripts/test.sh").exists());
}
