//! Unix domain sockets: the socket's file, and the streams accepted through it.
//!
//! An accepted stream goes on as a `TcpStream` that holds its descriptor. The work of connections on a stream (read,
//! write, shutdown, readiness) is the same system calls for both families, so nothing behind the listener knows the
//! difference and no connection pays for it. The options of TCP alone (no delay, addresses) are asked of TCP sockets
//! alone.

use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use socket2::{Domain, SockAddr, Socket, Type};

/// The file of a bound socket; removed on drop, unless another file has taken its place. To be dropped before the
/// listener, which keeps the inode from being used again.
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Binds and listens. The file has its permissions before anybody can connect. The file of a process that is gone is
/// replaced; a file with a listener, or one that is no socket, never is.
pub(crate) fn bind(path: &Path, mode: u32, backlog: i32) -> io::Result<(SocketFile, UnixListener)> {
    remove_stale(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&SockAddr::unix(path)?)?;
    let file = SocketFile { path: path.to_owned(), identity: identity(path)? };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    socket.listen(backlog)?;
    socket.set_nonblocking(true)?;
    Ok((file, OwnedFd::from(socket).into()))
}

/// See the module.
pub(crate) fn as_tcp(stream: UnixStream) -> std::net::TcpStream {
    OwnedFd::from(stream).into()
}

fn remove_stale(path: &Path) -> io::Result<()> {
    let in_use = |what| io::Error::new(io::ErrorKind::AddrInUse, what);
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !metadata.file_type().is_socket() {
        return Err(in_use("the file exists and is not a socket"));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
        Ok(_) => Err(in_use("another process listens on this socket")),
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_stale_socket_is_replaced_and_only_the_own_file_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("m.sock");
        let (file, listener) = bind(&path, 0o600, 8).unwrap();
        assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let refused = bind(&path, 0o600, 8).err().map(|error| error.kind());
        assert_eq!(refused, Some(io::ErrorKind::AddrInUse), "somebody listens");
        fs::remove_file(&path).unwrap();
        let (second_file, second) = bind(&path, 0o660, 8).unwrap();
        drop(file);
        assert!(path.exists(), "the first does not remove the file of the second");
        drop((listener, second));
        let (third_file, _third) = bind(&path, 0o660, 8).expect("a file that nobody listens on is replaced");
        drop(third_file);
        assert!(!path.exists());
        drop(second_file);

        fs::write(&path, "data").unwrap();
        let refused = bind(&path, 0o600, 8).err().map(|error| error.kind());
        assert_eq!(refused, Some(io::ErrorKind::AddrInUse));
        assert_eq!(fs::read_to_string(&path).unwrap(), "data");
    }
}
