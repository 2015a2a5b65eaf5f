//! Fields of a client certificate, and templates that make user names, client ids and groups of them.

use thiserror::Error;

/// The names that templates may have in braces.
pub const NAMES: [&str; 8] = ["cn", "ou", "o", "dns", "uri", "email", "serial", "fingerprint"];

/// Fields of a certificate that TLS has verified.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CertificateFields {
    /// Common name of the subject.
    pub cn: Option<Box<str>>,
    /// Its first organizational unit.
    pub ou: Option<Box<str>>,
    /// Its organization.
    pub o: Option<Box<str>>,
    /// First DNS name of the subjectAltName.
    pub dns: Option<Box<str>>,
    /// First URI of it.
    pub uri: Option<Box<str>>,
    /// First e-mail address of it.
    pub email: Option<Box<str>>,
    /// Serial number, hexadecimal in lower case.
    pub serial: Option<Box<str>>,
    /// SHA-256 of the certificate, hexadecimal in lower case.
    pub fingerprint: Option<Box<str>>,
}

impl CertificateFields {
    /// Returns the field with a name of [`NAMES`].
    pub fn get(&self, name: &str) -> Option<&str> {
        let field = match name {
            "cn" => &self.cn,
            "ou" => &self.ou,
            "o" => &self.o,
            "dns" => &self.dns,
            "uri" => &self.uri,
            "email" => &self.email,
            "serial" => &self.serial,
            "fingerprint" => &self.fingerprint,
            _ => return None,
        };
        field.as_deref()
    }
}

/// A template that cannot be one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadTemplate {
    /// A brace has no partner.
    #[error("a brace has no partner")]
    Brace,
    /// The name in braces is none of a certificate.
    #[error("{{{0}}} is nothing of a certificate")]
    Name(String),
}

/// Text with names in braces, such as `device-{cn}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameTemplate(Vec<NamePart>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum NamePart {
    Text(Box<str>),
    Name(&'static str),
}

impl NameTemplate {
    /// Reads a template.
    ///
    /// # Errors
    /// [`BadTemplate`].
    pub fn parse(text: &str) -> Result<Self, BadTemplate> {
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some(at) = rest.find(['{', '}']) {
            let (before, from) = rest.split_at(at);
            if !before.is_empty() {
                parts.push(NamePart::Text(before.into()));
            }
            let (name, behind) =
                from.strip_prefix('{').and_then(|from| from.split_once('}')).ok_or(BadTemplate::Brace)?;
            let known = NAMES.into_iter().find(|known| *known == name);
            parts.push(NamePart::Name(known.ok_or_else(|| BadTemplate::Name(name.to_owned()))?));
            rest = behind;
        }
        if !rest.is_empty() {
            parts.push(NamePart::Text(rest.into()));
        }
        Ok(Self(parts))
    }

    /// The text for a certificate; `None` if it lacks a name, or one that has a control character.
    pub fn fill(&self, fields: &CertificateFields) -> Option<String> {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                NamePart::Text(part) => text.push_str(part),
                NamePart::Name(name) => text.push_str(
                    fields
                        .get(name)
                        .filter(|value| !value.is_empty() && !value.chars().any(char::is_control))?,
                ),
            }
        }
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_filled_in_and_one_that_is_missing_fills_nothing() {
        let fields = CertificateFields {
            cn: Some("d7".into()),
            o: Some("a\0b".into()),
            ..CertificateFields::default()
        };
        let fill = |text: &str| NameTemplate::parse(text).unwrap().fill(&fields);
        assert_eq!(fill("{cn}").as_deref(), Some("d7"));
        assert_eq!(fill("plant-{cn}/x").as_deref(), Some("plant-d7/x"));
        assert_eq!(fill("fixed").as_deref(), Some("fixed"));
        assert_eq!(fill("{cn}{ou}"), None);
        assert_eq!(fill("{o}"), None);
    }

    #[test]
    fn a_template_names_only_what_a_certificate_has() {
        assert_eq!(NameTemplate::parse("{cn"), Err(BadTemplate::Brace));
        assert_eq!(NameTemplate::parse("cn}"), Err(BadTemplate::Brace));
        assert_eq!(NameTemplate::parse("{CN}"), Err(BadTemplate::Name("CN".to_owned())));
        for name in NAMES {
            assert!(NameTemplate::parse(&format!("{{{name}}}")).is_ok(), "{name}");
        }
    }
}
