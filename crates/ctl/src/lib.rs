//! `mqtt-server ctl`: the gateway's API on a command line, over the Rust client library.
//!
//! One module for each group of verbs; `output` prints what they show, as tables or as JSON; `profile` says which
//! gateway is meant; `failure` is how it ends. docs/ctl.md is the reference.
//! `output` and the command line share the name of the format.

mod failure;
mod output;
mod profile;
mod spans;
mod verbs;

use std::{
    io::{IsTerminal as _, Write as _},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::ValueEnum;
use mqtt_gateway_client::{Client, Request};

use self::{failure::Failure, output::OutputWriter};

/// What to do at which gateway.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    connection: GatewayAddress,
    /// Form of the output: tables for people, or a line of JSON for each thing
    #[arg(
        short,
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "FORMAT",
        help_heading = "Output"
    )]
    output: Format,
    /// Ask again every so many seconds and show the answer anew, until interrupted
    #[arg(short, long, global = true, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", require_equals = true, value_parser = seconds, help_heading = "Output")]
    watch: Option<f64>,
    #[command(subcommand)]
    verb: verbs::Verb,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| seconds.is_finite());
    seconds.ok_or_else(|| "it is not a number of seconds".to_owned())
}

/// Which gateway, and who asks.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(crate) struct GatewayAddress {
    /// The gateway, https://HOST:PORT, or http:// for plaintext; also MQTTCTL_ADDR. Without it that of the profile, or
    /// https://localhost:10000
    #[arg(long, global = true, value_name = "URL")]
    addr: Option<String>,
    /// The authority to trust, PEM; also MQTTCTL_CA. Without it that of the profile, or for this machine certs/ca.crt, which
    /// --dev makes, or those that the system trusts
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Token, or @FILE with it, which others do not see in the list of processes; also MQTTCTL_TOKEN
    #[arg(long, global = true, value_name = "TOKEN")]
    token: Option<String>,
    /// Certificate of this client, PEM, where the gateway asks for one; also MQTTCTL_CERT
    #[arg(long, global = true, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Its private key, PEM; also MQTTCTL_KEY
    #[arg(long, global = true, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Name in the gateway's certificate, if it is not the host of the address
    #[arg(long, global = true, value_name = "NAME")]
    server_name: Option<String>,
    /// The profile to use, see 'profile'; also MQTTCTL_PROFILE
    #[arg(long, global = true, value_name = "NAME")]
    profile: Option<String>,
    /// How long to wait for an answer, like 500ms, 30s or 2m; streams have no end
    #[arg(long, global = true, value_name = "SPAN", default_value = "30s", value_parser = spans::span)]
    timeout: Option<Duration>,
}

/// Form of the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Tables and lines for people.
    #[default]
    Table,
    /// A line of JSON for each thing.
    Json,
}

/// Context of a verb.
pub(crate) struct VerbContext {
    pub(crate) client: Client,
    pub(crate) out: OutputWriter,
    pub(crate) timeout: Duration,
}

impl VerbContext {
    /// A call with the deadline of `--timeout`.
    pub(crate) fn ask<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.timeout);
        request
    }
}

/// Runs the command; the exit codes are those of docs/ctl.md. `whole` is the definition of the program it is a part of, for
/// completion and man pages.
pub fn run(args: Args, whole: clap::Command) -> ExitCode {
    // One thread is enough, and starts fastest.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::Local(error.to_string()).tell(),
    };
    let done = runtime.block_on(work(args, whole));
    // Standard input may be read by a thread that nothing ends.
    runtime.shutdown_background();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.tell(),
    }
}

async fn work(args: Args, whole: clap::Command) -> Result<(), Failure> {
    let mut out = OutputWriter::new(args.output);
    if let Some(local) = verbs::local(&args.verb) {
        return verbs::locally(local, &args.connection, &mut out, whole);
    }
    let options = profile::options(&args.connection)?;
    let streams = args.verb.streams() || args.watch.is_some();
    let again = args.watch.filter(|_| !args.verb.streams());
    let working = async {
        let client = options.connect().await?;
        let timeout = args.connection.timeout.unwrap_or(Duration::from_secs(30));
        let mut context = VerbContext { client, out, timeout };
        loop {
            if again.is_some() {
                context.out.fresh_page()?;
            }
            args.verb.clone().run(&mut context).await?;
            context.out.flush()?;
            match again {
                Some(seconds) => {
                    tokio::time::sleep(Duration::from_secs_f64(seconds.clamp(0.1, 86_400.0))).await
                }
                None => return Ok(()),
            }
        }
    };
    if args.verb.hears_interrupts() {
        return working.await;
    }
    tokio::select! {
        done = working => done,
        interrupted = tokio::signal::ctrl_c() => match interrupted {
            Ok(()) if streams => Ok(()),
            Ok(()) => Err(Failure::Interrupted),
            Err(error) => Err(Failure::Local(error.to_string())),
        },
    }
}

/// A remark beside the output: what is missing, what is tried again.
pub(crate) fn remark(text: &str) {
    let _ = writeln!(std::io::stderr(), "mqtt-server: {text}");
}

/// Shows the progress of long work, on one line of a terminal that is written over; nothing elsewhere.
pub(crate) fn progress(text: &str) {
    let mut error = std::io::stderr();
    if error.is_terminal() {
        let end = if text.is_empty() { "" } else { "\r" };
        let _ = write!(error, "\r\x1b[K{text}{end}");
        let _ = error.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The help of a verb and of all below it.
    fn help(command: &mut clap::Command, name: &str, text: &mut String) {
        let long = command.render_long_help().to_string();
        let lines: Vec<&str> = long.lines().map(str::trim_end).collect();
        text.push_str(&format!("==== {name}\n{}\n\n", lines.join("\n").trim_end()));
        for verb in command.get_subcommands_mut().filter(|verb| verb.get_name() != "help") {
            let name = format!("{name} {}", verb.get_name());
            help(verb, &name, text);
        }
    }

    /// `MQTT_SERVER_TEST_BLESS=1` writes help.txt anew after a change that is wanted.
    #[test]
    fn the_help_of_every_verb_is_what_help_txt_says() {
        use clap::Args as _;

        let mut whole =
            Args::augment_args(clap::Command::new("ctl").bin_name("mqtt-server ctl")).term_width(120);
        whole.build();
        whole.clone().debug_assert();
        // Options of all verbs are shown once, with the first.
        let shown = |command: clap::Command| {
            command.mut_args(|arg| if arg.is_global_set() { arg.hide(true) } else { arg })
        };
        let mut text = format!("{}\n\n", whole.render_long_help());
        let mut below = String::new();
        for verb in whole.get_subcommands_mut() {
            *verb = hidden(std::mem::take(verb), &shown);
        }
        help(&mut whole, "mqtt-server ctl", &mut below);
        text = text.lines().map(|line| format!("{}\n", line.trim_end())).collect();
        let (_, verbs) = below.split_once("\n\n==== ").unwrap();
        text.push_str(&format!("==== {}\n", verbs.trim_end()));
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/help.txt");
        if std::env::var_os("MQTT_SERVER_TEST_BLESS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap_or_default();
        let differs = text.lines().zip(golden.lines()).find(|(now, golden)| now != golden);
        assert!(text == golden, "first difference (now, help.txt): {differs:?}");
    }

    /// A method of the API that no verb calls.
    #[test]
    fn every_method_of_the_api_has_a_verb() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut code = String::new();
        for folder in ["src/verbs", "../../clients/rust/src", "../../clients/rust/src/consume"] {
            for file in std::fs::read_dir(root.join(folder)).unwrap() {
                let path = file.unwrap().path();
                if path.is_file() {
                    code.push_str(&std::fs::read_to_string(path).unwrap());
                }
            }
        }
        let mut methods = 0;
        for service in
            gateway_api::json::pool().services().filter(|service| service.package_name() == "gateway.v1")
        {
            for method in service.methods() {
                let snake = method.name().chars().fold(String::new(), |mut name, c| {
                    if c.is_uppercase() && !name.is_empty() {
                        name.push('_');
                    }
                    name.extend(c.to_lowercase());
                    name
                });
                assert!(code.contains(&format!(".{snake}(")), "nothing calls {}", method.full_name());
                methods += 1;
            }
        }
        assert!(methods > 50, "{methods}");
    }

    fn hidden(command: clap::Command, shown: &impl Fn(clap::Command) -> clap::Command) -> clap::Command {
        let mut command = shown(command);
        for verb in command.get_subcommands_mut() {
            *verb = hidden(std::mem::take(verb), shown);
        }
        command
    }
}
