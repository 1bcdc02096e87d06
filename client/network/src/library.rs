//! Where NIXL is found, and which versions of it were tried.

use std::ffi::{CStr, CString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys::{Functions, Handle, Status};

/// Versions of NIXL with which network sessions were tried.
pub const TRIED: &[&str] = &["1.5.1"];
/// The variable that names NIXL's library or its folder.
pub const VARIABLE: &str = "EXPERTD_NIXL";
/// Name of the C interface's library.
const FILE: &str = "libnixl_capi.so";
/// The folder of NIXL's package on PyPI that holds the library, within `site-packages`.
const PACKAGED: &str = ".nixl_cu13.mesonpy.libs";

/// The folder beside it with the libraries that it needs.
const PACKAGED_BESIDE: &str = "nixl_cu13.libs";

/// How to install the library.
const WAY_OUT: &str =
    "pip install nixl-cu13==1.5.1, and name its site-packages folder by --network-library or EXPERTD_NIXL";

/// Why network sessions cannot be used or have ended.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The library was not found.
    #[error("NIXL ({FILE}) was not found: {0}; {WAY_OUT}")]
    Missing(String),
    /// The process is a fork of one that uses the library.
    #[error(
        "NIXL does not survive a fork, and the parent of this process uses it; start the process anew (Python: multiprocessing's `spawn`)"
    )]
    Forked,
    /// The library is of a version that was not tried.
    #[error("{path} is NIXL {found}; network sessions were tried with {}; {WAY_OUT}", TRIED.join(", "))]
    Untried {
        /// The library.
        path: String,
        /// Its version.
        found: String,
    },
    /// A call of the library failed.
    #[error("NIXL: {call} failed with status {status}{}", explain(*status))]
    Call {
        /// Name of the function.
        call: &'static str,
        /// What it returned.
        status: Status,
    },
    /// The peer sent what the protocol does not allow.
    #[error("the peer sent {0}")]
    Protocol(String),
    /// The local session cannot be used.
    #[error(transparent)]
    Session(#[from] expertd_session::SessionError),
    /// A socket or descriptor of this process failed.
    #[error(transparent)]
    System(#[from] std::io::Error),
    /// Memory for rows could not be made.
    #[error("memory for rows cannot be made: {0}")]
    Memory(#[from] expertd_session::memory::MemoryError),
    /// A ring of the local session is broken.
    #[error("the session's memory is broken: {0}")]
    Ring(#[from] expertd_shm::ring::RingError),
}

fn explain(status: Status) -> &'static str {
    match status {
        -1 => " (invalid parameter)",
        // UCX takes routes that the kernel has learnt for such of its table.
        -2 => {
            " (backend: UCX found no transport or no route to the peer, or the peer is gone; after a detour `ip route flush cache` helps)"
        }
        -3 => " (invalid state)",
        -4 => " (exception)",
        -6 => " (not found)",
        _ => "",
    }
}

/// NIXL's C interface.
pub struct Library {
    pub(crate) functions: Functions,
    path: PathBuf,
    version: Option<String>,
    _library: libloading::Library,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("path", &self.path).field("version", &self.version).finish()
    }
}

/// The first process that loaded the library; 0 before.
static FIRST_PROCESS: AtomicU32 = AtomicU32::new(0);

impl Library {
    /// Opens the library. `place` is the library, its folder or a `site-packages` folder; `None` asks the variable `EXPERTD_NIXL`,
    /// and then the system's linker.
    ///
    /// # Errors
    /// [`NetworkError::Missing`], [`NetworkError::Untried`] or [`NetworkError::Forked`].
    pub fn open(place: Option<&Path>) -> Result<Arc<Self>, NetworkError> {
        let given = place.map(Path::to_owned).or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from));
        let path = match given.filter(|path| !path.as_os_str().is_empty()) {
            Some(place) => find(&place).ok_or_else(|| {
                NetworkError::Missing(format!("{} neither is nor holds it", place.display()))
            })?,
            None => PathBuf::from(FILE),
        };
        let version = version_beside(&path);
        if let Some(found) = version.as_ref().filter(|found| !TRIED.contains(&found.as_str())) {
            let path = path.display().to_string();
            return Err(NetworkError::Untried { path, found: found.clone() });
        }
        Self::load(path, version)
    }

    #[allow(unsafe_code, reason = "opens a shared library")]
    fn load(path: PathBuf, version: Option<String>) -> Result<Arc<Self>, NetworkError> {
        let missing = |error: libloading::Error| NetworkError::Missing(chain(&error));
        // The locks and threads of UCX are the parent's: a session of a fork would hang.
        let process = std::process::id();
        let first = FIRST_PROCESS.compare_exchange(0, process, Ordering::AcqRel, Ordering::Acquire);
        if first.is_err_and(|first| first != process) {
            return Err(NetworkError::Forked);
        }
        // SAFETY: the operator names the library, whose initialisers are those of NIXL and UCX.
        let library = unsafe { libloading::Library::new(&path) }.map_err(missing)?;
        // SAFETY: the declarations are those of the versions that were tried; a library without a version beside it has at least all
        // the functions.
        let functions = unsafe { Functions::resolve(&library) }.map_err(missing)?;
        Ok(Arc::new(Library { functions, path, version, _library: library }))
    }

    /// Folders that the library and those that belong to it lie in. None if the system's linker looks for it.
    #[must_use]
    pub fn folders(place: Option<&Path>) -> Vec<PathBuf> {
        let library = place.and_then(find).and_then(|path| path.canonicalize().ok());
        let Some(folder) = library.as_deref().and_then(Path::parent) else { return Vec::new() };
        let beside = folder.parent().map(|packages| packages.join(PACKAGED_BESIDE));
        std::iter::once(folder.to_owned()).chain(beside).collect()
    }

    /// Where the library was found and its version, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let version = self.version.as_deref().unwrap_or("of a version that its folder does not tell");
        format!("NIXL {version} ({})", self.path.display())
    }
}

/// The library that `place` is or holds.
fn find(place: &Path) -> Option<PathBuf> {
    let candidates = [place.to_owned(), place.join(FILE), place.join(PACKAGED).join(FILE)];
    candidates.into_iter().find(|path| path.is_file())
}

/// The version in the name of the package's folder `nixl_cu13-VERSION.dist-info`, which lies beside the library's folder.
fn version_beside(library: &Path) -> Option<String> {
    let packages = std::fs::read_dir(library.parent()?.parent()?).ok()?;
    let names = packages.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names
        .filter_map(|name| Some(name.strip_prefix("nixl_cu13-")?.strip_suffix(".dist-info")?.to_owned()))
        .max()
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let _ = fmt::Write::write_fmt(&mut text, format_args!(": {cause}"));
        source = cause.source();
    }
    text
}

/// Turns a status into an error.
pub(crate) fn check(call: &'static str, status: Status) -> Result<Status, NetworkError> {
    if status < 0 { Err(NetworkError::Call { call, status }) } else { Ok(status) }
}

/// A handle that the library made, and the function that destroys it.
#[derive(Debug)]
pub(crate) struct Owned {
    pub(crate) handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> Status,
}

impl Owned {
    /// Makes a handle.
    ///
    /// # Safety
    /// `make` stores a handle that `destroy` may be called for once, and that stays valid until then.
    #[allow(unsafe_code, reason = "the caller vouches for the functions")]
    pub(crate) unsafe fn make(
        call: &'static str,
        destroy: unsafe extern "C" fn(Handle) -> Status,
        make: impl FnOnce(*mut Handle) -> Status,
    ) -> Result<Self, NetworkError> {
        let mut handle: Handle = std::ptr::null_mut();
        check(call, make(&raw mut handle))?;
        Ok(Owned { handle, destroy })
    }
}

impl Drop for Owned {
    #[allow(unsafe_code, reason = "gives the handle back to the library")]
    fn drop(&mut self) {
        // SAFETY: made by the library, destroyed once, as `make` was promised.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// Text for the library.
pub(crate) fn text(value: &str) -> Result<CString, NetworkError> {
    CString::new(value).map_err(|_| NetworkError::Protocol("a name with a zero byte".to_owned()))
}

/// A C string that the library allocated, which is freed.
///
/// # Safety
/// `pointer` is a string of `malloc`, or null.
#[allow(unsafe_code, reason = "takes memory of the library")]
pub(crate) unsafe fn take_text(pointer: *mut std::ffi::c_char) -> CString {
    if pointer.is_null() {
        return CString::default();
    }
    // SAFETY: a string that ends with zero, as the caller promises, freed once.
    unsafe {
        let copy = CStr::from_ptr(pointer).to_owned();
        libc::free(pointer.cast());
        copy
    }
}
