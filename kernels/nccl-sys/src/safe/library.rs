//! Loading of the NCCL library.

use std::env;
use std::ffi::{CStr, OsString, c_int};
use std::path::Path;
use std::sync::Arc;

use crate::result::{Error, Version};
use crate::sys::{self, Code, Comm, Functions};

/// Environment variable with the path of the library.
pub const LIBRARY_VARIABLE: &str = "EXPERTD_NCCL";
const DEFAULT_LIBRARY: &str = "libnccl.so.2";

/// A loaded NCCL library, at least of version [`Version::OLDEST`].
pub struct Library {
    pub(super) functions: Functions,
    version: Version,
    origin: String,
    // The last field, because the functions above are code of this library.
    _library: libloading::Library,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("origin", &self.origin).field("version", &self.version).finish()
    }
}

impl Library {
    /// Loads `path` if it is given, otherwise the library that `EXPERTD_NCCL` names, otherwise `libnccl.so.2` from the
    /// loader's search path. There is no fallback from a named library.
    ///
    /// # Errors
    /// If the library cannot be opened, lacks a function or is older than [`Version::OLDEST`].
    pub fn open(path: Option<&Path>) -> Result<Arc<Library>, Error> {
        let named = env::var_os(LIBRARY_VARIABLE).filter(|value| !value.is_empty());
        let (name, source): (OsString, &str) = match (path, named) {
            (Some(path), _) => (path.into(), "as configured"),
            (None, Some(named)) => (named, "from EXPERTD_NCCL"),
            (None, None) => (DEFAULT_LIBRARY.into(), "the loader's search path"),
        };
        let tried = format!("{} ({source})", name.to_string_lossy());
        // SAFETY: loading runs the library's initialisers; those of NCCL have no requirements.
        let library = unsafe { libloading::Library::new(&name) }
            .map_err(|e| Error::Open { tried: tried.clone(), why: e.to_string() })?;
        // The version is checked first, so that an old library is reported as old and not as incomplete.
        let version = {
            // SAFETY: the signature is that of nccl.h since its first version.
            let get = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> Code>(b"ncclGetVersion") }
                .map_err(|_| Error::Symbol { tried: tried.clone(), symbol: "ncclGetVersion" })?;
            let mut code: c_int = 0;
            // SAFETY: `code` is valid for writes.
            let status = unsafe { get(&raw mut code) };
            if status != sys::SUCCESS || code <= 0 {
                return Err(Error::Argument(format!(
                    "{tried}: ncclGetVersion returned status {status} and version {code}; expected 0 and a positive version"
                )));
            }
            Version::from_code(code.unsigned_abs())
        };
        if version < Version::OLDEST {
            return Err(Error::TooOld { tried, found: version });
        }
        // SAFETY: the library answered as NCCL does; the functions are stored in the same struct as the library.
        let functions = unsafe { Functions::resolve(&library) }
            .map_err(|symbol| Error::Symbol { tried: tried.clone(), symbol })?;
        Ok(Arc::new(Library { functions, version, origin: tried, _library: library }))
    }

    /// The library's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The path or name that was opened, and its source.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Whether the library has `ncclGetLsaDevicePointer`. Without it, window tables are read directly.
    #[must_use]
    pub fn has_lsa_pointer(&self) -> bool {
        self.functions.lsa_pointer.is_some()
    }

    pub(super) fn check(&self, call: &'static str, code: Code, comm: Comm) -> Result<(), Error> {
        if code == sys::SUCCESS {
            return Ok(());
        }
        // SAFETY: both return static or communicator-owned strings; a null communicator is allowed.
        let (text, last) = unsafe {
            (string((self.functions.error_string)(code)), string((self.functions.last_error)(comm)))
        };
        Err(Error::Call { call, code, text, last })
    }
}

/// # Safety
/// `text` is null or a C string.
unsafe fn string(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
