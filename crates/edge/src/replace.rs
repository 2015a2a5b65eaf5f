//! A file that is replaced as a whole, for those who read it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown},
    path::{Path, PathBuf},
};

/// Replaces the file's text, so that a reader sees all of it or none meanwhile, and the text is on disk when this
/// returns. The rights to read the file stay as they were: a gateway that runs as another user must be able to read a file
/// that root has changed. A new file is for its owner only. Of a symbolic link, the file that it leads to is replaced,
/// and the link stays.
///
/// # Errors
/// The system's errors, also if the file would get another group; then nothing has changed.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let path = &target(path)?;
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

/// The file that a path leads to, by way of symbolic links, whether it is there or not.
///
/// # Errors
/// The system's errors; links that lead to each other.
pub fn target(path: &Path) -> io::Result<PathBuf> {
    const MOST_LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        let is_link = fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_symlink());
        if !is_link {
            return Ok(path);
        }
        let next = fs::read_link(&path)?;
        // One that is absolute takes the place of it all.
        path = path.parent().unwrap_or_else(|| Path::new("")).join(next);
    }
    Err(io::Error::other("too many symbolic links"))
}

fn write(beside: &Path, path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(beside)?;
    if let Ok(before) = fs::metadata(path) {
        let now = file.metadata()?;
        if before.gid() != now.gid() {
            fchown(&file, None, Some(before.gid()))?;
        }
        // A process that is not root becomes the file's owner, as with an editor.
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
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

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

    /// The failure: the link becomes a file of its own, and the file that it led to, which others read, keeps the old
    /// text.
    #[test]
    fn a_symbolic_link_stays_one_and_the_file_behind_it_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("mounted")).unwrap();
        fs::write(at("mounted/tokens"), "one").unwrap();
        fs::set_permissions(at("mounted/tokens"), fs::Permissions::from_mode(0o640)).unwrap();
        symlink("mounted", at("data")).unwrap();
        symlink("data/tokens", at("tokens")).unwrap();
        symlink(at("tokens"), at("absolute")).unwrap();
        for (link, text) in [("tokens", "two"), ("absolute", "three")] {
            replace(&at(link), text).unwrap();
            assert!(fs::symlink_metadata(at(link)).unwrap().is_symlink(), "{link}");
            assert_eq!(fs::read_to_string(at("mounted/tokens")).unwrap(), text);
            assert_eq!(fs::metadata(at("mounted/tokens")).unwrap().mode() & 0o777, 0o640);
        }
        symlink("mounted/new", at("dangling")).unwrap();
        replace(&at("dangling"), "new").unwrap();
        assert_eq!(fs::read_to_string(at("mounted/new")).unwrap(), "new");
        symlink("circle", at("circle")).unwrap();
        assert!(replace(&at("circle"), "").is_err());
        assert_eq!(fs::read_dir(at("mounted")).unwrap().count(), 2, "nothing is left beside them");
    }
}
