//! Logins that a service of the user decides about: what it is asked, and what becomes of devices while it is away, slow,
//! or talks nonsense.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use codec::Packet;
use gateway_core::Protocol;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Runtime};

use crate::{
    client::{Client, Got, from_host},
    login::{answer, login},
    support::{Server, until},
};

/// Behaviour of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    /// Allows users whose name begins with `a`, denies those with `d`, and ignores others.
    Well,
    /// Answers after 10 s.
    Slow,
    /// Closes every connection.
    Away,
    /// Answers, with no answer.
    Nonsense,
}

/// Endings of a user name `odd-…`, each for an answer of the service whatever its mood; a number is the status that it
/// answers with.
const ODD_CLOSE: &str = "close";
const ODD_NONSENSE: &str = "nonsense";
const ODD_HANG: &str = "hang";

#[derive(Default)]
struct Heard {
    mood: Mutex<Option<Mood>>,
    asked: AtomicUsize,
    last: Mutex<Value>,
}

/// A service over HTTP that tests tell how to behave.
pub(crate) struct Hook {
    heard: Arc<Heard>,
    port: u16,
    _runtime: Runtime,
}

impl Hook {
    pub(crate) fn start() -> Self {
        let runtime = Runtime::new().expect("start a runtime");
        let socket = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("bind");
        let port = socket.local_addr().expect("an address").port();
        let heard = Arc::new(Heard::default());
        let hearing = Arc::clone(&heard);
        runtime.spawn(async move {
            while let Ok((stream, _)) = socket.accept().await {
                if hearing.mood() == Mood::Away {
                    continue;
                }
                let heard = Arc::clone(&hearing);
                let service = service_fn(move |request| tell(Arc::clone(&heard), request));
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { heard, port, _runtime: runtime }
    }

    pub(crate) fn feel(&self, mood: Mood) {
        *self.heard.mood.lock() = Some(mood);
    }

    fn asked(&self) -> usize {
        self.heard.asked.load(Relaxed)
    }

    /// `[auth.http]` for it.
    pub(crate) fn config(&self, more: &str, limits: &str) -> String {
        format!(
            "[auth.http]\nurl = \"http://127.0.0.1:{}/login\"\n{more}\n[auth.http.limits]\n{limits}\n",
            self.port
        )
    }
}

impl Heard {
    fn mood(&self) -> Mood {
        self.mood.lock().unwrap_or(Mood::Well)
    }
}

async fn tell(
    heard: Arc<Heard>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Box<dyn std::error::Error + Send + Sync>> {
    let body = request.into_body().collect().await?.to_bytes();
    let question: Value = serde_json::from_slice(&body).expect("JSON from the gateway");
    let user = question["username"].as_str().unwrap_or_default().to_owned();
    heard.asked.fetch_add(1, Relaxed);
    *heard.last.lock() = question;
    match user.strip_prefix("odd-") {
        None => {}
        Some(ODD_CLOSE) => return Err("no answer to this one".into()),
        Some(ODD_NONSENSE) => return Ok(Response::new(Full::from("what?"))),
        Some(ODD_HANG) => tokio::time::sleep(Duration::from_secs(10)).await,
        Some(status) => {
            let status: u16 = status.parse()?;
            return Ok(Response::builder().status(status).body(Full::default())?);
        }
    }
    let mood = heard.mood();
    match mood {
        Mood::Slow => tokio::time::sleep(Duration::from_secs(10)).await,
        Mood::Well | Mood::Away | Mood::Nonsense => {}
    }
    let result = match user.chars().next() {
        Some('a') => "allow",
        Some('d') => "deny",
        _ => "ignore",
    };
    let text = match mood {
        Mood::Nonsense => "<html>down for maintenance</html>".to_owned(),
        // Kept alive from better times.
        Mood::Away => return Ok(Response::builder().status(503).body(Full::default()).expect("an answer")),
        Mood::Well | Mood::Slow => json!({"result": result, "is_superuser": false}).to_string(),
    };
    Ok(Response::new(Full::from(text)))
}

fn ask(server: &Server, client_id: &str, user: &str) -> Got {
    answer(server.ports.tcp, login(Protocol::V5, client_id, Some(user), Some("pw")))
}

#[test]
fn a_hook_is_asked_as_emqx_asks_and_its_answer_is_remembered() {
    let hook = Hook::start();
    let server =
        Server::start_with(&[], &hook.config("", "cache_negative_ttl = \"0s\"\nstale_if_error = \"0s\""));
    assert_eq!(ask(&server, "c1", "ann"), Got::ConnAck(0));
    let last = hook.heard.last.lock().clone();
    for (name, value) in [
        ("clientid", "c1"),
        ("username", "ann"),
        ("password", "pw"),
        ("peerhost", "127.0.0.1"),
        ("listener", "test-tcp"),
    ] {
        assert_eq!(last[name], value, "{name} in {last}");
    }
    assert_eq!(ask(&server, "c1", "ann"), Got::ConnAck(0));
    assert_eq!(hook.asked(), 1, "the second time it was remembered");
    assert_eq!(ask(&server, "c2", "ann"), Got::ConnAck(0));
    assert_eq!(hook.asked(), 2, "another device is another question");
    assert_eq!(ask(&server, "c1", "dan"), Got::ConnAck(0x87));
    assert_eq!(ask(&server, "c1", "dan"), Got::ConnAck(0x87));
    assert_eq!(ask(&server, "c1", "eve"), Got::ConnAck(0x86), "ignored, and there is no other step");
    assert_eq!(hook.asked(), 5, "a denial is not remembered here");
    assert!(!server.log().contains("\"pw\""), "a password is in the log");
}

/// Logins follow the policy in every mood of the service, connected clients notice nothing, and the service comes back
/// by itself.
#[test]
fn a_hook_that_fails_costs_its_own_logins_and_comes_back() {
    for mood in [Mood::Away, Mood::Slow, Mood::Nonsense] {
        let hook = Hook::start();
        let limits = "cache_ttl = \"1ms\"\ncache_negative_ttl = \"1ms\"\ndeadline = \"200ms\"\nretry_after = \"100ms\"\nfailures = 3";
        let server = Server::start_with(&[], &hook.config("", limits));
        let mut connected =
            Client::connect_with(server.ports.tcp, login(Protocol::V5, "old", Some("ann"), Some("pw")));
        hook.feel(mood);
        let mut number = 0;
        let mut refused = || {
            number += 1;
            assert_eq!(ask(&server, &format!("new-{number}"), "ann"), Got::ConnAck(0x88), "{mood:?}");
        };
        // Answers that are none count only if there is nothing else for some time.
        until(|| {
            refused();
            server.log().contains("left alone")
        });
        let before = hook.asked();
        (0..100).for_each(|_| refused());
        let asked = hook.asked() - before;
        assert!(asked < 50, "{mood:?}: asked {asked} times, so that nobody would have left it alone");
        assert_eq!(connected.ping(), [], "{mood:?}");
        connected.publish_acked("t", b"m", false);
        drop(connected);
        // A known login gets in: better than nothing.
        assert_eq!(ask(&server, "old", "ann"), Got::ConnAck(0), "{mood:?}");
        hook.feel(Mood::Well);
        until(|| ask(&server, "new", "ann") == Got::ConnAck(0));
        assert!(server.log().contains("answers again"), "{mood:?}");
    }
}

/// Logins of strangers from several addresses at once, each with a client id of its own, and then one good one. Returns
/// the answers to the strangers and to the good one.
pub(crate) fn beside_odd_ones(server: &Server, round: usize, odd: &str, good: &str) -> (Vec<Got>, Got) {
    let port = server.ports.tcp;
    let strangers = 2_u8..8;
    let mut odd_ones: Vec<Client> = strangers
        .map(|host| {
            let mut client = Client::over(from_host(host, port), Protocol::V5);
            let connect = login(Protocol::V5, &format!("{odd}-{round}-{host}"), Some(odd), Some("pw"));
            client.send(&Packet::Connect(Box::new(connect)));
            client
        })
        .collect();
    let good = answer(port, login(Protocol::V5, &format!("good-{round}"), Some(good), Some("pw")));
    (odd_ones.iter_mut().map(Client::next).collect(), good)
}

/// The failure: a stranger whose odd names the service answers with a status, or not at all, keeps every device out.
#[test]
fn odd_names_that_a_hook_answers_with_a_status_keep_nobody_else_out() {
    let hook = Hook::start();
    let server = Server::start_with(&[], &hook.config("", "deadline = \"3s\""));
    let all = [
        ("400", 0x87, 100),
        ("422", 0x87, 100),
        ("500", 0x88, 100),
        ("413", 0x87, 5),
        ("414", 0x87, 5),
        ("431", 0x87, 5),
        ("404", 0x88, 20),
        ("429", 0x88, 20),
        (ODD_CLOSE, 0x88, 20),
        (ODD_NONSENSE, 0x88, 20),
        (ODD_HANG, 0x88, 3),
    ];
    let (mut denied, mut begin) = (0, 0);
    for (odd, code, rounds) in all {
        for round in begin..begin + rounds {
            let (strangers, good) = beside_odd_ones(&server, round, &format!("odd-{odd}"), "ann");
            assert_eq!(good, Got::ConnAck(0), "good login {round} beside {odd}");
            assert_eq!(strangers, vec![Got::ConnAck(code); strangers.len()], "{odd}");
            denied += if code == 0x87 { strangers.len() } else { 0 };
        }
        begin += rounds;
    }
    assert_eq!(server.metric_of("gateway_auth_hook_total", "result=\"status\""), denied as u64);
    let log = server.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("answers it with a status")).collect();
    assert!(lines[0].contains("status 400") && lines[0].contains("client_id"), "{}", lines[0]);
    assert!(lines.len() * 2 < denied, "{} lines about {denied} logins", lines.len());
    assert!(!log.contains("left alone"));
}

/// The failure: while there are odd logins alone the breaker opens, and then who has always been let in is kept out.
#[test]
fn who_was_let_in_before_goes_first_while_a_hook_is_left_alone() {
    let hook = Hook::start();
    // Odd answers open it after five deadlines without another.
    let limits = "deadline = \"200ms\"\nretry_after = \"1h\"\ncache_ttl = \"0s\"\ncache_negative_ttl = \"0s\"\nstale_if_error = \"0s\"";
    let server = Server::start_with(&[], &hook.config("", limits));
    assert_eq!(ask(&server, "known", "ann"), Got::ConnAck(0));
    for opened in 1..=2 {
        let mut number = 0;
        until(|| {
            number += 1;
            assert_eq!(ask(&server, &format!("{opened}-{number}"), "odd-500"), Got::ConnAck(0x88));
            server.log().matches("left alone").count() == opened
        });
        for number in 0..100 {
            assert_eq!(ask(&server, &format!("more-{number}"), "odd-500"), Got::ConnAck(0x88));
        }
        let open = server.metric_of("gateway_auth_hook_total", "result=\"open\"");
        assert!(open >= 80, "only {open} were not asked");
        assert_eq!(ask(&server, "known", "ann"), Got::ConnAck(0), "it was let in before");
        assert!(server.log().matches("answers again").count() == opened, "one good answer closes it");
        assert_eq!(ask(&server, "new", "ann"), Got::ConnAck(0));
    }
}

/// The service comes and goes all the time.
#[test]
fn a_flapping_hook_never_ends_a_connection_or_the_gateway() {
    let hook = Hook::start();
    let limits =
        "cache_size = 1\ndeadline = \"200ms\"\nretry_after = \"10ms\"\nfailures = 1\nstale_if_error = \"0s\"";
    let server = Server::start_with(&[], &hook.config("", limits));
    let mut connected =
        Client::connect_with(server.ports.tcp, login(Protocol::V5, "old", Some("ann"), Some("pw")));
    let mut seen = [0, 0];
    for round in 0..40 {
        hook.feel(if round % 2 == 0 { Mood::Nonsense } else { Mood::Well });
        let said = |number| ask(&server, &format!("c-{round}-{number}"), "ann");
        if round % 2 == 0 {
            assert_eq!(said(0), Got::ConnAck(0x88));
            seen[0] += 1;
        } else {
            until(|| said(1) == Got::ConnAck(0));
            seen[1] += 1;
        }
        assert_eq!(connected.ping(), []);
    }
    assert_eq!(seen, [20, 20]);
}

#[test]
fn a_hook_that_nobody_hears_is_decided_by_the_policy() {
    // Nobody listens there: port 9 is not given out.
    let config = |on_error: &str| {
        format!(
            "[auth]\norder = [\"http\", \"anonymous\"]\n[auth.http]\nurl = \"http://127.0.0.1:9/\"\non_error = \"{on_error}\"\n"
        )
    };
    for (on_error, named, nobody) in [("refuse", 0x88, 0x88), ("allow", 0, 0), ("next", 0x86, 0)] {
        let server = Server::start_with(&[], &config(on_error));
        assert_eq!(ask(&server, "c1", "ann"), Got::ConnAck(named), "{on_error}");
        let anonymous = answer(server.ports.tcp, login(Protocol::V5, "c2", None, None));
        assert_eq!(anonymous, Got::ConnAck(nobody), "{on_error}");
    }
}

/// Logins that wait are bounded: one more is told that the server is busy, at once.
#[test]
fn more_logins_than_may_wait_for_a_hook_are_busy() {
    let hook = Hook::start();
    hook.feel(Mood::Slow);
    let limits = "deadline = \"60s\"\nmax_concurrent = 1\nmax_waiting = 1";
    let toml = format!("[limits]\nconnect_timeout = \"60s\"\n{}", hook.config("", limits));
    let server = Server::start_with(&[], &toml);
    let mut waits = Client::open(server.ports.tcp, Protocol::V5);
    waits.send(&Packet::Connect(Box::new(login(Protocol::V5, "c1", Some("ann"), Some("pw")))));
    until(|| hook.asked() == 1);
    for client_id in ["c2", "c3"] {
        assert_eq!(ask(&server, client_id, "ann"), Got::ConnAck(0x89));
    }
    assert_eq!(waits.next(), Got::ConnAck(0));
    assert_eq!(hook.asked(), 1);
}
