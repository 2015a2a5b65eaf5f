//! Reads what a verified client certificate says about its device.

use access::certificate::CertificateFields;
use aws_lc_rs::digest;
use x509_parser::{
    certificate::X509Certificate, extensions::GeneralName, prelude::FromDer as _, x509::AttributeTypeAndValue,
};

/// Returns the fields of the certificate; empty ones if the certificate cannot be read, which TLS would have refused.
pub(super) fn read(der: &[u8]) -> CertificateFields {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else { return CertificateFields::default() };
    let text = |attribute: &AttributeTypeAndValue<'_>| attribute.as_str().ok().map(Box::from);
    let subject = certificate.subject();
    let mut fields = CertificateFields {
        cn: subject.iter_common_name().next().and_then(text),
        ou: subject.iter_organizational_unit().next().and_then(text),
        o: subject.iter_organization().next().and_then(text),
        serial: Some(hex(certificate.raw_serial()).into()),
        fingerprint: Some(hex(digest::digest(&digest::SHA256, der).as_ref()).into()),
        ..CertificateFields::default()
    };
    if let Ok(Some(names)) = certificate.subject_alternative_name() {
        for name in &names.value.general_names {
            let (field, name) = match name {
                GeneralName::DNSName(name) => (&mut fields.dns, name),
                GeneralName::URI(name) => (&mut fields.uri, name),
                GeneralName::RFC822Name(name) => (&mut fields.email, name),
                _ => continue,
            };
            field.get_or_insert_with(|| Box::from(*name));
        }
    }
    fields
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    #[test]
    fn a_certificate_names_its_device() {
        let mut params =
            CertificateParams::new(vec!["d7.example".to_owned(), "e.example".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "d7");
        params.distinguished_name.push(DnType::OrganizationalUnitName, "pumps");
        params.subject_alt_names.push(SanType::URI("urn:d:7".try_into().unwrap()));
        params.serial_number = Some(vec![1, 0xab].into());
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let fields = read(certificate.der());
        let found = ["cn", "ou", "o", "dns", "uri", "email", "serial"].map(|name| fields.get(name));
        let expected =
            [Some("d7"), Some("pumps"), None, Some("d7.example"), Some("urn:d:7"), None, Some("01ab")];
        assert_eq!(found, expected);
        assert_eq!(fields.fingerprint.unwrap().len(), 64);
        assert_eq!(read(b"no certificate"), CertificateFields::default());
    }
}
