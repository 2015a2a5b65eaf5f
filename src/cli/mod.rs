//! The `mqtt-server` command: arguments, configuration, logs, runtime, signals.
//!
//! Exit codes: 0 clean, 1 failure at run time, 2 bad configuration, 3 a ledger that an operator has to look at.

mod cluster;
mod commands;
mod passwd;
mod rules;
mod store;
mod supervisor;
mod token;

use std::{
    collections::BTreeMap,
    fmt::Display,
    io::Write as _,
    path::Path,
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use clap::{CommandFactory as _, Parser as _, error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand};
use config::{Address, Config, DEV_CERTS_DIR, Flags, kubernetes_variables};
use edge::{
    reload::Reloads,
    secret_files,
    tls::{self, TlsStore},
};
use telemetry::{ReadRows, Telemetry};
use tokio::{
    runtime::{Builder, Runtime},
    time::Instant,
};
use tracing::{debug, info, warn};

use self::commands::{Command, CommandLine};
use crate::{
    cluster::ClusterMember,
    gateway::{Gateway, StartError},
    shutdown::{Shutdown, Signals},
};
use auth::{abuse::BanRegistry, backends::BackendAuthenticator};
use bridges::PlannedBridges;

/// Time beyond `shutdown.deadline` that an orderly end may take before the process ends regardless.
const MARGIN: Duration = Duration::from_secs(1);

/// Runs the command with the arguments of the process.
pub fn main() -> ExitCode {
    let CommandLine { flags, command } = match CommandLine::try_parse() {
        Ok(line) => line,
        // Help and the version are errors to the parser.
        Err(error) if !error.use_stderr() || error.kind() == DisplayHelpOnMissingArgumentOrSubcommand => {
            error.exit()
        }
        Err(error) => return fail(2, &on_one_line(&error.to_string())),
    };
    if let Some(command) = &command {
        let done = match command {
            Command::Cluster(command) => cluster::run(command, load),
            Command::Import(command) => import::run(command),
            Command::Passwd(command) => passwd::run(command),
            Command::Rules(command) => rules::run(command),
            Command::Store(command) => store::run(command),
            Command::Token(command) => token::run(command),
            Command::Ctl(args) => return ctl::run(args.as_ref().clone(), CommandLine::command()),
        };
        return done.unwrap_or_else(|error| fail(1, &error));
    }
    let config = match load(&flags) {
        Ok(config) => config,
        Err(error) => return fail(2, &error),
    };
    if flags.check {
        return match check(&config) {
            Ok(()) => say(&format!("configuration is valid\n{}", config.memory_summary())),
            Err(error) => fail(2, &error),
        };
    }
    let threads = config.effective_shards().clamp(1, 4);
    let runtime = Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    // Signals have a thread of their own: they are heard even while all others are busy.
    let signals = Builder::new_current_thread().enable_all().build();
    match (runtime, signals) {
        (Ok(runtime), Ok(signals)) => {
            // A start that fails leaves the runtime of the signals here: none may be dropped inside another.
            let mut signals = Some(signals);
            let code = runtime.block_on(run(config, &mut signals));
            // Tasks that still run have had their time, and end with the process.
            runtime.shutdown_background();
            code
        }
        (Err(error), _) | (_, Err(error)) => fail(1, &error),
    }
}

fn load(flags: &Flags) -> Result<Config, Box<dyn std::error::Error>> {
    let env = environment();
    let text = match flags.config_file(&env) {
        None => None,
        Some(path) => Some(
            std::fs::read_to_string(&path)
                .map_err(|error| format!("read {}: {error}; check --config", path.display()))?,
        ),
    };
    Ok(Config::load(flags, text.as_deref(), &env)?)
}

/// Reads the files that the configuration names, and logs what is allowed but worth a warning.
fn check(config: &Config) -> Result<(), Box<dyn std::error::Error>> {
    #[expect(clippy::disallowed_methods, reason = "certificates are dated by the wall clock")]
    let now = SystemTime::now();
    tls::check_files_at(config, now)?;
    let open = secret_files::check(config)?;
    config.database_password()?;
    BackendAuthenticator::open(&config.backends)?;
    let certificates = TlsStore::new();
    for (name, files) in config.tls_uses() {
        // The files were just read without fault.
        let _ = certificates.add(&name, files, &[]);
    }
    let notices = certificates.notices(now).into_iter().map(|notice| notice.text);
    auth::check_files(config)?;
    auth::open_rules(config, None, config.reserved_topics())?;
    PlannedBridges::open(config)?;
    BanRegistry::open(&config.bans, None)?;
    let lacks = cluster::lacks(config)?;
    for warning in config
        .anonymous_warning()
        .into_iter()
        .chain(config.warnings())
        .chain(open)
        .chain(notices)
        .chain(lacks)
    {
        let _ = writeln!(std::io::stderr(), "mqtt-server: warning: {warning}");
    }
    Ok(())
}

/// Variables of other programs may be anything; those that are not text are left out.
fn environment() -> BTreeMap<String, String> {
    let variables = std::env::vars_os();
    variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// Runs the gateway until it is asked to end; takes the runtime of the signals once it has started.
async fn run(config: Config, signals_runtime: &mut Option<Runtime>) -> ExitCode {
    let (dev, plain, deadline) = (config.dev, config.non_tls, config.shutdown.deadline.0);
    let telemetry = match Telemetry::start(&config.log, &config.otel) {
        Ok(telemetry) => telemetry,
        Err(error) => return fail(1, &error),
    };
    let installed = {
        let _entered = signals_runtime.as_ref().map(Runtime::enter);
        Signals::install()
    };
    let signals = match installed {
        Ok(signals) => signals,
        Err(error) => return fail(1, &error),
    };
    let env = environment();
    let ignored = kubernetes_variables(&env);
    if !ignored.is_empty() {
        debug!(
            variables = ignored.join(" "),
            "variables that Kubernetes sets for a Service of this name are ignored"
        );
    }
    let asks = config.backends.is_on() || config.grpc.tls && config.grpc.require_client_cert;
    if !asks {
        warn!("backends may do everything: nothing checks who calls; see docs/security/backends.md");
    }
    info!("{}", config.memory_summary());
    let shutdown = Shutdown::new();
    let reloads = Arc::new(OnceLock::<Arc<Reloads>>::new());
    let reloaded = Arc::clone(&reloads);
    let reload = move || {
        supervisor::reloading();
        drop(reloaded.get().map(|reloads| reloads.reload_all()));
        supervisor::ready();
    };
    let heard = signals.run(shutdown.clone(), reload, deadline + MARGIN, || std::process::exit(1));
    let signals_runtime = signals_runtime.take();
    let listening = std::thread::Builder::new().name("signals".to_owned());
    if let Err(error) = listening.spawn(move || signals_runtime.map(|runtime| runtime.block_on(heard))) {
        return fail(1, &error);
    }
    let running = match config.cluster.is_on() {
        false => match Gateway::builder(config).start().await {
            Ok(gateway) => RunningGateway::Alone(Box::new(gateway)),
            Err(error @ (StartError::Config(_) | StartError::Tls { .. })) => return fail(2, &error),
            Err(error) => return fail(1, &error),
        },
        true => match ClusterMember::start(config) {
            Ok(member) => RunningGateway::InCluster(Box::new(member)),
            Err(error) => return fail(error.code(), &error),
        },
    };
    for (listener, address) in running.addresses() {
        info!(listener, %address, "listening");
    }
    if let (true, RunningGateway::Alone(gateway)) = (dev, &running) {
        let _ = say(&welcome(gateway, plain));
    }
    if let Some(audit) = telemetry.audit() {
        running.reloads().add(Arc::clone(audit) as _);
    }
    let _ = reloads.set(Arc::clone(running.reloads()));
    telemetry.export(running.metrics());
    supervisor::ready();
    let silence = running.silence();
    let asked = async {
        tokio::select! {
            () = shutdown.wait() => {}
            () = supervisor::beat(silence) => {}
        }
        supervisor::stopping();
    };
    let begun;
    match running {
        RunningGateway::Alone(gateway) => {
            asked.await;
            begun = Instant::now();
            gateway.shutdown().await;
        }
        RunningGateway::InCluster(mut member) => {
            if let Err(error) = member.run(asked).await {
                return fail(error.code(), &error);
            }
            begun = Instant::now();
            member.gateway.end().await;
        }
    }
    telemetry.stop(deadline.saturating_sub(begun.elapsed())).await;
    ExitCode::SUCCESS
}

/// A gateway that has started.
enum RunningGateway {
    Alone(Box<Gateway>),
    InCluster(Box<ClusterMember>),
}

impl RunningGateway {
    fn addresses(&self) -> &[(String, Address)] {
        match self {
            Self::Alone(gateway) => gateway.addresses(),
            Self::InCluster(member) => member.gateway.addresses(),
        }
    }

    fn reloads(&self) -> &Arc<Reloads> {
        match self {
            Self::Alone(gateway) => gateway.reloads(),
            Self::InCluster(member) => member.gateway.reloads(),
        }
    }

    fn metrics(&self) -> ReadRows {
        match self {
            Self::Alone(gateway) => gateway.metrics(),
            Self::InCluster(member) => member.gateway.metrics(),
        }
    }

    fn silence(&self) -> Box<dyn Fn() -> Duration + Send + Sync> {
        match self {
            Self::Alone(gateway) => Box::new(gateway.silence()),
            Self::InCluster(member) => Box::new(member.gateway.silence()),
        }
    }
}

/// Addresses, and the next things to try.
fn welcome(gateway: &Gateway, plain: bool) -> String {
    let mut text = String::from("\nmqtt-server is running (development mode)\n");
    for (name, address) in gateway.addresses() {
        text.push_str(&format!("  {name:<10} {address}\n"));
    }
    let ca = Path::new(DEV_CERTS_DIR).join("ca.crt");
    let ca = ca.display();
    let port = |name| gateway.address(name).map_or(0, |address| address.port());
    let (grpc, mqtt) = (port("grpc"), port("default"));
    let program = std::env::args().next().unwrap_or_else(|| "mqtt-server".to_owned());
    let addr = if grpc == 10_000 { String::new() } else { format!("--addr https://localhost:{grpc} ") };
    let tls = if plain { String::new() } else { format!("--cafile {ca} ") };
    text.push_str(&format!(
        "\nTry, each in its own terminal:\n  \
         mosquitto_sub {tls}-h localhost -p {mqtt} -t 'demo/#' -v\n  \
         mosquitto_pub {tls}-h localhost -p {mqtt} -i device-1 -t demo/temperature -m 21.5\n  \
         {program} ctl {addr}latest get demo/temperature\n\
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

/// The one form in which failures to run are reported, before there is a log and after: a line for each problem, with
/// cause and remedy.
fn fail(code: u8, problem: &dyn Display) -> ExitCode {
    for line in problem.to_string().lines() {
        let _ = writeln!(std::io::stderr(), "mqtt-server: {line}");
    }
    ExitCode::from(code)
}

/// Puts the words of the flag parser, which fill several lines, on one line, without the usage.
fn on_one_line(text: &str) -> String {
    let lines =
        text.lines().map(|line| line.trim().trim_start_matches("error: ").trim_start_matches("tip: "));
    let lines =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let mut said = String::new();
    for line in lines.filter(|line| !line.is_empty()) {
        let between = match said.is_empty() {
            true => "",
            false if said.ends_with(':') => " ",
            false => "; ",
        };
        said.push_str(between);
        said.push_str(line.trim_matches(['[', ']']));
    }
    if !said.contains("; ") {
        said.push_str("; 'mqtt-server --help' lists all flags");
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_flag_is_told_on_one_line_with_what_was_meant() {
        for (args, said) in [
            (&["--adr", "x"][..], "unexpected argument '--adr' found; a similar argument exists: '--addr'"),
            (
                &["--log-format", "x"],
                "invalid value 'x' for '--log-format <FORMAT>'; possible values: auto, human, json",
            ),
            (&["--qqq"], "unexpected argument '--qqq' found; 'mqtt-server --help' lists all flags"),
            (
                &["store", "check"],
                "the following required arguments were not provided: <DIR>; 'mqtt-server --help'",
            ),
        ] {
            let error = CommandLine::try_parse_from(["mqtt-server"].iter().chain(args)).unwrap_err();
            let line = on_one_line(&error.to_string());
            assert!(line.starts_with(said) && !line.contains('\n'), "{line}");
        }
    }
}
