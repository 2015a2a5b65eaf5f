//! Filter of the log: `info`, or by module `info,mqtt_server::net=debug`.

use tracing_subscriber::filter::{LevelFilter, Targets};

/// The gateway's crates besides `mqtt_server` that write lines, as their events name them.
pub const CRATES: [&str; 22] = [
    "auth",
    "bridges",
    "broker",
    "cassandra",
    "cluster_node",
    "commands",
    "config",
    "consumer_groups",
    "device_shadows",
    "disk",
    "edge",
    "gateway_core",
    "gateway_http",
    "grpc",
    "grpc_messages",
    "links",
    "net",
    "postgres",
    "segment_log",
    "store",
    "telemetry",
    "values",
];

/// Reads a level. The parser of the library takes any word that it does not know for the name of a module, so that a
/// misspelt level would silence everything.
///
/// # Errors
/// Names the part that is neither a level nor `module=level`.
pub fn parse(text: &str) -> Result<Targets, String> {
    let mut targets = Targets::new();
    for part in text.split(',').map(str::trim) {
        match part.split_once('=') {
            None => targets = targets.with_default(level(part)?),
            Some((module, word)) if is_module(module.trim()) => {
                let (module, level) = (module.trim(), level(word.trim())?);
                targets = targets.with_targets(places(module).into_iter().map(|place| (place, level)));
            }
            Some(_) => return Err(format!("'{part}' is not module=level")),
        }
    }
    Ok(targets)
}

/// Returns the names by which the events of `module` call it. `mqtt_server` stands for all crates of the gateway, and
/// `mqtt_server::store` for that crate.
fn places(module: &str) -> Vec<&str> {
    let ours = |name: &str| CRATES.contains(&name.split("::").next().unwrap_or_default());
    match module.strip_prefix("mqtt_server::") {
        Some(rest) if ours(rest) => vec![rest],
        _ if module == "mqtt_server" => CRATES.into_iter().chain([module]).collect(),
        _ => vec![module],
    }
}

fn level(word: &str) -> Result<LevelFilter, String> {
    Ok(match word.to_ascii_lowercase().as_str() {
        "off" => LevelFilter::OFF,
        "error" => LevelFilter::ERROR,
        "warn" | "warning" => LevelFilter::WARN,
        "info" => LevelFilter::INFO,
        "debug" => LevelFilter::DEBUG,
        "trace" => LevelFilter::TRACE,
        _ => return Err(format!("'{word}' is not a level")),
    })
}

fn is_module(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '-'))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use toml::Table;
    use tracing::Level;

    use super::*;

    /// The failure: `mqtt_server=debug` says nothing of a part that has become a crate.
    #[test]
    fn every_crate_that_writes_lines_is_the_gateway_s() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut writing = Vec::new();
        for entry in fs::read_dir(crates).unwrap() {
            let manifest = fs::read_to_string(entry.unwrap().path().join("Cargo.toml")).unwrap();
            let manifest: Table = manifest.parse().unwrap();
            let names = |table: &str| manifest.get(table).is_some_and(|all| all.get("tracing").is_some());
            if names("dependencies") || names("dev-dependencies") {
                writing.push(manifest["package"]["name"].as_str().unwrap().replace('-', "_"));
            }
        }
        writing.sort();
        assert_eq!(writing, CRATES);
    }

    #[test]
    fn words_of_other_programs_are_levels_and_unknown_words_are_not_modules() {
        for (text, most) in [("warning", Level::WARN), ("WARN", Level::WARN), ("Info", Level::INFO)] {
            let targets = parse(text).unwrap();
            assert!(targets.would_enable("mqtt_server", &most), "{text}");
            assert!(!targets.would_enable("mqtt_server", &Level::DEBUG), "{text}");
        }
        let parts = parse("warning, mqtt_server::net=debug").unwrap();
        assert!(parts.would_enable("net::accept", &Level::DEBUG), "a crate is named as a module");
        assert!(!parts.would_enable("broker", &Level::INFO));
        let parts = parse("warning, mqtt_server::gateway=debug").unwrap();
        assert!(parts.would_enable("mqtt_server::gateway", &Level::DEBUG));
        assert!(!parts.would_enable("mqtt_server::cli", &Level::INFO));
        let whole = parse("warn,mqtt_server=info,mqtt_server::cassandra::write=debug").unwrap();
        for ours in ["mqtt_server::gateway", "net", "broker", "disk::open"] {
            assert!(
                whole.would_enable(ours, &Level::INFO) && !whole.would_enable(ours, &Level::DEBUG),
                "{ours}"
            );
        }
        assert!(whole.would_enable("cassandra::write", &Level::DEBUG), "a crate is named as a module");
        assert!(!whole.would_enable("h2", &Level::INFO), "a library");
        assert!(!parse("off").unwrap().would_enable("mqtt_server", &Level::ERROR));
        for text in
            ["", "warnings", "verbose", "notice", "mqtt_server", "a=b=c", "info,", "=info", "net=loud"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
