//! Tells the crate its version with the commit and the devices of the build.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=EXPERTD_COMMIT");
    let commit = commit();
    let devices = if std::env::var_os("CARGO_FEATURE_CUDA").is_some() { "cuda" } else { "cpu" };
    println!(
        "cargo:rustc-env=EXPERTD_BUILD={} ({}, {devices})",
        std::env::var("CARGO_PKG_VERSION").unwrap_or_default(),
        commit.as_deref().unwrap_or("commit unknown"),
    );
    println!("cargo:rustc-env=EXPERTD_BUILD_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}

/// The commit that EXPERTD_COMMIT gives, as builds of images do. Release builds in a checkout ask git; other builds do not, so that they
/// need not be repeated after each commit.
fn commit() -> Option<String> {
    if let Some(given) =
        std::env::var("EXPERTD_COMMIT").ok().filter(|given| !given.is_empty() && given != "unknown")
    {
        return Some(given);
    }
    if std::env::var("PROFILE").as_deref() != Ok("release") {
        return None;
    }
    let git = |arguments: &[&str]| {
        let output =
            Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    // A commit or a checkout writes a line there.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    println!("cargo:rerun-if-changed={log}");
    git(&["rev-parse", "--short", "HEAD"])
}
