//! Keys of tokens that are fetched from their issuer: rotation, and what becomes of logins while the issuer is away.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD as B64};
use bytes::Bytes;
use gateway_core::Protocol;
use http_body_util::Full;
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use parking_lot::Mutex;
use rcgen::{KeyPair, PublicKeyData as _};
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Runtime};

use crate::{
    client::{Client, Got},
    login::{answer, login, seconds_from_now},
    support::{Server, until},
};

/// The issuer: says what a test has it say.
struct Issuer {
    /// Status and body.
    says: Arc<Mutex<(u16, String)>>,
    asked: Arc<AtomicUsize>,
    port: u16,
    _runtime: Runtime,
}

impl Issuer {
    fn start() -> Self {
        let runtime = Runtime::new().expect("start a runtime");
        let socket = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("bind");
        let port = socket.local_addr().expect("an address").port();
        let says = Arc::new(Mutex::new((503, String::new())));
        let asked = Arc::new(AtomicUsize::new(0));
        let (saying, asking) = (Arc::clone(&says), Arc::clone(&asked));
        runtime.spawn(async move {
            while let Ok((stream, _)) = socket.accept().await {
                let (says, asked) = (Arc::clone(&saying), Arc::clone(&asking));
                let service = service_fn(move |request: Request<Incoming>| {
                    asked.fetch_add(1, Relaxed);
                    assert_eq!((request.method().as_str(), request.uri().path()), ("GET", "/keys"));
                    let (status, body) = says.lock().clone();
                    let answer = Response::builder().status(status).body(Full::new(Bytes::from(body)));
                    std::future::ready(Ok::<_, std::convert::Infallible>(answer.expect("an answer")))
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { says, asked, port, _runtime: runtime }
    }

    fn publish(&self, keys: &[&Key]) {
        let keys: Vec<Value> = keys.iter().map(|key| key.jwk.clone()).collect();
        *self.says.lock() = (200, json!({ "keys": keys }).to_string());
    }

    fn config(&self, interval: &str) -> String {
        let port = self.port;
        // Tokens of keys that are not known yet are failed logins.
        let bans = "[bans]\nfailed_logins = 0\n";
        format!(
            "{bans}[auth.jwt]\njwks_url = \"http://127.0.0.1:{port}/keys\"\njwks_interval = \"{interval}\"\n"
        )
    }

    fn asked(&self) -> usize {
        self.asked.load(Relaxed)
    }
}

/// A key pair of the issuer.
struct Key {
    id: &'static str,
    algorithm: Algorithm,
    sign: EncodingKey,
    jwk: Value,
}

impl Key {
    fn ed25519(id: &'static str) -> Self {
        let pair = KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("generate a key");
        let x = B64.encode(pair.der_bytes());
        let sign = EncodingKey::from_ed_pem(pair.serialize_pem().as_bytes()).expect("a key");
        let jwk = json!({"kty": "OKP", "crv": "Ed25519", "x": x, "kid": id, "use": "sig"});
        Self { id, algorithm: Algorithm::EdDSA, sign, jwk }
    }

    fn p256(id: &'static str) -> Self {
        let pair = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).expect("generate a key");
        let point = pair.der_bytes();
        let (x, y) = (B64.encode(&point[1..33]), B64.encode(&point[33..65]));
        let sign = EncodingKey::from_ec_pem(pair.serialize_pem().as_bytes()).expect("a key");
        let jwk = json!({"kty": "EC", "crv": "P-256", "x": x, "y": y, "kid": id, "alg": "ES256"});
        Self { id, algorithm: Algorithm::ES256, sign, jwk }
    }

    fn rsa(id: &'static str) -> Self {
        let pair = KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).expect("generate a key");
        let sign = EncodingKey::from_rsa_pem(pair.serialize_pem().as_bytes()).expect("a key");
        // A sequence of two integers, each with its length; those of 2048 bits take two bytes for it, and begin with a zero.
        let der = pair.der_bytes();
        let n = &der[9..9 + 256];
        let e = &der[9 + 256 + 2..];
        let jwk = json!({"kty": "RSA", "n": B64.encode(n), "e": B64.encode(e), "kid": id});
        Self { id, algorithm: Algorithm::RS256, sign, jwk }
    }

    fn token(&self) -> String {
        let header = Header { kid: Some(self.id.to_owned()), ..Header::new(self.algorithm) };
        let claims = json!({"sub": "ann", "exp": seconds_from_now(3600)});
        jsonwebtoken::encode(&header, &claims, &self.sign).expect("sign a token")
    }
}

fn ask(server: &Server, token: &str) -> Got {
    answer(server.ports.tcp, login(Protocol::V5, "d1", None, Some(token)))
}

#[test]
fn a_new_key_is_fetched_with_its_first_token_and_an_old_one_goes() {
    let issuer = Issuer::start();
    let (old, new, rsa) = (Key::ed25519("old"), Key::p256("new"), Key::rsa("rsa"));
    issuer.publish(&[&old, &rsa]);
    let server = Server::start_with(&[], &issuer.config("1h"));
    for key in [&old, &rsa] {
        assert_eq!(ask(&server, &key.token()), Got::ConnAck(0), "{}", key.id);
    }
    let mut connected =
        Client::connect_with(server.ports.tcp, login(Protocol::V5, "stays", None, Some(&old.token())));
    assert_eq!(issuer.asked(), 1);
    issuer.publish(&[&new]);
    assert_eq!(ask(&server, &old.token()), Got::ConnAck(0), "nothing said that it has gone");
    until(|| ask(&server, &new.token()) == Got::ConnAck(0));
    assert_eq!(ask(&server, &old.token()), Got::ConnAck(0x86));
    assert_eq!(connected.ping(), [], "who is connected stays");
    // However many tokens with keys that nobody knows.
    let unknown = Key::ed25519("unknown").token();
    for _ in 0..100 {
        assert_eq!(ask(&server, &unknown), Got::ConnAck(0x86));
    }
    let asked = issuer.asked();
    assert!(asked < 20, "asked {asked} times");
}

#[test]
fn keys_stay_while_their_issuer_is_away_or_talks_nonsense() {
    let issuer = Issuer::start();
    let key = Key::ed25519("a");
    // The issuer is away when the gateway starts: nobody can say who owns the token.
    let server = Server::start_with(&[], &issuer.config("50ms"));
    assert_eq!(ask(&server, &key.token()), Got::ConnAck(0x88));
    issuer.publish(&[&key]);
    until(|| ask(&server, &key.token()) == Got::ConnAck(0));
    let long = format!("{{\"keys\": [], \"x\": \"{}\"}}", "x".repeat(100 << 10));
    let many = json!({"keys": vec![key.jwk.clone(); 300]}).to_string();
    for (status, body) in [(500, ""), (200, "<html>"), (200, "{\"keys\": []}"), (200, &long), (200, &many)] {
        *issuer.says.lock() = (status, body.to_owned());
        let asked = issuer.asked();
        until(|| issuer.asked() >= asked + 2);
        assert_eq!(ask(&server, &key.token()), Got::ConnAck(0), "{status} {}", body.len());
    }
    let next = Key::ed25519("b");
    issuer.publish(&[&next]);
    until(|| ask(&server, &key.token()) == Got::ConnAck(0x86));
    assert_eq!(ask(&server, &next.token()), Got::ConnAck(0));
    assert!(server.metric("gateway_jwks_fetches_total") > 10);
}
