//! Unix-domain sockets and their files.
//!
//! The file of an ended service is replaced, and a removed one is made again. Services on one host take turns at this, by a lock on
//! the folder: otherwise two that start at once could both find the file of an ended service, and the second to replace it would leave
//! the first without clients.

use std::fs::Permissions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

use super::address::{Address, BindError};
use crate::telemetry::Rarely;

/// Interval of the checks whether the file of a Unix-domain socket still exists.
const FILE_ROUND: Duration = Duration::from_secs(1);
/// How long a start waits for the lock on a folder, which services hold for less than a millisecond.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of attempts to take the lock.
const LOCK_ROUND: Duration = Duration::from_millis(10);

/// A bound Unix-domain socket and its file.
pub(crate) struct UnixSocket {
    /// Dropped before the listener, which keeps the file's number from being used again.
    file: SocketFile,
    listener: UnixListener,
    mode: u32,
    next_check: Instant,
    /// The check of the file that is under way: a network file system may take long to answer.
    check: Option<JoinHandle<Found>>,
    /// Whether another process had locked the folder when the file was to be made again.
    was_locked: bool,
    unreachable: Rarely,
}

/// What a check finds at the path of a socket.
enum Found {
    /// The file that was bound, and its number now.
    Own(FileId),
    /// Another file.
    Other,
    /// No file.
    Nothing,
    /// The file system's error.
    Failed(io::Error),
}

impl Found {
    fn at(path: &Path, id: FileId) -> Found {
        match FileId::of(path) {
            Ok(found) if found == id || leads_here(path) => Found::Own(found),
            Ok(_) => Found::Other,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Nothing,
            Err(error) => Found::Failed(error),
        }
    }
}

impl UnixSocket {
    /// Binds the socket when no other service is at this in the same folder.
    pub(super) async fn bind(path: &Path, mode: u32) -> Result<UnixSocket, BindError> {
        UnixSocket::bind_within(path, mode, LOCK_TIMEOUT).await
    }

    async fn bind_within(path: &Path, mode: u32, timeout: Duration) -> Result<UnixSocket, BindError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(lock) = FolderLock::try_take(path) {
                return UnixSocket::bind_locked(path, mode, &lock);
            }
            if Instant::now() >= deadline {
                tracing::warn!(path = %path.display(), "another process keeps the folder of a socket locked; it is bound without the lock");
                return UnixSocket::bind_locked(path, mode, &FolderLock::none());
            }
            tokio::time::sleep(LOCK_ROUND).await;
        }
    }

    fn bind_locked(path: &Path, mode: u32, _: &FolderLock) -> Result<UnixSocket, BindError> {
        let failed = |source| BindError::System { address: Address::Unix(path.to_owned()), source };
        let listener = match listen(path, mode) {
            Ok(listener) => listener,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path)?;
                listen(path, mode).map_err(failed)?
            }
            Err(error) => return Err(failed(error)),
        };
        let id = FileId::of(path).map_err(failed)?;
        let file = SocketFile { path: path.to_owned(), id };
        // The umask may have taken permissions away.
        std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)?;
        let next_check = Instant::now() + FILE_ROUND;
        let (check, was_locked, unreachable) = (None, false, Rarely::default());
        Ok(UnixSocket { file, listener, mode, next_check, check, was_locked, unreachable })
    }

    /// The path of the socket's file.
    pub(super) fn path(&self) -> &Path {
        &self.file.path
    }

    /// Accepts the next connection; returns it with the peer's user.
    pub(super) async fn accept(&mut self) -> io::Result<(UnixStream, u32)> {
        self.check_file();
        let (stream, _) = self.listener.accept().await?;
        let user = stream.peer_cred()?.uid();
        Ok((stream, user))
    }

    /// Binds the socket again if its file was removed: without the file no client can connect. A file that something else has put in
    /// its place stays.
    fn check_file(&mut self) {
        let Some(check) = &mut self.check else {
            if Instant::now() >= self.next_check {
                let (path, id) = (self.file.path.clone(), self.file.id);
                self.check = Some(tokio::task::spawn_blocking(move || Found::at(&path, id)));
            }
            return;
        };
        let Some(found) = check.now_or_never() else { return };
        (self.check, self.next_check) = (None, Instant::now() + FILE_ROUND);
        let path = self.file.path.display().to_string();
        let problem = match found.unwrap_or_else(|error| Found::Failed(error.into())) {
            Found::Own(id) => {
                (self.file.id, self.was_locked) = (id, false);
                return;
            }
            Found::Other => {
                "another file is in its place; remove that file, and the socket is bound again".to_owned()
            }
            Found::Nothing => {
                let lock = match FolderLock::try_take(&self.file.path) {
                    Some(lock) => lock,
                    None if self.was_locked => FolderLock::none(),
                    None => {
                        // Another service is binding a socket, and has done so before the next round.
                        self.was_locked = true;
                        return;
                    }
                };
                match UnixSocket::bind_locked(&self.file.path, self.mode, &lock) {
                    Ok(again) => {
                        tracing::warn!(path, "the file of a socket was removed; the socket is bound again");
                        *self = again;
                        return;
                    }
                    Err(error) => error.to_string(),
                }
            }
            Found::Failed(error) => error.to_string(),
        };
        if let Some(times) = self.unreachable.now() {
            tracing::error!(
                path,
                problem,
                times,
                "clients cannot connect to a socket whose file was removed"
            );
        }
    }
}

/// Listens at a path where no file is. From the first moment on, the file allows no more than `mode`.
fn listen(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets the mode of the socket that is bound, less the umask.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, i32::MAX)?;
    UnixListener::from_std(socket.into())
}

/// The right to replace files of sockets in a folder, which one process on this host has at a time. It ends on drop, and with the
/// process.
struct FolderLock {
    /// `None` where the folder cannot be locked, as on some network file systems. Services then do not take turns.
    _folder: Option<OwnedFd>,
}

impl FolderLock {
    /// No lock. Everyone who may read a folder can keep it locked, which must not keep a service from starting.
    const fn none() -> FolderLock {
        FolderLock { _folder: None }
    }

    /// Takes the lock on the folder of `path`; `None` if another process has it.
    fn try_take(path: &Path) -> Option<FolderLock> {
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = open(folder, flags, Mode::empty());
        match opened
            .and_then(|opened| flock(&opened, FlockOperation::NonBlockingLockExclusive).map(|()| opened))
        {
            Ok(opened) => Some(FolderLock { _folder: Some(opened) }),
            Err(Errno::WOULDBLOCK) => None,
            Err(error) => {
                tracing::debug!(folder = %folder.display(), %error, "a folder of sockets cannot be locked");
                Some(FolderLock::none())
            }
        }
    }
}

/// Removes a socket file that an ended process left behind, and nothing else: a refused connection proves that no process
/// listens.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let failed = |source| BindError::System { address: Address::Unix(path.to_owned()), source };
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if !metadata.file_type().is_socket() {
        return Err(BindError::NotASocket { path: path.to_owned() });
    }
    match connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "removing the socket of an ended process");
            std::fs::remove_file(path).map_err(failed)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(failed(error)),
        _ => Err(BindError::InUse { path: path.to_owned() }),
    }
}

/// Connects without waiting: a stopped process that listens may have no room for another connection, which is an error then.
fn connect(path: &Path) -> io::Result<std::os::unix::net::UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Whether clients that connect to `path` reach the socket that this process bound to it. Some file systems give another number to a
/// file that is in use, so that a new number alone does not show that the file is another one.
fn leads_here(path: &Path) -> bool {
    let peer = || {
        let stream = connect(path)?;
        let is_path = stream.peer_addr()?.as_pathname() == Some(path);
        Ok((is_path, UnixStream::from_std(stream)?.peer_cred()?.pid()))
    };
    let found: io::Result<(bool, Option<i32>)> = peer();
    let own = i32::try_from(std::process::id()).ok();
    found.is_ok_and(|(is_path, pid)| is_path && pid == own)
}

/// Device and inode of a file. While a socket is open, no other file gets those of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId(u64, u64);

impl FileId {
    fn of(path: &Path) -> io::Result<FileId> {
        let metadata = std::fs::symlink_metadata(path)?;
        Ok(FileId(metadata.dev(), metadata.ino()))
    }
}

/// Removes the socket's file on drop if it is still the file that was bound.
struct SocketFile {
    path: PathBuf,
    id: FileId,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = FileId::of(&self.path).is_ok_and(|found| found == self.id);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "the socket file could not be removed");
        }
    }
}

#[cfg(test)]
#[path = "unix_tests.rs"]
mod tests;
