//! A CA, and certificates of it for both sides.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// Writes `ca.pem`, `server.crt`, `server.key`, both as `server.pem`, `client.crt` and `client.key`.
pub(super) fn write(folder: &Path) {
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        fs::write(&path, text).expect("write a file");
        // A key that others can read is refused.
        fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("keep it from others");
    };
    let mut ca = CertificateParams::new(Vec::new()).expect("names");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    // A certificate with its issuer's name counts as signed by itself.
    ca.distinguished_name.push(DnType::CommonName, "the CA");
    let key = KeyPair::generate().expect("a key");
    write("ca.pem", ca.self_signed(&key).expect("sign").pem());
    let issuer = Issuer::new(ca, key);
    for name in ["server", "client"] {
        let key = KeyPair::generate().expect("a key");
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&key, &issuer).expect("sign").pem();
        write(&format!("{name}.pem"), key.serialize_pem() + &certificate);
        write(&format!("{name}.crt"), certificate);
        write(&format!("{name}.key"), key.serialize_pem());
    }
}
