//! Connection of `status` and `drain` to the Admin service.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use clap::Args;
use expertd_client::transport::{self, Channel, ConnectError, Credentials};
use expertd_proto::v1::admin_client::AdminClient;

use super::client::{call_failed, not_connected};
use super::exit::CommandError;

/// Address of a service's Admin service.
#[derive(Args, Clone, Debug, Default)]
pub struct AdminAddress {
    /// The service's admin address: unix:PATH or HOST:PORT (`serve --admin-listen`) [default: the socket of this user]
    #[arg(long = "admin", value_name = "ADDR", env = "EXPERTD_ADMIN_LISTEN")]
    pub address: Option<String>,
    /// Credentials of the caller, and how the service is authenticated.
    #[command(flatten)]
    pub credentials: Credentials,
}

impl AdminAddress {
    /// Connects to Admin.
    ///
    /// # Errors
    /// If the address is malformed or the connection fails.
    pub async fn connect(&self) -> Result<AdminClient<Channel>, CommandError> {
        if self.address.is_none() {
            let address = self.shown();
            let socket = Path::new(address.trim_start_matches("unix:"));
            check_owner(socket).map_err(|error| {
                CommandError::failed(format!(
                    "cannot trust {address}: {error}; --admin gives another address"
                ))
            })?;
        }
        match transport::connect_with(&self.shown(), &self.credentials).await {
            Ok(channel) => Ok(AdminClient::new(channel)),
            Err(error @ ConnectError::Unreachable { .. }) if self.address.is_none() => {
                Err(CommandError::failed(format!(
                    "{error} This is the default socket of this user; --admin gives another address (that of `serve \
                     --admin-listen`)"
                )))
            }
            Err(error) => Err(not_connected(error)),
        }
    }

    /// The address that is connected to.
    pub fn shown(&self) -> String {
        self.address.clone().unwrap_or_else(|| {
            let mut sockets = folders().map(|folder| folder.join(SOCKET));
            let first = folders().next().map(|folder| folder.join(SOCKET)).unwrap_or_default();
            format!("unix:{}", sockets.find(|socket| socket.exists()).unwrap_or(first).display())
        })
    }
}

/// Name of Admin's socket in its folder.
const SOCKET: &str = "admin.sock";

/// The folders that may hold this user's socket, the preferred one first: the folder of the login session, then one that does not
/// depend on how the service was started.
fn folders() -> impl Iterator<Item = PathBuf> {
    let session = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_dir());
    let user = rustix::process::geteuid().as_raw();
    session.map(|folder| folder.join("expertd")).into_iter().chain([format!("/tmp/expertd-{user}").into()])
}

/// The default address of Admin: a socket in a folder that only this user may enter. The folder is made if it does not exist.
///
/// # Errors
/// If the folder cannot be made, or others may change it.
pub fn default_admin_address() -> Result<String, String> {
    let folder = folders().next().unwrap_or_default();
    private(&folder).map_err(|error| {
        format!("cannot use {} for Admin's socket: {error}; give --admin-listen unix:PATH", folder.display())
    })?;
    Ok(format!("unix:{}", folder.join(SOCKET).display()))
}

/// Makes a folder that only this user may enter, or checks that an existing folder is one.
fn private(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    check_private(folder)
}

/// Checks that a folder is one that only this user may change.
fn check_private(folder: &Path) -> io::Result<()> {
    let found = std::fs::symlink_metadata(folder)?;
    let own = found.uid() == rustix::process::geteuid().as_raw();
    if !found.is_dir() || !own || found.mode() & 0o022 != 0 {
        return Err(io::Error::other("it is not a folder that only this user may change"));
    }
    Ok(())
}

/// Checks that no other user can have made a default socket. A folder that does not exist has none.
fn check_owner(socket: &Path) -> Result<(), String> {
    let Some(folder) = socket.parent() else { return Ok(()) };
    match check_private(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(format!("{}: {error}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Wraps the status of an Admin call, with a hint if the address does not serve Admin.
pub(super) fn call_error(call: &str, address: &str, status: tonic::Status) -> CommandError {
    if status.code() == tonic::Code::Unimplemented {
        let text = format!(
            "{address} does not serve Admin; it has an address of its own (`serve --admin-listen`, by default a socket of its user)"
        );
        return call_failed(call, &tonic::Status::unimplemented(text));
    }
    call_failed(call, &status)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_folder_that_others_may_change_is_not_used() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("expertd");
        private(&folder).unwrap();
        assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        private(&folder).unwrap();
        set_permissions(&folder, Permissions::from_mode(0o770)).unwrap();
        assert!(private(&folder).is_err());
        assert!(check_owner(&folder.join(SOCKET)).is_err(), "another user may have made the socket");
        assert!(check_owner(&parent.path().join("missing").join(SOCKET)).is_ok());
        let link = parent.path().join("link");
        std::os::unix::fs::symlink(parent.path(), &link).unwrap();
        assert!(private(&link).is_err());
        assert!(check_owner(&link.join(SOCKET)).is_err());
    }
}
