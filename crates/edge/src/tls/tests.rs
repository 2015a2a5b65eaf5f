#![allow(clippy::disallowed_methods, reason = "certificates of tests are valid today")]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Duration, SystemTime},
};

use ::config::{CertificatePair, CipherSuite, DatabaseTls, TlsFiles, TlsVersion};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer, KeyIdMethod,
    KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tempfile::TempDir;

use super::*;

mod chain;

fn server_config(files: &TlsFiles, alpn: &[&[u8]]) -> Result<ServerConfig, TlsError> {
    Ok(config::build(files, alpn, None)?.config)
}

fn files(dir: &Path) -> TlsFiles {
    TlsFiles {
        cert: dir.join("server.crt"),
        key: dir.join("server.key"),
        client_ca: None,
        require_client_cert: false,
        crl: None,
        min_version: TlsVersion::V12,
        certificates: Vec::new(),
        ciphersuites: Vec::new(),
        open_key_files: false,
    }
}

fn dev() -> (TempDir, TlsFiles) {
    let dir = tempfile::tempdir().unwrap();
    ensure_dev_certs(dir.path(), SystemTime::now()).unwrap();
    let files = files(dir.path());
    (dir, files)
}

/// A file that only its owner may read.
fn write_key(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// A client CA with one client: (issuer, certificate file, key file).
fn client_ca(dir: &Path, serial: u64) -> (Issuer<'static, KeyPair>, PathBuf, PathBuf) {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "device CA");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate().unwrap();
    fs::write(dir.join("client-ca.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(params, key);
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "dev1");
    params.serial_number = Some(SerialNumber::from(serial));
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate().unwrap();
    let (cert_file, key_file) = (dir.join("client.crt"), dir.join("client.key"));
    fs::write(&cert_file, params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
    write_key(&key_file, &key.serialize_pem());
    (issuer, cert_file, key_file)
}

fn client(ca: &Path, identity: Option<(&Path, &Path)>) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for cert in CertificateDer::pem_file_iter(ca).unwrap() {
        roots.add(cert.unwrap()).unwrap();
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match identity {
        Some((cert, key)) => builder
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_file(cert).unwrap()],
                PrivateKeyDer::from_pem_file(key).unwrap(),
            )
            .unwrap(),
        None => builder.with_no_client_auth(),
    };
    Arc::new(config)
}

/// A handshake in memory.
fn handshake(
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
) -> Result<(ServerConnection, ClientConnection), rustls::Error> {
    handshake_as(server, client, "localhost")
}

fn handshake_as(
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    name: &str,
) -> Result<(ServerConnection, ClientConnection), rustls::Error> {
    let mut server = ServerConnection::new(server).unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut client = ClientConnection::new(client, name).unwrap();
    for _ in 0..8 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        let mut input = bytes.as_slice();
        while !input.is_empty() {
            server.read_tls(&mut input).unwrap();
            server.process_new_packets()?;
        }
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        let mut input = bytes.as_slice();
        while !input.is_empty() {
            client.read_tls(&mut input).unwrap();
            client.process_new_packets()?;
        }
    }
    assert!(!server.is_handshaking() && !client.is_handshaking());
    Ok((server, client))
}

fn openssl(dir: &Path, line: &str) -> bool {
    match Command::new("openssl").current_dir(dir).args(line.split_whitespace()).output() {
        Ok(output) if output.status.success() => true,
        Ok(output) => panic!("openssl {line}: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            eprintln_skip(&error);
            false
        }
    }
}

#[expect(clippy::print_stderr, reason = "a skipped test must show")]
fn eprintln_skip(error: &std::io::Error) {
    eprintln!("SKIPPED: the openssl command is not here ({error})");
}

#[test]
fn dev_certificates_serve_a_client_that_trusts_their_ca() {
    let (dir, files) = dev();
    let server = Arc::new(server_config(&files, &[b"h2"]).unwrap());
    assert_eq!(server.alpn_protocols, [b"h2".to_vec()]);
    let client = client(&dir.path().join("ca.crt"), None);
    let (connection, _) = handshake(Arc::clone(&server), Arc::clone(&client)).unwrap();
    assert_eq!(connection.handshake_kind(), Some(rustls::HandshakeKind::Full));
    let (connection, _) = handshake(server, client).unwrap();
    assert_eq!(connection.handshake_kind(), Some(rustls::HandshakeKind::Resumed));
}

#[test]
fn dev_certificates_are_kept_until_they_are_about_to_expire() {
    let dir = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    let certs = ensure_dev_certs(dir.path(), now).unwrap();
    assert!(certs.made);
    for secret in [&certs.key, &certs.ca_key] {
        assert_eq!(fs::metadata(secret).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let (ca, server) = (fs::read(&certs.ca_cert).unwrap(), fs::read(&certs.cert).unwrap());
    assert!(!ensure_dev_certs(dir.path(), now).unwrap().made);
    let late = now + Duration::from_secs(355 * 24 * 3600);
    assert!(ensure_dev_certs(dir.path(), late).unwrap().made);
    assert_eq!(fs::read(&certs.ca_cert).unwrap(), ca, "clients must go on trusting the same CA");
    assert_ne!(fs::read(&certs.cert).unwrap(), server);
    assert!(!ensure_dev_certs(dir.path(), late).unwrap().made);
    fs::remove_file(&certs.ca_key).unwrap();
    fs::remove_file(&certs.cert).unwrap();
    assert!(ensure_dev_certs(dir.path(), now).unwrap().made);
    assert_ne!(fs::read(&certs.ca_cert).unwrap(), ca);
}

#[test]
fn an_old_directory_keeps_the_keys_former_name_through_renewals() {
    let (dir, files) = dev();
    let former = dir.path().join("private.key");
    fs::rename(&files.key, &former).unwrap();
    let cert = fs::read(&files.cert).unwrap();
    assert!(!ensure_dev_certs(dir.path(), SystemTime::now()).unwrap().made);
    assert_eq!(fs::read(&files.cert).unwrap(), cert, "the same pair");
    let late = SystemTime::now() + Duration::from_secs(355 * 24 * 3600);
    assert!(ensure_dev_certs(dir.path(), late).unwrap().made);
    for key in [files.key.clone(), former] {
        server_config(&TlsFiles { key, ..files.clone() }, &[]).unwrap();
    }
}

#[test]
fn every_private_key_form_is_read() {
    let (dir, mut files) = dev();
    let path = dir.path();
    for (name, make, convert) in [
        ("EC as SEC1", "ecparam -name prime256v1 -genkey -out k.pem", "ec -in k.pem -out form.key"),
        (
            "EC as PKCS#8",
            "ecparam -name secp384r1 -genkey -out k.pem",
            "pkcs8 -topk8 -nocrypt -in k.pem -out form.key",
        ),
        ("RSA as PKCS#1", "genrsa -traditional -out k.pem 2048", "rsa -traditional -in k.pem -out form.key"),
        ("RSA as PKCS#8", "genrsa -out k.pem 2048", "pkcs8 -topk8 -nocrypt -in k.pem -out form.key"),
        ("Ed25519", "genpkey -algorithm ed25519 -out k.pem", "pkey -in k.pem -out form.key"),
    ] {
        if !openssl(path, make) {
            return;
        }
        openssl(path, convert);
        openssl(path, "req -new -x509 -key form.key -subj /CN=localhost -days 2 -out form.crt");
        (files.cert, files.key) = (path.join("form.crt"), path.join("form.key"));
        let form = fs::read_to_string(&files.key).unwrap();
        let marker = if name.ends_with("SEC1") {
            "BEGIN EC PRIVATE KEY"
        } else if name.ends_with("PKCS#1") {
            "BEGIN RSA PRIVATE KEY"
        } else {
            "BEGIN PRIVATE KEY"
        };
        assert!(form.contains(marker), "{name}: {form}");
        server_config(&files, &[]).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn a_key_after_its_ec_parameters_is_read() {
    let (dir, mut files) = dev();
    // As `openssl ecparam -genkey` writes it: an EC PARAMETERS block first.
    if !openssl(dir.path(), "ecparam -name prime256v1 -genkey -out k.pem") {
        return;
    }
    openssl(dir.path(), "req -new -x509 -key k.pem -subj /CN=localhost -days 2 -out k.crt");
    (files.cert, files.key) = (dir.path().join("k.crt"), dir.path().join("k.pem"));
    assert!(fs::read_to_string(&files.key).unwrap().contains("EC PARAMETERS"));
    server_config(&files, &[]).unwrap();
}

#[test]
fn errors_name_the_file_and_the_fix() {
    let (dir, good) = dev();
    let path = dir.path();
    let write = |name: &str, text: &str| {
        write_key(&path.join(name), text);
        path.join(name)
    };
    let other = write("other.key", &KeyPair::generate().unwrap().serialize_pem());
    let empty = write("empty.pem", "nothing here\n");
    let encrypted = write(
        "enc.key",
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
    );
    let garbage = write("bad.crt", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    let cut = write("cut.crt", "-----BEGIN CERTIFICATE-----\nAAAA\n");
    for (files, file, fix) in [
        (TlsFiles { cert: path.join("none.crt"), ..good.clone() }, "none.crt", "check the path"),
        (TlsFiles { cert: empty.clone(), ..good.clone() }, "empty.pem", "BEGIN CERTIFICATE"),
        (TlsFiles { cert: cut, ..good.clone() }, "cut.crt", "export it again"),
        (TlsFiles { cert: garbage, ..good.clone() }, "bad.crt", "export it again"),
        (TlsFiles { key: empty.clone(), ..good.clone() }, "empty.pem", "PKCS#8"),
        (TlsFiles { key: encrypted, ..good.clone() }, "enc.key", "openssl pkey"),
        (TlsFiles { key: other, ..good.clone() }, "other.key", "take the pair"),
        (TlsFiles { client_ca: Some(empty.clone()), ..good.clone() }, "empty.pem", "BEGIN CERTIFICATE"),
        (
            TlsFiles { client_ca: Some(path.join("ca.crt")), crl: Some(empty), ..good.clone() },
            "empty.pem",
            "X509 CRL",
        ),
    ] {
        let error = server_config(&files, &[]).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains(fix), "{error}");
    }
}

#[test]
fn client_certificates_are_optional_required_or_revoked() {
    let (dir, mut files) = dev();
    let path = dir.path();
    let (issuer, cert, key) = client_ca(path, 7);
    let with = client(&path.join("ca.crt"), Some((&cert, &key)));
    let without = client(&path.join("ca.crt"), None);
    let build = |files: &TlsFiles| Arc::new(server_config(files, &[]).unwrap());

    files.client_ca = Some(path.join("client-ca.crt"));
    let (server, _) = handshake(build(&files), Arc::clone(&with)).unwrap();
    assert_eq!(server.peer_certificates().map(<[_]>::len), Some(1));
    handshake(build(&files), Arc::clone(&without)).unwrap();

    files.require_client_cert = true;
    handshake(build(&files), Arc::clone(&with)).unwrap();
    handshake(build(&files), without).unwrap_err();

    let crl = CertificateRevocationListParams {
        this_update: date_time_ymd(2024, 1, 1),
        next_update: date_time_ymd(2050, 1, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: vec![RevokedCertParams {
            serial_number: SerialNumber::from(7),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: None,
            invalidity_date: None,
        }],
        key_identifier_method: KeyIdMethod::Sha256,
    };
    fs::write(path.join("revoked.crl"), crl.signed_by(&issuer).unwrap().pem().unwrap()).unwrap();
    files.crl = Some(path.join("revoked.crl"));
    handshake(build(&files), with).unwrap_err();
}

#[test]
fn tls_1_3_only_refuses_older_clients() {
    let (dir, mut files) = dev();
    files.min_version = TlsVersion::V13;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(dir.path().join("ca.crt")).unwrap()).unwrap();
    let old = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let old = Arc::new(old);
    handshake(Arc::new(server_config(&files, &[]).unwrap()), Arc::clone(&old)).unwrap_err();
    files.min_version = TlsVersion::V12;
    handshake(Arc::new(server_config(&files, &[]).unwrap()), old).unwrap();
}

#[test]
fn a_reload_takes_everything_or_nothing() {
    let (dir, first) = dev();
    let (other, second) = dev();
    let store = TlsStore::new();
    let handles =
        [store.add("a", first.clone(), &[]).unwrap(), store.add("b", second.clone(), &[b"h2"]).unwrap()];
    let before = [handles[0].load_full(), handles[1].load_full()];

    // New pair for a, broken key for b.
    fs::remove_file(dir.path().join("server.crt")).unwrap();
    ensure_dev_certs(dir.path(), SystemTime::now()).unwrap();
    let key = fs::read(other.path().join("server.key")).unwrap();
    fs::write(other.path().join("server.key"), "broken").unwrap();
    let errors = store.reload_at(SystemTime::now()).unwrap_err();
    assert_eq!((errors.len(), errors[0].0.as_str()), (1, "b"));
    assert!(Arc::ptr_eq(&before[0], &handles[0].load_full()), "a must keep its old configuration");

    fs::write(other.path().join("server.key"), key).unwrap();
    assert_eq!(store.reload_at(SystemTime::now()).unwrap(), 2);
    assert!(!Arc::ptr_eq(&before[0], &handles[0].load_full()));
    assert_eq!(handles[1].load().alpn_protocols, [b"h2".to_vec()]);
}

#[test]
fn tickets_survive_a_renewed_certificate_but_not_new_rules_for_clients() {
    let (dir, mut files) = dev();
    client_ca(dir.path(), 1);
    files.client_ca = Some(dir.path().join("client-ca.crt"));
    let store = TlsStore::new();
    let handle = store.add("a", files, &[]).unwrap();
    let tickets = Arc::clone(&handle.load().ticketer);
    fs::remove_file(dir.path().join("server.crt")).unwrap();
    ensure_dev_certs(dir.path(), SystemTime::now()).unwrap();
    store.reload_at(SystemTime::now()).unwrap();
    assert!(Arc::ptr_eq(&tickets, &handle.load().ticketer));
    client_ca(dir.path(), 2);
    store.reload_at(SystemTime::now()).unwrap();
    assert!(!Arc::ptr_eq(&tickets, &handle.load().ticketer));
}

/// A certificate that signs itself, valid for these days from now.
fn dated(dir: &Path, name: &str, days: std::ops::Range<i64>, names: &[&str]) -> TlsFiles {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64;
    let day = |days: i64| {
        let at = u64::try_from(now + days * 24 * 3600).unwrap();
        date_time_ymd(1970, 1, 1) + Duration::from_secs(at)
    };
    (params.not_before, params.not_after) = (day(days.start), day(days.end));
    params.distinguished_name.push(DnType::CommonName, "localhost");
    let key = KeyPair::generate().unwrap();
    let mut files = files(dir);
    (files.cert, files.key) = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
    fs::write(&files.cert, params.self_signed(&key).unwrap().pem()).unwrap();
    write_key(&files.key, &key.serialize_pem());
    files
}

fn with_certificate(files: &TlsFiles) -> ::config::Config {
    ::config::Config { cert: files.cert.clone(), key: files.key.clone(), ..Default::default() }
}

#[test]
fn the_check_and_a_reload_name_a_certificate_that_is_not_valid_now() {
    let dir = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    for (name, days, problem, remedy) in
        [("old", -20..-10, "expired on ", "renew it"), ("early", 10..20, "is valid from ", "set the clock")]
    {
        let bad = dated(dir.path(), name, days, &["localhost"]);
        let error = check_files_at(&with_certificate(&bad), now).unwrap_err().to_string();
        for part in [
            problem,
            remedy,
            &format!("{name}.crt"),
            "openssl x509 -in",
            "listener default: cert, grpc: cert",
        ] {
            assert!(error.contains(part), "{part} in {error}");
        }
        check_files(&with_certificate(&bad)).unwrap();

        let files = dated(dir.path(), "used", -1..90, &["localhost"]);
        let store = TlsStore::new();
        let handle = store.add("a", files.clone(), &[]).unwrap();
        let before = handle.load_full();
        fs::copy(&bad.cert, &files.cert).unwrap();
        fs::copy(&bad.key, &files.key).unwrap();
        let errors = store.reload_at(now).unwrap_err();
        assert!(errors[0].1.to_string().contains(problem), "{errors:?}");
        assert!(Arc::ptr_eq(&before, &handle.load_full()), "the good one stays");

        // A start goes on, and says so.
        let store = TlsStore::new();
        store.add("listener default", bad.clone(), &[]).unwrap();
        store.add("grpc", bad, &[]).unwrap();
        let notices = store.notices(now);
        assert_eq!(notices.len(), 1, "{notices:?}");
        assert!(notices[0].out && notices[0].text.contains(problem), "{notices:?}");
        assert_eq!(notices[0].uses, ["listener default", "grpc"]);
        assert_eq!(store.notices(now), [], "once");
        store.reload_at(now).unwrap();
    }
}

#[test]
fn the_end_of_a_certificate_is_told_30_days_7_days_and_one_day_before() {
    let dir = tempfile::tempdir().unwrap();
    let files = dated(dir.path(), "x", -1..60, &["localhost"]);
    let store = TlsStore::new();
    store.add("grpc", files.clone(), &[]).unwrap();
    let start = SystemTime::now();
    let at = |days: u64| start + Duration::from_secs(days * 24 * 3600 + 60);
    let mut told = Vec::new();
    for day in 0..=61 {
        let left = store.days_left(at(day));
        assert_eq!(left[0].0, "grpc");
        assert!((left[0].2 - (60.0 - day as f64)).abs() < 0.1, "{left:?} on day {day}");
        for _ in 0..3 {
            told.extend(store.notices(at(day)).into_iter().map(|notice| (day, notice.out)));
        }
    }
    assert_eq!(told, [(30, false), (53, false), (59, false), (60, true)]);
    dated(dir.path(), "x", -1..20, &["localhost"]);
    store.reload_at(start).unwrap();
    let notices = store.notices(at(0));
    assert!(notices.len() == 1 && notices[0].text.contains("in 19 days"), "{notices:?}");
}

#[test]
fn a_certificate_without_names_is_reported_and_version_1_refused() {
    let dir = tempfile::tempdir().unwrap();
    let nameless = dated(dir.path(), "nameless", -1..90, &[]);
    let store = TlsStore::new();
    store.add("grpc", nameless, &[]).unwrap();
    let notices = store.notices(SystemTime::now());
    assert!(
        notices.len() == 1 && !notices[0].out && notices[0].text.contains("subjectAltName"),
        "{notices:?}"
    );
    assert_eq!(store.notices(SystemTime::now()), [], "once");

    // A certificate as plain `openssl x509 -req` makes it.
    let mut files = files(dir.path());
    (files.cert, files.key) = (dir.path().join("v1.crt"), dir.path().join("v1.key"));
    let req = "req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout v1.key -out v1.csr -subj /CN=localhost";
    if !openssl(dir.path(), req)
        || !openssl(dir.path(), "x509 -req -in v1.csr -signkey v1.key -days 9 -out v1.crt")
    {
        return;
    }
    let text = fs::read_to_string(&files.cert).unwrap();
    let der = CertificateDer::from_pem_slice(text.as_bytes()).unwrap();
    if inspect::inspect(&files.cert, &[der]).is_ok() {
        return; // OpenSSL from 3.4 on makes version 3 of its own accord.
    }
    let error = check_files(&with_certificate(&files)).unwrap_err().to_string();
    for part in ["v1.crt", "X.509 version 1", "-extfile", "subjectAltName=DNS:"] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

#[test]
fn missing_files_are_found_before_any_port_opens() {
    let dir = tempfile::tempdir().unwrap();
    let config = ::config::Config {
        cert: dir.path().join("no.crt"),
        key: dir.path().join("no.key"),
        ..Default::default()
    };
    let error = check_files(&config).unwrap_err();
    assert_eq!(error.0.len(), 1, "one file, two uses: {error}");
    let text = error.to_string();
    for part in ["listener default: cert", "grpc: cert", "no.crt", "--dev"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn the_database_is_verified_by_the_named_ca_and_shown_our_certificate() {
    let (dir, files) = dev();
    let (_, cert, key) = client_ca(dir.path(), 1);
    let path = |name: &str| Some(dir.path().join(name));
    let files = TlsFiles { client_ca: path("client-ca.crt"), require_client_cert: true, ..files };
    let server = Arc::new(server_config(&files, &[]).unwrap());
    let connect = |tls: &DatabaseTls| {
        handshake(Arc::clone(&server), Arc::new(client_config(tls, false).unwrap().unwrap())).map(drop)
    };
    let good = DatabaseTls { ca: path("ca.crt"), cert: Some(cert), key: Some(key) };
    connect(&good).unwrap();
    assert!(connect(&DatabaseTls { cert: None, key: None, ..good.clone() }).is_err());
    assert!(connect(&DatabaseTls { ca: path("client-ca.crt"), ..good.clone() }).is_err());
    assert!(client_config(&DatabaseTls::default(), false).unwrap().is_none());
    let absent =
        client_config(&DatabaseTls { ca: path("absent.crt"), ..good }, false).unwrap_err().to_string();
    assert!(absent.contains("absent.crt"), "{absent}");
}

#[test]
fn a_key_that_others_may_read_is_refused_with_the_command_that_mends_it() {
    let (_dir, mut files) = dev();
    let mode = |mode| fs::set_permissions(&files.key, fs::Permissions::from_mode(mode)).unwrap();
    mode(0o644);
    let error = server_config(&files, &[]).unwrap_err().to_string();
    for part in ["server.key", "mode 0644", "chmod 600 ", "tls.open_key_files"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    mode(0o600);
    server_config(&files, &[]).unwrap();
    let root = std::os::unix::fs::MetadataExt::uid(&fs::metadata(&files.key).unwrap()) == 0;
    mode(0o640);
    assert_eq!(server_config(&files, &[]).is_ok(), root, "the group of a file of root's may read it");
    mode(0o644);
    files.open_key_files = true;
    server_config(&files, &[]).unwrap();
}

/// The leaf that a client is shown that asks for this name.
fn shown(server: &Arc<ServerConfig>, name: &str) -> CertificateDer<'static> {
    #[derive(Debug)]
    struct Anything;
    impl rustls::client::danger::ServerCertVerifier for Anything {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: rustls::pki_types::UnixTime,
        ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
            Ok(rustls::client::danger::ServerCertVerified::assertion())
        }
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
        }
        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
        }
        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            aws_lc_rs::default_provider().signature_verification_algorithms.supported_schemes()
        }
    }
    let client = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anything))
        .with_no_client_auth();
    let (_, client) = handshake_as(Arc::clone(server), Arc::new(client), name).unwrap();
    client.peer_certificates().unwrap()[0].clone()
}

#[test]
fn a_client_is_shown_the_certificate_of_the_name_it_asks_for() {
    let (dir, mut files) = dev();
    let leaf = |files: &TlsFiles| CertificateDer::from_pem_file(&files.cert).unwrap();
    let pair = |files: &TlsFiles| CertificatePair { cert: files.cert.clone(), key: files.key.clone() };
    let shop = dated(dir.path(), "shop", -1..90, &["Shop.example", "*.shop.example"]);
    let bank = dated(dir.path(), "bank", -1..20, &["bank.example", "shop.example"]);
    files.certificates = vec![pair(&shop), pair(&bank)];
    let server = Arc::new(server_config(&files, &[]).unwrap());
    for (name, expected) in [
        ("shop.example", &shop),
        ("a.shop.example", &shop),
        ("a.b.shop.example", &files),
        ("BANK.example", &bank),
        ("localhost", &files),
        ("elsewhere.example", &files),
        ("127.0.0.1", &files),
    ] {
        assert_eq!(shown(&server, name), leaf(expected), "{name}");
    }
    // Each of them is watched: its files, its end.
    let store = TlsStore::new();
    store.add("a", files.clone(), &[]).unwrap();
    assert_eq!(store.days_left(SystemTime::now()).len(), 3);
    let notices = store.notices(SystemTime::now());
    assert!(notices.len() == 1 && notices[0].text.contains("bank.crt"), "{notices:?}");
    let files_read = crate::reload::Reload::files(&store);
    assert!(files_read.contains(&bank.key) && files_read.contains(&shop.cert), "{files_read:?}");
    let nameless = dated(dir.path(), "nameless", -1..90, &[]);
    files.certificates.push(pair(&nameless));
    let error = server_config(&files, &[]).unwrap_err().to_string();
    assert!(error.contains("nameless.crt") && error.contains("no client can ask for it"), "{error}");
}

#[test]
fn an_ocsp_response_is_stapled_and_a_broken_one_is_refused() {
    let (dir, files) = dev();
    let path = dir.path().join("server.crt.ocsp");
    let response = [0x30, 0x05, 0x0A, 0x01, 0x00, 0x05, 0x00];
    fs::write(&path, response).unwrap();
    #[derive(Debug)]
    struct Stapled(parking_lot::Mutex<Vec<u8>>, Arc<rustls::client::WebPkiServerVerifier>);
    impl rustls::client::danger::ServerCertVerifier for Stapled {
        fn verify_server_cert(
            &self,
            end: &CertificateDer<'_>,
            chain: &[CertificateDer<'_>],
            name: &ServerName<'_>,
            ocsp: &[u8],
            now: rustls::pki_types::UnixTime,
        ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
            ocsp.clone_into(&mut self.0.lock());
            self.1.verify_server_cert(end, chain, name, &[], now)
        }
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signed: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            self.1.verify_tls12_signature(message, cert, signed)
        }
        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signed: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            self.1.verify_tls13_signature(message, cert, signed)
        }
        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            self.1.supported_verify_schemes()
        }
    }
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(dir.path().join("ca.crt")).unwrap()).unwrap();
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder =
        rustls::client::WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let verifier = Arc::new(Stapled(parking_lot::Mutex::default(), builder.build().unwrap()));
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&verifier) as _)
        .with_no_client_auth();
    handshake(Arc::new(server_config(&files, &[]).unwrap()), Arc::new(client)).unwrap();
    assert_eq!(*verifier.0.lock(), response);
    for broken in [&b"HTTP/1.1 404"[..], &[0x30, 0x03, 0x0A, 0x01, 0x06], &[]] {
        fs::write(&path, broken).unwrap();
        let error = server_config(&files, &[]).unwrap_err().to_string();
        assert!(error.contains("server.crt.ocsp") && error.contains("openssl ocsp"), "{error}");
    }
}

#[test]
fn only_the_named_suites_are_negotiated() {
    let (dir, mut files) = dev();
    files.ciphersuites =
        vec![CipherSuite::TLS_AES_256_GCM_SHA384, CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384];
    let server = Arc::new(server_config(&files, &[]).unwrap());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(dir.path().join("ca.crt")).unwrap()).unwrap();
    for (suite, version, taken) in [
        (aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384, &rustls::version::TLS13, true),
        (aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256, &rustls::version::TLS13, false),
        (aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256, &rustls::version::TLS13, false),
        (aws_lc_rs::cipher_suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, &rustls::version::TLS12, true),
        (aws_lc_rs::cipher_suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, &rustls::version::TLS12, false),
    ] {
        let provider =
            rustls::crypto::CryptoProvider { cipher_suites: vec![suite], ..aws_lc_rs::default_provider() };
        let client = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        assert_eq!(handshake(Arc::clone(&server), Arc::new(client)).is_ok(), taken, "{suite:?}");
    }
}

#[test]
fn a_revocation_is_logged_with_its_certificate_whatever_its_zeros() {
    let (dir, mut files) = dev();
    let (issuer, cert, _) = client_ca(dir.path(), 0x80);
    let revoke = |serials: &[u64]| {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(2050, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        fs::write(dir.path().join("list.crl"), list.signed_by(&issuer).unwrap().pem().unwrap()).unwrap();
    };
    revoke(&[1]);
    files.client_ca = Some(dir.path().join("client-ca.crt"));
    files.crl = Some(dir.path().join("list.crl"));
    let store = TlsStore::new();
    store.add("a", files, &[]).unwrap();
    let certificate = CertificateId::of(&CertificateDer::from_pem_file(cert).unwrap()).unwrap();
    let revocations = store.revocations("a").unwrap();
    let changed = store.revocations_changed();
    assert!(!revocations.has(&certificate));
    store.reload_at(SystemTime::now()).unwrap();
    assert!(!changed.has_changed().unwrap(), "the same list");
    revoke(&[1, 0x80]);
    store.reload_at(SystemTime::now()).unwrap();
    assert!(changed.has_changed().unwrap() && revocations.has(&certificate));
}
