//! Logins of devices: each step of `[auth]`, and the fate of a client that the step does not know. A step without a row
//! that lets in and one that does not fails the test.

use std::{fs, net::Ipv4Addr, path::Path, sync::Arc};

use bytes::Bytes;
use codec::{Connect, Packet};
use gateway_core::Protocol;
use mqtt_server::config::AuthStep;
use rustls::ClientConfig;
use serde_json::{Value, json};

use super::{
    lines,
    ways::{Devices, Way},
};
use crate::{
    client::{Client, Got, hello},
    enhanced::{answer_by_scram, with_keys},
    hooks::Hook,
    login::{added, seconds_from_now, token},
    provider::Provider,
    support::{Server, root, until, write_secret},
};

const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";
const OTHER_SECRET: &[u8] = b"another secret, which nobody here knows";

/// Answer to a CONNECT: the code in MQTT 5, in MQTT 3, and the reason that is counted.
type Answer = (u8, u8, &'static str);
const IN: Answer = (0, 0, "");
const WRONG: Answer = (0x86, 4, "credentials");
const NOT: Answer = (0x87, 5, "not_authorized");
const ID: Answer = (0x85, 2, "client_id");
/// The method is offered to nobody, so that nothing is refused by authentication; MQTT 3 has none.
const METHOD: Answer = (0x8C, 5, "");
const BANNED: Answer = (0x8A, 5, "banned");

/// Bans, which hold for their clients whatever credentials they show.
const BANS: &str = r#"
[[bans]]
client_id = "banned-id"
[[bans]]
username = "eve"
[[bans]]
username = "tina"
[[bans]]
common_name = "stolen"
"#;

/// A login: the step that decides, if one does; the chain of the listener; what is brought; what comes of it.
struct Login {
    step: &'static str,
    chain: &'static str,
    /// Common name; none is no certificate, an empty one a certificate without a name.
    certificate: Option<&'static str>,
    user: Option<&'static str>,
    /// As [`brought`] reads it.
    password: &'static str,
    client_id: &'static str,
    answer: Answer,
}

/// Chains of steps, for each a listener of each kind.
const CHAINS: [(&str, &str); 4] = [
    ("all", r#"["certificate", "jwt", "scram", "password", "http"]"#),
    ("remote", r#"["password", "grpc"]"#),
    ("open", r#"["password", "anonymous"]"#),
    ("anybody", r#"["anonymous"]"#),
];

#[rustfmt::skip]
const LOGINS: &[Login] = &[
    //    step           chain      certificate  user            password                client id  answer
    login("certificate", "all",     Some("d1"),  None,           "",                     "d1",      IN),
    login("certificate", "all",     Some("d1"),  Some("pat"),    "only-a-guess",         "d1",      IN),
    login("certificate", "all",     Some("d1"),  None,           "",                     "d2",      ID),
    login("certificate", "all",     Some(""),    None,           "",                     "d1",      NOT),
    login("jwt",         "all",     None,        None,           "token",                "d1",      IN),
    login("jwt",         "all",     None,        Some("any"),    "token",                "d1",      IN),
    login("jwt",         "all",     None,        None,           "token",                "d2",      ID),
    login("jwt",         "all",     None,        None,           "expired token",        "d1",      NOT),
    login("jwt",         "all",     None,        None,           "token for another",    "d1",      NOT),
    login("jwt",         "all",     None,        None,           "token of another key", "d1",      WRONG),
    login("jwt",         "all",     None,        None,           "method token",         "d1",      IN),
    login("jwt",         "all",     None,        None,           "method token",         "d2",      ID),
    login("jwt",         "all",     None,        None,           "method expired token", "d1",      NOT),
    login("jwt",         "all",     None,        None,           "method token of another key", "d1", WRONG),
    login("jwt",         "open",    None,        None,           "method token",         "d1",      METHOD),
    login("scram",       "all",     None,        Some("sam"),    "scram correct-horse-7", "d1",     IN),
    login("scram",       "all",     Some("d1"),  Some("sam"),    "scram correct-horse-7", "d1",     IN),
    login("scram",       "all",     Some("d1"),  Some("sam"),    "scram correct-horse-7", "d2",     ID),
    login("scram",       "all",     None,        Some("sam"),    "scram only-a-guess",   "d1",      WRONG),
    login("scram",       "all",     None,        Some("pat"),    "scram correct-horse-7", "d1",     WRONG),
    login("scram",       "all",     None,        Some("bob"),    "scram only-a-guess",   "d1",      WRONG),
    login("scram",       "open",    None,        Some("sam"),    "scram correct-horse-7", "d1",     METHOD),
    login("password",    "all",     None,        Some("sam"),    "correct-horse-7",      "d1",      IN),
    login("password",    "all",     None,        Some("pat"),    "correct-horse-7",      "d1",      IN),
    login("password",    "open",    None,        Some("pat"),    "correct-horse-7",      "d1",      IN),
    login("password",    "all",     None,        Some("pat"),    "only-a-guess",         "d1",      WRONG),
    login("password",    "open",    None,        Some("pat"),    "only-a-guess",         "d1",      WRONG),
    login("http",        "all",     None,        Some("alice"),  "asked-elsewhere",      "d1",      IN),
    login("http",        "all",     None,        Some("dora"),   "asked-elsewhere",      "d1",      NOT),
    login("grpc",        "remote",  None,        Some("alice"),  "asked-elsewhere",      "d1",      IN),
    login("grpc",        "remote",  None,        Some("dora"),   "asked-elsewhere",      "d1",      NOT),
    login("anonymous",   "open",    None,        None,           "",                     "d1",      IN),
    login("anonymous",   "open",    None,        Some("bob"),    "",                     "d1",      IN),
    login("anonymous",   "anybody", None,        Some("bob"),    "never-looked-at",      "d1",      IN),
    login("anonymous",   "open",    None,        Some("bob"),    "only-a-guess",         "d1",      WRONG),
    login("ban",         "all",     None,        Some("pat"),    "correct-horse-7",      "banned-id", BANNED),
    login("ban",         "open",    None,        Some("eve"),    "",                     "d1",      BANNED),
    login("ban",         "all",     Some("stolen"), None,        "",                     "stolen",  BANNED),
    login("ban",         "all",     None,        None,           "token of tina",        "d1",      BANNED),
    // Nobody knows whose it is.
    login("",            "all",     None,        None,           "",                     "d1",      NOT),
    login("",            "all",     None,        Some("pat"),    "",                     "d1",      WRONG),
    login("",            "remote",  None,        Some("bob"),    "only-a-guess",         "d1",      WRONG),
    login("",            "all",     None,        Some("bob"),    "only-a-guess",         "d1",      WRONG),
    login("",            "all",     None,        None,           "no.token.at-all",      "d1",      WRONG),
];

/// With `auth.jwt.in_username`.
#[rustfmt::skip]
const LOGINS_BY_NAME: &[Login] = &[
    login("jwt",         "all",     None,        Some("token"),                "",       "d1",      IN),
    login("jwt",         "all",     None,        Some("token"),                "only-a-guess", "d1",      IN),
    login("jwt",         "all",     None,        Some("expired token"),        "",       "d1",      NOT),
    login("jwt",         "all",     None,        Some("token of another key"), "",       "d1",      WRONG),
    login("jwt",         "all",     None,        Some("token"),                "",       "d2",      ID),
    login("",            "all",     None,        None,                         "token",  "d1",      WRONG),
];

const fn login(
    step: &'static str,
    chain: &'static str,
    certificate: Option<&'static str>,
    user: Option<&'static str>,
    password: &'static str,
    client_id: &'static str,
    answer: Answer,
) -> Login {
    Login { step, chain, certificate, user, password, client_id, answer }
}

/// Stands before a password that is proved by SCRAM, which only MQTT 5 has.
const SCRAM: &str = "scram ";
/// Stands before a token that is presented by the method JWT, which only MQTT 5 has.
const METHOD_JWT: &str = "method ";

/// A password, or the token that is described so.
fn brought(what: &str) -> String {
    let claims = |user, seconds, audience| json!({"sub": user, "exp": seconds_from_now(seconds), "device": "d1", "aud": audience});
    match what.strip_prefix(METHOD_JWT).unwrap_or(what) {
        "token" => token(SECRET, &claims("tom", 3_600, "gateway")),
        "token of tina" => token(SECRET, &claims("tina", 3_600, "gateway")),
        "expired token" => token(SECRET, &claims("tom", -3_600, "gateway")),
        "token for another" => token(SECRET, &claims("tom", 3_600, "another")),
        "token of another key" => token(OTHER_SECRET, &claims("tom", 3_600, "gateway")),
        text => text.strip_prefix(SCRAM).unwrap_or(text).to_owned(),
    }
}

/// The steps that the configuration knows.
fn steps() -> Vec<String> {
    // The error about an unknown word names all known ones.
    let error = serde_json::from_str::<AuthStep>("\"?\"").expect_err("no step").to_string();
    error.split('`').skip(3).step_by(2).map(str::to_owned).collect()
}

#[test]
fn each_step_has_a_row_that_lets_in_and_one_that_does_not() {
    let steps = steps();
    assert!(steps.len() >= 5 && steps.iter().any(|step| step == "password"), "{steps:?}");
    let page = fs::read_to_string(root().join("docs/security/devices.md")).expect("read the page");
    for step in &steps {
        let rows = || LOGINS.iter().filter(|row| row.step == step);
        assert!(rows().any(|row| row.answer == IN), "no row where {step} lets in");
        assert!(rows().any(|row| row.answer != IN), "no row where {step} does not");
        assert!(page.contains(&format!("\n| `{step}` |")), "docs/security/devices.md has no row for {step}");
    }
    assert!(
        LOGINS.iter().all(|row| matches!(row.step, "" | "ban") || steps.iter().any(|step| step == row.step))
    );
}

fn setup(dir: &Path, more: &str) -> String {
    let file = dir.join("passwords");
    added(&file, "pat", "correct-horse-7");
    with_keys(&file, "sam");
    write_secret(&dir.join("secret"), SECRET);
    fs::write(dir.join("bans"), BANS).expect("write the bans");
    let mut toml = format!(
        "log.level = \"debug\"\nbans.file = \"{0}/bans\"\n[auth]\npassword_file = \"{0}/passwords\"\n[auth.certificate]\nclient_id = \"{{cn}}\"\n\
         [auth.jwt]\nsecret_file = \"{0}/secret\"\nclient_id = \"device\"\naudience = [\"gateway\"]\n{more}\n",
        dir.display()
    );
    for (chain, steps) in CHAINS {
        for way in Way::ALL {
            let ca = format!("client_ca = \"{}/devices.crt\"", dir.display());
            let ca = if way.is_tls() { ca.as_str() } else { "" };
            toml += &format!(
                "[[listeners]]\nname = \"{chain}-{0}\"\nkind = \"{0}\"\naddress = \"127.0.0.1:0\"\nauth = {steps}\n{ca}\n",
                way.kind()
            );
        }
    }
    toml
}

/// Denials by what is counted: the reason of a failure, a ban, and every CONNECT that is refused.
fn denials(server: &Server) -> Vec<(String, u64)> {
    let page = server.http_get("/metrics").expect("read the metrics");
    let failures = page
        .lines()
        .filter_map(|line| line.strip_prefix("mqtt_auth_failures_total{reason=\"")?.split_once("\"} "));
    let bans = page.lines().filter_map(|line| Some(("banned", line.strip_prefix("mqtt_banned_total ")?)));
    let refused = "mqtt_connections_refused_total{reason=\"connack\"} ";
    let refused = page.lines().filter_map(|line| Some(("any", line.strip_prefix(refused)?)));
    let count = |text: &str| text.parse::<f64>().expect("a count") as u64;
    let all: Vec<_> =
        failures.chain(bans).chain(refused).map(|(what, text)| (what.to_owned(), count(text))).collect();
    assert!(["banned", "any"].iter().all(|known| all.iter().any(|(what, _)| what == known)), "{all:?}");
    all
}

fn matrix(logins: &[Login], more: &str) {
    let dir = tempfile::tempdir().expect("make a directory");
    let devices = Devices::new();
    fs::write(dir.path().join("devices.crt"), &devices.pem).expect("write the authority");
    let server = Server::start_with(&[], &setup(dir.path(), more));
    let mut tried = 0;
    // The log has five lines in ten seconds about one address.
    let mut host = 0_u8;
    for row in logins {
        let tls = devices.config(&server.ca(), row.certificate);
        for way in Way::ALL.into_iter().filter(|way| way.is_tls() || row.certificate.is_none()) {
            host += 1;
            for protocol in [Protocol::V5, Protocol::V4, Protocol::V3] {
                attempt(&server, row, way, protocol, Ipv4Addr::new(127, 0, 1, host), &tls);
                tried += 1;
            }
        }
    }
    assert!(tried >= 6 * logins.len());
    let log = server.log();
    let texts = logins.iter().flat_map(|row| [row.password, row.user.unwrap_or_default()]);
    for secret in texts.filter(|text| text.contains(['-', ' '])).map(brought) {
        assert!(!log.contains(&secret), "{secret} is in the log");
    }
    assert!(!log.contains("eyJ"), "the head of a token is in the log");
}

fn attempt(
    server: &Server,
    row: &Login,
    way: Way,
    protocol: Protocol,
    from: Ipv4Addr,
    tls: &Arc<ClientConfig>,
) {
    let listener = format!("{}-{}", row.chain, way.kind());
    let said = format!(
        "{:?} {:?} {:?} as {} at {listener}, {protocol:?}",
        row.certificate, row.user, row.password, row.client_id
    );
    let mut connect = Connect {
        username: row.user.map(brought),
        password: Some(brought(row.password)).filter(|text| !text.is_empty()).map(Bytes::from),
        ..hello(protocol, row.client_id)
    };
    if protocol != Protocol::V5 && connect.username.is_none() && connect.password.is_some() {
        // Only MQTT 5 has passwords without a user name.
        return;
    }
    let by_scram = row.password.starts_with(SCRAM);
    let by_token = row.password.starts_with(METHOD_JWT);
    if by_token {
        connect.auth_method = Some("JWT".to_owned());
        connect.auth_data = connect.password.take();
    }
    if (by_scram || by_token) && protocol != Protocol::V5 {
        return;
    }
    let before = denials(server);
    let (stream, own) =
        way.open(from, server.port(&listener), tls).unwrap_or_else(|error| panic!("{said}: {error}"));
    let mut client = Client::on(stream, protocol);
    let answer = if by_scram {
        let connect = Connect { username: None, password: None, ..connect };
        answer_by_scram(&mut client, connect, row.user.unwrap_or_default(), &brought(row.password))
    } else {
        client.send(&Packet::Connect(Box::new(connect)));
        client.next()
    };
    let (five, three, reason) = row.answer;
    let code = if protocol.is_v5() { five } else { three };
    assert_eq!(answer, Got::ConnAck(code), "{said}");
    let after = denials(server);
    for ((name, before), (_, after)) in before.iter().zip(&after) {
        let expected = name == reason || name == "any" && row.answer != IN;
        assert_eq!(after - before, u64::from(expected), "{name} counted for {said}");
    }
    let refusals = lines(server, "CONNECT refused", own);
    if row.answer == IN {
        assert_eq!(refusals, Vec::<Value>::new(), "{said}");
        assert_eq!(client.ping(), [], "{said}");
        return;
    }
    assert_eq!(client.next(), Got::Closed, "{said}");
    until(|| !lines(server, "CONNECT refused", own).is_empty());
    let line = &lines(server, "CONNECT refused", own)[0];
    assert_eq!(
        (&line["listener"], &line["client_id"]),
        (&json!(listener), &json!(row.client_id)),
        "{said}: {line}"
    );
    let word = match reason {
        "credentials" => "bad_user_name_or_password",
        "client_id" => "client_identifier_not_valid",
        "" => "bad_authentication_method",
        other => other,
    };
    assert!(line.to_string().contains(word), "{said}: {line}");
}

#[test]
fn every_way_to_log_in_lets_in_and_refuses_as_its_row_says() {
    let (hook, provider) = (Hook::start(), Provider::start());
    matrix(LOGINS, &(hook.config("", "") + &provider.config("", "")));
}

#[test]
fn tokens_as_user_names_let_in_and_are_refused_as_their_rows_say() {
    let (hook, provider) = (Hook::start(), Provider::start());
    let more = hook.config("", "") + &provider.config("", "");
    matrix(LOGINS_BY_NAME, &format!("in_username = true\n{more}"));
}
