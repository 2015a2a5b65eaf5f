//! Certificates that change while the gateway runs: renewed ones, revoked ones, broken ones.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use codec::{Connect, Packet, Subscribe, SubscribeFilter};
use gateway_core::{Protocol, QoS};
use parking_lot::Mutex;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer, KeyIdMethod,
    KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion,
    client::WebPkiServerVerifier,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
};

use crate::client::{WAIT, decoded, hello, message};
use crate::support::{Server, local, until};

/// An authority with its files in a directory.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    der: CertificateDer<'static>,
    dir: PathBuf,
}

impl Authority {
    fn new(dir: &Path) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, "authority of these tests");
        let key = KeyPair::generate().expect("generate a key");
        let cert = params.self_signed(&key).expect("sign the authority");
        fs::create_dir_all(dir).expect("make a directory");
        fs::write(dir.join("ca.crt"), cert.pem()).expect("write the authority");
        Self { issuer: Issuer::new(params, key), der: cert.der().clone(), dir: dir.to_owned() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A certificate for these DNS names, and its key.
    fn sign(&self, names: &[&str], serial: u64) -> (rcgen::Certificate, KeyPair) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.serial_number = Some(SerialNumber::from(serial));
        params.use_authority_key_identifier_extension = true;
        params.distinguished_name.push(DnType::CommonName, format!("number {serial}"));
        let key = KeyPair::generate().expect("generate a key");
        (params.signed_by(&key, &self.issuer).expect("sign"), key)
    }

    /// The same as files `NAME.crt` and `NAME.key`, each put in its place by renaming.
    fn write(&self, name: &str, names: &[&str], serial: u64) {
        let (cert, key) = self.sign(names, serial);
        for (suffix, text) in [("crt", cert.pem()), ("key", key.serialize_pem())] {
            let new = self.path("new");
            fs::write(&new, text).expect("write");
            fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).expect("close the file to others");
            fs::rename(new, self.path(&format!("{name}.{suffix}"))).expect("rename");
        }
    }

    fn client(&self, serial: u64) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let (cert, key) = self.sign(&["device"], serial);
        (vec![cert.der().clone()], PrivatePkcs8KeyDer::from(key.serialize_der()).into())
    }

    /// Writes `revoked.crl` with these serial numbers in it.
    fn revoke(&self, serials: &[u64]) {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(2050, 1, 1),
            crl_number: SerialNumber::from(serials.len() as u64 + 1),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer).expect("sign the list").pem().expect("PEM");
        fs::write(self.path("revoked.crl"), list).expect("write the list");
    }
}

type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// A client of TLS that trusts one authority.
struct Trust {
    verifier: Arc<WebPkiServerVerifier>,
    versions: Vec<&'static SupportedProtocolVersion>,
    suites: Vec<rustls::SupportedCipherSuite>,
}

impl Trust {
    fn in_authority(der: &CertificateDer<'static>) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(der.clone()).expect("an authority");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .expect("a verifier");
        Self {
            verifier,
            versions: rustls::ALL_VERSIONS.to_vec(),
            suites: rustls::crypto::aws_lc_rs::ALL_CIPHER_SUITES.to_vec(),
        }
    }

    fn config(&self, identity: Option<Pair>) -> Arc<ClientConfig> {
        let provider = rustls::crypto::CryptoProvider {
            cipher_suites: self.suites.clone(),
            ..rustls::crypto::aws_lc_rs::default_provider()
        };
        let builder = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&self.versions)
            .expect("versions and suites that fit")
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&self.verifier) as _);
        let mut config = match identity {
            Some((chain, key)) => builder.with_client_auth_cert(chain, key).expect("a pair"),
            None => builder.with_no_client_auth(),
        };
        // Every handshake shows a certificate.
        config.resumption = rustls::client::Resumption::disabled();
        Arc::new(config)
    }

    /// A handshake that succeeds, without MQTT.
    fn handshake(&self, port: u16, name: &str) -> io::Result<Secured> {
        Secured::open(port, name, self.config(None))
    }
}

/// A connection over TLS.
struct Secured {
    stream: StreamOwned<ClientConnection, TcpStream>,
    buffer: Vec<u8>,
}

impl Secured {
    fn open(port: u16, name: &str, config: Arc<ClientConfig>) -> io::Result<Self> {
        let name = ServerName::try_from(name.to_owned()).expect("a name");
        let tls = ClientConnection::new(config, name).map_err(io::Error::other)?;
        let socket = TcpStream::connect(local(port))?;
        socket.set_read_timeout(Some(WAIT))?;
        let mut stream = StreamOwned::new(tls, socket);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock)?;
        }
        Ok(Self { stream, buffer: Vec::new() })
    }

    /// With a CONNECT that is accepted.
    fn connect(port: u16, config: Arc<ClientConfig>, client_id: &str) -> io::Result<Self> {
        let mut client = Self::open(port, "localhost", config)?;
        client.send(&Packet::Connect(Box::<Connect>::new(hello(Protocol::V5, client_id))))?;
        match client.next()? {
            bytes if bytes[0] == 0x20 && bytes[3] == 0 => Ok(client),
            bytes => Err(io::Error::other(format!("refused: {bytes:?}"))),
        }
    }

    fn send(&mut self, packet: &Packet<'_>) -> io::Result<()> {
        let mut bytes = Vec::new();
        codec::encode(packet, Protocol::V5, &mut bytes);
        self.stream.write_all(&bytes)
    }

    /// The next packet; at the end of the connection an error.
    fn next(&mut self) -> io::Result<Vec<u8>> {
        loop {
            if let Ok(Some(frame)) = codec::frame(&self.buffer, usize::MAX) {
                let len = frame.len;
                return Ok(self.buffer.drain(..len).collect());
            }
            let mut some = [0; 4096];
            match self.stream.read(&mut some)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => self.buffer.extend_from_slice(&some[..read]),
            }
        }
    }

    /// The names of the certificate that the server has shown.
    fn shown(&self) -> CertificateDer<'static> {
        self.stream.conn.peer_certificates().expect("a certificate")[0].clone()
    }
}

fn subscribe(filter: &str) -> Packet<'static> {
    Packet::Subscribe(Subscribe {
        packet_id: 1,
        id: None,
        user: Vec::new(),
        filters: vec![SubscribeFilter {
            filter: filter.to_owned(),
            qos: QoS::AtMostOnce,
            no_local: false,
            retain_as_published: false,
            retain_handling: 0,
        }],
    })
}

/// A server whose default listener has a pair of `authority`.
fn server_of(authority: &Authority, more: &str) -> Server {
    authority.write("own", &["localhost"], 1);
    let (cert, key) = (authority.path("own.crt"), authority.path("own.key"));
    let listener = format!(
        "[[listeners]]\nname = \"secured\"\nkind = \"tls\"\naddress = \"127.0.0.1:0\"\ncert = \"{}\"\nkey = \"{}\"\n",
        cert.display(),
        key.display()
    );
    Server::start_with(&[], &format!("{more}\n{listener}"))
}

/// Reloads and waits until the log says so once more.
fn reload(server: &Server, said: &str) {
    let count = || server.log().matches(said).count();
    let before = count();
    server.signal("HUP");
    until(|| count() > before);
}

const RELOADED: &str = "\"reloaded\",\"what\":\"certificates\"";
const NOT_RELOADED: &str = "all stays as it was\",\"what\":\"certificates\"";

/// The failure: a renewal ends connections, or a handshake in the moment of the change sees half of a pair.
#[test]
fn certificates_are_renewed_under_load_without_a_lost_connection() {
    const RENEWALS: u64 = 10;
    const DEVICES: usize = 8;
    let dir = tempfile::tempdir().expect("make a directory");
    let authority = Authority::new(dir.path());
    let server = server_of(&authority, "");
    let port = server.port("secured");
    let trust = Trust::in_authority(&authority.der);
    let config = trust.config(None);
    let (stop, echoes, handshakes) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let seen = Mutex::new(std::collections::HashSet::new());
    thread::scope(|scope| {
        for number in 0..DEVICES {
            let (config, stop, echoes) = (Arc::clone(&config), &stop, &echoes);
            scope.spawn(move || {
                let name = format!("steady-{number}");
                let mut device = Secured::connect(port, config, &name).expect("connect");
                device.send(&subscribe(&name)).expect("subscribe");
                device.next().expect("SUBACK");
                while !stop.load(Relaxed) {
                    device.send(&message(&name, b"x", QoS::AtMostOnce, false)).expect("publish");
                    let bytes = device.next().expect("the connection is still there");
                    assert!(matches!(decoded(&bytes, Protocol::V5), Packet::Publish(_)));
                    echoes.fetch_add(1, Relaxed);
                }
            });
        }
        for number in 0..2 {
            let (config, stop, handshakes, seen) = (Arc::clone(&config), &stop, &handshakes, &seen);
            scope.spawn(move || {
                while !stop.load(Relaxed) {
                    let name = format!("new-{number}");
                    let device = Secured::connect(port, Arc::clone(&config), &name).expect("a handshake");
                    seen.lock().insert(device.shown().to_vec());
                    handshakes.fetch_add(1, Relaxed);
                }
            });
        }
        let stops = Stops(&stop);
        // The certificate of the start is seen, too.
        until(|| handshakes.load(Relaxed) > 0);
        for serial in 2..2 + RENEWALS {
            authority.write("own", &["localhost"], serial);
            reload(&server, RELOADED);
            // Some of both under each certificate.
            let (echoed, shaken) = (echoes.load(Relaxed), handshakes.load(Relaxed));
            until(|| echoes.load(Relaxed) > echoed + DEVICES && handshakes.load(Relaxed) > shaken + 4);
        }
        drop(stops);
    });
    assert_eq!(seen.lock().len() as u64, 1 + RENEWALS, "each certificate was shown");
    assert_eq!(server.metric("mqtt_protocol_errors_total"), 0);
}

/// Ends the loops of a test, also when it fails.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// The failure: a stolen device stays connected until somebody restarts the gateway.
#[test]
fn a_revoked_certificate_ends_its_connection_and_no_other() {
    let dir = tempfile::tempdir().expect("make a directory");
    let authority = Authority::new(dir.path());
    authority.revoke(&[]);
    let more = format!(
        "[tls]\nclient_ca = \"{}\"\ncrl = \"{}\"\nrequire_client_cert = true",
        authority.path("ca.crt").display(),
        authority.path("revoked.crl").display()
    );
    let server = server_of(&authority, &more);
    let port = server.port("secured");
    let trust = Trust::in_authority(&authority.der);
    let (stolen, kept) = (authority.client(7), authority.client(8));
    let stolen_config = trust.config(Some((stolen.0.clone(), stolen.1.clone_key())));
    let mut thief = Secured::connect(port, Arc::clone(&stolen_config), "thief").expect("not revoked yet");
    let mut other = Secured::connect(port, trust.config(Some(kept)), "other").expect("connect");

    // No signal: the file is looked at.
    authority.revoke(&[7]);
    let bytes = thief.next().expect("a DISCONNECT");
    assert_eq!(bytes[..3], [0xE0, 0x01, 0x87], "{bytes:?}");
    assert!(thief.next().is_err(), "the connection ends");
    other.send(&Packet::PingReq).expect("send");
    assert_eq!(other.next().expect("still connected")[0], 0xD0);
    until(|| server.metric("mqtt_connections_evicted_total") == 1);
    assert!(Secured::connect(port, stolen_config, "thief").is_err(), "nor does it come in again");
    until(|| server.log().contains("connection ended, it may no longer be"));
}

/// The failure: devices of a new authority wait for a restart, or those of one that is gone come in by resuming a session.
#[test]
fn an_authority_is_rotated_with_both_for_a_while_and_without_a_restart() {
    let dir = tempfile::tempdir().expect("make a directory");
    let (old, new) = (Authority::new(&dir.path().join("old")), Authority::new(&dir.path().join("new")));
    let pem = |authority: &Authority| fs::read_to_string(authority.path("ca.crt")).expect("read");
    let trusted = dir.path().join("clients.crt");
    fs::write(&trusted, pem(&old)).expect("write the authority");
    let more = format!("[tls]\nclient_ca = \"{}\"\nrequire_client_cert = true", trusted.display());
    let server = server_of(&old, &more);
    let port = server.port("secured");
    let trust = Trust::in_authority(&old.der);
    let (before, after) = (trust.config(Some(old.client(7))), trust.config(Some(new.client(8))));
    let mut device = Secured::connect(port, Arc::clone(&before), "stays").expect("of the authority");
    assert!(Secured::connect(port, Arc::clone(&after), "after").is_err(), "nobody knows it yet");

    fs::write(&trusted, [pem(&old), pem(&new)].concat()).expect("write both");
    reload(&server, RELOADED);
    Secured::connect(port, Arc::clone(&after), "after").expect("of the new one");
    Secured::connect(port, Arc::clone(&before), "before").expect("of the old one, still");

    fs::write(&trusted, pem(&new)).expect("write the new one");
    reload(&server, RELOADED);
    assert!(Secured::connect(port, before, "before").is_err(), "not even by resuming its session");
    Secured::connect(port, after, "after").expect("of the new one");
    device.send(&Packet::PingReq).expect("send");
    assert_eq!(device.next().expect("who is connected stays")[0], 0xD0);
}

/// The failure: a ban of a certificate by its name misses who has logged in otherwise, or is connected already.
#[test]
fn a_ban_by_common_name_ends_a_device_that_logged_in_without_it() {
    let dir = tempfile::tempdir().expect("make a directory");
    let authority = Authority::new(dir.path());
    fs::write(authority.path("bans.toml"), "").expect("write no bans");
    let more = format!(
        "[tls]\nclient_ca = \"{}\"\n[bans]\nfile = \"{}\"",
        authority.path("ca.crt").display(),
        authority.path("bans.toml").display()
    );
    let server = server_of(&authority, &more);
    let port = server.port("secured");
    let trust = Trust::in_authority(&authority.der);
    let banned = trust.config(Some(authority.client(7)));
    let mut thief = Secured::connect(port, Arc::clone(&banned), "thief").expect("not banned yet");
    let mut other =
        Secured::connect(port, trust.config(Some(authority.client(8))), "other").expect("connect");

    fs::write(authority.path("bans.toml"), "[[bans]]\ncommon_name = \"number 7\"\n").expect("write the bans");
    server.signal("HUP");
    let bytes = thief.next().expect("a DISCONNECT");
    assert_eq!(bytes[..3], [0xE0, 0x01, 0x87], "{bytes:?}");
    assert!(thief.next().is_err(), "the connection ends");
    other.send(&Packet::PingReq).expect("send");
    assert_eq!(other.next().expect("still connected")[0], 0xD0);
    let again = Secured::connect(port, banned, "innocent").err().expect("nor does it come in again");
    assert!(again.to_string().contains("138"), "CONNACK 0x8A: {again}");
}

#[test]
fn a_broken_certificate_keeps_the_one_that_is_served() {
    let dir = tempfile::tempdir().expect("make a directory");
    let authority = Authority::new(dir.path());
    let server = server_of(&authority, "");
    let trust = Trust::in_authority(&authority.der);
    let shown = || trust.handshake(server.port("secured"), "localhost").expect("a handshake").shown();
    let before = shown();
    let whole = fs::read(authority.path("own.crt")).expect("read");
    fs::write(authority.path("own.crt"), &whole[..whole.len() / 2]).expect("write");
    reload(&server, NOT_RELOADED);
    assert_eq!(shown(), before);
    authority.write("own", &["localhost"], 2);
    reload(&server, RELOADED);
    assert_ne!(shown(), before);
}
