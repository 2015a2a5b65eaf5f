//! The id of this gateway among those that share a database: made once, kept in the data directory.

use std::{
    fs,
    hash::{BuildHasher, RandomState},
    io::ErrorKind,
};

use super::{DataDir, StoreError};

/// The id in file `server_id` of the data directory, made at the first call. It does not change with the name of the
/// host, and no two gateways have the same, as a directory belongs to one of them. Blocks on the disk.
///
/// # Errors
/// The file can be neither read nor made.
pub fn server_id(directory: &DataDir) -> Result<String, StoreError> {
    let path = directory.path().join("server_id");
    let failed = |what: &str, e: std::io::Error| {
        StoreError::Unavailable(format!("cannot {what} {}: {e}", path.display()))
    };
    match fs::read_to_string(&path) {
        Ok(text) if !text.trim().is_empty() => return Ok(text.trim().to_owned()),
        Ok(_) => {}
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(failed("read", e)),
    }
    // The keys of a new RandomState are random.
    let id = format!("{:016x}", RandomState::new().hash_one(std::process::id()));
    directory.replace_file("server_id", &format!("{id}\n"))?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_stays_with_its_directory() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let read = |dir: &tempfile::TempDir| server_id(&DataDir::open(dir.path()).unwrap()).unwrap();
        let id = read(&one);
        assert_eq!(id.len(), 16);
        assert_eq!(read(&one), id);
        assert_ne!(read(&other), id);
        fs::write(one.path().join("server_id"), "").unwrap();
        assert_eq!(read(&one).len(), 16, "an empty file is no id");
    }
}
