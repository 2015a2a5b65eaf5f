//! Files with secrets.

use std::{fs, path::Path};

/// The content of a file with a secret, without the end of its last line.
///
/// # Errors
/// `key`, and what is wrong with the file.
pub(super) fn read_secret(path: &Path, key: &'static str) -> Result<Vec<u8>, (&'static str, String)> {
    let mut secret = fs::read(path).map_err(|error| (key, format!("{}: {error}", path.display())))?;
    while secret.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
        secret.pop();
    }
    if secret.is_empty() {
        return Err((key, format!("{}: is empty", path.display())));
    }
    Ok(secret)
}
