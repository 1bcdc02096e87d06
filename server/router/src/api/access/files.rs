//! Values that are read from files and reloaded when the files change.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use metrics::counter;

use super::AccessError;
use crate::telemetry::names;

/// Identity of a file's content: device, inode, size and time of its last change.
type Stamp = (u64, u64, u64, i64, i64);

fn stamp(path: &Path) -> Option<Stamp> {
    let found = std::fs::metadata(path).ok()?;
    Some((found.dev(), found.ino(), found.size(), found.mtime(), found.mtime_nsec()))
}

/// A value and the files that it is read from.
pub(super) struct Watched<T> {
    files: Vec<PathBuf>,
    load: Box<dyn Fn() -> Result<T, AccessError> + Send + Sync>,
    now: RwLock<Arc<T>>,
    seen: Mutex<Seen>,
}

struct Seen {
    /// Stamps of the files when the value was read.
    used: Vec<Option<Stamp>>,
    /// Stamps of files that could not be used, so that they are reported once.
    refused: Option<Vec<Option<Stamp>>>,
}

impl<T> Watched<T> {
    pub(super) fn load(
        files: Vec<PathBuf>,
        load: impl Fn() -> Result<T, AccessError> + Send + Sync + 'static,
    ) -> Result<Watched<T>, AccessError> {
        let used = files.iter().map(|path| stamp(path)).collect();
        let now = RwLock::new(Arc::new(load()?));
        Ok(Watched { files, load: Box::new(load), now, seen: Mutex::new(Seen { used, refused: None }) })
    }

    /// The current value.
    pub(super) fn now(&self) -> Arc<T> {
        Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reloads the value if a file has changed. Files that cannot be used are tried again in the next round, since a
    /// certificate and its key may be replaced one after the other.
    pub(super) fn refresh(&self) {
        let found: Vec<_> = self.files.iter().map(|path| stamp(path)).collect();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if found == seen.used {
            return;
        }
        match (self.load)() {
            Ok(value) => {
                *self.now.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
                *seen = Seen { used: found, refused: None };
                counter!(names::CREDENTIAL_RELOADS_TOTAL, "result" => "ok").increment(1);
                tracing::info!(files = ?self.files, "reloaded credentials");
            }
            Err(error) if seen.refused.as_ref() != Some(&found) => {
                seen.refused = Some(found);
                counter!(names::CREDENTIAL_RELOADS_TOTAL, "result" => "error").increment(1);
                tracing::error!(%error, "the changed credentials cannot be used; the previous ones stay in force");
            }
            Err(_) => {}
        }
    }
}
