//! The names of a client certificate.

use x509_parser::{certificate::X509Certificate, extensions::GeneralName, prelude::FromDer as _};

/// Most names that are looked at: the authority signs what a client asks it to.
const MOST: usize = 32;

/// Common name, DNS names, URIs and e-mail addresses of a certificate that TLS has verified, and when it ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateNames {
    names: Box<[String]>,
    /// Seconds since 1970.
    pub(super) until: Option<u64>,
}

impl CertificateNames {
    /// From DER; without any names if it has none, or is not a certificate.
    pub fn read(der: &[u8]) -> Self {
        let Ok((_, certificate)) = X509Certificate::from_der(der) else { return Self::of([]) };
        let common = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
        let others = certificate.subject_alternative_name().ok().flatten();
        let others =
            others.iter().flat_map(|names| &names.value.general_names).filter_map(|name| match name {
                GeneralName::DNSName(name) | GeneralName::URI(name) | GeneralName::RFC822Name(name) => {
                    Some(*name)
                }
                _ => None,
            });
        let until = u64::try_from(certificate.validity().not_after.timestamp()).ok();
        Self { until, ..Self::of(common.chain(others).map(str::to_owned)) }
    }

    pub(super) fn of(names: impl IntoIterator<Item = String>) -> Self {
        let names = names.into_iter().filter(|name| !name.is_empty()).take(MOST).collect();
        Self { names, until: None }
    }

    /// All of them, the common name first.
    pub(super) fn all(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_common_one_and_the_alternatives() {
        use rcgen::{CertificateParams, DnType, KeyPair, SanType};

        let mut params = CertificateParams::new(vec!["a.example.com".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "backend 1");
        params.subject_alt_names.push(SanType::URI("spiffe://x/y".try_into().unwrap()));
        params.subject_alt_names.push(SanType::Rfc822Name("ops@example.com".try_into().unwrap()));
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let names = CertificateNames::read(certificate.der());
        let expected = ["backend 1", "a.example.com", "spiffe://x/y", "ops@example.com"];
        assert_eq!(names.all().collect::<Vec<_>>(), expected);
        assert!(names.until > Some(4_000_000_000), "that of rcgen's default: {:?}", names.until);
        assert_eq!(CertificateNames::read(b"x").all().count(), 0);
    }
}
