//! The `mqtt-server` command: arguments, configuration, logs, runtime, signals.
//!
//! Exit codes: 0 clean, 1 failure at run time, 2 bad configuration.

mod store_command;

use std::{collections::BTreeMap, io::Write as _, path::Path, process::ExitCode, sync::Arc};

use clap::Parser as _;
use mqtt_server::{
    config::{Command, Config, DEV_CERTS_DIR, Flags},
    gateway::{Gateway, StartError},
    shutdown::{Shutdown, Signals},
    telemetry::Telemetry,
    tls,
};
use tokio::time::Instant;
use tracing::{error, info, warn};

#[cfg(not(target_env = "msvc"))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let flags = Flags::parse();
    if let Some(Command::Store(command)) = &flags.command {
        return store_command::run(command).unwrap_or_else(|error| fail(1, &*error));
    }
    let config = match load(&flags) {
        Ok(config) => config,
        Err(error) => return fail(2, &*error),
    };
    if flags.check {
        return match tls::check_files(&config).and_then(|()| config.database_password().map(drop)) {
            Ok(()) => say("configuration is valid"),
            Err(error) => fail(2, &error),
        };
    }
    let threads = config.effective_shards().clamp(1, 4);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    match runtime {
        Ok(runtime) => runtime.block_on(run(config)),
        Err(error) => fail(1, &error),
    }
}

fn load(flags: &Flags) -> Result<Config, Box<dyn std::error::Error>> {
    let env: BTreeMap<String, String> = std::env::vars().collect();
    let text = match flags.config_file(&env) {
        None => None,
        Some(path) => Some(
            std::fs::read_to_string(&path)
                .map_err(|error| format!("read {}: {error}; check --config", path.display()))?,
        ),
    };
    Ok(Config::load(flags, text.as_deref(), &env)?)
}

async fn run(config: Config) -> ExitCode {
    let (dev, plain, deadline) = (config.dev, config.non_tls, config.shutdown.deadline.0);
    let telemetry = match Telemetry::start(&config.log, &config.otel) {
        Ok(telemetry) => telemetry,
        Err(error) => return fail(1, &error),
    };
    let signals = match Signals::install() {
        Ok(signals) => signals,
        Err(error) => return fail(1, &error),
    };
    if !config.tls.require_client_cert {
        warn!("devices are anonymous: nothing checks who connects; see docs/operations.md");
    }
    let gateway = match Gateway::builder(config).start().await {
        Ok(gateway) => gateway,
        Err(error @ (StartError::Config(_) | StartError::Tls { .. })) => return fail(2, &error),
        Err(error) => return fail(1, &error),
    };
    for (listener, address) in gateway.addresses() {
        info!(listener, %address, "listening");
    }
    if dev {
        let _ = say(&welcome(&gateway, plain));
    }
    let shutdown = Shutdown::new();
    let tls = Arc::clone(gateway.tls());
    let reload = move || tls.reload_and_log();
    tokio::spawn(signals.run(shutdown.clone(), reload, || std::process::exit(1)));
    telemetry.export(gateway.metrics());
    shutdown.wait().await;
    let asked = Instant::now();
    gateway.shutdown().await;
    telemetry.stop(deadline.saturating_sub(asked.elapsed())).await;
    ExitCode::SUCCESS
}

/// Addresses and what to try next.
fn welcome(gateway: &Gateway, plain: bool) -> String {
    let mut text = String::from("\nmqtt-server is running (development mode)\n");
    for (name, address) in gateway.addresses() {
        text.push_str(&format!("  {name:<10} {address}\n"));
    }
    let ca = Path::new(DEV_CERTS_DIR).join("ca.crt");
    let ca = ca.display();
    let port = |name| gateway.address(name).map_or(0, |address| address.port());
    let (grpc, mqtt) = (port("grpc"), port("default"));
    let tls = if plain { String::new() } else { format!("--cafile {ca} ") };
    text.push_str(&format!(
        "\nTry, each in its own terminal:\n  \
         mosquitto_sub {tls}-h localhost -p {mqtt} -t 'demo/#' -v\n  \
         mosquitto_pub {tls}-h localhost -p {mqtt} -i device-1 -t demo/temperature -m 21.5\n  \
         cargo run --release --example grpc_client -- --addr https://localhost:{grpc} --ca {ca} \\\n      latest demo/temperature\n\
         More in README.md. Stop with Ctrl-C.\n"
    ));
    text
}

fn say(text: &str) -> ExitCode {
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn fail(code: u8, problem: &dyn std::error::Error) -> ExitCode {
    // Before there are logs, and where they are silent, plain words.
    if tracing::enabled!(tracing::Level::ERROR) {
        error!(%problem, "mqtt-server ends");
    } else {
        let _ = writeln!(std::io::stderr(), "mqtt-server: {problem}");
    }
    ExitCode::from(code)
}
