//! The layer against rustls' client.

use std::io::{Read, Write};

use rcgen::CertifiedKey;
use rustls::{
    AlertDescription, ClientConfig, ClientConnection, HandshakeKind, RootCertStore, SupportedProtocolVersion,
    crypto::aws_lc_rs,
    pki_types::{PrivateKeyDer, ServerName},
    server::WebPkiClientVerifier,
    version::{TLS12, TLS13},
};

use super::*;

/// Both sides trust and show one certificate.
fn configs(
    version: &'static SupportedProtocolVersion,
    fragment: Option<usize>,
) -> (ServerConfig, ClientConfig) {
    let CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = || PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let roots = Arc::new(roots);
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(vec![cert.der().clone()], key())
        .unwrap();
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![cert.der().clone()], key())
        .unwrap();
    client.max_fragment_size = fragment;
    (server, client)
}

struct Pair {
    client: ClientConnection,
    server: TlsLayer,
    /// Bytes the server is given at once.
    step: usize,
    /// Bytes that the server has decrypted.
    plain: Vec<u8>,
}

impl Pair {
    fn new(server: &Arc<ServerConfig>, client: &Arc<ClientConfig>, step: usize) -> Self {
        let name = ServerName::try_from("localhost").unwrap();
        let mut client = ClientConnection::new(Arc::clone(client), name).unwrap();
        client.set_buffer_limit(None);
        Self { client, server: TlsLayer::new(Arc::clone(server)).unwrap(), step, plain: Vec::new() }
    }

    fn connected(version: &'static SupportedProtocolVersion, step: usize) -> Self {
        let (server, client) = configs(version, None);
        let mut pair = Self::new(&Arc::new(server), &Arc::new(client), step);
        pair.shake_hands();
        pair
    }

    fn shake_hands(&mut self) {
        while self.client.is_handshaking() || self.server.is_handshaking() {
            assert!(self.client.wants_write(), "the handshake stands still");
            self.send().unwrap();
        }
    }

    /// Returns the bytes that the client wants to send.
    fn client_bytes(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while self.client.wants_write() {
            self.client.write_tls(&mut bytes).unwrap();
        }
        bytes
    }

    /// Gives the server `bytes`, and the client what the server answers.
    fn serve(&mut self, mut bytes: Vec<u8>) -> Result<(), Error> {
        for chunk in bytes.chunks_mut(self.step) {
            let mut wire = Vec::new();
            let opened = self.server.open(chunk, &mut self.plain, &mut wire);
            let _ = self.receive(&wire);
            opened?;
        }
        Ok(())
    }

    fn send(&mut self) -> Result<(), Error> {
        let bytes = self.client_bytes();
        self.serve(bytes)
    }

    /// Gives the client `wire`; returns the plaintext.
    fn receive(&mut self, mut wire: &[u8]) -> Result<Vec<u8>, Error> {
        let mut plain = Vec::new();
        while !wire.is_empty() {
            self.client.read_tls(&mut wire).unwrap();
            let state = self.client.process_new_packets()?;
            let start = plain.len();
            plain.resize(start + state.plaintext_bytes_to_read(), 0);
            self.client.reader().read_exact(&mut plain[start..]).unwrap();
        }
        Ok(plain)
    }

    fn sealed(&mut self, plain: &[u8]) -> Vec<u8> {
        let mut wire = Vec::new();
        self.server.seal(plain, &mut wire).unwrap();
        wire
    }
}

/// The failure: a read of thousands of tiny records was charged as if it were one.
#[test]
fn every_record_counts_once() {
    let mut pair = Pair::connected(&TLS13, usize::MAX);
    pair.server.take_count();
    let mut bytes = Vec::new();
    for _ in 0..100 {
        pair.client.writer().write_all(b"x").unwrap();
        bytes.extend(pair.client_bytes());
    }
    pair.serve(bytes).unwrap();
    assert_eq!((pair.server.take_count(), pair.server.take_count()), (100, 0));
}

#[test]
fn bytes_cut_anywhere_give_the_same_plaintext_and_leave_nothing_behind() {
    let long: Vec<u8> = (0..100_000u32).map(|n| n as u8).collect();
    for version in [&TLS12, &TLS13] {
        for step in [1, 2, 5, 6, 61, 1024, 20_000, usize::MAX] {
            let mut pair = Pair::connected(version, step);
            assert_eq!(pair.server.peer_certificates().map(<[_]>::len), Some(1));
            for piece in [&b"one"[..], b"two", &long, b"three"] {
                pair.client.writer().write_all(piece).unwrap();
            }
            pair.send().unwrap();
            assert!(pair.plain == [b"onetwo", &long[..], b"three"].concat(), "{version:?}, step {step}");
            assert_eq!(pair.server.kept.capacity(), 0, "{version:?}, step {step}");
        }
    }
}

#[test]
fn a_message_of_many_records_arrives_whole_in_both_directions() {
    let frame: Vec<u8> = (0..1u32 << 20).map(|n| (n % 251) as u8).collect();
    for version in [&TLS12, &TLS13] {
        let mut pair = Pair::connected(version, 64 << 10);
        pair.client.writer().write_all(&frame).unwrap();
        pair.send().unwrap();
        assert!(pair.plain == frame, "{version:?}");
        // Behind bytes that are in the buffer already.
        let mut wire = pair.sealed(b"first");
        pair.server.seal(&frame, &mut wire).unwrap();
        assert!(pair.receive(&wire).unwrap() == [b"first", &frame[..]].concat(), "{version:?}");
    }
}

#[test]
fn an_incomplete_record_is_kept_in_a_buffer_of_its_size() {
    let mut pair = Pair::connected(&TLS13, usize::MAX);
    pair.client.writer().write_all(&[7; 5000]).unwrap();
    let mut bytes = pair.client_bytes();
    let rest = bytes.split_off(3000);
    pair.serve(bytes).unwrap();
    assert_eq!((pair.server.kept.len(), pair.server.kept.capacity()), (3000, 3000));
    // Sending meanwhile does not lose it.
    let wire = pair.sealed(b"answer");
    assert_eq!(pair.receive(&wire).unwrap(), b"answer");
    pair.serve(rest).unwrap();
    assert_eq!(pair.plain, [7; 5000]);
    assert_eq!(pair.server.kept.capacity(), 0);
}

#[test]
fn new_keys_of_the_client_are_taken_and_answered_with_ours() {
    for step in [1, usize::MAX] {
        let mut pair = Pair::connected(&TLS13, step);
        for round in 0..3u8 {
            pair.client.refresh_traffic_keys().unwrap();
            pair.client.writer().write_all(&[round]).unwrap();
            pair.send().unwrap();
            assert_eq!(pair.plain, (0..=round).collect::<Vec<_>>());
            let wire = pair.sealed(b"answer");
            assert!(wire.len() > b"answer".len() + RECORD_OVERHEAD, "no key update before the data");
            assert_eq!(pair.receive(&wire).unwrap(), b"answer");
        }
    }
}

#[test]
fn a_handshake_in_small_records_succeeds_and_seals_nothing_meanwhile() {
    for version in [&TLS12, &TLS13] {
        for step in [1, 64, usize::MAX] {
            let (server, client) = configs(version, Some(32));
            let mut pair = Pair::new(&Arc::new(server), &Arc::new(client), step);
            let mut hello = pair.client_bytes();
            let rest = hello.split_off(80);
            pair.serve(hello).unwrap();
            let mut wire = Vec::new();
            assert_eq!(pair.server.seal(b"early", &mut wire), Err(Error::HandshakeNotComplete));
            assert_eq!(pair.server.close(&mut wire), Err(Error::HandshakeNotComplete));
            assert!(wire.is_empty());
            pair.serve(rest).unwrap();
            pair.shake_hands();
            pair.client.writer().write_all(&[1; 1000]).unwrap();
            pair.send().unwrap();
            assert_eq!(pair.plain, [1; 1000]);
        }
    }
}

#[test]
fn a_handshake_message_in_endless_small_records_is_not_kept() {
    let mut server = TlsLayer::new(Arc::new(configs(&TLS13, None).0)).unwrap();
    // A ClientHello of 65,535 bytes, one in each record.
    let message = [1, 0, 0xFF, 0xFF].into_iter().chain(std::iter::repeat(0)).take(60_000);
    let mut records: Vec<u8> = message.flat_map(|byte| [22, 3, 1, 0, 1, byte]).collect();
    let (mut plain, mut wire) = (Vec::new(), Vec::new());
    let mut given = 0;
    let refused = records.chunks_mut(6000).any(|chunk| {
        given += chunk.len();
        assert!(server.kept.len() <= KEPT_MAX);
        server.open(chunk, &mut plain, &mut wire).is_err()
    });
    assert!(refused && given > KEPT_MAX, "after {given} bytes");
    assert_eq!(server.kept.capacity(), 0);
}

#[test]
fn garbage_is_answered_with_an_alert() {
    let mut server = TlsLayer::new(Arc::new(configs(&TLS13, None).0)).unwrap();
    let (mut plain, mut wire) = (Vec::new(), Vec::new());
    let mut connect = *b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00";
    assert!(server.open(&mut connect, &mut plain, &mut wire).is_err());
    assert_eq!(wire, [21, 3, 3, 0, 2, 2, 50], "a fatal decode_error");
    assert!(server.open(&mut connect, &mut plain, &mut wire).is_err());
    assert_eq!((wire.len(), plain.len()), (7, 0));
}

#[test]
fn a_forged_record_ends_the_connection_with_an_alert_behind_the_rest() {
    for version in [&TLS12, &TLS13] {
        let mut pair = Pair::connected(version, usize::MAX);
        pair.client.writer().write_all(b"good").unwrap();
        let mut bytes = pair.client_bytes();
        pair.client.writer().write_all(b"forged").unwrap();
        bytes.extend(pair.client_bytes());
        *bytes.last_mut().unwrap() ^= 1;
        let mut wire = Vec::new();
        let opened = pair.server.open(&mut bytes, &mut pair.plain, &mut wire);
        assert_eq!(opened, Err(Error::DecryptError));
        assert_eq!(pair.plain, b"good");
        let told = pair.receive(&wire);
        assert_eq!(told, Err(Error::AlertReceived(AlertDescription::BadRecordMac)), "{version:?}");
        let len = wire.len();
        assert!(pair.server.seal(b"late", &mut wire).is_err() && pair.server.close(&mut wire).is_err());
        assert_eq!(wire.len(), len, "something was sent after the alert");
    }
}

#[test]
fn close_notify_is_told_in_both_directions_and_ends_the_input() {
    for version in [&TLS12, &TLS13] {
        for step in [1, usize::MAX] {
            let mut pair = Pair::connected(version, step);
            pair.client.writer().write_all(b"last").unwrap();
            pair.send().unwrap();
            assert!(!pair.server.peer_closed());
            pair.client.send_close_notify();
            let mut bytes = pair.client_bytes();
            bytes.extend_from_slice(b"ignored");
            pair.serve(bytes).unwrap();
            assert!(pair.server.peer_closed());
            assert_eq!(pair.plain, b"last");
            assert_eq!(pair.server.kept.capacity(), 0);
            let mut wire = pair.sealed(b"still open");
            pair.server.close(&mut wire).unwrap();
            let len = wire.len();
            pair.server.close(&mut wire).unwrap();
            assert_eq!(wire.len(), len, "said goodbye twice");
            assert_eq!(pair.receive(&wire).unwrap(), b"still open");
            assert!(pair.client.process_new_packets().unwrap().peer_has_closed(), "{version:?}");
        }
    }
}

#[test]
fn a_client_that_comes_again_resumes() {
    for version in [&TLS12, &TLS13] {
        let (server, client) = configs(version, None);
        let (server, client) = (Arc::new(server), Arc::new(client));
        let kinds = [(); 2].map(|()| {
            let mut pair = Pair::new(&server, &client, usize::MAX);
            pair.shake_hands();
            pair.client.handshake_kind()
        });
        assert_eq!(kinds, [Some(HandshakeKind::Full), Some(HandshakeKind::Resumed)], "{version:?}");
    }
}
