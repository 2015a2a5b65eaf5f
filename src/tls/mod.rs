//! Certificates: TLS configurations from PEM files, their reload, and certificates for development.
//!
//! A leaf beside `config`, whose file lists it reads. Knows no socket and no protocol above TLS.
//!
//! Invariant: a configuration in use is replaced only by one that was built whole; nothing is served with
//! half-read files.

mod client;
mod config;
mod dev_certs;
mod inspect;
mod reload;

pub use client::client_config;
pub use config::{TlsError, check_files, check_files_at, server_config};
pub use dev_certs::{DevCerts, DevCertsError, ensure_dev_certs};
pub use reload::{Notice, TlsHandle, TlsStore};

#[cfg(test)]
mod tests;
