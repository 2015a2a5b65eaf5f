//! Certificates: TLS configurations from PEM files, their reload, and certificates for development.
//!
//! A leaf beside `config`, whose file lists it reads. Knows no socket and no protocol above TLS.
//!
//! Invariant: a configuration in use is replaced only by one that was built whole; nothing is served with
//! half-read files.

mod by_name;
mod certificate_id;
mod client;
mod config;
mod dev_certs;
mod failure;
mod inspect;
mod reload;
mod revocations;

pub use certificate_id::CertificateId;
pub(crate) use client::ClientTls;
pub use client::{ServerName, client_config, client_of_ca};
pub use config::{TlsError, check_files, check_files_at};
pub use dev_certs::{DevCertsError, ensure_dev_certs};
pub use failure::{in_words, io_in_words};
pub use reload::{TlsHandle, TlsStore};
pub use revocations::Revocations;

#[cfg(test)]
mod tests;
