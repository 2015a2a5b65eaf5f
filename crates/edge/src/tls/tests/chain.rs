//! Files in which certificates are not where they should be.

use super::*;

/// The failure: the key "does not belong to the certificate" where only the order of the file is wrong, and of an
/// authority's file that is empty "the server's own" certificate is asked for.
#[test]
fn a_chain_in_the_wrong_order_and_a_file_without_authorities_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let authority = |name: &str| {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        (params, KeyPair::generate().unwrap())
    };
    let (root, root_key) = authority("root");
    let root_pem = root.self_signed(&root_key).unwrap().pem();
    let root = Issuer::new(root, root_key);
    let (middle, middle_key) = authority("middle");
    let middle_pem = middle.signed_by(&middle_key, &root).unwrap().pem();
    let middle = Issuer::new(middle, middle_key);
    let key = KeyPair::generate().unwrap();
    let own =
        CertificateParams::new(["localhost".to_owned()]).unwrap().signed_by(&key, &middle).unwrap().pem();
    let mut files = files(dir.path());
    write_key(&files.key, &key.serialize_pem());
    let write =
        |pems: &[&String]| fs::write(&files.cert, pems.iter().map(|pem| pem.as_str()).collect::<String>());

    write(&[&middle_pem, &own]).unwrap();
    let error = check_files(&with_certificate(&files)).unwrap_err().to_string();
    for part in ["server.crt", "wrong order", "number 2", "server's own first"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    for (pems, told) in [
        (&[&own, &middle_pem][..], 0),
        (&[&own, &middle_pem, &root_pem], 0),
        (&[&own], 0),
        (&[&own, &root_pem, &middle_pem], 1),
    ] {
        write(pems).unwrap();
        let store = TlsStore::new();
        store.add("grpc", files.clone(), &[]).unwrap();
        let notices = store.notices(SystemTime::now());
        assert_eq!(notices.len(), told, "{notices:?}");
        assert!(notices.iter().all(|notice| notice.text.contains("number 3 signed number 1")), "{notices:?}");
    }

    files.client_ca = Some(dir.path().join("ca.pem"));
    write_key(&dir.path().join("ca.pem"), &key.serialize_pem());
    let error = server_config(&files, &[]).unwrap_err().to_string();
    assert!(
        error.contains("ca.pem") && error.contains("authority") && !error.contains("own first"),
        "{error}"
    );
}
