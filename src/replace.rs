//! A file that is replaced as a whole, for those who read it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown},
    path::Path,
};

/// Replaces the file's text, so that whoever reads it meanwhile sees all of it or none, and it is on disk when this returns. Who
/// may read it stays as it was: a gateway that runs as another user must be able to read what root has changed. A new file is
/// for its owner only.
///
/// # Errors
/// Those of the system, also if the file would get another group; then nothing has changed.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let beside = path.with_file_name(name);
    let written = write(&beside, path, text);
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or_else(|| Path::new(".")))?.sync_all()
}

fn write(beside: &Path, path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(beside)?;
    if let Ok(before) = fs::metadata(path) {
        let now = file.metadata()?;
        if before.gid() != now.gid() {
            fchown(&file, None, Some(before.gid()))?;
        }
        // Who is not root becomes its owner, as with an editor.
        if before.uid() != now.uid() {
            let _ = fchown(&file, Some(before.uid()), None);
        }
        // After the owner, a change of which takes rights away.
        file.set_permissions(before.permissions())?;
    }
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(beside, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown};

    use super::*;

    /// The file became root's, so that the gateway could read neither the passwords nor that a token was revoked.
    #[test]
    fn owner_group_and_mode_stay_and_nothing_is_left_beside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        replace(&path, "one").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let is_root = chown(&path, Some(4_000), Some(4_001)).is_ok();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let before = fs::metadata(&path).unwrap();
        replace(&path, "two").unwrap();
        let now = fs::metadata(&path).unwrap();
        assert_eq!((now.uid(), now.gid(), now.mode()), (before.uid(), before.gid(), before.mode()));
        assert!(!is_root || now.gid() == 4_001);
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(replace(&dir.path().join("none/tokens"), "").is_err());
    }
}
