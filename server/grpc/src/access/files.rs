//! Values that are read from files and reloaded when the files change.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use metrics::counter;
use rustix::fs::OFlags;

use super::AccessError;
use expertd_telemetry::names;

/// Largest size of a file with credentials.
const MAX_BYTES: u64 = 1 << 20;

/// Identity of a file's content: device, inode, size and time of its last change. Tools that copy files may set the time of the
/// last modification, but not this one.
type Stamp = (u64, u64, u64, i64, i64);

fn stamp(path: &Path) -> Option<Stamp> {
    let found = std::fs::metadata(path).ok()?;
    Some((found.dev(), found.ino(), found.size(), found.ctime(), found.ctime_nsec()))
}

/// The content of a regular file of at most [`MAX_BYTES`]. Neither a named pipe without a writer nor a device without an end holds
/// up the next reload.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, AccessError> {
    read_regular(path).map_err(|source| AccessError::Read { path: path.to_owned(), source })
}

fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let unusable = |found: &str| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("expected a regular file of at most {MAX_BYTES} bytes, found {found}"),
        )
    };
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(unusable("a directory, pipe or device"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(unusable("a larger one"));
    }
    Ok(bytes)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_regular_files_of_a_bounded_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, "tokens").unwrap();
        assert_eq!(read(&path).unwrap(), b"tokens");
        std::fs::write(&path, vec![b'#'; MAX_BYTES as usize]).unwrap();
        assert_eq!(read(&path).unwrap().len() as u64, MAX_BYTES);
        std::fs::write(&path, vec![b'#'; MAX_BYTES as usize + 1]).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("found a larger one"));
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for endless in [&pipe, Path::new("/dev/zero"), folder.path()] {
            assert!(read(endless).unwrap_err().to_string().contains("found a directory, pipe or device"));
        }
    }

    #[test]
    fn a_change_that_keeps_size_and_modification_time_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, "before").unwrap();
        let of_path = path.clone();
        let watched = Watched::load(vec![path.clone()], move || read(&of_path)).unwrap();
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        // Times of changes have the granularity of the kernel's clock ticks.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        std::io::Write::write_all(&mut &file, b"after!").unwrap();
        file.set_modified(modified).unwrap();
        watched.refresh();
        assert_eq!(*watched.now(), b"after!");
    }

    #[test]
    fn a_pipe_in_the_place_of_a_file_leaves_the_earlier_value_and_the_next_file_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, "first").unwrap();
        let of_path = path.clone();
        let watched = Watched::load(vec![path.clone()], move || read(&of_path)).unwrap();
        std::fs::remove_file(&path).unwrap();
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        watched.refresh();
        assert_eq!(*watched.now(), b"first");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "second").unwrap();
        watched.refresh();
        assert_eq!(*watched.now(), b"second");
    }
}
