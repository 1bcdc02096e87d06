//! The build that runs, as metrics and `GetStatus` name it.

use std::sync::OnceLock;

/// The text and the commit of [`set_build`].
static BUILD: OnceLock<(&'static str, &'static str)> = OnceLock::new();

/// Names the build of this process: a version, and in brackets its commit and devices, as in `0.1.0 (968b295, cuda)`; and the commit
/// alone, `unknown` if it is. Later calls change nothing.
pub fn set_build(text: &'static str, commit: &'static str) {
    let _ = BUILD.set((text, commit));
}

/// The text of [`set_build`], or the version alone.
pub fn build() -> &'static str {
    BUILD.get().map_or(env!("CARGO_PKG_VERSION"), |(text, _)| text)
}

/// The commit of [`set_build`], or `unknown`.
pub(crate) fn commit() -> &'static str {
    BUILD.get().map_or("unknown", |(_, commit)| commit)
}
