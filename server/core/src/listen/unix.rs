//! Unix-domain sockets and their files.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};

use super::address::{Address, BindError};

/// Interval at which a listener looks for its file.
const CHECK_FILE: Duration = Duration::from_secs(1);

/// A bound Unix-domain socket. Dropping it removes its file, unless another one is in its place.
pub struct UnixSocket {
    listener: UnixListener,
    path: PathBuf,
    mode: u32,
    /// Device and inode of the file.
    file: Option<(u64, u64)>,
}

impl UnixSocket {
    /// Binds the socket, whose file gets `mode`. The file of an ended service is replaced.
    ///
    /// # Errors
    /// [`BindError`] if the path is in use, no socket, or cannot be bound.
    pub fn bind(path: &Path, mode: u32) -> Result<UnixSocket, BindError> {
        let failed = |source| BindError::System { address: Address::Unix(path.to_owned()), source };
        let listener = match listen(path, mode) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path)?;
                listen(path, mode)
            }
            listener => listener,
        };
        Ok(UnixSocket {
            listener: listener.map_err(failed)?,
            path: path.to_owned(),
            mode,
            file: identity(path),
        })
    }

    /// The path of its file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The listener.
    #[must_use]
    pub const fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Accepts the next connection; returns it with the peer's user. Meanwhile a removed file is made again.
    ///
    /// # Errors
    /// The system's error.
    pub async fn accept(&mut self) -> io::Result<(UnixStream, u32)> {
        loop {
            self.check_file();
            if let Ok(accepted) = tokio::time::timeout(CHECK_FILE, self.listener.accept()).await {
                let (stream, _) = accepted?;
                let user = stream.peer_cred()?.uid();
                return Ok((stream, user));
            }
        }
    }

    /// Binds the socket again if its file was removed, for example by a cleaner of temporary files: without the file no
    /// client can connect.
    fn check_file(&mut self) {
        if fs::symlink_metadata(&self.path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
            && let Ok(listener) = listen(&self.path, self.mode)
        {
            tracing::warn!(path = %self.path.display(), "the file of a socket was removed; the socket is bound again");
            self.listener = listener;
            self.file = identity(&self.path);
        }
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        if self.file.is_some() && identity(&self.path) == self.file {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Listens at a path where no file is. The file gets `mode` at once: that of the socket, which the umask would restrict.
fn listen(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    let address = SocketAddrUnix::new(path)?;
    let umask = rustix::process::umask(Mode::empty());
    let bound = rustix::net::bind(&socket, &address);
    rustix::process::umask(umask);
    bound?;
    rustix::net::listen(&socket, i32::MAX)?;
    UnixListener::from_std(socket.into())
}

/// Removes the file of a socket on which no process listens. Of services that start at once on such a file, one binds it: the file
/// that is removed is the one that was tried.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let failed = |source| BindError::System { address: Address::Unix(path.to_owned()), source };
    let tried = fs::symlink_metadata(path).map_err(failed)?;
    if !tried.file_type().is_socket() {
        return Err(BindError::NotASocket { path: path.to_owned() });
    }
    match StdStream::connect(path) {
        Err(error)
            if error.kind() == io::ErrorKind::ConnectionRefused
                && identity(path) == Some((tried.dev(), tried.ino())) =>
        {
            fs::remove_file(path).map_err(failed)
        }
        _ => Err(BindError::InUse { path: path.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn the_file_has_its_mode_and_goes_with_its_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        for mode in [0o600, 0o660, 0o666] {
            let socket = UnixSocket::bind(&path, mode).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, mode);
            assert!(matches!(UnixSocket::bind(&path, mode).err(), Some(BindError::InUse { .. })));
            drop(socket);
            assert!(!path.exists());
        }
    }

    #[tokio::test]
    async fn a_stale_file_is_replaced_and_foreign_files_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let socket = UnixSocket::bind(&path, 0o600).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "notes").unwrap();
        drop(socket);
        assert!(matches!(UnixSocket::bind(&path, 0o600).err(), Some(BindError::NotASocket { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "notes");
    }

    #[tokio::test]
    async fn the_kernel_reports_the_user_of_a_peer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let mut socket = UnixSocket::bind(&path, 0o600).unwrap();
        let _client = StdStream::connect(&path).unwrap();
        assert_eq!(socket.accept().await.unwrap().1, rustix::process::geteuid().as_raw());
    }
}
