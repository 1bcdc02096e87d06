//! Unix-domain sockets and their files.

use std::ffi::OsStr;
use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, chmod, fstat, linkat, openat, renameat, renameat_with,
    unlinkat,
};
use rustix::io::Errno;
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
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                remove_stale(path)?;
                listen(path, mode)
            }
            listener => listener,
        };
        // A service that was started at the same time has bound the path.
        let listener = listener.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => BindError::InUse { path: path.to_owned() },
            _ => failed(error),
        })?;
        Ok(UnixSocket { listener, path: path.to_owned(), mode, file: identity(path) })
    }

    /// The path of its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The listener.
    pub const fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Accepts the next connection; returns it with the peer's user. Meanwhile a removed file is made again.
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

/// The folder of a socket's file, and names in it.
struct Place<'a> {
    folder: OwnedFd,
    name: &'a OsStr,
    /// A name that no other process uses.
    private: String,
}

impl Place<'_> {
    fn of(path: &Path) -> io::Result<Place<'_>> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = openat(CWD, folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        // Random, because processes of several containers can have the same id.
        let private = format!(".expertd-{:016x}", RandomState::new().hash_one(std::process::id()));
        Ok(Place { folder, name, private })
    }

    /// The path of the private name. The path of a socket has at most 107 bytes; this one is short.
    fn private_path(&self) -> PathBuf {
        format!("/proc/self/fd/{}/{}", self.folder.as_raw_fd(), self.private).into()
    }

    /// Gives a file with the private name its public one, if no file has that, and removes the private name.
    fn publish(&self) -> io::Result<()> {
        let published =
            match renameat_with(&self.folder, &self.private, &self.folder, self.name, RenameFlags::NOREPLACE)
            {
                // A file system without this renaming may have hard links.
                Err(Errno::INVAL) => {
                    linkat(&self.folder, &self.private, &self.folder, self.name, AtFlags::empty())
                }
                renamed => renamed,
            };
        self.remove_private();
        Ok(published?)
    }

    fn remove_private(&self) {
        let _ = unlinkat(&self.folder, &self.private, AtFlags::empty());
    }
}

/// Listens at a path where no file is. The socket appears there once it has `mode` and listens, so that no other service takes it
/// for the socket of an ended one. Until then it has a private name in the same folder.
fn listen(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let place = Place::of(path)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(place.private_path())?)?;
    let prepared = set_mode(&place, mode).and_then(|()| Ok(rustix::net::listen(&socket, i32::MAX)?));
    if let Err(error) = prepared {
        place.remove_private();
        return Err(error);
    }
    place.publish()?;
    UnixListener::from_std(socket.into())
}

/// Sets the mode of a socket, which the umask has restricted. A user who may write the folder can put another file in its place,
/// so the file is opened and checked first.
fn set_mode(place: &Place<'_>, mode: u32) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(&place.folder, &place.private, flags, Mode::empty())?;
    if !FileType::from_raw_mode(fstat(&file)?.st_mode).is_socket() {
        return Err(io::Error::other("another process has replaced the socket's file"));
    }
    Ok(chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), Mode::from_raw_mode(mode))?)
}

/// Removes the file of a socket on which no process listens. If another service binds the path meanwhile, its file is put back,
/// so that one of several services that start at once gets the path.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let failed = |source: io::Error| match source.kind() {
        // Another service has removed the file.
        io::ErrorKind::NotFound => BindError::InUse { path: path.to_owned() },
        _ => BindError::System { address: Address::Unix(path.to_owned()), source },
    };
    let tried = fs::symlink_metadata(path).map_err(failed)?;
    if !tried.file_type().is_socket() {
        return Err(BindError::NotASocket { path: path.to_owned() });
    }
    let in_use = || BindError::InUse { path: path.to_owned() };
    let is_removed = is_stale(path) && take_stale(path).map_err(failed)?;
    is_removed.then_some(()).ok_or_else(in_use)
}

/// Whether no process listens on a socket.
fn is_stale(path: &Path) -> bool {
    StdStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Removes the socket's file; returns false, and keeps the file, if a process listens on it.
fn take_stale(path: &Path) -> io::Result<bool> {
    let place = Place::of(path)?;
    renameat(&place.folder, place.name, &place.folder, &place.private)?;
    if !is_stale(&place.private_path()) {
        place.publish()?;
        return Ok(false);
    }
    place.remove_private();
    Ok(true)
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

    /// Services that start at the same time on the file of an ended one.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn of_many_services_one_gets_a_stale_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        for _ in 0..50 {
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let start = || {
                let path = path.clone();
                tokio::spawn(async move { UnixSocket::bind(&path, 0o600) })
            };
            let (one, other) = (start(), start());
            let bound: Vec<_> = [one.await.unwrap(), other.await.unwrap()].into_iter().flatten().collect();
            assert_eq!(bound.len(), 1);
            assert_eq!(identity(&path), bound[0].file);
            assert!(StdStream::connect(&path).is_ok());
            let files = fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(files, 1, "private names are left");
        }
    }

    #[tokio::test]
    async fn a_file_that_comes_while_a_stale_one_is_removed_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let socket = UnixSocket::bind(&path, 0o600).unwrap();
        assert!(!take_stale(&path).unwrap());
        assert_eq!(identity(&path), socket.file);
    }

    #[tokio::test]
    async fn a_path_may_be_as_long_as_a_socket_allows() {
        let folder = tempfile::tempdir().unwrap();
        let rest = 107 - folder.path().as_os_str().len() - 1;
        let path = folder.path().join("x".repeat(rest));
        let _socket = UnixSocket::bind(&path, 0o660).unwrap();
        assert!(StdStream::connect(&path).is_ok());
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
