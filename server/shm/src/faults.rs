//! Faults that tests cause in running processes. Builds without debug assertions and without the feature `fault-injection`
//! contain none of them.

/// Environment variable with a folder of faults. A process that reaches a place where the fault `NAME` can happen removes the
/// file `NAME`, if it exists, and the fault happens there once.
#[cfg(any(debug_assertions, feature = "fault-injection"))]
const FOLDER: &str = "EXPERTD_INJECT_FAULTS";

/// Whether the fault `name` is to happen here and now.
#[cfg(any(debug_assertions, feature = "fault-injection"))]
#[must_use]
pub fn happens(name: &str) -> bool {
    use std::path::PathBuf;
    use std::sync::OnceLock;
    static FAULTS: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = FAULTS.get_or_init(|| std::env::var_os(FOLDER).map(PathBuf::from));
    folder.as_ref().is_some_and(|folder| std::fs::remove_file(folder.join(name)).is_ok())
}

/// The value of the environment variable `name`, with which tests change what the process does.
#[cfg(any(debug_assertions, feature = "fault-injection"))]
#[must_use]
pub fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The value of a variable for tests; `None`, in this build.
#[cfg(not(any(debug_assertions, feature = "fault-injection")))]
#[must_use]
pub const fn setting(_name: &str) -> Option<String> {
    None
}

/// Whether the fault is to happen; never, in this build.
#[cfg(not(any(debug_assertions, feature = "fault-injection")))]
#[must_use]
pub const fn happens(_name: &str) -> bool {
    false
}
