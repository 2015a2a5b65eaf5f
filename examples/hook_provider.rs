//! A small service of the user, to start one's own from: it decides who may connect and what devices may do, by a file that is
//! read for each question, and prints what happens.
//!
//! ```text
//! hook_provider --listen 127.0.0.1:7070 --grants grants --token @gateway.token
//! ```
//!
//! The file has lines of words:
//!
//! ```text
//! login anna 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae
//! publish pump-1 plant/pump-1/#
//! subscribe anna plant/#
//! ```
//!
//! The long word is the SHA-256 of the password: enough to show how it works, and too little to keep passwords by.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "it is a command-line tool")]

use std::{error::Error, net::SocketAddr, path::PathBuf, process::ExitCode};

use aws_lc_rs::{constant_time, digest};
use clap::Parser;
use gateway_core::matches;
use mqtt_server::proto::{
    gateway::v1::event::Detail,
    hooks::v1::{
        Action, AuthenticateRequest, AuthenticateResponse, AuthorizeRequest, AuthorizeResponse, Decision,
        OnEventsRequest, OnEventsResponse, Principal,
        hook_provider_server::{HookProvider, HookProviderServer},
    },
};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Request, Response, Status,
    transport::{Identity, Server, ServerTlsConfig},
};

/// Decides who may connect and what devices may do.
#[derive(Parser)]
struct Args {
    /// Where the gateway finds it.
    #[arg(long, default_value = "127.0.0.1:7070")]
    listen: SocketAddr,
    /// File of logins and grants.
    #[arg(long)]
    grants: PathBuf,
    /// Token that the gateway must show, or `@FILE` with it in a file.
    #[arg(long)]
    token: Option<String>,
    /// Certificate (PEM), for `https://`.
    #[arg(long, requires = "key")]
    cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, requires = "cert")]
    key: Option<PathBuf>,
}

struct Provider {
    grants: PathBuf,
    bearer: Option<String>,
}

impl Provider {
    /// The words of the lines that begin with these two.
    fn lines(&self, kind: &str, who: &str) -> Result<Vec<String>, Status> {
        // Not OK is no answer: the gateway goes by what it remembers, or by its policy.
        let text = std::fs::read_to_string(&self.grants)
            .map_err(|error| Status::unavailable(format!("the grants cannot be read: {error}")))?;
        let lines = text.lines().filter_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some(kind) && words.next() == Some(who)).then(|| words.next())?
        });
        Ok(lines.map(str::to_owned).collect())
    }

    fn check<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let Some(bearer) = &self.bearer else { return Ok(()) };
        let shown = request.metadata().get("authorization").map_or(&[][..], |value| value.as_bytes());
        let same = constant_time::verify_slices_are_equal(shown, bearer.as_bytes()).is_ok();
        if same { Ok(()) } else { Err(Status::unauthenticated("not the gateway")) }
    }
}

#[tonic::async_trait]
impl HookProvider for Provider {
    async fn authenticate(
        &self,
        request: Request<AuthenticateRequest>,
    ) -> Result<Response<AuthenticateResponse>, Status> {
        self.check(&request)?;
        let AuthenticateRequest { username, password, .. } = request.into_inner();
        let (Some(user), Some(password)) = (username, password) else {
            return Ok(Response::new(AuthenticateResponse {
                decision: Decision::Ignore.into(),
                principal: None,
            }));
        };
        let known = self.lines("login", &user)?;
        let digest = digest::digest(&digest::SHA256, &password);
        let shown: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let same =
            |hash: &String| constant_time::verify_slices_are_equal(hash.as_bytes(), shown.as_bytes()).is_ok();
        let decision = match known.first() {
            None => Decision::Ignore,
            Some(hash) if same(hash) => Decision::Allow,
            Some(_) => Decision::Deny,
        };
        let principal = Principal { username: user, ..Principal::default() };
        Ok(Response::new(AuthenticateResponse { decision: decision.into(), principal: Some(principal) }))
    }

    async fn authorize(
        &self,
        request: Request<AuthorizeRequest>,
    ) -> Result<Response<AuthorizeResponse>, Status> {
        self.check(&request)?;
        let request = request.into_inner();
        let action = match request.action() {
            Action::Publish => "publish",
            Action::Subscribe => "subscribe",
            Action::Unspecified => return Err(Status::invalid_argument("an action that is not known")),
        };
        let subject = request.subject.unwrap_or_default();
        let user = subject.principal.unwrap_or_default().username;
        let granted = self.lines(action, &user)?;
        // A filter is no topic: only one that is granted as it stands, or lies below a granted `#`, is surely covered.
        let covers = |grant: &String| {
            *grant == request.topic
                || matches(grant, &request.topic) && !request.topic.contains(['+', '#'])
                || grant.strip_suffix('#').is_some_and(|above| {
                    !above.contains('+') && !above.is_empty() && request.topic.starts_with(above)
                })
        };
        let decision = if granted.iter().any(covers) { Decision::Allow } else { Decision::Deny };
        println!("{action} {user} {}: {}", request.topic, decision.as_str_name());
        Ok(Response::new(AuthorizeResponse { decision: decision.into() }))
    }

    async fn on_events(
        &self,
        request: Request<OnEventsRequest>,
    ) -> Result<Response<OnEventsResponse>, Status> {
        self.check(&request)?;
        let OnEventsRequest { events, dropped, .. } = request.into_inner();
        if dropped > 0 {
            println!("{dropped} events are missing here");
        }
        for event in events {
            let device = event.device_id;
            match event.detail {
                Some(Detail::Connected(_)) => println!("connected {device}"),
                Some(Detail::Disconnected(why)) => println!("disconnected {device}: {}", why.reason),
                Some(Detail::AuthFailed(_)) => println!("refused {device}"),
                other => println!("{device}: {other:?}"),
            }
        }
        Ok(Response::new(OnEventsResponse {}))
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hook_provider: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), Box<dyn Error>> {
    let token = match args.token.as_deref().map(|token| token.strip_prefix('@').ok_or(token)) {
        None => None,
        Some(Ok(file)) => Some(std::fs::read_to_string(file)?.trim().to_owned()),
        Some(Err(token)) => Some(token.to_owned()),
    };
    let bearer = token.map(|token| format!("Bearer {token}"));
    let mut server = Server::builder();
    if let (Some(cert), Some(key)) = (&args.cert, &args.key) {
        let identity = Identity::from_pem(std::fs::read(cert)?, std::fs::read(key)?);
        server = server.tls_config(ServerTlsConfig::new().identity(identity))?;
    }
    let socket = TcpListener::bind(args.listen).await?;
    println!("listening on {}", socket.local_addr()?);
    let provider = HookProviderServer::new(Provider { grants: args.grants, bearer });
    server.add_service(provider).serve_with_incoming(TcpListenerStream::new(socket)).await?;
    Ok(())
}
