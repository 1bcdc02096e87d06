//! The build that runs, as metrics and `GetStatus` name it.

use std::sync::OnceLock;

static BUILD: OnceLock<&'static str> = OnceLock::new();

/// Names the build of this process: a version, and in brackets its commit and devices, as in `0.1.0 (968b295, cuda)`. Later calls
/// change nothing.
pub fn set_build(text: &'static str) {
    let _ = BUILD.set(text);
}

/// The text of [`set_build`], or the version alone.
pub fn build() -> &'static str {
    BUILD.get().copied().unwrap_or(env!("CARGO_PKG_VERSION"))
}

/// The commit in a text of [`set_build`].
pub(crate) fn commit(build: &str) -> &str {
    let commit = build.split_once(" (").and_then(|(_, rest)| rest.split_once(", "));
    commit.map_or("unknown", |(commit, _)| commit.trim_start_matches("commit "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_is_read_from_the_text() {
        assert_eq!(commit("0.1.0 (968b295, cuda)"), "968b295");
        assert_eq!(commit("0.1.0 (commit unknown, cpu)"), "unknown");
        assert_eq!(commit("0.1.0"), "unknown");
    }
}
