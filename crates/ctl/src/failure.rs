//! Failure of a command: its message and its exit code.

use std::{io, io::Write as _, process::ExitCode};

use mqtt_gateway_client::{Code, Error, Reason};

/// Reason for which a command did not do its work.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The gateway refused, or was not there.
    Call(Error),
    /// The command line, a file or a profile is not valid.
    Usage(String),
    /// Something on this machine, or an outcome that is none: dropped, rejected, denied.
    Local(String),
    /// Something that was asked for is not there.
    Absent(String),
    /// The answer is no, and was printed.
    No,
    /// Nobody reads the output any more, which ends it without a fault; or it cannot be written.
    Output(io::Error),
    /// Ctrl-C before it was done.
    Interrupted,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Call(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl Failure {
    /// Says it on one line and gives the exit code of docs/ctl.md.
    pub(crate) fn tell(self) -> ExitCode {
        let (code, text) = match &self {
            Self::Call(error) => (exit_code(error), in_words(error)),
            Self::Usage(text) => (2, text.clone()),
            Self::Local(text) => (1, text.clone()),
            Self::Absent(text) => (4, text.clone()),
            Self::No => return ExitCode::from(1),
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
            Self::Output(error) => (1, format!("write the output: {error}")),
            Self::Interrupted => return ExitCode::from(130),
        };
        let text = text.replace(['\n', '\r'], " ");
        let _ = writeln!(io::stderr(), "mqtt-server: {text}");
        ExitCode::from(code)
    }
}

fn exit_code(error: &Error) -> u8 {
    match (error.reason(), error.code()) {
        (Reason::BadOptions, _) => 2,
        (Reason::Unreachable, _) => 3,
        (_, Code::InvalidArgument) => 2,
        (_, Code::NotFound) => 4,
        (_, Code::Unauthenticated | Code::PermissionDenied) => 5,
        (_, Code::DeadlineExceeded) => 6,
        _ => 1,
    }
}

fn in_words(error: &Error) -> String {
    match hint(error) {
        Some(hint) => format!("{error}; {hint}"),
        None => error.to_string(),
    }
}

/// Returns a remedy for an error, if one is known.
fn hint(error: &Error) -> Option<&'static str> {
    Some(match error.reason() {
        Reason::Unreachable if error.to_string().contains("certificate: UnknownIssuer") => {
            "--ca FILE has the authority that signed the gateway's certificate; that of --dev is certs/ca.crt where it runs"
        }
        Reason::Unreachable => {
            "is the gateway running there, is this its gRPC address, and does it speak TLS (https://) or not (http://)? --addr and \
             --ca say which"
        }
        Reason::NoAnswerInTime => "--timeout gives it longer",
        Reason::DeviceNotFound => "'mqtt-server ctl devices list' shows those that have one",
        Reason::DeviceOffline => {
            "without --fail-offline the message waits for it; --wait lets a command wait"
        }
        Reason::GroupNotFound => "'mqtt-server ctl groups create' makes one",
        Reason::GroupExists => {
            "'mqtt-server ctl groups get' shows it, 'groups update' changes it, but not its filter"
        }
        Reason::DeviceUnknown => "--username, --common-name, --group and --claim do so",
        Reason::VersionConflict => "read it again with 'mqtt-server ctl shadow get'",
        Reason::TokenNotFound => "'mqtt-server ctl security tokens list' shows them",
        Reason::TooManyTraces => "see 'mqtt-server ctl devices trace --off'",
        Reason::WaitIncomplete => "--timeout gives it longer",
        Reason::LatestOff | Reason::GroupsDisabled | Reason::ShadowsDisabled | Reason::CommandsDisabled => {
            "the gateway's configuration decides that"
        }
        _ => match error.code() {
            Code::Unauthenticated => {
                "--token @FILE, or --cert and --key, show who asks; see docs/security.md"
            }
            Code::Unimplemented => "the gateway is older than this command",
            _ => return None,
        },
    })
}
